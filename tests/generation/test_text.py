"""Text in, text out: stop strings, streams, whole characters, special tokens."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import make_model, play
from tokenmakers import TEXTS, byte_level, sentence_pieces

from regard.generation import Decoding, generate, generate_batch, generate_ids, stream, stream_ids
from regard.generation.stopping import TextWatch, find_tokens
from regard.models import BadCheckpoint, SpecialTokens, Transformer
from regard.tokens import Tokenizer

HALF = "\N{REPLACEMENT CHARACTER}"
Play = Callable[..., Transformer]


@pytest.fixture
def bytes_of() -> Tokenizer:
    names = {"eos_token": "<|end|>", "pad_token": "<pad>"}
    return Tokenizer.from_parts(byte_level(), names)


@pytest.fixture
def pieces_of() -> Tokenizer:
    return Tokenizer.from_parts(sentence_pieces(), {"bos_token": "<s>", "eos_token": "</s>"})


def model_that_says(
    patch: pytest.MonkeyPatch, tokenizer: Tokenizer, *rows: list[int]
) -> Transformer:
    play(patch, list(rows), tokenizer.vocab_size)
    return make_model(tokenizer.vocab_size, eos_token_id=tokenizer.special.eos, bos_token_id=1)


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of each byte by itself, so that every character and stop string spans tokens."""
    return [at for byte in text for at in tokenizer.encode(byte, special=False).ids]


@pytest.mark.parametrize(
    ("stop", "text", "n_tokens"),
    [
        ("e f", "abc d", 8),
        ("bc", "a", 3),
        ("a", "", 1),
        (["zz", "f", "de"], "abc ", 6),
        (["gh", "ghi", "fgh"], "abc de ", 10),
        ("gi", "abc de fghij", 12),
        ("hij", "abc de fg", 12),
        ("ijk", "abc de fghij", 12),
    ],
)
def test_a_text_ends_just_before_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer, stop: Any, text: str, n_tokens: int
) -> None:
    said = spell(bytes_of, "abc de fghij")
    assert len(said) == 12
    model = model_that_says(monkeypatch, bytes_of, said)
    options: dict[str, Any] = {"tokenizer": bytes_of, "stop": stop, "max_new_tokens": 12}
    assert generate(model, "x", **options) == text
    pieces = stream(model, "x", **options)
    assert "".join(pieces) == text
    assert pieces.ids == said[:n_tokens]
    assert pieces.reason == ("length" if text == "abc de fghij" else "stop")
    made = generate_ids(model, [[5]], **options)
    assert made.rows() == [said[:n_tokens]]
    assert made.reasons == (pieces.reason,)
    assert list(stream_ids(model, [5], **options)) == said[:n_tokens]


def test_a_stop_string_ends_its_own_row_alone(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer
) -> None:
    end = bytes_of.special.eos
    assert end is not None
    rows = [spell(bytes_of, "one. two"), spell(bytes_of, "twelve"), [*spell(bytes_of, "ab"), end]]
    model = model_that_says(monkeypatch, bytes_of, *rows)
    options: dict[str, Any] = {"tokenizer": bytes_of, "stop": ". ", "max_new_tokens": 6}
    assert generate_batch(model, ["x", "yyy", "z"], **options) == ["one", "twelve", "ab"]
    made = generate_ids(model, [[5]] * 3, **options)
    assert made.lengths == (5, 6, 3)
    assert made.reasons == ("stop", "length", "stop")


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_pieces_are_whole_characters_and_what_decode_gives(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer, pieces_of: Tokenizer, kind: str
) -> None:
    tokenizer = bytes_of if kind == "bytes" else pieces_of
    for text in TEXTS.values():
        said = spell(tokenizer, text)
        if not said or HALF in text:
            continue
        model = model_that_says(monkeypatch, tokenizer, said)
        options: dict[str, Any] = {"tokenizer": tokenizer, "max_new_tokens": len(said)}
        pieces = list(stream(model, "be", **options))
        after = tokenizer.decode(tokenizer.encode("be").ids + said).removeprefix("be")
        assert "".join(pieces) == after == generate(model, "be", **options)
        assert not any(HALF in piece for piece in pieces)
        cut = generate(model, "be", tokenizer=tokenizer, max_new_tokens=max(1, len(said) - 1))
        assert after.startswith(cut)
        assert HALF not in cut


def test_the_space_between_prompt_and_answer_is_kept(
    monkeypatch: pytest.MonkeyPatch, pieces_of: Tokenizer
) -> None:
    """Alone, this decoder would strip the space in front of its first piece."""
    space_a = pieces_of.id("▁a")
    model = model_that_says(monkeypatch, pieces_of, [space_a, space_a])
    assert generate(model, "be", tokenizer=pieces_of, max_new_tokens=2) == " a a"
    assert list(stream(model, "be", tokenizer=pieces_of, max_new_tokens=2)) == [" a", " a"]


