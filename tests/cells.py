"""One cell of the grid backend × feature × type × device, and how it is judged.

A cell is right when its error against the float64 reference is at most twice that of the plain
formula computed in the cell's type, both on the same inputs: forward, and backward to every input.
A few roundings of the largest number in play are allowed where the plain formula happens to be
exact.
"""

from __future__ import annotations

import functools

import pytest
import torch
from plain import CASES, Case, dense_bias, dense_mask, plain
from torch import Tensor

from regard.ops import attention

TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ROUNDINGS = 8
"""Sums of up to 53 terms, each rounded once: about √53 roundings, as chance adds them up."""
EMPTY = "torch's fused kernels are not asked for empty inputs"
NO_BIAS_GRADIENT = "torch's fused kernels give no gradient to the bias"
SDPA_REFUSALS = {
    "softcap": "torch's fused kernels have no softcap",
    "everything": "torch's fused kernels have no softcap",
    "sinks": "torch's fused kernels have no sinks",
    "alibi learned": NO_BIAS_GRADIENT,
    "relative table learned": NO_BIAS_GRADIENT,
    "dense bias learned": NO_BIAS_GRADIENT,
    "no batch": EMPTY,
    "no queries": EMPTY,
    "no keys": EMPTY,
}


ONE_QUERY = [
    "plain",
    "causal",
    "causal from the start",
    "causal square",
    "window",
    "window of itself",
    "open window",
    "lengths",
    "lengths left",
    "documents",
    "prefix",
    "prefix of each sample",
    "joined",
    "alibi",
    "alibi causal",
    "alibi learned",
    "relative table",
    "relative table learned",
    "scale",
    "negative scale",
    "zero scale",
    "softcap",
    "sinks",
    "one group",
    "no groups",
    "wide values",
    "narrow values",
    "more queries than keys",
    "one query",
    "one of everything",
]
"""Cases whose rule has a meaning for their last query alone."""


@functools.cache
def pairs(name: str) -> tuple[Tensor, Tensor]:
    """The mask and bias of a case, pair by pair."""
    made = CASES[name]()
    return dense_mask(made), dense_bias(made)


def by_formula(name: str, made: Case) -> Tensor:
    seen, bias = (x.to(made.q.device) for x in pairs(name))
    numbers = {key: made.call[key] for key in ("scale", "softcap", "sinks") if key in made.call}
    learned = made.call.get("bias")
    values = getattr(learned, "values", None)
    dense = values if isinstance(values, Tensor) and values.requires_grad else bias
    return plain(made.q, made.k, made.v, seen, dense, **numbers)[0]


def results(output: Tensor, made: Case) -> list[Tensor]:
    """The output, and the gradient of a fixed mixture of it to q, k, v and the sinks."""
    pull = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device=output.device)
    pull = pull.sin().view_as(output)
    wanted = [made.q, made.k, made.v]
    if "sinks" in made.call:
        wanted.append(made.call["sinks"])
    grads = torch.autograd.grad((output.double() * pull).sum(), wanted, allow_unused=True)
    return [
        output,
        *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)),
    ]


def check_cell(backend: str, name: str, kind: str, sentence: str | None, device: str) -> None:
    """The cell equals the float64 reference, or refuses with its sentence."""
    made = CASES[name]().cast(TYPES[kind], device)
    if sentence is not None:
        with pytest.raises(ValueError) as refused:
            attention(made.q, made.k, made.v, **made.call, backend=backend)
        assert f'backend "{backend}" refuses this call: {sentence};' in str(refused.value)
        return
    exact = made.cast(torch.float64, device)
    truth = results(attention(exact.q, exact.k, exact.v, **exact.call, backend="reference"), exact)
    ours = results(attention(made.q, made.k, made.v, **made.call, backend=backend), made)
    theirs = results(by_formula(name, made), made)
    judge(truth, ours, theirs)


def judge(
    truth: list[Tensor], ours: list[Tensor], theirs: list[Tensor], score: float = 0.0
) -> None:
    """Our error is at most twice theirs, part by part.

    score: the largest score, where it is large: rounded, it changes a weight by score · eps of it.
    """
    largest = max((float(x.detach().abs().max()) for x in truth if x.numel()), default=0.0)
    floor = max(ROUNDINGS, score) * torch.finfo(ours[0].dtype).eps * largest
    parts = ("output", "dq", "dk", "dv", "sinks")
    for part, t, o, p in zip(parts, truth, ours, theirs, strict=False):
        assert o.dtype == ours[0].dtype and o.shape == t.shape, part
        if t.numel():
            allowed = 2 * (p.double() - t).abs().max() + floor
            error = (o.double() - t).abs().max()
            assert error <= allowed, f"{part}: error {error:.3g}, allowed {allowed:.3g}"
