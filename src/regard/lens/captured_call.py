"""One call of attention, as a door saw it, cut down to the row and the heads that are recorded.

Why: doors see batches of calls in many dialects; behind them everything speaks of one row of the
batch, q (1, H, T, D) and k (1, G, S, D), and one rule in the words of `regard.attention`.

How: masks and biases say which axes their tensors have, and so can be cut like q and k.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.ops import Bias, DenseBias, Mask, call
from regard.ops.call import Rule, as_bias, as_mask
from regard.ops.shape import Shape
from regard.ops.term import Cut, Keys


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

    @classmethod
    def of_ours(cls, name: str, call: call.Call) -> Call:
        """A call of our own attention."""
        rule = call.rule
        return cls(
            name=name,
            q=call.q,
            k=call.k,
            mask=rule.mask,
            bias=rule.bias,
            scale=rule.scale,
            softcap=rule.softcap,
            sinks=call.sinks,
        )

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
        sinks = None if sinks is None else sinks.detach()
        return self._cut(Cut(row=row, heads=picked), q=q, k=k, sinks=sinks)

    def with_keys(self, keys: Keys) -> Call:
        """The same with some of the keys, or with all in another order."""
        return self._cut(Cut(keys=keys), k=self.k[:, :, keys])

    def _cut(self, cut: Cut, **tensors: Any) -> Call:
        mask, bias = as_mask(self.mask), as_bias(self.bias)
        return replace(
            self,
            mask=None if mask is None else mask.cut(cut),
            bias=None if bias is None else bias.cut(cut),
            **tensors,
        )

    @property
    def follows_keys(self) -> bool:
        """Whether what its rule says of a key goes with the key when others are taken away."""
        terms = (as_mask(self.mask), as_bias(self.bias))
        return all(term is None or term.follows_keys for term in terms)


def whole_scores(name: str, scores_bhts: Tensor, mask: Mask | None = None) -> Call:
    """A call of which the scores are known and nothing else: heads of no width, and a bias."""
    B, H, T, S = scores_bhts.shape
    none_q, none_k = (scores_bhts.new_zeros(B, H, n, 0) for n in (T, S))
    return Call(name=name, q=none_q, k=none_k, mask=mask, bias=DenseBias(scores_bhts), scale=1.0)
