"""The one hook through which all looking goes: it is given every call of attention in a block.

Why: what heads look at is asked by layers (`observing`), by the lens (`watch`) and by losses on
attention, and what calls attention must know none of them.

How: `attention`, and `observe` where it gives an output, look at `active`, which is None outside a
block, and then do nothing else. A hook is given the call, checked, before it runs, and must change
nothing. In a compiled graph it is traced along, where it can be.

Left out: who called. A hook keeps track of modules itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from regard.ops.call import Call

Hook = Callable[[Call], None]

active: Hook | None = None
"""What is given every call now, if anything."""


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Give the hook every call of attention in this block; those of outer blocks get them too."""
    global active
    outer = active
    if outer is hook:
        yield
        return

    def both(call: Call) -> None:
        hook(call)
        if outer is not None:
            outer(call)

    active = hook if outer is None else both
    try:
        yield
    finally:
        active = outer
