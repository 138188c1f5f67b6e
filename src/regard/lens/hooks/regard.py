"""The door to our own attention: every call of `regard.attention` in the model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.lens.captured_call import Call
from regard.ops.call_hook import listening

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder


@contextmanager
def own_door(recorder: Recorder) -> Iterator[None]:
    """Hear the calls while a module of the model is running."""

    def hear(q_bhtd: Tensor, k_bgsd: Tensor, **rule: Any) -> None:
        name = recorder.name_of()
        if name is not None and not recorder.busy:
            recorder.take(Call(name=name, q=q_bhtd, k=k_bgsd, **rule))

    with listening(hear):
        yield
