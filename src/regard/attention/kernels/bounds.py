"""Which keys each query sees, where these are one interval: the form in which kernels take a mask.

Letters: B batch, T queries, S keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.attention.rule import Packed, Rule, pack, unpack
from regard.attention.shape import Shape


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
    return _plain_bounds(written.text, tuple(written.ints), rule.shape, device)


@functools.lru_cache(maxsize=4)
def _plain_bounds(
    text: str, ints: tuple[int, ...], shape: Shape, device: torch.device
) -> Bounds | None:
    """Those of a mask without tensors, kept for a while: all layers of a model ask for them."""
    return _read_bounds(unpack(Packed(text, [], list(ints), []), shape), device)


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
