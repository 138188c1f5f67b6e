"""Attention in tiles: the reference's numbers without the reference's matrix.

The matrix is walked in tiles. For each band of queries the running maximum, the running sum and the
running output are kept, and beside them whatever was asked about the rows (entropy, peak, distance,
mass). Tiles that the mask empties are skipped, tiles that it leaves whole are not masked. Extra
memory is O(T + S), forward and backward: the backward pass makes the weights again, tile by tile,
from the saved logsumexp.

What is not finite reaches the rows that may look at it, and no others. A NaN score does so by
itself, since the mask replaces the scores of hidden pairs. A value does not, as 0 · NaN is NaN: in
a tile that is partly hidden only finite values are added up, and rows that see another are marked.

The backward pass is written in differentiable operations on lists of tiles, so it can be
differentiated again, and under `torch.func`; it is in `blockwise_backward.py`, and
`blockwise_op.py` ties the two together for autograd and for compiled graphs.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width; t, s
sizes of a tile.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard._check import known_finite
from regard._torch import is_transformed
from regard.ops.call import Call, Rule, score_dtype
from regard.ops.dropout import keep_factor
from regard.ops.mask import edges, tile_bounds
from regard.ops.reference import (
    add_rule,
    finite_part,
    group_matmul,
    raw_scores,
    repeat_heads,
    row_max,
    spoil,
)
from regard.ops.shape import Shape, Tile

TILE_ENTRIES = 2**20
"""Scores held at once over all heads: small enough for a cache, large enough to keep torch busy."""
GPU_ENTRIES = 2**25
"""The same on a GPU, which small tiles would leave idle."""

SMALLEST = 64
"""The side below which tiles do not shrink, however many heads there are."""


class Ask(NamedTuple):
    """Which row statistics to keep beside the output."""

    entropy: bool = False
    peak: bool = False
    distance: bool = False


NOTHING = Ask()


class Rows(NamedTuple):
    """What one pass over the tiles tells of each row, (B, H, T); empty tensors where not asked.

    `total` is the sum of the row's weights: 1, less with sinks, 0 where nothing is seen. A weight
    is exp(score - `row_max`) / `denominator`, which stays exact where exp(score - lse) would not.
    """

    output: Tensor
    lse: Tensor
    total: Tensor
    entropy: Tensor
    peak: Tensor
    peak_key: Tensor
    distance: Tensor
    mass: Tensor
    row_max: Tensor
    denominator: Tensor


def tile_sizes(shape: Shape, on_gpu: bool = False) -> tuple[int, int]:
    """Height and width of the tiles for this shape."""
    entries = GPU_ENTRIES if on_gpu else TILE_ENTRIES
    most = max(entries // max(shape.B * shape.H, 1), SMALLEST**2)
    height = max(min(shape.T, 2 ** int(math.log2(most) / 2)), 1)
    return height, max(min(shape.S, most // height), 1)


def tile_scratch(shape: Shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A scratch buffer for the scores of one tile, or what is as large, used for every tile.

    A new tensor for each leaves holes in the heap that the next, aligned one may not fit.
    """
    height, width = tile_sizes(shape, like.is_cuda)
    size = shape.B * shape.H * height * width
    return torch.empty(size, dtype=dtype or score_dtype(like.dtype), device=like.device)


def grid_tiles(shape: Shape) -> list[Tile]:
    """Every tile of the grid that `bands` walks, the empty ones too."""
    height, width = tile_sizes(shape)
    return [
        Tile(t, min(t + height, shape.T), s, min(s + width, shape.S))
        for t in range(0, shape.T, height)
        for s in range(0, shape.S, width)
    ]


def bands(
    rule: Rule, on_gpu: bool = False, queries: tuple[int, int] | None = None
) -> list[tuple[tuple[int, int], list[tuple[Tile, bool]]]]:
    """Per band of queries (t0, t1): the tiles that are not empty, each with whether it is full.

    queries: the first and past the last that are wanted; all unless given.
    """
    height, width = tile_sizes(rule.shape, on_gpu)
    t_edges, s_edges = edges(rule.shape.T, height), edges(rule.shape.S, width)
    if queries is not None:
        t_edges = np.unique(t_edges.clip(*queries))
    known = tile_bounds(rule.mask, rule.shape, t_edges, s_edges)
    result = []
    for row, (t0, t1) in enumerate(pairwise(t_edges)):
        tiles = [
            (Tile(int(t0), int(t1), int(s0), int(s1)), bool(known.surely[row, column]))
            for column, (s0, s1) in enumerate(pairwise(s_edges))
            if known.maybe[row, column]
        ]
        result.append(((int(t0), int(t1)), tiles))
    return result


