"""What torch's multi-head attention computes before its heads attend, from the same arguments.

Letters: B batch, T queries, S keys, H heads, D head width, C model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.lens.captured_call import Call
from regard.ops import Bias, Causal, Dense, DenseBias, Mask


def read_heads(name: str, given: dict[str, Any], cross: bool | None = None) -> Call:
    """A call of `multi_head_attention_forward`, its arguments by name, as ours."""
    query, key = given["query"].detach(), given["key"].detach()
    if query.dim() == 2:
        query, key = query[:, None], key[:, None]
    n_heads = given["num_heads"]
    with torch.no_grad():
        q, k = project(query, key, given)
        k = extend(k, given)
    mask, bias = read_masks(given, k.shape[2], n_heads)
    if cross is None:
        cross = given["key"] is not given["query"]
    return Call(name=name, q=q, k=k, mask=mask, bias=bias, cross=cross)


def project(query_tbc: Tensor, key_sbc: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Queries and keys, (B, H, T, D) and (B, H, S, D)."""
    C, n_heads, bias = query_tbc.shape[-1], given["num_heads"], given.get("in_proj_bias")
    if given.get("use_separate_proj_weight"):
        q_weight, k_weight = given["q_proj_weight"], given["k_proj_weight"]
    else:
        q_weight, k_weight, _ = given["in_proj_weight"].chunk(3)
    q_bias, k_bias = (None, None) if bias is None else bias.chunk(3)[:2]
    q = F.linear(query_tbc, q_weight, q_bias)

    def split(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], n_heads, C // n_heads).permute(1, 2, 0, 3)

    static = given.get("static_k")
    if static is not None:
        return split(q), static.detach().view(-1, n_heads, *static.shape[1:])
    return split(q), split(F.linear(key_sbc, k_weight, k_bias))


def extend(k_bhsd: Tensor, given: dict[str, Any]) -> Tensor:
    """Keys with the learned one and the one of zeros behind them, where there are any."""
    B, H, _, D = k_bhsd.shape
    parts = [k_bhsd]
    if given.get("bias_k") is not None:
        parts.append(given["bias_k"].to(k_bhsd).view(1, H, 1, D).expand(B, H, 1, D))
    if given.get("add_zero_attn"):
        parts.append(k_bhsd.new_zeros(B, H, 1, D))
    return torch.cat(parts, 2) if len(parts) > 1 else k_bhsd


def read_masks(given: dict[str, Any], n_keys: int, n_heads: int) -> tuple[Mask | None, Bias | None]:
    """Mask and bias: torch's bool masks are True where a look is forbidden."""
    padding, attn_mask = given.get("key_padding_mask"), given.get("attn_mask")
    alone = padding is None and not given.get("need_weights", True)
    if given.get("is_causal") and alone:
        return Causal(align="start"), None
    mask: Mask | None = None
    bias: Bias | None = None
    for found, is_padding in ((attn_mask, False), (padding, True)):
        if found is None:
            continue
        four = found.detach()
        if is_padding:
            four = (four if four.dim() == 2 else four[None])[:, None, None]
        elif four.dim() == 3:
            four = four.reshape(-1, n_heads, *four.shape[1:])
        four = F.pad(four, (0, n_keys - four.shape[-1]))
        if four.dtype == torch.bool:
            mask = Dense(~four) if mask is None else mask & Dense(~four)
        else:
            bias = DenseBias(four) if bias is None else bias + DenseBias(four)
    return mask, bias
