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

from regard.ops import Causal, Documents, Lengths, Map, Observation, Wants, Window, observe
from regard.ops.call import make_call
from regard.ops.kernels import row_stats
from regard.ops.kernels.inputs import find_bounds

ROUNDINGS = 16
Sizes = tuple[int, int, int]

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
}  # fmt: skip

SINGLES = ("causal", "padding left", "softcap", "sinks", "fewer queries than keys")
"""Cases in which single weights are summed too."""


def numbers_of(seen: Observation) -> dict[str, Tensor]:
    assert seen.peak is not None and seen.received is not None and seen.top is not None
    found = {
        "lse": seen.lse,
        "entropy": seen.entropy,
        "distance": seen.distance,
        "peak": seen.peak.weight,
        "received": seen.received.total,
        "seen_by": seen.received.seen_by,
        "map": seen.map,
        "top": seen.top.weight,
        "rows": seen.rows,
    }
    return {name: x.double() for name, x in found.items() if x is not None}


def gaps(
    name: str, dtype: torch.dtype, device: str, backend: str | Callable[..., Observation]
) -> dict[str, tuple[float, float]]:
    """The largest error of each answer, and what is allowed."""
    (T, S, D), mask, picture, numbers = SEEN[name]
    generator = torch.Generator().manual_seed(len(name))
    q = torch.randn(2, 2, T, D, generator=generator).to(device, dtype)
    k = torch.randn(2, S, 1, D, generator=generator).to(device, dtype).transpose(1, 2)
    call = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in numbers.items()}
    wants = Wants(
        lse=True, entropy=True, peak=True, distance=True, received=True, map=picture, top=3,
        rows=[T // 2],
    )  # fmt: skip

    def by(q: Tensor, k: Tensor, backend: str, wants: Wants = wants) -> Observation:
        return observe(q, k, None, mask=mask, wants=wants, backend=backend, **call)

    truth_seen = by(q.double(), k.double(), "reference", replace(wants, weights=True))
    if callable(backend):
        whole = replace(make_call(q, k, k, mask=mask, **call), wants=wants)
        ours_seen = backend(whole, q[..., :0])
    else:
        ours_seen = by(q, k, backend)
    truth, ours = numbers_of(truth_seen), numbers_of(ours_seen)
    plain = numbers_of(by(q, k, "reference"))
    found = {what: compare(ours[what], plain[what], truth[what]) for what in truth}
    assert ours_seen.peak is not None and ours_seen.top is not None
    found["peak keys"] = misnamed(
        ours_seen.peak.key[..., None], truth["peak"][..., None], truth_seen
    )
    found["top keys"] = misnamed(ours_seen.top.key, truth["top"], truth_seen)
    return found


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
    keys = torch.randint(-1, S, (3, T), generator=generator)
    call = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in numbers.items()}
    wants = Wants(weights=True, lse=True)
    seen = observe(
        q.double(), k.double(), None, mask=mask, wants=wants, backend="reference", **call
    )
    assert seen.weights is not None and seen.lse is not None
    at = keys.to(device)[:, None, None, :, None].expand(3, 2, 2, T, 1)
    picked = seen.weights.expand(3, -1, -1, -1, -1).gather(-1, at.clamp(min=0))
    truth = picked.masked_fill(at < 0, 0.0).sum((-1, -2))
    rule = make_call(q, k, k, mask=mask, **call).rule
    bounds = find_bounds(rule, q.device)
    assert bounds is not None
    ours = row_stats.sum_singles(q, k, rule, bounds, seen.lse.float(), keys.int().to(device))
    return float((ours - truth).abs().max()), 1e-5
