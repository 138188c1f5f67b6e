"""What may be asked about the weights (`Wants`), and how the answers come (`Observation`).

Every answer is about the softmax weights, per head, before dropout. With sinks a row sums to less
than one, and `lse` is the logarithm of the whole denominator, the sink's share included. Where a
row sees nothing: weights, entropy, distance and mass are 0, `lse` is -inf (with a sink: its score),
and the key of a peak is -1. A row that looks at a NaN is NaN, with key -1.

Letters: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.ops.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Map:
    """A picture of the matrix or a window of it; each cell is the exact mean of its area.

    A cell may cover parts of rows and keys: each weight counts by the part of it that lies in the
    cell, so any resolution is exact, also one finer than the matrix. `queries` and `keys` are
    (first, past the last).
    """

    height: int
    width: int
    queries: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"a map needs at least 1 × 1 cells, got {self.height} × {self.width}")

    def window(self, shape: Shape) -> tuple[int, int, int, int]:
        """t0, t1, s0, s1 of the window, checked against the shape."""
        t0, t1 = self.queries if self.queries is not None else (0, shape.T)
        s0, s1 = self.keys if self.keys is not None else (0, shape.S)
        if not (0 <= t0 < t1 <= shape.T and 0 <= s0 < s1 <= shape.S):
            raise ValueError(
                f"the map's window, queries {t0}..{t1} and keys {s0}..{s1}, must not be empty "
                f"and must lie inside T={shape.T} queries and S={shape.S} keys"
            )
        return t0, t1, s0, s1


@dataclass(frozen=True, kw_only=True, eq=False)
class Wants:
    """What to tell about the weights; nothing unless asked.

    lse, entropy (nats), peak, distance (mean of i - j), received: flags.
    mass: a bool tensor over the keys, (S,) or (B, S): the weight each row puts on them together.
    top: how many of the largest weights of each row. above: every weight of at least this much.
    map: (height, width), or a `Map` of any window. rows: the queries whose whole rows are wanted.
    weights: the whole matrix, T × S for every head.
    Gradients flow through the output, lse, entropy and weights; the others refuse one.
    """

    lse: bool = False
    entropy: bool = False
    peak: bool = False
    distance: bool = False
    mass: Tensor | None = None
    received: bool = False
    top: int | None = None
    above: float | None = None
    map: tuple[int, int] | Map | None = None
    rows: Sequence[int] | None = None
    weights: bool = False

    def __post_init__(self) -> None:
        if self.mass is not None and (
            not isinstance(self.mass, Tensor)
            or self.mass.dtype != torch.bool
            or self.mass.dim() not in (1, 2)
        ):
            raise TypeError("mass must be a bool tensor over the keys, (S,) or (B, S)")
        if self.top is not None and self.top < 1:
            raise ValueError(f"top must be at least 1, got {self.top}")
        if self.above is not None and not 0.0 < self.above <= 1.0:
            raise ValueError(
                "above must lie over 0 and at most at 1 (a row has at most 1/above such weights), "
                f"got {self.above}"
            )

    def picture(self) -> Map | None:
        """The map asked for, in its full form."""
        if self.map is None or isinstance(self.map, Map):
            return self.map
        height, width = self.map
        return Map(height=height, width=width)

    def check(self, shape: Shape) -> None:
        """Raise ValueError when something is asked that this shape does not have."""
        if self.mass is not None and (
            self.mass.shape[-1] != shape.S or self.mass.shape[:-1] not in ((), (1,), (shape.B,))
        ):
            raise ValueError(
                f"mass must be (S,) or (B, S) with B={shape.B}, S={shape.S}, "
                f"got shape {tuple(self.mass.shape)}"
            )
        picture = self.picture()
        if picture is not None:
            picture.window(shape)
        outside = [t for t in self.rows or () if not 0 <= t < shape.T]
        if outside:
            raise ValueError(f"rows must lie between 0 and T-1={shape.T - 1}, got {outside[0]}")

    def second_pass(self) -> bool:
        """Whether anything is asked that needs the row sums first."""
        asked = (self.top, self.above, self.map, self.rows)
        return self.received or any(x is not None for x in asked)


@dataclass(frozen=True)
class Peak:
    """The largest weight of each row and its key, (B, H, T); key -1 where nothing is seen."""

    weight: Tensor
    key: Tensor


@dataclass(frozen=True)
class Received:
    """What each key gets from all queries, (B, H, S), and how many queries could see it."""

    total: Tensor
    seen_by: Tensor

    @property
    def mean(self) -> Tensor:
        """Per query that may see the key; 0 where none may."""
        return self.total / self.seen_by.clamp(min=1)


@dataclass(frozen=True)
class Top:
    """The k largest weights of each row, largest first, and their keys, (B, H, T, k).

    Where fewer keys are visible than asked for, the rest has weight 0 and key -1.
    """

    weight: Tensor
    key: Tensor


@dataclass(frozen=True)
class SparseRows:
    """Every weight over a threshold: row r of B · H · T owns entries offsets[r]..offsets[r + 1]."""

    offsets: Tensor
    key: Tensor
    weight: Tensor
    shape: Shape

    def row(self, b: int, h: int, t: int) -> tuple[Tensor, Tensor]:
        """Keys and weights of one row, by key."""
        _, H, T, _ = self.shape
        r = (b * H + h) * T + t
        a, z = int(self.offsets[r]), int(self.offsets[r + 1])
        return self.key[a:z], self.weight[a:z]

    def to_dense(self) -> Tensor:
        """The matrix with zeros for what is under the threshold, (B, H, T, S)."""
        B, H, T, S = self.shape
        counts = self.offsets[1:] - self.offsets[:-1]
        row = torch.repeat_interleave(torch.arange(B * H * T, device=counts.device), counts)
        flat = torch.zeros(B * H * T * S, dtype=self.weight.dtype, device=self.weight.device)
        flat[row * S + self.key] = self.weight
        return flat.view(B, H, T, S)


@dataclass(frozen=True)
class Observation:
    """The output, and what was asked about the weights; None where it was not asked."""

    output: Tensor | None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    peak: Peak | None = None
    distance: Tensor | None = None
    mass: Tensor | None = None
    received: Received | None = None
    top: Top | None = None
    above: SparseRows | None = None
    map: Tensor | None = None
    rows: Tensor | None = None
    weights: Tensor | None = None


class _Refuse(torch.autograd.Function):
    """The identity forward; backward says that there is no gradient here."""

    @staticmethod
    def forward(x: Tensor, anchor: Tensor, name: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        ctx.name = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        raise RuntimeError(
            f"`{ctx.name}` has no gradient: gradients flow through output, lse, entropy and "
            f"weights. Use `{ctx.name}.detach()` where none is meant, or build it from `weights`"
        )


def without_gradient(x: Tensor, anchor: Tensor, name: str) -> Tensor:
    """x, refusing a gradient in words wherever one would be asked of `anchor`."""
    x = x.detach()
    if not (torch.is_grad_enabled() and anchor.requires_grad):
        return x
    refused: Tensor = _Refuse.apply(x, anchor, name)  # type: ignore[no-untyped-call]
    return refused
