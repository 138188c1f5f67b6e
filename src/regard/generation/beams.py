"""Beam search: the likeliest texts, not the likeliest next token.

Why: a good text may begin with a token that is not the likeliest.

How: each row has K running beams and up to K finished ones. A step ranks every continuation of
every running beam by its sum of log-probabilities. Of the best (1 + number of stop tokens) · K
candidates at least K do not end, and the best K of these continue; of the first K, those that end
compete with the finished ones, by their sum / length ** length_penalty. A row is done when no
running beam can get among the finished ones (see `early_stopping`), and leaves the batch; its
result never depends on other rows. The prompt is read once per row, not once per beam.

Rows of the cache change places at every step of a search, so they are no continuous texts. So call
hooks are paused during the search; if there are any, the best text of each row is read once more
for them afterwards.

Impossible candidates have `BARRED` added to their score: far below every sum, yet finite, so that
order and sums stay defined while a row has fewer than K texts. At the start all beams but one are
barred.

Letters: B rows, A rows still searching, K beams, N candidates, T steps, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.generation.decode_loop import refuse_logits
from regard.generation.engine import Decoding
from regard.generation.prompts import Task, pad_rows
from regard.ops import call_hook

BARRED = -1.0e9


class Beams(NamedTuple):
    """Texts and their scores, best first: tokens (A, K, T), scores and lengths (A, K).

    `real_ak` is False where there is no text yet.
    """

    tokens_akt: Tensor
    scores_ak: Tensor
    lengths_ak: Tensor
    real_ak: Tensor

    def best(self, k: int) -> Beams:
        return self.take(self.scores_ak.topk(k, dim=1).indices)

    def take(self, place_ak: Tensor) -> Beams:
        """The beams with these indices in each row."""
        deep = place_ak[:, :, None].expand(-1, -1, self.tokens_akt.shape[2])
        return Beams(self.tokens_akt.gather(1, deep), *(x.gather(1, place_ak) for x in self[1:]))

    def rows(self, index: Tensor) -> Beams:
        return Beams(*(x[index] for x in self))

    def join(self, other: Beams) -> Beams:
        return Beams(*(torch.cat(pair, 1) for pair in zip(self, other, strict=True)))


@torch.inference_mode()
def search_beams(task: Task) -> list[Beams]:
    """The `num_return_sequences` best finished texts of each row, as Beams with A = 1."""
    with call_hook.unheard() as hooked:
        found = run_search(task)
    if hooked:
        read_best(task, found)
    return found


def run_search(task: Task) -> list[Beams]:
    n_tokens = task.ids_bt.shape[1] + max(task.limits)
    decoding = Decoding(task.model, max_len=n_tokens, memory=task.memory)
    search = Search(task)
    logits_av = decoding.read(task.ids_bt, task.real_bt, task.config.chunk)
    # Each prompt's row is repeated K times; from here on row a · K + k is beam k of row a.
    alike = torch.arange(len(task.rows), device=logits_av.device)
    alike = alike.repeat_interleave(task.config.num_beams)
    decoding.reorder(alike)
    logits_av = logits_av[alike]
    while True:
        index, token = search.step(logits_av)
        if not search.rows:
            return search.found
        decoding.reorder(index)
        logits_av = decoding.step(token)


def read_best(task: Task, found: list[Beams]) -> None:
    """Read each row's best text, up to its last token, in one prefill."""
    rows = []
    for prompt, best in zip(task.rows, found, strict=True):
        n_tokens = int(best.lengths_ak[0, 0])
        rows.append(prompt + best.tokens_akt[0, 0, : n_tokens - 1].tolist())
    ids_bt, real_bt = pad_rows(rows, "left", task.pad, task.ids_bt.device)
    decoding = Decoding(task.model, max_len=ids_bt.shape[1], memory=task.memory)
    decoding.read(ids_bt, real_bt, task.config.chunk)


