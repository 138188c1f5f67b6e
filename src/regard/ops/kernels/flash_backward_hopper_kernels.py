"""The backward of `flash.py` for Hopper GPUs, in Gluon: five products a tile, most of them at once.

Programs own a tile of keys and walk over tiles of rows, as in `flash_backward_kernels.py`, which
stays the judge and takes what `flash_backward.py` leaves to it. Here products are issued
asynchronously, and waited for as late as can be, so that tensor cores have work while weights and
gradients of scores are made. For the m-th tile of rows, in this order:
- its scores k qᵀ, issued one tile before, are waited for; v gᵀ is issued; then the weights p;
- v gᵀ is waited for; dv += p g is issued; then ds, which is written to shared memory;
- a barrier of all warps;
- kᵀ ds, dk += ds q and the scores of the next tile are issued. Nobody reads the tile before this
  one any more, so TMA loads another into its slot: there are three slots at least;
- kᵀ ds is waited for, and added to the sums of dq in memory, where programs of other keys add
  theirs; dk is waited for. What is left in flight is the scores.
ds has two buffers: between what read one last, which is waited for, and who writes it is a barrier.
The logsumexp and δ of rows have one buffer: it is read before the barrier, and written after it.
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

from regard.ops.kernels import tile_kernels
from regard.ops.kernels.arguments import TileLists, view
from regard.ops.kernels.flash_hopper_kernels import describe
from regard.ops.kernels.hopper_tile_kernels import async_load, sync_threads
from regard.ops.kernels.launch import Sized
from regard.ops.kernels.tile_kernels import BITS, NATS
from regard.ops.kernels.tiles import Tiles

APART = {64: 2, 128: 0}
"""By width: tiles of rows that programs of neighbouring keys are apart, where it was measured to
help that they do not add to the same sums."""

bounds_of = gluon.jit(tile_kernels.bounds_of.fn)
runs_by_keys = gluon.jit(tile_kernels.runs_by_keys.fn)
seen = gluon.jit(tile_kernels.seen.fn)


@gluon.jit
def _load_both(
    one, other, at, b, h, full, one_buffer, other_buffer, BYTES: gl.constexpr
):  # fmt: skip
    """Load the rows of a head from `at` on, of two tensors, by TMA."""
    mbarrier.expect(full, BYTES)
    async_load(one, [b, h, at, 0], full, one_buffer)
    async_load(other, [b, h, at, 0], full, other_buffer)


@gluon.jit
def _walk(rule, lists, b, key, T, S, ROWS: gl.constexpr, KEYS: gl.constexpr, APART: gl.constexpr):
    """The tiles of rows that see keys from `key` on: how many, and what `_where` needs of them.

    Without lists the full ones begin at another row in each program.
    """
    if lists is None:
        begin, whole, ends, n_full, n_before, n_mixed = runs_by_keys(rule, b, key, T, S, ROWS, KEYS)
        skipped = gl.where(n_full > 0, key // KEYS * APART % gl.maximum(n_full, 1), 0)
        count = n_full + n_mixed
        run = (begin, whole, ends, n_full, n_before, skipped)
    else:
        at = b * lists.b + key // KEYS
        count = gl.load(lists.full + at)
        run = (at.to(gl.int64) * lists.n, at, at, at, at, at)
    return count, run


@gluon.jit
def _where(m, count, run, lists, group, H, n_rows, R: gl.constexpr, ROWS: gl.constexpr):
    """The m-th tile of a program: its first row, whether it is mixed, its head, its row of all.

    Without lists full tiles come first, from `skipped` on round about, then the mixed ones on
    either side; and one query head after the other.
    """
    r = m * 0
    if R > 1:
        r = m // count
        m = m % count
    if lists is None:
        begin, whole, ends, n_full, n_before, skipped = run
        n = m - n_full
        edge = gl.where(n < n_before, begin + n * ROWS, ends + (n - n_before) * ROWS)
        m += skipped
        m = gl.where(m >= n_full, m - n_full, m)
        start = gl.where(n < 0, whole + m * ROWS, edge)
        is_mixed = n >= 0
    else:
        code = gl.load(lists.tiles + run[0] + m)
        start = code // 2 * ROWS
        is_mixed = code % 2 == 1
    b, h = group // (H // R), group % (H // R) * R + r
    return start, is_mixed, h, (b * H + h).to(gl.int64) * n_rows + start


@gluon.jit
def _rows_at(rows, at):
    """The logsumexp and δ of rows; 0 where nothing is seen, whatever gradient arrives there."""
    lse = gl.load(rows.lse + at)
    return lse, gl.where(lse == float("inf"), 0.0, gl.load(rows.delta + at))


@gluon.jit
def _weigh(
    x_st, lse_t, tile, key, rule, b, T, S, HIDES: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The weights of a tile, keys by rows, from its products; HIDES: whether some may be hidden."""
    KEYS: gl.constexpr = x_st.shape[0]
    ROWS: gl.constexpr = x_st.shape[1]
    start, is_mixed, h, _row = tile
    column_s = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    column_t = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    s, t = key + column_s, start + column_t
    x_st = x_st * rule.factor
    if rule.slopes is not None:
        # No key that is seen stands behind its query: the way between them has parts of each.
        slope = gl.load(rule.slopes + h) * BITS
        lse_t += slope * (start + (S - T) - key + column_t).to(gl.float32)
        x_st += gl.expand_dims(slope * column_s.to(gl.float32), 1)
    x_st = x_st - gl.expand_dims(lse_t, 0)
    if HIDES and is_mixed:
        t = gl.minimum(t, T - 1)
        lo_t, hi_t = bounds_of(rule, b, t, T, S)
        seen_st = seen(
            rule, b, h, gl.expand_dims(t, 0), gl.expand_dims(s, 1),
            gl.expand_dims(lo_t, 0), gl.expand_dims(hi_t, 0), S,
        )  # fmt: skip
        x_st = gl.where(seen_st, x_st, float("-inf"))
    return gl.exp2(x_st)


