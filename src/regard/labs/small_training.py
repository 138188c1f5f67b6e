"""A small training loop for labs: AdamW, warm-up, one batch per step.

Why: `regard.training` is for runs of hours, with files; a lab trains many models of a minute each.

How: `draw(step)` makes the batch of a step, as a pure function of the step number; `loss(model,
batch)` is minimised. The learning rate schedule is `regard.training`'s, by default warm-up and then
cosine to a tenth.

Left out: files and resuming; a lab saves the result of a whole training (`Run.map`).
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
    """Train in place; return the loss of each step. `after(step)` is called after each step."""
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
    """A generator seeded by these numbers alone, such as a seed, a step and a purpose."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator(device).manual_seed(seed)


def build_seeded(make: Callable[[], Model], *numbers: int) -> Model:
    """Call `make` with torch's seed set by these numbers, so that they determine the weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_of(*numbers).initial_seed())
        return make()
