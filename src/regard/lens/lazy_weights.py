"""What is stored of an attention layer, and how any weight is recomputed from it, with numpy alone.

From q, k, the rule and the logsumexp of each row a weight is

    exp(softcap(scale · q·k) + biases - lse) where the row's runs include the key, else 0

so any part of the matrix is computed on demand, in pieces of bounded memory. The rule is stored in
three simple forms, into which every mask and bias of a call is converted exactly:
- `Runs`: each row sees a few runs of neighbouring keys (causal, windows, padding, documents);
- `Relative`: a number for each head and each difference of two positions (ALiBi, T5);
- `Whole`: a number for each head and pair, or for each head and key (BLOOM).

Maps are exact at every zoom: a cell is the mean of all weights in it. Where the cells of a map are
whole multiples of the cells of `Base` (exact means, computed while the model ran) and aligned to
its grid, they are means of base cells; everywhere else they are computed from q and k.

Letters: H heads, G key heads, T queries, S keys, D head width; t, s sizes of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Window: TypeAlias = tuple[int, int, int, int]


class BadRecord(ValueError):
    """A file is no record, or a damaged or malicious one; the message says what is wrong."""


PIECE = 1 << 20
"""Weights computed at once."""
STRIP = 256
"""Rows computed at once: few, so that most keys that causal rows do not see are skipped."""
WEIGHT_LIMIT = 1.01
"""The largest weight accepted: 1, with room for rounding in half types."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Row r of (H or 1) · T sees the keys of pairs[first[r] : first[r + 1]], each (lo, hi)."""

    first: Array
    pairs: Array
    n_queries: int

    def of(self, head: int, t0: int, t1: int) -> tuple[Array, Array]:
        """`first`, shifted to start at 0, and the pairs for rows t0 to t1 of a head."""
        shared = len(self.first) == self.n_queries + 1
        at = t0 if shared else head * self.n_queries + t0
        first = np.asarray(self.first[at : at + t1 - t0 + 1])
        return first - first[0], np.asarray(self.pairs[first[0] : first[-1]])

    def counts(self, head: int) -> Array:
        """How many keys each row of a head sees, (T,)."""
        first, pairs = self.of(head, 0, self.n_queries)
        ends = np.r_[0, np.cumsum(pairs[:, 1] - pairs[:, 0], dtype=np.int64)]
        return np.asarray(ends[first[1:]] - ends[first[:-1]])

    def bounds(self, head: int, t0: int, t1: int) -> tuple[Array, Array]:
        """The first and past-the-last visible key of each row; equal if a row sees nothing."""
        first, pairs = self.of(head, t0, t1)
        lo, hi = np.zeros(t1 - t0, np.int64), np.zeros(t1 - t0, np.int64)
        some = first[1:] > first[:-1]
        lo[some], hi[some] = pairs[first[:-1][some], 0], pairs[first[1:][some] - 1, 1]
        return lo, hi

    def allowed(self, head: int, window: Window) -> Array | None:
        """Which pairs of a window may be seen, (t, s); None for all of them."""
        t0, t1, s0, s1 = window
        first, pairs = self.of(head, t0, t1)
        counts = np.diff(first)
        if len(counts) and counts.max() <= 1:
            lo, hi = self.bounds(head, t0, t1)
            if lo.max() <= s0 and hi.min() >= s1:
                return None
            j = np.arange(s0, s1)
            return np.asarray((j >= lo[:, None]) & (j < hi[:, None]))
        rows = np.repeat(np.arange(t1 - t0), counts)
        edges = np.zeros((t1 - t0, s1 - s0 + 1), np.int32)
        np.add.at(edges, (rows, np.clip(pairs[:, 0], s0, s1) - s0), 1)
        np.add.at(edges, (rows, np.clip(pairs[:, 1], s0, s1) - s0), -1)
        return np.asarray(np.cumsum(edges, 1)[:, :-1] > 0)


