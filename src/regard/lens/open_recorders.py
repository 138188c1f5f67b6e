"""Which recorders see a call: those of the blocks that are open in its thread and its context.

Why: two threads, or two tasks of an event loop, may watch two models or the same one at the same
time, and each record must contain its own block only.

How: a context variable holds the recorders of the enclosing blocks; a task inherits a copy of those
open where it was created. A thread that runs in a copied context is still a different thread, so
the recorder's thread is checked too. Hooks that are shared by all blocks ask here which recorders
to notify.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from regard.lens.captured_call import Call
    from regard.lens.recorder import Recorder

_open: ContextVar[tuple[Recorder, ...]] = ContextVar("regard_recorders", default=())


@contextmanager
def opened(recorder: Recorder) -> Iterator[None]:
    _open.set((*_open.get(), recorder))
    recorder.is_open = True
    try:
        yield
    finally:
        recorder.is_open = False
        _open.set(tuple(other for other in _open.get() if other is not recorder))


def recorders_around(module: nn.Module | None = None) -> list[Recorder]:
    """The recorders of the blocks around this call; of a module, those that watch its model."""
    if torch.compiler.is_compiling():
        return []
    thread = threading.get_ident()
    return [
        recorder
        for recorder in _open.get()
        if recorder.thread == thread
        and recorder.is_open
        and (module is None or id(module) in recorder.names)
    ]


def recorders_of(module: nn.Module | None = None) -> list[Recorder]:
    """The recorders that record a call: their model runs, and no hook is handling it yet."""
    around = recorders_around(module)
    return [recorder for recorder in around if recorder.stack and not recorder.handling]


def run_recorded(
    recorders: list[Recorder],
    read: Callable[[Recorder], Call | None],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the call, and record for each recorder what `read` returns.

    Calls inside it are not recorded, unless `read` found that it is no attention call.
    """
    inside = [recorder for recorder in recorders if recorder.record(read)]
    for recorder in inside:
        recorder.handling += 1
    try:
        return function(*args, **kwargs)
    finally:
        for recorder in inside:
            recorder.handling -= 1
