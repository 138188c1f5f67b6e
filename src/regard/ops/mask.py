"""Masks are values: each defines once which query may look at which key; all other forms follow.

The one definition is `allows(b, h, i, j, shape)`, a predicate on indices that works on any integer
tensors that broadcast. The dense tensor (`dense`, `block`) and the FlexAttention function (`flex`)
are derived from it. What else a mask says about itself makes it faster:
- `interval`: the keys of each row as one run lo..hi, if they are one (padding, windows, causal);
- `bounds`: of a grid of tiles, which may hold a visible pair and which hold only visible pairs, so
  that whole tiles are skipped or left unmasked (`tiles`: empty, mixed or full);
- `window`: how far back and ahead a query sees, if that is all that the mask says;
- `span`: the keys that all queries of a sample see alike, if that is all that the mask says;
- `is_causal_flag`: whether torch's `is_causal` flag means exactly this mask.

The masks themselves are in `masks.py`; here is what a mask is and how masks are joined. `term.py`
moves, cuts and lists their tensors. Left out: masks that depend on the values of q or k.

Letters: B batch, H heads, T queries, S keys; b, h, i, j indices. Position: the last query is at the
last key, so query row t has position i = t + S - T. True means: this query may look at this key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard._check import readable
from regard.ops.shape import (
    Bools,
    Ints,
    Shape,
    Tile,
    indices,
    positions,
    spans,
)
from regard.ops.term import Joined, Placed, Term


class Box(NamedTuple):
    """A grid of tiles by the first and last position of each: (rows, 1) and (1, columns)."""

    i_lo: Ints
    i_hi: Ints
    j_lo: Ints
    j_hi: Ints
    shape: Shape


class Bounds(NamedTuple):
    """Per tile: may it hold a visible pair, and are surely all its pairs visible."""

    maybe: Bools
    surely: Bools


class Mask(Term):
    """Which query may look at which key. Join masks with `&` (both), `|` (either) and `~` (not).

    Positions: keys have the positions 0 .. S - 1, and the last query sits on the last key: query t
    of T has the position t + S - T. `mask.at(queries, keys)` gives others.

    A mask of your own is a frozen dataclass that derives from `Mask` and says `allows`. It then
    works on every backend; CONTRIBUTING.md ("How to add: a mask") says what else it may define.

    Example:
        >>> mask = regard.Causal() & ~regard.Window(0, 0)  # what came before, but not itself
        >>> x = torch.zeros(1, 1, 3, 1)
        >>> regard.observe(x, x, x, mask=mask, wants=regard.Wants(weights=True)).weights[0, 0]
        tensor([[0.0000, 0.0000, 0.0000],
                [1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000]])
    """

    sees_itself = False
    """Whether every query that sits on a key may look at that key, at any shape."""
    from_first = False
    """Whether the keys of every row are one run that begins with the first key, or none."""

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        """Whether the query at position i may look at the key at position j.

        b (batch), h (head), i and j are int64 tensors that broadcast against each other; return a
        bool tensor that broadcasts with them. shape: the sizes B, H, T, S of the call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it allows")

    def bounds(self, box: Box) -> Bounds:
        """What is known of each tile without evaluating pairs; knowing nothing is always right."""
        grid = (box.i_lo.shape[0], box.j_lo.shape[1])
        return Bounds(np.ones(grid, np.bool_), np.zeros(grid, np.bool_))

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
        """First and past-the-last key of rows at positions i (1 or B, T), if each sees one run."""
        return None

    def window(self) -> tuple[int | None, int | None] | None:
        """How far back and ahead of itself a query sees (None: all), if that is all it says."""
        return None

    def window_in(self, shape: Shape) -> tuple[int | None, int | None] | None:
        """The `window` for inputs of this shape, where the last query sits on the last key."""
        return self.window()

    def span(self, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """First and past-the-last key, the same for all rows, (B or 1,), if that is all it says."""
        return None

    @property
    def looks_back(self) -> bool:
        """Whether, for sure, no query sees a key after its own."""
        window = self.window()
        return window is not None and window[1] == 0

    def block(self, shape: Shape, tile: Tile, device: torch.device) -> Tensor:
        """The mask inside one tile, a bool tensor that broadcasts to (B, H, t, s)."""
        if self.relative:
            # A relative mask ignores the sample and the head, so any index will do for them.
            i, j = positions(shape, tile, device)
            return self.allows(i, i, i, j, shape)
        return self.allows(*indices(shape, tile, device), shape)

    def dense(self, shape: Shape, device: torch.device | str = "cpu") -> Tensor:
        """The whole mask as a bool tensor that broadcasts to (B, H, T, S)."""
        self.check(shape)
        return self.block(shape, Tile(0, shape.T, 0, shape.S), torch.device(device))

    def flex(self, shape: Shape) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The mask as FlexAttention's `mask_mod`, a predicate on single indices (t is a row)."""
        self.check(shape)
        return lambda b, h, t, j: self.allows(b, h, t + shape.offset, j, shape)

    def tiles(self, shape: Shape, height: int, width: int) -> Tensor:
        """A picture of the matrix in tiles: 0 empty, 1 mixed, 2 full; mixed when not known."""
        self.check(shape)
        known = tile_bounds(self, shape, edges(shape.T, height), edges(shape.S, width))
        return torch.from_numpy(known.maybe.astype(np.int8) + (known.maybe & known.surely))

    def is_causal_flag(self, shape: Shape) -> bool:
        """Whether torch's `is_causal=True` means exactly this mask at this shape."""
        return False

    def hides_nothing(self, shape: Shape) -> bool:
        """Whether every query surely sees every key at this shape; False where it is not known."""
        return False

    def at(self, queries: Tensor, keys: Tensor | None = None) -> Mask:
        """The same mask with given positions of queries, (T,) or (B, T), and keys, (S,) or (B, S).

        A key at a negative position is an empty slot of a cache, which nobody sees. keys=None: the
        keys have the positions 0 .. S - 1. ValueError: this mask does not speak of positions.
        """
        if not self.positional:
            raise ValueError(
                f"{type(self).__name__} counts rows and keys by their index in memory, not by "
                "position; give positions to the other masks alone: mask.at(queries, keys) & "
                f"{type(self).__name__}(...)"
            )
        return At(self, queries, keys)

    def with_own_queries(self) -> Mask:
        """The same mask at T = S, with explicit tensors for queries, not read off the keys."""
        return self

    def __and__(self, other: Mask) -> Mask:
        return And(self, other) if _is_mask(other) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other) if _is_mask(other) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; join masks with & | ~, not with and / or / not")


