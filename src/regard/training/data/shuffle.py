"""Orders that follow from a seed and a place alone, the same on every machine.

Why: a run that is resumed, or spread over several devices, must see what it would have seen.

How: Philox, started from the seed and the place (an epoch, a step), gives raw 64-bit words, whose
ranks are the order. Raw words are promised never to change between versions of numpy; what is made
of them by numpy's own shuffling is not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LARGEST_SEED = 2**63 - 1  # torch takes no larger one


def check_seed(seed: int) -> None:
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed is {seed!r}, expected a whole number from 0 on, below 2**63")


def check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise ValueError(f"step is {step!r}, expected a whole number from 0 on")


def draw_words(n: int, *place: int) -> npt.NDArray[np.uint64]:
    """n words of 64 bits each, from the numbers given."""
    return np.random.Philox(np.random.SeedSequence(place)).random_raw(n)


def draw_order(n: int, *place: int) -> npt.NDArray[np.int64]:
    """The numbers 0 .. n - 1 in an order of their own for each place."""
    return np.argsort(draw_words(n, *place), kind="stable")


def draw_shares(n: int, *place: int) -> npt.NDArray[np.float64]:
    """n numbers from 0 up to, not including, 1."""
    return (draw_words(n, *place) >> np.uint64(11)).astype(np.float64) * 2.0**-53
