"""Layers are numbered in the order in which they are called (`lens/recorder.py`)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.layers import MultiHeadAttention
from regard.lens.recorder import stack_of
from regard.lens.watch import watch


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("encoder.layer.3.attention.self", "encoder.layer"),
        ("0.auto_model.encoder.layer.3.attention.self", "auto_model.encoder.layer"),
        ("vision_model.encoder.layers.3.self_attn", "vision_model.encoder.layers"),
        ("decoder.block.1.layer.0.SelfAttention", "decoder.block.layer"),
        ("attn_layers.layers.4.1", "attn_layers.layers"),
        ("first", ""),
    ],
)
def test_a_stack_is_what_its_names_share(name: str, stack: str) -> None:
    assert stack_of(name) == stack


class Alternating(nn.Module):
    """A list that holds a norm, attention and a feed-forward in turn, as x-transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(6), Attend() if n % 2 == 0 else nn.Linear(6, 6)])
            for n in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in self.layers:
            x = x + block(norm(x))
        return x


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[:, 0]


class Decoding(nn.Module):
    """Writes in a loop of its own: the same layers again for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attend(), Attend()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


def test_what_a_list_holds_beside_attention_is_no_layer() -> None:
    model = Alternating()
    with torch.no_grad(), watch(model) as record:
        model(torch.randn(1, 5, 6))
    assert [place.layer for place in record.places] == [0, 1, 2]
    assert [place.name for place in record.places] == [f"layers.{n}.1" for n in (0, 2, 4)]
    with torch.no_grad(), watch(model, layers=[2]) as record:
        model(torch.randn(1, 5, 6))
    assert [place.name for place in record.places] == ["layers.4.1"]


def test_modules_that_are_called_one_by_one_are_layers_in_that_order() -> None:
    model = Decoding()
    with torch.no_grad(), watch(model) as record:
        for layer in model.layers:
            layer(torch.randn(1, 5, 6))
    assert [place.layer for place in record.places] == [0, 1]


def test_a_layer_that_is_run_again_is_a_further_one() -> None:
    model = Decoding()
    with torch.no_grad(), watch(model) as record:
        model(torch.randn(1, 5, 6))
    found = [(place.name, place.layer) for place in record.places]
    names = ["layers.0", "layers.1", "layers.0@2", "layers.1@2"]
    assert found == list(zip(names, range(4), strict=True))


class Twice(nn.Module):
    """One layer that attends twice."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x[:, None]
        one = F.scaled_dot_product_attention(heads, heads, heads)
        return one[:, 0] - F.scaled_dot_product_attention(-heads, heads, heads)[:, 0]


def test_a_layer_that_attends_twice_is_one_layer() -> None:
    model = nn.Sequential(Twice(), Twice())
    with torch.no_grad(), watch(model) as record:
        model(torch.randn(1, 5, 6))
    assert [(place.name, place.layer) for place in record.places] == [
        ("0", 0),
        ("0@2", 0),
        ("1", 1),
        ("1@2", 1),
    ]
    with torch.no_grad(), watch(model, layers=["1@2"]) as record:
        model(torch.randn(1, 5, 6))
    assert [place.name for place in record.places] == ["1@2"]


