"""What a record keeps of a call of one or several texts, measured on the call's own device.

How: `look_at` asks for all of it, by the names in a record. Small calls on a GPU take longer to
launch than to run, so `look` replays them as one CUDA graph for all layers (`cuda_graphs.py`).

Letters: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.lens.captured_call import Call
from regard.lens.cuda_graphs import Look, Replays
from regard.lens.measure import NamedKeys, fingerprints, measure, reach, sum_weights
from regard.ops import Map, Wants
from regard.ops.kernels.backend import is_little
from regard.ops.pack import pack, unpack

LONG = 1 << 33
"""Weights of all heads from which kernels take longer than launching them."""
COPIED = 1 << 28
"""Bytes of masks and biases up to which they are copied to a graph's static inputs."""


class Asked(NamedTuple):
    """What is measured of a call.

    base: the map from which larger maps are computed. offset: the number of its first key in the
    record. new: how many of its last keys are new there. reaches: whether to measure how far rows
    look to either side; ahead: whether any row sees keys after its own.
    """

    wants: Wants
    base: Map | None
    offset: int
    new: int
    reaches: bool
    ahead: bool


def look(
    call: Call, asked: Asked, spots: NamedKeys | None, replays: Replays | None
) -> dict[str, Tensor]:
    """Measure a call, of any number of texts; tensors (B, ...) by their names in the record.

    spots: the keys of head scores, unless they are summed later. replays: None measures a call as
    it comes.
    """
    if spots is None or replays is None or not suits_graphs(call):
        return look_at(call, asked, spots)
    return look_again(call, asked, spots, replays)


def look_at(call: Call, asked: Asked, spots: NamedKeys | None = None) -> dict[str, Tensor]:
    """Measure a call by launching each kernel."""
    S, found = call.shape.S, dict[str, Tensor]()
    wants = asked.wants
    if asked.base is not None:
        base_wants = replace(wants, map=asked.base) if wants.map is None else Wants(map=asked.base)
        seen = measure(call, base_wants)
        assert seen.map is not None
        found["base"] = seen.map.float()
    if asked.base is None or wants.map is not None:
        seen = measure(call, wants)
        if seen.map is not None:
            found["map"] = seen.map.float()
    assert seen.lse is not None
    found["lse"] = seen.lse
    for name in ("entropy", "distance", "mass"):
        value = getattr(seen, name)
        if value is not None:
            found[name] = value
    for weights, keys, peaks in (
        ("peak", "peak_key", seen.peak),
        ("top_weights", "top_keys", seen.top),
    ):
        if peaks is not None:
            at, found[weights] = peaks.key, peaks.weight
            at = torch.where(at >= 0, at + asked.offset, at) if asked.offset else at
            found[keys] = at.int()
    if seen.received is not None:
        found["received"] = total = seen.received.total
        found["seen_by"] = seen.received.seen_by.expand_as(total)
    if asked.reaches and seen.distance is not None:
        found["reach"] = reach(call, seen) if asked.ahead else seen.distance
    found["prints"] = fingerprints(call.k[:, :, S - asked.new :])
    if spots is not None:
        found["spots"] = sum_weights(call, found["lse"], spots)
    return found


def look_again(call: Call, asked: Asked, spots: NamedKeys, replays: Replays) -> dict[str, Tensor]:
    """`look_at` by replaying a CUDA graph that is shared by all calls of one form.

    They may differ in layer, row and text. All that the graph reads is copied to its static inputs:
    queries and keys, row statistics, named keys, and the tensors of the rule.
    """
    rows, packed, device = call.rows or {}, pack(call.rule), call.q.device
    # Each tensor once, so that parts of a rule that share a tensor still do.
    held = list({id(x): x for x in packed.tensors}.values())
    order = [next(n for n, y in enumerate(held) if y is x) for x in packed.tensors]

    def make(given: list[Tensor]) -> Look:
        q, k, keys_bnt, *others = given
        told = dict(zip(rows, others, strict=False)) or None
        moved = [x.expand(was.shape) for x, was in zip(others[len(rows) :], held, strict=True)]
        rule = unpack(packed._replace(tensors=[moved[n] for n in order]), call.shape)
        there = replace(call, q=q, k=k, v=None, rows=told, mask=rule.mask, bias=rule.bias)
        # A copy to the device inside the graph would synchronize and end the capture.
        mass = asked.wants.mass
        mass = None if mass is None else mass.to(device)
        placed = asked._replace(wants=replace(asked.wants, mass=mass))
        return functools.partial(look_at, there, placed, NamedKeys(keys_bnt))

    given = [call.q, call.k, spots.on(device), *rows.values(), *map(once, held)]
    lying = [(x.shape, x.dtype, x.device) for x in given]
    wants, shapes = map(form_of, vars(asked.wants).values()), [x.shape for x in held]
    form = (*lying, *shapes, *order, *rows, *asked[1:], *wants)
    form += (packed.form, *packed.ints, *packed.floats)
    return replays.answer(form, given, make)


def form_of(value: Any) -> Any:
    """A value as part of a graph's form: a tensor's shape and dtype, another object's type."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return value if value is None or isinstance(value, int | float | tuple | Map) else type(value)


def once(x: Tensor) -> Tensor:
    """A tensor without the repetitions of expanded axes (stride 0)."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]


def suits_graphs(call: Call) -> bool:
    """Whether a call is so large that kernels run it, and so small that launches take longer."""
    B, H, T, S = call.shape
    if not call.q.is_cuda or type(call.q) is not Tensor or type(call.k) is not Tensor:
        return False
    if sum(once(x).nbytes for x in call.rule.tensors()) > COPIED:
        return False
    return not is_little(call.rule.shape) and B * H * T * S < LONG
