"""The one hook on attention: inside a block it is called with every call of `attention`.

Why: layers (`observing`), the lens (`watch`) and losses on attention all want to see the calls, and
the code that calls attention must not know any of them.

How: `attention`, and `observe` where it gives an output, look at `active`, which is None while no
block is open anywhere, and then do nothing else. A hook is given the call, checked, before it runs,
and must change nothing. It belongs to its block, and hears the calls of the thread and the context
(`contextvars`) in which the block was opened; blocks may end in any order. One that is `shared`
hears the calls of all threads, and is traced along in compiled graphs, which know no contexts. For
the others a graph that is traced while a block is open has an operation, `regard::hear`, which
gives them each call when it runs. It says that it writes to `effect`, so that it is not removed.

A hook may bring a context in which calls are prepared and heard: what follows functions of torch
for its sake is spared the many of them. And it may say beforehand what it will ask about rows.
Where the kernel that runs can tell that beside the output, which must not change by a bit, it is
told with the call, after it ran.

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
from regard.ops.shape import Shape
from regard.ops.wants import Wants

Hook = Callable[[Call], None]
AskRows = Callable[[Call], Wants | None]
Quiet = Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class Block:
    """One open block; one that has ended may still be known to a context that was copied."""

    hook: Hook
    shared: bool
    asks: AskRows | None = None
    quiet: Quiet | None = None
    thread: int = field(default_factory=threading.get_ident)
    is_open: bool = True


active: Hook | None = None
"""What is given every call now: `tell`, while some block is open."""
shared: tuple[Hook, ...] = ()
listening = False
"""Whether some block is open that is not shared."""
tracing: list[Any] = []
"""The modules that the compiler is tracing now, outermost first."""
effect: Tensor | None = None
"""What operations say they write to that only tell something."""
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
    """What the hooks that hear a call here will ask about its rows; None where none says so."""
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
    """In which what hooks do beside hearing calls is left out."""
    with ExitStack() as contexts:
        for block in own_blocks():
            if block.quiet is not None:
                contexts.enter_context(block.quiet())
        yield


def trace_call(call: Call) -> None:
    """Have a compiled graph tell of a call when it runs."""
    packed = pack(call.rule)
    assert not isinstance(packed.form, str)
    tensors = [tensor.detach() for tensor in packed.tensors]
    q, k, v = call.q.detach(), call.k.detach(), call.v.detach()
    sinks = None if call.sinks is None else call.sinks.detach()
    caller = id(tracing[-1]) if tracing else None
    _hear_op(
        effect, spell(packed.form), tensors, packed.ints, packed.floats, q, k, v, sinks, caller
    )


def _hear(
    effect: Tensor,
    form: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
    *rest: Any,
) -> None:
    blocks = own_blocks()
    if blocks:
        q, k, v, sinks, caller = rest
        shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        rule = unpack(Packed(form, tensors, ints, floats), shape)
        for block in blocks:
            block.hook(Call(q=q, k=k, v=v, rule=rule, sinks=sinks, caller=caller))


_hear_op = torch.library.custom_op(
    "regard::hear",
    _hear,
    mutates_args=("effect",),
    schema="(Tensor(a!) effect, str form, Tensor[] tensors, SymInt[] ints, float[] floats, "
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, int? caller) -> ()",
)
_hear_op.register_fake(lambda *given: None)


def own_blocks() -> list[Block]:
    """The open blocks of this thread and context."""
    thread = threading.get_ident()
    return [block for block in _own.get() if block.is_open and block.thread == thread]


def is_hooked() -> bool:
    """Whether a call made here and now would be heard."""
    return bool(shared or own_blocks())


@contextmanager
def hooked(
    hook: Hook,
    *,
    shared: bool = False,
    asks: AskRows | None = None,
    quiet: Quiet | None = None,
) -> Iterator[None]:
    """Give the hook the calls of attention in this block; those of outer blocks get them too.

    asks: what it will ask about the rows of a call. quiet: a context in which calls are prepared
    and heard. Only hooks that are not shared have these.
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
    """Calls in this block are given to no hook of this thread and context; whether there is one."""
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
        # The same hook in several blocks is told once.
        shared = tuple(dict.fromkeys(each.hook for each in _open if each.shared))
