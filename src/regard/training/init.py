"""The initial weights of a model that is trained from scratch.

How: all matrices are normal with standard deviation 0.02; the two that end a sublayer (`out_proj`,
`down_proj`) have it divided by √(2 · layers), so that the residual stream keeps its size however
many layers add to it (GPT-2). Where the embedding is multiplied by √dim (the original Transformer),
it is normal with standard deviation 1/√dim and the layers' matrices are Xavier uniform: within
√(6 / (fan in + fan out)). Biases are 0; norms keep the values they were constructed with. Weights
are drawn in the order of parameter names, from a generator of their own, on the CPU, so a seed
gives the same weights on every device.

A masked model takes long to learn more than token frequencies, so two of its parts start where
training would bring them. Its learned positions start as sinusoids at half the spread of its token
embeddings, from which heads can tell a neighbour. Its output bias starts as the logarithm of each
token's frequency (`start_at_frequencies`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from regard.models import Transformer
from regard.positions import Learned, sinusoidal

SPREAD = 0.02
Array = npt.NDArray[np.float64]


@torch.no_grad()
def start(model: Transformer, seed: int) -> None:
    """Draw the model's initial weights, in place."""
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
    embed = model.encoder_embed
    if config.head.kind == "masked" and embed is not None and isinstance(embed.positions, Learned):
        table = embed.positions.table.weight
        # The mean square of a sinusoid is 1/2.
        table.copy_(sinusoidal(*table.shape) * math.sqrt(2.0) * SPREAD / 2)


@torch.no_grad()
def start_at_frequencies(model: Transformer, shares: Array) -> None:
    """Set the output bias to the log of token frequencies (V,); absent tokens get the lowest."""
    if model.head is None or model.head.bias is None:
        return
    least = shares[shares > 0].min()
    model.head.bias.copy_(torch.from_numpy(np.log(np.maximum(shares, least))))