class Added(Protocol):
    """A bias: a number that is added to each score."""

    def at(self, head: int, window: Window) -> Array:
        """The numbers of a window, which broadcast to (t, s)."""


@dataclass(frozen=True, eq=False)
class Relative:
    """table[head, keys_at[s] - queries_at[t] - lowest]: depends on a difference of positions."""

    table: Array
    lowest: int
    queries_at: Array
    keys_at: Array

    def at(self, head: int, window: Window) -> Array:
        t0, t1, s0, s1 = window
        gap = self.keys_at[None, s0:s1].astype(np.int64) - self.queries_at[t0:t1, None]
        # Hidden pairs (empty cache slots) may be out of range; any number does for them.
        place = np.clip(gap - self.lowest, 0, self.table.shape[1] - 1)
        return np.asarray(self.table[_one(self.table, head)][place])


@dataclass(frozen=True, eq=False)
class Whole:
    """values[head, t, s]; with one row for all queries it is a column."""

    values: Array

    def at(self, head: int, window: Window) -> Array:
        t0, t1, s0, s1 = window
        rows = slice(t0, t1) if self.values.shape[1] > 1 else slice(None)
        return np.asarray(self.values[_one(self.values, head), rows, s0:s1])


@dataclass(frozen=True, eq=False)
class Base:
    """Exact means of `cell` × `cell` weights, (H, rows, columns), starting at the first pair."""

    cell: int
    means: Array


