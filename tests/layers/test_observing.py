"""Layers hand out attention inside `with observing(...)`, and are untouched by it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.layers import (
    BlockConfig,
    Decoder,
    KVCache,
    MultiHeadAttention,
    Observable,
    observing,
)
from regard.ops import Wants

B, T, S, C = 3, 7, 11, 10
CONFIG = BlockConfig(
    dim=C, n_heads=5, ffn_dim=13, cross_attention=True, dropout=0.3, attention_dropout=0.2
)


def make() -> tuple[Decoder, Tensor, Tensor]:
    return Decoder(CONFIG, 2), torch.randn(B, T, C), torch.randn(B, S, C)


@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_bit_identical_with_and_without(training: bool) -> None:
    model, x, memory = make()
    model.train(training)
    answers = []
    for observed in (False, True):
        torch.manual_seed(5)
        if observed:
            with observing(model, Wants(weights=True, entropy=True, top=3)):
                out = model(x, memory)
        else:
            out = model(x, memory)
        answers.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_every_layer_is_found_under_its_dotted_name() -> None:
    model, x, memory = make()
    with observing(model.eval(), Wants(weights=True)) as seen:
        model(x, memory)
    assert list(seen) == [f"layers.{n}.{kind}_attn" for n in (0, 1) for kind in ("self", "cross")]
    assert seen["layers.0.self_attn"].weights.shape == (B, 5, T, T)
    assert seen["layers.1.cross_attn"].weights.shape == (B, 5, T, S)
    for answer in seen.values():
        assert answer.output is None
        torch.testing.assert_close(answer.weights.sum(-1), torch.ones(B, 5, T))


def test_what_is_seen_is_what_the_layer_used() -> None:
    """Weights times values, joined and projected, is the layer's own output."""
    layer = MultiHeadAttention(C, 5, causal=True, dtype=torch.float64)
    x = torch.randn(B, T, C, dtype=torch.float64)
    with observing(layer, Wants(weights=True)) as seen:
        out = layer(x)
    v_bhtd = layer.v_proj(x).view(B, T, 5, 2).transpose(1, 2)
    again = layer.out_proj((seen[""].weights @ v_bhtd).transpose(1, 2).reshape(B, T, C))
    torch.testing.assert_close(again, out)


def test_calls_keeps_every_call_and_the_name_gives_the_last() -> None:
    model, x, memory = make()
    cache = model.eval().make_cache(KVCache.growing)
    with torch.no_grad(), observing(model, Wants(weights=True)) as seen:
        model(x[:, :4], memory, cache=cache)
        model(x[:, 4:5], cache=cache)
        assert len(seen) == 4  # readable inside the block too
    shapes = [tuple(call.weights.shape) for call in seen.calls["layers.1.self_attn"]]
    assert shapes == [(B, 5, 4, 4), (B, 5, 1, 5)]
    assert seen["layers.1.self_attn"] is seen.calls["layers.1.self_attn"][-1]


def test_layers_are_as_before_after_the_block_and_after_an_error() -> None:
    model, x, memory = make()
    layer = model.layers[0].self_attn
    with observing(model, Wants(lse=True)) as outer:
        with pytest.raises(RuntimeError, match="stop"), observing(model, Wants(entropy=True)):
            raise RuntimeError("stop")
        model(x, memory)
    assert outer["layers.0.self_attn"].lse is not None
    assert outer["layers.0.self_attn"].entropy is None
    model(x, memory)
    assert len(outer.calls["layers.0.self_attn"]) == 1
    assert layer.wants is None and "wants" not in vars(layer) and "seen" not in vars(layer)
    copy.deepcopy(model)  # nothing with a graph has stayed in the model


def test_a_layer_used_twice_in_the_tree_is_found_once() -> None:
    layer = MultiHeadAttention(C, 5)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with observing(model, Wants(lse=True)) as seen:
        model(torch.randn(B, T, C))
    assert list(seen) == ["0"] and len(seen.calls["0"]) == 2


def test_an_inner_block_asks_for_its_own_and_then_the_outer_one_goes_on() -> None:
    layer = MultiHeadAttention(C, 5)
    with observing(layer, Wants(peak=True)) as outer:
        with observing(layer, Wants(entropy=True)) as inner:
            layer(torch.randn(B, T, C))
        layer(torch.randn(B, T, C))
    assert len(outer.calls[""]) == 1 and len(inner.calls[""]) == 1
    assert outer[""].peak.key.shape == (B, 5, T) and outer[""].entropy is None
    assert inner[""].entropy.shape == (B, 5, T) and inner[""].peak is None


def test_gradients_flow_through_what_was_seen() -> None:
    layer = MultiHeadAttention(C, 5)
    with observing(layer, Wants(entropy=True)) as seen:
        layer(torch.randn(B, T, C))
    seen[""].entropy.sum().backward()
    assert layer.q_proj.weight.grad.abs().sum() > 0
    assert layer.v_proj.weight.grad is None


def test_a_model_without_our_layers_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.MultiheadAttention(6, 3))
    with pytest.raises(ValueError, match="Sequential has no attention layer of regard"):
        observing(model, Wants(lse=True)).__enter__()
    with pytest.raises(TypeError, match="wants must be a Wants"):
        observing(MultiHeadAttention(6, 3), {"lse": True}).__enter__()  # type: ignore[arg-type]


def test_a_layer_that_was_not_called_says_so() -> None:
    model, _, _ = make()
    with observing(model, Wants(lse=True)) as seen:
        pass
    assert len(seen) == 0 and "layers.0.self_attn" not in seen
    with pytest.raises(KeyError, match="has not been called"):
        seen["layers.0.self_attn"]
    with pytest.raises(KeyError, match="no attention layer is named 'head'"):
        seen["head"]


def test_a_mixin_subclass_is_observable() -> None:
    class Mine(Observable, nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            heads = super().forward(x)[:, None]
            return self._attention(heads, heads, heads, scale=1.0)[:, 0]

    model = nn.Sequential(Mine(C, C, bias=False))
    with observing(model, Wants(weights=True)) as seen:
        model(torch.randn(B, T, C))
    assert seen["0"].weights.shape == (B, 1, T, T)


def test_a_compiled_model_is_observed_under_its_plain_names() -> None:
    layer = nn.Sequential(MultiHeadAttention(6, 3))
    x = torch.randn(B, 5, 6)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    before = compiled(x)
    with observing(compiled, Wants(weights=True)) as seen:
        during = compiled(x)
    assert torch.equal(before, during) and torch.equal(before, compiled(x))
    assert list(seen) == ["0"] and len(seen.calls["0"]) == 1


def test_a_compiled_model_is_compiled_once_for_all_blocks() -> None:
    layer, graphs = nn.Sequential(MultiHeadAttention(6, 3)), []

    def count(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=count)
    compiled(torch.randn(B, 5, 6))
    for _ in range(12):
        with observing(compiled, Wants(lse=True)) as seen:
            compiled(torch.randn(B, 5, 6))
        assert len(seen.calls["0"]) == 1
    assert len(graphs) == 2, "one without a hook, one with it"
