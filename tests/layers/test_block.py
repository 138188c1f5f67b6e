"""Blocks and stacks: the four orders, torch's own layers as a judge, caches, copies and files."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.layers import (
    BlockConfig,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    FeedForward,
    KVCache,
    MultiHeadAttention,
    ProjectionBias,
    make_norm,
    observing,
)
from regard.ops import Lengths, RelativeTable, Wants
from regard.positions import RotaryConfig

B, T, S, C, H, F = 3, 7, 11, 15, 5, 13
LENGTHS = torch.tensor([7, 2, 5])
CONFIG = BlockConfig(dim=C, n_heads=H, ffn_dim=F)
LLAMA = BlockConfig(
    dim=C,
    n_heads=H,
    head_dim=4,
    n_kv_heads=1,
    ffn_dim=F,
    norm="rms",
    activation="silu",
    gated=True,
    attention_bias=False,
    ffn_bias=False,
    rotary=RotaryConfig(head_dim=4),
)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (B, T, C)), dtype=dtype)


def stir(module: nn.Module) -> Any:
    """Every parameter at random, so that no norm and no bias is idle."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


# The textbook


def test_a_block_of_512_with_8_heads_and_2048_has_the_textbooks_matrix_weights() -> None:
    for block in (
        EncoderBlock(BlockConfig(dim=512, n_heads=8, ffn_dim=2048), device="meta"),
        DecoderBlock(BlockConfig(dim=512, n_heads=8, ffn_dim=2048), device="meta"),
    ):
        count = sum(p.numel() for p in block.parameters() if p.dim() == 2)
        assert count == 4 * 512**2 + 2 * 512 * 2048


# The four orders


def test_with_sublayers_that_answer_1_and_10_each_order_gives_what_is_worked_by_hand() -> None:
    """attend(x) = 1, feed(x) = 10 everywhere: pre and parallel add 11; post norms twice."""
    x = torch.tensor([[[3.0, 5.0]]], dtype=torch.float64)
    for order, expected in (("pre", [14.0, 16.0]), ("parallel", [14.0, 16.0]), ("post", [-1, 1])):
        config = BlockConfig(dim=2, n_heads=1, ffn_dim=3, order=order, norm_eps=1e-12)  # type: ignore[arg-type]
        block = EncoderBlock(config, dtype=torch.float64)
        with torch.no_grad():
            for proj, answer in ((block.self_attn.out_proj, 1.0), (block.ffn.down_proj, 10.0)):
                proj.weight.zero_()
                proj.bias.fill_(answer)
        torch.testing.assert_close(block(x), torch.tensor([[expected]], dtype=torch.float64))


def test_each_order_is_the_formula_its_name_stands_for() -> None:
    x, memory = draw(), draw(B, S, C)
    for order in ("pre", "post", "parallel", "sandwich"):
        block = stir(EncoderBlock(replace(CONFIG, order=order), dtype=torch.float64))  # type: ignore[arg-type]
        attend, feed = block.self_attn, block.ffn
        one, two = block.self_attn_norm, block.ffn_norm
        if order == "pre":
            y = x + attend(one(x))
            expected = y + feed(two(y))
        elif order == "post":
            y = one(x + attend(x))
            expected = two(y + feed(y))
        elif order == "parallel":
            expected = x + attend(one(x)) + feed(two(x))
        else:
            y = x + block.self_attn_after(attend(one(x)))
            expected = y + block.ffn_after(feed(two(y)))
        torch.testing.assert_close(block(x), expected)
    for order in ("pre", "post"):
        config = replace(CONFIG, order=order, cross_attention=True)  # type: ignore[arg-type]
        block = stir(DecoderBlock(config, dtype=torch.float64))
        attend, cross, feed = block.self_attn, block.cross_attn, block.ffn
        one, two, three = block.self_attn_norm, block.cross_attn_norm, block.ffn_norm
        if order == "pre":
            y = x + attend(one(x))
            y = y + cross(two(y), memory)
            expected = y + feed(three(y))
        else:
            y = one(x + attend(x))
            y = two(y + cross(y, memory))
            expected = three(y + feed(y))
        torch.testing.assert_close(block(x, memory), expected)


