"""What the kernel for few queries is tried on: every form of mask with every form of bias.

Each pair is one case, with sizes that change from case to case: numbers of queries, heads and keys,
widths. `gaps` gives for the output and each answer the largest error against the float64 reference,
and what is allowed: twice that of the plain formula in the case's own type, and a few roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from plain import plain
from row_stats_cases import compare
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Wants,
    Window,
    observe,
)
from regard.ops.call import Call, make_call
from regard.ops.shape import Shape
from regard.ops.wants import Observation

B, ROUNDINGS = 2, 8


class Sizes(NamedTuple):
    """Queries, query heads, key heads, keys, widths of keys and of values."""

    T: int
    H: int
    G: int
    S: int
    D: int
    E: int


SIZES = (
    Sizes(1, 4, 1, 37, 5, 7),
    Sizes(2, 2, 2, 41, 64, 64),
    Sizes(3, 6, 2, 37, 80, 80),
    Sizes(5, 4, 1, 43, 9, 3),
    Sizes(16, 3, 1, 37, 17, 17),
    Sizes(7, 2, 2, 5, 8, 8),
)
"""The last has more queries than keys, so that some stand before the first of them."""

Positions = tuple[Tensor, Tensor]
"""Positions of queries (B, T) and of keys (B, S), as a cache has them."""


def draw_positions(n: Sizes, generator: torch.Generator) -> Positions:
    """Keys in any order, with empty slots, each row by itself; queries anywhere."""
    keys = torch.stack([torch.randperm(n.S + 3, generator=generator)[: n.S] - 3 for _ in range(B)])
    return torch.randint(-1, n.S, (B, n.T), generator=generator), keys


def coin(n: Sizes, *sizes: int) -> Tensor:
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(n.T)) < 0.6


MASKS: dict[str, Callable[[Sizes, Positions], Any]] = {
    "nothing hidden": lambda n, at: None,
    "causal": lambda n, at: Causal(),
    "causal from the start": lambda n, at: Causal(align="start"),
    "window": lambda n, at: Causal() & Window(9, None),
    "both sides": lambda n, at: Window(3, 2),
    "padding": lambda n, at: Lengths(torch.tensor([0, n.S - 2])),
    "padding left": lambda n, at: Causal() & Lengths(torch.tensor([3, n.S - 1]), side="left"),
    "window of padded": lambda n, at: (
        Window(7, 0) & Lengths(torch.tensor([n.S - 4, n.S - 1])) & Causal()
    ),
    "documents": lambda n, at: Causal() & Documents(torch.arange(n.S) // 11, torch.arange(n.T) % 3),
    "documents anywhere": lambda n, at: (
        Documents(torch.arange(B * n.S).view(B, n.S) % 3 * 2**40, torch.arange(n.T) % 4 * 2**40)
        & Lengths(torch.tensor([n.S, 3]))
    ),
    "documents twice": lambda n, at: (
        Documents(torch.arange(n.S) // 7, torch.arange(n.T) % 3)
        & Documents(torch.arange(n.S) % 2, torch.arange(n.T) % 2)
    ),
    "prefix": lambda n, at: Causal() | Prefix(3),
    "given whole": lambda n, at: Dense(coin(n, B, n.H, n.T, n.S)),
    "given for all heads": lambda n, at: coin(n, n.T, n.S),
    "not near": lambda n, at: Causal() & ~Window(2, 0) & Lengths(torch.tensor([n.S, 4])),
    "placed": lambda n, at: Causal().at(*at),
    "placed window": lambda n, at: (Causal() & Window(4, None)).at(*at),
    "placed both sides": lambda n, at: Window(2, 1).at(*at),
    "placed open": lambda n, at: Window(None, None).at(*at),
    "placed and padded": lambda n, at: (
        Causal().at(*at) & Lengths(torch.tensor([n.S, 3])) & Window(5, None).at(*at)
    ),
    "placed twice": lambda n, at: Causal().at(*at) & Window(9, 9),
    "queries placed": lambda n, at: Window(6, 1).at(at[0]),
}

BIASES: dict[str, Callable[[Sizes, Positions], Any]] = {
    "no bias": lambda n, at: None,
    "alibi": lambda n, at: ALiBi(n.H),
    "alibi placed": lambda n, at: ALiBi(n.H).at(*at),
    "table": lambda n, at: RelativeTable(torch.linspace(-1, 1, 32 * n.H).sin().view(32, n.H)),
    "holes": lambda n, at: DenseBias(
        torch.where(coin(n, n.T, n.S), torch.linspace(-2, 2, n.S), -math.inf)
    ),
    "alibi and more": lambda n, at: (
        DenseBias(torch.linspace(-1, 1, n.S)) + ALiBi(slopes=torch.linspace(0, 1, n.H))
    ),
}

NUMBERS: tuple[dict[str, Any], ...] = (
    {},
    {"sinks": True},
    {"softcap": 1.7},
    {"scale": -0.6},
    {"scale": 0.0},
    {"sinks": True, "softcap": 0.9, "scale": 0.4},
)


def cases() -> dict[str, tuple[str, str, Sizes, dict[str, Any]]]:
    """Every mask with every bias, at sizes and numbers that change in other steps than these."""
    found = {}
    for m, mask in enumerate(MASKS):
        for n, bias in enumerate(BIASES):
            sizes = SIZES[(m + n * 5) % len(SIZES)]
            numbers = NUMBERS[(2 * m + n + m // 3) % len(NUMBERS)]
            found[f"{mask}, {bias}"] = (mask, bias, sizes, numbers)
    return found


CASES = cases()


def make_inputs(n: Sizes, seed: int = 3) -> tuple[list[Tensor], Positions]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (n.H, n.T, n.D), (n.G, n.S, n.D), (n.G, n.S, n.E)
    inputs = [torch.randn(B, *shape, generator=generator) for shape in shapes]
    return inputs, draw_positions(n, generator)


def move(x: Any, device: str) -> Any:
    return x.to(torch.device(device)) if x is not None else None


def gaps(
    name: str, dtype: torch.dtype, device: str, run: Callable[[Call], Observation]
) -> dict[str, tuple[float, float]]:
    """The largest error of the output and of each answer, and what is allowed."""
    mask_name, bias_name, n, numbers = CASES[name]
    inputs, at = make_inputs(n)
    inputs = [x.to(device, dtype) for x in inputs]
    at = at[0].to(device), at[1].to(device)
    rule = {
        "mask": move(MASKS[mask_name](n, at), device),
        "bias": move(BIASES[bias_name](n, at), device),
    }
    numbers = dict(numbers)
    if numbers.pop("sinks", False):
        numbers["sinks"] = torch.linspace(-2, 1, n.H, device=device)
    mass = coin(n, B, n.S).to(device)
    wants = Wants(lse=True, entropy=True, peak=True, distance=True, mass=mass)
    ours = run(replace(make_call(*inputs, **rule, **numbers), wants=wants))
    wide = [x.double() for x in inputs]
    whole = replace(wants, weights=True)
    truth = observe(*wide, **rule, **numbers, wants=whole, backend="reference")
    single = [x.float() for x in inputs]
    known = observe(*single, **rule, **numbers, wants=wants, backend="reference")
    formula = by_formula(inputs, rule, numbers)
    found = {"output": judge_output(ours.output, formula, truth.output)}
    for what in ("lse", "entropy", "distance", "mass"):
        found[what] = compare(*(getattr(x, what).double() for x in (ours, known, truth)))
    assert ours.peak is not None and known.peak is not None and truth.peak is not None
    peaks = (x.peak.weight.double() for x in (ours, known, truth))
    found["peak"] = compare(*peaks)
    logits = [x.peak.logit for x in (ours, known, truth)]
    found["logit"] = compare(*(x.double() for x in logits if x is not None))
    found["key of the peak"] = misnamed(ours, truth), found["peak"][1]
    return found


def by_formula(inputs: list[Tensor], rule: dict[str, Any], numbers: dict[str, Any]) -> Tensor:
    """The output as a textbook has it, every step in the type of q."""
    q, k, _ = inputs
    call = make_call(*inputs, **rule)
    shape = Shape(*q.shape[:3], k.shape[2])
    mask, bias = call.rule.mask, call.rule.bias
    seen = None if mask is None else mask.dense(shape, q.device)
    added = None if bias is None else bias.dense(shape, q.device)
    return plain(*inputs, seen, added, **numbers)[0]


def judge_output(ours: Tensor | None, formula: Tensor, truth: Tensor | None) -> tuple[float, float]:
    assert ours is not None and truth is not None
    assert ours.shape == truth.shape and ours.dtype == formula.dtype
    floor = ROUNDINGS * torch.finfo(ours.dtype).eps * float(truth.abs().max())
    error = float((ours.double() - truth).abs().max())
    return error, 2 * float((formula.double() - truth).abs().max()) + floor


def misnamed(ours: Observation, truth: Observation) -> float:
    """How far the keys named for peaks are from weighing most; rows that see nothing name none."""
    assert ours.peak is not None and truth.peak is not None and truth.weights is not None
    key = ours.peak.key[..., None]
    assert torch.equal(key >= 0, truth.weights.sum(-1, keepdim=True) > 0)
    weighs = truth.weights.gather(-1, key.clamp(min=0)).masked_fill(key < 0, 0.0)
    return float((weighs[..., 0] - truth.peak.weight).abs().max())
