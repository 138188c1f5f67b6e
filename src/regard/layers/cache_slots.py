"""The slots of a KV cache: the token position of each slot, and the slot mapping of a call.

Why: a key's slot in memory is not its position in the text. All layers of a stack cache the same
tokens, so positions and slots are computed once per call, at the top, and only read below.

How: `advance` adds the tokens of a call and returns a `Step`: their positions, the positions of
all keys they attend to, and the slots of a static buffer into which the new keys are written. A
negative position is padding or an empty slot, to which no query attends.

- `GrowingSlots`: one slot per token, in order of arrival. As long as the caller gives no positions
  they are 0, 1, 2, ..., and none are stored.
- `FixedSlots`: a fixed number of slots, filled in order and written in place, so that one compiled
  graph serves every step.
- `RingSlots`: the token at position p is stored in slot p mod (left + 1), so that no more is kept
  than a window can see.

Letters: B batch, T new tokens, S keys. N rows of positions: B, or 1 while all rows are alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import NamedTuple, final

import torch
from torch import Tensor

from regard._check import check_count, check_positions, name_kind, readable
from regard._torch import assert_async


class Step(NamedTuple):
    """What the caches of all layers need to know about the tokens of one call.

    `queries` (N, T) are their positions, `keys` (N, S) the positions of all keys they attend to,
    `slots` (N, T) the slots of static buffers that they are written to. `first`: the cache was
    empty before. `in_line`: no slot is empty, keys are in the order of the text, and the last key
    is the newest token's in every row, so that masks and biases need no explicit positions.
    """

    queries: Tensor
    keys: Tensor
    slots: Tensor | None
    first: bool
    in_line: bool


class Slots(ABC):
    """The positions of the keys in a KV cache."""

    window: int | None = None  # how many keys back a query may attend; None: no limit
    n_slots: int | None = None  # slots of a static buffer; None where the buffer grows
    n_read: int | None = None  # how many of these slots, from the first on, are read
    evicted = False  # whether keys were evicted: the true positions of the others are then unknown
    _keys: Tensor | None = None
    _next: Tensor | None = None
    _started = False

    @property
    def kind(self) -> Hashable:
        """Caches whose slots are of equal `kind` may share one `Slots` object."""
        return type(self), self.n_slots

    @property
    def length(self) -> Tensor | None:
        """The length of each row's text, which is its next position: (N,); None while empty."""
        return self._next if self._started else None

    def next_positions(self, n: int, device: torch.device) -> Tensor:
        """Positions (N, n) of the next n tokens of each row."""
        if (length := self.length) is None:
            return torch.arange(n, device=device)[None]
        first_n1 = length.to(device)[:, None]
        return first_n1.clone() if n == 1 else first_n1 + torch.arange(n, device=device)

    def advance(
        self, batch: int, n_new: int, device: torch.device, positions: Tensor | None
    ) -> Step:
        """Add n_new tokens per row. `positions` (T,) or (B, T) are theirs, negative for padding;
        those of real tokens increase along a row. None: each row continues its own count."""
        if positions is None:
            return self._take(self.next_positions(n_new, device), batch, True)
        return self._take(as_rows(positions, batch, n_new).to(device), batch, False)

    @abstractmethod
    def _take(self, queries: Tensor, batch: int, counted: bool) -> Step:
        """Add tokens at positions (N, T). `counted`: they continue the count, none were given."""

    @abstractmethod
    def reorder(self, index: Tensor) -> None:
        """Replace row b by the old row index[b]; there are then as many rows as index has."""

    def evict(self, n: int) -> None:
        """Keep n keys per row; which ones may differ between heads. The next token's position does
        not change, and the kept keys get the n positions just before it."""
        raise ValueError(
            "keys cannot be evicted from a fixed or windowed cache; use KVCache.growing()"
        )

    @abstractmethod
    def reset(self) -> None:
        """Empty the slots; allocated memory is kept."""


