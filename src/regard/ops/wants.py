"""What can be asked about the weights (`Wants`), and how it is answered (`Observation`).

Every answer is about the softmax weights, per head, before dropout. With sinks a row sums to less
than one, and `lse` is the logarithm of the whole denominator, the sink's share included. Where a
row sees nothing: weights, entropy, distance and mass are 0, `lse` is -inf (with a sink: its score),
the key of a peak is -1 and its logit -inf. A row that looks at a NaN is NaN, with key -1.

Letters: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from regard.ops.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Map:
    """The matrix of weights, or a window of it, pooled to height × width cells: `Wants(map=...)`.

    Each cell is the exact mean of the area it covers. A cell may cover parts of rows and columns;
    a weight then counts by the part of it that lies in the cell. So any resolution is exact, also
    one that is finer than the matrix.

    Args:
        height: Number of cells along the queries.
        width: Number of cells along the keys.
        queries: (first, past the last) query of the window; None: all of them.
        keys: The same for keys.

    Example:
        >>> x = torch.randn(1, 8, 100, 64)
        >>> wants = regard.Wants(map=regard.Map(height=10, width=10, keys=(0, 50)))
        >>> regard.observe(x, x, x, wants=wants).map.shape
        torch.Size([1, 8, 10, 10])
    """

    height: int
    width: int
    queries: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, ends in (("queries", self.queries), ("keys", self.keys)):
            if ends is not None and not _is_pair(ends):
                raise TypeError(f"{name} of a map must be (first, past the last), got {ends!r}")
        check_whole("a map's height", self.height)
        check_whole("a map's width", self.width)
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
class Received:
    """How the weights that each key receives are summed up: `Wants(received=Received(...))`.

    The answer has one number for each query head and key, (B, H, S). `Received()` is the plain sum
    over all queries. A query that looks at a NaN makes the keys it may see NaN, even where its row
    weight is 0.

    Args:
        rows: A weight for each row, a float tensor (B or 1, H or 1, T); leading axes may be left
            out. What a query gives is multiplied by it, and `by="mean"` divides by the sum of the
            row weights. They may be negative. None: 1 for each row.
        by: "sum", "mean" or "max" over the queries that may see the key. A key that no query may
            see gets 0, as does a mean over row weights that add up to 0. Hidden pairs never count,
            so that a maximum over negative row weights is negative.
        queries: The queries that count: a slice such as slice(-32, None), or (first, past the
            last). None: all of them.

    Example:
        >>> x = torch.randn(1, 8, 100, 64)
        >>> wants = regard.Wants(received=regard.Received(by="mean", queries=slice(-32, None)))
        >>> regard.observe(x, x, None, wants=wants).received.value.shape
        torch.Size([1, 8, 100])
    """

    rows: Tensor | None = None
    by: str = "sum"
    queries: slice | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.by not in ("sum", "mean", "max"):
            raise ValueError(f'by must be "sum", "mean" or "max", got {self.by!r}')
        if self.rows is not None and (
            not isinstance(self.rows, Tensor)
            or not self.rows.is_floating_point()
            or self.rows.dim() not in (1, 2, 3)
        ):
            raise TypeError(
                "rows must be a float tensor (B or 1, H or 1, T), a weight for each query, "
                f"got {_describe(self.rows)}"
            )
        ends = self.queries
        if isinstance(ends, slice):
            if ends.step not in (None, 1):
                raise ValueError(
                    f"queries must be neighbours, got a slice with step {ends.step}; rows with "
                    "zeros leave out single queries"
                )
            ends = (ends.start or 0, ends.stop or 0)
        if ends is not None and not _is_pair(ends):
            raise TypeError(
                "queries must be a slice of whole numbers or (first, past the last), "
                f"got {self.queries!r}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether it is the sum over all queries, each counted alike."""
        return self.rows is None and self.by == "sum" and self.queries is None

    @property
    def unseen(self) -> float:
        """The value of a hidden pair in a sum or maximum; unseen keys are set to 0 at the end."""
        return -math.inf if self.by == "max" else 0.0

    def span(self, T: int) -> tuple[int, int]:
        """The first and past-the-last query that counts, checked against T."""
        if self.queries is None:
            return 0, T
        if isinstance(self.queries, slice):
            # Not by `slice.indices`, which would tie a graph that is being traced to one length.
            first = _count_from(self.queries.start, T, 0)
            last = _count_from(self.queries.stop, T, T)
        else:
            first, last = self.queries
        if not 0 <= first < last <= T:
            raise ValueError(
                f"the queries {self.queries} of Received must not be empty and must lie inside "
                f"T={T} queries"
            )
        return first, last

    def check(self, shape: Shape) -> None:
        """Raise ValueError when this shape has no such queries, or rows do not fit it."""
        self.span(shape.T)
        if self.rows is None:
            return
        sizes = self.rows.shape[::-1]
        fits = zip(sizes[1:], (shape.H, shape.B), strict=False)
        if sizes[0] != shape.T or any(size not in (1, most) for size, most in fits):
            raise ValueError(
                f"rows must be (B or 1, H or 1, T) with B={shape.B}, H={shape.H}, T={shape.T}, "
                f"got shape {tuple(self.rows.shape)}"
            )

    def row_weights(self, like: Tensor) -> Tensor | None:
        """The weights of the rows, (B or 1, H or 1, T, 1), in the type of `like`."""
        if self.rows is None:
            return None
        rows = self.rows.detach().to(like.device, like.dtype)
        return rows[(None,) * (3 - rows.dim())][..., None]

    def answer(
        self, found: Tensor, seen_by: Tensor, row_weight: Tensor | None = None
    ) -> ReceivedAttention:
        """The answer, from the sums or maxima over the queries."""
        if self.by == "max":
            found = found.masked_fill(seen_by == 0, 0.0)
        elif self.by == "mean":
            found = mean_of(found, seen_by if row_weight is None else row_weight)
        return ReceivedAttention(found, seen_by, row_weight, self.by)


