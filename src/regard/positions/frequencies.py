"""Frequencies of sinusoidal and rotary positions.

Why: an angle is position × frequency, and it must be right at position 1,000,003 too, where
float32 has lost three digits, bfloat16 all of them.

How: frequencies are computed at every call, from plain numbers, on the device, in float64. None is
ever stored, so there is no buffer that `.bfloat16()`, `to_empty()` or an earlier, longer text could
corrupt. Only elementwise operations are used; autocast lowers none of them.

Letters: R pairs of numbers, each with one frequency.
"""

import math

import torch
from torch import Tensor


def make_frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    """base^(-2r / dim) for each pair r of `dim` numbers; an odd last number counts as a pair."""
    # Apple's GPUs have no float64.
    exact = torch.float32 if device.type == "mps" else torch.float64
    pair_r = torch.arange((dim + 1) // 2, dtype=exact, device=device)
    return torch.exp(pair_r * (-2 * math.log(base) / dim))
