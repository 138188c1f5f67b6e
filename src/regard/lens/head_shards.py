"""Heads sharded over ranks (tensor parallel): which of them are local, and one record of all.

Why: under tensor parallel a rank computes some heads of each layer, and numbers them from 0. A
record of these alone would show part of a model, and its head 0 would be a different head on each
rank.

How: the shards are found from the weights of the attention module: DTensors that are sharded along
an axis whose local size matches the heads of the call are cut by heads. FSDP2 unshards its weights
while a module runs, so they are not mistaken for this. When a block ends, the ranks of a group
exchange what they recorded and join it head by head, along the axes that `schema.py` names; so
every rank has the same record. All ranks must watch, as all must run the model. A selection of
heads is applied after that.

Left out: queries that are sharded along another axis than heads; places that failed on some rank
are left out on all.

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
"""A place, the rule from which its weights are computed, and its arrays."""
WHOLE = ("scale", "softcap", "cell", "biases")
"""Fields of a rule that must be equal on all ranks."""
RUNS: tuple[str, ...] = ("first", "pairs")


@dataclass(frozen=True, eq=False)
class HeadShard:
    """The local heads of a layer: from head `first` on, of `total`; `group` holds all of them."""

    group: Any
    first: int
    total: int

    def local(self, heads: Sequence[int] | None, n_here: int) -> list[int] | None:
        """The local ones of these heads, by their local numbers; None for all of them."""
        if heads is None:
            return None
        return [head - self.first for head in heads if 0 <= head - self.first < n_here]


def is_sharded(x: Any) -> bool:
    """Whether a tensor is a DTensor."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def local_part(x: Tensor) -> Tensor:
    """This rank's local part of a tensor."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def cuts_of(x: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield (mesh, mesh axis, tensor axis) for each axis along which a DTensor is sharded."""
    for axis, placement in enumerate(x.placements):
        if placement.is_shard():
            yield x.device_mesh, axis, placement.dim % x.dim()


def find_shard(weights: Iterable[Tensor], n_heads: int, sizes: Iterable[int]) -> HeadShard | None:
    """Find how heads are sharded, from the weights of the attention module; None if they are not.

    sizes: the possible local sizes of a weight's head axis, such as H · D.
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
    """How the heads of a module's call, (B, H, T, D), are sharded."""
    (_, H, _, D), G = q.shape, k.shape[1]
    return find_shard(module.parameters(), H, (H * D, (H + 2 * G) * D))


def take_local(call: Call) -> tuple[Call, HeadShard | None]:
    """The call with the local parts of its tensors, and the shard if they are sharded by heads."""
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
    """Join each sharded place over its group of ranks, in place; failures go to `left_out`."""
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
    """Whether a place is sharded over the group with this id."""
    module = place.name.partition("@")[0].partition("[")[0]
    return module in shards and id(shards[module].group) == key


def join(parts: Sequence[Finished]) -> Finished:
    """Join one place from all ranks: the heads in the order of ranks."""
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
    """Join an array over ranks; an array without a head axis is the same on all ranks."""
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
    """Join the runs of visible keys: shared by all heads if all ranks agree, else head by head."""
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
    """For each head, the number of runs in each row, and the runs."""
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
    """A place with only the given heads."""
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
