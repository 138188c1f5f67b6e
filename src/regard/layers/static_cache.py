"""Caches of a set size, written in place: the fixed one and the ring of a window.

Why: where shapes never change, one compiled graph serves every step, and a window never costs more
than it sees.

How: keys and values lie in slots; a ledger says which position stands in which slot, -1 for none.
All layers of a stack keep the same tokens, so one of them, the leader, keeps the ledger for all,
and a step writes it once.

Left out: gradients, which memory that is overwritten cannot give.

Letters: B batch, G key heads, T new tokens, S slots, D and E widths of keys and values. N rows of
positions: B, or 1 while all rows of the batch are alike.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from regard._check import check_count, readable
from regard.layers.cache import Kept, KVCache, check_fit, past_the_last


class Turn(NamedTuple):
    """Where the tokens of one call go: positions (N, T), slots (N, T), and what the first call is.

    `first`: nothing was kept before. `counted`: positions were not given, they go on by themselves.
    """

    at: Tensor
    slots: Tensor
    first: bool
    counted: bool


class SlotCache(KVCache):
    """Memory of a set size, written in place; what the fixed and the windowed cache share.

    The layers of a stack keep the same tokens in the same slots. `leader`, the cache of an earlier
    layer, then does the bookkeeping for all: this one writes keys and values where it wrote.
    """

    in_order = False
    n_slots: int

    def __init__(self, leader: SlotCache | None) -> None:
        self._leader = leader
        self._memory: tuple[Tensor, Tensor] | None = None
        self._ledger: Ledger | None = None
        self._turn: Turn | None = None
        self._started = False

    @property
    def _head(self) -> SlotCache:
        return self if self._leader is None else self._leader

    @property
    def length(self) -> Tensor | None:
        head = self._head
        return head._ledger.next if head._ledger is not None and head._started else None

    def reset(self) -> None:
        self._started = False
        if self._ledger is not None:
            self._ledger.clear()

    def reorder(self, index: Tensor) -> None:
        if self._memory is not None:
            self._memory = reorder_in_place(self._memory, index)
        if self._ledger is not None:
            self._ledger.reorder(index)

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Kept:
        refuse_gradient(k, v)
        if self._leader is None:
            at_nt = self._find_positions(k, v, positions)
            self._turn = self._take_turn(at_nt, positions is None, k.shape[0])
        turn = self._head._turn
        assert turn is not None, "the leader comes first"
        memory = self._memory
        if memory is None or (turn.first and not fits(memory, k, v)):
            memory = make_memory(k, v, self.n_slots)
        check_fit(*memory, k, v)
        kept = self._answer(memory, k, v, turn)
        write_slots(memory, k, v, turn.slots)
        self._memory = memory
        return kept

    def _start_ledger(self, at_nt: Tensor, batch: int) -> tuple[Ledger, bool]:
        """The bookkeeping in use, with a row for each row of the positions; and if this is new."""
        first = not self._started
        ledger = self._ledger
        if ledger is None or (first and not ledger.suits(at_nt, batch)):
            ledger = Ledger.empty(self.n_slots, at_nt.device)
        self._ledger, self._started = ledger.with_rows(at_nt.shape[0]), True
        return self._ledger, first

    @abstractmethod
    def _take_turn(self, at_nt: Tensor, counted: bool, batch: int) -> Turn:
        """Find slots for tokens at these positions, and write them down."""

    @abstractmethod
    def _answer(self, memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor, turn: Turn) -> Kept:
        """What the tokens of this turn attend to, before they are written."""


@final
class FixedCache(SlotCache):
    """Room for `size` tokens a row, written in order of arrival; padding takes a slot too.

    More tokens than there is room for are refused. Where reading the count would stop a device or a
    compiled graph, the refusal is torch's asynchronous assertion, with the same words.
    """

    def __init__(self, size: int, leader: FixedCache | None = None) -> None:
        check_count("size", size)
        super().__init__(leader)
        self.size = self.n_slots = size
        self._used: Tensor | None = None

    def reset(self) -> None:
        super().reset()
        if self._used is not None:
            self._used.zero_()

    def _take_turn(self, at_nt: Tensor, counted: bool, batch: int) -> Turn:
        n_new = at_nt.shape[1]
        if self._used is None or self._used.device != at_nt.device:
            self._used = torch.zeros((), dtype=torch.int64, device=at_nt.device)
        slots_1t = self._find_room(self._used, n_new, not self._started)[None]
        ledger, first = self._start_ledger(at_nt, batch)
        ledger.write(at_nt, slots_1t)
        self._used += n_new
        return Turn(at_nt, slots_1t, first, counted)

    def _find_room(self, used: Tensor, n_new: int, first: bool) -> Tensor:
        """The slots of the next tokens, (T,), or why there are none."""
        words = f"a fixed cache of size {self.size} has no room for {n_new} more tokens"
        advice = "; make it larger, or reset() it for a new text"
        if first and n_new > self.size:
            raise ValueError(f"{words}: it is empty{advice}")
        slots_t = used + torch.arange(n_new, device=used.device)
        if used.device.type == "cpu" and readable(used):
            if int(used) + n_new > self.size:
                raise ValueError(f"{words}: {int(used)} slots are taken{advice}")
            return slots_t
        torch._assert_async(used + n_new <= self.size, words + advice)
        # A graph may write before it asserts; a slot that is there lets the assertion speak.
        return slots_t.clamp(max=self.size - 1)

    def _answer(self, memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor, turn: Turn) -> Kept:
        if turn.first:
            return Kept(k, v, turn.at, turn.at, turn.counted)
        ledger = self._head._ledger
        assert ledger is not None
        return Kept(*memory, ledger.positions, turn.at, False)


@final
class WindowedCache(SlotCache):
    """A ring of `left` + 1 slots a row: the token at position p lies in slot p mod (left + 1).

    Padding is not kept, so it never pushes a real token out. A call with several tokens is answered
    with the ring as it was and the new tokens behind it, since the first of them looks furthest
    back; a call with one token with the ring alone. Memory is one slot more, where padding goes.
    """

    def __init__(self, left: int, leader: WindowedCache | None = None) -> None:
        if left != 0:
            check_count("left", left)
        super().__init__(leader)
        self.window: int = left
        # What is not kept is written to the slot behind the ring, which is never read.
        self.n_slots = left + 2
        self._before: Tensor | None = None

    def _take_turn(self, at_nt: Tensor, counted: bool, batch: int) -> Turn:
        ledger, first = self._start_ledger(at_nt, batch)
        size = self.window + 1
        if at_nt.shape[1] > 1 and not first:
            self._before = ledger.positions[:, :size].clone()
        last_n1 = past_the_last(ledger.next, at_nt)[:, None] - 1
        stays = (at_nt >= 0) & (at_nt > last_n1 - size)
        slots_nt = torch.where(stays, at_nt % size, size)
        ledger.write(at_nt, slots_nt)
        return Turn(at_nt, slots_nt, first, counted)

    def _answer(self, memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor, turn: Turn) -> Kept:
        if turn.first:
            return Kept(k, v, turn.at, turn.at, turn.counted)
        size, head = self.window + 1, self._head
        k_ring, v_ring = (x[:, :, :size] for x in memory)
        assert isinstance(head, WindowedCache) and head._ledger is not None
        if k.shape[2] == 1:
            # Views, which show what is about to be written.
            return Kept(k_ring, v_ring, head._ledger.positions[:, :size], turn.at, False)
        before = head._before
        assert before is not None
        n = max(before.shape[0], turn.at.shape[0])
        where = torch.cat((before.expand(n, -1), turn.at.expand(n, -1)), 1)
        k_all, v_all = torch.cat((k_ring, k), 2), torch.cat((v_ring, v), 2)
        return Kept(k_all, v_all, where, turn.at, False)


@dataclass(eq=False)
class Ledger:
    """What stands in which slot: positions (N, S), -1 where none does, and the next ones (N,)."""

    positions: Tensor
    next: Tensor

    @staticmethod
    def empty(size: int, device: torch.device) -> Ledger:
        """No slot is taken."""
        positions = torch.full((1, size), -1, dtype=torch.int64, device=device)
        return Ledger(positions, torch.zeros_like(positions[:, 0]))

    def suits(self, at_nt: Tensor, batch: int) -> bool:
        """Whether it is on the device of these positions and has as many rows, or the batch's."""
        known = self.positions
        return known.device == at_nt.device and known.shape[0] in (at_nt.shape[0], batch)

    def with_rows(self, n: int) -> Ledger:
        """The same with at least n rows."""
        if n <= self.positions.shape[0]:
            return self
        return Ledger(self.positions.expand(n, -1).clone(), self.next.expand(n).clone())

    def write(self, at_nt: Tensor, slots_nt: Tensor) -> None:
        """Put the positions `at_nt` into `slots_nt`, in place."""
        n = self.positions.shape[0]
        self.positions.scatter_(1, slots_nt.expand(n, -1), at_nt.expand(n, -1))
        self.next.copy_(past_the_last(self.next, at_nt))

    def clear(self) -> None:
        """No slot is taken any more."""
        self.positions.fill_(-1)
        self.next.zero_()

    def reorder(self, index: Tensor) -> None:
        """Row b as row index[b] was."""
        if self.positions.shape[0] > 1:
            self.positions, self.next = reorder_in_place((self.positions, self.next), index)


