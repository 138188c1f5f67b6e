"""Runs a model on a batch of texts that it generates: prefill, then one decode step per token.

Why: greedy search, sampling and beams differ in which token they choose; the prefill, the KV cache
and the decode step are the same for all.

How: `read` is the prefill: given the prompts (padded on the left) it returns the logits of the next
token, reading long prompts in chunks; `step` is given one token per row and returns the logits of
the one after. If compiled, a step is one graph over a static cache, and on a GPU one replay of a
CUDA graph. Graphs are kept with their model and reused for later batches of the same shape.

Left out: batches that new rows can join (continuous batching), and compiled encoder–decoders.

Letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor

from regard.layers import DecoderCache, FeedForward, MultiHeadAttention
from regard.layers.fused_linear import FusedLinear, trusting
from regard.models import Memory, ModelConfig, Transformer
from regard.ops import call_hook, edit_hook
from regard.positions import DynamicNTK, LongRoPE

CHUNK = 2048  # tokens of a prompt that are read at a time
ROUND = 64  # static caches and prompt graphs have sizes in multiples of this, so they are reused
MOST = 8  # graphs that are kept with a model, each with a static cache of its own
SHORT = 512  # prompts up to this length are read by a CUDA graph: launch overhead dominates there


class Decoding:
    """The state of a batch while its texts are generated."""

    def __init__(
        self,
        model: Transformer,
        *,
        max_len: int,
        memory: Memory | None = None,
        compiled: bool = False,
    ) -> None:
        """max_len: the most tokens a row can have, with padding. memory: the encoded source."""
        if model.head is None:
            raise ValueError("this model has no head, so it cannot say which token comes next")
        if compiled and memory is not None:
            raise ValueError("compiled=True is for models without an encoder; leave compiled=False")
        if compiled and call_hook.is_hooked():
            what = "a compiled step cannot be watched, and this is a block of watch or observing"
            raise ValueError(f"{what}; leave compiled=False")
        if compiled and edit_hook.open_editors():
            what = "a compiled step cannot be edited, and this is a block of edit"
            raise ValueError(f"{what}; leave compiled=False")
        self.model, self.head, self.memory = model, model.head, memory
        self.n_tokens, self.compiled = max_len, compiled
        self.graph: StepGraph | None = None
        self.cache: DecoderCache | None = None if compiled else model.make_cache()

    def read(self, ids_bt: Tensor, real_bt: Tensor | None = None, chunk: int = CHUNK) -> Tensor:
        """Prefill, `chunk` tokens at a time; returns the next token's logits (B, V), float32."""
        width = ids_bt.shape[1]
        if grows_in(self.model.config, width):
            chunk = width
        if self.compiled and self.graph is None:
            # Tensors made in inference mode could not be used outside of it later.
            with torch.inference_mode(False), torch.no_grad():
                size = round_up(self.n_tokens + round_up(width) - width)
                self.graph = find_graph(self.model, ids_bt.shape[0], size)
                self.cache = self.graph.cache
                if ids_bt.is_cuda and width <= min(chunk, SHORT):
                    return self.graph.read(self.model, ids_bt, real_bt)
        for start in range(0, width, chunk):
            part = slice(start, start + chunk)
            real = None if real_bt is None else real_bt[:, part]
            x_btc = self.model.run(ids_bt[:, part], real=real, memory=self.memory, cache=self.cache)
        logits_bv: Tensor = self.head(x_btc[:, -1])
        return logits_bv.float()

    def step(self, ids_b: Tensor) -> Tensor:
        """Add one token per row; returns the next token's logits (B, V), float32.

        A compiled step returns the same tensor each time, overwritten.
        """
        if self.graph is not None:
            return self.graph.run(ids_b)
        x_btc = self.model.run(ids_b[:, None], memory=self.memory, cache=self.cache)
        logits_bv: Tensor = self.head(x_btc[:, -1])
        return logits_bv.float()

    def run_on(self, ids_b: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """n greedy steps without a sync: tokens (B, n), and which rows' logits were finite (B,)."""
        assert self.graph is not None
        return self.graph.run_on(ids_b, n)

    def reorder(self, index_b: Tensor) -> None:
        """Replace row b by the old row index_b[b]; there are then as many rows as index_b has."""
        if self.graph is not None and index_b.shape[0] != self.graph.batch:
            raise ValueError("a compiled batch keeps its number of rows; leave compiled=False")
        assert self.cache is not None
        self.cache.reorder(index_b)
        if self.memory is not None:
            self.memory = self.memory.reorder(index_b)

    def close(self) -> None:
        if self.graph is not None:
            self.graph.busy = False
            self.graph = None


class StepGraph:
    """One compiled decode step for batches of one shape, and the static cache it works on.

    A step writes its logits to `logits_bv` and the likeliest tokens to `ids_b1`, from which the
    next step reads, and to the next column of `written_bt`. `finite_b` becomes False for rows whose
    largest logit is not finite.
    """

    def __init__(self, model: Transformer, batch: int, size: int) -> None:
        self.batch, self.size, self.busy = batch, size, False
        self.cache = model.make_cache(size)
        self.fused = fuse(model)
        device = next(model.parameters()).device
        # torch.compile limits how often one code object is compiled, so each graph has its own copy
        # of the function, with model and cache bound as default arguments.
        n_parts = max(n for n in range(1, 257) if model.config.vocab_size % n == 0)
        given = model, self.cache, n_parts
        step = FunctionType(take_step.__code__.replace(), take_step.__globals__, "step", given)
        self.compiled: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = torch.compile(
            step, fullgraph=True, dynamic=False
        )
        self.ids_b1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.written_bt = torch.zeros(batch, size, dtype=torch.int64, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.finite_b = torch.ones(batch, dtype=torch.bool, device=device)
        self.logits_bv: Tensor | None = None
        self.recorded: torch.cuda.CUDAGraph | None = None
        self.prompts: dict[int, PromptGraph] = {}
        # Compile, and on a GPU capture, with a text of two tokens; the cache is then reset.
        positions = torch.arange(2, device=device).expand(batch, 2)
        model.run(self.ids_b1.expand(batch, 2), positions=positions, cache=self.cache)
        if self.ids_b1.is_cuda:
            self.recorded = record(self._step)
        else:
            self._step()
        self.cache.reset()

    def read(self, model: Transformer, ids_bt: Tensor, real_bt: Tensor | None) -> Tensor:
        width = round_up(ids_bt.shape[1])
        if width not in self.prompts:
            self.prompts[width] = PromptGraph(model, self.cache, self.batch, width)
        return self.prompts[width].run(ids_bt, real_bt)

    def run(self, ids_b: Tensor) -> Tensor:
        self._advance(ids_b, 1)
        assert self.logits_bv is not None
        return self.logits_bv

    def run_on(self, ids_b: Tensor, n: int) -> tuple[Tensor, Tensor]:
        self.finite_b.fill_(True)
        self._advance(ids_b, n)
        return self.written_bt[:, :n].clone(), self.finite_b.clone()

    def _advance(self, ids_b: Tensor, n: int) -> None:
        self.column.zero_()
        self.ids_b1.copy_(ids_b[:, None])
        for _ in range(n):
            if self.recorded is not None:
                self.recorded.replay()
                continue
            # Compiled code is specialized to these modes, so they must be those of compilation.
            with torch.inference_mode(False), torch.no_grad():
                self._step()

    def _step(self) -> None:
        self.logits_bv, next_b1, finite_b = self.compiled(self.ids_b1)
        self.ids_b1.copy_(next_b1)
        self.written_bt.index_copy_(1, self.column, next_b1)
        self.column += 1
        self.finite_b &= finite_b


class PromptGraph:
    """The prefill of prompts of up to `width` tokens as a CUDA graph; shorter ones are padded."""

    def __init__(self, model: Transformer, cache: DecoderCache, batch: int, width: int) -> None:
        self.model, self.cache = model, cache
        device = next(model.parameters()).device
        self.ids_bt = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self.positions_bt = torch.arange(width, device=device).expand(batch, width).clone()
        self.logits_bv: Tensor | None = None
        self.recorded = record(self._read)
        cache.reset()

    def run(self, ids_bt: Tensor, real_bt: Tensor | None) -> Tensor:
        n = ids_bt.shape[1]
        if real_bt is None:
            real_bt = torch.ones_like(ids_bt, dtype=torch.bool)
        self.ids_bt[:, -n:] = ids_bt
        self.positions_bt.fill_(-1)
        self.positions_bt[:, -n:] = torch.where(real_bt, real_bt.cumsum(-1) - 1, -1)
        self.recorded.replay()
        assert self.logits_bv is not None
        return self.logits_bv.clone()

    def _read(self) -> None:
        assert self.model.head is not None
        self.cache.reset()
        x_btc = self.model.run(self.ids_bt, positions=self.positions_bt, cache=self.cache)
        self.logits_bv = self.model.head(x_btc[:, -1]).float()


def record(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture `run` as a CUDA graph, after two runs to warm up."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        run()
    return recorded


def round_up(n: int) -> int:
    return -(-n // ROUND) * ROUND


def take_step(
    ids_b1: Tensor, model: Transformer, cache: DecoderCache, n_parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, V) after one token per row, likeliest tokens (B, 1), whether finite (B,)."""
    assert model.head is not None
    with trusting():  # `find_graph` discards graphs whose fused weights are out of date
        x_btc = model.run(ids_b1, cache=cache)
    logits_bv = model.head(x_btc[:, -1]).float()
    # argmax in two stages, per part and then over the parts: one long reduction is slow on a GPU.
    best_bp, at_bp = logits_bv.view(ids_b1.shape[0], n_parts, -1).max(-1)
    best_b, part_b = best_bp.max(-1)
    at_b1 = at_bp.gather(1, part_b[:, None])
    next_b1 = part_b[:, None] * (logits_bv.shape[1] // n_parts) + at_b1
    return logits_bv, next_b1, best_b.isfinite()


def grows_in(config: ModelConfig, n_tokens: int) -> bool:
    """Whether rotary depends on the text's length here, so that it must be read in one chunk."""
    scalings = [block.rotary.scaling for block in config.decoder if block.rotary is not None]
    kinds = DynamicNTK | LongRoPE
    return any(isinstance(x, kinds) and n_tokens > x.original_max_len for x in scalings)


class Graphs(list[StepGraph]):
    """The graphs of one model, kept with it, newest last; a copy of the model starts with none."""

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        return Graphs, ()


def graphs_of(model: Transformer) -> Graphs:
    found: Graphs = model.__dict__.setdefault("step_graphs", Graphs())
    return found


def find_graph(model: Transformer, batch: int, size: int) -> StepGraph:
    """An idle graph for batches of this shape, captured now if there is none."""
    graphs = graphs_of(model)
    graphs[:] = [graph for graph in graphs if all(fused.holds() for fused in graph.fused)]
    for graph in graphs:
        if (graph.batch, graph.size, graph.busy) == (batch, size, False):
            graph.cache.reset()
            break
    else:
        idle = [graph for graph in graphs if not graph.busy]
        for graph in idle[: max(len(idle) - MOST + 1, 0)]:
            graphs.remove(graph)
        graph = StepGraph(model, batch, size)
        graphs.append(graph)
    graph.busy = True
    return graph


def fuse(model: Transformer) -> list[FusedLinear]:
    """Fuse the projections that share an input, in all layers of the model."""
    found = []
    for module in model.modules():
        if isinstance(module, MultiHeadAttention | FeedForward):
            if module.fused is None or not module.fused.holds():
                module.fuse()
            if module.fused is not None:
                found.append(module.fused)
    return found
