"""Blocks of the Transformer.

Why: every model of the family is the same few sublayers in one of four orders, so a model is a
`BlockConfig` for each layer.

How: a block adds the answers of its sublayers to what passes through it.
- "post":     x = norm(x + attend(x));  x = norm(x + feed(x))    (the first Transformer, BERT, BART)
- "pre":      x = x + attend(norm(x));  x = x + feed(norm(x))    (GPT-2, LLaMA, T5)
              x = norm(x) + attend(norm(x)), and so the other, with `normed_residual` (BLOOM can)
- "parallel": x = x + attend(norm(x)) + feed(norm'(x))           (NeoX; GPT-J has norm' = norm)
- "sandwich": x = x + after(attend(norm(x))), and so the feed-forward layer      (Gemma 2 and 3)

`EncoderBlock` looks both ways, `DecoderBlock` only back; without cross-attention it is a GPT's.
What speaks of positions in the config (rotary, alibi, window) belongs to self-attention;
everything else holds for cross-attention too.

Left out: stacks (`stack.py`); embeddings and heads, which are the model's.

Letters: B batch, T tokens, S tokens of the memory, C model width, M width of the memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regard._check import check_choice, check_count, check_probability
from regard.layers.cache import BlockCache
from regard.layers.dropout import Dropout
from regard.layers.feedforward import Activation, FeedForward, make_activation
from regard.layers.multihead import (
    Factory,
    MultiHeadAttention,
    Places,
    ProjectionBias,
    Sides,
    check_heads,
    check_rotary,
    check_scores,
    check_window,
)
from regard.layers.norm import NormKind, check_norm, make_norm
from regard.ops import Bias, Mask
from regard.positions import RotaryConfig

Order = Literal["pre", "post", "parallel", "sandwich"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What one block is.

    `shared_norm`: in "parallel" order one norm serves both sublayers. `normed_residual`: in "pre"
    order an answer is added to norm(x), which the sublayer read, and not to x. `dropout` falls on
    each sublayer's answer before it is added, `attention_dropout` on the weights, `ffn_dropout` on
    the hidden numbers of the feed-forward layer; all in training only. `cross_attention` is for
    decoders, with `memory_dim` as the width of the memory (dim unless given). The rest is told in
    `MultiHeadAttention`, `FeedForward` and `make_norm`.
    """

    dim: int
    n_heads: int
    ffn_dim: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    order: Order = "pre"
    shared_norm: bool = False
    normed_residual: bool = False
    norm: NormKind = "layer"
    norm_eps: float = 1e-5
    norm_bias: bool | None = None
    activation: Activation = "relu"
    gated: bool = False
    attention_bias: bool | ProjectionBias = True
    ffn_bias: bool = True
    rotary: RotaryConfig | None = None
    alibi: bool = False
    window: Sides | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    qk_norm: NormKind | None = None
    qk_norm_eps: float = 1e-6
    dropout: float = 0.0
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0
    cross_attention: bool = False
    memory_dim: int | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        _, head_dim = check_heads(self.dim, self.n_heads, self.n_kv_heads, self.head_dim)
        check_count("ffn_dim", self.ffn_dim)
        check_choice("order", self.order, get_args(Order))
        check_norm(self.norm, self.norm_eps, self.norm_bias)
        check_rotary(self.rotary, head_dim)
        check_scores(self.scale, self.softcap, self.backend)
        check_window(self.window)
        make_activation(self.activation)
        if self.qk_norm is not None:
            check_choice("qk_norm", self.qk_norm, get_args(NormKind))
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            check_probability(name, getattr(self, name))
        if self.cross_attention and self.order not in ("pre", "post"):
            raise ValueError(
                f"a {self.order} block has no place for cross-attention; use pre or post"
            )
        if self.shared_norm and self.order != "parallel":
            raise ValueError(f"shared_norm is for parallel order; the order is {self.order}")
        if self.normed_residual and self.order != "pre":
            raise ValueError(f"normed_residual is for pre order; the order is {self.order}")
        if self.memory_dim is not None:
            check_count("memory_dim", self.memory_dim)
            if not self.cross_attention:
                raise ValueError("memory_dim is set, but cross_attention is not")


