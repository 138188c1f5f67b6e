"""One process's view of all the processes that train a model together.

Why: a training loop should read the same on one device and on many.

How: `Mesh.alone(device)` is one process; `Mesh.launch(layout)` joins those that torchrun started.
Ranks are laid out as (data, context, tensor), with tensor ranks adjacent, since they communicate
most. Every rank makes the same global batch from seed and step, takes its part (`cut`), and divides
its summed loss by the number of tokens of the global batch. So FSDP2 must sum gradients over ranks
instead of averaging them, and `total` of the ranks' losses is the loss. The loop creates its
optimizers after `prepare`, and seeds dropout with `part`, which is the same on ranks that read the
same tokens.

Left out: generation on a prepared model (load the state into a model of its own).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.optim import Optimizer

from regard._check import check_count
from regard.layers.feedforward import FeedForward
from regard.layers.multihead import MultiHeadAttention
from regard.models import Transformer
from regard.training.data.packing import NOTHING
from regard.training.parallel.context import Parts, check_context, cut_text
from regard.training.parallel.state import clip_gradients, gather_state, group_by_mesh, put_back
from regard.training.parallel.tensor import check_tensor, cut_layers

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TARGETS = ("targets", "target_out")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Over how many processes rows (data), layers (tensor) and sequences (context) are split."""

    data: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "context"):
            check_count(name, getattr(self, name))

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.context


class _Ties(NamedTuple):
    """How a process reaches the others; `owned`: whether we opened the process group."""

    mesh: DeviceMesh  # (parts, tensor): ranks that read different tokens, ranks that share layers
    parts: Parts | None
    owned: bool


@final
class Mesh(AbstractContextManager["Mesh"]):
    """All processes of a run, seen from one of them. Made by `alone` or `launch`."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, ties: _Ties | None) -> None:
        self.layout, self.rank, self.device = layout, rank, device
        self._ties = ties

    @staticmethod
    def alone(device: torch.device | str = "cpu") -> Mesh:
        return Mesh(Layout(), 0, torch.device(device), None)

    @staticmethod
    def launch(layout: Layout, device_type: str = "cpu") -> Mesh:
        """Join the processes that torchrun started; the backend is gloo on "cpu", NCCL on "cuda".

        A process group that is open already is used, and `close` leaves it open.
        """
        if device_type not in BACKENDS:
            raise ValueError(f"device_type is {device_type!r}; expected {' or '.join(BACKENDS)}")
        rank, size = read_environment(layout)
        device = torch.device(device_type)
        if device_type == "cuda":
            local_rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local_rank >= count:
                what = f"process {local_rank} of this machine has no GPU: torch sees {count}"
                raise RuntimeError(f"{what}; start no more than that, or use device_type='cpu'")
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        if size == 1:
            return Mesh(layout, rank, device, None)
        owned = not dist.is_initialized()
        if owned:
            dist.init_process_group(BACKENDS[device_type])
        shape: tuple[int, ...] = layout.data * layout.context, layout.tensor
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("parts", "tensor"))
        parts = None
        if layout.context > 1:
            shape = layout.data, layout.context, layout.tensor
            names = ("data", "context", "tensor")
            cuts = init_device_mesh(device_type, shape, mesh_dim_names=names)["context"]
            parts = Parts(cuts.get_group(), cuts.get_local_rank(), layout.context)
        return Mesh(layout, rank, device, _Ties(mesh, parts, owned))

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def part(self) -> int:
        """The number of the part of a batch that this rank reads; tensor ranks share one part."""
        return self.rank // self.layout.tensor

    def prepare(self, model: Transformer, compute: torch.dtype | None = None) -> Transformer:
        """Distribute a model over all processes, in place, starting from the main rank's weights.

        compute: the dtype in which FSDP2 gathers weights and runs layers (autocast works as well).
        """
        model.to(self.device)
        if self._ties is None:
            if compute is None:
                return model
            raise ValueError(f"compute={compute} is for several processes; use autocast on one")
        layout, ties = self.layout, self._ties
        if layout.tensor > 1:
            check_tensor(model, layout.tensor)
        if layout.context > 1:
            check_context(model, layout.context)
        for layer in model.modules():
            if isinstance(layer, MultiHeadAttention | FeedForward):
                # Fused weights share one tensor, which sharding would cut apart.
                layer.fused = None
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, 0)
        if layout.tensor > 1:
            cut_layers(model, ties.mesh["tensor"])
        if ties.parts is not None:
            cut_text(model, ties.parts)
        if layout.size > layout.tensor or compute is not None:
            shard(model, ties.mesh["parts"], compute)
        return model

    def cut(
        self, batch: Mapping[str, Tensor], targets: Sequence[str] = TARGETS
    ) -> dict[str, Tensor]:
        """Take this rank's rows of the global batch, and its part of each sequence.

        A rank without rows must run all the same, since collectives wait for it: it gets the first
        row with all `targets` -100.
        """
        if self._ties is None:
            return dict(batch)
        data, context = divmod(self.part, self.layout.context)
        own = {}
        for name, tensor in batch.items():
            rows = tensor.tensor_split(self.layout.data)[data]
            if not len(rows):
                rows = torch.full_like(tensor[:1], NOTHING) if name in targets else tensor[:1]
            own[name] = cut_row(name, rows, self.layout.context)[context]
        return own

    def total(self, x: Tensor) -> Tensor:
        """Sum x over the ranks that read different tokens; every rank gets the sum."""
        if self._ties is None or self.layout.size == self.layout.tensor:
            return x.detach()
        total = x.detach().to(self.device, copy=True)
        dist.all_reduce(total, group=self._ties.mesh.get_group("parts"))
        return total.to(x.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank, so that a stop of one process stops all."""
        if self._ties is None:
            return flag
        said = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(said)
        return bool(said)

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Group parameters that one fused optimizer step can update together."""
        return group_by_mesh(parameters)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip gradients to a norm of at most `max_norm` (inf: none); return the norm before."""
        if self._ties is None:
            return nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return clip_gradients(model, max_norm)

    def state(
        self, model: nn.Module, optimizers: Sequence[Optimizer] = ()
    ) -> dict[str, Tensor] | None:
        """Gather unsharded copies of weights and optimizer state on the main rank's CPU, else None.

        Names are "model/<parameter>" and "optim/<parameter>/<word>", as on one device. It is a
        collective: all ranks must call it.
        """
        return gather_state(model, optimizers, self.is_main)

    def restore(
        self, model: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]
    ) -> None:
        """Load a state from `state` (of any layout), given unsharded on every rank, in place."""
        put_back(model, optimizers, tensors)

    def close(self) -> None:
        """Leave the process group if `launch` opened it; a second call does nothing."""
        if self._ties is not None and self._ties.owned and dist.is_initialized():
            dist.destroy_process_group()
        self._ties = None

    def __exit__(self, *_: object) -> None:
        self.close()


