"""Device functions on rows and tiles for `flash_backward_hopper_kernels.py`, in Gluon.

Scores are in bits; tiles are keys by rows. This module needs triton, and is imported where it runs.

Letters: T queries, S keys, H query heads, R query heads a key head, D head width; b, h, t, s one or
some of each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from regard.ops.kernels import tile_kernels
from regard.ops.kernels.hopper_tile_kernels import async_load

bounds_of = gluon.jit(tile_kernels.bounds_of.fn)
runs_by_keys = gluon.jit(tile_kernels.runs_by_keys.fn)
is_scattered = gluon.jit(tile_kernels.is_scattered.fn)


@gluon.jit
def load_both(
    one, other, at, b, h, full, one_buffer, other_buffer, BYTES: gl.constexpr
):  # fmt: skip
    """Load the rows of a head from `at` on, of two tensors, by TMA."""
    mbarrier.expect(full, BYTES)
    async_load(one, [b, h, at, 0], full, one_buffer)
    async_load(other, [b, h, at, 0], full, other_buffer)


@gluon.jit
def walk(rule, lists, b, key, T, S, ROWS: gl.constexpr, KEYS: gl.constexpr, APART: gl.constexpr):
    """The tiles of rows that see keys from `key` on: how many, and what `where_tile` needs.

    Without lists each program begins with another of the full ones.
    """
    if lists is None:
        begin, whole, ends, n_full, n_before, n_mixed = runs_by_keys(rule, b, key, T, S, ROWS, KEYS)
        skipped = gl.where(n_full > 0, key // KEYS * APART % gl.maximum(n_full, 1), 0)
        count = n_full + n_mixed
        run = (begin, whole, ends, n_full, n_before, skipped)
    else:
        at = b * lists.b + key // KEYS
        count = gl.load(lists.full + at)
        run = (at.to(gl.int64) * lists.n, at, at, at, at, at)
    return count, run


@gluon.jit
def where_tile(m, count, run, lists, group, H, n_rows, R: gl.constexpr, ROWS: gl.constexpr):
    """The m-th tile of a program: first row, whether it is mixed, head, first row over all heads.

    Without lists full tiles come first, cyclically from `skipped` on, then the mixed ones on
    either side; and one query head after the other.
    """
    r = m * 0
    if R > 1:
        r = m // count
        m = m % count
    if lists is None:
        begin, whole, ends, n_full, n_before, skipped = run
        n = m - n_full
        edge = gl.where(n < n_before, begin + n * ROWS, ends + (n - n_before) * ROWS)
        m += skipped
        m = gl.where(m >= n_full, m - n_full, m)
        start = gl.where(n < 0, whole + m * ROWS, edge)
        is_mixed = n >= 0
    else:
        code = gl.load(lists.tiles + run[0] + m)
        start = code // 2 * ROWS
        is_mixed = code % 2 == 1
    b, h = group // (H // R), group % (H // R) * R + r
    return start, is_mixed, h, (b * H + h).to(gl.int64) * n_rows + start


@gluon.jit
def rows_at(rows, at):
    """The logsumexp and δ of rows; δ is 0 where nothing is seen, whatever the gradient is."""
    lse = gl.load(rows.lse + at)
    return lse, gl.where(lse == float("inf"), 0.0, gl.load(rows.delta + at))


@gluon.jit
def weigh(
    x_st, lse_t, ends, tile, key, rule, b, T, S, HIDES: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The weights of a tile, keys by rows, from its products; HIDES: whether some may be hidden."""
    T_LAYOUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    _row, start, is_mixed, slope, scattered = tile
    column_s = gl.arange(0, x_st.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    x_st = x_st * rule.factor
    if rule.slopes is not None:
        x_st += gl.expand_dims(slope * column_s.to(gl.float32), 1)
    x_st = x_st - gl.expand_dims(lse_t, 0)
    if HIDES and is_mixed:
        s = key + column_s
        lo_1t = gl.expand_dims(ends[0].load(T_LAYOUT), 0)
        hi_1t = gl.expand_dims(ends[1].load(T_LAYOUT), 0)
        s_s1 = gl.expand_dims(s, 1)
        x_st = gl.where((s_s1 >= lo_1t) & (s_s1 < hi_1t), x_st, float("-inf"))
        if rule.ids is not None:  # noqa: SIM102 - this is decided when the kernel is compiled
            if scattered:
                t = gl.minimum(start + gl.arange(0, x_st.shape[1], layout=T_LAYOUT), T - 1)
                of_t = gl.load(rule.ids.queries + b * rule.ids.queries_b + t)
                of_s = gl.load(rule.ids.keys + b * rule.ids.keys_b + gl.minimum(s, S - 1))
                same_st = gl.expand_dims(of_t, 0) == gl.expand_dims(of_s, 1)
                x_st = gl.where(same_st, x_st, float("-inf"))
    return gl.exp2(x_st)


@gluon.jit
def add_sums(to, x, LAYOUT: gl.constexpr):
    """Add a tile of dq, width by rows, to its sums, four numbers at a time.

    The sums have the layout of tensor cores' results: of 16 by 8 numbers a thread has four, which
    are adjacent in memory, as are those of the threads of a warp. No number changes its thread.
    """
    WIDTH: gl.constexpr = x.shape[0]
    d = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LAYOUT)), 1)
    t = gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    block = t // 8 * (WIDTH // 16) + d // 16
    at = to + block * 128 + (d % 8 * 16 + t % 8 // 2 * 4 + d // 8 % 2 * 2 + t % 2)
    # The result is not used, but an elementwise operation must have one.
    gl.inline_asm_elementwise(
        """red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;""",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [at.to(gl.int64), x],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def keep_keys(buffer, key, rule, b, T, S, LAYOUT: gl.constexpr):
    """Zeros for keys or values that no query sees by window and span, as 0 · NaN is NaN."""
    s = key + gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    # What the first query sees begins first, and what the last one sees ends last.
    low, _end = bounds_of(rule, b, s * 0, T, S)
    _begin, past = bounds_of(rule, b, s * 0 + (T - 1), T, S)
    kept = gl.expand_dims((s >= low) & (s < past), 1)
    buffer.store(gl.where(kept, buffer.load(LAYOUT), 0.0))


@gluon.jit
def keep_rows(buffer, start, rule, b, T, S, LAYOUT: gl.constexpr):
    """Zeros for the rows that see nothing by window and span."""
    t = start + gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    lo_t, hi_t = bounds_of(rule, b, gl.minimum(t, T - 1), T, S)
    buffer.store(gl.where(gl.expand_dims(hi_t > lo_t, 1), buffer.load(LAYOUT), 0.0))


@gluon.jit
def write_keys(to, buffer, b, h, key, S, LAYOUT: gl.constexpr):
    """Store the gradient of the keys, or of their values."""
    KEYS: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    s = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = to.at + b.to(gl.int64) * to.b + h.to(gl.int64) * to.h
    at_sd = at + gl.expand_dims(s.to(gl.int64) * to.t, 1) + gl.expand_dims(d * to.d, 0)
    gl.store(at_sd, buffer.load(LAYOUT), mask=gl.expand_dims(s < S, 1))
