"""What heads do, one number a head, each by one formula on single weights.

w(t, s) is the weight of query t on key s. Means are over the queries that are no padding and see
something; a key that the query may not see counts as 0. In self-attention query t has its own key,
here also called t.

    previous    mean of w(t, t - 1) over queries with a key before their own
    next        mean of w(t, t + 1) over queries with a key after their own
    same        mean of w(t, t)
    induction   mean of w(t, p + 1), where p is the last place before t - 1 with the token of t,
                over queries that have one: "... A B ... A" looks at B
    first       mean of w(t, f) over queries after f, the first key that any query sees
    separator   mean over all queries that see something, padding too, of Σ w(t, s), s the tokens
                without letters or digits: what these keys receive, divided by these queries
    local       mean of |Σ (t - s) w(t, s)|: how far away, on balance, a head looks, in tokens
    broad       mean of -Σ w(t, s) log w(t, s), in nats

and for given relations the mean of w(t, s) over the pairs (`Record.pairs`). The first five need one
weight a query, and are summed here while the model runs; the others come from the statistics
(`Record.heads`). Cross-attention has no own key: of the first five it has `first` only, over all
queries.

Letters: H heads, T queries, S keys; P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.lens.calls import Call
from regard.lens.contents import SPOTS
from regard.lens.measure import spot_weights


def sum_spots(
    call: Call, lse_ht: Tensor, real_t: Tensor, first: int, ids_s: Tensor | None, cross: bool
) -> tuple[Tensor, Tensor]:
    """Sums of single weights and how many there are, each (scores, H), for the scores of `SPOTS`.

    real_t: the queries that count. first: the first key that is seen. ids_s: the tokens at the
    keys, with which induction is told.
    """
    T, S, device = call.shape.T, call.shape.S, call.q.device
    t = torch.arange(T, device=device)[real_t.to(device)]
    own = t + S - T
    sums = torch.zeros(len(SPOTS), call.shape.H, dtype=torch.float64)
    counts = torch.zeros(len(SPOTS), call.shape.H, dtype=torch.int64)

    def add(name: str, rows_p: Tensor, keys_p: Tensor) -> None:
        inside = (keys_p >= 0) & (keys_p < S)
        rows_p, keys_p = rows_p[inside], keys_p[inside]
        if len(rows_p):
            at = SPOTS.index(name)
            sums[at] = spot_weights(call, lse_ht, rows_p, keys_p).sum(-1).double().cpu()
            counts[at] = len(rows_p)

    if cross:
        add("first", t, torch.full_like(t, first))
        return sums, counts
    add("previous", t[own > first], own[own > first] - 1)
    add("next", t[own < S - 1], own[own < S - 1] + 1)
    add("same", t, own)
    add("first", t[own > first], torch.full_like(t[own > first], first))
    if ids_s is not None and len(ids_s) == S:
        last = last_seen(ids_s)[own.cpu()].to(device)
        add("induction", t[last >= 0], last[last >= 0] + 1)
    return sums, counts


def last_seen(ids_s: Tensor) -> Tensor:
    """For each place the last one before its neighbour that has the same token, or -1."""
    found = torch.full((len(ids_s),), -1, dtype=torch.int64)
    ids = ids_s.cpu()
    order = torch.argsort(ids, stable=True)
    token, place = ids[order], order
    for back in (1, 2):
        # Same tokens are neighbours in order; the one before may be the neighbour in the text,
        # which does not count, and then the one before that does.
        earlier = torch.full_like(place, -1)
        same = token[back:] == token[:-back]
        earlier[back:][same] = place[:-back][same]
        good = (earlier >= 0) & (earlier < place - 1)
        here = found[place]
        found[place] = torch.where((here < 0) & good, earlier, here)
    return found
