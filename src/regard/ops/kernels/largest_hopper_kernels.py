"""Candidates for the largest scores of rows, found on a Hopper GPU, in Gluon.

Why: a kernel that keeps the largest scores of 64 rows finds a new one in nearly every tile, and
then goes through the tile again. But the forward has seen all scores, and has stored the maximum of
each of some runs of keys. The n-th largest of these maxima is no larger than the n-th largest
score: so scores below it are not among the n largest, and the others are hardly more than n.

How: a program takes 128 rows, and walks the keys in tiles, loaded by TMA; two such programs share a
multiprocessor, so that one multiplies while the other searches. A tile's keys are in groups of
eight that one thread has. Of a group whose maximum is not below the row's bound all scores are
written to the row's list, beside its first key. For a row that has few tiles, or whose largest
scores are in one run of keys, as those of its neighbours are, the forward gives a low bound: so
first some tiles are walked for another bound, all where they are few, otherwise the last ones.
There a row's scores are in 64 classes by their keys, of which it keeps the maxima.

This module needs triton, and is imported where it runs.

Letters: T queries, S keys, H query heads, R query heads a key head, n rows; of a tile's keys q its
parts, c the threads that have a row, e what each of them has of a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from regard.ops.kernels.arguments import rule_of
from regard.ops.kernels.flash_hopper_kernels import describe, is_plain
from regard.ops.kernels.hopper_tile_kernels import (
    KEYS,
    STAGES,
    first_key,
    know_rows,
    load_tile,
    score,
    sync_threads,
    walk,
)
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.tile_kernels import LOWEST

ROWS = tl.constexpr(128)
PARTS = tl.constexpr(4)
"""Parts of a tile's keys; a row's four threads each have a group of every part."""
GROUP = tl.constexpr(8)
"""Keys of a group: two and two neighbours, eight keys apart."""
MOST = tl.constexpr(16)
"""Groups that a row's list holds."""
CLASSES = tl.constexpr(64)
"""Classes of keys, by their index in a tile, for a row's own bound."""
REGISTERS = 128
"""Registers per thread: so two programs of two warpgroups share a multiprocessor."""
FLOOR = tl.constexpr(-3.4e38)
"""A bound that every score reaches, and -inf does not."""


class Lists(NamedTuple):
    """The scores of each row that may be among its largest, in groups of neighbouring keys.

    scores: (rows, groups, keys); first_keys: (rows, groups); both for some heads. counts: how many
    groups each row has, of which the first are in the list; bounds: what a group's maximum reaches.
    """

    scores: Tensor
    first_keys: Tensor
    counts: Tensor
    bounds: Tensor


@gluon.jit
def _load(k, m, n_first, n_tiles, run, b, g, k_full, k_buffer, WIDTH: gl.constexpr):
    """Start loading the m-th tile: those for the bound come first, from the last one back."""
    n = gl.where(m < n_first, n_tiles - 1 - m, m - n_first)
    slot = m % STAGES
    load_tile(
        k, first_key(n, run), b, g, k_full.index(slot), k_buffer.index(slot), KEYS * WIDTH * 2
    )