def _is_mask(other: object) -> bool:
    """Whether this is a mask; for a tensor, an error that says what to write instead."""
    if isinstance(other, Tensor):
        raise TypeError("a mask is joined with a mask: write mask & Dense(tensor)")
    return isinstance(other, Mask)


@dataclass(frozen=True, eq=False)
class At(Placed, Mask):
    """A mask at explicit positions. A key at a negative one is an empty slot, which nobody sees."""

    inner: Mask
    queries: Tensor
    keys: Tensor | None = None

    @property
    def from_first(self) -> bool:  # type: ignore[override]
        return self.keys is None and self.inner.from_first

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        queries, keys = self.positions(b, i, j, shape)
        seen = self.inner.allows(b, h, queries, keys, shape._replace(T=shape.S))
        return seen if self.keys is None else seen & (keys >= 0)

    def bounds(self, box: Box) -> Bounds:
        keys = self.keys
        if not readable(self.queries, keys) or not self.queries.numel() or not box.shape.S:
            return super().bounds(box)
        rows = (box.i_lo[:, 0] - box.shape.offset, box.i_hi[:, 0] - box.shape.offset)
        i_lo, i_hi = spans(self.queries, *rows)
        j_lo, j_hi = (box.j_lo, box.j_hi) if keys is None else spans(keys, box.j_lo[0], box.j_hi[0])
        j_lo, j_hi = j_lo.min(0)[None], j_hi.max(0)[None]
        inner = box.shape._replace(T=box.shape.S)
        known = self.inner.bounds(
            Box(i_lo.min(0)[:, None], i_hi.max(0)[:, None], j_lo, j_hi, inner)
        )
        return Bounds(known.maybe & (j_hi >= 0), known.surely & (j_lo >= 0))

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
        if self.keys is not None:
            return None
        queries = self.queries.to(i)
        queries = queries if queries.dim() == 2 else queries[None]
        return self.inner.interval(queries, shape._replace(T=shape.S))


