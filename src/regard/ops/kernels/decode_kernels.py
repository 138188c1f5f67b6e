"""The Triton side of `decode.py`: this module needs triton, and is imported where it runs.

Strides are passed for every tensor, so views of any layout will do, and offsets are 64-bit, so
caches of any size will do. All programs are numbered along one axis of the grid, the only one
without a low limit. Scores and sums are float32, in nats.

No load depends on another: which keys are read follows from where the stretch begins and ends, and
hidden keys in between get the weight 0. Positions of keys are loaded a tile ahead, as nothing else
would hide their latency; Triton does this for keys and values. With one query what is seen of a
tile is the same for all heads, and is computed once per key instead of once per pair.

A hidden value that is not finite would turn that 0 into NaN. So a stretch whose output is not
finite is walked once more, summing only finite values and marking rows that do see another; no
other stretch pays for it.

Letters: B batch, T queries, S keys, H query heads, G key heads, R query heads a key head, D and E
widths, P parts of the keys; r rows of a tile (pairs of a query and a head), s keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest float32: below every score, and finite, so that no -inf meets a -inf."""
SLOTS = tl.constexpr(6)
"""Numbers that a part stores for each row: maximum, sum, moment, distance, mass, key."""
SCAN = tl.constexpr(1024)
"""Positions that are read at once where a stretch is cut to what is seen."""


