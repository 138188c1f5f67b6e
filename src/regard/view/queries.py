"""The queries that a page sends to a record, answered as plain arrays.

A query is a short path, the same for every host of a page; numbers count from zero:

    map/RECORD/PLACE/HEAD/LT/LS/TI/SI    one tile: TILE × TILE cells of 2^LT × 2^LS weights
    row/RECORD/PLACE/HEAD/QUERY          one query's weights on every key
    column/RECORD/PLACE/HEAD/KEY         every query's weight on one key
    weight/RECORD/PLACE/HEAD/QUERY/KEY   one weight
    received/RECORD/PLACE/HEAD           the sum of weights that each key gets from all queries
    top/RECORD/PLACE/HEAD                each query's largest weights, and beside them their keys
    norms/RECORD/PLACE/HEAD              the norm of each key's value after the output projection
    gradient_rows/RECORD/PLACE/HEAD      attention × gradient, summed for each query
    gradient_columns/RECORD/PLACE/HEAD   attention × gradient, summed for each key
    rollout/RECORD/TOKEN                 what a last state draws on, by way of all layers
    drawn/RECORD/TOKEN                   which last states draw on a token
    given/RECORD                         the probability that each token had before it was read
    next/RECORD                          after each token: probabilities of the likeliest next
                                         ones, their ids, and the id of the one that came

HEAD is a number, or `layer` for the mean over the heads of the place, or `all` for the mean over
the heads of every place of its kind and size. Tiles are on a grid of powers of two, so a cell of
one level is exactly four of the level below; a cell at the ragged edge is the mean of those that
exist. Every number is checked before the record is read.

Left out: caching (server.py has one) and any form of drawing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from regard.lens.lazy_weights import Array
from regard.lens.record import Record
from regard.view.pieces import cut

TILE = 256
MAX_LEVEL = 30
Floats = npt.NDArray[np.float32]
T = TypeVar("T")
_NUMBER = re.compile(r"[0-9]{1,9}")
_LENGTHS = {
    **{"map": 8, "row": 5, "column": 5, "weight": 6, "received": 4, "top": 4, "norms": 4},
    **{"gradient_rows": 4, "gradient_columns": 4},
    **{"rollout": 3, "drawn": 3, "given": 2, "next": 2},
}
_OF_RECORDS = ("rollout", "drawn", "given", "next")


class BadView(ValueError):
    """A record that cannot be shown, or a query that cannot be answered; says which and why."""


def answer(records: Sequence[Record], question: str) -> Floats:
    """Answer a query as a float32 array; raise BadView if something is wrong with it."""
    words = question.split("/")
    if words[0] not in _LENGTHS or len(words) != _LENGTHS[words[0]]:
        raise BadView(f"no such question: {cut(question, 80)!r}")
    record = records[_index(words[1], len(records), "record")]
    if words[0] in _OF_RECORDS:
        return np.asarray(_ask_record(record, words[0], words[2:]), np.float32)
    kind, _, place, head, *rest = words
    at = _index(place, len(record.places), "place")
    pairs = heads_meant(record, at, head)
    if kind == "top" and len(pairs) != 1:
        raise BadView("the largest weights are those of one head")
    numbers = [_index(word, 1 << 31, "number") for word in rest]
    total = sum(_ask(record, kind, *pair, numbers).astype(np.float64) for pair in pairs)
    return (np.asarray(total) / len(pairs)).astype(np.float32)


def _ask_record(record: Record, kind: str, rest: Sequence[str]) -> Array:
    """Answer a query about a record as a whole."""
    if kind in ("rollout", "drawn"):
        stack = record.rollout_places()
        if not stack:
            raise BadView("rollout needs self-attention with as many queries as keys throughout")
        token = _index(rest[0], record.places[stack[0]].n_queries, "token")
        return record.rollout(token) if kind == "rollout" else record.drawn_on(token)
    found = record.next_tokens()
    if found is None:
        raise BadView("this record did not keep what the model said would come next")
    if kind == "given":
        return found.given
    return np.concatenate([found.probs, found.ids, found.came[:, None]], axis=1)


def heads_meant(record: Record, place: int, head: str) -> list[tuple[int, int]]:
    here = record.places[place]
    if head == "layer":
        return [(place, each) for each in range(here.n_heads)]
    if head == "all":
        return [
            (number, each)
            for number, other in enumerate(record.places)
            # Do not average an encoder's places with a decoder's of the same size.
            if (other.kind, other.n_queries, other.n_keys, other.stack)
            == (here.kind, here.n_queries, here.n_keys, here.stack)
            for each in range(other.n_heads)
        ]
    return [(place, _index(head, here.n_heads, "head"))]


def _ask(record: Record, kind: str, place: int, head: int, numbers: Sequence[int]) -> Array:
    here = record.places[place]
    if kind == "map":
        lt, ls, ti, si = numbers
        return make_tile(record, place, head, (lt, ls), (ti, si))
    if kind == "row":
        _below(numbers[0], here.n_queries, "query")
        return record.rows(place, head, numbers[0])
    if kind == "column":
        _below(numbers[0], here.n_keys, "key")
        return record.column(place, head, numbers[0])
    if kind == "weight":
        t, s = numbers
        _below(t, here.n_queries, "query")
        _below(s, here.n_keys, "key")
        return record.map(place, head, (t, t + 1, s, s + 1), (1, 1))
    if kind == "norms":
        return np.asarray(_kept(record.value_norms(place), "how long values are")[head])
    if kind.startswith("gradient"):
        sums = _kept(record.gradients(place), "attention × gradient")
        return np.asarray(sums[0 if kind == "gradient_rows" else 1][head])
    known = record.statistics(place)
    if kind == "received":
        if "received" not in known:
            raise BadView("this record did not keep what each key received")
        return np.asarray(known["received"][head])
    if "top_weights" not in known or "top_keys" not in known:
        raise BadView("this record did not keep each query's largest weights")
    # (T, 2k): weights, then keys; float32 is exact for keys below 2^24.
    return np.concatenate([known["top_weights"][head], known["top_keys"][head]], axis=1)


def _kept(found: T | None, what: str) -> T:
    if found is None:
        raise BadView(f"this record did not keep {what}")
    return found


def make_tile(
    record: Record, place: int, head: int, levels: tuple[int, int], at: tuple[int, int]
) -> Floats:
    """Make one tile of the pyramid, whose finest level is the weights, or the pooled map kept."""
    here, grid = record.places[place], record.grid(place)
    if grid is None:
        raise BadView(f"{cut(here.name, 80)} kept no map")
    picture = None
    if not record.has_weights(place):
        picture = record.map(place, head, (0, here.n_queries, 0, here.n_keys), grid)

    def cells(t0: int, t1: int, height: int, s0: int, s1: int, width: int) -> Array:
        if picture is None:
            return record.map(place, head, (t0, t1, s0, s1), (height, width))
        part = picture[t0:t1, s0:s1].reshape(height, -1, width, (s1 - s0) // width)
        return np.asarray(part.mean((1, 3), dtype=np.float64), np.float32)

    columns = _cut_axis(grid[1], levels[1], at[1])
    rows = _cut_axis(grid[0], levels[0], at[0])
    return np.block([[cells(*row, *column) for column in columns] for row in rows])


def _cut_axis(length: int, level: int, index: int) -> list[tuple[int, int, int]]:
    """Cut a tile along an axis into (start, end, cells): its full cells, and a partial last one."""
    _below(level, MAX_LEVEL + 1, "level")
    cell = 1 << level
    start = index * TILE * cell
    _below(start, length, "tile's first token")
    end = min(length, start + TILE * cell)
    whole = (end - start) // cell
    edge = start + whole * cell
    pieces = [(start, edge, whole)] if whole else []
    return pieces + ([(edge, end, 1)] if edge < end else [])


def whole_level(length: int, cells: int) -> int:
    """The finest level at which a length takes at most `cells` cells."""
    level = 0
    while (length + (1 << level) - 1) >> level > cells:
        level += 1
    return level


def _index(word: str, count: int, what: str) -> int:
    if not _NUMBER.fullmatch(word, 0):
        raise BadView(f"{what} {cut(word, 20)!r} is not a whole number")
    _below(int(word), count, what)
    return int(word)


def _below(value: int, count: int, what: str) -> None:
    if value >= count:
        raise BadView(f"{what} {value} is out of range; there are {count}")
