"""Wants about the weights of many queries, by Triton kernels: two passes, no matrix.

Why: the tiles of `blockwise.py` are torch's operations, each of which reads and writes memory. On a
GPU that costs many times what attention itself costs.

How: the first pass is the forward of `flash.py`, which keeps each row's maximum and sum and, beside
these, the row statistics asked for. From them the second pass computes any weight by itself. Maps
and received attention are summed in a walk along the queries of each key (`pooling.py`); the
largest weights (`largest_kernels.py`) and those above a threshold are found in walks along the keys
of each query, as a search in rows needs its tiles the other way round.

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
from regard.ops.kernels.rendered import Rendered, aligned_rows, crop, render, render_rule
from regard.ops.kernels.row_sums import RowSums, crop_both
from regard.ops.observe import key_sets, refusing_gradients
from regard.ops.shape import Tile
from regard.ops.wants import Observation, Peak, SparseRows, Top, Wants
from regard.ops.weight_stats import Weights

MOST_TOP = 32
"""The largest `top` for which the kernel is used; more weights per row are found in tiles."""


def by_kernels(call: Call, output: Tensor | None = None) -> Observation:
    """Every want but `weights`; the output is computed here too, unless it is given."""
    wants = call.wants
    assert wants is not None
    call = call.seeded()
    given = render(call if output is None else replace(call, v=call.v[..., :0]))
    if call.rows is not None and not given.v.shape[3] and _tells(call.rows, wants):
        own, found = call.q.new_empty((*call.q.shape[:3], 0)), call.rows
    else:
        own, found = first_pass(given, wants)
    answers: dict[str, Any] = {name: found.get(name) for name in ("entropy", "distance", "mass")}
    answers["lse"] = found["lse"] if wants.lse else None
    answers["peak"] = Peak(found["peak"], found["key"], found["logit"]) if wants.peak else None
    sums = RowSums(found["maxima"], found["sums"])
    answers |= second_pass(given, sums, wants, call.rule, found.get(_bounds_of(wants)))
    seen = Observation(own if output is None else output, **answers)
    return refusing_gradients(seen, found["lse"], wants)


def _tells(rows: dict[str, Tensor], wants: Wants) -> bool:
    """Whether all that is wanted of a first pass is among the known row statistics."""
    wanted = {"entropy": wants.entropy, "peak": wants.peak, "distance": wants.distance}
    return wants.mass is None and all(name in rows for name, asked in wanted.items() if asked)


def _bounds_of(wants: Wants) -> str:
    """The name of the lower bounds of each row's `top` largest scores."""
    return f"bounds of {wants.top}"


def first_pass(given: Rendered, wants: Wants) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the row statistics asked for, which are 0 for rows that nothing needs."""
    from regard.ops.kernels import largest_kernels as largest

    masses = key_sets(wants)
    masses = None if masses is None else masses.to(given.q.device)
    ask = Ask(wants.entropy, wants.peak, wants.distance)
    if wants.top is not None and largest.takes_lists(given, wants.top):
        out, found = flash.forward(given, ask, masses, with_crests=True)
        crests = found.pop("crests")
        found[_bounds_of(wants)] = largest.find_bounds(crests, given.shape.T, wants.top)
        return out, found
    if wants.first_pass() or given.v.shape[3] or not wants.second_pass():
        return flash.forward(given, ask, masses)
    t0, t1 = wants.span(given.shape)
    out, found = flash.forward(crop(given, Tile(t0, t1, 0, given.shape.S)), ask, None)
    around = (t0, given.shape.T - t1)
    return out, {name: torch.nn.functional.pad(x, around) for name, x in found.items()}


def second_pass(
    given: Rendered, sums: RowSums, wants: Wants, rule: Rule, bounds: Tensor | None
) -> dict[str, Any]:
    """What needs the row sums first, by the names in `Observation`.

    bounds: lower bounds of each row's `top` largest scores, if known.
    """
    from regard.ops.kernels import largest_kernels, row_stats_kernels

    asked, given = given, aligned_rows(given)
    found = _pooled(given, sums, wants)
    if wants.above is not None:
        offsets, keys, weights = row_stats_kernels.run_above(given, sums, wants.above)
        found["above"] = SparseRows(offsets, keys, weights, given.shape)
    if wants.rows is not None:
        wanted = torch.tensor(list(wants.rows), dtype=torch.int32, device=given.q.device)
        found["rows"] = row_stats_kernels.run_rows(given, sums, wanted)
    if wants.top is not None and wants.top <= MOST_TOP:
        found["top"] = Top(*largest_kernels.run_largest(given, sums, wants.top, bounds))
    elif wants.top is not None:
        weights_of = Weights(asked.q, asked.k, rule, sums.maxima / BITS, sums.sums)
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
    asked = wants.receiving()
    if asked is not None:
        queries, rows = asked.span(shape.T), asked.row_weights(sums.sums)
        rows = None if rows is None else rows[..., 0]
        if total is None or rows is not None or asked.by == "max" or queries != (0, shape.T):
            total = pooling.receive(given, sums, rows, asked.by, queries)
        found["received"] = asked.answer(total, *pooling.count_queries(given, rows, queries))
    return found


def sum_singles(q: Tensor, k: Tensor, rule: Rule, lse_bht: Tensor, keys_bnt: Tensor) -> Tensor:
    """For N lists of one key per query: the sum of all queries' weights on it, (B, N, H), float64.

    A key of -1 means none; keys_bnt is int32.
    """
    from regard.ops.kernels import row_stats_kernels

    given = render_rule(q, k, rule)
    parts = row_stats_kernels.run_singles(given, lse_bht.contiguous(), keys_bnt.contiguous())
    sums_nbh = parts.sum(-1, dtype=torch.float64).view(keys_bnt.shape[1], *q.shape[:2])
    return sums_nbh.transpose(0, 1)
