"""Weights and optimizer state as plain tensors, whatever the layout; and the norm of gradients.

Why: a snapshot must load on another number of devices, and on one.

How: names are those of one device. Each tensor is gathered whole, one at a time, and laid on the
CPU of the main rank. Back, every rank has the whole tensors and takes its own shard without asking
anyone. The order of shards is fixed: first over the tensor ranks, then, of what that left, over the
ranks that read different tokens; so shards are taken from the last axis of the mesh to the first.

Left out: learning rates and other numbers of an optimizer's groups, which belong to the loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from regard._torch import multiply_all

MODEL, OPTIM = "model/", "optim/"
_Tensor = TypeVar("_Tensor", bound=Tensor)
# What wrappers put into the names of the parameters below them.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and what else a model saves, each once, under its name on one device."""
    reshard(model)
    named: dict[str, Tensor] = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    named.update((name, x) for name, x in model.named_buffers() if name in kept)
    return {_WRAPPERS.sub("", name): tensor for name, tensor in named.items()}


def reshard(model: nn.Module) -> None:
    """Give back FSDP2's outermost weights, which an evaluation leaves gathered in other tensors."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def find_optimizers(
    weights: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> dict[str, Optimizer]:
    """The optimizer that moves each parameter, in the order of the weights."""
    names = {id(weight): name for name, weight in weights.items()}
    found: dict[str, Optimizer] = {}
    for optimizer in optimizers:
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            name = names.get(id(weight))
            if name is None:
                what = f"{type(optimizer).__name__} holds a parameter {tuple(weight.shape)} that is"
                todo = "make optimizers after prepare(), which replaces parameters"
                raise ValueError(f"{what} not the model's; {todo}")
            if name in found:
                raise ValueError(f"two optimizers, or two groups of one, hold {name}")
            found[name] = optimizer
    return {name: found[name] for name in weights if name in found}


def gather_state(
    model: nn.Module, optimizers: Sequence[Optimizer], keep: bool
) -> dict[str, Tensor] | None:
    """All that training changes, whole, on the CPU of those that `keep`; all ranks must ask."""
    weights = named_weights(model)
    tensors = {MODEL + name: weight for name, weight in weights.items()}
    for name, optimizer in find_optimizers(weights, optimizers).items():
        for word, value in optimizer.state.get(weights[name], {}).items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIM}{name}/{word}"] = value
            elif value is not None:
                what = (
                    f"{type(optimizer).__name__} keeps {word} of {name} as {type(value).__name__}"
                )
                raise TypeError(f"{what}; only optimizers whose state is tensors can be saved")
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        x = tensor.detach()
        x = x.full_tensor() if isinstance(x, DTensor) else x
        if keep:
            whole[name] = torch.empty_like(x, device="cpu").copy_(x)
    return whole if keep else None


def own_shard(like: Tensor, whole: Tensor) -> Tensor:
    """What this rank holds of a whole tensor, sharded as `like` is; it may be nothing."""
    # Not by the placement's class: that of a shard of a shard differs between versions of torch.
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(like.placements[axis], "dim", None)
        if dim is not None:
            shards, rank = whole.chunk(mesh.size(axis), dim), mesh.get_local_rank(axis)
            whole = shards[rank] if rank < len(shards) else whole.narrow(dim, 0, 0)
    return whole


def local(tensor: Tensor) -> Tensor:
    shard: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard


@torch.no_grad()
def fill(target: Tensor, name: str, whole: Tensor) -> None:
    if tuple(target.shape) != tuple(whole.shape):
        what = f"{name} has shape {tuple(whole.shape)}, but the model's is {tuple(target.shape)}"
        raise ValueError(f"{what}: the tensors are of another model")
    local(target).copy_(own_shard(target, whole))


def put_back(
    model: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Make weights and optimizer state what `tensors` say, and nothing else."""
    weights = named_weights(model)
    holders = find_optimizers(weights, optimizers)
    given = {key.removeprefix(MODEL): x for key, x in tensors.items() if key.startswith(MODEL)}
    states: dict[str, dict[str, Tensor]] = {}
    for key in (key for key in tensors if key.startswith(OPTIM)):
        name, _, word = key.removeprefix(OPTIM).rpartition("/")
        states.setdefault(name, {})[word] = tensors[key]
    missing, strange = sorted(weights.keys() - given), sorted(given.keys() - weights)
    unheld = sorted(states.keys() - holders)
    if unheld:
        what = f"the tensors hold state for {len(unheld)} parameters that no optimizer has"
        raise ValueError(f"{what} {unheld[:1]}; make the optimizers as they were")
    if missing or strange:
        what = f"the tensors are of another model: {len(missing)} weights are missing {missing[:1]}"
        raise ValueError(f"{what}, {len(strange)} are unknown {strange[:1]}")
    for name, weight in weights.items():
        fill(weight, name, given[name])
    for name, optimizer in holders.items():
        state, words = optimizer.state[weights[name]], states.get(name, {})
        for word in set(state) - set(words):
            del state[word]
        for word, whole in words.items():
            if not isinstance(state.get(word), Tensor):
                state[word] = make_state(optimizer, weights[name], whole)
            fill(state[word], f"{word} of {name}", whole)


def make_state(optimizer: Optimizer, weight: Tensor, whole: Tensor) -> Tensor:
    """An empty tensor for an optimizer that has not stepped yet, on the device its step wants."""
    if whole.shape == weight.shape and whole.dim():
        return torch.empty_like(weight, dtype=whole.dtype, requires_grad=False)
    # A count stays on the CPU unless the step runs on the device as a whole.
    groups = optimizer.param_groups
    group = next(group for group in groups if any(x is weight for x in group["params"]))
    on_device = group.get("fused") or group.get("capturable")
    return torch.empty_like(whole, device=weight.device if on_device else "cpu")


def group_by_mesh(tensors: Iterable[_Tensor]) -> list[list[_Tensor]]:
    groups: dict[DeviceMesh | None, list[_Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm over all ranks is at most `max_norm`; that norm."""
    reshard(model)
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if not grads:
        return torch.zeros(())
    norms = [nn.utils.get_total_norm(group) for group in group_by_mesh(grads)]
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
    norm: Tensor = torch.stack(whole).norm()
    multiply_all([local(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
