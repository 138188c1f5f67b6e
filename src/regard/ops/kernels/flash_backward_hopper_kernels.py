"""The backward of `flash.py` for Hopper GPUs, in Gluon: five products a tile, most of them at once.

Programs own a tile of keys and walk over tiles of rows, as in `flash_backward_kernels.py`, which
remains the reference and runs what `flash_backward.py` leaves to it. One warp loads (`_produce`):
keys and values once, and for each tile of rows queries and gradients by TMA, and numbers: logsumexp
and δ of its rows, which keys these see if some are hidden, where the tile is. Four or eight warps
multiply (`_consume`), asynchronously, and wait as late as possible, so that tensor cores have work
while weights and gradients of scores are computed. For the m-th tile of rows, in this order:
- its scores k qᵀ, issued one tile before, are waited for; v gᵀ is issued; then the weights p;
- v gᵀ is waited for; dv += p g is issued; then ds, which is written to shared memory;
- a barrier of all warps;
- kᵀ ds, dk += ds q and the scores of the next tile are issued;
- kᵀ ds is waited for, and added to the sums of dq in memory, where programs of other keys add
  theirs; dk is waited for. Only the scores are left in flight.
After that barrier no warp reads the previous tile any more, and its slot is `empty`: so there are
two slots at least, and with a third loads run ahead. A slot is `full` when bytes and numbers are
there. ds has two buffers: the last product that read one is waited for, and a barrier follows,
before it is written again.
Why there is no deadlock: the load of tile m waits until tile m - STAGES is released, which is
signalled before any warp waits for tile m - STAGES + 2.
This module needs triton, and is imported where it runs.

Letters: T queries, S keys, H query heads, R query heads a key head, D head width; t, s sizes of a
tile.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from regard.ops.kernels.arguments import TileLists, view
from regard.ops.kernels.flash_hopper_kernels import describe
from regard.ops.kernels.hopper_backward_tile_kernels import (
    add_sums,
    bounds_of,
    is_scattered,
    keep_keys,
    keep_rows,
    load_both,
    rows_at,
    walk,
    weigh,
    where_tile,
    write_keys,
)
from regard.ops.kernels.hopper_tile_kernels import sync_threads
from regard.ops.kernels.launch import Sized
from regard.ops.kernels.tile_kernels import BITS, NATS
from regard.ops.kernels.tiles import Tiles

APART = {64: 2, 128: 0}
"""By width: by how many tiles of rows programs of neighbouring keys are kept apart, where it was
measured to help that they do not add to the same sums at once."""

LOADER_REGISTERS = 24
"""Per thread of the warp that loads. Eight warps that multiply then have 240 per thread."""
REGISTERS = 128
"""Mean registers per thread with four such warps: two programs share a multiprocessor."""


@gluon.jit
def _own(H, S, R: gl.constexpr, KEYS: gl.constexpr):
    """This program's first key, its index over samples and key heads, its sample, its key head."""
    n_tiles = gl.cdiv(S, KEYS)
    group = gl.program_id(0) // n_tiles
    return gl.program_id(0) % n_tiles * KEYS, group, group // (H // R), group % (H // R)


