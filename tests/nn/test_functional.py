"""regard.nn.functional against torch.nn.functional.

torch's formula in plain kernels (`SDPBackend.MATH`) is the judge, in float64 where it can be.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard.nn
from regard.nn.functional import multi_head_attention_forward, scaled_dot_product_attention

B, T, S, H, G, D, E = 3, 5, 7, 6, 2, 11, 13
LEADS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "no leading axis": ((), (), ()),
    "one": ((B,), (B,), (B,)),
    "two": ((B, H), (B, H), (B, H)),
    "three": ((2, B, H), (2, B, H), (2, B, H)),
    "keys for all": ((B, H), (), ()),
    "one query for all": ((), (B, H), (B, H)),
    "broadcast both ways": ((B, 1), (1, H), (H,)),
    "one key head for all": ((B, H), (B, 1), (B, 1)),
    "values for all": ((2, B, H), (2, 1, H), (H,)),
    "an empty batch": ((0, H), (0, H), (0, H)),
}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def inputs_for(leads: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    sizes = ((T, D), (S, D), (S, E))
    return [draw(*lead, *size, dtype=dtype) for lead, size in zip(leads, sizes, strict=True)]


def run(attend: Callable[..., Tensor], inputs: list[Tensor], **call: Any) -> list[Tensor]:
    output = attend(*inputs, **call)
    total = (output * torch.arange(output.numel(), dtype=output.dtype).cos().view_as(output)).sum()
    return [output, *torch.autograd.grad(total, inputs)]


def torchs(inputs: list[Tensor], **call: Any) -> list[Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        return run(F.scaled_dot_product_attention, inputs, **call)


def masks_for(lead: tuple[int, ...], dtype: torch.dtype) -> list[dict[str, Any]]:
    """No mask, the flag, and bool and float masks over ever more of the axes."""
    calls: list[dict[str, Any]] = [{}, {"is_causal": True}, {"scale": 0.3}]
    shapes = [(T, S), (1, S), (T, 1)]
    shapes += [(*lead[-n:], T, S) for n in range(1, len(lead) + 1)]
    shapes += [(*(1,) * len(lead), T, S)]
    if len(lead) > 1:
        shapes += [(lead[-2], 1, T, S), (lead[-2], 1, 1, S)]
    for shape in shapes:
        seen = torch.rand(shape) < 0.6
        seen[..., 0] = True
        floats = torch.randn(shape, dtype=dtype)
        calls += [{"attn_mask": seen}, {"attn_mask": floats.masked_fill(~seen, float("-inf"))}]
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("lead", LEADS)
def test_outputs_and_gradients_are_torchs_for_any_leading_axes_and_mask(
    lead: str, dtype: torch.dtype
) -> None:
    inputs = inputs_for(LEADS[lead], dtype)
    for call in masks_for(torch.broadcast_shapes(*LEADS[lead]), dtype):
        atol = 2e-5 if dtype == torch.float32 else 1e-12
        got = run(scaled_dot_product_attention, inputs, **call)
        torch.testing.assert_close(got, torchs(inputs, **call), atol=atol, rtol=1e-5)


@pytest.mark.parametrize(
    "leads",
    [
        ((B, H), (B, G), (B, G)),
        ((H,), (G,), (G,)),
        ((2, B, H), (2, B, G), (2, B, G)),
        ((B, H), (B, G), (B, 3)),
        ((B, H), (B, 1), (B, 1)),
        ((B, H), (B, H), (B, H)),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads_are_torchs(leads: Any, is_causal: bool) -> None:
    inputs = inputs_for(leads, torch.float64)
    call = {"enable_gqa": True, "is_causal": is_causal}
    got = run(scaled_dot_product_attention, inputs, **call)
    torch.testing.assert_close(got, torchs(inputs, **call))


def test_neighbouring_query_heads_share_a_key_head() -> None:
    q, k, v = (x.detach() for x in inputs_for(((B, H), (B, G), (B, G)), torch.float64))
    got = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for head, shared in ((0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)):
        one = scaled_dot_product_attention(q[:, head], k[:, shared], v[:, shared])
        torch.testing.assert_close(got[:, head], one)


@pytest.mark.parametrize("lengths", [(T, S), (S, T), (T, T)])
def test_is_causal_counts_from_the_start(lengths: tuple[int, int]) -> None:
    n, m = lengths
    q, k, v = draw(B, H, n, D), draw(B, H, m, D), torch.eye(m, dtype=torch.float64)
    weights = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(weights[0, 0] > 0, torch.ones(n, m, dtype=torch.bool).tril())


@pytest.mark.parametrize("scale", [-0.5, 0.0, 2.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_scale_is_torchs(scale: float, is_causal: bool) -> None:
    inputs = inputs_for(LEADS["two"], torch.float64)
    got = run(scaled_dot_product_attention, inputs, scale=scale, is_causal=is_causal)
    torch.testing.assert_close(got, torchs(inputs, scale=scale, is_causal=is_causal))


def test_a_row_with_nothing_to_see_gives_zeros_forward_and_backward() -> None:
    inputs = inputs_for(LEADS["two"], torch.float64)
    seen = torch.ones(T, S, dtype=torch.bool)
    seen[2] = False
    for mask in (seen, torch.zeros(T, S).masked_fill(~seen, torch.finfo(torch.float32).min)):
        output, dq, dk, dv = run(scaled_dot_product_attention, inputs, attn_mask=mask)
        assert (output[:, :, 2] == 0).all() and (output[:, :, 1] != 0).all()
        assert (dq[:, :, 2] == 0).all() and dk.isfinite().all() and dv.isfinite().all()


def test_a_float32_mask_on_float64_inputs_is_exact() -> None:
    q, k, v = (torch.randn(B, H, 31, D, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(31, 31)
    wanted = scaled_dot_product_attention(q, k, v, attn_mask=mask.double())
    got = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_as_near_to_the_truth_as_torchs_formula(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in inputs_for(LEADS["two"], torch.float32))
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    plain = ((q @ k.mT) * D**-0.5).softmax(-1) @ v
    off = (scaled_dot_product_attention(q, k, v).double() - truth).abs().max()
    assert off <= 2 * (plain.double() - truth).abs().max()


def test_dropout_drops_the_share_asked_for_and_follows_the_seed() -> None:
    q, k = torch.randn(B, H, 41, D), torch.randn(B, H, 43, D)
    v = torch.eye(43)
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(scaled_dot_product_attention(q, k, v, dropout_p=0.3))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert abs((weights[0] == 0).float().mean() - 0.3) < 0.01
    whole = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(weights[0], torch.where(weights[0] == 0, 0.0, whole / 0.7))


def test_torchs_causal_biases_are_understood() -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = (x.detach() for x in inputs_for(LEADS["two"], torch.float64))
    for bias in (causal_upper_left(T, S), causal_lower_right(T, S)):
        wanted = F.scaled_dot_product_attention(q, k, v, bias._materialize())
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, bias), wanted)
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        scaled_dot_product_attention(q, k, v, causal_upper_left(T, S), is_causal=True)


Q, K, V = (x.detach().float() for x in inputs_for(LEADS["two"], torch.float64))
WRONG: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "one axis": ((Q[0, 0, 0], K, V), {}),
    "widths": ((Q, K[..., 1:], V), {}),
    "lengths": ((Q, K, V[..., 1:, :]), {}),
    "types": ((Q, K.double(), V), {}),
    "whole numbers": ((Q.int(), K.int(), V.int()), {}),
    "leading axes": ((Q, K[:2], V[:2]), {}),
    "heads without enable_gqa": ((Q, K[:, :2], V[:, :2]), {}),
    "heads that do not divide": ((Q, K[:, :4], V[:, :4]), {"enable_gqa": True}),
    "a mask and the flag": ((Q, K, V), {"attn_mask": torch.ones(T, S), "is_causal": True}),
    "a mask of whole numbers": ((Q, K, V), {"attn_mask": torch.ones(T, S, dtype=torch.int64)}),
    "a mask too wide": ((Q, K, V), {"attn_mask": torch.ones(T, S + 1)}),
    "a mask that would grow the output": ((Q, K, V), {"attn_mask": torch.ones(2, B, H, T, S)}),
    "a probability over 1": ((Q, K, V), {"dropout_p": 1.5}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_raises_what_torch_raises(wrong: str) -> None:
    inputs, call = WRONG[wrong]
    with pytest.raises(Exception) as theirs:
        F.scaled_dot_product_attention(*inputs, **call)
    with pytest.raises(theirs.type) as ours:
        scaled_dot_product_attention(*inputs, **call)
    assert isinstance(ours.value, ValueError)


# multi_head_attention_forward

C = 15


def packed_weights(module: nn.MultiheadAttention) -> list[Any]:
    """The weights of a module in the order of the functional form's arguments."""
    return [
        *(module.in_proj_weight, module.in_proj_bias, module.bias_k, module.bias_v),
        *(module.add_zero_attn, 0.0, module.out_proj.weight, module.out_proj.bias),
    ]


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("apart", [False, True])
def test_the_functional_form_of_multi_head_attention_is_torchs(
    apart: bool, extra: dict[str, bool]
) -> None:
    module = nn.MultiheadAttention(C, 3, dtype=torch.float64, **extra)
    given = packed_weights(module)
    call: dict[str, Any] = {}
    if apart:
        parts = module.in_proj_weight.chunk(3)
        call = {f"{name}_proj_weight": part for name, part in zip("qkv", parts, strict=True)}
        call["use_separate_proj_weight"] = True
        given[0] = None
    query, key = (torch.randn(n, B, C, dtype=torch.float64) for n in (T, S))
    pad = torch.arange(S) >= torch.tensor([[S], [2], [4]])
    for need_weights, average in itertools.product([True, False], [True, False]):
        call |= {"need_weights": need_weights, "average_attn_weights": average}
        args = (query, key, key, C, 3, *given)
        wanted = F.multi_head_attention_forward(*args, key_padding_mask=pad, **call)
        got = multi_head_attention_forward(*args, key_padding_mask=pad, **call)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("zero", [False, True])
