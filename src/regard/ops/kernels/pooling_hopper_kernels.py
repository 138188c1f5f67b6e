"""What keys receive, and the cells of maps, on a Hopper GPU, in Gluon.

Why: `pooling_kernels.py` adds up the cells of each tile across warps, who wait for each other, and
has the tensor cores wait for all of them. Here no number leaves its warp before it is told: cells
are 16 keys wide, which is what a warp has, and are joined afterwards; and what a key receives stays
apart in the four threads that share a row of products, until the end. Two programs share a
multiprocessor, so that one multiplies while the other weighs. Tiles of rows come by TMA.

Left out: weights of rows, maxima, caps, biases, and masks that are told by lists, which
`pooling_kernels.py` has.

This module needs triton, and is imported where it runs.

Letters: B batch, T queries, S keys, H query heads, R query heads a key head; t, s sizes of a tile;
x, y its cells down and across, c threads that share a row of products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from regard.ops.kernels import tile_kernels
from regard.ops.kernels.arguments import rule_of
from regard.ops.kernels.flash_hopper_kernels import describe
from regard.ops.kernels.hopper_tile_kernels import STAGES, bounds_of, load_tile, sync_threads
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.row_sums import RowSums

if TYPE_CHECKING:
    from regard.ops.kernels.pooling_kernels import Cells

ROWS = tl.constexpr(128)
KEYS = tl.constexpr(128)
WARP = tl.constexpr(16)
"""Keys of a warp."""
REGISTERS = 128
"""Of a thread: so two programs of two warpgroups share a multiprocessor."""


class RowScales(NamedTuple):
    """Maxima of rows and one by their sums; 0 of rows beyond the last, which so weigh 0."""

    maxima: Tensor
    scales: Tensor


runs_by_keys = gluon.jit(tile_kernels.runs_by_keys.fn)


@gluon.jit
def _first_row(n, run):
    """The first row of the n-th tile: the full ones first, then the mixed ones on either side."""
    n_full, n_before, first, whole, ends = run
    m = n - n_full
    edge = gl.where(m < n_before, first + m * ROWS, ends + (m - n_before) * ROWS)
    return gl.where(n < n_full, whole + n * ROWS, edge)


@gluon.jit
def _weigh(x_st, start, s, is_mixed, rule, rows, row, b, sizes, LAYOUT: gl.constexpr):
    """The weights of a tile of products, 0 where nothing is seen."""
    T, S = sizes
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    max_t = gl.load(rows.maxima + (row + start) + n)
    w_st = gl.exp2(x_st * rule.factor - gl.expand_dims(max_t, 0))
    w_st = w_st * gl.expand_dims(gl.load(rows.scales + (row + start) + n), 0)
    if is_mixed:
        lo_t, hi_t = bounds_of(rule, b, gl.minimum(start + n, T - 1), T, S)
        after_st = gl.expand_dims(s, 1) >= gl.expand_dims(lo_t, 0)
        seen_st = after_st & (gl.expand_dims(s, 1) < gl.expand_dims(hi_t, 0))
        w_st = gl.where(seen_st, w_st, 0.0)
    return w_st


@gluon.jit
def _write_cells(w_sxc, cells, head, start, key, TALL: gl.constexpr, WIDE: gl.constexpr):
    """Write the cells of a tile."""
    Y: gl.constexpr = KEYS // WIDE
    X: gl.constexpr = ROWS // TALL
    w_yx = gl.sum(gl.sum(w_sxc.reshape([Y, WIDE, X, 4]), 1), 2)
    x = start // TALL + gl.arange(0, X, layout=gl.SliceLayout(0, w_yx.type.layout))
    y = key // WIDE + gl.arange(0, Y, layout=gl.SliceLayout(1, w_yx.type.layout))
    real_yx = gl.expand_dims(y < cells.width, 1) & gl.expand_dims(x < cells.height, 0)
    at_yx = gl.expand_dims(x * cells.width, 0) + gl.expand_dims(y, 1)
    to = cells.at + head.to(gl.int64) * cells.height * cells.width
    gl.store(to + at_yx, w_yx * cells.share, mask=real_yx)


@gluon.jit(do_not_specialize=["H", "T", "S"])
def _received(
    q, k, rule, rows, received, cells, H, T, S,
    R: gl.constexpr, WIDTH: gl.constexpr, TALL: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """What 128 keys of one head get from all queries, and the cells of TALL × WIDE above them."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    X: gl.constexpr = ROWS // TALL
    n_lines = gl.cdiv(S, KEYS)
    # Under a causal mask the first keys are seen by most, and begin first.
    key = gl.program_id(0) % n_lines * KEYS
    head = gl.program_id(0) // n_lines
    b, h = head // H, head % H
    k_buffer = gl.allocate_shared_memory(k.dtype, [1, 1, KEYS, WIDTH], k.layout)
    q_buffer = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
    fence_async_shared()
    sync_threads()
    first, whole, ends, n_full, n_before, n_mixed = runs_by_keys(rule, b, key, T, S, ROWS, KEYS)
    run = (n_full, n_before, first, whole, ends)
    n_tiles = n_full + n_mixed
    load_tile(k, key, b, h // R, k_full, k_buffer, KEYS * WIDTH * 2)
    for i in gl.static_range(STAGES):
        if i < n_tiles:
            load_tile(
                q, _first_row(i, run), b, h, q_full.index(i), q_buffer.index(i), ROWS * WIDTH * 2
            )
    row = head.to(gl.int64) * (gl.cdiv(T, ROWS) * ROWS)
    s = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    zero_st = gl.full([KEYS, ROWS], 0.0, gl.float32, layout=LAYOUT)
    sum_sc = gl.sum(gl.sum(zero_st.reshape([KEYS, ROWS // 8, 4, 2]), 3), 1)
    k_sd = k_buffer.reshape([KEYS, WIDTH])
    mbarrier.wait(k_full, 0)
    for n in range(0, n_tiles):
        slot = n % STAGES
        mbarrier.wait(q_full.index(slot), (n // STAGES) & 1)
        q_dt = q_buffer.index(slot).reshape([ROWS, WIDTH]).permute((1, 0))
        x_st = warpgroup_mma(k_sd, q_dt, zero_st, use_acc=False)
        sync_threads()
        if n + STAGES < n_tiles:
            at = _first_row(n + STAGES, run)
            load_tile(q, at, b, h, q_full.index(slot), q_buffer.index(slot), ROWS * WIDTH * 2)
        start = _first_row(n, run)
        w_st = _weigh(x_st, start, s, n >= n_full, rule, rows, row, b, (T, S), LAYOUT)
        w_sxc = gl.sum(gl.sum(w_st.reshape([KEYS, X, TALL // 8, 4, 2]), 4), 2)
        part_sc = gl.sum(w_sxc, 1)
        sum_sc += gl.convert_layout(part_sc, sum_sc.type.layout)
        if cells is not None:
            _write_cells(w_sxc, cells, head, start, key, TALL, WIDE)
    sum_s = gl.convert_layout(gl.sum(sum_sc, 1), gl.SliceLayout(1, LAYOUT))
    gl.store(received + head.to(gl.int64) * S + s, sum_s, mask=s < S)


def run_received(
    given: Rendered, sums: RowSums, received: Tensor, cells: tuple[Cells, int, int] | None
) -> None:
    """Fill in what keys receive, (B, H, S), and the cells, of some rows and keys each."""
    (B, H, T, D), (_, G, S, _) = given.q.shape, given.k.shape
    to, tall, wide = cells or (None, ROWS.value, WARP.value)
    lack = (0, -T % ROWS.value)
    rows = RowScales(
        torch.nn.functional.pad(sums.maxima, lack),
        torch.nn.functional.pad(sums.sums.reciprocal(), lack),
    )
    launch: Any = _received[(B * H * triton.cdiv(S, KEYS.value),)]
    launch(
        describe(given.q, ROWS.value), describe(given.k, KEYS.value), rule_of(given),
        rows, received, to, H, T, S,
        R=H // G, WIDTH=D, TALL=tall, WIDE=wide, num_warps=8, maxnreg=REGISTERS,
        enable_fp_fusion=True,
    )  # fmt: skip
