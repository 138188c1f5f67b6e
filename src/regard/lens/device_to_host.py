"""Copy results from a GPU to the host through pinned memory, while the model continues.

Why: maps of 256 × 256 cells for 512 heads are 134 MB. The first write to fresh memory is slow, and
`tensor.cpu()` makes the model wait for it, longer than the measurement itself takes.

How: the results of a call are concatenated on the device, on the stream that computed them, so that
a cache may overwrite their sources afterwards. A separate stream copies them into pinned staging
buffers while the device continues. A thread copies them from there into ordinary memory, and torch
reuses the staging buffers. The thread is used once per call, since whenever it wakes, it takes the
GIL from the thread that runs the model. The ordinary memory is allocated by numpy, which asks Linux
for huge pages: the first write to a page of 4 KiB costs more than the data written there.

Small results are copied directly.
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
"""Results of at least this many bytes are copied by the thread."""
PIECE = 2**25
"""Bytes that are staged in one pinned buffer."""
BACKLOG = 2**27
"""The most bytes in flight; a further copy waits until earlier ones have arrived."""

HostCopy: TypeAlias = Future[dict[str, Tensor]]


def is_large(values: Tensor) -> bool:
    """Whether a tensor is on a GPU, and large enough to be copied asynchronously."""
    return values.is_cuda and values.nbytes >= LARGE


class HostCopier:
    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._changed = threading.Condition()
        self._under_way = 0

    def copy(self, values: dict[str, Tensor]) -> HostCopy:
        """Copy the current contents of tensors to the host; the future is done when all arrived."""
        if not any(is_large(x) for x in values.values()):
            here: HostCopy = Future()
            here.set_result({name: x.to("cpu", copy=True) for name, x in values.items()})
            return here
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "regard-device-to-host")
        # The widest types first, so that each starts at a multiple of its element size.
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
                # A copy that never starts, for example if no memory can be pinned, must not keep
                # others waiting.
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
        """The copy stream, which waits until the current stream has written the values."""
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
        """Copy a piece from pinned to ordinary memory; `piece` keeps its device memory in use."""
        try:
            done.synchronize()
            # If the model ran in inference mode, its tensors can only be written to in inference
            # mode.
            with torch.inference_mode():
                there.copy_(staged)
        finally:
            del piece
            self._leave_backlog(len(staged))
        return copies
