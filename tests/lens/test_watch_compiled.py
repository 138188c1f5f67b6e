"""Watching compiled models: the numbers of the same model uncompiled, and one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import transformers
from lens_subjects import SUBJECTS, question
from rounding import assert_within
from tiny_checkpoints import CONFIGS
from torch import Tensor, nn

from regard import hf
from regard.layers import MultiHeadAttention
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.models import Transformer, config_of

KEEP = ("qk", "values", "predictions")
CLOSE = 2e-5
"""Of weights: what an inductor rounds at other places, layer after layer."""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ours(name: str) -> Transformer:
    torch.manual_seed(11)
    model = Transformer(config_of(CONFIGS[name])).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.mul_(1.7)
    return model


def theirs(name: str, implementation: str) -> Any:
    model = SUBJECTS[name]()
    model.set_attn_implementation(implementation)
    return model


def draw(*shape: int) -> Tensor:
    return torch.randint(5, 37, shape, generator=torch.Generator().manual_seed(shape[-1]))


def see(model: Any, run: Callable[[], Any], **options: Any) -> tuple[Record, Any]:
    with torch.no_grad(), watch(model, **{"keep": KEEP, **options}) as record:
        out = run()
    return record, out


def assert_same(found: Record, want: Record, atol: float = 0.0) -> None:
    assert not found.notes and found.places == want.places and found.tokens == want.tokens
    for number, place in enumerate(want.places):
        ids = want.ids(number)
        assert (found.ids(number) is None) == (ids is None)
        assert ids is None or np.array_equal(found.ids(number), ids)
        names = set(want.statistics(number)) - {"peak_key", "top_keys"}
        assert names <= set(found.statistics(number))
        for name in names:
            one, two = (each.statistics(number)[name] for each in (found, want))
            assert np.allclose(one, two, rtol=0, atol=atol * np.abs(two).max()), name
        for head in range(place.n_heads):
            assert_within(found.map(number, head), want.map(number, head), atol)
        norms = want.value_norms(number)
        assert norms is not None
        assert np.allclose(found.value_norms(number), norms, rtol=0, atol=atol * norms.max())
    said = want.next_tokens()
    if said is not None:
        again = found.next_tokens()
        assert again is not None and np.allclose(again.probs, said.probs, rtol=0, atol=atol)
    one, two = found.heads(), want.heads()
    for name in two:
        assert np.allclose(one[name], two[name], rtol=0, atol=30 * atol, equal_nan=True), name


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "t5"))]
)
def test_a_compiled_model_of_ours_is_seen_as_the_model_is(name: str) -> None:
    model, ids = ours(name), draw(1, 11)
    given = {"source": draw(1, 7)} if name == "t5" else {}
    want, _ = see(model, lambda: model(ids, **given))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = fast(ids, **given).logits
    for watched in (model, fast):
        found, out = see(watched, lambda: fast(ids, **given))
        assert torch.equal(out.logits, plain)
        assert_same(found, want, CLOSE)


THEIRS = [
    ("llama", hf.NAME),
    ("llama", "sdpa"),
    *(
        pytest.param(name, implementation, marks=pytest.mark.slow)
        for name, implementation in (
            *(("gemma2", hf.NAME), ("gpt_oss", "eager"), ("bert", "sdpa"), ("t5", hf.NAME)),
        )
    ),
]


@pytest.mark.parametrize(("name", "implementation"), THEIRS)
def test_a_compiled_model_of_transformers_is_seen_as_the_model_is(
    name: str, implementation: str
) -> None:
    model, given = theirs(name, implementation), question(name, "right").given
    want, _ = see(model, lambda: model(**given), row=1)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = fast(**given)[0]
    found, out = see(model, lambda: fast(**given), row=1)
    assert torch.equal(out[0], plain)
    assert_same(found, want, CLOSE)


class Compiled:
    """Ways to a compiled model, each given the uncompiled one."""

    @staticmethod
    def module(model: nn.Module) -> Any:
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    @staticmethod
    def in_place(model: nn.Module) -> Any:
        model.compile(backend="aot_eager", fullgraph=True)
        return model

    @staticmethod
    def function(model: nn.Module) -> Any:
        return torch.compile(
            lambda *args, **kwargs: model(*args, **kwargs), backend="aot_eager", fullgraph=True
        )

    @staticmethod
    def layers(model: Any) -> Any:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = torch.compile(layer, backend="aot_eager")
        return model

    @staticmethod
    def layers_in_place(model: Any) -> Any:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        return model


WAYS = [
    *((way, hf.NAME, True) for way in ("in_place", "function")),
    *((way, "sdpa", True) for way in ("module", "layers", "layers_in_place")),
    ("function", "sdpa", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "implementation", "before"), WAYS)
def test_however_a_model_is_compiled(way: str, implementation: str, before: bool) -> None:
    """Also where it ran before the block, so that there is a graph which tells nothing."""
    model, given = theirs("llama", implementation), question("llama").given
    want, _ = see(model, lambda: model(**given))
    fast = getattr(Compiled, way)(model)
    with torch.no_grad():
        if before:
            fast(**given)
        for _ in range(2):
            found, _ = see(model, lambda: fast(**given))
            assert_same(found, want, CLOSE)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_blocks_share_a_graph_and_leave_the_one_outside_alone() -> None:
    model, ids = ours("llama"), draw(1, 11)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    fast = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        fast(ids)
        for _ in range(12):
            with watch(model):
                fast(ids)
        fast(ids)
    assert len(graphs) == 2
    told = [sum("regard.hear" in name for name in names) for names in graphs]
    assert told == [0, 3]
    assert not any("regard.enter_module" in name for name in graphs[0])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["ours", "sdpa"])
def test_by_inductor(implementation: str) -> None:
    if implementation == "ours":
        model, given = ours("llama"), {"ids_bt": draw(1, 11)}
    else:
        model, given = theirs("llama", implementation), question("llama").given
    want, _ = see(model, lambda: model(**given))
    fast = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        plain = fast(**given).logits
    found, out = see(model, lambda: fast(**given))
    assert torch.equal(out.logits, plain)
    assert_same(found, want, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [hf.NAME, "sdpa"])
def test_a_generation_that_transformers_compiles(implementation: str) -> None:
    model, ids = theirs("llama", implementation), question("llama").given["input_ids"]
    compiled = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True
    given = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    given["attention_mask"] = torch.ones_like(ids)
    want, plain = see(model, lambda: model.generate(ids, disable_compile=True, **given))
    assert torch.equal(model.generate(ids, compile_config=compiled, **given), plain)
    found, out = see(model, lambda: model.generate(ids, compile_config=compiled, **given))
    assert torch.equal(out, plain)
    assert found.places[0].n_queries == ids.shape[1] + 4
    assert_same(found, want, CLOSE)


class Mixed(nn.Module):
    """Attention of ours, and torch.nn's."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = MultiHeadAttention(12, 3)
        self.torchs = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ours(x)
        out: Tensor = self.torchs(x, x, x, need_weights=False)[0]
        return out