class Writing(nn.Module):
    """Two layers that write three tokens in one call, with keys that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Remembering(), Remembering()])

    def forward(self, x: Tensor) -> Tensor:
        for t in range(x.shape[1]):
            token = x[:, t : t + 1]
            for layer in self.layers:
                token = layer(token)
        return token


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x[:, None])
        keys = torch.cat(self.kept, 2)
        return F.scaled_dot_product_attention(x[:, None], keys, keys)[:, 0]


@pytest.mark.parametrize("layers", [None, [1]])
def test_tokens_written_inside_one_call_go_on_in_their_layer(layers: list[int] | None) -> None:
    model = Writing()
    with torch.no_grad(), watch(model, layers=layers) as record:
        model(torch.randn(1, 3, 6))
    found = [(place.layer, place.n_queries, place.n_keys) for place in record.places]
    assert found == [(n, 3, 3) for n in layers or (0, 1)]


def compiled_ways(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    def around(x: Tensor) -> Tensor:
        out: Tensor = model(x) + 1
        return out

    def compile_inside(x: Tensor) -> Tensor:
        model.compile(backend="eager")
        out: Tensor = model(x)
        return out

    return {
        "the model": torch.compile(model, backend="eager"),
        "a function": torch.compile(around, backend="eager"),
        "in place": compile_inside,
    }


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("way", ["the model", "a function", "in place"])
def test_compiled_code_that_attends_in_its_own_way_is_refused_in_words(
    way: str, before: bool
) -> None:
    """Also where the model was compiled, or run compiled, before the block."""
    torch._dynamo.reset()
    model, x = Decoding().eval(), torch.randn(1, 5, 6)
    run = compiled_ways(model)[way]
    with torch.no_grad():
        want = run(x) if before and way != "in place" else None
        with pytest.raises(ValueError, match="no attention was seen"), watch(model):
            run(x)
        assert torch.overrides._get_current_function_mode_stack() == []
        if want is not None:
            assert torch.equal(run(x), want)
    torch._dynamo.reset()


def test_code_compiled_around_another_model_is_left_alone() -> None:
    torch._dynamo.reset()
    model, other, x = Decoding().eval(), nn.Linear(6, 6), torch.randn(1, 5, 6)
    run = torch.compile(other.forward, backend="eager", fullgraph=True)
    with torch.no_grad(), watch(model) as record:
        out = run(x)
        model(x)
    assert torch.equal(out, other(x)) and len(record.places) == 4


def checkpointed(reentrant: bool) -> nn.Module:
    class Checkpointed(Decoding):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return x

    return Checkpointed()


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpointing_runs_again_are_recorded_once(reentrant: bool) -> None:
    model = checkpointed(reentrant)
    x = torch.randn(1, 5, 6, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad is not None
    want, x.grad = x.grad, None
    with watch(model) as record:
        model(x).square().sum().backward()
    assert [place.name for place in record.places] == ["layers.0", "layers.1"]
    assert torch.equal(x.grad, want)


class Merged(nn.Module):
    """Attention by torch's function, by ours, and written out."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.fused = MultiHeadAttention(12, 3), nn.MultiheadAttention(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 3, 4).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape_as(x)
        x = (x @ x.mT).softmax(-1) @ x
        out: Tensor = self.fused(self.ours(x), x, x, need_weights=False)[0]
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_torch_jit_traces_is_traced_as_without() -> None:
    """What was recorded was traced, and the two traces that torch compares differed."""
    model, x = Merged().eval(), torch.randn(1, 5, 12)
    with torch.no_grad():
        want = torch.jit.trace(model, x)
        told = pytest.warns(RuntimeWarning, match="traces could not be recorded")
        with told, watch(model) as record:
            traced = torch.jit.trace(model, x)
            model(x)
    assert len(list(traced.inlined_graph.nodes())) == len(list(want.inlined_graph.nodes()))
    assert not len(record.places) % 4  # torch runs it once more, and compares


class Capturing(nn.Module):
    """A model that has one of its layers captured as a CUDA graph while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 12)
        self.inner = nn.ModuleDict({"words": nn.Embedding(7, 12), "attend": Merged()})
        self.is_capturing = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        self.is_capturing = True
        out: Tensor = self.inner["attend"](x + self.inner["words"](ids))
        self.is_capturing = False
        return F.scaled_dot_product_attention(out, out, out)


def test_what_a_model_captures_inside_as_a_cuda_graph_is_asked_for_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = Capturing().eval(), torch.arange(5)[None]
    with torch.no_grad():
        want = model(ids)
    plain = torch.Tensor.cpu

    def cpu(x: Tensor) -> Tensor:
        assert not model.is_capturing, "this ends the capture"
        return plain(x)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: model.is_capturing)
    told = pytest.warns(RuntimeWarning, match="what a CUDA graph captures could not be recorded")
    with torch.no_grad(), told, watch(model) as record:
        assert torch.equal(model(ids), want)
    assert [place.name for place in record.places] == ["Capturing"]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("way", [torch.func.vmap, torch.func.grad])
def test_what_torch_func_transforms_is_left_out_in_words(way: Any) -> None:
    model, x = Merged().eval(), torch.randn(3, 1, 5, 12)
    runs = {
        torch.func.vmap: lambda: torch.func.vmap(model)(x),
        torch.func.grad: lambda: torch.func.grad(lambda y: model(y).sum())(x[0]),
    }
    want = runs[way]()
    with pytest.raises(ValueError, match=r"runs under torch\.func"), watch(model):
        assert torch.equal(runs[way](), want)
