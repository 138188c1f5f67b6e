"""Heads that several ranks share (tensor parallel): which of them are here, and one record of all.

Why: under tensor parallel a rank computes some heads of each layer, and numbers them from 0. A
record of these alone would be of half a model, and its head 0 on the second rank another one.

How: a module that attends knows it by its weights: those that are sharded, as DTensors, over an
axis that has as many numbers here as the heads of the call have, are cut by heads. FSDP2's weights
are whole while a module runs, and cut nothing. When a block ends, the ranks of a group give each
other what they recorded, and join it head by head, by the axes that `schema.py` names; so every
rank has the same record. All ranks must watch, as all must run the model. Heads that were asked for
are chosen after that.

Left out: queries that are spread by another axis than heads; ranks on which other places failed
have those places left out.

Letters: H heads, G key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from regard.lens.captured_call import Call
from regard.lens.lazy_weights import Array
from regard.lens.left_out import LeftOut
from regard.lens.schema import FORMS, Place, plain_form

Finished = tuple[Place, dict[str, Any], dict[str, Array]]
"""A place, the rule that its weights are made by, and its arrays."""
WHOLE = ("scale", "softcap", "cell", "biases")
"""What a rule says of all heads alike."""
RUNS: tuple[str, ...] = ("first", "pairs")


@dataclass(frozen=True, eq=False)
class HeadShard:
    """The heads of a layer that are here: from `first` on, of `total`; `group` has the others."""

    group: Any
    first: int
    total: int

    def local(self, heads: Sequence[int] | None, n_here: int) -> list[int] | None:
        """Those of the heads that are here, by their numbers here; None for all of them."""
        if heads is None:
            return None
        return [head - self.first for head in heads if 0 <= head - self.first < n_here]


def is_sharded(x: Any) -> bool:
    """Whether a tensor is spread over ranks."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def local_part(x: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def cuts_of(x: Any) -> Iterator[tuple[Any, int, int]]:
    """The axes along which a tensor is cut: a mesh of ranks, its axis, and that of the tensor."""
    for axis, placement in enumerate(x.placements):
        if placement.is_shard():
            yield x.device_mesh, axis, placement.dim % x.dim()


def find_shard(weights: Iterable[Tensor], n_heads: int, sizes: Iterable[int]) -> HeadShard | None:
    """How heads are shared among ranks, by the weights of the module that attends.

    sizes: how many numbers all heads have here, in the ways in which weights may hold them.
    """
    sizes = set(sizes)
    for weight in weights:
        if is_sharded(weight):
            here = local_part(weight)
            for mesh, axis, dim in cuts_of(weight):
                if here.shape[dim] in sizes and here.shape[dim] < weight.shape[dim]:
                    total = n_heads * weight.shape[dim] // here.shape[dim]
                    return make_shard(mesh, axis, total)
    return None


def make_shard(mesh: Any, axis: int, total: int) -> HeadShard:
    each = math.ceil(total / mesh.size(axis))
    return HeadShard(mesh.get_group(axis), each * mesh.get_local_rank(axis), total)


def shard_of(module: nn.Module, q: Tensor, k: Tensor) -> HeadShard | None:
    """How the heads of a call (B, H, T, D) are shared that a module makes."""
    (_, H, _, D), G = q.shape, k.shape[1]
    return find_shard(module.parameters(), H, (H * D, (H + 2 * G) * D))


def take_local(call: Call) -> tuple[Call, HeadShard | None]:
    """A call whose tensors are spread over ranks by their heads, with those that are here."""
    shard = None
    for x in (call.q, call.k):
        for mesh, axis, dim in cuts_of(x) if is_sharded(x) else ():
            if dim != 1:
                raise ValueError(
                    "its queries or keys are sharded over ranks along another axis than heads"
                )
            shard = make_shard(mesh, axis, call.shape.H)
    v = None if call.v is None else local_part(call.v)
    return replace(call, q=local_part(call.q), k=local_part(call.k), v=v), shard


def gather(finished: list[Finished], shards: dict[str, HeadShard], left_out: LeftOut) -> None:
    """Make each place that is shared one of all heads, on all ranks of its group."""
    import torch.distributed as dist

    groups = {id(shard.group): shard.group for shard in shards.values()}
    for key, group in groups.items():
        own = {
            place.name: (place, rule, arrays)
            for place, rule, arrays in finished
            if place_shard(place, shards, key)
        }
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, own, group=group)
        for number, (place, _, _) in reversed(list(enumerate(finished))):
            if place.name not in own:
                continue
            try:
                finished[number] = join([part[place.name] for part in parts])
            except (KeyError, ValueError) as error:
                missing = isinstance(error, KeyError)
                why = "another rank could not record it" if missing else str(error)
                left_out.add(place.name, ValueError(f"its heads could not be joined: {why}"))
                del finished[number]


