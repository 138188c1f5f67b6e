"""What needs the row sums first: received attention, the largest weights, maps, whole rows.

With the log-sum of each row known, the weight of any pair is exp(score - lse), so every tile tells
its weights exactly and alone. Pictures of a window walk only the tiles of that window. Extra memory
is O(T + S) plus the answer. No gradient flows through any of it.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width; t, s sizes of a tile;
X, Y cells of a map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.blockwise import bands
from regard.attention.reference import add_rule, raw_scores
from regard.attention.rule import Rule, score_dtype
from regard.attention.shape import Tile
from regard.attention.wants import Map, Received, SparseRows, Top


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a call, made when asked for from q, k, the rule and the log-sums."""

    q_bhtd: Tensor
    k_bgsd: Tensor
    rule: Rule
    top_bht: Tensor
    denominator_bht: Tensor
    nan_rows_bht: Tensor | None = None

    def tile(self, tile: Tile, full: bool = False) -> Tensor:
        """The weights inside one tile, (B, H, t, s)."""
        q_bhtd, k_bgsd = self.q_bhtd[:, :, tile.t0 : tile.t1], self.k_bgsd[:, :, tile.s0 : tile.s1]
        scores_bhts = add_rule(raw_scores(q_bhtd, k_bgsd, self.rule), self.rule, tile, full)
        rows = (slice(None), slice(None), slice(tile.t0, tile.t1), None)
        weights_bhts = scores_bhts.sub_(self.top_bht[rows]).exp_().div_(self.denominator_bht[rows])
        if self.nan_rows_bht is not None:
            seen = visible(self.rule, tile, full, weights_bhts.device)
            weights_bhts.masked_fill_(self.nan_rows_bht[rows] & seen, math.nan)
        return weights_bhts

    def tiles(self, window: Tile | None = None) -> Iterator[tuple[Tile, bool]]:
        """The tiles that are not empty, cut to a window, each with whether it is full."""
        whole = window or Tile(0, self.rule.shape.T, 0, self.rule.shape.S)
        for _, row in bands(self.rule, self.q_bhtd.is_cuda):
            for tile, full in row:
                inside = Tile(
                    max(tile.t0, whole.t0),
                    min(tile.t1, whole.t1),
                    max(tile.s0, whole.s0),
                    min(tile.s1, whole.s1),
                )
                if inside.t0 < inside.t1 and inside.s0 < inside.s1:
                    yield inside, full

    def _zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        B, H = self.rule.shape.B, self.rule.shape.H
        kind = dtype or score_dtype(self.q_bhtd.dtype)
        return torch.zeros(B, H, *sizes, dtype=kind, device=self.q_bhtd.device)

    def received(self) -> Received:
        """What each key gets from all queries, and how many queries may see it."""
        total, seen_by = self._zeros(self.rule.shape.S), self._zeros(self.rule.shape.S)
        for tile, full in self.tiles():
            keys = slice(tile.s0, tile.s1)
            total[..., keys] += self.tile(tile, full).sum(2)
            if full and self.rule.bias is None:
                seen_by[..., keys] += tile.t1 - tile.t0
            else:
                seen_by[..., keys] += visible(self.rule, tile, full, total.device).to(total).sum(2)
        return Received(total, seen_by)

    def top(self, k: int) -> Top:
        """The k largest weights of each row and their keys."""
        T = self.rule.shape.T
        best, where = self._zeros(T, k), self._zeros(T, k, dtype=torch.int64) - 1
        for tile, full in self.tiles():
            rows = slice(tile.t0, tile.t1)
            weights = self.tile(tile, full)
            weights = weights.masked_fill(~visible(self.rule, tile, full, weights.device), -1.0)
            weights, keys = weights.topk(min(k, weights.shape[-1]), -1)
            keys = (keys + tile.s0).masked_fill(weights < 0, -1)
            known = best[:, :, rows].masked_fill(where[:, :, rows] < 0, -1.0)
            both, key = torch.cat([known, weights], -1), torch.cat([where[:, :, rows], keys], -1)
            both, order = both.topk(k, -1)
            best[:, :, rows], where[:, :, rows] = both, key.gather(-1, order)
        if self.nan_rows_bht is not None:
            where = where.masked_fill(self.nan_rows_bht[..., None], -1)
            best = best.masked_fill(self.nan_rows_bht[..., None], math.nan)
        return Top(best.masked_fill((where < 0) & ~best.isnan(), 0.0), where)

    def above(self, threshold: float) -> SparseRows:
        """Every weight of at least the threshold, as sparse rows."""
        _, H, T, _ = shape = self.rule.shape
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for tile, full in self.tiles():
            weights = self.tile(tile, full)
            b, h, t, s = (weights >= threshold).nonzero(as_tuple=True)
            found.append(((b * H + h) * T + t + tile.t0, s + tile.s0, weights[b, h, t, s]))
        none = self._zeros(dtype=torch.int64).new_zeros(0)
        row = torch.cat([none, *(f[0] for f in found)])
        key = torch.cat([none, *(f[1] for f in found)])
        weight = torch.cat([self.top_bht.new_zeros(0), *(f[2] for f in found)])
        order = (row * max(shape.S, 1) + key).argsort()
        counts = torch.bincount(row, minlength=shape.B * H * T)
        offsets = torch.cat([none.new_zeros(1), counts.cumsum(0)])
        return SparseRows(offsets, key[order], weight[order], shape)

    def map(self, picture: Map) -> Tensor:
        """The mean weight in each cell of a picture of the matrix or of a window, (B, H, X, Y)."""
        t0, t1, s0, s1 = picture.window(self.rule.shape)
        cells = self._zeros(picture.height, picture.width)
        for tile, full in self.tiles(Tile(t0, t1, s0, s1)):
            weights = self.tile(tile, full)
            down = overlap(picture.height, (t0, t1), (tile.t0, tile.t1), weights)
            across = overlap(picture.width, (s0, s1), (tile.s0, tile.s1), weights)
            (x0, x1), (y0, y1) = touched(down), touched(across)
            cells[:, :, x0:x1, y0:y1] += pool(
                weights, down[x0:x1], across[y0:y1], self.nan_rows_bht is not None
            )
        return cells

    def rows(self, wanted: Sequence[int]) -> Tensor:
        """Whole rows of the matrix for chosen queries, (B, H, rows, S)."""
        found = self._zeros(len(wanted), self.rule.shape.S)
        for place, t in enumerate(wanted):
            for tile, full in self.tiles(Tile(t, t + 1, 0, self.rule.shape.S)):
                found[:, :, place, tile.s0 : tile.s1] = self.tile(tile, full)[:, :, 0]
        return found


def visible(rule: Rule, tile: Tile, full: bool, device: torch.device) -> Tensor:
    """Which pairs of a tile may be seen, by mask and by a bias of -inf, (B, H, t, s)."""
    seen = torch.ones((), dtype=torch.bool, device=device)
    if rule.mask is not None and not full:
        seen = rule.mask.block(rule.shape, tile, device)
    if rule.bias is not None:
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