def test_a_prompt_that_ends_in_bytes_does_not_come_out_again(
    monkeypatch: pytest.MonkeyPatch, pieces_of: Tokenizer
) -> None:
    said = [pieces_of.id("b"), pieces_of.id("▁a")]
    model = model_that_says(monkeypatch, pieces_of, said)
    # é has no piece, so it is two byte tokens, which the stream holds back.
    assert generate(model, "aé", tokenizer=pieces_of, max_new_tokens=2) == "b a"


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_watch_stops_with_the_first_token_that_completes_a_stop_string(
    bytes_of: Tokenizer, pieces_of: Tokenizer, kind: str
) -> None:
    tokenizer = bytes_of if kind == "bytes" else pieces_of
    draw = random.Random(11)
    n_stopped = 0
    for _ in range(150):
        text = draw.choice([text for text in TEXTS.values() if text and HALF not in text])
        ids = spell(tokenizer, text)
        whole = tokenizer.decode(ids)
        at = draw.randrange(len(whole))
        stops = [whole[at : at + draw.randint(1, 4)], "qqq", *whole[at : at + 2][1:]]
        stops = [stop for stop in stops if stop]
        watch = TextWatch(tokenizer, [], stops, ())
        shown, n = "", 0
        for n, token in enumerate(ids, 1):
            shown += watch.step(token)
            so_far = tokenizer.decode(ids[:n])
            assert watch.stopped == any(stop in so_far for stop in stops)
            if watch.stopped:
                cut = min(so_far.find(stop) for stop in stops if stop in so_far)
                assert shown == so_far[:cut]
                n_stopped += 1
                break
        assert watch.stopped
        assert watch.finish() == ""
    assert n_stopped == 150


def test_stop_tokens_have_no_text_even_if_the_tokenizer_knows_them_as_plain(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer
) -> None:
    comma = bytes_of.encode(",", special=False).ids[0]
    model = model_that_says(monkeypatch, bytes_of, [*spell(bytes_of, "ab"), comma])
    text = generate(model, "x", tokenizer=bytes_of, stop_tokens=[comma], max_new_tokens=5)
    assert text == "ab"


def test_a_special_token_by_name_is_a_stop_token(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer
) -> None:
    pad = bytes_of.special.pad
    assert pad is not None
    model = model_that_says(monkeypatch, bytes_of, [*spell(bytes_of, "ab"), pad, 9, 9])
    options: dict[str, Any] = {"tokenizer": bytes_of, "max_new_tokens": 5}
    assert generate(model, "x", stop="<pad>", **options) == "ab"
    assert generate(model, "x", **options) != "ab"


def test_ids_beyond_the_tokenizer_say_nothing(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer
) -> None:
    beyond = bytes_of.vocab_size + 3
    said = [*spell(bytes_of, "a"), beyond, *spell(bytes_of, "b")]
    play(monkeypatch, [said], beyond + 1)
    model = make_model(beyond + 1)
    assert generate(model, "x", tokenizer=bytes_of, max_new_tokens=3) == "ab"


def test_text_for_an_encoder_decoder_is_its_source(bytes_of: Tokenizer) -> None:
    from regard.models import config_of

    source = {"model_type": "t5", "vocab_size": bytes_of.vocab_size, "d_model": 14, "d_kv": 7}
    more = {"d_ff": 11, "num_layers": 1, "num_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    model = Transformer(config_of({**source, **more})).eval()
    asked = "The animal"
    options: dict[str, Any] = {"max_new_tokens": 7, "temperature": 2.0, "seed": 3}
    made = generate_ids(model, source=[bytes_of.encode(asked).ids], **options)
    text = generate(model, asked, tokenizer=bytes_of, **options)
    assert bytes_of.decode(made.rows()[0]).rstrip(HALF) == text
    pieces = stream(model, asked, tokenizer=bytes_of, **options)
    assert "".join(pieces) == text
    assert pieces.n_prompt == len(bytes_of.encode(asked).ids)


def test_beams_give_text_too(bytes_of: Tokenizer) -> None:
    model = make_model(bytes_of.vocab_size, eos_token_id=1)
    ids = bytes_of.encode("The").ids
    made = generate_ids(model, [ids], num_beams=3, max_new_tokens=6)
    text = generate(model, "The", tokenizer=bytes_of, num_beams=3, max_new_tokens=6)
    assert text == bytes_of.decode(ids + made.rows()[0]).removeprefix("The").rstrip(HALF)
    with pytest.raises(ValueError, match="generate_ids gives more"):
        generate_batch(model, ["The"], tokenizer=bytes_of, num_beams=3, num_return_sequences=2)


def test_a_closed_stream_is_over_and_was_not_written_further(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer
) -> None:
    model = make_model(bytes_of.vocab_size)
    steps = []
    step = Decoding.step
    monkeypatch.setattr(Decoding, "step", lambda *args: (steps.append(1), step(*args))[1])
    with stream(model, "The", tokenizer=bytes_of, max_new_tokens=50) as pieces:
        next(pieces)
        n_steps = len(steps)
    assert list(pieces) == []
    assert pieces.reason is None
    assert 0 < pieces.n_new < 50
    assert len(steps) == n_steps
    assert not torch.is_inference_mode_enabled()


def test_an_interrupted_stream_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer
) -> None:
    model = make_model(bytes_of.vocab_size)
    expected = generate(model, "The", tokenizer=bytes_of, max_new_tokens=9)
    step = Decoding.step

    def interrupted(self: Decoding, ids_b: torch.Tensor) -> torch.Tensor:
        if len(pieces.ids) == 3:
            raise KeyboardInterrupt
        return step(self, ids_b)

    monkeypatch.setattr(Decoding, "step", interrupted)
    pieces = stream(model, "The", tokenizer=bytes_of, max_new_tokens=9)
    with pytest.raises(KeyboardInterrupt):
        list(pieces)
    assert not torch.is_inference_mode_enabled()
    assert list(pieces) == []
    monkeypatch.undo()
    assert generate(model, "The", tokenizer=bytes_of, max_new_tokens=9) == expected


