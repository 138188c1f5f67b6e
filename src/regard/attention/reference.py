"""What attention means: the definition that every other path is judged against.

    softmax(softcap(scale · q kᵀ) + bias, where allowed) v

Query heads are grouped: neighbours share a key head. Scores and softmax run in float32 for half
types and in float64 for float64. Sinks are one more score in each row's sum with no value behind
it, so weights sum to less than one. A row with nothing to see has weights 0, output 0 and log-sum
-inf. Dropout comes last. Gradients are autograd's, to any order, forward-mode included. The whole
matrix is built: this is the plainest path, not the fastest.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attention.dropout import keep_factor
from regard.attention.rule import Rule, score_dtype
from regard.attention.shape import Tile


class Attended(NamedTuple):
    """The output, the weights before dropout, and the log-sum-exp of each row."""

    output: Tensor
    weights: Tensor
    lse: Tensor


def attend(
    q_bhtd: Tensor,
    k_bgsd: Tensor,
    v_bgse: Tensor,
    rule: Rule,
    sinks_h: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Attended:
    """Attention by the formula."""
    tile = Tile(0, rule.shape.T, 0, rule.shape.S)
    scores_bhts = add_rule(raw_scores(q_bhtd, k_bgsd, rule), rule, tile)

    # The largest score is taken out before exp; it cancels, so no gradient passes through it.
    top_bht1 = row_max(scores_bhts.detach())
    sum_bht1 = (scores_bhts - top_bht1).exp().sum(-1, keepdim=True)
    if sinks_h is not None:
        sink_bht1 = sinks_h.to(scores_bhts.dtype)[:, None, None]
        higher_bht1 = torch.maximum(top_bht1, sink_bht1.detach())
        sum_bht1 = sum_bht1 * (top_bht1 - higher_bht1).exp() + (sink_bht1 - higher_bht1).exp()
        top_bht1 = higher_bht1
    empty_bht1 = sum_bht1 == 0
    sum_bht1 = sum_bht1.masked_fill(empty_bht1, 1.0)

    weights_bhts = (scores_bhts - top_bht1).exp() / sum_bht1
    kept_bhts = weights_bhts
    if dropout > 0.0:
        assert seed is not None
        kept_bhts = weights_bhts * keep_factor(seed, dropout, rule.shape, dtype=weights_bhts.dtype)
    output_bhte = group_matmul(kept_bhts, v_bgse.to(kept_bhts.dtype))
    lse_bht = (top_bht1 + sum_bht1.log()).masked_fill(empty_bht1, -math.inf).squeeze(-1)
    return Attended(output_bhte.to(q_bhtd.dtype), weights_bhts, lse_bht)


def raw_scores(q_bhtd: Tensor, k_bgsd: Tensor, rule: Rule) -> Tensor:
    """How alike each query and key are: scaled, then softly capped."""
    dtype = score_dtype(q_bhtd.dtype)
    scores_bhts = group_matmul(q_bhtd.to(dtype) * rule.factor(q_bhtd.shape[3]), k_bgsd.to(dtype).mT)
    if rule.softcap is not None:
        scores_bhts = rule.softcap * torch.tanh(scores_bhts / rule.softcap)
    return scores_bhts


def add_rule(scores_bhts: Tensor, rule: Rule, tile: Tile, full: bool = False) -> Tensor:
    """Scores with the bias added, and -inf where the mask allows no look (nowhere, if `full`)."""
    if rule.bias is not None:
        scores_bhts = scores_bhts + rule.bias.block(
            rule.shape, tile, scores_bhts.device, scores_bhts.dtype
        )
    if rule.mask is not None and not full:
        allowed_bhts = rule.mask.block(rule.shape, tile, scores_bhts.device)
        scores_bhts = scores_bhts.masked_fill(~allowed_bhts, -math.inf)
    return scores_bhts


def row_max(scores_bhts: Tensor) -> Tensor:
    """The largest score of each row; the lowest finite number where there is nothing to see."""
    if not scores_bhts.shape[-1]:
        return scores_bhts.new_full(
            (*scores_bhts.shape[:-1], 1), torch.finfo(scores_bhts.dtype).min
        )
    return scores_bhts.amax(-1, keepdim=True).clamp(min=torch.finfo(scores_bhts.dtype).min)


def group_matmul(a_bhtx: Tensor, b_bgxy: Tensor) -> Tensor:
    """Matrix product per head, H heads against G: neighbouring heads share, without repeating b."""
    B, H, T, X = a_bhtx.shape
    G, Y = b_bgxy.shape[1], b_bgxy.shape[3]
    if H == G:
        return a_bhtx @ b_bgxy
    return (a_bhtx.reshape(B, G, H // G * T, X) @ b_bgxy).view(B, H, T, Y)
