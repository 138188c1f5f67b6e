"""What the two kernels of `flash_hopper_kernels.py` do with rows and tiles, in Gluon.

Scores are in bits; rows lie in the registers of one warpgroup. This module needs triton, and is
imported where it runs.

Letters: T queries, S keys; b, h, t, s one or some of each; e places of a value.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from regard.ops.kernels import tile_kernels
from regard.ops.kernels.tile_kernels import BITS, LOWEST, NATS

ROWS = tl.constexpr(64)
"""Of a warpgroup."""
KEYS = tl.constexpr(128)
STAGES = tl.constexpr(2)

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
def walk(rule, b, start, T, S, N: gl.constexpr, WARPS: gl.constexpr):
    """The tiles of keys that N rows from `start` on see: how many, and what `first_key` needs.

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
def first_key(n, run):
    """The first key of the n-th tile: the full ones first, then the mixed ones on either side."""
    n_full, n_before, first, whole, ends = run
    m = n - n_full
    edge = gl.where(m < n_before, first + m * KEYS, ends + (m - n_before) * KEYS)
    return gl.where(n < n_full, whole + n * KEYS, edge)


@gluon.jit
def as_float(n, zero):
    """Whole numbers of 0 to 2^23 as float32, without conversions, which take turns with exp2.

    They become the low bits of 2^23. zero: 0, in a way that the compiler does not see through, so
    that it does not keep all n in registers.
    """
    return (n + (0x4B000000 + zero)).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def weigh(
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
            away_ts = gl.expand_dims(place_t, 1) - gl.expand_dims(as_float(real_s, 0), 0)
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
        near_t = gl.sum(w_ts * gl.expand_dims(as_float(column_s, start >> 30), 0), 1)
        away_t = (t + (S - T - start)).to(gl.float32)
        far_t = fade_t * far_t + (part_t * away_t - near_t)
    if answers.mass is not None:
        of_s = gl.load(chosen.at + b * chosen.b + s, mask=s < S, other=0).to(gl.float32)
        mass_t = fade_t * mass_t + gl.sum(w_ts * gl.expand_dims(of_s, 0), 1)
    sum_t = fade_t * sum_t + part_t
    return w_ts, fade_t, (highest_t, sum_t, heat_t, far_t, mass_t, key_t)


@gluon.jit
def load_tile(tensor, at, b, h, full, buffer, BYTES: gl.constexpr):
    """Ask for the rows of a head from `at` on."""
    mbarrier.expect(full, BYTES)
    async_load(tensor, [b, h, at, 0], full, buffer)


@gluon.jit
def clear_unseen(buffer, start, low, past, WIDTH: gl.constexpr):
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
def open_rows(rule, b, h, start, T, S, LAYOUT: gl.constexpr):
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
def scale_rows(out_te, fade_t, LAYOUT: gl.constexpr):
    """Rows of the output times a number each."""
    return out_te * gl.expand_dims(gl.convert_layout(fade_t, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def write_rows(
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
    out_te = scale_rows(out_te, share_t, O_LAYOUT).to(out.at.dtype.element_ty)
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
