"""Apply edits to a call and its output: looks are forbidden, heads switched off or replaced.

Looks are forbidden by a mask that is combined with the call's own (`ops/blocked.py`); only the rows
that it affects are recomputed. The outputs of heads are changed afterwards.

Letters: B batch, H heads, T queries, S keys, E value width; N rows of positions, B or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from regard.lens.edit.positions import Standing
from regard.lens.edit.values import HeadOutputs, Patch
from regard.lens.lazy_weights import Array
from regard.ops.blocked import Blocked
from regard.ops.call import Call
from regard.ops.edit_hook import run_rows


def pick(numbers: Sequence[int] | None, n: int) -> Tensor:
    """Indices of rows or heads; all of them if `numbers` is None."""
    return torch.arange(n) if numbers is None else torch.tensor(numbers, dtype=torch.int64)


def make_blocked(
    looking_nt: Array,
    hidden_ns: Array,
    rows: Sequence[int] | None,
    heads: Sequence[int] | None,
    call: Call,
) -> Blocked:
    """A mask that forbids the looks from some queries at some keys, in some rows and heads."""
    B, H, _, _ = call.rule.shape
    queries = torch.from_numpy(looking_nt)[:, None]
    if rows is not None or heads is not None:
        chosen = torch.zeros(B if rows is not None else 1, H if heads is not None else 1, 1)
        chosen[pick(rows, chosen.shape[0])[:, None], pick(heads, chosen.shape[1])[None]] = 1.0
        queries = queries & chosen.bool()
    device = call.q.device
    return Blocked(queries.to(device), torch.from_numpy(hidden_ns)[:, None].to(device))


def block_call(call: Call, masks: Sequence[Blocked]) -> Call:
    """The call with the masks of forbidden looks added."""
    mask = call.rule.mask
    for blocked in masks:
        mask = blocked if mask is None else mask & blocked
    return replace(call, rule=replace(call.rule, mask=mask))


def redo_rows(call: Call, masks: Sequence[Blocked], output_bhte: Tensor) -> Tensor:
    """Recompute the rows that have a forbidden look with the edited `call`, in place."""
    touched_bht = masks[0].queries
    for blocked in masks[1:]:
        touched_bht = touched_bht | blocked.queries
    rows = touched_bht.flatten(0, 1).any(0).nonzero()[:, 0].tolist()
    for part, redone in run_rows(call, rows):
        here = touched_bht[:, :, part, None]
        output_bhte[:, :, part] = torch.where(here, redone, output_bhte[:, :, part])
    return output_bhte


def average(output_bhte: Tensor, real_bt: Tensor) -> Tensor:
    """The mean over real tokens, repeated at every token."""
    weights = real_bt[:, None, :, None].to(output_bhte.dtype)
    mean = (output_bhte * weights).sum(2, keepdim=True) / weights.sum(2, keepdim=True)
    return mean.expand_as(output_bhte)


def find_real(call: Call, standing: Standing, cross: bool) -> Tensor:
    """Which queries are real tokens, (B, T): in self-attention, those that may see themselves."""
    B, _, T, S = shape = call.rule.shape
    device = call.q.device
    real = torch.from_numpy(standing.queries >= 0).to(device).expand(B, T)
    if cross or T > S:
        return real
    b, own = torch.arange(B, device=device)[:, None], torch.arange(T, device=device)[None]
    index = b, torch.zeros_like(own[:, :1]), own + shape.offset, own
    if call.rule.mask is not None:
        real = real & call.rule.mask.allows(*index, shape)
    if call.rule.bias is not None:
        real = real & (call.rule.bias.add(*index, shape, torch.float32) > -torch.inf)
    return real | ~real.any(1, keepdim=True)


def find_source(
    patch: Patch, name: str, standing: Standing, call: Call, chosen_nt: Array | None
) -> tuple[Tensor, Tensor]:
    """Which queries are replaced (all if none are chosen), and by what, (B or 1, H, queries, E)."""
    if name not in patch.source:
        raise ValueError(f"the source has no outputs of {name}; it has {', '.join(patch.source)}")
    source = patch.source[name]
    B, H, _, _ = call.rule.shape
    width = call.v.shape[3]
    if source.shape[0] not in (1, B) or source.shape[1] != H or source.shape[3] != width:
        raise ValueError(
            f"the source has outputs {tuple(source.shape)} of {name}, and this run has B={B}, "
            f"H={H}, E={width}: it is of another model or another batch"
        )
    if len(standing.queries) > 1:
        raise ValueError("outputs are not replaced in a batch with padding; run its rows alone")
    positions = standing.queries[0]
    n = source.shape[2]
    if chosen_nt is None:
        if int(standing.query_lengths.max()) > n or (standing.begins and len(positions) != n):
            length = int(standing.query_lengths.max())
            raise ValueError(
                f"the source has {n} tokens and this text {length}: positions do not match; name "
                "those to replace, Patch(..., positions=...)"
            )
        chosen = np.ones_like(positions, bool)
    else:
        chosen = chosen_nt[0]
        if chosen.any() and positions[chosen].max() >= n:
            raise ValueError(
                f"position {positions[chosen].max()} is not in the source of {n} tokens"
            )
    rows = torch.from_numpy(np.flatnonzero(chosen))
    return rows, source[:, :, torch.from_numpy(positions[chosen])]


def keep_outputs(outputs: HeadOutputs, name: str, standing: Standing, output: Tensor) -> None:
    """Store the outputs of heads, appended to those of earlier calls of the same text."""
    kept, new = outputs._outputs, output.detach().clone()
    kept[name] = new if standing.begins or name not in kept else torch.cat([kept[name], new], 2)
