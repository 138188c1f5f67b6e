"""The Triton side of `seeing.py`: this module needs triton, and is imported where it runs.

Scores are counted in bits: multiplied by log2(e), so that a power of two is a weight. Strides are
passed for q and k, and offsets are 64-bit, so views of any layout and any size do. All programs are
numbered along one axis of the grid, the only one without a low limit.

Letters: B batch, T queries, S keys, H query heads, G key heads, R query heads a key head, D width;
t, s sizes of a tile, n slots of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.kernels.inputs import Inputs, RowSums

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
    max_t, sum_t, heat_t, far_t, key_t, q_td, k_head, start, lo_t, hi_t, i_t,
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
    highest_t = tl.maximum(max_t, tl.max(x_ts, 1))
    if PEAK:
        found_t = tl.min(tl.where(x_ts == highest_t[:, None], s[None, :], S), 1)
        key_t = tl.where(highest_t > max_t, found_t, key_t)
    fade_t = tl.exp2(max_t - highest_t)
    x_ts = x_ts - highest_t[:, None]
    w_ts = tl.exp2(x_ts)
    if ENTROPY:
        # Moving the top by a step moves every term by the step.
        heat_t = fade_t * (heat_t + sum_t * (max_t - highest_t))
        if MASKED:
            x_ts = tl.maximum(x_ts, LOWEST)
        heat_t += tl.sum(w_ts * x_ts, 1)
    if DISTANCE:
        away_ts = i_t.to(tl.float32)[:, None] - s.to(tl.float32)[None, :]
        far_t = fade_t * far_t + tl.sum(w_ts * away_ts, 1)
    return highest_t, fade_t * sum_t + tl.sum(w_ts, 1), heat_t, far_t, key_t


@triton.jit
def _rows(
    q, k, lo, hi, sinks,
    maxima, sums, lse, entropy, peak, key, distance,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, S, D, bits, cap_bits,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, SINKS: tl.constexpr,
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
    max_t = tl.full((ROWS,), LOWEST, tl.float32)
    sum_t = tl.zeros((ROWS,), tl.float32)
    heat_t = tl.zeros((ROWS,), tl.float32)
    far_t = tl.zeros((ROWS,), tl.float32)
    key_t = tl.full((ROWS,), -1, tl.int32)
    for start in range(first, tl.minimum(whole, last), KEYS):
        max_t, sum_t, heat_t, far_t, key_t = _take(
            max_t, sum_t, heat_t, far_t, key_t, q_td, k_head, start, lo_t, hi_t, i_t,
            k_s, k_d, S, D, bits, cap_bits,
            KEYS, WIDTH, CAPPED, EXACT, True, ENTROPY, PEAK, DISTANCE,
        )  # fmt: skip
    for start in range(whole, ends, KEYS):
        max_t, sum_t, heat_t, far_t, key_t = _take(
            max_t, sum_t, heat_t, far_t, key_t, q_td, k_head, start, lo_t, hi_t, i_t,
            k_s, k_d, S, D, bits, cap_bits,
            KEYS, WIDTH, CAPPED, EXACT, False, ENTROPY, PEAK, DISTANCE,
        )  # fmt: skip
    for start in range(ends, last, KEYS):
        max_t, sum_t, heat_t, far_t, key_t = _take(
            max_t, sum_t, heat_t, far_t, key_t, q_td, k_head, start, lo_t, hi_t, i_t,
            k_s, k_d, S, D, bits, cap_bits,
            KEYS, WIDTH, CAPPED, EXACT, True, ENTROPY, PEAK, DISTANCE,
        )  # fmt: skip
    highest_t = max_t
    total_t = sum_t
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * BITS
        highest_t = tl.maximum(max_t, sink)
        total_t = sum_t * tl.exp2(max_t - highest_t) + tl.exp2(sink - highest_t)
    empty_t = total_t == 0.0
    total_t = tl.where(empty_t, 1.0, total_t)
    share_t = tl.exp2(max_t - highest_t) / total_t
    row_t = head * T + t
    tl.store(maxima + row_t, highest_t, mask=real_t)
    tl.store(sums + row_t, total_t, mask=real_t)
    lse_t = tl.where(empty_t, float("-inf"), (highest_t + tl.log2(total_t)) * NATS)
    tl.store(lse + row_t, lse_t, mask=real_t)
    if ENTROPY:
        # The logsumexp less the maximum, but not by way of it, whose last digits would be lost.
        spread_t = (highest_t - max_t) + tl.log2(total_t)
        bits_t = tl.where(empty_t, 0.0, sum_t * share_t * spread_t) - heat_t * share_t
        tl.store(entropy + row_t, bits_t * NATS, mask=real_t)
    if PEAK:
        # A row that looks at a NaN has a sum of NaN, and no key.
        key_t = tl.where(sum_t == sum_t, key_t, -1)
        tl.store(peak + row_t, tl.where(sum_t == 0.0, 0.0, share_t), mask=real_t)
        tl.store(key + row_t, key_t.to(tl.int64), mask=real_t)
    if DISTANCE:
        tl.store(distance + row_t, far_t * share_t, mask=real_t)


@triton.jit
def _largest(
    q, k, lo, hi, maxima, sums, weights, keys,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, bounds_b,
    H, T, S, D, n_top, bits, cap_bits,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    SLOTS: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
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
    max_t = tl.load(maxima + row_t, mask=real_t, other=0.0)
    share_t = 1.0 / tl.load(sums + row_t, mask=real_t, other=1.0)
    best_tn = tl.where(slot < n_top, best_tn, none)
    for place in range(0, n_top):
        high_t = tl.max(best_tn, 1)
        found_t = tl.min(tl.where(best_tn == high_t[:, None], key_tn, S), 1)
        best_tn = tl.where(key_tn == found_t[:, None], none, best_tn)
        # Empty slots have no key, and stay until the last: rows that see fewer end with these.
        w_t = tl.exp2(high_t - max_t) * share_t
        found_t = tl.where(share_t == share_t, found_t, -1)
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


def run_rows(inputs: Inputs, sinks: Tensor | None, answers: dict[str, Tensor]) -> None:
    """Every row's numbers, written into `answers`; those it lacks are not computed."""
    (B, H, T, D), S = inputs.q.shape, inputs.k.shape[2]
    rows, keys, warps = tile_of(D, inputs.exact)
    maxima = answers["maxima"]
    launch: Any = _rows[(B * H * triton.cdiv(T, rows),)]
    launch(
        *inputs.tensors(),
        maxima if sinks is None else sinks, maxima, answers["sums"], answers["lse"], *(
            answers.get(name, maxima) for name in ("entropy", "peak", "key", "distance")
        ),
        *inputs.strides(), H, T, S, D, inputs.factor, inputs.cap,
        **inputs.options(), ROWS=rows, KEYS=keys, EXACT=inputs.exact,
        SINKS=sinks is not None,
        ENTROPY="entropy" in answers, PEAK="peak" in answers, DISTANCE="distance" in answers,
        num_warps=warps,
    )  # fmt: skip


