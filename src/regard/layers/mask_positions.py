"""Rules with given positions: how a layer's mask and bias follow tokens that do not lie in line.

Why: padding and caches put a token elsewhere in memory than it stands in its text.

How: every part of a mask or bias that speaks of positions is given them (`at`); parts that speak of
keys as they lie stay, and are named where they cannot.

Letters: N rows of positions, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._check import readable
from regard.ops import Bias, Mask, Window
from regard.ops.bias import Sum
from regard.ops.mask import And, Not, Or


def as_they_lie(at_nt: Tensor) -> bool:
    """Whether every row is 0, 1, 2, ...: then rules need no positions.

    Only told where reading values costs nothing; not knowing is slower, and as right.
    """
    if at_nt.device.type != "cpu" or not readable(at_nt):
        return False
    return bool((at_nt == torch.arange(at_nt.shape[1])).all())


def place_mask(mask: Mask | None, queries: Tensor, keys: Tensor) -> Mask:
    """The mask with positions given to all parts that speak of them; empty keys are never seen."""
    if mask is None:
        return Window(None, None).at(queries, keys)
    if mask.positional:
        return mask.at(queries, keys)

    def move(part: Mask) -> Mask:
        if part.positional:
            return part.at(queries, keys)
        if isinstance(part, And | Or):
            return type(part)(move(part.one), move(part.other))
        return Not(move(part.rule)) if isinstance(part, Not) else part

    return move(mask) & Window(None, None).at(queries, keys)


def place_bias(bias: Bias | None, queries: Tensor, keys: Tensor) -> Bias | None:
    """The bias with positions given to all parts that speak of them."""
    if bias is None or bias.relative:
        return None if bias is None else bias.at(queries, keys)
    if isinstance(bias, Sum):
        one, other = (place_bias(part, queries, keys) for part in (bias.one, bias.other))
        assert one is not None and other is not None
        return one + other
    return bias


def unplaced(part: Mask | Bias | None) -> str | None:
    """The name of a part that speaks of keys as they lie, which cannot be given positions."""
    if part is None or getattr(part, "positional", False) or getattr(part, "relative", False):
        return None
    if isinstance(part, And | Or | Sum):
        return unplaced(part.one) or unplaced(part.other)
    return unplaced(part.rule) if isinstance(part, Not) else type(part).__name__
