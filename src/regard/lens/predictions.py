"""The next tokens that a language model predicts, from its logits while it is watched.

How: a call has logits for all its tokens, for the last few, or for the very last one. They are
turned into probabilities in pieces of bounded memory, on their device, and only the likeliest next
tokens are kept. The probability of the token that actually came is read off where it is known:
within a call at once, and after its last token when the next call has read one.

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
"""Logits that are turned into probabilities at once."""


def logits_of(output: Any, vocab_sizes: set[int]) -> Tensor | None:
    """The logits in a module's output, (B, L, V), if it has any."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return None
    if found.dim() not in (2, 3) or found.shape[-1] not in vocab_sizes:
        return None
    return found[:, None] if found.dim() == 2 else found


class Predictions:
    """The predictions so far for one text, token after token."""

    def __init__(self) -> None:
        self.ids_t = torch.zeros(0, dtype=torch.int64)
        self._candidates: list[tuple[int, Tensor, Tensor]] = []
        self._given: list[tuple[int, Tensor]] = []
        self._last_v: Tensor | None = None

    @torch.no_grad()
    def add(self, ids_t: Tensor, logits_lv: Tensor) -> None:
        """Add a call that read these tokens: new ones, or all from the first on, and more."""
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
        """The arrays of a record, by token; -1 where there is no prediction."""
        n, k = len(self.ids_t), self._candidates[0][1].shape[1]
        probs, ids = np.zeros((n, k), np.float32), np.full((n, k), -1, np.int32)
        given = np.full(n, -1, np.float32)
        for start, values_lk, ids_lk in self._candidates:
            probs[start : start + len(values_lk)] = values_lk.cpu().numpy()
            ids[start : start + len(ids_lk)] = ids_lk.cpu().numpy()
        for start, values_l in self._given:
            given[start : start + len(values_l)] = values_l.cpu().numpy()
        return {"next_probs": probs, "next_ids": ids, "given": given}
