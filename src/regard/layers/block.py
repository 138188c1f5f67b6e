"""Blocks of the Transformer.

Why: the models here are all built of the same few sublayers in one of four orders, so a model is
described by a `BlockConfig` for each layer.

How: a block adds the outputs of its sublayers to the residual stream x.
- "post":     x = norm(x + attend(x));  x = norm(x + feed(x))    (the first Transformer, BERT, BART)
- "pre":      x = x + attend(norm(x));  x = x + feed(norm(x))    (GPT-2, LLaMA, T5)
              x = norm(x) + attend(norm(x)), and feed likewise, with `normed_residual` (in BLOOM)
- "parallel": x = x + attend(norm(x)) + feed(norm'(x))           (NeoX; GPT-J has norm' = norm)
- "sandwich": x = x + after(attend(norm(x))), and feed likewise  (Gemma 2 and 3)

`EncoderBlock` attends in both directions; `DecoderBlock` is causal, and without cross-attention the
block of a GPT. The position settings (rotary, alibi, window) apply to self-attention only, all
others to cross-attention too.

Left out: stacks (`stack.py`); embeddings and heads, which are the model's.

Letters: B batch, T tokens, S tokens of the memory, C model width, M width of the memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, Unpack, get_args

from torch import Tensor, nn

from regard._check import check_choice, check_count, check_probability
from regard.layers.cache import BlockCache
from regard.layers.dropout import Dropout
from regard.layers.feedforward import Activation, FeedForward, make_activation
from regard.layers.multihead import (
    MultiHeadAttention,
    Places,
    ProjectionBias,
    Sides,
    check_heads,
    check_rule,
)
from regard.layers.norm import Factory, NormKind, check_norm, make_norm
from regard.ops import Bias, Mask
from regard.positions import RotaryConfig

Order = Literal["pre", "post", "parallel", "sandwich"]
Sublayer = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The settings of one block of an encoder or a decoder.

    Args:
        dim, n_heads, n_kv_heads, head_dim, rotary, alibi, window, softcap, scale, sinks, qk_norm,
            qk_norm_eps, backend: As in `MultiHeadAttention`.
        ffn_dim, activation, gated: As in `FeedForward`.
        attention_bias, ffn_bias: Whether the projections of attention and feed-forward have biases.
        order: Where the norms are. "pre": x + f(norm(x)). "post": norm(x + f(x)). "parallel":
            x + attention(norm(x)) + ffn(norm(x)). "sandwich": x + norm(f(norm(x))).
        shared_norm: In "parallel" order, whether one norm serves both sublayers.
        normed_residual: In "pre" order, whether f(norm(x)) is added to norm(x) instead of x.
        norm, norm_eps, norm_bias: As in `make_norm`.
        dropout: Of each sublayer's output, before it is added.
        attention_dropout: Of the attention weights.
        ffn_dropout: Of the hidden layer of the feed-forward layer. All three in training mode only.
        cross_attention: Whether a decoder block attends to a memory, too.
        memory_dim: The width of the memory; dim by default.

    Example:
        >>> config = regard.layers.BlockConfig(dim=64, n_heads=8, ffn_dim=256, norm="rms")
        >>> decoder = regard.layers.Decoder(config, n_layers=2)
        >>> decoder(torch.randn(2, 11, 64)).shape
        torch.Size([2, 11, 64])
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
        check_rule(head_dim, self.rotary, self.window, self.scale, self.softcap, self.backend)
        make_activation(self.activation)
        if self.qk_norm is not None:
            check_choice("qk_norm", self.qk_norm, get_args(NormKind))
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            check_probability(name, getattr(self, name))
        for name, orders in (
            ("cross_attention", ("pre", "post")),
            ("shared_norm", ("parallel",)),
            ("normed_residual", ("pre",)),
        ):
            if getattr(self, name) and self.order not in orders:
                wanted = " or ".join(orders)
                raise ValueError(f"{name} is for {wanted} order; the order is {self.order}")
        if self.memory_dim is not None:
            check_count("memory_dim", self.memory_dim)
            if not self.cross_attention:
                raise ValueError("memory_dim is set, but cross_attention is not")


class Block(nn.Module):
    """The sublayers of a block, and the order in which they run."""

    causal: ClassVar[bool]

    def __init__(self, config: BlockConfig, **where: Unpack[Factory]) -> None:
        super().__init__()
        if config.cross_attention and not self.causal:
            raise ValueError("an encoder has no cross-attention; use a decoder")
        self.config = config
        self.self_attn = make_attention(config, self.causal, where)
        self.self_attn_norm, self.self_attn_after = make_norms(config, where)
        self.cross_attn: MultiHeadAttention | None = None
        self.cross_attn_norm: nn.Module | None = None
        if config.cross_attention:
            self.cross_attn = make_attention(config, False, where, cross=True)
            self.cross_attn_norm, _ = make_norms(config, where)
        self.ffn = make_feed_forward(config, where)
        self.ffn_norm, self.ffn_after = make_norms(config, where, config.shared_norm)
        self.dropout = Dropout(config.dropout)

    def run(self, x_btc: Tensor, attend: Sublayer, cross: Sublayer | None = None) -> Tensor:
        """Run the sublayers in the config's order."""
        if self.config.order != "parallel":
            x_btc = self._add(x_btc, attend, self.self_attn_norm, self.self_attn_after)
            if cross is not None:
                x_btc = self._add(x_btc, cross, self.cross_attn_norm, None)
            return self._add(x_btc, self.ffn, self.ffn_norm, self.ffn_after)
        assert self.self_attn_norm is not None
        ready_btc = self.self_attn_norm(x_btc)
        seen_btc = attend(ready_btc)
        ready_btc = ready_btc if self.ffn_norm is None else self.ffn_norm(x_btc)
        fed_btc: Tensor = self.ffn(ready_btc)
        if self.training:
            seen_btc, fed_btc = self.dropout(seen_btc), self.dropout(fed_btc)
        return x_btc + seen_btc + fed_btc

    def _add(
        self, x_btc: Tensor, sublayer: Sublayer, norm: nn.Module | None, after: nn.Module | None
    ) -> Tensor:
        """Add the sublayer's output to x, with the norms before or after it."""
        assert norm is not None
        post = self.config.order == "post"
        ready_btc = x_btc if post else norm(x_btc)
        answer_btc = sublayer(ready_btc)
        if after is not None:
            answer_btc = after(answer_btc)
        if self.training:
            answer_btc = self.dropout(answer_btc)
        sum_btc: Tensor = (ready_btc if self.config.normed_residual else x_btc) + answer_btc
        return norm(sum_btc) if post else sum_btc


