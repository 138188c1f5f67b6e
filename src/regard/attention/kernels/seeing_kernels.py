"""The Triton side of `seeing.py`: this module needs triton, and is imported where it runs.

Scores are counted in bits: multiplied by log2(e), so that a power of two is a weight. Strides are
passed for q and k, and offsets are 64-bit, so views of any layout and any size do. All programs are
numbered along one axis of the grid, the only one without a low limit.

Letters: B batch, T queries, S keys, H query heads, G key heads, R query heads a key head, D width;
X, Y cells of a map down and across; t, s sizes of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.attention.kernels.bounds import Bounds

BITS = tl.constexpr(1.4426950408889634)
"""log2(e): from nats to bits."""
NATS = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e38)
"""Below every score, and still finite, so that no -inf meets a -inf."""


@triton.jit
def _product(a_md, b_nd, bits, cap_bits, CAPPED: tl.constexpr, EXACT: tl.constexpr):
    """a bᵀ as scores in bits, (m, n)."""
    if EXACT:
        scores_mn = tl.dot(a_md, tl.trans(b_nd), input_precision="ieee") * bits
    else:
        scores_mn = tl.dot(a_md, tl.trans(b_nd)) * bits
    if CAPPED:
        # c tanh(x / c), with tanh(y) = 1 - 2 / (exp(2y) + 1); cap_bits is c in bits.
        scores_mn = cap_bits * (1.0 - 2.0 / (tl.exp2(scores_mn * (2.0 * BITS / cap_bits)) + 1.0))
    return scores_mn


@triton.jit
def _scores(
    q_td, k_head, s, k_s, k_d, S, D, bits, cap_bits,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Scores of some queries with the keys s, in bits, (t, s)."""
    d = tl.arange(0, WIDTH)
    place_sd = k_head + s[:, None].to(tl.int64) * k_s + d[None, :] * k_d
    if WHOLE:
        k_sd = tl.load(place_sd, mask=(d < D)[None, :], other=0.0)
    else:
        k_sd = tl.load(place_sd, mask=(s < S)[:, None] & (d < D)[None, :], other=0.0)
    return _product(q_td, k_sd, bits, cap_bits, CAPPED, EXACT)


@triton.jit
def _open(
    q, lo, hi, b, h, t, real_t, q_b, q_h, q_t, q_d, bounds_b, D, WIDTH: tl.constexpr
):  # fmt: skip
    """The queries t of one head, (t, d), and the keys that each of them sees."""
    d = tl.arange(0, WIDTH)
    q_td = tl.load(
        q + b * q_b + h * q_h + t[:, None].to(tl.int64) * q_t + d[None, :] * q_d,
        mask=real_t[:, None] & (d < D)[None, :],
        other=0.0,
    )
    lo_t = tl.load(lo + b * bounds_b + t, mask=real_t, other=0)
    hi_t = tl.load(hi + b * bounds_b + t, mask=real_t, other=0)
    return q_td, lo_t, hi_t


