"""Watching our own models and layers: the same numbers as `observe`, and no bit changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rounding import assert_within, bound_error, bound_weights
from tiny_checkpoints import CONFIGS
from torch import Tensor, nn

import regard
from regard.layers import KVCache, MultiHeadAttention, observing
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.models import Transformer, config_of
from regard.nn import functional
from regard.ops import Causal, Wants, call_hook, op


def make(name: str, **more: Any) -> Transformer:
    torch.manual_seed(11)
    model = Transformer(config_of({**CONFIGS[name], **more})).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.mul_(1.7)
    return model


def draw(n: int, rows: int = 1) -> Tensor:
    return torch.randint(5, 37, (rows, n), generator=torch.Generator().manual_seed(n))


def observe_both(model: Any, call: Callable[[Any], Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Each place's weights as `observing` gives them, and those of the same model in float64."""
    found = []
    for each in (model, copy.deepcopy(model).double()):
        with torch.no_grad(), observing(each, Wants(weights=True)) as seen:
            call(each)
        found.append({name: seen[name].weights for name in seen})
    plain, exact = found
    return {name: (plain[name], exact[name]) for name in plain}


def assert_as_observed(
    record: Record, seen: dict[str, tuple[Tensor, Tensor]], row: int = 0
) -> None:
    assert [place.name for place in record.places] == list(seen)
    for number, place in enumerate(record.places):
        plain, exact = (weights[row] for weights in seen[place.name])
        assert exact.shape == (place.n_heads, place.n_queries, place.n_keys)
        found = np.stack([record.map(number, head) for head in range(place.n_heads)])
        assert_within(found, exact, bound_weights(plain, exact), place.name)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_of_ours(name: str) -> None:
    model, given = make(name), {}
    if model.encoder is not None and model.decoder is not None:
        given["source"] = draw(13)
    ids = draw(11)
    with torch.no_grad():
        before = model(ids, **given)
        with watch(model, keep="qk") as record:
            after = model(ids, **given)
    one, two = (x.logits if x.logits is not None else x.last for x in (before, after))
    assert torch.equal(one, two)
    assert_as_observed(record, observe_both(model, lambda each: each(ids, **given)))
    kinds = {place.kind for place in record.places}
    assert kinds == ({"self", "cross"} if given else {"self"})


def test_progress_is_told_of_each_place_and_changes_nothing() -> None:
    model, ids = make("t5"), draw(11)
    told: list[tuple[str, int]] = []
    with torch.no_grad():
        before = model(ids, source=draw(13)).logits
        with watch(model, keep="qk") as plain:
            model(ids, source=draw(13))
        with watch(model, keep="qk", progress=lambda *step: told.append(step)) as record:
            after = model(ids, source=draw(13)).logits
    assert before is not None and after is not None and torch.equal(before, after)
    assert told == [(place.name, n + 1) for n, place in enumerate(record.places)]
    for number in range(len(record.places)):
        mine, theirs = record.statistics(number), plain.statistics(number)
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_progress_counts_steps_and_its_own_attention_is_not_seen() -> None:
    model, layer = make("llama"), MultiHeadAttention(12, 3)
    told: list[int] = []

    def tell(place: str, n: int) -> None:
        told.append(n)
        layer(torch.zeros(1, 2, 12))

    with torch.no_grad(), watch(model, layers=1, progress=tell) as record:
        cache = model.make_cache()
        model.run(draw(5), cache=cache)
        model.run(draw(1), cache=cache)
    assert told == [1, 2] and [place.layer for place in record.places] == [1]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "bloom", "gemma2", "bert"])
def test_padding(name: str, side: str) -> None:
    model, ids = make(name), draw(13, 2)
    real = torch.ones(2, 13, dtype=torch.bool)
    real[1, slice(0, 5) if side == "left" else slice(8, 13)] = False
    with torch.no_grad():
        before = model(ids, real=real).logits
        with watch(model, keep="qk", row=1) as record:
            after = model(ids, real=real).logits
    assert torch.equal(before, after)
    seen = observe_both(model, lambda each: each(ids, real=real))
    assert_as_observed(record, seen, row=1)
    for number in range(len(record.places)):
        assert np.abs(record.received(number)[:, ~real[1].numpy()]).max() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["own", "growing", "fixed"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "gemma2"])
