"""Copy results from a GPU to the host through pinned memory, while the model continues.

Why: maps of 256 × 256 cells for 512 heads are 134 MB. The first write to fresh memory is slow, and
`tensor.cpu()` makes the model wait for it, longer than the measurement itself takes.

How: the results of a call are concatenated on the device, on the stream that computed them, so that
a cache may overwrite their sources afterwards; those of a CUDA graph lie in one buffer as they are,
which is copied whole. A separate stream copies them into pinned staging
buffers while the device continues. A thread copies them from there into ordinary memory, and torch
reuses the staging buffers. The thread is used once per call, since whenever it wakes, it takes the
GIL from the thread that runs the model. The ordinary memory is allocated by numpy, which asks Linux
for huge pages: the first write to a page of 4 KiB costs more than the data written there.

Small results are copied directly.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

LARGE = 2**18
"""Results of at least this many bytes are copied by the thread."""
PIECE = 2**25
"""Bytes that are staged in one pinned buffer."""
MOSTLY = 1.5
"""How much larger than its results a buffer may be to be copied as it is."""
BACKLOG = 2**27
"""The most bytes in flight; a further copy waits until earlier ones have arrived."""


class HostCopy:
    """Copies on their way: `result` waits until all have arrived."""

    def __init__(self, joint: Future[None] | None, read: Callable[[], dict[str, Tensor]]) -> None:
        self._joint, self._read = joint, read
        self._ends: dict[str, tuple[float, float]] = {}

    def result(self) -> dict[str, Tensor]:
        if self._joint is not None:
            self._joint.result()
        return self._read()

    def ends_of(self, name: str) -> tuple[float, float]:
        """The smallest and the largest number under a name, NaN if there is any."""
        if name not in self._ends:
            numbers = self.result()[name].numpy()
            self._ends[name] = float(numbers.min()), float(numbers.max())
        return self._ends[name]


def is_large(values: Tensor) -> bool:
    """Whether a tensor is on a GPU, and large enough to be copied asynchronously."""
    return values.is_cuda and values.nbytes >= LARGE


class HostCopier:
    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._changed = threading.Condition()
        self._under_way = 0

    def copy(self, values: dict[str, Tensor], *, final: bool = False) -> HostCopy:
        """Copy the current contents of tensors to the host.

        final: nobody writes to them again, so that they need not be copied on the device first.
        """
        if not any(is_large(x) for x in values.values()):
            here = {name: x.to("cpu", copy=True) for name, x in values.items()}
            return HostCopy(None, lambda: here)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "regard-device-to-host")
        joint, starts = (find_joint(values) if final else None) or join(values)
        stream = self._stream_behind(joint)
        host = torch.from_numpy(np.empty(len(joint), np.uint8))
        forms = {name: (x.shape, x.dtype, x.nbytes) for name, x in values.items()}

        def read() -> dict[str, Tensor]:
            return {
                name: host[starts[name] : starts[name] + size].view(dtype).view(shape)
                for name, (shape, dtype, size) in forms.items()
            }

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
                arriving = self._thread.submit(self._land, piece, staged, done, there)
                failing.pop_all()
        return HostCopy(arriving, read)

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
    ) -> None:
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


def join(values: dict[str, Tensor]) -> tuple[Tensor, dict[str, int]]:
    """All tensors in one new buffer of bytes, and where each begins."""
    # The widest types first, so that each starts at a multiple of its element size.
    order = sorted(values, key=lambda name: -values[name].element_size())
    flat = [values[name].reshape(-1).view(torch.uint8) for name in order]
    starts = itertools.accumulate(map(len, flat), initial=0)
    return torch.cat(flat), dict(zip(order, starts, strict=False))


def find_joint(values: dict[str, Tensor]) -> tuple[Tensor, dict[str, int]] | None:
    """As `join`, the buffer that all tensors already lie in, if they are most of it; else None."""
    some = next(iter(values.values()))
    storage, size = some.untyped_storage(), sum(x.nbytes for x in values.values())
    if storage.nbytes() > MOSTLY * size:
        return None
    for x in values.values():
        if not x.is_contiguous() or x.untyped_storage().data_ptr() != storage.data_ptr():
            return None
    joint = torch.tensor([], dtype=torch.uint8, device=some.device).set_(storage)
    starts = {name: int(x.storage_offset()) * x.element_size() for name, x in values.items()}
    return joint, starts
