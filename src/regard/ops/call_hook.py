"""The door through which `lens` hears our own attention: one listener, set for the time of a block.

Why: a lens must see the queries, keys and rule of every call of `attention` in a model, and the
rooms that call it must not know the lens.

How: `attention` looks at `heard_by`, which is None outside a block, and then does nothing else. A
listener is called with q, k and the rule before the call, and must change nothing.

Left out: who called. The listener keeps track of modules itself.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Listener = Callable[..., None]
"""Called as listener(q_bhtd, k_bgsd, mask=, bias=, scale=, softcap=, sinks=)."""

heard_by: Listener | None = None


def tell(*given: Any, **rule: Any) -> None:
    """Hand one call to the listener, if there is one."""
    if heard_by is None:
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a compiled graph cannot be watched: its steps are recorded once and run unseen; "
            "watch the model that is not compiled, and leave compiled=False in generate"
        )
    heard_by(*given, **rule)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let the listener hear every call of `attention` in this block; an outer one hears it too."""
    global heard_by
    outer = heard_by

    def both(*given: Any, **rule: Any) -> None:
        listener(*given, **rule)
        if outer is not None:
            outer(*given, **rule)

    heard_by = both
    try:
        yield
    finally:
        heard_by = outer