def test_steps_are_appended_whatever_the_cache(name: str, kind: str, mode: Any) -> None:
    """A window shorter than the text: our windowed caches are rings, in which keys move."""
    more = {"sliding_window": 5} if name in ("mistral", "gemma2") else {}
    model = make(name, **more)
    assert model.decoder is not None
    ids = draw(19)
    make_cache = {
        "own": model.make_cache,
        "growing": lambda: model.decoder.make_cache(KVCache.growing),
        "fixed": lambda: model.decoder.make_cache(lambda: KVCache.fixed(41)),
    }[kind]
    with mode():
        cache = make_cache()
        with watch(model, keep="qk") as record:
            model.run(ids[:, :7], cache=cache)
            model.run(ids[:, 7:10], cache=cache)
            for n in range(10, 19):
                model.run(ids[:, n : n + 1], cache=cache)
    assert {(place.n_queries, place.n_keys) for place in record.places} == {(19, 19)}
    assert_as_observed(record, observe_both(model, lambda each: each.run(ids)))
    for number, place in enumerate(record.places):
        assert record.ids(number).tolist() == ids[0].tolist()
        assert place.causal


def test_a_step_of_another_text_continues_nothing() -> None:
    """Two caches of one length: only the keys tell which text a step belongs to."""
    model, one, two = make("llama"), draw(11), draw(13)[:, :11]
    with torch.no_grad():
        mine, other = model.make_cache(), model.make_cache()
        model.run(two[:, :10], cache=other)
        with watch(model, keep="qk", layers=[0]) as record:
            model.run(one[:, :10], cache=mine)
            model.run(two[:, 10:], cache=other)
            model.run(one[:, 10:], cache=mine)
    found = [(place.name.partition("@")[2], place.n_queries) for place in record.places]
    assert found == [("", 11), ("2", 1)]
    assert one[0, 10] != two[0, 10]
    assert record.ids(0).tolist() == one[0].tolist()


def test_generate_and_translate_are_seen() -> None:
    model = make("llama")
    ids = draw(7)
    plain = regard.generate_ids(model, ids, max_new_tokens=5)
    with watch(model, keep="qk") as record:
        written = regard.generate_ids(model, ids, max_new_tokens=5)
    assert torch.equal(torch.as_tensor(plain.ids), torch.as_tensor(written.ids))
    assert {place.n_queries for place in record.places} == {11}