def test_parallel_sublayers_may_share_one_norm() -> None:
    config = replace(CONFIG, order="parallel", shared_norm=True)
    block = stir(DecoderBlock(config, dtype=torch.float64))
    x = draw()
    ready = block.self_attn_norm(x)
    torch.testing.assert_close(block(x), x + block.self_attn(ready) + block.ffn(ready))
    assert not [name for name, _ in block.named_parameters() if name.startswith("ffn_norm")]


def test_a_normed_residual_is_added_to_instead_of_the_input() -> None:
    """By hand: (3, 5) is normed to (-1, 1); with 1 added to (0, 2), normed again; then 10."""
    config = BlockConfig(dim=2, n_heads=1, ffn_dim=3, norm_eps=1e-12, normed_residual=True)
    block = EncoderBlock(config, dtype=torch.float64)
    with torch.no_grad():
        for proj, answer in ((block.self_attn.out_proj, 1.0), (block.ffn.down_proj, 10.0)):
            proj.weight.zero_()
            proj.bias.fill_(answer)
    x = torch.tensor([[[3.0, 5.0]]], dtype=torch.float64)
    torch.testing.assert_close(block(x), torch.tensor([[[9.0, 11.0]]], dtype=torch.float64))
    config = replace(CONFIG, cross_attention=True, normed_residual=True)
    block, x, memory = stir(DecoderBlock(config, dtype=torch.float64)), draw(), draw(B, S, C)
    one, two, three = (block.self_attn_norm(x), block.cross_attn_norm, block.ffn_norm)
    y = two(one + block.self_attn(one))
    y = three(y + block.cross_attn(y, memory))
    torch.testing.assert_close(block(x, memory), y + block.ffn(y))


def test_gemmas_norm_multiplies_by_1_plus_its_weight() -> None:
    norm = make_norm("rms_offset", 2, eps=1e-12, dtype=torch.float64)
    assert norm.weight.tolist() == [0.0, 0.0]
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -0.5]))
    # rms of (1, 7) is 5.
    made = norm(torch.tensor([1.0, 7.0], dtype=torch.float64))
    torch.testing.assert_close(made, torch.tensor([0.4, 0.7], dtype=torch.float64))