@final
class GrowingSlots(Slots):
    """One slot per token, in order of arrival."""

    _n_keys = 0
    _in_line = True
    _line: Tensor | None = None
    _device: torch.device

    def reset(self) -> None:
        self._n_keys, self._in_line, self._started = 0, True, False
        self._keys = self._next = None
        self.evicted = False

    def evict(self, n: int) -> None:
        length, before = self.length, self._n_keys
        if length is None or not 0 < n <= before:
            raise ValueError(
                f"keep is {n}, but the cache holds {before} keys; expected 1 to {before}"
            )
        if self._keys is not None and bool((self._keys < 0).any()):
            raise ValueError(
                "the cache holds padding, which cannot be told from tokens once each head keeps "
                "other keys; evict from rows of one length, or from one row at a time"
            )
        self._keys = length[:, None] - n + torch.arange(n, device=length.device)
        self._n_keys, self._next, self._in_line, self.evicted = n, length.clone(), False, True

    @property
    def length(self) -> Tensor | None:
        if not self._in_line or not self._started:
            return self._next
        return self._count(self._n_keys, self._n_keys + 1, self._device)[0]

    def next_positions(self, n: int, device: torch.device) -> Tensor:
        if self._in_line:
            return self._count(self._n_keys, self._n_keys + n, device)
        return super().next_positions(n, device)

    def _take(self, queries: Tensor, batch: int, counted: bool) -> Step:
        first, before, device = not self._started, self._n_keys, queries.device
        after = before + queries.shape[1]
        if self._in_line and counted:
            keys = self._count(0, after, device)
        else:
            old, last = self._keys, self._next
            if self._in_line:
                old, last = self._count(0, before, device), None if first else self.length
            assert old is not None
            keys = join_rows(old, queries)
            self._in_line, self._keys, self._next = False, keys, past_the_last(last, queries)
        self._n_keys, self._started, self._device = after, True, device
        return Step(queries, keys, None, first, self._in_line)

    def reorder(self, index: Tensor) -> None:
        # A single row of positions holds for the whole batch.
        if self._keys is not None and self._next is not None and self._keys.shape[0] > 1:
            self._keys, self._next = (x.index_select(0, index) for x in (self._keys, self._next))

    def _count(self, start: int, stop: int, device: torch.device) -> Tensor:
        """start .. stop - 1 as (1, n): a slice of a longer range, which is kept for later calls."""
        if torch.compiler.is_compiling():
            return torch.arange(start, stop, device=device)[None]
        line = self._line
        if line is None or line.shape[1] < stop or line.device != device:
            # A tensor made in inference mode could not be used everywhere outside of it.
            with torch.inference_mode(False):
                self._line = line = torch.arange(stop + max(stop // 2, 64), device=device)[None]
        return line[:, start:stop]


class StaticSlots(Slots):
    """A fixed number of slots, written in place: the base of `FixedSlots` and `RingSlots`."""

    n_slots: int
    n_read: int

    def reset(self) -> None:
        self._started = False
        if self._keys is not None and self._next is not None:
            self._keys = writable(self._keys).fill_(-1)
            self._next = writable(self._next).zero_()

    def reorder(self, index: Tensor) -> None:
        if self._keys is not None and self._next is not None and self._keys.shape[0] > 1:
            self._keys, self._next = reorder_in_place((self._keys, self._next), index)

    def _take(self, queries: Tensor, batch: int, counted: bool) -> Step:
        first = not self._started
        keys, last = self._find_rows(queries, batch)
        slots = self._map(queries, last)
        read = queries if first else keys[:, : self.n_read]
        if not first and self.window is not None and queries.shape[1] > 1:
            read = join_rows(read, queries)
        n = keys.shape[0]
        keys.scatter_(1, slots.expand(n, -1), queries.expand(n, -1))
        last.copy_(past_the_last(last, queries))
        self._started = True
        return Step(queries, read, slots, first, first and counted)

    def _find_rows(self, queries: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Positions of the slots (N, S) and next positions (N,), with N no less than in queries."""
        keys, last, n = self._keys, self._next, queries.shape[0]
        usable = keys is not None and (
            self._started or (keys.device == queries.device and keys.shape[0] in (n, batch))
        )
        if keys is None or last is None or not usable:
            keys = torch.full((1, self.n_slots), -1, dtype=torch.int64, device=queries.device)
            last = torch.zeros_like(keys[:, 0])
        if n > keys.shape[0]:
            keys, last = keys.expand(n, -1).clone(), last.expand(n).clone()
        self._keys, self._next = keys, last = writable(keys), writable(last)
        return keys, last

    @abstractmethod
    def _map(self, queries: Tensor, last: Tensor) -> Tensor:
        """The slots (N, T) into which tokens at these positions are written."""


@final
class FixedSlots(StaticSlots):
    """`size` slots per row, filled in order of arrival; padding takes a slot too.

    A call with more tokens than free slots raises. Where reading the count would synchronize with a
    device or break a compiled graph, this is torch's asynchronous assertion, with the same message.
    """

    def __init__(self, size: int) -> None:
        check_count("size", size)
        self.n_slots = self.n_read = size
        self._used: Tensor | None = None

    def reset(self) -> None:
        super().reset()
        if self._used is not None:
            self._used = writable(self._used).zero_()

    def _map(self, queries: Tensor, last: Tensor) -> Tensor:
        n_new, device, size = queries.shape[1], queries.device, self.n_slots
        if self._used is None or self._used.device != device:
            self._used = torch.zeros((), dtype=torch.int64, device=device)
        self._used = used = writable(self._used)
        words = f"a fixed cache of size {size} has no room for {n_new} more tokens"
        advice = "; make it larger, or reset() it for a new text"
        if not self._started and n_new > size:
            raise ValueError(f"{words}: it is empty{advice}")
        slots_t = used + torch.arange(n_new, device=device)
        if device.type == "cpu" and readable(used):
            if int(used) + n_new > size:
                raise ValueError(f"{words}: {int(used)} slots are taken{advice}")
        else:
            assert_async(used + n_new <= size, words + advice)
            # A graph may write before it asserts: clamped slots keep that write within bounds.
            slots_t = slots_t.clamp(max=size - 1)
        used += n_new
        return slots_t[None]


@final
class RingSlots(StaticSlots):
    """`left` + 1 slots per row: the token at position p is stored in slot p mod (left + 1).

    Padding is not kept, so it never overwrites a real token: it is written to one extra slot behind
    the ring, which is never read. A call with several tokens attends to the ring as it was before
    the call, followed by these tokens, since the first of them still needs keys that the last ones
    overwrite. A call with one token attends to the ring alone.
    """

    def __init__(self, left: int) -> None:
        if left != 0:
            check_count("left", left)
        self.window, self.n_read, self.n_slots = left, left + 1, left + 2

    def _map(self, queries: Tensor, last: Tensor) -> Tensor:
        size = self.n_read
        newest_n1 = past_the_last(last, queries)[:, None] - 1
        stays = (queries >= 0) & (queries > newest_n1 - size)
        return torch.where(stays, queries % size, size)


def as_rows(positions: Tensor, n_rows: int, n_new: int) -> Tensor:
    """Check positions (T,) or (B, T) and return them as int64 (N, T), where N is 1 or B."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor (T,) or (B, T), got {name_kind(positions)}")
    check_positions(positions)
    rows = positions if positions.dim() == 2 else positions[None]
    if rows.shape[1] != n_new or rows.shape[0] not in (1, n_rows):
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}; expected (T,) or (B, T) with "
            f"B={n_rows}, T={n_new}"
        )
    return rows.to(torch.int64)


