"""The Triton side of `pooling.py`: this module needs triton, and is imported where it runs.

Letters: as in `seeing_kernels.py`; X, Y cells of a map down and across, x, y some of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.kernels.inputs import Inputs, RowSums
from regard.ops.kernels.row_stats_kernels import _open, _product


@triton.jit
def _weights(
    q_td, k_head, s, lo_t, hi_t, max_t, share_t, edged, k_s, k_d, S, D, bits, cap_bits,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The weights of some queries on the keys s, (s, t).

    Tiles stand on their side, keys down and rows across: so a sum over rows stays inside a warp.
    edged: whether some row does not see all of these keys.
    """
    d = tl.arange(0, WIDTH)
    k_sd = tl.load(
        k_head + s[:, None].to(tl.int64) * k_s + d[None, :] * k_d,
        mask=(s < S)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    x_st = _product(k_sd, q_td, bits, cap_bits, CAPPED, EXACT)
    w_st = tl.exp2(x_st - max_t[None, :]) * share_t[None, :]
    if edged:
        seen_st = (s[:, None] >= lo_t[None, :]) & (s[:, None] < hi_t[None, :])
        w_st = tl.where(seen_st, w_st, 0.0)
    return w_st


@triton.jit
def _parts(
    q, k, lo, hi, maxima, sums, out,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, S, D, bits, cap_bits,
    t0, span, X, x_first, n_cells, n_slices, s0, s1,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    CELLS: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """For some rows of one head: the mean over each cell's rows, key by key.

    A tile of rows holds CELLS whole cells; or, where a cell is higher, one of its n_slices slices.
    """
    groups = tl.cdiv(n_cells, CELLS) * n_slices
    n_heads = tl.num_programs(0) // groups
    group = groups - 1 - tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    b, h = head // H, head % H
    x0 = x_first + group // n_slices * CELLS
    past = tl.minimum(x0 + CELLS, x_first + n_cells)
    begin = t0 + (x0.to(tl.int64) * span // X).to(tl.int32) + group % n_slices * ROWS
    end = t0 + tl.cdiv(past.to(tl.int64) * span, X).to(tl.int32)
    t = begin + tl.arange(0, ROWS)
    real_t = t < end
    q_td, lo_t, hi_t = _open(q, lo, hi, b, h, t, real_t, q_b, q_h, q_t, q_d, bounds_b, D, WIDTH)
    k_head = k + b * k_b + (h // R) * k_g
    lo_t, hi_t = tl.maximum(lo_t, s0), tl.minimum(hi_t, s1)
    row_t = head * T + t
    max_t = tl.load(maxima + row_t, mask=real_t, other=0.0)
    share_t = 1.0 / tl.load(sums + row_t, mask=real_t, other=1.0)
    first = s0 + (tl.min(tl.where(hi_t > lo_t, lo_t, s1), 0) - s0) // KEYS * KEYS
    last = tl.max(hi_t, 0)
    whole, ends = tl.max(lo_t, 0), tl.min(tl.where(real_t, hi_t, s1), 0)
    n_t = (t - t0).to(tl.int64) * X
    width = (s1 - s0).to(tl.int64)
    for start in range(first, last, KEYS):
        s = start + tl.arange(0, KEYS)
        w_st = _weights(
            q_td, k_head, s, lo_t, hi_t, max_t, share_t, (start < whole) | (start + KEYS > ends),
            k_s, k_d, S, D, bits, cap_bits, WIDTH, CAPPED, EXACT,
        )  # fmt: skip
        for c in tl.static_range(CELLS):
            x = (x0 + c).to(tl.int64) * span
            part_t = tl.minimum(x + span, n_t + X) - tl.maximum(x, n_t)
            part_t = tl.where(real_t, tl.maximum(part_t, 0), 0)
            p_st = w_st * (part_t.to(tl.float32) / span)[None, :]
            # No row has a part in a cell beyond the last: its sums are zeros.
            row = (head * groups + group) * CELLS + c
            tl.store(out + row * width + (s - s0), tl.sum(p_st, 1), mask=s < s1)


@triton.jit
def _grid(
    q, k, lo, hi, maxima, sums, cells, bands,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, S, D, bits, cap_bits, t0, t1, s0, s1, x_first, height, share,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
    CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sums of the weights of some rows of one head: over cells of TALL × WIDE, and key by key.

    Tiles hold whole cells, so that no weight is shared between two.
    """
    n_bands = tl.cdiv(t1 - t0, ROWS)
    n_heads = tl.num_programs(0) // n_bands
    band = n_bands - 1 - tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    b, h = head // H, head % H
    t = t0 + band * ROWS + tl.arange(0, ROWS)
    real_t = t < t1
    q_td, lo_t, hi_t = _open(q, lo, hi, b, h, t, real_t, q_b, q_h, q_t, q_d, bounds_b, D, WIDTH)
    lo_t, hi_t = tl.maximum(lo_t, s0), tl.minimum(hi_t, s1)
    k_head = k + b * k_b + (h // R) * k_g
    row_t = head * T + t
    max_t = tl.load(maxima + row_t, mask=real_t, other=0.0)
    share_t = tl.where(real_t, 1.0 / tl.load(sums + row_t, mask=real_t, other=1.0), 0.0)
    first = s0 + (tl.min(tl.where(hi_t > lo_t, lo_t, s1), 0) - s0) // KEYS * KEYS
    last = tl.max(hi_t, 0)
    whole, ends = tl.max(lo_t, 0), tl.min(tl.where(real_t, hi_t, s1), 0)
    width = (s1 - s0).to(tl.int64)
    across = tl.cdiv(s1 - s0, WIDE)
    x = band * (ROWS // TALL) + tl.arange(0, ROWS // TALL)
    real_x = t0 + x * TALL < t1
    cell_x = (head * height + x_first + x) * across
    for start in range(first, last, KEYS):
        s = start + tl.arange(0, KEYS)
        w_st = _weights(
            q_td, k_head, s, lo_t, hi_t, max_t, share_t, (start < whole) | (start + KEYS > ends),
            k_s, k_d, S, D, bits, cap_bits, WIDTH, CAPPED, EXACT,
        )  # fmt: skip
        w_sx = tl.sum(tl.reshape(w_st, (KEYS, ROWS // TALL, TALL)), 2)
        tl.store(bands + (head * n_bands + band) * width + (s - s0), tl.sum(w_sx, 1), mask=s < s1)
        w_yx = tl.sum(tl.reshape(w_sx, (KEYS // WIDE, WIDE, ROWS // TALL)), 1)
        y = (start - s0) // WIDE + tl.arange(0, KEYS // WIDE)
        real_yx = (y < across)[:, None] & real_x[None, :]
        tl.store(cells + cell_x[None, :] + y[:, None], w_yx * share, mask=real_yx)


@triton.jit
def _cells(
    parts, cells, n_slices, n_rows, n_cells, height, x_first, Y, span, wide,
    GROUP: tl.constexpr, ACROSS: tl.constexpr, KEYS: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Cells of a map from the means over their rows: the mean over each cell's keys."""
    blocks = tl.cdiv(Y, ACROSS)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head, x = row // n_cells, row % n_cells
    y = block * ACROSS + tl.arange(0, ACROSS)
    if not SMALL:
        y = y.to(tl.int64)
    begin_y = y * span // Y
    total_y = tl.zeros((ACROSS,), tl.float32)
    for part in range(0, n_slices):
        group = x // GROUP * n_slices + part
        from_row = parts + ((head * n_rows + group) * GROUP + x % GROUP) * span
        for start in range(0, wide, KEYS):
            n_ys = begin_y[:, None] + start + tl.arange(0, KEYS)[None, :]
            at_ys = y[:, None] * span
            shared = tl.minimum(at_ys + span, n_ys * Y + Y) - tl.maximum(at_ys, n_ys * Y)
            there = (shared > 0) & (y < Y)[:, None] & (n_ys < span)
            p_ys = tl.load(from_row + n_ys, mask=there, other=0.0)
            total_y += tl.sum(tl.where(there, p_ys * (shared.to(tl.float32) / span), 0.0), 1)
    tl.store(cells + (head * height + x_first + x) * Y + y, total_y, mask=y < Y)


def run_parts(
    inputs: Inputs,
    rows: RowSums,
    cells: tuple[int, int, int, int, int],
    cut: tuple[int, int, int],
    keys: tuple[int, int],
) -> Tensor:
    """Means over the rows of cells, (B · H, parts, keys).

    cells: the first query and the queries of the whole map, its height, the first cell and how many
    of them. cut: rows of a tile, cells in it, slices of a cell.
    """
    (B, H, T, D), S = inputs.q.shape, inputs.k.shape[2]
    t0, span, height, first, n_cells = cells
    n_rows, n_in_tile, n_slices = cut
    groups = triton.cdiv(n_cells, n_in_tile) * n_slices
    size = (B * H, groups * n_in_tile, keys[1] - keys[0])
    out = torch.zeros(size, dtype=torch.float32, device=inputs.q.device)
    launch: Any = _parts[(B * H * groups,)]
    launch(
        *inputs.tensors(), *rows.tensors(), out,
        *inputs.strides(), H, T, S, D, inputs.factor, inputs.cap,
        t0, span, height, first, n_cells, n_slices, *keys,
        **inputs.options(), ROWS=n_rows, KEYS=32 if inputs.exact else 64, CELLS=n_in_tile,
        EXACT=inputs.exact, num_warps=4,
    )  # fmt: skip
    return out


def run_grid(
    inputs: Inputs,
    rows: RowSums,
    window: tuple[int, int, int, int],
    tile: tuple[int, int],
    cell: tuple[int, int],
    cells: Tensor,
    first: int,
    share: float,
) -> Tensor:
    """Sums of the weights in a window by key, (B · H, bands, keys); times `share` into `cells`.

    tile, cell: rows and keys of each. cells, (B · H, X, Y), are filled from row `first` on, where
    any weight is seen.
    """
    (B, H, T, D), S = inputs.q.shape, inputs.k.shape[2]
    t0, t1, s0, s1 = window
    n_bands = triton.cdiv(t1 - t0, tile[0])
    bands = torch.zeros(B * H, n_bands, s1 - s0, dtype=torch.float32, device=inputs.q.device)
    launch: Any = _grid[(B * H * n_bands,)]
    launch(
        *inputs.tensors(), *rows.tensors(), cells, bands,
        *inputs.strides(), H, T, S, D, inputs.factor, inputs.cap,
        *window, first, cells.shape[1], share,
        **inputs.options(), ROWS=tile[0], KEYS=tile[1], TALL=cell[0], WIDE=cell[1],
        EXACT=inputs.exact, num_warps=4,
    )  # fmt: skip
    return bands


def run_cells(
    parts: Tensor, cells: Tensor, first: int, n_cells: int, cut: tuple[int, int, int]
) -> None:
    """Cells `first` onwards of each map in (B · H, X, Y), from the means over their rows."""
    _, n_in_tile, n_slices = cut
    heads, height, width = cells.shape
    span = parts.shape[2]
    # Cells that begin inside a key touch one key more.
    wide = triton.cdiv(span, width) + (span % width > 0)
    across, keys = 64, min(64, triton.next_power_of_2(wide))
    launch: Any = _cells[(heads * n_cells * triton.cdiv(width, across),)]
    launch(
        parts, cells, n_slices, parts.shape[1] // n_in_tile, n_cells, height, first, width, span,
        wide, GROUP=n_in_tile, ACROSS=across, KEYS=keys, SMALL=(span + 64) * (width + 64) < 2**31,
        num_warps=4,
    )  # fmt: skip
