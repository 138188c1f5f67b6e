"""Clearing keys and values that no query sees, so that a NaN in them never reaches the output.

Why: a fused kernel multiplies hidden values by 0 and adds -inf to hidden scores, and 0 · NaN is
NaN. So a NaN in padding, in unused slots of a cache or in another document would reach the output.

How: for most masks it is known at once that there is no such key (`covers`). Else the keys that no
query of their sample sees are found, and replaced by zeros, through which no gradient passes.

Letters: B batch, T queries, S keys, H query heads, G key heads, D width of a key or value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._check import is_one
from regard.ops.blockwise import bands
from regard.ops.call import Rule
from regard.ops.shape import Tile
from regard.ops.weight_stats import visible


def covers(rule: Rule) -> bool:
    """Whether, for sure, every query sees some key and every key is seen by some query."""
    if rule.bias_hides():
        return False
    if rule.mask is None:
        return True
    return rule.mask.sees_itself and rule.shape.T == rule.shape.S


def find_unseen(rule: Rule, device: torch.device) -> Tensor:
    """The keys that no query of their sample and head may look at, (B, H, S)."""
    B, H, T, S = rule.shape
    if torch.compiler.is_compiling():
        return ~visible(rule, Tile(0, T, 0, S), False, device).any(2)
    unseen_bhs = torch.ones(B, H, S, dtype=torch.bool, device=device)
    for _, tiles in bands(rule, device.type == "cuda"):
        for tile, full in tiles:
            unseen_bhs[..., tile.s0 : tile.s1] &= ~visible(rule, tile, full, device).any(2)
    return unseen_bhs


def clear(x_bgsd: Tensor, unseen_bhs: Tensor) -> Tensor:
    """Keys or values with zeros for those that no query head of their group sees."""
    B, H, S = unseen_bhs.shape
    G = x_bgsd.shape[1]
    if not is_one(H) and H != G:
        unseen_bhs = unseen_bhs.view(B, G, H // G, S).all(2)
    return x_bgsd.masked_fill(unseen_bhs[..., None], 0.0)