def as_they_lie(at_nt: Tensor) -> bool:
    """Whether every row is 0, 1, 2, ..., so that masks and biases need no explicit positions.

    True only where reading values is cheap, on a CPU; a needless False is slower, but not wrong.
    """
    if at_nt.device.type != "cpu" or not readable(at_nt):
        return False
    return bool((at_nt == torch.arange(at_nt.shape[1])).all())


def join_rows(one_ns: Tensor, other_nt: Tensor) -> Tensor:
    n = max(one_ns.shape[0], other_nt.shape[0])
    return torch.cat((one_ns.expand(n, -1), other_nt.expand(n, -1)), 1)


def past_the_last(next_n: Tensor | None, at_nt: Tensor) -> Tensor:
    """Each row's next position: one past the largest so far."""
    if next_n is None:
        next_n = at_nt.new_zeros(at_nt.shape[0])
    return join_rows(next_n[:, None] - 1, at_nt).amax(1) + 1


def writable(x: Tensor) -> Tensor:
    """x, or a copy of an inference tensor, which cannot be written outside of inference mode."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return x
    return x.clone() if x.is_inference() else x


def reorder_in_place(pair: tuple[Tensor, Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors with row b replaced by row index[b]; in place if the number of rows is equal."""
    one, other = (x.index_select(0, index) for x in pair)
    if one.shape != pair[0].shape:
        return one, other
    return writable(pair[0]).copy_(one), writable(pair[1]).copy_(other)
