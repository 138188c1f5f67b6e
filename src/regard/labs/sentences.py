"""Format means with their intervals as parts of sentences.

Why: a sentence may say "rises" or "falls" only if the whole interval does; and several means in one
sentence are easier to read if "95% interval" is said once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from regard.labs.interval import mean_interval, spell_interval


def mean_share(shares: Sequence[float]) -> dict[str, float]:
    """Mean and interval of shares, one for each seed; the interval is clipped to 0 to 1."""
    found = mean_interval(shares)
    return found | {"low": max(0.0, found["low"]), "high": min(1.0, found["high"])}


def list_intervals(found: Mapping[str, dict[str, float]], form: str | None = None) -> str:
    """List names with means and intervals, for a sentence that itself says "95% interval"."""
    spelled = []
    for name, each in found.items():
        numbers = (each[part] for part in ("mean", "low", "high"))
        mean, low, high = (format(x, form) if form else spell_number(x) for x in numbers)
        spelled.append(f"{name} {mean} ({low} to {high})")
    return ", ".join(spelled)


def spell_number(number: float) -> str:
    """Format with three significant digits, or with all digits before the point if more."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def spell_change(found: dict[str, float], form: str = ".3g") -> str:
    """Format a difference as a verb: rises or falls by how much, or does not clearly change."""
    mean, low, high = found["mean"], found["low"], found["high"]
    if low > 0:
        return f"rises by {spell_interval(found, form)}"
    if high < 0:
        return f"falls by {spell_interval({'mean': -mean, 'low': -high, 'high': -low}, form)}"
    ends = f"{format(low, form)} to {format(high, form)}"
    return f"does not clearly change ({format(mean, '+' + form)}, 95% interval {ends})"
