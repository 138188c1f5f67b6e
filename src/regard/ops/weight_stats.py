"""The second pass: received attention, the largest weights, maps and whole rows, in tiles.

These need the row sums first. With the logsumexp of each row known, the weight of any pair is
exp(score - lse), so the weights of a tile are exact without the other tiles. One walk over the
tiles answers all but whole rows: each tile is computed once, and only for queries that something is
asked about. Extra memory is O(T + S) plus the answer. No gradient flows through any of it.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width; t, s sizes of a tile;
X, Y cells of a map.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.ops.blockwise import LOG2_E, bands, tile_scratch
from regard.ops.call import Rule, score_dtype
from regard.ops.reference import add_rule, raw_scores
from regard.ops.shape import Tile
from regard.ops.wants import (
    Map,
    Received,
    ReceivedAttention,
    SparseRows,
    Top,
    Wants,
)


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a call, computed on demand from q, k, the rule and each row's max and sum."""

    q_bhtd: Tensor
    k_bgsd: Tensor
    rule: Rule
    max_bht: Tensor
    denominator_bht: Tensor

    @functools.cached_property
    def spoiled_bht(self) -> Tensor:
        """The rows that look at a NaN, whose weights are NaN."""
        return self.denominator_bht.isnan()

    def tile(self, tile: Tile, full: bool = False, scratch: Tensor | None = None) -> Tensor:
        """The weights of one tile, (B, H, t, s); in `scratch` if given, which is reused."""
        q_bhtd, k_bgsd = self.q_bhtd[:, :, tile.t0 : tile.t1], self.k_bgsd[:, :, tile.s0 : tile.s1]
        scores_bhts = raw_scores(q_bhtd, k_bgsd, self.rule, scratch)
        scores_bhts = add_rule(scores_bhts, self.rule, tile, full, in_place=scratch is not None)
        rows = (slice(None), slice(None), slice(tile.t0, tile.t1), None)
        hidden = None if full and not self.rule.bias_hides() else scores_bhts == -math.inf
        weights_bhts = scores_bhts.sub_(self.max_bht[rows]).mul_(LOG2_E).exp2_()
        weights_bhts.div_(self.denominator_bht[rows])
        return weights_bhts if hidden is None else weights_bhts.masked_fill_(hidden, 0.0)

    def tiles(self, window: Tile | None = None) -> Iterator[tuple[Tile, bool]]:
        """The tiles that are not empty, cut to a window, each with whether it is full."""
        whole = window or Tile(0, self.rule.shape.T, 0, self.rule.shape.S)
        for _, row in bands(self.rule, self.q_bhtd.is_cuda, (whole.t0, whole.t1)):
            for tile, full in row:
                inside = common(tile, whole)
                if inside is not None:
                    yield inside, full

    def zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        B, H = self.rule.shape.B, self.rule.shape.H
        kind = dtype or score_dtype(self.q_bhtd.dtype)
        return torch.zeros(B, H, *sizes, dtype=kind, device=self.q_bhtd.device)

    def answer(self, wants: Wants) -> dict[str, Any]:
        """The wants of the second pass, by their names in `Observation`."""
        picture, asked, shape = wants.picture(), wants.receiving(), self.rule.shape
        collectors: dict[str, _Collector] = {}
        if asked is not None:
            collectors["received"] = _Receiving(self, asked)
        if wants.top is not None:
            collectors["top"] = _Largest(self, wants.top)
        if wants.above is not None:
            collectors["above"] = _Sparse(self, wants.above)
        if picture is not None:
            collectors["map"] = _Picturing(self, picture)
        # A map alone needs only the keys of its window.
        keys = picture.window(shape)[2:] if picture and len(collectors) == 1 else (0, shape.S)
        if collectors:
            scratch = tile_scratch(shape, self.q_bhtd)
            for tile, full in self.tiles(Tile(*replace(wants, rows=None).span(shape), *keys)):
                weights = self.tile(tile, full, scratch)
                for collector in collectors.values():
                    collector.take(tile, full, weights)
        found = {name: collector.finish() for name, collector in collectors.items()}
        return found if wants.rows is None else {**found, "rows": self.rows(wants.rows)}

    def rows(self, wanted: Sequence[int]) -> Tensor:
        """Whole rows of the matrix for chosen queries, (B, H, rows, S)."""
        found = self.zeros(len(wanted), self.rule.shape.S)
        for place, t in enumerate(wanted):
            for tile, full in self.tiles(Tile(t, t + 1, 0, self.rule.shape.S)):
                found[:, :, place, tile.s0 : tile.s1] = self.tile(tile, full)[:, :, 0]
        return found


class _Collector(Protocol):
    """Accumulates one answer: it gets the weights of each tile, and must not change them."""

    def take(self, tile: Tile, full: bool, weights_bhts: Tensor) -> None: ...

    def finish(self) -> Any: ...


