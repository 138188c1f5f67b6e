"""Watching torch.nn's modules on all their paths, and modules that call torch's functions."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rounding import assert_within, bound_weights, widen
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

from regard.lens.record import Record
from regard.lens.watch import watch

B, T, C, H = 3, 11, 20, 4


def same(a: Any, b: Any) -> bool:
    one, two = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return all(
        x is y or torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
        for x, y in zip(one, two, strict=True)
    )


def assert_weights(record: Record, place: int, plain_hts: Tensor, exact_hts: Tensor) -> None:
    """The weights are those of `exact_hts`, which is float64, as `plain_hts` is in float32."""
    assert record.places[place].n_heads == exact_hts.shape[0]
    assert exact_hts.dtype == torch.float64
    size = exact_hts.shape[1:]
    found = np.stack([record.map(place, head, size=size) for head in range(len(exact_hts))])
    assert_within(found, exact_hts, bound_weights(plain_hts, exact_hts))


def weigh(layer: nn.MultiheadAttention, *inputs: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Each head's weights as torch's layer gives them, and as it does in float64."""
    given["average_attn_weights"] = False
    exact = copy.deepcopy(layer).double()
    with torch.no_grad():
        plain = layer(*inputs, **given)[1]
        return plain, exact(*(x.double() for x in inputs), **widen(given))[1]


def masks() -> dict[str, dict[str, Any]]:
    torch.manual_seed(5)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, 7:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(T)
    each = torch.rand(B * H, T, T) > 0.6
    each[:, :, 0] = False
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.randn(B, T)},
        "causal": {"attn_mask": causal, "is_causal": True},
        "causal bool": {"attn_mask": causal < 0},
        "each head": {"attn_mask": each},
        "float": {"attn_mask": torch.randn(T, T)},
        "causal and padding": {"attn_mask": causal < 0, "key_padding_mask": padding},
    }


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("name", masks())
def test_multihead_attention(name: str, need: bool, training: bool) -> None:
    """Evaluation takes the fast path where it can; the watched call takes the same."""
    layer = nn.MultiheadAttention(C, H, batch_first=True).train(training)
    x, given = torch.randn(B, T, C), masks()[name]
    with torch.set_grad_enabled(training):
        before = layer(x, x, x, need_weights=need, **given)
        with watch(layer, keep="qk", row=1) as record:
            after = layer(x, x, x, need_weights=need, **given)
    assert same(before, after)
    plain, exact = weigh(layer, x, x, x, **given)
    assert_weights(record, 0, plain[1], exact[1])
    assert record.places[0].kind == "self"


def test_multihead_attention_with_other_widths_and_added_keys() -> None:
    layer = nn.MultiheadAttention(C, H, kdim=12, vdim=14, add_bias_kv=True, add_zero_attn=True)
    query, key, value = torch.randn(5, C), torch.randn(7, 12), torch.randn(7, 14)
    with torch.no_grad():
        before = layer(query, key, value)
        with watch(layer, keep="qk") as record:
            after = layer(query, key, value)
    assert same(before, after)
    place = record.places[0]
    assert (place.kind, place.n_queries, place.n_keys) == ("cross", 5, 9)
    assert_weights(record, 0, *weigh(layer, query, key, value))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["none", "padding", "causal"])
def test_encoder_on_its_fast_path(name: str, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(C, H, 37, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, given = torch.randn(B, T, C), masks()[name]
    names = {"attn_mask": "mask", "key_padding_mask": "src_key_padding_mask"}
    given = {names.get(key, key): value for key, value in given.items()}
    slow: list[int] = []
    with torch.no_grad():
        before = encoder(x, **given)
        # Proof that the fast path is taken: it does not call the module inside.
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: slow.append(1) if module is inner else None
        )
        inner = encoder.layers[0].self_attn
        with watch(encoder, keep="qk", row=1) as record:
            after = encoder(x, **given)
        handle.remove()
    assert same(before, after)
    assert [p.name for p in record.places] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert not slow
    assert not any("forward" in vars(module) for module in encoder.modules())
    first = encoder.layers[0]
    h = first.norm1(x) if norm_first else x
    plain, exact = weigh(first.self_attn, h, h, h, **masks()[name])
    n = record.places[0].n_queries
    assert n == (7 if name == "padding" and not norm_first else T)
    assert_weights(record, 0, plain[1, :, :n, :n], exact[1, :, :n, :n])


def test_transformer_of_2017() -> None:
    model = nn.Transformer(C, H, 2, 2, 37, batch_first=True).eval()
    source, target = torch.randn(1, 7, C), torch.randn(1, 5, C)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        before = model(source, target, tgt_mask=mask, tgt_is_causal=True)
        with watch(model, keep="qk") as record:
            after = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    assert same(before, after)
    found = [(p.name, p.kind, p.causal, p.n_queries, p.n_keys) for p in record.places]
    assert found[0] == ("encoder.layers.0.self_attn", "self", False, 7, 7)
    assert found[2:4] == [
        ("decoder.layers.0.self_attn", "self", True, 5, 5),
        ("decoder.layers.0.multihead_attn", "cross", False, 5, 7),
    ]
    assert len(found) == 6


class Calls(nn.Module):
    """Attention by a function that is given."""

    def __init__(self, attend: Callable[..., Tensor], groups: int = H) -> None:
        super().__init__()
        self.attend, self.groups, self.num_heads = attend, groups, H
        self.q, self.k, self.v = (nn.Linear(C, 5 * n) for n in (H, groups, groups))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            f(x).view(*x.shape[:2], n, 5).transpose(1, 2)
            for f, n in ((self.q, H), (self.k, self.groups), (self.v, self.groups))
        )
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x)).transpose(1, 2).flatten(2)


