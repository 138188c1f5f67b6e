"""Biases are values: each defines once what it adds to the scores; all other forms follow from it.

The one definition is `add(b, h, i, j, shape, dtype)`, the number added to the score of the query at
position i and the key at position j. The dense tensor (`dense`, `block`) and the FlexAttention
function are derived from it. Biases with learned numbers also define how a gradient of the scores
becomes a gradient of those numbers: `grad_at` and `grad_block` for one tile, `grad_places` and
`grad_join` to combine all tiles. A bias without these can be differentiated by the reference
backend only.

-inf, and the most negative number of the bias's own type, mean "may not look": both are read as
-inf.

`term.py` moves, cuts and lists the tensors that a bias holds.

Letters: B batch, H heads, T queries, S keys. Positions as in `mask.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from regard._check import check_count, check_float, name_kind
from regard.ops.shape import (
    Shape,
    Tile,
    check_broadcast,
    cut,
    indices,
    pick_broadcast,
)
from regard.ops.term import Joined, Placed, Term


class Bias(Term):
    """What is added to the scores, after scale and softcap, before the softmax. Join with `+`.

    A bias of your own is a frozen dataclass that derives from `Bias` and says `add`; see
    CONTRIBUTING.md ("How to add: a bias"). Positions of queries and keys are as in `Mask`.

    Example:
        >>> bias = regard.ALiBi(8) + regard.DenseBias(torch.zeros(100, 100))
    """

    hides = True
    """Whether the bias may be -inf, which hides the pair as a mask does."""
    gives_gradient = False
    """Whether it computes the gradient of its tensors from that of the scores (`grad_at`)."""

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.relative

    def add(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape, dtype: torch.dtype
    ) -> Tensor:
        """The number that is added for head h, the query at position i and the key at position j.

        b (batch), h, i and j are int64 tensors that broadcast against each other; return a tensor
        of type `dtype` that broadcasts with them. shape: the sizes B, H, T, S of the call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it adds")

    def leaves(self) -> list[Tensor]:
        """The float tensors the bias holds, to which gradients may flow."""
        return [t for t in self.tensors() if t.is_floating_point()]

    def grad_at(self, grad_bhts: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
        """The gradient of each leaf from the scores' gradient, for queries at i and keys at j."""
        raise AssertionError(f"{type(self).__name__} gives no gradient by positions")

    def grad_block(self, grad_bhts: Tensor, shape: Shape, tile: Tile) -> list[Tensor]:
        """The gradient of each leaf from the scores' gradient in one tile, before `grad_join`."""
        _, _, i, j = indices(shape, tile, grad_bhts.device)
        return self.grad_at(grad_bhts, i, j)

    def grad_places(self, tile: Tile) -> list[Tile]:
        """The region of each leaf that a tile's gradient belongs to; equal regions are summed."""
        return [Tile(0, 0, 0, 0)] * len(self.leaves())

    def grad_join(self, parts: list[dict[Tile, Tensor]], tiles: Sequence[Tile]) -> list[Tensor]:
        """The whole gradient of each leaf from its sums by region (`grad_places`).

        tiles: all tiles of the matrix. The sums have the scores' dtype and are rounded once, here.
        """
        return [
            next(iter(found.values())).to(leaf) if found else torch.zeros_like(leaf)
            for found, leaf in zip(parts, self.leaves(), strict=True)
        ]

    def block(self, shape: Shape, tile: Tile, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The bias inside one tile, a float tensor that broadcasts to (B, H, t, s)."""
        return self.add(*indices(shape, tile, device), shape, dtype)

    def dense(
        self, shape: Shape, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The whole bias as a float tensor that broadcasts to (B, H, T, S)."""
        self.check(shape)
        return self.block(shape, Tile(0, shape.T, 0, shape.S), torch.device(device), dtype)

    def at(self, queries: Tensor, keys: Tensor | None = None) -> Bias:
        """The same bias with given positions of queries, (T,) or (B, T), and keys, (S,) or (B, S).

        keys=None: the keys have the positions 0 .. S - 1.
        """
        return BiasAt(self, queries, keys)

    def by_distance(self, gaps: Tensor, n_heads: int) -> Tensor:
        """The values of a relative bias at the distances j - i in `gaps`, (H, gaps), float32."""
        h = torch.arange(n_heads, device=gaps.device)[:, None]
        zero, shape = torch.zeros_like(gaps[0]), Shape(1, n_heads, 1, 1)
        numbers = self.add(zero, h, zero, gaps[None], shape, torch.float32)
        return numbers.expand(n_heads, len(gaps))

    def __add__(self, other: Bias) -> Bias:
        if isinstance(other, Tensor):
            raise TypeError("a bias is joined with a bias: write bias + DenseBias(tensor)")
        return Sum(self, other) if isinstance(other, Bias) else NotImplemented


@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """Attention with linear biases: -slope · |i - j|, a slope for each head (Press et al. 2022).

    Args:
        n_heads: The number of query heads H; the slopes are the published ones, from 2^(-8/H) down
            to 2^-8 where H is a power of two.
        slopes: Slopes of your own, a float tensor (H,), instead of n_heads. They get a gradient if
            they require one.

    Example:
        >>> x = torch.randn(1, 8, 100, 64)
        >>> out = regard.attention(x, x, x, mask=regard.Causal(), bias=regard.ALiBi(8))
    """

    n_heads: int | None = None
    slopes: Tensor = field(default=None, kw_only=True)  # type: ignore[assignment]
    axes: ClassVar = {"slopes": "H"}
    relative = True
    hides = False
    gives_gradient = True

    def __post_init__(self) -> None:
        if (self.n_heads is None) == (self.slopes is None):
            raise ValueError(
                "ALiBi takes either the number of heads or slopes=(H,), one of the two"
            )
        if self.slopes is None:
            assert self.n_heads is not None
            object.__setattr__(self, "slopes", alibi_slopes(self.n_heads))
            object.__setattr__(self, "n_heads", None)
        check_float("slopes", self.slopes)
        if self.slopes.dim() != 1:
            raise ValueError(f"slopes must have one axis (H), got shape {tuple(self.slopes.shape)}")

    def to(self, device: torch.device) -> Self:
        """The bias on a device; slopes that need no gradient are copied there only once."""
        slopes = self.slopes
        if torch.compiler.is_compiling() or slopes.device == device:
            return super().to(device)
        if slopes.requires_grad or slopes.is_inference():
            return super().to(device)
        version, copies = self.__dict__.get("_copies", (None, {}))
        if version != slopes._version:
            version, copies = slopes._version, {}
            object.__setattr__(self, "_copies", (version, copies))
        if device not in copies:
            copies[device] = super().to(device)
        return copies[device]  # type: ignore[no-any-return]

    def check(self, shape: Shape) -> None:
        if self.slopes.shape[0] != shape.H:
            raise ValueError(
                f"ALiBi has {self.slopes.shape[0]} slopes, but q has H={shape.H} heads"
            )

    def add(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape, dtype: torch.dtype
    ) -> Tensor:
        return self.slopes.to(device=h.device, dtype=dtype)[h] * -(i - j).abs().to(dtype)

    def grad_at(self, grad_bhts: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
        far = (i - j).abs().to(grad_bhts.dtype)
        return [-(grad_bhts * far).sum((0, 2, 3))]


@dataclass(frozen=True, eq=False)
class RelativeTable(Bias):
    """T5's relative bias: a learned number for each bucket of distances j - i and each head.

    Small distances have a bucket each, larger ones share buckets of logarithmic width, and all
    from max_distance on have the last.

    Args:
        table: The numbers, a float tensor (n_buckets, H); it gets a gradient if it requires one.
        bidirectional: True: half of the buckets are for later keys (encoders). False: later keys
            share bucket 0 (decoders).
        max_distance: The distance from which on all share one bucket.

    Example:
        >>> table = torch.nn.Parameter(torch.zeros(32, 8))
        >>> bias = regard.RelativeTable(table)
    """

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128
    axes: ClassVar = {"table": "buckets H"}
    relative = True
    gives_gradient = True

    def __post_init__(self) -> None:
        check_float("table", self.table)
        if self.table.dim() != 2:
            raise ValueError(f"table must be (n_buckets, H), got shape {tuple(self.table.shape)}")
        check_buckets(self.table.shape[0], self.bidirectional, self.max_distance)

    def check(self, shape: Shape) -> None:
        if self.table.shape[1] != shape.H:
            raise ValueError(
                f"table must be (n_buckets, H) with H={shape.H}, got {tuple(self.table.shape)}"
            )

    def _bucket(self, i: Tensor, j: Tensor) -> Tensor:
        return t5_bucket(j - i, self.bidirectional, self.table.shape[0], self.max_distance)

    def add(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape, dtype: torch.dtype
    ) -> Tensor:
        return self.table.to(device=h.device, dtype=dtype)[self._bucket(i, j), h]

    def grad_at(self, grad_bhts: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
        bucket_b1ts = self._bucket(i, j)[(None,) * (4 - (i - j).dim())]
        grad_bhts = grad_bhts.sum_to_size(bucket_b1ts.shape[0], *grad_bhts.shape[1:])
        grad_nh = grad_bhts.movedim(1, -1).flatten(0, -2)
        zero = torch.zeros_like(self.table, dtype=grad_bhts.dtype, device=grad_bhts.device)
        return [zero.index_add(0, bucket_b1ts.reshape(-1), grad_nh)]


@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """A bias given as a tensor. `attention(..., bias=t)` is short for `bias=DenseBias(t)`.

    -inf, and the lowest number of its dtype, hide the key, as a mask does. The tensor gets a
    gradient if it requires one.

    Args:
        values: A float tensor that broadcasts to (B, H, T, S).

    Example:
        >>> bias = regard.DenseBias(torch.randn(8, 100, 100))  # a number for each head and pair
    """

    values: Tensor
    axes: ClassVar = {"values": "B H T S"}
    follows_keys = True
    gives_gradient = True

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor):
            raise TypeError(
                "a bias must be a float tensor, or a Bias such as ALiBi(n_heads); got "
                f"{name_kind(self.values)}"
            )
        if self.values.dtype == torch.bool:
            raise TypeError("a bool tensor is a mask, not a bias: mask=Dense(t), True = may look")
        check_float("bias", self.values)

    def check(self, shape: Shape) -> None:
        check_broadcast("bias", self.values, shape)

    def add(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape, dtype: torch.dtype
    ) -> Tensor:
        return lowest_as_inf(pick_broadcast(self.values, (b, h, i - shape.offset, j)), dtype)

    def block(self, shape: Shape, tile: Tile, device: torch.device, dtype: torch.dtype) -> Tensor:
        return lowest_as_inf(cut(self.values, tile).to(device), dtype)

    def grad_block(self, grad_bhts: Tensor, shape: Shape, tile: Tile) -> list[Tensor]:
        return [grad_bhts.sum_to_size(cut(self._four(), tile).shape)]

    def _four(self) -> Tensor:
        return self.values[(None,) * (4 - self.values.dim())]

    def grad_places(self, tile: Tile) -> list[Tile]:
        four = self._four()
        rows = (0, 0) if four.shape[-2] == 1 else (tile.t0, tile.t1)
        return [Tile(*rows, *((0, 0) if four.shape[-1] == 1 else (tile.s0, tile.s1)))]

    def grad_join(self, parts: list[dict[Tile, Tensor]], tiles: Sequence[Tile]) -> list[Tensor]:
        (found,), four = parts, self._four()
        if not found:
            return [torch.zeros_like(self.values)]
        like, rows = next(iter(found.values())), dict[tuple[int, int], list[Tensor]]()
        for place in sorted({self.grad_places(tile)[0] for tile in tiles}):
            part = found.get(place)
            if part is None:
                part = like.new_zeros(cut(four, place).shape)
            rows.setdefault((place.t0, place.t1), []).append(part)
        whole = torch.cat([torch.cat(band, -1) for band in rows.values()], -2)
        return [whole.reshape(self.values.shape).to(self.values)]


@dataclass(frozen=True, eq=False)
class BiasAt(Placed, Bias):
    """A bias at explicit positions of queries and of keys, as a KV cache has them."""

    inner: Bias
    queries: Tensor
    keys: Tensor | None = None
    positional = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inner.positional:
            raise ValueError(
                f"{type(self.inner).__name__} counts rows and keys by their index in memory, not "
                "by position; give positions to the other biases alone: bias.at(queries, keys) + "
                f"{type(self.inner).__name__}(...)"
            )

    @property
    def hides(self) -> bool:  # type: ignore[override]
        return self.inner.hides

    @property
    def gives_gradient(self) -> bool:  # type: ignore[override]
        return self.inner.gives_gradient

    def add(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape, dtype: torch.dtype
    ) -> Tensor:
        return self.inner.add(b, h, *self.positions(b, i, j, shape), shape, dtype)

    def grad_block(self, grad_bhts: Tensor, shape: Shape, tile: Tile) -> list[Tensor]:
        b, _, i, j = indices(shape, tile, grad_bhts.device)
        return self.inner.grad_at(grad_bhts, *self.positions(b, i, j, shape))


@dataclass(frozen=True, eq=False)
class Sum(Joined, Bias):
    """Two biases added."""

    one: Bias
    other: Bias

    def parts(self) -> tuple[Bias, ...]:  # type: ignore[override]
        return self.one, self.other

    @property
    def hides(self) -> bool:  # type: ignore[override]
        return self.one.hides or self.other.hides

    @property
    def gives_gradient(self) -> bool:  # type: ignore[override]
        return self.one.gives_gradient and self.other.gives_gradient

    def add(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape, dtype: torch.dtype
    ) -> Tensor:
        return self.one.add(b, h, i, j, shape, dtype) + self.other.add(b, h, i, j, shape, dtype)

    def block(self, shape: Shape, tile: Tile, device: torch.device, dtype: torch.dtype) -> Tensor:
        one, other = (x.block(shape, tile, device, dtype) for x in (self.one, self.other))
        return one + other

    def grad_block(self, grad_bhts: Tensor, shape: Shape, tile: Tile) -> list[Tensor]:
        return self.one.grad_block(grad_bhts, shape, tile) + self.other.grad_block(
            grad_bhts, shape, tile
        )

    def grad_at(self, grad_bhts: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
        return self.one.grad_at(grad_bhts, i, j) + self.other.grad_at(grad_bhts, i, j)

    def grad_places(self, tile: Tile) -> list[Tile]:
        return self.one.grad_places(tile) + self.other.grad_places(tile)

    def grad_join(self, parts: list[dict[Tile, Tensor]], tiles: Sequence[Tile]) -> list[Tensor]:
        n = len(self.one.leaves())
        return self.one.grad_join(parts[:n], tiles) + self.other.grad_join(parts[n:], tiles)


def lowest_as_inf(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in another dtype, with the lowest numbers of their own dtype read as -inf.

    Numbers at or below bfloat16's lowest count too, since masks made in bfloat16 are often widened.
    """
    floor = max(torch.finfo(values.dtype).min, torch.finfo(torch.bfloat16).min)
    return values.to(dtype).masked_fill(values <= floor, -math.inf)


def alibi_slopes(n_heads: int) -> Tensor:
    """The published slopes, (H,) float32: 2^(-8/n), its square, its cube, ... for n a power of two.

    Other counts take those of the next lower power of two, then every second one of the next
    higher.
    """
    if isinstance(n_heads, Tensor) or not hasattr(n_heads, "__index__"):
        raise TypeError(
            f"n_heads must be a whole number, got {type(n_heads).__name__}; slopes of your own are "
            "given by name, ALiBi(slopes=t)"
        )
    check_count("n_heads", n_heads)
    lower = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (k + 1) / lower) for k in range(lower)]
    slopes += [2 ** (-4 * (2 * k + 1) / lower) for k in range(n_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32)


def check_buckets(n_buckets: int, bidirectional: bool, max_distance: int) -> None:
    """Raise ValueError for counts from which T5's buckets cannot be built."""
    exact = n_buckets // (4 if bidirectional else 2)
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"n_buckets={n_buckets} and max_distance={max_distance} make no buckets: expected "
            f"at least {4 if bidirectional else 2} buckets and a max_distance above {max(exact, 1)}"
        )


def t5_bucket(
    distance: Tensor, bidirectional: bool = True, n_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """The bucket of each distance j - i: one each for near ones, then by logarithm.

    With `bidirectional` the upper half of the buckets is for later keys; without, later keys share
    bucket 0.
    """
    check_buckets(n_buckets, bidirectional, max_distance)
    side = torch.zeros_like(distance)
    if bidirectional:
        n_buckets //= 2
        side = (distance > 0).to(distance.dtype) * n_buckets
        far = distance.abs()
    else:
        far = (-distance).clamp(min=0)
    exact = n_buckets // 2
    # The original's order of float32 operations, so that the edges of buckets are the same.
    ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    log_bucket = exact + (ratio * (n_buckets - exact)).to(distance.dtype)
    return side + torch.where(far < exact, far, log_bucket.clamp(max=n_buckets - 1))
