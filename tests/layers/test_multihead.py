"""Multi-head attention as a layer: the textbook's numbers, each option against the plain formula,
and the ways a layer is used (types, copies, files, compile).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import plain
from rounding import assert_within, bound_error, bound_sum
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.layers import CrossCache, KVCache, MultiHeadAttention, ProjectionBias
from regard.ops import (
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Wants,
    Window,
)
from regard.positions import RotaryConfig, alibi_slopes, count_positions

B, T, S, C, H, D = 3, 7, 11, 15, 5, 3
ROTARY = RotaryConfig(head_dim=4, base=100.0, pairing="neighbours")


def make(**options: Any) -> MultiHeadAttention:
    given = {"dtype": torch.float64, **options}
    layer = MultiHeadAttention(C, H, **given)
    if layer.sinks is not None:
        nn.init.normal_(layer.sinks)
    return layer.eval()


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (B, T, C)), dtype=dtype)


def split(x: Tensor, head_dim: int) -> Tensor:
    """(B, T, H·D) to (B, H, T, D), head after head along the last axis."""
    return torch.stack(x.split(head_dim, -1), 1)


def join(heads: Tensor) -> Tensor:
    return torch.cat(list(heads.unbind(1)), -1)


def turn(x: Tensor, positions: Tensor, base: float, kind: torch.dtype) -> Tensor:
    """Rotary by complex numbers of a `kind`, neighbouring pairs; positions (T,) or (B, T)."""
    width = x.shape[-1]
    speed = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = positions[..., None].double() * speed
    angle = angle[:, None] if angle.dim() == 3 else angle
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    phases = torch.polar(torch.ones_like(angle), angle).to(kind)
    return torch.view_as_real(turned * phases).flatten(-2)


def by_formula(
    layer: MultiHeadAttention, x: Tensor, memory: Tensor | None = None, **rule: Any
) -> tuple[Tensor, Tensor]:
    """The layer's output and weights from its weights, by the plain formula."""
    memory = x if memory is None else memory
    q = split(layer.q_proj(x), layer.head_dim)
    k, v = (split(proj(memory), layer.head_dim) for proj in (layer.k_proj, layer.v_proj))
    heads, weights = plain(q, k, v, **rule)
    return layer.out_proj(join(heads)), weights


# The textbook


def test_batch_32_length_20_width_512_with_8_heads() -> None:
    layer = MultiHeadAttention(512, 8)
    seen = layer.observe(torch.randn(32, 20, 512), wants=Wants(weights=True))
    assert seen.weights.shape == (32, 8, 20, 20) and seen.output.shape == (32, 20, 512)


def test_batch_2_length_5_width_64_with_8_heads() -> None:
    layer = MultiHeadAttention(64, 8)
    seen = layer.observe(torch.randn(2, 5, 64), wants=Wants(weights=True))
    assert seen.output.shape == (2, 5, 64) and seen.weights.shape == (2, 8, 5, 5)


def test_768_with_12_heads_has_width_64() -> None:
    assert MultiHeadAttention(768, 12, device="meta").head_dim == 64


def test_parameters_do_not_depend_on_the_number_of_heads() -> None:
    counts = {
        sum(p.numel() for p in MultiHeadAttention(60, n, device="meta").parameters())
        for n in (1, 3, 5, 60)
    }
    assert counts == {4 * 60 * 60 + 4 * 60}


def test_a_width_not_divisible_by_the_heads_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="dim=100 is not divisible by n_heads=7"):
        MultiHeadAttention(100, 7)
    assert MultiHeadAttention(100, 7, head_dim=13).q_proj.out_features == 91