def weights_of(q: Tensor, k: Tensor, scale: float, added: Tensor | float = 0.0) -> Tensor:
    return torch.softmax(q @ k.repeat_interleave(H // k.shape[1], 1).mT * scale + added, -1)


def weigh_twice(q: Tensor, k: Tensor, *rule: Any, row: int = 0) -> tuple[Tensor, Tensor]:
    """`weights_of` one row, in float32 and in float64."""
    exact = weights_of(q.double(), k.double(), *rule)
    return weights_of(q, k, *rule)[row], exact[row]


LOW = torch.full((T, T), -math.inf).triu(1)
BIAS = torch.randn(1, H, T, T, generator=torch.Generator().manual_seed(2))
SDPA: dict[str, tuple[dict[str, Any], Any, int]] = {
    "plain": ({}, 0.0, H),
    "causal": ({"is_causal": True}, LOW, H),
    "scaled": ({"scale": 0.7}, 0.0, H),
    "bool": ({"attn_mask": LOW == 0}, LOW, H),
    "float": ({"attn_mask": BIAS}, BIAS, H),
    "groups": ({"enable_gqa": True, "is_causal": True}, LOW, 2),
    "upper left": ({"attn_mask": causal_upper_left(T, T)}, LOW, H),
    "lower right": ({"attn_mask": causal_lower_right(T, T)}, LOW, H),
}


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(name: str) -> None:
    given, added, groups = SDPA[name]
    model = Calls(lambda *qkv: F.scaled_dot_product_attention(*qkv, **given), groups)
    x = torch.randn(1, T, C)
    with torch.no_grad():
        before = model(x)
        with watch(model, keep="qk") as record:
            after = model(x)
        q, k, _ = model.split(x)
    assert same(before, after)
    assert_weights(record, 0, *weigh_twice(q, k, given.get("scale", 5**-0.5), added))


def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows and heads in one axis."""
    flat = (x.reshape(-1, T, 5) for x in (q, k, v))
    bias = BIAS.expand(q.shape[0], H, T, T).reshape(-1, T, T)
    return F.scaled_dot_product_attention(*flat, attn_mask=bias).view_as(q)


def test_sdpa_with_rows_and_heads_in_one_axis() -> None:
    model, x = Calls(joined), torch.randn(2, T, C)
    with torch.no_grad(), watch(model, keep="qk", row=1) as record:
        model(x)
    q, k, _ = model.split(x)
    assert_weights(record, 0, *weigh_twice(q, k, 5**-0.5, BIAS, row=1))


class Last(nn.Module):
    """More keys than queries."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def test_is_causal_counts_from_the_start() -> None:
    """torch's flag: query 0 sees key 0 alone, however many keys there are."""
    model, q, k = Last(), torch.randn(1, 2, 3, 5), torch.randn(1, 2, 7, 5)
    with watch(model, keep="qk") as record:
        model(q, k)
    assert record.rows(0, 0, 0)[0] == pytest.approx(1.0)
    assert record.map(0, 1)[:, 3:].max() == 0


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(5)
    return F.softmax(scores + BIAS, dim=-1) @ v


def by_masked_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q * 5**-0.5) @ k.mT
    return scores.masked_fill(LOW < 0, torch.finfo(scores.dtype).min).softmax(-1) @ v


def by_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.where(LOW == 0, (q @ k.mT).mul(0.3), torch.tensor(-1e9))
    return torch.softmax(scores.float(), 3) @ v


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = q.shape[0] * H
    bias = BIAS.expand(q.shape[0], H, T, T).reshape(rows, T, T)
    scores = bias.baddbmm(q.reshape(rows, T, 5), k.reshape(rows, T, 5).mT, beta=0.5, alpha=0.4)
    return F.softmax(scores.view(-1, H, T, T) + LOW, -1) @ v


def by_scaling_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (((q @ k.mT) + BIAS) * 0.4).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.4
    scores += BIAS
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(dim=-1), v)


def by_three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = (x.reshape(-1, T, 5) for x in (q, k, v))
    a, b, c = flat
    return (torch.bmm(a, b.mT).mul_(0.4).softmax(-1) @ c).view_as(q)