def make_memory(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Slots for keys and values like these."""
    k_room, v_room = (x.new_zeros(*x.shape[:2], size, x.shape[3]) for x in (k, v))
    return k_room, v_room


def fits(memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> bool:
    """Whether keys and values like these can be written here."""
    return all(
        (old.shape[:2], old.shape[3], old.dtype, old.device)
        == (new.shape[:2], new.shape[3], new.dtype, new.device)
        for old, new in zip(memory, (k, v), strict=True)
    )


def write_slots(memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor, slots_nt: Tensor) -> None:
    """Put keys and values into their slots, in place."""
    for room, x in zip(memory, (k, v), strict=True):
        if slots_nt.shape[0] == 1:
            room.index_copy_(2, slots_nt[0], x)
        else:
            room.scatter_(2, slots_nt[:, None, :, None].expand_as(x), x)


def reorder_in_place(pair: tuple[Tensor, Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
    """Row b of both as row index[b] was, in the same memory where the number of rows stays."""
    one, other = (x.index_select(0, index) for x in pair)
    if one.shape != pair[0].shape:
        return one, other
    pair[0].copy_(one)
    pair[1].copy_(other)
    return pair


def refuse_gradient(k: Tensor, v: Tensor) -> None:
    """Memory that is written in place has no gradient to give."""
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ValueError(
            "this cache is written in place and carries no gradient: call the model under "
            "torch.no_grad(), or use KVCache.growing()"
        )
