"""The forward of `flash.py` for Hopper GPUs, in Gluon: loads, products and softmax at one time.

Tiles of keys and values come by TMA, and the scores of the next tile are asked for before the
weights of the last one are multiplied with their values: so the tensor cores have work while the
softmax runs. What is told and how it is reckoned is as in `flash_kernels.py`, which stays the judge
and takes what `flash_hopper.py` leaves to it.
This module needs triton, and is imported where it runs.

Heads of 64 (`_alone`): one warpgroup takes 64 rows; three such programs share a multiprocessor.

Heads of 128 (`_shared`): programs of 64 rows would read more shared memory than there is time for.
So two warpgroups of 64 rows share what a third, of one warp, loads. Each is told by barriers how
many tiles, m, are done; slot = m % STAGES, use = m // STAGES:
- k_full, v_full: the bytes are there; both consumers wait for the parity of `use`.
- k_empty, v_empty: both consumers are through; the loader waits for the parity of use - 1, which a
  fresh barrier has.
- turn: consumer 0 asks for products m after consumer 1 has asked for its m - 1, and consumer 1 for
  m after consumer 0 has for its m: so one multiplies while the other is at its softmax.
Why nobody hangs: the loader's order is K0, K1, V0, K2, V1, ..; the load of tile m waits for the
release of tile m - STAGES, for which only loads before it are needed. A barrier cannot complete
twice before those who wait for it have seen the first time, as each of them is needed for the
second. All rows' tiles are walked by both consumers, also by one whose rows lie beyond the last.

Letters: B batch, T queries, S keys, H query heads, R query heads a key head, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from regard.ops.kernels import tile_kernels
from regard.ops.kernels.arguments import rule_of, view
from regard.ops.kernels.flash_kernels import Answers, KeySet
from regard.ops.kernels.rendered import Rendered

BITS = tl.constexpr(1.4426950408889634)
NATS = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e38)
ROWS = tl.constexpr(64)
"""Of a warpgroup."""
KEYS = tl.constexpr(128)
STAGES = tl.constexpr(2)
CONSUMER_REGISTERS, LOADER_REGISTERS = 232, 40
"""Of a thread; two warpgroups and the loader's share 504 each lane, of 65,536 in all."""

# Later than 3.6 Gluon has other names for both.
sync_threads = getattr(gl, "thread_barrier", None) or gl.barrier
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
capped = gluon.jit(tile_kernels.capped.fn)
slope_of = gluon.jit(tile_kernels.slope_of.fn)
query_places = gluon.jit(tile_kernels.query_places.fn)
key_places = gluon.jit(tile_kernels.key_places.fn)
biased = gluon.jit(tile_kernels.biased.fn)
bounds_of = gluon.jit(tile_kernels.bounds_of.fn)
runs_of = gluon.jit(tile_kernels.runs_of.fn)


