"""What is asked about the weights of many queries, as Triton kernels: two passes, no matrix.

Why: the tiles of `blockwise.py` are torch's operations, each of which goes through memory. On a GPU
that costs many times what attention itself costs.

How: the first pass keeps each row's running sum and, beside it, whatever is asked about rows. The
second knows these sums, and so every weight alone. It walks bands of rows along the keys and writes
down, key by key, the mean over the rows of each cell of the map; the sum of these is what a key
receives, and their means over the keys are the cells. Where cells and tiles divide evenly, as they
do in a text of 8,192 tokens and a map of 256 × 256, it sums the cells at once. The largest weights
of rows are found in a walk of their own. Which keys a row sees must be one interval, as masks made
of Causal, Window, Lengths and documents have it.

Left out: gradients; dropout, which weights do not know of; biases, and masks that are no interval,
which `blockwise` takes.

Letters: B batch, T queries, S keys, H query heads, D head width; X, Y cells of a map.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.attention.kernels.bounds import Bounds, find_bounds
from regard.attention.rule import Rule
from regard.attention.secondpass import Weights
from regard.attention.wants import Map, Observation, Peak, Received, Top, Wants

ROOM = 2**27
"""Numbers held between the second pass and the cells of a map."""
ROWS = 128
"""The most rows that a program of the second pass takes."""
KEYS = 64
"""The keys that it takes at a time, where cells and tiles divide evenly; half, in float32."""
CELLS = 16
"""The most cells, one above the other, whose rows it sums at once."""
MOST_TOP = 32
"""The most of the largest weights of a row that the kernel keeps; more are found in tiles."""

BITS = 1.0 / math.log(2.0)
"""From nats to bits, in which the kernels count."""


def by_kernels(
    q: Tensor,
    k: Tensor,
    rule: Rule,
    sinks: Tensor | None,
    wants: Wants,
    nan_rows: Tensor | None,
    output: Tensor | None,
) -> Observation:
    """Every want but `weights` and `mass`, beside an output made elsewhere."""
    from regard.attention.kernels import seeing_kernels

    bounds = find_bounds(rule, q.device)
    assert bounds is not None, "a call without bounds is refused"
    nan_rows = None if nan_rows is None else nan_rows.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    shape = q.shape[:3]
    asked = [name for name in ("entropy", "distance", "peak") if getattr(wants, name)]
    floats = ["tops", "sums", "lse", *asked]
    made = {name: torch.empty(shape, dtype=torch.float32, device=q.device) for name in floats}
    if wants.peak:
        made["key"] = torch.empty(shape, dtype=torch.int64, device=q.device)
    numbers = in_bits(rule, q.shape[3])
    seeing_kernels.run_rows(q, k, bounds, sinks, nan_rows, made, numbers)
    answers: dict[str, Any] = {name: made[name] for name in ("entropy", "distance") if name in made}
    answers["lse"] = made["lse"] if wants.lse else None
    answers["peak"] = Peak(made["peak"], made["key"]) if wants.peak else None
    rows = made["tops"], made["sums"], nan_rows
    answers |= _Pooling(q, k, bounds, numbers, rows).answer(wants, rule)
    others = replace(wants, received=False, map=None)
    if wants.top is not None and wants.top <= MOST_TOP:
        answers["top"] = Top(*seeing_kernels.run_largest(q, k, bounds, rows, numbers, wants.top))
        others = replace(others, top=None)
    if others.second_pass():
        answers |= Weights(q, k, rule, made["tops"] / BITS, made["sums"], nan_rows).tell(others)
    return Observation(output, **answers)


def in_bits(rule: Rule, width: int) -> tuple[float, float]:
    """What products of q and k are multiplied by, and the softcap, 0 for none."""
    return rule.factor(width) * BITS, (rule.softcap or 0.0) * BITS


def sum_singles(
    q: Tensor, k: Tensor, rule: Rule, bounds: Bounds, lse_bht: Tensor, keys_nt: Tensor
) -> Tensor:
    """Sums over all queries of each one's weight on the key named for it, (N, B, H), float64.

    A key of -1 names none; keys_nt is int32. The rule must be one that `by_kernels` takes.
    """
    from regard.attention.kernels import seeing_kernels

    parts = seeing_kernels.run_singles(
        q, k, bounds, lse_bht.contiguous(), keys_nt.contiguous(), in_bits(rule, q.shape[3])
    )
    return parts.sum(-1, dtype=torch.float64).view(len(keys_nt), *q.shape[:2])


class _Pooling:
    """The second pass: maps, and what keys receive."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        bounds: Bounds,
        numbers: tuple[float, float],
        rows: tuple[Tensor, Tensor, Tensor | None],
    ) -> None:
        self.q, self.k, self.bounds, self.numbers, self.rows = q, k, bounds, numbers, rows

    def answer(self, wants: Wants, rule: Rule) -> dict[str, Any]:
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
            seen_by = self.bounds.seen_by[:, None].expand(total.shape).contiguous()
            found["received"] = Received(total, seen_by)
        return found

    def pool(
        self, picture: Map, window: tuple[int, int, int, int], cells: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The cells of a map (B, H, X, Y), where asked for, and all that its keys receive in it."""
        from regard.attention.kernels import seeing_kernels

        t0, t1, s0, s1 = window
        (B, H), span, X = self.q.shape[:2], t1 - t0, picture.height
        tile = ROWS, KEYS // 2 if self.q.dtype == torch.float32 else KEYS
        tall, wide = whole_part(span, X, tile[0]), whole_part(s1 - s0, picture.width, tile[1])
        if cells and tall and wide:
            return self.pool_evenly(picture, window, tile, (tall, wide))
        cut = cut_rows(span, X)
        _, n_in_tile, n_slices = cut
        height = X if cells else 0
        made = torch.empty(B * H, height, picture.width, dtype=torch.float32, device=self.q.device)
        total = torch.zeros(B * H, s1 - s0, dtype=torch.float32, device=self.q.device)
        # So many cells at a time as leave the sums room, and whole tiles of them.
        step = ROOM // (B * H * (s1 - s0) * n_slices) // n_in_tile * n_in_tile
        step = max(step, n_in_tile)
        for first in range(0, X, step):
            count = min(step, X - first)
            parts = seeing_kernels.run_parts(
                self.q,
                self.k,
                self.bounds,
                self.rows,
                self.numbers,
                (t0, span, X, first, count),
                cut,
                (s0, s1),
            )
            total += parts.sum(1)
            if cells:
                seeing_kernels.run_cells(parts, made, first, count, cut)
        # Each row's shares of all cells together are X / span.
        total *= span / X
        return made.view(B, H, height, picture.width), total.view(B, H, s1 - s0)

    def pool_evenly(
        self,
        picture: Map,
        window: tuple[int, int, int, int],
        tile: tuple[int, int],
        cell: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """The same, where a tile holds whole cells, or a cell whole tiles."""
        from regard.attention.kernels import seeing_kernels

        t0, t1, s0, s1 = window
        (B, H), X, Y = self.q.shape[:2], picture.height, picture.width
        share = X * Y / ((t1 - t0) * (s1 - s0))
        size = (B * H, (t1 - t0) // cell[0], (s1 - s0) // cell[1])
        made = torch.zeros(size, dtype=torch.float32, device=self.q.device)
        total: Tensor | None = None
        # So many rows at a time as leave the sums by key room.
        step = max(ROOM // (B * H * (s1 - s0)), 1) * tile[0]
        for first in range(t0, t1, step):
            part = (first, min(first + step, t1), s0, s1)
            bands = seeing_kernels.run_grid(
                self.q,
                self.k,
                self.bounds,
                self.rows,
                self.numbers,
                part,
                tile,
                cell,
                made,
                (first - t0) // cell[0],
                share,
            ).sum(1)
            total = bands if total is None else total + bands
        assert total is not None, "a window is not empty"
        if size[1:] != (X, Y):
            made = made.view(B * H, X, size[1] // X, Y, size[2] // Y).sum((2, 4))
        return made.view(B, H, X, Y), total.view(B, H, s1 - s0)


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
