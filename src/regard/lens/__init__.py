"""The lens: watch what the attention heads of any model do, measure it, keep it as a record.

Names are imported when first used, so that a record can be opened where torch is not installed.
`watch` itself is in `regard.lens.watch`, and is `regard.watch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.lens.lazy_weights import BadRecord as BadRecord
    from regard.lens.record import Comparison as Comparison
    from regard.lens.record import Place as Place
    from regard.lens.record import Record as Record

_HOMES = {
    "BadRecord": "lazy_weights",
    "Comparison": "record",
    "Place": "record",
    "Record": "record",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"regard.lens.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'regard.lens' has no attribute {name!r}")
