"""The backward pass of `blockwise`: recomputes the weights tile by tile from the saved logsumexp.

With p the weights, g the gradient of the output and δ = Σ g·output for each row, the gradient on a
score is p · (dropped g·v − δ + g_lse + g_total · (1 − Σp) − g_entropy · (log p + entropy + 1 −
Σp)); the chain rule continues through bias, softcap and scale to q and k. Only differentiable
operations are used, and nothing is written in place, so the pass can itself be differentiated.
Products with gradients use the finite parts of q, k and v: a hidden pair has the weight 0, and 0 ·
NaN would be NaN. Rows that see a NaN or an infinity have a logsumexp or an output of NaN, which
spoils only their gradients.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width; t, s
sizes of a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.ops.blockwise import Rows, bands, grid_tiles, marked
from regard.ops.call import Call, Rule, outside_autocast, score_dtype
from regard.ops.dropout import keep_factor
from regard.ops.reference import add_rule, finite_part, group_matmul, raw_scores
from regard.ops.shape import Tile

Place = TypeVar("Place", bound=tuple[int, ...])


class Grads(NamedTuple):
    """Gradients of q, k, v, of the sinks (empty without) and of the bias's leaves."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor
    leaves: list[Tensor]


class Given(NamedTuple):
    """Incoming gradients of output, logsumexp, totals and entropies; None where there is none."""

    output: Tensor | None
    lse: Tensor | None
    total: Tensor | None
    entropy: Tensor | None


class _Walk:
    """One backward walk over the tiles, with the gradients it accumulates."""

    def __init__(self, call: Call, rows: Rows, given: Given) -> None:
        self.marked = marked(call.q), marked(call.k)
        self.q, self.k, self.v = (finite_part(x) for x in (call.q, call.k, call.v))
        self.rule, self.rows, self.given = call.rule, rows, given
        self.dtype = score_dtype(self.q.dtype)
        self.k_parts: dict[tuple[int, int], Tensor] = {}
        self.v_parts: dict[tuple[int, int], Tensor] = {}
        # Summed immediately: small tensors kept between large ones would fragment the heap.
        self.bias_parts: list[dict[Tile, Tensor]] = [{} for _ in self.rule.bias_leaves()]
        self.lse = rows.lse.masked_fill(rows.lse == -math.inf, 0.0)[..., None]
        self.slope = self._slope_of_rows()

    def _slope_of_rows(self) -> Tensor:
        """The part of (gradient of a score) / weight that a row has in common, (B, H, T, 1)."""
        given, rows = self.given, self.rows
        slope = torch.zeros_like(rows.lse)
        if given.output is not None:
            slope = slope - (given.output.to(self.dtype) * rows.output.to(self.dtype)).sum(-1)
        if given.lse is not None:
            slope = slope + given.lse
        if given.total is not None:
            slope = slope + given.total * (1.0 - rows.total)
        if given.entropy is not None:
            slope = slope - given.entropy * (rows.entropy + 1.0 - rows.total)
        return slope[..., None]

    def sinks(self, sinks_h: Tensor) -> Tensor:
        """The gradient of the sinks: scores without a value, left out of totals and entropies."""
        share = (sinks_h.to(self.dtype)[:, None] - self.lse[..., 0]).exp()
        slope = self.slope[..., 0]
        if self.given.total is not None:
            slope = slope - self.given.total
        if self.given.entropy is not None:
            slope = slope + self.given.entropy
        return (share * slope).sum((0, 2)).to(sinks_h.dtype)

    def tile(self, tile: Tile, full: bool, keep: Tensor | None, wants_bias: bool) -> Tensor:
        """Accumulate the gradients of one tile; returns its part of the gradient of its queries."""
        rows, keys = (tile.t0, tile.t1), (tile.s0, tile.s1)
        q, k, v = run_of(self.q, rows), run_of(self.k, keys), run_of(self.v, keys)
        capped = raw_scores(run_of(self.marked[0], rows), run_of(self.marked[1], keys), self.rule)
        scores = add_rule(capped, self.rule, tile, full)
        log_p = scores - run_of(self.lse, rows)
        p = log_p.exp()
        hidden = None if full and not self.rule.bias_hides() else scores == -math.inf
        if hidden is not None:
            p = p.masked_fill(hidden, 0.0)
        slope = run_of(self.slope, rows).expand_as(p)
        if self.given.output is not None:
            g = run_of(self.given.output, rows).to(self.dtype)
            pull = group_matmul(g, v.to(self.dtype).mT)
            kept = p if keep is None else p * keep
            slope = slope + (pull if keep is None else pull * keep)
            add_part(self.v_parts, keys, group_outer(kept, g, v.shape[1]))
        if self.given.entropy is not None:
            log_p = log_p.masked_fill(p == 0, 0.0)
            slope = slope - run_of(self.given.entropy, rows).unsqueeze(-1) * log_p
        ds = p * slope if hidden is None else (p * slope).masked_fill(hidden, 0.0)
        if wants_bias:
            bias = self.rule.bias
            assert bias is not None
            given = bias.grad_places(tile), bias.grad_block(ds, self.rule.shape, tile)
            for parts, place, part in zip(self.bias_parts, *given, strict=True):
                add_part(parts, place, part)
        if self.rule.softcap is not None:
            capped = capped if hidden is None else capped.masked_fill(hidden, 0.0)
            ds = ds * (1.0 - (capped / self.rule.softcap) ** 2)
        ds = ds * self.rule.factor(q.shape[3])
        add_part(self.k_parts, keys, group_outer(ds, q.to(self.dtype), k.shape[1]))
        return group_matmul(ds, k.to(self.dtype))


