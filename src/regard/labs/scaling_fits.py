"""Scaling laws fitted to runs: `fit_chinchilla` and `fit_kaplan`, with bootstrap intervals.

Why: the loss of a larger model or budget is extrapolated by a law fitted to many small runs; so the
law needs confidence intervals, and a fit that does not depend on its starting point.

How: with x = log N and y = log D, for N parameters, D tokens and a loss of L nats a token,

    Chinchilla:  L = E + A / N^α + B / D^β          log L = logsumexp(a - α x, b - β y, e)
    Kaplan:      L = [(N_c/N)^(α_N/α_D) + D_c/D]^α_D  log L = α_D · logsumexp(n - ρ x, d - y)

The fit minimises the Huber loss of the differences of log L, so an outlier pulls by its sign, not
its size. x and y are centred, so that a factor and its exponent are not collinear. The method is
Levenberg–Marquardt with weights min(1, δ/|difference|), batched over all starts: each iteration
solves a small system for each start and accepts steps that lower the loss. Starts are a grid over
the share of the mean loss that each term has, and over exponents. The bootstrap draws as many runs
as there are, with replacement, and fits again, from the best fit and from two starts; samples are
stored as counts of runs, so that all are one batch. Intervals are the quantiles 2.5% and 97.5% of
these fits.

Left out: runs that share their noise (evaluations along one training): the bootstrap assumes
independent runs. With some dozens of runs with little noise, bootstrap intervals contain the truth
somewhat less often than 95 times in 100.

Letters: S starts or bootstrap samples, R runs, P parameters of the law.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from regard._check import check_count, check_number
from regard.training.data.shuffle import check_seed

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]
Curve = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From parameters (S, P) to log L (S, R) and its derivatives (S, R, P)."""

FLOPS_PER_PARAMETER = 6.0  # a token of training: 2 forward, 4 backward
LARGEST_LOG = 700.0  # beyond it exp overflows float64
KEPT_STARTS = 12  # the best starts after `FIRST` iterations, which are run to convergence
FIRST = 30
OTHER_STARTS = 2  # of a bootstrap sample, besides the best fit


class Allocation(NamedTuple):
    """The best use of a budget: a model of n_params parameters, trained on n_tokens tokens."""

    n_params: float
    n_tokens: float


