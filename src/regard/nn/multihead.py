"""`MultiheadAttention` with torch.nn's constructor, parameters, call and state_dict, on ours.

Why: so that changing `torch.nn` to `regard.nn` is the whole migration. The same seed draws the same
weights, and each loads the other's state_dict.

Unlike torch's: there is one path, in training and in evaluation alike. Asking for weights changes
the output in no bit. A row that may see nothing gives zeros, in output and weights, forward and
backward. `is_causal` is a hint that can only make a call faster. Masks of any float type, and a
bool mask beside a float one, mean what they say. A module put in the place of `out_proj` is called,
and hooks on it fire. `observing(model, Wants(...))` shows what the heads looked at, of which the
keys that `add_bias_kv` and `add_zero_attn` add are the last.

Left out: nested tensors, refused in words; TorchScript, refused in words.

Letters: B batch, T queries, S keys, H heads, D head width, C model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.layers.observing import Observable
from regard.nn.errors import InputError, refuse_script
from regard.nn.heads import (
    Projection,
    attend,
    check_widths,
    extend,
    learned_pair,
    project,
    read_inputs,
)
from regard.nn.masks import check_dims, check_kinds, check_sizes, read_masks


class MultiheadAttention(Observable):
    """torch.nn.MultiheadAttention, in one path that can be seen.

    query (T, B, C), key (S, B, kdim), value (S, B, vdim); with `batch_first` (B, T, C) and so on;
    without a batch (T, C). Gives the output, shaped like query, and the weights averaged over
    heads, (B, T, S), or per head, (B, H, T, S).
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if embed_dim <= 0 or num_heads <= 0:
            raise ValueError(
                f"embed_dim and num_heads must be greater than 0, got embed_dim={embed_dim} "
                f"and num_heads={num_heads}"
            )
        if embed_dim % num_heads:
            raise InputError(
                f"embed_dim must be divisible by num_heads, got embed_dim={embed_dim} "
                f"and num_heads={num_heads}"
            )
        super().__init__()
        self.embed_dim = embed_dim
        self.kdim = kdim if kdim is not None else embed_dim
        self.vdim = vdim if vdim is not None else embed_dim
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.head_dim = embed_dim // num_heads
        self.add_zero_attn = add_zero_attn

        made: dict[str, Any] = {"device": device, "dtype": dtype}
        shapes = {"in_proj_weight": (3 * embed_dim, embed_dim)}
        if not self._qkv_same_embed_dim:
            widths = {"q": embed_dim, "k": self.kdim, "v": self.vdim}
            shapes = {f"{name}_proj_weight": (embed_dim, width) for name, width in widths.items()}
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight"):
            weight = nn.Parameter(torch.empty(shapes[name], **made)) if name in shapes else None
            self.register_parameter(name, weight)
        in_bias = nn.Parameter(torch.empty(3 * embed_dim, **made)) if bias else None
        self.register_parameter("in_proj_bias", in_bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **made)
        self.bias_k = nn.Parameter(torch.empty((1, 1, embed_dim), **made)) if add_bias_kv else None
        self.bias_v = nn.Parameter(torch.empty((1, 1, embed_dim), **made)) if add_bias_kv else None
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Draw the weights, in torch's order, so that the same seed gives the same ones."""
        for weight in (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        ):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for pair in (self.bias_k, self.bias_v):
            if pair is not None:
                nn.init.xavier_normal_(pair)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also read modules that were pickled before a field was there."""
        older: dict[str, Any] = {
            "_qkv_same_embed_dim": True,
            "batch_first": False,
            "wants": None,
            "seen": [],
        }
        super().__setstate__({**older, **state})  # type: ignore[no-untyped-call]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; masks as in torch.nn: bool True = may not look, float = added to the scores."""
        check_kinds(attn_mask, key_padding_mask)
        inputs = read_inputs(query, key, value, self.batch_first)
        check_dims(attn_mask, key_padding_mask, inputs.batched)
        made = self._projection()
        check_widths(inputs, self.embed_dim, made)
        shape = inputs.sizes(self.num_heads)
        check_sizes(attn_mask, key_padding_mask, shape, inputs.batched)

        pair = learned_pair(self.bias_k, self.bias_v)
        extra = (pair is not None) + bool(self.add_zero_attn)
        mask, bias = read_masks(attn_mask, key_padding_mask, is_causal, shape, extra)
        q, k, v = project(inputs, made)
        k, v = extend(k, v, pair, self.add_zero_attn)
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(q, k, v, mask, bias, dropout, need_weights, self._attention)
        if weights is not None:
            weights = inputs.unbatch(weights.mean(1) if average_attn_weights else weights)
        return inputs.unbatch(self.out_proj(inputs.join(output))), weights

    def _projection(self) -> Projection:
        """The weights of the way in, packed or apart."""
        apart = None
        if self.in_proj_weight is None:
            assert self.q_proj_weight is not None
            assert self.k_proj_weight is not None and self.v_proj_weight is not None
            apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return Projection(
            n_heads=self.num_heads, packed=self.in_proj_weight, apart=apart, bias=self.in_proj_bias
        )
