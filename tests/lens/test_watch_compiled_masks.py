"""Watching compiled models: a mask is read once in a forward pass, and none is taken for another.

Inductor writes masks into memory that it uses again, a copy for each layer, and counts no versions.
`Pool` does the same on purpose.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from lens_subjects import SUBJECTS, question
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef

from regard.layers import MultiHeadAttention
from regard.lens import mask_runs
from regard.lens.captured_call import Call
from regard.lens.mask_runs import find_runs
from regard.lens.measure import rule_key
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import Dense, call_hook

N_LAYERS, T = 3, 7
CLOSE = 2e-5
"""Of weights: what an inductor rounds at other places, layer after layer."""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rules of which runs were found."""
    rules: list[Any] = []
    monkeypatch.setattr(mask_runs, "find_runs", lambda one: (rules.append(one), find_runs(one))[1])
    return rules


class Pool(fx.Interpreter):
    """Runs a graph, and gives every reported call its mask in other memory than the one before.

    Or, if it `reuses` it, in the same, as a tensor whose version stays. What is given to the graph
    stays where it is.
    """

    def __init__(self, graph: fx.GraphModule, reuses: bool) -> None:
        super().__init__(graph)
        self.reuses, self.written = reuses, dict[Any, Tensor]()
        self.given: list[Any] = []

    def boxed_run(self, args_list: list[Any]) -> Any:
        self.given = [*args_list]
        try:
            return super().boxed_run(args_list)
        finally:
            self.given.clear()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if args and args[0] is torch.ops.regard.hear.default:
            kwargs = kwargs | {"tensors": [self.write(x) for x in kwargs["tensors"]]}
        if target is torch.ops.regard.number_rule.default:
            args = [self.write(x) for x in args[0]], *args[1:]
        return super().call_function(target, args, kwargs)

    def write(self, x: Tensor) -> Tensor:
        if any(x is one for one in self.given):
            return x
        if not self.reuses:
            return x.clone()
        there = self.written.setdefault((x.shape, x.dtype), torch.empty_like(x))
        there.numpy()[:] = x.numpy()
        return there


def pooling(reuses: bool) -> Any:
    def compile_graph(graph: Any, inputs: Any) -> Any:
        pool = Pool(graph, reuses)

        def run(given: list[Any]) -> Any:
            return pool.boxed_run(given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=compile_graph)


INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)
BACKENDS = [pooling(False), pooling(True), "eager", "aot_eager", INDUCTOR]
NAMED = ["pool", "reused", "eager", "aot_eager", "inductor"]
FEW, FEW_NAMED = [*BACKENDS[:2], INDUCTOR], [*NAMED[:2], "inductor"]
MODES = [torch.no_grad, torch.inference_mode, nullcontext]


