"""One tensor, laid out in memory in every way that a view can have: the numbers stay the same.

What lies around the view is filled with NaN, so that a kernel which reads past its strides shows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LAYOUTS = (
    "plain",
    "heads last",
    "columns",
    "unbound",
    "stepped",
    "rows stepped",
    "odd offset",
    "packed",
    "turned round",
    "odd single axes",
    "overlapping",
    "expanded batch",
    "expanded heads",
    "expanded tokens",
    "expanded width",
)
EXPANDED = {f"expanded {name}": axis for axis, name in enumerate(("batch", "heads", "tokens"))}
EXPANDED["expanded width"] = 3


def lay_out(x: Tensor, layout: str) -> Tensor:
    """x (B, H, T, D) with other strides.

    An expanded one has the same numbers along one axis, an overlapping one in neighbouring rows.
    """
    if layout in EXPANDED:
        axis = EXPANDED[layout]
        return x.narrow(axis, 0, 1).clone().expand_as(x) if x.shape[axis] else x
    if layout == "overlapping" and x.numel():
        line = x.flatten(2)[..., : x.shape[2] + x.shape[3] - 1].contiguous()
        return line.unfold(2, x.shape[3], 1)
    if layout == "heads last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "turned round":
        return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if layout == "unbound":
        return torch.stack([torch.full_like(x, math.nan), x], -1).unbind(-1)[1]
    if layout == "odd single axes":
        base = x.contiguous()
        strides = [5 if n == 1 else step for n, step in zip(x.shape, base.stride(), strict=True)]
        return base.as_strided(x.shape, strides)
    B, H, T, D = x.shape
    if layout == "stepped":
        wide = x.new_full((B, H, T, 2 * D), math.nan)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "odd offset":
        wide = x.new_full((B, H, T, D + 1), math.nan)
        wide[..., 1:] = x
        return wide[..., 1:]
    if layout == "rows stepped":
        tall = x.new_full((B, H, 3 * T, D), math.nan)
        tall[:, :, 1::3] = x
        return tall[:, :, 1::3]
    if layout == "packed":
        wide = x.new_full((B, T, 3, H, D), math.nan)
        wide[:, :, 1] = x.transpose(1, 2)
        return wide[:, :, 1].transpose(1, 2)
    assert layout in ("plain", "overlapping"), layout
    return x.contiguous()
