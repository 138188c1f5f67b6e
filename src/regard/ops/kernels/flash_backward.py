"""The backward of `flash.py`: which kernels are launched for which gradients, and how.

Why several kernels: the gradients of keys are summed by programs that own keys, those of queries
by programs that own queries, those of a bias by programs that own its numbers. So every number has
one writer, and the same call gives the same bits. Two kernels for q, k and v compute every tile
twice, in seven matrix products. The one for Hopper GPUs computes it once, in five: programs that
own keys add their part of the queries' gradients to sums in float32, in any order.

That one runs the plainest calls only (`_suits_hopper`). The two kernels run the rest: calls that
need the gradient of slopes, which the queries' kernel computes, or not both that of q and of k or
v; float32; other GPUs; and all calls while `torch.use_deterministic_algorithms(True)` holds.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.kernels import flash_hopper
from regard.ops.kernels.arguments import (
    Rule,
    TileLists,
    form_of,
    options_of,
    rule_of,
    view,
    width_of,
)
from regard.ops.kernels.launch import PLANS, Plans, layout_of
from regard.ops.kernels.rendered import Rendered, aligned, aligned_rows, is_aligned
from regard.ops.kernels.tile_lists import list_tiles
from regard.ops.kernels.tiles import Tiles, tiles_of

PADDED = 128
"""`RowGrads` is padded to a multiple of this many rows, so that tiles of rows need no mask."""
FINISHED = 32
"""Rows of a program that writes the gradient of the queries from the sums of Hopper's kernel."""
PROGRAMS = 1024
"""Programs that keep a GPU busy: a band's samples are split until there are so many."""
HOPPER = {"": (64, 128), "windowed": (64, 128), "biased": (128,), "listed": (64, 128)}
"""By kind of call (`_kind_of`): widths at which the kernel that is written for Hopper is faster."""


class Saved(NamedTuple):
    """What the forward saves: (B, H, T, E), then (B, H, T); entropy only if it was asked for."""

    output: Tensor
    lse: Tensor
    entropy: Tensor | None


class Arriving(NamedTuple):
    """The incoming gradients of what is `Saved`, of the same shapes; None where there is none."""

    output: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


class Grads(NamedTuple):
    """Gradients by input; or flags that say which of them are wanted."""

    q: Any = None
    k: Any = None
    v: Any = None
    sinks: Any = None
    slopes: Any = None
    band: Any = None
    dense: Any = None


class RowGrads(NamedTuple):
    """What kernels need of each row, (B, H, n): logsumexp in bits, and two terms of the gradient.

    The gradient of a score, divided by its weight, contains delta and, if there is heat, −heat · x,
    where x is log p in bits.
    """

    lse: Tensor
    delta: Tensor
    heat: Tensor | None
    n: int


class Incoming(NamedTuple):
    """What `RowGrads` is computed from, beside outputs: (B, H, T) each, and the sinks."""

    lse: Tensor
    sinks: Tensor | None
    lse_grad: Tensor | None
    entropy: Tensor | None
    entropy_grad: Tensor | None


class _Pass(NamedTuple):
    """A call, its rule, the gradient of its output if there is one, and its `RowGrads`.

    plan: shared by all calls of this form.
    """

    given: Rendered
    rule: Rule
    g: Tensor | None
    rows: RowGrads
    plan: Plans

    def inputs(self) -> tuple[Any, ...]:
        """q, k, v and the gradient as kernels read them."""
        given, g = self.given, self.g
        return view(given.q), view(given.k), view(given.v), None if g is None else view(g)

    def sizes(self) -> tuple[int, int, int, int, int]:
        """H, T, S, D, E."""
        (_, H, T, D), (_, _, S, E) = self.given.q.shape, self.given.v.shape
        return H, T, S, D, E

    def options(self, tiles: Tiles, *without: str) -> dict[str, Any]:
        """The compile-time options of a kernel, except those named in `without`."""
        given = self.given
        more = {"VALUES": width_of(given.v.shape[3]), "COVERED": given.covered}
        shape = {"ROWS": tiles.rows, "KEYS": tiles.keys}
        every = options_of(given) | more | shape | tiles.options()
        return {name: x for name, x in every.items() if name not in without}

    def tiles(self, kernel: str, is_listed: bool) -> Tiles:
        """The tiles of a kernel for this kind of call."""

        def find() -> Tiles:
            return tiles_of(f"{kernel} {_kind_of(self.rule, is_listed)}".strip(), self.given)

        return self.plan.find((kernel, "tiles"), find)

    def kept_share(self) -> float:
        """The factor of the weights that dropout keeps."""
        return 1.0 / (1.0 - self.given.dropout)


