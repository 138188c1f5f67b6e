"""Which keys each query may see: a mask of any kind as runs of neighbouring keys, found by rows.

Why: a record stores runs instead of a mask matrix, and which queries and keys are padding follows
from them. And libraries render simple rules as matrices, which takes longer to measure with.

How: most masks know their rows' first and last key. Others are rendered in pieces of bounded
memory. A row that sees one run is told by its first key and its number of keys, so only these leave
the device; all edges are looked for only where some row sees several runs. Runs that are those of a
causal mask, a window or padding, or of these together, are recognised, and the matrix is then
replaced by such masks, for measuring.

Letters: B batch, T queries, S keys, H query heads; R runs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from regard.lens.captured_call import Call
from regard.lens.lazy_weights import Array
from regard.ops import Causal, Dense, Lengths, Mask, Window
from regard.ops.bias import Bias, BiasAt
from regard.ops.call import Rule
from regard.ops.shape import Shape, Tile
from regard.ops.weight_stats import visible

PIECE = 1 << 24
"""Entries of a mask that are rendered at once."""
MOST_RUNS = 1 << 23


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


@dataclass(frozen=True, eq=False)
class Seen:
    """What the rows of a batch see. runs: of each text; None if there are too many.

    known: a mask that is the same, if the call's own was a matrix and was recognised; in a tuple,
    since None is a mask too, by which all keys are seen.
    """

    runs: tuple[FoundRuns | None, ...]
    known: tuple[Mask | None] | None = None

    def simplify(self, call: Call) -> Call:
        """The call under the recognised mask."""
        return call if self.known is None else replace(call, mask=self.known[0])


def find_seen(call: Call) -> Seen:
    """What the rows of a call see, by mask and -inf in the bias."""
    rules = [call.of(row, None).rule for row in range(call.shape.B)]
    runs = tuple(map(find_runs, rules))
    if call.mask is None or _interval(rules[0], call.q.device) is not None:
        return Seen(runs)
    whole = [one for one in runs if one is not None]
    known = recognise(whole, call.rule.shape) if len(whole) == len(runs) else None
    if known is not None and known[0] is not None:
        known = (known[0].to(call.q.device),)
    return Seen(runs, known)


def find_runs(rule: Rule) -> FoundRuns | None:
    """The runs of keys that each row sees, by mask and -inf in the bias; None if too many."""
    device = torch.device("cpu") if not rule.tensors() else rule.tensors()[0].device
    heads = 1
    ends = _interval(rule, device)
    if ends is None:
        heads = _heads_of(rule, device)
        ends = _rendered_interval(rule, device) if heads == 1 else None
    if ends is None:
        return _find_edges(rule, heads, device)
    lo, hi = ends
    some = hi > lo
    return FoundRuns(some.long()[None].cpu(), torch.stack([lo, hi], 1)[some].int().cpu())


def _rendered_interval(rule: Rule, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """As `_interval`, of a mask that has to be rendered; None if some row sees several runs."""
    T, S = rule.shape.T, rule.shape.S
    if not S:
        return torch.zeros(T, dtype=torch.long), torch.zeros(T, dtype=torch.long)
    step, found = max(PIECE // S, 1), []
    for t0 in range(0, T, step):
        seen = visible(rule, Tile(t0, min(t0 + step, T), 0, S), False, device)[0, 0]
        begins = seen[:, :1].sum(1) + (seen[:, 1:] & ~seen[:, :-1]).sum(1)
        found.append(torch.stack([begins, seen.to(torch.uint8).argmax(1), seen.sum(1)]))
    begins, lo, n = torch.cat(found, 1).cpu() if found else torch.zeros(3, 0, dtype=torch.long)
    return None if (begins > 1).any() else (lo, lo + n)


def _find_edges(rule: Rule, heads: int, device: torch.device) -> FoundRuns | None:
    """The runs of a mask of any form, by the edges of each row."""
    T, S = rule.shape.T, rule.shape.S
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


def recognise(runs: Sequence[FoundRuns], shape: Shape) -> tuple[Mask | None] | None:
    """The mask of the texts of a batch, in a tuple: causal, a window, padding; None if another."""
    T, S = shape.T, shape.S
    if not T or not S or any(len(one.counts) > 1 or (one.counts > 1).any() for one in runs):
        return None
    lo, hi = (np.zeros((len(runs), T), np.int64) for _ in range(2))
    for text, one in enumerate(runs):
        sees = one.counts[0].numpy() > 0
        lo[text, sees], hi[text, sees] = one.pairs.numpy().T
    some = hi > lo
    begin = np.where(some, lo, S).min(1, initial=S)[:, None]
    end = hi.max(1, initial=0)[:, None]
    own = np.arange(T)[None] + S - T
    widest = int((hi - lo).max())
    for causal, width in ((False, S), (True, S), (True, widest)):
        want_lo, want_hi = begin, np.minimum(end, own + 1) if causal else end
        want_lo = np.maximum(begin, own + 1 - width) if width < S else want_lo
        visible_here = want_hi > want_lo
        alike = (some == visible_here) & (~some | ((lo == want_lo) & (hi == want_hi)))
        if alike.all():
            parts: list[Mask] = []
            if causal:
                parts.append(Window(width - 1, 0) if width < S else Causal())
            if (begin > 0).any():
                parts.append(Lengths(torch.from_numpy((S - begin)[:, 0]), side="left"))
            if (end < (np.minimum(own[:, -1:] + 1, S) if causal else S)).any():
                parts.append(Lengths(torch.from_numpy(end[:, 0])))
            return (functools.reduce(operator.and_, parts) if parts else None,)
    return None


def mask_of(runs: FoundRuns, shape: Shape, device: torch.device) -> Mask | None:
    """A mask by which the rows of one text see these runs of the first keys, `shape.S` of them."""
    known = recognise([runs], shape)
    if known is not None:
        return None if known[0] is None else known[0].to(device)
    heads, T = runs.counts.shape
    rows = np.repeat(np.arange(heads * T), runs.counts.reshape(-1).numpy())
    edge = np.zeros((heads * T, shape.S + 1), np.int8)
    lo, hi = runs.pairs.numpy().T
    np.add.at(edge, (rows, lo), 1)
    np.add.at(edge, (rows, hi), -1)
    seen = np.cumsum(edge, 1, dtype=np.int8)[:, :-1] > 0
    return Dense(torch.from_numpy(seen).view(1, heads, T, shape.S).to(device))


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
