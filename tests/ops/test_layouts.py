"""Any view will do: q, k, v and the gradient that comes back, in every layout, on every backend.

Judged as the grid is: the error against float64 is at most twice that of the plain formula.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cells import judge
from layouts import LAYOUTS, lay_out
from plain import plain
from torch import Tensor

from regard.nn import functional
from regard.ops import Causal, Lengths, Mask, attention
from regard.ops.shape import Shape

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
MASKS: dict[str, Mask | None] = {
    "plain": None,
    "causal": Causal(),
    "padding": Lengths(torch.tensor([2, 41])),
}


def results(output: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad(output, inputs, grad)]


@DEVICES
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "gradient"])
def test_every_layout_gives_what_the_formula_gives(
    which: str, layout: str, dtype: torch.dtype, name: str, device: str
) -> None:
    mask = MASKS[name]
    for T, width in ((3, 16), (41, 17), (41, 16)):
        S = 41 if mask is not None else T
        sizes = {"q": (2, 3, T, 16), "k": (2, 3, S, 16), "v": (2, 3, S, width)}
        sizes["gradient"] = (2, 3, T, width)
        drawn = {key: torch.randn(size).to(device, dtype) for key, size in sizes.items()}
        drawn[which] = lay_out(drawn[which], layout)
        *inputs, grad = drawn.values()
        inputs = [x.requires_grad_() for x in inputs]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        seen = None if mask is None else mask.dense(Shape(2, 3, T, S)).to(device)
        theirs = results(plain(*inputs, seen)[0], inputs, grad)
        truth = results(plain(*wide, seen)[0], wide, grad.double())
        for backend in ("auto", "sdpa", "blockwise", "reference"):
            ours = attention(*inputs, mask=mask, backend=backend)
            judge(truth, results(ours, inputs, grad), theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_names_take_every_layout(layout: str) -> None:
    q, k, v = (lay_out(torch.randn(2, 3, 16, 8), layout) for _ in range(3))
    for call in ({}, {"is_causal": True}, {"attn_mask": torch.rand(16, 16) < 0.5}):
        given: dict[str, Any] = call
        ours = functional.scaled_dot_product_attention(q, k, v, **given)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), **given
        ).nan_to_num(0.0)
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


@DEVICES
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.3, -4.0, 1e-30])
@pytest.mark.parametrize("mask", MASKS)
def test_every_scale_is_honoured(mask: str, scale: float, kind: torch.dtype, device: str) -> None:
    q, k, v = (torch.randn(2, 3, 41, 16).to(device, kind).requires_grad_() for _ in range(3))
    grad = torch.randn(2, 3, 41, 16).to(device, kind)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    rule = MASKS[mask]
    seen = None if rule is None else rule.dense(Shape(2, 3, 41, 41)).to(device)
    theirs = results(plain(q, k, v, seen, scale=scale)[0], [q, k, v], grad)
    truth = results(plain(*wide, seen, scale=scale)[0], wide, grad.double())
    score = float((wide[0] @ wide[1].mT * scale).detach().abs().max())
    for backend in ("auto", "sdpa", "blockwise"):
        ours = attention(q, k, v, mask=rule, scale=scale, backend=backend)
        judge(truth, results(ours, [q, k, v], grad), theirs, score)


@DEVICES
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_without_keys_a_bool_mask_gives_zeros_whatever_the_query_holds(
    bad: float, device: str
) -> None:
    q = torch.full((2, 3, 5, 8), bad, device=device, requires_grad=True)
    none = torch.zeros(2, 3, 0, 8, device=device, requires_grad=True)
    mask = torch.ones(5, 0, dtype=torch.bool, device=device)
    for backend in ("auto", "blockwise", "reference"):
        out = attention(q, none, none, mask=mask, backend=backend)
        assert out.shape == (2, 3, 5, 8) and (out == 0).all()
        assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()