def test_a_batch_is_closed_however_it_ends(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Tokenizer
) -> None:
    model = make_model(bytes_of.vocab_size)
    closed = []
    monkeypatch.setattr(Decoding, "close", lambda self: closed.append(self))
    options: dict[str, Any] = {"tokenizer": bytes_of, "max_new_tokens": 5}
    generate(model, "The", **options)
    assert len(closed) == 1
    list(stream(model, "The", **options))
    assert len(closed) == 2
    pieces = stream(model, "The", **options)
    next(pieces)
    pieces.close()
    assert len(closed) == 3
    monkeypatch.setattr(Decoding, "step", lambda self, ids_b: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, "The", **options)
    with pytest.raises(ZeroDivisionError):
        list(stream(model, "The", **options))
    assert len(closed) == 5


def test_what_is_no_text_is_refused(bytes_of: Tokenizer) -> None:
    model = make_model(bytes_of.vocab_size)
    with pytest.raises(TypeError, match="generate_batch takes several"):
        generate(model, ["a"], tokenizer=bytes_of)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generate takes one"):
        generate_batch(model, "a", tokenizer=bytes_of)
    with pytest.raises(TypeError, match="one text"):
        stream(model, [3], tokenizer=bytes_of)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no tokenizer lies beside"):
        generate(model, "a")
    with pytest.raises(ValueError, match="training mode"):
        generate(model.train(), "a", tokenizer=bytes_of)


def write_beside(folder: Path, told: Any) -> Transformer:
    text = told if isinstance(told, str) else json.dumps(told)
    (folder / "generation_config.json").write_text(text)
    model = make_model(17, eos_token_id=2, bos_token_id=1, pad_token_id=0)
    model.origin = folder
    return model


def test_the_file_beside_the_weights_tells_the_tokens(tmp_path: Path) -> None:
    plain = SpecialTokens(pad=0, bos=1, eos=(2,))
    assert find_tokens(make_model(17, eos_token_id=2, bos_token_id=1, pad_token_id=0)) == plain
    assert find_tokens(write_beside(tmp_path, {})) == plain
    told = {
        "eos_token_id": [5, 6],
        "forced_bos_token_id": 7,
        "forced_eos_token_id": 5,
        "suppress_tokens": [8],
        "bad_words_ids": [[9], [3, 4]],
        "pad_token_id": None,
        "temperature": 0.6,
    }
    assert find_tokens(write_beside(tmp_path, told)) == SpecialTokens(
        pad=0, bos=1, eos=(5, 6), forced_bos=7, forced_eos=5, suppressed=(8, 9)
    )


@pytest.mark.parametrize(
    "told",
    [
        "{",
        "[]",
        '{"a": ' + "[" * 200 + "]" * 200 + "}",
        {"eos_token_id": "2"},
        {"eos_token_id": [2, 17]},
        {"forced_bos_token_id": True},
        {"bad_words_ids": [3]},
        {"bad_words_ids": [["3"]]},
    ],
)
def test_a_damaged_file_beside_the_weights_is_refused_by_name(tmp_path: Path, told: Any) -> None:
    with pytest.raises(BadCheckpoint, match="generation_config"):
        find_tokens(write_beside(tmp_path, told))


def test_a_link_beside_the_weights_to_a_file_that_is_lost_is_told(tmp_path: Path) -> None:
    model = write_beside(tmp_path, {})
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "blobs" / "lost")
    with pytest.raises(BadCheckpoint, match=r"generation_config.json' \(a link to .*\) is missing"):
        find_tokens(model)
