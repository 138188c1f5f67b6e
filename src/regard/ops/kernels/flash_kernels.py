"""The forward of `flash.py` in Triton: output, logsumexp and row statistics, in one pass.

A program takes some queries of one head (or of the heads that share a key head, where there are few
queries) and walks the keys in tiles with a running softmax. Tiles that all of its rows see whole
come first and need no mask; tiles that are mixed follow; empty ones are not visited. Which are
which follows from the rows' intervals, or from lists (`tile_lists.py`). Hidden values get the
weight 0, and 0 times a value that is not finite is NaN: where an output is not finite, all tiles
are walked once more, and values that no row sees are cleared first. This module needs triton, and
is imported where it runs.

Letters: B batch, T queries, S keys, H query heads, G key heads, R query heads a key head, D head
width, E value width; t, s sizes of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from regard.ops.kernels.arguments import options_of, rule_of, share, view, width_of
from regard.ops.kernels.launch import Launch, Plans
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.tile_kernels import (
    BITS,
    LOWEST,
    NATS,
    biased,
    bounds_of,
    capped,
    find_runs,
    kept,
    product,
    query_places,
    row_word,
    seen,
    slope_of,
)
from regard.ops.kernels.tile_lists import list_tiles
from regard.ops.kernels.tiles import tiles_of

SLOTS = tl.constexpr(64)
"""Runs of tiles for each of which a row's maximum is stored."""


class Crests(NamedTuple):
    """The maximum score of each row in each run of tiles that it walks, in bits, (B, H, SLOTS, T').

    -inf or less than LOWEST where nothing was seen. T': T padded to a multiple. b, h, run: strides.
    keys: per run. No number is 1, which Triton 3.6 loses inside a tuple in a tuple.
    """

    at: Tensor
    b: int
    h: int
    run: int
    keys: int


class Answers(NamedTuple):
    """Output tensors of row statistics, (B, H, T) each and contiguous; None: not asked for."""

    lse: Tensor
    maxima: Tensor | None = None
    sums: Tensor | None = None
    entropy: Tensor | None = None
    peak: Tensor | None = None
    key: Tensor | None = None
    logit: Tensor | None = None
    distance: Tensor | None = None
    mass: Tensor | None = None
    crests: Crests | None = None


class KeySet(NamedTuple):
    """The keys whose mass is wanted, (B or 1, S) of 0 and 1; b: stride from sample to sample."""

    at: Tensor
    b: int


