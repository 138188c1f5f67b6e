"""Sharded weights and optimizer state to plain tensors and back; the norm of sharded gradients.

Why: a snapshot must load on any number of devices, and on one.

How: names are those of one device. Tensors are gathered one at a time and copied to the CPU of the
main rank. To restore, every rank gets the unsharded tensors and takes its own shard without
communication. The order of sharding is fixed: first over the tensor ranks, then each of these
shards over the ranks that read different tokens; so a shard is taken from the last axis of the mesh
to the first.

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
# Prefixes that wrapper modules add to parameter names.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each once, under the names they have on one device."""
    reshard(model)
    named: dict[str, Tensor] = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    named.update((name, x) for name, x in model.named_buffers() if name in kept)
    return {_WRAPPERS.sub("", name): tensor for name, tensor in named.items()}


def reshard(model: nn.Module) -> None:
    """Reshard FSDP2 modules: after an evaluation the outermost one stays gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def find_optimizers(
    weights: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> dict[str, Optimizer]:
    """Map each parameter's name to the optimizer that updates it, in the order of the weights."""
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
    """Gather weights and optimizer state on the CPU of ranks that `keep`; all ranks must call."""
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
    """Take this rank's shard (perhaps empty) of a whole tensor, sharded as `like` is."""
    # By the placement's `dim`: the class for a shard of a shard differs between versions of torch.
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
    """Set weights and optimizer state to `tensors`, and drop other optimizer state."""
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
    """Allocate state for an optimizer that has not stepped yet, on the device its step needs."""
    if whole.shape == weight.shape and whole.dim():
        return torch.empty_like(weight, dtype=whole.dtype, requires_grad=False)
    # A step count stays on the CPU unless the optimizer is fused or capturable.
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
    """Clip gradients to a norm over all ranks of at most `max_norm`; return the norm before."""
    reshard(model)
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if not grads:
        return torch.zeros(())
    norms = [nn.utils.get_total_norm(group) for group in group_by_mesh(grads)]
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
    norm: Tensor = torch.stack(whole).norm()
    multiply_all([local(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
