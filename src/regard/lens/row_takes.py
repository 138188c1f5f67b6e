"""Which rows of the batch are recorded, and which earlier calls a call continues.

How: each place has, for each recorded row, a list of takes, one for each text. A call is added to
the take whose keys it extends, or opens a new one (`stitch_calls.py`). The first call of a batch of
texts, all of which are recorded, is measured for all of them at once. Finished texts may leave the
batch during generation; a recorded row is then found again by its keys. Rows that are reordered in
the batch, as beams are, are refused.

Letters: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from regard.lens.by_identity import ByIdentity
from regard.lens.captured_call import Call
from regard.lens.cuda_graphs import Replays
from regard.lens.device_to_host import HostCopier, is_large
from regard.lens.extras import Extras
from regard.lens.head_scores import NamedSpots
from regard.lens.look_at_calls import look
from regard.lens.mask_runs import FoundRuns, Seen, find_seen
from regard.lens.measure import rule_key
from regard.lens.stitch_calls import Fit, OneText, Queries, Step, Take
from regard.ops import Wants

MOST_TEXTS = 16
"""Texts for which the data that layers share is cached; or four times the recorded rows."""
MOST_TAKES = 256
"""The most places per module, since a training loop is not meant to be watched."""


@dataclass(frozen=True)
class Located:
    """The place that a call belongs to: its name and its layer."""

    name: str
    layer: int


@dataclass(eq=False)
class Inputs:
    """The inputs of one call of the model: its batch size, and the last token ids it looked up."""

    n_inputs: int | None = None
    ids_bt: Tensor | None = None


@dataclass(frozen=True)
class Chosen:
    """What is recorded of each place: measurements, queries and keys, rows, heads, extras."""

    wants: Wants
    keep: str
    rows: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    extras: frozenset[str] = frozenset()


class RowTakes:
    """The takes of all places, by name and row, and in the order in which they were opened."""

    def __init__(self, chosen: Chosen, copier: HostCopier, extras: Extras) -> None:
        self.chosen, self.copier, self.extras = chosen, copier, extras
        self.rows, self.heads = chosen.rows, chosen.heads
        self.takes: dict[str, list[Take]] = {}
        self.order: list[Take] = []
        self.remarks: dict[str, None] = {}
        self._read, self._entry = Inputs(), 0
        self.n_passes = 0
        """How often the model has begun to run."""
        # The batch rows where each recorded row is now, if rows have left the batch; empty if it
        # left too.
        self._moved: dict[int, tuple[int, ...]] = {}
        self._seen: dict[Any, tuple[Any, Seen]] = {}
        # Every layer comes with all rows again: what is cached for a row must last until then.
        self._most = max(MOST_TEXTS, 4 * len(self.rows or ()))
        self._replays, self._named = Replays(self._most), NamedSpots(self._most)
        self._queries, self._texts = ByIdentity[Queries](self._most), ByIdentity[Tensor](self._most)

    def knows(self, call: Call) -> bool:
        """Whether the place of a call has been recorded before."""
        return any(self.takes.get(self._key(call, row)) for row in self.rows or (0,))

    def take(self, call: Call, found: Located | None, read: Inputs, entry: int) -> bool:
        """Record a call; return whether it was. If `found` is None, it may only continue a take.

        entry: the number of the module's run that the call belongs to.
        """
        if not call.shape.T or not call.shape.S:
            return False
        if self._read is not read:
            self._read = read
            self._moved.clear()
        self._entry = entry
        rows = self._rows_of(call)
        if found is not None and self._are_new(call, rows) and self._take_texts(call, found):
            return True
        return any([self._take_row(call, found, row) for row in rows])

    def drop(self, name: str) -> None:
        """Discard everything that was recorded of a module."""
        for key in [key for key in self.takes if key == name or key.startswith(f"{name}[")]:
            for take in self.takes.pop(key):
                self.order.remove(take)

    def clear(self) -> None:
        """Discard everything that was recorded."""
        self.takes.clear()
        self.order.clear()
        self._replays.clear()

    def rows_now(self) -> dict[int, int]:
        """The recorded rows, and the row of the batch in which each is now."""
        rows = self.rows or (0,)
        return {row: now for row in rows for now in self._moved.get(row, (row,))}

    def _rows_of(self, call: Call) -> tuple[int, ...]:
        """The rows of a call that are recorded."""
        B = call.shape.B
        if call.is_row or (self.rows is None and B == 1):
            return (0,)
        n_inputs = self._read.n_inputs
        if self.rows is not None:
            if n_inputs is not None and 1 < n_inputs < B and B % n_inputs == 0:
                self.remarks[
                    f"{call.name} attends in {B} rows, and the first axis of what the model was "
                    f"given has {n_inputs}: if these are its inputs, a row is one window of all"
                ] = None
            return self.rows
        if self._read.n_inputs == 1:
            self.remarks[
                f"{call.name} sees its input in {B} windows, and the record has the first; "
                "watch(model, row=...) names others"
            ] = None
            return (0,)
        raise ValueError(
            f"the batch has {B} rows; say which to record: watch(model, row=0), or several, "
            "row=[0, 1]"
        )

    def _key(self, call: Call, row: int) -> str:
        return call.name if self.rows is None or len(self.rows) == 1 else f"{call.name}[{row}]"

    def _are_new(self, call: Call, rows: tuple[int, ...]) -> bool:
        """Whether a call reads new texts from their start, and all of its rows are recorded."""
        if rows != tuple(range(call.shape.B)) or len(rows) == 1 or call.is_step or self._moved:
            return False
        if self.heads is not None and not all(0 <= h < call.shape.H for h in self.heads):
            return False
        known = [take for row in rows for take in self.takes.get(self._key(call, row), ())]
        return all(take.entry == self._entry and call.shape.T > 1 for take in known)

    def _take_texts(self, call: Call, found: Located) -> bool:
        """Record the first call of all texts of a batch; False if each has to be measured alone."""
        whole = call if self.extras.wants_values else replace(call, v=None)
        batch = whole.of(None, self.heads)
        seen = self.see(batch)
        if batch.sinks is not None or None in seen.runs:
            return False
        opened: list[tuple[Take, Step]] = []
        for row, runs in enumerate(seen.runs):
            ids = self._ids(call.shape.B, row, call.shape.T)
            take = self._open(call, whole, found, row)
            opened.append((take, take.begin(Fit(batch.of(row, None), 0, runs), ids)))
        steps = [step for _, step in opened]
        asked = steps[0].asked._replace(ahead=any(step.asked.ahead for step in steps))
        spots = self._named.join([step.queries.spots for step in steps if step.queries is not None])
        measured = look(seen.simplify(batch), asked, spots, self._replays)
        for row, (take, step) in enumerate(opened):
            take.end(step, {name: x[row] for name, x in measured.items()})
            self.extras.follow(take, whole, row)
        # Copied to the host together: each copy takes the host longer than the device.
        names = [n for n in opened[0][0].first_call() if n in measured and is_large(measured[n])]
        copies = self.copier.copy({name: measured[name] for name in names}, final=True)
        for row, (take, _) in enumerate(opened):
            take.early = OneText(copies, row)
        return True

    def _open(self, call: Call, whole: Call, found: Located, row: int) -> Take:
        """A new take for a row of the batch."""
        key = self._key(call, row)
        takes = self.takes.setdefault(key, [])
        take = self._make_take(call, takes, found, key[len(call.name) :])
        self.extras.prepare(take, whole)
        take.n_rows, take.entry = call.shape.B, self._entry
        return take

    def _take_row(self, call: Call, found: Located | None, row: int) -> bool:
        B, takes = call.shape.B, self.takes.setdefault(self._key(call, row), [])
        if self._has_left(call, takes, row):
            return self._follow_row(call, takes, row)
        if not -B <= row < B:
            raise ValueError(f"row={row} was asked for, and the batch has {B} rows")
        if self.heads is not None and not all(0 <= h < call.shape.H for h in self.heads):
            raise ValueError(
                f"heads={list(self.heads)} were asked for; it has 0 to {call.shape.H - 1}"
            )
        ids, batch = self._ids(B, row % B, call.shape.T), call
        whole = call if self.extras.wants_values else replace(call, v=None)
        call = whole.of(row % B, self.heads)
        # A second stream over the same keys in one run of a module is not a later text
        # (ProphetNet).
        earlier = [take for take in takes if take.entry != self._entry or call.shape.T == 1]
        for take in earlier:
            if self._continue(take, call, ids):
                return True
            if take.grows(call, ids):
                # The same text read from its start again, and further: generation without a cache.
                fresh = replace(take)
                fresh.reads = take.reads
                takes[takes.index(take)] = self.order[self.order.index(take)] = fresh
                break
        else:
            if found is None:
                return False
            if B > 1 and earlier and self._sees_before(call):
                raise ValueError(
                    f"row {row} of the batch is no longer the text that it was, as in a search "
                    "whose beams change places; watch the model read what was written"
                )
            fresh = self._open(batch, whole, found, row)
        fresh.n_rows, fresh.entry = B, self._entry
        fit = self._fit(fresh, call)
        assert fit is not None, "the first call of a take always fits"
        fresh.add(fit, ids)
        self.extras.follow(fresh, whole, row % B)
        return True

    def _sees_before(self, call: Call) -> bool:
        """Whether a call sees keys of earlier calls, and not only empty cache slots."""
        runs = self.runs_of(call) if call.is_step else None
        return call.is_step and (runs is None or runs.reach > call.shape.T)

    def _continue(self, take: Take, call: Call, ids: Tensor | None) -> bool:
        """Append a call to a take if it continues it; return whether it does."""
        fit = self._fit(take, call)
        if fit is None:
            moved = take.fit_slots(call)
            fit = None if moved is None else self._fit(take, moved)
        if fit is not None:
            take.add(fit, ids)
            take.entry = self._entry
        return fit is not None

    def _fit(self, take: Take, call: Call) -> Fit | None:
        seen = self.see(call)
        fit = take.fit(call, seen.runs[0])
        whole = fit is not None and fit.call is call
        return replace(fit, call=seen.simplify(call)) if whole and fit is not None else fit

    def _has_left(self, call: Call, takes: list[Take], row: int) -> bool:
        """Whether rows have left the batch since the recorded text began."""
        if call.cross:
            return row in self._moved
        return call.is_step and any(take.n_rows > call.shape.B for take in takes)

    def _follow_row(self, call: Call, takes: list[Take], row: int) -> bool:
        """Find a recorded row in the smaller batch by its keys; it may be gone too."""
        B = call.shape.B
        for now in self._moved[row] if call.cross else range(B):
            one, ids = call.of(now, self.heads), self._ids(B, now, call.shape.T)
            if any(self._continue(take, one, ids) for take in takes):
                self._moved[row] = (now,)
                return True
        self._moved[row] = ()
        return False

    def _make_take(self, call: Call, takes: list[Take], found: Located, suffix: str) -> Take:
        if len(takes) >= MOST_TAKES:
            raise ValueError(
                f"{call.name} was called {MOST_TAKES} times for texts that do not continue each "
                "other; a block records one text, and what is written after it"
            )
        base, *again = found.name.rsplit("@", 1)
        name, number = "@".join([base + suffix, *again]), len(takes)
        known = {take.name for take in takes}
        while name in known:  # the place of another text
            number += 1
            name = name_place(call.name + suffix, number)
        take = Take(
            name=name,
            layer=found.layer,
            wants=self.chosen.wants,
            keep=self.chosen.keep,
            copier=self.copier,
            cross=bool(call.cross),
            heads=self.heads or (),
            replays=self._replays,
            named=self._named,
            queries=self._queries,
        )
        takes.append(take)
        self.order.append(take)
        return take

    def _ids(self, B: int, row: int, T: int) -> Tensor | None:
        """The token ids of the queries, if the ids that were last looked up are as many."""
        ids = self._read.ids_bt
        if ids is None or ids.shape[1] != T or ids.shape[0] not in (1, B):
            return None
        row = row if ids.shape[0] > 1 else 0
        return self._texts.once(row, (ids,), lambda: ids[row])

    def runs_of(self, call: Call) -> FoundRuns | None:
        """The runs of visible keys of a call of one text."""
        return self.see(call).runs[0]

    def see(self, call: Call) -> Seen:
        """What a call's rows see, cached, since layers share masks."""
        rule = call.rule
        key = rule_key(rule, call.rule_number, self.n_passes)
        if key not in self._seen:
            while len(self._seen) >= self._most:
                self._seen.pop(next(iter(self._seen)))
            # A rule that is known by addresses is kept, so that no other tensor can get these.
            self._seen[key] = (rule if call.rule_number is None else None, find_seen(call))
        return self._seen[key][1]


def name_place(name: str, number: int) -> str:
    return name if number == 1 else f"{name}@{number}"
