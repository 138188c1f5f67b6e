"""Positions of tokens, for models: sinusoidal, learned and rotary positions.

Why: attention by itself does not know the order of its tokens. Each scheme here is a pure function
of integer positions, so padding, packing, caches and any length need only the right positions.

How: positions are int tensors, (T,) shared by all rows or (B, T) per row. `frequencies.py` computes
the frequencies, `absolute.py` positions that are added to the embeddings, `rotary.py` rotates
queries and keys, `scaling.py` scales rotary to longer texts. ALiBi slopes and T5 buckets are
defined where they are used, in `regard.ops.bias`, and re-exported here.

Left out: positions in two or three axes, xPos, Gemma's "proportional" frequencies.
"""

from regard.ops.bias import alibi_slopes, t5_bucket
from regard.positions.absolute import Learned, Sinusoidal, count_positions, sinusoidal
from regard.positions.rotary import Phases, Rotary, RotaryConfig
from regard.positions.scaling import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Scaling,
    YaRN,
    scaling_from_dict,
)

__all__ = [
    "DynamicNTK",
    "Learned",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Phases",
    "Rotary",
    "RotaryConfig",
    "Scaling",
    "Sinusoidal",
    "YaRN",
    "alibi_slopes",
    "count_positions",
    "scaling_from_dict",
    "sinusoidal",
    "t5_bucket",
]
