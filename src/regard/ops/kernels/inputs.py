"""What the kernels that look at weights are given: queries, keys, and which of these each sees.

A mask comes to them as the interval of keys that each query sees. Scores are counted in bits, so
that a power of two is a weight.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.ops.call import Rule
from regard.ops.pack import Form, Packed, pack, unpack
from regard.ops.shape import Shape

BITS = 1.0 / math.log(2.0)
"""From nats to bits."""


@dataclass(eq=False)
class Bounds:
    """First and past-the-last key that each query sees, (B or 1, T)."""

    lo: Tensor
    hi: Tensor
    n_keys: int

    @functools.cached_property
    def seen_by(self) -> Tensor:
        """How many queries may see each key, (B or 1, S)."""
        lo, hi = self.lo.long(), self.hi.long()
        edges = torch.zeros(len(lo), self.n_keys + 1, dtype=torch.int64, device=lo.device)
        one = torch.ones_like(lo)
        edges.scatter_add_(1, lo, one).scatter_add_(1, hi, -one)
        return edges[:, :-1].cumsum(1).float()


def find_bounds(rule: Rule, device: torch.device) -> Bounds | None:
    """The keys that each query sees, if a mask is all that tells and they are one interval."""
    if rule.bias is not None:
        return None
    if rule.tensors():
        return _read_bounds(rule, device)
    written = pack(replace(rule, scale=None, softcap=None))
    return _plain_bounds(written.form, tuple(written.ints), rule.shape, device)


@functools.lru_cache(maxsize=4)
def _plain_bounds(
    form: Form, ints: tuple[int, ...], shape: Shape, device: torch.device
) -> Bounds | None:
    """Those of a mask without tensors, kept for a while: all layers of a model ask for them."""
    return _read_bounds(unpack(Packed(form, [], list(ints), []), shape), device)


def _read_bounds(rule: Rule, device: torch.device) -> Bounds | None:
    _, _, T, S = rule.shape
    if rule.mask is None:
        lo = torch.zeros(1, T, dtype=torch.int32, device=device)
        return Bounds(lo, torch.full_like(lo, S), S)
    i = torch.arange(T, device=device)[None] + rule.shape.offset
    ends = rule.mask.interval(i, rule.shape)
    if ends is None:
        return None
    lo, hi = (x.clamp(0, S).to(device=device, dtype=torch.int32).contiguous() for x in ends)
    return Bounds(lo, torch.maximum(lo, hi), S)


@dataclass(frozen=True, eq=False)
class Inputs:
    """q (B, H, T, D) and k (B, G, S, D), the keys that queries see, and how scores are made.

    factor: what products of q and k are multiplied by; cap: the softcap, 0 for none; both in bits.
    """

    q: Tensor
    k: Tensor
    bounds: Bounds
    factor: float
    cap: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, rule: Rule, bounds: Bounds) -> Inputs:
        """That of a rule, whose bounds are known."""
        factor, cap = rule.factor(q.shape[3]) * BITS, (rule.softcap or 0.0) * BITS
        return cls(q, k, bounds, factor, cap)

    @property
    def exact(self) -> bool:
        """Whether products are those of float32, and so the tiles small."""
        return self.q.dtype == torch.float32

    def tensors(self) -> tuple[Tensor, ...]:
        """The first arguments of every kernel."""
        return self.q, self.k, self.bounds.lo, self.bounds.hi

    def strides(self) -> tuple[int, ...]:
        """Those of q, of k, and from row to row of the bounds."""
        lo = self.bounds.lo
        return *self.q.stride(), *self.k.stride(), 0 if len(lo) == 1 else lo.stride(0)

    def options(self) -> dict[str, Any]:
        """What a kernel is compiled for: query heads a key head, a width, a cap or none."""
        width = max(16, 2 ** (self.q.shape[3] - 1).bit_length())
        return {"R": self.q.shape[1] // self.k.shape[1], "WIDTH": width, "CAPPED": self.cap > 0.0}


@dataclass(frozen=True, eq=False)
class RowSums:
    """Top and sum of each row, (B, H, T), with which a score is a weight."""

    maxima: Tensor
    sums: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Both as arguments."""
        return self.maxima, self.sums
