"""The weights a model is trained from.

How: all matrices normal with standard deviation 0.02, the two that end a sublayer (`out_proj`,
`down_proj`) divided by √(2 · layers), so that what passes through keeps its size however many
layers add to it (GPT-2). Where the table is multiplied by √dim on the way in (the original
Transformer), the table is normal with 1/√dim and the matrices are Xavier's: uniform within
√(6 / (fan in + fan out)). Biases are 0 and norms as they were made. Drawn in the order of names,
from a seed of their own, on the CPU: so a seed means the same weights everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from regard.models import Transformer

SPREAD = 0.02


@torch.no_grad()
def start(model: Transformer, seed: int) -> None:
    """Draw the model's weights anew."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    deep = math.sqrt(2 * max(len(config.encoder), len(config.decoder)))
    scaled = config.embed.scale != 1.0
    norms = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) or "Norm" in type(module).__name__
        for p in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if id(parameter) in norms or name.endswith("sinks"):
            continue
        if parameter.dim() < 2:
            parameter.zero_()
            continue
        drawn = torch.empty(parameter.shape)
        if scaled and ".layers." in name:
            nn.init.xavier_uniform_(drawn, generator=generator)
        elif scaled and "tokens" in name:
            drawn.normal_(std=config.embed_dim**-0.5, generator=generator)
        else:
            ends = name.endswith(("out_proj.weight", "down_proj.weight"))
            drawn.normal_(std=SPREAD / (deep if ends else 1.0), generator=generator)
        parameter.copy_(drawn)
