"""IsoFLOP curves: the loss of models of many sizes at one training budget, and its minimum.

Why: they give the best size for a budget without a fitted law, and so check such a law.

How: a budget of C FLOPs trains a model of N parameters on C / 6N tokens. Its loss there is
interpolated between its two nearest runs, linearly in log D and log L; a model whose runs do not
reach the budget is left out. A parabola in log N fitted to the models' losses has its minimum at
the best size, which counts only if it is between the smallest and the largest model. Over budgets
the minima grow as C^a, where a is the slope of a line in logarithms. Intervals are from resampling
the models with replacement.

Left out: any extrapolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.labs.scaling_fits import FLOPS_PER_PARAMETER, quantiles

Floats = NDArray[np.float64]


def isoflop(
    n_params: Floats,
    n_tokens: Floats,
    losses: Floats,
    *,
    least_models: int = 5,
    n_budgets: int = 5,
    bootstraps: int = 200,
) -> dict[str, Any]:
    """Fit curves for budgets that enough models reach: the curves, their minima, and a, as JSON."""
    log_n = np.log(n_params)
    curves = choose_curves(log_n, np.log(n_tokens), np.log(losses), least_models, n_budgets)
    sizes = np.unique(log_n)
    minima = find_minima(curves, sizes, np.ones(len(sizes)))
    drawn = np.random.default_rng(0).multinomial(
        len(sizes), [1 / len(sizes)] * len(sizes), bootstraps
    )
    again = [find_minima(curves, sizes, counts.astype(np.float64)) for counts in drawn]
    found = []
    for (budget, each_n, log_loss), minimum, others in zip(
        curves, minima, zip(*again, strict=True), strict=True
    ):
        interval = [x for x in others if x is not None]
        found.append(
            {
                "compute": float(np.exp(budget)),
                "n_params": np.exp(each_n).tolist(),
                "losses": np.exp(log_loss).tolist(),
                "minimum": spread(minimum, interval, bootstraps, exponentiate=True),
            }
        )
    budgets = [budget for budget, _, _ in curves]
    slopes = [slope for each in again if (slope := slope_of(budgets, each)) is not None]
    return {"curves": found, "exponent": spread(slope_of(budgets, minima), slopes, bootstraps)}


def choose_curves(
    log_n: Floats, log_d: Floats, log_loss: Floats, least_models: int, n_budgets: int
) -> list[tuple[float, Floats, Floats]]:
    """Choose evenly spaced budgets that enough models reach: (log C, log N, log L) of each."""
    spent = log_n + log_d + np.log(FLOPS_PER_PARAMETER)
    curves = []
    for budget in np.linspace(spent.min(), spent.max(), 200):
        sizes, read = read_curve(log_n, log_d, log_loss, float(budget))
        if len(sizes) >= least_models:
            curves.append((float(budget), sizes, read))
    if len(curves) <= n_budgets:
        return curves
    return [curves[at] for at in np.linspace(0, len(curves) - 1, n_budgets).round().astype(int)]


def read_curve(
    log_n: Floats, log_d: Floats, log_loss: Floats, budget: float
) -> tuple[Floats, Floats]:
    """Sizes with runs on both sides of the budget, and their losses interpolated at the budget."""
    sizes, read = [], []
    for size in np.unique(log_n):
        own = np.flatnonzero(log_n == size)
        own = own[np.argsort(log_d[own])]
        wanted = budget - np.log(FLOPS_PER_PARAMETER) - size
        if log_d[own[0]] <= wanted <= log_d[own[-1]]:
            sizes.append(size)
            read.append(np.interp(wanted, log_d[own], log_loss[own]))
    return np.asarray(sizes), np.asarray(read)


def find_minima(
    curves: Sequence[tuple[float, Floats, Floats]], sizes: Floats, counts: Floats
) -> list[float | None]:
    """log N at each curve's minimum, with models weighted by `counts`; None without a minimum."""
    minima = []
    for _, log_n, log_loss in curves:
        weights = counts[np.searchsorted(sizes, log_n)]
        minima.append(parabola_minimum(log_n[weights > 0], log_loss[weights > 0], weights))
    return minima


def parabola_minimum(x: Floats, y: Floats, weights: Floats) -> float | None:
    if len(x) < 4:
        return None  # a parabola through three points fits always, so it says nothing
    middle = x.mean()
    curvature, slope, _ = np.polyfit(x - middle, y, 2, w=np.sqrt(weights[weights > 0]))
    if curvature <= 0:
        return None
    lowest = float(middle - slope / (2 * curvature))
    return lowest if x.min() < lowest < x.max() else None


def slope_of(budgets: Sequence[float], minima: Sequence[float | None]) -> float | None:
    known = [(c, n) for c, n in zip(budgets, minima, strict=True) if n is not None]
    if len(known) < 3:
        return None
    c, n = np.array(known).T
    return float(np.polyfit(c - c.mean(), n, 1)[0])


def spread(
    value: float | None, others: Sequence[float], bootstraps: int, exponentiate: bool = False
) -> dict[str, float] | None:
    """A number with its bootstrap interval; None if it, or most bootstrap samples, have none."""
    if value is None or 2 * len(others) < bootstraps:
        return None
    found = (value, *quantiles(others))
    mean, low, high = (float(np.exp(x)) if exponentiate else x for x in found)
    return {"mean": mean, "low": low, "high": high, "n": len(others)}
