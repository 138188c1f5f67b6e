"""Read a long text in windows, by a model with a shorter limit, as one record of the whole text.

Windows are as long as the model accepts, and overlap by half, so that every token is in one or two
of them. Each token's row is taken from the window in which it has most context: the middle of a
window in a bidirectional model, the later half in a causal one. A row sees the keys of its own
window, special tokens included, so each window brings its own [CLS] and [SEP]: they are placed
before and after the tokens whose rows are taken from it. A token's key differs between its two
windows, so keys are twice as wide: a row of an even window has its query in the first half and 0 in
the second, a row of an odd window the other way round. Every weight is then computed as in any
other record (`lazy_weights.py`).

Left out: cross-attention; and biases that depend on more than a distance, which are refused.

Letters: H heads, N tokens of the record, T of a window, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from regard.lens.head_scores import spot_keys
from regard.lens.lazy_weights import Array, Runs
from regard.lens.record import Record
from regard.lens.schema import SPOTS, Description

BY_QUERY = ("entropy", "peak", "distance", "reach", "mass", "top_weights")
"""Row statistics that contain no key numbers."""


class Window(NamedTuple):
    """The tokens that a window reads, and the rows taken from it: first, and past the last."""

    first: int
    last: int
    own_first: int
    own_last: int


def plan_windows(n_tokens: int, most: int, causal: bool) -> list[Window]:
    """Windows of at most `most` tokens that cover the text, each token in one or two of them."""
    step = (most + 1) // 2
    starts = [0]
    while starts[-1] + most < n_tokens:
        starts.append(starts[-1] + step)
    ends = [min(start + most, n_tokens) for start in starts]
    # Where rows of one window end and those of the next begin.
    edges = [
        end if causal else (start + end + 1) // 2
        for start, end in zip(starts[1:], ends[:-1], strict=True)
    ]
    return [
        Window(*each) for each in zip(starts, ends, [0, *edges], [*edges, n_tokens], strict=True)
    ]


@dataclass(frozen=True)
class Layout:
    """The position of each token of each window in the record.

    `columns`: for each window the position in the record of each of its tokens. `rows`: the tokens
    of each window whose rows are taken, by their numbers in the window. `order`: the token at each
    position of the record, by its number in the text tokenized whole, special tokens included.
    """

    windows: Sequence[Window]
    columns: list[Array]
    rows: list[Array]
    order: list[int]


def lay_out(windows: Sequence[Window], n_before: int, n_after: int) -> Layout:
    """Lay out the windows; n_before, n_after: special tokens around the text of each window."""
    n_tokens = n_before + windows[-1].last + n_after
    column_of: dict[int, int] = {}
    columns, rows, order = list[Array](), list[Array](), list[int]()
    for first, last, own_first, own_last in windows:
        own = range(own_first, own_last)
        size = n_before + last - first + n_after
        column_of |= {token: len(order) + n_before + at for at, token in enumerate(own)}
        rows.append(np.r_[:n_before, np.array(own) - first + n_before, size - n_after : size])
        order += [*range(n_before), *(n_before + token for token in own)]
        order += range(n_tokens - n_after, n_tokens)
    ends = np.cumsum([len(taken) for taken in rows])
    for taken, end, (first, last, *_) in zip(rows, ends, windows, strict=True):
        inside = np.array([column_of[token] for token in range(first, last)])
        begin = end - len(taken)
        columns.append(np.r_[begin : begin + n_before, inside, end - n_after : end])
    return Layout(windows, columns, rows, order)


def join_windows(records: Sequence[Record], layout: Layout) -> Record:
    """Join the records of all windows; text and tokens must be described again."""
    about = records[0]._about
    arrays: dict[str, Array] = {}
    n_tokens = len(layout.order)
    places, rules = [], []
    for number, place in enumerate(about.places):
        _check_place(records, number)
        joined = _Joined(records, number, layout)
        arrays |= {f"{number}.{name}": values for name, values in joined.arrays().items()}
        places.append(replace(place, n_queries=n_tokens, n_keys=n_tokens))
        rules.append({**about.rules[number], "cell": 0})
    window = max(len(columns) for columns in layout.columns)
    labels = [str(number) for number in range(n_tokens)]
    seen = Description(kept="qk", window=window, tokens=labels, places=places, rules=rules)
    seen.model, seen.created = about.model, about.created
    seen.notes = list(dict.fromkeys(note for record in records for note in record.notes))
    return Record(seen, arrays)


def _check_place(records: Sequence[Record], number: int) -> None:
    place, rule = records[0].places[number], records[0]._about.rules[number]
    if place.kind != "self" or not place.exact_zoom:
        raise ValueError(f"{place.name} is cross-attention, which cannot be read in windows")
    if any(bias["kind"] != "relative" for bias in rule["biases"]):
        raise ValueError(
            f"{place.name} adds a bias that depends on more than the distance, so windows cannot "
            "be joined to one record; give a shorter text, or truncate it"
        )
    if any(len(record.places) != len(records[0].places) for record in records):
        raise ValueError("the windows were not read by the same layers, so they are no one record")


@dataclass(frozen=True)
class _Joined:
    """The arrays of one place, joined over all windows."""

    records: Sequence[Record]
    number: int
    layout: Layout

    def arrays(self) -> dict[str, Array]:
        found = {name: self.rows_of(name) for name in ("lse", *BY_QUERY) if self.has(name)}
        found |= {name: self.keys_of(name) for name in ("peak_key", "top_keys") if self.has(name)}
        found |= {name: self.one(name) for name in ("real", "ids") if self.has(name)}
        found |= {"q": self.widened("q"), "k": self.widened("k")}
        found["first"], found["pairs"] = self.runs()
        found |= self.sums()
        for bias in range(len(self.records[0]._about.rules[self.number]["biases"])):
            found |= self.bias(f"bias{bias}")
        return found

    def has(self, name: str) -> bool:
        return self.records[0]._arrays.has(self.number, name)

    def get(self, window: int, name: str) -> Array:
        return self.records[window]._arrays.get(self.number, name)

    def each(self) -> Any:
        """The number, rows and columns of each window."""
        return zip(range(len(self.records)), self.layout.rows, self.layout.columns, strict=True)

    def rows_of(self, name: str) -> Array:
        return np.concatenate([self.get(w, name)[:, rows] for w, rows, _ in self.each()], 1)

    def one(self, name: str) -> Array:
        return np.concatenate([self.get(w, name)[rows] for w, rows, _ in self.each()])

    def keys_of(self, name: str) -> Array:
        """Key numbers, converted to positions in the record; -1 (none) stays."""
        found = []
        for window, rows, columns in self.each():
            keys = self.get(window, name)[:, rows]
            found.append(np.where(keys < 0, -1, columns[keys]).astype(np.int32))
        return np.concatenate(found, 1)

    def widened(self, name: str) -> Array:
        """Queries of the rows taken, or all keys, in the half of their window (even or odd)."""
        one = self.get(0, name)
        width = one.shape[2]
        found = np.zeros((one.shape[0], len(self.layout.order), 2 * width), one.dtype)
        for window, rows, columns in self.each():
            taken = rows if name == "q" else np.arange(len(columns))
            half = slice(width) if window % 2 == 0 else slice(width, None)
            found[:, columns[taken], half] = self.get(window, name)[:, taken]
        return found

    def allowed(self, window: int, head: int) -> Array:
        """Which keys of a window each of its taken rows sees, (rows, T)."""
        rows, n_keys = self.layout.rows[window], len(self.layout.columns[window])
        runs = self.records[window]._weights(self.number).runs
        seen = None if runs is None else runs.allowed(head, (0, n_keys, 0, n_keys))
        return np.ones((len(rows), n_keys), np.bool_) if seen is None else seen[rows]

    def runs(self) -> tuple[Array, Array]:
        """The runs of the record's columns that each row sees; by head if heads differ."""
        kept = [record._weights(self.number).runs for record in self.records]
        heads = range(1 if all(map(_is_shared, kept)) else len(self.get(0, "lse")))
        found = [
            _find_runs(self.allowed(window, head), columns)
            for head in heads
            for window, _, columns in self.each()
        ]
        counts = np.concatenate([counts for counts, _ in found])
        pairs = np.concatenate([pairs for _, pairs in found])
        return np.r_[0, np.cumsum(counts)].astype(np.int64), pairs.astype(np.int32)

    def sums(self) -> dict[str, Array]:
        """Sums over rows: received weights, how many rows see each key, and head scores."""
        n_heads, n_tokens = len(self.get(0, "lse")), len(self.layout.order)
        found = {
            name: np.zeros((n_heads, n_tokens), np.float32) for name in ("received", "seen_by")
        }
        spots, counts = np.zeros((len(SPOTS), n_heads)), np.zeros((len(SPOTS), n_heads), np.int64)
        for window, rows, columns in self.each():
            keys = self.spots(window)
            counts += (keys >= 0).sum(1)[:, None]
            for head in range(n_heads):
                weights = self.records[window]._all_of(self.number, head, (0, len(columns)) * 2)
                found["received"][head, columns] += weights[rows].sum(0, dtype=np.float64)
                found["seen_by"][head, columns] += self.allowed(window, head).sum(0)
                at = np.where(keys >= 0, weights[np.arange(len(columns)), keys], 0)
                spots[:, head] += at.sum(1, dtype=np.float64)
        return {**found, "spots": spots, "counts": counts}

    def spots(self, window: int) -> Array:
        """The key that each score reads for the taken rows of a window, (scores, T)."""
        rows, n_keys = self.layout.rows[window], len(self.layout.columns[window])
        real = np.zeros(n_keys, np.bool_)
        real[rows] = True
        if self.has("real"):
            real &= self.get(window, "real") == 2
        ids = self.get(window, "ids").astype(np.int64).tobytes() if self.has("ids") else b""
        return spot_keys(n_keys, n_keys, real.tobytes(), 0, ids, False).keys_bnt[0].numpy()

    def bias(self, start: str) -> dict[str, Array]:
        """A relative bias, with positions continued from window to window, as in the text."""
        at = {
            name: np.zeros(len(self.layout.order), np.int32) for name in ("queries_at", "keys_at")
        }
        for window, rows, columns in self.each():
            shift = self.layout.windows[window].first
            for name, values in at.items():
                taken = rows if name == "queries_at" else np.arange(len(columns))
                values[columns[taken]] = self.get(window, f"{start}.{name}")[taken] + shift
        return {f"{start}.table": self.get(0, f"{start}.table")} | {
            f"{start}.{name}": values for name, values in at.items()
        }


def _is_shared(runs: Runs | None) -> bool:
    return runs is None or len(runs.first) == runs.n_queries + 1


def _find_runs(allowed: Array, columns: Array) -> tuple[Array, Array]:
    """The number of runs of columns in each row, and the runs: first, and past the last."""
    low = columns.min()
    seen = np.zeros((len(allowed), columns.max() - low + 3), np.int8)
    seen[:, columns - low + 1] = allowed
    steps = np.diff(seen, axis=1)
    row, begin = np.nonzero(steps == 1)
    _, end = np.nonzero(steps == -1)
    return np.bincount(row, minlength=len(allowed)), np.stack([begin, end], 1) + low
