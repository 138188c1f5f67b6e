"""What attention means: the definition that every other backend is tested against.

    softmax(softcap(scale · q kᵀ) + bias, where the mask allows) v

Query heads are grouped: neighbours share a key head. Scores and softmax are computed in float32 for
half types and in float64 for float64. A sink is one more score in each row's softmax with no value
behind it, so weights sum to less than one. A row with nothing to see has weights 0, output 0 and
logsumexp -inf. A NaN or an infinity makes those rows NaN that may look at it, and no others: a
hidden pair has the weight 0 and changes nothing, forward or backward. Dropout comes last.
Gradients are autograd's, of any order, forward mode included. The whole matrix is built: this is
the plainest backend, not the fastest.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._check import known_finite
from regard.ops.call import Call, Rule, score_dtype
from regard.ops.dropout import keep_factor
from regard.ops.shape import Tile


def run(call: Call) -> Tensor:
    """Attention by the formula."""
    scores_bhts = score(call.q, call.k, call.rule)
    weights_bhts = weigh(scores_bhts, call.rule, call.sinks)
    return mix(weights_bhts, scores_bhts, call)


def score(q_bhtd: Tensor, k_bgsd: Tensor, rule: Rule) -> Tensor:
    """The scores of all pairs: scaled, capped, biased, and -inf where no look is allowed."""
    tile = Tile(0, rule.shape.T, 0, rule.shape.S)
    if known_finite(q_bhtd, k_bgsd):
        return add_rule(raw_scores(q_bhtd, k_bgsd, rule), rule, tile)
    scores_bhts = raw_scores(finite_part(q_bhtd), finite_part(k_bgsd), rule)
    # A pair whose query or key is not finite has the score NaN, added to that of the finite parts:
    # so a hidden pair, whose score is replaced below, passes no NaN back to either.
    spoil_bht1 = spoil(q_bhtd, scores_bhts.dtype)[..., None]
    spoil_bg1s = spoil(k_bgsd, scores_bhts.dtype)[..., None, :]
    scores_bhts = scores_bhts + spoil_bht1 + repeat_heads(spoil_bg1s, q_bhtd.shape[1])
    return add_rule(scores_bhts, rule, tile)


def weigh(scores_bhts: Tensor, rule: Rule, sinks_h: Tensor | None) -> Tensor:
    """The softmax of each row, with a sink in its sum; 0 where there is nothing to see."""
    S, alone_bhts = scores_bhts.shape[-1], scores_bhts
    if sinks_h is not None:
        scores_bhts = append(scores_bhts, sinks_h)
    if not rule.hides():
        return torch.softmax(scores_bhts, -1)[..., :S]
    # A row of -inf has no softmax; it is given numbers first and zeros afterwards.
    empty_bht1 = (scores_bhts == -math.inf).all(-1, keepdim=True)
    weights_bhts = torch.softmax(scores_bhts.masked_fill(empty_bht1, 0.0), -1)
    return weights_bhts[..., :S].masked_fill(alone_bhts == -math.inf, 0.0)


def logsumexp(scores_bhts: Tensor, sinks_h: Tensor | None) -> Tensor:
    """The logsumexp of each row, the sink counted; -inf where there is nothing to sum."""
    scores_bhts = append(scores_bhts, sinks_h)
    empty_bht = (scores_bhts == -math.inf).all(-1)
    sums_bht = torch.logsumexp(scores_bhts.masked_fill(empty_bht[..., None], 0.0), -1)
    return sums_bht.masked_fill(empty_bht, -math.inf)


def mix(weights_bhts: Tensor, scores_bhts: Tensor, call: Call) -> Tensor:
    """The values, mixed by the weights that dropout leaves, in the type of q."""
    v_bgse, drawn = call.v, call.seeded()
    if drawn.seed is not None:
        keep_bhts = keep_factor(
            drawn.seed, drawn.dropout, call.rule.shape, dtype=weights_bhts.dtype
        )
        weights_bhts = weights_bhts * keep_bhts
    if known_finite(v_bgse):
        return group_matmul(weights_bhts, v_bgse.to(weights_bhts.dtype)).to(call.q.dtype)
    mixed_bhte = group_matmul(weights_bhts, finite_part(v_bgse).to(weights_bhts.dtype))
    spoil_bg1s = spoil(v_bgse, weights_bhts.dtype)[..., None, :]
    spoil_bhts = repeat_heads(spoil_bg1s, weights_bhts.shape[1])
    spoil_bht = torch.where(scores_bhts == -math.inf, 0.0, spoil_bhts).sum(-1)
    return (mixed_bhte * (1.0 + spoil_bht[..., None])).to(call.q.dtype)


def finite_part(x: Tensor) -> Tensor:
    """x with 0 for what is not finite."""
    return torch.where(torch.isfinite(x), x, 0.0)


def spoil(x_bnsd: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN for each key, value or query with a number that is not finite, else 0, (B, G or H, S)."""
    bad_bns = ~torch.isfinite(x_bnsd).all(-1)
    return torch.zeros_like(bad_bns, dtype=dtype).masked_fill(bad_bns, math.nan)


