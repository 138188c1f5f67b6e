"""A row comes out as it would alone; limits, padding, refusals."""

from typing import Any

import pytest
import torch
from scripted import make_model, play, play_scores
from tiny_writers import EOS, PAD, ask_ours, make_pair, make_rows

from regard.generation import Decoding, decode_loop, generate_ids, stream_ids
from regard.models import BadCheckpoint, Transformer, config_of, named_config

LENGTHS = (5, 13, 1, 9, 2)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.5},
    "sampled": {"temperature": 1.5, "top_p": 0.95, "repetition_penalty": 1.1},
    "beams": {"num_beams": 3, "length_penalty": 0.7},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", "mistral", "t5"])
def test_each_row_of_a_batch_is_its_lone_run(name: str, way: str) -> None:
    pair, options = make_pair(name), {"max_new_tokens": 23, **WAYS[way]}
    rows = make_rows(pair, LENGTHS)
    seeds = [31, 8, 8, 5, 3]
    alone = [
        ask_ours(pair, [row], seed=seed, **options)[0]
        for row, seed in zip(rows, seeds, strict=True)
    ]
    assert ask_ours(pair, rows, seed=seeds, **options) == alone
    assert ask_ours(pair, rows[::-1], seed=seeds[::-1], chunk=4, **options) == alone[::-1]
    if way == "sampled":
        again = [ask_ours(pair, [row], seed=9, **options)[0] for row in rows]
        assert again != alone


def test_rows_of_one_prompt_are_drawn_apart_and_again_the_same() -> None:
    pair = make_pair("gpt2")
    rows = make_rows(pair, (7,)) * 5
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 11, "ignore_eos": True}
    first = ask_ours(pair, rows, seed=4, **options)
    assert len({tuple(row) for row in first}) == 5
    assert ask_ours(pair, rows, seed=4, **options) == first
    assert ask_ours(pair, rows[:3], seed=5, **options) == first[1:4]
    torch.manual_seed(6)
    free = ask_ours(pair, rows, **options)
    assert ask_ours(pair, rows, **options) != free
    torch.manual_seed(6)
    assert ask_ours(pair, rows, **options) == free


def test_a_tensor_may_be_padded_on_any_side_and_with_any_token() -> None:
    pair = make_pair("llama")
    row = make_rows(pair, (7,))[0]
    expected = ask_ours(pair, [row], max_new_tokens=9, repetition_penalty=1.3)[0]
    ids = torch.tensor([[5, *row, 6], [*row, 3, 3], [3, 3, *row], [row[0], 4, *row[1:], 4]])
    real = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0]] * 4, dtype=torch.bool)
    real[1], real[2] = real[0].roll(-1), real[0].roll(1)
    real[3] = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    made = generate_ids(pair.ours, ids, real=real, max_new_tokens=9, repetition_penalty=1.3)
    assert made.rows() == [expected] * 4


def test_rows_that_have_ended_are_filled_with_padding() -> None:
    pair = make_pair("gpt2")
    rows = make_rows(pair, LENGTHS)
    made = generate_ids(pair.ours, rows, max_new_tokens=40)
    assert made.ids.shape == (5, max(made.lengths))
    assert len(set(made.lengths)) > 1
    for row, n, reason in zip(made.ids.tolist(), made.lengths, made.reasons, strict=True):
        assert set(row[n:]) <= {PAD}
        assert EOS not in row[: n - 1]
        assert reason == ("stop" if row[n - 1] == EOS else "length")


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_each_row_may_fill_the_models_length_and_no_more(way: str) -> None:
    # Learned positions: a step beyond the last would be an error of the table.
    source = {"model_type": "gpt2", "n_embd": 14, "n_layer": 1, "n_head": 1, "n_positions": 19}
    model = Transformer(config_of({**source, "vocab_size": 23})).eval()
    rows = [[3] * n for n in (18, 4, 11)]
    made = generate_ids(model, rows, **WAYS[way])
    assert made.lengths == (1, 15, 8)
    assert made.reasons == ("length",) * 3
    for row, whole in zip(rows, made.rows(), strict=True):
        assert generate_ids(model, [row], **WAYS[way]).rows() == [whole]
    with pytest.raises(ValueError, match="19 tokens, and this model reads 19 in all"):
        generate_ids(model, [[3] * 4, [3] * 19])


