"""Dropout that costs little inside a compiled graph.

Why: a compiler draws torch's random numbers entry by entry, ten rounds of mixing each, and keeps
which entries were dropped until the backward pass. In training that costs more than the norms do.

How: inside a graph one random number is drawn for the whole tensor, and whether an entry is dropped
is a short hash of it and of the entry's place. The backward pass computes it again, so nothing is
kept. Outside of graphs it is torch's own dropout.

Left out: attention's weights, which are dropped in `attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOST = 2**62


class Dropout(nn.Dropout):
    """torch's dropout under every name; other draws inside a compiled graph."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        plain = self.p >= 1.0 or self.inplace or input.numel() >= 2**31
        if plain or not torch.compiler.is_compiling():
            return super().forward(input)
        seed = torch.randint(0, MOST, (), dtype=torch.int64, device=input.device)
        # A backward pass multiplies by the same factors: they come of the seed again.
        return input * keep_factor(seed, self.p, input)


def keep_factor(seed: Tensor, p: float, like: Tensor) -> Tensor:
    """What each entry is multiplied by: 0 with probability p, else 1 / (1 - p)."""
    place = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
    # Words of int32, whose products wrap round. The seed's second half goes in between, since with
    # one alone the draws of two seeds would be the same ones in another order. The first step mixes
    # the place with the seed: a product of the place alone a compiler would fold into an index of
    # more than 32 bits.
    word = place ^ seed.to(torch.int32)
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D
    word = word ^ (seed >> 32).to(torch.int32)
    word = (word ^ ((word >> 15) & 0x1FFFF)) * -2073254261
    word = word ^ ((word >> 16) & 0xFFFF)
    kept = word >= int(p * 2**32) - 2**31
    return kept.to(like.dtype) * (1.0 / (1.0 - p))
