"""Device functions on a tile of scores for all kernels: bias, mask, dropout, weights; needs triton.

Rows and keys are passed as vectors that already broadcast over the tile, (t, 1) and (1, s) or the
other way round, so a tile may be rows by keys or keys by rows. Scores are in bits. For parts of a
rule that are None (`arguments.py`) no code is compiled.

Letters: B batch, T queries, S keys, H query heads; b, h, t, s one or some of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

BITS = tl.constexpr(1.4426950408889634)
"""log2(e): from nats to bits."""
NATS = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e38)
"""Below every score, and still finite, so that no -inf meets a -inf."""


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """a b, in float32; with exact products where inputs are float32, not those of tensor cores."""
    return tl.dot(a, b, input_precision="ieee") if EXACT else tl.dot(a, b)


@triton.jit
def capped(x, cap):
    """c tanh(x / c), by tanh(y) = 1 - 2 / (exp(2y) + 1), which neither overflows nor cancels."""
    return cap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * BITS / cap)) + 1.0))


@triton.jit
def slope_of(rule, h):
    """The slopes of heads, in bits; 0 without any."""
    return h * 0.0 if rule.slopes is None else tl.load(rule.slopes + h).to(tl.float32) * BITS


@triton.jit
def query_places(rule, b, t, T, S):
    """The positions of queries for the bias, as float32, which is faster in tiles."""
    place = t + (S - T)
    if rule.places is not None:
        place = tl.load(rule.places.queries + b * rule.places.queries_b + t)
    return place.to(tl.float32)


@triton.jit
def key_places(rule, b, s):
    """The positions of keys for the bias, as float32."""
    place = s
    if rule.places is not None:
        place = tl.load(rule.places.keys + b * rule.places.keys_b + s)
    return place.to(tl.float32)


@triton.jit
def biased(x, rule, b, h, t, s, slope, place, T, S):
    """Scores after the bias, in bits, -inf where it hides; t and s must be clamped to T and S."""
    if rule.slopes is not None:
        x -= slope * tl.abs(place - key_places(rule, b, s))
    if rule.band is not None:
        at = rule.band.at + h * rule.band.h + (s - t + (T - 1))
        added = tl.load(at).to(tl.float32)
        x = tl.where(added == float("-inf"), added, x + added * BITS)
    if rule.dense is not None:
        row = rule.dense.at + b * rule.dense.b + h.to(tl.int64) * rule.dense.h
        added = tl.load(row + t.to(tl.int64) * rule.dense.t + s.to(tl.int64) * rule.dense.s)
        added = added.to(tl.float32)
        x = tl.where(added <= rule.dense.floor, float("-inf"), x + added * BITS)
    return x


@triton.jit
def bounds_of(rule, b, t, T, S):
    """First and past-the-last key of queries by window, span and interval; all keys without."""
    lo = t * 0
    hi = t * 0 + S
    if rule.window is not None:
        i = t + (S - T)
        lo = tl.maximum(i - rule.window.left, 0)
        hi = tl.minimum(i + rule.window.right + 1, S)
    if rule.span is not None:
        lo = tl.maximum(lo, tl.load(rule.span.first + b * rule.span.b).to(tl.int32))
        hi = tl.minimum(hi, tl.load(rule.span.past + b * rule.span.b).to(tl.int32))
    if rule.interval is not None:
        lo = tl.maximum(lo, tl.load(rule.interval.lo + b * rule.interval.b + t))
        hi = tl.minimum(hi, tl.load(rule.interval.hi + b * rule.interval.b + t))
    return lo, hi


@triton.jit
def runs_of(lo_t, hi_t, real_t, S, KEYS: tl.constexpr):
    """The tiles of keys that rows see, if each row sees one interval.

    Returns the first key of them; first and past-the-last key of those that every row sees whole;
    how many are whole, mixed and before the whole ones, mixed altogether.
    """
    sees_t = real_t & (hi_t > lo_t)
    first = tl.min(tl.where(sees_t, lo_t, S), 0) // KEYS * KEYS
    last = tl.cdiv(tl.max(tl.where(sees_t, hi_t, 0), 0), KEYS) * KEYS
    whole = tl.maximum(tl.cdiv(tl.max(tl.where(real_t, lo_t, 0), 0), KEYS) * KEYS, first)
    whole = tl.minimum(whole, last)
    ends = tl.min(tl.where(real_t, hi_t, S), 0) // KEYS * KEYS
    ends = tl.maximum(tl.minimum(ends, last), whole)
    n_before = tl.maximum(whole - first, 0) // KEYS
    return first, whole, ends, (ends - whole) // KEYS, n_before, n_before + (last - ends) // KEYS


@triton.jit
def is_scattered(rule, b):
    """Whether ids have to be compared in a sample, whose documents may not be runs of keys."""
    return tl.load(rule.ids.scattered + b * rule.ids.scattered_b) != 0


@triton.jit
def find_runs(rule, b, lo_t, hi_t, real_t, S, KEYS: tl.constexpr):
    """As `runs_of`, with no tile whole where ids have to be compared."""
    first, whole, ends, n_full, n_before, n_mixed = runs_of(lo_t, hi_t, real_t, S, KEYS)
    if rule.ids is not None:  # noqa: SIM102 - this is decided when the kernel is compiled
        if is_scattered(rule, b):
            ends = whole
            n_mixed += n_full
            n_full = 0
    return first, whole, ends, n_full, n_before, n_mixed


@triton.jit
def runs_by_keys(rule, b, key, T, S, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """As `runs_of`, for the tiles of rows that see some of the KEYS keys from `key` on.

    By window and span alone: where rows have intervals of their own, lists are used instead.
    """
    past = tl.minimum(key + KEYS, S)
    first = key * 0
    last = first + T
    whole = first
    ends = last
    if rule.window is not None:
        # A query at i sees the keys i - left .. i + right.
        first = tl.maximum(key - rule.window.right - (S - T), 0)
        last = tl.minimum(past + rule.window.left - (S - T), T)
        whole = tl.maximum(past - 1 - rule.window.right - (S - T), 0)
        ends = tl.minimum(key + rule.window.left + 1 - (S - T), T)
    is_whole = key + KEYS <= S
    if rule.span is not None:
        begin = tl.load(rule.span.first + b * rule.span.b).to(tl.int32)
        end = tl.load(rule.span.past + b * rule.span.b).to(tl.int32)
        is_whole = is_whole & (begin <= key) & (end >= key + KEYS)
        # Not `first`, which may lie beyond the last row where a window has no right side.
        last = tl.where((begin < past) & (end > key), last, 0)
    last = tl.maximum(tl.cdiv(last, ROWS) * ROWS, 0)
    first = tl.minimum(first // ROWS * ROWS, last)
    whole = tl.minimum(tl.maximum(tl.cdiv(whole, ROWS) * ROWS, first), last)
    # Full tiles of rows are loaded without a mask, so they must not reach beyond the last row.
    ends = tl.where(is_whole, tl.minimum(ends, T) // ROWS * ROWS, whole)
    ends = tl.maximum(tl.minimum(ends, last), whole)
    n_before = (whole - first) // ROWS
    return first, whole, ends, (ends - whole) // ROWS, n_before, n_before + (last - ends) // ROWS


@triton.jit
def bits_of(rule, b, h, t, s):
    """The mask's bits of a tile of queries t (t, 1) and the keys s (1, s); or t (1, t), s (s, 1).

    A word is loaded once for its 32 keys: these are neighbours, from a multiple of 32 on.
    """
    DOWN: tl.constexpr = s.shape[1] == 1
    N: tl.constexpr = s.shape[0] * s.shape[1] // 32
    word = tl.min(tl.reshape(s, (N, 32)), 1) // 32
    row = rule.words.at + b * rule.words.b + h * rule.words.h + t.to(tl.int64) * rule.words.t
    lane = tl.arange(0, 32)
    if DOWN:
        words = tl.load(row + word[:, None])
        bits = words[:, None, :] >> lane[None, :, None]
        bits = tl.reshape(bits, (N * 32, t.shape[1]))
    else:
        words = tl.load(row + word[None, :])
        bits = words[:, :, None] >> lane[None, None, :]
        bits = tl.reshape(bits, (t.shape[0], N * 32))
    return (bits & 1) != 0


@triton.jit
def seen(rule, b, h, t, s, lo, hi, S, ALIGNED: tl.constexpr = False):
    """Whether queries may look at keys; t must be clamped to T, keys from S on are not seen.

    ALIGNED: the keys are neighbours, from a multiple of 32 on.
    """
    ok = (s >= lo) & (s < hi)
    if rule.ids is not None:
        of_queries = tl.load(rule.ids.queries + b * rule.ids.queries_b + t)
        of_keys = tl.load(rule.ids.keys + b * rule.ids.keys_b + tl.minimum(s, S - 1))
        ok = ok & (of_queries == of_keys)
    if rule.words is not None:
        if ALIGNED:
            ok = ok & bits_of(rule, b, h, t, s)
        else:
            row = rule.words.at + b * rule.words.b + h * rule.words.h
            word = tl.load(row + t.to(tl.int64) * rule.words.t + tl.minimum(s, S - 1) // 32)
            ok = ok & (((word >> (s % 32)) & 1) != 0)
    return ok


@triton.jit
def mixed(word):
    """The hash of a 32-bit word, as in `ops.dropout`."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def row_word(rule, head, t):
    """The hash from which a row's dropout is drawn; head: its index over the whole batch."""
    word = t.to(tl.uint32)
    if rule.dropout is not None:
        seed = tl.load(rule.dropout.seed)
        word = mixed((seed ^ (seed >> 32)).to(tl.uint32))
        word = mixed(word + head.to(tl.uint32) * 0x9E3779B1)
        word = mixed(word + t.to(tl.uint32) * 0x85EBCA77)
    return word


