"""Scores by which published methods keep keys in a KV cache: one call of `observe` each.

About `Received`, as someone who shrinks a cache asks it. Each score is compared with the method's
own formula, on the whole matrix of causal weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.ops import Causal, Received, Wants, observe


def causal_matrix(B: int, H: int, G: int, N: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and the whole matrix of causal weights."""
    made = torch.Generator().manual_seed(17)
    q = torch.randn(B, H, N, D, generator=made, dtype=torch.float64)
    k = torch.randn(B, G, N, D, generator=made, dtype=torch.float64)
    scores = q @ k.repeat_interleave(H // G, 1).mT / math.sqrt(D)
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    return q, k, scores.masked_fill(hidden, -math.inf).softmax(-1)


def received(q: Tensor, k: Tensor, **asked: Any) -> Tensor:
    wants = Wants(received=Received(**asked))
    found: Any = observe(q, k, None, mask=Causal(), wants=wants).received
    return found.value


def test_h2o_keeps_what_was_looked_at_most_in_all() -> None:
    q, k, weights = causal_matrix(2, 6, 2, 41, 7)
    accumulated = torch.zeros(2, 6, 41, dtype=torch.float64)
    for t in range(41):  # one decoding step after the other
        accumulated += weights[:, :, t]
    torch.testing.assert_close(received(q, k), accumulated)


def test_snapkv_keeps_what_the_last_window_of_queries_votes_for() -> None:
    q, k, weights = causal_matrix(2, 6, 2, 41, 7)
    votes = received(q, k, queries=slice(-8, None)).unflatten(1, (2, 3)).sum(2)
    by_hand = torch.stack(
        [sum(weights[:, 3 * g + h, -8:].sum(1) for h in range(3)) for g in range(2)], 1
    )
    torch.testing.assert_close(votes, by_hand)
    assert torch.equal(votes[..., :-8].topk(5)[1], by_hand[..., :-8].topk(5)[1])


def test_tova_keeps_what_the_last_query_looks_at() -> None:
    q, k, weights = causal_matrix(2, 6, 2, 41, 7)
    scores = received(q, k, queries=slice(-1, None)).mean(1)
    torch.testing.assert_close(scores, sum(weights[:, h, -1] for h in range(6)) / 6)


def test_kvzip_keeps_what_any_query_that_repeats_the_text_looks_at() -> None:
    """The last 19 queries say the text again; a key has the most that one of them gives it."""
    q, k, weights = causal_matrix(2, 6, 2, 41, 7)
    scores = received(q, k, by="max", queries=slice(-19, None))
    by_hand = torch.zeros(2, 6, 41, dtype=torch.float64)
    for t in range(22, 41):
        by_hand = torch.maximum(by_hand, weights[:, :, t])
    torch.testing.assert_close(scores, by_hand)
