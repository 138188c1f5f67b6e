"""What heads do: one number per head and score, each defined by one formula on single weights.

w(t, s) is the weight of query t on key s. Means are over the queries that are not padding and see
something; a key that the query may not see counts as 0. In self-attention each query has its own
key, here also called t.

    previous    mean of w(t, t - 1) over queries with a key before their own
    next        mean of w(t, t + 1) over queries with a key after their own
    same        mean of w(t, t)
    induction   mean of w(t, p + 1), where p is the last position before t - 1 with the token of t,
                over queries that have one: "... A B ... A" looks at B
    first       mean of w(t, f) over queries after f, the first key that any query sees
    separator   mean over all queries that see something, padding too, of Σ w(t, s), s the tokens
                without letters or digits: what these keys receive, divided by these queries
    local       mean of Σ |t - s| w(t, s): how far away a head looks, to either side, in tokens
    broad       mean of -Σ w(t, s) log w(t, s), in nats

and for given relations the mean of w(t, s) over the pairs (`Record.pairs`). The first five need one
weight per query, and are summed here while the model runs; the others are computed from the
statistics (`Record.heads`). Cross-attention has no own key: of the first five it has only `first`,
over all queries.

Letters: H heads, T queries, S keys; P pairs.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.lens.by_identity import ByIdentity
from regard.lens.lazy_weights import Array
from regard.lens.measure import NamedKeys
from regard.lens.schema import SPOTS
from regard.ops.shape import Shape


class NamedSpots:
    """The keys whose weights are summed, cached for up to `most` texts: all layers share them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: dict[tuple[Any, ...], NamedKeys] = {}
        self._joint = ByIdentity[NamedKeys](1)

    def find(
        self, shape: Shape, real_t: Tensor, first: int, ids_s: Tensor | None, cross: bool
    ) -> NamedKeys:
        """The keys for one text; `real_t`: which queries count."""
        tokens = b""
        if not cross and ids_s is not None and len(ids_s) == shape.S:
            tokens = ids_s.numpy().astype(np.int64).tobytes()
        asked = shape.T, shape.S, real_t.numpy().tobytes(), first, tokens, cross
        if asked not in self._known:
            while len(self._known) >= self.most:
                self._known.pop(next(iter(self._known)))
            self._known[asked] = spot_keys(*asked)
        return self._known[asked]

    def join(self, texts: list[NamedKeys]) -> NamedKeys:
        """The keys of the texts of a batch, cached for the last batch."""
        return self._joint.once(
            (), (*texts,), lambda: NamedKeys(torch.cat([text.keys_bnt for text in texts]))
        )


@functools.lru_cache(maxsize=4)
def spot_keys(T: int, S: int, real: bytes, first: int, tokens: bytes, cross: bool) -> NamedKeys:
    """The key that each score reads for each query, (1, scores, T); -1: none."""
    is_real = np.frombuffer(real, np.bool_)
    own = np.arange(T) + S - T
    keys = np.full((len(SPOTS), T), -1, np.int32)

    def name(spot: str, keys_t: Array, where: Array) -> None:
        there = is_real & where & (keys_t >= 0) & (keys_t < S)
        keys[SPOTS.index(spot)] = np.where(there, keys_t, -1)

    if cross:
        name("first", np.full(T, first), is_real)
        return NamedKeys(torch.from_numpy(keys[None]))
    name("previous", own - 1, own > first)
    name("next", own + 1, own < S - 1)
    name("same", own, is_real)
    name("first", np.full(T, first), own > first)
    if tokens:
        last = last_seen(np.frombuffer(tokens, np.int64))[own]
        name("induction", last + 1, last >= 0)
    return NamedKeys(torch.from_numpy(keys[None]))


def last_seen(ids: Array) -> Array:
    """For each position the last one before its predecessor with the same token, or -1."""
    found = np.full(len(ids), -1, np.int64)
    place = np.argsort(ids, kind="stable")
    token = ids[place]
    for back in (1, 2):
        # After sorting, equal tokens are neighbours. The one before may be the direct predecessor
        # in the text, which does not count; then the one before that does.
        earlier = np.full(len(ids), -1, np.int64)
        earlier[back:] = np.where(token[back:] == token[:-back], place[:-back], -1)
        good = (earlier >= 0) & (earlier < place - 1)
        found[place] = np.where((found[place] < 0) & good, earlier, found[place])
    return found
