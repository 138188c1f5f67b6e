"""How far apart the heads of two records look.

The distance between two rows of weights is their total variation, half the sum of the absolute
differences: the share of a query's weight that lies on other keys. A head's distance is the mean
over its queries. Maps of very many weights are compared as pictures of at most `TILE` cells on a
side, whose distance is at most that of the weights themselves.

Left out: models of different shapes, whose heads have only their numbers in common, and texts of
different lengths, whose rows have different keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.lens.record import Record
from regard.view.queries import TILE, make_tile, whole_level

MOST_WEIGHTS = 30_000_000  # of one record, that are compared one by one


def rank_distances(one: Record, two: Record) -> list[tuple[int, int, float]] | None:
    """Every head as (place, head, distance), the farthest first; None where none can be told."""
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
    """What two records must have in common for a head of one to be like that of the other."""
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
    # A cell is a mean: of a picture, over so many keys.
    keys = widths * (here.n_keys / grid[1])
    rows = np.abs(a.astype(np.float64) - b) @ keys / 2
    return float(np.average(rows, weights=heights))


def _cell_sizes(length: int, level: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How many cells of the grid each cell of a level covers; the last one may cover fewer."""
    starts = np.arange(0, length, 1 << level)
    return np.diff(np.append(starts, length)).astype(np.float64)
