"""Measure one attention call: its row statistics, single weights, and runs of visible keys.

All of it needs O(T + S) memory. `measure` calls `regard.observe`, which works in tiles, on the
device of q and k. `spot_weights` computes selected weights alone, each from one query, one key and
the logsumexp of its row; head scores are summed from these (`head_scores.py`). `find_runs` converts
a mask, of any kind, to runs of neighbouring visible keys, in pieces of bounded memory.

Letters: B batch (here 1), T queries, S keys, H query heads, G key heads, D head width; P pairs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.lens.captured_call import Call
from regard.lens.lazy_weights import Array
from regard.ops import Causal, Observation, Wants
from regard.ops.bias import Bias, BiasAt
from regard.ops.call import Rule, make_call, score_dtype
from regard.ops.kernels import row_stats
from regard.ops.kernels.backend import is_little, refuse_tensors
from regard.ops.kernels.launch import on_device_of
from regard.ops.kernels.rendered import renders_whole
from regard.ops.op import observe_call
from regard.ops.pack import pack
from regard.ops.rule_numbers import age_of
from regard.ops.shape import Shape, Tile
from regard.ops.weight_stats import visible

PIECE = 1 << 24
"""Entries of a mask, or numbers of queries and keys, that are processed at once."""
MOST_RUNS = 1 << 23
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
    """A key for each query, N times, (N, T) int32; -1: none. On the CPU, except in a CUDA graph."""

    keys_nt: Tensor
    _there: dict[torch.device, tuple[Tensor, torch.cuda.Stream, torch.cuda.Event]] = field(
        default_factory=dict
    )

    @functools.cached_property
    def counts(self) -> Tensor:
        """How many queries have a key, (N,)."""
        return (self.keys_nt >= 0).sum(1)

    def on(self, device: torch.device) -> Tensor:
        """The keys on a device: copied there once, from pinned memory, without synchronizing."""
        if self.keys_nt.device == device:
            return self.keys_nt
        here = torch.cuda.current_stream(device)
        if device not in self._there:
            keys_nt = self.keys_nt.pin_memory().to(device, non_blocking=True)
            self._there[device] = keys_nt, here, here.record_event()
        keys_nt, stream, copied = self._there[device]
        # `watch` blocks in other threads, on other streams, share these keys.
        if here != stream:
            here.wait_event(copied)
            keys_nt.record_stream(here)
        return keys_nt


def sum_weights(call: Call, lse_ht: Tensor, named: NamedKeys) -> Tensor:
    """Sums over queries of the weight on each query's named key, (N, H) float64, on q's device."""
    rule = call.rule
    refused = is_little(rule.shape) or refuse_tensors(call.q, call.q.shape[3]) is not None
    refused = refused or renders_whole(rule)
    if not refused:
        keys_nt = named.on(call.q.device)
        with on_device_of(call.q):
            return row_stats.sum_singles(call.q, call.k, rule, lse_ht[None], keys_nt)[:, 0]
    # Many pairs at once, since a step costs about the same for a few of them.
    n_p, t_p = (named.keys_nt >= 0).nonzero(as_tuple=True)
    n_pairs = max(PIECE // (call.shape.H * max(call.q.shape[3], 1)), 1)
    ends = t_p.to(call.q.device), named.keys_nt[n_p, t_p].to(call.q.device)
    pairs = (torch.split(x, n_pairs) for x in ends)
    found = [
        spot_weights(call, lse_ht[None], torch.zeros_like(t), t, s).double()
        for t, s in zip(*pairs, strict=True)
    ]
    # Not `named.counts`, which is cached: in a CUDA graph the keys change.
    counts = torch.bincount(n_p, minlength=len(named.keys_nt)).tolist()
    parts = torch.split(torch.cat(found, 1), counts, 1)
    return torch.stack([part.sum(-1) for part in parts])


def fingerprints(k_gsd: Tensor) -> Tensor:
    """A hash of each key, by which it is recognised: caches may move what they hold."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[k_gsd.element_size()]
    G, S, D = k_gsd.shape
    total = torch.zeros(S, dtype=torch.int64, device=k_gsd.device)
    mix_gd = mixing(G, D, k_gsd.device)
    # As many heads at a time as fit: each of their numbers becomes an int64 of eight bytes.
    step = max(1, FINGERPRINTED // max(S * D, 1))
    for g in range(0, G, step):
        bits_gsd = k_gsd[g : g + step].contiguous().view(bits).long()
        total += (bits_gsd * mix_gd[g : g + step, None]).sum((0, 2))
    return total


@functools.cache
def mixing(n_heads: int, width: int, device: torch.device) -> Tensor:
    """Factors of a key's numbers in its hash, (G, D); the products wrap around."""
    # Computed on the CPU: another stream might read what this one has not finished computing.
    mix_d = torch.arange(width) * 2654435761 + 1013904223
    return (1000003 ** torch.arange(n_heads)[:, None] * mix_d).to(device)


@dataclass(frozen=True, eq=False)
class FoundRuns:
    """The number of runs in each row, (1 or H, T), and all runs in order, (R, 2): lo, hi."""

    counts: Tensor
    pairs: Tensor

    @functools.cached_property
    def seen(self) -> Array:
        """Which keys are seen by any row, up to the last key that is."""
        lo, hi = self.pairs.numpy().T
        edge = np.zeros(hi.max(initial=0) + 1, np.int64)
        np.add.at(edge, lo, 1)
        np.add.at(edge, hi, -1)
        return np.cumsum(edge)[:-1] > 0

    @functools.cached_property
    def reach(self) -> int:
        """One past the last key that any row sees."""
        return int(self.pairs[:, 1].max()) if len(self.pairs) else 0

    @functools.cached_property
    def ahead(self) -> int:
        """The largest (last visible key - row number) of rows that see a key; at least -T."""
        counts, n_rows = self.counts.numpy(), self.counts.shape[1]
        rows = np.repeat(np.tile(np.arange(n_rows), len(counts)), counts.reshape(-1))
        return int((self.pairs[:, 1].numpy() - 1 - rows).max(initial=-n_rows))


def find_runs(rule: Rule) -> FoundRuns | None:
    """The runs of keys that each row sees, by mask and -inf in the bias; None if too many."""
    device = torch.device("cpu") if not rule.tensors() else rule.tensors()[0].device
    ends = _interval(rule, device)
    if ends is not None:
        lo, hi = ends
        some = hi > lo
        return FoundRuns(some.long()[None].cpu(), torch.stack([lo, hi], 1)[some].int().cpu())
    T, S = rule.shape.T, rule.shape.S
    heads = _heads_of(rule, device)
    step = max(PIECE // max(S * heads, 1), 1)
    counts, pairs, total = [], [], 0
    for t0 in range(0, T, step):
        tile = Tile(t0, min(t0 + step, T), 0, S)
        seen = visible(rule, tile, False, device)[0, :heads]
        edge = torch.nn.functional.pad(seen, (1, 1))
        h, t, at = (edge[..., 1:] != edge[..., :-1]).nonzero(as_tuple=True)
        row = (h[::2] * T + t[::2] + t0).cpu()
        pairs.append(torch.stack([row, at[::2].cpu(), at[1::2].cpu()], 1))
        total += len(row)
        if total > MOST_RUNS:
            return None
        counts.append(torch.zeros(heads, tile.t1 - t0, dtype=torch.long))
        counts[-1].view(-1).index_add_(
            0, (h[::2] * (tile.t1 - t0) + t[::2]).cpu(), torch.ones(len(row), dtype=torch.long)
        )
    found = torch.cat(pairs) if pairs else torch.zeros(0, 3, dtype=torch.long)
    order = torch.argsort(found[:, 0], stable=True)
    return FoundRuns(torch.cat(counts, 1), found[order, 1:].int())


def _interval(rule: Rule, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The first and past-the-last key of each row, if the mask knows them without rendering."""
    T, S = rule.shape.T, rule.shape.S
    i = torch.arange(T, device=device)[None] + rule.shape.offset
    if not _hides_nothing(rule.bias, rule.shape):
        return None
    if rule.mask is None:
        return torch.zeros(T, dtype=torch.long), torch.full((T,), S)
    ends = rule.mask.interval(i, rule.shape)
    if ends is None:
        return None
    lo, hi = (x.expand(1, T)[0].clamp(0, S) for x in ends)
    return lo, hi


def _hides_nothing(bias: Bias | None, shape: Shape) -> bool:
    """Whether a bias is known to have no -inf: it declares that, or its table has none."""
    if bias is None or not bias.hides:
        return True
    if bias.parts():
        return all(_hides_nothing(part, shape) for part in bias.parts())
    if not bias.relative and not isinstance(bias, BiasAt):
        return False
    inner, queries, keys = positions_under(bias, shape)
    gaps = torch.arange(int(keys.min() - queries.max()), int(keys.max() - queries.min()) + 1)
    device = next((t.device for t in inner.tensors()), gaps.device)
    return bool((inner.by_distance(gaps.to(device), shape.H) > -math.inf).all())


def positions_under(bias: Bias, shape: Shape) -> tuple[Bias, Array, Array]:
    """A positional bias without its `BiasAt`, and its positions: as given by that, or in order."""
    queries, keys = np.arange(shape.T) + shape.offset, np.arange(shape.S)
    if not isinstance(bias, BiasAt):
        return bias, queries, keys
    if bias.keys is not None:
        keys = bias.keys.reshape(-1).cpu().numpy().astype(np.int64)
    return bias.inner, bias.queries.reshape(-1).cpu().numpy().astype(np.int64), keys


def _heads_of(rule: Rule, device: torch.device) -> int:
    """1 if all heads see the same keys, else H."""
    tile = Tile(0, min(rule.shape.T, 1), 0, min(rule.shape.S, 1))
    parts = []
    if rule.mask is not None:
        parts.append(rule.mask.block(rule.shape, tile, device))
    if rule.bias is not None and not _hides_nothing(rule.bias, rule.shape):
        parts.append(rule.bias.block(rule.shape, tile, device, torch.float32))
    wide = max((part.shape[-3] if part.dim() >= 3 else 1 for part in parts), default=1)
    return rule.shape.H if wide > 1 else 1


def rule_key(rule: Rule, number: Any = None) -> Any:
    """A key that identifies a rule, without reading large tensors; `number` stands for these."""
    packed = pack(rule)
    if number is not None:
        return number, packed.form, tuple(packed.ints), tuple(packed.floats), rule.shape
    tensors = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, age_of(t)) for t in packed.tensors)
    return packed.form, tensors, tuple(packed.ints), tuple(packed.floats), rule.shape
