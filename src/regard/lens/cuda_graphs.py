"""Replay the measurements of a call as one CUDA graph for the layers that follow.

Why: the same is measured in every layer of a model, by some fifty small kernels. To launch them
takes Python longer than they run, so the model would wait for launch overhead.

How: what is measured is a function of the call's tensors and its *form*, which is everything else:
sizes, rule, what is wanted. The first call of a form is measured eagerly, on a copy of its tensors,
so that all kernels are compiled. At the second call the graph is captured on static inputs, and
from then on each call of that form is copied into these inputs and the graph is replayed. In later
blocks the graph is captured at the first call. A graph's results are copied before the next replay
overwrites them. Graphs run one after the other, so they share one memory pool.

Left out: calls that cannot be captured, because they synchronize with the device. They and all
calls after them in the block are measured eagerly.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard._torch import copy_all, end_allocation

COMPILED: set[Hashable] = set()
"""Forms that were measured eagerly in this process, so that their kernels are compiled."""

Answers: TypeAlias = dict[str, Tensor]
Look: TypeAlias = Callable[[], Answers]
"""Computes the answers from static tensors, whose contents may be replaced between calls."""


class Replays:
    """The CUDA graphs of one block, by the form of calls; at most `most` at a time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: dict[Hashable, Replay] = {}
        # The memory pool of each stream: graphs that share memory must not run at the same time.
        # Each pool has one stream on which its graphs are captured, since torch keeps separate
        # memory for each stream.
        self._pools: dict[Any, tuple[Any, torch.cuda.Stream]] = {}
        # The first graph of each pool is kept: torch frees a pool together with its last graph, and
        # does not accept its handle any more.
        self._first: dict[Any, torch.cuda.CUDAGraph | None] = {}
        self._can_capture = True

    def answer(
        self,
        form: Hashable,
        given: list[Tensor],
        make: Callable[[list[Tensor]], Look],
    ) -> Answers:
        """Run what `make` returns on the `given` tensors; the answers are new tensors.

        make: gets the static input tensors, whose contents will be replaced, and returns the
        function that measures them. All else that this function reads must follow from the form,
        and live as long as it.
        """
        with torch.cuda.device(given[0].device):
            if not self._can_capture:
                return make(given)()
            stream, where = torch.cuda.current_stream(), torch.is_inference_mode_enabled()
            known = self._known.get((form, stream, where))
            if known is not None:
                copy_all(known.inputs, given)
            else:
                while len(self._known) >= self.most:
                    self._known.pop(next(iter(self._known)))
                inputs = [x.clone(memory_format=torch.contiguous_format) for x in given]
                known = self._known[form, stream, where] = Replay(inputs, make(inputs))
                if form not in COMPILED:
                    found = known.look_now()
                    COMPILED.add(form)
                    return found
            if known.graph is None:
                if stream not in self._pools:
                    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                    self._pools[stream] = torch.cuda.graph_pool_handle(), own
                self._can_capture = known.capture(*self._pools[stream])
                self._first.setdefault(stream, known.graph)
            return known.run() if self._can_capture else known.look_now()

    def clear(self) -> None:
        """Release all graphs and their memory."""
        self._known.clear()
        self._first.clear()
        self._pools.clear()


class Place(NamedTuple):
    """Where an answer begins in the joint buffer, counted in numbers of its own type."""

    start: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: torch.dtype


class Replay:
    """The calls of one form: static input tensors, and the graph that reads them.

    joint: all outputs of the graph as one flat buffer; `places`: where each lies in it.
    """

    def __init__(self, inputs: list[Tensor], look: Look) -> None:
        self.inputs, self.look = inputs, look
        self.graph: torch.cuda.CUDAGraph | None = None
        self.joint: Tensor | None = None
        self.places: dict[str, Place] = {}

    def look_now(self) -> Answers:
        """The answers for the current contents of the inputs, computed without the graph."""
        own = {x.untyped_storage().data_ptr() for x in self.inputs}
        return {
            # An answer that shares storage with an input (row statistics that came with the call)
            # is cloned, because the next call overwrites the inputs.
            name: x.clone() if x.untyped_storage().data_ptr() in own else x
            for name, x in self.look().items()
        }

    def run(self) -> Answers:
        """The answers for the current contents of the inputs, by replaying the graph."""
        assert self.graph is not None and self.joint is not None
        self.graph.replay()
        joint = self.joint.clone()
        of_type = {dtype: joint.view(dtype) for dtype in {x.dtype for x in self.places.values()}}
        return {
            name: of_type[x.dtype].as_strided(x.shape, x.steps, x.start)
            for name, x in self.places.items()
        }

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> bool:
        """Capture the graph; return whether that worked."""
        with capturing(pool, stream) as graph:
            joint, places = lay_out(self.look())
        if not graph:
            return False
        self.graph, self.joint, self.places = graph[0], joint, places
        return True


def lay_out(found: Answers) -> tuple[Tensor, dict[str, Place]]:
    """All answers in one buffer of bytes, and where each lies in it."""
    # The widest types first, so that each starts at a multiple of its element size.
    order = sorted(found, key=lambda name: -found[name].element_size())
    flat = [found[name].reshape(-1).view(torch.uint8) for name in order]
    places, at = dict[str, Place](), 0
    for name, numbers in zip(order, flat, strict=True):
        x = found[name]
        steps = (*itertools.accumulate(reversed(x.shape[1:]), operator.mul, initial=1),)[::-1]
        places[name] = Place(at // x.element_size(), (*x.shape,), steps, x.dtype)
        at += len(numbers)
    # Whole numbers of the widest type, or it could not be viewed as such.
    widest = found[order[0]].element_size()
    flat.append(flat[0].new_zeros(-at % widest))
    return torch.cat(flat), {name: places[name] for name in found}


@contextmanager
def capturing(pool: Any, stream: torch.cuda.Stream) -> Iterator[list[torch.cuda.CUDAGraph]]:
    """Capture the block instead of running it; the yielded list gets the graph, if that works."""
    found: list[torch.cuda.CUDAGraph] = []
    graph, failed = torch.cuda.CUDAGraph(), False
    with torch.cuda.stream(stream):
        # Other threads may continue to use the GPU.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield found
        except RuntimeError:
            failed = True
        finally:
            # Always end the capture: while it is open, nothing else would run on this stream.
            failed = not end_capture(graph, pool) or failed
    if not failed:
        found.append(graph)


def end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> bool:
    """End a capture on the current stream; return whether there is a graph."""
    try:
        graph.capture_end()
    except RuntimeError:
        # Torch raises where CUDA reports that the capture failed. Its allocator would believe that
        # the capture goes on for ever: memory used by several streams would not be reused, and
        # `torch.cuda.empty_cache` would fail.
        end_allocation(torch.cuda.current_device(), pool)
        # Torch's random number generator would wait for this capture to end; ending another one
        # serves.
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")
        empty.capture_end()
        return False
    return True