def place_shard(place: Place, shards: dict[str, HeadShard], key: int) -> bool:
    """Whether a place is shared among the ranks of a group."""
    module = place.name.partition("@")[0].partition("[")[0]
    return module in shards and id(shards[module].group) == key


def join(parts: Sequence[Finished]) -> Finished:
    """One place of the heads of all ranks, in their order."""
    places, rules = [part[0] for part in parts], [part[1] for part in parts]
    sizes = [place.n_heads for place in places]
    same = {(p.layer, p.kind, p.n_queries, p.n_keys, p.exact_zoom) for p in places}
    if len(same) > 1 or any(rule[word] != rules[0][word] for rule in rules for word in WHOLE):
        raise ValueError("the ranks recorded different calls; run the same text on all of them")
    place = replace(
        places[0],
        n_heads=sum(sizes),
        heads=tuple(range(sum(sizes))),
        causal=all(p.causal for p in places),
    )
    before, key_heads = 0, []
    for _, rule, arrays in parts:
        key_heads += [head + before for head in rule["key_heads"]]
        before += len(arrays["k"]) if "k" in arrays else max(rule["key_heads"]) + 1
    names = set(parts[0][2]).intersection(*(part[2] for part in parts)) - {*RUNS}
    found = {name: join_arrays(name, [part[2][name] for part in parts], sizes) for name in names}
    found |= join_runs([part[2] for part in parts], sizes, place)
    return place, {**rules[0], "key_heads": key_heads}, found


def join_arrays(name: str, arrays: Sequence[Array], sizes: Sequence[int]) -> Array:
    """An array of all heads; what is not by head is the same on all ranks."""
    axes = FORMS[plain_form(name)].axes.split()
    if name == "k":
        return np.concatenate(arrays)
    if "H" in axes:
        return np.concatenate(arrays, axes.index("H"))
    if axes[0] == "?" and not all(np.array_equal(arrays[0], other) for other in arrays):
        wide = [np.broadcast_to(x, (n, *x.shape[1:])) for x, n in zip(arrays, sizes, strict=True)]
        return np.concatenate(wide)
    return arrays[0]


def join_runs(
    arrays: Sequence[dict[str, Array]], sizes: Sequence[int], place: Place
) -> dict[str, Array]:
    """The runs of keys that rows see: once where all ranks have the same, else head by head."""
    kept: list[dict[str, Array]] = [
        {name: part[name] for name in RUNS if name in part} for part in arrays
    ]
    if all(same_arrays(kept[0], other) for other in kept) and (
        not kept[0] or len(kept[0]["first"]) == place.n_queries + 1
    ):
        return kept[0]
    counts, pairs = [], []
    for part, n_heads in zip(kept, sizes, strict=True):
        by_head = runs_by_head(part, n_heads, place)
        counts += [count for count, _ in by_head]
        pairs += [found for _, found in by_head]
    first = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    return {"first": first, "pairs": np.concatenate(pairs).astype(np.int32)}


def runs_by_head(part: dict[str, Array], n_heads: int, place: Place) -> list[tuple[Array, Array]]:
    """How many runs each row has, and these, for each head."""
    T = place.n_queries
    if "first" not in part:
        every = np.tile(np.array([[0, place.n_keys]], np.int32), (T, 1))
        return [(np.ones(T, np.int64), every)] * n_heads
    first, pairs = part["first"], part["pairs"]
    shared = len(first) == T + 1
    found = []
    for head in range(n_heads):
        rows = first if shared else first[head * T : (head + 1) * T + 1]
        found.append((np.diff(rows), pairs[rows[0] : rows[-1]]))
    return found


def same_arrays(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[x], other[x]) for x in one)


def choose_heads(finished: Finished, heads: Sequence[int]) -> Finished:
    """A place with some of its heads alone."""
    place, rule, arrays = finished
    if not all(0 <= head < place.n_heads for head in heads):
        raise ValueError(f"heads are {tuple(heads)}, and there are {place.n_heads}")
    chosen, key_heads = list(heads), [rule["key_heads"][head] for head in heads]
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        axes = FORMS[plain_form(name)].axes.split()
        if name == "k":
            found[name] = array[key_heads]
        elif "H" in axes:
            found[name] = array.take(chosen, axes.index("H"))
        elif axes[0] == "?" and len(array) == place.n_heads:
            found[name] = array[chosen]
        else:
            found[name] = array
    if "first" in found and len(found["first"]) != place.n_queries + 1:
        by_head = runs_by_head(arrays, place.n_heads, place)
        counts = np.concatenate([by_head[head][0] for head in chosen])
        found["first"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        found["pairs"] = np.concatenate([by_head[head][1] for head in chosen])
    place = replace(place, n_heads=len(chosen), heads=tuple(heads))
    return place, {**rule, "key_heads": list(range(len(chosen)))}, found