@gluon.jit
def _walk(rule, b, start, T, S, N: gl.constexpr, WARPS: gl.constexpr):
    """The tiles of keys that N rows from `start` on see: how many, and what `_key` needs.

    Last come the first and past-the-last key that some row sees.
    """
    # Every warp has all rows, so that none waits for another.
    LAYOUT: gl.constexpr = gl.BlockedLayout([N // 32], [32], [WARPS], [0])
    t = start + gl.arange(0, N, layout=LAYOUT)
    lo_t, hi_t = bounds_of(rule, b, gl.minimum(t, T - 1), T, S)
    first, whole, ends, n_full, n_before, n_mixed = runs_of(lo_t, hi_t, t < T, S, KEYS)
    sees_t = (t < T) & (hi_t > lo_t)
    low, past = gl.min(gl.where(sees_t, lo_t, S), 0), gl.max(gl.where(sees_t, hi_t, 0), 0)
    return n_full + n_mixed, (n_full, n_before, first, whole, ends), low, past


@gluon.jit
def _key(n, run):
    """The first key of the n-th tile: the full ones first, then the mixed ones on either side."""
    n_full, n_before, first, whole, ends = run
    m = n - n_full
    edge = gl.where(m < n_before, first + m * KEYS, ends + (m - n_before) * KEYS)
    return gl.where(n < n_full, whole + n * KEYS, edge)


@gluon.jit
def _whole(n, zero):
    """Whole numbers of 0 to 2^23 as float32, without conversions, which take turns with exp2.

    They become the low bits of 2^23. zero: 0, in a way that the compiler does not see through, so
    that it does not keep all n in registers.
    """
    return (n + (0x4B000000 + zero)).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def _weigh(
    x_ts, state, start, is_mixed, rule, chosen, answers, row, sizes,
    PLAIN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The weights of a tile, what older sums fade by, and the running numbers of its rows."""
    max_t, sum_t, heat_t, far_t, mass_t, key_t = state
    b, h, t, slope_t, place_t, lo_t, hi_t = row
    T, S = sizes
    column_s = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    s = start + column_s
    if not PLAIN:
        x_ts = x_ts * rule.factor
        if rule.cap is not None:
            x_ts = capped(x_ts, rule.cap)
        real_s = gl.minimum(s, S - 1)
        if rule.slopes is not None and rule.places is None:
            away_ts = gl.expand_dims(place_t, 1) - gl.expand_dims(_whole(real_s, 0), 0)
            x_ts -= gl.expand_dims(slope_t, 1) * gl.abs(away_ts)
        else:
            x_ts = biased(
                x_ts, rule, b, h, gl.expand_dims(t, 1), gl.expand_dims(real_s, 0),
                gl.expand_dims(slope_t, 1), gl.expand_dims(place_t, 1), T, S,
            )  # fmt: skip
    if is_mixed:
        after_ts = gl.expand_dims(s, 0) >= gl.expand_dims(lo_t, 1)
        seen_ts = after_ts & (gl.expand_dims(s, 0) < gl.expand_dims(hi_t, 1))
        x_ts = gl.where(seen_ts, x_ts, float("-inf"))
    top_t = gl.max(x_ts, 1)
    if answers.key is not None:
        found_t = gl.min(gl.where(x_ts == gl.expand_dims(top_t, 1), gl.expand_dims(s, 0), S), 1)
    if PLAIN:
        top_t = top_t * rule.factor
    highest_t = gl.maximum(max_t, top_t)
    if answers.key is not None:
        better_t = (top_t > max_t) | ((top_t == max_t) & (found_t < key_t))
        key_t = gl.where(better_t, found_t, key_t)
    fade_t = gl.exp2(max_t - highest_t)
    if PLAIN:
        x_ts = x_ts * rule.factor - gl.expand_dims(highest_t, 1)
    else:
        x_ts = x_ts - gl.expand_dims(highest_t, 1)
    w_ts = gl.exp2(x_ts)
    if answers.entropy is not None:
        heat_t = fade_t * (heat_t + sum_t * (max_t - highest_t))
        heat_t += gl.sum(w_ts * gl.maximum(x_ts, LOWEST), 1)
    part_t = gl.sum(w_ts, 1)
    if answers.distance is not None:
        near_t = gl.sum(w_ts * gl.expand_dims(_whole(column_s, start >> 30), 0), 1)
        away_t = (t + (S - T - start)).to(gl.float32)
        far_t = fade_t * far_t + (part_t * away_t - near_t)
    if answers.mass is not None:
        of_s = gl.load(chosen.at + b * chosen.b + s, mask=s < S, other=0).to(gl.float32)
        mass_t = fade_t * mass_t + gl.sum(w_ts * gl.expand_dims(of_s, 0), 1)
    sum_t = fade_t * sum_t + part_t
    return w_ts, fade_t, (highest_t, sum_t, heat_t, far_t, mass_t, key_t)


@gluon.jit
def _load(tensor, at, b, h, full, buffer, BYTES: gl.constexpr):
    """Ask for the rows of a head from `at` on."""
    mbarrier.expect(full, BYTES)
    async_load(tensor, [b, h, at, 0], full, buffer)


@gluon.jit
def _clear(buffer, start, low, past, WIDTH: gl.constexpr):
    """Zeros for the values that no row of the program sees, as 0 · NaN is NaN.

    Two consumers write the same bytes, each before it multiplies.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = buffer.reshape([KEYS, WIDTH])
    s = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    v_se = values.load(LAYOUT)
    values.store(gl.where(gl.expand_dims((s >= low) & (s < past), 1), v_se, 0.0))
    fence_async_shared()
    sync_threads()


@gluon.jit
def _open(rule, b, h, start, T, S, LAYOUT: gl.constexpr):
    """What a warpgroup knows of its rows, and where its running numbers begin."""
    T_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    t = gl.minimum(start + gl.arange(0, ROWS, layout=T_LAYOUT), T - 1)
    lo_t, hi_t = bounds_of(rule, b, t, T, S)
    row = (b, h, t, slope_of(rule, t * 0 + h), query_places(rule, b, t, T, S), lo_t, hi_t)
    zero_t = gl.full([ROWS], 0.0, gl.float32, layout=T_LAYOUT)
    lowest_t = gl.full([ROWS], LOWEST, gl.float32, layout=T_LAYOUT)
    none_t = gl.full([ROWS], -1, gl.int32, layout=T_LAYOUT)
    return row, (lowest_t, zero_t, zero_t, zero_t, zero_t, none_t)


@gluon.jit
def _fade(out_te, fade_t, LAYOUT: gl.constexpr):
    """Rows of the output times a number each."""
    return out_te * gl.expand_dims(gl.convert_layout(fade_t, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def _finish(
    out_te, state, out, sinks, answers, own, start, T,
    WIDTH: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write the output of a warpgroup's rows and what was asked about them."""
    head, b, h = own
    t = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    real_t = t < T
    max_t, sum_t, heat_t, far_t, mass_t, key_t = state
    highest_t = max_t
    total_t = sum_t
    if sinks is not None:
        sink = gl.load(sinks + h).to(gl.float32) * BITS
        highest_t = gl.maximum(max_t, sink)
        total_t = sum_t * gl.exp2(max_t - highest_t) + gl.exp2(sink - highest_t)
    empty_t = total_t == 0.0
    total_t = gl.where(empty_t, 1.0, total_t)
    share_t = gl.exp2(max_t - highest_t) / total_t
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    out_te = _fade(out_te, share_t, O_LAYOUT).to(out.at.dtype.element_ty)
    row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    e = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
    to = out.at + b.to(gl.int64) * out.b + h.to(gl.int64) * out.h
    to_te = to + gl.expand_dims(row.to(gl.int64) * out.t, 1) + gl.expand_dims(e * out.d, 0)
    gl.store(to_te, gl.convert_layout(out_te, OUT), mask=gl.expand_dims(row < T, 1))
    row_t = head.to(gl.int64) * T + t
    lse_t = gl.where(empty_t, float("-inf"), (highest_t + gl.log2(total_t)) * NATS)
    gl.store(answers.lse + row_t, lse_t, mask=real_t)
    if answers.maxima is not None:
        gl.store(answers.maxima + row_t, highest_t, mask=real_t)
        gl.store(answers.sums + row_t, total_t, mask=real_t)
        gl.store(answers.total + row_t, sum_t * share_t, mask=real_t)
    if answers.entropy is not None:
        spread_t = (highest_t - max_t) + gl.log2(total_t)
        bits_t = gl.where(empty_t, 0.0, sum_t * share_t * spread_t) - heat_t * share_t
        gl.store(answers.entropy + row_t, bits_t * NATS, mask=real_t)
    if answers.key is not None:
        key_t = gl.where(sum_t == sum_t, key_t, -1)
        gl.store(answers.peak + row_t, gl.where(sum_t == 0.0, 0.0, share_t), mask=real_t)
        gl.store(answers.key + row_t, key_t.to(gl.int64), mask=real_t)
        logit_t = gl.where(sum_t == 0.0, float("-inf"), (max_t + 0.0 * sum_t) * NATS)
        gl.store(answers.logit + row_t, logit_t, mask=real_t)
    if answers.distance is not None:
        gl.store(answers.distance + row_t, far_t * share_t, mask=real_t)
    if answers.mass is not None:
        gl.store(answers.mass + row_t, mass_t * share_t, mask=real_t)


@gluon.jit(do_not_specialize=["H", "T", "S"])
def _alone(
    q, k, v, out, rule, sinks, chosen, answers, H, T, S,
    R: gl.constexpr, WIDTH: gl.constexpr, COVERED: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """64 rows of one head, by one warpgroup that loads for itself."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    BYTES: gl.constexpr = KEYS * WIDTH * 2
    dtype: gl.constexpr = q.dtype
    n_bands = gl.cdiv(T, ROWS)
    # Under a causal mask the last rows are the longest, and begin first.
    start = (n_bands - 1 - gl.program_id(0) % n_bands) * ROWS
    head = gl.program_id(0) // n_bands
    b, h = head // H, head % H
    q_buffer = gl.allocate_shared_memory(dtype, [1, 1, ROWS, WIDTH], q.layout)
    k_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, WIDTH], k.layout)
    v_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, WIDTH], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    row, state = _open(rule, b, h, start, T, S, S_LAYOUT)
    n_tiles, run, low, past = _walk(rule, b, start, T, S, ROWS, 4)
    n_full = run[0]
    _load(q, start, b, h, q_full, q_buffer, ROWS * WIDTH * 2)
    for i in gl.static_range(STAGES):
        if i < n_tiles:
            _load(k, _key(i, run), b, h // R, k_full.index(i), k_buffer.index(i), BYTES)
            _load(v, _key(i, run), b, h // R, v_full.index(i), v_buffer.index(i), BYTES)
    out_te = gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=O_LAYOUT)
    zero_ts = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=S_LAYOUT)
    mbarrier.wait(q_full, 0)
    q_td = q_buffer.reshape([ROWS, WIDTH])
    if n_tiles > 0:
        mbarrier.wait(k_full.index(0), 0)
        k_ds = k_buffer.index(0).reshape([KEYS, WIDTH]).permute((1, 0))
        x_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False)
        w_ts, fade_t, state = _weigh(
            x_ts, state, _key(0, run), n_full == 0, rule, chosen, answers, row, (T, S),
            PLAIN, S_LAYOUT,
        )  # fmt: skip
        p_ts = gl.convert_layout(w_ts.to(dtype), P_LAYOUT)
        sync_threads()
        if n_tiles > STAGES:
            _load(k, _key(STAGES, run), b, h // R, k_full.index(0), k_buffer.index(0), BYTES)
        for n in range(1, n_tiles):
            slot = n % STAGES
            old = (n - 1) % STAGES
            mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
            k_ds = k_buffer.index(slot).reshape([KEYS, WIDTH]).permute((1, 0))
            next_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(old), ((n - 1) // STAGES) & 1)
            if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
                if n - 1 >= n_full:
                    _clear(v_buffer.index(old), _key(n - 1, run), low, past, WIDTH)
            v_se = v_buffer.index(old).reshape([KEYS, WIDTH])
            next_te = warpgroup_mma(p_ts, v_se, out_te, is_async=True)
            x_ts = warpgroup_mma_wait(1, deps=[next_ts])
            w_ts, fade_t, state = _weigh(
                x_ts, state, _key(n, run), n >= n_full, rule, chosen, answers, row, (T, S),
                PLAIN, S_LAYOUT,
            )  # fmt: skip
            out_te, p_ts = warpgroup_mma_wait(0, deps=[next_te, p_ts])
            p_ts = gl.convert_layout(w_ts.to(dtype), P_LAYOUT)
            sync_threads()
            if n + STAGES < n_tiles:
                at = _key(n + STAGES, run)
                _load(k, at, b, h // R, k_full.index(slot), k_buffer.index(slot), BYTES)
            if n - 1 + STAGES < n_tiles:
                at = _key(n - 1 + STAGES, run)
                _load(v, at, b, h // R, v_full.index(old), v_buffer.index(old), BYTES)
            out_te = _fade(out_te, fade_t, O_LAYOUT)
        old = (n_tiles - 1) % STAGES
        mbarrier.wait(v_full.index(old), ((n_tiles - 1) // STAGES) & 1)
        if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
            if n_tiles - 1 >= n_full:
                _clear(v_buffer.index(old), _key(n_tiles - 1, run), low, past, WIDTH)
        out_te = warpgroup_mma(p_ts, v_buffer.index(old).reshape([KEYS, WIDTH]), out_te)
    _finish(
        out_te, state, out, sinks, answers, (head, b, h), start, T,
        WIDTH, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip


@gluon.jit
def _own(H, T):
    """The first of this program's 128 rows, and its head."""
    n_bands = gl.cdiv(T, 2 * ROWS)
    band = n_bands - 1 - gl.program_id(0) % n_bands
    head = gl.program_id(0) // n_bands
    return band * 2 * ROWS, head, head // H, head % H


@gluon.jit
def _produce(inputs, buffers, barriers, rule, sizes, R: gl.constexpr, WIDTH: gl.constexpr):
    """Load for both consumers, in the order in which they need it."""
    q, k, v = inputs
    q_buffer, k_buffer, v_buffer = buffers
    q_full, k_full, k_empty, v_full, v_empty, _turn = barriers
    H, T, S = sizes
    BYTES: gl.constexpr = KEYS * WIDTH * 2
    start, _head, b, h = _own(H, T)
    n_tiles, run, _low, _past = _walk(rule, b, start, T, S, 2 * ROWS, 1)
    for c in gl.static_range(2):
        at = start + c * ROWS
        _load(q, at, b, h, q_full.index(c), q_buffer.index(c), ROWS * WIDTH * 2)
    for n in range(0, n_tiles + 1):
        if n < n_tiles:
            slot = n % STAGES
            mbarrier.wait(k_empty.index(slot), ((n // STAGES) & 1) ^ 1)
            _load(k, _key(n, run), b, h // R, k_full.index(slot), k_buffer.index(slot), BYTES)
        if n > 0:
            m = n - 1
            slot = m % STAGES
            mbarrier.wait(v_empty.index(slot), ((m // STAGES) & 1) ^ 1)
            _load(v, _key(m, run), b, h // R, v_full.index(slot), v_buffer.index(slot), BYTES)


@gluon.jit
def _release(barrier):
    """Arrive once for the warpgroup, when all its warps have come so far."""
    sync_threads()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _consume(
    C: gl.constexpr, buffers, barriers, out, rule, sinks, chosen, answers, sizes,
    WIDTH: gl.constexpr, COVERED: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """The 64 rows of consumer C."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    q_buffer, k_buffer, v_buffer = buffers
    q_full, k_full, k_empty, v_full, v_empty, turn = barriers
    H, T, S = sizes
    dtype: gl.constexpr = q_buffer.dtype
    start, head, b, h = _own(H, T)
    n_tiles, run, low, past = _walk(rule, b, start, T, S, 2 * ROWS, 4)
    n_full = run[0]
    row, state = _open(rule, b, h, start + C * ROWS, T, S, S_LAYOUT)
    q_td = q_buffer.index(C).reshape([ROWS, WIDTH])
    out_te = gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=O_LAYOUT)
    zero_ts = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=S_LAYOUT)
    mbarrier.wait(q_full.index(C), 0)
    if n_tiles > 0:
        mbarrier.wait(k_full.index(0), 0)
        mbarrier.wait(turn.index(C), 1 - C)
        k_ds = k_buffer.index(0).reshape([KEYS, WIDTH]).permute((1, 0))
        next_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False, is_async=True)
        mbarrier.arrive(turn.index(1 - C), count=1)
        x_ts = warpgroup_mma_wait(0, deps=[next_ts])
        _release(k_empty.index(0))
        w_ts, fade_t, state = _weigh(
            x_ts, state, _key(0, run), n_full == 0, rule, chosen, answers, row, (T, S),
            PLAIN, S_LAYOUT,
        )  # fmt: skip
        p_ts = gl.convert_layout(w_ts.to(dtype), P_LAYOUT)
        for n in range(1, n_tiles):
            slot = n % STAGES
            old = (n - 1) % STAGES
            old_use = ((n - 1) // STAGES) & 1
            if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
                if n - 1 >= n_full:
                    # Before any product, as it needs registers.
                    mbarrier.wait(v_full.index(old), old_use)
                    _clear(v_buffer.index(old), _key(n - 1, run), low, past, WIDTH)
            mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
            mbarrier.wait(turn.index(C), (n & 1) ^ (1 - C))
            k_ds = k_buffer.index(slot).reshape([KEYS, WIDTH]).permute((1, 0))
            next_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(old), old_use)
            v_se = v_buffer.index(old).reshape([KEYS, WIDTH])
            next_te = warpgroup_mma(p_ts, v_se, out_te, is_async=True)
            mbarrier.arrive(turn.index(1 - C), count=1)
            x_ts = warpgroup_mma_wait(1, deps=[next_ts])
            _release(k_empty.index(slot))
            w_ts, fade_t, state = _weigh(
                x_ts, state, _key(n, run), n >= n_full, rule, chosen, answers, row, (T, S),
                PLAIN, S_LAYOUT,
            )  # fmt: skip
            # Long since true. Its branch keeps the assembler from waiting before the softmax.
            mbarrier.wait(q_full.index(C), 0)
            out_te, p_ts = warpgroup_mma_wait(0, deps=[next_te, p_ts])
            _release(v_empty.index(old))
            p_ts = gl.convert_layout(w_ts.to(dtype), P_LAYOUT)
            out_te = _fade(out_te, fade_t, O_LAYOUT)
        old = (n_tiles - 1) % STAGES
        mbarrier.wait(v_full.index(old), ((n_tiles - 1) // STAGES) & 1)
        if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
            if n_tiles - 1 >= n_full:
                _clear(v_buffer.index(old), _key(n_tiles - 1, run), low, past, WIDTH)
        out_te = warpgroup_mma(p_ts, v_buffer.index(old).reshape([KEYS, WIDTH]), out_te)
        _release(v_empty.index(old))
    _finish(
        out_te, state, out, sinks, answers, (head, b, h), start + C * ROWS, T,
        WIDTH, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["H", "T", "S"])
def _shared(
    q, k, v, out, rule, sinks, chosen, answers, H, T, S,
    R: gl.constexpr, WIDTH: gl.constexpr, COVERED: gl.constexpr, PLAIN: gl.constexpr,
    CONSUMER: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """128 rows of one head: two warpgroups, and a warp that loads for both."""
    q_buffer = gl.allocate_shared_memory(q.dtype, [2, 1, 1, ROWS, WIDTH], q.layout)
    k_buffer = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, KEYS, WIDTH], k.layout)
    v_buffer = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, KEYS, WIDTH], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    sync_threads()
    buffers = (q_buffer, k_buffer, v_buffer)
    barriers = (q_full, k_full, k_empty, v_full, v_empty, turn)
    sizes = (H, T, S)
    gl.warp_specialize(
        [
            (_consume, (
                0, buffers, barriers, out, rule, sinks, chosen, answers, sizes,
                WIDTH, COVERED, PLAIN,
            )),
            (_consume, (
                1, buffers, barriers, out, rule, sinks, chosen, answers, sizes,
                WIDTH, COVERED, PLAIN,
            )),
            (_produce, ((q, k, v), buffers, barriers, rule, sizes, R, WIDTH)),
        ],
        [4, 1],
        [CONSUMER, LOADER],
    )  # fmt: skip


def run_forward(given: Rendered, out: Tensor, answers: Answers, mass: Tensor | None) -> None:
    """Write the output and the answers that are."""
    (B, H, T, D), S, G = given.q.shape, given.k.shape[2], given.k.shape[1]
    rule = rule_of(given)
    plain = rule.factor > 0.0 and rule.cap is None and rule.slopes is None
    chosen = None if mass is None else KeySet(mass, 0 if len(mass) == 1 else mass.stride(0))
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
    kernel, rows = _alone, ROWS.value
    if D > 64:
        kernel, rows = _shared, 2 * ROWS.value
        options |= {"CONSUMER": CONSUMER_REGISTERS, "LOADER": LOADER_REGISTERS}
    launch: Any = kernel[(B * H * triton.cdiv(T, rows),)]
    launch(
        describe(given.q, ROWS.value), describe(given.k, KEYS.value), describe(given.v, KEYS.value),
        view(out), rule, given.sinks, chosen, answers, H, T, S,
        R=H // G, WIDTH=D, COVERED=given.covered, PLAIN=plain, **options,
    )  # fmt: skip


def describe(x: Tensor, rows: int) -> TensorDescriptor:
    """How TMA reads so many rows of a head (B, H, T, D) at a time; beyond the last they are 0."""
    shape = [1, 1, rows, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(
        x, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype)
    )