@gluon.jit
def _produce(
    inputs, rule, lists, rows, buffers, row_buffers, barriers, sizes,
    R: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, HIDES: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Load keys and values, and then tile after tile of rows with the numbers of these."""
    q, k, v, g = inputs
    k_buffer, v_buffer, q_buffer, g_buffer, _ds = buffers
    lse_buffer, delta_buffer, ends, numbers = row_buffers
    own_full, full, empty = barriers
    H, T, S = sizes
    key, group, b, own = _own(H, S, R, KEYS)
    load_both(k, v, key, b, own, own_full, k_buffer.index(0), v_buffer.index(0), KEYS * WIDTH * 4)
    count, run = walk(rule, lists, b, key, T, S, ROWS, KEYS, APART)
    row_t = gl.arange(0, ROWS, layout=gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for m in range(0, count * R):
        slot = m % STAGES
        start, is_mixed, h, row = where_tile(m, count, run, lists, group, H, rows.n, R, ROWS)
        mbarrier.wait(empty.index(slot), ((m // STAGES) & 1) ^ 1)
        load_both(
            q, g, start, b, h, full.index(slot), q_buffer.index(slot), g_buffer.index(slot),
            ROWS * WIDTH * 4,
        )  # fmt: skip
        lse_t, delta_t = rows_at(rows, row + row_t)
        if rule.slopes is not None:
            # No visible key is after its query: the distance is a part per row plus one per key.
            slope = gl.load(rule.slopes + h) * BITS
            lse_t += slope * (start + (S - T) - key + row_t).to(gl.float32)
            bits = slope.to(gl.int32, bitcast=True)
            numbers.index(2 * STAGES + slot).store(gl.full([1], bits, gl.int32, layout=ONE))
        lse_buffer.index(slot).store(lse_t)
        delta_buffer.index(slot).store(delta_t)
        code = (row // ROWS).to(gl.int32) * 2 + is_mixed.to(gl.int32)
        numbers.index(slot).store(gl.full([1], code, gl.int32, layout=ONE))
        if HIDES:  # noqa: SIM102 - this is decided when the kernel is compiled
            if is_mixed:
                lo_t, hi_t = bounds_of(rule, b, gl.minimum(start + row_t, T - 1), T, S)
                ends.index(2 * slot).store(lo_t)
                ends.index(2 * slot + 1).store(hi_t)
                numbers.index(STAGES + slot).store(gl.full([1], start, gl.int32, layout=ONE))
        sync_threads()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _read(numbers, n):
    """The n-th number that the loader has stored."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index(n).load(LAYOUT), 0)


@gluon.jit
def _zero(n):
    """A 0 unknown to the compiler, so that it keeps no addresses of products in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _score(
    at, scattered, buffers, row_buffers, barriers, rule, b, sizes, zero_st,
    STAGES: gl.constexpr, HIDES: gl.constexpr, COVERED: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Wait for a tile of rows, read where it is, and issue its scores k qᵀ."""
    k_buffer, _v, q_buffer, g_buffer, _ds = buffers
    numbers = row_buffers[3]
    slot, parity = at
    _H, T, S = sizes
    KEYS: gl.constexpr = zero_st.shape[0]
    ROWS: gl.constexpr = zero_st.shape[1]
    WIDTH: gl.constexpr = k_buffer.shape[4]
    mbarrier.wait(barriers[1].index(slot), parity)
    code = _read(numbers, slot)
    is_mixed = (code & 1) == 1
    start = 0
    slope = 0.0
    if HIDES:
        start = _read(numbers, STAGES + slot)
    if rule.slopes is not None:
        slope = _read(numbers, 2 * STAGES + slot).to(gl.float32, bitcast=True)
    q_td = q_buffer.index(slot).reshape([ROWS, WIDTH])
    if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
        if is_mixed:
            g_td = g_buffer.index(slot).reshape([ROWS, WIDTH])
            keep_rows(q_td, start, rule, b, T, S, OUT)
            keep_rows(g_td, start, rule, b, T, S, OUT)
            fence_async_shared()
            sync_threads()
    k_sd = k_buffer.index(_zero(slot)).reshape([KEYS, WIDTH])
    next_st = warpgroup_mma(k_sd, q_td.permute((1, 0)), zero_st, use_acc=False, is_async=True)
    return next_st, ((code // 2).to(gl.int64) * ROWS, start, is_mixed, slope, scattered)


@gluon.jit
def _fold(
    m, at, state, tile, sums, rule, buffers, row_buffers, barriers, key, b, sizes, zeros,
    STAGES: gl.constexpr, HIDES: gl.constexpr, COVERED: gl.constexpr, S_LAYOUT: gl.constexpr,
    D_LAYOUT: gl.constexpr, Q_LAYOUT: gl.constexpr, OUT: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Add the gradients of the m-th tile, whose scores are in flight; issue those of the next."""
    next_st, dk_sd, dv_sd = state
    k_buffer, v_buffer, q_buffer, g_buffer, ds_buffer = buffers
    lse_buffer, delta_buffer, ends, _numbers = row_buffers
    own_full, _full, empty = barriers
    zero_st, zero_dt = zeros
    _H, T, S = sizes
    slot, parity = at
    dtype: gl.constexpr = q_buffer.dtype
    KEYS: gl.constexpr = zero_st.shape[0]
    ROWS: gl.constexpr = zero_st.shape[1]
    WIDTH: gl.constexpr = zero_dt.shape[0]
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    T_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    q_td = q_buffer.index(slot).reshape([ROWS, WIDTH])
    g_td = g_buffer.index(slot).reshape([ROWS, WIDTH])
    x_st = warpgroup_mma_wait(0, deps=[next_st])
    v_sd = v_buffer.index(_zero(slot)).reshape([KEYS, WIDTH])
    pull_st = warpgroup_mma(v_sd, g_td.permute((1, 0)), zero_st, use_acc=False, is_async=True)
    seen = (ends.index(2 * slot), ends.index(2 * slot + 1))
    lse_t = lse_buffer.index(slot).load(T_LAYOUT)
    p_st = weigh(x_st, lse_t, seen, tile, key, rule, b, T, S, HIDES, S_LAYOUT)
    w_st = gl.convert_layout(p_st.to(dtype), P_LAYOUT)
    # Already true; the branch keeps the assembler from moving the wait before the weights.
    mbarrier.wait(own_full, 0)
    pull_st = warpgroup_mma_wait(0, deps=[pull_st])
    dv_next = warpgroup_mma(w_st, g_td, dv_sd, is_async=True)
    delta_t = delta_buffer.index(slot).load(T_LAYOUT)
    ds = ds_buffer.index(m % 2)
    ds_st = (p_st * (pull_st + gl.expand_dims(delta_t, 0))).to(dtype)
    ds.store(ds_st)
    fence_async_shared()
    sync_threads()
    # No warp reads the previous tile any more.
    mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1, pred=m > 0)
    k_ds = k_buffer.index(_zero(slot)).reshape([KEYS, WIDTH]).permute((1, 0))
    dq_next = warpgroup_mma(k_ds, ds, zero_dt, use_acc=False, is_async=True)
    # From registers, which spares shared memory.
    ds_st = gl.convert_layout(ds_st, P_LAYOUT)
    dk_next = warpgroup_mma(ds_st, q_td, dk_sd, is_async=True)
    # Already done: the weights free their registers before the scores need some.
    dv_sd, w_st = warpgroup_mma_wait(2, deps=[dv_next, w_st])
    to = sums + tile[0] * WIDTH
    if LAST:
        dq_dt = warpgroup_mma_wait(1, deps=[dq_next])
        add_sums(to, dq_dt, Q_LAYOUT)
        dk_sd, ds_st = warpgroup_mma_wait(0, deps=[dk_next, ds_st])
    else:
        past = slot == STAGES - 1
        at = (gl.where(past, 0, slot + 1), gl.where(past, parity ^ 1, parity))
        next_st, tile = _score(
            at, tile[4], buffers, row_buffers, barriers, rule, b, sizes, zero_st,
            STAGES, HIDES, COVERED, OUT,
        )  # fmt: skip
        dq_dt = warpgroup_mma_wait(2, deps=[dq_next])
        add_sums(to, dq_dt, Q_LAYOUT)
        dk_sd, ds_st = warpgroup_mma_wait(1, deps=[dk_next, ds_st])
    return at, (next_st, dk_sd, dv_sd), tile


@gluon.jit
def _consume(
    outputs, rule, lists, rows, buffers, row_buffers, barriers, sizes,
    R: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, HIDES: gl.constexpr, COVERED: gl.constexpr, APART: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The gradients of this program's keys and values, and their part of dq."""
    dk, dv, sums = outputs
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    # Tiles of 64 by ROWS: four warps for each 64 of the width, further warps side by side.
    DOWN: gl.constexpr = min(WARPS, WIDTH // 16)
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [DOWN, WARPS // DOWN], [16, ROWS * DOWN // WARPS, 16]
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    H, T, S = sizes
    key, _group, b, head = _own(H, S, R, KEYS)
    count, _run = walk(rule, lists, b, key, T, S, ROWS, KEYS, APART)
    total = count * R
    zero_st = gl.full([KEYS, ROWS], 0.0, gl.float32, layout=S_LAYOUT)
    zero_dt = gl.full([WIDTH, ROWS], 0.0, gl.float32, layout=Q_LAYOUT)
    dk_sd = gl.full([KEYS, WIDTH], 0.0, gl.float32, layout=D_LAYOUT)
    dv_sd = dk_sd
    k_sd = buffers[0].index(0).reshape([KEYS, WIDTH])
    v_sd = buffers[1].index(0).reshape([KEYS, WIDTH])
    mbarrier.wait(barriers[0], 0)
    if not COVERED:
        keep_keys(k_sd, key, rule, b, T, S, OUT)
        keep_keys(v_sd, key, rule, b, T, S, OUT)
        fence_async_shared()
        sync_threads()
    if total > 0:
        scattered = False
        if rule.ids is not None:
            scattered = is_scattered(rule, b)
        # The slot, and the parity of how often all slots were used.
        at = (total * 0, total * 0)
        next_st, tile = _score(
            at, scattered, buffers, row_buffers, barriers, rule, b, sizes, zero_st,
            STAGES, HIDES, COVERED, OUT,
        )  # fmt: skip
        state = (next_st, dk_sd, dv_sd)
        for m in range(0, total - 1):
            at, state, tile = _fold(
                m, at, state, tile, sums, rule, buffers, row_buffers, barriers, key, b, sizes,
                (zero_st, zero_dt), STAGES, HIDES, COVERED, S_LAYOUT, D_LAYOUT, Q_LAYOUT, OUT,
                False,
            )  # fmt: skip
        at, state, tile = _fold(
            total - 1, at, state, tile, sums, rule, buffers, row_buffers, barriers, key, b, sizes,
            (zero_st, zero_dt), STAGES, HIDES, COVERED, S_LAYOUT, D_LAYOUT, Q_LAYOUT, OUT, True,
        )  # fmt: skip
        _next, dk_sd, dv_sd = state
    # Keys and values are no longer read: their shared memory stages what is written.
    sync_threads()
    k_sd.store((dk_sd * (rule.factor * NATS)).to(k_sd.dtype))
    v_sd.store(dv_sd.to(v_sd.dtype))
    sync_threads()
    write_keys(dk, k_sd, b, head, key, S, OUT)
    write_keys(dv, v_sd, b, head, key, S, OUT)


@gluon.jit(do_not_specialize=["H", "T", "S"])
def _fused(
    q, k, v, g, dk, dv, sums, rule, lists, rows, H, T, S,
    R: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, HIDES: gl.constexpr, COVERED: gl.constexpr, APART: gl.constexpr,
    LOADER: gl.constexpr,
):  # fmt: skip
    """The gradients of some keys of one key head and of their values, and their part of dq."""
    gl.static_assert(STAGES > 1)
    dtype: gl.constexpr = q.dtype
    k_buffer = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, WIDTH], k.layout)
    v_buffer = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, WIDTH], v.layout)
    q_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    g_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], g.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    ds_buffer = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], DS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    delta_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    ends = gl.allocate_shared_memory(gl.int32, [2 * STAGES, ROWS], FLAT)
    numbers = gl.allocate_shared_memory(gl.int32, [3 * STAGES, 1], FLAT)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    sync_threads()
    buffers = (k_buffer, v_buffer, q_buffer, g_buffer, ds_buffer)
    row_buffers = (lse_buffer, delta_buffer, ends, numbers)
    barriers = (own_full, full, empty)
    sizes = (H, T, S)
    gl.warp_specialize(
        [
            (_consume, (
                (dk, dv, sums), rule, lists, rows, buffers, row_buffers, barriers, sizes,
                R, ROWS, KEYS, WIDTH, STAGES, HIDES, COVERED, APART, gl.num_warps(),
            )),
            (_produce, (
                (q, k, v, g), rule, lists, rows, buffers, row_buffers, barriers, sizes,
                R, ROWS, KEYS, WIDTH, STAGES, HIDES, APART,
            )),
        ],
        [1],
        [LOADER],
    )  # fmt: skip


