"""The backward of `flash.py` in Triton: recomputes weights tile by tile from the logsumexp.

With p the weights, g the gradient of the output and δ the term that a row's scores have in common
(`_delta`), the gradient of a score is p · (dropped g·v + δ − g_entropy · log p). One kernel takes a
tile of keys, walks the rows that see it and sums the gradients of keys and values; another takes a
tile of rows, walks its keys and sums that of the queries. So every number has one writer, and the
same call gives the same bits. `_finish` scales and rounds the sums that the kernel for Hopper
computes for the queries. This module needs triton, and is imported where it runs.

A row that sees nothing, or beyond the last one, has the logsumexp +inf here, and so weights of 0.
Hidden keys, values, queries and gradients are not multiplied, as 0 · NaN is NaN: in mixed tiles
they are cleared where no pair of theirs is seen.

Letters: B batch, T queries, S keys, H query heads, G key heads, R query heads a key head, D head
width, E value width; t, s sizes of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.kernels.backward_tile_kernels import (
    corner,
    differentiate,
    load,
    load_rows,
    some_shown,
    weigh,
)
from regard.ops.kernels.tile_kernels import (
    BITS,
    NATS,
    bounds_of,
    kept,
    key_places,
    product,
    runs_by_keys,
    runs_of,
)


@triton.jit(do_not_specialize=["H", "T"])
def _delta(out, g, given, rows, sums, H, T, E, ROWS: tl.constexpr, VALUES: tl.constexpr):
    """The logsumexp in bits, and δ = −Σ g·out + g_lse − g_entropy · (entropy + 1 − Σp), of rows.

    Sums for the gradient of the queries begin with zeros here, if there are any: VALUES of a row.
    """
    n_bands = rows.n // ROWS
    band = tl.program_id(0) % n_bands
    head = (tl.program_id(0) // n_bands).to(tl.int64)
    b, h = head // H, head % H
    t = band * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, VALUES)
    real_t = t < T
    row_t = head * T + t
    lse_t = tl.load(given.lse + row_t, mask=real_t, other=float("-inf")) * BITS
    lse_t = tl.where(lse_t == float("-inf"), float("inf"), lse_t)
    delta_t = tl.zeros((ROWS,), tl.float32)
    if g is not None:
        real_te = real_t[:, None] & (e < E)[None, :]
        t_te = t[:, None].to(tl.int64)
        out_at = out.at + b * out.b + h * out.h + t_te * out.t + e[None, :] * out.d
        g_at = g.at + b * g.b + h * g.h + t_te * g.t + e[None, :] * g.d
        out_te = tl.load(out_at, mask=real_te, other=0.0).to(tl.float32)
        g_te = tl.load(g_at, mask=real_te, other=0.0).to(tl.float32)
        delta_t -= tl.sum(out_te * g_te, 1)
    if given.lse_grad is not None:
        delta_t += tl.load(given.lse_grad + row_t, mask=real_t, other=0.0)
    if given.entropy_grad is not None:
        heat_t = tl.load(given.entropy_grad + row_t, mask=real_t, other=0.0)
        spread_t = tl.load(given.entropy + row_t, mask=real_t, other=0.0)
        if given.sinks is not None:
            # 1 − Σp is the weight of the sink.
            spread_t += tl.exp2(tl.load(given.sinks + h).to(tl.float32) * BITS - lse_t)
        delta_t -= heat_t * spread_t
        tl.store(rows.heat + head * rows.n + t, heat_t * NATS)
    tl.store(rows.lse + head * rows.n + t, lse_t)
    tl.store(rows.delta + head * rows.n + t, delta_t)
    if sums is not None:
        at = sums + (head * rows.n + t[:, None]) * VALUES + e[None, :]
        tl.store(at, tl.zeros((ROWS, VALUES), tl.float32))


@triton.jit
def _fold_rows(
    state, k_sd, v_se, q, g, start, s, rule, rows, where, kept_share, sizes,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    MASKED: tl.constexpr, COVERED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add a tile of rows to the gradients of keys and values; the tile is keys by rows."""
    dk_sd, dv_se = state
    b, h, head, q_at, g_at = where
    T, S, D, E = sizes
    GUARDED: tl.constexpr = not COVERED and (
        MASKED or rule.band is not None or rule.dense is not None
    )
    t = start + tl.arange(0, ROWS)
    far = start + b * 0
    q_td = load(q_at + far * q.t, t, T, D, MASKED, EVEN, WIDTH)
    row = load_rows(rows, rule, b, h, head, t, T, S, True)
    x_st = product(k_sd, tl.trans(q_td), EXACT)
    p_st, x_st, raw_st = weigh(x_st, s[:, None], rule, row, T, S, MASKED)
    if GUARDED:
        shown_t1 = some_shown(x_st, 0)[:, None]
        q_td = tl.where(shown_t1, q_td, 0.0)
    pull_st = p_st * 0.0
    if g is not None:
        g_te = load(g_at + far * g.t, t, T, E, MASKED, EVEN, VALUES)
        if GUARDED:
            g_te = tl.where(shown_t1, g_te, 0.0)
        w_st = p_st
        if rule.dropout is not None:
            keep_st = kept(rule, row[2], s[:, None])
            w_st = tl.where(keep_st, p_st, 0.0)
        dv_se += product(w_st.to(g_te.dtype), g_te, EXACT)
        pull_st = product(v_se, tl.trans(g_te), EXACT)
        if rule.dropout is not None:
            pull_st = tl.where(keep_st, pull_st * kept_share, 0.0)
    _, dx_st = differentiate(p_st, x_st, raw_st, pull_st, rule, row, rows.heat is not None, GUARDED)
    dk_sd += product(dx_st.to(q_td.dtype), q_td, EXACT)
    return dk_sd, dv_se


