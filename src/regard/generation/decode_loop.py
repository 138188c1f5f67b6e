"""Greedy search and sampling: a batch in which every row gets one token a step.

Why: a row must come out as if it were alone, though rows end at different times; and a device must
not be made to wait for questions that can be asked later.

How: `advance` chooses a token for each row from the scores at hand, writes it down, and runs the
step that makes the next scores. Whether rows have ended is asked at every step where asking is free
or somebody is waiting for the tokens, else now and then: a row that has ended goes on with padding
that is not looked at. Rows at their limit leave the batch at once, since the model has no position
for them; others leave when half of the batch has ended. A compiled batch keeps all of its rows.

Letters: B rows, T steps, V vocabulary; A rows that are still in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from regard.generation.config import GenerationConfig
from regard.generation.engine import Decoding
from regard.generation.prompts import Prompts
from regard.generation.sampling import Rules, draw, make_chances, make_seeds
from regard.generation.stopping import TextWatch
from regard.models import Transformer

LOOK_EVERY = 16  # steps between two questions to a device that runs ahead
LOOK_AT_MOST = 64  # and where steps follow each other without this program


class Writing:
    """A batch being written. Call `advance` until `over`, then `result`."""

    def __init__(
        self,
        model: Transformer,
        prompts: Prompts,
        config: GenerationConfig,
        rules: Rules,
        stop_tokens: Sequence[int],
        *,
        watches: Sequence[TextWatch] = (),
        streaming: bool = False,
    ) -> None:
        """watches: the text of each row, where stop strings are wanted. streaming: someone waits
        for each token."""
        device = prompts.ids_bt.device
        self.prompts, self.config, self.rules, self.watches = prompts, config, rules, watches
        self._texts = [""] * len(watches)
        self.over = False
        self._limits = prompts.limits
        self._looks = streaming or bool(watches) or device.type == "cpu"
        self._runs_on = config.compiled and rules.plain and not streaming and not watches
        self._pad = filler(rules, stop_tokens)
        self._stops = torch.tensor(list(stop_tokens), dtype=torch.int64, device=device)
        self._step = 0
        self._rows = list(range(len(prompts.rows)))  # of the batch, those still in it
        self._ended: dict[int, int] = {}  # row -> how many tokens it has
        n_steps = max(prompts.limits)
        if config.compiled and min(prompts.limits) < n_steps:
            raise ValueError(
                "a compiled batch keeps all rows to its end, but with prompts of different lengths "
                f"the model's length leaves some rows {min(prompts.limits)} new tokens and others "
                f"{n_steps}: lower max_new_tokens, or leave compiled=False"
            )
        with torch.inference_mode():
            self._out_bt = torch.full((len(prompts.rows), n_steps), self._pad, device=device)
            self._limit_a = torch.tensor(prompts.limits, device=device)
            self._lone_a = torch.tensor([len(row) == 1 for row in prompts.rows], device=device)
            self._row_a = torch.arange(len(prompts.rows), device=device)
            self._done_a = torch.zeros_like(self._lone_a)
            self._bad_a = torch.zeros_like(self._lone_a)
            self._chance_at: Tensor | None = None
            if config.samples:
                seeds = make_seeds(config, len(prompts.rows))
                self._chance_at = make_chances(seeds, n_steps).to(device)
            self._seen_av = mark_seen(prompts, rules)
            width = prompts.ids_bt.shape[1]
            self._decoding = Decoding(
                model, room=width + n_steps, memory=prompts.memory, compiled=config.compiled
            )
            self._scores_av: Tensor | None = None
            self._token_a: Tensor | None = None

    @torch.inference_mode()
    def advance(self) -> Tensor:
        """The next token (A,) of each row that was in the batch; the last of several, if nobody
        waits for each."""
        if self._runs_on and self._token_a is not None:
            return self._run_on(self._token_a)
        if self._token_a is None:
            prompts = self.prompts
            scores_av = self._decoding.read(prompts.ids_bt, prompts.real_bt, self.config.chunk)
        else:
            scores_av = self._decoding.step(self._token_a)
        token_a = self._choose(scores_av)
        self._out_bt[self._row_a, self._step] = token_a
        self._done_a = self._done_a | (token_a[:, None] == self._stops).any(1)
        if self._seen_av is not None:
            self._seen_av.scatter_(1, token_a[:, None], True)
        self._token_a = token_a
        self._step += 1
        at_limit = any(self._limits[row] <= self._step for row in self._rows)
        if self._looks or at_limit or self._step % LOOK_EVERY == 0:
            self._look()
        return token_a

    def _run_on(self, token_a: Tensor) -> Tensor:
        """Several greedy steps that nothing but the scores decides, without a look in between."""
        # The longer the text, the longer may a step be in vain: at most as many as it has, or few.
        burst = min(max(LOOK_EVERY, self._step), LOOK_AT_MOST)
        start, stop = self._step, min(self._step + burst, max(self._limits))
        token_an, finite_a = self._decoding.run_on(token_a, stop - start)
        self._out_bt[:, start:stop] = token_an
        self._bad_a = self._bad_a | (~finite_a & ~self._done_a)
        self._done_a = self._done_a | (token_an[:, :, None] == self._stops).any(2).any(1)
        self._token_a, self._step = token_an[:, -1], stop
        self._look()
        return self._token_a

    def result(self) -> tuple[Tensor, list[int], list[str]]:
        """Tokens (B, T) filled up with padding, how many each row has, and why it ended."""
        assert self.over
        lengths = [self._ended[row] for row in range(len(self.prompts.rows))]
        # A copy made outside of inference mode is a tensor like any other.
        out_bt = self._out_bt[:, : max(lengths)].clone()
        last_b = [int(row[n - 1]) for row, n in zip(out_bt.tolist(), lengths, strict=True)]
        stops = set(self._stops.tolist())
        reasons = []
        for row, last in enumerate(last_b):
            stopped = last in stops or (bool(self.watches) and self.watches[row].stopped)
            reasons.append("stop" if stopped else "length")
            out_bt[row, lengths[row] :] = self._pad
        return out_bt, lengths, reasons

    def close(self) -> None:
        """Give back what the batch held; call it at the end, however that came."""
        self._decoding.close()

    def take_text(self, row: int) -> str:
        """The text of a watched row that became certain since it was taken last; "" of others."""
        if not self.watches:
            return ""
        new, self._texts[row] = self._texts[row], ""
        return new

    def _choose(self, scores_av: Tensor) -> Tensor:
        # Largest score NaN or inf: some score is; -inf: all are.
        self._bad_a = self._bad_a | (~scores_av.amax(-1).isfinite() & ~self._done_a)
        scores_av = self.rules.reshape(
            scores_av, self._seen_av, self._step, self._lone_a, self._limit_a
        )
        if self._chance_at is None:
            token_a = scores_av.argmax(-1)
        else:
            token_a = draw(scores_av, self._chance_at[:, self._step])
        return torch.where(self._done_a, self._pad, token_a)

    def _look(self) -> None:
        """Read back who has ended, and let rows leave."""
        assert self._token_a is not None
        done, bad = torch.stack((self._done_a, self._bad_a)).tolist()
        if any(bad):
            refuse_scores(self._rows[bad.index(True)], self._step)
        self._follow_texts(done)
        stays = []
        for place, row in enumerate(self._rows):
            at_limit = self._limits[row] <= self._step
            if not at_limit:
                stays.append(place)
            if (done[place] or at_limit) and row not in self._ended:
                self._ended[row] = self._count(row)
                if self.watches:
                    self._texts[row] += self.watches[row].finish()
        running = [place for place in stays if self._rows[place] not in self._ended]
        self.over = not running
        if self.over or self.config.compiled:
            return
        if 2 * len(running) <= len(self._rows):
            stays = running
        if len(stays) < len(self._rows):
            self._leave(stays)

    def _count(self, row: int) -> int:
        """How many tokens a row has that has just been seen to have ended."""
        n = min(self._step, self._limits[row])
        ends = (self._out_bt[row, :n, None] == self._stops).any(-1).nonzero()
        return int(ends[0]) + 1 if len(ends) else n

    def _follow_texts(self, done: list[bool]) -> None:
        """Give each running row's token to its watch; a stop string ends the row."""
        if not self.watches:
            return
        assert self._token_a is not None
        stopped = []
        for place, token in enumerate(self._token_a.tolist()):
            row = self._rows[place]
            if row in self._ended:
                continue
            watch = self.watches[row]
            self._texts[row] += watch.step(token)
            if watch.stopped and not done[place]:
                done[place] = True
                stopped.append(place)
        if stopped:
            self._done_a[stopped] = True

    def _leave(self, stays: list[int]) -> None:
        """Go on with the rows at these places alone."""
        index = torch.tensor(stays, device=self._row_a.device)
        self._decoding.reorder(index)
        self._rows = [self._rows[place] for place in stays]
        self._row_a, self._limit_a = self._row_a[index], self._limit_a[index]
        self._lone_a, self._done_a = self._lone_a[index], self._done_a[index]
        self._bad_a = self._bad_a[index]
        assert self._token_a is not None
        self._token_a = self._token_a[index]
        if self._chance_at is not None:
            self._chance_at = self._chance_at[index]
        if self._seen_av is not None:
            self._seen_av = self._seen_av[index]


def mark_seen(prompts: Prompts, rules: Rules) -> Tensor | None:
    """Which tokens each prompt has, (B, V), where that is asked for; padding is not one of them."""
    if not rules.counts_seen:
        return None
    marked = torch.zeros(len(prompts.rows), rules.vocab_size, dtype=torch.bool)
    for place, row in enumerate(prompts.rows):
        marked[place, row] = True
    return marked.to(prompts.ids_bt.device)


def filler(rules: Rules, stop_tokens: Sequence[int]) -> int:
    """What stands behind the end of a row: padding, or an end token where there is none."""
    pad = rules.tokens.pad
    return pad if pad is not None else next(iter(stop_tokens), 0)


def refuse_scores(row: int, step: int) -> NoReturn:
    raise ValueError(
        f"the model's scores for row {row} are NaN or infinite at new token {step} or shortly "
        "before: the weights are damaged, or a narrow type overflows; load the model as float32 "
        "or bfloat16"
    )
