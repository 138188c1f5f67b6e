"""Attention in tiles, with the online softmax: the reference's numbers without its T × S matrix.

The matrix is computed tile by tile. For each band of queries the running maximum, the running sum
and the running output are kept, and with them the row statistics asked for (entropy, peak,
distance, mass). Tiles in which the mask hides every pair are skipped, tiles in which it hides none
are not masked. Extra memory is O(T + S), forward and backward: the backward pass recomputes the
weights, tile by tile, from the saved logsumexp.

On a CPU the two matrix products should take most of the time. So a tile is computed in place in one
scratch buffer, exp is computed as a power of 2, which torch vectorises, heads are processed a few
at a time where the rule is the same for all of them, and at the edge of a mask tiles are cut to the
visible keys.

A NaN or an infinity reaches the rows that may look at it, and no others. For scores the mask sees
to that, as it replaces the scores of hidden pairs. For values it does not, as 0 · NaN is NaN: in a
tile that is partly hidden only finite values are summed, and rows that see another are marked.

The backward pass is written in differentiable operations on lists of tiles, so it can be
differentiated again, and under `torch.func`; it is in `blockwise_backward.py`, and
`blockwise_op.py` ties the two together for autograd and for compiled graphs.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width; t, s
sizes of a tile.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard._check import known_finite, readable
from regard._torch import is_transformed
from regard.ops.call import Call, Rule, score_dtype
from regard.ops.dropout import keep_factor
from regard.ops.mask import edges, tile_bounds
from regard.ops.reference import (
    add_group_matmul,
    add_rule,
    finite_part,
    group_matmul,
    repeat_heads,
    row_max,
    softcapped,
    spoil,
)
from regard.ops.shape import Shape, Tile

TILE_ENTRIES = 2**20
"""Scores held at once over all heads: small enough for a cache, large enough to keep torch busy."""
GPU_ENTRIES = 2**25
"""Scores held at once on a GPU, which smaller tiles would leave idle."""

SMALLEST = 64
"""The side below which tiles do not shrink, however many heads there are."""
HEAD_ENTRIES = 2**18
"""Scores of one head in a tile, where heads can be processed a few at a time (`cut_heads`)."""
TALLEST = 512
"""Most rows of a tile on a CPU: enough for a fast product, few enough to follow a mask's edge."""
RUN = 32
"""Keys in a run: `argmax` finds the run with the largest score first, then the key in it."""
LOG2_E = math.log2(math.e)
"""exp(x) is exp2(x · LOG2_E), which torch computes faster on many CPUs."""
EDGE = 128
"""Tiles are cut to what a mask leaves at multiples of this many keys."""


class Ask(NamedTuple):
    """Which row statistics to keep beside the output."""

    entropy: bool = False
    peak: bool = False
    distance: bool = False


NOTHING = Ask()


class Rows(NamedTuple):
    """Row statistics of one pass over the tiles, (B, H, T); empty tensors where not asked for.

    `total` is the sum of the row's weights: 1, less with sinks, 0 where nothing is seen. A weight
    is exp(score - `row_max`) / `denominator`, which stays exact where exp(score - lse) would not.
    """

    output: Tensor
    lse: Tensor
    total: Tensor
    entropy: Tensor
    peak: Tensor
    peak_key: Tensor
    peak_logit: Tensor
    distance: Tensor
    mass: Tensor
    row_max: Tensor
    denominator: Tensor


