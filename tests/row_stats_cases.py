"""What may be asked about weights, case by case, for the kernels that tell it.

`gaps` gives for each answer its largest error against the float64 reference and what is allowed:
twice the error of the reference in the case's own type, and a few roundings of the largest number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Map,
    Observation,
    Prefix,
    Received,
    RelativeTable,
    Wants,
    Window,
    observe,
)
from regard.ops.call import make_call
from regard.ops.kernels import row_stats

ROUNDINGS = 16
ABOVE = 0.1
Sizes = tuple[int, int, int]
Backend = str | Callable[..., Observation]


def draw(*size: int) -> Tensor:
    """Numbers that are the same every time."""
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def some_hidden(*size: int) -> Tensor:
    """Numbers of a bias of which every third hides its pair, each in one of two ways."""
    numbers = draw(*size)
    numbers[..., ::6] = -float("inf")
    numbers[..., 3::6] = torch.finfo(numbers.dtype).min
    return numbers


DOCUMENTS = torch.tensor([0] * 11 + [1] * 37 + [2] * 19)
SEEN: dict[str, tuple[Sizes, Any, Any, dict[str, Any]]] = {
    "everything": ((13, 17, 5), None, (3, 4), {}),
    "causal": ((67, 67, 8), Causal(), (8, 8), {}),
    "fewer queries than keys": ((37, 131, 5), Causal(), (7, 13), {}),
    "more queries than keys": ((71, 37, 5), Causal(), (7, 5), {}),
    "causal from the start": ((37, 41, 5), Causal(align="start"), (7, 13), {}),
    "window": ((67, 67, 17), Causal() & Window(9, None), (67, 67), {}),
    "both sides": ((131, 67, 8), Window(5, 3), (2, 3), {}),
    "padding": ((37, 41, 8), Lengths(torch.tensor([0, 23])), (2, 41), {}),
    "padding left": (
        (37, 37, 8), Causal() & Lengths(torch.tensor([5, 23]), side="left"), (5, 3), {}
    ),
    "documents": ((67, 67, 8), Causal() & Documents(DOCUMENTS), (9, 9), {}),
    "softcap": ((37, 37, 8), None, (3, 50), {"softcap": 2.0}),
    "sinks": ((37, 37, 8), Causal(), (3, 5), {"sinks": torch.tensor([0.3, -2.0])}),
    "negative scale": ((37, 37, 8), Causal(), (3, 5), {"scale": -0.7}),
    "part of the map": (
        (67, 67, 8), Causal(), Map(height=5, width=7, queries=(3, 50), keys=(11, 64)), {}
    ),
    "finer than the matrix": ((7, 11, 3), Causal(), (29, 23), {}),
    "even cells": ((160, 96, 8), Causal(), (20, 12), {}),
    "large even cells": ((64, 96, 8), Causal(), (2, 3), {}),
    "even cells of a part": (
        (64, 128, 8), Causal(), Map(height=4, width=4, queries=(19, 51), keys=(48, 112)), {}
    ),
    "one of everything": ((1, 1, 1), None, (1, 1), {}),
    "documents of both sides": (
        (37, 41, 8), Documents(torch.arange(41) // 9, torch.arange(37) // 7 * 2),
        Map(height=3, width=3, queries=(3, 30), keys=(5, 40)), {},
    ),
    "documents anywhere": (
        (67, 67, 8),
        Documents(torch.stack([torch.arange(67) // 32, torch.arange(67) % 3 * 10**12])) & Causal(),
        (32, 67), {},
    ),
    "prefix": ((37, 37, 8), Causal() | Prefix(11), (4, 4), {}),
    "bits": (
        (37, 71, 8), Dense(draw(2, 1, 37, 71) > 0.0),
        Map(height=4, width=5, queries=(5, 31), keys=(17, 70)), {},
    ),
    "bits of heads": ((37, 71, 8), Dense(draw(2, 37, 71) > 0.0) & Causal(), (3, 7), {}),
    "not a window": ((37, 37, 8), ~Window(3, 3), (37, 37), {}),
    "ALiBi": (
        (37, 41, 8), Causal(), Map(height=3, width=5, queries=(7, 30), keys=(2, 33)),
        {"bias": ALiBi(2)},
    ),
    "ALiBi at positions": (
        (37, 41, 8), None, Map(height=3, width=5, queries=(7, 30), keys=(2, 33)),
        {"bias": ALiBi(2).at(torch.arange(37) * 3, torch.arange(41) * 2)},
    ),
    "table": (
        (37, 41, 8), Window(20, 9), Map(height=3, width=5, queries=(7, 30), keys=(2, 33)),
        {"bias": RelativeTable(draw(8, 2))},
    ),
    "table at positions": (
        (13, 37, 8), None, (3, 5),
        {"bias": RelativeTable(draw(8, 2)).at(torch.arange(13) * 2, torch.arange(37))},
    ),
    "numbers that hide": (
        (37, 41, 8), Causal(), Map(height=3, width=5, queries=(7, 30), keys=(2, 33)),
        {"bias": DenseBias(some_hidden(2, 37, 41))},
    ),
    "sum of biases": (
        (37, 41, 8), Lengths(torch.tensor([41, 23])), (3, 4),
        {"bias": DenseBias(some_hidden(2, 1, 1, 41)) + ALiBi(2) + RelativeTable(draw(8, 2)),
         "softcap": 3.0, "sinks": torch.tensor([0.3, -2.0])},
    ),
}  # fmt: skip

SINGLES = (
    "causal", "padding left", "softcap", "sinks", "fewer queries than keys",
    "documents of both sides", "bits of heads", "ALiBi at positions", "table", "numbers that hide",
)  # fmt: skip
"""Cases in which single weights are summed too."""

RECEIVED = (
    "causal", "padding", "documents of both sides", "bits of heads", "table", "numbers that hide",
)  # fmt: skip
"""Cases in which received attention is asked about in every way."""


def numbers_of(seen: Observation) -> dict[str, Tensor]:
    assert seen.peak is not None and seen.received is not None and seen.top is not None
    found = {
        "lse": seen.lse,
        "entropy": seen.entropy,
        "distance": seen.distance,
        "peak": seen.peak.weight,
        "logit": seen.peak.logit,
        "received": seen.received.total,
        "seen_by": seen.received.seen_by,
        "map": seen.map,
        "top": seen.top.weight,
        "rows": seen.rows,
        "mass": seen.mass,
    }
    return {name: x.double() for name, x in found.items() if x is not None}


def gaps(
    name: str, dtype: torch.dtype, device: str, backend: Backend
) -> dict[str, tuple[float, float]]:
    """The largest error of each answer, and what is allowed."""
    (T, S, D), mask, picture, numbers = SEEN[name]
    generator = torch.Generator().manual_seed(len(name))
    q = torch.randn(2, 2, T, D, generator=generator).to(device, dtype)
    k = torch.randn(2, S, 1, D, generator=generator).to(device, dtype).transpose(1, 2)
    call = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in numbers.items()}
    wants = Wants(
        lse=True, entropy=True, peak=True, distance=True, received=True, map=picture, top=3,
        rows=[T // 2, 0, T - 1], above=ABOVE, mass=(draw(2, S) > 0.0).to(device),
    )  # fmt: skip

    all_of = replace(wants, weights=True)
    truth_seen = look(q.double(), k.double(), mask, call, all_of, "reference")
    ours_seen = look(q, k, mask, call, wants, backend)
    truth, ours = numbers_of(truth_seen), numbers_of(ours_seen)
    plain = numbers_of(look(q, k, mask, call, wants, "reference"))
    found = {what: compare(ours[what], plain[what], truth[what]) for what in truth}
    # Rounding a score by eps of its size changes its weight by so much of it, and the entropy, and
    # the distance by so much of the farthest; the plain formula may have been lucky in all rows.
    lse = truth["lse"]
    reach = torch.finfo(torch.float32).eps * float(lse.masked_fill(lse.isinf(), 0.0).abs().max())
    for what, size in {"entropy": 1.0, "distance": float(max(T, S))}.items():
        found[what] = found[what][0], found[what][1] + reach * size
    assert ours_seen.peak is not None and ours_seen.top is not None
    found["peak keys"] = misnamed(
        ours_seen.peak.key[..., None], truth["peak"][..., None], truth_seen
    )
    found["top keys"] = misnamed(ours_seen.top.key, truth["top"], truth_seen)
    found["above"] = above_gap(ours_seen, truth_seen)
    return found


def above_gap(ours: Observation, truth: Observation) -> tuple[float, float]:
    """How far weights above the threshold are off, or one that is left out is above it."""
    assert ours.above is not None and truth.weights is not None
    offsets, key = ours.above.offsets, ours.above.key
    assert int(offsets[-1]) == len(key) == len(ours.above.weight)
    row = torch.repeat_interleave(torch.arange(len(offsets) - 1).to(key), offsets.diff())
    assert ((row.diff() > 0) | (key.diff() > 0)).all(), "keys of a row come in order"
    dense = ours.above.to_dense().double()
    off = torch.where(dense > 0, (dense - truth.weights).abs(), truth.weights - ABOVE)
    return float(off.max()), 1e-5


def misnamed(key: Tensor, weight: Tensor, truth: Observation) -> tuple[float, float]:
    """How far the keys named for rows are from weighing what they should; none is named twice."""
    assert truth.weights is not None
    weighs = truth.weights.gather(-1, key.clamp(min=0)).masked_fill(key < 0, 0.0)
    named = torch.zeros_like(truth.weights).scatter_add_(
        -1, key.clamp(min=0), (key >= 0).to(weighs)
    )
    assert named.max() <= 1.0
    # A row has keys as long as it sees some, and they come first.
    seen = (truth.weights > 0).sum(-1, keepdim=True).clamp(max=key.shape[-1])
    assert torch.equal((key >= 0).sum(-1, keepdim=True), seen)
    assert torch.equal(key >= 0, torch.arange(key.shape[-1], device=key.device) < seen)
    return float((weighs - weight).abs().max()), 1e-6


def compare(ours: Tensor, plain: Tensor, truth: Tensor) -> tuple[float, float]:
    assert torch.equal(ours.isinf(), truth.isinf())
    ours, plain, truth = (x.masked_fill(x.isinf(), 0.0) for x in (ours, plain, truth))
    floor = ROUNDINGS * torch.finfo(torch.float32).eps * float(truth.abs().max())
    return float((ours - truth).abs().max()), 2 * float((plain - truth).abs().max()) + floor


def singles_gap(name: str, device: str) -> tuple[float, float]:
    """How far the sums of single weights are off those of the whole matrix."""
    (T, S, D), mask, _, numbers = SEEN[name]
    generator = torch.Generator().manual_seed(len(name))
    q = torch.randn(2, 2, T, D, generator=generator).to(device)
    k = torch.randn(2, S, 1, D, generator=generator).to(device).transpose(1, 2)
    keys = torch.randint(-1, S, (2, 3, T), generator=generator)
    call = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in numbers.items()}
    wants = Wants(weights=True, lse=True)
    seen = observe(
        q.double(), k.double(), None, mask=mask, wants=wants, backend="reference", **call
    )
    assert seen.weights is not None and seen.lse is not None
    at = keys.to(device)[:, :, None, :, None].expand(2, 3, 2, T, 1)
    picked = seen.weights[:, None].expand(-1, 3, -1, -1, -1).gather(-1, at.clamp(min=0))
    truth = picked.masked_fill(at < 0, 0.0).sum((-1, -2))
    rule = make_call(q, k, k, mask=mask, **call).rule
    ours = row_stats.sum_singles(q, k, rule, seen.lse.float(), keys.int().to(device))
    return float((ours - truth).abs().max()), 1e-5


def received_gaps(name: str, device: str, backend: Backend) -> dict[str, tuple[float, float]]:
    """How far what keys receive is off: each kind, with and without weights of rows, some rows."""
    (T, S, D), mask, _, numbers = SEEN[name]
    q, k = draw(2, 2, T, D).to(device), draw(2, 1, S, D).to(device)
    call = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in numbers.items()}
    signed, positive = draw(2, 1, T).to(device), draw(2, T).abs().to(device).half()
    found = {}
    for asked in (
        Received(queries=(3, T - 4)), Received(rows=signed), Received(by="mean"),
        Received(by="mean", rows=positive, queries=slice(3, -4)), Received(by="max"),
        Received(by="max", rows=-positive, queries=(5, T)),
    ):  # fmt: skip
        wants = Wants(received=asked, map=(3, 3) if asked.queries is None else None)
        seen, truth, plain = (
            look(q.to(dtype), k.to(dtype), mask, call, wants, by).received
            for dtype, by in (
                (torch.float32, backend), (torch.float64, "reference"), (torch.float32, "reference")
            )
        )  # fmt: skip
        assert seen is not None and truth is not None and plain is not None
        key = f"{name} {asked.by} {asked.queries} {asked.rows is not None}"
        found[key] = compare(seen.value.double(), plain.value.double(), truth.value)
        found[f"{key} counts"] = (float((seen.seen_by - truth.seen_by).abs().max()), 0.0)
        assert (seen.row_weight is None) == (asked.rows is None)
        if seen.row_weight is not None and truth.row_weight is not None:
            off = (seen.row_weight - truth.row_weight).abs().max()
            found[f"{key} row weights"] = (float(off), 1e-5)
    return found


def look(
    q: Tensor, k: Tensor, mask: Any, call: dict[str, Any], wants: Wants, backend: Backend
) -> Observation:
    """What a backend tells of a call, or a function that stands for one."""
    if isinstance(backend, str):
        return observe(q, k, None, mask=mask, wants=wants, backend=backend, **call)
    whole = make_call(q, k, k[..., :0], mask=mask, **call)
    return backend(replace(whole, wants=wants), q[..., :0])
