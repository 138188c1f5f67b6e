"""Keys and values kept from earlier calls, so that each new token is computed once.

Why: a text grows by a token at a time, and the keys of what came before do not change.

How: a layer hands its new keys and values to `update` and attends to what comes back. Where a key
lies is not where it stands, so every key is kept with its position; the layer gives these to its
rules (`mask.at`, `bias.at`). One convention covers padding and empty slots: a negative position is
not there, and nobody sees it. So each row of a batch starts and goes on by itself. What an empty
slot holds does not matter, not even when it is NaN.

- `KVCache.growing()` keeps everything, in order of arrival. Gradients pass through it, where they
  are asked for.
- `KVCache.fixed(size)` is allocated at its first call and written in place: shapes never change, so
  one compiled graph serves every step. Without gradients.
- `KVCache.windowed(left)` is a ring for layers that look `left` keys back: it never holds more than
  these and the newest. Without gradients.
- `CrossCache` holds the keys and values of a memory, which are computed once.

The first call finds nothing kept and gets back just what it brought, so a prompt costs what it
costs without a cache.

Left out: pages shared between rows, quantised keys, going back to an earlier position.

Letters: B batch, G key heads, T new tokens, S kept keys, D and E widths of keys and values. N rows
of positions: B, or 1 while all rows of the batch are alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from regard._check import check_positions, check_shapes


class Kept(NamedTuple):
    """What a layer attends to: keys (B, G, S, D), values (B, G, S, E), the keys' positions (N, S).

    `queries` (N, T) is where the new tokens stand. `in_line`: no slot is empty, keys lie in the
    order of the text, and the last key is the newest token's in every row. Then rules need no
    positions.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    queries: Tensor
    in_line: bool