def run_fused(
    step: Any, lists: TileLists | None, outputs: tuple[Tensor, ...], tiles: Tiles
) -> None:
    """Write the gradients of keys and values, and add those of the queries to sums.

    lists: tiles in order, where window and span do not say which rows see a tile of keys.
    """
    (dk, dv, sums), given, rule = outputs, step.given, step.rule
    (_, H, T, D), (B, G, S, _) = given.q.shape, given.k.shape

    def size() -> Sized:
        masks = (rule.window, rule.span, lists)
        hides = any(part is not None for part in masks) or S % tiles.keys > 0
        options = {
            "R": H // G,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "WIDTH": D,
            "STAGES": tiles.stages,
            "HIDES": hides,
            "COVERED": given.covered,
            "APART": APART[D],
            "LOADER": LOADER_REGISTERS,
            "num_warps": tiles.warps,
            "enable_fp_fusion": True,
        }
        if tiles.warps == 4:
            options["maxnreg"] = REGISTERS
        return B * G * -(-S // tiles.keys), options

    step.plan.run(
        "fused", _fused, size,
        describe(given.q, tiles.rows), describe(given.k, tiles.keys),
        describe(given.v, tiles.keys), describe(step.g, tiles.rows),
        view(dk), view(dv), sums, rule, lists, step.rows, H, T, S,
    )  # fmt: skip
