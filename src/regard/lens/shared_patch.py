"""Monkey-patches that several blocks share: installed by the first block, removed by the last.

Why: some models can only be seen or edited by replacing a function of torch or of `transformers`.
Blocks open and close in several threads and in any order; if each restored what it found, one would
remove the other's replacement, or leave its own behind.

How: an attribute has a list of wrappers, each with a count, under a lock. What is installed is the
original inside all of them, and is rebuilt when a wrapper is added or removed. A wrapper belongs to
no block: it asks which recorders or editors are open where it is called, and outside of blocks does
nothing. A function that an instance holds is replaced by a `StandIn`, which is copied and pickled
as the original.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Wrap = Callable[[Any], Any]

_lock = threading.Lock()


@dataclass(eq=False)
class Patch:
    """An attribute that is patched now; `own`: its owner defines it, and does not inherit it."""

    owner: Any
    name: str
    original: Any
    own: bool
    current: Any
    wraps: list[Wrap] = field(default_factory=list)
    counts: Counter[Any] = field(default_factory=Counter)

    def add(self, wrap: Wrap) -> None:
        self.counts[kind_of(wrap)] += 1
        if self.counts[kind_of(wrap)] == 1:
            self.wraps.append(wrap)
            self.put_in_place()

    def remove(self, wrap: Wrap) -> None:
        kind = kind_of(wrap)
        self.counts[kind] -= 1
        if not self.counts[kind]:
            self.wraps = [other for other in self.wraps if kind_of(other) != kind]
            self.put_in_place()

    def put_in_place(self) -> None:
        if vars(self.owner).get(self.name, self.original) is not self.current:
            return  # Someone else has patched it since; ours stays inside, and does nothing.
        self.current = self.original
        for wrap in self.wraps:
            self.current = wrap(self.current)
        if self.wraps or self.own:
            setattr(self.owner, self.name, self.current)
        else:
            delattr(self.owner, self.name)


class StandIn:
    """Replaces a function that an instance holds; copies and pickles yield the original."""

    def __init__(self, original: Any, function: Callable[..., Any]) -> None:
        self.original, self.function = original, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return give_back, (self.original,)


def give_back(original: Any) -> Any:
    return original


def original_of(value: Any) -> Any:
    """The original that a stand-in replaces, or the function itself."""
    return value.original if isinstance(value, StandIn) else value


def kind_of(wrap: Wrap) -> Any:
    """What identifies a wrapper: its function and, if it is a partial, its arguments."""
    return (wrap.func, wrap.args) if isinstance(wrap, functools.partial) else wrap


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
def patched(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """While a block is open, `owner.name` is wrap(what it was)."""
    key = id(owner), name
    with _lock:
        if key not in _patches:
            own = name in vars(owner)
            original = vars(owner)[name] if own else getattr(owner, name)
            _patches[key] = Patch(owner, name, original, own, original)
        patch = _patches[key]
        patch.add(wrap)
    try:
        yield
    finally:
        with _lock:
            patch.remove(wrap)
            if not patch.wraps:
                _patches.pop(key, None)
