"""One call of attention, as a door saw it, cut down to the row and the heads that are recorded.

Why: doors see batches of calls in many dialects; behind them everything speaks of one row of the
batch, q (1, H, T, D) and k (1, G, S, D), and one rule in the words of `regard.attention`.

How: masks and biases are values made of small tensors; `cut` takes the row, the heads and the keys
out of each of these tensors, whatever the masks are joined to.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard.ops import ALiBi, Bias, Dense, DenseBias, Documents, Lengths, Mask, Prefix
from regard.ops.bias import BiasAt, RelativeTable
from regard.ops.mask import At
from regard.ops.rule import Rule, as_bias, as_mask
from regard.ops.shape import Shape

Keys = slice | Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """q, k and the rule of one call.

    `cross`: whether it looks at another text, where the door knows. `is_row`: whether the door has
    taken the recorded row out of the batch already.
    """

    name: str
    q: Tensor
    k: Tensor
    mask: Mask | Tensor | None = None
    bias: Bias | Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    cross: bool | None = None
    is_row: bool = False

    @functools.cached_property
    def shape(self) -> Shape:
        return Shape(self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2])

    @functools.cached_property
    def rule(self) -> Rule:
        """The rule, with its tensors beside q."""
        mask, bias = as_mask(self.mask), as_bias(self.bias)
        made = Rule(shape=self.shape, scale=self.scale, mask=mask, bias=bias, softcap=self.softcap)
        return made.on(self.q.device)

    def of(self, row: int, heads: Sequence[int] | None) -> Call:
        """The same for one row of the batch, and for these heads alone."""
        q, k, sinks = self.q[row : row + 1].detach(), self.k[row : row + 1].detach(), self.sinks
        mask, bias = as_mask(self.mask), as_bias(self.bias)
        if mask is not None:
            mask.check(self.shape)
        if bias is not None:
            bias.check(self.shape)
        picked: Tensor | None = None
        if heads is not None:
            picked = torch.tensor(list(heads), device=q.device)
            group = q.shape[1] // k.shape[1]
            q, k = q[:, picked], k[:, picked // group]
            sinks = None if sinks is None else sinks[picked.to(sinks.device)]
        where = Where(self.shape.B, row, self.shape.H, picked)
        return replace(
            self,
            q=q,
            k=k,
            mask=cut(mask, where),
            bias=cut(bias, where),
            sinks=None if sinks is None else sinks.detach(),
        )

    def with_keys(self, keys: Keys) -> Call:
        """The same with some of the keys, or with all in another order."""
        where = Where(1, 0, self.shape.H, None, keys)
        k = self.k[:, :, keys]
        return replace(self, k=k, mask=cut(self.mask, where), bias=cut(self.bias, where))


def whole_scores(name: str, scores_bhts: Tensor, mask: Mask | None = None) -> Call:
    """A call of which the scores are known and nothing else: heads of no width, and a bias."""
    B, H, T, S = scores_bhts.shape
    none_q, none_k = (scores_bhts.new_zeros(B, H, n, 0) for n in (T, S))
    return Call(name=name, q=none_q, k=none_k, mask=mask, bias=DenseBias(scores_bhts), scale=1.0)


@dataclass(frozen=True, eq=False)
class Where:
    """What is taken out of a rule: one row of B, some of H heads, some keys."""

    B: int
    row: int
    H: int
    heads: Tensor | None = None
    keys: Keys | None = None


ROWS = {"lengths": 1, "n": 1, "queries": 2, "keys": 2, "ids": 2, "query_ids": 2}
"""The axes that a field has when it differs from row to row."""
OVER_KEYS = ("keys", "ids")


def cut(part: Any, where: Where) -> Any:
    """A mask or bias for what `where` names."""
    if not isinstance(part, (Mask, Bias)):
        return part
    made: dict[str, Any] = {}
    for entry in fields(part):  # type: ignore[arg-type]
        value = getattr(part, entry.name)
        made[entry.name] = (
            _cut_tensor(part, entry.name, value, where)
            if isinstance(value, Tensor)
            else cut(value, where)
        )
    if where.keys is not None and isinstance(part, (At, BiasAt)) and part.keys is None:
        made["keys"] = _every_key(part, where)
    return replace(part, **made)


def _cut_tensor(part: Mask | Bias, name: str, value: Tensor, where: Where) -> Tensor:
    value = value.detach()
    if isinstance(part, (Dense, DenseBias)):
        return _cut_whole(value, where)
    if isinstance(part, ALiBi):
        return value if where.heads is None else value[where.heads.to(value.device)]
    if isinstance(part, RelativeTable):
        return value if where.heads is None else value[:, where.heads.to(value.device)]
    assert isinstance(part, (At, BiasAt, Documents, Lengths, Prefix)), type(part)
    if value.dim() == ROWS[name] and value.shape[0] == where.B > 1:
        value = value[where.row : where.row + 1]
    if where.keys is not None and name in OVER_KEYS:
        value = value[..., _on(where.keys, value)]
    return value


def _cut_whole(value: Tensor, where: Where) -> Tensor:
    """A tensor that broadcasts to (B, H, T, S)."""
    if value.dim() == 4 and value.shape[0] > 1:
        value = value[where.row : where.row + 1]
    if where.heads is not None and value.dim() >= 3 and value.shape[-3] == where.H > 1:
        value = value.index_select(-3, where.heads.to(value.device))
    if where.keys is not None and value.dim() and value.shape[-1] > 1:
        value = value[..., _on(where.keys, value)]
    return value


def _on(keys: Keys, beside: Tensor) -> Keys:
    return keys if isinstance(keys, slice) else keys.to(beside.device)


def _every_key(part: At | BiasAt, where: Where) -> Tensor:
    """Keys that stood as they lay, once some are gone."""
    device = part.queries.device
    if isinstance(where.keys, slice):
        return torch.arange(where.keys.start or 0, where.keys.stop, device=device)
    assert where.keys is not None
    return where.keys.to(device)
