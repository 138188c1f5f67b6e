"""The backward of `flash.py`: which kernels are launched for which gradients, and how.

Why several kernels: the gradients of keys are gathered by programs that own keys, those of queries
by programs that own queries, those of a bias by programs that own its numbers. So every number has
one writer, nothing is added up by atomics, and the same call gives the same bits.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.kernels.arguments import Rule, options_of, rule_of, view, width_of
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.tile_lists import list_tiles
from regard.ops.kernels.tiles import tiles_of

PADDED = 128
"""Rows' numbers are kept for a multiple of this many rows, so that tiles of rows need no mask."""
PROGRAMS = 1024
"""Programs that keep a GPU busy: a band's samples are parted until there are so many."""


class Saved(NamedTuple):
    """What the forward tells of rows: (B, H, T, E), then (B, H, T); entropy if it was asked for."""

    output: Tensor
    lse: Tensor
    entropy: Tensor | None


class Arriving(NamedTuple):
    """The gradients that arrive, of the same shapes; None where none does."""

    output: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


class Grads(NamedTuple):
    """Gradients by what they belong to; as flags, which of them are wanted."""

    q: Any = None
    k: Any = None
    v: Any = None
    sinks: Any = None
    slopes: Any = None
    band: Any = None
    dense: Any = None


class RowGrads(NamedTuple):
    """What kernels need of each row, (B, H, n): logsumexp in bits, and the gradients' shares.

    Every score of a row has delta in its gradient, over its weight, and heat times log p.
    """

    lse: Tensor
    delta: Tensor
    heat: Tensor | None
    n: int


class Incoming(NamedTuple):
    """What rows' numbers are made of, beside outputs; (B, H, T) each, and sinks."""

    lse: Tensor
    sinks: Tensor | None
    lse_grad: Tensor | None
    entropy: Tensor | None
    entropy_grad: Tensor | None


class _Pass(NamedTuple):
    """A call, the gradient of its output if one arrives, and the numbers of its rows."""

    given: Rendered
    g: Tensor | None
    rows: RowGrads

    def inputs(self) -> tuple[Any, ...]:
        """q, k, v and the gradient as kernels take them."""
        given, g = self.given, self.g
        return view(given.q), view(given.k), view(given.v), None if g is None else view(g)

    def sizes(self) -> tuple[int, int, int, int, int]:
        """H, T, S, D, E."""
        (_, H, T, D), (_, _, S, E) = self.given.q.shape, self.given.v.shape
        return H, T, S, D, E

    def options(self) -> dict[str, Any]:
        """What every kernel is compiled for."""
        given = self.given
        more = {"VALUES": width_of(given.v.shape[3]), "COVERED": given.covered}
        return options_of(given) | more

    def kept_share(self) -> float:
        """What kept weights are multiplied by."""
        return 1.0 / (1.0 - self.given.dropout)


def backward(given: Rendered, saved: Saved, arriving: Arriving, wanted: Grads) -> Grads:
    """The gradients wanted: shaped, typed and laid out as what they belong to."""
    g = arriving.output
    if g is not None and g.stride(3) != 1:
        g = g.contiguous()
    step = _Pass(given, g, _find_rows(given, saved, arriving, g))
    found: dict[str, Tensor] = {}
    if wanted.k or wanted.v:
        found["k"], found["v"] = torch.empty_like(given.k), torch.empty_like(given.v)
        _run_keys(step, found["k"], found["v"])
    if wanted.q or wanted.slopes:
        found["q"] = torch.empty_like(given.q)
        slopes = _run_queries(step, found["q"], wanted.slopes)
        if slopes is not None:
            found["slopes"] = slopes
    if wanted.band:
        found["band"] = _run_band(step)
    if wanted.dense:
        found["dense"] = _run_dense(step)
    if wanted.sinks:
        found["sinks"] = _sink_grad(given, step.rows, arriving.entropy)
    return Grads(**found)


