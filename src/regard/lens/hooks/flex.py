"""Convert FlexAttention's mask_mod and score_mod, functions of indices, to masks and scores.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._torch import indexing_by_vmap
from regard.ops import Dense, Mask
from regard.ops.call import score_dtype

Function = Callable[..., Tensor]
MOST = 1 << 28
"""The most pairs for which a function is evaluated, in pieces one after the other."""
PIECE = 1 << 22


def flex_rule(mask_mod: Function, q_bhtd: Tensor, k_bgsd: Tensor) -> Mask | None:
    (B, H, T, _), S = q_bhtd.shape, k_bgsd.shape[2]
    if getattr(mask_mod, "__name__", "") == "noop_mask":
        return None
    check_pairs("a mask", B * H * T * S, MOST)
    return Dense(ask(mask_mod, (B, H, T, S), q_bhtd.device, torch.bool))


def flex_scores(score_mod: Function, q_bhtd: Tensor, k_bgsd: Tensor, scale: float) -> Tensor:
    """The scores of all pairs after a score_mod, (B, H, T, S)."""
    (B, H, T, _), S = q_bhtd.shape, k_bgsd.shape[2]
    check_pairs("scores", B * H * T * S, MOST // 4)
    dtype = score_dtype(q_bhtd.dtype)
    k_bhsd = k_bgsd.repeat_interleave(H // k_bgsd.shape[1], 1)
    plain = (q_bhtd.to(dtype) @ k_bhsd.to(dtype).mT) * scale

    def changed(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return score_mod(plain[b, h, t, s], b, h, t, s)

    return ask(changed, plain.shape, q_bhtd.device, dtype)


def check_pairs(what: str, n_pairs: int, most: int) -> None:
    if n_pairs > most:
        pairs = f"{n_pairs:,} pairs to be recorded; at most {most:,}"
        raise ValueError(f"{what} given by a function would be asked for {pairs}")


def ask(function: Function, sizes: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Evaluate a function of single indices at all of them, by vmap over b, h, t, s."""
    B, H, T, S = sizes
    over = function
    for axis in (3, 2, 1, 0):
        over = torch.vmap(over, in_dims=tuple(0 if n == axis else None for n in range(4)))
    b, h, s = (torch.arange(n, device=device) for n in (B, H, S))
    values = torch.empty(B, H, T, S, dtype=dtype, device=device)
    step = max(PIECE // max(B * H * S, 1), 1)
    with indexing_by_vmap():
        for t0 in range(0, T, step):
            t = torch.arange(t0, min(t0 + step, T), device=device)
            values[:, :, t0 : t0 + step] = over(b, h, t, s).to(dtype)
    return values
