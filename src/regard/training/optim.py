"""Optimizers, learning rate schedules and an exponential moving average of the weights.

How: torch's AdamW, or its Muon for the matrices inside the blocks and AdamW for the rest
(embeddings, norms, biases). Weight decay applies to matrices, not to vectors. The learning rate is
a function of the step number alone, so a snapshot needs no scheduler state.

Left out: optimizers of other packages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from regard.training.config import TrainConfig
from regard.training.parallel import Mesh


def rate_share(config: TrainConfig, step: int) -> float:
    """The learning rate of a step (counted from 0), as a share of the highest.

    During warm-up it is (step + 1) / warmup. After it, with f going from 0 to 1 at the last step
    and e = `end_share`: cosine is e + (1 - e)(1 + cos πf)/2, linear is 1 - (1 - e) f. inverse_sqrt
    is √(warmup / (step + 1)), as in the original Transformer, whose highest rate is
    1/√(dim · warmup).
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        return math.sqrt(config.warmup / (step + 1))
    done = min(1.0, (step - config.warmup) / max(1, config.steps - 1 - config.warmup))
    end = config.end_share
    if config.schedule == "linear":
        return 1.0 - (1.0 - end) * done
    return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * done))


def make_optimizers(
    model: nn.Module, config: TrainConfig, mesh: Mesh
) -> list[torch.optim.Optimizer]:
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(n, p) for n, p in learned if config.optimizer == "muon" and is_inner(n, p)]
    names = {name for name, _ in matrices}
    rest = [p for name, p in learned if name not in names]
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": config.weight_decay if decays else 0.0}
        for decays in (True, False)
        for group in mesh.groups(p for p in rest if (p.dim() >= 2) == decays)
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), config.eps, fused=True)
    ]
    if matrices:
        inner = [p for _, p in matrices]
        rates = config.lr, config.weight_decay
        optimizers.append(torch.optim.Muon(inner, *rates, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def is_inner(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and ".layers." in name


def set_rate(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


@final
class Average:
    """Exponential moving average of the weights: average = keep · average + (1 - keep) · weights.

    To forget the initial weights soon, `keep` starts low: at most (1 + n) / (10 + n) at step n.
    """

    def __init__(self, model: nn.Module, keep: float) -> None:
        self.keep = keep
        self.weights = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }

    def follow(self, model: nn.Module, n_steps: int) -> None:
        keep = min(self.keep, (1 + n_steps) / (10 + n_steps))
        follow = get_ema_multi_avg_fn(keep)  # type: ignore[no-untyped-call]
        now = dict(model.named_parameters())
        follow(list(self.weights.values()), [now[name] for name in self.weights], n_steps)

    @contextmanager
    def shown(self, model: nn.Module) -> Iterator[None]:
        """Put the averaged weights into the model, and its own back at the end of the `with`."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.put(model, self.weights)
        try:
            yield
        finally:
            self.put(model, own)

    @staticmethod
    @torch.no_grad()
    def put(model: nn.Module, weights: dict[str, Tensor]) -> None:
        now = dict(model.named_parameters())
        for name, tensor in weights.items():
            now[name].copy_(tensor)
