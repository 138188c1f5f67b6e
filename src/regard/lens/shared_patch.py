"""Attributes that several blocks replace at once: replaced by the first, put back by the last.

Why: some models can only be seen by replacing a function of torch or of `transformers`. Blocks open
and close in several threads and in any order; if each put back what it found, one would take away
the other's replacement, or leave its own behind.

How: replacements are counted, under a lock. What is put in place belongs to no block: it asks which
recorders are open where it is called (`open_recorders.py`), and outside of blocks does nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_lock = threading.Lock()


@dataclass(eq=False)
class Patch:
    """An attribute that is replaced now; `own`: whether its owner had it, or inherited it."""

    owner: Any
    name: str
    original: Any
    replacement: Any
    own: bool
    n_blocks: int = 0

    def put_back(self) -> None:
        if vars(self.owner).get(self.name) is not self.replacement:
            return  # Someone else has replaced it since, and calls ours, which does nothing.
        if self.own:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


_patches: dict[tuple[int, str], Patch] = {}
_counts: Counter[str] = Counter()


@contextmanager
def counted(name: str, set_up: Callable[[], None], take_down: Callable[[], None]) -> Iterator[None]:
    """Set something up when the first block opens, and take it down when the last one closes."""
    with _lock:
        _counts[name] += 1
        if _counts[name] == 1:
            set_up()
    try:
        yield
    finally:
        with _lock:
            _counts[name] -= 1
            if not _counts[name]:
                take_down()


@contextmanager
def patched(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """While a block is open, `owner.name` is wrap(what it was)."""
    key = id(owner), name
    with _lock:
        if key not in _patches:
            own = name in vars(owner)
            original = vars(owner)[name] if own else getattr(owner, name)
            _patches[key] = Patch(owner, name, original, wrap(original), own)
            setattr(owner, name, _patches[key].replacement)
        patch = _patches[key]
        patch.n_blocks += 1
    try:
        yield
    finally:
        with _lock:
            patch.n_blocks -= 1
            if not patch.n_blocks:
                del _patches[key]
                patch.put_back()
