"""Blocks that keep nothing: fewer activations, the same gradients, and no trace afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import GPT2, MODELS, make_model, make_task
from torch.autograd.graph import saved_tensors_hooks

from regard.models import Transformer
from regard.training.checkpointing import checkpointed
from regard.training.loss import summed_loss


def gradients(model: Transformer, task: Any, seed: int = 3) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(seed)
    batch = task.batch(0)
    assert model.head is not None
    loss = summed_loss(model.head, task.vectors(model, batch), batch[task.targets])
    found = torch.autograd.grad(loss, [p for _, p in model.named_parameters()], allow_unused=True)
    return loss.item(), [g for g in found if g is not None]


@pytest.mark.parametrize("kind", ["lm", "masked", "translate"])
def test_gradients_are_the_same_with_dropout_on(tmp_path: Path, kind: str) -> None:
    model, task = make_model(MODELS[kind]).train(), make_task(kind, tmp_path)
    loss, plain = gradients(model, task)
    with checkpointed(model):
        again, made = gradients(model, task)
    assert loss == again and len(plain) == len(made) > 10
    assert all(torch.equal(x, y) for x, y in zip(plain, made, strict=True))
    assert gradients(model, task, seed=4)[0] != loss  # dropout is on


def kept_numbers(model: Transformer, task: Any) -> int:
    """How many numbers the forward pass keeps for the backward pass."""
    count = 0

    def keep(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += x.numel()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        task.vectors(model, task.batch(0))
    return count


def test_less_is_kept_and_the_blocks_run_twice(tmp_path: Path) -> None:
    model, task = make_model(GPT2, n_layer=5).train(), make_task("lm", tmp_path)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    assert model.decoder is not None
    model.decoder.layers[1].ffn.register_forward_hook(count)
    plain = kept_numbers(model, task)
    with checkpointed(model):
        assert kept_numbers(model, task) < 0.5 * plain
        calls = 0
        gradients(model, task)
    assert calls == 2


def test_the_model_is_as_before_even_after_an_error() -> None:
    model = make_model(GPT2)
    with pytest.raises(KeyError), checkpointed(model):
        assert model.decoder is not None and "forward" in vars(model.decoder.layers[0])
        raise KeyError
    assert all("forward" not in vars(module) for module in model.modules())
