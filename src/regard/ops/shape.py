"""Sizes and tiles of a call, and how the tensors of masks and biases are indexed.

Masks and biases hold small tensors (lengths, document ids, tables). Each has one definition, which
is evaluated on whole grids, on tiles, and inside FlexAttention on single indices; the functions
here pick the right entries in all three cases. The `check_*` functions check the tensors from which
masks and biases are made.

Letters: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

from typing import NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from regard._check import is_one

Ints: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"
Bools: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]"


class Shape(NamedTuple):
    """The sizes a rule is applied to."""

    B: int
    H: int
    T: int
    S: int

    @property
    def offset(self) -> int:
        """Position of the first query: the last query sits on the last key."""
        return self.S - self.T


class Tile(NamedTuple):
    """Query rows t0..t1 and keys s0..s1 of the matrix, ends excluded, of all samples."""

    t0: int
    t1: int
    s0: int
    s1: int

    @property
    def samples(self) -> slice | None:
        """The samples that the tile covers; None: all."""
        return None


class SampleTile(Tile):
    """A tile of the samples b0..b1 alone."""

    _samples: slice

    @classmethod
    def of(cls, tile: Tile, b0: int, b1: int) -> Self:
        part = cls(*tile)
        part._samples = slice(b0, b1)
        return part

    @property
    def samples(self) -> slice:
        return self._samples


def indices(
    shape: Shape, tile: Tile, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices b, h, i, j of a tile, shaped to broadcast to (B, H, t, s); i is a position."""
    b = of_samples(torch.arange(shape.B, device=device), tile).view(-1, 1, 1, 1)
    h = torch.arange(shape.H, device=device).view(-1, 1, 1)
    return b, h, *positions(shape, tile, device)


def positions(shape: Shape, tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions i and j of the queries and keys of a tile, shaped to broadcast to (t, s)."""
    first = tile.t0 + shape.offset
    i = torch.arange(first, first + tile.t1 - tile.t0, device=device).view(-1, 1)
    return i, torch.arange(tile.s0, tile.s1, device=device)


def cut(tensor: Tensor, tile: Tile) -> Tensor:
    """The tile of a tensor that broadcasts to (..., T, S); axes of size one stay."""
    if tensor.dim() >= 1 and tensor.shape[-1] != 1:
        tensor = tensor[..., tile.s0 : tile.s1]
    if tensor.dim() >= 2 and tensor.shape[-2] != 1:
        tensor = tensor[..., tile.t0 : tile.t1, :]
    return of_samples(tensor, tile) if tensor.dim() == 4 else tensor


def of_samples(values: Tensor, tile: Tile) -> Tensor:
    """The entries of a tensor (B, ...) or (1, ...) for the samples of a tile."""
    if tile.samples is None or values.shape[0] == 1:
        return values
    return values[tile.samples]


def pick_batch(values: Tensor, b: Tensor) -> Tensor:
    """values[b] for values (B,), or (1,) shared by all samples."""
    values = values.to(b.device, torch.int64)
    return values[0] if is_one(values.shape[0]) else values[b]


def pick_axis(values: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """values[b, x] for values (B, X), or values[x] for (X,) and (1, X)."""
    values = values.to(b.device, torch.int64)
    if values.dim() == 2 and not is_one(values.shape[0]):
        return values[b, x]
    return values.reshape(-1)[x]


def pick_broadcast(values: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    """values[b, h, t, j] for values that broadcast to (B, H, T, S)."""
    values = values.to(where[0].device)
    used = where[len(where) - values.dim() :]
    zero = torch.zeros((), dtype=torch.int64, device=values.device)
    places = [zero if is_one(size) else x for x, size in zip(used, values.shape, strict=True)]
    return values[tuple(places)] if places else values


def spans(values: Tensor, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Minimum and maximum of values (X,) or (B, X) in each run first..last, as (B or 1, runs)."""
    rows = values.detach().cpu().numpy()
    rows = (rows[None] if rows.ndim == 1 else rows).astype(np.int64)
    if not len(first):
        return np.zeros((len(rows), 0), np.int64), np.zeros((len(rows), 0), np.int64)
    low = np.stack([rows[:, a : z + 1].min(1) for a, z in zip(first, last, strict=True)], 1)
    high = np.stack([rows[:, a : z + 1].max(1) for a, z in zip(first, last, strict=True)], 1)
    return low, high


def count_pairs(seen: Bools, t0: Ints, t1: Ints, s0: Ints, s1: Ints) -> Ints:
    """How many entries of seen (T or 1, S or 1) are true in each tile, as (rows, columns)."""
    if seen.shape[0] == 1:
        t0, t1 = np.zeros_like(t0), np.ones_like(t1)
    if seen.shape[1] == 1:
        s0, s1 = np.zeros_like(s0), np.ones_like(s1)
    rows = [seen[a:z].sum(0, dtype=np.int64) for a, z in zip(t0, t1, strict=True)]
    sums = np.cumsum(np.stack(rows), 1) if rows else np.zeros((0, seen.shape[1]), np.int64)
    sums = np.concatenate([np.zeros((len(sums), 1), np.int64), sums], 1)
    return np.asarray(sums[:, s1] - sums[:, s0], np.int64)


def fits(have: int, want: int) -> bool:
    """Whether an axis of this size broadcasts to the other without growing it."""
    return is_one(have) or have == want


def check_counts(name: str, values: object) -> None:
    """Raise TypeError for anything but a tensor of whole numbers."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor of whole numbers, got {type(values).__name__}")
    if values.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name} must hold whole numbers (int64 or int32), got {values.dtype}")


def check_batch(name: str, values: Tensor, shape: Shape) -> None:
    """Raise ValueError unless values have one number per sample, (B,) or (1,)."""
    if values.dim() != 1 or not fits(values.shape[0], shape.B):
        raise ValueError(f"{name} must be (B,) with B={shape.B}, got shape {tuple(values.shape)}")


def check_axis(name: str, values: Tensor, letter: str, shape: Shape) -> None:
    """Raise ValueError unless values are (T,) or (B, T); (S,) or (B, S) where `letter` is S."""
    size = getattr(shape, letter)
    right = values.shape[-1:] == (size,) and (
        values.dim() == 1 or (values.dim() == 2 and fits(values.shape[0], shape.B))
    )
    if not right:
        raise ValueError(
            f"{name} must be ({letter},) or (B, {letter}) with B={shape.B}, {letter}={size}, "
            f"got shape {tuple(values.shape)}"
        )


def check_broadcast(name: str, values: Tensor, shape: Shape) -> None:
    """Raise ValueError unless a tensor broadcasts to (B, H, T, S) without growing it."""
    given = tuple(values.shape)
    if len(given) > 4 or not all(map(fits, given[::-1], shape[::-1])):
        raise ValueError(
            f"{name} must broadcast to (B, H, T, S) = {tuple(shape)}, got shape {given}"
        )
