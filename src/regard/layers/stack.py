"""Stacks of blocks: an encoder, a decoder.

Why: a model is a sequence of blocks, and what all of them need is computed once, here: positions,
rotary phases, T5's bias.

How: one `BlockConfig` for all layers, or one for each (Gemma's windows alternate). Layers with the
same rotary config share its phases. A stack ends with a norm, except in "post" order, where the
last block ends with one. `states`, a list, is filled with the input of each block and the output of
the stack: n_layers + 1 tensors.

Left out: embeddings and heads, which are the model's.

Letters: B batch, T tokens, S tokens of the memory, C model width, M width of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from regard._check import check_count, check_shapes
from regard.layers.block import Block, BlockConfig, DecoderBlock, EncoderBlock, make_block_norm
from regard.layers.cache import BlockCache, CrossCache, DecoderCache, KVCache
from regard.layers.cache_slots import Slots, Step
from regard.layers.multihead import MultiHeadAttention, Places
from regard.layers.norm import Factory
from regard.ops import Bias, Mask, RelativeTable
from regard.ops.bias import check_buckets
from regard.ops.call import as_bias


@dataclass(frozen=True, kw_only=True)
class RelativeConfig:
    """T5's relative bias, shared by all layers of a stack (`RelativeTable`).

    Args:
        n_buckets: How many buckets the distances have.
        max_distance: The distance from which on all are in the last bucket.
    """

    n_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_count("n_buckets", self.n_buckets)
        check_count("max_distance", self.max_distance)
        check_buckets(self.n_buckets, True, self.max_distance)


class Stack(nn.Module):
    """The base of `Encoder` and `Decoder`: the blocks, the final norm, T5's bias table."""

    block: ClassVar[type[Block]]

    def __init__(
        self,
        config: BlockConfig | Sequence[BlockConfig],
        n_layers: int | None = None,
        *,
        relative: RelativeConfig | None = None,
        **where: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.configs = list_configs(config, n_layers)
        self.config = self.configs[0]
        # For each layer the first layer with the same rotary config, whose phases it shares.
        rotaries = [config.rotary for config in self.configs]
        self.kind_of = [rotaries.index(rotary) for rotary in rotaries]
        self.relative = relative
        self.relative_table: nn.Parameter | None = None
        if relative is not None:
            check_buckets(relative.n_buckets, not self.block.causal, relative.max_distance)
            table = torch.empty(relative.n_buckets, self.config.n_heads, **where)
            self.relative_table = nn.Parameter(nn.init.normal_(table, std=0.02))
        post = self.config.order == "post"
        self.norm = None if post else make_block_norm(self.config, where)
        self.layers = nn.ModuleList(self.block(config, **where) for config in self.configs)

    def place(
        self, x_btc: Tensor, positions: Tensor | None, cache: DecoderCache | None
    ) -> list[Places]:
        """Positions, phases and cache step of each layer, computed once for layers that agree."""
        check_shapes({"x": (x_btc, "B T C")})
        steps: list[Step | None] = [None]
        step_of = [0] * len(self.configs)
        if cache is not None:
            batch, n_new, _ = x_btc.shape
            step_of, steps = cache.slots_of, []
            for slots in cache.slots:
                steps.append(slots.advance(batch, n_new, x_btc.device, positions))
        known: dict[tuple[int, int], Places] = {}
        places = []
        for layer, alike in enumerate(zip(self.kind_of, step_of, strict=True)):
            if alike not in known:
                attn = self.layers[layer].self_attn
                assert isinstance(attn, MultiHeadAttention)
                known[alike] = attn.place(x_btc, positions, steps[alike[1]])
            places.append(known[alike])
        return places

    def add_relative(self, bias: Bias | Tensor | None, bidirectional: bool) -> Bias | None:
        """The caller's bias plus T5's, if the stack has one."""
        given = as_bias(bias)
        if self.relative is None or self.relative_table is None:
            return given
        own = RelativeTable(self.relative_table, bidirectional, self.relative.max_distance)
        return own if given is None else own + given

    def run(
        self,
        x_btc: Tensor,
        positions: Tensor | None,
        states: list[Tensor] | None,
        cache: DecoderCache | None,
        *args: Tensor | None,
        **given: Any,
    ) -> Tensor:
        """Run all blocks, each with the same arguments, then the final norm."""
        places = self.place(x_btc, positions, cache)
        for n, (block, where) in enumerate(zip(self.layers, places, strict=True)):
            if states is not None:
                states.append(x_btc)
            if cache is not None:
                given["cache"] = cache.blocks[n]
            x_btc = block(x_btc, *args, positions=where, **given)
        if self.norm is not None:
            x_btc = self.norm(x_btc)
        if states is not None:
            states.append(x_btc)
        return x_btc


class Encoder(Stack):
    """A stack of encoder blocks: (B, T, C) -> (B, T, C), with a norm at the end but for "post".

    Args:
        config: One `BlockConfig` for all layers, or a sequence with one for each.
        n_layers: The number of layers, where there is one config.
        relative: T5's relative bias, for all layers. None: none.

    Example:
        >>> config = regard.layers.BlockConfig(dim=64, n_heads=8, ffn_dim=256)
        >>> regard.layers.Encoder(config, n_layers=2)(torch.randn(2, 11, 64)).shape
        torch.Size([2, 11, 64])
    """

    block = EncoderBlock

    def forward(
        self,
        x_btc: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        bias = self.add_relative(bias, bidirectional=True)
        return self.run(x_btc, positions, states, None, mask=mask, bias=bias)


class Decoder(Stack):
    """A stack of decoder blocks, causal, with a norm at the end but for "post" order.

    Args:
        config: One `BlockConfig` for all layers, or a sequence with one for each.
        n_layers: The number of layers, where there is one config.
        relative: T5's relative bias, for all layers. None: none.

    Example: see `BlockConfig`.
    """

    block = DecoderBlock

    def make_cache(
        self, make: Callable[[], KVCache] | None = None, *, size: int | None = None
    ) -> DecoderCache:
        """An empty KV cache for every block: growing, or static with `size` slots a row.

        Layers with a window get a cache of that window, if this is smaller than `size`. `make`, if
        given, makes every block's cache instead. All blocks cache the same tokens, so caches of one
        kind share their slots.
        """
        shared: dict[Hashable, Slots] = {}
        blocks = []
        for config in self.configs:
            left = None if config.window is None else config.window[0]
            if make is not None:
                cache = make()
            elif left is not None and (size is None or left + 1 < size):
                cache = KVCache.windowed(left)
            else:
                cache = KVCache.growing() if size is None else KVCache.fixed(size)
            cache.slots = shared.setdefault(cache.slots.kind, cache.slots)
            blocks.append(BlockCache(cache, CrossCache() if config.cross_attention else None))
        return DecoderCache(blocks)

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
        if cache is not None and len(cache.blocks) != (n := len(self.layers)):
            raise ValueError(f"the cache is for {len(cache.blocks)} blocks; the decoder has {n}")
        given = {"mask": mask, "bias": self.add_relative(bias, False), "memory_mask": memory_mask}
        return self.run(x_btc, positions, states, cache, memory, **given)


def list_configs(
    config: BlockConfig | Sequence[BlockConfig], n_layers: int | None
) -> tuple[BlockConfig, ...]:
    """Check the configs and return one for each layer; a single one is repeated n_layers times."""
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