@dataclass(frozen=True, eq=False)
class Kept:
    q_htd: Array
    k_gsd: Array
    lse_ht: Array
    key_heads: tuple[int, ...]
    scale: float
    softcap: float | None
    runs: Runs | None
    added: tuple[Added, ...]
    base: Base | None

    def piece(self, head: int, window: Window) -> Array:
        """The weights of a window, (t, s) float32, all at once: for windows of bounded size."""
        t0, t1, s0, s1 = window
        q = as_float(self.q_htd[head, t0:t1])
        k = as_float(self.k_gsd[self.key_heads[head], s0:s1])
        with np.errstate(all="ignore"):
            return self._weigh(head, window, (q * q.dtype.type(self.scale)) @ k.T)

    def _weigh(self, head: int, window: Window, scores: Array) -> Array:
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        for part in self.added:
            scores = scores + part.at(head, window)
        lse = np.asarray(self.lse_ht[head, window[0] : window[1]])
        empty = np.isneginf(lse)
        scores -= np.where(empty, 0.0, lse).astype(scores.dtype)[:, None]
        allowed = None if self.runs is None else self.runs.allowed(head, window)
        if allowed is not None:
            scores[~allowed] = -np.inf
        scores[empty] = -np.inf
        np.exp(scores, out=scores)
        if scores.size and not scores.max() <= WEIGHT_LIMIT:  # also where it is NaN
            raise BadRecord(
                "queries, keys and logsumexp do not fit together: a weight would be over 1; the "
                "record is damaged, or the model gave NaN"
            )
        return scores

    def pieces(self, head: int, window: Window) -> Iterator[tuple[Window, Array]]:
        """Yield the weights of a window in pieces; weights in no piece are 0."""
        t0, t1, s0, s1 = window
        width = max(PIECE // STRIP, 1)
        for a in range(t0, t1, STRIP):
            z = min(a + STRIP, t1)
            left, right = s0, s1
            if self.runs is not None:
                lo, hi = self.runs.bounds(head, a, z)
                some = hi > lo
                if not some.any():
                    continue
                left, right = max(s0, int(lo[some].min())), min(s1, int(hi[some].max()))
            for b in range(left, right, width):
                inside = (a, z, b, min(b + width, right))
                yield inside, self.piece(head, inside)

    def part(self, head: int, window: Window) -> Array:
        t0, t1, s0, s1 = window
        found = np.zeros((t1 - t0, s1 - s0), np.float32)
        for (a, z, b, y), part in self.pieces(head, window):
            found[a - t0 : z - t0, b - s0 : y - s0] = part
        return found

    def map(self, head: int, window: Window, size: tuple[int, int]) -> Array:
        """The mean weight in each of size[0] × size[1] equal cells of a window, float32."""
        if size == (window[1] - window[0], window[3] - window[2]):
            return self.part(head, window)
        rows, columns = self._on_base(window, size)
        if not rows or not columns:
            return self._direct(head, window, size)
        # The part covered by whole base cells first, then what is right of it, then what is below.
        t0, t1, s0, s1 = window
        height, width = size
        t_in, s_in = t0 + rows * ((t1 - t0) // height), s0 + columns * ((s1 - s0) // width)
        cells = np.zeros(size, np.float32)
        cells[:rows, :columns] = self._from_base(head, (t0, t_in, s0, s_in), (rows, columns))
        if columns < width:
            beside = self._direct(head, (t0, t_in, s_in, s1), (rows, width - columns))
            cells[:rows, columns:] = beside
        if rows < height:
            cells[rows:] = self._direct(head, (t_in, t1, s0, s1), (height - rows, width))
        return cells

    def _on_base(self, window: Window, size: tuple[int, int]) -> tuple[int, int]:
        """How many rows and columns of cells are whole base cells; 0 if the grids do not align."""
        if self.base is None:
            return 0, 0
        counts = []
        for axis in (0, 1):
            first, last = window[2 * axis], window[2 * axis + 1]
            step, rest = divmod(last - first, size[axis])
            if rest or first % self.base.cell or step % self.base.cell:
                return 0, 0
            covered = self.base.means.shape[axis + 1] * self.base.cell
            counts.append(min(max((covered - first) // step, 0), size[axis]))
        return counts[0], counts[1]

    def _from_base(self, head: int, window: Window, size: tuple[int, int]) -> Array:
        assert self.base is not None
        t0, t1, s0, s1 = (edge // self.base.cell for edge in window)
        part = np.asarray(self.base.means[head, t0:t1, s0:s1], np.float32)
        fine = part.reshape(size[0], -1, size[1], (s1 - s0) // size[1])
        return np.asarray(fine.mean((1, 3), dtype=np.float64))

    def _direct(self, head: int, window: Window, size: tuple[int, int]) -> Array:
        t0, t1, s0, s1 = window
        cells = np.zeros(size, np.float32)
        for (a, z, b, y), part in self.pieces(head, window):
            x0, down = shares(size[0], (t0, t1), (a, z))
            y0, across = shares(size[1], (s0, s1), (b, y))
            cells[x0 : x0 + len(down), y0 : y0 + len(across)] += down @ (part @ across.T)
        return cells


def shares(cells: int, window: tuple[int, int], part: tuple[int, int]) -> tuple[int, Array]:
    """The first cell that a part of a window touches, and the share of each index in the cells.

    Cell x of the window a..z starts at a + x · (z - a) / cells. Overlaps are counted in integer
    units of 1 / cells, so that they are exact at any size.
    """
    first, span = window[0], window[1] - window[0]
    begin = (part[0] - first) * cells // span
    end = -((first - part[1]) * cells // span)
    x = np.arange(begin, end, dtype=np.int64)[:, None] * span
    n = (np.arange(part[0], part[1], dtype=np.int64) - first) * cells
    shared = np.minimum(x + span, n + cells) - np.maximum(x, n)
    return begin, (np.maximum(shared, 0) / span).astype(np.float32)


def as_float(values: Array) -> Array:
    """Numbers as float32, float64 unchanged; uint16 is bfloat16, whose bits are its upper half."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values if values.dtype == np.float64 else values.astype(np.float32))


def _one(values: Array, head: int) -> int:
    """The row of a head in an array with one row per head, or one for all heads."""
    return head if values.shape[0] > 1 else 0