def test_training_mode_gradients_and_autocast() -> None:
    model, ids = make("gpt2").train(), draw(11)

    def run(watched: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        if watched:
            with watch(model):
                logits = model(ids).logits
        else:
            logits = model(ids).logits
        logits.square().mean().backward()
        grad = next(p for p in model.parameters() if p.grad is not None).grad
        assert grad is not None
        return logits.detach(), grad.clone()

    (one, grad), (two, other) = run(False), run(True)
    assert torch.equal(one, two) and torch.equal(grad, other)


class Direct(nn.Module):
    """A module that calls the operation itself, and one of torch.nn's functions on ours."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(*x.shape[:2], 3, 2, 6).permute(2, 0, 3, 1, 4)
        out = regard.attention(q, k, v, mask=Causal(), softcap=1.5)
        return out + functional.scaled_dot_product_attention(q, k, v)


def test_direct_calls_are_places_of_their_module() -> None:
    model, x = Direct(), torch.randn(1, 7, 12)
    before = model(x)
    with watch(model, keep="qk") as record:
        after = model(x)
    assert torch.equal(before, after)
    assert [place.name for place in record.places] == ["Direct", "Direct@2"]
    assert [place.causal for place in record.places] == [True, False]
    q, k, _ = model.inner(x).view(1, 7, 3, 2, 6).permute(2, 0, 3, 1, 4)
    rule: Any = {"mask": Causal(), "softcap": 1.5, "wants": Wants(weights=True)}
    plain, exact = (
        regard.observe(a, b, None, **rule).weights[0, 1]  # type: ignore[index]
        for a, b in ((q, k), (q.double(), k.double()))
    )
    assert_within(record.map(0, 1), exact, bound_weights(plain, exact))


def test_documents_windows_and_masks_of_every_kind() -> None:
    layer = MultiHeadAttention(12, 2, causal=True, window=(3, 0), sinks=True).eval()
    nn.init.normal_(layer.sinks)  # type: ignore[arg-type]
    x = torch.randn(2, 11, 12)
    ids = torch.tensor([[0] * 5 + [1] * 6, [0] * 3 + [1] * 8])
    random = torch.rand(2, 2, 11, 11) > 0.4
    for mask in (regard.Documents(ids), regard.Lengths(torch.tensor([9, 4])), regard.Dense(random)):
        with torch.no_grad(), watch(layer, keep="qk", row=1) as record:
            layer(x, mask=mask)
        inputs = {torch.float32: x, torch.float64: x.double()}
        seen = observe_both(
            layer, lambda each, m=mask, xs=inputs: each(xs[each.sinks.dtype], mask=m)
        )
        plain, exact = (weights[1] for weights in seen[""])
        found = np.stack([record.map(0, head) for head in range(2)])
        assert_within(found, exact, bound_weights(plain, exact))


def test_observing_a_layer_works_in_a_watched_block() -> None:
    model = make("t5")
    name = "decoder.layers.1.cross_attn"
    layer = model.get_submodule(name)
    with watch(model, keep="qk") as record, observing(layer, Wants(weights=True)) as asked:
        model(draw(7), source=draw(11))
    seen = observe_both(model, lambda each: each(draw(7), source=draw(11)))
    plain, exact = (weights[0, [0, 2]] for weights in seen[name])
    found = np.stack([record.map(record.find(name), head) for head in (0, 2)])
    for each in (found, asked[""].weights[0, [0, 2]]):  # type: ignore[index]
        assert_within(each, exact, bound_weights(plain, exact))


def test_a_forward_that_is_compiled_without_its_module_is_refused_in_words() -> None:
    plain = MultiHeadAttention(12, 2).eval()
    step = torch.compile(plain.forward, backend="eager", fullgraph=True)
    x = torch.randn(1, 5, 12)
    with torch.no_grad():
        want = step(x)
        with (
            pytest.raises(ValueError, match="no attention was seen"),
            watch(plain),
        ):
            step(x)
        assert torch.equal(step(x), want)


def test_compiling_has_no_graph_break_outside_a_block() -> None:
    layer, x = MultiHeadAttention(12, 2).eval(), torch.randn(1, 5, 12)
    torch._dynamo.reset()
    with torch.no_grad():
        explained = torch._dynamo.explain(layer)(x)
        plain = layer(x)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
        exact = copy.deepcopy(layer).double()(x.double())
    assert explained.graph_break_count == 0
    assert_within(compiled, exact, bound_error(plain, exact, n_terms=12))


def test_outside_a_block_no_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an unwatched call costs one comparison with None."""
    layer, x = MultiHeadAttention(12, 2).eval(), torch.randn(1, 5, 12)
    made: list[int] = []
    make_call = op.make_call
    monkeypatch.setattr(
        op, "make_call", lambda *given, **rule: made.append(1) or make_call(*given, **rule)
    )
    layer(x)
    assert call_hook.active is None and not made
    with watch(layer) as record:
        layer(x)
    assert made and call_hook.active is None
    assert [place.name for place in record.places] == ["MultiHeadAttention"]


def test_what_cannot_be_asked_is_refused_in_words() -> None:
    model = make("llama")
    with pytest.raises(ValueError, match='keep="qk"'), watch(model, Wants(weights=True)):
        pass
    with pytest.raises(ValueError, match=r"keep has .all.; expected"), watch(model, keep="all"):
        pass
    with pytest.raises(TypeError, match="keep is True; expected"), watch(model, keep=True):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="tokens is one text"), watch(model, tokens="abc"):
        pass
    with pytest.raises(TypeError, match="Wants"), watch(model, {"entropy"}):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match=r"nn\.Module"), watch(lambda x: x):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="no attention was seen"), watch(model):
        pass
    with pytest.raises(RuntimeError, match="is empty until"), watch(model) as record:
        record.statistics(0)
