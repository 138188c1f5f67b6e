"""95% confidence intervals of means, shares and medians, over seeds or samples.

How: Student's t for a mean; its quantile is found by bisection on the integral of its density, so
that no table and no further package is needed. Wilson's interval for a share of trials. For a
median, two of the values, chosen by the binomial distribution, whatever distribution they have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and 95% interval (low, high) of independent values, at least two."""
    if len(values) < 2:
        raise ValueError(f"an interval needs at least two values, and {len(values)} came")
    numbers = np.asarray(values, dtype=np.float64)
    mean = float(numbers.mean())
    half = t_quantile(len(values) - 1) * float(numbers.std(ddof=1)) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": len(values)}


def paired_difference(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Mean of second - first with its interval; both have the same seeds in the same order."""
    return mean_interval([b - a for a, b in zip(first, second, strict=True)])


def share_interval(right: int, trials: int) -> dict[str, float]:
    """The share of trials that were right, with Wilson's 95% interval."""
    if not 0 <= right <= trials or trials < 1:
        raise ValueError(f"{right} of {trials} is no share; expected 0 <= right <= trials, above 0")
    z, share = 1.959964, right / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    half = z * spread / (1 + z * z / trials)
    return {"mean": share, "low": middle - half, "high": middle + half, "n": trials}


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """Median and 95% interval (low, high) of independent values, at least six."""
    n = len(values)
    if n < 6:
        raise ValueError(f"an interval of a median needs at least six values, and {n} came")
    # The median is below the k-th smallest value with P(Binomial(n, 1/2) < k), at most 2.5%.
    tails = itertools.accumulate(math.comb(n, k) / 2**n for k in range(n))
    k = sum(tail <= 0.025 for tail in tails)
    ordered = sorted(float(value) for value in values)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return {"median": middle, "low": ordered[k - 1], "high": ordered[n - k], "n": n}


@cache
def t_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t with `freedom` degrees of freedom."""
    log_c = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_c) / math.sqrt(freedom * math.pi)
    low, high = 0.0, 16.0
    for _ in range(40):
        middle = (low + high) / 2
        x = np.linspace(0.0, middle, 4001)
        density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
        below = 0.5 + float(np.trapezoid(density, x))
        low, high = (middle, high) if below < 0.975 else (low, middle)
    return (low + high) / 2


def spell_interval(found: dict[str, float], form: str = ".3g") -> str:
    """Format a mean or median for a sentence: 1.23 (95% interval 1.20 to 1.26)."""
    middle = "mean" if "mean" in found else "median"
    value, low, high = (format(found[name], form) for name in (middle, "low", "high"))
    return f"{value} (95% interval {low} to {high})"


def side_of(found: dict[str, float], value: float = 0.0) -> int:
    """1 if the interval is entirely above a value, -1 if below, 0 if it contains the value."""
    return int(found["low"] > value) - int(found["high"] < value)