@triton.jit
def _take(
    top_t, sum_t, heat_t, far_t, key_t, q_td, k_head, start, lo_t, hi_t, i_t,
    k_s, k_d, S, D, bits, cap_bits,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    MASKED: tl.constexpr, ENTROPY: tl.constexpr, PEAK: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Fold one tile into the running numbers of its rows."""
    s = start + tl.arange(0, KEYS)
    x_ts = _scores(
        q_td, k_head, s, k_s, k_d, S, D, bits, cap_bits, WIDTH, CAPPED, EXACT, not MASKED
    )
    if MASKED:
        seen_ts = (s[None, :] >= lo_t[:, None]) & (s[None, :] < hi_t[:, None])
        x_ts = tl.where(seen_ts, x_ts, float("-inf"))
    highest_t = tl.maximum(top_t, tl.max(x_ts, 1))
    if PEAK:
        found_t = tl.min(tl.where(x_ts == highest_t[:, None], s[None, :], S), 1)
        key_t = tl.where(highest_t > top_t, found_t, key_t)
    fade_t = tl.exp2(top_t - highest_t)
    x_ts = x_ts - highest_t[:, None]
    w_ts = tl.exp2(x_ts)
    if ENTROPY:
        # Moving the top by a step moves every term by the step.
        heat_t = fade_t * (heat_t + sum_t * (top_t - highest_t))
        if MASKED:
            x_ts = tl.maximum(x_ts, LOWEST)
        heat_t += tl.sum(w_ts * x_ts, 1)
    if DISTANCE:
        away_ts = i_t.to(tl.float32)[:, None] - s.to(tl.float32)[None, :]
        far_t = fade_t * far_t + tl.sum(w_ts * away_ts, 1)
    return highest_t, fade_t * sum_t + tl.sum(w_ts, 1), heat_t, far_t, key_t


@triton.jit
def _rows(
    q, k, lo, hi, sinks, spoiled,
    tops, sums, lse, entropy, peak, key, distance,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, S, D, bits, cap_bits,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, SINKS: tl.constexpr, SPOILED: tl.constexpr,
    ENTROPY: tl.constexpr, PEAK: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """What is asked about some queries of one head."""
    n_bands = tl.cdiv(T, ROWS)
    n_heads = tl.num_programs(0) // n_bands
    # Under a causal mask the last rows are the longest, and begin first.
    band = n_bands - 1 - tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    b, h = head // H, head % H
    t = band * ROWS + tl.arange(0, ROWS)
    real_t = t < T
    q_td, lo_t, hi_t = _open(q, lo, hi, b, h, t, real_t, q_b, q_h, q_t, q_d, bounds_b, D, WIDTH)
    k_head = k + b * k_b + (h // R) * k_g
    i_t = t + (S - T)
    first = tl.min(tl.where(hi_t > lo_t, lo_t, S), 0) // KEYS * KEYS
    last = tl.max(hi_t, 0)
    # Tiles from whole to ends are seen by every row, and need no mask.
    whole = tl.maximum(tl.cdiv(tl.max(lo_t, 0), KEYS) * KEYS, first)
    ends = tl.min(tl.where(real_t, hi_t, S), 0) // KEYS * KEYS
    ends = tl.maximum(ends, whole)
    top_t = tl.full((ROWS,), LOWEST, tl.float32)
    sum_t = tl.zeros((ROWS,), tl.float32)
    heat_t = tl.zeros((ROWS,), tl.float32)
    far_t = tl.zeros((ROWS,), tl.float32)
    key_t = tl.full((ROWS,), -1, tl.int32)
    for start in range(first, tl.minimum(whole, last), KEYS):
        top_t, sum_t, heat_t, far_t, key_t = _take(
            top_t, sum_t, heat_t, far_t, key_t, q_td, k_head, start, lo_t, hi_t, i_t,
            k_s, k_d, S, D, bits, cap_bits,
            KEYS, WIDTH, CAPPED, EXACT, True, ENTROPY, PEAK, DISTANCE,
        )  # fmt: skip
    for start in range(whole, ends, KEYS):
        top_t, sum_t, heat_t, far_t, key_t = _take(
            top_t, sum_t, heat_t, far_t, key_t, q_td, k_head, start, lo_t, hi_t, i_t,
            k_s, k_d, S, D, bits, cap_bits,
            KEYS, WIDTH, CAPPED, EXACT, False, ENTROPY, PEAK, DISTANCE,
        )  # fmt: skip
    for start in range(ends, last, KEYS):
        top_t, sum_t, heat_t, far_t, key_t = _take(
            top_t, sum_t, heat_t, far_t, key_t, q_td, k_head, start, lo_t, hi_t, i_t,
            k_s, k_d, S, D, bits, cap_bits,
            KEYS, WIDTH, CAPPED, EXACT, True, ENTROPY, PEAK, DISTANCE,
        )  # fmt: skip
    highest_t = top_t
    total_t = sum_t
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * BITS
        highest_t = tl.maximum(top_t, sink)
        total_t = sum_t * tl.exp2(top_t - highest_t) + tl.exp2(sink - highest_t)
    empty_t = total_t == 0.0
    total_t = tl.where(empty_t, 1.0, total_t)
    share_t = tl.exp2(top_t - highest_t) / total_t
    nan_t = real_t
    if SPOILED:
        nan_t = tl.load(spoiled + head * T + t, mask=real_t, other=0) != 0
    row_t = head * T + t
    tl.store(tops + row_t, highest_t, mask=real_t)
    tl.store(sums + row_t, total_t, mask=real_t)
    lse_t = tl.where(empty_t, float("-inf"), (highest_t + tl.log2(total_t)) * NATS)
    if SPOILED:
        lse_t = tl.where(nan_t, float("nan"), lse_t)
    tl.store(lse + row_t, lse_t, mask=real_t)
    if ENTROPY:
        # The log-sum less the top, but not by way of the log-sum, whose last digits would be lost.
        spread_t = (highest_t - top_t) + tl.log2(total_t)
        bits_t = tl.where(empty_t, 0.0, sum_t * share_t * spread_t) - heat_t * share_t
        if SPOILED:
            bits_t = tl.where(nan_t, float("nan"), bits_t)
        tl.store(entropy + row_t, bits_t * NATS, mask=real_t)
    if PEAK:
        peak_t = tl.where(sum_t > 0.0, share_t, 0.0)
        if SPOILED:
            peak_t = tl.where(nan_t, float("nan"), peak_t)
            key_t = tl.where(nan_t, -1, key_t)
        tl.store(peak + row_t, peak_t, mask=real_t)
        tl.store(key + row_t, key_t.to(tl.int64), mask=real_t)
    if DISTANCE:
        far_t = far_t * share_t
        if SPOILED:
            far_t = tl.where(nan_t, float("nan"), far_t)
        tl.store(distance + row_t, far_t, mask=real_t)


@triton.jit
def _weights(
    q_td, k_head, s, lo_t, hi_t, top_t, nan_t, edged, k_s, k_d, S, D, bits, cap_bits,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, SPOILED: tl.constexpr,
):  # fmt: skip
    """The weights of some queries on the keys s, each row's still to be shared out, (s, t).

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
    w_st = tl.exp2(x_st - top_t[None, :])
    if edged:
        seen_st = (s[:, None] >= lo_t[None, :]) & (s[:, None] < hi_t[None, :])
        w_st = tl.where(seen_st, w_st, 0.0)
        if SPOILED:
            w_st = tl.where(seen_st & nan_t[None, :], float("nan"), w_st)
    elif SPOILED:
        w_st = tl.where(nan_t[None, :], float("nan"), w_st)
    return w_st


@triton.jit
def _parts(
    q, k, lo, hi, tops, sums, spoiled, out,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, S, D, bits, cap_bits,
    t0, span, X, x_first, n_cells, n_slices, s0, s1,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    CELLS: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, SPOILED: tl.constexpr,
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
    top_t = tl.load(tops + row_t, mask=real_t, other=0.0)
    share_t = 1.0 / tl.load(sums + row_t, mask=real_t, other=1.0)
    nan_t = real_t
    if SPOILED:
        nan_t = tl.load(spoiled + row_t, mask=real_t, other=0) != 0
    first = s0 + (tl.min(tl.where(hi_t > lo_t, lo_t, s1), 0) - s0) // KEYS * KEYS
    last = tl.max(hi_t, 0)
    whole, ends = tl.max(lo_t, 0), tl.min(tl.where(real_t, hi_t, s1), 0)
    n_t = (t - t0).to(tl.int64) * X
    width = (s1 - s0).to(tl.int64)
    for start in range(first, last, KEYS):
        s = start + tl.arange(0, KEYS)
        w_st = _weights(
            q_td, k_head, s, lo_t, hi_t, top_t, nan_t, (start < whole) | (start + KEYS > ends),
            k_s, k_d, S, D, bits, cap_bits, WIDTH, CAPPED, EXACT, SPOILED,
        )  # fmt: skip
        for c in tl.static_range(CELLS):
            x = (x0 + c).to(tl.int64) * span
            part_t = tl.minimum(x + span, n_t + X) - tl.maximum(x, n_t)
            part_t = tl.where(real_t, tl.maximum(part_t, 0), 0)
            p_st = w_st * (share_t * (part_t.to(tl.float32) / span))[None, :]
            if SPOILED:
                # A cell that a row has no part in does not suffer from its NaN.
                p_st = tl.where((part_t > 0)[None, :], p_st, 0.0)
            # No row has a part in a cell beyond the last: its sums are zeros.
            row = (head * groups + group) * CELLS + c
            tl.store(out + row * width + (s - s0), tl.sum(p_st, 1), mask=s < s1)


@triton.jit
def _grid(
    q, k, lo, hi, tops, sums, spoiled, cells, bands,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, S, D, bits, cap_bits, t0, t1, s0, s1, x_first, height, share,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, SPOILED: tl.constexpr,
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
    top_t = tl.load(tops + row_t, mask=real_t, other=0.0)
    share_t = tl.where(real_t, 1.0 / tl.load(sums + row_t, mask=real_t, other=1.0), 0.0)
    nan_t = real_t
    if SPOILED:
        nan_t = tl.load(spoiled + row_t, mask=real_t, other=0) != 0
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
            q_td, k_head, s, lo_t, hi_t, top_t, nan_t, (start < whole) | (start + KEYS > ends),
            k_s, k_d, S, D, bits, cap_bits, WIDTH, CAPPED, EXACT, SPOILED,
        )  # fmt: skip
        w_st = w_st * share_t[None, :]
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


@triton.jit
def _largest(
    q, k, lo, hi, tops, sums, spoiled, weights, keys,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, S, D, n_top, bits, cap_bits,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    SLOTS: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, SPOILED: tl.constexpr,
):  # fmt: skip
    """The largest weights of some queries of one head, and their keys, largest first.

    Each row has a slot for each score it keeps. As long as a tile has one that is above the lowest
    of its row's, it takes that one's place; most tiles have none, once some are seen.
    """
    n_bands = tl.cdiv(T, ROWS)
    n_heads = tl.num_programs(0) // n_bands
    band = n_bands - 1 - tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    b, h = head // H, head % H
    t = band * ROWS + tl.arange(0, ROWS)
    real_t = t < T
    q_td, lo_t, hi_t = _open(q, lo, hi, b, h, t, real_t, q_b, q_h, q_t, q_d, bounds_b, D, WIDTH)
    k_head = k + b * k_b + (h // R) * k_g
    slot = tl.arange(0, SLOTS)[None, :]
    none = float("-inf")
    # Slots beyond those asked for are never the lowest.
    best_tn = tl.zeros((ROWS, SLOTS), tl.float32) + tl.where(slot < n_top, none, float("inf"))
    key_tn = tl.full((ROWS, SLOTS), -1, tl.int32)
    low_t = tl.min(best_tn, 1)
    first = tl.min(tl.where(hi_t > lo_t, lo_t, S), 0) // KEYS * KEYS
    for start in range(first, tl.max(hi_t, 0), KEYS):
        s = start + tl.arange(0, KEYS)
        x_ts = _scores(q_td, k_head, s, k_s, k_d, S, D, bits, cap_bits, WIDTH, CAPPED, EXACT, False)
        seen_ts = (s[None, :] >= lo_t[:, None]) & (s[None, :] < hi_t[:, None])
        x_ts = tl.where(seen_ts, x_ts, none)
        high_t = tl.max(x_ts, 1)
        left = tl.sum((high_t > low_t).to(tl.int32), 0)
        while left > 0:
            found_t = tl.min(tl.where(x_ts == high_t[:, None], s[None, :], S), 1)
            goes_t = tl.max(tl.where(best_tn == low_t[:, None], slot, -1), 1)
            goes_tn = (slot == goes_t[:, None]) & (high_t > low_t)[:, None]
            best_tn = tl.where(goes_tn, high_t[:, None], best_tn)
            key_tn = tl.where(goes_tn, found_t[:, None], key_tn)
            x_ts = tl.where(s[None, :] == found_t[:, None], none, x_ts)
            low_t = tl.min(best_tn, 1)
            high_t = tl.max(x_ts, 1)
            left = tl.sum((high_t > low_t).to(tl.int32), 0)
    row_t = head * T + t
    top_t = tl.load(tops + row_t, mask=real_t, other=0.0)
    share_t = 1.0 / tl.load(sums + row_t, mask=real_t, other=1.0)
    best_tn = tl.where(slot < n_top, best_tn, none)
    for place in range(0, n_top):
        high_t = tl.max(best_tn, 1)
        found_t = tl.min(tl.where(best_tn == high_t[:, None], key_tn, S), 1)
        best_tn = tl.where(key_tn == found_t[:, None], none, best_tn)
        # Empty slots have no key, and stay until the last: rows that see fewer end with these.
        w_t = tl.exp2(high_t - top_t) * share_t
        if SPOILED:
            nan_t = tl.load(spoiled + row_t, mask=real_t, other=0) != 0
            w_t = tl.where(nan_t, float("nan"), w_t)
            found_t = tl.where(nan_t, -1, found_t)
        tl.store(weights + row_t * n_top + place, w_t, mask=real_t)
        tl.store(keys + row_t * n_top + place, found_t.to(tl.int64), mask=real_t)


@triton.jit
def _singles(
    q, k, lo, hi, lse, keys, out,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, D, n_kinds, bits, cap_bits,
    R: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """For some queries of one head: the sums of their weights on the keys named for each."""
    n_bands = tl.cdiv(T, ROWS)
    band = tl.program_id(0) % n_bands
    head = (tl.program_id(0) // n_bands).to(tl.int64)
    b, h = head // H, head % H
    t = band * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    real_t = t < T
    q_td, lo_t, hi_t = _open(q, lo, hi, b, h, t, real_t, q_b, q_h, q_t, q_d, bounds_b, D, WIDTH)
    q_td = q_td.to(tl.float32)
    k_head = k + b * k_b + (h // R) * k_g
    lse_t = tl.load(lse + head * T + t, mask=real_t, other=0.0) * BITS
    for n in range(0, n_kinds):
        s_t = tl.load(keys + n * T + t, mask=real_t, other=-1)
        seen_t = (s_t >= lo_t) & (s_t < hi_t)
        k_td = tl.load(
            k_head + s_t[:, None].to(tl.int64) * k_s + d[None, :] * k_d,
            mask=(seen_t & real_t)[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        x_t = tl.sum(q_td * k_td, 1) * bits
        if CAPPED:
            x_t = cap_bits * (1.0 - 2.0 / (tl.exp2(x_t * (2.0 * BITS / cap_bits)) + 1.0))
        w_t = tl.where(seen_t, tl.exp2(x_t - lse_t), 0.0)
        tl.store(out + (n * tl.num_programs(0)) + tl.program_id(0), tl.sum(w_t, 0))


def run_singles(
    q: Tensor,
    k: Tensor,
    bounds: Bounds,
    lse: Tensor,
    keys: Tensor,
    numbers: tuple[float, float],
) -> Tensor:
    """Sums over some queries each, (N, B · H, bands), for the keys (N, T) named for all queries."""
    B, H, T, D = q.shape
    lo, hi = bounds.lo, bounds.hi
    rows = 64
    bands = triton.cdiv(T, rows)
    out = torch.empty(len(keys), B * H, bands, dtype=torch.float32, device=q.device)
    launch: Any = _singles[(B * H * bands,)]
    launch(
        q, k, lo, hi, lse, keys, out,
        *q.stride(), *k.stride(), 0 if len(lo) == 1 else lo.stride(0),
        H, T, D, len(keys), *numbers,
        R=H // k.shape[1], ROWS=rows, WIDTH=triton.next_power_of_2(D), CAPPED=numbers[1] > 0.0,
        num_warps=4,
    )  # fmt: skip
    return out


def run_rows(
    q: Tensor,
    k: Tensor,
    bounds: Bounds,
    sinks: Tensor | None,
    spoiled: Tensor | None,
    answers: dict[str, Tensor],
    numbers: tuple[float, float],
) -> None:
    """Every row's numbers, written into `answers`; those it lacks are not computed."""
    (B, H, T, D), S = q.shape, k.shape[2]
    lo, hi = bounds.lo, bounds.hi
    bits, cap_bits = numbers
    exact = q.dtype == torch.float32
    rows, keys, warps = tile_of(D, exact)
    tops = answers["tops"]
    launch: Any = _rows[(B * H * triton.cdiv(T, rows),)]
    launch(
        q, k, lo, hi, tops if sinks is None else sinks, tops if spoiled is None else spoiled,
        tops, answers["sums"], answers["lse"], *(
            answers.get(name, tops) for name in ("entropy", "peak", "key", "distance")
        ),
        *q.stride(), *k.stride(), 0 if len(lo) == 1 else lo.stride(0),
        H, T, S, D, bits, cap_bits,
        R=H // k.shape[1], ROWS=rows, KEYS=keys, WIDTH=max(16, triton.next_power_of_2(D)),
        CAPPED=cap_bits > 0.0, EXACT=exact, SINKS=sinks is not None, SPOILED=spoiled is not None,
        ENTROPY="entropy" in answers, PEAK="peak" in answers, DISTANCE="distance" in answers,
        num_warps=warps,
    )  # fmt: skip


def run_largest(
    q: Tensor,
    k: Tensor,
    bounds: Bounds,
    rows: tuple[Tensor, Tensor, Tensor | None],
    numbers: tuple[float, float],
    n_top: int,
) -> tuple[Tensor, Tensor]:
    """The largest weights of each row and their keys, (B, H, T, n_top).

    rows: top and sum of each row, and which are NaN.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    lo, hi = bounds.lo, bounds.hi
    tops, sums, spoiled = rows
    exact = q.dtype == torch.float32
    n_rows = 32 if exact else 64
    weights = torch.empty(B, H, T, n_top, dtype=torch.float32, device=q.device)
    keys = torch.empty(B, H, T, n_top, dtype=torch.int64, device=q.device)
    launch: Any = _largest[(B * H * triton.cdiv(T, n_rows),)]
    launch(
        q, k, lo, hi, tops, sums, tops if spoiled is None else spoiled, weights, keys,
        *q.stride(), *k.stride(), 0 if len(lo) == 1 else lo.stride(0),
        H, T, S, D, n_top, *numbers,
        R=H // k.shape[1], ROWS=n_rows, KEYS=n_rows, WIDTH=max(16, triton.next_power_of_2(D)),
        SLOTS=triton.next_power_of_2(n_top), CAPPED=numbers[1] > 0.0, EXACT=exact,
        SPOILED=spoiled is not None, num_warps=4,
    )  # fmt: skip
    return weights, keys


def run_parts(
    q: Tensor,
    k: Tensor,
    bounds: Bounds,
    rows: tuple[Tensor, Tensor, Tensor | None],
    numbers: tuple[float, float],
    cells: tuple[int, int, int, int, int],
    cut: tuple[int, int, int],
    keys: tuple[int, int],
) -> Tensor:
    """Means over the rows of cells, (B · H, parts, keys).

    rows: top and sum of each row, and which are NaN. cells: the first query and the queries of the
    whole map, its height, the first cell and how many of them. cut: rows of a tile, cells in it,
    slices of a cell.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    lo, hi = bounds.lo, bounds.hi
    tops, sums, spoiled = rows
    t0, span, height, first, n_cells = cells
    n_rows, n_in_tile, n_slices = cut
    groups = triton.cdiv(n_cells, n_in_tile) * n_slices
    size = (B * H, groups * n_in_tile, keys[1] - keys[0])
    out = torch.zeros(size, dtype=torch.float32, device=q.device)
    exact = q.dtype == torch.float32
    launch: Any = _parts[(B * H * groups,)]
    launch(
        q, k, lo, hi, tops, sums, tops if spoiled is None else spoiled, out,
        *q.stride(), *k.stride(), 0 if len(lo) == 1 else lo.stride(0),
        H, T, S, D, *numbers,
        t0, span, height, first, n_cells, n_slices, *keys,
        R=H // k.shape[1], ROWS=n_rows, KEYS=32 if exact else 64,
        WIDTH=max(16, triton.next_power_of_2(D)), CELLS=n_in_tile,
        CAPPED=numbers[1] > 0.0, EXACT=exact, SPOILED=spoiled is not None,
        num_warps=4,
    )  # fmt: skip
    return out


def run_grid(
    q: Tensor,
    k: Tensor,
    bounds: Bounds,
    rows: tuple[Tensor, Tensor, Tensor | None],
    numbers: tuple[float, float],
    window: tuple[int, int, int, int],
    tile: tuple[int, int],
    cell: tuple[int, int],
    cells: Tensor,
    first: int,
    share: float,
) -> Tensor:
    """Sums of the weights in a window by key, (B · H, bands, keys); times `share` into `cells`.

    rows: top and sum of each row, and which are NaN. tile, cell: rows and keys of each. cells,
    (B · H, X, Y), are filled from row `first` on, where any weight is seen.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    tops, sums, spoiled = rows
    lo, hi = bounds.lo, bounds.hi
    t0, t1, s0, s1 = window
    n_bands = triton.cdiv(t1 - t0, tile[0])
    bands = torch.zeros(B * H, n_bands, s1 - s0, dtype=torch.float32, device=q.device)
    launch: Any = _grid[(B * H * n_bands,)]
    launch(
        q, k, lo, hi, tops, sums, tops if spoiled is None else spoiled, cells, bands,
        *q.stride(), *k.stride(), 0 if len(lo) == 1 else lo.stride(0),
        H, T, S, D, *numbers, *window, first, cells.shape[1], share,
        R=H // k.shape[1], ROWS=tile[0], KEYS=tile[1], WIDTH=max(16, triton.next_power_of_2(D)),
        TALL=cell[0], WIDE=cell[1], CAPPED=numbers[1] > 0.0, EXACT=q.dtype == torch.float32,
        SPOILED=spoiled is not None, num_warps=4,
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


def tile_of(width: int, exact: bool) -> tuple[int, int, int]:
    """Rows and keys of a tile, and warps, for a head of this width."""
    if exact:
        return 32, 32, 4
    return (128, 64, 4) if width <= 64 else (64, 64, 4)