def carry(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    for name, weight, bias in zip(
        "qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
    ):
        getattr(ours, f"{name}_proj").weight.data.copy_(weight)
        getattr(ours, f"{name}_proj").bias.data.copy_(bias)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("training", [True, False])
def test_a_stack_equals_torchs_with_the_same_weights(order: Any, training: bool) -> None:
    """Encoder with padding and decoder with memory, outputs and gradients of the input."""
    given: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "dtype": torch.float64}
    given["norm_first"] = order == "pre"
    ends = [nn.LayerNorm(C, dtype=torch.float64) if order == "pre" else None for _ in range(2)]
    their_encoder: Any = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(C, H, F, **given), 2, ends[0], enable_nested_tensor=False
    )
    their_decoder: Any = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(C, H, F, **given), 2, ends[1]
    )
    stir(their_encoder).train(training)
    stir(their_decoder).train(training)
    config = replace(CONFIG, order=order, activation="gelu")
    encoder = Encoder(config, 2, dtype=torch.float64).train(training)
    decoder = Decoder(replace(config, cross_attention=True), 2, dtype=torch.float64).train(training)
    for stack, other in ((encoder, their_encoder), (decoder, their_decoder)):
        for block, layer in zip(stack.layers, other.layers, strict=True):
            carry(layer.self_attn, block.self_attn)
            norms = [layer.norm1, layer.norm2]
            pairs = [(layer.linear1, block.ffn.up_proj), (layer.linear2, block.ffn.down_proj)]
            if stack is decoder:
                carry(layer.multihead_attn, block.cross_attn)
                pairs.append((norms.pop(), block.cross_attn_norm))
                norms.append(layer.norm3)
            pairs += [(norms[0], block.self_attn_norm), (norms[1], block.ffn_norm)]
            for old, new in pairs:
                new.load_state_dict(old.state_dict())
        if stack.norm is not None:
            stack.norm.load_state_dict(other.norm.state_dict())
    source, target = draw(B, S, C).requires_grad_(), draw().requires_grad_()
    lengths = torch.tensor([11, 3, 5])
    padding = torch.arange(S) >= lengths[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    expected = their_decoder(
        target,
        their_encoder(source, src_key_padding_mask=padding),
        tgt_mask=causal,
        memory_key_padding_mask=padding,
        tgt_is_causal=True,
    )
    memory = encoder(source, mask=Lengths(lengths))
    out = decoder(target, memory, memory_mask=Lengths(lengths))
    torch.testing.assert_close(out, expected)
    for one, other in zip(
        torch.autograd.grad(out.square().sum(), (source, target)),
        torch.autograd.grad(expected.square().sum(), (source, target)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_stack_ends_with_a_norm_except_in_post_order() -> None:
    x = draw()
    for order in ("pre", "parallel", "post"):
        config = replace(LLAMA, order=order)  # type: ignore[arg-type]
        for stack in (Encoder(config, 3), Decoder(config, 3)):
            stir(stack.double())
            assert (stack.norm is None) == (order == "post")
            y = x
            for block in stack.layers:
                y = block(y)
            torch.testing.assert_close(stack(x), y if stack.norm is None else stack.norm(y))


# What a config says reaches the layers


def test_every_field_reaches_its_layer() -> None:
    config = replace(
        LLAMA,
        cross_attention=True,
        memory_dim=17,
        attention_bias=ProjectionBias(q=False),
        window=(3, 0),
        alibi=True,
        softcap=7.0,
        scale=0.3,
        sinks=True,
        qk_norm="layer",
        qk_norm_eps=0.7,
        norm_eps=0.9,
        dropout=0.1,
        attention_dropout=0.2,
        ffn_dropout=0.3,
        backend="reference",
    )
    block = DecoderBlock(config, device="meta", dtype=torch.bfloat16)
    own, cross = block.self_attn, block.cross_attn
    assert (own.causal, own.window, own.alibi) == (True, (3, 0), True)
    assert own.rotary.config is config.rotary
    assert (cross.causal, cross.window, cross.alibi, cross.rotary) == (False, None, False, None)
    assert (own.kv_dim, cross.kv_dim) == (C, 17)
    for layer in (own, cross):
        assert (layer.n_heads, layer.n_kv_heads, layer.head_dim) == (H, 1, 4)
        assert (layer.scale, layer.softcap, layer.dropout) == (0.3, 7.0, 0.2)
        assert layer.backend == "reference" and layer.sinks is not None
        assert layer.q_proj.bias is None and layer.k_proj.bias is not None
        assert isinstance(layer.q_norm, nn.LayerNorm) and layer.q_norm.eps == 0.7
    assert (block.dropout.p, block.ffn.dropout.p) == (0.1, 0.3)
    for norm in (block.self_attn_norm, block.cross_attn_norm, block.ffn_norm):
        assert isinstance(norm, nn.RMSNorm) and norm.eps == 0.9
    assert block.ffn.gate_proj is not None and block.ffn.up_proj.bias is None
    assert isinstance(block.ffn.activation, nn.SiLU)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in block.parameters())
    assert not EncoderBlock(LLAMA, device="meta").self_attn.causal
    plain = EncoderBlock(replace(CONFIG, norm_bias=False), device="meta")
    assert plain.ffn_norm.bias is None and plain.ffn.up_proj.bias is not None


def test_residual_dropout_falls_on_each_answer_in_training_only() -> None:
    for order in ("pre", "parallel"):
        block = DecoderBlock(replace(CONFIG, order=order, dropout=1.0), dtype=torch.float64)  # type: ignore[arg-type]
        x = draw()
        assert torch.equal(block(x), x)
        assert not torch.equal(block.eval()(x), x)


def test_a_decoder_looks_back_and_an_encoder_both_ways() -> None:
    x = draw()
    other = x.clone()
    other[:, 4] += 1.0
    for kind, reached in ((Decoder, [False] * 4 + [True] * 3), (Encoder, [True] * T)):
        stack = kind(LLAMA, 2, dtype=torch.float64)
        changed = (stack(x) != stack(other)).any(-1).any(0)
        assert changed.tolist() == reached


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_padding_changes_nobodys_output(kind: Any, side: str) -> None:
    """Told by negative positions, or, where order in memory is enough, by a mask."""
    stack = stir(kind(replace(LLAMA, alibi=True), 2, dtype=torch.float64)).eval()
    x = draw()
    real = torch.arange(T) < LENGTHS[:, None]
    real = real if side == "right" else real.flip(1)
    positions = (real.cumsum(1) - 1).masked_fill(~real, -1)
    told = stack(x, positions=positions)
    masked = stack(x, mask=Lengths(LENGTHS, side=side))
    for b in range(B):
        alone = stack(x[b][real[b]][None])[0]
        torch.testing.assert_close(told[b][real[b]], alone)
        # Rotary knows distances only, but its float32 phases differ with the shift.
        torch.testing.assert_close(masked[b][real[b]], alone, atol=1e-5, rtol=1e-5)


def test_positions_and_phases_are_made_once_for_the_whole_stack() -> None:
    stack = Decoder(LLAMA, 3).eval()
    made: list[int] = []
    for block in stack.layers:
        rotary = block.self_attn.rotary
        original = rotary.phases
        rotary.phases = lambda *a, original=original, **k: made.append(1) or original(*a, **k)
    x = draw(dtype=torch.float32)
    with torch.no_grad():
        stack(x)
        stack(x, positions=2 * torch.arange(T))
        cache = stack.make_cache()
        stack(x, cache=cache)
        stack(x[:, :1], cache=cache)
    assert len(made) == 4


# Caches


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kind", ["growing", "fixed", "windowed"])
def test_a_decoder_steps_through_a_padded_batch_as_it_would_alone(kind: str, cross: bool) -> None:
    make = {
        "growing": KVCache.growing,
        "fixed": lambda: KVCache.fixed(11),
        "windowed": lambda: KVCache.windowed(3),
    }[kind]
    config = replace(LLAMA, cross_attention=cross, window=(3, 0))
    stack = stir(Decoder(config, 2)).eval()
    x, steps = draw(dtype=torch.float32), draw(B, 4, C, dtype=torch.float32)
    given = {"memory": draw(B, S, C, dtype=torch.float32)} if cross else {}
    rule = {"memory_mask": Lengths(torch.tensor([11, 3, 5]))} if cross else {}
    positions = (torch.arange(T) - (T - LENGTHS)[:, None]).clamp(min=-1)
    cache = stack.make_cache(make)
    with torch.no_grad():
        out = [stack(x, positions=positions, cache=cache, **given, **rule)[:, -1:]]
        for t in range(4):
            out.append(stack(steps[:, t : t + 1], cache=cache, **rule))
        got = torch.cat(out, 1)
        for b in range(B):
            text = torch.cat((x[b, T - LENGTHS[b] :], steps[b]))[None]
            alone_rule = (
                {"memory_mask": Lengths(torch.tensor([11, 3, 5])[b : b + 1])} if cross else {}
            )
            alone = stack(text, **{k: v[b : b + 1] for k, v in given.items()}, **alone_rule)
            torch.testing.assert_close(got[b], alone[0, -5:], atol=2e-5, rtol=1e-5)
    assert cache.length.tolist() == (LENGTHS + 4).tolist()


def test_bfloat16_steps_stay_within_the_stated_bound_of_one_pass() -> None:
    """Through two blocks and a norm: four roundings of the largest output."""
    stack = Decoder(LLAMA, 2, dtype=torch.bfloat16).eval()
    x = draw(dtype=torch.bfloat16)
    with torch.no_grad():
        full, cache = stack(x), stack.make_cache()
        out = torch.cat([stack(x[:, t : t + 1], cache=cache) for t in range(T)], 1)
    bound = 4 * torch.finfo(torch.bfloat16).eps * full.abs().max()
    assert (out - full).abs().max() <= bound


def test_a_shared_relative_table_steps_through_a_cache() -> None:
    """As in T5: one learned table for all layers, no scale, no positions of its own."""
    stack = stir(Decoder(replace(CONFIG, norm="rms", scale=1.0), 2, dtype=torch.float64)).eval()
    bias = RelativeTable(draw(8, H), bidirectional=False, max_distance=5)
    x, cache = draw(), stack.make_cache()
    with torch.no_grad():
        steps = torch.cat([stack(x[:, t : t + 1], bias=bias, cache=cache) for t in range(T)], 1)
        torch.testing.assert_close(steps, stack(x, bias=bias))


def test_beams_are_reordered_through_all_layers_and_the_memory() -> None:
    stack = stir(Decoder(replace(LLAMA, cross_attention=True), 2, dtype=torch.float64)).eval()
    x, memory, step = draw(), draw(B, S, C), draw(B, 1, C)
    index = torch.tensor([2, 2, 0])
    with torch.no_grad():
        cache = stack.make_cache()
        stack(x, memory, cache=cache)
        cache.reorder(index)
        out = stack(step, cache=cache)
        whole = stack(torch.cat((x[index], step), 1), memory[index])
    torch.testing.assert_close(out, whole[:, -1:])


# The ways a stack is used


def test_a_module_as_activation_survives_stacking_copying_and_saving() -> None:
    """Each block has its own copy, so that parameters are not shared, and files can hold them."""
    bend = nn.PReLU(init=0.3, dtype=torch.float64)
    stack = Encoder(replace(CONFIG, activation=bend), 2, dtype=torch.float64)
    first, second = (block.ffn.activation for block in stack.layers)
    assert isinstance(first, nn.PReLU) and first is not second and first is not bend
    nn.init.normal_(first.weight)
    x = draw()
    twin = Encoder(replace(CONFIG, activation=bend), 2, dtype=torch.float64)
    assert not torch.allclose(twin(x), stack(x))
    twin.load_state_dict(load(save(stack.state_dict())))
    assert torch.equal(twin(x), stack(x))
    assert torch.equal(copy.deepcopy(stack)(x), stack(x))


def test_built_on_meta_and_loaded_from_safetensors_it_is_the_same() -> None:
    config = replace(LLAMA, cross_attention=True, sinks=True, alibi=True)
    stack = stir(Decoder(config, 2, dtype=torch.float64)).eval()
    held = save(stack.state_dict())
    with torch.device("meta"):
        empty = Decoder(config, 2)
    empty.load_state_dict(load(held), assign=True)
    x, memory = draw(), draw(B, S, C)
    assert torch.equal(empty.eval()(x, memory), stack(x, memory))
    assert not list(stack.buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type_stays_and_is_close_to_float64(dtype: torch.dtype) -> None:
    stack = Decoder(LLAMA, 2, dtype=dtype)
    exact = copy.deepcopy(stack).double()
    x = draw().to(dtype)
    out = stack(x)
    assert out.dtype == dtype
    bound = 16 * torch.finfo(dtype).eps * out.abs().max()
    assert (out.double() - exact(x.double())).abs().max() < bound


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_autocast_is_close_to_float32(norm: Any) -> None:
    stack = Encoder(replace(LLAMA, norm=norm), 2)
    x = draw(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = stack(x)
    torch.testing.assert_close(out.float(), stack(x), atol=0.1, rtol=0.05)


def test_checkpointed_blocks_give_the_same_gradients_with_dropout() -> None:
    config = replace(LLAMA, dropout=0.2, attention_dropout=0.2, ffn_dropout=0.2)
    block, x = DecoderBlock(config, dtype=torch.float64), draw().requires_grad_()
    answers = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        torch.manual_seed(7)
        out = run(x)
        answers.append((out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_a_stack_with_a_windowed_cache_compiles_as_one_graph() -> None:
    stack, x = Decoder(replace(CONFIG, window=(2, 0), alibi=True), 1, dtype=torch.float64), draw()
    graphs: list[object] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(stack, fullgraph=True, backend=count)
    cache = stack.make_cache(lambda: KVCache.windowed(2))
    with torch.no_grad():
        out = [compiled(x[:, :4], cache=cache)]
        out += [compiled(x[:, t : t + 1], cache=cache) for t in range(4, T)]
        torch.testing.assert_close(torch.cat(out, 1), stack(x))
    assert len(graphs) == 2  # the prompt, and the step


def test_train_and_eval_give_the_same_and_every_layer_can_be_observed() -> None:
    stack, x = Encoder(LLAMA, 2, dtype=torch.float64), draw()
    with observing(stack, Wants(received=True)) as seen:
        out = stack.train()(x)
    assert torch.equal(out, stack.eval()(x))
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(
        seen["layers.1.self_attn"].received.total.sum(-1), torch.full((B, H), float(T)).double()
    )


# Doors


def refused(match: str, **given: Any) -> None:
    with pytest.raises(ValueError, match=match):
        replace(CONFIG, **given)


def test_a_config_that_makes_no_sense_is_refused_when_it_is_made() -> None:
    refused("dim=15 is not divisible by n_heads=7", n_heads=7)
    refused("n_heads=5 is not divisible by n_kv_heads=3", n_kv_heads=3)
    refused("ffn_dim is 0", ffn_dim=0)
    refused("order is 'sideways'", order="sideways")
    refused("shared_norm is for parallel order", shared_norm=True)
    refused(
        "normed_residual is for pre order; the order is post", normed_residual=True, order="post"
    )
    refused("norm is 'batch'", norm="batch")
    refused("RMSNorm has no bias", norm="rms", norm_bias=True)
    refused("activation is 'swish'", activation="swish")
    refused("qk_norm is 'l2'", qk_norm="l2")
    refused("rotary was configured for head_dim=4", rotary=RotaryConfig(head_dim=4))
    refused("window is 5; expected", window=5)
    refused("softcap must be", softcap=-1.0)
    refused("backend is 'fast'", backend="fast")
    refused("ffn_dropout must lie", ffn_dropout=2.0)
    refused("cross_attention is for pre or post", order="parallel", cross_attention=True)
    refused("memory_dim is set, but cross_attention is not", memory_dim=7)


def test_a_call_that_makes_no_sense_is_refused_in_words() -> None:
    plain, cross = Decoder(CONFIG, 2), Decoder(replace(CONFIG, cross_attention=True), 2)
    x, memory = draw(dtype=torch.float32), draw(B, S, C, dtype=torch.float32)
    with pytest.raises(ValueError, match="a memory or memory_mask was given to a decoder without"):
        plain(x, memory)
    with pytest.raises(ValueError, match="needs a memory"):
        cross(x)
    with pytest.raises(ValueError, match="needs a memory"):
        cross(x, cache=cross.make_cache())
    with pytest.raises(ValueError, match="the cache is for 3 blocks; the decoder has 2"):
        plain(x, cache=Decoder(CONFIG, 3).make_cache())
    with pytest.raises(ValueError, match="made without cross-attention"):
        cross(x, memory, cache=plain.make_cache())
    with pytest.raises(ValueError, match=r"x must have 3 axes \(B, T, C\)"):
        plain(x[0])
    with pytest.raises(ValueError, match="an encoder has no cross-attention"):
        Encoder(replace(CONFIG, cross_attention=True), 1)
    with pytest.raises(ValueError, match="n_layers is 0"):
        Encoder(CONFIG, 0)
    assert isinstance(plain.layers[0].ffn, FeedForward)
