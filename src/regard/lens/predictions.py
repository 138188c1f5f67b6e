"""What a language model says will come next, taken from its logits while it is watched.

How: the logits of a call are those of its last tokens, of all of them or of the very last alone.
They are made into probabilities in pieces of bounded memory, and of each token the likeliest next
ones are kept, on the device where they are. The probability of the token that came is read off
where it is known: within a call at once, after its last token when the next call has read one.

Letters: T tokens of a call, L of which have logits, V vocabulary, K candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.lens.lazy_weights import Array

CANDIDATES = 5
PIECE = 1 << 24
"""Logits that are made into probabilities together."""


def logits_of(output: Any, vocab_sizes: set[int]) -> Tensor | None:
    """The logits in what a module gave, (B, L, V), where it gave any."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return None
    if found.dim() not in (2, 3) or found.shape[-1] not in vocab_sizes:
        return None
    return found[:, None] if found.dim() == 2 else found


class Predictions:
    """What was said so far of one text, token after token."""

    def __init__(self) -> None:
        self.ids_t = torch.zeros(0, dtype=torch.int64)
        self._candidates: list[tuple[int, Tensor, Tensor]] = []
        self._given: list[tuple[int, Tensor]] = []
        self._last_v: Tensor | None = None

    @torch.no_grad()
    def add(self, ids_t: Tensor, logits_lv: Tensor) -> None:
        """A call that read these tokens, after earlier ones or anew from the first, and more."""
        known = len(self.ids_t)
        anew = len(ids_t) > known and torch.equal(ids_t[:known], self.ids_t)
        self.ids_t = ids_t if anew else torch.cat([self.ids_t, ids_t])
        ids_t = self.ids_t.to(logits_lv.device)
        if self._last_v is not None and known:
            self._given.append((known, self._last_v[ids_t[known]].exp()[None]))
        L, V = logits_lv.shape
        start, step = len(ids_t) - L, max(PIECE // V, 1)
        for a in range(0, L, step):
            logp_lv = logits_lv[a : a + step].float().log_softmax(-1)
            top = logp_lv.topk(min(CANDIDATES, V))
            self._candidates.append((start + a, top.values.exp(), top.indices.int()))
            came_l = ids_t[start + a + 1 : start + a + 1 + len(logp_lv)]
            logp_l = logp_lv[: len(came_l)].gather(1, came_l[:, None])[:, 0]
            self._given.append((start + a + 1, logp_l.exp()))
            self._last_v = logp_lv[-1]

    def finish(self) -> dict[str, Array]:
        """Arrays by token; -1 where nothing was said."""
        n, k = len(self.ids_t), self._candidates[0][1].shape[1]
        probs, ids = np.zeros((n, k), np.float32), np.full((n, k), -1, np.int32)
        given = np.full(n, -1, np.float32)
        for start, values_lk, ids_lk in self._candidates:
            probs[start : start + len(values_lk)] = values_lk.cpu().numpy()
            ids[start : start + len(ids_lk)] = ids_lk.cpu().numpy()
        for start, values_l in self._given:
            given[start : start + len(values_l)] = values_l.cpu().numpy()
        return {"next_probs": probs, "next_ids": ids, "given": given}
