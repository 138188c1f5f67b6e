"""How tensors and rules are passed to kernels: as named tuples, with None for absent parts.

A kernel is compiled for the fields that are None, so that a rule without a bias has no code for
one. Tensors are passed with their strides, so that views of any layout will do.

Letters: B batch, T queries, S keys, H query heads; D width of a head.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.kernels.launch import layout_of
from regard.ops.kernels.rendered import TENSORS, Rendered

BITS = 1.0 / math.log(2.0)
"""From nats to bits: with scores in bits a weight is a power of two."""
OPEN = 2**30
"""A side of a window that has no end; no call has so many queries or keys."""


class View(NamedTuple):
    """A tensor of four axes (B, H, T, D)."""

    at: Tensor
    b: int
    h: int
    t: int
    d: int


class Window(NamedTuple):
    """How far back and ahead of itself a query sees; OPEN: all."""

    left: int
    right: int


class Span(NamedTuple):
    """The keys first..past that all queries of a sample see; b: stride from sample to sample."""

    first: Tensor
    past: Tensor
    b: int


class Interval(NamedTuple):
    """The keys lo..hi that each query sees; b: stride from sample to sample, 0 if shared."""

    lo: Tensor
    hi: Tensor
    b: int


class Ids(NamedTuple):
    """The document ids of queries and of keys, which decide in samples that are `scattered`."""

    queries: Tensor
    queries_b: int
    keys: Tensor
    keys_b: int
    scattered: Tensor
    scattered_b: int


class Pair(NamedTuple):
    """A position for each query and one for each key."""

    queries: Tensor
    queries_b: int
    keys: Tensor
    keys_b: int


class Words(NamedTuple):
    """A bit for each pair of query and key, 32 keys a word."""

    at: Tensor
    b: int
    h: int
    t: int


class Band(NamedTuple):
    """A number for each head and each s - t."""

    at: Tensor
    h: int


class Dense(NamedTuple):
    """A number for each pair; at `floor` and below it hides the pair."""

    at: Tensor
    b: int
    h: int
    t: int
    s: int
    floor: float


class Dropout(NamedTuple):
    """A weight is kept where the hash of its indices, minus 2^31, is at least `threshold`."""

    seed: Tensor
    threshold: int


class Rule(NamedTuple):
    """How scores are computed, in bits, and which of them count."""

    factor: float
    cap: float | None
    window: Window | None
    span: Span | None
    interval: Interval | None
    ids: Ids | None
    words: Words | None
    slopes: Tensor | None
    places: Pair | None
    band: Band | None
    dense: Dense | None
    dropout: Dropout | None
    end: None = None
    """Always None: Triton 3.6 loses a 1 inside a field, unless a field after it is None."""


class TileLists(NamedTuple):
    """For each line of tiles: how many runs of full tiles, how many mixed tiles, and which.

    n: numbers per line in `tiles`. b, h: strides of samples and heads, in lines. Where tiles are
    listed in order, `full` counts all of them, and `mixed` none.
    """

    tiles: Tensor
    full: Tensor
    mixed: Tensor
    n: int
    b: int
    h: int


def view(x: Tensor) -> View:
    """A tensor of four axes with its strides."""
    return View(x, *x.stride())


def share(x: Tensor, axis: int) -> int:
    """The stride of an axis, 0 where its single entry is shared."""
    return 0 if x.shape[axis] == 1 else x.stride(axis)


def form_of(given: Rendered) -> tuple[Any, ...]:
    """Everything about a call but the contents and addresses of its tensors."""
    tensors: Any = given[:TENSORS]
    lying = [None if x is None else layout_of(x) for x in tensors]
    return given.q.device, *lying, *given[TENSORS:]


def rule_of(given: Rendered) -> Rule:
    """The rule of a call as kernels read it."""
    window = span = interval = ids = words = places = band = dense = dropout = None
    if given.left is not None or given.right is not None:
        # No None inside of a tuple in a tuple: Triton 3.6 does not compile it.
        left, right = (OPEN if side is None else side for side in (given.left, given.right))
        window = Window(left, right)
    if given.first is not None and given.past is not None:
        span = Span(*_alike(given.first, given.past))
    if given.lo is not None and given.hi is not None:
        interval = Interval(*_alike(given.lo, given.hi))
    if given.query_ids is not None and given.key_ids is not None:
        assert given.scattered is not None
        pair = _pair(given.query_ids, given.key_ids)
        ids = Ids(*pair, given.scattered, share(given.scattered, 0))
    if given.words is not None:
        words = Words(given.words, *(share(given.words, axis) for axis in range(3)))
    if given.query_places is not None and given.key_places is not None:
        places = _pair(given.query_places, given.key_places)
    if given.band is not None:
        band = Band(given.band, given.band.stride(0))
    if given.dense is not None:
        floor = max(torch.finfo(given.dense.dtype).min, torch.finfo(torch.bfloat16).min)
        b, h, t, s = (share(given.dense, axis) for axis in range(4))
        dense = Dense(given.dense, b, h, t, s, floor)
    if given.seed is not None:
        dropout = Dropout(given.seed, int(given.dropout * 2**32) - 2**31)
    cap = None if given.cap is None else given.cap * BITS
    seen = (window, span, interval, ids, words)
    return Rule(given.factor * BITS, cap, *seen, given.slopes, places, band, dense, dropout)


def _alike(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, int]:
    """Two tensors of one shape (B or 1, ...) and of one stride from sample to sample."""
    if one.shape == other.shape and one.stride() == other.stride():
        return one, other, share(one, 0)
    samples = max(len(one), len(other))
    one, other = (x.expand(samples, *x.shape[1:]) for x in (one, other))
    if one.stride() != other.stride():
        one, other = one.contiguous(), other.contiguous()
    return one, other, share(one, 0)


def _pair(queries: Tensor, keys: Tensor) -> Pair:
    return Pair(queries, share(queries, 0), keys, share(keys, 0))


def options_of(given: Rendered) -> dict[str, Any]:
    """Compile-time options of all kernels: query heads per key head, widths, kind of product."""
    D = given.q.shape[3]
    E = given.v.shape[3] or D
    return {
        "R": given.q.shape[1] // given.k.shape[1],
        "WIDTH": width_of(D),
        "EVEN": width_of(D) == D and width_of(E) == E,
        "EXACT": given.q.dtype == torch.float32,
    }


@functools.cache
def width_of(size: int) -> int:
    """The width of a tile for heads of this width: a power of two, 16 at least."""
    return max(16, 1 << max(size - 1, 0).bit_length())