class EncoderBlock(Block):
    """Bidirectional self-attention, then feed-forward: (B, T, C) -> (B, T, C)."""

    causal = False

    def forward(
        self,
        x_btc: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | Places | None = None,
    ) -> Tensor:
        return self.run(x_btc, partial(self.self_attn, mask=mask, bias=bias, positions=positions))


class DecoderBlock(Block):
    """Causal self-attention, cross-attention if the config has it, then feed-forward."""

    causal = True

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
        if cross_attn is None:
            if memory is not None or memory_mask is not None:
                raise ValueError(
                    "a memory or memory_mask was given to a decoder without cross-attention; set "
                    "cross_attention=True in its config"
                )
            return self.run(x_btc, attend)
        kept_memory = None if cache is None else cache.cross_attn
        if cache is not None and kept_memory is None:
            raise ValueError(
                "the cache was made without cross-attention; use make_cache() of this decoder"
            )
        if memory is None and (kept_memory is None or not kept_memory.filled):
            raise ValueError("a decoder with cross-attention needs a memory (B, S, M)")
        cross = partial(cross_attn, memory=memory, mask=memory_mask, cache=kept_memory)
        return self.run(x_btc, attend, cross)


def make_attention(
    config: BlockConfig, causal: bool, where: Factory, cross: bool = False
) -> MultiHeadAttention:
    names = ["n_kv_heads", "head_dim", "softcap", "scale", "sinks", "qk_norm", "qk_norm_eps"]
    names += ["backend"] if cross else ["backend", "rotary", "alibi", "window"]
    given = {name: getattr(config, name) for name in names}
    given |= {"bias": config.attention_bias, "dropout": config.attention_dropout}
    kv_dim = config.memory_dim if cross else None
    return MultiHeadAttention(
        config.dim, config.n_heads, kv_dim=kv_dim, causal=causal, **given, **where
    )


def make_feed_forward(config: BlockConfig, where: Factory) -> FeedForward:
    activation, gated, bias = config.activation, config.gated, config.ffn_bias
    if isinstance(activation, nn.Module):  # each block has its own parameters
        activation = copy.deepcopy(activation)
    layer = partial(FeedForward, config.dim, config.ffn_dim, activation, gated=gated, bias=bias)
    return layer(dropout=config.ffn_dropout, **where)


def make_block_norm(config: BlockConfig, where: Factory) -> nn.Module:
    return make_norm(config.norm, config.dim, eps=config.norm_eps, bias=config.norm_bias, **where)


def make_norms(
    config: BlockConfig, where: Factory, shared: bool = False
) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms before and after a sublayer; shared: it uses another sublayer's norm before."""
    before = None if shared else make_block_norm(config, where)
    return before, make_block_norm(config, where) if config.order == "sandwich" else None
