"""The functions that show a record, by name: how the lens reaches the view without importing it.

Why: `record.show()` should work, and the lens must not import the view, which imports the lens.
How: the package's `__init__`, which knows both and always runs first, registers them here.
"""

from collections.abc import Callable
from typing import Any

VIEWERS: dict[str, Callable[..., Any]] = {}
