"""Convert the biases of an attention layer, call by call, to the forms that a record stores.

Why: a model passes its bias as a dense tensor in every call, even where it is ALiBi or T5's table.
A record of 16,000 tokens cannot store those, and its reader must compute exactly the same numbers.

How: our own relative biases are stored as a table over differences of positions, which is computed
after the last call. A dense bias is examined: numbers at hidden pairs do not count. If the rest is
zero the bias is dropped, if it is the same for all queries it is stored as a column, if it depends
on key minus query as a table, else whole, up to `MOST` numbers. Nothing is rounded: a form is used
only if it reproduces every visible number exactly.

Letters: H heads, T queries, S keys, N keys so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from regard.lens.captured_call import Call
from regard.lens.lazy_weights import Array
from regard.lens.mask_runs import positions_under
from regard.ops import Bias
from regard.ops.bias import BiasAt
from regard.ops.shape import Tile

MOST = 1 << 24
LOOK_AT = 1 << 26
"""Numbers of a dense bias up to which it is examined; with a larger one there is no exact zoom."""


class TooLarge(Exception):
    """A bias that would have to be stored whole, and is too large for that."""


@dataclass
class Written:
    """One bias as a record stores it: its kind, the lowest difference, and arrays by name."""

    kind: str
    arrays: dict[str, Array]
    lowest: int = 0


class RelativeBook:
    """One of our relative biases: the positions in all calls, and the bias itself."""

    def __init__(self) -> None:
        self.bias: Bias | None = None
        self.queries_at: list[Array] = []
        self.keys_at = np.zeros(0, np.int64)
        self.n_heads = 0

    def add(self, bias: Bias, call: Call, offset: int) -> None:
        shape, placed = call.shape, isinstance(bias, BiasAt)
        bias, queries, keys = positions_under(bias, shape)
        if not placed:
            queries, keys = queries + offset, keys + offset
        known = np.full(max(len(self.keys_at), offset + shape.S), -1, np.int64)
        known[: len(self.keys_at)] = self.keys_at
        known[offset : offset + shape.S] = keys
        self.bias, self.keys_at, self.n_heads = bias, known, shape.H
        self.queries_at.append(queries)

    def write(self) -> Written | None:
        assert self.bias is not None
        queries = np.concatenate(self.queries_at)
        lowest = int(self.keys_at.min() - queries.max())
        highest = int(self.keys_at.max() - queries.min())
        device = next((t.device for t in self.bias.tensors()), None)
        gaps = torch.arange(lowest, highest + 1, device=device)
        table = self.bias.by_distance(gaps, self.n_heads)
        arrays = {
            "table": table.contiguous().cpu().numpy(),
            "queries_at": queries.astype(np.int32),
            "keys_at": self.keys_at.astype(np.int32),
        }
        return Written("relative", arrays, lowest)


@dataclass
class Lookup:
    """A table of numbers by head and index; the first index is `lowest`. NaN: not known yet."""

    table: Array = field(default_factory=lambda: np.zeros((1, 0), np.float32))
    lowest: int = 0

    def take(self, values_hts: Array, index_ts: Array) -> Lookup | None:
        """The table with these numbers added (NaN: hidden pairs), or None if they contradict it."""
        width = self.table.shape[1]
        lowest, highest = int(index_ts.min()), int(index_ts.max())
        if width:
            lowest, highest = min(lowest, self.lowest), max(highest, self.lowest + width - 1)
        heads = max(len(values_hts), len(self.table))
        table = np.full((heads, highest - lowest + 1), np.nan, np.float32)
        if width:
            table[:, self.lowest - lowest :][:, :width] = self.table
        at = index_ts - lowest
        for head, row in enumerate(np.broadcast_to(values_hts, (heads, *index_ts.shape))):
            known = ~np.isnan(row)
            free = known & np.isnan(table[head][at])
            table[head][at[free]] = row[free]
            if not np.array_equal(table[head][at[known]], row[known]):
                return None
        return Lookup(table, lowest)

    def at(self, index_ts: Array) -> Array:
        at = np.clip(index_ts - self.lowest, 0, self.table.shape[1] - 1)
        return without_nan(self.table)[:, at]


def without_nan(values: Array) -> Array:
    """Replace NaN, which marks hidden pairs, where any number would do, by 0."""
    return np.where(np.isnan(values), np.float32(0), values)


@dataclass
class DenseBook:
    """A dense bias in the simplest form that has fitted so far: zero, column, relative, whole."""

    form: str = "zero"
    lookup: Lookup = field(default_factory=Lookup)
    whole: list[Array] = field(default_factory=list)
    n_queries: int = 0
    n_keys: int = 0

    def add(self, values_hts: Array, offset: int, own_t: Array) -> None:
        """Add a call's numbers, (1 or H, T, S), NaN at hidden pairs; own_t: each query's key."""
        n_keys = max(self.n_keys, offset + values_hts.shape[2])
        if self.form != "zero" or np.any(values_hts[~np.isnan(values_hts)]):
            for form in (self.form,) if self.n_queries else ("column", "relative"):
                found = self._look_up(form, values_hts, offset, own_t)
                if found is not None:
                    self.form, self.lookup = form, found
                    break
            else:
                self._go_whole(values_hts, offset, n_keys)
        self.n_queries, self.n_keys = self.n_queries + values_hts.shape[1], n_keys

    def _look_up(self, form: str, values: Array, offset: int, own_t: Array) -> Lookup | None:
        keys = np.arange(values.shape[2])[None] + offset
        if form == "relative":
            return self.lookup.take(values, keys - own_t[:, None])
        if form == "column":
            known = ~np.isnan(values)
            column = np.where(known, values, -np.inf).max(1, keepdims=True)
            if np.all((values == column) | ~known):
                return self.lookup.take(np.where(np.isneginf(column), np.nan, column), keys)
        return None

    def _go_whole(self, values: Array, offset: int, n_keys: int) -> None:
        heads = max(len(values), len(self.lookup.table), *map(len, self.whole))
        if heads * (self.n_queries + values.shape[1]) * n_keys > MOST:
            raise TooLarge
        if self.form != "whole":
            self.whole = [self._so_far(heads)]
            self.form = "whole"
        wide = np.zeros((heads, values.shape[1], n_keys), np.float32)
        wide[:, :, offset : offset + values.shape[2]] = without_nan(values)
        self.whole.append(wide)

    def _so_far(self, heads: int) -> Array:
        keys = np.arange(self.n_keys)[None]
        if self.form == "column":
            return self.lookup.at(np.repeat(keys, self.n_queries, 0))
        if self.form == "relative":
            return self.lookup.at(keys - self._own()[:, None])
        return np.zeros((heads, self.n_queries, self.n_keys), np.float32)

    def _own(self) -> Array:
        return np.arange(self.n_queries) + (self.n_keys - self.n_queries)

    def write(self) -> Written | None:
        keys = np.arange(self.n_keys, dtype=np.int32)
        if self.form == "zero":
            return None
        if self.form == "column":
            return Written("column", {"column": self.lookup.at(keys)})
        if self.form == "relative":
            table, own = without_nan(self.lookup.table), self._own().astype(np.int32)
            arrays = {"table": table, "queries_at": own, "keys_at": keys}
            return Written("relative", arrays, self.lookup.lowest)
        heads = max(map(len, self.whole))
        wide = [np.pad(x, ((0, 0), (0, 0), (0, self.n_keys - x.shape[2]))) for x in self.whole]
        rows = [np.broadcast_to(x, (heads, *x.shape[1:])) for x in wide]
        return Written("whole", {"whole": np.concatenate(rows, 1)})


Book = RelativeBook | DenseBook


class Biases:
    """All biases of one attention layer: those of the first call, which later calls repeat."""

    def __init__(self) -> None:
        self.books: list[Book] = []
        self.calls = 0

    def add(self, call: Call, offset: int, own_t: Array) -> None:
        """Add the biases of one more call; raise `TooLarge` if they cannot be stored."""
        parts = [] if call.bias is None else call.bias.leaf_terms()
        while len(self.books) < len(parts):
            if _is_relative(parts[len(self.books)]):
                if self.calls:
                    raise TooLarge
                self.books.append(RelativeBook())
            else:
                before = int(own_t[0]) if self.calls else 0
                self.books.append(DenseBook(n_queries=before, n_keys=before))
        for number, book in enumerate(self.books):
            part = parts[number] if number < len(parts) else None
            if isinstance(book, DenseBook) == (part is not None and _is_relative(part)):
                raise TooLarge
            if isinstance(book, DenseBook):
                book.add(_dense(part, call), offset, own_t)
            else:
                assert part is not None
                book.add(part, call, offset)
        self.calls += 1

    def write(self) -> list[Written]:
        return [written for book in self.books if (written := book.write()) is not None]


def _is_relative(bias: Bias) -> bool:
    return bias.relative or isinstance(bias, BiasAt)


def _dense(bias: Bias | None, call: Call) -> Array:
    """A dense bias as (1 or H, T, S), NaN at pairs that it hides."""
    _, _, T, S = call.shape
    if bias is None:
        return np.zeros((1, T, S), np.float32)
    block = bias.block(call.shape, Tile(0, 0, 0, 0), call.q.device, torch.float32)
    heads = 1 if block.dim() < 3 else block.shape[-3]
    if heads * T * S > LOOK_AT:
        raise TooLarge
    values = bias.block(call.shape, Tile(0, T, 0, S), call.q.device, torch.float32)
    values = values[(None,) * (4 - values.dim())][0].expand(heads, T, S)
    return values.masked_fill(values == -math.inf, math.nan).cpu().numpy()