def repeat_heads(x_bgts: Tensor, n_heads: int) -> Tensor:
    """Entries of key heads, repeated for the query heads that share them."""
    return x_bgts.repeat_interleave(n_heads // max(x_bgts.shape[1], 1), 1)


def append(scores_bhts: Tensor, sinks_h: Tensor | None) -> Tensor:
    """The scores with the sink behind them, or with a -inf, which counts for nothing."""
    if sinks_h is None:
        return F.pad(scores_bhts, (0, 1), value=-math.inf)
    sink_bht1 = sinks_h.to(scores_bhts.dtype)[:, None, None].expand(*scores_bhts.shape[:3], 1)
    return torch.cat([scores_bhts, sink_bht1], -1)


def raw_scores(q_bhtd: Tensor, k_bgsd: Tensor, rule: Rule, scratch: Tensor | None = None) -> Tensor:
    """q kᵀ, scaled and soft-capped; written into a scratch buffer if given."""
    dtype = score_dtype(q_bhtd.dtype)
    q_bhtd = q_bhtd.to(dtype) * rule.factor(q_bhtd.shape[3])
    return softcapped(group_matmul(q_bhtd, k_bgsd.to(dtype).mT, scratch), rule)


def softcapped(scores_bhts: Tensor, rule: Rule) -> Tensor:
    """Scores squeezed between -softcap and softcap, if the rule has one."""
    if rule.softcap is None:
        return scores_bhts
    return rule.softcap * torch.tanh(scores_bhts / rule.softcap)


def add_rule(
    scores_bhts: Tensor, rule: Rule, tile: Tile, full: bool = False, in_place: bool = False
) -> Tensor:
    """Scores with the bias added, and -inf where the mask allows no look (nowhere, if `full`)."""
    out = scores_bhts if in_place else None
    never = scores_bhts.new_full((), -math.inf)
    if rule.bias is not None:
        added_bhts = rule.bias.block(rule.shape, tile, scores_bhts.device, scores_bhts.dtype)
        scores_bhts = torch.add(scores_bhts, added_bhts, out=out)
        if rule.bias.hides:
            scores_bhts = torch.where(added_bhts == never, never, scores_bhts, out=out)
    if rule.mask is not None and not full:
        # Not by `masked_fill`: on a CPU that takes longer than both products in a mixed tile.
        allowed_bhts = rule.mask.block(rule.shape, tile, scores_bhts.device)
        scores_bhts = torch.where(allowed_bhts, scores_bhts, never, out=out)
    return scores_bhts


def row_max(scores_bhts: Tensor) -> Tensor:
    """The largest score of each row; the lowest finite number where there is nothing to see."""
    if not scores_bhts.shape[-1]:
        return scores_bhts.new_full(
            (*scores_bhts.shape[:-1], 1), torch.finfo(scores_bhts.dtype).min
        )
    return scores_bhts.amax(-1, keepdim=True).clamp(min=torch.finfo(scores_bhts.dtype).min)


def group_matmul(a_bhtx: Tensor, b_bgxy: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Matrix product per head, H heads against G: neighbouring heads share, without repeating b."""
    B, H, T, X = a_bhtx.shape
    G, Y = b_bgxy.shape[1], b_bgxy.shape[3]
    if scratch is not None and G:
        product = scratch[: B * H * T * Y].view(B * G, H // G * T, Y)
        torch.bmm(a_bhtx.reshape(B * G, H // G * T, X), b_bgxy.flatten(0, 1), out=product)
        return product.view(B, H, T, Y)
    if H == G:
        return a_bhtx @ b_bgxy
    return (a_bhtx.reshape(B, G, H // G * T, X) @ b_bgxy).view(B, H, T, Y)


def add_group_matmul(sum_bhty: Tensor, a_bhtx: Tensor, b_bgxy: Tensor) -> None:
    """Add the product of `group_matmul` to a contiguous tensor, in place."""
    B, H, T, X = a_bhtx.shape
    G, Y = b_bgxy.shape[1], b_bgxy.shape[3]
    if G:
        rows = H // G * T
        a, b = a_bhtx.reshape(B * G, rows, X), b_bgxy.flatten(0, 1)
        sum_bhty.view(B * G, rows, Y).baddbmm_(a, b)