def backward_pass(call: Call, rows: Rows, given: Given, wants_bias: bool) -> Grads:
    """Gradients of all inputs of the first pass."""
    # backward() may be called inside autocast, which was switched off for the first pass.
    with outside_autocast(call.q.device.type):
        return _walk_back(call, rows, given, wants_bias)


def _walk_back(call: Call, rows: Rows, given: Given, wants_bias: bool) -> Grads:
    walk = _Walk(call, rows, given)
    q, k, v, rule, sinks_h = call.q, call.k, call.v, call.rule, call.sinks
    q_parts: list[Tensor] = []
    for (t0, t1), tiles in bands(rule):
        total = torch.zeros_like(run_of(q, (t0, t1)), dtype=walk.dtype)
        for tile, full in tiles:
            keep = None
            if call.seed is not None:
                keep = keep_factor(call.seed, call.dropout, rule.shape, tile, walk.dtype)
            total = total + walk.tile(tile, full, keep, wants_bias)
        q_parts.append(total)
    leaves: list[Tensor] = []
    if wants_bias:
        assert rule.bias is not None
        leaves = rule.bias.grad_join(walk.bias_parts, grid_tiles(rule.shape))
    return Grads(
        q=torch.cat(q_parts, 2).to(q.dtype) if q_parts else torch.zeros_like(q),
        k=join_parts(walk.k_parts, k, rule),
        v=join_parts(walk.v_parts, v, rule),
        sinks=q.new_zeros(0) if sinks_h is None else walk.sinks(sinks_h),
        leaves=leaves,
    )


def run_of(x: Tensor, run: tuple[int, int]) -> Tensor:
    """Rows or keys from the first of `run` to past its last, along the third axis.

    By `narrow`, which batched gradients (`is_grads_batched`) support. A slice of everything would
    be an alias, which they do not support.
    """
    return x.narrow(2, run[0], run[1] - run[0])


def group_outer(a_bhts: Tensor, b_bhtx: Tensor, n_groups: int) -> Tensor:
    """Sum over the rows of each group of heads: aᵀ b, (B, G, s, x)."""
    B, H, t, s = a_bhts.shape
    rows = H // max(n_groups, 1) * t
    return a_bhts.reshape(B, n_groups, rows, s).mT @ b_bhtx.reshape(
        B, n_groups, rows, b_bhtx.shape[3]
    )


def add_part(parts: dict[Place, Tensor], place: Place, part: Tensor) -> None:
    """Add a tile's part to the sum of its region."""
    parts[place] = parts[place] + part if place in parts else part


def join_parts(parts: dict[tuple[int, int], Tensor], like: Tensor, rule: Rule) -> Tensor:
    """Concatenate the gradients of the keys; keys that no tile touched get zeros."""
    if not parts:
        return torch.zeros_like(like)
    pieces, at = [], 0
    for s0, s1 in sorted(parts):
        if s0 > at:
            pieces.append(torch.zeros_like(like[:, :, at:s0]))
        pieces.append(parts[(s0, s1)].to(like.dtype))
        at = s1
    if at < rule.shape.S:
        pieces.append(torch.zeros_like(like[:, :, at:]))
    return torch.cat(pieces, 2)