def run_largest(inputs: Inputs, rows: RowSums, n_top: int) -> tuple[Tensor, Tensor]:
    """The largest weights of each row and their keys, (B, H, T, n_top)."""
    (B, H, T, D), S = inputs.q.shape, inputs.k.shape[2]
    side = 32 if inputs.exact else 64
    weights = torch.empty(B, H, T, n_top, dtype=torch.float32, device=inputs.q.device)
    keys = torch.empty(B, H, T, n_top, dtype=torch.int64, device=inputs.q.device)
    launch: Any = _largest[(B * H * triton.cdiv(T, side),)]
    launch(
        *inputs.tensors(), *rows.tensors(), weights, keys,
        *inputs.strides(), H, T, S, D, n_top, inputs.factor, inputs.cap,
        **inputs.options(), ROWS=side, KEYS=side, SLOTS=triton.next_power_of_2(n_top),
        EXACT=inputs.exact, num_warps=4,
    )  # fmt: skip
    return weights, keys


def run_singles(inputs: Inputs, lse: Tensor, keys: Tensor) -> Tensor:
    """Sums over some queries each, (N, B · H, bands), for the keys (N, T) named for all queries."""
    B, H, T, D = inputs.q.shape
    rows = 64
    bands = triton.cdiv(T, rows)
    out = torch.empty(len(keys), B * H, bands, dtype=torch.float32, device=inputs.q.device)
    launch: Any = _singles[(B * H * bands,)]
    launch(
        *inputs.tensors(), lse, keys, out,
        *inputs.strides(), H, T, D, len(keys), inputs.factor, inputs.cap,
        **inputs.options(), ROWS=rows, num_warps=4,
    )  # fmt: skip
    return out


def tile_of(width: int, exact: bool) -> tuple[int, int, int]:
    """Rows and keys of a tile, and warps, for a head of this width."""
    if exact:
        return 32, 32, 4
    return (128, 64, 4) if width <= 64 else (64, 64, 4)
