"""Device functions on rows and tiles for the kernels for Hopper, in Gluon.

Scores are in bits; rows are in the registers of one warpgroup. This module needs triton, and is
imported where it runs.

Letters: T queries, S keys; b, h, t, s one or some of each; e entries of a value.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from regard.ops.kernels import tile_kernels
from regard.ops.kernels.tile_kernels import BITS, LOWEST, NATS

ROWS = tl.constexpr(64)
"""Rows of a warpgroup."""
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
is_scattered = gluon.jit(tile_kernels.is_scattered.fn)
runs_of = gluon.jit(tile_kernels.runs_of.fn)
find_runs = gluon.jit(tile_kernels.find_runs.fn)


@gluon.jit
def walk(rule, b, start, T, S, N: gl.constexpr, WARPS: gl.constexpr):
    """The tiles of keys that N rows from `start` on see: how many, and what `first_key` needs.

    Last in the result are the first and past-the-last key that some row sees.
    """
    # Every warp computes this for all rows, so that none waits for another.
    LAYOUT: gl.constexpr = gl.BlockedLayout([N // 32], [32], [WARPS], [0])
    t = start + gl.arange(0, N, layout=LAYOUT)
    lo_t, hi_t = bounds_of(rule, b, gl.minimum(t, T - 1), T, S)
    first, whole, ends, n_full, n_before, n_mixed = find_runs(rule, b, lo_t, hi_t, t < T, S, KEYS)
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
def as_float(n):
    """Whole numbers of 0 to 2^23 as float32, without conversions, which compete with exp2.

    The numbers are put into the low bits of the float 2^23.
    """
    return (n + 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def in_eights(x_ts):
    """Split a tile's keys into j, c: key 8 j + c. Of a row a thread has two c with all their j."""
    return x_ts.reshape([ROWS, KEYS // 8, 8])


@gluon.jit
def eights_of(x_tjc):
    """The j of a tile's keys, (1, j, 1), which are compile-time constants."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, x_tjc.type.layout))
    j = gl.arange(0, KEYS // 8, layout=LAYOUT)
    return gl.expand_dims(gl.expand_dims(j, 0), 2)


@gluon.jit
def places_of(x_tc):
    """The c of a tile's keys, (1, c)."""
    return gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, x_tc.type.layout)), 0)


@gluon.jit
def first_highest(x_ts, top_t, start, S, LAYOUT: gl.constexpr):
    """The first key of each row whose score is `top_t`; S where there is none."""
    x_tjc = in_eights(gl.where(x_ts == gl.expand_dims(top_t, 1), 0, KEYS))
    j_tc = gl.min(gl.maximum(x_tjc, eights_of(x_tjc)), 1)
    s_tc = gl.where(j_tc < KEYS, start + 8 * j_tc + places_of(j_tc), S)
    return gl.convert_layout(gl.min(s_tc, 1), gl.SliceLayout(1, LAYOUT))


@gluon.jit
def sum_rows(w_ts, LAYOUT: gl.constexpr):
    """Sums of rows, added in the order of `sum_places`: outputs do not depend on what is asked."""
    sum_tc = gl.sum(in_eights(w_ts), 1)
    return gl.convert_layout(gl.sum(sum_tc, 1), gl.SliceLayout(1, LAYOUT))


@gluon.jit
def sum_places(w_ts, LAYOUT: gl.constexpr):
    """Sums of rows, and sums of each weight times its key's index in the tile."""
    w_tjc = in_eights(w_ts)
    sum_tc = gl.sum(w_tjc, 1)
    near_tc = 8.0 * gl.sum(w_tjc * eights_of(w_tjc).to(gl.float32), 1)
    near_tc += sum_tc * places_of(sum_tc).to(gl.float32)
    T_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return (
        gl.convert_layout(gl.sum(sum_tc, 1), T_LAYOUT),
        gl.convert_layout(gl.sum(near_tc, 1), T_LAYOUT),
    )


@gluon.jit
def hide_other_documents(x_ts, hidden, rule, b, t, s, S):
    """Scores, `hidden` where query and key are of two documents."""
    of_t = gl.load(rule.ids.queries + b * rule.ids.queries_b + t)
    of_s = gl.load(rule.ids.keys + b * rule.ids.keys_b + gl.minimum(s, S - 1))
    return gl.where(gl.expand_dims(of_t, 1) == gl.expand_dims(of_s, 0), x_ts, hidden)