class _Receiving:
    """What each key gets from the queries asked about, and how many of these may see it."""

    def __init__(self, of: Weights, asked: Received) -> None:
        self.rule, self.asked, S = of.rule, asked, of.rule.shape.S
        self.window = Tile(*asked.span(of.rule.shape.T), 0, S)
        self.found, self.seen_by = of.zeros(S).fill_(asked.unseen), of.zeros(S)
        self.rows_bht1 = asked.row_weights(self.found)
        self.row_weight = None if self.rows_bht1 is None else of.zeros(S)

    def take(self, tile: Tile, full: bool, weights_bhts: Tensor) -> None:
        inside = common(tile, self.window)
        if inside is None:
            return
        keys, all_seen = slice(inside.s0, inside.s1), full and not self.rule.bias_hides()
        weights_bhts = weights_bhts[:, :, inside.t0 - tile.t0 : inside.t1 - tile.t0]
        hidden = None if all_seen else ~visible(self.rule, inside, full, weights_bhts.device)
        one = self.seen_by.new_ones(1, 1, inside.t1 - inside.t0, 1)
        self.seen_by[..., keys] += sum_seen(one, hidden)
        if self.rows_bht1 is not None and self.row_weight is not None:
            rows_bht1 = self.rows_bht1[:, :, inside.t0 : inside.t1]
            self.row_weight[..., keys] += sum_seen(rows_bht1, hidden)
            weights_bhts = rows_bht1 * weights_bhts
        if hidden is not None:
            weights_bhts = weights_bhts.masked_fill(hidden, self.asked.unseen)
        if self.asked.by == "max":
            most = torch.maximum(self.found[..., keys], weights_bhts.amax(2))
            self.found[..., keys] = most
        else:
            self.found[..., keys] += weights_bhts.sum(2)

    def finish(self) -> ReceivedAttention:
        return self.asked.answer(self.found, self.seen_by, self.row_weight)


class _Largest:
    """The k largest weights of each row and their keys."""

    def __init__(self, of: Weights, k: int) -> None:
        self.rule, self.spoiled_bht, self.k = of.rule, of.spoiled_bht, k
        self.best = of.zeros(of.rule.shape.T, k).flatten(0, 1) - 1.0
        self.where = torch.full_like(self.best, -1, dtype=torch.int64)

    def take(self, tile: Tile, full: bool, weights_bhts: Tensor) -> None:
        if not full or self.rule.bias_hides():
            seen = visible(self.rule, tile, full, weights_bhts.device)
            weights_bhts = weights_bhts.masked_fill(~seen, -1.0)
        weights_nts = weights_bhts.flatten(0, 1)
        # After the first few tiles, most rows find nothing larger in a tile, and are skipped.
        better_nt = weights_nts.amax(-1) > self.best[:, tile.t0 : tile.t1, -1]
        n, t = better_nt.nonzero(as_tuple=True)
        if not len(n):
            return
        largest, keys = weights_nts[n, t].topk(min(self.k, weights_nts.shape[-1]), -1)
        keys = (keys + tile.s0).masked_fill(largest < 0, -1)
        at = n, t + tile.t0
        both, order = torch.cat([self.best[at], largest], -1).topk(self.k, -1)
        self.where[at] = torch.cat([self.where[at], keys], -1).gather(-1, order)
        self.best[at] = both

    def finish(self) -> Top:
        shape = (self.rule.shape.B, self.rule.shape.H, *self.best.shape[1:])
        best, where = self.best.clamp(min=0.0).view(shape), self.where.view(shape)
        spoiled_bht1 = self.spoiled_bht[..., None]
        return Top(best.masked_fill(spoiled_bht1, math.nan), where.masked_fill(spoiled_bht1, -1))


class _Sparse:
    """Every weight of at least the threshold, as sparse rows."""

    def __init__(self, of: Weights, threshold: float) -> None:
        self.shape, self.threshold = of.rule.shape, threshold
        none = of.zeros(dtype=torch.int64).new_zeros(0)
        self.found = [(none, none, of.max_bht.new_zeros(0))]
        # What is kept from a tile is small, and is allocated where its temporary tensors were, so
        # that the next tile's would not fit there. So the large one is allocated once.
        self.scratch = tile_scratch(of.rule.shape, of.q_bhtd, torch.bool)

    def take(self, tile: Tile, full: bool, weights_bhts: Tensor) -> None:
        _, H, T, _ = self.shape
        above = self.scratch[: weights_bhts.numel()].view(weights_bhts.shape)
        b, h, t, s = torch.ge(weights_bhts, self.threshold, out=above).nonzero(as_tuple=True)
        if not len(b):
            return
        row = (b * H + h) * T + t + tile.t0
        self.found.append((row, s + tile.s0, weights_bhts[b, h, t, s]))

    def finish(self) -> SparseRows:
        row, key, weight = (torch.cat(parts) for parts in zip(*self.found, strict=True))
        order = (row * max(self.shape.S, 1) + key).argsort()
        counts = torch.bincount(row, minlength=self.shape.B * self.shape.H * self.shape.T)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return SparseRows(offsets, key[order], weight[order], self.shape)


