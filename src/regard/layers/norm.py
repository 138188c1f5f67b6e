"""Torch's LayerNorm or RMSNorm, chosen by a word.

Why: a family says "layer" or "rms" in its config, and blocks and heads build what it says.

How: both are torch's own modules; nothing is computed here. `eps` always has a value: torch's
RMSNorm would otherwise take one that depends on the type of x.

Left out: norms with other formulas, such as Gemma's 1 + weight.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

from regard.positions.angles import check_choice, check_count, check_number

NormKind = Literal["layer", "rms"]
Norm: TypeAlias = nn.LayerNorm | nn.RMSNorm


def make_norm(
    kind: NormKind,
    dim: int,
    *,
    eps: float = 1e-5,
    bias: bool | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Norm:
    """A norm over the last axis, of width `dim`. `bias`: None is what the kind has by itself."""
    check_norm(kind, eps, bias)
    check_count("dim", dim)
    if kind == "rms":
        return nn.RMSNorm(dim, eps=eps, device=device, dtype=dtype)
    return nn.LayerNorm(dim, eps=eps, bias=bias is not False, device=device, dtype=dtype)


def check_norm(kind: str, eps: float, bias: bool | None = None) -> None:
    """Refuse a norm that cannot be made."""
    check_choice("norm", kind, get_args(NormKind))
    check_number("norm eps", eps)
    if kind == "rms" and bias:
        raise ValueError("an RMSNorm has no bias; leave the norm's bias at None, or take 'layer'")
