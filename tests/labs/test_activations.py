"""ReLU, GELU and SwiGLU: equal parameters, and a text whose entropy is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab_runs import measure_lab
from torch import Tensor, nn

from regard.labs import activations
from regard.labs.activations import (
    FULL,
    KINDS,
    LAB,
    TINY,
    Setting,
    Source,
    bin_curve,
    find,
    loss_of,
    make_model,
    make_source,
    pick,
)
from regard.labs.interval import paired_difference, side_of
from regard.labs.small_training import generator_of


@pytest.mark.parametrize("setting", [TINY, FULL])
def test_all_kinds_have_the_same_number_of_parameters(setting: Setting) -> None:
    models = {kind: make_model(setting, kind) for kind in KINDS}
    counts = {k: sum(p.numel() for p in model.parameters()) for k, model in models.items()}
    assert len(set(counts.values())) == 1, counts


def test_a_gate_is_what_the_kinds_differ_by() -> None:
    blocks = {kind: make_model(TINY, kind).config.main for kind in KINDS}
    plain, gated = blocks["ReLU"], blocks["SwiGLU"]
    assert 3 * gated.ffn_dim == 2 * plain.ffn_dim == 8 * TINY.dim
    same = {"activation": "relu", "gated": False, "ffn_dim": plain.ffn_dim}
    assert all(replace(block, **same) == plain for block in blocks.values())


def test_the_entropy_of_a_source_worked_by_hand() -> None:
    # The letter before last comes back with chance 3/4, whatever the last is: two chains in turn,
    # each with the entropy of a coin that falls on one side in 3 of 4.
    coin = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    chances = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    source = Source(chances[:, None, :].expand(2, 2, 2))
    assert source.entropy == pytest.approx(coin)
    assert source.pairs.flatten().tolist() == pytest.approx([0.25] * 4)


def test_pairs_are_as_frequent_after_a_letter_as_before_it() -> None:
    source = make_source(7)
    assert float(source.pairs.sum()) == pytest.approx(1)
    torch.testing.assert_close(source.pairs.sum(0), source.pairs.sum(1))
    later = torch.einsum("ab,abc->bc", source.pairs, source.chances)
    torch.testing.assert_close(later, source.pairs)


def test_texts_lose_the_entropy_by_their_own_table() -> None:
    source = make_source(7)
    _, losses = source.write(5000, 20, generator_of(0))
    texts = losses.double().mean(1)
    error = float(texts.std()) / 5000**0.5
    assert abs(float(texts.mean()) - source.entropy) < 5 * error


def test_a_model_that_is_the_table_loses_nothing_above_it() -> None:
    source = make_source(5)
    texts, losses = source.write(11, 13, generator_of(3))

    class Table(nn.Module):
        def forward(self, ids: Tensor) -> SimpleNamespace:
            before = ids.roll(1, 1)  # the first, which has none, is not counted
            return SimpleNamespace(logits=source.chances[before, ids].log().float())

    torch.testing.assert_close(loss_of(Table(), texts), losses.mean())


def test_lots_fall_on_numbers_by_their_chances() -> None:
    sums = torch.tensor([0.5, 0.5, 0.75, 1.0])
    assert pick(sums, torch.tensor([0.1, 0.49, 0.51, 0.99])).tolist() == [0, 0, 2, 3]
    short = torch.tensor([0.5, 0.9999])  # rounding may leave a sum below 1
    assert pick(short, torch.tensor([0.99999])).tolist() == [1]


def test_a_curve_has_every_step_once() -> None:
    found = bin_curve([float(n) for n in range(1, 8)], ratio=2)
    assert found == [
        {"step": 1.0, "loss": 1.0},
        {"step": 2.0, "loss": 2.0},
        {"step": 3.5, "loss": 3.5},
        {"step": 6.0, "loss": 6.0},
    ]


def test_differences_are_between_models_of_one_seed() -> None:
    found = paired_difference([1.0, 5.0, 9.0], [2.0, 6.0, 10.0])
    assert found == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 3}
    sides = [side_of({"mean": 0, "low": low, "high": high}, 1) for low, high in ((2, 3), (0, 2))]
    assert sides == [1, 0] and side_of({"mean": 0, "low": -2, "high": -1}) == -1
    with pytest.raises(ValueError, match="longer than"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])


def made_up(losses: dict[str, float], milliseconds: dict[str, float]) -> dict[str, Any]:
    """Results of three seeds; all kinds lose as much more with each further seed."""
    models = [
        {
            "kind": kind,
            "seed": seed,
            "parameters": 1234,
            "loss": loss + seed / 10,
            "curve": [{"step": 1.0, "loss": 1.0}],
            "milliseconds": milliseconds[kind] * (1 + seed),
        }
        for kind, loss in losses.items()
        for seed in {"ReLU": (2, 0, 1)}.get(kind, (0, 1, 2))
    ]
    return {"entropy": 1.5, "dim": 48, "steps": 100, "seeds": 3, "models": models}


def test_the_sentences_turn_with_the_numbers() -> None:
    times = {"ReLU": 2.0, "GELU": 2.0, "SwiGLU": 3.0}
    said = " ".join(find(made_up({"ReLU": 0.5, "GELU": 0.4, "SwiGLU": 0.2}, times)))
    assert "All models have 1,234 parameters, with hidden width 192, gated 128." in said
    assert "GELU loses 0.1 (95% interval 0.1 to 0.1) less than ReLU." in said
    assert "SwiGLU loses 0.3 (95% interval 0.3 to 0.3) less than ReLU." in said
    assert "takes 1.5 (95% interval 1.5 to 1.5) of one of ReLU, longer." in said
    times = {"ReLU": 2.0, "GELU": 2.0, "SwiGLU": 1.0}
    results = made_up({"ReLU": 0.2, "GELU": 0.4, "SwiGLU": 0.4}, times)
    results["models"][-1]["loss"] += 0.1
    said = " ".join(find(results))
    assert "GELU loses 0.2 (95% interval 0.2 to 0.2) more than ReLU, against the pred" in said
    assert "Between SwiGLU and GELU there is no clear difference: +0.0333 (95%" in said
    assert "of one of ReLU, shorter." in said


def test_parameters_that_differ_are_not_called_equal() -> None:
    even = dict.fromkeys(KINDS, 1.0)
    results = made_up(even, even)
    results["models"][0]["parameters"] = 1000
    assert find(results)[1].startswith("The models have from 1,000 to 1,234 parameters")


@pytest.mark.parametrize(("name", "setting"), [("TINY", TINY), ("FULL", FULL)])
def test_a_few_steps_of_either_size_give_all_that_is_told(
    name: str, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(setting.train, steps=12, warmup=1)
    short = replace(setting, seeds=2, batch=2, length=4, test=3, train=config)
    monkeypatch.setattr(activations, name, short)
    results = measure_lab(LAB, tmp_path, tiny=name == "TINY")
    assert len(results["models"]) == 6
    assert all(row["milliseconds"] > 0 for row in results["models"])