@dataclass(frozen=True, kw_only=True, eq=False)
class Wants:
    """What `observe` shall tell about the softmax weights; only what is asked for is computed.

    Each answer is the field of the same name in the `Observation`; shapes below are the answers'.
    Gradients flow through `output`, `lse`, `entropy` and `weights`; backward() through any other
    answer raises an error. Of a row that may see no key, lse and the peak's logit are -inf (lse is
    the sink's score where there is one), keys are -1, and all else is 0.

    Args:
        lse: The logsumexp of each row's scores, in nats, a sink included; (B, H, T).
        entropy: The entropy of each row, in nats; (B, H, T).
        peak: The largest weight of each row, its key and its logit: a `Peak` of three (B, H, T).
        distance: The mean of i - j over each row, how far back it looks in tokens; (B, H, T).
        mass: A bool tensor over the keys, (S,) or (B, S): the sum of each row's weights on the keys
            that are True; (B, H, T).
        received: True: the sum of what each key gets from all queries; a `Received(...)`: a mean, a
            maximum, a weighted sum, or of some queries. `ReceivedAttention` of (B, H, S).
        top: A number k: the k largest weights of each row and their keys, exact, largest first; a
            `Top` of two (B, H, T, k).
        above: A number in (0, 1]: all weights of at least this much, exact; `SparseRows`.
        map: (height, width), or a `Map` of a window: the matrix, mean-pooled; a tensor
            (B, H, height, width).
        rows: Numbers of queries: their whole rows of weights; (B, H, len(rows), S).
        weights: The whole matrix; (B, H, T, S). This alone needs memory for T × S numbers a head.

    Example:
        >>> wants = regard.Wants(entropy=True, peak=True, top=5, map=(64, 64))
    """

    lse: bool = False
    entropy: bool = False
    peak: bool = False
    distance: bool = False
    mass: Tensor | None = None
    received: bool | Received = False
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
            raise TypeError(
                "mass must be a bool tensor over the keys, (S,) or (B, S), "
                f"got {_describe(self.mass)}"
            )
        if not isinstance(self.received, (bool, Received)):
            raise TypeError(
                f"received must be True, False or a Received(...), got {self.received!r}"
            )
        if self.top is not None:
            check_whole("top", self.top)
            if self.top < 1:
                raise ValueError(f"top must be at least 1, got {self.top}")
        if isinstance(self.above, str):
            raise TypeError(f"above must be a number, got {self.above!r}")
        if self.above is not None and not 0.0 < self.above <= 1.0:
            raise ValueError(
                "above must be greater than 0 and at most 1 (a row has at most 1/above such "
                f"weights), got {self.above}"
            )
        if self.rows is not None:
            if not isinstance(self.rows, (Sequence, Set)) or isinstance(self.rows, str):
                raise TypeError(
                    "rows must be a list of whole numbers, the queries wanted, "
                    f"got {_describe(self.rows)}; a tensor or array becomes one by .tolist()"
                )
            for row in self.rows:
                check_whole("each of rows", row)
        if self.map is not None and not isinstance(self.map, Map):
            if not isinstance(self.map, tuple | list) or len(self.map) != 2:
                raise TypeError(f"map must be (height, width) or a Map(...), got {self.map!r}")
            self.picture()

    def picture(self) -> Map | None:
        """The map asked for, as a `Map`; None if there is none."""
        if self.map is None or isinstance(self.map, Map):
            return self.map
        height, width = self.map
        return Map(height=height, width=width)

    def receiving(self) -> Received | None:
        """What is asked about received weights, as a `Received`; None if nothing is."""
        if isinstance(self.received, Received):
            return self.received
        return Received() if self.received else None

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
        asked = self.receiving()
        if asked is not None:
            asked.check(shape)
        outside = [t for t in self.rows or () if not 0 <= t < shape.T]
        if outside:
            raise ValueError(f"rows must lie between 0 and T-1={shape.T - 1}, got {outside[0]}")

    def second_pass(self) -> bool:
        """Whether anything is asked that needs the row sums first."""
        asked = (self.top, self.above, self.map, self.rows)
        return bool(self.received) or any(x is not None for x in asked)

    def first_pass(self) -> bool:
        """Whether anything is asked that is computed along with the row sums."""
        flags = self.lse or self.entropy or self.peak or self.distance
        return flags or self.mass is not None

    def span(self, shape: Shape) -> tuple[int, int]:
        """The first and past-the-last query whose weights the second pass needs."""
        if self.top is not None or self.above is not None:
            return 0, shape.T
        picture, asked = self.picture(), self.receiving()
        ends = [] if picture is None else [picture.window(shape)[:2]]
        ends += [] if asked is None else [asked.span(shape.T)]
        ends += [(t, t + 1) for t in self.rows or ()]
        return min((a for a, _ in ends), default=0), max((z for _, z in ends), default=0)