class _Band:
    """The running numbers of one band of queries."""

    def __init__(
        self, q_bhtd: Tensor, v_bgse: Tensor, i_t1: Tensor, scratch: Tensor | None = None
    ) -> None:
        dtype = score_dtype(q_bhtd.dtype)
        B, H, t, _ = q_bhtd.shape
        self.q, self.i_t1, self.scratch = q_bhtd, i_t1, scratch
        zero = torch.zeros_like(q_bhtd[..., :1], dtype=dtype) if q_bhtd.shape[3] else None
        self.sum = (
            zero if zero is not None else torch.zeros(B, H, t, 1, dtype=dtype, device=q_bhtd.device)
        )
        self.row_max = torch.full_like(self.sum, torch.finfo(dtype).min)
        self.output = self.sum.expand(B, H, t, v_bgse.shape[3])
        self.spoil = self.sum
        self.score_sum = self.distance_sum = self.mass = self.sum
        self.key = torch.full_like(self.sum, -1, dtype=torch.int64)

    def take(
        self, scores_bhts: Tensor, j_s: Tensor, mass_b1s1: Tensor | None, ask: Ask
    ) -> tuple[Tensor, Tensor]:
        """Fold in one tile; its weights before division, and what the old numbers shrink by."""
        highest = torch.maximum(self.row_max, row_max(scores_bhts))
        shrink = (self.row_max - highest).exp()
        if ask.peak:
            self.key = better_key(scores_bhts, highest > self.row_max, self.key, j_s[0])
        centred = scores_bhts.sub_(highest)
        if ask.entropy:
            # The sum of w · (score - highest); raising highest by a step lowers every term by it.
            score_sum = shrink * (self.score_sum + self.sum * (self.row_max - highest))
            scratch = None if is_transformed(centred) else self.scratch
            out = None if scratch is None else scratch[: centred.numel()].view(centred.shape)
            weights = torch.exp(centred, out=out)
            terms = centred.clamp_(min=torch.finfo(centred.dtype).min).mul_(weights)
            self.score_sum = score_sum + terms.sum(-1, keepdim=True)
        else:
            weights = centred.exp_()
        part = weights.sum(-1, keepdim=True)
        self.sum = shrink * self.sum + part
        if ask.distance:
            near = (weights @ (j_s - j_s[0]).to(weights.dtype))[..., None]
            step = part * (self.i_t1 - j_s[0]).to(weights.dtype) - near
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
        """Add the values of one tile; hidden: the pairs that no NaN may pass, if there are any."""
        if hidden_bhts is not None:
            spoil_bg1s = spoil(v_bgse, weights_bhts.dtype)[..., None, :]
            spoil_bhts = repeat_heads(spoil_bg1s, weights_bhts.shape[1])
            seen_bhts = torch.where(hidden_bhts, 0.0, spoil_bhts)
            self.spoil = self.spoil + seen_bhts.sum(-1, keepdim=True)
            v_bgse = finite_part(v_bgse)
        part = group_matmul(weights_bhts, v_bgse.to(weights_bhts.dtype))
        self.output = self.output * shrink_bht1 + part

    def none(self) -> Tensor:
        """What stands for an answer not asked for; new each time, since results share nothing."""
        return self.sum.new_zeros(0)

    def finish(self, sinks_h: Tensor | None, ask: Ask, has_mass: bool) -> Rows:
        """The rows' numbers with the sums divided out."""
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
        # lse - self.row_max, but not by way of lse: large scores would cost its last digits.
        spread = (highest - self.row_max) + total.log()
        entropy = (weight * spread).masked_fill(empty, 0.0) - self.score_sum * share
        seen = (self.sum != 0).to(share.dtype)
        return Rows(
            output=(self.output * share * (1.0 + self.spoil)).to(self.q.dtype),
            lse=lse.squeeze(-1),
            total=weight.squeeze(-1),
            entropy=entropy.squeeze(-1) if ask.entropy else self.none(),
            peak=(share * seen).squeeze(-1) if ask.peak else self.none(),
            peak_key=no_key(self.key, share).squeeze(-1) if ask.peak else self.none().long(),
            distance=(self.distance_sum * share).squeeze(-1) if ask.distance else self.none(),
            mass=(self.mass * share).squeeze(-1) if has_mass else self.none(),
            row_max=highest.squeeze(-1).clone(),
            denominator=total.squeeze(-1),
        )


def better_key(scores_bhts: Tensor, better_bht1: Tensor, key_bht1: Tensor, first: Tensor) -> Tensor:
    """Each row's best key so far, looked for only in rows where this tile holds a better one."""
    if is_transformed(scores_bhts):
        best = scores_bhts.argmax(-1, keepdim=True) + first
        return torch.where(better_bht1, best, key_bht1)
    rows = better_bht1.flatten().nonzero().squeeze(1)
    key = key_bht1.flatten().clone()
    if rows.numel():
        key[rows] = scores_bhts.flatten(0, 2)[rows].argmax(-1) + first
    return key.view_as(key_bht1)


def no_key(key: Tensor, weight: Tensor) -> Tensor:
    """Keys, of which rows of NaN have none: -1."""
    return key.masked_fill(weight.isnan(), -1)


def marked(x: Tensor) -> Tensor:
    """x with NaN for an infinity too, so that every score made with it is NaN."""
    return x + x * 0.0


def first_pass(
    call: Call, ask: Ask, mass_bs: Tensor | None, queries: tuple[int, int] | None = None
) -> Rows:
    """Output, logsumexp and the row statistics asked for, in one walk over the tiles.

    queries: the first and past the last whose rows are wanted; all unless given.
    """
    rule, v_bgse, sinks_h, device = call.rule, call.v, call.sinks, call.q.device
    q_bhtd, k_bgsd = marked(call.q), marked(call.k)
    clean = not v_bgse.numel() or known_finite(v_bgse)
    done: list[Rows] = []
    scratch, spare = None, None
    if not is_transformed(q_bhtd) and not is_transformed(k_bgsd):
        scratch = tile_scratch(rule.shape, q_bhtd)
        spare = torch.empty_like(scratch) if ask.entropy else None
    for (t0, t1), tiles in bands(rule, q_bhtd.is_cuda, queries):
        i_t1 = torch.arange(t0, t1, device=device)[:, None] + rule.shape.offset
        band = _Band(q_bhtd[:, :, t0:t1], v_bgse, i_t1, spare)
        for tile, full in tiles:
            keys = slice(tile.s0, tile.s1)
            scores = raw_scores(band.q, k_bgsd[:, :, keys], rule, scratch)
            scores = add_rule(scores, rule, tile, full)
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
    return Rows(
        *(
            torch.cat(parts, 2) if parts[0].dim() > 1 else parts[0]
            for parts in zip(*done, strict=True)
        )
    )