class KVCache(ABC):
    """Keys and values of one self-attention layer."""

    window: int | None = None
    """How far back a query may look; None is as far as the text goes."""
    in_order: bool
    """Whether keys lie in order of arrival, so that a mask over keys as they lie has a meaning."""

    @staticmethod
    def growing() -> GrowingCache:
        """Keeps everything and grows with the text."""
        return GrowingCache()

    @staticmethod
    def fixed(size: int) -> KVCache:
        """Room for `size` tokens a row, padding counted."""
        from regard.layers.static_cache import FixedCache

        return FixedCache(size)

    @staticmethod
    def windowed(left: int) -> KVCache:
        """For layers whose window reaches `left` keys back."""
        from regard.layers.static_cache import WindowedCache

        return WindowedCache(left)

    @abstractmethod
    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Kept:
        """Keep k (B, G, T, D) and v (B, G, T, E), and give what these tokens may attend to.

        `positions` (T,) or (B, T) is where the tokens stand, negative for padding; the real ones
        grow along a row. None goes on counting, in each row from its own last position.
        """

    @property
    @abstractmethod
    def length(self) -> Tensor | None:
        """How long each row's text is, its next position: (N,); None before the first call."""

    @abstractmethod
    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was; with more or fewer rows, if index has."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything; memory that was allocated stays."""

    def next_positions(self, n: int, device: torch.device) -> Tensor:
        """Positions (N, n) of the next n tokens of each row."""
        if n == 1 and self.length is not None:
            return self.length.to(device)[:, None].clone()
        steps = torch.arange(n, device=device)[None]
        return steps if self.length is None else self.length.to(device)[:, None] + steps

    def _find_positions(self, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        """The positions (N, T) of these keys and values, given or counted on, checked."""
        sizes = check_shapes({"k": (k, "B G T D"), "v": (v, "B G T E")})
        if positions is None:
            positions = self.next_positions(sizes["T"], k.device)
        return as_rows(positions, sizes["B"], sizes["T"]).to(k.device)


@final
class GrowingCache(KVCache):
    """Keeps everything, in order of arrival.

    Where no gradient is asked for, keys are written into memory with room to spare, which grows by
    half when it is full; so a step does not copy all that came before it.
    """

    in_order = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._kept: Kept | None = None
        self._next: Tensor | None = None
        self._room: tuple[Tensor, Tensor] | None = None
        self._line: Tensor | None = None

    @property
    def length(self) -> Tensor | None:
        return self._next

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Kept:
        old = self._kept
        at_nt = self._find_positions(k, v, positions)
        if old is None:
            kept = Kept(k, v, at_nt, at_nt, positions is None)
        else:
            check_fit(old.k, old.v, k, v)
            keys, values = self._append(old, k, v)
            in_line = old.in_line and positions is None
            kept = Kept(keys, values, self._where(old, at_nt, in_line), at_nt, in_line)
        self._kept = kept
        if positions is None and at_nt.shape[1]:
            self._next = at_nt[:, -1] + 1
        else:
            self._next = past_the_last(self._next, at_nt)
        return kept

    def _where(self, old: Kept, at_nt: Tensor, in_line: bool) -> Tensor:
        """The positions of all kept keys; those of a text in line are known beforehand."""
        after = old.positions.shape[1] + at_nt.shape[1]
        if in_line and self._room is not None:
            if self._line is None or self._line.shape[1] < after:
                self._line = torch.arange(self._room[0].shape[2], device=at_nt.device)[None]
            return self._line[:, :after]
        n = max(old.positions.shape[0], at_nt.shape[0])
        return torch.cat((old.positions.expand(n, -1), at_nt.expand(n, -1)), 1)

    def _append(self, old: Kept, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The kept keys and values with the new ones behind them."""
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (old.k, old.v, k, v))
        if tracked or torch.compiler.is_compiling():
            self._room = None
            return torch.cat((old.k, k), 2), torch.cat((old.v, v), 2)
        before, after = old.k.shape[2], old.k.shape[2] + k.shape[2]
        # What inference mode made cannot be written outside of it.
        locked = self._room is not None and self._room[0].is_inference()
        locked = locked and not torch.is_inference_mode_enabled()
        if self._room is None or locked or self._room[0].shape[2] < after:
            size = after + max(after // 2, 64)
            room = [x.new_empty(*x.shape[:2], size, x.shape[3]) for x in (old.k, old.v)]
            for new, kept in zip(room, old[:2], strict=True):
                new[:, :, :before] = kept
            self._room = room[0], room[1]
        for room_x, x in zip(self._room, (k, v), strict=True):
            room_x[:, :, before:after] = x
        return self._room[0][:, :, :after], self._room[1][:, :, :after]

    def reorder(self, index: Tensor) -> None:
        if self._kept is None or self._next is None:
            return
        k, v, positions, queries, in_line = self._kept
        if self._room is None:
            k, v = k.index_select(0, index), v.index_select(0, index)
        else:
            k_room, v_room = (x.index_select(0, index) for x in self._room)
            k, v = (x[:, :, : k.shape[2]] for x in (k_room, v_room))
            self._room = k_room, v_room
        queries = pick_rows(queries, index)
        self._kept = Kept(k, v, pick_rows(positions, index), queries, in_line)
        self._next = pick_rows(self._next, index)


@final
class CrossCache:
    """Keys and values of a memory, computed at the first call and used in all later ones."""

    def __init__(self) -> None:
        self.reset()

    @property
    def filled(self) -> bool:
        """Whether the memory has been seen."""
        return self.k is not None

    def reset(self) -> None:
        """Forget the memory."""
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Keep k (B, G, S, D) and v (B, G, S, E)."""
        check_shapes({"k": (k, "B G S D"), "v": (v, "B G S E")})
        self.k, self.v = k, v

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)


@final
@dataclass(frozen=True, eq=False)
class BlockCache:
    """What one decoder block keeps; `cross_attn` is None without cross-attention."""

    self_attn: KVCache
    cross_attn: CrossCache | None = None


@final
class DecoderCache:
    """What a stack of decoder blocks keeps, block by block."""

    def __init__(self, blocks: Iterable[BlockCache]) -> None:
        self.blocks = tuple(blocks)

    @staticmethod
    def build(n_layers: int, make: Callable[[], KVCache], cross: bool) -> DecoderCache:
        """A cache for each of n blocks, as `make` makes it."""
        return DecoderCache(
            BlockCache(make(), CrossCache() if cross else None) for _ in range(n_layers)
        )

    @property
    def length(self) -> Tensor | None:
        """How long each row's text is so far, (N,); None before the first call."""
        return self.blocks[0].self_attn.length if self.blocks else None

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was, in every block."""
        for part in self._parts():
            part.reorder(index)

    def reset(self) -> None:
        """Forget everything, the memory too."""
        for part in self._parts():
            part.reset()

    def _parts(self) -> list[KVCache | CrossCache]:
        parts: list[KVCache | CrossCache] = []
        for block in self.blocks:
            parts.append(block.self_attn)
            if block.cross_attn is not None:
                parts.append(block.cross_attn)
        return parts


def as_rows(positions: Tensor, n_rows: int, n_new: int) -> Tensor:
    """Positions (T,) or (B, T) as int64 (N, T), N being 1 or B, or why they are no such thing."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor (T,) or (B, T), got {type(positions)}")
    check_positions(positions)
    rows = positions if positions.dim() == 2 else positions[None]
    if rows.shape[1] != n_new or rows.shape[0] not in (1, n_rows):
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}; expected (T,) or (B, T) with "
            f"B={n_rows}, T={n_new}"
        )
    return rows.to(torch.int64)


def past_the_last(next_n: Tensor | None, at_nt: Tensor) -> Tensor:
    """Each row's next position: one past the largest so far."""
    if next_n is None:
        next_n = at_nt.new_zeros(at_nt.shape[0])
    n = max(next_n.shape[0], at_nt.shape[0])
    return torch.cat((next_n.expand(n)[:, None] - 1, at_nt.expand(n, -1)), 1).amax(1) + 1


def pick_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], or the one row that all share."""
    return rows if rows.shape[0] == 1 else rows.index_select(0, index)


def check_fit(old_k: Tensor, old_v: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse keys and values unlike the kept ones."""
    check_shapes({"kept k": (old_k, "B G S D"), "k": (k, "B G T D")})
    check_shapes({"kept v": (old_v, "B G S E"), "v": (v, "B G T E")})
    for name, old, new in (("k", old_k, k), ("v", old_v, v)):
        if old.dtype != new.dtype or old.device != new.device:
            raise TypeError(
                f"{name} is {new.dtype} on {new.device}, but the cache holds {old.dtype} on "
                f"{old.device}; use a new cache"
            )
