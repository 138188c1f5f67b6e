"""Layers that are looked at by launching a graph again are seen as if each came first.

On a CPU what stands for CUDA tells how captures begin and end.
"""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from regard.lens import cuda_graphs, look_at_calls, mask_runs, measure, stitch_calls
from regard.lens.by_identity import ByIdentity
from regard.lens.captured_call import Call
from regard.lens.device_to_host import HostCopier
from regard.lens.head_scores import NamedSpots
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import ALiBi, Causal, Documents, Lengths, Wants, Window, attention

T, N_LAYERS = 521, 5
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Window(300, 70)},
    "scale": {"mask": Causal(), "scale": 0.3, "softcap": 3.0},
    "slopes": {"mask": Causal(), "bias": ALiBi(6)},
    "padding": {"mask": Causal() & Lengths(torch.tensor([401]), side="left")},
    "documents": {"mask": Causal() & Documents(torch.arange(T) // 100)},
    "sinks": {"mask": Causal(), "sinks": torch.randn(6)},
}


class Layers(torch.nn.Module):
    """Some layers of attention, each with queries and keys of its own."""

    def __init__(self, *rules: dict[str, Any]) -> None:
        super().__init__()
        self.rules = rules * N_LAYERS
        self.attend = torch.nn.ModuleList(torch.nn.Identity() for _ in self.rules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for rule, layer in zip(self.rules, self.attend, strict=True):
            q, k = layer(x).roll(1, 3), x[:, ::2].roll(7, 2)
            x = x + torch.nn.functional.normalize(attention(q, k, k, **rule), dim=3)
        return x


def model_of(*names: str) -> Layers:
    rules = [
        {what: x.to("cuda") if hasattr(x, "to") else x for what, x in RULES[name].items()}
        for name in names
    ]
    return Layers(*rules)


def draw(batch: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, 6, T, 64, device="cuda", dtype=torch.bfloat16)


def seen(model: Layers, x: torch.Tensor, **asked: Any) -> tuple[Record, torch.Tensor]:
    with torch.no_grad(), watch(model, **asked) as record:
        out = model(x)
    return record, out


def assert_same(one: Record, other: Record) -> None:
    assert one.places == other.places
    for place in range(len(one.places)):
        ours, theirs = one.statistics(place), other.statistics(place)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for name, scores in one.heads().items():
        np.testing.assert_array_equal(scores, other.heads()[name], err_msg=name)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each launch of a graph."""
    monkeypatch.setattr(cuda_graphs, "COMPILED", set())
    found: list[int] = []
    plain = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        found.append(1)
        plain(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    return found


WANTS = {
    "as it comes": None,
    "a map": Wants(entropy=True, peak=True, distance=True, received=True, map=(29, 31)),
    "a mass": Wants(mass=torch.arange(T) % 7 == 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["statistics", "qk"])
@pytest.mark.parametrize("wants", WANTS)
@pytest.mark.parametrize("name", RULES)
def test_they_tell_the_same_in_every_bit(
    name: str, wants: str, keep: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of(name), draw()
    asked = {"wants": WANTS[wants], "keep": keep}
    with torch.no_grad():
        unseen = model(x)
    record, out = seen(model, x, **asked)
    # Sinks are asked of the device which rows see anything.
    assert len(replays) == (0 if name == "sinks" else N_LAYERS - 1)
    assert torch.equal(out, unseen)
    again, _ = seen(model, x, **asked)
    # Another block begins with a graph, as all is compiled.
    assert len(replays) == (0 if name == "sinks" else 2 * N_LAYERS - 1)
    assert_same(record, again)
    monkeypatch.setattr(look_at_calls, "suits_graphs", lambda _: False)
    replays.clear()
    assert_same(record, seen(model, x, **asked)[0])
    assert not replays


@pytest.mark.gpu
def test_layers_of_two_rules_and_texts_of_two_lengths_have_graphs_of_their_own(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of("causal", "window"), draw(3)

    def look() -> Record:
        with torch.no_grad(), watch(model, row=[0, 2]) as record:
            model(x)
            model(x[:, :, : T - 100].flip(2))
        return record

    record = look()
    assert len(replays) == 2 * 2 * 2 * N_LAYERS - 2 * 2
    monkeypatch.setattr(look_at_calls, "suits_graphs", lambda _: False)
    assert_same(record, look())


def own_masks(device: str, n: int) -> Layers:
    """Layers for three rows of n tokens, by rules of two forms; each second pair has its own."""
    rules: list[dict[str, Any]] = []
    for _ in range(2):
        lengths, ids = torch.randint(n // 2, n, (3,)), torch.randint(0, 5, (3, n)).sort(1).values
        rules += [{"mask": Causal() & Lengths(lengths.to(device), side="left")}]
        bias = torch.randn(3, 1, 1, n, device=device).expand(3, 6, n, n)
        rules += [{"mask": Documents(ids.to(device)), "bias": bias}]
    return Layers(*rules)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [[0, 2, 1], [0, 1, 2]], ids=["alone", "together"])
def test_rows_and_layers_with_masks_of_their_own_are_looked_at_by_one_graph_on_a_gpu(
    row: list[int], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, asked = own_masks("cuda", T), draw(3), {"wants": WANTS["a map"], "row": row}
    record, _ = seen(model, x, **asked)
    calls = 1 if row == [0, 1, 2] else 3
    assert len(replays) == calls * len(model.rules) - 2
    monkeypatch.setattr(look_at_calls, "suits_graphs", lambda _: False)
    assert_same(record, seen(model, x, **asked)[0])


@pytest.mark.gpu
def test_masks_too_large_to_be_copied_are_looked_at_where_they_are(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of("padding", "causal"), draw()
    want, _ = seen(model, x)
    assert len(replays) == 2 * (N_LAYERS - 1)
    replays.clear()
    monkeypatch.setattr(look_at_calls, "COPIED", 0)
    assert_same(seen(model, x)[0], want)
    assert len(replays) == N_LAYERS, "those of the mask that holds no tensor"


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["statistics", "qk"])
def test_a_model_in_inference_mode_is_seen_as_in_any_other(keep: str, replays: list[int]) -> None:
    model, x = model_of("padding"), draw()
    asked = {"wants": WANTS["a map"], "keep": keep}
    want, unseen = seen(model, x, **asked)
    with torch.inference_mode():
        record, out = seen(model, x, **asked)
    assert len(replays) == 2 * N_LAYERS - 1 and not record.notes
    assert torch.equal(out, unseen)
    assert_same(record, want)


@pytest.mark.gpu
def test_what_cannot_be_captured_is_answered_as_it_comes(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = look_at_calls.look_at

    def look(*args: Any) -> dict[str, torch.Tensor]:
        found = plain(*args)
        assert found["lse"].sum().item() != 0
        return found

    model, x = model_of("causal"), draw()
    want, _ = seen(model, x)
    assert replays
    replays.clear()
    monkeypatch.setattr(look_at_calls, "look_at", look)
    record, _ = seen(model, x)
    assert not replays
    assert_same(record, want)
    # Random numbers are drawn as ever, and the next block has graphs again.
    assert float(torch.randn(3, device="cuda").abs().sum()) > 0
    monkeypatch.setattr(look_at_calls, "look_at", plain)
    assert_same(seen(model, x)[0], want)
    assert len(replays) == N_LAYERS


@pytest.mark.gpu
def test_watching_draws_no_random_numbers_and_lets_go_of_what_it_measured() -> None:
    model, x = model_of("causal"), draw()
    seen(model, x)
    gc.collect()
    torch.cuda.synchronize()
    before, drawn = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    gc.disable()
    try:
        record, out = seen(model, x)
        del out
        # All but what waits for the garbage collector, which is less than one head's map.
        assert torch.cuda.memory_allocated() - before < 2 * stitch_calls.PICTURE**2
    finally:
        gc.enable()
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
    assert len(record.places) == N_LAYERS


@pytest.mark.gpu
def test_blocks_of_several_threads_capture_at_the_same_time() -> None:
    names = ("causal", "plain", "window", "scale")
    models, x = {name: model_of(name) for name in names}, draw()
    want = {name: seen(model, x)[0] for name, model in models.items()}
    found: list[tuple[str, Record]] = []

    def look(name: str) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for _ in range(3):
            with torch.cuda.stream(stream):
                found.append((name, seen(models[name], x)[0]))

    threads = [threading.Thread(target=look, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 * len(names)
    for name, record in found:
        assert_same(record, want[name])


@pytest.mark.gpu
def test_a_graph_of_the_models_own_is_captured_as_ever() -> None:
    model, x = model_of("causal"), draw()
    want, unseen = seen(model, x)
    graph = torch.cuda.CUDAGraph()
    told = pytest.warns(RuntimeWarning, match="a CUDA graph captures")
    with torch.no_grad(), told, watch(model) as record:
        model(x)
        with torch.cuda.graph(graph):
            out = model(x)
    graph.replay()
    assert torch.equal(out, unseen)
    assert_same(record, want)


class Cuda:
    """What stands for CUDA: it captures nothing, and keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[FakeGraph] = []
        self.live: dict[Any, weakref.WeakSet[FakeGraph]] = {}
        self.streams: list[Any] = []
        self.given_back: list[tuple[str, int, Any]] = []
        self.fails, self.keeps = False, True
        cuda: dict[str, Any] = {
            "CUDAGraph": lambda: FakeGraph(self),
            "Stream": object,
            "stream": lambda stream: nullcontext(self.streams.append(stream)),
            "device": nullcontext,
            "current_stream": lambda: "the stream",
            "current_device": lambda: 3,
            "graph_pool_handle": lambda: (0, 7),
        }
        for name, what in cuda.items():
            monkeypatch.setattr(torch.cuda, name, what)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(
                torch._C, name, lambda *given, name=name: self.given_back.append((name, *given))
            )
        plain = torch.zeros

        def zeros(*size: Any, device: Any = "cpu", **how: Any) -> torch.Tensor:
            return plain(*size, device="cpu" if device == "cuda" else device, **how)

        monkeypatch.setattr(torch, "zeros", zeros)
        monkeypatch.setattr(cuda_graphs, "COMPILED", {"one", "two"})


class FakeGraph:
    """A graph of nothing."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.is_open = cuda, False
        if cuda.keeps:
            cuda.graphs.append(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        live = self.cuda.live.setdefault(pool, weakref.WeakSet([self]))
        if not live and pool is not None:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        live.add(self)
        self.is_open, self.pool = True, pool

    def capture_end(self) -> None:
        self.is_open = False
        if self.pool is not None and self.cuda.fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        pass


def answer(replays: cuda_graphs.Replays, form: str, error: Exception | None = None) -> Any:
    """What is asked about a tensor of ones: itself twice; once the graph is captured, an error."""
    calls: list[int] = []

    def look(x: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(1)
        if error is not None and len(calls) == 1:
            raise error
        return {"twice": 2 * x}

    return replays.answer(form, [torch.ones(3)], lambda given: lambda: look(*given))


def test_an_error_of_any_kind_ends_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, replays = Cuda(monkeypatch), cuda_graphs.Replays(3)
    with pytest.raises(ValueError, match="no such map"):
        answer(replays, "one", ValueError("no such map"))
    assert len(cuda.graphs) == 1 and not cuda.graphs[0].is_open
    # One that torch tells of has the call answered as it comes.
    assert answer(replays, "two", RuntimeError("out of memory"))["twice"].tolist() == [2, 2, 2]
    assert not cuda.graphs[1].is_open and not cuda.given_back


def test_a_capture_that_failed_leaves_nothing_to_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, replays = Cuda(monkeypatch), cuda_graphs.Replays(3)
    cuda.fails = True
    assert answer(replays, "one")["twice"].tolist() == [2, 2, 2]
    names = "_cuda_endAllocateToPool", "_cuda_releasePool"
    assert cuda.given_back == [(name, 3, (0, 7)) for name in names]
    assert not any(graph.is_open for graph in cuda.graphs)
    n_graphs = len(cuda.graphs)
    assert answer(replays, "two")["twice"].tolist() == [2, 2, 2]
    assert len(cuda.graphs) == n_graphs, "the rest of the block is not captured"


def test_graphs_of_a_block_are_captured_on_one_stream_as_they_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, replays = Cuda(monkeypatch), cuda_graphs.Replays(3)
    for form in ("one", "two", "one"):
        assert answer(replays, form)["twice"].tolist() == [2, 2, 2]
    assert len(cuda.graphs) == 2 == len(cuda.streams) and len(set(cuda.streams)) == 1
    assert {graph.pool for graph in cuda.graphs} == {(0, 7)}


def test_graphs_that_are_let_go_leave_their_memory_to_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch takes the handle of a pool no longer once all that was captured in it is gone."""
    cuda, replays = Cuda(monkeypatch), cuda_graphs.Replays(2)
    cuda.keeps = False
    for form in ("one", "a new one", "another", "two"):
        assert answer(replays, form)["twice"].tolist() == [2, 2, 2]
    replays.clear()
    gc.collect()
    assert not any(cuda.live.values())


@pytest.mark.parametrize("row", [[0, 2, 1], [0, 1, 2]], ids=["alone", "together"])
def test_rows_and_layers_with_masks_of_their_own_are_looked_at_by_one_graph(
    row: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each has its own answers: what stands for a graph reads again what it was made for."""
    cuda, plain, runs = Cuda(monkeypatch), cuda_graphs.Replay.run, list[int]()

    def run(replay: cuda_graphs.Replay) -> Any:
        runs.append(1)
        assert replay.joint is not None
        replay.joint.copy_(cuda_graphs.lay_out(replay.look())[0])
        return plain(replay)

    monkeypatch.setattr(cuda_graphs.Replay, "run", run)
    monkeypatch.setattr(look_at_calls, "suits_graphs", lambda _: True)
    torch.manual_seed(0)
    model, x = own_masks("cpu", 23), torch.randn(3, 6, 23, 8)
    asked = {"wants": replace(WANTS["a map"], map=(5, 7)), "row": row}
    record, _ = seen(model, x, **asked)
    assert len(cuda.graphs) == 2
    assert len(runs) == (1 if row == [0, 1, 2] else 3) * len(model.rules) - 2
    monkeypatch.setattr(look_at_calls, "suits_graphs", lambda _: False)
    assert_same(record, seen(model, x, **asked)[0])


def test_what_a_capture_would_wait_for_is_on_the_device_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys whose mass is wanted, which are given on the CPU."""
    looks: list[Any] = []

    class Kept(cuda_graphs.Replays):
        def answer(self, form: Any, given: Any, make: Any) -> Any:
            looks.append(make(given))
            return {}

    monkeypatch.setattr(look_at_calls, "suits_graphs", lambda _: True)
    monkeypatch.setattr(measure.NamedKeys, "on", lambda keys, device: keys.keys_bnt.to(device))
    q = torch.empty(1, 2, 7, 5, device="meta")
    call = Call(name="x", q=q, k=q, mask=Causal())
    wants = Wants(mass=torch.arange(7) < 3)
    shared = HostCopier(), False, (), Kept(3), NamedSpots(3), ByIdentity[Any](3)
    take = stitch_calls.Take("x", 0, wants, "statistics", *shared)
    step = take.begin(stitch_calls.Fit(call, 0, mask_runs.find_runs(call.rule)), None)
    assert step.queries is not None
    look_at_calls.look(call, step.asked, step.queries.spots, take.replays)
    assert len(looks) == 1 and looks[0].args[1].wants.mass.is_meta
