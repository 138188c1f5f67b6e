"""Attention by our own kernels, for every mask and bias, with row statistics from the same pass.

Why: torch's fused kernels accept a mask or a bias only as a whole matrix, and return nothing about
the weights. Ours read the rule in a compact form (`rendered.py`), skip the tiles that it empties,
and compute row statistics while the weights are at hand.

Letters: B batch, T queries, S keys, H query heads, E value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.blockwise import Ask
from regard.ops.kernels import flash_hopper
from regard.ops.kernels.arguments import form_of
from regard.ops.kernels.launch import PLANS, layout_of
from regard.ops.kernels.rendered import Rendered, aligned_rows, is_aligned

ROW_SUMS = ("maxima", "sums")
"""The statistics of rows from which a second pass recomputes their weights."""
BANDED = 128
"""The number of rows of each program divides this."""


class Plan(NamedTuple):
    """How calls of one form run: names of row statistics, if they share memory, and the kernel."""

    names: tuple[str, ...]
    together: bool
    forward: Any
    """A `flash_kernels.Forward`."""
    kernels: Any
    """The module that defines `Answers`, which kernels write to."""


def forward(
    given: Rendered,
    ask: Ask,
    mass: Tensor | None,
    with_sums: bool = True,
    with_crests: bool = False,
    like_queries: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output (B, H, T, E), and by name the row statistics asked for, (B, H, T) each.

    like_queries: the output has the order of the queries in memory, not that of its axes.
    with_sums: also `ROW_SUMS`, and all in one allocation where that is possible. with_crests: also
    the maxima of parts of rows (`Crests`).
    """
    keys = None if mass is None else mass.contiguous()
    plan = find_plan(given, ask, keys, with_sums, with_crests, like_queries)
    if plan is None:
        out, found = forward(aligned_rows(given), ask, keys, with_sums, with_crests)
        return out[..., : given.v.shape[3]].contiguous(), found
    q, kernels = given.q, plan.kernels
    B, H, T, _ = q.shape
    sizes = (B, H, T, given.v.shape[3])
    out = q.new_empty_strided(sizes, strides_of(q, sizes)) if like_queries else q.new_empty(sizes)
    if plan.together:
        rows = q.new_empty(len(plan.names), B, H, T, dtype=torch.float32).unbind()
        found = dict(zip(plan.names, rows, strict=True))
    else:
        found = {name: q.new_empty(B, H, T, dtype=torch.float32) for name in plan.names}
    if ask.peak:
        found["key"] = q.new_empty(B, H, T, dtype=torch.int64)
    answers = kernels.Answers(**found)
    if with_crests:
        size = (B, H, kernels.SLOTS.value, -(-T // BANDED) * BANDED)
        found["crests"] = q.new_full(size, -torch.inf, dtype=torch.float32)
        answers = answers._replace(crests=kernels.Crests(found["crests"], 0, 0, 0, 0))
    plan.forward.run(given, out, answers, keys)
    return out, found


def strides_of(q: Tensor, sizes: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The strides of an output of these sizes, packed in the order of the queries in memory.

    Models take heads from a projection (B, T, C), and put them into the next one: there nothing has
    to be copied.
    """
    _, H, T, E = sizes
    if q.stride(1) < q.stride(2):
        return T * H * E, E, H * E, 1
    return H * T * E, T * E, E, 1


def find_plan(
    given: Rendered,
    ask: Ask,
    mass: Tensor | None,
    with_sums: bool,
    with_crests: bool,
    like_queries: bool,
) -> Plan | None:
    """The plan for calls of this form; None where inputs have to be copied first."""
    lying = None if mass is None else layout_of(mass)
    how = ask, lying, with_sums, flash_hopper.runs_on(given.q.device), with_crests, like_queries
    form = *form_of(given), *how
    return PLANS.find(form, lambda: make_plan(given, ask, mass, with_sums))


def make_plan(given: Rendered, ask: Ask, mass: Tensor | None, with_sums: bool) -> Plan | None:
    """The plan for all calls of this form; None where inputs have to be copied first."""
    from regard.ops.kernels import flash_kernels

    if not all(map(is_aligned, given[:3])):
        return None
    names = ["lse", *(name for name in ask._fields if getattr(ask, name))]
    names += ROW_SUMS if with_sums else ()
    names += ["mass"] if mass is not None else []
    names += ["logit"] if ask.peak else []
    # Outputs of a custom op must not share memory; and each must begin at an aligned address.
    together = with_sums and given.q.shape[:3].numel() % 4 == 0
    asked = any(ask) or mass is not None
    plan_forward = flash_kernels.plan_forward
    if flash_hopper.takes(given, ask, mass):
        from regard.ops.kernels import flash_hopper_kernels

        plan_forward = flash_hopper_kernels.plan_forward
    return Plan(tuple(names), together, plan_forward(given, asked), flash_kernels)
