"""Maps of the weights and received attention, by Triton kernels that know the row sums.

How: a program takes some keys and walks the queries that see them, so what a key receives stays in
registers until the end. Where the cells of a map and the tiles of the walk divide evenly, as they
do in a text of 8,192 tokens and a map of 256 × 256, each tile also sums its cells. Otherwise bands
of rows walk along the keys, and store for each key the sum of their weights in each cell: added up
this is what a key receives, and the means over the keys are the cells. On a Hopper GPU the plainest
calls are pooled by a kernel of their own (`pooling_hopper_kernels.py`).

Letters: B batch, T queries, S keys, H query heads; X, Y cells of a map down and across.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.ops.kernels import flash_hopper
from regard.ops.kernels.arguments import rule_of
from regard.ops.kernels.rendered import Rendered, crop
from regard.ops.kernels.row_sums import RowSums, crop_both, order_tiles
from regard.ops.kernels.tiles import Tiles, tiles_of
from regard.ops.shape import Tile

if TYPE_CHECKING:
    from regard.ops.kernels.pooling_kernels import Cells

SCRATCH = 2**26
"""The most numbers held at a time between the bands of rows and the cells of a map."""
HOPPER = (16, 64)
"""The most rows and keys that the kernel for Hopper sums in one cell."""
SMALLEST = 8
"""The least rows and keys in a cell of that kernel."""


def receive(
    given: Rendered, sums: RowSums, rows: Tensor | None, by: str, queries: tuple[int, int]
) -> Tensor:
    """The sum over queries of row weight × weight, (B, H, S); or the maximum, -inf where none sees.

    rows: a weight for each row, (B or 1, H or 1, T). queries: first and past the last that count.
    """
    from regard.ops.kernels import pooling_kernels

    given, sums = crop_both(given, sums, Tile(*queries, 0, given.shape.S))
    rows = None if rows is None else rows[..., slice(*queries)]
    if rows is None and by != "max" and suits_hopper(given):
        return _receive_on_hopper(given, sums, None)
    return pooling_kernels.run_by_keys(given, sums, tiles_of("pool", given), rows, by == "max")


def suits_hopper(given: Rendered) -> bool:
    """Whether the kernel for Hopper accepts a call: scaled products, no intervals of rows."""
    if not flash_hopper.runs_on(given.q.device) or not flash_hopper.suits_scores(given):
        return False
    other = (given.cap, given.slopes, given.lo, given.query_ids)
    return all(part is None for part in other)


def _receive_on_hopper(
    given: Rendered, sums: RowSums, cells: tuple[Cells, int, int] | None
) -> Tensor:
    """The sum over queries of the weights, (B, H, S); cells: to fill, rows and keys of one."""
    from regard.ops.kernels import pooling_hopper_kernels

    (B, H, _, S), device = given.shape, given.q.device
    received = torch.empty(B, H, S, dtype=torch.float32, device=device)
    pooling_hopper_kernels.run_received(given, sums, received, cells)
    return received


def count_queries(
    given: Rendered, rows: Tensor | None, queries: tuple[int, int]
) -> tuple[Tensor, Tensor | None]:
    """How many queries may see each key, (B, H, S), and the sum of the weights of these rows."""
    from regard.ops.kernels import pooling_kernels

    given = crop(given, Tile(*queries, 0, given.shape.S))
    rows = None if rows is None else rows[..., slice(*queries)]
    if rows is None and given.query_ids is None and given.words is None and not given.hides:
        counts, totals = count_intervals(given), None
    else:
        counts, totals = pooling_kernels.run_count(given, rows)
    B, H, _, S = given.shape
    counts = counts.expand(B, H, S).contiguous()
    return counts, None if totals is None else totals.expand(B, H, S).contiguous()


def count_intervals(given: Rendered) -> Tensor:
    """How many queries may see each key, (B or 1, 1, S), where each sees one interval."""
    _, _, T, S = given.shape
    if any(x is not None for x in (given.first, given.past, given.lo, given.hi)):
        return _count_between(given, T, S)
    return _count_window(T, S, given.left, given.right, given.q.device)


def _count_window(
    T: int, S: int, left: int | None, right: int | None, device: torch.device
) -> Tensor:
    """`count_intervals` of a window alone: query t sees the keys from t + S - T - left on."""
    own = torch.arange(S, device=device) - (S - T)
    past = torch.full_like(own, T) if left is None else (own + (left + 1)).clamp_(0, T)
    if right is not None:
        past = (past - (own - right).clamp_(0, T)).clamp_(min=0)
    return past.float()[None, None]


def _count_between(given: Rendered, T: int, S: int) -> Tensor:
    t = torch.arange(T, device=given.q.device)[None]
    lo, hi = torch.zeros_like(t), torch.full_like(t, S)
    if given.left is not None:
        lo = t + (S - T - given.left)
    if given.right is not None:
        hi = t + (S - T + given.right + 1)
    if given.first is not None and given.past is not None:
        lo, hi = torch.maximum(lo, given.first[:, None]), torch.minimum(hi, given.past[:, None])
    if given.lo is not None and given.hi is not None:
        lo, hi = torch.maximum(lo, given.lo[:, :T]), torch.minimum(hi, given.hi[:, :T])
    lo = lo.clamp(0, S)
    hi = torch.maximum(lo, hi.clamp(0, S))
    edges = torch.zeros(len(lo), S + 1, dtype=torch.int64, device=lo.device)
    one = torch.ones_like(lo)
    edges.scatter_add_(1, lo, one).scatter_add_(1, hi, -one)
    return edges[:, None, :-1].cumsum(2).float()


def pool(given: Rendered, sums: RowSums, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A map of X × Y cells, (B, H, X, Y), and what its keys receive in all, (B, H, S)."""
    (_, _, T, S), (X, Y) = given.shape, size
    tall, wide = whole_part(T, X, HOPPER[0]), whole_part(S, Y, HOPPER[1])
    # It counts the cells of a head in 32 bits.
    fits = min(tall, wide) >= SMALLEST and (T // tall) * (S // wide) < 2**31
    if fits and suits_hopper(given):
        return _pool_evenly(given, sums, size, None, (tall, wide))
    tiles = tiles_of("pool", given)
    tall, wide = whole_part(T, X, tiles.rows), whole_part(S, Y, tiles.keys)
    if tall and wide:
        return _pool_evenly(given, sums, size, tiles, (tall, wide))
    return _pool_unevenly(given, sums, size, tiles_of("search", given))


def _pool_evenly(
    given: Rendered,
    sums: RowSums,
    size: tuple[int, int],
    tiles: Tiles | None,
    cell: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """`pool` where a tile holds whole cells, or a cell whole tiles; tiles: None on Hopper."""
    from regard.ops.kernels import pooling_kernels

    (B, H, T, S), (X, Y) = given.shape, size
    height, width = T // cell[0], S // cell[1]
    cells = torch.zeros(B, H, height, width, dtype=torch.float32, device=given.q.device)
    to = pooling_kernels.Cells(cells, height, width, X * Y / (T * S))
    if tiles is None:
        total = _receive_on_hopper(given, sums, (to, *cell))
    else:
        total = pooling_kernels.run_by_keys(given, sums, tiles, cells=(to, *cell))
    if (height, width) != size:
        cells = cells.view(B, H, X, height // X, Y, width // Y).sum((3, 5))
    return cells, total


def _pool_unevenly(
    given: Rendered, sums: RowSums, size: tuple[int, int], tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """`pool` where rows or keys may be shared by two cells."""
    from regard.ops.kernels import pooling_kernels

    (B, H, T, S), (X, Y), rows = given.shape, size, tiles.rows
    device = given.q.device
    cells = torch.zeros(B, H, X, Y, dtype=torch.float32, device=device)
    total = torch.zeros(B, H, S, dtype=torch.float32, device=device)
    to = pooling_kernels.Cells(cells, X, Y, 1.0)
    shares = row_shares(T, X, rows, device)
    n_bands, n_touched, _ = shares.shape
    lists = order_tiles(given, rule_of(given), tiles)
    # As many bands at a time as fit into SCRATCH.
    step = max(SCRATCH // (B * H * S * n_touched), 1)
    for first in range(0, n_bands, step):
        count = min(step, n_bands - first)
        bands = pooling_kernels.Bands(first, count, n_touched, shares, lists)
        past = min((first + count) * rows, T)
        some = first * rows * X // T, -(-past * X // T)
        parts = pooling_kernels.run_bands(given, sums, tiles, bands)
        pooling_kernels.run_cells(parts, to, bands, some, (T, rows))
        # Each row's shares of all cells together are X / T.
        total += parts.sum((1, 2)).view(B, H, S) * (T / X)
        # Freed before the next ones are allocated.
        del parts
    return cells, total


def row_shares(T: int, X: int, rows: int, device: torch.device) -> Tensor:
    """The part of each cell that each row of a band covers, (bands, cells touched, rows).

    Cell x covers the rows x·T/X onwards, and is counted in units of 1/X, so that it is exact.
    """
    n_touched = min(X, -(-rows * X // T) + 1)
    band = torch.arange(-(-T // rows), device=device)[:, None, None]
    x = band * rows * X // T + torch.arange(n_touched, device=device)[:, None]
    t = band * rows + torch.arange(rows, device=device)
    shared = torch.minimum((x + 1) * T, (t + 1) * X) - torch.maximum(x * T, t * X)
    return shared.clamp(min=0).masked_fill(t >= T, 0).float() / T


def whole_part(span: int, n_cells: int, tile: int) -> int:
    """How many rows (or keys) of one tile lie in one cell, where none lies in two; otherwise 0."""
    size, rest = divmod(span, n_cells)
    even = not rest and size and (tile % size == 0 or size % tile == 0)
    return min(size, tile) if even else 0
