"""NaN and infinity stay where they are: a row is NaN when it looks at one, and no other row is.

Plain arithmetic does not keep this: 0 · NaN is NaN, so a value that nobody may see would still
reach every sum, and torch's CPU kernel turns a NaN query into zeros. So entries that are not finite
are taken out before any backend runs, and every row that has one in its query, or may see one in a
key or a value, is set to NaN afterwards. On the CPU a sum over the inputs tells first whether there
is anything to do.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard._check import is_transformed, readable
from regard.attention.blockwise import bands
from regard.attention.rule import Packed, Rule, pack, unpack
from regard.attention.secondpass import visible
from regard.attention.shape import Shape

Inputs = tuple[Tensor, Tensor, Tensor]


def all_finite(*tensors: Tensor) -> bool:
    """Whether all entries are finite; a sum that overflows counts as no, which costs time only."""
    total = sum(
        t.detach().sum(dtype=torch.float64 if t.dtype == torch.float64 else torch.float32)
        for t in tensors
    )
    return math.isfinite(float(total))


def needs_shield(inputs: Inputs, rule: Rule) -> bool:
    """Whether non-finite entries must be kept apart: known on the CPU, else assumed."""
    if inputs[0].device.type == "cpu" and readable(*inputs, *rule.tensors()):
        return not all_finite(*inputs)
    return True


def take_out(inputs: Inputs) -> Inputs:
    """The inputs with zeros for what is not finite."""
    q, k, v = (torch.where(torch.isfinite(x.detach()), x, 0.0) for x in inputs)
    return q, k, v


def spoiled_rows(q: Tensor, keys: tuple[Tensor, ...], rule: Rule) -> Tensor:
    """Rows whose query, or whose part of any of the given (B, G, S, ...), is not finite, (B, H, T).

    A row that may see nothing looks at nothing, whatever its query holds.
    """
    bad_q_bht = ~torch.isfinite(q.detach()).all(-1)
    bad_k_bgs = torch.stack([~torch.isfinite(x.detach()).all(-1) for x in keys]).any(0)
    bad_k_bhs = bad_k_bgs.repeat_interleave(q.shape[1] // max(bad_k_bgs.shape[1], 1), 1)
    sees_bad, sees_any = look(rule, bad_k_bhs)
    return sees_bad | (bad_q_bht & sees_any)


class _PutBack(torch.autograd.Function):
    """NaN in the rows that looked at one; what is pulled from such a row is a NaN for its query."""

    @staticmethod
    def forward(output_bhte: Tensor, q_bhtd: Tensor, nan_rows_bht: Tensor) -> Tensor:
        return torch.where(nan_rows_bht[..., None], math.nan, output_bhte)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q_bhtd, nan_rows_bht = ctx.saved_tensors
        pulled_bht = nan_rows_bht & (grad != 0).any(-1)
        q_grad = torch.zeros_like(q_bhtd).masked_fill(pulled_bht[..., None], math.nan)
        return grad.masked_fill(nan_rows_bht[..., None], 0.0), q_grad, None


def put_back(output_bhte: Tensor, q_bhtd: Tensor, nan_rows_bht: Tensor | None) -> Tensor:
    """NaN in the rows that looked at one; `q_bhtd` are the queries as they came."""
    if nan_rows_bht is None:
        return output_bhte
    if is_transformed(q_bhtd) or not (torch.is_grad_enabled() and q_bhtd.requires_grad):
        return torch.where(nan_rows_bht[..., None], math.nan, output_bhte)
    made: Tensor = _PutBack.apply(output_bhte, q_bhtd, nan_rows_bht)  # type: ignore[no-untyped-call]
    return made


def look(rule: Rule, marked_bhs: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows may see a marked key, and which may see any key at all, (B, H, T)."""
    B, H, T, S = rule.shape
    if rule.mask is None and rule.bias is None:
        sees_bad = marked_bhs.any(-1, keepdim=True)
        return sees_bad.expand(B, H, T), torch.full_like(sees_bad, S > 0).expand(B, H, T)
    keys = None
    if rule.mask is not None and rule.bias is None:
        i = torch.arange(T, device=marked_bhs.device)[None] + rule.shape.offset
        keys = rule.mask.interval(i, rule.shape)
    if keys is not None:
        lo, hi = (x.clamp(0, S)[:, None] for x in keys)
        counts = torch.nn.functional.pad(marked_bhs.long().cumsum(-1), (1, 0))
        lo, hi = lo.expand(B, H, T), torch.maximum(lo, hi).expand(B, H, T)
        return counts.gather(-1, hi) > counts.gather(-1, lo), hi > lo
    run = _look_op if torch.compiler.is_compiling() else _look_in_tiles
    sees_bad, sees_any = run(*pack(rule), marked_bhs, T)
    return sees_bad, sees_any


def _look_in_tiles(
    text: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
    marked_bhs: Tensor,
    n_queries: int,
) -> list[Tensor]:
    """The same for any mask and bias, tile by tile."""
    B, H, S = marked_bhs.shape
    rule = unpack(Packed(text, tensors, ints, floats), Shape(B, H, n_queries, S))
    bad, some = [marked_bhs[..., :0]], [marked_bhs[..., :0]]
    for (t0, t1), tiles in bands(rule, marked_bhs.is_cuda):
        sees_bad = torch.zeros_like(marked_bhs[..., :1]).expand(-1, -1, t1 - t0)
        sees_any = sees_bad
        for tile, full in tiles:
            seen = visible(rule, tile, full, marked_bhs.device)
            sees_bad = sees_bad | (seen & marked_bhs[:, :, None, tile.s0 : tile.s1]).any(-1)
            sees_any = sees_any | seen.any(-1)
        bad.append(sees_bad)
        some.append(sees_any)
    return [torch.cat(bad, -1), torch.cat(some, -1)]


_look_op = torch.library.custom_op(
    "regard::look",
    _look_in_tiles,
    mutates_args=(),
    schema="(str text, Tensor[] tensors, SymInt[] ints, float[] floats, Tensor marked, "
    "SymInt n_queries) -> Tensor[]",
)


@_look_op.register_fake
def _(
    text: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
    marked_bhs: Tensor,
    n_queries: int,
) -> list[Tensor]:
    return [marked_bhs.new_empty((*marked_bhs.shape[:2], n_queries)) for _ in range(2)]