@triton.jit
def _fold(
    max_r, sum_r, out_re, moment_r, away_r, mass_r, key_r, spoilt_r,
    start, stop, at_s, lo_r, hi_r, at_r, i_r, slope_r, of_r, q_rd,
    k_head, v_head, added_r, mass_b, ids_b,
    k_s, k_d, v_s, v_e, added_s, mass_s, ids_s, left, right, scale, softcap,
    D: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ONE: tl.constexpr,
    STAGGERED: tl.constexpr, SEEN: tl.constexpr, ADDED: tl.constexpr,
    DOCUMENTS: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    ENTROPY: tl.constexpr, PEAK: tl.constexpr, DISTANCE: tl.constexpr, MASS: tl.constexpr,
    FINITE: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys, at positions at_s, into the running statistics of its rows.

    ONE: there is one query, so that all rows have one position and one document. FINITE: only
    finite values are summed, and spoilt_r counts for each row the others that it sees.
    """
    s = start + tl.arange(0, KEYS)
    j_s = s.to(tl.int64)
    d = tl.arange(0, WIDTH).to(tl.int64)
    e = tl.arange(0, VALUES).to(tl.int64)
    inside_s = s < stop
    seen_s = inside_s
    if SEEN:
        seen_s = seen_s & (at_s >= 0)
    if ONE:
        at = tl.max(at_r, 0)
        if SEEN:
            seen_s = seen_s & (at - at_s <= left) & (at_s - at <= right)
        if DOCUMENTS:
            of_s = tl.load(ids_b + j_s * ids_s, mask=inside_s, other=0)
            seen_s = seen_s & (tl.max(of_r, 0) == of_s)
    k_sd = tl.load(
        k_head + j_s[:, None] * k_s + d[None, :] * k_d,
        mask=inside_s[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if EXACT:
        x_rs = tl.dot(q_rd, tl.trans(k_sd), input_precision="ieee") * scale
    else:
        x_rs = tl.dot(q_rd, tl.trans(k_sd)) * scale
    # An infinity in q or k must not pass for a weight of 0, or hide behind the cap.
    x_rs = tl.where(tl.abs(x_rs) == float("inf"), float("nan"), x_rs)
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows nor cancels badly here.
        x_rs = softcap * (1.0 - 2.0 / (tl.exp(2.0 * x_rs / softcap) + 1.0))
    seen_rs = seen_s[None, :]
    if ONE:
        if ALIBI:
            x_rs -= slope_r[:, None] * tl.abs(at - at_s).to(tl.float32)[None, :]
    else:
        if ALIBI:
            x_rs -= slope_r[:, None] * tl.abs(at_r[:, None] - at_s[None, :]).to(tl.float32)
        if STAGGERED:
            seen_rs = seen_rs & (s[None, :] >= lo_r[:, None]) & (s[None, :] < hi_r[:, None])
        if SEEN:
            seen_rs = seen_rs & (at_r[:, None] - at_s[None, :] <= left)
            seen_rs = seen_rs & (at_s[None, :] - at_r[:, None] <= right)
        if DOCUMENTS:
            of_s = tl.load(ids_b + j_s * ids_s, mask=inside_s, other=0)
            seen_rs = seen_rs & (of_r[:, None] == of_s[None, :])
    if ADDED:
        added_rs = tl.load(
            added_r[:, None] + j_s[None, :] * added_s,
            mask=inside_s[None, :],
            other=float("-inf"),
        ).to(tl.float32)
        x_rs += added_rs
        seen_rs = seen_rs & (added_rs > float("-inf"))
    x_rs = tl.where(seen_rs, x_rs, float("-inf"))
    highest_r = tl.maximum(max_r, tl.max(x_rs, 1))
    if PEAK:
        found_r = tl.min(tl.where(x_rs == highest_r[:, None], s[None, :], stop), 1)
        key_r = tl.where(highest_r > max_r, found_r, key_r)
    step_r = tl.maximum(max_r - highest_r, LOWEST)
    fade_r = tl.exp(step_r)
    x_rs = x_rs - highest_r[:, None]
    w_rs = tl.exp(x_rs)
    if ENTROPY:
        # Raising the maximum by a step lowers every term by the step.
        moment_r = fade_r * (moment_r + sum_r * step_r)
        moment_r += tl.sum(w_rs * tl.maximum(x_rs, LOWEST), 1)
    if DISTANCE:
        away_rs = (i_r[:, None] - s[None, :]).to(tl.float32)
        away_r = fade_r * away_r + tl.sum(w_rs * away_rs, 1)
    if MASS:
        counts_s = tl.load(mass_b + j_s * mass_s, mask=inside_s, other=0).to(tl.float32)
        mass_r = fade_r * mass_r + tl.sum(w_rs * counts_s[None, :], 1)
    sum_r = fade_r * sum_r + tl.sum(w_rs, 1)
    if E > 0:
        v_se = tl.load(
            v_head + j_s[:, None] * v_s + e[None, :] * v_e,
            mask=inside_s[:, None] & (e < E)[None, :],
            other=0.0,
        )
        if FINITE:
            finite_se = tl.abs(v_se.to(tl.float32)) < float("inf")
            v_se = tl.where(finite_se, v_se, 0.0).to(v_se.dtype)
            spoilt_s = 1 - tl.min(finite_se.to(tl.int32), 1)
            spoilt_r += tl.sum(tl.where(seen_rs, spoilt_s[None, :], 0), 1)
        out_re *= fade_r[:, None]
        if EXACT:
            out_re += tl.dot(w_rs.to(v_se.dtype), v_se, input_precision="ieee")
        else:
            out_re += tl.dot(w_rs.to(v_se.dtype), v_se)
    return highest_r, sum_r, out_re, moment_r, away_r, mass_r, key_r, spoilt_r


@triton.jit
def _finish(
    max_r, sum_r, out_re, moment_r, away_r, mass_r, key_r, row_r, b, h_r, t_r, real_r,
    sinks, out, stats, key, n_rows, H, T,
    E: tl.constexpr, VALUES: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    ENTROPY: tl.constexpr, PEAK: tl.constexpr, DISTANCE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Divide by the sums of whole rows, sinks included, and write what is asked for.

    LSE to MASS: 0 where it is not asked for, else its index in `stats`, counted from 1; the largest
    logit is stored behind the peak.
    """
    n_rows = n_rows.to(tl.int64)
    top_r = max_r
    total_r = sum_r
    if SINKS:
        sink_r = tl.load(sinks + h_r).to(tl.float32)
        top_r = tl.maximum(max_r, sink_r)
        total_r = sum_r * tl.exp(max_r - top_r) + tl.exp(sink_r - top_r)
    empty_r = total_r == 0.0
    total_r = tl.where(empty_r, 1.0, total_r)
    share_r = tl.exp(max_r - top_r) / total_r
    if LSE:
        lse_r = tl.where(empty_r, float("-inf"), top_r + tl.log(total_r))
        tl.store(stats + (LSE - 1) * n_rows + row_r, lse_r, mask=real_r)
    if ENTROPY:
        spread_r = (top_r - max_r) + tl.log(total_r)
        entropy_r = tl.where(sum_r == 0.0, 0.0, sum_r * share_r * spread_r) - moment_r * share_r
        tl.store(stats + (ENTROPY - 1) * n_rows + row_r, entropy_r, mask=real_r)
    if PEAK:
        nothing_r = sum_r == 0.0
        weight_r = tl.where(nothing_r, 0.0, share_r)
        tl.store(stats + (PEAK - 1) * n_rows + row_r, weight_r, mask=real_r)
        # A row of NaN has no largest logit, and no key.
        logit_r = tl.where(nothing_r, float("-inf"), max_r + 0.0 * sum_r)
        tl.store(stats + PEAK * n_rows + row_r, logit_r, mask=real_r)
        key_r = tl.where(total_r == total_r, key_r, -1)
        tl.store(key + row_r, key_r.to(tl.int64), mask=real_r)
    if DISTANCE:
        tl.store(stats + (DISTANCE - 1) * n_rows + row_r, away_r * share_r, mask=real_r)
    if MASS:
        tl.store(stats + (MASS - 1) * n_rows + row_r, mass_r * share_r, mask=real_r)
    if E > 0:
        e = tl.arange(0, VALUES)
        cell_r = ((b * T + t_r) * H + h_r) * E
        tl.store(
            out + cell_r[:, None] + e[None, :],
            (out_re * share_r[:, None]).to(out.dtype.element_ty),
            mask=real_r[:, None] & (e < E)[None, :],
        )


@triton.jit
def _stand(start, stop, keys_b, keys_s, KEYS: tl.constexpr, PLACED: tl.constexpr):
    """The positions of a tile's keys: their indices, or those given, -1 beyond the last."""
    s = start + tl.arange(0, KEYS)
    at_s = s.to(tl.int64)
    if PLACED:
        at_s = tl.load(keys_b + at_s * keys_s, mask=s < stop, other=-1).to(tl.int64)
    return at_s


@triton.jit
def _find_seen(first, last, low, high, keys_b, keys_s, left, right):
    """The keys first .. last, cut at both ends to those that queries at low .. high may see."""
    begin_s = tl.zeros((SCAN,), tl.int32) + last
    end_s = tl.zeros((SCAN,), tl.int32) + first
    for start in range(first, last, SCAN):
        s = start + tl.arange(0, SCAN)
        at_s = _stand(start, last, keys_b, keys_s, SCAN, True)
        seen_s = (at_s >= 0) & (low - at_s <= left) & (at_s - high <= right)
        begin_s = tl.minimum(begin_s, tl.where(seen_s, s, last))
        end_s = tl.maximum(end_s, tl.where(seen_s, s + 1, first))
    return tl.min(begin_s, 0), tl.max(end_s, 0)


@triton.jit(do_not_specialize=["S", "n_parts", "n_rows", "left", "right"])
def _parts(
    q, k, v, query, keys, counts, added, slopes, mass, query_ids, key_ids, sinks,
    scratch, out, stats, key,
    q_b, q_h, q_t, q_d, k_b, k_g, k_s, k_d, v_b, v_g, v_s, v_e,
    query_b, query_t, keys_b, keys_s, counts_b, added_b, added_h, added_t, added_s, mass_b, mass_s,
    query_ids_b, query_ids_t, key_ids_b, key_ids_s,
    S, n_parts, n_rows, left, right, scale, softcap,
    G: tl.constexpr, R: tl.constexpr, T: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    POSITIONED: tl.constexpr, PLACED: tl.constexpr, SEEN: tl.constexpr, WINDOWED: tl.constexpr,
    PADDED: tl.constexpr, ADDED: tl.constexpr, DOCUMENTS: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, SINKS: tl.constexpr,
    TRIMMED: tl.constexpr, JOINED: tl.constexpr, LSE: tl.constexpr, ENTROPY: tl.constexpr,
    PEAK: tl.constexpr, DISTANCE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """The running softmax of one stretch of keys, for some rows of one key head.

    POSITIONED: query positions are given; PLACED: those of keys; SEEN: a key at a negative
    position, or out of the window, is hidden; WINDOWED: the window is over the indices of keys;
    PADDED: `counts` keys of each sample are real, the first (1) or the last (2); TRIMMED: the
    stretch is cut to what is seen of it; JOINED: there are other stretches.
    """
    n_blocks: tl.constexpr = (R * T + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    p = pid // n_blocks % n_parts
    head = (pid // n_blocks // n_parts).to(tl.int64)
    b, g = head // G, head % G
    r = pid % n_blocks * ROWS + tl.arange(0, ROWS)
    real_r = r < R * T
    # Rows beyond the last repeat the last one, and are not written.
    r = tl.minimum(r, R * T - 1)
    t_r = (r // R).to(tl.int64)
    h_r = g * R + r % R
    d = tl.arange(0, WIDTH).to(tl.int64)
    q_rd = tl.load(
        q + b * q_b + h_r[:, None] * q_h + t_r[:, None] * q_t + d[None, :] * q_d,
        mask=(d < D)[None, :],
        other=0.0,
    )
    i_r = r // R + (S - T)
    at_r = i_r.to(tl.int64)
    if POSITIONED:
        at_r = tl.load(query + b * query_b + t_r * query_t).to(tl.int64)
    lo = 0
    hi = S
    if PADDED > 0:
        count = tl.load(counts + b * counts_b).to(tl.int64)
        count = tl.minimum(tl.maximum(count, 0), S).to(tl.int32)
        if PADDED == 1:
            hi = count
        else:
            lo = S - count
    lo_r = tl.zeros((ROWS,), tl.int32) + lo
    hi_r = tl.zeros((ROWS,), tl.int32) + hi
    if WINDOWED:
        lo_r = tl.minimum(tl.maximum(at_r - left, lo), hi).to(tl.int32)
        hi_r = tl.maximum(tl.minimum(at_r + right + 1, hi), lo).to(tl.int32)
        # A row that sees nothing does not widen what the others see.
        nothing_r = lo_r >= hi_r
        lo = tl.min(tl.where(nothing_r, hi, lo_r), 0)
        hi = tl.max(tl.where(nothing_r, lo, hi_r), 0)
    stretch = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), n_parts), KEYS) * KEYS
    start = tl.minimum(lo + p * stretch, hi)
    stop = tl.minimum(start + stretch, hi)
    keys_row = keys + b * keys_b
    if TRIMMED:
        start, stop = _find_seen(
            start, stop, tl.min(at_r, 0), tl.max(at_r, 0), keys_row, keys_s, left, right
        )
    slope_r = tl.zeros((ROWS,), tl.float32)
    if ALIBI:
        slope_r = tl.load(slopes + h_r).to(tl.float32)
    of_r = tl.zeros((ROWS,), tl.int64)
    if DOCUMENTS:
        of_r = tl.load(query_ids + b * query_ids_b + t_r * query_ids_t)
    k_head = k + b * k_b + g * k_g
    v_head = v + b * v_b + g * v_g
    added_r = added + b * added_b + h_r * added_h + t_r * added_t
    mass_row = mass + b * mass_b
    ids_row = key_ids + b * key_ids_b
    STAGGERED: tl.constexpr = WINDOWED and T > 1
    max_r = tl.full((ROWS,), LOWEST, tl.float32)
    zero_r = tl.zeros((ROWS,), tl.float32)
    sum_r, moment_r, away_r, mass_r = zero_r, zero_r, zero_r, zero_r
    out_re = tl.zeros((ROWS, VALUES), tl.float32)
    key_r = tl.full((ROWS,), -1, tl.int32)
    spoilt_r = tl.zeros((ROWS,), tl.int32)
    next_s = _stand(start, stop, keys_row, keys_s, KEYS, PLACED)
    for tile in range(start, stop, KEYS):
        at_s = next_s
        next_s = _stand(tile + KEYS, stop, keys_row, keys_s, KEYS, PLACED)
        max_r, sum_r, out_re, moment_r, away_r, mass_r, key_r, spoilt_r = _fold(
            max_r, sum_r, out_re, moment_r, away_r, mass_r, key_r, spoilt_r,
            tile, stop, at_s, lo_r, hi_r, at_r, i_r, slope_r, of_r, q_rd,
            k_head, v_head, added_r, mass_row, ids_row,
            k_s, k_d, v_s, v_e, added_s, mass_s, key_ids_s, left, right, scale, softcap,
            D, E, KEYS, WIDTH, VALUES, T == 1, STAGGERED, SEEN, ADDED, DOCUMENTS, ALIBI, CAPPED,
            EXACT, ENTROPY, PEAK, DISTANCE, MASS, False,
        )  # fmt: skip
    if E > 0 and (STAGGERED or SEEN or ADDED or DOCUMENTS):
        finite_re = (tl.abs(out_re) < float("inf")).to(tl.int32)
        if tl.min(tl.min(finite_re, 1), 0) == 0:
            max_r = tl.full((ROWS,), LOWEST, tl.float32)
            sum_r, moment_r, away_r, mass_r = zero_r, zero_r, zero_r, zero_r
            out_re = tl.zeros((ROWS, VALUES), tl.float32)
            key_r = tl.full((ROWS,), -1, tl.int32)
            for tile in tl.range(start, stop, KEYS, num_stages=1):
                at_s = _stand(tile, stop, keys_row, keys_s, KEYS, PLACED)
                max_r, sum_r, out_re, moment_r, away_r, mass_r, key_r, spoilt_r = _fold(
                    max_r, sum_r, out_re, moment_r, away_r, mass_r, key_r, spoilt_r,
                    tile, stop, at_s, lo_r, hi_r, at_r, i_r, slope_r, of_r, q_rd,
                    k_head, v_head, added_r, mass_row, ids_row,
                    k_s, k_d, v_s, v_e, added_s, mass_s, key_ids_s, left, right, scale, softcap,
                    D, E, KEYS, WIDTH, VALUES, T == 1, STAGGERED, SEEN, ADDED, DOCUMENTS, ALIBI,
                    CAPPED, EXACT, ENTROPY, PEAK, DISTANCE, MASS, True,
                )  # fmt: skip
            out_re = tl.where((spoilt_r > 0)[:, None], float("nan"), out_re)
    row_r = (b * (G * R) + h_r) * T + t_r
    if JOINED:
        part_r = row_r * n_parts + p
        sums_r = scratch + n_rows.to(tl.int64) * n_parts * E + part_r * SLOTS
        tl.store(sums_r, max_r, mask=real_r)
        tl.store(sums_r + 1, sum_r, mask=real_r)
        if ENTROPY:
            tl.store(sums_r + 2, moment_r, mask=real_r)
        if DISTANCE:
            tl.store(sums_r + 3, away_r, mask=real_r)
        if MASS:
            tl.store(sums_r + 4, mass_r, mask=real_r)
        if PEAK:
            tl.store(sums_r + 5, key_r.to(tl.float32, bitcast=True), mask=real_r)
        if E > 0:
            e = tl.arange(0, VALUES)
            to_re = scratch + part_r[:, None] * E + e[None, :]
            tl.store(to_re, out_re, mask=real_r[:, None] & (e < E)[None, :])
    else:
        _finish(
            max_r, sum_r, out_re, moment_r, away_r, mass_r, key_r, row_r, b, h_r, t_r, real_r,
            sinks, out, stats, key, n_rows, G * R, T,
            E, VALUES, SINKS, LSE, ENTROPY, PEAK, DISTANCE, MASS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_parts", "n_rows"])
def _join(
    scratch, sinks, out, stats, key, n_parts, n_rows,
    H: tl.constexpr, T: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, ENTROPY: tl.constexpr, PEAK: tl.constexpr, DISTANCE: tl.constexpr,
    MASS: tl.constexpr,
):  # fmt: skip
    """Combine all stretches of one row."""
    row = tl.program_id(0).to(tl.int64)
    b, h, t = row // (H * T), row // T % H, row % T
    sums = scratch + n_rows.to(tl.int64) * n_parts * E + row * n_parts * SLOTS
    p = tl.arange(0, PARTS)
    there_p = p < n_parts
    if E > 0:
        e = tl.arange(0, VALUES)
        if PARTS == CHUNK:
            # Loaded first, as it does not depend on the sums.
            part_pe = tl.load(
                scratch + (row * n_parts + p)[:, None] * E + e[None, :],
                mask=there_p[:, None] & (e < E)[None, :],
                other=0.0,
            )
    max_p = tl.load(sums + p * SLOTS, mask=there_p, other=LOWEST)
    sum_p = tl.load(sums + p * SLOTS + 1, mask=there_p, other=0.0)
    top = tl.max(max_p, 0)
    step_p = tl.maximum(max_p - top, LOWEST)
    fade_p = tl.exp(step_p)
    # Vectors of a single row, as `_finish` expects them.
    one = tl.arange(0, 1)
    zero_r = tl.zeros((1,), tl.float32)
    moment_r, away_r, mass_r, key_r = zero_r, zero_r, zero_r, one - 1
    if ENTROPY:
        moment_p = tl.load(sums + p * SLOTS + 2, mask=there_p, other=0.0)
        moment_r += tl.sum(fade_p * (moment_p + sum_p * step_p), 0)
    if DISTANCE:
        away_p = tl.load(sums + p * SLOTS + 3, mask=there_p, other=0.0)
        away_r += tl.sum(fade_p * away_p, 0)
    if MASS:
        mass_p = tl.load(sums + p * SLOTS + 4, mask=there_p, other=0.0)
        mass_r += tl.sum(fade_p * mass_p, 0)
    if PEAK:
        key_p = tl.load(sums + p * SLOTS + 5, mask=there_p, other=0.0).to(tl.int32, bitcast=True)
        key_r += tl.max(tl.where(there_p & (max_p == top), key_p + 1, 0), 0)
    out_e = tl.zeros((VALUES,), tl.float32)
    if E > 0 and PARTS == CHUNK:
        out_e = tl.sum(part_pe * fade_p[:, None], 0)
    elif E > 0:
        for start in range(0, n_parts, CHUNK):
            c = start + tl.arange(0, CHUNK)
            max_c = tl.load(sums + c * SLOTS, mask=c < n_parts, other=LOWEST)
            part_ce = tl.load(
                scratch + (row * n_parts + c)[:, None] * E + e[None, :],
                mask=(c < n_parts)[:, None] & (e < E)[None, :],
                other=0.0,
            )
            out_e += tl.sum(part_ce * tl.exp(max_c - top)[:, None], 0)
    _finish(
        zero_r + top, zero_r + tl.sum(sum_p * fade_p, 0), out_e[None, :],
        moment_r, away_r, mass_r, key_r, one + row, b, one + h, one + t, one == 0,
        sinks, out, stats, key, n_rows, H, T,
        E, VALUES, SINKS, LSE, ENTROPY, PEAK, DISTANCE, MASS,
    )  # fmt: skip
