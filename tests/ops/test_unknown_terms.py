"""A mask and a bias that the package does not know, each in a few lines, work wherever ours do.

They are written as a user would write them, against `ops/term.py` alone; nothing in the package has
their names.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import regard
from regard import Bias, Causal, Mask, Wants, attention, explain, observe
from regard.layers import KVCache, MultiHeadAttention, observing
from regard.lens import Record
from regard.ops.backends import BACKENDS
from regard.ops.shape import Shape, pick_axis
from regard.ops.term import Cut
from regard.training.parallel.context import Parts


@dataclass(frozen=True, eq=False)
class LikeColours(Mask):
    """A query sees keys whose colour is at most `spread` away from its own."""

    keys: Tensor
    queries: Tensor
    spread: int = 1
    axes = {"keys": "B S", "queries": "B T"}  # noqa: RUF012
    follows_keys = True

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        own = pick_axis(self.queries, b, i - shape.offset)
        return (own - pick_axis(self.keys, b, j)).abs() <= self.spread


@dataclass(frozen=True, eq=False)
class Ripple(Bias):
    """A wave over the distance, of a height that each head has learned."""

    height: Tensor
    axes = {"height": "H"}  # noqa: RUF012
    relative = True
    hides = False

    def add(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape, dtype: torch.dtype
    ) -> Tensor:
        return self.height.to(dtype)[h] * torch.cos((i - j).to(dtype))


@dataclass(frozen=True, eq=False)
class EveryThird(Mask):
    """Keys at a distance that three divides: a mask that speaks of positions alone."""

    relative = True
    positional = True
    sees_itself = True

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        return (i - j) % 3 == 0


B, H, T, D = 2, 4, 13, 8


def terms() -> tuple[LikeColours, Ripple]:
    colours = torch.randint(0, 5, (B, T), generator=torch.Generator().manual_seed(5))
    return LikeColours(colours, colours), Ripple(torch.linspace(-2.0, 2.0, H))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(B, n, T, D, generator=generator).to(dtype) for n in (H, 2, 2))
    return q, k, v


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: LikeColours, bias: Ripple
) -> tuple[Tensor, Tensor]:
    """The formula, with both spelled out once more."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    seen = (mask.queries[:, :, None] - mask.keys[:, None]).abs() <= 1
    scores = q @ k.repeat_interleave(2, 1).mT / D**0.5
    scores = scores + bias.height.to(q)[:, None, None] * torch.cos((i - j).to(q.dtype))
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return weights @ v.repeat_interleave(2, 1), weights


def test_both_are_written_in_under_twenty_lines() -> None:
    for kind in (LikeColours, Ripple, EveryThird):
        assert len(inspect.getsource(kind).splitlines()) < 20


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_every_backend_equals_the_formula_or_refuses_in_words(backend: str) -> None:
    mask, bias = terms()
    q, k, v = inputs()
    truth, _ = by_hand(*inputs(torch.float64), mask, bias)
    reason = explain(q, k, v, mask=mask, bias=bias).verdicts.get(backend)
    if backend == "triton" or reason is not None:
        with pytest.raises(ValueError, match=r"refuses this call: (our kernels|FlexAttention) "):
            attention(q, k, v, mask=mask, bias=bias, backend=backend)
        return
    ours = attention(q, k, v, mask=mask, bias=bias, backend=backend)
    torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=0)


def test_what_is_seen_of_the_weights_is_the_matrix() -> None:
    mask, bias = terms()
    q, k, v = inputs(torch.float64)
    truth, weights = by_hand(q, k, v, mask, bias)
    seen = observe(q, k, v, mask=mask, bias=bias, wants=Wants(entropy=True, received=True, top=3))
    torch.testing.assert_close(seen.output, truth)
    torch.testing.assert_close(seen.received.total, weights.sum(2))
    torch.testing.assert_close(seen.top.weight, weights.topk(3).values)


def test_a_learned_bias_is_taught_by_the_reference_and_refused_by_tiles() -> None:
    mask, bias = terms()
    q, k, v = inputs(torch.float64)
    learned = Ripple(bias.height.double().requires_grad_())
    attention(q, k, v, mask=mask, bias=learned).square().sum().backward()
    ours, learned.height.grad = learned.height.grad, None
    by_hand(q, k, v, mask, learned)[0].square().sum().backward()
    torch.testing.assert_close(ours, learned.height.grad)
    with pytest.raises(ValueError, match="Ripple does not tell its gradient"):
        attention(q, k, v, bias=learned, softcap=5.0, backend="blockwise")


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_compiled_as_one_graph_it_is_the_same(softcap: float | None) -> None:
    mask, bias = terms()
    q, k, v = inputs()

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return attention(q, k, v, mask=mask & Causal(), bias=bias, softcap=softcap)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, mask), run(q, k, v, mask), atol=1e-5, rtol=0)


def test_each_is_a_node_of_torchs_pytrees() -> None:
    mask, bias = terms()
    wide = _pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, (~mask, bias))
    assert wide[1].height.dtype == torch.float64 and wide[0].inner.spread == 1
    leaves, _ = _pytree.tree_flatten(mask & Causal())
    assert [leaf.data_ptr() for leaf in leaves] == [mask.keys.data_ptr(), mask.queries.data_ptr()]