@triton.jit
def kept(rule, word, s):
    """Whether dropout keeps the weights on keys s of rows with this word."""
    word = mixed(word ^ (s.to(tl.uint32) * 0xC2B2AE3D))
    # Flipping the highest bit gives signed numbers the order of unsigned ones.
    return (word ^ 0x80000000).to(tl.int32, bitcast=True) >= rule.dropout.threshold


@triton.jit
def own_band(H, T, ROWS: tl.constexpr):
    """This program's band of rows, and its head; the last rows, longest if causal, go first."""
    n_bands = tl.cdiv(T, ROWS)
    n_heads = tl.num_programs(0) // n_bands
    band = n_bands - 1 - tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    return band, head, head // H, head % H


@triton.jit
def walk(rule, lists, b, h, line, t, T, S, KEYS: tl.constexpr):
    """The tiles of keys that the rows t see, in order: what `step` needs, and how many."""
    if lists is None:
        lo_t, hi_t = bounds_of(rule, b, tl.minimum(t, T - 1), T, S)
        first, whole, ends, n_full, _, n_mixed = find_runs(rule, b, lo_t, hi_t, t < T, S, KEYS)
        run = (first, whole, ends)
        count = n_full + n_mixed
    else:
        at = b * lists.b + h * lists.h + line
        run = (at * lists.n, at, at)
        count = tl.load(lists.full + at)
    return run, count


