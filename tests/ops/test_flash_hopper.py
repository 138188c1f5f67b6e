"""The forward for Hopper GPUs: which calls it takes, and that it compiles without one.

What it tells is held to the plain kernel on a GPU, in test_gpu.py.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
import triton
from no_gpu import Driver

from regard.ops import (
    ALiBi,
    Causal,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Window,
)
from regard.ops.blockwise import NOTHING, Ask
from regard.ops.call import make_call
from regard.ops.kernels import flash_hopper
from regard.ops.kernels.flash_kernels import Answers
from regard.ops.kernels.rendered import render

ALL = Ask(entropy=True, peak=True, distance=True)
IDS = torch.arange(300) // 70


COMPILED: dict[str, tuple[int, torch.dtype, Ask, dict[str, Any]]] = {
    "wide, causal, asked": (128, torch.bfloat16, ALL, {"mask": Causal()}),
    "wide, padded": (128, torch.float16, NOTHING, {"mask": Lengths(torch.tensor([200]))}),
    "wide, slopes, capped": (
        128, torch.bfloat16, NOTHING, {"mask": Window(9, 9), "bias": ALiBi(4), "softcap": 3.0},
    ),
    "narrow, causal, asked": (64, torch.bfloat16, ALL, {"mask": Causal()}),
    "narrow, sinks": (64, torch.bfloat16, NOTHING, {"mask": Causal(), "sinks": torch.zeros(4)}),
    "wide, documents": (128, torch.bfloat16, NOTHING, {"mask": Causal() & Documents(IDS[:256])}),
    "narrow, documents": (64, torch.bfloat16, NOTHING, {"mask": Documents(IDS[:256])}),
    "narrow, prefix": (64, torch.float16, NOTHING, {"mask": Causal() | Prefix(9)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_for_a_gpu_as_it_is_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.ops.kernels import flash_hopper_kernels

    width, dtype, ask, more = COMPILED[name]
    q, k = (torch.zeros(1, heads, 256, width, dtype=dtype) for heads in (4, 2))
    given = render(make_call(q, k, k, **more))
    names = ["lse", "maxima", "sums", *(x for x in ask._fields if getattr(ask, x))]
    found = {x: torch.zeros(1, 4, 256) for x in (*names, *(["logit"] if ask.peak else []))}
    if ask.peak:
        found["key"] = torch.zeros(1, 4, 256, dtype=torch.int64)
    mass = torch.ones(1, 256) if ask.peak else None
    if mass is not None:
        found["mass"] = torch.zeros(1, 4, 256)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    run = flash_hopper_kernels.plan_forward(given, asked=any(ask)).run
    run(given, torch.zeros_like(q), Answers(**found), mass)
    kernel: Any = flash_hopper_kernels._alone if width == 64 else flash_hopper_kernels._shared
    compiled = [one for cache in kernel.device_caches.values() for one in cache[0].values()]
    text = compiled[-1].asm["ptx"]
    assert ".target sm_90a" in text and "wgmma" in text


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], Ask, bool]] = {
    "plain": ({}, {}, NOTHING, True),
    "asked": ({}, {"mask": Causal()}, ALL, True),
    "narrow": ({"D": 64}, {"mask": Causal()}, NOTHING, True),
    "narrow and asked": ({"D": 64}, {"mask": Causal()}, ALL, True),
    "narrow, slopes, asked": ({"D": 64}, {"mask": Causal(), "bias": ALiBi(2)}, ALL, True),
    "slopes": ({}, {"bias": ALiBi(2)}, NOTHING, True),
    "narrow slopes": ({"D": 64}, {"bias": ALiBi(2)}, NOTHING, False),
    "few queries": ({"T": 127}, {}, NOTHING, False),
    "another width": ({"D": 96}, {}, NOTHING, False),
    "wide values": ({"E": 64}, {}, NOTHING, False),
    "float32": ({"dtype": torch.float32}, {}, NOTHING, False),
    "a table": ({}, {"bias": RelativeTable(torch.zeros(8, 2))}, NOTHING, False),
    "dropout": ({}, {"dropout": 0.1, "seed": 3}, NOTHING, False),
    "documents": ({}, {"mask": Causal() & Documents(IDS)}, NOTHING, True),
    "documents of fewer queries": ({"T": 200}, {"mask": Documents(IDS)}, NOTHING, False),
    "documents of queries": ({}, {"mask": Documents(IDS, IDS)}, NOTHING, False),
    "a window at positions": ({}, {"mask": Window(3, 0).at(IDS * 7)}, NOTHING, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_takes_what_it_is_faster_for_and_leaves_the_rest(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, rule, ask, is_taken = CALLS[name]
    T, D, dtype = (sizes.get(x, y) for x, y in (("T", 300), ("D", 128), ("dtype", torch.bfloat16)))
    q, k, v = (torch.zeros(1, 2, n, w, dtype=dtype) for n, w in ((T, D), (300, D), (300, D)))
    v = v[..., : sizes.get("E", D)]
    given = render(make_call(q, k, v, **rule).seeded())
    assert flash_hopper.suits(given, ask, None) == is_taken
    assert not flash_hopper.takes(given, ask, None), "and on a CPU none"


def test_tma_reads_packed_rows_that_begin_at_sixteen_bytes() -> None:
    x = torch.zeros(2, 3, 5, 64, dtype=torch.bfloat16)
    packed = torch.zeros(2, 5, 3, 3, 64, dtype=torch.bfloat16)
    for good in (x, packed[:, :, 1].transpose(1, 2), x[:, :, 2:], x[:, :, ::2]):
        assert flash_hopper.is_read_by_tma(good)
    odd = torch.zeros(2, 3, 5, 68, dtype=torch.bfloat16)
    for bad in (x.mT, odd[..., :64], x[..., 4:60], x[:, :1].expand(2, 3, 5, 64), x[..., ::2]):
        assert not flash_hopper.is_read_by_tma(bad)


@pytest.mark.parametrize(
    ("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.9.0", True), ("3.10.0", False)]
)
def test_only_a_triton_that_was_tried_is_used(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert flash_hopper.has_gluon.__wrapped__() == known


def test_long_calls_without_gradients_are_those_that_ours_is_faster_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_hopper, "runs_on", lambda device: True)
    monkeypatch.setattr(flash_hopper, "LONG", 96)
    monkeypatch.setattr(flash_hopper, "LARGE", 2 * 96 * 96)

    def draw(T: int = 96, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(1, 2, T, width, dtype=dtype)

    q = draw()
    assert flash_hopper.is_long(q, q, q)
    others = [draw(T=95), draw(width=80), draw(dtype=torch.float32), draw(width=128)[..., ::2]]
    for other in others:
        assert not flash_hopper.is_long(other, other, other)
    assert not flash_hopper.is_long(q, draw(T=97), draw(T=97))
    learned = draw().requires_grad_()
    assert not flash_hopper.is_long(q, q, learned)
    with torch.no_grad():
        assert flash_hopper.is_long(q, q, learned)
    one = q[:, :1]
    assert not flash_hopper.is_long(one, one, one), "one head is too little work"
