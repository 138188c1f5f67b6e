"""Device functions on a tile, for the kernels of `flash_backward_kernels.py`; needs triton.

Letters: T queries, S keys; b, h, t, s one or some of each; t, s also sizes of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.kernels.tile_kernels import (
    biased,
    bounds_of,
    capped,
    query_places,
    row_word,
    seen,
    slope_of,
)


@triton.jit
def load_rows(rows, rule, b, h, head, t, T, S, ACROSS: tl.constexpr):
    """The values per row that a tile needs, across it or down; only `rows` is padded beyond T."""
    near_t = tl.minimum(t, T - 1)
    at_t = head * rows.n + t
    lse_t = tl.load(rows.lse + at_t)
    delta_t = tl.load(rows.delta + at_t)
    heat_t = lse_t
    if rows.heat is not None:
        heat_t = tl.load(rows.heat + at_t)
    word_t, place_t = row_word(rule, head, near_t), query_places(rule, b, near_t, T, S)
    lo_t, hi_t = bounds_of(rule, b, near_t, T, S)
    return (
        b, h, _spread(word_t, ACROSS), _spread(near_t, ACROSS), slope_of(rule, h),
        _spread(place_t, ACROSS),
        _spread(lo_t, ACROSS), _spread(hi_t, ACROSS), _spread(lse_t, ACROSS),
        _spread(delta_t, ACROSS), _spread(heat_t, ACROSS),
    )  # fmt: skip


@triton.jit
def _spread(x, ACROSS: tl.constexpr):
    """A vector as a row of a tile, or as a column."""
    return x[None, :] if ACROSS else x[:, None]


@triton.jit
def weigh(x, s, rule, row, T, S, MASKED: tl.constexpr):
    """From q·k of a tile: the weights, their logarithms in bits, the scores after the softcap."""
    b, h, _, t, slope, place, lo, hi, lse, _, _ = row
    x = x * rule.factor
    if rule.cap is not None:
        x = capped(x, rule.cap)
    raw = x
    x = biased(x, rule, b, h, t, tl.minimum(s, S - 1), slope, place, T, S)
    if MASKED:
        x = tl.where(seen(rule, b, h, t, s, lo, hi, S), x, float("-inf"))
    x = x - lse
    return tl.exp2(x), x, raw


@triton.jit
def differentiate(p, x, raw, pull, rule, row, HEAT: tl.constexpr, GUARDED: tl.constexpr):
    """The gradients of a tile's biased scores and of its scores before the softcap.

    pull: g·v, after dropout. GUARDED: pairs with a weight of 0 pass on 0, never a NaN.
    """
    _, _, _, _, _, _, _, _, _, delta, heat = row
    pull = pull + delta
    if HEAT:
        pull -= heat * tl.where(p == 0.0, 0.0, x)
    ds = p * pull
    dx = ds
    if rule.cap is not None:
        raw = raw / rule.cap
        dx = ds * (1.0 - raw * raw)
    if GUARDED:
        ds = tl.where(p == 0.0, 0.0, ds)
        dx = tl.where(p == 0.0, 0.0, dx)
    return ds, dx


@triton.jit
def some_shown(x, axis: tl.constexpr):
    """Which rows or keys of a tile have a visible pair."""
    return tl.max((x != float("-inf")).to(tl.int32), axis) > 0


@triton.jit
def load(at, n, real, width, MASKED: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr):
    """A tile of rows n; 0 beyond the last one and beyond the width, where it may reach there."""
    d = tl.arange(0, SIZE)
    if MASKED:
        x = tl.load(at, mask=(n < real)[:, None] & (d < width)[None, :], other=0.0)
    elif EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(d < width)[None, :], other=0.0)
    return x


@triton.jit
def corner(x, b, h, n, SIZE: tl.constexpr):
    """The addresses of a head's rows n, (n, SIZE)."""
    d = tl.arange(0, SIZE).to(tl.int64)
    return x.at + b * x.b + h * x.h + n[:, None].to(tl.int64) * x.t + d[None, :] * x.d
