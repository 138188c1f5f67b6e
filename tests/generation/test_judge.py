"""Token for token what `transformers` writes, on tiny random originals."""

from typing import Any

import pytest
from tiny_writers import EOS, ask_original, ask_ours, make_pair, make_rows

from regard.generation import generate_ids

LENGTHS = (5, 13, 1, 9)
CAUSAL = ("gpt2", "llama", "mistral")
SEARCHES: dict[str, dict[str, Any]] = {
    "two, short": {"num_beams": 2, "length_penalty": 0.5},
    "three, early": {"num_beams": 3, "early_stopping": True},
    "four, never": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    "five, long": {"num_beams": 5, "length_penalty": 2.0},
    "five, short, never": {"num_beams": 5, "length_penalty": -0.5, "early_stopping": "never"},
    "three, penalty": {"num_beams": 3, "repetition_penalty": 1.4, "min_new_tokens": 4},
}


@pytest.mark.parametrize("name", [*CAUSAL, "bart", "marian", "t5"])
def test_greedy_is_that_of_transformers_in_a_batch_and_alone(name: str) -> None:
    pair = make_pair(name)
    rows = make_rows(pair, LENGTHS)
    theirs = ask_original(pair, rows, max_new_tokens=64)
    assert ask_ours(pair, rows, max_new_tokens=64) == theirs
    assert [ask_ours(pair, [row], max_new_tokens=64)[0] for row in rows] == theirs
    assert ask_ours(pair, rows, max_new_tokens=64, chunk=3) == theirs
    assert len({len(row) for row in theirs}) > 1


@pytest.mark.parametrize("name", CAUSAL)
def test_64_tokens_without_an_end_are_those_of_transformers(name: str) -> None:
    pair = make_pair(name)
    rows = make_rows(pair, LENGTHS)
    theirs = pair_without_end(pair, rows)
    assert {len(row) for row in theirs} == {64}
    assert ask_ours(pair, rows, max_new_tokens=64, ignore_eos=True) == theirs
    assert ask_ours(pair, rows, max_new_tokens=64, ignore_eos=True, chunk=5) == theirs


def pair_without_end(pair: Any, rows: list[list[int]]) -> list[list[int]]:
    import torch

    return [
        pair.original.generate(
            torch.tensor([row]), max_new_tokens=64, do_sample=False, eos_token_id=None
        )[0, len(row) :].tolist()
        for row in rows
    ]


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_a_penalty_for_repeating_is_that_of_transformers(name: str) -> None:
    pair = make_pair(name)
    rows = make_rows(pair, LENGTHS)
    # In a batch theirs counts the padding as seen; alone there is none.
    options: dict[str, Any] = {"max_new_tokens": 31, "repetition_penalty": 1.7}
    theirs = [ask_original(pair, [row], **options)[0] for row in rows]
    assert ask_ours(pair, rows, **options) == theirs
    assert theirs != [ask_original(pair, [row], max_new_tokens=31)[0] for row in rows]


@pytest.mark.parametrize("name", ["gpt2", "mistral", "bart", "marian", "t5"])
def test_beams_are_those_of_transformers(name: str) -> None:
    pair = make_pair(name)
    rows = make_rows(pair, (7, 12, 2))
    lengths = set()
    for search, options in SEARCHES.items():
        if search == "three, penalty":
            # In a batch theirs counts the padding as seen.
            rows = [row[:7] for row in rows[:2]]
        theirs = ask_original(pair, rows, max_new_tokens=13, **options)
        assert ask_ours(pair, rows, max_new_tokens=13, **options) == theirs, search
        lengths |= {len(row) for row in theirs}
    assert len(lengths) > 2  # the end token is reached, at different times


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_several_beams_of_a_row_and_their_scores_are_those_of_transformers(name: str) -> None:
    import torch

    pair = make_pair(name)
    rows = make_rows(pair, (11, 11))
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 1.5}
    out = pair.original.generate(
        torch.tensor(rows),
        attention_mask=torch.ones(2, 11, dtype=torch.int64),
        do_sample=False,
        max_new_tokens=9,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    given = {"source": rows} if pair.two_sided else {"ids": rows}
    ours = generate_ids(pair.ours, **given, max_new_tokens=9, **options)
    start = 1 if pair.two_sided else 11
    theirs = out.sequences[:, start:].tolist()
    assert len(ours.rows()) == 6
    for mine, other in zip(ours.rows(), theirs, strict=True):
        assert mine == other[: len(mine)]
        assert set(other[len(mine) :]) <= {1}
    assert ours.scores == pytest.approx(out.sequences_scores.tolist(), abs=1e-5)
    ends = [row[-1] == EOS for row in ours.rows()]
    assert [reason == "stop" for reason in ours.reasons] == ends