@final
@dataclass(frozen=True, kw_only=True)
class ChinchillaFit:
    """A fit of L = E + A / N^α + B / D^β. `intervals`: 95%, by the names of the parameters.

    `resampled` are the fits of the bootstrap samples, `objective` is the sum of Huber losses.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    objective: float
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    resampled: tuple[ChinchillaFit, ...] = field(default=(), repr=False)

    def predict(self, n_params: ArrayLike, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """The loss of models of n_params after n_tokens; the two broadcast."""
        log_n, log_d = log_of("n_params", n_params), log_of("n_tokens", n_tokens)
        by_size = np.exp(safe_log(self.A) - self.alpha * log_n)
        by_tokens = np.exp(safe_log(self.B) - self.beta * log_d)
        return np.asarray(self.E + by_size + by_tokens, dtype=np.float64)

    def optimal(self, compute: float) -> Allocation:
        """Parameters and tokens of the least loss for a budget of 6 N D = compute FLOPs.

        At the minimum of A/N^α + B/D^β along N D = C/6 the derivative by log N is 0:
        αA/N^α = βB/D^β. So N = G (C/6)^(β/(α+β)) and D = (C/6)^(α/(α+β)) / G, with
        G = (αA / βB)^(1/(α+β)).
        """
        check_number("compute", compute)
        if self.alpha <= 0 or self.beta <= 0:
            what = f"alpha is {self.alpha:.3g} and beta {self.beta:.3g}"
            raise ValueError(
                f"{what}; a budget has a best size only where both are above 0: fit runs whose "
                "loss falls with size and with tokens"
            )
        both = self.alpha + self.beta
        log_budget = math.log(compute / FLOPS_PER_PARAMETER)
        log_ratio = math.log(self.alpha / self.beta) + safe_log(self.A) - safe_log(self.B)
        log_n = (log_ratio + self.beta * log_budget) / both
        return Allocation(safe_exp(log_n), safe_exp(log_budget - log_n))

    def interval(self, value: Callable[[ChinchillaFit], float]) -> Interval:
        """The 95% interval of a function of the fit: lambda fit: fit.optimal(1e20).n_params.

        Bootstrap fits for which it raises an error are left out; half of them must remain.
        """
        return interval_of(value, self.resampled)


@final
@dataclass(frozen=True, kw_only=True)
class KaplanFit:
    """A fit of L = [(N_c/N)^(α_N/α_D) + D_c/D]^α_D, which has no irreducible loss."""

    N_c: float
    D_c: float
    alpha_N: float
    alpha_D: float
    objective: float
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    resampled: tuple[KaplanFit, ...] = field(default=(), repr=False)

    def predict(self, n_params: ArrayLike, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """The loss of models of n_params after n_tokens; the two broadcast."""
        log_n, log_d = log_of("n_params", n_params), log_of("n_tokens", n_tokens)
        by_size = self.alpha_N / self.alpha_D * (safe_log(self.N_c) - log_n)
        by_tokens = safe_log(self.D_c) - log_d
        return np.asarray(np.exp(self.alpha_D * np.logaddexp(by_size, by_tokens)))

    def interval(self, value: Callable[[KaplanFit], float]) -> Interval:
        """The 95% interval of a function of the fit; see `ChinchillaFit.interval`."""
        return interval_of(value, self.resampled)


Fit = TypeVar("Fit", ChinchillaFit, KaplanFit)


@final
@dataclass(frozen=True, kw_only=True)
class Runs:
    """Centred logs of sizes and token counts, and logs of losses; each (R,) float64."""

    x: Tensor
    y: Tensor
    log_loss: Tensor
    mean_x: float
    mean_y: float


def fit_chinchilla(
    n_params: ArrayLike,
    n_tokens: ArrayLike,
    losses: ArrayLike,
    *,
    delta: float = 1e-3,
    bootstraps: int = 200,
    seed: int = 0,
) -> ChinchillaFit:
    """Fit L = E + A / N^α + B / D^β (Hoffmann et al. 2022) to the losses of training runs.

    Args:
        n_params: The number of parameters N of each run.
        n_tokens: The number of tokens D that each run has read.
        losses: The loss L of each run. Six runs or more, of at least three sizes.
        delta: The delta of the Huber loss of the differences of log L.
        bootstraps: How many resampled fits the intervals are from.
        seed: Of the resampling.

    Returns:
        A `ChinchillaFit`: E, A, B, alpha, beta, `intervals`, `predict(n_params, n_tokens)`, and
        `optimal(compute)`, the best spending of a budget in FLOPs.
    """
    runs = check_runs(n_params, n_tokens, losses, n_needed=6, n_distinct=3)

    def curve(theta_sp: Tensor) -> tuple[Tensor, Tensor]:
        a, alpha, b, beta, e = theta_sp.T[..., None]
        terms = torch.stack([a - alpha * runs.x, b - beta * runs.y, e.expand(-1, len(runs.x))])
        log_loss_sr = torch.logsumexp(terms, 0)
        by_n, by_d, rest = (terms - log_loss_sr).exp()
        slopes = [by_n, -by_n * runs.x, by_d, -by_d * runs.y, rest]
        return log_loss_sr, torch.stack(slopes, -1)

    def name(theta: Tensor, objective: float) -> ChinchillaFit:
        a, alpha, b, beta, e = theta.tolist()
        return ChinchillaFit(
            E=safe_exp(e),
            A=safe_exp(a + alpha * runs.mean_x),
            B=safe_exp(b + beta * runs.mean_y),
            alpha=alpha,
            beta=beta,
            objective=objective,
        )

    middle, exponents = float(runs.log_loss.mean()), (0.1, 0.3, 0.6, 1.2)
    starts = [
        [middle + math.log(by_n), alpha, middle + math.log(by_d), beta, middle + math.log(left)]
        for left in (0.1, 0.3, 0.5, 0.8, 0.95)
        for by_n, by_d in ((part * (1 - left), (1 - part) * (1 - left)) for part in (0.1, 0.5, 0.9))
        for alpha, beta in itertools.product(exponents, exponents)
    ]
    best, found = fit_all(curve, starts, runs, delta, bootstraps, seed)
    return put_together(name(*best), [name(*each) for each in found])


def fit_kaplan(
    n_params: ArrayLike,
    n_tokens: ArrayLike,
    losses: ArrayLike,
    *,
    delta: float = 1e-3,
    bootstraps: int = 200,
    seed: int = 0,
) -> KaplanFit:
    """Fit L = [(N_c/N)^(α_N/α_D) + D_c/D]^α_D (Kaplan et al. 2020) to the losses of runs.

    Args:
        n_params, n_tokens, losses, delta, bootstraps, seed: As in `fit_chinchilla`; five runs or
            more, of at least two sizes.

    Returns:
        A `KaplanFit`: N_c, D_c, alpha_N, alpha_D, `intervals`, `predict(n_params, n_tokens)`.
    """
    runs = check_runs(n_params, n_tokens, losses, n_needed=5, n_distinct=2)

    def curve(theta_sp: Tensor) -> tuple[Tensor, Tensor]:
        n, rho, d, alpha = theta_sp.T[..., None]
        by_n, by_d = n - rho * runs.x, d - runs.y
        total_sr = torch.logaddexp(by_n, by_d)
        part_sr = (by_n - total_sr).exp()
        slopes = [alpha * part_sr, -alpha * part_sr * runs.x, alpha * (1 - part_sr), total_sr]
        return alpha * total_sr, torch.stack(slopes, -1)

    def name(theta: Tensor, objective: float) -> KaplanFit:
        n, rho, d, alpha = theta.tolist()
        return KaplanFit(
            N_c=safe_exp(n / rho + runs.mean_x),
            D_c=safe_exp(d + runs.mean_y),
            alpha_N=rho * alpha,
            alpha_D=alpha,
            objective=objective,
        )

    middle = float(runs.log_loss.mean())
    starts = [
        [middle / alpha + math.log(part), rho, middle / alpha + math.log(1 - part), alpha]
        for part in (0.1, 0.5, 0.9)
        for rho, alpha in itertools.product((0.25, 0.5, 1.0, 2.0), (0.03, 0.1, 0.2, 0.4, 0.8))
    ]
    best, found = fit_all(curve, starts, runs, delta, bootstraps, seed)
    return put_together(name(*best), [name(*each) for each in found])


def fit_all(
    curve: Curve,
    starts: Sequence[Sequence[float]],
    runs: Runs,
    delta: float,
    bootstraps: int,
    seed: int,
) -> tuple[tuple[Tensor, float], list[tuple[Tensor, float]]]:
    """Fit the runs and each bootstrap sample: (parameters, objective), and a list of the same."""
    check_number("delta", delta)
    check_count("bootstraps", bootstraps)
    check_seed(seed)
    n_runs = len(runs.log_loss)
    once = torch.ones(1, n_runs, dtype=torch.float64)
    start_sp = torch.tensor(starts, dtype=torch.float64)
    theta, values = least_huber(curve, start_sp, runs.log_loss, once, delta, FIRST)
    kept = values.argsort()[:KEPT_STARTS]
    theta, values = least_huber(curve, theta[kept], runs.log_loss, once, delta)
    best = theta[values.argmin()]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(n_runs, (bootstraps, n_runs), generator=generator)
    counts = torch.zeros(bootstraps, n_runs, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    # If started at the best fit only, a term that vanished there would be missing in every sample.
    nearest = huber_sum(curve(start_sp)[0] - runs.log_loss, once, delta).argsort()[:OTHER_STARTS]
    tried, values_of = [], []
    for each in torch.cat([best[None], start_sp[nearest]]):
        theta, low = least_huber(
            curve, each.expand(bootstraps, -1), runs.log_loss, counts, delta, FIRST
        )
        tried.append(theta)
        values_of.append(low)
    lowest = torch.stack(values_of).argmin(0)
    theta = torch.stack(tried)[lowest, torch.arange(bootstraps)]
    theta, lows = least_huber(curve, theta, runs.log_loss, counts, delta, tolerance=1e-8)
    return (best, float(values.min())), list(zip(theta, lows.tolist(), strict=True))


def least_huber(
    curve: Curve,
    start_sp: Tensor,
    log_loss: Tensor,
    counts_sr: Tensor,
    delta: float,
    iterations: int = 500,
    tolerance: float = 1e-11,
) -> tuple[Tensor, Tensor]:
    """Minimise the Huber loss, summed over runs with weights `counts_sr`; parameters (S, P), sums.

    Each iteration takes a damped Gauss–Newton step, for each start not yet converged, on the
    weighted squares that majorise the Huber loss, and accepts it if it lowers that loss. A start
    has converged after two steps that gain less than `tolerance` of its sum.
    """
    theta_sp, counts_sr = start_sp.clone(), counts_sr.expand(len(start_sp), -1)
    guess_sr, slopes_srp = curve(theta_sp)
    value_s = huber_sum(guess_sr - log_loss, counts_sr, delta)
    damping_s, calm_s = torch.full_like(value_s, 1e-2), torch.zeros_like(value_s)
    moving = torch.arange(len(theta_sp))
    for _ in range(iterations):
        if not len(moving):
            break
        off_sr, slopes = guess_sr[moving] - log_loss, slopes_srp[moving]
        weights_sr = counts_sr[moving] * (delta / off_sr.abs().clamp(min=delta))
        weighted = slopes * weights_sr[..., None]
        curvature_spp = weighted.mT @ slopes
        size_sp = curvature_spp.diagonal(dim1=-2, dim2=-1)
        least_s1 = 1e-12 * size_sp.amax(-1, keepdim=True) + 1e-300
        damped = curvature_spp + torch.diag_embed(damping_s[moving, None] * size_sp + least_s1)
        downhill = -(weighted.mT @ off_sr[..., None])
        tried_sp = theta_sp[moving] + torch.linalg.solve_ex(damped, downhill)[0][..., 0]
        guess, slopes = curve(tried_sp)
        value = huber_sum(guess - log_loss, counts_sr[moving], delta)
        lower = value < value_s[moving]
        gain = (value_s[moving] - value) / value_s[moving].clamp(min=1e-300)
        still = torch.where(lower, gain < tolerance, damping_s[moving] > 1e8)
        calm_s[moving] = torch.where(still, calm_s[moving] + 1, 0.0)
        changed = torch.where(lower, 0.2, 5.0) * damping_s[moving]
        damping_s[moving] = changed.clamp(1e-12, 1e12)
        better = moving[lower]
        theta_sp[better], value_s[better] = tried_sp[lower], value[lower]
        guess_sr[better], slopes_srp[better] = guess[lower], slopes[lower]
        moving = moving[calm_s[moving] < 2]
    return theta_sp, value_s


def huber_sum(off_sr: Tensor, counts_sr: Tensor, delta: float) -> Tensor:
    """Σ over runs of ½ off² where |off| is at most delta, else delta (|off| - ½ delta)."""
    size_sr = off_sr.abs()
    each_sr = torch.where(size_sr <= delta, size_sr**2 / 2, delta * (size_sr - delta / 2))
    return (counts_sr * each_sr).sum(-1)


def put_together(best: Fit, resampled: Sequence[Fit]) -> Fit:
    """Add to the best fit the bootstrap fits and the intervals of its parameters."""
    others = {"objective", "intervals", "resampled"}
    names = [name for name in best.__dataclass_fields__ if name not in others]
    values = {name: getattr(best, name) for name in names}
    intervals = {name: quantiles([getattr(fit, name) for fit in resampled]) for name in names}
    kind = type(best)
    return kind(**values, objective=best.objective, intervals=intervals, resampled=tuple(resampled))


def interval_of(value: Callable[[Fit], float], resampled: Sequence[Fit]) -> Interval:
    if not resampled:
        raise ValueError("a fit of a bootstrap sample has no samples of its own; ask the whole fit")
    values = []
    for fit in resampled:
        try:
            values.append(float(value(fit)))
        except ValueError:
            continue
    if 2 * len(values) < len(resampled):
        given = f"{len(values)} of {len(resampled)} bootstrap fits"
        raise ValueError(f"only {given} have that number; the runs do not tell it")
    return quantiles(values)


def quantiles(values: Sequence[float]) -> Interval:
    low, high = np.quantile(np.asarray(values, dtype=np.float64), [0.025, 0.975])
    return float(low), float(high)


def check_runs(
    n_params: ArrayLike, n_tokens: ArrayLike, losses: ArrayLike, n_needed: int, n_distinct: int
) -> Runs:
    """Check the three arrays and take their logarithms; raise an error that says what is wrong."""
    given = {"n_params": n_params, "n_tokens": n_tokens, "losses": losses}
    logs = {name: log_of(name, values) for name, values in given.items()}
    for name, values in logs.items():
        if values.ndim != 1:
            raise ValueError(f"{name} has shape {values.shape}; expected one number for each run")
    lengths = {name: len(values) for name, values in logs.items()}
    if len(set(lengths.values())) > 1:
        came = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"{came}; expected one of each for each run")
    if lengths["losses"] < n_needed:
        what = f"{lengths['losses']} runs for a law of {n_needed - 1} parameters"
        raise ValueError(f"{what}; expected at least {n_needed} runs")
    for name, needed in {"n_params": n_distinct, "n_tokens": n_distinct, "losses": 2}.items():
        if len(np.unique(logs[name])) < needed:
            what = f"{name} has {len(np.unique(logs[name]))} different values"
            raise ValueError(f"{what}; this law needs {needed} or more of them")
    x, y, log_loss = (torch.from_numpy(values) for values in logs.values())
    mean_x, mean_y = float(x.mean()), float(y.mean())
    return Runs(x=x - mean_x, y=y - mean_y, log_loss=log_loss, mean_x=mean_x, mean_y=mean_y)


def log_of(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Take the logarithms of an array; refuse numbers that are not finite and positive."""
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    if np.ma.is_masked(values):
        what = f"{name} has {np.ma.count_masked(values):,} masked numbers"  # type: ignore[no-untyped-call]
        raise ValueError(f"{what}; leave these runs out of all arrays")
    try:
        numbers = np.asarray(values)
        if np.iscomplexobj(numbers):
            raise TypeError("complex numbers")
        numbers = numbers.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as wrong:
        raise ValueError(f"{name} is no array of numbers ({wrong}); expected one") from None
    bad = ~(np.isfinite(numbers) & (numbers > 0))
    if bad.any():
        first = numbers[bad].flat[0]
        raise ValueError(f"{name} has {first:g} in it; expected finite numbers above 0")
    return np.asarray(np.log(numbers))


def safe_exp(log: float) -> float:
    return math.exp(min(max(log, -LARGEST_LOG), LARGEST_LOG))


def safe_log(number: float) -> float:
    return math.log(max(number, math.exp(-LARGEST_LOG)))
