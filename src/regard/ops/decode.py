"""One query a row: how our kernel is told the rule.

Why: generating text is nothing but single queries, and a cache's rules have one form, which the
kernel knows by positions; every other rule is rendered for it, one number a key.

Letters: B batch, S keys, H query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.call import Call
from regard.ops.kernels import decode
from regard.ops.kernels.decode import OPEN, KeyWindow
from regard.ops.mask import At, Mask
from regard.ops.shape import Tile


def run(call: Call) -> Tensor:
    """Attention of one query a row, by our kernel."""
    rule = call.rule
    window = find_window(rule.mask)
    added = None
    if rule.bias is not None or (rule.mask is not None and window is None):
        like = torch.empty(0, device=call.q.device)
        added = rule.block(Tile(0, 1, 0, rule.shape.S), like, with_mask=window is None)[:, :, 0]
    numbers = rule.factor(call.q.shape[3]), rule.softcap
    q_bhd = call.q[:, :, 0]
    return decode.attend(q_bhd, call.k, call.v, window, added, numbers, call.sinks)[:, :, None]


def find_window(mask: Mask | None) -> KeyWindow | None:
    """A mask that speaks of given positions and a window around them alone, as the kernel has it.

    One query that stands on the last key sees every key before it, so plain Causal needs nothing.
    """
    if not isinstance(mask, At) or mask.keys is None:
        return None
    window = mask.inner.window()
    if window is None:
        return None
    left, right = (OPEN if side is None else side for side in window)
    return KeyWindow(mask.queries, mask.keys, left, right)
