"""The lens: watch what the heads of any model do, measure it, keep it as a record.

Names are loaded when first used, so that a record opens where torch is not installed. `watch`
itself is in `regard.lens.watch`, and is `regard.watch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.lens.lazy_weights import BadRecord
    from regard.lens.record import Comparison, Place, Record

_HOME = {
    "BadRecord": "regard.lens.lazy_weights",
    "Comparison": "regard.lens.record",
    "Place": "regard.lens.record",
    "Record": "regard.lens.record",
}

__all__ = ["BadRecord", "Comparison", "Place", "Record"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'regard.lens' has no attribute {name!r}")
