"""Decoding: calls with few queries, turned into the arguments of our decode kernel.

Why: a step of generation has one or a few queries per sample, and most masks and biases are of a
few kinds, which the kernel reads as they are: windows, lengths, documents, ALiBi. Nothing is
computed for these before the kernel runs. Every other mask or bias is rendered as a tensor, one
number for each pair.

Letters: B batch, T queries, S keys, H query heads.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.ops.bias import ALiBi, Bias, BiasAt
from regard.ops.call import Call, Rule
from regard.ops.kernels import decode
from regard.ops.kernels.decode import OPEN, KeyRule
from regard.ops.mask import And, At, Mask
from regard.ops.masks import Documents, Lengths
from regard.ops.observe import key_sets
from regard.ops.shape import Tile
from regard.ops.wants import Observation, Peak

BITS = {
    "lse": decode.LSE,
    "entropy": decode.ENTROPY,
    "peak": decode.PEAK,
    "distance": decode.DISTANCE,
}
"""The wants that are flags."""
Frame = tuple[Tensor | None, Tensor | None]
"""The tensors of positions of queries and keys that a term uses; None: the default positions."""


def run(call: Call) -> Tensor:
    """Attention of few queries per sample, by our decode kernel."""
    return _attend(call).output


def observe(call: Call) -> Observation:
    """The output and every want that needs no second pass, for few queries per sample."""
    wants = call.wants
    assert wants is not None
    asked = sum(bit for name, bit in BITS.items() if getattr(wants, name))
    mass = key_sets(wants)
    found = _attend(call, asked, None if mass is None else mass.to(call.q.device))
    answers: dict[str, Any] = {}
    if found.stats is not None:
        names = decode.name_stats(asked, mass is not None)
        answers = dict(zip(names, found.stats.unbind(), strict=True))
    if found.key is not None:
        answers["peak"] = Peak(answers["peak"], found.key, answers.pop("logit"))
    return Observation(found.output, **answers)


def _attend(call: Call, asked: int = 0, mass: Tensor | None = None) -> decode.Answers:
    numbers = call.rule.factor(call.q.shape[3]), call.rule.softcap
    rule = find_rule(call.rule, call.q.device)
    return decode.attend((call.q, call.k, call.v), rule, numbers, call.sinks, asked, mass)


def find_rule(rule: Rule, device: torch.device) -> KeyRule:
    """The rule as the kernel reads it; masks and biases that it cannot read are rendered."""
    if rule.mask is None and rule.bias is None:
        return KeyRule()
    masks = [] if rule.mask is None else conjuncts(rule.mask)
    biases: list[Bias] = [] if rule.bias is None else rule.bias.leaf_terms()
    windows, slopes = [window_of(mask) for mask in masks], [slopes_of(bias) for bias in biases]
    frame = find_frame([*zip(masks, windows, strict=True), *zip(biases, slopes, strict=True)])
    known: dict[str, Any] = {}
    others: list[Mask] = []
    for mask, window in zip(masks, windows, strict=True):
        if window is not None and stands_in(mask, frame):
            left, right = window
            known["left"] = min(OPEN if left is None else left, known.get("left", OPEN))
            known["right"] = min(OPEN if right is None else right, known.get("right", OPEN))
        elif isinstance(mask, Lengths) and "counts" not in known:
            known |= {"counts": mask.lengths, "side": 1 if mask.side == "right" else 2}
        elif isinstance(mask, Documents) and "key_ids" not in known:
            known["query_ids"], known["key_ids"] = mask.pair_ids(rule.shape, device)
        else:
            others.append(mask)
    known["placed"] = "left" in known and frame[1] is not None
    rest: list[Bias] = []
    for bias, slope in zip(biases, slopes, strict=True):
        if slope is not None and "slopes" not in known and stands_in(bias, frame):
            known["slopes"] = slope
        else:
            rest.append(bias)
    if others or rest:
        mask_left = functools.reduce(operator.and_, others) if others else None
        bias_left = functools.reduce(operator.add, rest) if rest else None
        left_over = replace(rule, mask=mask_left, bias=bias_left)
        like = torch.empty(0, device=device)
        known["added"] = left_over.block(Tile(0, rule.shape.T, 0, rule.shape.S), like)
    return KeyRule(*frame, **known)


def conjuncts(mask: Mask) -> list[Mask]:
    """The masks that must all allow a look."""
    if isinstance(mask, And):
        return [inner for part in mask.parts() for inner in conjuncts(part)]
    return [mask]


def find_frame(terms: list[tuple[Mask | Bias, Any]]) -> Frame:
    """The positions of the first window or ALiBi; windows and ALiBi at others are rendered."""
    for term, known in terms:
        if known is not None:
            return (term.queries, term.keys) if isinstance(term, (At, BiasAt)) else (None, None)
    return None, None


def stands_in(term: Mask | Bias, frame: Frame) -> bool:
    """Whether a term uses the very tensors of positions that the frame has."""
    if isinstance(term, (At, BiasAt)):
        return term.queries is frame[0] and term.keys is frame[1]
    return frame[0] is None and frame[1] is None


def window_of(mask: Mask) -> tuple[int | None, int | None] | None:
    """How far back and ahead of its position a query sees, if the mask is just a window."""
    return mask.inner.window() if isinstance(mask, At) else mask.window()


def slopes_of(bias: Bias) -> Tensor | None:
    """The slopes of ALiBi, with explicit positions or without; None for any other bias."""
    inner = bias.inner if isinstance(bias, BiasAt) else bias
    return inner.slopes if isinstance(inner, ALiBi) else None