def test_a_cache_gives_positions_to_what_speaks_of_them() -> None:
    """Token by token through caches of two kinds, as all at once."""
    bias = Ripple(torch.linspace(-2.0, 2.0, H))
    layer = MultiHeadAttention(H * D, H, causal=True)
    x = torch.randn(B, T, H * D)
    with torch.no_grad():
        whole = layer(x, mask=EveryThird(), bias=bias)
        for cache in (KVCache.growing(), KVCache.fixed(T + 3)):
            steps = [
                layer(x[:, t : t + 1], mask=EveryThird(), bias=bias, cache=cache) for t in range(T)
            ]
            torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=0)


def test_layers_are_observed_under_it() -> None:
    mask, bias = terms()
    layer = MultiHeadAttention(H * D, H)
    with observing(layer, Wants(weights=True)) as seen, torch.no_grad():
        layer(torch.randn(B, T, H * D), mask=mask, bias=bias)
    hidden = ~mask.dense(Shape(B, H, T, T)).expand(B, H, T, T)
    assert (seen[""].weights[hidden] == 0).all() and (seen[""].weights[~hidden] > 0).all()


class Attends(nn.Module):
    def __init__(self, mask: Mask, bias: Bias) -> None:
        super().__init__()
        self.mask, self.bias = mask, bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=self.mask, bias=self.bias)


def test_a_record_made_under_it_is_saved_opened_and_exact(tmp_path: Path) -> None:
    mask, bias = terms()
    q, k, v = inputs()
    model = Attends(mask, bias)
    with regard.watch(model, row=1) as record:
        watched = model(q, k, v)
    assert torch.equal(watched, model(q, k, v))
    record.save(tmp_path / "unknown.regard")
    opened = Record.open(tmp_path / "unknown.regard")
    _, weights = by_hand(*inputs(torch.float64), mask, bias)
    for head in range(H):
        found = torch.stack([torch.from_numpy(opened.rows(0, head, t).copy()) for t in range(T)])
        torch.testing.assert_close(found.double(), weights[1, head], atol=1e-5, rtol=0)


def test_it_is_cut_to_a_row_heads_and_keys() -> None:
    mask, bias = terms()
    heads = torch.tensor([3, 1])
    cut = mask.cut(Cut(row=1, keys=slice(2, 9)))
    whole = mask.dense(Shape(B, H, T, T))[1:, ..., 2:9]
    assert torch.equal(cut.dense(Shape(1, H, T, 7)).expand_as(whole), whole)
    assert torch.equal(bias.cut(Cut(heads=heads)).height, bias.height[heads])


def test_one_that_does_not_name_its_axes_is_refused_with_the_line_to_write() -> None:
    @dataclass(frozen=True, eq=False)
    class Nameless(Mask):
        marked: Tensor

        def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
            return self.marked[j] | (i == j)

    q, k, v = inputs()
    mask = Nameless(torch.arange(T) % 2 == 0)
    attention(q, k, v, mask=mask)
    with pytest.raises(ValueError, match=r'write axes = {"marked": "B S"}'):
        mask.cut(Cut(row=0))


def test_context_parallel_gathers_what_belongs_to_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank asks the others for, with two ranks whose parts are alike."""
    mask, _ = terms()
    parts = Parts(None, 0, 2)  # type: ignore[arg-type]
    monkeypatch.setattr(parts, "gather", lambda x, axis: torch.cat([x, x], axis))
    widened = parts.widen(mask & EveryThird())
    assert torch.equal(widened.one.keys, torch.cat([mask.keys, mask.keys], 1))
    assert torch.equal(widened.one.queries, mask.queries)
    with pytest.raises(ValueError, match="Dense counts keys"):
        parts.widen(mask & regard.Dense(torch.ones(T, T, dtype=torch.bool)))


def test_two_classes_of_one_name_stay_apart_in_graphs() -> None:
    def make(step: int) -> Mask:
        @dataclass(frozen=True, eq=False)
        class Steps(Mask):
            def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
                return (i - j) % step == 0

        return Steps()

    q, k, v = inputs()
    run = torch.compile(
        lambda mask: attention(q, k, v, mask=mask, softcap=5.0), fullgraph=True, backend="eager"
    )
    masks = make(2), make(3)
    found = [run(mask) for mask in masks]
    for ours, mask in zip(found, masks, strict=True):
        torch.testing.assert_close(ours, attention(q, k, v, mask=mask, softcap=5.0))
    assert not torch.equal(*found)


def test_a_term_is_an_input_of_an_exported_program() -> None:
    class Takes(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
            return attention(q, k, v, mask=mask)

    mask, _ = terms()
    q, k, v = inputs()
    exported = torch.export.export(Takes(), (q, k, v, mask))
    other = LikeColours(mask.keys.flip(0), mask.queries.flip(0))
    for given in (mask, other):
        torch.testing.assert_close(exported.module()(q, k, v, given), Takes()(q, k, v, given))


@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
def test_one_tensor_given_three_times_compiles_with_its_gradient(backend: str) -> None:
    q = inputs()[0].requires_grad_()

    def run(x: Tensor) -> Tensor:
        return attention(x, x, x, mask=Causal(), backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(q).square().sum(), q)
    (plain,) = torch.autograd.grad(run(q).square().sum(), q)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