def _find_rows(given: Rendered, saved: Saved, arriving: Arriving, g: Tensor | None) -> RowGrads:
    from regard.ops.kernels import flash_backward_kernels as kernels

    B, H, T, E = saved.output.shape
    n = -(-T // PADDED) * PADDED
    heat = None if arriving.entropy is None else saved.lse.new_empty((B, H, n))
    rows = RowGrads(saved.lse.new_empty((B, H, n)), saved.lse.new_empty((B, H, n)), heat, n)
    incoming = Incoming(
        saved.lse.contiguous(),
        given.sinks,
        _packed(arriving.lse),
        _packed(saved.entropy),
        _packed(arriving.entropy),
    )
    launch: Any = kernels._delta[(B * H * (n // PADDED),)]
    launch(
        view(saved.output), None if g is None else view(g), incoming, rows, H, T, E,
        ROWS=PADDED, VALUES=width_of(E), num_warps=4,
    )  # fmt: skip
    return rows


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _run_keys(step: _Pass, dk: Tensor, dv: Tensor) -> None:
    from regard.ops.kernels import flash_backward_kernels as kernels

    given, rule = step.given, rule_of(step.given)
    is_listed = any(part is not None for part in (rule.interval, rule.ids, rule.words))
    tiles, lists = tiles_of(f"keys {_kind_of(rule, is_listed)}".strip(), given), None
    if is_listed:
        lists = list_tiles(rule, given.shape, tiles[:2], True, given.q.device)
    B, G, S, _ = given.k.shape
    launch: Any = kernels._keys[(B * G * -(-S // tiles.keys),)]
    launch(
        *step.inputs(), view(dk), view(dv), rule, lists, step.rows, step.kept_share(),
        *step.sizes(), **step.options(), ROWS=tiles.rows, KEYS=tiles.keys, **tiles.options(),
    )  # fmt: skip


def _run_queries(step: _Pass, dq: Tensor, with_slopes: bool) -> Tensor | None:
    """Write the gradient of the queries; that of the slopes, if wanted, comes back."""
    from regard.ops.kernels import flash_backward_kernels as kernels

    given, rule = step.given, rule_of(step.given)
    is_listed = rule.ids is not None or rule.words is not None
    tiles, lists = tiles_of(f"queries {_kind_of(rule, is_listed)}".strip(), given), None
    if is_listed:
        lists = list_tiles(rule, given.shape, tiles[:2], False, given.q.device)
    B, H, T, _ = given.q.shape
    n_bands = -(-T // tiles.rows)
    slopes = step.rows.lse.new_empty((B, H, n_bands)) if with_slopes else None
    launch: Any = kernels._queries[(B * H * n_bands,)]
    launch(
        *step.inputs(), view(dq), slopes, rule, lists, step.rows, step.kept_share(),
        *step.sizes(), **step.options(), ROWS=tiles.rows, KEYS=tiles.keys, **tiles.options(),
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
    launch: Any = kernels._band[(runs * parts,)]
    options = step.options()
    del options["EVEN"]
    launch(
        *step.inputs(), sums, N, rule_of(given), step.rows, step.kept_share(), samples, B,
        *step.sizes(), **options, ROWS=tiles.rows, **tiles.options(),
    )  # fmt: skip
    return sums.sum(0)


def _run_dense(step: _Pass) -> Tensor:
    from regard.ops.kernels import flash_backward_kernels as kernels

    given, tiles = step.given, tiles_of("bias", step.given)
    assert given.dense is not None
    grad = torch.empty_like(given.dense)
    B, H, T, S = given.dense.shape
    ones = {f"ONE_{letter}": size == 1 for letter, size in zip("BHTS", (B, H, T, S), strict=True)}
    launch: Any = kernels._dense[(B * H * -(-T // tiles.rows) * -(-S // tiles.keys),)]
    options = step.options()
    del options["EVEN"]
    launch(
        *step.inputs(), view(grad), rule_of(given), step.rows, step.kept_share(), given.q.shape[0],
        *step.sizes(), **ones, **options, ROWS=tiles.rows, KEYS=tiles.keys, **tiles.options(),
    )  # fmt: skip
    return grad


def _sink_grad(given: Rendered, rows: RowGrads, entropy_grad: Tensor | None) -> Tensor:
    """The gradient of the sinks: scores that count in no value and in no entropy."""
    assert given.sinks is not None
    T = given.q.shape[2]
    weight = torch.exp2(given.sinks.float()[:, None] / math.log(2.0) - rows.lse[..., :T])
    slope = rows.delta[..., :T]
    if entropy_grad is not None:
        slope = slope + entropy_grad
    return (weight * slope).sum((0, 2)).to(given.sinks.dtype)


def _kind_of(rule: Rule, is_listed: bool) -> str:
    """What tells most of how long a row of tiles is, for the table of tiles."""
    if is_listed:
        return "listed"
    if any(part is not None for part in (rule.cap, rule.slopes, rule.band, rule.dense)):
        return "biased"
    seen = (rule.window, rule.span, rule.interval)
    return "windowed" if any(part is not None for part in seen) else ""