def test_the_three_words_of_the_textbook() -> None:
    """Q = K = V = x: one head of width 4, first row 0.3963, 0.3245, 0.2793."""
    x = torch.tensor([[[1.0, 0.5, 0.2, 0.1], [0.3, 1.0, 0.4, 0.2], [0.2, 0.3, 1.0, 0.5]]])
    layer = MultiHeadAttention(4, 1, bias=False)
    with torch.no_grad():
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
            proj.weight.copy_(torch.eye(4))
    seen = layer.observe(x, wants=Wants(weights=True))
    row = torch.tensor([0.3963, 0.3245, 0.2793])
    torch.testing.assert_close(seen.weights[0, 0, 0], row, atol=5e-5, rtol=0)
    torch.testing.assert_close(seen.output[0, 0], row @ x[0], atol=2e-4, rtol=0)


def test_self_attention_without_positions_is_permutation_equivariant() -> None:
    layer, x = make(), draw()
    order = torch.randperm(T)
    out = layer(x)
    torch.testing.assert_close(layer(x[:, order]), out[:, order])
    assert not torch.allclose(layer(x[:, order]), out)  # equivariant, not invariant


def test_heads_attend_over_tokens_and_not_over_heads() -> None:
    """A change in one token reaches only rows that look at it; heads are cut from the last axis."""
    layer, x = make(causal=True), draw()
    other = x.clone()
    other[:, 4] += 1.0
    changed = (layer(x) != layer(other)).any(-1)
    assert changed.tolist() == [[False] * 4 + [True] * 3] * B