@gluon.jit
def _add_sums(to, x, d, t, WIDTH: gl.constexpr):
    """Add a tile of dq, width by rows, to its sums, four numbers at a time.

    The sums are kept as tensor cores give them: of 16 by 8 numbers a thread has four, which lie
    side by side, and so do those of the threads of a warp. No number changes its thread.
    """
    block = t // 8 * (WIDTH // 16) + d // 16
    at = to + block * 128 + (d % 8 * 16 + t % 8 // 2 * 4 + d // 8 % 2 * 2 + t % 2)
    # What comes back is not used: an elementwise operation has to have a result.
    gl.inline_asm_elementwise(
        """red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;""",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [at.to(gl.int64), x],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _keep_keys(buffer, key, rule, b, T, S, LAYOUT: gl.constexpr):
    """Zeros for keys or values that no query sees by window and span, as 0 · NaN is NaN."""
    s = key + gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    # What the first query sees begins first, and what the last one sees ends last.
    low, _end = bounds_of(rule, b, s * 0, T, S)
    _begin, past = bounds_of(rule, b, s * 0 + (T - 1), T, S)
    kept = gl.expand_dims((s >= low) & (s < past), 1)
    buffer.store(gl.where(kept, buffer.load(LAYOUT), 0.0))


@gluon.jit
def _keep_rows(buffer, start, rule, b, T, S, LAYOUT: gl.constexpr):
    """Zeros for the rows that see nothing by window and span."""
    t = start + gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    lo_t, hi_t = bounds_of(rule, b, gl.minimum(t, T - 1), T, S)
    buffer.store(gl.where(gl.expand_dims(hi_t > lo_t, 1), buffer.load(LAYOUT), 0.0))


@gluon.jit
def _write(to, x_sd, scale, b, h, key, S, LAYOUT: gl.constexpr):
    """Store the gradient of the keys, or of their values."""
    KEYS: gl.constexpr = x_sd.shape[0]
    WIDTH: gl.constexpr = x_sd.shape[1]
    x_sd = gl.convert_layout((x_sd * scale).to(to.at.dtype.element_ty), LAYOUT)
    s = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = to.at + b.to(gl.int64) * to.b + h.to(gl.int64) * to.h
    at_sd = at + gl.expand_dims(s.to(gl.int64) * to.t, 1) + gl.expand_dims(d * to.d, 0)
    gl.store(at_sd, x_sd, mask=gl.expand_dims(s < S, 1))


@gluon.jit
def _zero(n):
    """0, which the compiler does not know: what follows from it is not kept in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["H", "T", "S"])
def _fused(
    q, k, v, g, dk, dv, sums, rule, lists, rows, H, T, S,
    R: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, HIDES: gl.constexpr, COVERED: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """The gradients of some keys of one key head, of their values, and what they give to dq."""
    gl.static_assert(STAGES > 2)
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    # Of 64 by ROWS; one group of four warps for each 64 of the width, the others beside it.
    DOWN: gl.constexpr = min(WARPS, WIDTH // 16)
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [DOWN, WARPS // DOWN], [16, ROWS * DOWN // WARPS, 16]
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], q.dtype)
    BYTES: gl.constexpr = ROWS * WIDTH * 4
    dtype: gl.constexpr = q.dtype
    n_tiles = gl.cdiv(S, KEYS)
    key = gl.program_id(0) % n_tiles * KEYS
    group = gl.program_id(0) // n_tiles
    b, own = group // (H // R), group % (H // R)
    k_buffer = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, WIDTH], k.layout)
    v_buffer = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, WIDTH], v.layout)
    q_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    g_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], g.layout)
    ds_buffer = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], DS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_buffer = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    delta_buffer = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    sync_threads()
    count, run = _walk(rule, lists, b, key, T, S, ROWS, KEYS, APART)
    total = count * R
    _load_both(k, v, key, b, own, own_full, k_buffer.index(0), v_buffer.index(0), KEYS * WIDTH * 4)
    for i in gl.static_range(STAGES):
        if i < total:
            start, _mixed, h, _row = _where(i, count, run, lists, group, H, rows.n, R, ROWS)
            _load_both(
                q, g, start, b, h, full.index(i), q_buffer.index(i), g_buffer.index(i), BYTES
            )
    k_sd = k_buffer.index(0).reshape([KEYS, WIDTH])
    v_sd = v_buffer.index(0).reshape([KEYS, WIDTH])
    zero_st = gl.full([KEYS, ROWS], 0.0, gl.float32, layout=S_LAYOUT)
    zero_dt = gl.full([WIDTH, ROWS], 0.0, gl.float32, layout=Q_LAYOUT)
    dk_sd = gl.full([KEYS, WIDTH], 0.0, gl.float32, layout=D_LAYOUT)
    dv_sd = dk_sd
    d1 = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(1, Q_LAYOUT)), 1)
    t1 = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, Q_LAYOUT)), 0)
    row_t = gl.arange(0, ROWS, layout=gl.BlockedLayout([ROWS // 32], [32], [WARPS], [0]))
    T_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    mbarrier.wait(own_full, 0)
    if not COVERED:
        _keep_keys(k_sd, key, rule, b, T, S, OUT)
        _keep_keys(v_sd, key, rule, b, T, S, OUT)
        fence_async_shared()
        sync_threads()
    if total > 0:
        tile = _where(0, count, run, lists, group, H, rows.n, R, ROWS)
        lse, delta = _rows_at(rows, tile[3] + row_t)
        lse_buffer.store(lse)
        delta_buffer.store(delta)
        mbarrier.wait(full.index(0), 0)
        q_dt = q_buffer.index(0).reshape([ROWS, WIDTH]).permute((1, 0))
        next_st = warpgroup_mma(k_sd, q_dt, zero_st, use_acc=False, is_async=True)
        for m in range(0, total):
            q_td = q_buffer.index(m % STAGES).reshape([ROWS, WIDTH])
            g_td = g_buffer.index(m % STAGES).reshape([ROWS, WIDTH])
            x_st = warpgroup_mma_wait(0, deps=[next_st])
            if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
                if tile[1]:
                    _keep_rows(q_td, tile[0], rule, b, T, S, OUT)
                    _keep_rows(g_td, tile[0], rule, b, T, S, OUT)
                    fence_async_shared()
                    sync_threads()
            g_dt = g_td.permute((1, 0))
            v_now = v_buffer.index(_zero(m)).reshape([KEYS, WIDTH])
            pull_st = warpgroup_mma(v_now, g_dt, zero_st, use_acc=False, is_async=True)
            # After the last tile it is the last one again, whose scores nobody reads.
            ahead = gl.minimum(m + 1, total - 1)
            next_tile = _where(ahead, count, run, lists, group, H, rows.n, R, ROWS)
            lse, delta = _rows_at(rows, next_tile[3] + row_t)
            p_st = _weigh(
                x_st, lse_buffer.load(T_LAYOUT), tile, key, rule, b, T, S, HIDES, S_LAYOUT
            )
            w_st = gl.convert_layout(p_st.to(dtype), P_LAYOUT)
            # Long since true. Its branch keeps the assembler from waiting before the weights.
            mbarrier.wait(own_full, 0)
            pull_st = warpgroup_mma_wait(0, deps=[pull_st])
            dv_next = warpgroup_mma(w_st, g_td, dv_sd, is_async=True)
            delta_t = delta_buffer.load(T_LAYOUT)
            ds = ds_buffer.index(m % 2)
            ds_st = (p_st * (pull_st + gl.expand_dims(delta_t, 0))).to(dtype)
            ds.store(ds_st)
            fence_async_shared()
            sync_threads()
            lse_buffer.store(lse)
            delta_buffer.store(delta)
            k_ds = k_buffer.index(_zero(m)).reshape([KEYS, WIDTH]).permute((1, 0))
            dq_next = warpgroup_mma(k_ds, ds, zero_dt, use_acc=False, is_async=True)
            if WIDTH > 64:
                dk_next = warpgroup_mma(ds, q_td, dk_sd, is_async=True)
            else:
                # Here are registers enough for it, which spares shared memory.
                ds_st = gl.convert_layout(ds_st, P_LAYOUT)
                dk_next = warpgroup_mma(ds_st, q_td, dk_sd, is_async=True)
            mbarrier.wait(full.index(ahead % STAGES), (ahead // STAGES) & 1)
            q_dt = q_buffer.index(ahead % STAGES).reshape([ROWS, WIDTH]).permute((1, 0))
            k_now = k_buffer.index(_zero(m)).reshape([KEYS, WIDTH])
            next_st = warpgroup_mma(k_now, q_dt, zero_st, use_acc=False, is_async=True)
            if (m > 0) & (m - 1 + STAGES < total):
                free = (m - 1) % STAGES
                start, _mixed, h, _row = _where(
                    m - 1 + STAGES, count, run, lists, group, H, rows.n, R, ROWS
                )
                _load_both(
                    q, g, start, b, h, full.index(free), q_buffer.index(free),
                    g_buffer.index(free), BYTES,
                )  # fmt: skip
            dq_dt, dv_sd, w_st = warpgroup_mma_wait(2, deps=[dq_next, dv_next, w_st])
            _add_sums(sums + tile[3] * WIDTH, dq_dt, d1, t1, WIDTH)
            if WIDTH > 64:
                dk_sd = warpgroup_mma_wait(1, deps=[dk_next])
            else:
                dk_sd, ds_st = warpgroup_mma_wait(1, deps=[dk_next, ds_st])
            tile = next_tile
        next_st = warpgroup_mma_wait(0, deps=[next_st])
    _write(dk, dk_sd, rule.factor * NATS, b, own, key, S, OUT)
    _write(dv, dv_sd, 1.0, b, own, key, S, OUT)


def run_fused(
    step: Any, lists: TileLists | None, outputs: tuple[Tensor, ...], tiles: Tiles
) -> None:
    """Write the gradients of keys and values, and add up the sums of that of the queries.

    lists: of tiles in order, where a tile of keys is not told by window and span who sees it.
    """
    (dk, dv, sums), given, rule = outputs, step.given, step.rule
    (_, H, T, D), (B, G, S, _) = given.q.shape, given.k.shape

    def size() -> Sized:
        masks = (rule.window, rule.span, lists)
        hides = any(part is not None for part in masks) or S % tiles.keys > 0
        return B * G * -(-S // tiles.keys), {
            "R": H // G,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "WIDTH": D,
            "STAGES": tiles.stages,
            "HIDES": hides,
            "COVERED": given.covered,
            "APART": APART[D],
            "num_warps": tiles.warps,
            "enable_fp_fusion": True,
        }

    step.plan.run(
        "fused", _fused, size,
        describe(given.q, tiles.rows), describe(given.k, tiles.keys),
        describe(given.v, tiles.keys), describe(step.g, tiles.rows),
        view(dk), view(dv), sums, rule, lists, step.rows, H, T, S,
    )  # fmt: skip
