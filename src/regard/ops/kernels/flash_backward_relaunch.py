"""Relaunching the kernels of `flash_backward.py`, for calls of the same form as an earlier one.

What is kept is what the first call of a form launched, and all that this was given but addresses.
It writes the gradients of q, k and v, by the kernel for Hopper GPUs or by two. Which calls it may
run is decided in `flash_relaunch.py`.

Left out: tiles that are listed for two kernels; gradients of anything else.

Letters: B batch, T queries, S keys, H query heads, D head width, E value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.kernels import flash_backward
from regard.ops.kernels.arguments import rule_of
from regard.ops.kernels.flash_backward import PADDED, Arriving, Saved
from regard.ops.kernels.launch import PLANS, Launch, Plans
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.tile_lists import ListForm, form_lists
from regard.ops.shape import Shape

FLOAT, INT = torch.float32.itemsize, torch.int32.itemsize
FUSED, BOTH = ("delta and sums", "fused", "finish"), ("delta", "keys", "queries")
"""The kernels that write the gradients of q, k and v, by their names in a plan."""


class Given(NamedTuple):
    """The tensors of a backward pass, and the addresses of the rule and the sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    output: Tensor
    lse: Tensor
    rule: tuple[Any, ...]
    sinks: int | None


class Relaunch(NamedTuple):
    """How the backward of calls of one form runs."""

    launches: tuple[Launch, ...]
    run: Callable[[list[Any], Given], tuple[Tensor, Tensor, Tensor]]

    def __call__(self, given: Given) -> tuple[Tensor, Tensor, Tensor] | None:
        """The gradients of q, k and v; None if they have to be launched on another device."""
        device = self.launches[0].current_device()
        runs = [launch.variant(device) for launch in self.launches]
        return None if None in runs else self.run(runs, given)


def relaunch_of(given: Rendered, saved: Saved, arriving: Arriving) -> Relaunch | None:
    """How calls like this one run, which has run; None where they cannot be launched again."""
    plan: Plans | None = PLANS.get(flash_backward.name_of(given, saved, arriving))
    g = arriving.output
    if plan is None or g is None or not plan.get("aligned"):
        return None
    listed = [plan[name] for name in plan if type(name) is tuple and name[0] == "list"]
    if listed and "fused" not in plan:
        return None
    for names, arrange in ((FUSED, arrange_fused), (BOTH, arrange_both)):
        if all(name in plan for name in names):
            launches = (*(plan[name] for name in names), *listed)
            return Relaunch(launches, arrange(given, g, saved.output, plan))
    return None


class _Rows(NamedTuple):
    """Where rows of statistics lie in scratch memory, and what computes them."""

    strides: tuple[tuple[int, ...], tuple[int, ...]]
    sizes: tuple[int, int, int]
    total: int
    n: int

    def run(self, delta: Any, at: int, sums: int | None, given: Given) -> tuple[Any, ...]:
        """Fill the rows that begin at an address, and the sums with zeros; returns `RowGrads`."""
        rows = (at, at + FLOAT * self.total, None, self.n)
        incoming = (given.lse.data_ptr(), given.sinks, None, None, None)
        out, g = self.strides
        delta(
            (given.output.data_ptr(), *out),
            (given.g.data_ptr(), *g),
            incoming, rows, sums, *self.sizes,
        )  # fmt: skip
        return rows


def _rows_of(given: Rendered, g: Tensor, output: Tensor) -> _Rows:
    B, H, T, E = output.shape
    n = -(-T // PADDED) * PADDED
    return _Rows((output.stride(), g.stride()), (H, T, E), B * H * n, n)


class _Lists(NamedTuple):
    """Where lists of tiles lie in scratch memory, and what computes them."""

    form: ListForm
    sizes: tuple[int, int]
    total: int

    def run(self, listing: Any, at: int, rule: tuple[Any, ...]) -> tuple[Any, ...]:
        """Fill the lists that begin at an address; returns `TileLists`."""
        _, heads, _, n, b, h = self.form
        counts = at + INT * self.total
        lists = at, counts, counts + INT * (self.total // n), n, b, h
        listing(rule, lists, heads, *self.sizes)
        return lists


def arrange_fused(given: Rendered, g: Tensor, output: Tensor, plan: Plans) -> Any:
    """The gradients by the kernel for Hopper."""
    from regard.ops.kernels.flash_hopper_kernels import describe_alike

    (B, H, T, D), S, rule = given.q.shape, given.k.shape[2], rule_of(given)
    tiles, factor, rows = plan["hopper", "tiles"], rule.factor, _rows_of(given, g, output)
    sides = (tiles.rows, tiles.keys, tiles.keys, tiles.rows)
    tensors = (*given[:3], g)
    of_q, of_k, of_v, of_g = (describe_alike(x, n) for x, n in zip(tensors, sides, strict=True))
    dq_strides, dk_strides, dv_strides = (torch.empty_like(x).stride() for x in given[:3])
    n_scratch, behind = rows.total * (2 + D), 2 * FLOAT * rows.total
    form = form_lists(rule, Shape(B, H, T, S), tiles[:2], True)
    listed = _Lists(form, (T, S), math.prod(form[:4]))
    n_listed = listed.total + 2 * (listed.total // form.n)

    def run(runs: list[Any], given: Given) -> tuple[Tensor, Tensor, Tensor]:
        (delta, fused, finish, *listing), (q, k, v, g) = runs, given[:4]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scratch = q.new_empty(n_scratch, dtype=torch.float32)
        at = scratch.data_ptr()
        sums = at + behind
        found, lists = rows.run(delta, at, sums, given), None
        if listing:
            space = q.new_empty(n_listed, dtype=torch.int32)
            lists = listed.run(listing[0], space.data_ptr(), given.rule)
        fused(
            of_q(q), of_k(k), of_v(v), of_g(g), (dk.data_ptr(), *dk_strides),
            (dv.data_ptr(), *dv_strides), sums, given.rule, lists, found, H, T, S,
        )  # fmt: skip
        finish(sums, (dq.data_ptr(), *dq_strides), factor, rows.n, H, T, D)
        return dq, dk, dv

    return run


def arrange_both(given: Rendered, g: Tensor, output: Tensor, plan: Plans) -> Any:
    """The gradients by two kernels."""
    (_, H, T, D), S, E = given.q.shape, given.k.shape[2], given.v.shape[3]
    rows, tensors = _rows_of(given, g, output), (*given[:3], g)
    strides = [x.stride() for x in tensors]
    dq_strides, dk_strides, dv_strides = (torch.empty_like(x).stride() for x in given[:3])
    more = 1.0, H, T, S, D, E

    def run(runs: list[Any], given: Given) -> tuple[Tensor, Tensor, Tensor]:
        (delta, keys, queries), (q, k, v) = runs, given[:3]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scratch = q.new_empty(2 * rows.total, dtype=torch.float32)
        found = rows.run(delta, scratch.data_ptr(), None, given)
        views = [(x.data_ptr(), *at) for x, at in zip(given[:4], strides, strict=True)]
        keys(
            *views, (dk.data_ptr(), *dk_strides), (dv.data_ptr(), *dv_strides),
            given.rule, None, found, *more,
        )  # fmt: skip
        queries(*views, (dq.data_ptr(), *dq_strides), None, given.rule, None, found, *more)
        return dq, dk, dv

    return run
