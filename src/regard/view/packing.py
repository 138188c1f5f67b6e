"""Arrays as a page holds them: deflated, in base64, and rounded where they take too many bytes.

A rounded weight is one of evenly spaced levels, so that its error has one bound at any size, and
what is small, which most weights are, deflates to little. Means of many weights are smaller than
any such step, and are float16.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

import numpy as np

from regard.view.queries import Floats

LEVELS = (65535, 16383, 4095, 2047, 1023)  # of rounded weights, above 0
HALF = 0  # instead of levels: float16
_HALF_BOUND = 2.0**-12  # by how much that rounds what is below 1


def pack(values: Floats, levels: int | None = None) -> str:
    """An array as a page has it: deflated, in base64; "LEVELS:" stands before rounded weights.

    Those lie column by column, first the upper bytes of all, then the lower: what is alike lies
    side by side so, and is deflated to less.
    """
    if levels is None:
        return _deflate(values.astype("<f4").tobytes())
    if levels == HALF:
        codes = values.T.astype(np.float16).view(np.uint16)
    else:  # rounding can have left a weight a little above 1
        codes = np.rint(np.minimum(values.T, 1.0) * np.float32(levels)).astype(np.uint16)
    upper, lower = (codes >> 8).astype(np.uint8), codes.astype(np.uint8)
    return f"{levels}:{_deflate(upper.tobytes() + lower.tobytes())}"


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def find_bound(parts: Mapping[str, str]) -> float:
    """By how much a weight in these parts can be off."""
    levels = {int(part.split(":", 1)[0]) for part in parts.values() if ":" in part}
    return max((0.5 / each if each else _HALF_BOUND for each in levels), default=0.0)


def tell_bound(bound: float) -> str:
    """How far weights of a page are rounded, in a sentence; nothing where they are not."""
    return f"weights in the file are rounded, each by at most {bound:.2g}" if bound else ""
