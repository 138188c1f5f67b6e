"""H2O, SnapKV and TOVA: which keys a KV cache keeps, by what each received from queries.

Each method is a question to `observe` (`Received`: from which queries, and how it is put together)
and a few lines that make scores of the answer; `regard.generation.evict` keeps the best of them.

    with receiving(H2O.received) as received:
        model(ids, cache=cache)
    evict(cache, [H2O.score(layer, keep) for layer in received], keep)

The same lines serve a model of transformers with attn_implementation="regard" (`import regard.hf`)
and its DynamicCache. Letters: B batch, H query heads, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

import regard
from regard.ops.call import Call
from regard.ops.call_hook import hooked

WINDOW = 8
"""How many of the last queries vote in SnapKV."""
POOLED = 7
"""Neighbouring keys of which SnapKV takes the largest votes, so that they are kept together."""
FIRST = 4
"""First tokens that are kept as attention sinks."""


@dataclass(frozen=True)
class Method:
    """What is asked about every layer, and what becomes of the answer (B, H, S): its scores."""

    received: regard.Received
    score: Callable[[Tensor, int], Tensor]


@contextmanager
def receiving(asked: regard.Received) -> Iterator[list[Tensor]]:
    """What each key receives, (B, H, S), in each call of attention in the block."""
    found: list[Tensor] = []

    def ask(call: Call) -> None:
        rule = {name: getattr(call.rule, name) for name in ("mask", "bias", "scale", "softcap")}
        wants = regard.Wants(received=asked)
        seen = regard.observe(call.q, call.k, None, sinks=call.sinks, wants=wants, **rule)
        found.append(seen.received.value)

    with hooked(ask):
        yield found


def keep_last(scores_bhs: Tensor, n: int) -> Tensor:
    """The same scores, but that the last n keys are kept whatever they have."""
    kept = scores_bhs.clone()
    kept[..., max(scores_bhs.shape[-1] - n, 0) :] = math.inf
    return kept


def score_h2o(received_bhs: Tensor, keep: int) -> Tensor:
    """Heavy hitters: what received most of all queries; half of what is kept are the last keys."""
    return keep_last(received_bhs, keep - keep // 2)


def score_snapkv(votes_bhs: Tensor, keep: int) -> Tensor:
    """The votes of the last queries, the most among neighbouring keys; those queries' own stay."""
    pooled = functional.max_pool1d(votes_bhs, POOLED, stride=1, padding=POOLED // 2)
    return keep_last(pooled, min(WINDOW, keep))


def score_tova(weights_bhs: Tensor, keep: int) -> Tensor:
    """What the last query looks at, the mean of all heads: every head keeps the same keys."""
    return weights_bhs.mean(1, keepdim=True)


def score_recent(received_bhs: Tensor, keep: int) -> Tensor:
    """No attention asked: the first tokens as attention sinks, and the last."""
    scores = keep_last(received_bhs[:, :1] * 0, keep - min(FIRST, keep // 2))
    scores[..., : min(FIRST, keep // 2)] = math.inf
    return scores


H2O = Method(regard.Received(), score_h2o)
SNAPKV = Method(regard.Received(queries=slice(-WINDOW, None)), score_snapkv)
TOVA = Method(regard.Received(queries=slice(-1, None)), score_tova)
RECENT = Method(regard.Received(queries=slice(-1, None)), score_recent)
METHODS = {"H2O": H2O, "SnapKV": SNAPKV, "TOVA": TOVA, "recent": RECENT}
