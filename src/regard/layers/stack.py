"""Stacks of blocks: an encoder, a decoder.

Why: a model is its blocks in a row, and what all of them read is worked out once, here: positions,
rotary's phases, T5's bias.

How: one `BlockConfig` for all layers, or one for each (Gemma's windows alternate). Layers with the
same rotary share its phases. A stack ends with a norm, except in "post" order, whose last block has
normed already. `states`, a list, is filled with what enters each block and with what leaves the
stack: n_layers + 1 tensors.

Left out: embeddings and heads, which are the model's.

Letters: B batch, T tokens, S tokens of the memory, C model width, M width of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard._check import check_shapes
from regard.layers.block import BlockConfig, DecoderBlock, EncoderBlock, Factory, make_block_norm
from regard.layers.cache import BlockCache, CrossCache, DecoderCache, KVCache
from regard.layers.multihead import Places
from regard.ops import Bias, Mask, RelativeTable
from regard.ops.bias import check_buckets
from regard.ops.call import as_bias
from regard.positions import RotaryConfig
from regard.positions.frequencies import check_count


@dataclass(frozen=True, kw_only=True)
class RelativeConfig:
    """T5's bias: how many buckets of distances, and where the last one begins."""

    n_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_count("n_buckets", self.n_buckets)
        check_count("max_distance", self.max_distance)
        check_buckets(self.n_buckets, True, self.max_distance)


class Stack(nn.Module):
    """What encoders and decoders share: the layers' configs, the last norm, T5's table."""

    def __init__(
        self,
        config: BlockConfig | Sequence[BlockConfig],
        n_layers: int | None,
        relative: RelativeConfig | None,
        made: Factory,
    ) -> None:
        super().__init__()
        self.configs = list_configs(config, n_layers)
        self.config = self.configs[0]
        # Which phases each layer reads: those of the first layer with the same rotary.
        rotaries = [config.rotary for config in self.configs]
        self.kinds: list[RotaryConfig | None] = list(dict.fromkeys(rotaries))
        self.kind_of = [self.kinds.index(rotary) for rotary in rotaries]
        self.first_of = [rotaries.index(rotary) for rotary in self.kinds]
        self.relative = relative
        self.relative_table: nn.Parameter | None = None
        if relative is not None:
            shape = relative.n_buckets, self.config.n_heads
            self.relative_table = nn.Parameter(torch.empty(shape, **made))
            nn.init.normal_(self.relative_table, std=0.02)
        self.norm: nn.Module | None = None
        if self.config.order != "post":
            self.norm = make_block_norm(self.config, made)

    def place(
        self,
        blocks: nn.ModuleList,
        x_btc: Tensor,
        positions: Tensor | None,
        caches: Sequence[BlockCache | None],
    ) -> list[Places]:
        """Positions and phases for each kind of layer."""
        check_shapes({"x": (x_btc, "B T C")})
        places = []
        for first in self.first_of:
            block, cache = blocks[first], caches[first]
            assert isinstance(block, EncoderBlock | DecoderBlock)
            kept = None if cache is None else cache.self_attn
            places.append(block.self_attn.place(x_btc, positions, kept))
        return places

    def add_relative(self, bias: Bias | Tensor | None, bidirectional: bool) -> Bias | None:
        """The caller's bias, and T5's where the stack has one."""
        given = as_bias(bias)
        if self.relative is None or self.relative_table is None:
            return given
        own = RelativeTable(self.relative_table, bidirectional, self.relative.max_distance)
        return own if given is None else own + given

    def finish(self, x_btc: Tensor, states: list[Tensor] | None) -> Tensor:
        """The last norm."""
        if self.norm is not None:
            x_btc = self.norm(x_btc)
        if states is not None:
            states.append(x_btc)
        return x_btc


class Encoder(Stack):
    """A stack of encoder blocks, and the norm that ends it."""

    def __init__(
        self,
        config: BlockConfig | Sequence[BlockConfig],
        n_layers: int | None = None,
        *,
        relative: RelativeConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, n_layers, relative, Factory(device=device, dtype=dtype))
        self.layers = nn.ModuleList(
            EncoderBlock(config, device=device, dtype=dtype) for config in self.configs
        )

    def forward(
        self,
        x_btc: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        places = self.place(self.layers, x_btc, positions, [None] * len(self.layers))
        bias = self.add_relative(bias, bidirectional=True)
        for block, kind in zip(self.layers, self.kind_of, strict=True):
            if states is not None:
                states.append(x_btc)
            x_btc = block(x_btc, mask=mask, bias=bias, positions=places[kind])
        return self.finish(x_btc, states)


class Decoder(Stack):
    """A stack of decoder blocks, and the norm that ends it."""

    def __init__(
        self,
        config: BlockConfig | Sequence[BlockConfig],
        n_layers: int | None = None,
        *,
        relative: RelativeConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, n_layers, relative, Factory(device=device, dtype=dtype))
        self.layers = nn.ModuleList(
            DecoderBlock(config, device=device, dtype=dtype) for config in self.configs
        )

    def make_cache(self, make: Callable[[], KVCache] | None = None) -> DecoderCache:
        """An empty cache for every block, for example `make_cache(lambda: KVCache.fixed(512))`.

        Without `make` layers with a window keep their window alone, the others everything.
        """

        def build(config: BlockConfig) -> KVCache:
            if make is not None:
                return make()
            left = None if config.window is None else config.window[0]
            return KVCache.growing() if left is None else KVCache.windowed(left)

        return DecoderCache(
            BlockCache(build(config), CrossCache() if config.cross_attention else None)
            for config in self.configs
        )

    def forward(
        self,
        x_btc: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        cache: DecoderCache | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """`mask` and `bias` are for self-attention, `memory_mask` for the memory (B, S, M)."""
        n_layers = len(self.layers)
        if cache is not None and len(cache.blocks) != n_layers:
            raise ValueError(
                f"the cache is for {len(cache.blocks)} blocks, but the decoder has {n_layers}"
            )
        kept = [None] * n_layers if cache is None else cache.blocks
        places = self.place(self.layers, x_btc, positions, kept)
        bias = self.add_relative(bias, bidirectional=False)
        for block, kind, block_cache in zip(self.layers, self.kind_of, kept, strict=True):
            if states is not None:
                states.append(x_btc)
            x_btc = block(
                x_btc,
                memory,
                mask=mask,
                bias=bias,
                positions=places[kind],
                memory_mask=memory_mask,
                cache=block_cache,
            )
        return self.finish(x_btc, states)


def list_configs(
    config: BlockConfig | Sequence[BlockConfig], n_layers: int | None
) -> tuple[BlockConfig, ...]:
    """A config for each layer, from one for all and their number, or from one each."""
    if isinstance(config, BlockConfig):
        if n_layers is None:
            raise ValueError("one config for all layers needs n_layers")
        check_count("n_layers", n_layers)
        return (config,) * n_layers
    configs = tuple(config)
    if not configs or not all(isinstance(each, BlockConfig) for each in configs):
        raise ValueError("expected a BlockConfig, or one for each layer and at least one")
    if n_layers is not None and n_layers != len(configs):
        raise ValueError(f"n_layers is {n_layers}, but there are {len(configs)} configs")
    for name in ("dim", "order", "norm", "cross_attention"):
        values = {getattr(each, name) for each in configs}
        if len(values) > 1:
            raise ValueError(f"layers of one stack have one {name}, got {sorted(map(str, values))}")
    return configs
