"""The largest weights of rows, in Triton: this module needs triton, and is imported where it runs.

How: a program keeps the largest scores of its rows in slots while it walks the keys. On a Hopper
GPU `largest_hopper_kernels.py` first lists the few scores of each row that can be among the
largest, and only rows whose lists do not suffice are left to that walk.

Letters: B batch, T queries, S keys, H query heads, R query heads a key head, D width; t, s sizes of
a tile, n slots of a row, c maxima of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.kernels import flash_hopper
from regard.ops.kernels.arguments import options_of, rule_of, view
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.row_sums import RowSums, order_tiles
from regard.ops.kernels.tile_kernels import (
    load_sums,
    load_tile,
    own_band,
    product,
    scored,
    shown,
    step,
    walk,
)
from regard.ops.kernels.tiles import tiles_of

UNROLLED = tl.constexpr(8)
"""Up to this many slots the loop over them is unrolled."""
SLACK = tl.constexpr(2.0**-14)
"""How much bounds are lowered, relative and in bits, as each kernel rounds in its own way."""


@triton.jit
def _keep(best_tn, key_tn, low_t, x_ts, high_t, s, S, SLOTS: tl.constexpr):
    """Replace the lowest score that a row keeps by its highest new one, where that is higher.

    Last in the result: whether any row has another such score.
    """
    slot = tl.arange(0, SLOTS)[None, :]
    found_t = tl.min(tl.where(x_ts == high_t[:, None], s[None, :], S), 1)
    goes_t = tl.max(tl.where(best_tn == low_t[:, None], slot, -1), 1)
    goes_tn = (slot == goes_t[:, None]) & (high_t > low_t)[:, None]
    best_tn = tl.where(goes_tn, high_t[:, None], best_tn)
    key_tn = tl.where(goes_tn, found_t[:, None], key_tn)
    x_ts = tl.where(s[None, :] == found_t[:, None], float("-inf"), x_ts)
    low_t = tl.min(best_tn, 1)
    high_t = tl.max(x_ts, 1)
    return best_tn, key_tn, low_t, x_ts, high_t, tl.max((high_t > low_t).to(tl.int32), 0)


@triton.jit(do_not_specialize=["H", "T", "S", "n_top"])
def _largest(
    q, k, rule, lists, sums, weights, keys, flags, H, T, S, D, n_top,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    SLOTS: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The largest weights of some queries of one head, and their keys, largest first.

    Each row has a slot for each score it keeps. As long as a tile has a score above the lowest of
    its row's, it replaces that: at most as often as there are slots, and in most tiles once, as
    some row has one. For few slots this is unrolled, as beside a loop the compiler would not
    prefetch the next tiles. flags: which bands are still open, (heads, bands); None: all.
    """
    band, head, b, h = own_band(H, T, ROWS)
    if flags is not None:  # noqa: SIM102 - this is decided when the kernel is compiled
        if tl.load(flags + head * tl.cdiv(T, ROWS) + band) == 0:
            return
    t = band * ROWS + tl.arange(0, ROWS)
    q_td = load_tile(q, b, h, t, T, D, WIDTH, EVEN)
    slot = tl.arange(0, SLOTS)[None, :]
    none = float("-inf")
    # Slots beyond those asked for are never the lowest.
    best_tn = tl.zeros((ROWS, SLOTS), tl.float32) + tl.where(slot < n_top, none, float("inf"))
    key_tn = tl.full((ROWS, SLOTS), -1, tl.int32)
    low_t = tl.min(best_tn, 1)
    run, count = walk(rule, lists, b, h, band, t, T, S, KEYS)
    for n in range(0, count):
        start, edged = step(lists, run, n, KEYS)
        s = start + tl.arange(0, KEYS)
        k_sd = load_tile(k, b, h // R, s, S, D, WIDTH, EVEN)
        x_ts = product(q_td, tl.trans(k_sd), EXACT)
        x_ts = scored(x_ts, rule, b, h, t[:, None], s[None, :], T, S)
        if edged:
            x_ts = tl.where(shown(rule, b, h, t[:, None], s[None, :], T, S), x_ts, none)
        high_t = tl.max(x_ts, 1)
        left = tl.max((high_t > low_t).to(tl.int32), 0)
        if SLOTS <= UNROLLED:
            for _ in tl.static_range(SLOTS):
                if left > 0:
                    best_tn, key_tn, low_t, x_ts, high_t, left = _keep(
                        best_tn, key_tn, low_t, x_ts, high_t, s, S, SLOTS
                    )
        else:
            while left > 0:
                best_tn, key_tn, low_t, x_ts, high_t, left = _keep(
                    best_tn, key_tn, low_t, x_ts, high_t, s, S, SLOTS
                )
    row_t = head * T + t
    max_t, scale_t = load_sums(sums, row_t, t < T)
    best_tn = tl.where(slot < n_top, best_tn, none)
    for n in range(0, n_top):
        high_t = tl.max(best_tn, 1)
        found_t = tl.min(tl.where(best_tn == high_t[:, None], key_tn, S), 1)
        best_tn = tl.where(key_tn == found_t[:, None], none, best_tn)
        # Empty slots have no key, and stay until the last: rows that see fewer end with these.
        w_t = tl.exp2(high_t - max_t) * scale_t
        found_t = tl.where(scale_t == scale_t, found_t, -1)
        tl.store(weights + row_t * n_top + n, w_t, mask=t < T)
        tl.store(keys + row_t * n_top + n, found_t.to(tl.int64), mask=t < T)


@triton.jit(do_not_specialize=["T", "rows", "n_top"])
def _bounds(crests, bounds, T, rows, n_top, ROWS: tl.constexpr, CRESTS: tl.constexpr):
    """The n-th largest of the different maxima of each row, or less than any score.

    Lowered by SLACK, as another kernel may round the same scores in another way.
    """
    n_bands = tl.cdiv(T, ROWS)
    head = (tl.program_id(0) // n_bands).to(tl.int64)
    t = tl.program_id(0) % n_bands * ROWS + tl.arange(0, ROWS)
    at_c = (head * CRESTS + tl.arange(0, CRESTS)) * rows
    x_ct = tl.load(crests + at_c[:, None] + t[None, :], mask=(t < T)[None, :], other=0.0)
    high_t = tl.max(x_ct, 0)
    for _ in range(1, n_top):
        x_ct = tl.where(x_ct == high_t[None, :], float("-inf"), x_ct)
        high_t = tl.max(x_ct, 0)
    tl.store(bounds + head * T + t, high_t - SLACK * (tl.abs(high_t) + 1.0), mask=t < T)


@triton.jit(do_not_specialize=["first_head", "T", "S", "n_top", "n_flags"])
def _pick(
    lists, sums, weights, keys, flags, factor, first_head, T, S, n_top, n_flags,
    ROWS: tl.constexpr, BAND: tl.constexpr, FLAGGED: tl.constexpr, MOST: tl.constexpr,
    GROUP: tl.constexpr, FLOOR: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The weights of the largest scores in the lists of some rows, largest first.

    A flag is set for rows whose lists had to be cut, or whose bound turns out too high for these
    very scores. BAND: rows that share the memory of their lists; FLAGGED: rows that share a flag.
    """
    n_bands = tl.cdiv(T, BAND)
    n_parts = n_bands * (BAND // ROWS)
    own = (tl.program_id(0) // n_parts).to(tl.int64)
    start = tl.program_id(0) % n_parts * ROWS
    head = first_head + own
    t = start + tl.arange(0, ROWS)
    row_t = head * T + t
    real_t = t < T
    list_t = (own * n_bands * BAND + t) * MOST
    max_t, scale_t = load_sums(sums, row_t, real_t)
    count_t = tl.load(lists.counts + row_t, mask=real_t, other=0)
    bound_t = tl.load(lists.bounds + row_t, mask=real_t, other=FLOOR)
    n = tl.arange(0, MOST * GROUP)
    there_tn = real_t[:, None] & ((n // GROUP)[None, :] < count_t[:, None])
    at_tn = list_t[:, None] * GROUP + n[None, :]
    x_tn = tl.load(lists.scores + at_tn, mask=there_tn, other=float("-inf"))
    key_tn = tl.load(
        lists.first_keys + list_t[:, None] + (n // GROUP)[None, :], mask=there_tn, other=0
    )
    key_tn += (n % GROUP // 2 * 8 + n % 2)[None, :]
    if PLAIN:
        x_tn *= factor
    key_tn = tl.where(there_tn & (x_tn != float("-inf")), key_tn, -1)
    high_t = bound_t
    for i in range(0, n_top):
        high_t = tl.max(x_tn, 1)
        found_t = tl.min(tl.where(x_tn == high_t[:, None], key_tn, S), 1)
        x_tn = tl.where(key_tn == found_t[:, None], float("-inf"), x_tn)
        w_t = tl.exp2(high_t - max_t) * scale_t
        found_t = tl.where(scale_t == scale_t, found_t, -1)
        tl.store(weights + row_t * n_top + i, w_t, mask=real_t)
        tl.store(keys + row_t * n_top + i, found_t.to(tl.int64), mask=real_t)
    # A row that looks at a NaN has no result to find.
    known_t = real_t & (scale_t == scale_t)
    is_open_t = known_t & ((count_t > MOST) | ((bound_t > FLOOR) & (high_t < bound_t)))
    flag = flags + head * n_flags + start // FLAGGED
    tl.store(flag, 1, mask=tl.max(is_open_t.to(tl.int32), 0) > 0)


LIST_NUMBERS = 2**26
"""The most numbers of lists that are held at a time."""
MOST_LISTED = 8
"""The largest n_top for which lists are made."""
FEW_TILES = 32
"""A row of up to this many tiles computes its bound from all of its scores."""


def find_bounds(crests: Tensor, T: int, n_top: int) -> Tensor:
    """A lower bound of the n_top-th largest score of each row, in bits, (B, H, T)."""
    B, H, n_crests, rows = crests.shape
    bounds = torch.empty(B, H, T, dtype=torch.float32, device=crests.device)
    launch: Any = _bounds[(B * H * triton.cdiv(T, 64),)]
    launch(
        crests, bounds, T, rows, n_top, ROWS=64, CRESTS=n_crests, num_warps=4, enable_fp_fusion=True
    )
    return bounds


def takes_lists(given: Rendered, n_top: int) -> bool:
    """Whether candidates are listed first: on a Hopper GPU, where a row's bound leaves few."""
    if n_top > MOST_LISTED or not flash_hopper.runs_on(given.q.device):
        return False
    return flash_hopper.suits_scores(given)


def run_largest(
    given: Rendered, sums: RowSums, n_top: int, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The largest weights of each row and their keys, (B, H, T, n_top).

    bounds: lower bounds of these scores, in bits, where known.
    """
    (B, H, T, D), S = given.q.shape, given.k.shape[2]
    rule, tiles = rule_of(given), tiles_of("search", given)
    weights = torch.empty(B, H, T, n_top, dtype=torch.float32, device=given.q.device)
    keys = torch.empty(B, H, T, n_top, dtype=torch.int64, device=given.q.device)
    n_bands = triton.cdiv(T, tiles.rows)
    flags = None
    if takes_lists(given, n_top):
        flags = torch.zeros(B * H, n_bands, dtype=torch.int32, device=given.q.device)
        _run_lists(given, sums, bounds, weights, keys, flags, tiles.rows)
    launch: Any = _largest[(B * H * n_bands,)]
    launch(
        view(given.q), view(given.k), rule, order_tiles(given, rule, tiles), sums, weights, keys,
        flags, H, T, S, D, n_top,
        **options_of(given), ROWS=tiles.rows, KEYS=tiles.keys, SLOTS=triton.next_power_of_2(n_top),
        **tiles.options(),
    )  # fmt: skip
    return weights, keys


def _run_lists(
    given: Rendered,
    sums: RowSums,
    bounds: Tensor | None,
    weights: Tensor,
    keys: Tensor,
    flags: Tensor,
    flagged: int,
) -> None:
    """Fill in the largest weights and their keys, except for rows whose flags are set.

    flagged: rows that share a flag.
    """
    from regard.ops.kernels import flash_hopper_kernels
    from regard.ops.kernels import largest_hopper_kernels as hopper

    (B, H, T, _), n_top, device = given.q.shape, weights.shape[3], given.q.device
    band, most, group = hopper.ROWS.value, hopper.MOST.value, hopper.GROUP.value
    n_lists = triton.cdiv(T, band) * band * most
    n_heads = min(B * H, max(LIST_NUMBERS // (n_lists * (group + 1)), 1))
    lists = hopper.Lists(
        torch.empty(n_heads * n_lists * group, dtype=torch.float32, device=device),
        torch.empty(n_heads * n_lists, dtype=torch.int32, device=device),
        torch.empty(B * H * T, dtype=torch.int32, device=device),
        torch.empty(B * H * T, dtype=torch.float32, device=device),
    )
    launch: Any = _pick
    plain = flash_hopper_kernels.is_plain(given)
    for head in range(0, B * H, n_heads):
        n = min(n_heads, B * H - head)
        hopper.run_candidates(given, bounds, lists, (head, n), n_top, FEW_TILES)
        launch[(n * triton.cdiv(T, band) * (band // 32),)](
            lists, sums, weights, keys, flags, rule_of(given).factor, head, T, given.k.shape[2],
            n_top, flags.shape[1], ROWS=32, BAND=band, FLAGGED=flagged, MOST=most, GROUP=group,
            FLOOR=hopper.FLOOR.value, PLAIN=plain, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
