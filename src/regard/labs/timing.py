"""Time a call, repeatedly, after a warm-up call.

How: a GPU runs asynchronously, so it is synchronised before and after each call. The first call
compiles and fills caches, and is not counted. Other work on the machine slows some calls down, so
results are medians, with intervals by resampling the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch


def time_calls(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Measure the seconds of each of `repeats` calls."""
    call()
    seconds = []
    for _ in range(repeats):
        wait_for(device)
        begun = time.perf_counter()
        call()
        wait_for(device)
        seconds.append(time.perf_counter() - begun)
    return seconds


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_time(values: Sequence[float]) -> dict[str, float]:
    """The median, under the name `mean`, with its 95% bootstrap interval; deterministic."""
    numbers = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(np.median(resample(numbers), -1), (0.025, 0.975))
    found = {"mean": np.median(numbers), "low": low, "high": high}
    return {name: float(value) for name, value in found.items()} | {"n": len(values)}


def resample(numbers: np.ndarray, times: int = 1000) -> np.ndarray:
    """Draw (times, n) of the n numbers with replacement; every call draws the same."""
    drawn = np.random.default_rng(0).integers(len(numbers), size=(times, len(numbers)))
    taken: np.ndarray = numbers[drawn]
    return taken
