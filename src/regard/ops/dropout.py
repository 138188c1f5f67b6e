"""Which weights are dropped, as a pure function of a seed and of the indices of the weight.

The reference, the tiles and the kernels must drop the same weights, in the forward pass and again
in the backward pass, without ever storing the matrix. So the choice for (b, h, t, s) is a hash of
the seed and these four numbers: every path computes it for any tile, at any time, with the same
result. The hash mixes 32-bit words inside int64 by multiplication and shift, which a kernel can do
as well.

Letters: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.ops.shape import Shape, Tile

_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """A fresh seed from torch's generator, as a 0-dim int64 tensor; no value is read back."""
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int64, device=device)


def as_seed(seed: int | Tensor, device: torch.device) -> Tensor:
    """The seed as a 0-dim int64 tensor."""
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype != torch.int64:
            raise ValueError(
                "seed must be a number or a 0-dim int64 tensor, "
                f"got {seed.dtype} {tuple(seed.shape)}"
            )
        return seed.to(device)
    if not isinstance(seed, int | torch.SymInt | np.integer):
        raise TypeError(f"seed must be a whole number or a 0-dim int64 tensor, got {seed!r}")
    return torch.tensor(seed, dtype=torch.int64, device=device)


def _mix(word: Tensor) -> Tensor:
    word = word & _WORD
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def keep_factor(
    seed: Tensor,
    p: float,
    shape: Shape,
    tile: Tile | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What each weight is multiplied by: 0 with probability p, else 1 / (1 - p); (B, H, t, s)."""
    tile = tile or Tile(0, shape.T, 0, shape.S)
    device = seed.device
    head = torch.arange(shape.B * shape.H, device=device).view(shape.B, shape.H, 1, 1)
    row = torch.arange(tile.t0, tile.t1, device=device)[:, None]
    key = torch.arange(tile.s0, tile.s1, device=device)
    word = _mix(_mix(_mix(seed ^ (seed >> 32)) + head * 0x9E3779B1) + row * 0x85EBCA77)
    key = key * 0xC2B2AE3D & _WORD
    if p >= 1.0:
        return torch.zeros_like(word ^ key, dtype=dtype)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        kept = _mix_narrow(word.to(torch.int32) ^ key.to(torch.int32)) >= int(p * 2**32) - 2**31
    else:
        kept = _mix(word ^ key) >= int(p * 2**32)
    return kept.to(dtype) / (1.0 - p)


def _mix_narrow(word: Tensor) -> Tensor:
    """`_mix` of an int32, in place, minus 2^31: half as many bytes for a CPU to move.

    Products wrap around, where `_mix` masks them; shifts are cleared of copies of the sign bit.
    Subtracting 2^31, which flips the highest bit, gives signed numbers the order of unsigned ones.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        word.bitwise_xor_((word >> shift).bitwise_and_(0xFFFFFFFF >> shift)).mul_(factor)
    word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
    return word.bitwise_xor_(-(2**31))
