"""One query a row: which of our kernel's ways says the rule.

Why: generating text is nothing but single queries, and a cache's rules have one form, which the
kernel knows by positions; every other rule is rendered for it, one number a key.

Letters: B batch, S keys, H query heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.ops.kernels import decode
from regard.ops.kernels.decode import OPEN, Sight
from regard.ops.mask import And, At, Mask
from regard.ops.masks import Causal, Window
from regard.ops.rule import Rule
from regard.ops.shape import Tile


def attend(q_bh1d: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None) -> Tensor:
    """Attention of one query a row, by our kernel."""
    sight = find_sight(rule.mask)
    added = None
    if rule.bias is not None or (rule.mask is not None and sight is None):
        added = render(rule, sight is None, q_bh1d.device)
    numbers = rule.factor(q_bh1d.shape[3]), rule.softcap
    return decode.attend(q_bh1d[:, :, 0], k, v, sight, added, numbers, sinks)[:, :, None]


def find_sight(mask: Mask | None) -> Sight | None:
    """A mask that speaks of given positions and a window around them alone, as the kernel has it.

    One query that stands on the last key sees every key before it, so plain Causal needs nothing.
    """
    if not isinstance(mask, At) or mask.keys is None:
        return None
    sides = window_of(mask.rule)
    if sides is None:
        return None
    return Sight(mask.queries, mask.keys, *sides)


def window_of(mask: Mask) -> tuple[int, int] | None:
    """How far back and ahead a mask made of Causal and Window sees; None for other masks."""
    if isinstance(mask, Causal) and mask.align == "end":
        return OPEN, 0
    if isinstance(mask, Window):
        return (
            OPEN if mask.left is None else mask.left,
            OPEN if mask.right is None else mask.right,
        )
    if isinstance(mask, And):
        one, other = window_of(mask.one), window_of(mask.other)
        if one is not None and other is not None:
            return min(one[0], other[0]), min(one[1], other[1])
    return None


def render(rule: Rule, with_mask: bool, device: torch.device) -> Tensor:
    """Bias, and mask where it has to be, as numbers (B or 1, H or 1, S) added to the scores."""
    tile = Tile(0, 1, 0, rule.shape.S)
    values = torch.zeros((1, 1, 1, 1), device=device)
    if rule.bias is not None:
        values = four(rule.bias.block(rule.shape, tile, device, torch.float32))
    if with_mask and rule.mask is not None:
        allowed = four(rule.mask.block(rule.shape, tile, device))
        values = torch.where(allowed, values, -math.inf)
    return values.expand(-1, -1, 1, rule.shape.S)[:, :, 0]


def four(x: Tensor) -> Tensor:
    """A tensor that broadcasts to (B, H, 1, S), with all four axes."""
    return x[(None,) * (4 - x.dim())]