def read_environment(layout: Layout) -> tuple[int, int]:
    """Read rank and world size from torchrun's environment; raise with advice if they misfit."""
    start = f"start it with: torchrun --nproc-per-node {layout.size} ..."
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        what = f"{layout} takes {layout.size} processes that torchrun starts"
        raise RuntimeError(f"{what}, but {', '.join(missing)} is not in the environment; {start}")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != layout.size:
        takes = f"{layout} takes data × tensor × context = {layout.size}"
        raise ValueError(f"torchrun started {size} processes, but {takes}; change it, or {start}")
    return rank, size


def cut_row(name: str, rows: Tensor, count: int) -> tuple[Tensor, ...]:
    if count == 1:
        return (rows,)
    if rows.dim() < 2 or rows.shape[1] % count:
        what = f"{name} is {tuple(rows.shape)}; with context={count} every tensor is (B, S, ...)"
        raise ValueError(f"{what} with an S that {count} divides: take such a context length")
    return rows.chunk(count, 1)


def shard(model: Transformer, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    """Apply FSDP2 to each block and to the rest of the model, with gradients summed."""
    # Inputs are not cast: rotary phases are among them, and activations already have the dtype of
    # the weights that computed them.
    sums = None if compute is None else torch.float32
    policy = MixedPrecisionPolicy(compute, sums, cast_forward_inputs=False)
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    for module in (*(block for stack in stacks for block in stack.layers), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # A plain sum: gloo has no reduction that also multiplies.
        module.set_force_sum_reduction_for_comms(True)
    gather_around_methods(model)


def gather_around_methods(model: Transformer) -> None:
    """Make FSDP2 gather weights around `run` and `encode`, as it does around `forward`.

    It must not do so for a call from within `forward`: at the end of the inner method it would
    reshard the weights too early. Hooks on `forward` therefore record whether it is running.
    """
    within: list[nn.Module] = []
    model.register_forward_pre_hook(lambda module, _: within.append(module))
    model.register_forward_hook(lambda *_: within.clear(), always_call=True)

    def wrap(plain: Callable[..., Any], gathering: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: (plain if within else gathering)(*args, **named)

    for name in ("run", "encode"):
        plain = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, wrap(plain, getattr(model, name)))
