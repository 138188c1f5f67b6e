"""Pack arrays into a page: deflated, in base64, and quantised if they would take too many bytes.

Weights are quantised to evenly spaced levels, so the error has the same bound for all weights, and
small weights, which most are, compress well. Means of many weights are smaller than any such step,
and are stored as float16.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

import numpy as np

from regard.view.queries import Floats

LEVELS = (65535, 16383, 4095, 2047, 1023)  # numbers of quantisation levels above 0
HALF = 0  # in place of a number of levels: float16
_HALF_BOUND = 2.0**-12  # the largest rounding error of float16 for numbers up to 1


def pack(values: Floats, levels: int | None = None) -> str:
    """Pack an array: float32, or quantised with "LEVELS:" in front; deflated, in base64.

    Quantised arrays are stored column by column, first the high bytes of all, then the low ones, so
    that similar bytes are adjacent and compress better.
    """
    if levels is None:
        return _deflate(values.astype("<f4").tobytes())
    if levels == HALF:
        codes = values.T.astype(np.float16).view(np.uint16)
    else:  # rounding may have left a weight slightly above 1
        codes = np.rint(np.minimum(values.T, 1.0) * np.float32(levels)).astype(np.uint16)
    upper, lower = (codes >> 8).astype(np.uint8), codes.astype(np.uint8)
    return f"{levels}:{_deflate(upper.tobytes() + lower.tobytes())}"


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def find_bound(parts: Mapping[str, str]) -> float:
    """The largest rounding error of a weight in these parts."""
    levels = {int(part.split(":", 1)[0]) for part in parts.values() if ":" in part}
    return max((0.5 / each if each else _HALF_BOUND for each in levels), default=0.0)


def tell_bound(bound: float) -> str:
    """State the largest rounding error in a sentence; "" if weights are not rounded."""
    return f"weights in the file are rounded, each by at most {bound:.2g}" if bound else ""