@gluon.jit
def score(
    x_ts, hidden, start, is_mixed, rule, row, sizes, PLAIN: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Scores from products q·k, `hidden` for hidden pairs. PLAIN: without the factor as yet."""
    b, h, t, slope_t, place_t, lo_t, hi_t, _row_t = row
    T, S = sizes
    s = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    if not PLAIN:
        x_ts = x_ts * rule.factor
        if rule.cap is not None:
            x_ts = capped(x_ts, rule.cap)
        real_s = gl.minimum(s, S - 1)
        if rule.slopes is not None and rule.places is None:
            away_ts = gl.expand_dims(place_t, 1) - gl.expand_dims(as_float(real_s), 0)
            x_ts -= gl.expand_dims(slope_t, 1) * gl.abs(away_ts)
        else:
            x_ts = biased(
                x_ts, rule, b, h, gl.expand_dims(t, 1), gl.expand_dims(real_s, 0),
                gl.expand_dims(slope_t, 1), gl.expand_dims(place_t, 1), T, S,
            )  # fmt: skip
    if is_mixed:
        after_ts = gl.expand_dims(s, 0) >= gl.expand_dims(lo_t, 1)
        seen_ts = after_ts & (gl.expand_dims(s, 0) < gl.expand_dims(hi_t, 1))
        x_ts = gl.where(seen_ts, x_ts, hidden)
        if rule.ids is not None:  # noqa: SIM102 - this is decided when the kernel is compiled
            if is_scattered(rule, b):
                x_ts = hide_other_documents(x_ts, hidden, rule, b, t, s, S)
    return x_ts


@gluon.jit
def weigh(
    x_ts, state, n, start, is_mixed, rule, chosen, answers, row, sizes,
    PLAIN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The weights of the n-th tile, the factor of older sums, and the rows' running statistics.

    For an entropy, in which 0 · inf is NaN, hidden pairs get a finite score, twice the maximum
    that rows begin with. PLAIN: scores are multiplied by the factor late.
    """
    max_t, sum_t, heat_t, far_t, mass_t, key_t, crest_t = state
    b, h, t, _slope_t, _place_t, _lo_t, _hi_t, row_t = row
    T, S = sizes
    s = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    hidden = float("-inf")
    if answers.entropy is not None:
        hidden = 2.0 * LOWEST
        if PLAIN:
            hidden = 2.0 * LOWEST / gl.maximum(rule.factor, 1.0)
    x_ts = score(x_ts, hidden, start, is_mixed, rule, row, sizes, PLAIN, LAYOUT)
    top_t = gl.max(x_ts, 1)
    if answers.key is not None:
        found_t = first_highest(x_ts, top_t, start, S, LAYOUT)
    if PLAIN:
        top_t = top_t * rule.factor
    if answers.crests is not None:
        key = n * KEYS
        crest_t = gl.where(key % answers.crests.keys == 0, top_t, gl.maximum(crest_t, top_t))
        at = (
            answers.crests.at
            + b.to(gl.int64) * answers.crests.b
            + h.to(gl.int64) * answers.crests.h
        )
        gl.store(at + key // answers.crests.keys * answers.crests.run + row_t, crest_t)
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
        heat_t += gl.sum(w_ts * x_ts, 1)
    if answers.distance is None:
        part_t = sum_rows(w_ts, LAYOUT)
    else:
        part_t, near_t = sum_places(w_ts, LAYOUT)
        away_t = (t + (S - T - start)).to(gl.float32)
        far_t = fade_t * far_t + (part_t * away_t - near_t)
    if answers.mass is not None:
        of_s = gl.load(chosen.at + b * chosen.b + s, mask=s < S, other=0).to(gl.float32)
        mass_t = fade_t * mass_t + gl.sum(w_ts * gl.expand_dims(of_s, 0), 1)
    sum_t = fade_t * sum_t + part_t
    return w_ts, fade_t, (highest_t, sum_t, heat_t, far_t, mass_t, key_t, crest_t)


@gluon.jit
def load_tile(tensor, at, b, h, full, buffer, BYTES: gl.constexpr):
    """Start loading the rows of a head from `at` on, by TMA."""
    mbarrier.expect(full, BYTES)
    async_load(tensor, [b, h, at, 0], full, buffer)


@gluon.jit
def clear_unseen(buffer, start, low, past, WIDTH: gl.constexpr):
    """Clear the values that no row of the program sees, as 0 · NaN is NaN.

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
def know_rows(rule, b, h, start, T, S, N: gl.constexpr, LAYOUT: gl.constexpr):
    """What is known of N rows from `start` on; beyond the last t is clamped, row_t counts on."""
    row_t = start + gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    t = gl.minimum(row_t, T - 1)
    lo_t, hi_t = bounds_of(rule, b, t, T, S)
    slope_t, place_t = slope_of(rule, t * 0 + h), query_places(rule, b, t, T, S)
    return b, h, t, slope_t, place_t, lo_t, hi_t, row_t


@gluon.jit
def open_rows(rule, b, h, start, T, S, PLAIN: gl.constexpr, LAYOUT: gl.constexpr):
    """What a warpgroup knows of its rows, and their initial running statistics."""
    T_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = know_rows(rule, b, h, start, T, S, ROWS, LAYOUT)
    zero_t = gl.full([ROWS], 0.0, gl.float32, layout=T_LAYOUT)
    lowest_t = zero_t + LOWEST
    if PLAIN:
        lowest_t = zero_t + LOWEST * gl.minimum(rule.factor, 1.0)
    none_t = gl.full([ROWS], -1, gl.int32, layout=T_LAYOUT)
    return row, (lowest_t, zero_t, zero_t, zero_t, zero_t, none_t, lowest_t)


@gluon.jit
def scale_rows(out_te, fade_t, LAYOUT: gl.constexpr):
    """The output with each row multiplied by a number."""
    return out_te * gl.expand_dims(gl.convert_layout(fade_t, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def write_rows(
    out_te, state, out, sinks, answers, own, start, T,
    WIDTH: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write the output of a warpgroup's rows and the statistics asked for."""
    head, b, h = own
    t = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    real_t = t < T
    max_t, sum_t, heat_t, far_t, mass_t, key_t, _crest_t = state
    max_t = gl.where(sum_t == 0.0, LOWEST, max_t)
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
