"""Parts of sentences, made of means with their intervals.

Why: a sentence says "rises" or "falls" only where the interval does; and several means in one
sentence are read more easily if their intervals are named once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from regard.labs.interval import mean_interval, spell_interval


def mean_share(shares: Sequence[float]) -> dict[str, float]:
    """Mean and interval of shares, one of each seed; no share is below 0 or above 1."""
    found = mean_interval(shares)
    return found | {"low": max(0.0, found["low"]), "high": min(1.0, found["high"])}


def list_intervals(found: Mapping[str, dict[str, float]], form: str | None = None) -> str:
    """Names with their means, in a sentence which says itself that these are 95% intervals."""
    spelled = []
    for name, each in found.items():
        numbers = (each[part] for part in ("mean", "low", "high"))
        mean, low, high = (format(x, form) if form else spell_number(x) for x in numbers)
        spelled.append(f"{name} {mean} ({low} to {high})")
    return ", ".join(spelled)


def spell_number(number: float) -> str:
    """Three digits, or all before the point where there are more."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def spell_change(found: dict[str, float], form: str = ".3g") -> str:
    """A difference as a verb: rises or falls by so much, or cannot be told from none."""
    mean, low, high = found["mean"], found["low"], found["high"]
    if low > 0:
        return f"rises by {spell_interval(found, form)}"
    if high < 0:
        return f"falls by {spell_interval({'mean': -mean, 'low': -high, 'high': -low}, form)}"
    ends = f"{format(low, form)} to {format(high, form)}"
    return f"does not clearly change ({format(mean, '+' + form)}, 95% interval {ends})"
