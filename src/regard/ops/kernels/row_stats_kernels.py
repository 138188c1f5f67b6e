"""The Triton side of `row_stats.py`: this module needs triton, and is imported where it runs.

Tiles are rows by keys, so that a search in a row stays inside a warp. All programs are numbered
along one axis of the grid, the only one without a low limit.

Letters: B batch, T queries, S keys, H query heads, R query heads a key head, D width; t, s sizes of
a tile, n slots of a row or rows that are named.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.kernels.arguments import options_of, rule_of, view
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.row_sums import RowSums, order_tiles
from regard.ops.kernels.tile_kernels import (
    BITS,
    load_sums,
    load_tile,
    own_band,
    product,
    scored,
    shown,
    step,
    walk,
    weighed,
)
from regard.ops.kernels.tiles import tiles_of

GROUP = 8
"""Tiles of one walk that share a flag, which says if any of their weights is large enough."""


@triton.jit
def _over(
    q_td, k, rule, lists, run, n, band, sizes, threshold,
    R: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    HIDES: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The weights of the n-th tile of a walk, their keys, and which reach the threshold."""
    b, h, t, max_t, scale_t = band
    T, S, D = sizes
    start, edged = step(lists, run, n, KEYS)
    s = start + tl.arange(0, KEYS)
    k_sd = load_tile(k, b, h // R, s, S, D, WIDTH, EVEN)
    w_ts = weighed(
        product(q_td, tl.trans(k_sd), EXACT), rule, b, h, t[:, None], s[None, :],
        max_t[:, None], scale_t[:, None], edged, T, S, HIDES, 0.0,
    )  # fmt: skip
    return w_ts, s, (w_ts >= threshold).to(tl.int32)


@triton.jit(do_not_specialize=["H", "T", "S", "n_groups"])
def _above(
    q, k, rule, lists, sums, counts, flags, offsets, weights, keys, threshold, n_groups, H, T, S, D,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, HIDES: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Count the weights of some queries that reach a threshold; or, with offsets, write them.

    Both are one kernel, so that the same numbers are counted and written. Counting sets flags, and
    writing visits only the tiles whose flag is set.
    """
    band, head, b, h = own_band(H, T, ROWS)
    t = band * ROWS + tl.arange(0, ROWS)
    row_t = head * T + t
    q_td = load_tile(q, b, h, t, T, D, WIDTH, EVEN)
    max_t, scale_t = load_sums(sums, row_t, t < T)
    count_t = tl.zeros((ROWS,), tl.int32)
    run, count = walk(rule, lists, b, h, band, t, T, S, KEYS)
    own = (b, h, t, max_t, scale_t)
    sizes = (T, S, D)
    flag = flags + (head * tl.cdiv(T, ROWS) + band) * n_groups
    if offsets is None:
        before_t = count_t
        for n in range(0, count):
            _, _, over_ts = _over(
                q_td, k, rule, lists, run, n, own, sizes, threshold,
                R, KEYS, WIDTH, HIDES, EVEN, EXACT,
            )  # fmt: skip
            count_t += tl.sum(over_ts, 1)
            if (n % GROUP == GROUP - 1) | (n == count - 1):
                some = tl.max(count_t - before_t, 0) > 0
                tl.store(flag + n // GROUP, some.to(tl.int8))
                before_t = count_t
        tl.store(counts + row_t, count_t.to(tl.int64), mask=t < T)
    else:
        # Entries count from the first of this program, in 32 bits.
        first = tl.load(offsets + head * T + band * ROWS)
        count_t = (tl.load(offsets + row_t, mask=t < T, other=0) - first).to(tl.int32)
        for group in range(0, tl.cdiv(count, GROUP)):
            if tl.load(flag + group) > 0:
                for n in range(group * GROUP, tl.minimum((group + 1) * GROUP, count)):
                    w_ts, s, over_ts = _over(
                        q_td, k, rule, lists, run, n, own, sizes, threshold,
                        R, KEYS, WIDTH, HIDES, EVEN, EXACT,
                    )  # fmt: skip
                    at_ts = count_t[:, None] + (tl.cumsum(over_ts, 1) - 1)
                    there_ts = (over_ts > 0) & (t < T)[:, None]
                    tl.store(weights + first + at_ts, w_ts, mask=there_ts)
                    key_ts = tl.zeros((ROWS, KEYS), tl.int64) + s[None, :]
                    tl.store(keys + first + at_ts, key_ts, mask=there_ts)
                    count_t += tl.sum(over_ts, 1)


@triton.jit(do_not_specialize=["H", "T", "S", "n_rows"])
def _rows(
    q, k, rule, sums, wanted, out, H, T, S, D, n_rows,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    HIDES: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The weights of some wanted queries of one head on some keys."""
    n_tiles = tl.cdiv(S, KEYS)
    n_bands = tl.cdiv(n_rows, ROWS)
    band = tl.program_id(0) // n_tiles % n_bands
    head = (tl.program_id(0) // n_tiles // n_bands).to(tl.int64)
    b, h = head // H, head % H
    n = band * ROWS + tl.arange(0, ROWS)
    s = tl.program_id(0) % n_tiles * KEYS + tl.arange(0, KEYS)
    t = tl.load(wanted + n, mask=n < n_rows, other=0)
    q_td = load_tile(q, b, h, t, T, D, WIDTH, EVEN)
    k_sd = load_tile(k, b, h // R, s, S, D, WIDTH, EVEN)
    max_t, scale_t = load_sums(sums, head * T + t, t < T)
    w_ts = weighed(
        product(q_td, tl.trans(k_sd), EXACT), rule, b, h, t[:, None], s[None, :],
        max_t[:, None], scale_t[:, None], True, T, S, HIDES, 0.0,
    )  # fmt: skip
    at_ts = out + (head * n_rows + n[:, None]) * S + s[None, :]
    tl.store(at_ts, w_ts, mask=(n < n_rows)[:, None] & (s < S)[None, :])


@triton.jit(do_not_specialize=["H", "T", "S", "n_kinds"])
def _singles(
    q, k, rule, lse, keys, out, H, T, S, D, n_kinds,
    R: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """For some queries of one head: the sums of their weights on the keys named for each."""
    n_bands = tl.cdiv(T, ROWS)
    band = tl.program_id(0) % n_bands
    head = (tl.program_id(0) // n_bands).to(tl.int64)
    b, h = head // H, head % H
    t = band * ROWS + tl.arange(0, ROWS)
    q_td = load_tile(q, b, h, t, T, D, WIDTH, EVEN).to(tl.float32)
    lse_t = tl.load(lse + head * T + t, mask=t < T, other=0.0) * BITS
    for n in range(0, n_kinds):
        s_t = tl.load(keys + (b * n_kinds + n) * T + t, mask=t < T, other=-1)
        named_t = s_t >= 0
        s_t = tl.maximum(s_t, 0)
        seen_t = named_t & shown(rule, b, h, t, s_t, T, S, False)
        # Keys that are not seen are not loaded, as 0 · NaN is NaN.
        k_td = load_tile(k, b, h // R, tl.where(seen_t, s_t, S), S, D, WIDTH, EVEN)
        x_t = scored(tl.sum(q_td * k_td.to(tl.float32), 1), rule, b, h, t, s_t, T, S)
        w_t = tl.where(seen_t & (x_t != float("-inf")), tl.exp2(x_t - lse_t), 0.0)
        tl.store(out + (n * tl.num_programs(0)) + tl.program_id(0), tl.sum(w_t, 0))


def run_above(given: Rendered, sums: RowSums, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of the rows (B · H · T + 1), keys and weights of every weight from a threshold on."""
    (B, H, T, D), S = given.q.shape, given.k.shape[2]
    rule, tiles, device = rule_of(given), tiles_of("above", given), given.q.device
    lists = order_tiles(given, rule, tiles)
    n_bands, n_groups = triton.cdiv(T, tiles.rows), triton.cdiv(triton.cdiv(S, tiles.keys), GROUP)
    launch: Any = _above[(B * H * n_bands,)]
    flags = torch.empty(B * H * n_bands * n_groups, dtype=torch.int8, device=device)

    def run(counts: Tensor | None, *to: Tensor | None) -> None:
        launch(
            view(given.q), view(given.k), rule, lists, sums, counts, flags, *to, threshold,
            n_groups, H, T, S, D, **options_of(given), ROWS=tiles.rows, KEYS=tiles.keys,
            GROUP=GROUP, HIDES=given.hides, **tiles.options(),
        )  # fmt: skip

    counts = torch.empty(B * H * T, dtype=torch.int64, device=device)
    run(counts, None, None, None)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    total = int(offsets[-1])
    weights = torch.empty(total, dtype=torch.float32, device=device)
    keys = torch.empty(total, dtype=torch.int64, device=device)
    if total:
        run(None, offsets, weights, keys)
    return offsets, keys, weights


def run_rows(given: Rendered, sums: RowSums, wanted: Tensor) -> Tensor:
    """Whole rows of the wanted queries, (B, H, rows, S)."""
    (B, H, T, D), S, n_rows = given.q.shape, given.k.shape[2], len(wanted)
    out = torch.empty(B, H, n_rows, S, dtype=torch.float32, device=given.q.device)
    rows, keys = 16, 32 if given.q.dtype.itemsize == 4 else 64
    n_tiles = B * H * triton.cdiv(n_rows, rows) * triton.cdiv(S, keys)
    if n_tiles:
        launch: Any = _rows[(n_tiles,)]
        launch(
            view(given.q), view(given.k), rule_of(given), sums, wanted, out, H, T, S, D, n_rows,
            **options_of(given), ROWS=rows, KEYS=keys, HIDES=given.hides, num_warps=4,
        )  # fmt: skip
    return out


def run_singles(given: Rendered, lse: Tensor, keys: Tensor) -> Tensor:
    """Sums of weights over bands of queries, (N, B · H, bands), on one key per query, (B, N, T)."""
    (B, H, T, D), S, N = given.q.shape, given.k.shape[2], keys.shape[1]
    rows = 64
    bands = triton.cdiv(T, rows)
    out = torch.empty(N, B * H, bands, dtype=torch.float32, device=given.q.device)
    launch: Any = _singles[(B * H * bands,)]
    launch(
        view(given.q), view(given.k), rule_of(given), lse, keys, out, H, T, S, D, N,
        **options_of(given), ROWS=rows, num_warps=4,
    )  # fmt: skip
    return out
