"""The backward by one kernel on a CUDA device, held to the two that it stands for.

Also for `flash_backward_kernels.py`, at the widths whose tiles lie in registers as warpgroups have
them; others are in test_gpu.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cells import TYPES
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Window,
    attention,
)
from regard.ops.shape import Shape

pytestmark = pytest.mark.gpu

S = 700
IDS = torch.arange(S) // 150
RULES: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (True, {}),
    "causal": (True, {"mask": Causal()}),
    "window": (True, {"mask": Window(200, 40) & Causal()}),
    "slopes": (True, {"mask": Causal(), "bias": ALiBi(6)}),
    "negative scale": (True, {"scale": -0.3}),
    "sinks": (True, {"mask": Causal(), "sinks": torch.linspace(-1.0, 1.0, 6)}),
    "softcap": (False, {"mask": Causal(), "softcap": 5.0}),
    "padding": (True, {"mask": Lengths(torch.tensor([600, 333])) & Causal()}),
    "prefix": (True, {"mask": Causal() | Prefix(100)}),
    "documents": (True, {"mask": Causal() & Documents(IDS)}),
    "bits": (False, {"mask": Dense(torch.arange(S)[:, None] % 7 != torch.arange(S) % 5)}),
    "table": (False, {"bias": RelativeTable(torch.linspace(-1.0, 1.0, 192).view(32, 6))}),
    "dropout": (False, {"mask": Causal(), "dropout": 0.2, "seed": 3}),
}
"""Whether the kernel that is written for Hopper takes it at width 128, and what is asked for."""


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU is no Hopper")
    yield
    torch.use_deterministic_algorithms(False)


def draw(T: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and g: 6 query heads over 2, heads beside each other in memory."""
    torch.manual_seed(T + width)
    sizes = ((T, 6), (S, 2), (S, 2), (T, 6))
    found = (torch.randn(2, n, heads, width).to("cuda", dtype) for n, heads in sizes)
    return [x.transpose(1, 2).requires_grad_() for x in found]


def grads_of(inputs: list[Tensor], rule: dict[str, Any], backend: str) -> tuple[Tensor, ...]:
    q, k, v, g = inputs
    return torch.autograd.grad(attention(q, k, v, **rule, backend=backend), (q, k, v), g.detach())


def on_device(rule: dict[str, Any]) -> dict[str, Any]:
    return {key: x.to("cuda") if hasattr(x, "to") else x for key, x in rule.items()}


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 72, 128])
@pytest.mark.parametrize("name", RULES)
def test_one_kernel_is_as_near_to_the_reference_as_two(
    name: str, width: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.ops.kernels import flash_backward_hopper_kernels as kernels

    for_hopper, given = RULES[name]
    rule, launched = on_device(given), []
    run = kernels.run_fused
    monkeypatch.setattr(kernels, "run_fused", lambda *args: (launched.append(1), run(*args)))
    for T in (S, 257, 131):
        if name == "bits" and T != S:
            continue
        inputs = draw(T, width, TYPES[kind])
        wide = [x.detach().double().requires_grad_() for x in inputs]
        truth = grads_of(wide, rule, "reference")
        torch.use_deterministic_algorithms(True)
        two = grads_of(inputs, rule, "triton")
        torch.use_deterministic_algorithms(False)
        launched.clear()
        one = grads_of(inputs, rule, "triton")
        if width == 128 and T == S:
            assert bool(launched) == for_hopper
        for part, ours, theirs, exact in zip("qkv", one, two, truth, strict=True):
            error, limit = (float((x - exact).abs().max()) for x in (ours, theirs))
            floor = 32 * torch.finfo(torch.float32).eps * float(exact.abs().max())
            assert error <= 2 * limit + floor, (part, T)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_sees_nothing_and_what_nobody_sees_stay_out_of_sums(width: int, side: str) -> None:
    mask = (Lengths(torch.tensor([333, 0]), side=side) & Causal()).to("cuda")
    inputs = draw(S, width, torch.bfloat16)
    seen = mask.dense(Shape(2, 6, S, S), "cuda").expand(2, 1, S, S)
    rows, keys = ~seen.any(3)[..., None], ~seen.any(2)[..., None]
    clean, dirty = (
        [
            x.detach().masked_fill(hidden, number).requires_grad_()
            for x, hidden in zip(inputs, (rows, keys, keys, rows), strict=True)
        ]
        for number in (0.0, math.nan)
    )
    torch.use_deterministic_algorithms(True)
    exact = grads_of(clean, {"mask": mask}, "triton")
    torch.use_deterministic_algorithms(False)
    for part, ours, theirs in zip(
        "qkv", grads_of(dirty, {"mask": mask}, "triton"), exact, strict=True
    ):
        assert float((ours - theirs).abs().max()) <= 0.02 * float(theirs.abs().max()), part


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_deterministic_algorithms_repeat_their_bits(name: str) -> None:
    inputs, rule = draw(S, 128, torch.bfloat16), on_device(RULES[name][1])
    torch.use_deterministic_algorithms(True)
    once, again = (grads_of(inputs, rule, "triton") for _ in range(2))
    assert all(map(torch.equal, once, again))


def test_sums_of_many_heads_have_offsets_beyond_32_bits() -> None:
    """4,200 heads of 4,096 rows of 128 numbers are more than 2^31."""
    q = torch.randn(4200, 1, 4096, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    k = torch.randn(4200, 1, 64, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dq, _ = torch.autograd.grad(attention(q, k, k, backend="triton")[-3:].sum(), (q, k))
    few, keys = q.detach()[-3:].double().requires_grad_(), k.detach()[-3:].double()
    (exact,) = torch.autograd.grad(attention(few, keys, keys, backend="reference").sum(), few)
    assert float((dq[-3:] - exact).abs().max()) <= 0.02 * float(exact.abs().max())
    assert not dq[:-3].any()
