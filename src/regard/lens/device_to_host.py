"""Copies of results from a GPU to the host while the model goes on, through pinned memory.

Why: maps of 256 × 256 cells of 512 heads are 134 MB. Memory that nobody has written to yet is slow
to write to, and `tensor.cpu()` lets the model wait for it: longer than the measuring itself takes.

How: what a call gave is laid end to end, in the order of the device's own work, so that a cache may
overwrite afterwards what was there. From there it goes into pinned staging buffers on a stream of
its own, while the device goes on. A thread moves it on into plain memory, and torch takes the
staging buffers back. The thread is asked once a call, since whenever it wakes, it takes the GIL
from the thread that runs the model. The plain memory is numpy's, which asks Linux for huge pages:
the first write to a page of 4 KiB costs more than what is written there.

Small results are not worth it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

LARGE = 2**18
"""Bytes from which a result is copied by the thread."""
PIECE = 2**25
"""Bytes that are staged together."""
BACKLOG = 2**27
"""Bytes that may be under way; who copies more waits for those before."""

HostCopy: TypeAlias = Future[dict[str, Tensor]]


def is_large(values: Tensor) -> bool:
    """Whether a tensor is on a GPU, and large enough to be copied while others are computed."""
    return values.is_cuda and values.nbytes >= LARGE


class HostCopier:
    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._changed = threading.Condition()
        self._under_way = 0

    def copy(self, values: dict[str, Tensor]) -> HostCopy:
        """What some tensors hold now, as soon as all have arrived."""
        if not any(is_large(x) for x in values.values()):
            here: HostCopy = Future()
            here.set_result({name: x.to("cpu", copy=True) for name, x in values.items()})
            return here
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "regard-device-to-host")
        # The widest types first, so that each begins at a multiple of its size.
        order = sorted(values, key=lambda name: -values[name].element_size())
        flat = [values[name].reshape(-1).view(torch.uint8) for name in order]
        joint = torch.cat(flat)
        stream = self._stream_behind(joint)
        host = torch.from_numpy(np.empty(len(joint), np.uint8))
        parts = zip(order, torch.split(host, [len(x) for x in flat]), strict=True)
        copies = {name: x.view(values[name].dtype).view(values[name].shape) for name, x in parts}
        for piece, there in zip(torch.split(joint, PIECE), torch.split(host, PIECE), strict=True):
            self._wait_for_backlog(len(piece))
            with ExitStack() as failing:
                # What never gets under way, as where no memory can be pinned, keeps nobody waiting.
                failing.callback(self._leave_backlog, len(piece))
                staged = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True)
                with torch.cuda.stream(stream):
                    staged.copy_(piece, non_blocking=True)
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(stream)
                arriving = self._thread.submit(self._land, piece, staged, done, there, copies)
                failing.pop_all()
        return arriving

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _stream_behind(self, values: Tensor) -> torch.cuda.Stream:
        """The stream that copies, once it has waited for what was written."""
        device = values.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def _wait_for_backlog(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way or self._under_way + size <= BACKLOG)
            self._under_way += size

    def _leave_backlog(self, size: int) -> None:
        with self._changed:
            self._under_way -= size
            self._changed.notify()

    def _land(
        self,
        piece: Tensor,
        staged: Tensor,
        done: torch.cuda.Event,
        there: Tensor,
        copies: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Move a piece on; until it has arrived its memory on the device is nobody else's."""
        try:
            done.synchronize()
            # As the model may have been: only then may its tensors be written to.
            with torch.inference_mode():
                there.copy_(staged)
        finally:
            del piece
            self._leave_backlog(len(staged))
        return copies
