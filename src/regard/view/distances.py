"""How much the attention of each head differs between two records.

The distance between two rows of weights is their total variation, half the sum of the absolute
differences: the share of a query's weight that is on other keys. A head's distance is the mean
over its queries. Very large maps are compared after pooling to at most `TILE` cells on a side; the
distance of pooled maps is at most that of the weights.

Left out: models of different shapes, whose heads correspond only by number, and texts of different
lengths, whose rows have different keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.lens.record import Record
from regard.view.queries import TILE, make_tile, whole_level

MOST_WEIGHTS = 30_000_000  # of one record; larger records are compared pooled


def rank_distances(one: Record, two: Record) -> list[tuple[int, int, float]] | None:
    """List heads as (place, head, distance), the largest first; None if records do not compare."""
    if _shape(one) != _shape(two):
        return None
    weights = sum(p.n_heads * p.n_queries * p.n_keys for p in one.places)
    found = []
    for number, place in enumerate(one.places):
        if one.grid(number) is None or two.grid(number) is None:
            continue
        for head in range(place.n_heads):
            distance = _distance(one, two, number, head, weights <= MOST_WEIGHTS)
            if np.isfinite(distance):
                found.append((number, head, float(f"{distance:.7g}")))
    return sorted(found, key=lambda each: -each[2])


def _shape(record: Record) -> list[tuple[Any, ...]]:
    """What must be equal in two records for their heads to be comparable."""
    return [
        (here.name, here.kind, tuple(here.heads), here.n_queries, here.n_keys, record.grid(number))
        for number, here in enumerate(record.places)
    ]


def _distance(one: Record, two: Record, place: int, head: int, exact: bool) -> float:
    here, grid = one.places[place], one.grid(place)
    assert grid is not None
    if exact:
        window = (0, here.n_queries, 0, here.n_keys)
        a, b = (record.map(place, head, window, grid) for record in (one, two))
        heights, widths = np.ones(grid[0]), np.ones(grid[1])
    else:
        levels = whole_level(grid[0], TILE), whole_level(grid[1], TILE)
        a, b = (make_tile(record, place, head, levels, (0, 0)) for record in (one, two))
        heights, widths = (_cell_sizes(*each) for each in zip(grid, levels, strict=True))
    # A cell is the mean over this many keys.
    keys = widths * (here.n_keys / grid[1])
    rows = np.abs(a.astype(np.float64) - b) @ keys / 2
    return float(np.average(rows, weights=heights))


def _cell_sizes(length: int, level: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How many grid cells each cell of a level covers along an axis; the last may cover fewer."""
    starts = np.arange(0, length, 1 << level)
    return np.diff(np.append(starts, length)).astype(np.float64)
