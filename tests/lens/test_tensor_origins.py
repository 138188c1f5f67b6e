"""Whether a place looks at its own text is known from its tensors, not from lengths or names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from lens_subjects import SUBJECTS, TWO_SIDED, draw, question, text_model
from torch import Tensor, nn

import regard
from regard.lens.record import Record
from regard.lens.tensor_origins import TensorOrigins
from regard.lens.watch import watch
from regard.ops import Causal

C, H = 12, 3


class Attention(nn.Module):
    """As diffusers has it: queries of one input, keys and values of another, or of the same."""

    def __init__(self, how: str = "sdpa") -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(C, C) for _ in range(3))
        self.norm, self.how = nn.LayerNorm(C // H), how

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, C // H)).transpose(1, 2)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        q, k, v = (self.split(f(y)) for f, y in zip(self.projections(), (x, other, other)))  # noqa: B905
        q, k = self.norm(q), self.norm(k)
        if self.how == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v)
        elif self.how == "regard":
            out = regard.attention(q, k, v)
        else:
            out = (q @ k.mT * (C // H) ** -0.5).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)

    def projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.to_q, self.to_k, self.to_v


class Blocks(nn.Module):
    """A UNet's block: attention to itself, then to a text, under names that tell nothing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.attn1, self.attn2, self.norm = Attention(how), Attention(how), nn.LayerNorm(C)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = x + self.attn1(self.norm(x))
        out: Tensor = x + self.attn2(self.norm(x), text)
        return out


def see(model: nn.Module, *inputs: Tensor, **more: Any) -> Record:
    with torch.no_grad():
        before = model(*inputs)
        with watch(model, keep="qk", **more) as record:
            after = model(*inputs)
    assert torch.equal(before, after) and not record.notes
    return record


@pytest.mark.parametrize("how", ["sdpa", "regard", "written out"])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(20, 7), (8, 7), (7, 7), (7, 20)])
def test_keys_of_another_input_are_cross_attention(n_queries: int, n_keys: int, how: str) -> None:
    model = Blocks(how).eval()
    record = see(model, torch.randn(1, n_queries, C), torch.randn(1, n_keys, C))
    found = [(place.name, place.kind, place.n_queries, place.n_keys) for place in record.places]
    assert found == [
        ("attn1", "self", n_queries, n_queries),
        ("attn2", "cross", n_queries, n_keys),
    ]


@pytest.mark.parametrize("how", ["sdpa", "regard", "written out"])
def test_the_same_input_twice_is_self_attention(how: str) -> None:
    model, x = Blocks(how).eval(), torch.randn(1, 7, C)

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross_attn = model.attn2

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.cross_attn(x, x)
            return out

    assert [place.kind for place in see(Same(), x).places] == ["self"]


@pytest.mark.parametrize(("n_queries", "n_keys"), [(20, 7), (8, 7)])
def test_fewer_keys_than_queries_without_any_projection(n_queries: int, n_keys: int) -> None:
    """20 over 7 was an IndexError in the model's forward, and 8 over 7 self-attention."""

    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k)

    record = see(Plain(), torch.randn(1, 2, n_queries, 5), torch.randn(1, 2, n_keys, 5))
    assert record.places[0].kind == "cross"


class Core(nn.Module):
    """Attention alone, in a module of its own, as x-transformers has it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Around(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.k_lora = Core(), nn.Linear(C, C)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        q, v = self.split(self.to_q(x)), self.split(self.to_v(other))
        k = self.split(self.k_lora(F.layer_norm(self.to_k(other), (C,))))  # in two steps
        cos = torch.rand(q.shape[-2], C // H)
        rotated = q * cos + torch.cat([-q[..., 2:], q[..., :2]], -1) * cos
        out: Tensor = self.core(rotated, k, v)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("cross", [False, True])
def test_projections_outside_of_the_module_that_attends(cross: bool) -> None:
    torch.manual_seed(1)
    model, x = Around().eval(), torch.randn(1, 7, C)
    inputs = (x, torch.randn(1, 7, C)) if cross else (x,)
    with torch.no_grad(), watch(model) as record:
        model(*inputs)
    assert [place.kind for place in record.places] == ["cross" if cross else "self"]


class Pool(Attention):
    """One learned query, or one mean, looks at all tokens."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, H, 1, C // H)) if learned else None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        query = self.query
        q = self.split(self.to_q(x.mean(1, keepdim=True))) if query is None else query
        return F.scaled_dot_product_attention(q, self.split(self.to_k(x)), self.split(self.to_v(x)))