def backward(given: Rendered, saved: Saved, arriving: Arriving, wanted: Grads) -> Grads:
    """The gradients wanted, each with the shape, dtype and layout of its input."""
    plan = PLANS.find(name_of(given, saved, arriving), Plans)
    g, rows, asked = arriving.output, _allot_rows(saved, arriving), given
    held = given[:3] if g is None else (*given[:3], g)
    if not plan.find("aligned", lambda: all(map(is_aligned, held))):
        given, g = aligned_rows(given), None if g is None else aligned(g)
    step = _Pass(given, rule_of(given), g, rows, plan)
    sums = _allot_sums(step) if _is_fused(step, wanted) else None
    _find_rows(step, saved, arriving, sums)
    found: dict[str, Tensor] = {}
    if wanted.q or wanted.slopes:
        found["q"] = torch.empty_like(given.q)
    if wanted.k or wanted.v:
        found["k"], found["v"] = torch.empty_like(given.k), torch.empty_like(given.v)
    if sums is not None:
        _run_fused(step, found["q"], found["k"], found["v"], sums)
    else:
        found |= _run_both(step, found, wanted)
    if wanted.band:
        found["band"] = _run_band(step)
    if wanted.dense:
        found["dense"] = _run_dense(step)
    if wanted.sinks:
        found["sinks"] = _sink_grad(given, step.rows, arriving.entropy)
    for name, owner, copy in zip("qkv", asked[:3], given[:3], strict=True):
        if name in found and copy is not owner:
            found[name] = torch.empty_like(owner).copy_(found[name][..., : owner.shape[3]])
    return Grads(**found)


def name_of(given: Rendered, saved: Saved, arriving: Arriving) -> tuple[Any, ...]:
    """The name of the plan for calls of this form."""
    lying = [None if x is None else layout_of(x) for x in (*saved, *arriving)]
    return "backward", *form_of(given), *lying


