"""Received attention and the cells of maps, on a Hopper GPU, in Gluon.

Why: `pooling_kernels.py` sums the cells of each tile across warps, which wait for each other, and
the tensor cores wait for all of them. Here no number leaves its thread before the end, except those
of cells, which do not leave their warp: cells are 16 rows high, as many as a warp has, and are
combined afterwards. A tile has its rows across the threads, so that what is known of a row is read
once for all of its keys; each thread keeps its own sums of what a key receives until the end.
Several programs share a multiprocessor, so that one multiplies while another computes weights.
Tiles of rows are loaded by TMA.

Left out: weights of rows, maxima, caps, biases, and masks that need lists of tiles, which
`pooling_kernels.py` has.

This module needs triton, and is imported where it runs.

Letters: B batch, T queries, S keys, H query heads, R query heads a key head; t, s sizes of a tile;
x, y its cells down and across; w warps, l rows side by side in eight threads of a warp, c threads
that share a row of products.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

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
    warpgroup_mma_wait,
)

from regard.ops.kernels import tile_kernels
from regard.ops.kernels.arguments import rule_of
from regard.ops.kernels.flash_hopper_kernels import describe
from regard.ops.kernels.hopper_tile_kernels import STAGES, bounds_of, load_tile, sync_threads
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.row_sums import RowSums

if TYPE_CHECKING:
    from regard.ops.kernels.pooling_kernels import Cells

ROWS = tl.constexpr(64)
KEYS = tl.constexpr(128)
HALF = tl.constexpr(64)
"""Half the keys: weights are computed for one half while the other half is multiplied."""
WARP = tl.constexpr(16)
"""Rows of a warp."""
REGISTERS = 128
"""Registers per thread: so four programs share a multiprocessor, if their keys fit too."""

runs_by_keys = gluon.jit(tile_kernels.runs_by_keys.fn)


@gluon.jit
def _first_row(n, run):
    """The first row of the n-th tile: the full ones first, then the mixed ones on either side."""
    n_full, n_before, first, whole, ends = run
    m = n - n_full
    edge = gl.where(m < n_before, first + m * ROWS, ends + (m - n_before) * ROWS)
    return gl.where(n < n_full, whole + n * ROWS, edge)


@gluon.jit
def _weigh(x_ts, lse_t, t, key, is_mixed, rule, b, sizes):
    """The weights from a tile of products, 0 for hidden pairs."""
    T, S = sizes
    w_ts = gl.exp2(x_ts * rule.factor - gl.expand_dims(lse_t, 1))
    if is_mixed:
        lo_t, hi_t = bounds_of(rule, b, gl.minimum(t, T - 1), T, S)
        # Keys are 8 j + c, of which all j are constants: none is kept in a register.
        w_tjc = w_ts.reshape([ROWS, HALF // 8, 8])
        TJC: gl.constexpr = w_tjc.type.layout
        j = 8 * gl.arange(0, HALF // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, TJC)))
        c = key + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, TJC)))
        j_tjc = gl.expand_dims(gl.expand_dims(j, 0), 2)
        T_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, TJC))
        lo_tc = gl.expand_dims(gl.convert_layout(lo_t, T_LAYOUT), 1) - gl.expand_dims(c, 0)
        hi_tc = gl.expand_dims(gl.convert_layout(hi_t, T_LAYOUT), 1) - gl.expand_dims(c, 0)
        seen_tjc = (j_tjc >= gl.expand_dims(lo_tc, 1)) & (j_tjc < gl.expand_dims(hi_tc, 1))
        w_ts = gl.convert_layout(
            gl.where(seen_tjc, w_tjc, 0.0).reshape([ROWS, HALF]), w_ts.type.layout
        )
    return w_ts


@gluon.jit
def _bands(w_ts, TALL: gl.constexpr):
    """Sums over the rows of a cell that one thread has, (x, l, s)."""
    return gl.sum(w_ts.reshape([ROWS // TALL, TALL // 8, 8, HALF]), 1)


@gluon.jit
def _by_thread(w_xls, TALL: gl.constexpr):
    """Sums over all rows that one thread has, (w, l, s)."""
    return gl.sum(w_xls.reshape([ROWS // WARP, WARP // TALL, 8, HALF]), 1)


@gluon.jit
def _write_cells(w_xls, cells, head, start, key, TALL: gl.constexpr, WIDE: gl.constexpr):
    """Write the cells of a tile."""
    X: gl.constexpr = ROWS // TALL
    Y: gl.constexpr = HALF // WIDE
    # First over what one thread has, then over the four that share a row, and last over rows.
    w_xlyc = gl.sum(gl.sum(w_xls.reshape([X, 8, Y, WIDE // 8, 4, 2]), 5), 3)
    w_xy = gl.sum(gl.sum(w_xlyc, 3), 1)
    x = start // TALL + gl.arange(0, X, layout=gl.SliceLayout(1, w_xy.type.layout))
    y = key // WIDE + gl.arange(0, Y, layout=gl.SliceLayout(0, w_xy.type.layout))
    real_xy = gl.expand_dims(x < cells.height, 1) & gl.expand_dims(y < cells.width, 0)
    at_xy = gl.expand_dims(x * cells.width, 1) + gl.expand_dims(y, 0)
    to = cells.at + head.to(gl.int64) * cells.height * cells.width
    gl.store(to + at_xy, w_xy * cells.share, mask=real_xy)


@gluon.jit
def _gather(
    sum_wls, x_ts, lse_t, t, seen, rule, cells, own, sizes,
    TALL: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Add the weights of a tile to what its keys receive, and write its cells."""
    start, is_mixed = seen
    head, b, key = own
    w_ts = _weigh(x_ts, lse_t, start + t, key, is_mixed, rule, b, sizes)
    w_xls = _bands(w_ts, TALL)
    if cells is not None:
        _write_cells(w_xls, cells, head, start, key, TALL, WIDE)
    return sum_wls + gl.convert_layout(_by_thread(w_xls, TALL), sum_wls.type.layout)