@triton.jit(do_not_specialize=["H", "T"])
def _finish(sums, dq, factor, n, H, T, D, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of some queries of one head, from the sums of the kernel for Hopper."""
    n_bands = n // ROWS
    band = tl.program_id(0) % n_bands
    head = (tl.program_id(0) // n_bands).to(tl.int64)
    t = band * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    at = sums + (head * n + band * ROWS) * WIDTH
    x = tl.load(at + tl.arange(0, ROWS * WIDTH))
    x = tl.reshape(x, (ROWS // 8, WIDTH // 16, 8, 4, 2, 2))
    x_td = tl.reshape(tl.permute(x, (0, 3, 5, 1, 4, 2)), (ROWS, WIDTH))
    tl.store(
        corner(dq, head // H, head % H, t, WIDTH),
        (x_td * (factor * NATS)).to(dq.at.dtype.element_ty),
        mask=(t < T)[:, None] & (d < D)[None, :],
    )


@triton.jit(do_not_specialize=["H", "T", "S"])
def _keys(
    q, k, v, g, dk, dv, rule, lists, rows, kept_share, H, T, S, D, E,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, COVERED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of some keys of one key head, and of their values."""
    n_tiles = tl.cdiv(S, KEYS)
    tile = tl.program_id(0) % n_tiles
    group = (tl.program_id(0) // n_tiles).to(tl.int64)
    b, first = group // (H // R), group % (H // R) * R
    s = tile * KEYS + tl.arange(0, KEYS)
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, VALUES)
    k_sd = load(corner(k, b, first // R, s, WIDTH), s, S, D, True, EVEN, WIDTH)
    v_se = load(corner(v, b, first // R, s, VALUES), s, S, E, True, EVEN, VALUES)
    state = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, VALUES), tl.float32)
    sizes = (T, S, D, E)
    for r in range(0, R):
        t = tl.arange(0, ROWS)
        q_at = corner(q, b, first + r, t, WIDTH)
        # Not None without a gradient: Triton 3.6 takes no None in a tuple in a loop.
        g_at = q_at
        if g is not None:
            g_at = corner(g, b, first + r, t, VALUES)
        where = (b, first + r, b * H + first + r, q_at, g_at)
        if lists is None:
            begin, whole, ends, n_full, n_before, n_mixed = runs_by_keys(
                rule, b, tile * KEYS, T, S, ROWS, KEYS
            )
            for n in range(0, n_full):
                state = _fold_rows(
                    state, k_sd, v_se, q, g, whole + n * ROWS, s, rule, rows, where,
                    kept_share, sizes, ROWS, WIDTH, VALUES, False, COVERED, EVEN, EXACT,
                )  # fmt: skip
            for n in range(0, n_mixed):
                start = tl.where(n < n_before, begin + n * ROWS, ends + (n - n_before) * ROWS)
                state = _fold_rows(
                    state, k_sd, v_se, q, g, start, s, rule, rows, where,
                    kept_share, sizes, ROWS, WIDTH, VALUES, True, COVERED, EVEN, EXACT,
                )  # fmt: skip
        else:
            at = b * lists.b + (first + r) * lists.h + tile
            line = lists.tiles + at * lists.n
            for m in range(0, tl.load(lists.full + at)):
                for near in range(tl.load(line + 2 * m), tl.load(line + 2 * m + 1)):
                    state = _fold_rows(
                        state, k_sd, v_se, q, g, near * ROWS, s, rule, rows, where,
                        kept_share, sizes, ROWS, WIDTH, VALUES, False, COVERED, EVEN,
                        EXACT,
                    )  # fmt: skip
            for n in range(0, tl.load(lists.mixed + at)):
                start = tl.load(line + lists.n - 1 - n) * ROWS
                state = _fold_rows(
                    state, k_sd, v_se, q, g, start, s, rule, rows, where,
                    kept_share, sizes, ROWS, WIDTH, VALUES, True, COVERED, EVEN, EXACT,
                )  # fmt: skip
    dk_sd, dv_se = state
    tl.store(
        corner(dk, b, first // R, s, WIDTH),
        (dk_sd * (rule.factor * NATS)).to(dk.at.dtype.element_ty),
        mask=(s < S)[:, None] & (d < D)[None, :],
    )
    tl.store(
        corner(dv, b, first // R, s, VALUES),
        (dv_se * kept_share).to(dv.at.dtype.element_ty),
        mask=(s < S)[:, None] & (e < E)[None, :],
    )


@triton.jit
def _fold_keys(
    state, q_td, g_te, k, v, start, rule, rows, row, kept_share, sizes,
    R: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    SLOPES: tl.constexpr,
    MASKED: tl.constexpr, COVERED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the gradients of queries and of their slope; rows by keys."""
    dq_td, far_t = state
    b, h = row[0], row[1]
    T, S, D, E = sizes
    GUARDED: tl.constexpr = not COVERED and (
        MASKED or rule.band is not None or rule.dense is not None
    )
    s = start + tl.arange(0, KEYS)
    k_sd = load(corner(k, b, h // R, s, WIDTH), s, S, D, MASKED, EVEN, WIDTH)
    x_ts = product(q_td, tl.trans(k_sd), EXACT)
    p_ts, x_ts, raw_ts = weigh(x_ts, s[None, :], rule, row, T, S, MASKED)
    pull_ts = p_ts * 0.0
    if g_te is not None:
        v_se = load(corner(v, b, h // R, s, VALUES), s, S, E, MASKED, EVEN, VALUES)
        pull_ts = product(g_te, tl.trans(v_se), EXACT)
        if rule.dropout is not None:
            keep_ts = kept(rule, row[2], s[None, :])
            pull_ts = tl.where(keep_ts, pull_ts * kept_share, 0.0)
    ds_ts, dx_ts = differentiate(
        p_ts, x_ts, raw_ts, pull_ts, rule, row, rows.heat is not None, GUARDED
    )
    if SLOPES:
        near_s = tl.minimum(s, S - 1)[None, :]
        away_ts = tl.abs(row[5] - key_places(rule, b, near_s))
        far_t += tl.sum(ds_ts * away_ts, 1)
    if GUARDED:
        k_sd = tl.where(some_shown(x_ts, 0)[:, None], k_sd, 0.0)
    dq_td += product(dx_ts.to(k_sd.dtype), k_sd, EXACT)
    return dq_td, far_t


@triton.jit(do_not_specialize=["H", "T", "S"])
def _queries(
    q, k, v, g, dq, slopes, rule, lists, rows, kept_share, H, T, S, D, E,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, COVERED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of some queries of one head, and their part of its slope's gradient."""
    n_bands = tl.cdiv(T, ROWS)
    # Under a causal mask the last rows are the longest, and begin first.
    band = n_bands - 1 - tl.program_id(0) % n_bands
    head = (tl.program_id(0) // n_bands).to(tl.int64)
    b, h = head // H, head % H
    t = band * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    q_td = load(corner(q, b, h, t, WIDTH), t, T, D, True, EVEN, WIDTH)
    g_te = None
    if g is not None:
        g_te = load(corner(g, b, h, t, VALUES), t, T, E, True, EVEN, VALUES)
    row = load_rows(rows, rule, b, h, head, t, T, S, False)
    state = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS,), tl.float32)
    sizes = (T, S, D, E)
    SLOPES: tl.constexpr = slopes is not None
    if lists is None:
        lo_t, hi_t = bounds_of(rule, b, tl.minimum(t, T - 1), T, S)
        first, whole, ends, n_full, n_before, n_mixed = runs_of(lo_t, hi_t, t < T, S, KEYS)
        for n in range(0, n_full):
            state = _fold_keys(
                state, q_td, g_te, k, v, whole + n * KEYS, rule, rows, row, kept_share, sizes,
                R, KEYS, WIDTH, VALUES, SLOPES, False, COVERED, EVEN, EXACT,
            )  # fmt: skip
        for n in range(0, n_mixed):
            start = tl.where(n < n_before, first + n * KEYS, ends + (n - n_before) * KEYS)
            state = _fold_keys(
                state, q_td, g_te, k, v, start, rule, rows, row, kept_share, sizes,
                R, KEYS, WIDTH, VALUES, SLOPES, True, COVERED, EVEN, EXACT,
            )  # fmt: skip
    else:
        at = b * lists.b + h * lists.h + band
        line = lists.tiles + at * lists.n
        for m in range(0, tl.load(lists.full + at)):
            for near in range(tl.load(line + 2 * m), tl.load(line + 2 * m + 1)):
                state = _fold_keys(
                    state, q_td, g_te, k, v, near * KEYS, rule, rows, row, kept_share, sizes,
                    R, KEYS, WIDTH, VALUES, SLOPES, False, COVERED, EVEN, EXACT,
                )  # fmt: skip
        for n in range(0, tl.load(lists.mixed + at)):
            start = tl.load(line + lists.n - 1 - n) * KEYS
            state = _fold_keys(
                state, q_td, g_te, k, v, start, rule, rows, row, kept_share, sizes,
                R, KEYS, WIDTH, VALUES, SLOPES, True, COVERED, EVEN, EXACT,
            )  # fmt: skip
    dq_td, far_t = state
    tl.store(
        corner(dq, b, h, t, WIDTH),
        (dq_td * (rule.factor * NATS)).to(dq.at.dtype.element_ty),
        mask=(t < T)[:, None] & (d < D)[None, :],
    )
    if SLOPES:
        tl.store(slopes + head * n_bands + band, -tl.sum(far_t, 0))


@triton.jit
def _tile(
    q, k, v, g, rule, rows, kept_share, b, h, t, s, sizes,
    R: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    COVERED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of the biased scores of one tile, rows by keys; s must be clamped to S."""
    T, S, D, E, H = sizes
    q_td = load(corner(q, b, h, t, WIDTH), t, T, D, True, False, WIDTH)
    k_sd = load(corner(k, b, h // R, s, WIDTH), s, S, D, False, False, WIDTH)
    row = load_rows(rows, rule, b, h, b * H + h, t, T, S, False)
    x_ts = product(q_td, tl.trans(k_sd), EXACT)
    p_ts, x_ts, raw_ts = weigh(x_ts, s[None, :], rule, row, T, S, True)
    pull_ts = p_ts * 0.0
    if g is not None:
        g_te = load(corner(g, b, h, t, VALUES), t, T, E, True, False, VALUES)
        v_se = load(corner(v, b, h // R, s, VALUES), s, S, E, False, False, VALUES)
        pull_ts = product(g_te, tl.trans(v_se), EXACT)
        if rule.dropout is not None:
            keep_ts = kept(rule, row[2], s[None, :])
            pull_ts = tl.where(keep_ts, pull_ts * kept_share, 0.0)
    ds_ts, _ = differentiate(
        p_ts, x_ts, raw_ts, pull_ts, rule, row, rows.heat is not None, not COVERED
    )
    return ds_ts


@triton.jit
def _touches(rule, b, t, first, past, T, S):
    """Whether some of the rows t may see some of the keys first..past, by their intervals."""
    lo_t, hi_t = bounds_of(rule, b, tl.minimum(t, T - 1), T, S)
    sees_t = hi_t > lo_t
    return (tl.max(tl.where(sees_t, hi_t, 0), 0) > first) & (
        tl.min(tl.where(sees_t, lo_t, S), 0) < past
    )


@triton.jit(do_not_specialize=["H", "T", "S", "B", "samples"])
def _band(
    q, k, v, g, to, n_numbers, rule, rows, kept_share, samples, B, H, T, S, D, E,
    R: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    COVERED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of ROWS neighbours of a head's band, over some samples.

    Their pairs are diagonals. A tile of ROWS rows and twice as many keys holds a piece of each,
    one key further right in every row.
    """
    n_runs = tl.cdiv(n_numbers, ROWS)
    first = tl.program_id(0) % n_runs * ROWS
    h = (tl.program_id(0) // n_runs % H).to(tl.int64)
    part = tl.program_id(0) // n_runs // H
    n = tl.arange(0, ROWS)
    diagonal_tn = n[:, None] + n[None, :]
    sums_tn = tl.zeros((ROWS, ROWS), tl.float32)
    start = tl.maximum(T - first - ROWS, 0) // ROWS * ROWS
    for sample in range(0, tl.minimum(samples, B - part * samples)):
        b = (part * samples + sample).to(tl.int64)
        for t0 in range(start, tl.minimum(T, S + T - 1 - first), ROWS):
            key = t0 + first - (T - 1)
            if _touches(rule, b, t0 + n, key, key + 2 * ROWS, T, S):
                far_s = key + tl.arange(0, 2 * ROWS)
                s = tl.minimum(tl.maximum(far_s, 0), S - 1)
                ds_ts = _tile(
                    q, k, v, g, rule, rows, kept_share, b, h, t0 + n, s, (T, S, D, E, H),
                    R, WIDTH, VALUES, COVERED, EXACT,
                )  # fmt: skip
                ds_ts = tl.where((s == far_s)[None, :], ds_ts, 0.0)
                sums_tn += tl.gather(ds_ts, diagonal_tn, 1)
    at_n = (part * H + h) * n_numbers + first + n
    tl.store(to + at_n, tl.sum(sums_tn, 0), mask=first + n < n_numbers)


@triton.jit(do_not_specialize=["H", "T", "S", "B"])
def _dense(
    q, k, v, g, to, rule, rows, kept_share, B, H, T, S, D, E,
    ONE_B: tl.constexpr, ONE_H: tl.constexpr, ONE_T: tl.constexpr, ONE_S: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, COVERED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of a dense bias: over all pairs that share it, along the axes of 1."""
    down, across = tl.cdiv(T, ROWS), tl.cdiv(S, KEYS)
    n_s, own_s = (across, 1) if ONE_S else (1, across)
    n_t, own_t = (down, 1) if ONE_T else (1, down)
    n_h, own_h = (H, 1) if ONE_H else (1, H)
    n_b = B if ONE_B else 1
    tile_s = tl.program_id(0) % own_s
    tile_t = tl.program_id(0) // own_s % own_t
    head = tl.program_id(0) // own_s // own_t % own_h
    sample = tl.program_id(0) // own_s // own_t // own_h
    sums_ts = tl.zeros((ROWS, KEYS), tl.float32)
    for n in range(0, n_b * n_h * n_t * n_s):
        key = (tile_s + n % n_s) * KEYS
        t = (tile_t + n // n_s % n_t) * ROWS + tl.arange(0, ROWS)
        h = (head + n // n_s // n_t % n_h).to(tl.int64)
        b = (sample + n // n_s // n_t // n_h).to(tl.int64)
        if _touches(rule, b, t, key, key + KEYS, T, S):
            far_s = key + tl.arange(0, KEYS)
            ds_ts = _tile(
                q, k, v, g, rule, rows, kept_share, b, h, t, tl.minimum(far_s, S - 1),
                (T, S, D, E, H), R, WIDTH, VALUES, COVERED, EXACT,
            )  # fmt: skip
            sums_ts += tl.where((far_s < S)[None, :], ds_ts, 0.0)
    t = tile_t * ROWS + tl.arange(0, ROWS)
    s = tile_s * KEYS + tl.arange(0, KEYS)
    at = to.at + sample.to(tl.int64) * to.b + head.to(tl.int64) * to.h
    at_t = at + t.to(tl.int64) * to.t
    if ONE_T and ONE_S:
        tl.store(at, tl.sum(tl.sum(sums_ts, 1), 0))
    elif ONE_T:
        tl.store(at + s.to(tl.int64) * to.d, tl.sum(sums_ts, 0), mask=s < S)
    elif ONE_S:
        tl.store(at_t, tl.sum(sums_ts, 1), mask=t < T)
    else:
        at_ts = at_t[:, None] + s[None, :].to(tl.int64) * to.d
        tl.store(at_ts, sums_ts, mask=(t < T)[:, None] & (s < S)[None, :])
