"""Measure attention calls: row statistics, single weights, and what identifies keys and rules.

All of it needs O(T + S) memory. `measure` calls `regard.observe`, which works in tiles, on the
device of q and k. `spot_weights` computes selected weights alone, each from one query, one key and
the logsumexp of its row; head scores are summed from these (`head_scores.py`).

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width; P pairs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.lens.captured_call import Call
from regard.ops import Causal, Observation, Wants
from regard.ops.call import Rule, make_call, score_dtype
from regard.ops.kernels import row_stats
from regard.ops.kernels.backend import is_little, refuse_tensors
from regard.ops.kernels.launch import on_device_of
from regard.ops.kernels.rendered import renders_whole
from regard.ops.op import observe_call
from regard.ops.pack import pack
from regard.ops.rule_numbers import age_of

PIECE = 1 << 24
"""Numbers of queries and keys that are processed at once."""
FINGERPRINTED = 1 << 23
"""Numbers of keys that are hashed at once."""


def measure(call: Call, wants: Wants) -> Observation:
    rule = {name: getattr(call, name) for name in ("mask", "bias", "scale", "softcap", "sinks")}
    asked = make_call(call.q, call.k, call.k[..., :0], **rule)
    seen = observe_call(replace(asked, rows=call.rows), wants)
    return replace(seen, output=None)


def reach(call: Call, seen: Observation) -> Tensor:
    """The mean of |i - j| under each row's weights, (B, H, T): how far it looks, to either side.

    Computed as twice the distance to the left, minus the signed distance; for the left side the
    call is measured once more under a causal mask.
    """
    assert seen.lse is not None and seen.distance is not None
    mask = Causal() if call.mask is None else call.mask & Causal()
    left = measure(replace(call, mask=mask, rows=None), Wants(lse=True, distance=True))
    assert left.lse is not None and left.distance is not None
    share = (left.lse - seen.lse).exp().masked_fill(left.lse == -math.inf, 0.0)
    return 2 * left.distance * share - seen.distance


def spot_weights(call: Call, lse_bht: Tensor, b_p: Tensor, t_p: Tensor, s_p: Tensor) -> Tensor:
    """The weights of query t_p[p] on key s_p[p] in text b_p[p], (H, P); t_p counts rows from 0."""
    rule, shape = call.rule, call.shape
    dtype = score_dtype(call.q.dtype)
    h_h1 = torch.arange(shape.H, device=call.q.device)[:, None]
    group = shape.H // call.k.shape[1]
    q_hpd = call.q[b_p, :, t_p].movedim(1, 0).to(dtype) * rule.factor(call.q.shape[3])
    k_hpd = call.k[b_p, :, s_p].movedim(1, 0).to(dtype)
    k_hpd = k_hpd.repeat_interleave(group, 0) if group > 1 else k_hpd
    scores_hp = (q_hpd * k_hpd).sum(-1)
    if rule.softcap is not None:
        scores_hp = rule.softcap * torch.tanh(scores_hp / rule.softcap)
    b_1p, i_1p, j_1p = b_p[None], (t_p + shape.offset)[None], s_p[None]
    if rule.bias is not None:
        scores_hp = scores_hp + rule.bias.add(b_1p, h_h1, i_1p, j_1p, shape, dtype)
    if rule.mask is not None:
        hidden = ~rule.mask.allows(b_1p, h_h1, i_1p, j_1p, shape)
        scores_hp = scores_hp.masked_fill(hidden, -math.inf)
    sums_hp = lse_bht[b_p, :, t_p].T
    empty = sums_hp == -math.inf
    return (scores_hp - sums_hp.masked_fill(empty, 0.0)).exp().masked_fill(empty, 0.0)


@dataclass(frozen=True, eq=False)
class NamedKeys:
    """A key for each query, N times for each text of a batch, (B, N, T) int32; -1: none.

    On the CPU, except in a CUDA graph.
    """

    keys_bnt: Tensor
    _there: dict[torch.device, tuple[Tensor, torch.cuda.Stream, torch.cuda.Event]] = field(
        default_factory=dict
    )

    @functools.cached_property
    def counts(self) -> Tensor:
        """How many queries have a key, (B, N)."""
        return (self.keys_bnt >= 0).sum(2)

    def on(self, device: torch.device) -> Tensor:
        """The keys on a device: copied there once, from pinned memory, without synchronizing."""
        if self.keys_bnt.device == device:
            return self.keys_bnt
        here = torch.cuda.current_stream(device)
        if device not in self._there:
            keys_bnt = self.keys_bnt.pin_memory().to(device, non_blocking=True)
            self._there[device] = keys_bnt, here, here.record_event()
        keys_bnt, stream, copied = self._there[device]
        # `watch` blocks in other threads, on other streams, share these keys.
        if here != stream:
            here.wait_event(copied)
            keys_bnt.record_stream(here)
        return keys_bnt


def sum_weights(call: Call, lse_bht: Tensor, named: NamedKeys) -> Tensor:
    """Sums over queries of the weight on each query's named key, (B, N, H) float64, where q is."""
    rule = call.rule
    refused = is_little(rule.shape) or refuse_tensors(call.q, call.q.shape[3]) is not None
    refused = refused or renders_whole(rule)
    if not refused:
        keys_bnt = named.on(call.q.device)
        with on_device_of(call.q):
            return row_stats.sum_singles(call.q, call.k, rule, lse_bht, keys_bnt)
    # Many pairs at once, since a step costs about the same for a few of them.
    b_p, n_p, t_p = (named.keys_bnt >= 0).nonzero(as_tuple=True)
    n_pairs = max(PIECE // (call.shape.H * max(call.q.shape[3], 1)), 1)
    ends = (x.to(call.q.device) for x in (b_p, t_p, named.keys_bnt[b_p, n_p, t_p]))
    pairs = (torch.split(x, n_pairs) for x in ends)
    found = [spot_weights(call, lse_bht, b, t, s).double() for b, t, s in zip(*pairs, strict=True)]
    # Not `named.counts`, which is cached: in a CUDA graph the keys change.
    B, N, _ = named.keys_bnt.shape
    counts = torch.bincount(b_p * N + n_p, minlength=B * N).tolist()
    parts = torch.split(torch.cat(found, 1), counts, 1)
    return torch.stack([part.sum(-1) for part in parts]).view(B, N, -1)


def fingerprints(k_bgsd: Tensor) -> Tensor:
    """A hash of each key, (B, S), by which it is recognised: caches may move what they hold."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[k_bgsd.element_size()]
    B, G, S, D = k_bgsd.shape
    total = torch.zeros(B, S, dtype=torch.int64, device=k_bgsd.device)
    mix_gd = mixing(G, D, k_bgsd.device)
    # As many heads at a time as fit: each of their numbers becomes an int64 of eight bytes.
    step = max(1, FINGERPRINTED // max(B * S * D, 1))
    for g in range(0, G, step):
        bits_bgsd = k_bgsd[:, g : g + step].contiguous().view(bits).long()
        total += (bits_bgsd * mix_gd[g : g + step, None]).sum((1, 3))
    return total


@functools.cache
def mixing(n_heads: int, width: int, device: torch.device) -> Tensor:
    """Factors of a key's numbers in its hash, (G, D); the products wrap around."""
    # Computed on the CPU: another stream might read what this one has not finished computing.
    mix_d = torch.arange(width) * 2654435761 + 1013904223
    return (1000003 ** torch.arange(n_heads)[:, None] * mix_d).to(device)


def rule_key(rule: Rule, number: Any = None, now: int = 0) -> Any:
    """A key that identifies a rule, without reading large tensors; `number` stands for these.

    now: see `age_of`.
    """
    packed = pack(rule)
    if number is not None:
        return number, packed.form, tuple(packed.ints), tuple(packed.floats), rule.shape
    tensors = tuple(
        (t.data_ptr(), t.shape, t.stride(), t.dtype, age_of(t, now)) for t in packed.tensors
    )
    return packed.form, tensors, tuple(packed.ints), tuple(packed.floats), rule.shape