@gluon.jit
def _write_sums(sum_wls, to, s, S, LAYOUT: gl.constexpr):
    """Write what keys receive from all rows."""
    sum_s = gl.convert_layout(gl.sum(gl.sum(sum_wls, 1), 0), gl.SliceLayout(0, LAYOUT))
    gl.store(to + s, sum_s, mask=s < S)


@gluon.jit(do_not_specialize=["H", "T", "S"])
def _received(
    q, k, rule, lse, received, cells, H, T, S,
    R: gl.constexpr, WIDTH: gl.constexpr, TALL: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """What 128 keys of one head get from all queries, and the cells of TALL × WIDE above them."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    n_lines = gl.cdiv(S, KEYS)
    # Under a causal mask the first keys are seen by most, and begin first.
    key = gl.program_id(0) % n_lines * KEYS
    head = gl.program_id(0) // n_lines
    b, h = head // H, head % H
    k_buffer = gl.allocate_shared_memory(k.dtype, [2, 1, 1, HALF, WIDTH], k.layout)
    q_buffer = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
    fence_async_shared()
    sync_threads()
    first, whole, ends, n_full, n_before, n_mixed = runs_by_keys(rule, b, key, T, S, ROWS, KEYS)
    run = (n_full, n_before, first, whole, ends)
    n_tiles = n_full + n_mixed
    for i in gl.static_range(2):
        at = key + i * HALF
        load_tile(k, at, b, h // R, k_full, k_buffer.index(i), HALF * WIDTH * 2)
    for i in gl.static_range(STAGES):
        if i < n_tiles:
            load_tile(
                q, _first_row(i, run), b, h, q_full.index(i), q_buffer.index(i), ROWS * WIDTH * 2
            )
    row = head.to(gl.int64) * (gl.cdiv(T, ROWS) * ROWS)
    t = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    zero_ts = gl.full([ROWS, HALF], 0.0, gl.float32, layout=LAYOUT)
    left_wls = _by_thread(_bands(zero_ts, TALL), TALL)
    right_wls = left_wls
    k_left = k_buffer.index(0).reshape([HALF, WIDTH]).permute((1, 0))
    k_right = k_buffer.index(1).reshape([HALF, WIDTH]).permute((1, 0))
    own = (head, b, key)
    mbarrier.wait(k_full, 0)
    for n in range(0, n_tiles):
        slot = n % STAGES
        start = _first_row(n, run)
        mbarrier.wait(q_full.index(slot), (n // STAGES) & 1)
        q_td = q_buffer.index(slot).reshape([ROWS, WIDTH])
        x_ts = warpgroup_mma(q_td, k_left, zero_ts, use_acc=False, is_async=True)
        y_ts = warpgroup_mma(q_td, k_right, zero_ts, use_acc=False, is_async=True)
        lse_t = gl.load(lse + (row + start) + t)
        x_ts = warpgroup_mma_wait(1, deps=[x_ts])
        seen = (start, n >= n_full)
        left_wls = _gather(left_wls, x_ts, lse_t, t, seen, rule, cells, own, (T, S), TALL, WIDE)
        y_ts = warpgroup_mma_wait(0, deps=[y_ts])
        sync_threads()
        if n + STAGES < n_tiles:
            at = _first_row(n + STAGES, run)
            load_tile(q, at, b, h, q_full.index(slot), q_buffer.index(slot), ROWS * WIDTH * 2)
        own_right = (head, b, key + HALF)
        right_wls = _gather(
            right_wls, y_ts, lse_t, t, seen, rule, cells, own_right, (T, S), TALL, WIDE
        )  # fmt: skip
    to = received + head.to(gl.int64) * S
    left = key + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    _write_sums(left_wls, to, left, S, LAYOUT)
    _write_sums(right_wls, to, left + HALF, S, LAYOUT)


def run_received(
    given: Rendered, sums: RowSums, received: Tensor, cells: tuple[Cells, int, int] | None
) -> None:
    """Fill in what keys receive, (B, H, S), and the cells; cells: to fill, rows and keys of one."""
    (B, H, T, D), (_, G, S, _) = given.q.shape, given.k.shape
    to, tall, wide = cells or (None, WARP.value, HALF.value)
    # In bits; infinite for rows beyond the last, which so weigh 0.
    lse = torch.nn.functional.pad(
        sums.maxima + sums.sums.log2(), (0, -T % ROWS.value), value=math.inf
    )
    launch: Any = _received[(B * H * triton.cdiv(S, KEYS.value),)]
    launch(
        describe(given.q, ROWS.value), describe(given.k, HALF.value), rule_of(given),
        lse, received, to, H, T, S,
        R=H // G, WIDTH=D, TALL=tall, WIDE=wide, num_warps=4, maxnreg=REGISTERS,
        enable_fp_fusion=True,
    )  # fmt: skip