def test_static_keys_and_values_stand_for_projected_ones(zero: bool) -> None:
    module = nn.MultiheadAttention(C, 3, add_zero_attn=zero, dtype=torch.float64)
    query, key = (torch.randn(n, B, C, dtype=torch.float64) for n in (T, S))
    static = {name: torch.randn(B * 3, S, 5, dtype=torch.float64) for name in "kv"}
    args = (query, key, key, C, 3, *packed_weights(module))
    call = {"static_k": static["k"], "static_v": static["v"]}
    wanted = F.multi_head_attention_forward(*args, **call)
    torch.testing.assert_close(multi_head_attention_forward(*args, **call), wanted)


@pytest.mark.parametrize("wrong", ["bias beside static", "static heads", "no weight", "one bias"])
def test_what_the_functional_form_refuses_torch_refuses_too(wrong: str) -> None:
    module = nn.MultiheadAttention(C, 3, add_bias_kv=wrong in ("bias beside static", "one bias"))
    given, call = packed_weights(module), {}
    if wrong == "no weight":
        given[0] = None
    if wrong == "one bias":
        given[3] = None
    if "static" in wrong:
        rows = B * 3 + (wrong == "static heads")
        call = {"static_k": torch.randn(rows, S, 5), "static_v": torch.randn(rows, S, 5)}
    query = torch.randn(S, B, C)
    words = {
        "bias beside static": "bias cannot be added to static key",
        "static heads": r"static key must be \(B·H, S, D\) = \(9, 7, 5\), got \(10, 7, 5\)",
        "no weight": "in_proj_weight is None",
        "one bias": "bias_k is set but bias_v is None",
    }
    with pytest.raises(AssertionError):
        F.multi_head_attention_forward(query, query, query, C, 3, *given, **call)
    with pytest.raises(AssertionError, match=words[wrong]):
        multi_head_attention_forward(query, query, query, C, 3, *given, **call)


def test_the_module_computes_its_functional_form() -> None:
    module = regard.nn.MultiheadAttention(C, 3, dropout=0.4, add_bias_kv=True)
    query, key = torch.randn(T, B, C), torch.randn(S, B, C)
    given = packed_weights(module)  # type: ignore[arg-type]
    given[5] = 0.4
    for training in (True, False):
        torch.manual_seed(3)
        wanted = module.train(training)(query, key, key)
        torch.manual_seed(3)
        got = multi_head_attention_forward(query, key, key, C, 3, *given, training=training)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
