"""LayerNorm or RMSNorm, chosen by name.

Why: a family's config has "layer" or "rms", and blocks and heads build their norms from it.

How: both are torch's own modules. `eps` always has a value: the default of torch's RMSNorm depends
on the type of x. "rms_offset" is Gemma's: its weight is stored as the difference from 1, so that
files round-trip bit for bit and weight decay pulls the factor towards 1.

Left out: norms over other axes than the last.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from regard._check import check_choice, check_count, check_number

NormKind = Literal["layer", "rms", "rms_offset"]


class Factory(TypedDict, total=False):
    """The device and dtype of parameters, as torch.nn's constructors accept them."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class OffsetRMSNorm(nn.RMSNorm):
    """x / rms(x) · (1 + weight), in float32 and rounded once; the weight starts at 0."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        factor = 1.0 + self.weight.to(wide.dtype)
        return nn.functional.rms_norm(wide, self.normalized_shape, factor, self.eps).to(x.dtype)


Norm: TypeAlias = nn.LayerNorm | nn.RMSNorm


def make_norm(
    kind: NormKind,
    dim: int,
    *,
    eps: float = 1e-5,
    bias: bool | None = None,
    **where: Unpack[Factory],
) -> Norm:
    """A norm over the last axis.

    Args:
        kind: "layer" (LayerNorm), "rms" (RMSNorm), or "rms_offset" (RMSNorm with the weight stored
            as its difference from 1, as in Gemma).
        dim: The width of that axis.
        eps: What is added to the mean square, or the variance, before the root.
        bias: Whether a LayerNorm has a bias; None: it has. An RMSNorm has none.
    """
    check_norm(kind, eps, bias)
    check_count("dim", dim)
    if kind == "layer":
        return nn.LayerNorm(dim, eps=eps, bias=bias is not False, **where)
    return (nn.RMSNorm if kind == "rms" else OffsetRMSNorm)(dim, eps=eps, **where)


def check_norm(kind: str, eps: float, bias: bool | None = None) -> None:
    check_choice("norm", kind, get_args(NormKind))
    check_number("norm eps", eps)
    if kind != "layer" and bias:
        raise ValueError("an RMSNorm has no bias; leave the norm's bias at None, or take 'layer'")
