"""The Triton side of `tile_lists.py`: this module needs triton, and is imported where it runs.

Letters: B batch, T queries, S keys, H query heads; n tiles of a line that are classified at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from regard.ops.kernels.arguments import Rule, TileLists
from regard.ops.kernels.launch import Plans, Sized
from regard.ops.kernels.tile_kernels import bounds_of
from regard.ops.shape import Shape

AT_ONCE = 16
"""Tiles that a program classifies at once."""
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _judge(rule, b, h, row_n, key_n, T, S, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Of tiles at queries row_n and keys key_n: if any pair may be seen; if surely all are."""
    t_nt = row_n[:, None] + tl.arange(0, ROWS)[None, :]
    s_ns = key_n[:, None] + tl.arange(0, KEYS)[None, :]
    real_nt = t_nt < T
    t_nt = tl.minimum(t_nt, T - 1)
    s_ns = tl.minimum(s_ns, S - 1)
    maybe_n = (row_n < T) & (key_n < S)
    surely_n = maybe_n & (key_n + KEYS <= S)
    if rule.window is not None or rule.span is not None or rule.interval is not None:
        lo_nt, hi_nt = bounds_of(rule, b, t_nt, T, S)
        sees_nt = real_nt & (hi_nt > lo_nt)
        maybe_n = maybe_n & (tl.max(tl.where(sees_nt, hi_nt, 0), 1) > key_n)
        maybe_n = maybe_n & (tl.min(tl.where(sees_nt, lo_nt, FAR), 1) < key_n + KEYS)
        surely_n = surely_n & (tl.max(lo_nt, 1) <= key_n)
        surely_n = surely_n & (tl.min(hi_nt, 1) >= key_n + KEYS)
    if rule.ids is not None:
        of_nt = tl.load(rule.ids.queries + b * rule.ids.queries_b + t_nt)
        of_ns = tl.load(rule.ids.keys + b * rule.ids.keys_b + s_ns)
        t_low, t_high = tl.min(of_nt, 1), tl.max(of_nt, 1)
        s_low, s_high = tl.min(of_ns, 1), tl.max(of_ns, 1)
        maybe_n = maybe_n & (t_high >= s_low) & (s_high >= t_low)
        surely_n = surely_n & (t_low == t_high) & (s_low == s_high) & (t_low == s_low)
    if rule.words is not None:
        row_nt = rule.words.at + b * rule.words.b + h * rule.words.h
        row_nt += t_nt.to(tl.int64) * rule.words.t + key_n[:, None] // 32
        some_n = key_n < 0
        all_n = key_n >= 0
        for word in tl.static_range(KEYS // 32):
            # Words are padded with zeros far beyond the last key.
            word_nt = tl.load(row_nt + word, mask=key_n[:, None] < S, other=0)
            some_n = some_n | (tl.max((word_nt != 0).to(tl.int32), 1) > 0)
            all_n = all_n & (tl.min((word_nt == -1).to(tl.int32), 1) > 0)
        maybe_n = maybe_n & some_n
        surely_n = surely_n & all_n
    return maybe_n, surely_n & maybe_n


@triton.jit(do_not_specialize=["H", "T", "S"])
def _list(
    rule, lists, H, T, S,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BY_KEYS: tl.constexpr,
    IN_ORDER: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the list of one line of tiles."""
    n_lines = tl.cdiv(S, KEYS) if BY_KEYS else tl.cdiv(T, ROWS)
    line = tl.program_id(0) % n_lines
    head = (tl.program_id(0) // n_lines).to(tl.int64)
    b, h = head // H, head % H
    at = b * lists.b + h * lists.h + line
    to = lists.tiles + at * lists.n
    n_tiles = tl.cdiv(T, ROWS) if BY_KEYS else tl.cdiv(S, KEYS)
    n_full = 0
    n_mixed = 0
    last = 0
    for first in range(0, n_tiles, N):
        place_n = tl.arange(0, N)
        n = first + place_n
        same = n * 0 + line
        row_n = (n if BY_KEYS else same) * ROWS
        key_n = (same if BY_KEYS else n) * KEYS
        maybe_n, surely_n = _judge(rule, b, h, row_n, key_n, T, S, ROWS, KEYS)
        if BY_KEYS:
            # Full tiles of rows are loaded without a mask, so they must not reach beyond T.
            surely_n = surely_n & (row_n + ROWS <= T)
        full_n = surely_n.to(tl.int32)
        mixed_n = (maybe_n & (full_n == 0)).to(tl.int32)
        if IN_ORDER:
            both_n = full_n + mixed_n
            tl.store(to + n_full + tl.cumsum(both_n, 0) - 1, 2 * n + mixed_n, mask=both_n != 0)
            n_full += tl.sum(both_n, 0)
        else:
            # A run begins where the tile before is not full, and ends before one that is not.
            before_n = tl.gather(full_n, tl.maximum(place_n - 1, 0), 0)
            before_n = tl.where(place_n == 0, last, before_n)
            begins_n = full_n * (1 - before_n)
            run_n = to + 2 * (n_full + tl.cumsum(begins_n, 0) - 1)
            tl.store(run_n, n, mask=begins_n != 0)
            tl.store(run_n + 1, n, mask=(full_n == 0) & (before_n != 0))
            tl.store(to + lists.n - n_mixed - tl.cumsum(mixed_n, 0), n, mask=mixed_n != 0)
            n_full += tl.sum(begins_n, 0)
            n_mixed += tl.sum(mixed_n, 0)
            last = tl.sum(tl.where(place_n == N - 1, full_n, 0), 0)
    if last != 0:
        tl.store(to + 2 * n_full - 1, n_tiles)
    tl.store(lists.full + at, n_full)
    tl.store(lists.mixed + at, n_mixed)


def run_lists(
    rule: Rule, lists: TileLists, shape: Shape, options: dict[str, Any], plan: Plans
) -> None:
    """Fill the lists; options: rows and keys of a tile, BY_KEYS, IN_ORDER."""
    _, _, T, S = shape
    samples, heads = lists.tiles.shape[:2]

    def size() -> Sized:
        by_keys = options["BY_KEYS"]
        n_lines = triton.cdiv(S, options["KEYS"]) if by_keys else triton.cdiv(T, options["ROWS"])
        return samples * heads * n_lines, {**options, "N": AT_ONCE, "num_warps": 4}

    plan.run(("list", *options.values()), _list, size, rule, lists, heads, T, S)
