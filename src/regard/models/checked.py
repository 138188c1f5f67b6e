"""Checked reading of untrusted settings, from `config.json` and from GGUF's keys.

Every value is type-checked when it is read, and an error names its key. A null value counts as
absent; then `default` is returned, and without a default an absent key is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from regard._files import spell
from regard.models.header import BadCheckpoint

MAX_INT = 2**31 - 1


class Values:
    """Settings by key; `where` names the file in errors."""

    def __init__(self, source: Mapping[str, Any], where: str = "config.json") -> None:
        self.source = source
        self.where = where

    def has(self, key: str) -> bool:
        return self.source.get(key) is not None

    def count(
        self, key: str, default: int | None = None, most: int = MAX_INT, least: int = 1
    ) -> int:
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, value, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, above: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float):
            raise self.wrong(key, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or (above is not None and number <= above):
            more = "" if above is None else f" above {above:g}"
            raise self.wrong(key, value, f"a finite number{more}")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def word(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def choice(self, key: str, allowed: Collection[str], default: str) -> str:
        value = self.word(key, default)
        if value not in allowed:
            raise self.wrong(key, value, f"one of {', '.join(allowed)}")
        return value

    def get(self, key: str, default: Any) -> Any:
        value = self.source.get(key)
        if value is None and default is None:
            raise BadCheckpoint(f"{self.where} has no {key!r}, which this architecture needs")
        return default if value is None else value

    def wrong(self, key: str, value: Any, expected: str) -> BadCheckpoint:
        shown = spell(value.tolist() if hasattr(value, "tolist") else value)
        return BadCheckpoint(f"{self.where}: {key} is {shown}; expected {expected}")
