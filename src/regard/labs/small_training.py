"""Training of small models, as labs need it: a loss of a step's own batch, AdamW, a warm-up.

Why: `regard.training` is for runs of hours, with files; a lab trains many models of a minute each.

How: `draw(step)` makes the batch of a step, a pure function of its number; `loss(model, batch)` is
what falls. The rate is `regard.training`'s: warm-up, then cosine to a tenth.

Left out: files and going on in the middle; a lab keeps what a training gave (`Run.map`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.training.config import TrainConfig
from regard.training.optim import rate_share

Batch = TypeVar("Batch")
Model = TypeVar("Model", bound=nn.Module)


def train(
    model: nn.Module,
    draw: Callable[[int], Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    config: TrainConfig,
    after: Callable[[int], None] | None = None,
) -> list[float]:
    """Train in place; the loss of each step. `after(step)` is called when a step is done."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(
        groups, config.lr, betas, config.eps, config.weight_decay, fused=True
    )
    losses: list[Tensor] = []
    model.train()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * rate_share(config, step)
        value = loss(model, draw(step))
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        losses.append(value.detach())
        if after is not None:
            after(step)
            model.train()
    model.eval()
    return [float(x) for x in torch.stack(losses).cpu()] if losses else []


def generator_of(*numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A source of random numbers that is a function of these alone: a seed, a step, a purpose."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator(device).manual_seed(seed)


def build_seeded(make: Callable[[], Model], *numbers: int) -> Model:
    """What `make` builds, with first weights that are a function of these numbers alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_of(*numbers).initial_seed())
        return make()