@triton.jit
def _fold(
    state, q_td, k_at, v_at, n, start, rule, chosen, answers, row, sizes,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    MASKED: tl.constexpr, COVERED: tl.constexpr, PLAIN: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Fold the n-th tile of keys into the running statistics of its rows."""
    max_t, sum_t, out_te, heat_t, far_t, mass_t, key_t, crest_t = state
    b, h_t, t, word_t, slope_t, place_t, lo_t, hi_t, row_t = row
    T, S, D, E, k_s, v_s = sizes
    s = start + tl.arange(0, KEYS)
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, VALUES)
    at_k = k_at + start.to(tl.int64) * k_s
    if MASKED:
        k_sd = tl.load(at_k, mask=(s < S)[:, None] & (d < D)[None, :], other=0.0)
    elif EVEN:
        k_sd = tl.load(at_k)
    else:
        k_sd = tl.load(at_k, mask=(d < D)[None, :], other=0.0)
    if v_at is not None:
        at_v = v_at + start.to(tl.int64) * v_s
        if MASKED:
            v_se = tl.load(at_v, mask=(s < S)[:, None] & (e < E)[None, :], other=0.0)
        elif EVEN:
            v_se = tl.load(at_v)
        else:
            v_se = tl.load(at_v, mask=(e < E)[None, :], other=0.0)
    x_ts = product(q_td, tl.trans(k_sd), EXACT)
    if not PLAIN:
        x_ts *= rule.factor
        if rule.cap is not None:
            x_ts = capped(x_ts, rule.cap)
        real_s = s
        if MASKED:
            real_s = tl.minimum(s, S - 1)
        x_ts = biased(
            x_ts, rule, b, h_t[:, None], t[:, None], real_s[None, :], slope_t[:, None],
            place_t[:, None], T, S,
        )  # fmt: skip
    if MASKED:
        seen_ts = seen(
            rule, b, h_t[:, None], t[:, None], s[None, :], lo_t[:, None], hi_t[:, None], S, True
        )
        x_ts = tl.where(seen_ts, x_ts, float("-inf"))
    HIDDEN: tl.constexpr = MASKED or rule.band is not None or rule.dense is not None
    if v_at is not None and not COVERED and HIDDEN:
        # A value that none of these rows sees is not multiplied, as 0 · NaN is NaN.
        shown_s = tl.max((x_ts != float("-inf")).to(tl.int32), 0) > 0
        v_se = tl.where(shown_s[:, None], v_se, 0.0)
    top_t = tl.max(x_ts, 1)
    if answers.key is not None:
        found_t = tl.min(tl.where(x_ts == top_t[:, None], s[None, :], S), 1)
    if PLAIN:
        # The factor is above 0, so that it may be applied to the maximum, and in one step below.
        top_t *= rule.factor
    if answers.crests is not None:
        key = n * KEYS
        crest_t = tl.where(key % answers.crests.keys == 0, top_t, tl.maximum(crest_t, top_t))
        at_t = answers.crests.at + b * answers.crests.b + h_t * answers.crests.h + row_t
        tl.store(at_t + key // answers.crests.keys * answers.crests.run, crest_t)
    highest_t = tl.maximum(max_t, top_t)
    if answers.key is not None:
        better_t = (top_t > max_t) | ((top_t == max_t) & (found_t < key_t))
        key_t = tl.where(better_t, found_t, key_t)
    fade_t = tl.exp2(max_t - highest_t)
    x_ts = (x_ts * rule.factor if PLAIN else x_ts) - highest_t[:, None]
    w_ts = tl.exp2(x_ts)
    if answers.entropy is not None:
        # Raising the maximum by a step lowers every term by the step.
        heat_t = fade_t * (heat_t + sum_t * (max_t - highest_t))
        if MASKED or rule.band is not None or rule.dense is not None:
            x_ts = tl.maximum(x_ts, LOWEST)
        heat_t += tl.sum(w_ts * x_ts, 1)
    part_t = tl.sum(w_ts, 1)
    if answers.distance is not None:
        near_t = tl.sum(w_ts * tl.arange(0, KEYS).to(tl.float32)[None, :], 1)
        away_t = (t + (S - T - start)).to(tl.float32)
        far_t = fade_t * far_t + (part_t * away_t - near_t)
    if answers.mass is not None:
        of_s = tl.load(chosen.at + b * chosen.b + s, mask=s < S, other=0).to(tl.float32)
        mass_t = fade_t * mass_t + tl.sum(w_ts * of_s[None, :], 1)
    sum_t = fade_t * sum_t + part_t
    if v_at is not None:
        if rule.dropout is not None:
            w_ts = tl.where(kept(rule, word_t[:, None], s[None, :]), w_ts, 0.0)
        out_te = out_te * fade_t[:, None] + product(w_ts.to(v_se.dtype), v_se, EXACT)
    return highest_t, sum_t, out_te, heat_t, far_t, mass_t, key_t, crest_t


@triton.jit
def _walk(
    q_td, k_at, v_at, rule, lists, chosen, answers, row, own, sizes,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    COVERED: tl.constexpr, PLAIN: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The running statistics of rows after all tiles of keys that they see."""
    b, h, band, real_t = own
    state = (
        tl.full((ROWS,), LOWEST, tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, VALUES), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.full((ROWS,), -1, tl.int32),
        tl.full((ROWS,), LOWEST, tl.float32),
    )
    if lists is None:
        first, whole, ends, n_full, n_before, n_mixed = find_runs(
            rule, b, row[6], row[7], real_t, sizes[1], KEYS
        )
        for n in range(0, n_full):
            state = _fold(
                state, q_td, k_at, v_at, n, whole + n * KEYS, rule, chosen, answers, row, sizes,
                KEYS, WIDTH, VALUES, False, COVERED, PLAIN, EVEN, EXACT,
            )  # fmt: skip
        for n in range(0, n_mixed):
            start = tl.where(n < n_before, first + n * KEYS, ends + (n - n_before) * KEYS)
            state = _fold(
                state, q_td, k_at, v_at, n_full + n, start, rule, chosen, answers, row, sizes,
                KEYS, WIDTH, VALUES, True, COVERED, PLAIN, EVEN, EXACT,
            )  # fmt: skip
    else:
        line = (b * lists.b + h * lists.h + band) * lists.n
        n_full = tl.load(lists.full + b * lists.b + h * lists.h + band)
        n_mixed = tl.load(lists.mixed + b * lists.b + h * lists.h + band)
        for r in range(0, n_full):
            run = lists.tiles + line + 2 * r
            for tile in range(tl.load(run), tl.load(run + 1)):
                state = _fold(
                    state, q_td, k_at, v_at, tile, tile * KEYS, rule, chosen, answers, row, sizes,
                    KEYS, WIDTH, VALUES, False, COVERED, PLAIN, EVEN, EXACT,
                )  # fmt: skip
        for n in range(0, n_mixed):
            start = tl.load(lists.tiles + line + lists.n - 1 - n) * KEYS
            state = _fold(
                state, q_td, k_at, v_at, n, start, rule, chosen, answers, row, sizes,
                KEYS, WIDTH, VALUES, True, COVERED, PLAIN, EVEN, EXACT,
            )  # fmt: skip
    return state


@triton.jit(do_not_specialize=["H", "T", "S"])
def _forward(
    q, k, v, out, rule, lists, sinks, chosen, answers, kept_share, H, T, S, D, E,
    R: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr,
    COVERED: tl.constexpr, PLAIN: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Some queries of P heads that share a key head; rows run through the heads of each query."""
    n_bands = tl.cdiv(T * P, ROWS)
    # Under a causal mask the last rows are the longest, and begin first.
    band = n_bands - 1 - tl.program_id(0) % n_bands
    head = (tl.program_id(0) // n_bands).to(tl.int64) * P
    b, h = head // H, head % H
    n = band * ROWS + tl.arange(0, ROWS)
    real_t = n < T * P
    t = tl.minimum(n // P, T - 1)
    h_t = h + n % P
    head_t = head + n % P
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, VALUES)
    at_q = q.at + b * q.b + h_t[:, None] * q.h + t[:, None].to(tl.int64) * q.t + d[None, :] * q.d
    q_td = tl.load(at_q, mask=real_t[:, None] & (d < D)[None, :], other=0.0)
    s = tl.arange(0, KEYS).to(tl.int64)
    k_at = k.at + b * k.b + (h // R) * k.h + s[:, None] * k.t + d[None, :].to(tl.int64) * k.d
    v_at = None
    v_s = 0
    if v is not None:
        v_at = v.at + b * v.b + (h // R) * v.h + s[:, None] * v.t + e[None, :].to(tl.int64) * v.d
        v_s = v.t
    lo_t, hi_t = bounds_of(rule, b, t, T, S)
    word_t, place_t = row_word(rule, head_t, t), query_places(rule, b, t, T, S)
    row = (b, h_t, t, word_t, slope_of(rule, h_t), place_t, lo_t, hi_t, n // P)
    sizes = (T, S, D, E, k.t, v_s)
    own = (b, h, band, real_t)
    state = _walk(
        q_td, k_at, v_at, rule, lists, chosen, answers, row, own, sizes,
        ROWS, KEYS, WIDTH, VALUES, True, PLAIN, EVEN, EXACT,
    )  # fmt: skip
    if v is not None and not COVERED:
        finite_te = (tl.abs(state[2]) < float("inf")).to(tl.int32)
        if tl.min(tl.min(finite_te, 1), 0) == 0:
            # Hidden values may be the cause, as 0 · NaN is NaN.
            state = _walk(
                q_td, k_at, v_at, rule, lists, chosen, answers, row, own, sizes,
                ROWS, KEYS, WIDTH, VALUES, False, PLAIN, EVEN, EXACT,
            )  # fmt: skip
    max_t, sum_t, out_te, heat_t, far_t, mass_t, key_t, _crest_t = state
    highest_t = max_t
    total_t = sum_t
    if sinks is not None:
        sink_t = tl.load(sinks + h_t).to(tl.float32) * BITS
        highest_t = tl.maximum(max_t, sink_t)
        total_t = sum_t * tl.exp2(max_t - highest_t) + tl.exp2(sink_t - highest_t)
    empty_t = total_t == 0.0
    total_t = tl.where(empty_t, 1.0, total_t)
    share_t = tl.exp2(max_t - highest_t) / total_t
    if v is not None:
        at_out = out.at + b * out.b + h_t[:, None] * out.h + t[:, None].to(tl.int64) * out.t
        out_te = out_te * (share_t * kept_share)[:, None]
        tl.store(
            at_out + e[None, :] * out.d,
            out_te.to(out.at.dtype.element_ty),
            mask=real_t[:, None] & (e < E)[None, :],
        )
    row_t = head_t * T + t
    lse_t = tl.where(empty_t, float("-inf"), (highest_t + tl.log2(total_t)) * NATS)
    tl.store(answers.lse + row_t, lse_t, mask=real_t)
    if answers.maxima is not None:
        tl.store(answers.maxima + row_t, highest_t, mask=real_t)
        tl.store(answers.sums + row_t, total_t, mask=real_t)
    if answers.entropy is not None:
        # The logsumexp minus the maximum, but not computed so, which would lose the last digits.
        spread_t = (highest_t - max_t) + tl.log2(total_t)
        bits_t = tl.where(empty_t, 0.0, sum_t * share_t * spread_t) - heat_t * share_t
        tl.store(answers.entropy + row_t, bits_t * NATS, mask=real_t)
    if answers.key is not None:
        # A row that looks at a NaN has a sum of NaN, and no key.
        key_t = tl.where(sum_t == sum_t, key_t, -1)
        tl.store(answers.peak + row_t, tl.where(sum_t == 0.0, 0.0, share_t), mask=real_t)
        tl.store(answers.key + row_t, key_t.to(tl.int64), mask=real_t)
        logit_t = tl.where(sum_t == 0.0, float("-inf"), (max_t + 0.0 * sum_t) * NATS)
        tl.store(answers.logit + row_t, logit_t, mask=real_t)
    if answers.distance is not None:
        tl.store(answers.distance + row_t, far_t * share_t, mask=real_t)
    if answers.mass is not None:
        tl.store(answers.mass + row_t, mass_t * share_t, mask=real_t)


class Forward(NamedTuple):
    """How calls of one form run: by `run` of tensors, or by what it launches of addresses."""

    run: Callable[..., None]
    """Writes the output, if values have a width, and the answers."""
    launch: Launch
    arguments: Callable[..., tuple[Any, ...]]
    """What is launched, if nothing is asked but the logsumexp: of q, k, v, the output as an address
    and strides, the rule with addresses, and the addresses of sinks and of the logsumexp."""


UNASKED = (None,) * (len(Answers._fields) - 1)
"""The fields of `Answers` after the first where nothing is asked but the logsumexp."""


def plan_forward(given: Rendered, asked: bool) -> Forward:
    """How calls of this form run.

    asked: whether more is asked of rows than their sums.
    """
    (B, H, T, D), S, E = given.q.shape, given.k.shape[2], given.v.shape[3]
    kind = kind_of(asked, E > 0, given.words is not None)
    tiles, options, heads = tiles_of(kind, given), options_of(given), 1
    if given.words is None and T * options["R"] <= tiles.rows:
        heads = options["R"]
    added = (given.cap, given.slopes, given.band, given.dense)
    plain = given.factor > 0.0 and all(part is None for part in added)
    options |= {"P": heads, "ROWS": tiles.rows, "KEYS": tiles.keys, "VALUES": width_of(E)}
    options |= {"COVERED": given.covered, "PLAIN": plain, **tiles.options()}
    lists_plan = Plans()
    launch = Launch(B * H // heads * triton.cdiv(T * heads, tiles.rows), options)
    numbers = (1.0 / (1.0 - given.dropout), H, T, S, D, E)

    def run(given: Rendered, out: Tensor, answers: Answers, mass: Tensor | None) -> None:
        rule, lists = rule_of(given), None
        if rule.words is not None:
            lists = list_tiles(rule, given.shape, tiles[:2], False, given.q.device, plan=lists_plan)
        chosen = None if mass is None else KeySet(mass, share(mass, 0))
        answers = with_crests(answers, S, tiles.keys)
        launch(
            _forward, view(given.q), view(given.k), view(given.v) if E else None, view(out),
            rule, lists, given.sinks, chosen, answers, *numbers,
        )  # fmt: skip

    strides = [x.stride() for x in given[:3]]

    def arguments(
        inputs: tuple[Tensor, ...], out: Any, rule: Any, sinks: int | None, lse: int
    ) -> tuple[Any, ...]:
        views = [(x.data_ptr(), *steps) for x, steps in zip(inputs, strides, strict=True)]
        return (*views, out, rule, None, sinks, None, (lse, *UNASKED), *numbers)

    return Forward(run, launch, arguments)


def with_crests(answers: Answers, S: int, keys: int) -> Answers:
    """The answers with strides and run length of the crests, if there are any; keys: of a tile."""
    if answers.crests is None:
        return answers
    at = answers.crests.at
    b, h, run, _ = at.stride()
    crests = Crests(at, b, h, run, triton.cdiv(S, keys * SLOTS.value) * keys)
    return answers._replace(crests=crests)


def kind_of(asked: bool, has_values: bool, has_words: bool) -> str:
    """The name of the kernel in the table of tiles."""
    if not has_values:
        return "forward blind"
    if asked:
        return "forward asked"
    # With a third stage, beside the mask's words, a multiprocessor would hold only one program.
    return "forward listed" if has_words else "forward"
