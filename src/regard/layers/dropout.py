"""Dropout that is cheap inside a compiled graph.

Why: compiled code generates torch's random numbers entry by entry, ten rounds of mixing each, and
stores the dropout mask until the backward pass. In training that costs more than the norms do.

How: inside a graph one random seed is drawn for the whole tensor, and a short hash of the seed and
of an entry's index decides whether the entry is dropped. The backward pass recomputes the hash, so
no mask is stored. Outside of graphs it is torch's own dropout.

Left out: dropout of attention weights, which is part of `attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOST = 2**62


class Dropout(nn.Dropout):
    """A drop-in `nn.Dropout`; inside a compiled graph it uses other random numbers."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        plain = self.p >= 1.0 or self.inplace or input.numel() >= 2**31
        if plain or not torch.compiler.is_compiling():
            return super().forward(input)
        seed = torch.randint(0, MOST, (), dtype=torch.int64, device=input.device)
        # The backward pass needs the same factors, and recomputes them from the seed.
        return input * keep_factor(seed, self.p, input)


def keep_factor(seed: Tensor, p: float, like: Tensor) -> Tensor:
    """The factor for each entry: 0 with probability p, else 1 / (1 - p)."""
    place = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
    # A hash in int32, whose products wrap around. The seed's high half is mixed in halfway: with
    # the low half alone, two seeds would give the same values in another order. The first step
    # mixes the index with the seed: a compiler would fold a product of the index alone into an
    # index of more than 32 bits.
    word = place ^ seed.to(torch.int32)
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D
    word = word ^ (seed >> 32).to(torch.int32)
    word = (word ^ ((word >> 15) & 0x1FFFF)) * -2073254261
    word = word ^ ((word >> 16) & 0xFFFF)
    kept = word >= int(p * 2**32) - 2**31
    return kept.to(like.dtype) * (1.0 / (1.0 - p))