@pytest.mark.parametrize("learned", [False, True])
def test_a_query_that_is_no_token_stands_on_no_key(learned: bool) -> None:
    assert see(Pool(learned).eval(), torch.randn(1, 7, C)).places[0].kind == "cross"


class ClassToken(Attention):
    """A learned token is put before the others, and alone looks at all of them, as in CaiT."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, C))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        every = torch.cat([self.token, x], 1)
        q, k = self.split(self.to_q(every[:, :1])), self.split(self.to_k(every))
        return F.scaled_dot_product_attention(q, k, self.split(self.to_v(every)))


def test_a_token_taken_out_of_its_text_does_not_stand_at_the_end_of_it() -> None:
    assert see(ClassToken().eval(), torch.randn(1, 7, C)).places[0].kind == "cross"


class Cached(Attention):
    """Keys of earlier calls in front, joined or written into a buffer."""

    def __init__(self, static: bool) -> None:
        super().__init__()
        self.static, self.n = static, 0
        self.kept = torch.zeros(1, H, 11, C // H) if static else torch.zeros(1, H, 0, C // H)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q, k = self.split(self.to_q(x)), self.split(self.to_k(x))
        first, self.n = self.n, self.n + x.shape[1]
        if self.static:
            self.kept[:, :, first : self.n] = k
        else:
            self.kept = torch.cat([self.kept, k], 2)
        seen = torch.arange(self.kept.shape[2]) <= torch.arange(first, self.n)[:, None]
        return F.scaled_dot_product_attention(q, self.kept, self.kept, attn_mask=seen)


@pytest.mark.parametrize("static", [False, True])
def test_keys_of_a_cache_are_the_texts_own(static: bool) -> None:
    model = Cached(static).eval()
    with torch.no_grad(), watch(model) as record:
        for n in (5, 1, 1):
            model(torch.randn(1, n, C))
    assert [(p.kind, p.n_queries, p.n_keys) for p in record.places] == [("self", 7, 7)]


def test_keys_of_a_cache_are_the_texts_own_also_where_the_text_was_joined() -> None:
    class Joined(Cached):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            return super().forward(torch.cat([x[:, :1], x], 1))

    model = Joined(False).eval()
    with torch.no_grad(), watch(model) as record:
        for n in (4, 1):
            model(torch.randn(1, n, C))
    assert [(p.kind, p.n_queries, p.n_keys) for p in record.places] == [("self", 7, 7)]


def test_perceiver_looks_at_its_input_and_then_at_itself() -> None:
    config = hf.PerceiverConfig(
        num_latents=8,
        d_latents=12,
        d_model=10,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=3,
        num_cross_attention_heads=2,
    )
    torch.manual_seed(3)
    model = hf.PerceiverModel(config).eval()
    for n_inputs in (7, 8, 20):
        x = torch.randn(1, n_inputs, 10)
        with torch.no_grad(), watch(model) as record:
            model(x)
        found = [(place.kind, place.n_queries, place.n_keys) for place in record.places]
        assert found == [("cross", 8, n_inputs), ("self", 8, 8), ("self", 8, 8)]


def test_queries_that_experts_make_are_of_their_own_text() -> None:
    """JetMoE: what experts give is added up in empty places, each token where it was."""
    config = hf.JetMoeConfig(
        vocab_size=83,
        hidden_size=36,
        num_hidden_layers=2,
        num_key_value_heads=3,
        kv_channels=12,
        intermediate_size=52,
        num_local_experts=4,
    )
    model, ids = text_model(config), draw(1, 11)
    with torch.no_grad(), watch(model) as record:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    found = [(place.kind, place.causal, place.n_queries, place.n_keys) for place in record.places]
    assert found == [("self", True, 14, 14)] * 2


def test_keys_that_layers_share_in_a_fixed_cache_are_the_texts_own() -> None:
    """Gemma 3n writes into its streams, and its last layers take the keys of earlier ones."""
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3nTextConfig(
        vocab_size=83,
        hidden_size=36,
        intermediate_size=[52] * 4,
        num_hidden_layers=4,
        layer_types=kinds * 2,
        num_kv_shared_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        sliding_window=5,
        vocab_size_per_layer_input=83,
        hidden_size_per_layer_input=6,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    model, given = text_model(config), {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad(), watch(model) as record:
        model.generate(draw(1, 11), max_new_tokens=4, do_sample=False, **given)
    found = [(place.kind, place.layer, place.n_queries, place.n_keys) for place in record.places]
    assert found == [("self", layer, 14, 14) for layer in range(4)]


@pytest.mark.parametrize("length", [6, 12])
def test_a_decoder_looks_at_its_source_also_where_both_read_parts_of_one_input(length: int) -> None:
    """A time series: its past and its future are cut out of one tensor."""
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=6,
        context_length=length,
        lags_sequence=[1, 2],
        num_time_features=1,
        d_model=12,
        encoder_layers=1,
        decoder_layers=2,
    )
    model, (past, future) = hf.TimeSeriesTransformerModel(config).eval(), torch.randn(2, 1, 14)
    given = {"past_values": past[:, : length + 2], "future_values": future[:, :6]}
    more = {f"{name[:-7]}_time_features": x[..., None] for name, x in given.items()}
    with torch.no_grad(), watch(model) as record:
        model(**given, **more, past_observed_mask=torch.ones(1, length + 2))
    found = [(place.kind, place.layer) for place in record.places]
    assert found == [("self", 0), ("self", 0), ("cross", 0), ("self", 1), ("cross", 1)]


@pytest.mark.parametrize("name", SUBJECTS)
def test_kinds_of_every_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their modules' word and their names, by the tensors alone."""
    for names in ("CROSS", "SOURCE"):
        monkeypatch.setattr(f"regard.lens.recorder.{names}", re.compile("(?!)"))
    model = SUBJECTS[name]()
    for module in model.modules():
        if isinstance(getattr(module, "is_cross_attention", None), bool):
            module.is_cross_attention = None
    asked = question(name).given
    if name in TWO_SIDED:
        asked = {**asked, "decoder_input_ids": draw(1, asked["input_ids"].shape[1], 7)}
    with torch.no_grad(), watch(nn.ModuleList([model]), row=0) as record:
        model(**asked)
    for place in record.places:
        hint = any(word in place.name for word in ("encoder_attn", "EncDec"))
        assert place.kind == ("cross" if hint else "self"), place.name


def test_causal_attention_of_ours_over_more_keys_is_its_own() -> None:
    model = regard.MultiHeadAttention(C, H, causal=True).eval()
    assert see(model, torch.randn(1, 7, C)).places[0].causal

    class Given(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return regard.attention(q, k, k, mask=Causal())

    record = see(Given(), torch.randn(1, 2, 3, 5), torch.randn(1, 2, 7, 5))
    assert record.places[0].kind == "self"  # nothing tells where they come from


@pytest.mark.parametrize("lost", range(1, 9))
def test_where_following_fails_once_nothing_is_told_by_halves(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of which the origin was lost made the text that they are of another one."""
    follow, calls = TensorOrigins.follow, []

    def fails(self: TensorOrigins, func: Any, args: Any, result: Any) -> None:
        calls.append(func)
        if len(calls) == lost:
            raise IndexError("of no use")
        follow(self, func, args, result)

    monkeypatch.setattr(TensorOrigins, "follow", fails)
    model, x = Blocks("regard").eval(), torch.randn(1, 7, C)
    with (
        pytest.warns(RuntimeWarning, match="of no use"),
        torch.no_grad(),
        watch(model) as record,
    ):
        model(x, x)
    assert {place.kind for place in record.places} <= {"self"}
