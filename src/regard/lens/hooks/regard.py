"""The hook on our own attention: every call of `regard.attention` in the model's modules.

The caller may be one of our layers, a module of anyone's, or a model of `transformers` with
attn_implementation="regard". The call that is measured is the one that the operation checked. Row
statistics are requested from the pass that computes the output, if its kernel can return them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regard.lens.captured_call import Call
from regard.lens.hooks.transformers import is_cross
from regard.ops import Causal, Wants, call
from regard.ops.call_hook import hooked

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder


@contextmanager
def hook_regard(recorder: Recorder) -> Iterator[None]:
    def read(recorder: Recorder, seen: call.Call) -> Call:
        rule = {word: getattr(seen.rule, word) for word in ("mask", "bias", "scale", "softcap")}
        cross = is_cross(recorder, recorder.stack[-1], seen.q, seen.k)
        name, mask, k, v = recorder.name_of() or "", seen.rule.mask, seen.k, seen.v
        rows = seen.rows
        T, S = seen.q.shape[2], k.shape[2]
        if isinstance(mask, Causal) and mask.align == "start" and S > T and seen.rule.bias is None:
            # The other keys are slots of a fixed cache that no query sees.
            k, v, rows = k[:, :, :T], v[:, :, :T], None
        number = seen.rule_number
        return Call(
            name=name,
            q=seen.q,
            k=k,
            v=v,
            sinks=seen.sinks,
            cross=cross,
            rows=rows,
            rule_number=number,
            **rule,
        )

    def choose_wants(seen: call.Call) -> Wants | None:
        """The wanted row statistics, if at least half of the batch's rows are recorded."""
        takes, wants = recorder.takes, recorder.takes.chosen.wants
        if recorder.handling or not recorder.is_open or not recorder.stack:
            return None
        if recorder.layers is not None or recorder.on_call is not None or wants.mass is not None:
            return None
        if 2 * len(takes.rows or (0,)) < seen.q.shape[0]:
            return None
        return wants

    def asks(seen: call.Call) -> Wants | None:
        wants: list[Wants | None] = []
        name = recorder.name_of() or ""
        recorder.attempt(name, lambda: wants.append(choose_wants(seen)))
        return wants[0] if wants else None

    def record(seen: call.Call) -> None:
        if recorder.handling or not recorder.is_open:
            return
        with recorder.running(seen.caller):
            if recorder.stack:
                recorder.record(lambda each: read(each, seen))

    with hooked(record, asks=asks, quiet=recorder.unseen):
        yield
