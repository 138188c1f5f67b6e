"""The text and its floor; what scalings leave as it is; sentences that follow the numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import Transformer
from regard.labs import positions
from regard.labs.parts import Run
from regard.labs.positions import KINDS, LAB, NOTHING, SCALINGS, TINY
from regard.labs.report import make_figure
from regard.labs.small_training import generator_of
from regard.training.init import start

CPU = torch.device("cpu")


def test_a_letter_is_the_one_two_before_it_nine_times_in_ten() -> None:
    texts = positions.draw_texts(400, 101, 8, generator_of(3))
    counted = (texts.answers != NOTHING) & (texts.ids != 16)
    assert (texts.answers[counted] < 8).all()
    rows, at = counted.nonzero(as_tuple=True)
    assert (at >= 1).all()
    assert torch.equal(texts.answers[rows, at], texts.ids[rows, at + 1]), "the next letter"
    before = texts.ids[rows, at - 1]
    assert (before < 8).all(), "what may be repeated can be seen"
    same = float((texts.answers[rows, at] == before).double().mean())
    share = 0.9 + 0.1 / 8
    assert abs(same - share) < 5 * math.sqrt(share * (1 - share) / len(rows))


def test_the_answer_at_an_asking_sign_is_the_texts_only_number() -> None:
    texts = positions.draw_texts(50, 37, 8, generator_of(4))
    is_number = (texts.ids >= 8) & (texts.ids < 16)
    assert (is_number.sum(1) == 1).all()
    assert torch.equal(is_number.nonzero()[:, 1], texts.places)
    assert (texts.ids[:, -1] == 16).all(), "a text ends with the question"
    numbers = texts.ids.gather(1, texts.places[:, None]).expand_as(texts.ids)
    later = torch.arange(37) > texts.places[:, None]
    asks = texts.ids == 16
    assert torch.equal(texts.answers[asks & later], numbers[asks & later])
    assert (texts.answers[asks & ~later] == NOTHING).all()


def test_the_floor_by_hand() -> None:
    # Two letters: the same one with 0.95, the other with 0.05.
    assert positions.floor_loss(2) == pytest.approx(0.19851524334587, rel=1e-9)
    drawn = positions.draw_texts(2000, 61, 2, generator_of(5))
    letters = (drawn.answers != NOTHING) & (drawn.ids != 4)
    rows, at = letters.nonzero(as_tuple=True)
    repeats = drawn.answers[rows, at] == drawn.ids[rows, at - 1]
    lost = torch.where(repeats, -math.log(0.95), -math.log(0.05))
    assert float(lost.mean()) == pytest.approx(positions.floor_loss(2), abs=0.02)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_at_the_trained_length_a_scaling_changes_nothing_and_beyond_it_does(scaling: str) -> None:
    model = Transformer(positions.make_config("rotary", TINY)).eval()
    start(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0)  # so that positions matter
        ids = positions.draw_texts(3, 24, 8, generator_of(6)).ids
        plain = model(ids).logits
        apart = []
        for times in (1, 10):
            given = positions.make_scaling(scaling, times, 24)
            scaled = positions.scaled_model(model, TINY, given)
            longer = ids if times == 1 else ids.repeat(1, 10)
            apart.append(float((scaled(longer).logits[:, :24] - plain).abs().max()))
    assert apart[0] < 1e-4 < 1e-2 < apart[1]


@pytest.mark.parametrize("kind", KINDS)
def test_only_without_positions_do_outputs_move_with_their_tokens(kind: str) -> None:
    missed = positions.measure_moved(kind, TINY)
    assert missed < 1e-12 if kind == "no positions" else missed > 1e-3


def test_a_causal_mask_knows_order_without_positions() -> None:
    assert positions.measure_moved("no positions", TINY, causal=True) > 1e-3


def test_learned_positions_have_no_number_past_their_table() -> None:
    model = Transformer(positions.make_config("learned", TINY)).eval()
    size = replace(TINY, texts=5)
    found = positions.examine_model(model, 0, size, None)
    assert found["retrieval"][1:] == [None, None] and found["retrieval"][0] is not None
    assert found["far"] is None and found["by distance"] is None
    assert len(found["by position"]) == 2
    assert "outside max_len 24" in found["refusal"]


def test_the_whole_run_gives_numbers_that_json_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = replace(positions.FULL, length=24, dim=16, batch=2, steps=1, seeds=2, texts=24)
    monkeypatch.setattr(positions, "FULL", replace(size, multiples=(1, 10)))
    results = LAB.measure(Run(tmp_path / "parts", {"tiny": False}, CPU, None))
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert set(results["tests"]) == {*KINDS, *(f"rotary, {name}" for name in SCALINGS)}
    assert all(len(tests) == 2 for tests in results["tests"].values())
    said = " ".join(LAB.find(results))
    assert "Learned has no position there" in said
    LAB.draw(results, make_figure())


def invent(far: dict[str, float], moved: float, known: float) -> dict[str, Any]:
    """Results of two seeds: losses of 1 at the trained length, and these far beyond it."""
    names = [*KINDS, *(f"rotary, {name}" for name in SCALINGS)]
    tests: dict[str, Any] = {}
    for name in names:
        tests[name] = [
            {
                "trained": 1.0 + shift,
                "far": None if name == "learned" else far.get(name, 1.0) + 1.1 * shift,
                "retrieval": [1.0, None if name == "learned" else far.get(name, 1.0) / 10 + shift],
            }
            for shift in (0.0, 0.01)
        ]
    return {
        "length": 24,
        "lengths": [24, 240],
        "seeds": 2,
        "floor": 0.5,
        "symbols": 8,
        "moved": dict.fromkeys(KINDS, 0.5) | {"no positions": moved},
        "probe": {"embeddings": [0.0, 0.01], "last vectors": [known, known + 0.01]},
        "refusal": "position 239 is outside",
        "tests": tests,
    }


def test_the_sentences_turn_with_the_numbers() -> None:
    broken = {"no positions": 2.0, "sinusoidal": 3.0, "rotary": 4.0, "rotary, linear": 9.0}
    said = " ".join(LAB.find(invent(broken, moved=1e-16, known=0.5)))
    assert "Blind to order, that is below 1e-6: no positions." in said
    assert "so the causal mask alone tells it something" in said
    assert "rotary rises by 3" in said
    assert "Clearly less than at the trained length: no positions, sinusoidal, rotary, AL" in said
    assert "costs less than 0.1 nats more, with: ALiBi, T5. There" in said
    assert "Learned has no position there (position 239 is outside)." in said
    assert "With linear scaling at 240 tokens the loss of rotary rises by 5" in said
    assert "With YaRN scaling at 240 tokens the loss of rotary falls by 3" in said

    said = " ".join(LAB.find(invent(broken | {"T5": 2.0}, moved=0.1, known=0.0)))
    assert "below 1e-6: not one of them, against the prediction." in said
    assert "that it knows where a token stands is not clear" in said
    assert "more, with: ALiBi, which is not as predicted. There" in said
    unclear = invent(broken, moved=1e-16, known=0.5)
    unclear["tests"]["T5"][0]["far"] += 1.0
    said = " ".join(LAB.find(unclear))
    assert "T5 does not clearly change" in said, "which is neither to go on nor to end"
    assert "more, with: ALiBi; not clear with: T5. There" in said
    also = dict(broken, rotary=1.0, sinusoidal=1.0)
    said = " ".join(LAB.find(invent(also, moved=1e-16, known=0.5)))
    assert "with: sinusoidal, rotary, ALiBi, T5, which is not as predicted. There" in said
    worse = invent(broken, moved=1e-16, known=-0.5)
    worse["probe"]["embeddings"] = [-2.0, -2.01]
    assert "that it knows where a token stands is not clear" in " ".join(LAB.find(worse))
    every = dict.fromkeys(KINDS, 10.0)
    said = " ".join(LAB.find(invent(every, moved=0.1, known=0.0)))
    assert "more, with: not one of them, which is not as predicted. There" in said
    assert "Clearly less than at the trained length: not one of them." in said