@dataclass(frozen=True)
class Peak:
    """The largest weight of each row, its key and its logit, each (B, H, T), without gradients.

    `logit` is the row's largest score before the softmax, after scale, softcap, bias and mask, in
    nats; a sink does not count, as it is no key. Of a row that sees nothing the weight is 0, the
    key -1 and the logit -inf.
    """

    weight: Tensor
    key: Tensor
    logit: Tensor | None = None


@dataclass(frozen=True)
class ReceivedAttention:
    """What each key receives, (B, H, S); `Wants(received=...)` asks for it.

    `value` is the sum, mean or maximum, as `by` says; `total` and `mean` are read off a sum.
    `seen_by` counts the queries that may see the key, of those that were asked about; `row_weight`
    is the sum of their row weights, None where no `rows` were given.
    """

    value: Tensor
    seen_by: Tensor
    row_weight: Tensor | None = None
    by: str = "sum"

    @property
    def total(self) -> Tensor:
        """The sum of what the key gets."""
        if self.by != "sum":
            raise AttributeError(
                f'total and mean need Received(by="sum"); this is a {self.by}: read `value`'
            )
        return self.value

    @property
    def mean(self) -> Tensor:
        """The mean over the queries that may see the key; 0 where none may."""
        if self.by == "mean":
            return self.value
        return mean_of(self.total, self.seen_by if self.row_weight is None else self.row_weight)


@dataclass(frozen=True)
class Top:
    """The k largest weights of each row, largest first, and their keys, (B, H, T, k).

    Where fewer keys are visible than asked for, the rest has weight 0 and key -1.
    """

    weight: Tensor
    key: Tensor


@dataclass(frozen=True)
class SparseRows:
    """All weights from a threshold on, as sparse rows (CSR): `Wants(above=...)` asks for them.

    Row r of B · H · T has the entries offsets[r] .. offsets[r + 1] of `key` and `weight`;
    `row(b, h, t)` gives those of one, `to_dense()` the matrix.
    """

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
    """What `observe` returns: the output, and the answer to each want; None where it was not asked.

    `output` is (B, H, T, E). `lse`, `entropy`, `distance` and `mass` are (B, H, T); `peak` is a
    `Peak`, `received` a `ReceivedAttention`, `top` a `Top`, `above` `SparseRows`; `map` is
    (B, H, height, width), `rows` (B, H, n, S) and `weights` (B, H, T, S). `Wants` says what
    each of them means.
    """

    output: Tensor | None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    peak: Peak | None = None
    distance: Tensor | None = None
    mass: Tensor | None = None
    received: ReceivedAttention | None = None
    top: Top | None = None
    above: SparseRows | None = None
    map: Tensor | None = None
    rows: Tensor | None = None
    weights: Tensor | None = None


def check_whole(name: str, value: object) -> None:
    """Raise TypeError for anything but a whole number, which would fail somewhere inside."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt | np.integer):
        raise TypeError(f"{name} must be a whole number, got {value!r}")


def mean_of(total: Tensor, weight: Tensor) -> Tensor:
    """total / weight, and 0 where there is no weight; NaN stays."""
    none = weight == 0
    return (total / weight.masked_fill(none, 1.0)).masked_fill(none & ~total.isnan(), 0.0)


def _count_from(end: int | None, size: int, default: int) -> int:
    """An end of a slice as a number from 0 to size."""
    if end is None:
        return default
    return min(max(end + size if end < 0 else end, 0), size)


def _is_whole(value: object) -> bool:
    """Whether Python accepts it as an index."""
    return hasattr(value, "__index__")


def _is_pair(ends: object) -> TypeGuard[Sequence[int]]:
    """Whether these are two whole numbers."""
    return isinstance(ends, (tuple, list)) and len(ends) == 2 and all(map(_is_whole, ends))


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


class _Refuse(torch.autograd.Function):
    """The identity in forward; backward raises an error that says there is no gradient here."""

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
    """x, detached; if `anchor` requires a gradient, backward() through x raises an error."""
    x = x.detach()
    if not (torch.is_grad_enabled() and anchor.requires_grad):
        return x
    refused: Tensor = _Refuse.apply(x, anchor, name)  # type: ignore[no-untyped-call]
    return refused
