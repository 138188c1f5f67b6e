"""Maps of the weights, and what keys receive, by Triton kernels that know the row sums.

How: bands of rows are walked along the keys. Where the cells of a map and the tiles of the walk
divide evenly, as they do in a text of 8,192 tokens and a map of 256 × 256, each tile sums its cells
and its keys. Otherwise the mean over the rows of each cell is written down key by key; the sum of
these is what a key receives, and their means over the keys are the cells.

Letters: B batch, T queries, S keys, H query heads; X, Y cells of a map down and across.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.ops.call import Rule
from regard.ops.kernels.inputs import Inputs, RowSums
from regard.ops.wants import Map, ReceivedAttention, Wants

SCRATCH = 2**26
"""Numbers held between the second pass and the cells of a map."""
ROWS = 128
"""The most rows that a program of the second pass takes."""
KEYS = 64
"""The keys that it takes at a time, where cells and tiles divide evenly; half, in float32."""
CELLS = 16
"""The most cells, one above the other, whose rows it sums at once."""


@dataclass(frozen=True, eq=False)
class Pooling:
    """The second pass over what `inputs` shows, whose row sums are known."""

    inputs: Inputs
    rows: RowSums

    def answer(self, wants: Wants, rule: Rule) -> dict[str, Any]:
        """The map and the received attention, where they are wanted."""
        picture, (_, _, T, S) = wants.picture(), rule.shape
        found: dict[str, Any] = {}
        total: Tensor | None = None
        if picture is not None:
            found["map"], total = self.pool(picture, picture.window(rule.shape))
            if picture.window(rule.shape) != (0, T, 0, S):
                total = None
        if wants.received:
            if total is None:
                plain = Map(height=-(-T // ROWS), width=1)
                total = self.pool(plain, (0, T, 0, S), cells=False)[1]
            seen_by = self.inputs.bounds.seen_by[:, None].expand(total.shape).contiguous()
            found["received"] = ReceivedAttention(total, seen_by)
        return found

    def pool(
        self, picture: Map, window: tuple[int, int, int, int], cells: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The cells of a map (B, H, X, Y), where asked for, and all that its keys receive in it."""
        from regard.ops.kernels import pooling_kernels

        t0, t1, s0, s1 = window
        (B, H), span, X = self.inputs.q.shape[:2], t1 - t0, picture.height
        tile = ROWS, KEYS // 2 if self.inputs.exact else KEYS
        tall, wide = whole_part(span, X, tile[0]), whole_part(s1 - s0, picture.width, tile[1])
        if cells and tall and wide:
            return self.pool_evenly(picture, window, tile, (tall, wide))
        cut = cut_rows(span, X)
        _, n_in_tile, n_slices = cut
        height = X if cells else 0
        picked = torch.empty(
            B * H, height, picture.width, dtype=torch.float32, device=self.inputs.q.device
        )
        total = torch.zeros(B * H, s1 - s0, dtype=torch.float32, device=self.inputs.q.device)
        # So many cells at a time as leave memory for the sums, and whole tiles of them.
        step = SCRATCH // (B * H * (s1 - s0) * n_slices) // n_in_tile * n_in_tile
        step = max(step, n_in_tile)
        for first in range(0, X, step):
            count = min(step, X - first)
            part = (t0, span, X, first, count)
            parts = pooling_kernels.run_parts(self.inputs, self.rows, part, cut, (s0, s1))
            total += parts.sum(1)
            if cells:
                pooling_kernels.run_cells(parts, picked, first, count, cut)
        # Each row's shares of all cells together are X / span.
        total *= span / X
        return picked.view(B, H, height, picture.width), total.view(B, H, s1 - s0)

    def pool_evenly(
        self,
        picture: Map,
        window: tuple[int, int, int, int],
        tile: tuple[int, int],
        cell: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """The same, where a tile holds whole cells, or a cell whole tiles."""
        from regard.ops.kernels import pooling_kernels

        t0, t1, s0, s1 = window
        (B, H), X, Y = self.inputs.q.shape[:2], picture.height, picture.width
        share = X * Y / ((t1 - t0) * (s1 - s0))
        size = (B * H, (t1 - t0) // cell[0], (s1 - s0) // cell[1])
        cells = torch.zeros(size, dtype=torch.float32, device=self.inputs.q.device)
        total: Tensor | None = None
        # So many rows at a time as leave memory for the sums by key.
        step = max(SCRATCH // (B * H * (s1 - s0)), 1) * tile[0]
        for first in range(t0, t1, step):
            part = (first, min(first + step, t1), s0, s1)
            row = (first - t0) // cell[0]
            # Not given a name, so that one part's sums are gone before the next are made.
            keys = pooling_kernels.run_grid(
                self.inputs, self.rows, part, tile, cell, cells, row, share
            ).sum(1)
            total = keys if total is None else total + keys
        assert total is not None, "a window is not empty"
        if size[1:] != (X, Y):
            cells = cells.view(B * H, X, size[1] // X, Y, size[2] // Y).sum((2, 4))
        return cells.view(B, H, X, Y), total.view(B, H, s1 - s0)


def whole_part(span: int, n_cells: int, tile: int) -> int:
    """How many rows (or keys) of one tile lie in one cell, where none lies in two; otherwise 0."""
    size, rest = divmod(span, n_cells)
    even = not rest and size and (tile % size == 0 or size % tile == 0)
    return min(size, tile) if even else 0


def cut_rows(span: int, height: int) -> tuple[int, int, int]:
    """Rows of a tile, how many cells it holds, and in how many such tiles one cell is cut.

    A map of `height` cells over `span` rows: where rows are shared by two cells, tiles overlap.
    """
    shared = 0 if span % height == 0 else 2
    tall = -(-span // height)
    wanted = max(CELLS * tall + shared, 16)
    rows = min(ROWS, 2 ** (wanted - 1).bit_length())
    cells = min(CELLS, (rows - shared) * height // span)
    return (rows, cells, 1) if cells else (rows, 1, -(-(tall + shared) // rows))
