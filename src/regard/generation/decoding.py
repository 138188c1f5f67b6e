"""A batch of texts being written by one model, one token a row and step.

Why: greedy search, sampling and beams differ in which token they take; reading the prompt, keeping
keys and running one step is the same for all.

How: `read` takes the prompts (padded on the left), in chunks where they are long, and gives the
scores of the next token; `step` takes one token a row and gives the scores of the one after.
Compiled, a step is one graph over a cache of a set size, and on a GPU one replay of a CUDA graph.
Graphs are kept with their model and used again for the next batch of the same shape.

Non-finite numbers are not looked for in every layer here: once there, they reach the scores, and
the scores are checked where a token is chosen.

Left out: batches that rows join and leave, and compiled encoder–decoders.

Letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.layers import DecoderCache, FeedForward, MultiHeadAttention
from regard.models import Memory, Transformer

CHUNK = 2048
"""Tokens of a prompt that are read at a time."""
ROUND = 64
"""Compiled caches come in multiples of this many slots, so that graphs can be used again."""


class Decoding:
    """The state of a batch while it is written."""

    def __init__(
        self, model: Transformer, *, room: int, memory: Memory | None = None, compiled: bool = False
    ) -> None:
        """room: how many tokens a row can have in all, padding counted. memory: of the source."""
        if model.head is None:
            raise ValueError("this model has no head, so it cannot say which token comes next")
        if compiled and memory is not None:
            raise ValueError("compiled generation is for decoders alone; leave compiled=False")
        self.model, self.memory, self.room = model, memory, room
        self.layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
        self.compiled = compiled
        self.graph: StepGraph | None = None
        self.cache: DecoderCache | None = None if compiled else model.make_cache()

    def read(self, ids_bt: Tensor, real_bt: Tensor | None = None, chunk: int = CHUNK) -> Tensor:
        """The prompts, `chunk` tokens at a time; the scores (B, V) of what comes next, float32."""
        if self.compiled and self.graph is None:
            with promise_finite(self.layers):
                self.graph = find_graph(self.model, ids_bt.shape[0], self.room)
            self.cache = self.graph.cache
            # Rows are told apart from the start, so that every batch of this shape fits the graph.
            if real_bt is None:
                real_bt = torch.ones_like(ids_bt, dtype=torch.bool)
        last_bc = None
        with promise_finite(self.layers):
            for start in range(0, ids_bt.shape[1], chunk):
                part = slice(start, start + chunk)
                real = None if real_bt is None else real_bt[:, part]
                last_bc = self._run(ids_bt[:, part], real)[:, -1]
        assert last_bc is not None and self.model.head is not None
        scores_bv: Tensor = self.model.head(last_bc)
        return scores_bv.float()

    def step(self, ids_b: Tensor) -> Tensor:
        """One token a row; the scores (B, V) of what comes next, float32.

        A compiled step gives the same tensor each time, overwritten.
        """
        if self.graph is not None:
            return self.graph.run(ids_b)
        assert self.model.head is not None
        with promise_finite(self.layers):
            x_btc = self.model.run(ids_b[:, None], memory=self.memory, cache=self.cache)
        scores_bv: Tensor = self.model.head(x_btc[:, -1])
        return scores_bv.float()

    def run_on(self, ids_b: Tensor, n: int) -> Tensor:
        """The n tokens (B, n) that follow these when the likeliest is always taken.

        On a GPU nothing is read back in between, so the device never waits for this program.
        """
        if self.graph is not None:
            return self.graph.run_on(ids_b, n)
        written = []
        for _ in range(n):
            ids_b = self.step(ids_b).argmax(-1)
            written.append(ids_b)
        return torch.stack(written, 1)

    def reorder(self, index_b: Tensor) -> None:
        """Row b becomes what row index_b[b] was; with more or fewer rows, if index_b has."""
        if self.graph is not None and index_b.shape[0] != self.graph.batch:
            raise ValueError("a compiled batch keeps its number of rows; leave compiled=False")
        assert self.cache is not None
        self.cache.reorder(index_b)
        if self.memory is not None:
            self.memory = self.memory.reorder(index_b)

    def close(self) -> None:
        """Give a compiled graph back, for the next batch."""
        if self.graph is not None:
            self.graph.busy = False
            self.graph = None

    def _run(self, ids_bt: Tensor, real_bt: Tensor | None) -> Tensor:
        if self.graph is None:
            return self.model.run(ids_bt, real=real_bt, memory=self.memory, cache=self.cache)
        assert real_bt is not None
        count_bt = real_bt.cumsum(-1) - 1
        assert self.cache is not None
        if self.cache.length is not None:
            count_bt = count_bt + self.cache.length[:, None]
        return self.model.run(
            ids_bt, positions=torch.where(real_bt, count_bt, -1), cache=self.cache
        )


class StepGraph:
    """One compiled step for batches of one shape, and the cache it works on."""

    def __init__(self, model: Transformer, batch: int, room: int) -> None:
        self.batch, self.room, self.busy = batch, room, False
        self.cache = model.make_cache(room)
        self.fused = fuse(model)
        head = model.head
        assert head is not None

        def step(ids_b1: Tensor) -> tuple[Tensor, Tensor]:
            x_btc = model.run(ids_b1, cache=self.cache)
            scores_bv = head(x_btc[:, -1]).float()
            return scores_bv, scores_bv.argmax(-1)

        device = next(model.parameters()).device
        options: dict[str, Any] = {}
        if device.type == "cuda":
            # Products with one row reach the memory's speed only as tuned sums.
            options["coordinate_descent_tuning"] = True
        self.compiled: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.compile(
            step, fullgraph=True, dynamic=False, options=options
        )
        self.ids_b1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.scores_bv: Tensor | None = None
        self.recorded: torch.cuda.CUDAGraph | None = None
        self._warm_up(model)

    def run(self, ids_b: Tensor) -> Tensor:
        """The scores (B, V) after these tokens."""
        self.ids_b1.copy_(ids_b[:, None])
        self._advance()
        assert self.scores_bv is not None
        return self.scores_bv

    def run_on(self, ids_b: Tensor, n: int) -> Tensor:
        """The n tokens (B, n) that follow these when the likeliest is always taken."""
        self.ids_b1.copy_(ids_b[:, None])
        written = []
        for _ in range(n):
            self._advance()
            written.append(self.ids_b1.clone())
        return torch.cat(written, 1)

    def _advance(self) -> None:
        """One step, which leaves its scores, and the likeliest tokens where the next step reads."""
        if self.recorded is not None:
            self.recorded.replay()
            return
        self.scores_bv, next_b = self.compiled(self.ids_b1)
        self.ids_b1.copy_(next_b[:, None])

    def _warm_up(self, model: Transformer) -> None:
        """Compile, and on a GPU record, with a text of a few tokens that is forgotten again."""
        start_bt = torch.zeros(self.batch, 2, dtype=torch.int64, device=self.ids_b1.device)
        positions = torch.arange(2, device=start_bt.device).expand(self.batch, 2)
        model.run(start_bt, positions=positions, cache=self.cache)
        if not start_bt.is_cuda:
            self.compiled(self.ids_b1)
            self.cache.reset()
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.compiled(self.ids_b1)
        torch.cuda.current_stream().wait_stream(stream)
        self.recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.recorded):
            self.scores_bv, next_b = self.compiled(self.ids_b1)
            self.ids_b1.copy_(next_b[:, None])
        self.cache.reset()


GRAPHS: WeakKeyDictionary[Transformer, list[StepGraph]] = WeakKeyDictionary()
"""The graphs made so far, with the models they belong to."""


def find_graph(model: Transformer, batch: int, room: int) -> StepGraph:
    """A graph for batches of this shape that nobody uses now, made if there is none."""
    room = -(-room // ROUND) * ROUND
    graphs = GRAPHS.setdefault(model, [])
    graphs[:] = [graph for graph in graphs if all(joint.holds() for joint in graph.fused)]
    for graph in graphs:
        if (graph.batch, graph.room, graph.busy) == (batch, room, False):
            graph.cache.reset()
            break
    else:
        graph = StepGraph(model, batch, room)
        graphs.append(graph)
    graph.busy = True
    return graph


def fuse(model: Transformer) -> list[Any]:
    """Lay projections that read the same input side by side, all over the model."""
    joints = []
    for module in model.modules():
        if isinstance(module, MultiHeadAttention | FeedForward):
            if module.fused is None or not module.fused.holds():
                module.fuse()
            if module.fused is not None:
                joints.append(module.fused)
    return joints


@contextmanager
def promise_finite(layers: list[MultiHeadAttention]) -> Iterator[None]:
    """While this runs, no layer looks for numbers that are not finite."""
    before = [layer.finite for layer in layers]
    for layer in layers:
        layer.finite = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.finite = was
