"""The mask of `regard.edit`'s `Block`: some queries of some heads may not look at some keys.

It holds two short tensors, one number for each query and one for each key, so it needs no matrix
for a long text; a pair is forbidden where both are True. Other patterns are several joined by `&`.

Letters: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from regard._check import readable
from regard.ops.mask import Bounds, Box, Mask
from regard.ops.shape import Bools, Ints, Shape, Tile, of_samples, pick_broadcast


@dataclass(frozen=True, eq=False)
class Blocked(Mask):
    """Queries (B, H, T) do not see keys (B, H, S) where both are True; axes may be 1."""

    queries: Tensor
    keys: Tensor
    axes: ClassVar = {"queries": "B H T", "keys": "B H S"}
    follows_keys = True

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        where = b, h, i - shape.offset, j
        looking = pick_broadcast(self.queries[..., None], where)
        return ~(looking & pick_broadcast(self.keys[..., None, :], where))

    def block(self, shape: Shape, tile: Tile, device: torch.device) -> Tensor:
        queries, keys = of_samples(self.queries, tile), of_samples(self.keys, tile)
        looking = queries[..., tile.t0 : tile.t1, None].to(device)
        return ~(looking & keys[..., None, tile.s0 : tile.s1].to(device))

    def bounds(self, box: Box) -> Bounds:
        if not readable(self.queries, self.keys):
            return super().bounds(box)
        offset = box.shape.offset
        rows = any_in(self.queries, box.i_lo[:, 0] - offset, box.i_hi[:, 0] - offset)
        columns = any_in(self.keys, box.j_lo[0], box.j_hi[0])
        grid = rows[:, None] & columns[None]
        return Bounds(np.ones_like(grid), ~grid)


def any_in(values: Tensor, first: Ints, last: Ints) -> Bools:
    """Whether any of values (B, H, X) is True in each range first..last, ends included."""
    some = values.flatten(0, 1).any(0).cpu().numpy()
    count = np.r_[0, np.cumsum(some)]
    return np.asarray(count[last + 1] > count[first])
