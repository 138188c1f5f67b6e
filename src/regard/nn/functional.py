"""torch.nn.functional's two attention functions, with its signatures, on regard's attention.

`scaled_dot_product_attention` accepts any number of axes before the last two and broadcasts them,
as torch's does; a bool mask is True where attention is allowed. `multi_head_attention_forward` is
what `MultiheadAttention` computes, with every weight passed in; there a bool mask is True where
attention is *not* allowed. Both are so in torch.

Unlike torch's: fully masked rows give zeros; masks may be of any float type; a NaN stays in the
rows that attend to it. Under the same seed, dropout drops other weights than torch's does.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.errors import CallError, InputError, refuse_nested
from regard.nn.heads import Projection, attend, learned_pair, read_inputs
from regard.nn.masks import Masks
from regard.ops import Causal, Dense, DenseBias, Mask, attention
from regard.ops.shape import fits

__all__ = ["multi_head_attention_forward", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · query keyᵀ + mask) value, over the last two axes.

    query (..., H, T, D), key (..., G, S, D), value (..., G, S, E) give (..., H, T, E). attn_mask
    broadcasts to (..., H, T, S): bool, True = may attend, or float, added to the scores. is_causal:
    query t sees the keys up to t (counted from the start). dropout_p always applies; pass 0 in
    evaluation. enable_gqa: G divides H, and neighbouring query heads share a key head.
    """
    refuse_nested(query, key, value)
    check_tensors(query, key, value)
    if not 0.0 <= dropout_p <= 1.0:
        raise CallError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    lead = leading_axes(query, key, value, enable_gqa)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        key, value = (x.repeat_interleave(lead[-1] // x.shape[-3], -3) for x in (key, value))
    weights_shape = (*lead, query.shape[-2], key.shape[-2])
    mask, bias = read_mask(attn_mask, is_causal, weights_shape)
    q, k, v = (as_heads(x, lead, enable_gqa) for x in (query, key, value))
    if isinstance(scale, Tensor):
        scale = float(scale)
    output = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p)
    return output.reshape(*lead, *output.shape[2:]) if len(lead) != 2 else output


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    wrong = None
    mixed = query.dtype != key.dtype or query.dtype != value.dtype
    if min(query.dim(), key.dim(), value.dim()) < 2:
        wrong = "query, key and value must be at least 2 dimensional"
    elif query.shape[-1] != key.shape[-1]:
        wrong = "query and key must have one width (their last axis)"
    elif key.shape[-2] != value.shape[-2]:
        wrong = "key and value must have one length (their last axis but one)"
    elif not query.is_floating_point():
        wrong = "query, key and value must be of a float type"
    elif query.device != key.device or query.device != value.device:
        wrong = "query, key and value must be on one device"
    elif mixed and not torch.is_autocast_enabled(query.device.type):
        wrong = "query, key and value must have the same dtype"
    if wrong is not None:
        named = (("query", query), ("key", key), ("value", value))
        given = (f"{name} {tuple(x.shape)} {x.dtype} {x.device}" for name, x in named)
        raise CallError(f"{wrong}, got {', '.join(given)}")


def leading_axes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The output's axes before (T, E): broadcast, except that grouped heads are those of query."""
    if enable_gqa and min(query.dim(), key.dim(), value.dim()) < 3:
        raise CallError(
            "enable_gqa needs a head axis: query (..., H, T, D), key and value (..., G, S, D)"
        )
    heads = query.shape[-3:-2] if enable_gqa else ()
    for name, x in (("key", key), ("value", value)) if enable_gqa else ():
        G, H = x.shape[-3], query.shape[-3]
        if G == 0 or H % G:
            what = f"the heads of {name} (G={G}) must divide those of query (H={H})"
            raise CallError(f"with enable_gqa {what}")
    shapes = [x.shape[: -2 - len(heads)] for x in (query, key, value)]
    try:
        return (*torch.broadcast_shapes(*shapes), *heads)  # type: ignore[no-untyped-call]
    except RuntimeError:
        named = ", ".join(str(tuple(shape)) for shape in shapes)
        raise CallError(
            f"the leading axes of query, key and value do not broadcast: {named}; "
            "for grouped heads pass enable_gqa=True"
        ) from None


def as_heads(x: Tensor, lead: tuple[int, ...], enable_gqa: bool) -> Tensor:
    """x as (B, heads, length, width): axes before the heads are flattened to B or added."""
    heads = x.shape[-3] if enable_gqa else lead[-1] if lead else 1
    wanted = (*lead[:-1], heads, *x.shape[-2:])
    if x.dim() == 4 and x.shape == wanted:
        return x
    return x.expand(wanted).reshape(math.prod(lead[:-1]), heads, *x.shape[-2:])


def read_mask(
    attn_mask: Tensor | None, is_causal: bool, shape: tuple[int, ...]
) -> tuple[Mask | None, DenseBias | None]:
    """The mask or the bias that attn_mask and is_causal mean, for weights (..., H, T, S)."""
    if attn_mask is None:
        return (Causal(align="start") if is_causal else None), None
    drawn = type(attn_mask).__name__ == "CausalBias"
    if is_causal:
        what = "CausalBias should not be used with causal=True: it is the causal mask"
        other = "Explicit attn_mask should not be set when is_causal=True; join the two into one"
        raise CallError(what if drawn else other)
    if drawn:
        return Causal(align="start" if attn_mask.variant.name == "UPPER_LEFT" else "end"), None  # type: ignore[attr-defined]
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise CallError(
            "attn_mask must be bool (True = may look) or float (added to the scores), "
            f"got {attn_mask.dtype}"
        )
    given = tuple(attn_mask.shape)
    if len(given) > len(shape) or not all(map(fits, given[::-1], shape[::-1])):
        raise CallError(f"attn_mask must broadcast to (..., H, T, S) = {shape}, got {given}")
    if len(given) > 3 and len(shape) > 4:
        joined = attn_mask.expand(*shape[:-3], *given[-3:])
        attn_mask = joined.reshape(math.prod(shape[:-3]), *given[-3:])
    if attn_mask.dtype == torch.bool:
        return Dense(attn_mask), None
    return None, DenseBias(attn_mask)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `MultiheadAttention` computes, with its weights passed in; query (T, B, C) or (T, C).

    static_k and static_v, (B·H, S, D), are keys and values that are already projected and split
    into heads.
    """
    masks = Masks(attn_mask, key_padding_mask, is_causal)
    masks.check_kinds()
    inputs = read_inputs(query, key, value, batch_first=False)
    if embed_dim_to_check % num_heads:
        raise InputError(f"embed_dim {embed_dim_to_check} not divisible by num_heads {num_heads}")
    packed = apart = None
    if use_separate_proj_weight:
        q, k = present(q_proj_weight, "q_proj_weight"), present(k_proj_weight, "k_proj_weight")
        apart = (q, k, present(v_proj_weight, "v_proj_weight"))
    else:
        packed = present(in_proj_weight, "in_proj_weight")
    projection = Projection(
        dim=embed_dim_to_check,
        n_heads=num_heads,
        packed=packed,
        apart=apart,
        bias=in_proj_bias,
        pair=learned_pair(bias_k, bias_v),
        zero=add_zero_attn,
    )
    dropout = dropout_p if training else 0.0
    static = (static_k, static_v)
    output, weights = attend(inputs, projection, masks, dropout, need_weights, static)
    output = F.linear(output, out_proj_weight, out_proj_bias)
    return inputs.give_back(output, weights, average_attn_weights)


def present(weight: Tensor | None, name: str) -> Tensor:
    if weight is None:
        raise InputError(
            f"{name} is None, but use_separate_proj_weight={name != 'in_proj_weight'} needs it"
        )
    return weight
