"""Pre- against post-norm: the text's exact numbers, gradients by layer, what counts as failing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_runs import measure_lab

from regard.labs import norm
from regard.labs.norm import (
    ENTROPY,
    FULL,
    LAB,
    MARGIN,
    TINY,
    UNIFORM,
    Order,
    Setting,
    deepest,
    fate,
    find,
    gradient_by_layer,
    loss_of,
    make_model,
    make_texts,
    train_one,
)
from regard.labs.small_training import build_seeded

CPU = torch.device("cpu")
SMALL = replace(TINY, batch=3, length=5, train=replace(TINY.train, steps=2, warmup=1))


def test_each_letter_has_four_followers_and_follows_four() -> None:
    texts = make_texts(500, 32, 3, CPU)
    pairs = torch.zeros(32, 32, dtype=torch.long)
    pairs[texts[:, :-1].flatten(), texts[:, 1:].flatten()] = 1
    # So the chances of a letter's followers are 1/4, and the uniform distribution is stationary.
    assert pairs.sum(0).tolist() == pairs.sum(1).tolist() == [4] * 32


def test_texts_are_those_of_their_seed() -> None:
    assert torch.equal(make_texts(3, 5, 7, CPU), make_texts(3, 5, 7, CPU))
    assert not torch.equal(make_texts(3, 5, 7, CPU), make_texts(3, 5, 11, CPU))


def test_all_blocks_have_the_order_that_is_asked_for() -> None:
    for order in ("pre", "post"):
        model = make_model(TINY, order, 5)
        assert [block.order for block in model.config.decoder] == [order] * 5


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_new_model_starts_at_the_loss_of_knowing_nothing(order: Order) -> None:
    model = build_seeded(lambda: make_model(TINY, order, 5), 0)
    with torch.no_grad():
        loss = float(loss_of(model, make_texts(50, 16, 0, CPU)))
    # Logits of variance 32 · 0.02² = 0.0128 cost half of it on average.
    assert abs(loss - UNIFORM) < 0.1


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_layers_gradient_is_that_of_all_its_parameters(order: Order) -> None:
    found = gradient_by_layer(SMALL, order, 3, 5, CPU)
    model = build_seeded(lambda: make_model(SMALL, order, 3), 5, 3)
    loss = loss_of(model, make_texts(3, 5, 5, CPU))
    assert model.decoder is not None
    for layer, norm_found in zip(model.decoder.layers, found["norms"], strict=True):
        parts = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        whole = torch.cat([part.flatten() for part in parts]).double().norm()
        assert norm_found == pytest.approx(float(whole), rel=1e-4)


def test_a_training_without_warmup_begins_at_the_full_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(norm, "train", lambda model, draw, loss, config: seen.append(config))
    for warmup in (False, True):
        train_one(SMALL, "pre", 2, warmup, 0, CPU)
    assert [config.warmup for config in seen] == [0, 1]
    assert seen[0] == replace(seen[1], warmup=0)


def test_a_loss_that_is_not_finite_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: torch.nn.Module, *rest: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(torch.inf)

    monkeypatch.setattr(norm, "train", spoil)
    found = train_one(SMALL, "post", 2, False, 0, CPU)
    assert found["loss"] is None and math.isfinite(found["start"])
    assert fate(found) == "diverged"


def training(order: str, depth: int, warmup: bool, seed: int, loss: float | None) -> dict[str, Any]:
    found = {"order": order, "depth": depth, "warmup": warmup, "seed": seed}
    return found | {"start": UNIFORM, "loss": loss}


def test_what_becomes_of_a_training() -> None:
    losses = (None, UNIFORM + 2 * MARGIN, UNIFORM + MARGIN / 2, UNIFORM - MARGIN / 2, ENTROPY)
    fates = [fate(training("pre", 2, True, 0, loss)) for loss in losses]
    assert fates == ["diverged", "diverged", "stuck", "stuck", "learned"]


def made_up(failing: dict[tuple[str, bool], list[int]], lost: float | None) -> dict[str, Any]:
    """Results of two seeds and depths 2, 6 and 12; at the failing depths the loss is `lost`."""
    trainings = [
        training(order, depth, warm, seed, lost if depth in failing.get((order, warm), []) else 1.5)
        for order in ("pre", "post")
        for warm in (False, True)
        for depth in (2, 6, 12)
        for seed in (0, 1)
    ]
    gradients = [
        {"order": order, "depth": depth, "seed": seed, "norms": [first] + [4.0] * (depth - 1)}
        for order, first in (("pre", 8.0), ("post", 0.25))
        for depth in (2, 12)
        for seed in (0, 1)
    ]
    return {"gradients": gradients, "trainings": trainings}


def test_the_sentences_turn_with_the_numbers() -> None:
    failing = {("post", False): [6, 12], ("post", True): [12]}
    said = " ".join(find(made_up(failing, UNIFORM)))
    assert "2 (95% interval 2 to 2) of the last layer's with pre-norm, where it grows" in said
    assert "0.0625 (95% interval 0.0625 to 0.0625) of the last layer's with post-norm, " in said
    assert "where it shrinks on its way down." in said
    assert "loss: post-norm without warm-up 2 with 6 layers and 2 with 12 layers; " in said
    assert "post-norm with warm-up 2 with 12 layers." in said
    assert "None diverged." in said
    assert (
        "up to 12 without warm-up and 12 with it, post-norm up to 2 and 6: deeper with a war"
        in said
    )
    said = " ".join(find(made_up({("post", False): [2, 12], ("post", True): [2]}, None)))
    assert "None stayed" in said and "diverged: post-norm without warm-up 2 with 2 layers" in said
    assert "post-norm without warm-up not finite, post-norm with warm-up 1.5" in said
    assert "post-norm up to 0 and 0: no deeper with a warm-up, against the prediction." in said
    said = " ".join(find(made_up({}, None)))
    assert "post-norm up to 12 and 12: nothing fails for a warm-up to help, against" in said


def test_gradients_that_do_not_shrink_speak_against_the_prediction() -> None:
    results = made_up({}, None)
    for row in results["gradients"]:
        row["norms"][0] = 4.0
    assert find(results)[-2].endswith(
        "post-norm, where it does not clearly change on its way down."
    ), "what is not clear speaks against nothing"
    for row in results["gradients"]:
        row["norms"][0] = 8.0
    assert find(results)[-2].endswith(
        "post-norm, where it grows on its way down, against the prediction."
    )


def test_depth_is_reached_only_through_all_before_it() -> None:
    rows = made_up({("pre", True): [6]}, UNIFORM)["trainings"]
    assert deepest(rows, "pre", True) == 2
    assert deepest(rows, "pre", False) == 12


@pytest.mark.parametrize(("name", "setting"), [("TINY", TINY), ("FULL", FULL)])
def test_a_few_steps_of_either_size_give_all_that_is_told(
    name: str, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(setting.train, steps=2, warmup=1)
    short = replace(setting, seeds=2, starts=2, batch=2, length=4, depths=(2, 3), gradients=(1, 3))
    monkeypatch.setattr(norm, name, replace(short, train=config))
    results = measure_lab(LAB, tmp_path, tiny=name == "TINY")
    assert len(results["trainings"]) == 16 and len(results["gradients"]) == 8
