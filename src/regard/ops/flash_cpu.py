"""Torch's CPU kernel, cut to the parts of the matrix that the mask leaves.

The matrix is cut into pieces: per sample where padding differs, and per band of queries, each with
just the keys that some query of the band may see. A piece whose every pair is visible needs no
mask; the others get theirs rendered, a rule that depends on i - j alone only once for all pieces.
So with padding, windows, packing and causal biases the work is that of the pairs they leave, not
T × S, and no T × S mask is ever built. The backward pass walks the same pieces. When a gradient is
itself to be differentiated, which torch's kernel cannot do, it is computed by the tiled path.

The kernel turns some NaNs and infinities into zeros, so it gets finite inputs only; others go to
the tiled path.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard._check import all_finite
from regard._torch import flash_backward, flash_forward, is_batched_gradient
from regard.ops.blockwise_op import run_blockwise
from regard.ops.call import Call, Rule, outside_autocast, score_dtype
from regard.ops.mask import edges, tile_bounds
from regard.ops.shape import Bools, Ints, SampleTile, Shape, Tile

BAND = 256
"""Queries in a piece: few enough to follow a mask's edge, enough to fill the kernel's blocks."""
MOST_RENDERED = 2**22
"""Numbers of a bias that are rendered at once; beyond, it is cut whatever that costs."""
PIECE_COST = 2**17
"""The cost of one more kernel call, counted in scores."""


class Piece(NamedTuple):
    """Samples b0..b1, queries t0..t1 and keys s0..s1: one call of the kernel."""

    b0: int
    b1: int
    tile: Tile
    full: bool


def attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, rule: Rule, causal: bool | None) -> Tensor:
    """Torch's CPU kernel, cut to what the mask leaves; the tiled path for inputs not finite."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        output: Tensor = _Pieces.apply(rule, causal, q, k, v)  # type: ignore[no-untyped-call]
        return output
    if not is_finite(q, k, v, rule):
        return run_blockwise(Call(q=q, k=k, v=v, rule=rule)).output
    return run_pieces(q, k, v, make_plan(rule, causal))[0]


