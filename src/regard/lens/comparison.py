"""Compare two records head by head: the second minus the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from regard.lens.lazy_weights import Array


class Comparable(Protocol):
    """The parts of a record that a comparison reads."""

    places: Any
    tokens: list[str]

    def heads(self) -> Mapping[str, Array]: ...

    def statistics(self, place: int) -> Mapping[str, Array]: ...


@dataclass(frozen=True, eq=False)
class Comparison:
    """The differences between two records: the second minus the first.

    `heads`: score -> (places, heads). `statistics`: for each place, by name, where the shapes agree
    (none if the texts differ in length). `same_text`: whether the tokens are the same.
    """

    heads: dict[str, Array]
    statistics: list[dict[str, Array]]
    same_text: bool

    def largest(self, score: str, n: int = 10) -> list[tuple[int, int, float]]:
        """The n heads that differ most in a score: (place, head, difference)."""
        gaps = self.heads[score]
        # NaN marks a head without this score: it is left out, not ranked.
        known = np.argwhere(np.isfinite(gaps)).tolist()
        found = [(place, head, float(gaps[place, head])) for place, head in known]
        return sorted(found, key=lambda each: -abs(each[2]))[:n]


def compare(one: Comparable, two: Comparable) -> Comparison:
    if not hasattr(two, "places"):
        raise TypeError(f"other is a {type(two).__name__}; expected a Record to compare with")
    here = [(place.kind, place.n_heads) for place in one.places]
    there = [(place.kind, place.n_heads) for place in two.places]
    if here != there:
        raise ValueError(
            f"records are compared head by head, and these have {len(here)} and {len(there)} "
            "places, or other kinds or numbers of heads in them"
        )
    mine, theirs = one.heads(), two.heads()
    scores = {name: theirs[name] - mine[name] for name in mine}
    statistics = []
    for place in range(len(here)):
        first, second = one.statistics(place), two.statistics(place)
        names = [name for name in first if name in second and "key" not in name]
        same = [name for name in names if first[name].shape == second[name].shape]
        statistics.append({name: second[name].astype(np.float64) - first[name] for name in same})
    return Comparison(scores, statistics, one.tokens == two.tokens)