@gluon.jit
def _multiply(q_td, m, k_full, k_buffer, zero_ts, WIDTH: gl.constexpr):
    """The products of the m-th tile; when it returns, all warps have read the tile."""
    slot = m % STAGES
    mbarrier.wait(k_full.index(slot), (m // STAGES) & 1)
    k_ds = k_buffer.index(slot).reshape([KEYS, WIDTH]).permute((1, 0))
    x_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False)
    sync_threads()
    return x_ts


@gluon.jit
def _by_class(x_ts):
    """The maximum of each class of a tile's keys."""
    return gl.max(x_ts.reshape([ROWS, KEYS // CLASSES, CLASSES]), 1)


@gluon.jit
def _nth_largest(x_nc, count):
    """The count-th largest of the different numbers of each row, or -inf."""
    high_n = gl.max(x_nc, 1)
    for _ in range(1, count):
        x_nc = gl.where(x_nc == gl.expand_dims(high_n, 1), float("-inf"), x_nc)
        high_n = gl.max(x_nc, 1)
    return high_n


@gluon.jit
def _list(x_ts, count_n, bound_n, start, scores, first_keys, factor, PLAIN: gl.constexpr):
    """Write the groups of a tile that reach their row's bound, and count them.

    The index of a group in its row's list is the number of groups before it: those of earlier
    tiles, of the row's threads before this one, and of earlier parts. The last two are summed as
    bytes of one number, by a product: byte i of x · 0x01010100 is the sum of the bytes before i.
    """
    SIDE: gl.constexpr = KEYS // PARTS // 8
    x_nqjce = x_ts.reshape([ROWS, PARTS, SIDE, 4, 2])
    high_nqc = gl.max(gl.max(x_nqjce, 4), 2)
    if PLAIN:
        high_nqc = high_nqc * factor
    LAYOUT: gl.constexpr = high_nqc.type.layout
    N_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    n = gl.arange(0, ROWS, layout=N_LAYOUT)
    q = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    q_nqc = gl.expand_dims(gl.expand_dims(q, 0), 2)
    c_nqc = gl.expand_dims(gl.expand_dims(c, 0), 1)
    n_nqc = gl.expand_dims(gl.expand_dims(n, 1), 2)
    bound_nqc = gl.expand_dims(gl.expand_dims(gl.convert_layout(bound_n, N_LAYOUT), 1), 2)
    count_nqc = gl.expand_dims(gl.expand_dims(gl.convert_layout(count_n, N_LAYOUT), 1), 2)
    is_in_nqc = high_nqc >= bound_nqc
    own_nc = gl.sum(is_in_nqc.to(gl.int32) << (8 * q_nqc), 1)
    own_nqc = gl.expand_dims(own_nc, 1)
    total_nqc = ((own_nqc * 0x01010101) >> 24) & 255
    all_nq = gl.sum(total_nqc << (8 * c_nqc), 2)
    all_nqc = gl.expand_dims(all_nq, 2)
    at_nqc = count_nqc + (((all_nqc * 0x01010100) >> (8 * c_nqc)) & 255)
    at_nqc += ((own_nqc * 0x01010100) >> (8 * q_nqc)) & 255
    is_in_nqc = is_in_nqc & (at_nqc < MOST)
    at_nqc = n_nqc * MOST + at_nqc
    gl.store(first_keys + at_nqc, start + q_nqc * (KEYS // PARTS) + 2 * c_nqc, mask=is_in_nqc)
    x_nqce = x_nqjce.permute((0, 1, 3, 2, 4)).reshape([ROWS, PARTS, 4, GROUP])
    E_LAYOUT: gl.constexpr = x_nqce.type.layout
    e = gl.arange(
        0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, E_LAYOUT)))
    )
    e_nqce = gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 1), 2)
    at_nqce = gl.expand_dims(gl.convert_layout(at_nqc, gl.SliceLayout(3, E_LAYOUT)), 3)
    is_in_nqce = gl.expand_dims(gl.convert_layout(is_in_nqc, gl.SliceLayout(3, E_LAYOUT)), 3)
    gl.store(scores + at_nqce * GROUP + e_nqce, x_nqce, mask=is_in_nqce)
    found_n = gl.max(gl.max(((all_nqc * 0x01010101) >> 24) & 255, 2), 1)
    return count_n + gl.convert_layout(found_n, count_n.type.layout)


@gluon.jit(do_not_specialize=["H", "T", "S", "first_head", "n_top", "few"])
def _candidates(
    q, k, rule, bounds, lists, first_head, n_top, few, H, T, S,
    R: gl.constexpr, WIDTH: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """Write the lists of 128 rows of one head.

    bounds: of each row, from the forward. few: up to so many tiles, all are walked for a bound.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    T_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    n_bands = gl.cdiv(T, ROWS)
    # Under a causal mask the last rows are the longest, and begin first.
    band = n_bands - 1 - gl.program_id(0) % n_bands
    own = gl.program_id(0) // n_bands
    head = first_head + own
    start = band * ROWS
    b, h = head // H, head % H
    q_buffer = gl.allocate_shared_memory(q.dtype, [1, 1, ROWS, WIDTH], q.layout)
    k_buffer = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, KEYS, WIDTH], k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
    fence_async_shared()
    sync_threads()
    row = know_rows(rule, b, h, start, T, S, ROWS, LAYOUT)
    n_tiles, run, _low, _past = walk(rule, b, start, T, S, ROWS, 8)
    n_full = run[0]
    n_first = gl.where(n_tiles <= few, n_tiles, gl.minimum(n_tiles, 2))
    n_all = n_first + n_tiles
    load_tile(q, start, b, h, q_full, q_buffer, ROWS * WIDTH * 2)
    for i in gl.static_range(STAGES):
        if i < n_all:
            _load(k, i, n_first, n_tiles, run, b, h // R, k_full, k_buffer, WIDTH)
    zero_ts = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=LAYOUT)
    q_td = q_buffer.reshape([ROWS, WIDTH])
    most_tc = _by_class(gl.full([ROWS, KEYS], float("-inf"), gl.float32, layout=LAYOUT))
    mbarrier.wait(q_full, 0)
    for m in range(0, n_first):
        x_ts = _multiply(q_td, m, k_full, k_buffer, zero_ts, WIDTH)
        if m + STAGES < n_all:
            _load(k, m + STAGES, n_first, n_tiles, run, b, h // R, k_full, k_buffer, WIDTH)
        n = n_tiles - 1 - m
        x_ts = score(
            x_ts, float("-inf"), first_key(n, run), n >= n_full, rule, row, (T, S), PLAIN, LAYOUT
        )
        most_tc = gl.maximum(most_tc, _by_class(x_ts))
    bound_t = gl.convert_layout(_nth_largest(most_tc, n_top), T_LAYOUT)
    if PLAIN:
        bound_t = bound_t * rule.factor
    row_t = head.to(gl.int64) * T + start + gl.arange(0, ROWS, layout=T_LAYOUT)
    real_t = start + gl.arange(0, ROWS, layout=T_LAYOUT) < T
    if bounds is not None:
        bound_t = gl.maximum(bound_t, gl.load(bounds + row_t, mask=real_t, other=0.0))
    bound_t = gl.where(bound_t > LOWEST, bound_t, FLOOR)
    first = (own * n_bands + band).to(gl.int64) * (ROWS * MOST)
    scores, first_keys = lists.scores + first * GROUP, lists.first_keys + first
    count_t = gl.full([ROWS], 0, gl.int32, layout=T_LAYOUT)
    for n in range(0, n_tiles):
        m = n_first + n
        x_ts = _multiply(q_td, m, k_full, k_buffer, zero_ts, WIDTH)
        if m + STAGES < n_all:
            _load(k, m + STAGES, n_first, n_tiles, run, b, h // R, k_full, k_buffer, WIDTH)
        at = first_key(n, run)
        x_ts = score(x_ts, float("-inf"), at, n >= n_full, rule, row, (T, S), PLAIN, LAYOUT)
        count_t = _list(x_ts, count_t, bound_t, at, scores, first_keys, rule.factor, PLAIN)
    gl.store(lists.counts + row_t, count_t, mask=real_t)
    gl.store(lists.bounds + row_t, bound_t, mask=real_t)


def run_candidates(
    given: Rendered,
    bounds: Tensor | None,
    lists: Lists,
    heads: tuple[int, int],
    n_top: int,
    few: int,
) -> None:
    """Fill the lists of some heads; heads: the first of them, and how many.

    bounds: lower bounds of each row's n_top largest scores, in bits, from the forward.
    """
    (_, H, T, D), (_, G, S, _) = given.q.shape, given.k.shape
    first, n_heads = heads
    launch: Any = _candidates[(n_heads * triton.cdiv(T, ROWS.value),)]
    launch(
        describe(given.q, ROWS.value), describe(given.k, KEYS.value), rule_of(given), bounds, lists,
        first, n_top, few, H, T, S,
        R=H // G, WIDTH=D, PLAIN=is_plain(given), num_warps=8, maxnreg=REGISTERS,
        enable_fp_fusion=True,
    )  # fmt: skip