def tile_sizes(shape: Shape, on_gpu: bool = False) -> tuple[int, int]:
    """Height and width of the tiles for this shape."""
    entries = GPU_ENTRIES if on_gpu else TILE_ENTRIES
    most = max(entries // max(shape.B * shape.H, 1), SMALLEST**2)
    height = max(min(shape.T, 2 ** int(math.log2(most) / 2)), 1)
    if not on_gpu:
        height = min(height, TALLEST)
    return height, max(min(shape.S, most // height), 1)


def tile_scratch(shape: Shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A scratch buffer for the scores of one tile, or another tensor of that size, for every tile.

    A new tensor for each tile fragments the heap: the next, aligned one may not fit into its hole.
    """
    height, width = tile_sizes(shape, like.is_cuda)
    size = shape.B * shape.H * height * width
    return torch.empty(size, dtype=dtype or score_dtype(like.dtype), device=like.device)


def grid_tiles(shape: Shape) -> list[Tile]:
    """Every tile of the grid that `bands` covers, empty ones included."""
    height, width = tile_sizes(shape)
    return [
        Tile(t, min(t + height, shape.T), s, min(s + width, shape.S))
        for t in range(0, shape.T, height)
        for s in range(0, shape.S, width)
    ]


def bands(
    rule: Rule,
    on_gpu: bool = False,
    queries: tuple[int, int] | None = None,
    step: int | None = None,
) -> list[tuple[tuple[int, int], list[tuple[Tile, bool]]]]:
    """Per band of queries (t0, t1): the tiles that are not empty, each with whether it is full.

    queries: the first and past the last query wanted; default all. The tiles form a grid; with a
    step, they are cut to what the mask leaves, at multiples of that many keys.
    """
    height, width = tile_sizes(rule.shape, on_gpu)
    step = width if step is None or rule.mask is None else min(step, width)
    t_edges, s_edges = edges(rule.shape.T, height), edges(rule.shape.S, step)
    if queries is not None:
        t_edges = np.unique(t_edges.clip(*queries))
    known = tile_bounds(rule.mask, rule.shape, t_edges, s_edges)
    result = []
    for row, (t0, t1) in enumerate(pairwise(t_edges.tolist())):
        tiles: list[tuple[Tile, bool]] = []
        for column, (s0, s1) in enumerate(pairwise(s_edges.tolist())):
            if not known.maybe[row, column]:
                continue
            tile, full = Tile(t0, t1, s0, s1), bool(known.surely[row, column])
            last = tiles[-1][0] if tiles and tiles[-1][1] == full else tile
            if last.s1 == s0 and s1 - last.s0 <= width:
                tile = tiles.pop()[0]._replace(s1=s1)
            tiles.append((tile, full))
        result.append(((t0, t1), tiles))
    return result


class _Scratch(NamedTuple):
    """The buffers in which every tile is computed; without them nothing is written in place.

    `spare` is a second buffer, for statistics that need scores and weights at once.
    """

    scores: Tensor
    spare: Tensor | None


class _Band:
    """The running maximum, sums and output of one band of queries; q is scaled, in score dtype."""

    def __init__(
        self, q_bhtd: Tensor, v_bgse: Tensor, i_t1: Tensor, scratch: _Scratch | None = None
    ) -> None:
        B, H, t, _ = q_bhtd.shape
        self.q, self.i_t1, self.scratch = q_bhtd, i_t1, scratch
        zero = torch.zeros_like(q_bhtd[..., :1]) if q_bhtd.shape[3] else None
        self.sum = zero if zero is not None else q_bhtd.new_zeros(B, H, t, 1)
        self.row_max = torch.full_like(self.sum, torch.finfo(q_bhtd.dtype).min)
        self.output = self.sum.expand(B, H, t, v_bgse.shape[3])
        if scratch is not None:
            self.output = q_bhtd.new_zeros(B, H, t, v_bgse.shape[3])
        self.spoil = self.sum
        self.score_sum = self.distance_sum = self.mass = self.sum
        self.key = torch.full_like(self.sum, -1, dtype=torch.int64)

    def score(self, k_bgsd: Tensor, rule: Rule, tile: Tile, full: bool) -> Tensor:
        """The scores of one tile; the caller may overwrite them."""
        scratch = None if self.scratch is None else self.scratch.scores
        scores_bhts = softcapped(group_matmul(self.q, k_bgsd.mT, scratch), rule)
        return add_rule(scores_bhts, rule, tile, full, in_place=scratch is not None)

    def spare(self, like_bhts: Tensor) -> Tensor | None:
        """The second buffer in the shape of a tile; None where there is none."""
        if self.scratch is None or self.scratch.spare is None:
            return None
        return self.scratch.spare[: like_bhts.numel()].view(like_bhts.shape)

    def take(
        self, scores_bhts: Tensor, j_s: Tensor, mass_b1s1: Tensor | None, ask: Ask
    ) -> tuple[Tensor, Tensor]:
        """Fold in one tile; returns its unnormalised weights and the factor for the older sums."""
        highest = torch.maximum(self.row_max, row_max(scores_bhts))
        shrink = (self.row_max - highest).exp()
        if ask.peak:
            self.key = better_key(scores_bhts, highest > self.row_max, self.key, j_s[0])
        power = scores_bhts.sub_(highest).mul_(LOG2_E)
        if ask.entropy:
            # The sum of w · (score - highest); raising highest by a step lowers every term by it.
            score_sum = shrink * (self.score_sum + self.sum * (self.row_max - highest))
            weights = torch.exp2(power, out=self.spare(power))
            terms = power.clamp_(min=torch.finfo(power.dtype).min).mul_(weights)
            self.score_sum = score_sum + terms.sum(-1, keepdim=True) / LOG2_E
        else:
            weights = power.exp2_()
        part = weights.sum(-1, keepdim=True)
        self.sum = shrink * self.sum + part
        if ask.distance:
            # Not as a matrix-vector product, whose sums are less exact.
            free = power if ask.entropy and self.scratch is not None else self.spare(weights)
            near = torch.mul(weights, (j_s - j_s[0]).to(weights.dtype), out=free)
            step = part * (self.i_t1 - j_s[0]).to(part.dtype) - near.sum(-1, keepdim=True)
            self.distance_sum = shrink * self.distance_sum + step
        if mass_b1s1 is not None:
            self.mass = shrink * self.mass + weights @ mass_b1s1.to(weights.dtype)
        self.row_max = highest
        return weights, shrink

    def mix(
        self,
        weights_bhts: Tensor,
        shrink_bht1: Tensor,
        v_bgse: Tensor,
        hidden_bhts: Tensor | None,
    ) -> None:
        """Add one tile's weighted values; hidden: the hidden pairs, which pass no NaN, if any."""
        if hidden_bhts is not None:
            spoil_bg1s = spoil(v_bgse, weights_bhts.dtype)[..., None, :]
            spoil_bhts = repeat_heads(spoil_bg1s, weights_bhts.shape[1])
            seen_bhts = torch.where(hidden_bhts, 0.0, spoil_bhts)
            self.spoil = self.spoil + seen_bhts.sum(-1, keepdim=True)
            v_bgse = finite_part(v_bgse)
        if self.scratch is None:
            self.output = self.output * shrink_bht1 + group_matmul(weights_bhts, v_bgse)
        else:
            add_group_matmul(self.output.mul_(shrink_bht1), weights_bhts, v_bgse)

    def none(self) -> Tensor:
        """The empty tensor of a statistic not asked for; a new one each time, never shared."""
        return self.sum.new_zeros(0)

    def logit(self) -> Tensor:
        """The largest score of each row; NaN where the sum is NaN, -inf where nothing is seen."""
        return (self.row_max + 0.0 * self.sum).masked_fill(self.sum == 0, -math.inf)

    def finish(self, sinks_h: Tensor | None, ask: Ask, has_mass: bool) -> Rows:
        """The final statistics: sinks added to the sums, and everything divided by them."""
        highest, total = self.row_max, self.sum
        if sinks_h is not None:
            sink = sinks_h.to(total.dtype)[:, None, None]
            highest = torch.maximum(self.row_max, sink)
            total = total * (self.row_max - highest).exp() + (sink - highest).exp()
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        share = (self.row_max - highest).exp() / total
        lse = (highest + total.log()).masked_fill(empty, -math.inf)
        weight = self.sum * share
        # lse - self.row_max, but not computed from lse, which large scores cost its last digits.
        spread = (highest - self.row_max) + total.log()
        entropy = (weight * spread).masked_fill(empty, 0.0) - self.score_sum * share
        seen = (self.sum != 0).to(share.dtype)
        return Rows(
            output=self.output * share * (1.0 + self.spoil),
            lse=lse.squeeze(-1),
            total=weight.squeeze(-1),
            entropy=entropy.squeeze(-1) if ask.entropy else self.none(),
            peak=(share * seen).squeeze(-1) if ask.peak else self.none(),
            peak_key=no_key(self.key, share).squeeze(-1) if ask.peak else self.none().long(),
            peak_logit=self.logit().squeeze(-1) if ask.peak else self.none(),
            distance=(self.distance_sum * share).squeeze(-1) if ask.distance else self.none(),
            mass=(self.mass * share).squeeze(-1) if has_mass else self.none(),
            row_max=highest.squeeze(-1).clone(),
            denominator=total.squeeze(-1),
        )


def better_key(scores_bhts: Tensor, better_bht1: Tensor, key_bht1: Tensor, first: Tensor) -> Tensor:
    """Each row's best key so far; only rows for which this tile holds a better one are searched."""
    if not readable(scores_bhts):
        best = scores_bhts.argmax(-1, keepdim=True) + first
        return torch.where(better_bht1, best, key_bht1)
    rows = better_bht1.flatten().nonzero().squeeze(1)
    key = key_bht1.flatten().clone()
    if rows.numel():
        key[rows] = argmax(scores_bhts.flatten(0, 2).index_select(0, rows)) + first
    return key.view_as(key_bht1)


def argmax(scores_ns: Tensor) -> Tensor:
    """The index of each row's first maximum; torch's `amax` is much faster than its `argmax`."""
    if scores_ns.shape[1] % RUN:
        return scores_ns.argmax(-1)
    runs_nrs = scores_ns.view(scores_ns.shape[0], -1, RUN)
    run_n = runs_nrs.amax(-1).argmax(-1)
    one_ns = runs_nrs[torch.arange(len(run_n), device=run_n.device), run_n]
    return run_n * RUN + one_ns.argmax(-1)


def no_key(key: Tensor, weight: Tensor) -> Tensor:
    """The keys, with -1 for rows whose weight is NaN."""
    return key.masked_fill(weight.isnan(), -1)


def marked(x: Tensor) -> Tensor:
    """x with infinities replaced by NaN, so that every score computed from one is NaN."""
    return x if x.numel() and known_finite(x) else x + x * 0.0


def first_pass(
    call: Call, ask: Ask, mass_bs: Tensor | None, queries: tuple[int, int] | None = None
) -> Rows:
    """Output, logsumexp and the row statistics asked for, in one walk over the tiles.

    queries: the first and past the last query whose rows are wanted; default all.
    """
    given = [*call.tensors(), call.seed, mass_bs]
    transformed = any(t is not None and is_transformed(t) for t in given)
    samples = [
        join([walk(part, ask, mass, queries, transformed) for part, mass in heads], 1)
        for heads in cut_heads(call, mass_bs, transformed)
    ]
    return join(samples, 0)


def cut_heads(
    call: Call, mass_bs: Tensor | None, transformed: bool
) -> list[list[tuple[Call, Tensor | None]]]:
    """Split a call into parts of few samples, and these into parts of few heads, with their masses.

    On a CPU tiles of few heads are faster than small tiles of many. A call can be split only if its
    rule and its dropout do not depend on the head: a relative mask, no bias, no seed.
    """
    rule, (B, H, T, S) = call.rule, call.rule.shape
    alike = rule.bias is None and (rule.mask is None or rule.mask.relative) and call.seed is None
    n_heads = max(TILE_ENTRIES // max(min(T * S, HEAD_ENTRIES), 1), 1)
    if transformed or not alike or call.q.is_cuda or n_heads >= B * H:
        return [[(call, mass_bs)]]
    G = call.k.shape[1]
    n_samples, n_groups, shared = max(n_heads // H, 1), max(n_heads * G // H, 1), H // G
    parts = []
    for b in range(0, B, n_samples):
        of_b = slice(b, b + n_samples)
        mass = mass_bs if mass_bs is None or mass_bs.shape[0] == 1 else mass_bs[of_b]
        row = []
        for g in range(0, G, n_groups):
            heads, groups = slice(g * shared, (g + n_groups) * shared), slice(g, g + n_groups)
            q = call.q[of_b, heads]
            part = replace(
                call,
                q=q,
                k=call.k[of_b, groups],
                v=call.v[of_b, groups],
                rule=replace(rule, shape=Shape(q.shape[0], q.shape[1], T, S)),
                sinks=None if call.sinks is None else call.sinks[heads],
            )
            row.append((part, mass))
        parts.append(row)
    return parts


def join(parts: list[Rows], axis: int) -> Rows:
    """Concatenate rows of neighbouring samples, heads or queries; empty tensors stay empty."""
    if len(parts) == 1:
        return parts[0]
    together = zip(*parts, strict=True)
    return Rows(*(torch.cat(one, axis) if one[0].dim() > 1 else one[0] for one in together))


def walk(
    call: Call,
    ask: Ask,
    mass_bs: Tensor | None,
    queries: tuple[int, int] | None,
    transformed: bool,
) -> Rows:
    """One walk over the tiles of a call."""
    rule, sinks_h, device, dtype = call.rule, call.sinks, call.q.device, score_dtype(call.q.dtype)
    q_bhtd, k_bgsd = marked(call.q).to(dtype), marked(call.k).to(dtype)
    q_bhtd = q_bhtd * rule.factor(q_bhtd.shape[3])
    clean = not call.v.numel() or known_finite(call.v)
    v_bgse = call.v.to(dtype)
    step = None if q_bhtd.is_cuda else EDGE
    done: list[Rows] = []
    scratch = None
    if not transformed:
        scores = tile_scratch(rule.shape, q_bhtd)
        twice = ask.entropy or ask.distance
        scratch = _Scratch(scores, torch.empty_like(scores) if twice else None)
    for (t0, t1), tiles in bands(rule, q_bhtd.is_cuda, queries, step):
        i_t1 = torch.arange(t0, t1, device=device)[:, None] + rule.shape.offset
        band = _Band(q_bhtd[:, :, t0:t1], v_bgse, i_t1, scratch)
        for tile, full in tiles:
            keys = slice(tile.s0, tile.s1)
            scores = band.score(k_bgsd[:, :, keys], rule, tile, full)
            whole = clean or (full and not rule.bias_hides())
            hidden = None if whole else scores == -math.inf
            j_s = torch.arange(tile.s0, tile.s1, device=device)
            mass = None if mass_bs is None else mass_bs[:, None, keys, None]
            weights, shrink = band.take(scores, j_s, mass, ask)
            if call.seed is not None:
                keep = keep_factor(call.seed, call.dropout, rule.shape, tile, weights.dtype)
                weights = weights * keep
            band.mix(weights, shrink, v_bgse[:, :, keys], hidden)
        done.append(band.finish(sinks_h, ask, mass_bs is not None))
    if not done:
        i_t1 = torch.zeros(0, 1, dtype=torch.int64, device=device)
        done = [_Band(q_bhtd[:, :, :0], v_bgse, i_t1).finish(sinks_h, ask, mass_bs is not None)]
    rows = join(done, 2)
    return rows._replace(output=rows.output.to(call.q.dtype))
