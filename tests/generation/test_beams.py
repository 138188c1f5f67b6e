"""Beam search worked by hand; what it gives otherwise is held to `transformers` in test_judge."""

import math
from typing import Any

import pytest
import torch
from scripted import make_model, play_scores

from regard.generation import generate_ids

A, END = 1, 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The end or A, with one half each; then the end with 0.9 and A with 0.1; then the end."""
    scores = torch.full((1, 3, 5), -99.0)
    scores[0, :2, A] = torch.tensor([0.5, 0.1]).log()
    scores[0, :, END] = torch.tensor([0.5, 0.9, 1.0]).log()
    play_scores(monkeypatch, scores)
    model = make_model(5, eos_token_id=END)
    return lambda **options: generate_ids(model, [[3]], max_new_tokens=3, **options)


def test_a_length_penalty_chooses_between_a_short_text_and_a_long_one(asked: Any) -> None:
    short, long = math.log(0.5), math.log(0.5 * 0.9)
    made = asked(num_beams=2, length_penalty=0.0)
    assert made.rows() == [[END]]
    assert made.scores == pytest.approx((short,))
    made = asked(num_beams=2, num_return_sequences=2)
    assert made.rows() == [[A, END], [END]]
    assert made.scores == pytest.approx((long / 2, short))
    assert made.reasons == ("stop", "stop")
    made = asked(num_beams=3, num_return_sequences=3, length_penalty=2.0)
    assert made.rows() == [[A, END], [A, A, END], [END]]
    assert made.scores == pytest.approx((long / 4, math.log(0.5 * 0.1) / 9, short))


def test_a_beam_that_is_cut_off_ends_with_length(asked: Any) -> None:
    made = asked(num_beams=2, length_penalty=0.0, ignore_eos=True)
    assert made.lengths == (3,)
    assert made.reasons == ("length",)


def test_early_stopping_takes_the_first_that_end(asked: Any) -> None:
    # With three beams the search would go on for [A, A, END]; two are there after two steps.
    made = asked(num_beams=2, num_return_sequences=2, early_stopping=True, length_penalty=5.0)
    assert made.rows() == [[A, END], [END]]
