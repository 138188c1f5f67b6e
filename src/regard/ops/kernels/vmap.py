"""`torch.func.vmap` over our kernels: the mapped axis is folded into the batch.

Tensors with a batch axis then have N · B samples, so one launch computes all of them. Kernels share
sinks, slopes and bands over all samples, and draw dropout separately for each sample: mapping over
these is refused in words.

Letters: N entries of the mapped axis, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from regard._torch import is_only_vmapped, is_transformed
from regard.ops.bias import ALiBi, BiasAt
from regard.ops.call import Call
from regard.ops.kernels.rendered import Rendered

SHARED = ("sinks", "slopes", "band")
"""Fields of `Rendered` that a kernel shares over all samples."""


def refuse(call: Call) -> str | None:
    """Why our kernels cannot run a call inside `torch.func` transforms."""
    if not call.transformed:
        return None
    if not is_only_vmapped():
        return "our kernels run inside no transform of torch.func but vmap"
    if call.dropout > 0.0:
        return "our kernels have no dropout inside vmap; blockwise has"
    if any(is_transformed(x) for x in _shared(call)):
        return "our kernels share sinks, slopes and tables over the batch, so vmap cannot map them"
    return None


def _shared(call: Call) -> list[Tensor]:
    """The tensors of a call that become what `SHARED` names."""
    found = [] if call.sinks is None else [call.sinks]
    for term in () if call.rule.bias is None else call.rule.bias.leaf_terms():
        inner = term.inner if isinstance(term, BiasAt) else term
        if isinstance(inner, ALiBi):
            found.append(inner.slopes)
        elif term.relative:
            found += term.tensors()
    return found


def fold(x: Tensor, axis: int | None, n: int, samples: int) -> Tensor:
    """x (B or 1, ...), mapped along an axis or the same for all, as (N · B, ...)."""
    mapped = x[None].expand(n, *x.shape) if axis is None else x.movedim(axis, 0)
    return mapped.expand(n, samples, *mapped.shape[2:]).flatten(0, 1)


def fold_rule(x: Tensor | None, axis: int | None, n: int, samples: int) -> Tensor | None:
    """As `fold`, for tensors that kernels read without strides; those shared by all stay so."""
    if x is None or (axis is None and len(x) == 1):
        return x
    return fold(x, axis, n, samples).contiguous()


def keep(x: Tensor | None, axis: int | None, name: str) -> Tensor | None:
    """A tensor that kernels share over all samples; RuntimeError if it is mapped."""
    if axis is not None:
        raise RuntimeError(
            f"the triton backend has one {name} for the batch, which vmap cannot map; "
            'use backend="blockwise"'
        )
    return x


def count_samples(q: Tensor, axis: int | None) -> int:
    """The batch B of queries that are mapped along an axis, or not."""
    return q.shape[1 if axis == 0 else 0]


def fold_call(
    tensors: Sequence[Tensor | None], axes: Sequence[int | None], n: int
) -> tuple[list[Tensor | None], int]:
    """The tensors of `Rendered`, folded, and how many samples there were before."""
    assert tensors[0] is not None
    samples = count_samples(tensors[0], axes[0])
    folded: list[Tensor | None] = []
    for name, x, axis in zip(Rendered._fields, tensors, axes, strict=False):
        if name == "seed" and x is not None:
            raise RuntimeError('dropout inside vmap needs backend="blockwise"')
        if x is None or name in SHARED:
            folded.append(keep(x, axis, name))
        elif name in ("q", "k", "v"):
            folded.append(fold(x, axis, n, samples))
        else:
            folded.append(fold_rule(x, axis, n, samples))
    return folded, samples


def unfold(found: Sequence[Tensor], n: int) -> tuple[list[Tensor], list[int | None]]:
    """Results of N · B samples as (N, B, ...), and their mapped axes; None for empty results."""
    unfolded = [split(x, 0, n) if x.dim() > 1 else x for x in found]
    return unfolded, [0 if x.dim() > 1 else None for x in found]


def split(x: Tensor, axis: int, n: int) -> Tensor:
    """An axis of N · B samples as two, N and B."""
    return x.view(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])
