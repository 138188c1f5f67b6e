"""The masks: causal, window, padding, packing, prefix, and any that is given as a tensor.

Each has one definition (`allows`), and methods that say what is known without evaluating every pair
(`bounds`, `interval`, `window`); `mask.py` says what these mean and how masks are joined. `True`
means: this query may look at this key.

Letters: B batch, H heads, T queries, S keys; positions i of queries and j of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from regard._check import name_kind, readable
from regard.ops.mask import Bounds, Box, Mask
from regard.ops.shape import (
    Shape,
    Tile,
    check_axis,
    check_batch,
    check_broadcast,
    check_counts,
    count_pairs,
    cut,
    of_samples,
    pick_axis,
    pick_batch,
    pick_broadcast,
    spans,
)


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """No query looks at a later key.

    Args:
        align: Where queries stand if there are not as many as keys. "end": the last query sits on
            the last key, as in decoding with a KV cache. "start": the first query sits on the first
            key, as torch's `is_causal` has it.

    Example:
        >>> q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 5, 8)  # queries 3 and 4 of 5 tokens
        >>> out = regard.attention(q, k, k, mask=regard.Causal())
    """

    align: str = "end"
    relative = True
    positional = True
    from_first = True

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.align == "end"

    def __post_init__(self) -> None:
        if self.align not in ("end", "start"):
            raise ValueError(f'align must be "end" or "start", got {self.align!r}')

    def _shift(self, shape: Shape) -> int:
        return 0 if self.align == "end" else shape.offset

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        return j <= i - self._shift(shape)

    def bounds(self, box: Box) -> Bounds:
        shift = self._shift(box.shape)
        return Bounds(box.j_lo <= box.i_hi - shift, box.j_hi <= box.i_lo - shift)

    def window(self) -> tuple[int | None, int | None] | None:
        return (None, 0) if self.align == "end" else None

    def window_in(self, shape: Shape) -> tuple[int | None, int | None]:
        return None, -self._shift(shape)

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(i), i + (1 - self._shift(shape))

    def is_causal_flag(self, shape: Shape) -> bool:
        return shape.T == shape.S or self.align == "start"

    def hides_nothing(self, shape: Shape) -> bool:
        return shape.T == 1 and self.align == "end"


ENDLESS = 2**62
"""A window's side counts as open from here on, so that sums with positions fit into 64 bits."""


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """A sliding window: the query at position i sees the keys i - left .. i + right.

    Its own key comes on top of both sides, so that `Window(0, 0)` sees one key; a model with a
    "sliding window of 4096" that counts it has `Window(4095, 0)`.

    Args:
        left: How many keys before its own a query sees; None: all of them.
        right: How many keys after its own a query sees; None: all of them.

    Example:
        >>> mask = regard.Window(256, 0)  # causal and local: the 256 tokens before, and itself
    """

    left: int | None
    right: int | None
    relative = True
    positional = True
    sees_itself = True

    @property
    def from_first(self) -> bool:  # type: ignore[override]
        return self.left is None

    def __post_init__(self) -> None:
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not None and (not isinstance(side, int) or side < 0):
                raise ValueError(
                    f"{name} must be None (open) or a whole number from 0 (itself only) on, "
                    f"got {side!r}"
                )
            if side is not None and side >= ENDLESS:
                object.__setattr__(self, name, None)

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        seen = j == j if self.left is None else j >= i - self.left
        return seen if self.right is None else seen & (j <= i + self.right)

    def window(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    def hides_nothing(self, shape: Shape) -> bool:
        behind = self.left is None or self.left >= shape.S - 1
        return behind and (self.right is None or self.right >= shape.T - 1)

    def bounds(self, box: Box) -> Bounds:
        nearest, farthest = box.j_lo - box.i_hi, box.j_hi - box.i_lo
        maybe = np.ones(nearest.shape, np.bool_)
        surely = maybe.copy()
        if self.left is not None:
            maybe, surely = maybe & (farthest >= -self.left), surely & (nearest >= -self.left)
        if self.right is not None:
            maybe, surely = maybe & (nearest <= self.right), surely & (farthest <= self.right)
        return Bounds(maybe, surely)

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        lo = torch.zeros_like(i) if self.left is None else i - self.left
        hi = torch.full_like(i, shape.S) if self.right is None else i + self.right + 1
        return lo, hi


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Padding: of sample b only `lengths[b]` keys are real, and only these are seen.

    It speaks of keys alone: a query that is itself padding gets an output like any other, which
    nobody needs.

    Args:
        lengths: How many keys of each sample are real, whole numbers, (B,).
        side: Where the padding lies: "right" (the first keys are real) or "left" (the last are).

    Example:
        >>> mask = regard.Causal() & regard.Lengths(torch.tensor([7, 3]))  # texts of 7 and 3 tokens
    """

    lengths: Tensor
    side: str = "right"
    axes: ClassVar = {"lengths": "B"}

    @property
    def from_first(self) -> bool:  # type: ignore[override]
        return self.side == "right"

    def __post_init__(self) -> None:
        check_counts("lengths", self.lengths)
        if self.lengths.dim() != 1:
            raise ValueError(f"lengths must have one axis (B), got {tuple(self.lengths.shape)}")
        if self.side not in ("right", "left"):
            raise ValueError(f'side must be "right" or "left", got {self.side!r}')

    def check(self, shape: Shape) -> None:
        check_batch("lengths", self.lengths, shape)
        # On another device reading the values would synchronise with its stream.
        if self.lengths.device.type == "cpu" and readable(self.lengths) and self.lengths.numel():
            values = self.lengths.tolist()
            low, high = min(values), max(values)
            if low < 0 or high > shape.S:
                raise ValueError(
                    f"lengths must lie between 0 and S={shape.S}, got values from {low} to {high}"
                )

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        count = pick_batch(self.lengths, b)
        return j < count if self.side == "right" else j >= shape.S - count

    def block(self, shape: Shape, tile: Tile, device: torch.device) -> Tensor:
        j = torch.arange(tile.s0, tile.s1, device=device)
        lengths = of_samples(self.lengths, tile)
        count = lengths.to(device, torch.int64).view(-1, 1, 1, 1)
        return j < count if self.side == "right" else j >= shape.S - count

    def bounds(self, box: Box) -> Bounds:
        if not readable(self.lengths) or not self.lengths.numel():
            return super().bounds(box)
        low, high = int(self.lengths.min()), int(self.lengths.max())
        if self.side == "right":
            maybe, surely = box.j_lo < high, box.j_hi < low
        else:
            maybe, surely = box.j_hi >= box.shape.S - high, box.j_lo >= box.shape.S - low
        rows = np.ones(box.i_lo.shape, np.bool_)
        return Bounds(maybe & rows, surely & rows)

    def span(self, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
        count = self.lengths.to(device, torch.int64)
        if self.side == "right":
            return torch.zeros_like(count), count
        return shape.S - count, torch.full_like(count, shape.S)

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        lo, hi = self.span(shape, i.device)
        rows = torch.zeros_like(i)
        return lo[:, None] + rows, hi[:, None] + rows


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first n keys, and no others.

    Args:
        n: The number of keys, or a tensor with one number for each sample, (B,).

    Example:
        >>> mask = regard.Causal() | regard.Prefix(10)  # a prefix language model
    """

    n: int | Tensor
    axes: ClassVar = {"n": "B"}
    positional = True
    from_first = True

    def __post_init__(self) -> None:
        if isinstance(self.n, Tensor):
            check_counts("n", self.n)
        elif not isinstance(self.n, int) or self.n < 0:
            raise ValueError(
                f"n must be a whole number from 0 on, or one a sample (B,), got {self.n!r}"
            )

    def check(self, shape: Shape) -> None:
        if isinstance(self.n, Tensor):
            check_batch("n", self.n, shape)

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        return j < (pick_batch(self.n, b) if isinstance(self.n, Tensor) else self.n)

    def bounds(self, box: Box) -> Bounds:
        low = high = self.n
        if isinstance(self.n, Tensor):
            if not readable(self.n) or not self.n.numel():
                return super().bounds(box)
            low, high = int(self.n.min()), int(self.n.max())
        rows = np.ones(box.i_lo.shape, np.bool_)
        return Bounds((box.j_lo < high) & rows, (box.j_hi < low) & rows)

    def span(self, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
        if isinstance(self.n, Tensor):
            hi = self.n.to(device, torch.int64).clamp(max=shape.S)
        else:
            hi = torch.full((1,), min(self.n, shape.S), dtype=torch.int64, device=device)
        return torch.zeros_like(hi), hi

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        first = torch.zeros_like(i)
        if isinstance(self.n, int):
            return first, torch.full_like(i, min(self.n, shape.S))
        return first, self.span(shape, i.device)[1][:, None] + first


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packing: several texts lie in one row, and a query sees only the keys of its own text.

    Args:
        ids: The document of each key, whole numbers, (S,) or (B, S). Equal numbers are one
            document; the numbers mean nothing else.
        query_ids: The document of each query, (T,) or (B, T). None: that of the key it sits on.

    Example:
        >>> ids = torch.tensor([0, 0, 0, 1, 1])  # a text of three tokens, and one of two
        >>> mask = regard.Causal() & regard.Documents(ids)
    """

    ids: Tensor
    query_ids: Tensor | None = None
    axes: ClassVar = {"ids": "B S", "query_ids": "B T"}

    @property
    def follows_keys(self) -> bool:  # type: ignore[override]
        return self.query_ids is not None

    def with_own_queries(self) -> Documents:
        return self if self.query_ids is not None else Documents(self.ids, self.ids)

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        return self.query_ids is None

    def __post_init__(self) -> None:
        for name, ids in (("ids", self.ids), ("query_ids", self.query_ids)):
            if ids is None:
                continue
            check_counts(name, ids)
            if ids.dim() not in (1, 2):
                raise ValueError(f"{name} must be (S,) or (B, S), got shape {tuple(ids.shape)}")

    def check(self, shape: Shape) -> None:
        check_axis("ids", self.ids, "S", shape)
        if self.query_ids is not None:
            check_axis("query_ids", self.query_ids, "T", shape)
        elif shape.T > shape.S:
            raise ValueError(
                f"Documents needs query_ids when there are more queries (T={shape.T}) than keys "
                f"(S={shape.S}): a query takes the id of the key it sits on"
            )

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        keys = pick_axis(self.ids, b, j)
        if self.query_ids is None:
            return pick_axis(self.ids, b, i) == keys
        return pick_axis(self.query_ids, b, i - shape.offset) == keys

    def pair_ids(self, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
        """The document ids of the queries, (B or 1, T), and of the keys, (B or 1, S)."""
        keys = self.ids.to(device, torch.int64)
        queries = keys[..., shape.offset :] if self.query_ids is None else self.query_ids.to(keys)
        return queries[None] if queries.dim() == 1 else queries, (
            keys[None] if keys.dim() == 1 else keys
        )

    def bounds(self, box: Box) -> Bounds:
        queries = self.ids if self.query_ids is None else self.query_ids
        if not readable(self.ids, queries) or not self.ids.numel() or not queries.numel():
            return super().bounds(box)
        shift = 0 if self.query_ids is None else box.shape.offset
        q_lo, q_hi = spans(queries, box.i_lo[:, 0] - shift, box.i_hi[:, 0] - shift)
        k_lo, k_hi = spans(self.ids, box.j_lo[0], box.j_hi[0])
        q_lo, q_hi, k_lo, k_hi = q_lo[:, :, None], q_hi[:, :, None], k_lo[:, None], k_hi[:, None]
        overlap = (q_lo <= k_hi) & (k_lo <= q_hi)
        one = (q_lo == q_hi) & (k_lo == k_hi) & (q_lo == k_lo)
        return Bounds(np.asarray(overlap.any(0)), np.asarray(one.all(0)))

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
        if self.query_ids is not None or not readable(self.ids) or not self.ids.numel():
            return None
        ids = self.ids.cpu().numpy()
        ids = ids[None] if ids.ndim == 1 else ids
        lo, hi = np.zeros_like(ids, np.int64), np.zeros_like(ids, np.int64)
        for row, (starts, ends) in zip(ids, zip(lo, hi, strict=True), strict=True):
            edges = np.flatnonzero(np.diff(row)) + 1
            first, past = np.r_[0, edges], np.r_[edges, len(row)]
            if len(np.unique(row[first])) != len(first):
                return None
            starts[:], ends[:] = np.repeat(first, past - first), np.repeat(past, past - first)
        rows = slice(shape.offset, None)
        return torch.from_numpy(lo[:, rows]).to(i), torch.from_numpy(hi[:, rows]).to(i)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A mask given as a tensor. `attention(..., mask=t)` is short for `mask=Dense(t)`.

    The other masks cost less: they need no memory for the matrix, and whole tiles are skipped.

    Args:
        seen: A bool tensor that broadcasts to (B, H, T, S). True: this query may look at this key.

    Example:
        >>> mask = regard.Dense(torch.tensor([[True, False], [True, True]])) & regard.Causal()
    """

    seen: Tensor
    axes: ClassVar = {"seen": "B H T S"}
    follows_keys = True

    def __post_init__(self) -> None:
        if not isinstance(self.seen, Tensor) or self.seen.dtype != torch.bool:
            expected = (
                "a mask must be a bool tensor (True = this query may look at this key), or a Mask "
                "such as Causal()"
            )
            if not isinstance(self.seen, Tensor):
                raise TypeError(f"{expected}; got {name_kind(self.seen)}")
            raise TypeError(
                f"{expected}; got {self.seen.dtype}. A float tensor added to the scores is a bias: "
                "bias=DenseBias(t)"
            )

    def check(self, shape: Shape) -> None:
        check_broadcast("mask", self.seen, shape)

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        return pick_broadcast(self.seen, (b, h, i - shape.offset, j))

    def block(self, shape: Shape, tile: Tile, device: torch.device) -> Tensor:
        return cut(self.seen.to(device), tile)

    def bounds(self, box: Box) -> Bounds:
        if not readable(self.seen) or not self.seen.numel():
            return super().bounds(box)
        seen = self.seen.cpu()
        seen = seen.expand(*(1,) * (4 - seen.dim()), *seen.shape).flatten(0, 1)
        some, every = seen.any(0).numpy(), seen.all(0).numpy()
        t0, t1 = box.i_lo[:, 0] - box.shape.offset, box.i_hi[:, 0] - box.shape.offset + 1
        edges = (t0, t1, box.j_lo[0], box.j_hi[0] + 1)
        return Bounds(count_pairs(some, *edges) > 0, count_pairs(~every, *edges) == 0)
