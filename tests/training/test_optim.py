"""Learning rates by worked numbers, which optimizer moves what, and the averaged weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_runs import GPT2, LLAMA, make_model

from regard.training.config import TrainConfig
from regard.training.optim import Average, is_inner, make_optimizers, rate_share, set_rate
from regard.training.parallel import Mesh

CONFIG = TrainConfig(steps=21, warmup=5, end_share=0.2)


def shares(config: TrainConfig, *steps: int) -> list[float]:
    return [rate_share(config, step) for step in steps]


# ---- Schedules


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
def test_warm_up_rises_in_even_steps_to_the_highest(schedule: str) -> None:
    config = replace(CONFIG, schedule=schedule)  # type: ignore[arg-type]
    assert shares(config, 0, 1, 2, 3, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine_by_hand() -> None:
    # Of 15 parts after the warm-up: none, a third (cos 60° = ½), half, two thirds, all.
    worked = [1.0, 0.2 + 0.8 * 0.75, 0.2 + 0.8 * 0.25, 0.2]
    assert shares(CONFIG, 5, 10, 15, 20) == pytest.approx(worked)
    assert shares(replace(CONFIG, steps=16), 10) == pytest.approx([0.6])
    assert shares(CONFIG, 20, 21, 500) == pytest.approx([0.2, 0.2, 0.2])


def test_linear_by_hand() -> None:
    config = replace(CONFIG, schedule="linear")
    worked = [1.0, 1 - 0.8 / 3, 1 - 1.6 / 3, 0.2]
    assert shares(config, 5, 10, 15, 20) == pytest.approx(worked)
    assert shares(replace(config, end_share=0.0), 20, 99) == pytest.approx([0.0, 0.0])


def test_constant_stays_and_no_warmup_starts_at_the_highest() -> None:
    assert shares(replace(CONFIG, schedule="constant"), 5, 20, 999) == [1.0, 1.0, 1.0]
    for schedule in ("constant", "linear", "cosine"):
        assert rate_share(replace(CONFIG, schedule=schedule, warmup=0), 0) == 1.0


def test_runs_shorter_than_their_warmup_have_rates() -> None:
    for steps in (1, 5, 6):
        config = replace(CONFIG, steps=steps)
        assert all(0 < share <= 1 for share in shares(config, *range(steps)))


def test_inverse_square_root_is_the_papers_formula() -> None:
    """dim^-0.5 · min(s^-0.5, s · warmup^-1.5), where the highest rate is (dim · warmup)^-0.5."""
    dim, warmup = 512, 40
    config = TrainConfig(
        steps=1000, warmup=warmup, schedule="inverse_sqrt", lr=(dim * warmup) ** -0.5
    )
    for s in (1, 2, 39, 40, 41, 160, 1000, 4000):
        paper = dim**-0.5 * min(s**-0.5, s * warmup**-1.5)
        assert config.lr * rate_share(config, s - 1) == pytest.approx(paper, rel=1e-12)
    assert rate_share(config, 159) == pytest.approx(0.5)


# ---- Optimizers


def test_adamw_decays_matrices_and_spares_vectors() -> None:
    model = make_model(GPT2)
    config = replace(CONFIG, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-7)
    (made,) = make_optimizers(model, config, Mesh.alone())
    assert isinstance(made, torch.optim.AdamW)
    groups = {id(p): group for group in made.param_groups for p in group["params"]}
    learned = dict(model.named_parameters())
    assert set(groups) == {id(p) for p in learned.values()}
    for parameter in learned.values():
        group = groups[id(parameter)]
        assert group["weight_decay"] == (0.3 if parameter.dim() >= 2 else 0.0)
        assert (group["betas"], group["eps"], group["fused"]) == ((0.8, 0.9), 1e-7, True)


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    model = make_model(LLAMA)
    config = replace(CONFIG, optimizer="muon", weight_decay=0.3)
    adamw, muon = make_optimizers(model, config, Mesh.alone())
    assert isinstance(adamw, torch.optim.AdamW) and isinstance(muon, torch.optim.Muon)
    names = {id(p): name for name, p in model.named_parameters()}
    moved = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    others = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert moved == {name for name in names.values() if name.endswith("_proj.weight")}
    assert moved | others == set(names.values()) and not moved & others
    assert "decoder_embed.tokens.weight" in others
    assert all(group["weight_decay"] == 0.3 for group in muon.param_groups)
    assert not is_inner("decoder.layers.0.ffn.up_proj.bias", torch.ones(3))


def test_frozen_weights_are_left_to_nobody() -> None:
    model = make_model(LLAMA)
    frozen = model.decoder_embed.tokens.weight.requires_grad_(False)  # type: ignore[union-attr]
    for kind in ("adamw", "muon"):
        made = make_optimizers(model, replace(CONFIG, optimizer=kind), Mesh.alone())
        held = {id(p) for each in made for group in each.param_groups for p in group["params"]}
        assert id(frozen) not in held


def test_the_rate_reaches_every_group() -> None:
    made = make_optimizers(make_model(LLAMA), replace(CONFIG, optimizer="muon"), Mesh.alone())
    set_rate(made, 0.125)
    assert {group["lr"] for each in made for group in each.param_groups} == {0.125}


def test_a_step_of_adamw_by_hand() -> None:
    """The first step moves each weight by the rate, against its gradient, and decays matrices."""
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight[:] = torch.tensor([[2.0, -4.0]])
        model.bias.fill_(1.0)
    config = replace(CONFIG, lr=0.1, weight_decay=0.5)
    made = make_optimizers(model, config, Mesh.alone())
    (model.weight * torch.tensor([[3.0, -1.0]])).sum().backward()
    model.bias.grad = torch.tensor([7.0])
    made[0].step()
    # 2 - 0.1 · 0.5 · 2 - 0.1 and -4 + 0.1 · 0.5 · 4 + 0.1
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1.8, -3.7]]))
    torch.testing.assert_close(model.bias.detach(), torch.tensor([0.9]))


# ---- The average


def test_the_average_follows_by_hand() -> None:
    model = torch.nn.Linear(1, 1, bias=False)

    def put(value: float) -> None:
        with torch.no_grad():
            model.weight.fill_(value)

    put(1.0)
    average = Average(model, keep=0.15)
    put(2.0)
    average.follow(model, 0)  # keeps 1/10: 0.1 · 1 + 0.9 · 2
    assert average.weights["weight"].item() == pytest.approx(1.9)
    put(3.0)
    average.follow(model, 1)  # 2/11 would be kept, but `keep` is less: 0.15 · 1.9 + 0.85 · 3
    assert average.weights["weight"].item() == pytest.approx(0.15 * 1.9 + 0.85 * 3.0)
    slow = Average(model, keep=0.999)
    put(0.0)
    slow.follow(model, 89)  # 90/99 of 3
    assert slow.weights["weight"].item() == pytest.approx(3 * 90 / 99)


def test_the_average_is_shown_for_a_while_and_nothing_is_left_of_it() -> None:
    model = make_model(GPT2)
    average = Average(model, keep=0.5)
    begun = {name: x.clone() for name, x in average.weights.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(KeyError), average.shown(model):
        for name, p in model.named_parameters():
            assert torch.equal(p, begun[name])
        raise KeyError
    for name, p in model.named_parameters():
        assert torch.equal(p, own[name]) and p.requires_grad
        assert torch.equal(average.weights[name], begun[name])


def test_weights_of_the_average_are_its_own() -> None:
    model = torch.nn.Linear(3, 2)
    average = Average(model, keep=1.0)
    before = average.weights["weight"].clone()
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(average.weights["weight"], before) and not math.isnan(float(before.sum()))
