"""Track which module is running, by hooks on all modules, in eager code and in compiled graphs.

How: the two hooks are global, since torch.nn's fast paths are not taken with hooks on single
modules. They are the same objects for all blocks, so that a compiled model has one graph for all
blocks and one outside of them. In eager code they notify the recorders of the blocks around the
call. The compiler traces them: then they keep a stack of the modules that are being traced
(`call_hook.tracing`), and put custom operators into the graph that notify the recorders when it
runs: where its outermost modules begin and end, and which tokens are read.

Left out: compiled code that attends neither by `regard.attention` nor by the attention interface of
`transformers`: for torch.nn's attention, and for kernels that the interface has, a note says so.
And gradients.

Letters: B batch, T tokens, L tokens with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard._torch import is_called_by_compiled, run_uncompiled, set_module_hooks
from regard.lens.open_recorders import recorders_around
from regard.lens.shared_patch import counted
from regard.ops import call_hook

UNSEEN = (
    "compiled code is seen where it attends by regard's attention, or by that of transformers, but "
    "not by flex or paged attention; watch the model that is not compiled"
)


@contextmanager
def hooked_modules() -> Iterator[None]:
    with counted("modules", set_up, take_down):
        yield


def set_up() -> None:
    run_uncompiled(enter, leave, inside=False)
    run_uncompiled(tell_enter, tell_leave, inside=True)
    set_module_hooks(enter, leave)


def take_down() -> None:
    set_module_hooks(None, None)


def enter(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        tell_enter(module, args, is_called_by_compiled())
    elif torch.compiler.is_dynamo_compiling():
        trace_enter(module, args)


def leave(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        tell_leave(module, output)
    elif torch.compiler.is_dynamo_compiling():
        trace_leave(module, output)


def tell_enter(module: nn.Module, args: Any, compiled: bool) -> None:
    for recorder in recorders_around(module):
        recorder.safely(recorder.enter, module, args, compiled)


def tell_leave(module: nn.Module, output: Any) -> None:
    for recorder in recorders_around(module):
        recorder.safely(recorder.leave, module, output)


def trace_enter(module: nn.Module, args: Any) -> None:
    if not call_hook.tracing:
        _enter_op(call_hook.effect, id(module))
    call_hook.tracing.append(module)
    if isinstance(module, nn.Embedding) and args and isinstance(args[0], Tensor):
        _read_op(call_hook.effect, id(module), args[0])
    if isinstance(module, nn.MultiheadAttention):
        trace_unseen(module)


def trace_unseen(module: nn.Module) -> None:
    """Note that a module attends in a way that cannot be seen in compiled code."""
    _unseen_op(call_hook.effect, id(module))


def trace_leave(module: nn.Module, output: Any) -> None:
    call_hook.tracing.pop()
    if not call_hook.tracing:
        found = getattr(output, "logits", output)
        logits = found.detach() if isinstance(found, Tensor) else None
        _leave_op(call_hook.effect, id(module), logits)


def _enter(effect: Tensor, module: int) -> None:
    for recorder in recorders_around():
        if module in recorder.by_id:
            recorder.safely(recorder.enter, recorder.by_id[module], (), True)


def _read(effect: Tensor, module: int, ids: Tensor) -> None:
    for recorder in recorders_around():
        if module in recorder.by_id:
            recorder.read_ids(recorder.by_id[module], ids)


def _unseen(effect: Tensor, module: int) -> None:
    for recorder in recorders_around():
        if module in recorder.by_id:
            recorder.leave_out(recorder.names[module], ValueError(UNSEEN))


def _leave(effect: Tensor, module: int, logits: Tensor | None) -> None:
    for recorder in recorders_around():
        if module in recorder.by_id:
            recorder.safely(recorder.leave, recorder.by_id[module], logits)


_enter_op, _read_op, _unseen_op, _leave_op = (
    torch.library.custom_op(
        f"regard::{name}",
        function,
        mutates_args=("effect",),
        schema=f"(Tensor(a!) effect, int module{more}) -> ()",
    )
    for name, function, more in (
        ("enter_module", _enter, ""),
        ("read_ids", _read, ", Tensor ids"),
        ("leave_out", _unseen, ""),
        ("leave_module", _leave, ", Tensor? logits"),
    )
)
for operation in (_enter_op, _read_op, _unseen_op, _leave_op):
    operation.register_fake(lambda *given: None)
