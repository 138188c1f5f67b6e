"""Dropout that costs little inside a graph compiled for a CPU.

Why: a compiler draws torch's random numbers entry by entry, ten rounds of mixing each, and keeps
which entries were dropped until the backward pass. In training that costs more than the norms do.

How: inside such a graph one random number is drawn for the whole tensor, and whether an entry is
dropped is a short hash of it and of the entry's place. The backward pass computes it again, so
nothing is kept. Elsewhere it is torch's own dropout: in a graph for a GPU, Triton refuses the
products that the compiler folds out of the hash.

Left out: attention's weights, which are dropped in `attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOST = 2**62


class Dropout(nn.Dropout):
    """torch's dropout under every name; other draws inside a graph compiled for a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        ours = torch.compiler.is_compiling() and input.device.type == "cpu"
        if not ours or self.p >= 1.0 or self.inplace:
            return super().forward(input)
        seed = torch.randint(0, MOST, (), dtype=torch.int64, device=input.device)
        # A backward pass multiplies by the same factors: they come of the seed again.
        return input * keep_factor(seed, self.p, input)


def keep_factor(seed: Tensor, p: float, like: Tensor) -> Tensor:
    """What each entry is multiplied by: 0 with probability p, else 1 / (1 - p)."""
    place = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
    # Words of int32, whose products wrap round. The seed's second half goes in between, since with
    # one alone the draws of two seeds would be the same ones, moved along.
    word = place * -1640531535 + seed.to(torch.int32)
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D
    word = word ^ (seed >> 32).to(torch.int32)
    word = (word ^ ((word >> 15) & 0x1FFFF)) * -2073254261
    word = word ^ ((word >> 16) & 0xFFFF)
    kept = word >= int(p * 2**32) - 2**31
    return kept.to(like.dtype) * (1.0 / (1.0 - p))
