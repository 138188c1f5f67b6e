"""The hook on our own attention: every call of `regard.attention` in the model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from regard.lens.captured_call import Call
from regard.ops import call
from regard.ops.call_hook import hooked

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder


@contextmanager
def hook_regard(recorder: Recorder) -> Iterator[None]:
    def record(seen: call.Call) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "a compiled graph cannot be watched: its steps are recorded once and run unseen; "
                "watch the model that is not compiled, and leave compiled=False in generate"
            )
        name = recorder.name_of()
        if name is not None and not recorder.busy:
            rule = {word: getattr(seen.rule, word) for word in ("mask", "bias", "scale", "softcap")}
            found = Call(name=name, q=seen.q, k=seen.k, v=seen.v, sinks=seen.sinks, **rule)
            recorder.take(found)

    with hooked(record):
        yield
