"""Shuffling and random draws that are a function of integers alone, the same on every machine.

Why: a run that is resumed, or spread over several devices, must read the same batches.

How: Philox, seeded by the numbers in `place` (a seed, a purpose, an epoch, a row), gives raw 64-bit
words; their argsort is the order. numpy promises that raw words never change between its versions;
for its own shuffling it does not.
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
    """Draw n random 64-bit words, as a function of the numbers given."""
    return np.random.Philox(np.random.SeedSequence(place)).random_raw(n)


def draw_order(n: int, *place: int) -> npt.NDArray[np.int64]:
    """Draw a permutation of 0 .. n - 1, as a function of the numbers given."""
    return np.argsort(draw_words(n, *place), kind="stable")


def draw_shares(n: int, *place: int) -> npt.NDArray[np.float64]:
    """Draw n uniform numbers in [0, 1), as a function of the numbers given."""
    return (draw_words(n, *place) >> np.uint64(11)).astype(np.float64) * 2.0**-53
