"""GPT-3: the eight sizes of its paper, as GPT-2 with 2,048 positions; no weights were published.

Two of the paper's rows do not add up (24 heads of 128 in a width of 2,048; a width of 5,140 for 40
heads of 128); here they have 16 heads and a width of 5,120. Every layer attends to the whole text:
the paper does not specify the bands of the original's sparse layers.
"""

from __future__ import annotations

from regard.models.families import gpt2
from regard.models.family import Family, Source


def size(dim: int, n_layers: int, n_heads: int) -> Source:
    return {**gpt2.size(dim, n_layers, n_heads), "n_positions": 2048}


FAMILY = Family(
    name="gpt3",
    model_types=(),  # its configs say gpt2
    config_from=gpt2.config_from,
    links=gpt2.links,
    sizes={
        "gpt3-125m": size(768, 12, 12),
        "gpt3-350m": size(1024, 24, 16),
        "gpt3-760m": size(1536, 24, 16),
        "gpt3-1.3b": size(2048, 24, 16),
        "gpt3-2.7b": size(2560, 32, 32),
        "gpt3-6.7b": size(4096, 32, 32),
        "gpt3-13b": size(5120, 40, 40),
        "gpt3-175b": size(12288, 96, 96),
    },
)