def test_a_compiled_batch_with_rows_of_different_limits_is_refused_before_it_starts() -> None:
    model = make_model(17, max_len=19)
    with pytest.raises(ValueError, match="some rows 1 new tokens and others 15"):
        generate_ids(model, [[3] * 18, [3] * 4], compiled=True)


def test_a_source_longer_than_the_model_reads_is_refused() -> None:
    pair = make_pair("bart")
    with pytest.raises(ValueError, match="source row 1 has 68 tokens, and this model reads 67"):
        generate_ids(pair.ours, source=[[3], [3] * 68])


def test_a_decoders_own_beginning_takes_the_place_of_its_start_token() -> None:
    pair = make_pair("t5")
    source = make_rows(pair, (9, 4))
    whole = generate_ids(pair.ours, source=source, max_new_tokens=11, ignore_eos=True).rows()
    begun = [[0, *row[:3]] for row in whole]
    rest = generate_ids(pair.ours, begun, source=source, max_new_tokens=8, ignore_eos=True)
    assert rest.rows() == [row[3:] for row in whole]


def test_a_forced_first_token_follows_the_start_token_alone() -> None:
    pair = make_pair("bart")
    source = make_rows(pair, (5, 5))
    made = generate_ids(pair.ours, source=source, max_new_tokens=4)
    assert [row[0] for row in made.rows()] == [0, 0]
    made = generate_ids(pair.ours, [[2], [2, 7]], source=source, max_new_tokens=4)
    assert made.rows()[0][0] == 0
    assert made.rows()[1][0] != 0


def test_an_empty_prompt_starts_from_bos_or_is_refused() -> None:
    with_bos = make_model(17, bos_token_id=4)
    assert generate_ids(with_bos, [[]], max_new_tokens=3).rows() == (
        generate_ids(with_bos, [[4]], max_new_tokens=3).rows()
    )
    with pytest.raises(ValueError, match="no bos token to start from"):
        generate_ids(make_model(17, bos_token_id=None), [[3], []])


def test_a_text_is_cached_and_uncached_the_same() -> None:
    pair = make_pair("mistral")
    text = make_rows(pair, (29,))[0]
    made = generate_ids(pair.ours, [text], max_new_tokens=20, ignore_eos=True).rows()[0]
    for n in range(20):
        logits = pair.ours(torch.tensor([text + made[:n]])).logits
        assert logits is not None
        assert int(logits[0, -1].argmax()) == made[n]


def test_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks = make_model(17), []
    read = Decoding.read

    def seen(self: Decoding, ids: Any, real: Any, chunk: int) -> torch.Tensor:
        chunks.append(chunk)
        return read(self, ids, real, chunk)

    monkeypatch.setattr(Decoding, "read", seen)
    generate_ids(model, [[3] * 9], max_new_tokens=1, chunk=4)
    generate_ids(model, [[3] * 9], max_new_tokens=1, chunk=5, num_beams=2)
    assert chunks == [4, 5]


