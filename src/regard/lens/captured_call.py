"""One attention call as a hook captured it, cut down to the recorded row and heads.

Why: hooks see batched calls with arguments in many conventions. All code behind them handles one
form: one row of the batch, q (1, H, T, D) and k (1, G, S, D), and one rule in the terms of
`regard.attention`.

How: masks and biases know which axes their tensors have, so they can be cut like q and k.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.ops import Bias, DenseBias, Mask
from regard.ops.call import Rule
from regard.ops.shape import Shape
from regard.ops.term import Cut, Keys


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """q, k and the rule of one call.

    `is_row`: the hook has already extracted the recorded row. `v` is set if the hook sees it; it is
    needed to record how much keys add. `rows` are row statistics from the pass that computed the
    output (`ops.call.Call`), if it did: they are valid only for exactly these queries, keys and
    rule. `rule_number` stands for the tensors of the rule, if a compiled graph numbered them
    (`ops/rule_numbers.py`), and for what was cut from them.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor | None = None
    mask: Mask | None = None
    bias: Bias | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    cross: bool | None = None
    is_row: bool = False
    rows: dict[str, Tensor] | None = None
    rule_number: Any = None

    @functools.cached_property
    def shape(self) -> Shape:
        return Shape(self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2])

    @property
    def is_step(self) -> bool:
        """Whether some keys come from earlier calls, by way of a KV cache."""
        return not self.cross and self.shape.S > self.shape.T

    @functools.cached_property
    def rule(self) -> Rule:
        rule = Rule(
            shape=self.shape, scale=self.scale, mask=self.mask, bias=self.bias, softcap=self.softcap
        )
        return rule.on(self.q.device)

    def of(self, row: int | None, heads: Sequence[int] | None) -> Call:
        """The call for one row of the batch, or all, and the given heads, with tensors detached."""
        kept = slice(None) if row is None else slice(row, row + 1)
        q, k, sinks = self.q[kept].detach(), self.k[kept].detach(), self.sinks
        v = None if self.v is None else self.v[kept].detach()
        for term in (self.mask, self.bias):
            if term is not None:
                term.check(self.shape)
        picked: Tensor | None = None
        if heads is not None:
            picked = numbers_on(q.device, tuple(heads))
            group = q.shape[1] // k.shape[1]
            q, k = q[:, picked], k[:, picked // group]
            v = None if v is None else v[:, picked // group]
            sinks = None if sinks is None else sinks[picked.to(sinks.device)]
        sinks = None if sinks is None else sinks.detach()
        rows = self.rows
        if rows is not None:
            rows = {name: x[kept] for name, x in rows.items()}
            if picked is not None:
                rows = {name: x[:, picked] for name, x in rows.items()}
        call = self._cut(Cut(row=row, heads=picked), q=q, k=k, v=v, sinks=sinks, rows=rows)
        return call._numbered(row, None if heads is None else tuple(heads))

    def with_keys(self, keys: Keys) -> Call:
        """The call with a subset of the keys, or with all of them in another order."""
        v = None if self.v is None else self.v[:, :, keys]
        call = self._cut(Cut(keys=keys), k=self.k[:, :, keys], v=v, rows=None)
        # No other call has this object for the keys that were chosen.
        return call._numbered((keys.start, keys.stop) if isinstance(keys, slice) else object())

    def _cut(self, cut: Cut, **tensors: Any) -> Call:
        mask = None if self.mask is None else self.mask.cut(cut)
        bias = None if self.bias is None else self.bias.cut(cut)
        return replace(self, mask=mask, bias=bias, **tensors)

    def _numbered(self, *cut: Any) -> Call:
        number = self.rule_number
        return self if number is None else replace(self, rule_number=(number, *cut))

    @property
    def follows_keys(self) -> bool:
        """Whether the rule stays valid for the remaining keys when other keys are removed."""
        return all(term is None or term.follows_keys for term in (self.mask, self.bias))


@functools.lru_cache(maxsize=64)
def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Head numbers as an index tensor, cached: a copy in every layer would wait for the GPU."""
    return torch.tensor(numbers, device=device)


def whole_scores(name: str, scores_bhts: Tensor, mask: Mask | None = None) -> Call:
    """A call of which only the scores are known: q and k of width 0, and the scores as a bias."""
    B, H, T, S = scores_bhts.shape
    none_q, none_k = (scores_bhts.new_zeros(B, H, n, 0) for n in (T, S))
    return Call(name=name, q=none_q, k=none_k, mask=mask, bias=DenseBias(scores_bhts), scale=1.0)
