"""Rules with given positions: how a layer's mask and bias follow tokens that do not lie in line.

Why: padding and caches put a token elsewhere in memory than it stands in its text.

How: every part of a mask or bias that speaks of positions is given them; parts that speak of keys
as they lie stay, and are named where they cannot (`Term.placed`, `Term.unplaced`).

Letters: N rows of positions, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._check import readable
from regard.ops import Bias, Mask, Window


def as_they_lie(at_nt: Tensor) -> bool:
    """Whether every row is 0, 1, 2, ...: then rules need no positions.

    Only told where reading values costs nothing; not knowing is slower, and as right.
    """
    if at_nt.device.type != "cpu" or not readable(at_nt):
        return False
    return bool((at_nt == torch.arange(at_nt.shape[1])).all())


def place_mask(mask: Mask | None, queries: Tensor, keys: Tensor) -> Mask:
    """The mask with positions given to all parts that speak of them; empty keys are never seen."""
    if mask is not None and mask.positional:
        return mask.at(queries, keys)
    filled = Window(None, None).at(queries, keys)
    return filled if mask is None else mask.placed(queries, keys) & filled


def place_bias(bias: Bias | None, queries: Tensor, keys: Tensor) -> Bias | None:
    """The bias with positions given to all parts that speak of them."""
    return None if bias is None else bias.placed(queries, keys)


def unplaced(term: Mask | Bias | None) -> str | None:
    """The name of a part that speaks of keys as they lie, which cannot be given positions."""
    return None if term is None else term.unplaced()
