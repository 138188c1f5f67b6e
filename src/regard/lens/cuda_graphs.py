"""What is asked about a layer, launched for the next layers as one CUDA graph.

Why: the layers of a model are asked the same, by some fifty small kernels each. To launch these
takes Python longer than they take the GPU, so that the model would wait for its watching.

How: the answers of a call follow from its tensors and its form, which is all the rest: sizes, rule,
what is asked. The first call of a form is answered as it comes, from a copy of its tensors, so that
all kernels are compiled. The second is captured, from a copy at the same place, and from then on
the graph is launched again whenever such a call has been copied there. In later blocks the first is
captured too. What a graph has written is copied before it runs anew; graphs run one after the
other, and so share what memory they need in between.

Left out: calls that cannot be captured, since they wait for the device. They, and all behind them
in the block, are answered as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard._torch import copy_all, end_allocation

COMPILED: set[Hashable] = set()
"""Forms of which a call was answered in this process."""

Answers: TypeAlias = dict[str, Tensor]
Look: TypeAlias = Callable[[], Answers]
"""Answers from tensors that stay where they are."""


class Replays:
    """The graphs of one block, by the form of calls; at most so many at a time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: dict[Hashable, Replay] = {}
        # By stream: graphs that share memory must not run at the same time. Beside each pool is the
        # one stream on which they are captured, as torch keeps the memory of streams apart.
        self._pools: dict[Any, tuple[Any, torch.cuda.Stream]] = {}
        # The first graph of each pool: with its last one torch lets go of a pool, and takes its
        # handle no longer.
        self._first: dict[Any, torch.cuda.CUDAGraph | None] = {}
        self._can_capture = True

    def answer(
        self,
        form: Hashable,
        given: list[Tensor],
        make: Callable[[list[Tensor]], Look],
    ) -> Answers:
        """What `make` finds out about tensors of a form, as new tensors of ours.

        make: gives what looks at the tensors it is given, whose numbers will change. All that it
        reads beside these must follow from the form, and live as long as it does.
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
        """Let go of all graphs and their memory."""
        self._known.clear()
        self._first.clear()
        self._pools.clear()


class Replay:
    """The calls of one form: tensors that stay where they are, and the graph that reads them.

    joint: all that it writes, end to end, in this `order`; as `answers` are named.
    """

    def __init__(self, inputs: list[Tensor], look: Look) -> None:
        self.inputs, self.look = inputs, look
        self.graph: torch.cuda.CUDAGraph | None = None
        self.joint: Tensor | None = None
        self.answers: Answers = {}
        self.order: Answers = {}

    def look_now(self) -> Answers:
        """The answers for what is in the inputs now, without the graph."""
        own = {x.untyped_storage().data_ptr() for x in self.inputs}
        return {
            # What was told beforehand is an answer as it is; the next call is put in its place.
            name: x.clone() if x.untyped_storage().data_ptr() in own else x
            for name, x in self.look().items()
        }

    def run(self) -> Answers:
        """The same, by the graph."""
        assert self.graph is not None and self.joint is not None
        self.graph.replay()
        sizes = [x.nbytes for x in self.order.values()]
        parts = dict(zip(self.order, torch.split(self.joint.clone(), sizes), strict=True))
        return {name: parts[name].view(x.dtype).view(x.shape) for name, x in self.answers.items()}

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> bool:
        """Capture the graph; whether that could be done."""
        with capturing(pool, stream) as graph:
            found = self.look()
            # The widest types first, so that each begins at a multiple of its size.
            order = sorted(found, key=lambda name: -found[name].element_size())
            joint = torch.cat([found[name].reshape(-1).view(torch.uint8) for name in order])
        if not graph:
            return False
        self.graph, self.joint, self.answers = graph[0], joint, found
        self.order = {name: found[name] for name in order}
        return True


@contextmanager
def capturing(pool: Any, stream: torch.cuda.Stream) -> Iterator[list[torch.cuda.CUDAGraph]]:
    """A block that is captured and not run; it gives the graph, or none where that fails."""
    found: list[torch.cuda.CUDAGraph] = []
    graph, failed = torch.cuda.CUDAGraph(), False
    with torch.cuda.stream(stream):
        # Other threads may go on using the GPU as they like.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield found
        except RuntimeError:
            failed = True
        finally:
            # Whatever went wrong: in a capture that nobody ends, nothing on this stream would run.
            failed = not end_capture(graph, pool) or failed
    if not failed:
        found.append(graph)


def end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> bool:
    """End a capture on the current stream; whether there is a graph."""
    try:
        graph.capture_end()
    except RuntimeError:
        # Torch stops where CUDA says that the capture has failed. To its allocator that would go on
        # for ever: memory that several streams used would not be used again, and
        # `torch.cuda.empty_cache` would fail.
        end_allocation(torch.cuda.current_device(), pool)
        # Torch's random numbers would wait for the end of this capture; that of another serves.
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")
        empty.capture_end()
        return False
    return True