def _allot_rows(saved: Saved, arriving: Arriving) -> RowGrads:
    """Memory for the rows of a call."""
    B, H, T, _ = saved.output.shape
    n = -(-T // PADDED) * PADDED
    parts = 2 if arriving.entropy is None else 3
    lse, delta, *heat = saved.lse.new_empty(parts, B, H, n).unbind()
    return RowGrads(lse, delta, heat[0] if heat else None, n)


def _allot_sums(step: _Pass) -> Tensor:
    """Memory for the gradient of the queries, which is added up in float32."""
    B, H, _, D = step.given.q.shape
    return step.rows.lse.new_empty(B, H, step.rows.n, D)


def _find_rows(step: _Pass, saved: Saved, arriving: Arriving, sums: Tensor | None) -> None:
    """Fill the rows, and the sums with zeros."""
    from regard.ops.kernels import flash_backward_kernels as kernels

    (B, H, T, E), g, rows = saved.output.shape, arriving.output, step.rows
    incoming = Incoming(
        saved.lse.contiguous(),
        step.given.sinks,
        _packed(arriving.lse),
        _packed(saved.entropy),
        _packed(arriving.entropy),
    )
    options = {"ROWS": PADDED, "VALUES": width_of(E), "num_warps": 4, "enable_fp_fusion": True}
    name = "delta" if sums is None else "delta and sums"
    step.plan.run(
        name, kernels._delta, lambda: (B * H * (rows.n // PADDED), options),
        view(saved.output), None if g is None else view(g), incoming, rows, sums, H, T, E,
    )  # fmt: skip


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _is_fused(step: _Pass, wanted: Grads) -> bool:
    """Whether a single kernel computes the gradients of q, k and v."""
    if not wanted.q or not (wanted.k or wanted.v) or wanted.slopes:
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    on_hopper = flash_hopper.runs_on(step.given.q.device)
    return on_hopper and step.plan.find("on Hopper", lambda: _suits_hopper(step))


def _suits_hopper(step: _Pass) -> bool:
    """Whether the kernel for Hopper can run a call, and is the fastest for it."""
    given, rule, g, rows = step[:4]
    (_, _, T, D), v, is_listed = given.q.shape, given.v, _is_listed(rule)
    if g is None or T < flash_hopper.FEWEST or v.shape[3] != D or v.dtype.itemsize != 2:
        return False
    if is_listed and not given.covered:
        return False
    other = (rule.cap, rule.words, rule.places, rule.band, rule.dense, rule.dropout, rows.heat)
    if any(part is not None for part in other):
        return False
    if rule.slopes is not None and (rule.window is None or rule.window.right > 0):
        return False
    readable = all(map(flash_hopper.is_read_by_tma, (given.q, given.k, v, g)))
    return readable and D in flash_hopper.WIDTHS and D in HOPPER.get(_kind_of(rule, is_listed), ())


def _is_listed(rule: Rule) -> bool:
    """Whether programs that own keys need lists of the tiles of rows that see these."""
    return any(part is not None for part in (rule.interval, rule.ids, rule.words))


def _run_both(step: _Pass, found: dict[str, Tensor], wanted: Grads) -> dict[str, Tensor]:
    """Write the gradients of q, k and v that `found` has; returns that of the slopes, if wanted."""
    if "k" in found:
        _run_keys(step, found["k"], found["v"])
    slopes = _run_queries(step, found["q"], wanted.slopes) if "q" in found else None
    return {} if slopes is None else {"slopes": slopes}


def _run_fused(step: _Pass, dq: Tensor, dk: Tensor, dv: Tensor, sums: Tensor) -> None:
    """Write the gradients of queries, keys and values by the kernel for Hopper; sums: zeros."""
    from regard.ops.kernels import flash_backward_hopper_kernels as hopper
    from regard.ops.kernels import flash_backward_kernels as kernels

    given, rule, n, lists = step.given, step.rule, step.rows.n, None
    B, H, T, D = given.q.shape
    assert step.g is not None
    is_listed = _is_listed(rule)
    tiles = step.tiles("hopper", is_listed)
    if is_listed:
        lists = _list_tiles(step, tiles, True, in_order=True)
    hopper.run_fused(step, lists, (dk, dv, sums), tiles)
    options = {"ROWS": FINISHED, "WIDTH": D, "num_warps": 4, "enable_fp_fusion": True}
    step.plan.run(
        "finish", kernels._finish, lambda: (B * H * (n // FINISHED), options),
        sums, view(dq), rule.factor, n, H, T, D,
    )  # fmt: skip


def _list_tiles(step: _Pass, tiles: Tiles, by_keys: bool, in_order: bool = False) -> TileLists:
    given = step.given
    return list_tiles(
        step.rule, given.shape, tiles[:2], by_keys, given.q.device, in_order, step.plan
    )


def _run_keys(step: _Pass, dk: Tensor, dv: Tensor) -> None:
    """Write the gradients of keys and values."""
    from regard.ops.kernels import flash_backward_kernels as kernels

    given, rule = step.given, step.rule
    is_listed = _is_listed(rule)
    tiles, lists = step.tiles("keys", is_listed), None
    if is_listed:
        lists = _list_tiles(step, tiles, True)
    B, G, S, _ = given.k.shape
    step.plan.run(
        "keys", kernels._keys, lambda: (B * G * -(-S // tiles.keys), step.options(tiles)),
        *step.inputs(), view(dk), view(dv), rule, lists, step.rows, step.kept_share(),
        *step.sizes(),
    )  # fmt: skip


def _run_queries(step: _Pass, dq: Tensor, with_slopes: bool) -> Tensor | None:
    """Write the gradient of the queries; returns that of the slopes, if wanted."""
    from regard.ops.kernels import flash_backward_kernels as kernels

    given, rule = step.given, step.rule
    is_listed = rule.ids is not None or rule.words is not None
    tiles, lists = step.tiles("queries", is_listed), None
    if is_listed:
        lists = _list_tiles(step, tiles, False)
    B, H, T, _ = given.q.shape
    n_bands = -(-T // tiles.rows)
    slopes = step.rows.lse.new_empty((B, H, n_bands)) if with_slopes else None
    name = "queries" if slopes is None else "queries and slopes"
    step.plan.run(
        name, kernels._queries, lambda: (B * H * n_bands, step.options(tiles)),
        *step.inputs(), view(dq), slopes, rule, lists, step.rows, step.kept_share(),
        *step.sizes(),
    )  # fmt: skip
    return None if slopes is None else slopes.sum((0, 2))


def _run_band(step: _Pass) -> Tensor:
    from regard.ops.kernels import flash_backward_kernels as kernels

    given, tiles = step.given, tiles_of("bias", step.given)
    assert given.band is not None
    (H, N), B = given.band.shape, given.q.shape[0]
    runs = -(-N // tiles.rows) * H
    samples = -(-B // min(B, max(PROGRAMS // runs, 1)))
    parts = -(-B // samples)
    sums = given.band.new_empty((parts, H, N))
    step.plan.run(
        "band", kernels._band, lambda: (runs * parts, step.options(tiles, "EVEN", "KEYS")),
        *step.inputs(), sums, N, step.rule, step.rows, step.kept_share(), samples, B,
        *step.sizes(),
    )  # fmt: skip
    return sums.sum(0)


def _run_dense(step: _Pass) -> Tensor:
    from regard.ops.kernels import flash_backward_kernels as kernels

    given, tiles = step.given, tiles_of("bias", step.given)
    assert given.dense is not None
    grad = torch.empty_like(given.dense)
    B, H, T, S = given.dense.shape
    ones = {f"ONE_{letter}": size == 1 for letter, size in zip("BHTS", (B, H, T, S), strict=True)}
    n_programs = B * H * -(-T // tiles.rows) * -(-S // tiles.keys)
    step.plan.run(
        "dense", kernels._dense, lambda: (n_programs, step.options(tiles, "EVEN") | ones),
        *step.inputs(), view(grad), step.rule, step.rows, step.kept_share(), given.q.shape[0],
        *step.sizes(),
    )  # fmt: skip
    return grad


def _sink_grad(given: Rendered, rows: RowGrads, entropy_grad: Tensor | None) -> Tensor:
    """The gradient of the sinks: scores without a value, left out of entropies."""
    assert given.sinks is not None
    T = given.q.shape[2]
    weight = torch.exp2(given.sinks.float()[:, None] / math.log(2.0) - rows.lse[..., :T])
    slope = rows.delta[..., :T]
    if entropy_grad is not None:
        slope = slope + entropy_grad
    return (weight * slope).sum((0, 2)).to(given.sinks.dtype)


def _kind_of(rule: Rule, is_listed: bool) -> str:
    """The kind of rule, for the table of tiles: it mostly decides how long a row of tiles is."""
    if is_listed:
        return "listed"
    if any(part is not None for part in (rule.cap, rule.slopes, rule.band, rule.dense)):
        return "biased"
    seen = (rule.window, rule.span, rule.interval)
    return "windowed" if any(part is not None for part in seen) else ""