def by_unknown_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something the trail does not know, hidden from it: the scores themselves are kept."""
    scores = q @ k.mT
    scores.data.copy_(torch.tanh(scores.data) * 2)
    return scores.softmax(-1) @ v


def expected(q: Tensor, k: Tensor) -> dict[Any, Tensor]:
    return {
        by_matmul: weights_of(q, k, 5**-0.5, BIAS),
        by_masked_fill: weights_of(q, k, 5**-0.5, LOW),
        by_where: weights_of(q, k, 0.3, LOW),
        by_baddbmm: weights_of(q, k, 0.4, BIAS * 0.5 + LOW),
        by_einsum: weights_of(q, k, 0.4, BIAS),
        by_scaling_last: weights_of(q, k, 0.4, BIAS * 0.4),
        by_three_axes: weights_of(q, k, 0.4),
        by_unknown_step: torch.softmax(torch.tanh(q @ k.mT) * 2, -1),
    }


WRITTEN_OUT = (
    *(by_matmul, by_masked_fill, by_where, by_baddbmm, by_einsum, by_three_axes),
    *(by_scaling_last, by_unknown_step),
)


@pytest.mark.parametrize("attend", WRITTEN_OUT)
@pytest.mark.parametrize("keep", ["qk", "statistics"])
def test_attention_written_out(attend: Callable[..., Tensor], keep: str) -> None:
    model, x = Calls(attend), torch.randn(2, T, C)
    with torch.no_grad():
        before = model(x)
        with watch(model, keep=keep, row=1) as record:
            after = model(x)
        q, k, _ = model.split(x)
    assert same(before, after)
    assert [place.name for place in record.places] == ["Calls"]
    plain, exact = expected(q, k)[attend][1], expected(q.double(), k.double())[attend][1]
    assert_weights(record, 0, plain, exact)
    if keep == "qk" and attend is not by_unknown_step:
        assert record._arrays.get(0, "q").shape == (H, T, 5)


def test_other_softmaxes_are_no_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(C, 6)

        def forward(self, x: Tensor) -> Tensor:
            chosen = F.softmax(self.gate(x), -1)
            return F.softmax(x @ self.gate.weight.T[None], -1) + chosen

    with pytest.raises(ValueError, match="no attention was seen"), watch(Router()):
        pass
    router = Router()
    with pytest.raises(ValueError, match="no attention was seen"), watch(router):
        router(torch.randn(2, T, C))


class Flex(Calls):
    def __init__(self, score_mod: Any = None, mask_mod: Any = None) -> None:
        super().__init__(self.run)
        self.score_mod, self.mask_mod = score_mod, mask_mod

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = None
        if self.mask_mod is not None:
            made = create_block_mask(self.mask_mod, None, None, T, T, device="cpu")
        out: Any = flex_attention(q, k, v, score_mod=self.score_mod, block_mask=made, scale=0.3)
        return out


SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_flex_attention(scored: bool, masked: bool) -> None:
    model = Flex(
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs()) if scored else None,
        (lambda b, h, q, k: q >= k) if masked else None,
    )
    x = torch.randn(1, T, C)
    gap = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    added = -SLOPES[:, None, None] * gap if scored else torch.zeros(1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = model(x)
        with watch(model, keep="qk") as record:
            after = model(x)
        q, k, _ = model.split(x)
    assert same(before, after)
    assert_weights(record, 0, *weigh_twice(q, k, 0.3, added + (LOW if masked else 0.0)))
    assert "telling" not in repr(globals()["flex_attention"])
    assert not hasattr(flex_attention, "__wrapped__")


def test_multi_head_attention_forward() -> None:
    twin = nn.MultiheadAttention(C, H)

    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = (twin.in_proj_weight, twin.in_proj_bias, None, None, False, 0.0)
            last = (twin.out_proj.weight, twin.out_proj.bias)
            out = F.multi_head_attention_forward(x, x, x, C, H, *weights, *last, training=False)
            return out[0]

    model, x = Functional(), torch.randn(T, B, C)
    with torch.no_grad():
        before = model(x)
        with watch(model, keep="qk", row=2) as record:
            after = model(x)
    assert same(before, after)
    plain, exact = weigh(twin.eval(), x, x, x)
    assert_weights(record, 0, plain[2], exact[2])


def test_other_modes_above_the_tap_stay() -> None:
    class Counts(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            Counts.seen += 1
            return func(*args, **(kwargs or {}))

    layer, x = nn.MultiheadAttention(C, H, batch_first=True).eval(), torch.randn(1, T, C)
    with torch.no_grad(), watch(layer) as record, Counts():
        layer(x, x, x)
        seen = Counts.seen
        torch.ones(2) + 1
        assert Counts.seen > seen
    assert len(record.places) == 1
    assert torch.overrides._get_current_function_mode_stack() == []
