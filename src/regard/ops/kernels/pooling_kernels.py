"""The Triton side of `pooling.py`: this module needs triton, and is imported where it runs.

Tiles are keys by rows, so that a sum over rows stays inside a warp. A program owns what it writes,
so nothing is added atomically, and sums are the same every time.

Letters: B batch, T queries, S keys, H query heads, D head width; X, Y cells of a map down and
across; t, s, x, y some of each, c some cells that a band of rows touches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.kernels.arguments import TileLists, options_of, rule_of, share, view
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.row_sums import RowSums
from regard.ops.kernels.tile_kernels import (
    biased,
    load_sums,
    load_tile,
    product,
    query_places,
    runs_by_keys,
    shown,
    slope_of,
    step,
    walk,
    weighed,
)
from regard.ops.kernels.tile_lists import list_tiles
from regard.ops.kernels.tiles import Tiles


class RowWeights(NamedTuple):
    """A number for each row, (B or 1, H or 1, T)."""

    at: Tensor
    b: int
    h: int
    t: int


class Cells(NamedTuple):
    """Means over cells, (B · H, X, Y); share: 1 / the number of weights in a cell."""

    at: Tensor
    height: int
    width: int
    share: float


@triton.jit
def _gather(
    state, start, s, k_sd, q, rule, sums, row_weights, cells, own, sizes,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr, MASKED: tl.constexpr,
    HIDES: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add the weights of rows from `start` on to what keys s receive, and write their cells."""
    sum_s, most_s, nans_s = state
    b, h, head, line = own
    T, S, D = sizes
    t = start + tl.arange(0, ROWS)
    q_td = load_tile(q, b, h, t, T, D, WIDTH, EVEN)
    max_t, scale_t = load_sums(sums, head * T + t, t < T)
    if row_weights is not None:
        at = row_weights.at + b * row_weights.b + h * row_weights.h + t * row_weights.t
        scale_t = scale_t * tl.load(at, mask=t < T, other=0.0).to(tl.float32)
    w_st = weighed(
        product(k_sd, tl.trans(q_td), EXACT), rule, b, h, t[None, :], s[:, None],
        max_t[None, :], scale_t[None, :], MASKED, T, S, HIDES, float("-inf") if MOST else 0.0,
    )  # fmt: skip
    if MOST:
        # How a maximum treats NaN depends on the device, so NaNs are tracked separately.
        nans_s = tl.maximum(nans_s, tl.max((w_st != w_st).to(tl.int32), 1))
        most_s = tl.maximum(most_s, tl.max(tl.where(w_st == w_st, w_st, float("-inf")), 1))
    elif cells is None:
        sum_s += tl.sum(w_st, 1)
    else:
        w_sx = tl.sum(tl.reshape(w_st, (KEYS, ROWS // TALL, TALL)), 2)
        sum_s += tl.sum(w_sx, 1)
        w_yx = tl.sum(tl.reshape(w_sx, (KEYS // WIDE, WIDE, ROWS // TALL)), 1)
        x = start // TALL + tl.arange(0, ROWS // TALL)
        y = line * (KEYS // WIDE) + tl.arange(0, KEYS // WIDE)
        real_yx = (y < cells.width)[:, None] & (x < cells.height)[None, :]
        at_x = cells.at + (head * cells.height + x) * cells.width
        tl.store(at_x[None, :] + y[:, None], w_yx * cells.share, mask=real_yx)
    return sum_s, most_s, nans_s


@triton.jit(do_not_specialize=["H", "T", "S"])
def _by_keys(
    q, k, rule, lists, sums, row_weights, received, cells, H, T, S, D,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr, HIDES: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What some keys of one head get from all queries, and the cells of TALL × WIDE above them."""
    n_lines = tl.cdiv(S, KEYS)
    # Under a causal mask the first keys are seen by most, and begin first.
    n_heads = tl.num_programs(0) // n_lines
    line = tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    b, h = head // H, head % H
    s = line * KEYS + tl.arange(0, KEYS)
    k_sd = load_tile(k, b, h // R, s, S, D, WIDTH, EVEN)
    state = (
        tl.zeros((KEYS,), tl.float32),
        tl.full((KEYS,), float("-inf"), tl.float32),
        tl.zeros((KEYS,), tl.int32),
    )
    own = (b, h, head, line)
    sizes = (T, S, D)
    if lists is None:
        first, whole, ends, n_full, n_before, n_mixed = runs_by_keys(
            rule, b, line * KEYS, T, S, ROWS, KEYS
        )
        for n in range(0, n_full):
            state = _gather(
                state, whole + n * ROWS, s, k_sd, q, rule, sums, row_weights, cells, own, sizes,
                ROWS, KEYS, WIDTH, TALL, WIDE, MOST, False, HIDES, EVEN, EXACT,
            )  # fmt: skip
        for n in range(0, n_mixed):
            start = tl.where(n < n_before, first + n * ROWS, ends + (n - n_before) * ROWS)
            state = _gather(
                state, start, s, k_sd, q, rule, sums, row_weights, cells, own, sizes,
                ROWS, KEYS, WIDTH, TALL, WIDE, MOST, True, HIDES, EVEN, EXACT,
            )  # fmt: skip
    else:
        at = b * lists.b + h * lists.h + line
        listed = lists.tiles + at * lists.n
        for r in range(0, tl.load(lists.full + at)):
            for n in range(tl.load(listed + 2 * r), tl.load(listed + 2 * r + 1)):
                state = _gather(
                    state, n * ROWS, s, k_sd, q, rule, sums, row_weights, cells, own, sizes,
                    ROWS, KEYS, WIDTH, TALL, WIDE, MOST, False, HIDES, EVEN, EXACT,
                )  # fmt: skip
        for n in range(0, tl.load(lists.mixed + at)):
            start = tl.load(listed + lists.n - 1 - n) * ROWS
            state = _gather(
                state, start, s, k_sd, q, rule, sums, row_weights, cells, own, sizes,
                ROWS, KEYS, WIDTH, TALL, WIDE, MOST, True, HIDES, EVEN, EXACT,
            )  # fmt: skip
    sum_s, most_s, nans_s = state
    if MOST:
        sum_s = tl.where(nans_s > 0, float("nan"), most_s)
    tl.store(received + head * S + s, sum_s, mask=s < S)


@triton.jit(do_not_specialize=["heads", "T", "S"])
def _count(
    rule, lists, row_weights, counts, totals, heads, T, S,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """How many queries may see some keys, and the sum of the weights of these rows."""
    n_lines = tl.cdiv(S, KEYS)
    line = tl.program_id(0) % n_lines
    head = (tl.program_id(0) // n_lines).to(tl.int64)
    b, h = head // heads, head % heads
    s = line * KEYS + tl.arange(0, KEYS)
    count_s = tl.zeros((KEYS,), tl.int32)
    total_s = tl.zeros((KEYS,), tl.float32)
    own = b * lists.b + h * lists.h + line
    for n in range(0, tl.load(lists.full + own)):
        t = tl.load(lists.tiles + own * lists.n + n) // 2 * ROWS + tl.arange(0, ROWS)
        seen_st = shown(rule, b, h, t[None, :], s[:, None], T, S)
        if HIDES:
            x_st = tl.zeros((KEYS, ROWS), tl.float32)
            real_t = tl.minimum(t, T - 1)
            x_st = biased(
                x_st, rule, b, h, real_t[None, :], tl.minimum(s, S - 1)[:, None],
                slope_of(rule, h), query_places(rule, b, real_t[None, :], T, S), T, S,
            )  # fmt: skip
            seen_st = seen_st & (x_st != float("-inf"))
        count_s += tl.sum(seen_st.to(tl.int32), 1)
        if row_weights is not None:
            at = row_weights.at + b * row_weights.b + h * row_weights.h + t * row_weights.t
            weight_t = tl.load(at, mask=t < T, other=0.0).to(tl.float32)
            total_s += tl.sum(tl.where(seen_st, weight_t[None, :], 0.0), 1)
    tl.store(counts + head * S + s, count_s.to(tl.float32), mask=s < S)
    if row_weights is not None:
        tl.store(totals + head * S + s, total_s, mask=s < S)


@triton.jit(do_not_specialize=["H", "T", "S", "first_band", "n_bands", "n_touched"])
def _bands(
    q, k, rule, lists, sums, shares, parts, H, T, S, D, first_band, n_bands, n_touched,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    HIDES: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """For some rows of one head: the sums over each cell that they touch, key by key.

    shares: the part that each row has in each of these cells, (bands, c, rows).
    """
    n_heads = tl.num_programs(0) // n_bands
    # Under a causal mask the last rows are the longest, and begin first.
    n_band = n_bands - 1 - tl.program_id(0) // n_heads
    band = first_band + n_band
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    b, h = head // H, head % H
    t = band * ROWS + tl.arange(0, ROWS)
    q_td = load_tile(q, b, h, t, T, D, WIDTH, EVEN)
    max_t, scale_t = load_sums(sums, head * T + t, t < T)
    shares_at = shares + band.to(tl.int64) * n_touched * ROWS + tl.arange(0, ROWS)
    parts_at = parts + (head * n_bands + n_band) * n_touched * S
    run, count = walk(rule, lists, b, h, band, t, T, S, KEYS)
    for n in range(0, count):
        start, edged = step(lists, run, n, KEYS)
        s = start + tl.arange(0, KEYS)
        k_sd = load_tile(k, b, h // R, s, S, D, WIDTH, EVEN)
        w_st = weighed(
            product(k_sd, tl.trans(q_td), EXACT), rule, b, h, t[None, :], s[:, None],
            max_t[None, :], scale_t[None, :], edged, T, S, HIDES, 0.0,
        )  # fmt: skip
        for c in range(0, n_touched):
            share_t = tl.load(shares_at + c * ROWS)[None, :]
            # A row that has no part in the cell may be NaN.
            part_s = tl.sum(tl.where(share_t > 0.0, w_st * share_t, 0.0), 1)
            tl.store(parts_at + c * S.to(tl.int64) + s, part_s, mask=s < S)


@triton.jit(do_not_specialize=["first_band", "n_bands", "n_touched", "first_cell", "n_cells"])
def _cells(
    parts, cells, first_band, n_bands, n_touched, first_cell, n_cells, T, S, wide,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, KEYS: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Add the sums of some bands of rows to their cells, as means over each cell's keys."""
    Y = cells.width
    blocks = tl.cdiv(Y, ACROSS)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head, x = row // n_cells, first_cell + row % n_cells
    y = block * ACROSS + tl.arange(0, ACROSS)
    if not SMALL:
        y = y.to(tl.int64)
    begin_y = y * S // Y
    total_y = tl.zeros((ACROSS,), tl.float32)
    band = tl.maximum(x * T // cells.height // ROWS, first_band)
    last = tl.minimum((tl.cdiv((x + 1) * T, cells.height) - 1) // ROWS, first_band + n_bands - 1)
    for n in range(band, last + 1):
        c = x - n * ROWS * cells.height // T
        from_row = parts + ((head * n_bands + n - first_band) * n_touched + c) * S
        for start in range(0, wide, KEYS):
            n_ys = begin_y[:, None] + start + tl.arange(0, KEYS)[None, :]
            at_ys = y[:, None] * S
            shared = tl.minimum(at_ys + S, n_ys * Y + Y) - tl.maximum(at_ys, n_ys * Y)
            there = (shared > 0) & (y < Y)[:, None] & (n_ys < S)
            p_ys = tl.load(from_row + n_ys, mask=there, other=0.0)
            total_y += tl.sum(tl.where(there, p_ys * (shared.to(tl.float32) / S), 0.0), 1)
    at = cells.at + (head * cells.height + x) * Y + y
    tl.store(at, tl.load(at, mask=y < Y, other=0.0) + total_y, mask=y < Y)


def run_by_keys(
    given: Rendered,
    sums: RowSums,
    tiles: Tiles,
    row_weights: Tensor | None = None,
    most: bool = False,
    cells: tuple[Cells, int, int] | None = None,
) -> Tensor:
    """The sum over queries of what each key gets, or the maximum (`most`), (B, H, S).

    most: -inf where no query sees a key. cells: to fill where anything is seen; rows and keys of
    one.
    """
    (B, H, T, D), S = given.q.shape, given.k.shape[2]
    rule = rule_of(given)
    received = torch.empty(B, H, S, dtype=torch.float32, device=given.q.device)
    to, tall, wide = cells or (None, tiles.rows, tiles.keys)
    lists = None
    if any(part is not None for part in (rule.interval, rule.ids, rule.words)):
        lists = list_tiles(rule, given.shape, tiles[:2], True, given.q.device)
    launch: Any = _by_keys[(B * H * triton.cdiv(S, tiles.keys),)]
    launch(
        view(given.q), view(given.k), rule, lists, sums,
        _row_weights(row_weights), received, to, H, T, S, D,
        **options_of(given), ROWS=tiles.rows, KEYS=tiles.keys, TALL=tall, WIDE=wide, MOST=most,
        HIDES=given.hides, **tiles.options(),
    )  # fmt: skip
    return received


def run_count(given: Rendered, row_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """How many queries may see each key, (B or 1, H or 1, S), and the sum of their row weights."""
    (B, H, T, _), S = given.q.shape, given.k.shape[2]
    rule, tiles = rule_of(given), Tiles(64, 64, 4, 1)
    lists = list_tiles(rule, given.shape, tiles[:2], True, given.q.device, in_order=True)
    weights = _row_weights(row_weights)
    dense, band = (rule.dense, rule.band) if given.hides else (None, None)
    by_sample = [x.b for x in (lists, weights, dense) if x is not None]
    by_head = [x.h for x in (lists, weights, dense, band) if x is not None]
    shape = (B if any(by_sample) else 1, H if any(by_head) else 1, S)
    counts = torch.empty(shape, dtype=torch.float32, device=given.q.device)
    totals = None if weights is None else torch.empty_like(counts)
    launch: Any = _count[(shape[0] * shape[1] * triton.cdiv(S, tiles.keys),)]
    launch(
        rule, lists, weights, counts, totals, shape[1], T, S,
        ROWS=tiles.rows, KEYS=tiles.keys, HIDES=given.hides, num_warps=tiles.warps,
    )  # fmt: skip
    return counts, totals


def _row_weights(rows: Tensor | None) -> RowWeights | None:
    return (
        None if rows is None else RowWeights(rows, share(rows, 0), share(rows, 1), rows.stride(2))
    )


class Bands(NamedTuple):
    """Bands of rows that are pooled together.

    n_touched: the most cells that a band touches. shares: the part of each row in each of these,
    (all bands, cells, rows). lists: the tiles of all bands.
    """

    first: int
    n_bands: int
    n_touched: int
    shares: Tensor
    lists: TileLists | None


def run_bands(given: Rendered, sums: RowSums, tiles: Tiles, bands: Bands) -> Tensor:
    """Sums over the rows of the cells that bands touch, (B · H, bands, cells, S)."""
    (B, H, T, D), S = given.q.shape, given.k.shape[2]
    size = (B * H, bands.n_bands, bands.n_touched, S)
    parts = torch.zeros(size, dtype=torch.float32, device=given.q.device)
    launch: Any = _bands[(B * H * bands.n_bands,)]
    launch(
        view(given.q), view(given.k), rule_of(given), bands.lists, sums,
        bands.shares, parts, H, T, S, D, bands.first, bands.n_bands, bands.n_touched,
        **options_of(given), ROWS=tiles.rows, KEYS=tiles.keys, HIDES=given.hides,
        **tiles.options(),
    )  # fmt: skip
    return parts


def run_cells(
    parts: Tensor, cells: Cells, bands: Bands, some: tuple[int, int], span: tuple[int, int]
) -> None:
    """Add the bands' sums to the cells `some`; span: queries of the map, rows of a band."""
    S = parts.shape[3]
    # Cells that begin inside a key touch one key more.
    wide = triton.cdiv(S, cells.width) + (S % cells.width > 0)
    across, keys = 64, min(64, triton.next_power_of_2(wide))
    n_cells = some[1] - some[0]
    launch: Any = _cells[(len(parts) * n_cells * triton.cdiv(cells.width, across),)]
    launch(
        parts, cells, bands.first, bands.n_bands, bands.n_touched, some[0], n_cells, span[0], S,
        wide, ROWS=span[1], ACROSS=across, KEYS=keys, num_warps=4,
        SMALL=(S + 64) * (cells.width + 64) < 2**31,
    )  # fmt: skip
