"""A take: the calls of one attention layer for one text, stitched into one matrix as they come in.

Why: in generation a layer is called for the prompt and then for each token, with keys from a cache
that grows, slides, or has fixed slots. A record is one matrix, so the rows and keys of each call
must be located in it.

How: `fit` finds which keys of a call are those of the record, by comparing hashes of them with
those of earlier calls: growing and fixed caches keep them at the front, sliding ones keep the last.
A call that continues nothing is another take, for which the recorder opens a new place. `add`
measures the call on its own device, where the results stay until `finish`, so that nothing
synchronizes. Large ones are copied to the CPU at once (`device_to_host.py`): those of a first call,
in case it stays the only one, and with keep="qk" queries and new keys, which are many.

Letters: B batch (1 in a take), T queries, S keys, H heads, G key heads, D head width; N keys so
far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.lens.bias_forms import Biases, TooLarge
from regard.lens.by_identity import ByIdentity
from regard.lens.captured_call import Call
from regard.lens.contributions import value_norms
from regard.lens.cuda_graphs import Replays
from regard.lens.device_to_host import HostCopier, HostCopy, is_large
from regard.lens.head_scores import NamedSpots
from regard.lens.lazy_weights import Array
from regard.lens.look_at_calls import Asked, look
from regard.lens.mask_runs import FoundRuns, mask_of
from regard.lens.measure import NamedKeys, fingerprints, sum_weights
from regard.lens.schema import Place
from regard.ops import Causal, Map, Mask, Wants
from regard.ops.mask import At

DIRECT = 1 << 22
"""Weights of a call up to which a map is always computed from q and k, without a base map."""
BASE_CELLS = 1024
PICTURE = 128
"""Cells per side of the map that is kept with statistics."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A call, cut to the keys that belong to the record; the first is key `offset` there."""

    call: Call
    offset: int
    runs: FoundRuns | None


class Queries(NamedTuple):
    """`sees`: queries that see some key; `real`: whose own key is seen too, (T,), on the CPU.

    spots: the keys of head scores, named for the real queries.
    """

    sees: Tensor
    real: Tensor
    spots: NamedKeys


class Step(NamedTuple):
    """A call that is being added to a take, before it is measured.

    own: the positions of its queries among its keys. queries: None if only its row sums tell.
    """

    fit: Fit
    asked: Asked
    own: Array
    queries: Queries | None


class OneText(NamedTuple):
    """The copies of one text's results among those of a batch."""

    batch: HostCopy
    row: int

    def result(self) -> dict[str, Tensor]:
        return {name: x[self.row] for name, x in self.batch.result().items()}