class _JoinedMask(Joined, Mask):
    """What And, Or and Not share."""

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return all(part.sees_itself for part in self.parts())

    @property
    def from_first(self) -> bool:  # type: ignore[override]
        return all(part.from_first for part in self.parts())


class _Two(_JoinedMask):
    """What And and Or share."""

    one: Mask
    other: Mask

    def parts(self) -> tuple[Mask, ...]:  # type: ignore[override]
        return self.one, self.other


@dataclass(frozen=True, eq=False)
class And(_Two):
    """Both masks allow it."""

    one: Mask
    other: Mask

    def window(self) -> tuple[int | None, int | None] | None:
        one, other = self.one.window(), self.other.window()
        if one is None or other is None:
            return None
        return nearer(one[0], other[0]), nearer(one[1], other[1])

    @property
    def looks_back(self) -> bool:
        return self.one.looks_back or self.other.looks_back

    def hides_nothing(self, shape: Shape) -> bool:
        return self.one.hides_nothing(shape) and self.other.hides_nothing(shape)

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        return self.one.allows(b, h, i, j, shape) & self.other.allows(b, h, i, j, shape)

    def block(self, shape: Shape, tile: Tile, device: torch.device) -> Tensor:
        return self.one.block(shape, tile, device) & self.other.block(shape, tile, device)

    def bounds(self, box: Box) -> Bounds:
        one, other = self.one.bounds(box), self.other.bounds(box)
        return Bounds(one.maybe & other.maybe, one.surely & other.surely)

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
        one, other = self.one.interval(i, shape), self.other.interval(i, shape)
        if one is None or other is None:
            return None
        return torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])


@dataclass(frozen=True, eq=False)
class Or(_Two):
    """One of the masks, or both, allow it."""

    one: Mask
    other: Mask

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.one.sees_itself or self.other.sees_itself

    @property
    def looks_back(self) -> bool:
        return self.one.looks_back and self.other.looks_back

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        return self.one.allows(b, h, i, j, shape) | self.other.allows(b, h, i, j, shape)

    def block(self, shape: Shape, tile: Tile, device: torch.device) -> Tensor:
        return self.one.block(shape, tile, device) | self.other.block(shape, tile, device)

    def bounds(self, box: Box) -> Bounds:
        one, other = self.one.bounds(box), self.other.bounds(box)
        return Bounds(one.maybe | other.maybe, one.surely | other.surely)

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
        if not self.from_first:
            return None
        one, other = self.one.interval(i, shape), self.other.interval(i, shape)
        if one is None or other is None:
            return None
        return torch.zeros_like(one[0]), torch.maximum(one[1], other[1])


@dataclass(frozen=True, eq=False)
class Not(_JoinedMask):
    """The mask does not allow it."""

    inner: Mask

    sees_itself = False
    from_first = False

    def parts(self) -> tuple[Mask, ...]:  # type: ignore[override]
        return (self.inner,)

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        return ~self.inner.allows(b, h, i, j, shape)

    def block(self, shape: Shape, tile: Tile, device: torch.device) -> Tensor:
        return ~self.inner.block(shape, tile, device)

    def bounds(self, box: Box) -> Bounds:
        known = self.inner.bounds(box)
        return Bounds(~known.surely, ~known.maybe)


def nearer(one: int | None, other: int | None) -> int | None:
    """The smaller of two distances, where None is unlimited."""
    return other if one is None else one if other is None else min(one, other)


def tile_bounds(mask: Mask | None, shape: Shape, t_edges: Ints, s_edges: Ints) -> Bounds:
    """Bounds of the tiles between consecutive edges; no mask means that every tile is full."""
    grid = (len(t_edges) - 1, len(s_edges) - 1)
    if mask is None:
        return Bounds(np.ones(grid, np.bool_), np.ones(grid, np.bool_))
    i, j = t_edges + shape.offset, s_edges
    box = Box(i[:-1, None], i[1:, None] - 1, j[None, :-1], j[None, 1:] - 1, shape)
    known = mask.bounds(box)
    return Bounds(np.broadcast_to(known.maybe, grid), np.broadcast_to(known.surely, grid))


def edges(size: int, step: int) -> Ints:
    """0, step, 2 step, ... size: where tiles of one axis begin and end."""
    return np.append(np.arange(0, size, max(step, 1)), size).astype(np.int64)
