"""Why are scores divided by √d?

The derivation: for independent entries of mean 0 and variance 1, q · k is a sum of d products of
mean 0 and variance 1, so its standard deviation is √d. Softmax of scores that are √d apart comes
near to one weight of 1, and there its gradient goes to 0: for weights p the derivative is
diag(p) - p pᵀ, whose squared norm is Σ pᵢ² (1 - 2 pᵢ + Σ pⱼ²), 0 where one weight is 1 (and small
where there are many equal ones).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from regard import Wants, observe
from regard.labs.interval import mean_interval, spell_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.small_training import generator_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = 64


def measure_width(width: int, n_queries: int, seeds: int, device: torch.device) -> dict[str, Any]:
    """Means over seeds of the scores' spread, the largest weight and the softmax's gradient."""
    found: dict[str, Any] = {"d": width}
    for name, scale in (("plain", 1.0), ("scaled", width**-0.5)):
        rows = [measure_seed(width, scale, n_queries, seed, device) for seed in range(seeds)]
        for what in rows[0]:
            found[f"{name} {what}"] = mean_interval([row[what] for row in rows])
    return found


def measure_seed(
    width: int, scale: float, n_queries: int, seed: int, device: torch.device
) -> dict[str, float]:
    drawn = generator_of(seed, width, device=device)
    q = torch.randn(1, 1, n_queries, width, generator=drawn, device=device)
    k = torch.randn(1, 1, KEYS, width, generator=drawn, device=device)
    found = observe(q, k, None, scale=scale, wants=Wants(weights=True)).weights
    assert found is not None
    weights = found[0, 0]
    squares = weights.square().sum(-1, keepdim=True)
    gradient = (weights.square() * (1 - 2 * weights + squares)).sum(-1).clamp(min=0).sqrt()
    return {
        "spread": float((q @ k.mT).mul(scale).std()),
        "largest": float(weights.amax(-1).mean()),
        "gradient": float(gradient.mean()),
    }


def measure(run: Run) -> dict[str, Any]:
    widths = [4, 16, 64, 256, 1024] if run.tiny else [2**n for n in range(2, 11)]
    n_queries, seeds = (256, 3) if run.tiny else (4096, 20)

    def one(width: int) -> dict[str, Any]:
        return measure_width(width, n_queries, seeds, run.device)

    return {"keys": KEYS, "seeds": seeds, "widths": run.map("widths", one, widths)}


def find(results: Results) -> list[str]:
    last = results["widths"][-1]
    d, scaled = last["d"], [row["scaled gradient"]["mean"] for row in results["widths"]]
    sentences = [
        f"Without the division the largest of {results['keys']} weights at d = {d:,} is "
        f"{spell_interval(last['plain largest'])} on average, and "
        f"{spell_interval(last['scaled largest'])} with it.",
        f"Scores spread by {spell_interval(last['plain spread'])} then, where √d is {d**0.5:.3g}; "
        f"divided by √d by {spell_interval(last['scaled spread'])}.",
        f"The norm of the softmax's gradient is {spell_interval(last['plain gradient'])} there, "
        f"and {spell_interval(last['scaled gradient'])} with the division, {min(scaled):.3g} to "
        f"{max(scaled):.3g} at all d.",
    ]
    above = [row for row in results["widths"] if has_more(row)]
    if above:
        most = max(above, key=lambda row: row["plain gradient"]["mean"])
        sentences.append(
            f"Against the prediction, undivided scores let more gradient through at d = "
            f"{', '.join(str(row['d']) for row in above)}, most at d = {most['d']} "
            f"({spell_interval(most['plain gradient'])}): weights that are nearly equal have "
            "little of it too, and it falls only where one of them takes nearly all."
        )
    return sentences


def has_more(row: Results) -> bool:
    """Whether unscaled scores let clearly more gradient through at this width."""
    return bool(row["plain gradient"]["low"] > row["scaled gradient"]["high"])


def draw(results: Results, figure: Figure) -> None:
    widths = [row["d"] for row in results["widths"]]
    titles = {
        "spread": "standard deviation of scores",
        "largest": "largest weight",
        "gradient": "norm of the softmax's gradient",
    }
    for n, (what, title) in enumerate(titles.items()):
        axes = figure.add_subplot(1, 3, n + 1)
        for name, label in (("plain", "q · k"), ("scaled", "q · k / √d")):
            found = [row[f"{name} {what}"] for row in results["widths"]]
            line = axes.plot(widths, [x["mean"] for x in found], "o-", label=label)[0]
            low, high = ([x[end] for x in found] for end in ("low", "high"))
            axes.fill_between(widths, low, high, alpha=0.3, color=line.get_color())
        if what == "spread":
            axes.plot(widths, [d**0.5 for d in widths], "k:", label="√d")
            axes.legend(frameon=False)
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="width d")
        axes.grid(alpha=0.3)


LAB = Lab(
    name="scaling",
    question="Why are scores divided by √d?",
    prediction="A score is a sum of d products, so it spreads by √d. Undivided, one weight takes "
    "nearly all, and hardly any gradient comes through the softmax.",
    method="Queries and keys of independent normal numbers, 64 keys for each query, widths 4 to "
    "1,024: the standard deviation of the scores, the largest weight, and the Frobenius norm of "
    "the softmax's Jacobian, with and without the division; means over seeds.",
    measure=measure,
    find=find,
    draw=draw,
)