class Layers(nn.Module):
    """Layers of ours, each under the mask that `masks` makes of its input and of what is given."""

    def __init__(self, masks: list[Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.masks = masks
        self.layers = nn.ModuleList(MultiHeadAttention(12, 3) for _ in masks)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x = layer(x, mask=Dense(mask(x, given)))
        return x


def computed(step: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Every step-th key before a query; not known before the layer's input is."""

    def mask(x: Tensor, given: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        ago = i[:, None] - i + 0 * x.isnan().any()
        return ((ago >= 0) & (ago % step == 0))[None, None]

    return mask


class Shared(Layers):
    """One mask for all layers, which they look at through views of their own."""

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        mask = self.masks[0](x, given)
        for layer in self.layers:
            n = x.shape[1]
            x = layer(x, mask=Dense(mask[0, 0, :n, :n].to(torch.uint8)[None, None].bool()))
        return x


def as_given(x: Tensor, given: Tensor) -> Tensor:
    return given


def see(
    model: nn.Module, run: Callable[[], Any], mode: Any = torch.no_grad, **options: Any
) -> Record:
    with mode(), watch(model, keep="qk", **options) as record:
        run()
    return record


def assert_same(one: Record, two: Record) -> None:
    """The same records: of the visible keys in every number."""
    assert not one.notes and [p.name for p in one.places] == [p.name for p in two.places]
    for number, place in enumerate(two.places):
        for head in range(place.n_heads):
            a, b = one.map(number, head), two.map(number, head)
            assert np.array_equal(a == 0, b == 0)
            assert np.allclose(a, b, rtol=0, atol=CLOSE)


def draw() -> Tensor:
    return torch.randn(1, T, 12, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS, ids=NAMED)
def test_a_mask_that_layers_share_is_read_once(backend: Any, mode: Any, found: list[Any]) -> None:
    model, x = Shared([computed(2)] * N_LAYERS).eval(), draw()
    want = see(model, lambda: model(x, x))
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        found.clear()
        assert_same(see(model, lambda: fast(x, x), mode), want)
        assert len(want.places) == N_LAYERS
        assert len(found) == (N_LAYERS if backend == "eager" else 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", FEW, ids=FEW_NAMED)
def test_a_model_of_transformers_shares_its_mask(backend: Any, mode: Any, found: list[Any]) -> None:
    model, given = SUBJECTS["llama"](), question("llama", "left").given
    model.set_attn_implementation("sdpa")
    want = see(model, lambda: model(**given), row=1)
    fast = torch.compile(model, backend=backend, fullgraph=True)
    found.clear()
    assert_same(see(model, lambda: fast(**given), mode, row=1), want)
    assert len(found) == 1 and len(want.places) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", FEW, ids=FEW_NAMED)
def test_no_mask_is_taken_for_another_of_its_shape(
    backend: Any, mode: Any, found: list[Any]
) -> None:
    model, x = Layers([computed(n) for n in (1, 2, 3, 1)]).eval(), draw()
    want = see(model, lambda: model(x, x))
    fast = torch.compile(model, backend=backend, fullgraph=True)
    assert_same(see(model, lambda: fast(x, x), mode), want)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("backend", BACKENDS, ids=NAMED)
def test_masks_may_change_between_the_passes_of_a_block(backend: Any, mode: Any) -> None:
    """One that is given is written to in place; one that is computed is another each time."""

    def by_given(x: Tensor, given: Tensor) -> Tensor:
        return ~given.roll(1, -1) | torch.eye(T).bool()

    model, x = Layers([as_given, by_given]).eval(), draw()
    fast = torch.compile(model, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(7)
    masks = [torch.rand(1, 1, T, T, generator=generator) < 0.5 for _ in range(3)]
    records = []
    for run in (model, fast):
        with mode():
            given = torch.zeros_like(masks[0])
            with watch(model, keep="qk") as record:
                for mask in masks:
                    run(x, given.copy_(mask))
        records.append(record)
    assert len(records[0].places) == 6
    assert_same(records[1], records[0])


@pytest.mark.parametrize("backend", FEW, ids=FEW_NAMED)
def test_rows_and_heads_see_what_the_mask_shows_them(backend: Any, found: list[Any]) -> None:
    """And what is found of each row is found once."""

    def of_rows(x: Tensor, given: Tensor) -> Tensor:
        return ~given.flip(3) | torch.eye(T).bool()

    model, x = Shared([of_rows] * N_LAYERS).eval(), draw().expand(3, -1, -1).contiguous()
    given = torch.rand(3, 3, T, T, generator=torch.Generator().manual_seed(9)) < 0.5
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for options in ({"row": [2, 0]}, {"row": 1, "heads": [2, 0]}):
        want = see(model, lambda: model(x, given), **options)
        found.clear()
        assert_same(see(model, lambda: fast(x, given), **options), want)
        n_rows = len(want.places) // N_LAYERS
        assert len(found) == n_rows and n_rows in (1, 2)


def test_a_number_stands_for_the_part_of_a_rule_that_a_call_is_cut_to() -> None:
    q, mask = torch.randn(2, 3, T, 5), torch.rand(2, 3, T, T) < 0.5
    call = Call(name="", q=q, k=q, mask=Dense(mask), rule_number=5)
    some, row = torch.tensor([3, 1]), call.of(0, None)
    cuts = [call, row, call.of(1, None), call.of(0, (0,)), call.of(0, (2,))]
    cuts += [row.with_keys(slice(0, 3)), row.with_keys(slice(3, 6))]
    cuts += [row.with_keys(some), row.with_keys(some)]
    assert len({cut.rule_number for cut in cuts}) == len(cuts)
    assert len({rule_key(cut.rule, cut.rule_number) for cut in cuts}) == len(cuts)
    assert call.of(0, (2,)).rule_number == cuts[4].rule_number
    assert replace(call, rule_number=None).of(0, (2,)).with_keys(some).rule_number is None


def test_layers_that_are_compiled_one_by_one_share_what_is_given(found: list[Any]) -> None:
    """Until it is written to, in the same block."""
    models, x = [Layers([as_given] * N_LAYERS).eval() for _ in range(2)], draw()
    for layer in models[1].layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    records = []
    for model in models:
        given = torch.rand(1, 1, T, T, generator=torch.Generator().manual_seed(9)) < 0.5
        found.clear()
        with torch.no_grad(), watch(model, keep="qk") as record:
            for _ in range(2):
                model(x, given)
                given.logical_not_()
        assert len(found) == 2
        records.append(record)
    assert len(records[0].places) == 2 * N_LAYERS
    assert_same(records[1], records[0])


def test_a_graph_is_kept_for_a_later_block() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    model, x = Shared([computed(2)] * N_LAYERS).eval(), draw()
    fast = torch.compile(model, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    for _ in range(3):
        record = see(model, lambda: fast(x, x))
        assert len(record.places) == N_LAYERS
    assert len(graphs) == 1
    assert sum("number_rule" in name for name in graphs[0]) == 1


def test_no_mask_of_a_graph_is_kept() -> None:
    """Not even in the block, where a number stands for it."""
    kept: list[Any] = []

    class Noting(Pool):
        def write(self, x: Tensor) -> Tensor:
            found = x.clone()
            kept.append(StorageWeakRef(found.untyped_storage()))
            return found

    def backend(graph: Any, inputs: Any) -> Any:
        def run(given: list[Any]) -> Any:
            return Noting(graph, False).boxed_run(given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    model, x = Shared([computed(2)] * N_LAYERS).eval(), draw()
    fast = torch.compile(model, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    with torch.no_grad(), watch(model) as record:
        fast(x, x)
        gc.collect()
        assert len(kept) == N_LAYERS + 1 and all(one.expired() for one in kept)
    assert len(record.places) == N_LAYERS


@pytest.mark.slow
def test_inductor_writes_a_mask_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, plain = [], call_hook.unpack

    def note(packed: Any, shape: Any) -> Any:
        addresses.append([x.data_ptr() for x in packed.tensors])
        return plain(packed, shape)

    model, given = SUBJECTS["llama"](), question("llama", "left").given
    model.set_attn_implementation("sdpa")
    fast = torch.compile(model, fullgraph=True)
    monkeypatch.setattr(call_hook, "unpack", note)
    see(model, lambda: fast(**given), row=1)
    assert len(addresses) == N_LAYERS and len({*map(tuple, addresses)}) == 1