class Search:
    """The state of a beam search: running and finished beams of each row."""

    def __init__(self, task: Task) -> None:
        device, n_rows, k = task.ids_bt.device, len(task.rows), task.config.num_beams
        self.config, self.processor = task.config, task.processor
        self.rows = list(range(n_rows))  # rows still searching, by their index in the task
        self.found: list[Beams] = [empty_beams(1, 0, 0, 0, device)] * n_rows
        self.step_n = 0
        self._stops = torch.tensor(list(task.stop_tokens), dtype=torch.int64, device=device)
        self._running = empty_beams(n_rows, k, max(task.limits), task.pad, device)
        self._finished = empty_beams(n_rows, k, max(task.limits), task.pad, device)
        self._running.scores_ak[:, 0] = 0
        self._limit_a = torch.tensor(task.limits, device=device)
        self._lone_a = torch.tensor([len(row) == 1 for row in task.rows], device=device)
        seen_bv = task.mark_seen()
        self._seen = None if seen_bv is None else seen_bv.repeat_interleave(k, 0)

    def step(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the rows a · K + k continue, in order, and their next tokens."""
        n_rows, k, n_vocab = len(self.rows), self.config.num_beams, logits.shape[-1]
        bad = (~logits.amax(-1).isfinite()).tolist()
        if any(bad):
            refuse_logits(self.rows[bad.index(True) // k], self.step_n + 1)
        lone, limit = self._lone_a.repeat_interleave(k), self._limit_a.repeat_interleave(k)
        logp = logits.log_softmax(-1)
        logp = self.processor.process(logp, self._seen, self.step_n, lone, limit)
        total_an = (logp.view(n_rows, k, n_vocab) + self._running.scores_ak[:, :, None]).flatten(1)
        n_wide = min(k * max(2, 1 + len(self._stops)), total_an.shape[1])
        sum_an, place_an = total_an.topk(n_wide, dim=1)
        from_an, token_an = place_an // n_vocab, place_an % n_vocab
        candidates = self._running.take(from_an)
        candidates.tokens_akt[:, :, self.step_n] = token_an
        self.step_n += 1
        ends_an = torch.isin(token_an, self._stops) | (self._limit_a == self.step_n)[:, None]
        self._hold(candidates, sum_an, ends_an)

        score_ak, onward_ak = (sum_an + ends_an * BARRED).topk(k, dim=1)
        tokens_akt = candidates.take(onward_ak).tokens_akt
        self._running = self._running._replace(tokens_akt=tokens_akt, scores_ak=score_ak)
        stays = self._close(ends_an)
        token_ak, from_ak = token_an.gather(1, onward_ak), from_an.gather(1, onward_ak)
        first_a = torch.arange(n_rows, device=logits.device)[:, None] * k
        index, token = (first_a + from_ak)[stays].flatten(), token_ak[stays].flatten()
        if self._seen is not None:
            self._seen = self._seen[index].scatter(1, token[:, None], True)
        return index, token

    def _hold(self, candidates: Beams, sum_an: Tensor, ends_an: Tensor) -> None:
        """Merge those of the first K candidates that end into the finished; keep the best K."""
        k = self.config.num_beams
        new_ak = ends_an[:, :k]
        score_ak = sum_an[:, :k] / self.step_n**self.config.length_penalty + ~new_ak * BARRED
        length_ak = torch.full_like(new_ak, self.step_n, dtype=torch.int64)
        ended = Beams(candidates.tokens_akt[:, :k], score_ak, length_ak, new_ak)
        self._finished = self._finished.join(ended).best(k)

    def _close(self, ends_an: Tensor) -> Tensor:
        """Store the results of rows that are done; return the indices of the others."""
        config, n = self.config, self.step_n
        full_a = self._finished.real_ak.all(1)
        worst_a = torch.where(full_a, self._finished.scores_ak.amin(1), BARRED)
        reach_a = torch.full_like(self._limit_a, n)
        if config.early_stopping == "never" and config.length_penalty > 0:
            reach_a = self._limit_a
        best_a = self._running.scores_ak[:, 0] / reach_a**config.length_penalty
        over_a = (best_a <= worst_a) | ends_an.all(1)
        if config.early_stopping is True:
            over_a = over_a | full_a
        over = over_a.tolist()
        best = self._finished.best(config.num_return_sequences)
        for place, row in enumerate(self.rows):
            if over[place]:
                self.found[row] = best.rows(torch.tensor([place], device=ends_an.device))
        left = [place for place, done in enumerate(over) if not done]
        stays = torch.tensor(left, dtype=torch.int64, device=ends_an.device)
        if len(left) < len(over):
            self.rows = [self.rows[place] for place in left]
            self._running, self._finished = self._running.rows(stays), self._finished.rows(stays)
            self._limit_a, self._lone_a = self._limit_a[stays], self._lone_a[stays]
        return stays


def empty_beams(n_rows: int, k: int, n_steps: int, pad: int, device: torch.device) -> Beams:
    return Beams(
        torch.full((n_rows, k, n_steps), pad, device=device),
        torch.full((n_rows, k), BARRED, device=device),
        torch.zeros(n_rows, k, dtype=torch.int64, device=device),
        torch.zeros(n_rows, k, dtype=torch.bool, device=device),
    )