@pytest.mark.parametrize("training", [True, False])
def test_equals_torchs_layer_with_the_same_weights(training: bool) -> None:
    theirs = nn.MultiheadAttention(C, H, batch_first=True, dtype=torch.float64).train(training)
    nn.init.normal_(theirs.in_proj_bias)
    ours = make().train(training)
    with torch.no_grad():
        for name, weight, bias in zip(
            "qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
        ):
            getattr(ours, f"{name}_proj").weight.copy_(weight)
            getattr(ours, f"{name}_proj").bias.copy_(bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x, memory = draw(), draw(B, S, C)
    for source in (x, memory):
        out, weights = theirs(x, source, source, average_attn_weights=False)
        seen = ours.observe(x, None if source is x else memory, wants=Wants(weights=True))
        torch.testing.assert_close(seen.output, out)
        torch.testing.assert_close(seen.weights, weights)


# Each option against the plain formula

LENGTHS = torch.tensor([7, 3, 5])
BAND = torch.ones(T, T, dtype=torch.bool).tril().triu(-2)
COIN = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(3)) < 0.7
FAR = (torch.arange(T)[:, None] - torch.arange(T)).abs()

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "causal": ({"causal": True}, {}, {"seen": torch.ones(T, T, dtype=torch.bool).tril()}),
    "window": ({"window": (2, 0)}, {}, {"seen": BAND}),
    "window both ways": ({"window": (None, 1)}, {}, {"seen": FAR.new_ones(T, T).bool().tril(1)}),
    "causal window": ({"window": (2, 3), "causal": True}, {}, {"seen": BAND}),
    "causal and padding": (
        {"causal": True},
        {"mask": Lengths(LENGTHS)},
        {
            "seen": (
                FAR.new_ones(T, T).bool().tril() & (torch.arange(T) < LENGTHS.view(-1, 1, 1, 1))
            )
        },
    ),
    "causal and a bool tensor": (
        {"causal": True},
        {"mask": COIN},
        {"seen": COIN & torch.ones(T, T, dtype=torch.bool).tril()},
    ),
    "documents": (
        {},
        {"mask": Documents(torch.arange(T) // 3)},
        {"seen": torch.arange(T)[:, None] // 3 == torch.arange(T) // 3},
    ),
    "alibi": ({"alibi": True}, {}, {"bias": -alibi_slopes(H).double().view(-1, 1, 1) * FAR}),
    "alibi and a bias": (
        {"alibi": True},
        {"bias": COIN.double()},
        {"bias": COIN.double() - alibi_slopes(H).double().view(-1, 1, 1) * FAR},
    ),
    "scale": ({"scale": 0.9}, {}, {"scale": 0.9}),
    "softcap": ({"softcap": 0.6}, {}, {"softcap": 0.6}),
    "one key head": ({"n_kv_heads": 1}, {}, {}),
    "free head width": ({"head_dim": 13}, {}, {}),
}


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_means_what_the_formula_says(name: str, backend: str) -> None:
    options, call, rule = OPTIONS[name]
    layer, x = make(**options, backend=backend), draw()
    out, weights = by_formula(layer, x, **rule)
    seen = layer.observe(x, **call, wants=Wants(weights=True))
    torch.testing.assert_close(layer(x, **call), out)
    torch.testing.assert_close(seen.weights, weights)
    assert torch.equal(seen.output, layer(x, **call))


def test_sinks_take_their_share_of_each_row() -> None:
    layer, x = make(sinks=True), draw()
    out, weights = by_formula(layer, x, sinks=layer.sinks)
    torch.testing.assert_close(layer(x), out)
    assert (weights.sum(-1) < 1).all()
    layer(x).sum().backward()
    assert layer.sinks.grad.abs().min() > 0


def test_sinks_start_at_zero_also_after_to_empty() -> None:
    layer = MultiHeadAttention(C, H, sinks=True, device="meta").to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert torch.equal(layer.sinks, torch.zeros(H))
    assert layer(draw(dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize("group", [3, 6])
def test_neighbouring_query_heads_share_a_key_head(group: int) -> None:
    """The same as a layer in which each key head was repeated for its neighbours."""
    grouped = MultiHeadAttention(C, 6, head_dim=5, n_kv_heads=6 // group, dtype=torch.float64)
    whole = MultiHeadAttention(C, 6, head_dim=5, dtype=torch.float64)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        heads = state[name].unflatten(0, (6 // group, 5))
        state[name] = heads.repeat_interleave(group, 0).flatten(0, 1)
    whole.load_state_dict(state)
    x = draw()
    torch.testing.assert_close(grouped(x), whole(x))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_query_and_key_norms_come_per_head_and_before_rotary(kind: Any) -> None:
    """Neighbours that turn keep their length, so a norm before and after would agree but for its
    learned weights; these are drawn at random.
    """
    layer = make(head_dim=4, qk_norm=kind, qk_norm_eps=0.3, rotary=ROTARY)
    for norm in (layer.q_norm, layer.k_norm):
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    x = draw()

    def normed(heads: Tensor, norm: nn.Module) -> Tensor:
        if kind == "layer":
            heads = heads - heads.mean(-1, keepdim=True)
        heads = heads / (heads.square().mean(-1, keepdim=True) + 0.3).sqrt()
        return heads * norm.weight + (norm.bias if kind == "layer" else 0.0)

    at = torch.arange(T)
    answers = []
    for phases in (torch.complex64, torch.complex128):  # the layer's only float32
        q = turn(normed(split(layer.q_proj(x), 4), layer.q_norm), at, 100.0, phases)
        k = turn(normed(split(layer.k_proj(x), 4), layer.k_norm), at, 100.0, phases)
        heads, _ = plain(q, k, split(layer.v_proj(x), 4))
        answers.append(layer.out_proj(join(heads)))
    rounded, exact = answers
    assert_within(layer(x), exact, bound_error(rounded, exact, n_terms=1))


def test_biases_are_those_asked_for() -> None:
    layer = MultiHeadAttention(C, H, bias=ProjectionBias(k=False, out=False), device="meta")
    assert [name for name in layer.state_dict() if "bias" in name] == ["q_proj.bias", "v_proj.bias"]
    none = MultiHeadAttention(C, H, bias=False, device="meta")
    assert [name for name in none.state_dict() if "bias" in name] == []


# Cross-attention


def test_cross_attention_takes_another_length_and_width() -> None:
    layer, x, memory = make(kv_dim=17, n_kv_heads=1), draw(), draw(B, S, 17)
    out, weights = by_formula(layer, x, memory)
    seen = layer.observe(x, memory, wants=Wants(weights=True))
    assert seen.weights.shape == (B, H, T, S)
    torch.testing.assert_close(seen.output, out)
    torch.testing.assert_close(seen.weights, weights)
    real = torch.tensor([11, 2, 5])
    out, _ = by_formula(layer, x, memory, seen=torch.arange(S) < real.view(-1, 1, 1, 1))
    torch.testing.assert_close(layer(x, memory, mask=Lengths(real)), out)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"alibi": True}, {"window": (3, 3)}, {"head_dim": 4, "rotary": ROTARY}],
)
def test_a_layer_that_speaks_of_positions_refuses_a_memory(options: dict[str, Any]) -> None:
    name = list(options)[-1]
    with pytest.raises(ValueError, match=f"this layer has {name}, which need positions"):
        make(**options)(draw(), draw(B, S, C))


# Positions


def test_rotary_turns_queries_and_keys_by_their_positions() -> None:
    layer, x = make(head_dim=4, rotary=ROTARY, causal=True), draw()
    for at in (torch.arange(T), 2 * torch.arange(T) + torch.tensor([[0], [5], [17]])):
        answers = []
        for phases in (torch.complex64, torch.complex128):  # the layer's only float32
            q, k = (turn(split(p(x), 4), at, 100.0, phases) for p in (layer.q_proj, layer.k_proj))
            seen = FAR.new_ones(T, T).bool().tril()
            heads, _ = plain(q, k, split(layer.v_proj(x), 4), seen=seen)
            answers.append(layer.out_proj(join(heads)))
        rounded, exact = answers
        assert_within(layer(x, positions=at), exact, bound_error(rounded, exact, n_terms=1))
    assert torch.equal(layer(x), layer(x, positions=torch.arange(T)))


def test_partial_rotary_turns_only_its_part() -> None:
    """With the turning part of every query at zero, positions change nothing."""
    config = RotaryConfig(head_dim=6, rotary_dim=2)
    layer, x = make(head_dim=6, rotary=config), draw()
    at = torch.tensor([3, 1, 41, 5, 9, 2, 0])
    assert not torch.allclose(layer(x), layer(x, positions=at))
    with torch.no_grad():
        for rows in (slice(6 * h, 6 * h + 2) for h in range(H)):
            layer.q_proj.weight[rows] = 0.0
            layer.q_proj.bias[rows] = 0.0
    torch.testing.assert_close(layer(x), layer(x, positions=at))


def test_rotary_phases_are_float32_after_bfloat16_and_inside_autocast() -> None:
    """At position 1,000,003 bfloat16 phases would be noise; relative positions must still hold."""
    layer = MultiHeadAttention(C, H, head_dim=4, rotary=ROTARY, causal=True).eval()
    x, far = draw(dtype=torch.float32), torch.arange(T) + 1_000_003
    near = layer(x)
    torch.testing.assert_close(layer(x, positions=far), near, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x, positions=far).float(), near, atol=0.02, rtol=0.02)
    half = copy.deepcopy(layer).bfloat16()
    out = half(x.bfloat16(), positions=far).float()
    torch.testing.assert_close(out, near, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window": (2, 0)}, {"alibi": True, "window": (2, 1)}],
)
def test_shuffled_tokens_with_their_positions_give_shuffled_outputs(options: Any) -> None:
    """Causal, window, ALiBi and rotary all follow the positions, not the order in memory."""
    layer, x = make(head_dim=4, rotary=ROTARY, **options), draw()
    order = torch.stack([torch.randperm(T) for _ in range(B)])
    rows = torch.arange(B)[:, None]
    torch.testing.assert_close(layer(x[rows, order], positions=order), layer(x)[rows, order])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_negative_position_is_padding_which_nobody_sees(side: str, causal: bool) -> None:
    """Each row gives what it gives alone, whatever the padding holds, NaN too."""
    layer = make(head_dim=4, rotary=ROTARY, alibi=True, causal=causal)
    x = draw()
    real = torch.arange(T) < LENGTHS[:, None]
    real = real if side == "right" else real.flip(1)
    positions = count_positions(real).masked_fill(~real, -1)
    out = layer(x.masked_fill(~real[..., None], math.nan), positions=positions)
    for b in range(B):
        torch.testing.assert_close(out[b][real[b]], layer(x[b][real[b]][None])[0])


def test_no_mask_of_the_caller_brings_padding_back() -> None:
    layer, x = make(), draw()
    positions = torch.arange(T).masked_fill(torch.arange(T) == 3, -1)
    everything = ~(Dense(torch.zeros(T, T, dtype=torch.bool)) & Causal())
    assert torch.equal(layer(x, mask=everything), layer(x))
    seen = layer.observe(x, positions=positions, mask=everything, wants=Wants(weights=True))
    assert (seen.weights[..., 3] == 0).all() and (seen.weights[..., 4] > 0).all()


def test_masks_of_the_caller_follow_the_positions_too() -> None:
    layer, x = make(), draw()
    order = torch.randperm(T)
    coin = Dense(COIN)
    for mask, moved in (
        (Causal() | Prefix(3), Causal() | Prefix(3)),
        (~Window(1, 1) & coin, ~Window(1, 1) & Dense(COIN[..., order, :][..., order])),
        (coin | Window(2, 0), Dense(COIN[..., order, :][..., order]) | Window(2, 0)),
        (~(coin & Causal()), ~(Dense(COIN[..., order, :][..., order]) & Causal())),
    ):
        out = layer(x[:, order], positions=order, mask=moved)
        torch.testing.assert_close(out, layer(x, mask=mask)[:, order])


def test_biases_of_the_caller_follow_the_positions_too() -> None:
    layer, x = make(), draw()
    order, values = torch.randperm(T), draw(T, T)
    table = RelativeTable(draw(8, H), max_distance=11)
    out = layer(x[:, order], positions=order, bias=table + DenseBias(values[order][:, order]))
    torch.testing.assert_close(out, layer(x, bias=table + DenseBias(values))[:, order])


def test_a_row_that_sees_nothing_gives_the_bias_of_the_output_and_finite_gradients() -> None:
    layer, x = make(), draw().requires_grad_()
    out = layer(x, mask=Lengths(torch.tensor([7, 0, 5])))
    torch.testing.assert_close(out[1], layer.out_proj.bias.expand(T, C))
    out.sum().backward()
    assert x.grad.isfinite().all()
    seen = layer.observe(x, mask=Lengths(torch.tensor([7, 0, 5])), wants=Wants(lse=True))
    assert torch.equal(seen.output, out) and (seen.lse[1] == -math.inf).all()


# Dropout


def test_dropout_acts_in_training_and_not_in_evaluation() -> None:
    layer, x = make(dropout=0.5), draw()
    torch.testing.assert_close(layer(x), by_formula(layer, x)[0])
    layer.train()
    one, other = layer(x), layer(x)
    assert not torch.equal(one, other)
    torch.manual_seed(7)
    one = layer(x)
    torch.manual_seed(7)
    assert torch.equal(one, layer(x))


def test_dropout_keeps_the_mean() -> None:
    layer, x = make(dropout=0.4), draw(1, 3, C)
    exact = layer(x)
    layer.train()
    mean = layer(x.expand(4001, -1, -1)).mean(0, keepdim=True)
    assert (mean - exact).abs().max() < 0.03 * exact.abs().max()


def test_observing_in_training_gives_the_output_of_forward_and_undropped_weights() -> None:
    layer, x = make(dropout=0.5).train(), draw()
    torch.manual_seed(7)
    out = layer(x)
    torch.manual_seed(7)
    seen = layer.observe(x, wants=Wants(weights=True))
    assert torch.equal(seen.output, out)
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(B, H, T, dtype=torch.float64))


# The ways a layer is used

FULL: dict[str, Any] = {
    "head_dim": 4,
    "n_kv_heads": 1,
    "rotary": ROTARY,
    "alibi": True,
    "causal": True,
    "sinks": True,
    "qk_norm": "rms",
}


def test_train_and_eval_give_the_same_and_hooks_fire_in_both() -> None:
    layer, x = make(**FULL), draw()
    fired = []
    for part in (layer, layer.q_proj, layer.out_proj):
        part.register_forward_hook(lambda *_: fired.append(1))
    assert torch.equal(layer.train()(x), layer.eval()(x)) and len(fired) == 6
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type_stays_and_is_close_to_float64(dtype: torch.dtype) -> None:
    layer = make(**FULL)
    low = copy.deepcopy(layer).to(dtype)
    exact = copy.deepcopy(low).double()  # the same numbers
    x = draw().to(dtype).requires_grad_()
    out = low(x)
    assert out.dtype == dtype
    error = (out.double() - exact(x.double())).abs().max()
    assert error < 8 * torch.finfo(dtype).eps * out.abs().max()
    out.float().sum().backward()
    assert x.grad.dtype == dtype and x.grad.isfinite().all()


@pytest.mark.parametrize("kind", [None, "rms", "layer"])
def test_autocast_runs_in_its_type(kind: Any) -> None:
    layer = make(**{**FULL, "qk_norm": kind, "dtype": torch.float32})
    x = draw(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        cached = layer(x, cache=KVCache.growing())
    assert out.dtype == torch.bfloat16 and torch.equal(cached, out)
    torch.testing.assert_close(out.float(), layer(x), atol=0.03, rtol=0.03)


def test_gradients_are_right_by_finite_differences() -> None:
    layer = MultiHeadAttention(6, 3, dtype=torch.float64, causal=True, sinks=True, alibi=True)
    x = draw(2, 3, 6).requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    inputs = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    names = [name for name, _ in layer.named_parameters()]

    def run(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, given, (x.detach(),))

    assert torch.autograd.gradcheck(run, inputs)


def test_built_on_meta_and_loaded_from_safetensors_it_is_the_same() -> None:
    layer, x = make(**FULL), draw()
    held = save(layer.state_dict())
    with torch.device("meta"):
        empty = MultiHeadAttention(C, H, **FULL, dtype=torch.float64)
    assert all(p.is_meta for p in empty.parameters())
    empty.load_state_dict(load(held), assign=True)
    assert torch.equal(empty.eval()(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_checkpointed_gradients_are_those_without_dropout_included() -> None:
    layer, x = make(**FULL, dropout=0.3).train(), draw().requires_grad_()
    answers = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(7)
        out = run(x)
        answers.append((out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


# Tracing makes an instance of autograd's Function, which torch itself warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_as_one_graph_outputs_and_gradients_are_the_same() -> None:
    layer, x = make(**FULL), draw()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    answers = []
    for run in (layer, compiled):
        out = run(x)
        answers.append((out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))))
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other)


# Torch's own code generator imports parts of torch that torch has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_to_machine_code_it_is_the_same() -> None:
    layer = make(causal=True, head_dim=4, rotary=ROTARY, dtype=torch.float32)
    x = draw(dtype=torch.float32)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True)(x)
        exact = copy.deepcopy(layer).double()(x.double())
        assert_within(compiled, exact, bound_error(layer(x), exact, n_terms=H * 4))


@pytest.mark.parametrize("shape", [(0, T, C), (B, 0, C), (1, 1, C)])
def test_empty_and_single_inputs_work(shape: tuple[int, ...]) -> None:
    layer = make(**FULL)
    x = draw(*shape).requires_grad_()
    out = layer(x)
    assert out.shape == shape
    out.sum().backward()
    assert x.grad.shape == shape and x.grad.isfinite().all()
    assert make()(x, draw(shape[0], 0, C)).shape == shape  # a memory of no tokens


def test_inputs_need_not_be_contiguous() -> None:
    layer, x = make(**FULL), draw(C, T, B).permute(2, 1, 0)
    out, exact = layer(x), layer(x.contiguous())
    # Sums in float64 over C, head width, T and the heads; another layout adds up in another order.
    bound = bound_sum(C + 4 + T + H * 4, exact.abs().max(), torch.float64)
    assert_within(out, exact, bound)


def test_zero_input_with_alibi_forgets_at_the_published_rate() -> None:
    """All scores 0, so weights are softmax of -slope · distance: hand-worked for the first head."""
    layer = make(alibi=True, causal=True, bias=False)
    seen = layer.observe(torch.zeros(1, 3, C, dtype=torch.float64), wants=Wants(weights=True))
    slope = 2.0 ** (-8 / 4)  # 5 heads: the first four are those of 4 heads
    far = [math.exp(-slope * n) for n in (2, 1, 0)]
    expected = torch.tensor([x / sum(far) for x in far], dtype=torch.float64)
    torch.testing.assert_close(seen.weights[0, 0, 2], expected)


# Doors


def refused(match: str, run: Callable[[], object], kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=match):
        run()


def test_what_makes_no_sense_is_refused_in_words() -> None:
    refused("n_heads=5 is not divisible by n_kv_heads=2", lambda: make(n_kv_heads=2))
    refused("rotary was configured for head_dim=4, but the layer has", lambda: make(rotary=ROTARY))
    refused(r"window is 3; expected \(left, right\)", lambda: make(window=3))
    refused("left must be None", lambda: make(window=(-1, 0)))
    refused("softcap must be a finite number above 0", lambda: make(softcap=0.0))
    refused("'rmsnorm'; expected one of", lambda: make(qk_norm="rmsnorm"))
    refused("'fast'; expected one of 'auto'", lambda: make(backend="fast"))
    refused('"sdpa" refuses this call', lambda: make(backend="sdpa", softcap=2.0)(draw()))
    refused("between 0 and 1", lambda: make(dropout=1.5))
    refused("x has C=16, but the layer has dim=15", lambda: make()(draw(B, T, 16)))
    refused(r"x must have 3 axes \(B, T, C\)", lambda: make()(draw(T, C)))
    refused("memory has M=16, but the layer has", lambda: make()(draw(), draw(B, S, 16)))
    refused("k .* has B=2, but q has B=3", lambda: make()(draw(), draw(2, S, C)))
    refused("pass memory=", lambda: make(kv_dim=16)(draw()))
    refused(
        r"expected \(T,\) or \(B, T\) with B=3, T=7", lambda: make()(draw(), positions=FAR[0, :5])
    )
    refused(r"a RotaryConfig\(head_dim=3\), got True", lambda: make(rotary=True), TypeError)
    refused("cache is a bool; expected", lambda: make()(draw(), cache=True), TypeError)
    refused("got a list", lambda: make()(draw(), positions=[1]), TypeError)
    refused("expected whole numbers", lambda: make()(draw(), positions=draw(T)), TypeError)
    refused("a mask must be a bool tensor", lambda: make()(draw(), mask=draw(T, T)), TypeError)


def test_a_cache_of_the_wrong_kind_is_refused_in_words() -> None:
    x, memory = draw(), draw(B, S, C)
    refused("no KVCache, .* give a CrossCache", lambda: make()(x, memory, cache=KVCache.growing()))
    refused("takes no positions", lambda: make()(x, memory, positions=torch.arange(T)))
    refused("the CrossCache is empty", lambda: make()(x, cache=CrossCache()))
    refused("cache is a bool; expected a KVCache", lambda: make()(x, cache=True), TypeError)
    refused(
        r"keeps 2 keys back, but the layer's window is \(3, 0\)",
        lambda: make(window=(3, 0))(x, cache=KVCache.windowed(2)),
    )
    refused("keeps 2 keys back", lambda: make(causal=True)(x, cache=KVCache.windowed(2)))
    for mask in (Lengths(LENGTHS), Causal() & ~Lengths(LENGTHS)):
        refused(
            "Lengths counts rows and keys by their index in memory, and this cache",
            lambda mask=mask: make()(x, mask=mask, cache=KVCache.fixed(13)),
        )
    refused(
        "DenseBias counts rows and keys by their index",
        lambda: make(alibi=True)(x, bias=draw(T, T), cache=KVCache.fixed(13)),
    )
