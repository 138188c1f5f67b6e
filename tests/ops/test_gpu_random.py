"""Our kernels on a CUDA device, asked at random, with tiles that are full, cut and skipped.

A configuration is one call: sizes, layouts, numbers and rule are drawn. Kernels are compiled for
the form of a call (type, widths, kind of mask and bias), so forms are drawn first, and then some
configurations of each. How many of each, and which, is told by REGARD_FORMS, REGARD_DRAWS and
REGARD_SEED; by default there are few.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, lay_out
from plain import plain
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
    attention,
    observe,
)
from regard.ops.call import make_call
from regard.ops.kernels.backend import refuse
from regard.ops.shape import Shape

pytestmark = pytest.mark.gpu

FORMS, DRAWS, SEED = (
    int(os.environ.get(f"REGARD_{name}", default))
    for name, default in (("FORMS", 10), ("DRAWS", 4), ("SEED", 0))
)
ROUNDINGS = 32
Draw = Callable[[random.Random, Shape], Any]


def lengths(rng: random.Random, shape: Shape) -> Tensor:
    return torch.tensor([rng.randint(0, shape.S) for _ in range(shape.B)])


def ids(rng: random.Random, shape: Shape) -> Tensor:
    length = rng.choice([3, 40, 200])
    return torch.arange(shape.S) // length % rng.choice([3, 1000])


MASKS: dict[str, Draw] = {
    "none": lambda rng, shape: None,
    "causal": lambda rng, shape: Causal(align=rng.choice(["start", "end"])),
    "window": lambda rng, shape: Window(rng.randint(0, 300), rng.choice([0, 7, 150])),
    "padding": lambda rng, shape: Lengths(lengths(rng, shape), side=rng.choice(["left", "right"])),
    "padded causal": lambda rng, shape: Lengths(lengths(rng, shape)) & Causal(),
    "documents": lambda rng, shape: Documents(ids(rng, shape)) & Causal(),
    "prefix": lambda rng, shape: Causal() | Prefix(rng.randint(0, shape.S)),
    "bits": lambda rng, shape: Dense(
        torch.rand(*rng.choice([(1, 1), shape[:2]]), *shape[2:]) > rng.choice([0.1, 0.5, 0.98])
    ),
    "hole": lambda rng, shape: ~Window(rng.randint(0, 20), rng.randint(0, 90)) & Causal(),
}
BIASES: dict[str, Draw] = {
    "none": lambda rng, shape: None,
    "ALiBi": lambda rng, shape: ALiBi(shape.H),
    "table": lambda rng, shape: RelativeTable(torch.randn(32, shape.H)),
    "dense": lambda rng, shape: DenseBias(torch.randn(rng.choice([1, shape.H]), *shape[2:])),
}


def draw_form(rng: random.Random) -> dict[str, Any]:
    """What kernels are compiled for."""
    width = rng.choice([16, 40, 64, 64, 72, 80, 96, 128, 128, 128, 256])
    return {
        "dtype": rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
        "widths": (width, rng.choice([width, width, width, 48])),
        "heads": rng.choice([(2, 2), (6, 2), (4, 1)]),
        "mask": rng.choice(list(MASKS)),
        "bias": rng.choice(["none", "none", *BIASES]),
        "softcap": rng.choice([None, None, None, 4.0]),
        "sinks": rng.random() < 0.2,
        "dropout": rng.choice([0.0, 0.0, 0.0, 0.2]),
    }


def draw_call(
    rng: random.Random, form: dict[str, Any]
) -> tuple[Shape, list[Tensor], dict[str, Any]]:
    """A call of a form: q, k and v on the device, and the rest."""
    sizes = [1, 5, 17, 63, 64, 65, 127, 128, 129, 200, 256, 300, 385, 512, 600]
    T, S = rng.choice(sizes), rng.choice(sizes)
    if rng.random() < 0.5 or form["mask"] == "documents":
        S = T
    (H, G), (D, E) = form["heads"], form["widths"]
    shape = Shape(rng.choice([1, 2, 3]), H, T, S)
    torch.manual_seed(rng.randrange(2**31))
    rule: dict[str, Any] = {
        "mask": MASKS[form["mask"]](rng, shape),
        "bias": BIASES[form["bias"]](rng, shape),
        "scale": rng.choice([None, None, 0.3, -0.1]),
        "softcap": form["softcap"],
    }
    if form["sinks"]:
        rule["sinks"] = torch.randn(H)
    if form["dropout"]:
        rule |= {"dropout": form["dropout"], "seed": rng.randrange(1000)}
    wanted = ((shape.B, H, T, D), (shape.B, G, S, D), (shape.B, G, S, E))
    inputs = [
        lay_out(torch.randn(*size).to("cuda", form["dtype"]), rng.choice(LAYOUTS))
        for size in wanted
    ]
    rule = {name: x.to("cuda") if hasattr(x, "to") else x for name, x in rule.items()}
    return shape, inputs, rule


def grads_of(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    pull = torch.randn(output.shape, generator=generator, device="cuda").to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, pull)]


def check_attention(shape: Shape, inputs: list[Tensor], rule: dict[str, Any]) -> None:
    """Output and gradients err at most twice as much as the formula in the same type."""
    dtype = inputs[0].dtype
    narrow, wide = (
        [x.detach().to(kind, copy=True).requires_grad_() for x in inputs]
        for kind in (dtype, torch.float64)
    )
    ours = [x.detach().requires_grad_() for x in inputs]
    truth = grads_of(attention(*wide, **rule, backend="reference"), wide)
    mask, bias = rule["mask"], rule["bias"]
    seen = None if mask is None else mask.dense(shape).to("cuda")
    dense = None if bias is None else bias.dense(shape, dtype=dtype).to("cuda")
    scale = inputs[0].shape[3] ** -0.5 if rule["scale"] is None else rule["scale"]
    sinks = rule.get("sinks")
    sinks = None if sinks is None else sinks.to(dtype)
    formula = plain(*narrow, seen, dense, scale, rule["softcap"], sinks)[0]
    # Without dropout, by whose share errors grow with the numbers.
    theirs = grads_of(formula, narrow)
    exact = grads_of(attention(*wide, **{**rule, "dropout": 0.0}, backend="reference"), wide)
    kept = 1.0 - rule.get("dropout", 0.0)
    found = grads_of(attention(*ours, **rule, backend="triton"), ours)
    largest = max(float(x.detach().abs().max()) for x in truth)
    for part, o, p, e, t in zip(("output", *"qkv"), found, theirs, exact, truth, strict=True):
        allowed = 2 * float((p.double() - e).detach().abs().max()) / kept**2
        allowed += ROUNDINGS * torch.finfo(dtype).eps * largest
        error = float((o.double() - t).detach().abs().max())
        assert error <= allowed, f"{part}: {error:.3g}, allowed {allowed:.3g}"


def check_looks(inputs: list[Tensor], rule: dict[str, Any]) -> None:
    """What rows and keys tell, near to what the reference tells of the same numbers."""
    wants = Wants(
        lse=True, entropy=True, peak=True, distance=True, received=True, top=5, map=(4, 4)
    )
    rule = {name: x for name, x in rule.items() if name not in ("dropout", "seed")}
    wide = [x.double() for x in inputs]
    truth = observe(*wide, **rule, wants=wants, backend="reference")
    found = observe(*inputs, **rule, wants=wants, backend="triton")
    q, k = (x.flatten(0, 2).norm(dim=1).max() for x in wide[:2])
    scale = inputs[0].shape[3] ** -0.5 if rule["scale"] is None else rule["scale"]
    grows = 1.0 + abs(scale) * float(q * k)
    for name in ("lse", "entropy", "distance", "peak", "received", "top", "map"):
        ours, exact = getattr(found, name), getattr(truth, name)
        if name in ("peak", "top"):
            ours, exact = ours.weight, exact.weight
        if name == "received":
            ours, exact = ours.total, exact.total
        ours, exact = ours.double(), exact.double()
        assert torch.equal(ours.isfinite(), exact.isfinite()), name
        shown = exact.isfinite()
        if shown.any():
            error = float((ours - exact)[shown].abs().max())
            size = max(float(exact[shown].abs().max()), 1.0)
            allowed = 2 * ROUNDINGS * torch.finfo(torch.float32).eps * grows * size
            assert error <= allowed, f"{name}: {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("n", range(FORMS))
def test_a_form_drawn_at_random_is_the_reference_in_all_its_calls(n: int) -> None:
    rng = random.Random(SEED * 100_000 + n)
    form = draw_form(rng)
    for number in range(DRAWS):
        shape, inputs, rule = draw_call(rng, form)
        if refuse(make_call(*inputs, **rule).seeded()) is not None:
            # Said in words, which test_gpu.py sees to.
            continue
        try:
            check_attention(shape, inputs, rule)
            if number % 2:
                check_looks(inputs, rule)
        except AssertionError as error:
            strides = [x.stride() for x in inputs]
            raise AssertionError(f"{error}; {number} of {form}, {shape}, {strides}") from None
