"""The short way of the plainest calls to torch's kernels, and which of these a call takes."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS, lay_out
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend

import regard
from regard._torch import sdp_order
from regard.ops import (
    ALiBi,
    Causal,
    Documents,
    Lengths,
    Mask,
    Window,
    attention,
    explain,
    flash_cpu,
    sdpa,
)
from regard.ops.call import make_call
from regard.ops.flash_cpu import in_rows
from regard.ops.kernels import flash_hopper
from regard.ops.kernels.launch import Plans
from regard.ops.shape import Shape

HOUSE = str(Path(regard.__file__).parent)


@dataclass(frozen=True, eq=False)
class Counted(Mask):
    """All keys, counting of how many samples it is asked at once."""

    asked: list[int]

    def allows(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: Shape) -> Tensor:
        self.asked.append(b.numel())
        return (b >= 0) & (i >= 0) & (j >= 0)

    def interval(self, i: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(i), torch.full_like(i, shape.S)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What torch's attention is given by plain calls, which go the way of those on a GPU."""
    found: list[tuple[Any, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Tensor:
        found.append((q, k, v, *rest, more))
        return q * 1.0

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(sdpa, "ON_GPU", "is_cpu")
    monkeypatch.setattr(sdpa, "torchs_order_is_right", lambda device: True)
    monkeypatch.setattr(sdpa, "PLAIN", Plans())
    return found


def test_the_short_way_leaves_to_the_long_one_what_it_cannot_know() -> None:
    q = torch.randn(1, 2, 5, 8)
    assert sdpa.attend_plain(q, q, q, Causal(), None) is not None
    assert sdpa.attend_plain(q, q, q, Causal(), 0.3) is not None
    for scale in (0.0, -1.0, math.inf, math.nan, 1):
        assert sdpa.attend_plain(q, q, q, None, scale) is None
    for k in (q.double(), q[..., :7], q[0], q[:, :, :0], q[:, :0], q.to("meta"), None):
        assert sdpa.attend_plain(q, k, k, None, None) is None  # type: ignore[arg-type]
    assert sdpa.attend_plain(q, q, q[..., :3], None, None) is None
    for mask in (Window(1, 0), Causal() & Window(1, 0), torch.ones(5, 5) > 0):
        assert sdpa.attend_plain(q, q, q, mask, None) is None
    assert sdpa.attend_plain(q[:, :, :2], q, q, Causal(), None) is None
    one = sdpa.attend_plain(q[:, :, -1:], q, q, Causal(), None)
    assert one is not None
    torch.testing.assert_close(one, attention(q, q, q, mask=Causal())[:, :, -1:])
    assert sdpa.attend_plain(q[:, :, :1], q, q, Causal(align="start"), None) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sdpa.attend_plain(q, q, q, None, None) is None
    torch.set_autocast_enabled("cuda", True)
    try:
        assert sdpa.attend_plain(q, q, q, None, None) is None
        other = attention(q, q, q)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert torch.equal(other, attention(q, q, q)), "another device's autocast is only a detour"
    seen = []
    torch.func.vmap(lambda x: seen.append(sdpa.attend_plain(x, x, x, None, None)) or x)(q[None])
    torch.func.jvp(lambda x: seen.append(sdpa.attend_plain(x, x, x, None, None)) or x, (q,), (q,))
    assert seen == [None, None]


@pytest.mark.parametrize("learned", [False, True])
def test_a_plain_call_on_a_gpu_makes_few_calls(learned: bool, given: list[tuple[Any, ...]]) -> None:
    """3 once it is known, and one for the gradient that comes back."""
    q = torch.randn(1, 6, 1, 8, requires_grad=learned)
    k = torch.randn(1, 2, 5, 8)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            calls[frame.f_code.co_name] += 1

    for rule in ({}, {"mask": Causal()}, {"scale": 0.3}):
        attention(q, k, k, **rule)
        given.clear()
        calls.clear()
        sys.setprofile(count)
        try:
            attention(q, k, k, **rule)
        finally:
            sys.setprofile(None)
        assert calls.total() <= 3 + learned, calls
        told = {"scale": rule.get("scale"), "enable_gqa": True}
        assert [each[3:] for each in given] == [(None, 0.0, False, told)]


def test_a_plain_call_that_is_known_is_told_what_it_was_told_before(
    given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    anew: list[int] = []
    plain = sdpa.plain_sizes
    monkeypatch.setattr(sdpa, "plain_sizes", lambda *call: (anew.append(1), plain(*call))[1])
    x = torch.randn(2, 5, 6, 8).half()
    q, k = x.transpose(1, 2), x[:, :, :2].transpose(1, 2)
    odd = torch.zeros(q.numel() + 1).half()[1:].view(q.shape)
    calls: list[tuple[Any, ...]] = [
        (q, k, k, None, None),
        (q, q, q, None, None),
        (q, q, q, Causal(), None),
        (q, q, q, Causal(align="start"), None),
        (q, q, q, Causal(), 0.3),
        (q.contiguous(), q, q, None, None),
        (q, q.contiguous(), q, None, None),
        (q, q, q.contiguous(), None, None),
        (q.float(), q.float(), q.float(), None, None),
        (q[:1], q[:1], q[:1], None, None),
        (q[:, :, -1:], q, q, Causal(), None),
    ]
    for turn in range(2):
        anew.clear()
        for call in calls:
            sdpa.attend_plain(*call)
        assert len(anew) == (0 if turn else len(calls))
    for one, other in zip(given[: len(calls)], given[len(calls) :], strict=True):
        assert all(x is y for x, y in zip(one[:3], other[:3], strict=True))
        assert one[3:] == other[3:]
    assert [each[5] for each in given[2:5]] == [True] * 3 and given[10][5] is False
    sdpa.attend_plain(*[q.contiguous()] * 3, None, None)
    given.clear()
    for other in (odd, x.mT.contiguous().mT.transpose(1, 2)):
        for _ in range(2):
            anew.clear()
            sdpa.attend_plain(q.contiguous(), other, other, None, None)
            assert anew == [1] and given[-1][1] is not other, "it is copied each time"
    for wrong in ((q, q.float(), q), (q, q[:, :, 1:], q), (q.mT, q, q), (q, q.to("meta"), q)):
        for _ in range(2):
            assert sdpa.attend_plain(*wrong, None, None) is None


def test_calls_that_cudnn_may_plan_anew_are_not_kept(
    given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it does depends on what learns, and on what the user switched off."""
    monkeypatch.setattr(sdpa, "is_cudnn_first", lambda device: True)
    monkeypatch.setattr(flash_hopper, "LONG", 7)
    q, k, long = (torch.randn(1, 2, n, 8) for n in (3, 5, 7))
    sdpa.attend_plain(q, k, k, None, None)
    sdpa.attend_plain(long, long, long, None, None)
    assert len(given) == 2 and not sdpa.PLAIN


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("layout", [*LAYOUTS, "cut"])
def test_a_gpus_kernel_is_given_rows_it_can_read(
    layout: str, width: int, given: list[tuple[Any, ...]]
) -> None:
    """What it takes as it is begins and steps by 16 bytes; other rows are the same in a copy."""
    torch.manual_seed(0)
    wide = torch.randn(2, 3, 5, width + 1, dtype=torch.bfloat16)
    x = wide[..., :width] if layout == "cut" else lay_out(wide[..., :width].clone(), layout)
    attention(x, x, x)
    for seen in given[0][:3]:
        assert torch.equal(seen, x)
        assert in_rows(seen) is seen and seen.data_ptr() % 16 == 0
        if width == 8:
            assert all(step % 8 == 0 for step in seen.stride()[:3])
        fits = layout in ("plain", "heads last", "packed", "rows stepped", "odd single axes")
        fits = fits or layout in ("expanded batch", "expanded heads")
        if fits and width == 8:
            assert seen is x, "and what it can read is not copied"


def test_cudnn_is_asked_first_and_nothing_else_changes() -> None:
    """What was switched off stays off, the order behind it stays, and so does a choice of one."""
    cuda = torch.backends.cuda
    before = sdp_order()
    cudnn = int(SDPBackend.CUDNN_ATTENTION)
    assert before[0] != cudnn
    try:
        cuda.enable_math_sdp(False)
        with pytest.raises(ZeroDivisionError), sdpa.preferred_kernel():
            assert sdp_order() == [cudnn, *(kind for kind in before if kind != cudnn)]
            assert not cuda.math_sdp_enabled() and cuda.mem_efficient_sdp_enabled()
            raise ZeroDivisionError
        assert sdp_order() == before
        cuda.enable_flash_sdp(False)
        with sdpa.preferred_kernel():
            assert sdp_order() == before
    finally:
        cuda.enable_math_sdp(True)
        cuda.enable_flash_sdp(True)


def test_threads_that_ask_cudnn_first_at_a_time_leave_torchs_order() -> None:
    """Whichever begins or ends first: the order is one for all threads."""
    before = sdp_order()
    one, other = sdpa.preferred_kernel(), sdpa.preferred_kernel()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sdp_order()[0] == int(SDPBackend.CUDNN_ATTENTION), "the other is still asking"
    other.__exit__(None, None, None)
    assert sdp_order() == before


@pytest.mark.parametrize("T", [1, 7])
def test_tensors_of_a_gpu_that_have_no_data_are_asked_for_none(T: int) -> None:
    """As where somebody counts operations or memory beforehand, on a machine without a GPU."""
    with FakeTensorMode():
        q, k = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="cuda") for n in (T, 7))
        for mask in (None, Window(3, 0)):
            output = attention(q, k, k, mask=mask)
            assert output.shape == q.shape and output.is_cuda


@pytest.mark.parametrize("learned", [False, True])
def test_a_rule_is_rendered_for_the_samples_of_a_piece_alone(
    learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_cpu, "BAND", 4)
    monkeypatch.setattr(flash_cpu, "PIECE_COST", 0)
    q, asked, ids = torch.randn(5, 2, 12, 8), list[int](), torch.arange(60).view(5, 12) // 7
    rule = Documents(ids) & Counted(asked)
    x = q.clone().requires_grad_(learned)
    output = attention(x, q, q, mask=rule, backend="sdpa")
    if learned:
        output.sum().backward()
    torch.testing.assert_close(output, attention(q, q, q, mask=Documents(ids), backend="reference"))
    assert set(asked) == {1}


@pytest.mark.parametrize("mask", [None, Lengths(torch.tensor([2083, 1999])), Causal()])
def test_a_bias_of_a_long_text_is_rendered_in_bands(mask: Mask | None) -> None:
    q = torch.randn(2, 2, 2083, 8, dtype=torch.float64)
    call = make_call(q, q, q, mask=mask, bias=ALiBi(2))
    heights = [
        piece.tile.t1 - piece.tile.t0 for piece in flash_cpu.make_plan(call.rule, None).pieces
    ]
    assert max(heights) <= flash_cpu.BAND
    output = attention(q, q, q, mask=mask, bias=ALiBi(2), backend="sdpa")
    same = attention(q, q, q, mask=mask, bias=ALiBi(2), backend="blockwise")
    torch.testing.assert_close(output, same)


def test_explain_names_the_cpus_kernel() -> None:
    q = torch.randn(1, 2, 5, 8)
    told = explain(q, q, q, mask=Causal())
    assert told.kernel == "torch's flash kernel for the CPU, on what the mask leaves"
    assert str(told).splitlines()[0] == f"sdpa       runs     {told.kernel}"
    assert explain(q, q, q, softcap=2.0).kernel is None
    assert explain(q.to("meta"), q.to("meta"), q.to("meta")).kernel is None
    with FakeTensorMode():
        fake = torch.empty(1, 2, 5, 8, device="cuda")
        assert explain(fake, fake, fake).kernel is None


@pytest.mark.parametrize("torchs_order", [True, False])
def test_explain_names_the_kernel_that_torch_takes_on_a_gpu(
    torchs_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    answer: dict[str, str] = {}
    monkeypatch.setattr(sdpa, "readable", lambda *tensors: True)
    monkeypatch.setattr(sdpa, "torchs_order_is_right", lambda device: torchs_order)

    def choose(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *more: Any, **named: Any
    ) -> int:
        asked.append((q.shape, v.shape, mask is not None, *more, named))
        return int(getattr(SDPBackend, answer["kind"]))

    monkeypatch.setattr(sdpa, "sdp_choice", choose)
    with FakeTensorMode():
        q, k = torch.empty(1, 4, 5, 8, device="cuda"), torch.empty(1, 2, 5, 8, device="cuda")
        rest = (
            "in torch's order" if torchs_order else "cuDNN asked before FA2, as it is faster here"
        )
        for answer["kind"], name in (
            ("CUDNN_ATTENTION", "cuDNN"),
            ("FLASH_ATTENTION", "FA2"),
            ("EFFICIENT_ATTENTION", "efficient"),
            ("MATH", "math"),
        ):
            assert explain(q, k, k, mask=Causal()).kernel == f"torch's {name} kernel, {rest}"
        answer["kind"] = "ERROR"
        narrow = torch.empty(1, 2, 5, 3, device="cuda")
        assert explain(q, k, narrow, scale=0.3, mask=Window(1, 0)).kernel is None
    gqa = {"scale": None, "enable_gqa": True}
    assert asked[0] == (q.shape, k.shape, False, 0.0, True, gqa)
    # Values as wide as keys, and the mask rendered, as the kernel is given them.
    assert asked[-1] == (q.shape, k.shape, True, 0.0, False, gqa | {"scale": 0.3})


def test_flash_attention_is_named_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sdpa.flash_version() == "FA2"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", False)
    assert sdpa.flash_version() == "FA3"
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")
    assert sdpa.flash_version() == "FA2"
