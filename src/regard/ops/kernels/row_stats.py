"""What is asked about the weights of many queries, as Triton kernels: two passes, no matrix.

Why: the tiles of `blockwise.py` are torch's operations, each of which goes through memory. On a GPU
that costs many times what attention itself costs.

How: the first pass is the forward of `flash.py`, which keeps each row's maximum and sum and, beside
these, whatever is asked about rows. The second knows them, and so every weight alone. Maps and
received attention come of a walk along the queries of each key (`pooling.py`); the largest weights
and those above a threshold of walks along the keys of each query, as a search in rows wants its
tiles the other way round.

Left out: gradients.

Letters: B batch, T queries, H query heads; N keys named for each query.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.ops.blockwise import Ask
from regard.ops.call import Call, Rule
from regard.ops.kernels import flash, pooling
from regard.ops.kernels.arguments import BITS
from regard.ops.kernels.rendered import Rendered, render, render_rule
from regard.ops.kernels.row_sums import RowSums, crop_both
from regard.ops.shape import Tile
from regard.ops.wants import Observation, Peak, Received, SparseRows, Top, Wants
from regard.ops.weight_stats import Weights

MOST_TOP = 32
"""The most of the largest weights of a row that the kernel keeps; more are found in tiles."""


def by_kernels(call: Call, output: Tensor | None = None) -> Observation:
    """Every want but `weights`, beside an output that is known; else it comes from here."""
    wants = call.wants
    assert wants is not None
    given = render(call if output is None else replace(call, v=call.v[..., :0]))
    ask = Ask(wants.entropy, wants.peak, wants.distance)
    mass = None if wants.mass is None else wants.mass.to(call.q.device)
    own, found = flash.forward(given, ask, mass if mass is None or mass.dim() == 2 else mass[None])
    answers: dict[str, Any] = {
        name: found.get(name) for name in ("entropy", "distance", "mass") if name in found
    }
    answers["lse"] = found["lse"] if wants.lse else None
    answers["peak"] = Peak(found["peak"], found["key"]) if wants.peak else None
    answers |= second_pass(given, RowSums(found["maxima"], found["sums"]), wants, call.rule)
    return Observation(own if output is None else output, **answers)


def second_pass(given: Rendered, sums: RowSums, wants: Wants, rule: Rule) -> dict[str, Any]:
    """What needs the row sums first, by the names in `Observation`."""
    from regard.ops.kernels import row_stats_kernels

    found = _pooled(given, sums, wants)
    if wants.above is not None:
        offsets, keys, weights = row_stats_kernels.run_above(given, sums, wants.above)
        found["above"] = SparseRows(offsets, keys, weights, given.shape)
    if wants.rows is not None:
        wanted = torch.tensor(list(wants.rows), dtype=torch.int32, device=given.q.device)
        found["rows"] = row_stats_kernels.run_rows(given, sums, wanted)
    if wants.top is not None and wants.top <= MOST_TOP:
        found["top"] = Top(*row_stats_kernels.run_largest(given, sums, wants.top))
    elif wants.top is not None:
        weights_of = Weights(given.q, given.k, rule, sums.maxima / BITS, sums.sums)
        found |= weights_of.answer(Wants(top=wants.top))
    return found


def _pooled(given: Rendered, sums: RowSums, wants: Wants) -> dict[str, Any]:
    """The map and the received attention, where they are wanted."""
    picture, shape = wants.picture(), given.shape
    found: dict[str, Any] = {}
    total: Tensor | None = None
    if picture is not None:
        window = Tile(*picture.window(shape))
        size = picture.height, picture.width
        found["map"], total = pooling.pool(*crop_both(given, sums, window), size)
        if window != (0, shape.T, 0, shape.S):
            total = None
    if wants.received:
        total = pooling.receive(given, sums) if total is None else total
        found["received"] = Received(total, pooling.count_queries(given)[0])
    return found


def sum_singles(q: Tensor, k: Tensor, rule: Rule, lse_bht: Tensor, keys_nt: Tensor) -> Tensor:
    """Sums over all queries of each one's weight on the key named for it, (N, B, H), float64.

    A key of -1 names none; keys_nt is int32.
    """
    from regard.ops.kernels import row_stats_kernels

    given = render_rule(q, k, rule)
    parts = row_stats_kernels.run_singles(given, lse_bht.contiguous(), keys_nt.contiguous())
    return parts.sum(-1, dtype=torch.float64).view(len(keys_nt), *q.shape[:2])
