"""Values that follow from some objects, kept as long as the same objects come again.

Why: the layers of a model share a text and a mask, and what follows from these is found once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Values by a form and by the identity of objects; the latest `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: dict[Hashable, tuple[tuple[Any, ...], Value]] = {}

    def once(self, form: Hashable, objects: tuple[Any, ...], make: Callable[[], Value]) -> Value:
        """The value for a form and these very objects, which nobody may change; made once."""
        key = form, *map(id, objects)
        if key not in self._known:
            while len(self._known) >= self.most:
                self._known.pop(next(iter(self._known)))
            # The objects are kept, so that no others can get their ids.
            self._known[key] = objects, make()
        return self._known[key][1]