class _Picturing:
    """The mean weight in each cell of a picture of the matrix or of a window, (B, H, X, Y)."""

    def __init__(self, of: Weights, picture: Map) -> None:
        self.picture, self.window = picture, Tile(*picture.window(of.rule.shape))
        self.cells = of.zeros(picture.height, picture.width)
        # Reading the flag would synchronise with a device; there NaNs are always handled.
        spoiled = of.spoiled_bht
        self.has_nan = spoiled.device.type != "cpu" or bool(spoiled.any())

    def take(self, tile: Tile, full: bool, weights_bhts: Tensor) -> None:
        inside = common(tile, self.window)
        if inside is None:
            return
        t = slice(inside.t0 - tile.t0, inside.t1 - tile.t0)
        s = slice(inside.s0 - tile.s0, inside.s1 - tile.s0)
        weights = weights_bhts[:, :, t, s]
        t0, t1, s0, s1 = self.window
        down = overlap(self.picture.height, (t0, t1), (inside.t0, inside.t1), weights)
        across = overlap(self.picture.width, (s0, s1), (inside.s0, inside.s1), weights)
        (x0, x1), (y0, y1) = touched(down), touched(across)
        self.cells[:, :, x0:x1, y0:y1] += pool(weights, down[x0:x1], across[y0:y1], self.has_nan)

    def finish(self) -> Tensor:
        return self.cells


def sum_seen(values_bhts: Tensor, hidden_bhts: Tensor | None) -> Tensor:
    """The sum over the queries, (B, H, s), without hidden pairs, even where they are NaN."""
    if hidden_bhts is None:
        return values_bhts.sum(2)
    return torch.where(hidden_bhts, 0.0, values_bhts).sum(2)


def common(one: Tile, other: Tile) -> Tile | None:
    """The intersection of two tiles; None if it is empty."""
    t0, t1 = max(one.t0, other.t0), min(one.t1, other.t1)
    s0, s1 = max(one.s0, other.s0), min(one.s1, other.s1)
    return Tile(t0, t1, s0, s1) if t0 < t1 and s0 < s1 else None


def visible(rule: Rule, tile: Tile, full: bool, device: torch.device) -> Tensor:
    """Which pairs of a tile may be seen, by mask and by a bias of -inf, (B, H, t, s)."""
    seen = torch.ones((), dtype=torch.bool, device=device)
    if rule.mask is not None and not full:
        seen = rule.mask.block(rule.shape, tile, device)
    if rule.bias is not None and rule.bias.hides:
        seen = seen & (rule.bias.block(rule.shape, tile, device, torch.float32) != -math.inf)
    return seen.expand(rule.shape.B, rule.shape.H, tile.t1 - tile.t0, tile.s1 - tile.s0)


def pool(weights_bhts: Tensor, down_xt: Tensor, across_ys: Tensor, has_nan: bool) -> Tensor:
    """The mean of each cell; a NaN spoils the cells it lies in and no others."""
    if not has_nan:
        return down_xt @ (weights_bhts @ across_ys.T)
    spoiled = weights_bhts.isnan()
    cells = down_xt @ (weights_bhts.masked_fill(spoiled, 0.0) @ across_ys.T)
    touches = (down_xt > 0).to(cells) @ (spoiled.to(cells) @ (across_ys > 0).to(cells).T)
    return cells.masked_fill(touches > 0, math.nan)


def overlap(cells: int, window: tuple[int, int], part: tuple[int, int], like: Tensor) -> Tensor:
    """The share of each cell that each index of a part of the window covers, (cells, part).

    Cell x of the window a..z covers a + x·(z-a)/cells onwards; index n covers n..n+1. The overlap
    is counted in units of 1/cells, whole numbers, so that it is exact at any size.
    """
    first, last = window
    span = last - first
    x = torch.arange(cells, device=like.device)[:, None] * span
    n = (torch.arange(part[0], part[1], device=like.device) - first) * cells
    shared = torch.minimum(x + span, n + cells) - torch.maximum(x, n)
    return shared.clamp(min=0).to(like.dtype) / span


def touched(shares: Tensor) -> tuple[int, int]:
    """First and past-the-last cell with any share."""
    rows = shares.sum(1).nonzero()
    return int(rows[0]), int(rows[-1]) + 1