def test_nothing_is_asked_of_a_device_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that runs ahead rows are looked at now and then, and come out the same."""
    pair = make_pair("gpt2")
    rows = make_rows(pair, LENGTHS)
    expected = ask_ours(pair, rows, max_new_tokens=40)
    looks = []
    look = decode_loop.DecodeLoop._look
    begin = decode_loop.DecodeLoop.__init__

    def ahead(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._looks = False

    monkeypatch.setattr(decode_loop.DecodeLoop, "__init__", ahead)
    monkeypatch.setattr(decode_loop.DecodeLoop, "_look", lambda self: looks.append(look(self)))
    assert ask_ours(pair, rows, max_new_tokens=40) == expected
    assert len(looks) == -(-max(map(len, expected)) // 16)


def test_rows_leave_when_half_of_the_batch_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair("gpt2")
    sizes = []
    step = Decoding.step

    def seen(self: Decoding, ids_b: torch.Tensor) -> torch.Tensor:
        sizes.append(len(ids_b))
        return step(self, ids_b)

    monkeypatch.setattr(Decoding, "step", seen)
    rows = make_rows(pair, LENGTHS)
    lengths = sorted(map(len, ask_ours(pair, rows, max_new_tokens=40)))
    assert sizes[0] == 5
    assert sizes[lengths[2]] <= 2
    assert len(sizes) == lengths[-1] - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", ["greedy", "sampled", "beams"])
def test_scores_that_are_no_numbers_are_an_error(
    monkeypatch: pytest.MonkeyPatch, way: str, bad: float
) -> None:
    scores = torch.randn(2, 5, 17)
    scores[1, 3, 11] = bad
    play_scores(monkeypatch, scores)
    with pytest.raises(ValueError, match="row 1 are NaN or infinite at new token 4"):
        generate_ids(make_model(17), [[3], [4]], max_new_tokens=5, **WAYS[way])
    scores[1, 3] = -float("inf")
    with pytest.raises(ValueError, match="NaN or infinite"):
        generate_ids(make_model(17), [[3], [4]], max_new_tokens=5, **WAYS[way])
    scores[1, 3, 5] = 1.0
    generate_ids(make_model(17), [[3], [4]], max_new_tokens=5)


def test_a_row_that_has_ended_may_have_any_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(3, 5, 17)
    scores[1, 0, 2], scores[1, 1:] = 99.0, float("nan")
    play_scores(monkeypatch, scores)
    made = generate_ids(make_model(17, eos_token_id=2), [[3]] * 3, max_new_tokens=5)
    assert made.lengths[1] == 1


def test_stop_tokens_are_the_models_and_those_given(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, [[5, 9, 7, 5, 8], [5, 5, 5, 9, 8]], 17)
    model = make_model(17, eos_token_id=[7, 13])

    def rows(**options: Any) -> list[list[int]]:
        return generate_ids(model, [[3], [3]], max_new_tokens=5, **options).rows()

    assert rows() == [[5, 9, 7], [5, 5, 5, 9, 8]]
    assert rows(stop_tokens=[9]) == [[5, 9], [5, 5, 5, 9]]
    assert rows(ignore_eos=True) == [[5, 9, 7, 5, 8], [5, 5, 5, 9, 8]]
    assert rows(ignore_eos=True, stop_tokens=[8, 9]) == [[5, 9], [5, 5, 5, 9]]
    assert rows(min_new_tokens=3)[0][:2] == [5, 9]
    assert rows(min_new_tokens=3)[0][2] != 7


@pytest.mark.parametrize(
    "words",
    [
        {"pad_token_id": 17},
        {"eos_token_id": 50256},
        {"eos_token_id": 50256, "bos_token_id": 50256, "pad_token_id": 50257},
    ],
)
def test_numbers_of_a_larger_vocabulary_are_no_tokens(words: dict[str, int]) -> None:
    torch.manual_seed(4)
    model = make_model(17, **words)
    rows = [[3, 4, 6], [7, 8, 9], [2, 2, 5], [11]] if "pad_token_id" in words else [[3], [7], [2]]
    free = generate_ids(model, rows, max_new_tokens=9).rows()
    assert all(len(row) == 9 for row in free)
    end = next(x for x in free[0] if sum(x in row for row in free) < len(rows))
    found = generate_ids(model, rows, max_new_tokens=9, stop_tokens=[50256, end])
    assert found.rows() == [row[: row.index(end) + 1] if end in row else row for row in free]
    assert int(found.ids.max()) < 17
    with pytest.raises(ValueError, match="no bos token"):
        generate_ids(model, [[]])


@pytest.mark.parametrize("name", ["decoder_start", "forced_bos", "forced_eos"])
def test_a_token_that_every_text_gets_must_be_one(name: str) -> None:
    source = {**named_config("bart-base").source, "d_model": 24, "vocab_size": 17}
    source |= {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    model = Transformer(config_of({**source, f"{name}_token_id": 17})).eval()
    with pytest.raises(BadCheckpoint, match=f"{name}_token_id is 17; expected a token id below 17"):
        generate_ids(model, source=[[3, 4]])


def test_a_penalty_does_not_count_padding() -> None:
    # The padding token is the likeliest: a penalty for it would change the text.
    pair = make_pair("llama")
    rows = make_rows(pair, (3, 17))
    options: dict[str, Any] = {"repetition_penalty": 50.0, "max_new_tokens": 6}
    for pad in range(3, 41, 3):
        tokens = pair.ours.config.tokens
        object.__setattr__(tokens, "pad", pad)
        try:
            batch = ask_ours(pair, rows, **options)
        finally:
            object.__setattr__(tokens, "pad", PAD)
        assert batch[0] == ask_ours(pair, rows[:1], **options)[0]


def test_results_are_plain_tensors_and_the_model_is_left_as_it_was() -> None:
    pair = make_pair("gpt2")
    before = {name: weight.clone() for name, weight in pair.ours.state_dict().items()}
    made = generate_ids(pair.ours, [[5, 6]], max_new_tokens=4)
    assert not made.ids.is_inference()
    made.ids.add_(1)
    assert not pair.ours.training
    assert torch.is_grad_enabled()
    for name, weight in pair.ours.state_dict().items():
        assert torch.equal(weight, before[name])


def test_what_cannot_be_written_is_refused_in_words() -> None:
    pair, two = make_pair("gpt2"), make_pair("t5")
    source = {"model_type": "bert", "vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1}
    bert = config_of({**source, "num_attention_heads": 1, "intermediate_size": 8})
    ids = torch.tensor([[3, 4]])
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "training mode", Transformer(pair.ours.config), {"ids": ids}),
        (ValueError, "has no decoder", Transformer(bert).eval(), {"ids": ids}),
        (TypeError, "expected a regard Transformer", pair.original, {"ids": ids}),
        (ValueError, "give the ids", pair.ours, {}),
        (ValueError, "source= is for", pair.ours, {"ids": ids, "source": ids}),
        (ValueError, "as source=", two.ours, {"ids": ids}),
        (ValueError, "source row 0 is empty", two.ours, {"source": [[]]}),
        (ValueError, "ids has 2 rows and source 1", two.ours, {"ids": [[1], [1]], "source": ids}),
        (ValueError, "37 in row 0", pair.ours, {"ids": [[3, 37]]}),
        (ValueError, "-1 in row 1", pair.ours, {"ids": [[3], [-1]]}),
        (ValueError, "no rows", pair.ours, {"ids": []}),
        (TypeError, "one row is", pair.ours, {"ids": [3, 4]}),
        (TypeError, "float32", pair.ours, {"ids": ids.float()}),
        (ValueError, "2 axes", pair.ours, {"ids": ids[0]}),
        (TypeError, "bool", pair.ours, {"ids": ids, "real": torch.ones(1, 2)}),
        (ValueError, "B, T", pair.ours, {"ids": ids, "real": torch.ones(1, 3) > 0}),
        (ValueError, "real is for a padded", pair.ours, {"ids": [[3]], "real": ids > 0}),
        (ValueError, "no tokenizer", pair.ours, {"ids": ids, "stop": "x"}),
    ]
    for kind, words, model, given in cases:
        with pytest.raises(kind, match=words):
            generate_ids(model, **given)


def test_ids_can_be_streamed_and_counted() -> None:
    pair = make_pair("gpt2")
    row = make_rows(pair, (7,))[0]
    expected = ask_ours(pair, [row], max_new_tokens=12)[0]
    tokens = stream_ids(pair.ours, row, max_new_tokens=12)
    assert tokens.reason is None
    got = []
    for token in tokens:
        got.append(token)
        assert tokens.ids == got
        assert tokens.n_new == len(got)
    assert got == expected
    assert tokens.n_prompt == 7
    assert tokens.prefill_seconds > 0
    assert tokens.decode_seconds > 0
    assert tokens.reason == ("stop" if got[-1] == EOS else "length")
    with pytest.raises(ValueError, match="num_beams=1"):
        stream_ids(pair.ours, row, num_beams=2)
    source = make_rows(make_pair("t5"), (5,))[0]
    assert (
        list(stream_ids(make_pair("t5").ours, source=source, max_new_tokens=5))
        == (ask_ours(make_pair("t5"), [source], max_new_tokens=5)[0])
    )
