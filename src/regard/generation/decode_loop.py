"""Greedy search and sampling: a batch in which every row gets one token per step.

Why: a row's text must be as if it were alone, though rows end at different times; and the device
must not wait for reads that can be done later.

How: `advance` runs the prefill or a decode step, chooses a token for each row from the logits, and
stores it. Whether rows have ended is read back at every step on a CPU or if somebody waits for the
tokens, else now and then: a row that has ended continues with padding that is ignored. Rows at
their limit leave the batch at once, since the model has no position for them; others leave when
half of the batch has ended. A compiled batch keeps all rows.

Letters: B rows, T steps, V vocabulary; A rows that are still in the batch.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from regard.generation.engine import Decoding
from regard.generation.prompts import Task
from regard.generation.sampling import draw, make_chances, make_seeds

LOOK_EVERY = 16  # steps between two reads from the device (syncs)
LOOK_AT_MOST = 64  # the most steps between two reads when compiled greedy steps run in bursts


class DecodeLoop:
    """Generates one batch. Call `advance` until `over`, then `result`."""

    def __init__(self, task: Task, *, watched: bool = False, streaming: bool = False) -> None:
        """watched: decode to text, too (stop strings need it). streaming: tokens are awaited."""
        config, device, n_rows = task.config, task.ids_bt.device, len(task.rows)
        self.task, self.over = task, False
        self.watches = [task.watch(n) for n in range(n_rows)] if watched or config.stop else []
        self._texts = [""] * n_rows
        self._looks = streaming or bool(self.watches) or device.type == "cpu"
        self._runs_on = config.compiled and task.processor.plain and not (streaming or self.watches)
        self._stops = torch.tensor(list(task.stop_tokens), dtype=torch.int64, device=device)
        self._step = 0
        self._rows = list(range(n_rows))  # the rows that are still in the batch
        self._ended: dict[int, int] = {}  # row that has ended -> how many tokens it has
        n_steps = max(task.limits)
        if config.compiled and min(task.limits) < n_steps:
            raise ValueError(
                "a compiled batch keeps all rows to its end, but with prompts of different lengths "
                f"the model's length leaves some rows {min(task.limits)} new tokens and others "
                f"{n_steps}: lower max_new_tokens, or leave compiled=False"
            )
        with torch.inference_mode():
            self._out_bt = torch.full((n_rows, n_steps), task.pad, device=device)
            self._limit_a = torch.tensor(task.limits, device=device)
            self._lone_a = torch.tensor([len(row) == 1 for row in task.rows], device=device)
            self._row_a = torch.arange(n_rows, device=device)
            self._done_a = torch.zeros_like(self._lone_a)
            self._bad_a = torch.zeros_like(self._lone_a)
            self._token_a: Tensor | None = None
            self._chance_at: Tensor | None = None
            if config.samples:
                self._chance_at = make_chances(make_seeds(config, n_rows), n_steps).to(device)
            self._seen_av = task.mark_seen()
            n_tokens, compiled = task.ids_bt.shape[1] + n_steps, config.compiled
            self._decoding = Decoding(
                task.model, max_len=n_tokens, memory=task.memory, compiled=compiled
            )

    @torch.inference_mode()
    def advance(self) -> Tensor:
        """Run a step and return its token (A,) for each row of the batch; a compiled greedy batch
        may run several steps, and returns the last tokens."""
        task = self.task
        if self._runs_on and self._token_a is not None:
            return self._run_on(self._token_a)
        if self._token_a is None:
            logits_av = self._decoding.read(task.ids_bt, task.real_bt, task.config.chunk)
        else:
            logits_av = self._decoding.step(self._token_a)
        # The largest logit is NaN or inf if some logit is, and -inf if all are.
        self._bad_a = self._bad_a | (~logits_av.amax(-1).isfinite() & ~self._done_a)
        logits_av = task.processor.process(
            logits_av, self._seen_av, self._step, self._lone_a, self._limit_a
        )
        if self._chance_at is None:
            token_a = logits_av.argmax(-1)
        else:
            token_a = draw(logits_av, self._chance_at[:, self._step])
        token_a = torch.where(self._done_a, task.pad, token_a)
        self._out_bt[self._row_a, self._step] = token_a
        self._done_a = self._done_a | (token_a[:, None] == self._stops).any(1)
        if self._seen_av is not None:
            self._seen_av.scatter_(1, token_a[:, None], True)
        self._token_a = token_a
        self._step += 1
        at_limit = min(map(task.limits.__getitem__, self._rows)) <= self._step
        if self._looks or at_limit or self._step % LOOK_EVERY == 0:
            self._look()
        return token_a

    def _run_on(self, token_a: Tensor) -> Tensor:
        """Run several plain greedy steps without reading anything back in between."""
        # Steps after the end are wasted, so at most as many as the text has so far, but not below
        # LOOK_EVERY.
        burst = min(max(LOOK_EVERY, self._step), LOOK_AT_MOST)
        start, stop = self._step, min(self._step + burst, max(self.task.limits))
        token_an, finite_a = self._decoding.run_on(token_a, stop - start)
        self._out_bt[:, start:stop] = token_an
        self._bad_a = self._bad_a | (~finite_a & ~self._done_a)
        self._done_a = self._done_a | (token_an[:, :, None] == self._stops).any(2).any(1)
        self._token_a, self._step = token_an[:, -1], stop
        self._look()
        return self._token_a

    def result(self) -> tuple[Tensor, list[int], list[str]]:
        """Tokens (B, T) with padding, how many each row has, and why each row ended."""
        assert self.over
        lengths = [self._ended[row] for row in range(len(self.task.rows))]
        # The copy is no inference tensor, as it is made outside of inference mode.
        out_bt = self._out_bt[:, : max(lengths)].clone()
        reasons = []
        for row, (tokens, n) in enumerate(zip(out_bt.tolist(), lengths, strict=True)):
            stopped = tokens[n - 1] in self.task.stop_tokens
            stopped = stopped or (bool(self.watches) and self.watches[row].stopped)
            reasons.append("stop" if stopped else "length")
            out_bt[row, n:] = self.task.pad
        return out_bt, lengths, reasons

    def close(self) -> None:
        self._decoding.close()

    def take_text(self, row: int) -> str:
        """A watched row's text that became certain since the last call; "" for other rows."""
        new, self._texts[row] = self._texts[row], ""
        return new

    def _look(self) -> None:
        """Read back which rows have ended, and remove rows from the batch."""
        done, bad = torch.stack((self._done_a, self._bad_a)).tolist()
        if any(bad):
            refuse_logits(self._rows[bad.index(True)], self._step)
        if self.watches:
            self._follow_texts(done)
        stays = []
        for place, row in enumerate(self._rows):
            at_limit = self.task.limits[row] <= self._step
            if not at_limit:
                stays.append(place)
            if (done[place] or at_limit) and row not in self._ended:
                n = min(self._step, self.task.limits[row])
                ends = (self._out_bt[row, :n, None] == self._stops).any(-1).nonzero()
                self._ended[row] = int(ends[0]) + 1 if len(ends) else n
                if self.watches:
                    self._texts[row] += self.watches[row].finish()
        running = [place for place in stays if self._rows[place] not in self._ended]
        self.over = not running
        if self.over or self.task.config.compiled:
            return
        if 2 * len(running) <= len(self._rows):
            stays = running
        if len(stays) < len(self._rows):
            self._leave(stays)

    def _follow_texts(self, done: list[bool]) -> None:
        """Pass each running row's token to its `TextWatch`; a stop string ends the row."""
        assert self._token_a is not None
        for place, token in enumerate(self._token_a.tolist()):
            row = self._rows[place]
            if row in self._ended:
                continue
            watch = self.watches[row]
            self._texts[row] += watch.step(token)
            if watch.stopped and not done[place]:
                done[place] = self._done_a[place] = True

    def _leave(self, stays: list[int]) -> None:
        """Keep only the rows at these indices of the batch."""
        index = torch.tensor(stays, device=self._row_a.device)
        self._decoding.reorder(index)
        self._rows = [self._rows[place] for place in stays]
        names = ["_row_a", "_limit_a", "_lone_a", "_done_a", "_bad_a", "_token_a"]
        for name in (*names, "_chance_at", "_seen_av"):
            if (of_rows := getattr(self, name)) is not None:
                setattr(self, name, of_rows[index])


def refuse_logits(row: int, step: int) -> NoReturn:
    raise ValueError(
        f"the model's logits for row {row} are NaN or infinite at new token {step} or shortly "
        "before: the weights are damaged, or a narrow type overflows; load the model as float32 "
        "or bfloat16"
    )
