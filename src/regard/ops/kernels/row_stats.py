"""What is asked about the weights of many queries, as Triton kernels: two passes, no matrix.

Why: the tiles of `blockwise.py` are torch's operations, each of which goes through memory. On a GPU
that costs many times what attention itself costs.

How: the first pass keeps each row's running sum and, beside it, whatever is asked about rows. The
second knows these sums, and so every weight alone: maps and received attention come of it
(`pooling.py`). The largest weights of rows are found in a walk of their own. Which keys a row sees
must be one interval, as masks made of Causal, Window, Lengths and documents have it.

Left out: gradients; dropout, which weights do not know of; biases, and masks that are no interval,
which `blockwise` takes.

Letters: B batch, T queries, H query heads; N keys named for each query.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.ops.call import Call, Rule
from regard.ops.kernels.inputs import BITS, Bounds, Inputs, RowSums, find_bounds
from regard.ops.kernels.pooling import Pooling
from regard.ops.wants import Observation, Peak, Top
from regard.ops.weight_stats import Weights

MOST_TOP = 32
"""The most of the largest weights of a row that the kernel keeps; more are found in tiles."""


def by_kernels(call: Call, output: Tensor) -> Observation:
    """Every want but `weights` and `mass`, beside an output that is known."""
    from regard.ops.kernels import row_stats_kernels

    q, k, rule, wants, sinks = call.q, call.k, call.rule, call.wants, call.sinks
    assert wants is not None
    bounds = find_bounds(rule, q.device)
    assert bounds is not None, "a call without bounds is refused"
    sinks = None if sinks is None else sinks.contiguous()
    shape = q.shape[:3]
    asked = [name for name in ("entropy", "distance", "peak") if getattr(wants, name)]
    floats = ["maxima", "sums", "lse", *asked]
    found = {name: torch.empty(shape, dtype=torch.float32, device=q.device) for name in floats}
    if wants.peak:
        found["key"] = torch.empty(shape, dtype=torch.int64, device=q.device)
    inputs = Inputs.of(q, k, rule, bounds)
    row_stats_kernels.run_rows(inputs, sinks, found)
    answers: dict[str, Any] = {name: found[name] for name in asked if name != "peak"}
    answers["lse"] = found["lse"] if wants.lse else None
    answers["peak"] = Peak(found["peak"], found["key"]) if wants.peak else None
    rows = RowSums(found["maxima"], found["sums"])
    answers |= Pooling(inputs, rows).answer(wants, rule)
    others = replace(wants, received=False, map=None)
    if wants.top is not None and wants.top <= MOST_TOP:
        answers["top"] = Top(*row_stats_kernels.run_largest(inputs, rows, wants.top))
        others = replace(others, top=None)
    if others.second_pass():
        answers |= Weights(q, k, rule, found["maxima"] / BITS, found["sums"]).answer(others)
    return Observation(output, **answers)


def sum_singles(
    q: Tensor, k: Tensor, rule: Rule, bounds: Bounds, lse_bht: Tensor, keys_nt: Tensor
) -> Tensor:
    """Sums over all queries of each one's weight on the key named for it, (N, B, H), float64.

    A key of -1 names none; keys_nt is int32. The rule must be one that `by_kernels` takes.
    """
    from regard.ops.kernels import row_stats_kernels

    inputs = Inputs.of(q, k, rule, bounds)
    parts = row_stats_kernels.run_singles(inputs, lse_bht.contiguous(), keys_nt.contiguous())
    return parts.sum(-1, dtype=torch.float64).view(len(keys_nt), *q.shape[:2])
