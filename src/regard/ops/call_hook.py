"""The one hook on attention: inside a block it is called with every call of `attention`.

Why: layers (`observing`), the lens (`watch`) and losses on attention all need to see the calls, and
the code that calls attention must not depend on any of them.

How: `attention`, and `observe` where it computes an output, check `active`. It is None while no
block is open anywhere, and then nothing else is done. A hook gets the checked call before it runs,
and must change nothing. It belongs to its block, and gets the calls of the thread and the context
(`contextvars`) in which the block was opened; blocks may end in any order. A hook that is `shared`
gets the calls of all threads, and is itself traced into compiled graphs, where contexts cannot be
read. For the other hooks, a graph that is traced while a block is open contains an operation,
`regard::hear`, which passes them each call when the graph runs. It declares that it writes to
`effect`, so that the compiler does not remove it. Beside it, `rule_numbers.py` numbers the masks.

A hook may bring a context manager, `quiet`, inside which calls are checked and passed on, so that
code that intercepts torch's functions for it does not see the many that this calls. And a hook may
announce which row statistics it will ask for (`asks`). Where the kernel that runs can compute them
beside the output, which must not change by a bit, the hook gets the call with them, after it ran.

Left out: who called. A hook keeps track of modules itself; in compiled graphs by `tracing`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.ops.call import Call
from regard.ops.pack import Packed, pack, spell, unpack
from regard.ops.rule_numbers import number_rule
from regard.ops.shape import Shape
from regard.ops.wants import Wants

Hook = Callable[[Call], None]
AskRows = Callable[[Call], Wants | None]
Quiet = Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class Block:
    """One block of a hook; when it has ended, copies of the context may still refer to it."""

    hook: Hook
    shared: bool
    asks: AskRows | None = None
    quiet: Quiet | None = None
    thread: int = field(default_factory=threading.get_ident)
    is_open: bool = True


active: Hook | None = None
"""The function that gets every call: `tell` while some block is open, otherwise None."""
shared: tuple[Hook, ...] = ()
listening = False
"""Whether some block is open that is not shared."""
tracing: list[Any] = []
"""The modules that the compiler is tracing now, outermost first."""
effect: Tensor | None = None
"""The tensor that operations without a result declare to write to, so that they are kept."""
_open: list[Block] = []
_own: ContextVar[tuple[Block, ...]] = ContextVar("regard_call_hooks", default=())
_lock = threading.Lock()


def tell(call: Call) -> None:
    for hook in shared:
        hook(call)
    if torch.compiler.is_dynamo_compiling():
        if listening:
            trace_call(call)
    elif not torch.compiler.is_compiling():
        for block in own_blocks():
            block.hook(call)


def asked_of_rows(call: Call) -> Wants | None:
    """The row statistics that this context's hooks will ask of a call; None where none does."""
    if torch.compiler.is_compiling():
        return None
    asks = [block.asks(call) for block in own_blocks() if block.asks is not None]
    wanted = [ask for ask in asks if ask is not None]
    if not wanted:
        return None
    return Wants(
        entropy=any(ask.entropy for ask in wanted),
        peak=any(ask.peak for ask in wanted),
        distance=any(ask.distance for ask in wanted),
        top=max((ask.top for ask in wanted if ask.top is not None), default=None),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Enter the `quiet` contexts of all hooks of this thread and context."""
    with ExitStack() as contexts:
        for block in own_blocks():
            if block.quiet is not None:
                contexts.enter_context(block.quiet())
        yield


def trace_call(call: Call) -> None:
    """Put an operation into the graph being traced that passes this call to hooks at run time."""
    packed = pack(call.rule)
    assert not isinstance(packed.form, str)
    tensors = [tensor.detach() for tensor in packed.tensors]
    q, k, v = call.q.detach(), call.k.detach(), call.v.detach()
    sinks = None if call.sinks is None else call.sinks.detach()
    caller = id(tracing[-1]) if tracing else None
    number = number_rule(tensors, None) if tensors else None
    given = tensors, packed.ints, packed.floats, number
    _hear_op(effect, spell(packed.form), *given, q, k, v, sinks, caller)


def _hear(
    effect: Tensor,
    form: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
    numbered: Tensor | None,
    *rest: Any,
) -> None:
    blocks = own_blocks()
    if blocks:
        q, k, v, sinks, caller = rest
        shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        rule = unpack(Packed(form, tensors, ints, floats), shape)
        number = None if numbered is None else int(numbered)
        call = Call(q=q, k=k, v=v, rule=rule, sinks=sinks, caller=caller, rule_number=number)
        for block in blocks:
            block.hook(call)


_hear_op = torch.library.custom_op(
    "regard::hear",
    _hear,
    mutates_args=("effect",),
    schema="(Tensor(a!) effect, str form, Tensor[] tensors, SymInt[] ints, float[] floats, "
    "Tensor? number, Tensor q, Tensor k, Tensor v, Tensor? sinks, int? caller) -> ()",
)
_hear_op.register_fake(lambda *given: None)


def own_blocks() -> list[Block]:
    """The open blocks of this thread and context."""
    thread = threading.get_ident()
    return [block for block in _own.get() if block.is_open and block.thread == thread]


def is_hooked() -> bool:
    """Whether a call made now in this thread and context would reach a hook."""
    return bool(shared or own_blocks())


@contextmanager
def hooked(
    hook: Hook,
    *,
    shared: bool = False,
    asks: AskRows | None = None,
    quiet: Quiet | None = None,
) -> Iterator[None]:
    """Give the hook the calls of attention in this block; hooks of outer blocks get them too.

    asks: returns the row statistics that the hook will ask of a call. quiet: returns a context
    manager inside which calls are checked and passed on. Both only for hooks that are not shared.
    """
    block = Block(hook, shared, asks, quiet)
    _change(_open.append, block)
    if not shared:
        _own.set((*own_blocks(), block))
    try:
        yield
    finally:
        block.is_open = False
        _change(_open.remove, block)
        _own.set(tuple(own_blocks()))


@contextmanager
def unheard() -> Iterator[bool]:
    """Hide calls in this block from the context's own hooks; yields whether there are any."""
    heard = own_blocks()
    token = _own.set(())
    try:
        yield bool(heard)
    finally:
        _own.reset(token)


def _change(change: Callable[[Block], None], block: Block) -> None:
    global active, shared, listening, effect
    with _lock:
        change(block)
        listening = not all(each.shared for each in _open)
        if effect is None:
            with torch.inference_mode(False):
                effect = torch.zeros(1, device="cpu")
        active = tell if _open else None
        # A hook that is open in several blocks gets each call once.
        shared = tuple(dict.fromkeys(each.hook for each in _open if each.shared))