def is_finite(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> bool:
    """Whether the CPU's kernel may run these; with nothing hidden, v need not be finite."""
    return all_finite(q, k, v) if rule.hides() else all_finite(q, k)


def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of torch's private CPU kernel, at any strides."""
    output, lse = flash_forward(
        in_rows(q), in_rows(k), in_rows(v), 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, lse


def in_rows(x: Tensor) -> Tensor:
    """x, copied unless each of its rows is contiguous and no two rows overlap.

    Torch's CPU kernel assumes this, and reads other memory where it does not hold; its GPU kernels
    fail with an internal error, or are slow.
    """
    if x.stride(3) == 1 and x.stride(2) >= x.shape[3]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class Plan:
    """The pieces of one call, and how their masks are rendered."""

    rule: Rule
    pieces: list[Piece]
    causal: bool = False
    """The kernel's own `is_causal` flag, with which a single call does everything."""
    band: Tensor | None = None

    def mask(self, piece: Piece, q: Tensor) -> Tensor | None:
        """The float mask of one piece; None when every pair in it counts unchanged."""
        rule, tile = self.rule, piece.tile
        if piece.full and rule.bias is None:
            return None
        if len(self.pieces) == 1 or not rule.is_relative():
            rendered = rule.block(SampleTile.of(tile, piece.b0, piece.b1), q)
            # A mask with a `block` of its own may return all samples.
            is_of_all = rendered.shape[0] > piece.b1 - piece.b0
            return rendered[piece.b0 : piece.b1] if is_of_all else rendered
        if self.band is None:
            self.band = self._band(q)
        # Row t and key s are in the band at row t - t0 and column s - t0 + left.
        first = tile.s0 - tile.t0 + self._left()
        return self.band[..., : tile.t1 - tile.t0, first : first + tile.s1 - tile.s0]

    def is_whole(self) -> bool:
        """Whether a single kernel call covers the whole matrix."""
        if len(self.pieces) != 1:
            return False
        (b0, b1, tile, _), (B, _, T, S) = self.pieces[0], self.rule.shape
        return b0 == 0 and b1 == B and tile == (0, T, 0, S)

    def _left(self) -> int:
        return max(p.tile.t0 - p.tile.s0 for p in self.pieces)

    def _band(self, q: Tensor) -> Tensor:
        """The rule, rendered once for all pieces: rows for the tallest, keys on both sides."""
        rule = self.rule
        height = max(p.tile.t1 - p.tile.t0 for p in self.pieces)
        right = max(p.tile.s1 - p.tile.t0 for p in self.pieces)
        i = torch.arange(height, device=q.device)[:, None] + rule.shape.offset
        return rule.band(i, torch.arange(-self._left(), right, device=q.device), q)


def make_plan(rule: Rule, causal: bool | None) -> Plan:
    """The cheapest of: one call with the kernel's flag, one masked call, one call per piece."""
    shape, whole = rule.shape, causal is not None or rule.mask is None
    one = [Piece(0, shape.B, Tile(0, shape.T, 0, shape.S), whole)]
    if causal is not None or not shape.S or not shape.T:
        return Plan(rule, one, bool(causal))
    if cost(one, shape) <= 2 * PIECE_COST:
        return Plan(rule, one)
    pieces = cut_pieces(rule)
    if rule.bias is not None and shape.T * shape.S > MOST_RENDERED:
        return Plan(rule, pieces)
    return min((Plan(rule, one), Plan(rule, pieces)), key=lambda plan: cost(plan.pieces, shape))


def cost(pieces: list[Piece], shape: Shape) -> int:
    """The cost in scores: those computed, and `PIECE_COST` for each kernel call."""
    work = 0
    for b0, b1, tile, _ in pieces:
        work += (b1 - b0) * shape.H * (tile.t1 - tile.t0) * (tile.s1 - tile.s0) + PIECE_COST
    return work


def cut_pieces(rule: Rule) -> list[Piece]:
    """Bands of queries with the keys they may see; full neighbours with equal keys are joined."""
    pieces: list[Piece] = []
    lo, hi, exact = key_runs(rule)
    n_rows = lo.shape[0]
    for b in range(n_rows):
        b0, b1 = (b, b + 1) if n_rows > 1 else (0, rule.shape.B)
        for t0 in range(0, rule.shape.T, BAND):
            t1 = min(t0 + BAND, rule.shape.T)
            low, high = lo[b, t0:t1], hi[b, t0:t1]
            some = high > low
            if not some.any():
                continue
            s0, s1 = int(low[some].min()), int(high[some].max())
            full = bool(exact and (low == s0).all() and (high == s1).all())
            last = pieces[-1] if pieces else None
            if (
                full
                and rule.bias is None
                and last
                and last.full
                and last.b0 == b0
                and last.tile[1:] == (t0, s0, s1)
            ):
                pieces[-1] = last._replace(tile=last.tile._replace(t1=t1))
            else:
                pieces.append(Piece(b0, b1, Tile(t0, t1, s0, s1), full))
    return pieces


def key_runs(rule: Rule) -> tuple[Ints, Ints, bool]:
    """First and past-the-last visible key of each row, (B or 1, T); whether all between are too."""
    shape = rule.shape
    if rule.mask is None:
        return np.zeros((1, shape.T), np.int64), np.full((1, shape.T), shape.S), True
    i = torch.arange(shape.T)[None] + shape.offset
    run = rule.mask.interval(i, shape)
    if run is not None:
        lo, hi = np.broadcast_arrays(*(x.cpu().numpy().clip(0, shape.S) for x in run))
        return lo, np.maximum(lo, hi), True
    t_edges, s_edges = edges(shape.T, BAND), edges(shape.S, 128)
    known: Bools = tile_bounds(rule.mask, shape, t_edges, s_edges).maybe
    first, last = known.argmax(1), known.shape[1] - known[:, ::-1].argmax(1)
    seen = known.any(1)
    heights = np.diff(t_edges)
    lo = np.repeat(np.where(seen, s_edges[first], 0), heights)[None]
    hi = np.repeat(np.where(seen, s_edges[last], 0), heights)[None]
    return lo, hi, False


def run_pieces(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, piece by piece."""
    scale = plan.rule.scale
    if plan.is_whole():
        return flash_on_cpu(q, k, v, plan.causal, plan.mask(plan.pieces[0], q), scale)
    B, H, T, E = *q.shape[:3], v.shape[3]
    out = q.new_zeros(B, T, H, E).transpose(1, 2)
    lse = q.new_zeros(B, T, H, dtype=score_dtype(q.dtype)).transpose(1, 2)
    for piece in plan.pieces:
        rows, (q_, k_, v_) = take(piece, q, k, v)
        out[rows], lse[rows] = flash_on_cpu(q_, k_, v_, False, plan.mask(piece, q), scale)
    return out, lse


class _Pieces(torch.autograd.Function):
    """The CPU's kernel over the pieces of a plan, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, rule: Rule, causal: bool | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        ctx.plan, ctx.finite = make_plan(rule, causal), is_finite(q, k, v, rule)
        if ctx.finite:
            out, lse = run_pieces(q, k, v, ctx.plan)
        else:
            rows = run_blockwise(Call(q=q, k=k, v=v, rule=rule))
            out, lse = rows.output, rows.lse
        # The backward pass renders the rule again: saved so that autograd notices writes to it.
        watched = [tensor for tensor in rule.tensors() if not tensor.is_inference()]
        ctx.save_for_backward(q, k, v, out, lse, *watched)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        plan: Plan = ctx.plan
        if torch.is_grad_enabled() or is_batched_gradient(grad) or not ctx.finite:
            twice = torch.is_grad_enabled()
            with outside_autocast(q.device.type), torch.enable_grad():
                again = run_blockwise(Call(q=q, k=k, v=v, rule=plan.rule)).output
            needed = [x for x in (q, k, v) if x.requires_grad]
            grads = iter(torch.autograd.grad(again, needed, grad, create_graph=twice))
            return None, None, *(next(grads) if x.requires_grad else None for x in (q, k, v))
        q, k, v, out, grad = (in_rows(x) for x in (q, k, v, out, grad))
        if plan.is_whole():
            given = grad, q, repeat(k, q), repeat(v, q), out, lse
            mask = plan.mask(plan.pieces[0], q)
            dq, dk, dv = flash_backward(
                *given, 0.0, plan.causal, attn_mask=mask, scale=plan.rule.scale
            )
            return None, None, dq, fold(dk, k), fold(dv, v)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for piece in plan.pieces:
            rows, (q_, k_, v_) = take(piece, q, k, v)
            keys = (rows[0], slice(None), slice(piece.tile.s0, piece.tile.s1))
            given = grad[rows], q_, repeat(k_, q), repeat(v_, q), out[rows], lse[rows]
            mask = plan.mask(piece, q)
            parts = flash_backward(*given, 0.0, False, attn_mask=mask, scale=plan.rule.scale)
            dq[rows] = parts[0]
            dk[keys] += fold(parts[1], k)
            dv[keys] += fold(parts[2], v)
        return None, None, dq, dk, dv


def take(
    piece: Piece, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """The index of a piece's rows in the output, and its queries, keys and values."""
    b, t = slice(piece.b0, piece.b1), slice(piece.tile.t0, piece.tile.t1)
    s = slice(piece.tile.s0, piece.tile.s1)
    return (b, slice(None), t), (q[b, :, t], k[b, :, s], v[b, :, s])


def repeat(x_bgsd: Tensor, q_bhtd: Tensor) -> Tensor:
    """Key heads repeated for the query heads that share them."""
    times = q_bhtd.shape[1] // max(x_bgsd.shape[1], 1)
    return x_bgsd if times == 1 else x_bgsd.repeat_interleave(times, 1)


def fold(grad_bhsd: Tensor, x_bgsd: Tensor) -> Tensor:
    """Gradients of repeated heads, summed back."""
    G = x_bgsd.shape[1]
    return (
        grad_bhsd
        if grad_bhsd.shape[1] == G
        else grad_bhsd.view(grad_bhsd.shape[0], G, -1, *grad_bhsd.shape[2:]).sum(2)
    )