@triton.jit
def step(lists, run, n, KEYS: tl.constexpr):
    """The first key of the n-th tile of a walk, and whether some of its pairs are hidden."""
    if lists is None:
        start = run[0] + n * KEYS
        edged = (start < run[1]) | (start + KEYS > run[2])
    else:
        code = tl.load(lists.tiles + run[0] + n)
        start = code // 2 * KEYS
        edged = code % 2 == 1
    return start, edged


@triton.jit
def load_tile(x, b, h, n, end, D, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """The rows n of one head of q or k, (n, d); zeros from `end` on."""
    d = tl.arange(0, WIDTH)
    at = x.at + b * x.b + h * x.h + n[:, None].to(tl.int64) * x.t + d[None, :].to(tl.int64) * x.d
    if EVEN:
        rows = tl.load(at, mask=(n < end)[:, None], other=0.0)
    else:
        rows = tl.load(at, mask=(n < end)[:, None] & (d < D)[None, :], other=0.0)
    return rows


@triton.jit
def load_sums(sums, row, real):
    """The maxima of rows, and the reciprocals of their sums."""
    return tl.load(sums.maxima + row, mask=real, other=0.0), 1.0 / tl.load(
        sums.sums + row, mask=real, other=1.0
    )


@triton.jit
def scored(x, rule, b, h, t, s, T, S):
    """Scores in bits from products q·k, before the mask; t and s broadcast over the tile."""
    x = x * rule.factor
    if rule.cap is not None:
        x = capped(x, rule.cap)
    t = tl.minimum(t, T - 1)
    s = tl.minimum(s, S - 1)
    return biased(x, rule, b, h, t, s, slope_of(rule, h), query_places(rule, b, t, T, S), T, S)


@triton.jit
def shown(rule, b, h, t, s, T, S, ALIGNED: tl.constexpr = True):
    """Which pairs of a tile the mask allows; none beyond the last query and key."""
    real = t < T
    t = tl.minimum(t, T - 1)
    lo, hi = bounds_of(rule, b, t, T, S)
    return seen(rule, b, h, t, s, lo, tl.where(real, hi, 0), S, ALIGNED)


@triton.jit
def weighed(
    x, rule, b, h, t, s, top, scale, edged, T, S, HIDES: tl.constexpr, HIDDEN: tl.constexpr
):
    """Weights from products q·k, times a scale for each row; HIDDEN for pairs that are hidden.

    top, scale: the maximum of each row, and what exp2(score - top) is multiplied by. edged: whether
    the mask hides some; HIDES: whether a bias of -inf may.
    """
    x = scored(x, rule, b, h, t, s, T, S)
    w = tl.exp2(x - top) * scale
    if HIDES:
        w = tl.where(x == float("-inf"), HIDDEN, w)
    if edged:
        w = tl.where(shown(rule, b, h, t, s, T, S), w, HIDDEN)
    return w
