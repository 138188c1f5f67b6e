"""Stacks: layers that differ, T5's table, what is handed out between layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.layers import (
    BlockCache,
    BlockConfig,
    Decoder,
    DecoderBlock,
    DecoderCache,
    Encoder,
    KVCache,
    RelativeConfig,
)
from regard.ops import RelativeTable
from regard.positions import RotaryConfig

B, T, C, H, F = 3, 7, 15, 5, 13
CONFIG = BlockConfig(dim=C, n_heads=H, ffn_dim=F)
GROUPED = replace(CONFIG, head_dim=4, n_kv_heads=1, norm="rms", rotary=RotaryConfig(head_dim=4))


def draw() -> Tensor:
    return torch.randn(B, T, C, dtype=torch.float64)


def stir(module: nn.Module) -> Any:
    """Every parameter at random, so that no norm and no bias is idle."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def test_layers_of_one_stack_may_differ_in_window_and_rotary() -> None:
    """Each layer keeps its own window and its own phases, with a cache and without."""
    configs = [
        replace(GROUPED, window=(2, None)),
        replace(GROUPED, rotary=RotaryConfig(head_dim=4, base=77.0)),
        replace(GROUPED, rotary=None, alibi=True),
    ]
    stack, x = stir(Decoder(configs, dtype=torch.float64)), draw()
    y = x
    for config, block in zip(configs, stack.layers, strict=True):
        alone = DecoderBlock(config, dtype=torch.float64)
        alone.load_state_dict(block.state_dict())
        y = alone(y)
    torch.testing.assert_close(stack(x), stack.norm(y))
    with torch.no_grad():
        cache = stack.make_cache()
        steps = [stack(x[:, t : t + 1], cache=cache) for t in range(T)]
    torch.testing.assert_close(torch.cat(steps, 1), stack(x))
    assert cache.blocks[0].self_attn.window == 2 and cache.blocks[1].self_attn.window is None


def test_a_stack_with_t5s_table_adds_it_in_every_layer_and_with_a_cache() -> None:
    relative = RelativeConfig(n_buckets=6, max_distance=9)
    x = draw()
    for kind, bidirectional in ((Encoder, True), (Decoder, False)):
        stack = stir(kind(CONFIG, 2, relative=relative, dtype=torch.float64))
        bias = RelativeTable(stack.relative_table.detach(), bidirectional, 9)
        plain = kind(CONFIG, 2, dtype=torch.float64)
        plain.load_state_dict(stack.state_dict(), strict=False)
        torch.testing.assert_close(stack(x), plain(x, bias=bias))
        if kind is Decoder:
            cache = stack.make_cache()
            steps = [stack(x[:, t : t + 1], cache=cache) for t in range(T)]
            torch.testing.assert_close(torch.cat(steps, 1), stack(x))


def test_buckets_that_a_decoder_cannot_have_are_refused_when_it_is_made() -> None:
    relative = RelativeConfig(n_buckets=32, max_distance=16)  # enough for both directions
    Encoder(CONFIG, 1, relative=relative)
    with pytest.raises(ValueError, match="max_distance above 16"):
        Decoder(CONFIG, 1, relative=relative)


def test_a_stack_hands_out_what_enters_each_block_and_what_leaves_it() -> None:
    stack, x = stir(Encoder(CONFIG, 2, dtype=torch.float64)), draw()
    states: list[Tensor] = []
    out = stack(x, states=states)
    first = stack.layers[0](x)
    expected = [x, first, stack.norm(stack.layers[1](first))]
    for got, want in zip(states, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert states[-1] is out


def test_a_stack_of_layers_that_do_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="n_layers is 3, but there are 2 configs"):
        Encoder([CONFIG, CONFIG], 3)
    with pytest.raises(ValueError, match="one order, got"):
        Encoder([CONFIG, replace(CONFIG, order="post")])


CACHES: dict[str, Callable[[], KVCache]] = {
    "growing": KVCache.growing,
    "fixed": lambda: KVCache.fixed(17),
    "windowed": lambda: KVCache.windowed(2),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_caches_that_share_their_slots_keep_what_single_ones_keep(kind: str, side: str) -> None:
    make = CACHES[kind]
    stack = stir(Decoder(replace(GROUPED, window=(2, None)), 3, dtype=torch.float64))
    shared = stack.make_cache(make)
    lone = DecoderCache(BlockCache(make()) for _ in range(3))
    assert (len(shared.slots), len(lone.slots)) == (1, 3)
    x, index = draw(), torch.tensor([2, 0, 2])
    padding, real = torch.tensor([0, 2, 4])[:, None], torch.arange(T)
    real = real >= padding if side == "left" else real < T - padding
    at = None if side == "none" else torch.where(real, real.cumsum(1) - 1, -1)
    with torch.no_grad():
        for turn in range(2):
            for start, stop in ((0, 3), (3, 4), (4, 6), (6, 7)):
                where = None if at is None else at[:, start:stop]
                outs = [
                    stack(x[:, start:stop], positions=where, cache=each) for each in (lone, shared)
                ]
                assert torch.equal(*outs)
                if stop == 4 and turn == 0:
                    lone.reorder(index)
                    shared.reorder(index)
                    x, at = x[index], None if at is None else at[index]
            lone.reset()
            shared.reset()


def test_a_block_that_runs_alone_on_the_cache_of_a_stack_is_refused_in_words() -> None:
    stack, x = stir(Decoder(GROUPED, 2, dtype=torch.float64)), draw()
    cache = stack.make_cache()
    with torch.no_grad():
        stack(x, cache=cache)
        stack.layers[0](x[:, :1], cache=cache.blocks[0])
        with pytest.raises(ValueError, match=r"holds 7 keys, but the other layers .* hold 8"):
            stack.layers[1](x[:, :1], cache=cache.blocks[1])
