"""Types of a call on every backend: autocast, mixed types, and where half types are widened."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from plain import G, H, draw
from torch import Tensor

from regard.ops import Causal, Wants, attention, blockwise, flash_cpu, observe

BOTH = pytest.mark.parametrize("backend", ["reference", "blockwise"])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 4)
    monkeypatch.setattr(flash_cpu, "BAND", 8)
    monkeypatch.setattr(flash_cpu, "PIECE_COST", 0)


def small(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    made = draw(b=2, h=6, g=2, t=5, s=7, d=3, e=3)
    return made.q.to(dtype), made.k.to(dtype), made.v.to(dtype)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("bias_type", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_takes_a_bias_of_any_float_type(backend: str, bias_type: torch.dtype) -> None:
    q, k, v = small(torch.float32)
    bias = torch.randn(5, 7).to(bias_type)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attention(q, k, v, mask=Causal(), bias=bias, backend=backend)
    known = attention(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), mask=Causal(), bias=bias, backend=backend
    )
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, known)


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_gradients_asked_for_inside_autocast_are_those_of_outside(
    backend: str, spoilt: bool
) -> None:
    found = []
    for inside in (True, False):
        inputs = [x.clone().requires_grad_() for x in small(torch.float32)]
        with torch.no_grad():
            inputs[2][0, 0, -1] = math.nan if spoilt else 0.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = attention(*inputs, mask=Causal(), backend=backend).float().square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(loss, inputs))
    for ours, known in zip(*found, strict=True):
        assert ours.dtype == torch.float32 and known.isfinite().any()
        assert torch.equal(ours.nan_to_num(7.0), known.nan_to_num(7.0))


@pytest.mark.parametrize("wrong", [torch.int64, torch.bool, None])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_no_float_tensor_is_refused_inside_autocast_as_outside(
    wrong: torch.dtype | None, which: int
) -> None:
    inputs: list[Any] = [*small(torch.float32)]
    inputs[which] = None if wrong is None else inputs[which].to(wrong)
    said = []
    for inside in (True, False):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside),
            pytest.raises(TypeError) as error,
        ):
            attention(*inputs)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", "auto"])
def test_float64_stays_inside_autocast_and_is_not_mixed(backend: str) -> None:
    q, k, v = small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v, backend=backend).dtype == torch.float64
        with pytest.raises(TypeError, match="q, k and v must have one type"):
            attention(q, k.float(), v, backend=backend)
        assert attention(q.float(), k.half(), v.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_float64_with_a_float32_bias_is_right_from_16_keys_on(backend: str) -> None:
    made = draw(t=19, s=23)
    bias = torch.randn(19, 23)
    scores = made.q @ made.k.repeat_interleave(H // G, 1).mT / made.q.shape[3] ** 0.5
    known = torch.softmax(scores + bias.double(), -1) @ made.v.repeat_interleave(H // G, 1)
    ours = attention(made.q, made.k, made.v, bias=bias, backend=backend)
    torch.testing.assert_close(ours, known, rtol=1e-12, atol=1e-12)


@BOTH
def test_softmax_of_half_types_runs_in_float32(backend: str) -> None:
    # 2,048 equal keys: in bfloat16 a running sum would stop growing at 256.
    q, k = torch.zeros(1, 1, 1, 3).bfloat16(), torch.zeros(1, 1, 2048, 3).bfloat16()
    seen = observe(q, k, k, wants=Wants(lse=True, entropy=True), backend=backend)
    assert seen.lse.dtype == torch.float32
    torch.testing.assert_close(seen.lse.item(), math.log(2048))
    torch.testing.assert_close(seen.entropy.item(), math.log(2048))


def test_inputs_of_different_types_are_refused_outside_autocast() -> None:
    q, k, v = small(torch.float32)
    with pytest.raises(TypeError, match=r"v is torch\.float64"):
        attention(q, k, v.double())