@dataclass(eq=False)
class Take:
    """What has been recorded of one place; `replace(take)` is an empty take of the same place."""

    name: str
    layer: int
    wants: Wants
    keep: str
    copier: HostCopier
    cross: bool
    heads: tuple[int, ...]
    replays: Replays
    named: NamedSpots
    queries: ByIdentity[Queries]
    projection_hce: Tensor | None = None

    def __post_init__(self) -> None:
        self.reads: list[int] = []
        self.norms: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        self.n_queries = self.n_keys = self.calls = self.first = 0
        self.n_rows, self.entry = 1, 0
        self.exact = self.causal = self.whole_pictures = True
        self.ids: list[Tensor] | None = []
        self.prints: Tensor | None = None
        self.rule: dict[str, Any] = {}
        self.rows: dict[str, list[Tensor]] = {}
        self.by_key: dict[str, Tensor] = {}
        self.early: HostCopy | OneText | None = None
        self.kept: list[HostCopy] = []
        self.runs: list[tuple[Tensor, Tensor]] = []
        self.biases = Biases()
        self.pictures: list[tuple[int, Tensor]] = []
        self.own: list[Array] = []
        self.base: tuple[int, HostCopy] | None = None
        self.spots: Tensor | None = None
        self.spot_counts: Any = 0

    def fit(self, call: Call, runs: FoundRuns | None) -> Fit | None:
        """The call as part of this take, or None if it does not continue it."""
        T, S, N = call.shape.T, call.shape.S, self.n_keys
        reach = S if runs is None or not len(runs.pairs) else runs.reach
        if not self.calls:
            # A fixed cache has slots to which nothing was written yet.
            # Torch's `is_causal` by itself says nothing of a cache: keys that it hides are kept.
            told = is_known_by_runs(call, runs) and not isinstance(call.mask, Causal)
            cached = not self.cross and S > T and (call.follows_keys or told)
            return first_keys(call, max(T, reach) if cached else S, runs)
        prints, known = fingerprints(call.k)[0], self.prints
        if known is None or known.device != prints.device:
            return None
        if self.cross:
            return Fit(call, 0, runs) if torch.equal(prints, known) else None
        if S >= N + T and reach > N and torch.equal(prints[:N], known):
            return first_keys(call, N + T, runs) if reach <= N + T else None
        back = S - T
        if 0 < back < N and torch.equal(prints[:back], known[N - back :]):
            return Fit(call, N - back, runs)
        return None

    def fit_slots(self, call: Call) -> Call | None:
        """The call with its keys in the order of their positions, if its mask has positions."""
        at = key_positions(call.mask)
        if at is None or not self.calls:
            return None
        order = torch.argsort(at, stable=True)
        order = order[at[order] >= 0]
        return call.with_keys(order) if len(order) else None

    def grows(self, call: Call, ids: Tensor | None) -> bool:
        """Whether the call reads the same text from its start again, and more of it."""
        if self.cross or ids is None or not self.ids or call.shape.T != call.shape.S:
            return False
        known = torch.cat(self.ids)
        return len(ids) > len(known) and torch.equal(ids[: len(known)], known)

    @torch.no_grad()
    def add(self, fit: Fit, ids: Tensor | None) -> None:
        """Measure a call and add it; ids: its tokens, if they are known."""
        step = self.begin(fit, ids)
        spots = None if step.queries is None else step.queries.spots
        found = look(fit.call, step.asked, spots, None if self.calls else self.replays)
        self.end(step, {name: x[0] for name, x in found.items()})
        large = {name: x for name, x in self.first_call().items() if is_large(x)}
        self.early = self.copier.copy(large, final=True)

    def begin(self, fit: Fit, ids: Tensor | None) -> Step:
        """Note what is known of a call before it is measured; `end` follows."""
        call, offset, runs = fit.call, fit.offset, fit.runs
        T, S = call.shape.T, call.shape.S
        own = np.arange(T) + S - T
        self.own.append(own + offset)
        known = self.ids is not None and ids is not None and len(ids) == T
        self.ids = [*(self.ids or []), ids.cpu()] if known and ids is not None else None
        if runs is None:
            self.exact = self.causal = False
        else:
            self.runs.append((runs.counts, runs.pairs + offset))
            self.causal = self.causal and runs.ahead <= S - T
        if not self.calls:
            self._begin(call, runs)
        asked = self._ask(fit, max(offset + S - self.n_keys, 0))
        if runs is None or call.sinks is not None:
            return Step(fit, asked, own, None)
        if self.calls:
            return Step(fit, asked, own, self._count(fit, None, own))
        # Layers share a text and its mask, so that their first calls have the same queries.
        form, given = (T, S, self.cross), (runs, self.ids[0] if self.ids else None)
        queries = self.queries.once(form, given, lambda: self._count(fit, None, own))
        return Step(fit, asked, own, queries)

    def end(self, step: Step, found: dict[str, Tensor]) -> None:
        """Add the measurements of a call, without the axis of the batch."""
        fit, asked, own, queries = step
        call, offset, S = fit.call, fit.offset, fit.call.shape.S
        if queries is None:
            lse_ht = found["lse"]
            queries = self._count(fit, lse_ht, own)
            found["spots"] = sum_weights(call, lse_ht[None], queries.spots)[0]
        self._add_found(fit, found, queries)
        if self.keep == "qk" and self.exact:
            self._keep(call, offset, own + offset)
        if self.projection_hce is not None and call.v is not None:
            self.norms.append(value_norms(call.v[0, :, S - asked.new :], self.projection_hce))
        self.reads.append(call.shape.T - (0 if self.calls else sum(self.reads)))
        self.n_keys += asked.new
        self.n_queries += call.shape.T
        self.calls += 1

    def ends_of(self, name: str) -> tuple[float, float] | None:
        """The smallest and the largest number of a statistic in a whole batch, if it has one."""
        if not isinstance(self.early, OneText) or (self.cross and name == "distance"):
            return None
        batch = self.early.batch
        return batch.ends_of(name) if name in batch.result() else None

    def first_call(self) -> dict[str, Tensor]:
        """The measurements of the first call, as long as it is the only one."""
        return self._measured() if self.calls == 1 else {}

    def _begin(self, call: Call, runs: FoundRuns | None) -> None:
        group = call.shape.H // call.k.shape[1]
        self.rule = {
            "scale": float(call.rule.factor(call.q.shape[3])),
            "softcap": None if call.softcap is None else float(call.softcap),
            "key_heads": [h // group for h in range(call.shape.H)],
        }
        if runs is not None and len(runs.pairs):
            self.first = int(runs.pairs[:, 0].min())

    def _ask(self, fit: Fit, new: int) -> Asked:
        """Choose what to measure of a call."""
        call, runs = fit.call, fit.runs
        T, S = call.shape.T, call.shape.S
        wants, base = replace(self.wants, lse=True), None
        if wants.map is None and self.keep == "statistics":
            wants = replace(wants, map=(min(T, PICTURE), min(S, PICTURE)))
        elif self.keep == "qk" and not self.calls and T * S > DIRECT:
            cell = base_cell(call)
            down, across = T // cell, S // cell
            if down and across:
                ends = (0, down * cell), (0, across * cell)
                base = Map(height=down, width=across, queries=ends[0], keys=ends[1])
        reaches = self.wants.distance and not self.cross
        ahead = runs is None or runs.ahead > S - T
        return Asked(wants, base, fit.offset, new, reaches, ahead)

    def _key_ids(self, offset: int, S: int) -> Tensor | None:
        if self.ids is None or self.cross:
            return None
        known = torch.cat(self.ids)[offset:]
        return known if len(known) == S else None

    def _count(self, fit: Fit, lse_ht: Tensor | None, own: Array) -> Queries:
        """The queries that count; lse_ht: needed where the mask alone does not determine it."""
        call, runs = fit.call, fit.runs
        if lse_ht is not None:
            sees = (lse_ht > -math.inf).any(0).cpu()
        else:  # the mask's runs are on the CPU, so this does not synchronize
            assert runs is not None
            sees = (runs.counts > 0).any(0)
        real = sees
        if not self.cross and runs is not None:
            covered = np.zeros(call.shape.S, np.bool_)
            covered[: len(runs.seen)] = runs.seen
            real = sees & torch.from_numpy(covered[own])
        first, ids = max(self.first - fit.offset, 0), self._key_ids(fit.offset, call.shape.S)
        return Queries(sees, real, self.named.find(call.shape, real, first, ids, self.cross))

    def _add_found(self, fit: Fit, found: dict[str, Tensor], queries: Queries) -> None:
        """Append the measurements of a call to those of earlier calls."""
        call, offset = fit.call, fit.offset
        spots, prints = found.pop("spots"), found.pop("prints")
        self.spots = spots if self.spots is None else self.spots.to(spots) + spots
        counts = queries.spots.counts[0, :, None].expand(-1, call.shape.H)
        self.spot_counts = self.spot_counts + counts.numpy()
        self.prints = prints if self.prints is None else torch.cat([self.prints, prints])
        for name in ("received", "seen_by"):
            if name in found:
                self.by_key[name] = put_at(self.by_key.get(name), found.pop(name), offset)
        if "base" in found:
            self.base = (base_cell(call), self.copier.copy({"base": found.pop("base")}))
        if "map" in found:
            picture = found.pop("map")
            self.whole_pictures &= picture.shape[1:] == (call.shape.T, call.shape.S)
            self.pictures.append((offset, picture))
        real = queries.sees.int() + (queries.sees & queries.real).int()
        for name, values in {"real": real.to(torch.uint8), **found}.items():
            self.rows.setdefault(name, []).append(values)

    def _keep(self, call: Call, offset: int, own: Array) -> None:
        try:
            self.biases.add(call, offset, own)
        except TooLarge:
            self.exact, self.kept = False, []
            return
        new = {"q": call.q[0], "k": call.k[0, :, self.n_keys - offset :]}
        self.kept.append(self.copier.copy(new))

    def finish(self) -> tuple[Place, dict[str, Any], dict[str, Array]]:
        H, arrays = len(self.rule["key_heads"]), self._statistics()
        exact = self.keep == "qk" and self.exact
        rule: dict[str, Any] = {**self.rule, "cell": 0, "biases": []}
        if exact:
            parts = [copy.result() for copy in self.kept]
            arrays |= {name: as_array(join([part[name] for part in parts], 1)) for name in "qk"}
            arrays |= self._runs()
            for number, bias in enumerate(self.biases.write()):
                rule["biases"].append({"kind": bias.kind, "lowest": bias.lowest})
                arrays |= {f"bias{number}.{name}": x for name, x in bias.arrays.items()}
            if self.base is not None:
                rule["cell"], base = self.base
                arrays["base"] = base.result()["base"].numpy()
        place = Place(
            name=self.name,
            layer=self.layer,
            kind="cross" if self.cross else "self",
            n_heads=H,
            n_queries=self.n_queries,
            n_keys=self.n_keys,
            causal=self.causal and not self.cross,
            heads=self.heads or tuple(range(H)),
            exact_zoom=exact,
        )
        return place, rule, arrays

    def _measured(self) -> dict[str, Tensor]:
        measured = {
            name: join(parts, dim=0 if name == "real" else 1)
            for name, parts in self.rows.items()
            # If no key comes after its query, the reach equals the distance.
            if {"lse": self.keep == "qk" and self.exact, "reach": not self.causal}.get(name, True)
        }
        if len(self.pictures) == 1 == self.calls:
            measured["map"] = self.pictures[0][1]
        return measured | self.by_key

    def _statistics(self) -> dict[str, Array]:
        early = {} if self.early is None else self.early.result()
        assert self.spots is not None
        measured = self._measured() | early
        arrays: dict[str, Array] = {name: x.cpu().numpy() for name, x in measured.items()}
        if self.cross and "distance" in arrays:
            # A call's distances count from its own last query, a record's from the last of all.
            wanted = np.arange(self.n_queries) + self.n_keys - self.n_queries
            moved = (wanted - np.concatenate(self.own)) * (arrays["real"] > 0)
            arrays["distance"] = arrays["distance"] + moved.astype(arrays["distance"].dtype)
        if self.norms:
            arrays["value_norms"] = join(self.norms, 1).cpu().numpy()
        if len(self.reads) > 1:
            arrays["steps"] = np.array(self.reads, np.int32)
        if self.calls == 1 and len(self.gradients) == 2:
            arrays |= {f"gradient_{name}": x.cpu().numpy() for name, x in self.gradients.items()}
        arrays["spots"], arrays["counts"] = self.spots.double().cpu().numpy(), self.spot_counts
        if self.ids:
            arrays["ids"] = torch.cat(self.ids).long().numpy()
        if "map" not in arrays and self.whole_pictures:
            arrays |= self._joint_picture()
        return arrays

    def _joint_picture(self) -> dict[str, Array]:
        """The map of the whole record, if every call measured a cell for each weight."""
        rows = sum(picture.shape[1] for _, picture in self.pictures)
        ends = max((at + picture.shape[2] for at, picture in self.pictures), default=0)
        if (rows, ends) != (self.n_queries, self.n_keys):
            return {}
        wide = [F.pad(x.cpu(), (at, ends - at - x.shape[2])) for at, x in self.pictures]
        return {"map": torch.cat(wide, 1).numpy()}

    def _runs(self) -> dict[str, Array]:
        """The runs of all rows; empty if every row sees every key."""
        first, pairs = [], []
        for head in range(max(len(counts) for counts, _ in self.runs)):
            for counts, found in self.runs:
                each = head if len(counts) > 1 else 0
                first.append(counts[each])
                pairs.append(torch.split(found, counts.sum(1).tolist())[each])
        counts_all, pairs_all = torch.cat(first), torch.cat(pairs).int()
        full = torch.tensor([0, self.n_keys], dtype=torch.int32)
        if bool((counts_all == 1).all()) and bool((pairs_all == full).all()):
            return {}
        starts = F.pad(counts_all.cumsum(0), (1, 0))
        return {"first": starts.numpy(), "pairs": pairs_all.numpy()}


def base_cell(call: Call) -> int:
    """Rows and keys per cell of the base map, a power of 2."""
    return int(2 ** math.ceil(math.log2(max(call.shape.T, call.shape.S) / BASE_CELLS)))


def first_keys(call: Call, n: int, runs: FoundRuns | None) -> Fit:
    """The call cut to its first n keys; the others are not visible."""
    if n == call.shape.S:
        return Fit(call, 0, runs)
    if call.follows_keys:
        return Fit(call.with_keys(slice(0, n)), 0, runs)
    if not is_known_by_runs(call, runs):
        raise ValueError(
            f"{call.name} has empty cache slots, and a mask or bias that counts from the last key; "
            "this cache cannot be recorded"
        )
    assert runs is not None
    cut = replace(call, mask=None, rule_number=None).with_keys(slice(0, n))
    return Fit(replace(cut, mask=mask_of(runs, cut.shape, call.q.device)), 0, runs)


def is_known_by_runs(call: Call, runs: FoundRuns | None) -> bool:
    """Whether a call's rule can be told by what its rows see, and a bias that follows the keys."""
    return runs is not None and (call.bias is None or call.bias.follows_keys)


def key_positions(mask: Mask | None) -> Tensor | None:
    """The positions that a mask gives to keys, (S,), or None."""
    leaves = [] if mask is None else mask.leaf_terms()
    given = (leaf.keys for leaf in leaves if isinstance(leaf, At) and leaf.keys is not None)
    keys = next(given, None)
    return None if keys is None else keys.reshape(-1, keys.shape[-1])[0]


def join(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate parts; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def put_at(known: Tensor | None, new: Tensor, offset: int) -> Tensor:
    """Add numbers by key, from key `offset` on, to those of earlier calls."""
    if known is None and not offset:
        return new
    size = max(0 if known is None else known.shape[1], offset + new.shape[1])
    total = F.pad(new, (offset, size - offset - new.shape[1]))
    return total if known is None else total + F.pad(known, (0, size - known.shape[1]))


def as_array(values: Tensor) -> Array:
    """A tensor as an array; bfloat16, which numpy lacks, as its bits."""
    if values.dtype == torch.bfloat16:
        return values.contiguous().view(torch.int16).numpy().view(np.uint16)
    return values.contiguous().numpy()
