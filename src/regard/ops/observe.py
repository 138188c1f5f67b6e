"""Answering `Wants`: once from the whole matrix (`by_reference`), once in tiles (`by_tiles`).

Both return the same `Observation`. The reference builds the matrix and reads every answer off it;
the tiles never build it.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops import reference
from regard.ops.blockwise import NOTHING, Ask, Rows, first_pass, no_key
from regard.ops.blockwise_op import run_blockwise
from regard.ops.call import Call
from regard.ops.shape import Shape, Tile
from regard.ops.wants import (
    Observation,
    Peak,
    Received,
    ReceivedAttention,
    SparseRows,
    Top,
    Wants,
    without_gradient,
)
from regard.ops.weight_stats import Weights, overlap, pool, visible


def by_tiles(call: Call) -> Observation:
    """Every want but `weights`, in O(T + S) extra memory."""
    wants = call.wants
    assert wants is not None
    if not wants.first_pass() and wants.second_pass() and not call.v.shape[3]:
        return weights_by_tiles(call, wants)
    ask = Ask(entropy=wants.entropy, peak=wants.peak, distance=wants.distance)
    rows = run_blockwise(call, ask, key_sets(wants))
    answers = row_answers(rows, wants)
    if wants.second_pass():
        with torch.no_grad():
            sums = (rows.row_max.detach(), rows.denominator.detach())
            answers |= Weights(call.q.detach(), call.k.detach(), call.rule, *sums).answer(wants)
    return refusing_gradients(Observation(rows.output, **answers), rows.lse, wants)


def row_answers(rows: Rows, wants: Wants) -> dict[str, Any]:
    """The wants that the row statistics of one pass answer, by their names in `Observation`."""
    return {
        "lse": rows.lse if wants.lse else None,
        "entropy": rows.entropy if wants.entropy else None,
        "peak": Peak(rows.peak, rows.peak_key, rows.peak_logit) if wants.peak else None,
        "distance": rows.distance if wants.distance else None,
        "mass": rows.mass if wants.mass is not None else None,
    }


def weights_by_tiles(call: Call, wants: Wants) -> Observation:
    """The wants of the second pass alone; the first pass covers only the rows that these need."""
    t0, t1 = wants.span(call.rule.shape)
    with torch.no_grad():
        rows = first_pass(call, NOTHING, None, (t0, t1))
        around = (t0, call.rule.shape.T - t1)
        sums = F.pad(rows.row_max, around), F.pad(rows.denominator, around)
        answers = Weights(call.q, call.k, call.rule, *sums).answer(wants)
    # Depends on every tensor that requires a gradient, so backward() to any of them is refused.
    anchor = sum([t.sum() for t in call.tensors() if t.requires_grad], call.q.new_zeros(()))
    output = call.q.new_zeros((*call.q.shape[:3], 0))
    return refusing_gradients(Observation(output, **answers), anchor, wants)


def by_reference(call: Call) -> Observation:
    """Every want, read off the whole matrix."""
    wants, shape = call.wants, call.rule.shape
    assert wants is not None
    scores = reference.score(call.q, call.k, call.rule)
    p = reference.weigh(scores, call.rule, call.sinks)
    output = reference.mix(p, scores, call)
    lse = reference.logsumexp(scores, call.sinks) if wants.lse else None
    seen = visible(call.rule, Tile(0, shape.T, 0, shape.S), False, p.device)
    masses, asked = key_sets(wants), wants.receiving()
    answers: dict[str, Any] = {
        "lse": lse,
        "entropy": entropy_of(p) if wants.entropy else None,
        "peak": peak_of(p, scores, seen) if wants.peak else None,
        "distance": distance_of(p, shape) if wants.distance else None,
        "mass": None if masses is None else (p @ masses[:, None, :, None].to(p.dtype))[..., 0],
        "received": None if asked is None else received_of(p, seen, asked),
        "top": None if wants.top is None else top_of(p, seen, wants.top),
        "above": None if wants.above is None else above_of(p, wants.above, shape),
        "map": None if wants.map is None else map_of(p, wants, shape),
        "rows": None if wants.rows is None else p[:, :, list(wants.rows)],
        "weights": p if wants.weights else None,
    }
    return refusing_gradients(Observation(output, **answers), p, wants)


def key_sets(wants: Wants) -> Tensor | None:
    """The keys whose mass is wanted, as (B or 1, S)."""
    return wants.mass[None] if wants.mass is not None and wants.mass.dim() == 1 else wants.mass


def refusing_gradients(seen: Observation, anchor: Tensor, wants: Wants) -> Observation:
    """The observation, in which answers without a gradient raise an error in backward()."""
    asked = wants.receiving()
    if asked is not None and asked.rows is not None and asked.rows.requires_grad:
        anchor = anchor.sum() + asked.rows.sum().to(anchor.device)

    def guard(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return without_gradient(value, anchor, name) if value.is_floating_point() else value
        if not is_dataclass(value):
            return value
        parts = {part.name: guard(getattr(value, part.name), name) for part in fields(value)}
        return replace(value, **parts)  # type: ignore[type-var]

    names = ("peak", "distance", "mass", "received", "top", "above", "map", "rows")
    held = {name: getattr(seen, name) for name in names}
    guarded = {name: guard(value, name) for name, value in held.items() if value is not None}
    return replace(seen, **guarded)


def entropy_of(p_bhts: Tensor) -> Tensor:
    """-Σ p log p of each row; a weight of 0 adds 0 and passes no gradient."""
    return 0.0 - (p_bhts * p_bhts.masked_fill(p_bhts == 0, 1.0).log()).sum(-1)


def peak_of(p_bhts: Tensor, scores_bhts: Tensor, seen_bhts: Tensor) -> Peak:
    """The largest weight of each row, its key and its score."""
    if not p_bhts.shape[-1]:
        none = p_bhts.new_zeros(p_bhts.shape[:-1])
        return Peak(none, none.long() - 1, none - math.inf)
    weight, key = p_bhts.masked_fill(~seen_bhts, -1.0).max(-1)
    # Where the weight is NaN, so is the score.
    logit = scores_bhts.amax(-1) + 0.0 * weight
    return Peak(weight.clamp(min=0.0), no_key(key.masked_fill(weight < 0, -1), weight), logit)


def distance_of(p_bhts: Tensor, shape: Shape) -> Tensor:
    """The mean of i - j under the weights."""
    i = torch.arange(shape.T, device=p_bhts.device)[:, None] + shape.offset
    return (p_bhts * (i - torch.arange(shape.S, device=p_bhts.device)).to(p_bhts.dtype)).sum(-1)


def received_of(p_bhts: Tensor, seen_bhts: Tensor, asked: Received) -> ReceivedAttention:
    """What each key gets from the queries asked about that may see it."""
    queries = slice(*asked.span(p_bhts.shape[2]))
    p_bhts, seen_bhts = p_bhts[:, :, queries], seen_bhts[:, :, queries]
    rows_bht1, row_weight = asked.row_weights(p_bhts), None
    if rows_bht1 is not None:
        rows_bht1 = rows_bht1[:, :, queries]
        row_weight = torch.where(seen_bhts, rows_bht1, 0.0).sum(2)
        p_bhts = rows_bht1 * p_bhts
    p_bhts = p_bhts.masked_fill(~seen_bhts, asked.unseen)
    if asked.by == "max":
        # One more row, which never wins, in case there is no row.
        found = F.pad(p_bhts, (0, 0, 0, 1), value=asked.unseen).amax(2)
    else:
        found = p_bhts.sum(2)
    return asked.answer(found, seen_bhts.to(found).sum(2), row_weight)


def top_of(p_bhts: Tensor, seen_bhts: Tensor, k: int) -> Top:
    """The k largest weights of each row, padded with weight 0 and key -1."""
    weight, key = p_bhts.masked_fill(~seen_bhts, -1.0).topk(min(k, p_bhts.shape[-1]), -1)
    lack = k - weight.shape[-1]
    weight, key = (F.pad(x, (0, lack), value=-1) for x in (weight, key))
    spoiled = p_bhts.isnan().any(-1, keepdim=True)
    key = key.masked_fill((weight < 0) | spoiled, -1)
    return Top(weight.clamp(min=0.0).masked_fill(spoiled, math.nan), key)


def above_of(p_bhts: Tensor, threshold: float, shape: Shape) -> SparseRows:
    """Every weight of at least the threshold."""
    flat = p_bhts.detach().flatten(0, 2)
    row, key = (flat >= threshold).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=flat.shape[0])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return SparseRows(offsets, key, flat[row, key], shape)


def map_of(p_bhts: Tensor, wants: Wants, shape: Shape) -> Tensor:
    """The mean weight in each cell."""
    picture = wants.picture()
    assert picture is not None
    t0, t1, s0, s1 = picture.window(shape)
    down = overlap(picture.height, (t0, t1), (t0, t1), p_bhts)
    across = overlap(picture.width, (s0, s1), (s0, s1), p_bhts)
    return pool(p_bhts[:, :, t0:t1, s0:s1], down, across, has_nan=True)