def test_what_compiled_code_does_unseen_is_noted() -> None:
    torch.manual_seed(3)
    model, x = Mixed().eval(), torch.randn(1, 7, 12)
    fast = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        plain = fast(x)
        with pytest.warns(RuntimeWarning, match="torchs could not be recorded"):
            record, out = see(model, lambda: fast(x), keep="qk")
    assert torch.equal(out, plain)
    assert [place.name for place in record.places] == ["ours"]
    assert "compiled code is seen where" in record.notes[0]


def test_gradients_of_compiled_code_are_refused_in_words() -> None:
    model, x = Mixed().ours, torch.randn(1, 7, 12, requires_grad=True)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="not compiled"), watch(model, keep="gradients"):
        fast(x).sum().backward()


@pytest.mark.slow
def test_a_graph_for_all_lengths() -> None:
    """Sizes and numbers that a graph leaves open, as scale and softcap are then."""
    model = ours("gemma2")
    fast = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for n_tokens in (11, 13, 17):
        ids = draw(1, n_tokens)
        want, _ = see(model, lambda ids=ids: model(ids))
        found, _ = see(model, lambda ids=ids: fast(ids))
        assert_same(found, want, CLOSE)


@pytest.mark.slow
def test_training_by_a_compiled_model_is_the_same_while_it_is_watched() -> None:
    model = theirs("llama", "sdpa")
    fast, ids = torch.compile(model, backend="aot_eager", fullgraph=True), draw(2, 11)
    gradients = []
    for watched in (False, True):
        model.zero_grad()
        with watch(model, row=1) if watched else nullcontext() as record:
            fast(ids).logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(record.places) == 3
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
