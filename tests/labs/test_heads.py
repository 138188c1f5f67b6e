"""One head against many: what is equal by construction, and heads whose work is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_runs import measure_lab

from regard.labs import heads
from regard.labs.heads import (
    FULL,
    LAB,
    TINY,
    Lookup,
    Setting,
    accuracy_by_relation,
    accuracy_interval,
    draw_batch,
    find,
    look_up,
    mixed_accuracy,
    spared,
    steps_to_half,
    switch_off,
    worst_and_rest,
)
from regard.labs.interval import share_interval
from regard.labs.small_training import generator_of

SMALL = replace(TINY, dim=12, length=3, symbols=3, relations=2)


def made_by_hand() -> Lookup:
    """Two heads: each has the pointers of one relation as queries, and brings its symbols.

    The twelve numbers of a position: its own name, its symbol, and two pointers, one-hot each.
    """
    model = Lookup(SMALL, 2)
    eye, attention = torch.eye(12), model.attention
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.positions.copy_(eye[0:3])
        model.symbols.copy_(eye[3:6])
        model.pointers.copy_(eye[6:12])
        for head in (0, 1):
            rows = slice(6 * head, 6 * head + 3)
            attention.q_proj.weight[rows] = 100 * eye[6 + 3 * head : 9 + 3 * head]
            attention.k_proj.weight[rows] = eye[0:3]
            attention.v_proj.weight[rows] = eye[3:6]
            attention.out_proj.weight[3 * head : 3 * head + 3] = eye[rows]
        model.read.weight.copy_(eye[:6])
    return model


def test_heads_share_the_parameters_of_their_layer() -> None:
    counts = {n: sum(p.numel() for p in Lookup(FULL, n).attention.parameters()) for n in FULL.heads}
    assert set(counts.values()) == {4 * (FULL.dim**2 + FULL.dim)}, counts


def test_the_answer_is_the_symbol_that_is_pointed_to() -> None:
    symbols = torch.tensor([[7, 5, 3]])
    pointers = torch.tensor([[[2, 0], [1, 1], [0, 2]]])
    assert look_up(symbols, pointers).tolist() == [[[3, 7], [5, 5], [7, 3]]]


def test_a_head_for_each_relation_tells_every_symbol() -> None:
    batch = draw_batch(SMALL, 17, generator_of(0))
    assert accuracy_by_relation(made_by_hand(), batch) == [1.0, 1.0]


def test_a_head_that_is_off_takes_its_own_relation_with_it_and_no_other() -> None:
    batch = draw_batch(SMALL, 17, generator_of(0))
    without = accuracy_by_relation(made_by_hand(), batch, [1])
    assert without[0] == 1.0
    # Of equal logits the first symbol is taken.
    assert without[1] == (look_up(*batch)[..., 1] == 0).double().mean()


def test_who_knows_the_symbols_but_not_whose_guesses_the_most_frequent() -> None:
    # Two coins: alike in half the cases, when both guesses are right; else one of two is.
    assert mixed_accuracy(2, 2) == 0.75
    assert mixed_accuracy(1, 5) == 1.0


def test_heads_go_in_the_order_of_what_they_cost_alone() -> None:
    worth = {0: (0.3, 0.0), 1: (0.0, 0.1), 2: (0.2, 0.3)}
    asked = []

    def score(off: Sequence[int]) -> list[float]:
        asked.append(list(off))
        return [0.5 - sum(worth[h][0] for h in off), 0.4 - sum(worth[h][1] for h in off)]

    found = switch_off(3, score)
    assert asked == [[], [0], [1], [2], [], [1], [1, 0], [1, 0, 2]]
    assert found["accuracy"] == pytest.approx(0.45)
    assert found["left"] == pytest.approx([0.45, 0.4, 0.25, 0.0])
    assert found["lost"][2] == pytest.approx([0.2, 0.3])
    assert worst_and_rest(found) == pytest.approx(((0.3 + 0.1 + 0.3) / 3, (0 + 0 + 0.2) / 3))


def test_spared_heads_are_those_before_more_than_a_hundredth_is_lost() -> None:
    def count(*left: float) -> int:
        return spared({"accuracy": left[0], "left": left})

    assert count(0.9, 0.895, 0.891, 0.5, 0.1) == 2
    assert count(0.9, 0.5) == 0
    assert count(0.9, 0.9, 0.9) == 2


def test_a_loss_is_halved_where_ten_steps_average_below_half() -> None:
    assert steps_to_half([2.0] * 5 + [0.0] * 20) == 5 + 6  # 4 · 2 / 10 is 0.8, 5 · 2 / 10 is 1
    assert steps_to_half([2.0] * 30) is None


def made_up(accuracies: dict[int, float], half: int | None = 50) -> dict[str, Any]:
    """Results of two seeds, a little apart, with heads that cost 0.2 and 0 each."""
    models = [
        {
            "heads": n,
            "seed": seed,
            "parameters": 4_224,
            "half": half,
            "accuracy": accuracy + seed / 500,
            "lost": [[0.2, 0.0]] * n,
            "left": [accuracy + seed / 500] * n + [0.1],
        }
        for n, accuracy in accuracies.items()
        for seed in (0, 1)
    ]
    sizes = {"dim": 32, "relations": 2, "symbols": 8, "trials": 4096, "mixed": 0.5625}
    return sizes | {"models": models}


def test_the_sentences_turn_with_the_numbers() -> None:
    said = " ".join(find(made_up({1: 0.5, 2: 0.98, 8: 0.7})))
    assert "4,224 parameters with 1, 2 and 8 heads alike" in said
    assert "of 2 heads is 98.1% (95% interval 96.8% to 99.4%), more than that of 1 head." in said
    assert "of 8 heads, 4 wide, is 70.1% (95% interval 68.8% to 71.4%), less than that of 2" in said
    assert "costs the relation that suffers most 20.0 (95% interval 20.0 to 20.0) points" in said
    assert "Of 8 heads 7.0" in said
    assert "halved: 1 head 50 (95% interval 50 to 50), 2 heads 50" in said
    said = " ".join(find(made_up({1: 0.9, 2: 0.6, 8: 0.95}, half=None)))
    assert (
        "of 2 heads is 60.1% (95% interval 58.8% to 61.4%), less than that of 1 head, aga" in said
    )
    assert (
        "of 8 heads, 4 wide, is 95.1% (95% interval 93.8% to 96.4%), more than that of 2 heads"
        in said
    )
    assert "With some seed the loss was not halved: 1 head, 2 heads, 8 heads." in said


def test_differences_that_seeds_do_not_agree_on_are_not_called_any() -> None:
    results = made_up({1: 0.5, 2: 0.5, 8: 0.5})
    results["models"][2]["accuracy"] = 0.3
    said = " ".join(find(results))
    assert "of 2 heads is 40.1% (95% interval 0.0% to 100.0%), not clearly different from" in said


def test_seeds_that_are_all_right_still_have_the_interval_of_their_trials() -> None:
    results = made_up({1: 0.5, 2: 1.0})
    results["models"][3]["accuracy"] = 1.0
    found = accuracy_interval(results, 2)
    assert found["low"] == share_interval(8192, 8192)["low"] < found["high"] == 1


def test_parameters_that_differ_are_not_called_equal() -> None:
    results = made_up({1: 0.5, 2: 0.5, 8: 0.5})
    results["models"][0]["parameters"] = 4_000
    assert any(said.endswith("has from 4,000 to 4,224 parameters.") for said in find(results))


@pytest.mark.parametrize(("name", "setting"), [("TINY", TINY), ("FULL", FULL)])
def test_a_few_steps_of_either_size_give_all_that_is_told(
    name: str, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(setting, seeds=2, test=3, batch=2, train=replace(setting.train, steps=3))
    monkeypatch.setattr(heads, name, short)
    results = measure_lab(LAB, tmp_path, tiny=name == "TINY")
    assert len(results["models"]) == 2 * len(setting.heads)
    assert {len(model["left"]) - 1 for model in results["models"]} == set(setting.heads)