class EncoderBlock(nn.Module):
    """Self-attention that looks both ways, then feed-forward: (B, T, C) -> (B, T, C)."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.cross_attention:
            raise ValueError("an encoder has no cross-attention; use a decoder")
        self.config = config
        factory = Factory(device=device, dtype=dtype)
        self.self_attn = make_attention(config, False, factory)
        self.self_attn_norm, self.self_attn_after = make_norms(config, factory)
        self.ffn = make_feed_forward(config, factory)
        self.ffn_norm, self.ffn_after = make_norms(config, factory, config.shared_norm)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x_btc: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | Places | None = None,
    ) -> Tensor:
        attend = partial(self.self_attn, mask=mask, bias=bias, positions=positions)
        return run_block(self, x_btc, attend, None)


class DecoderBlock(nn.Module):
    """Self-attention that looks back, cross-attention if asked for, then feed-forward."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        factory = Factory(device=device, dtype=dtype)
        self.self_attn = make_attention(config, True, factory)
        self.self_attn_norm, self.self_attn_after = make_norms(config, factory)
        self.cross_attn: MultiHeadAttention | None = None
        self.cross_attn_norm: nn.Module | None = None
        if config.cross_attention:
            self.cross_attn = make_attention(config, False, factory, cross=True)
            self.cross_attn_norm, _ = make_norms(config, factory)
        self.ffn = make_feed_forward(config, factory)
        self.ffn_norm, self.ffn_after = make_norms(config, factory, config.shared_norm)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x_btc: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | Places | None = None,
        memory_mask: Mask | Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """`mask` and `bias` are for self-attention, `memory_mask` for the memory (B, S, M)."""
        kept = None if cache is None else cache.self_attn
        attend = partial(self.self_attn, mask=mask, bias=bias, positions=positions, cache=kept)
        cross_attn = self.cross_attn
        if cross_attn is None and memory is None and memory_mask is None:
            return run_block(self, x_btc, attend, None)
        self._check_memory(memory, memory_mask, cache)
        assert cross_attn is not None
        kept_memory = None if cache is None else cache.cross_attn
        cross = partial(cross_attn, memory=memory, mask=memory_mask, cache=kept_memory)
        return run_block(self, x_btc, attend, cross)

    def _check_memory(
        self, memory: Tensor | None, memory_mask: Mask | Tensor | None, cache: BlockCache | None
    ) -> None:
        if self.cross_attn is None:
            if memory is not None or memory_mask is not None:
                raise ValueError(
                    "a memory or memory_mask was given to a decoder without cross-attention; set "
                    "cross_attention=True in its config"
                )
            return
        if cache is not None and cache.cross_attn is None:
            raise ValueError(
                "the cache has no place for the memory's keys; use make_cache() of this decoder"
            )
        held = cache is not None and cache.cross_attn is not None and cache.cross_attn.filled
        if memory is None and not held:
            raise ValueError("a decoder with cross-attention needs a memory (B, S, M)")


def run_block(
    block: EncoderBlock | DecoderBlock,
    x_btc: Tensor,
    attend: Callable[..., Tensor],
    cross: Callable[..., Tensor] | None,
) -> Tensor:
    """The sublayers of a block in the order its config names."""
    if block.config.order != "parallel":
        x_btc = add_sublayer(block, x_btc, attend, block.self_attn_norm, block.self_attn_after)
        if cross is not None:
            assert isinstance(block, DecoderBlock)
            x_btc = add_sublayer(block, x_btc, cross, block.cross_attn_norm, None)
        return add_sublayer(block, x_btc, block.ffn, block.ffn_norm, block.ffn_after)
    assert block.self_attn_norm is not None
    ready_btc = block.self_attn_norm(x_btc)
    seen_btc = attend(ready_btc)
    ready_btc = ready_btc if block.ffn_norm is None else block.ffn_norm(x_btc)
    fed_btc: Tensor = block.ffn(ready_btc)
    if block.training:
        seen_btc, fed_btc = block.dropout(seen_btc), block.dropout(fed_btc)
    return x_btc + seen_btc + fed_btc


def add_sublayer(
    block: EncoderBlock | DecoderBlock,
    x_btc: Tensor,
    sublayer: Callable[..., Tensor],
    norm: nn.Module | None,
    after: nn.Module | None,
) -> Tensor:
    """x and the sublayer's answer to it, with the norms before or after."""
    assert norm is not None
    post = block.config.order == "post"
    ready_btc = x_btc if post else norm(x_btc)
    answer_btc = sublayer(ready_btc)
    if after is not None:
        answer_btc = after(answer_btc)
    if block.training:
        answer_btc = block.dropout(answer_btc)
    sum_btc: Tensor = (ready_btc if block.config.normed_residual else x_btc) + answer_btc
    return norm(sum_btc) if post else sum_btc


def make_attention(
    config: BlockConfig, causal: bool, where: Factory, cross: bool = False
) -> MultiHeadAttention:
    """Self-attention, or attention to a memory, which knows no positions."""
    return MultiHeadAttention(
        config.dim,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        kv_dim=config.memory_dim if cross else None,
        bias=config.attention_bias,
        rotary=None if cross else config.rotary,
        alibi=config.alibi and not cross,
        window=None if cross else config.window,
        causal=causal,
        softcap=config.softcap,
        scale=config.scale,
        sinks=config.sinks,
        qk_norm=config.qk_norm,
        qk_norm_eps=config.qk_norm_eps,
        dropout=config.attention_dropout,
        backend=config.backend,
        **where,
    )


def make_feed_forward(config: BlockConfig, where: Factory) -> FeedForward:
    """A module given as activation is copied, so that each block has its own parameters."""
    activation = config.activation
    return FeedForward(
        config.dim,
        config.ffn_dim,
        copy.deepcopy(activation) if isinstance(activation, nn.Module) else activation,
        gated=config.gated,
        bias=config.ffn_bias,
        dropout=config.ffn_dropout,
        **where,
    )


def make_block_norm(config: BlockConfig, where: Factory) -> nn.Module:
    return make_norm(config.norm, config.dim, eps=config.norm_eps, bias=config.norm_bias, **where)


def make_norms(
    config: BlockConfig, where: Factory, shared: bool = False
) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms before and after a sublayer; the one before may be another sublayer's."""
    before = None if shared else make_block_norm(config, where)
    return before, make_block_norm(config, where) if config.order == "sandwich" else None
