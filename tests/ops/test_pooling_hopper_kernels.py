"""The kernels for Hopper GPUs that look at weights: what they tell, and that they compile.

Numpy runs what they pool, and test_largest_kernels.py what they list. Both are held to the
reference on a GPU here too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from cells import TYPES
from gluon_on_numpy import Descriptor, as_argument, bind
from no_gpu import Driver
from row_stats_cases import compare

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    Received,
    RelativeTable,
    Wants,
    Window,
    observe,
)
from regard.ops.call import make_call
from regard.ops.kernels import flash_hopper, pooling
from regard.ops.kernels.arguments import rule_of
from regard.ops.kernels.rendered import Rendered, render
from regard.ops.kernels.row_sums import RowSums

IDS = torch.arange(600) // 150
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], bool, bool]] = {
    "plain": ({}, {}, True, True),
    "causal": ({"D": 64}, {"mask": Causal()}, True, True),
    "padding": ({}, {"mask": Lengths(torch.tensor([100])) & Causal()}, True, True),
    "sinks": ({}, {"sinks": torch.zeros(2)}, True, True),
    "softcap": ({}, {"softcap": 3.0}, False, True),
    "slopes": ({}, {"mask": Causal(), "bias": ALiBi(2)}, False, True),
    "documents": ({}, {"mask": Documents(IDS[:300])}, False, True),
    "prefix": ({}, {"mask": Causal() | Prefix(9)}, False, True),
    "bits": ({}, {"mask": Dense(torch.ones(300, 300) > 0)}, False, False),
    "a table": ({}, {"bias": RelativeTable(torch.zeros(8, 2))}, False, False),
    "numbers": ({}, {"bias": DenseBias(torch.zeros(300, 300))}, False, False),
    "few queries": ({"T": 127}, {}, False, False),
    "another width": ({"D": 96}, {}, False, False),
    "float32": ({"dtype": torch.float32}, {}, False, False),
}


def drawn(name: str) -> Rendered:
    sizes, rule, _, _ = CALLS[name]
    T, D, dtype = (sizes.get(x, y) for x, y in (("T", 300), ("D", 128), ("dtype", torch.bfloat16)))
    q, k = torch.zeros(1, 2, T, D, dtype=dtype), torch.zeros(1, 1, 300, D, dtype=dtype)
    return render(make_call(q, k, k, **rule))


@pytest.mark.parametrize("name", CALLS)
def test_they_take_what_tma_reads_and_few_numbers_tell(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.ops.kernels import largest_kernels

    given, (_, _, pooled, listed) = drawn(name), CALLS[name]
    assert not pooling.suits_hopper(given) and not largest_kernels.takes_lists(given, 8)
    monkeypatch.setattr(flash_hopper, "runs_on", lambda _: True)
    assert pooling.suits_hopper(given) == pooled
    assert largest_kernels.takes_lists(given, 8) == listed
    assert not largest_kernels.takes_lists(given, 9), "more are no candidates of few groups"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call[3]])
def test_they_compile_for_a_gpu_as_they_are_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.ops.kernels import largest_hopper_kernels, largest_kernels, pooling_hopper_kernels

    given = drawn(name)
    B, H, T, _ = given.shape
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(flash_hopper, "runs_on", lambda _: True)
    sums = RowSums(torch.zeros(B, H, T), torch.ones(B, H, T))
    bounds = largest_kernels.find_bounds(torch.zeros(B, H, 64, 384), T, 5)
    largest_kernels.run_largest(given, sums, 5, bounds)
    kernels: list[Any] = [largest_hopper_kernels._candidates]
    if CALLS[name][2]:
        assert pooling.pool(given, sums, (300, 300))[0].shape == (B, H, 300, 300)
        pooling.receive(given, sums, None, "sum", (0, T))
        kernels.append(pooling_hopper_kernels._received)
    for kernel in kernels:
        text = [one for cache in kernel.device_caches.values() for one in cache[0].values()]
        assert ".target sm_90a" in text[-1].asm["ptx"] and "wgmma" in text[-1].asm["ptx"]


RULES: dict[str, tuple[tuple[int, ...], tuple[int, int], dict[str, Any]]] = {
    "plain": ((256, 384, 2, 1), (8, 24), {}),
    "causal": ((384, 384, 2, 2), (24, 24), {"mask": Causal()}),
    "cells of eight": ((128, 256, 2, 2), (16, 32), {"mask": Causal()}),
    "few large cells": ((256, 512, 2, 2), (1, 2), {"mask": Causal()}),
    "ragged": ((131, 290, 2, 2), (7, 9), {"mask": Window(70, 30), "scale": -0.3}),
    "padding": ((200, 400, 2, 2), (5, 5), {"mask": Lengths(torch.tensor([300, 0])) & Causal()}),
    "sinks": ((128, 128, 2, 2), (4, 4), {"sinks": torch.tensor([0.3, -2.0])}),
}
"""Queries, keys, query heads and key heads, the map, and what is asked for."""


def pool_by_numpy(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> list[tuple[int, int]]:
    """Have numpy run the kernel wherever a GPU would; the cells of each launch go into a list."""
    from regard.ops.kernels import pooling_hopper_kernels as kernels

    launched: list[tuple[int, int]] = []

    def run(given: Rendered, sums: RowSums, received: torch.Tensor, cells: Any) -> None:
        (B, H, T, D), (_, G, S, _) = given.q.shape, given.k.shape
        lse = sums.maxima + sums.sums.log2()
        lse = torch.nn.functional.pad(lse, (0, -T % 64), value=math.inf)
        to, tall, wide = cells or (None, 16, 64)
        rest = (rule_of(given), lse, received, to, H, T, S)
        launched.append((tall, wide))
        for program in range(B * H * -(-S // 128)):
            bind(kernels, "_received", program, 4, is_late)(
                *(Descriptor(x.float().numpy()) for x in (given.q, given.k)),
                *(x if x is None else as_argument(x) for x in rest),
                R=H // G, WIDTH=D, TALL=tall, WIDE=wide,
            )  # fmt: skip

    monkeypatch.setattr(flash_hopper, "runs_on", lambda _: True)
    monkeypatch.setattr(kernels, "run_received", run)
    return launched


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_numpy_pools_as_the_reference_does(
    name: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NaN in every key that nobody sees, and in every row that sees nothing."""
    (T, S, H, G), size, asked = RULES[name]
    torch.manual_seed(T)
    q, k = (torch.randn(2, n, m, 64).bfloat16() for n, m in ((H, T), (G, S)))
    wants = Wants(lse=True, received=True, map=size)
    truth = observe(q.double(), k.double(), None, **asked, wants=wants, backend="reference")
    assert truth.lse is not None and truth.map is not None and truth.received is not None
    mask = asked.get("mask")
    if mask is not None:
        seen = mask.dense(make_call(q, k, k, **asked).rule.shape, "cpu").expand(2, 1, T, S)
        q = q.masked_fill(~seen.any(3)[..., None], math.nan)
        k = k.masked_fill(~seen.any(2)[..., None], math.nan)
    given = render(make_call(q, k, k, **asked))
    launched = pool_by_numpy(monkeypatch, is_late)
    lse = truth.lse.float() / math.log(2)
    sums = RowSums(lse.masked_fill(lse.isinf(), 0.0), torch.ones_like(lse))
    if name in ("ragged", "padding"):
        total = pooling.receive(given, sums, None, "sum", (0, T))
    else:
        cells, total = pooling.pool(given, sums, size)
        assert cells.shape == truth.map.shape
        assert float((cells - truth.map).abs().max()) <= 1e-5 * float(truth.map.max())
    assert launched
    exact = truth.received.total
    assert float((total - exact).abs().max()) <= 1e-5 * float(exact.max())


def test_numpy_reads_no_rows_beyond_the_last_for_keys_that_nobody_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by the mask from the start, of which a part of the queries is asked, nor padding."""
    T, S, queries = 192, 384, (3, 192)
    torch.manual_seed(T)
    q, k = torch.randn(1, 1, T, 64).bfloat16(), torch.randn(1, 1, S, 64).bfloat16()
    mask = Causal(align="start") & Lengths(torch.tensor([52]))
    wants = Wants(lse=True, received=Received(queries=queries))
    truth = observe(q.double(), k.double(), None, mask=mask, wants=wants, backend="reference")
    assert truth.lse is not None and truth.received is not None
    launched = pool_by_numpy(monkeypatch, False)
    sums = RowSums(truth.lse.float() / math.log(2), torch.ones(1, 1, T))
    total = pooling.receive(render(make_call(q, k, k, mask=mask)), sums, None, "sum", queries)
    assert launched
    exact = truth.received.total
    assert float((total - exact).abs().max()) <= 1e-5 * float(exact.max())


@pytest.mark.parametrize(("n", "is_hopper"), [(2**20, True), (2**21, False)])
def test_maps_of_more_cells_than_32_bits_count_are_left_to_the_plain_kernel(
    n: int, is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 rows and 64 keys each, a head of 2^21 tokens has 2^32."""
    found: list[bool] = []
    monkeypatch.setattr(flash_hopper, "runs_on", lambda _: True)
    monkeypatch.setattr(pooling, "_pool_evenly", lambda *given: found.append(given[3] is None))
    q = torch.empty(1, 1, n, 64, dtype=torch.bfloat16, device="meta")
    given = Rendered(q, q, q[..., :0])
    sums = RowSums(*torch.empty(2, 1, 1, n, device="meta").unbind())
    pooling.pool(given, sums, (128, 128))
    assert found == [is_hopper]


LOOKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((640, 640, 4, 2), {}),
    "causal": ((5120, 5120, 2, 1), {"mask": Causal()}),
    "ragged": ((300, 5001, 2, 2), {"mask": Causal()}),
    "window": ((700, 700, 2, 2), {"mask": Window(300, 50)}),
    "slopes": ((5120, 5120, 2, 2), {"mask": Causal(), "bias": ALiBi(2)}),
    "softcap": ((640, 640, 2, 2), {"softcap": 3.0}),
    "negative scale": ((640, 640, 2, 2), {"scale": -0.2}),
    "padding": ((640, 640, 2, 2), {"mask": Lengths(torch.tensor([600, 5])) & Causal()}),
    "documents": ((600, 600, 2, 2), {"mask": Documents(IDS) & Causal()}),
    "scattered documents": ((600, 600, 2, 2), {"mask": Documents(torch.arange(600) % 3)}),
    "sinks": ((640, 640, 2, 2), {"sinks": torch.tensor([0.3, -2.0])}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", LOOKS)
def test_on_a_gpu_they_tell_what_the_reference_tells(name: str, width: int, kind: str) -> None:
    (T, S, H, G), asked = LOOKS[name]
    rule = {key: x.to("cuda") if hasattr(x, "to") else x for key, x in asked.items()}
    torch.manual_seed(T)
    q, k = (torch.randn(2, n, m, width, device="cuda") for n, m in ((H, T), (G, S)))
    # Heads that look far, and heads that look beside themselves.
    near = torch.nn.functional.avg_pool1d(torch.randn(width, S + 31, device="cuda"), 32, 1)
    k[:, 0] = torch.nn.functional.normalize(near.mT, dim=-1) * math.sqrt(width)
    q[:, 0] = 2 * k[:, 0, -T:] if T <= S else q[:, 0]
    q, k = q.to(TYPES[kind]), k.to(TYPES[kind])
    size = (20, 20) if (T % 20, S % 20) == (0, 0) else (7, 9)
    wants = Wants(top=8, received=True, map=size, entropy=True)
    seen = observe(q, k, k, **rule, wants=wants, backend="triton")
    blind = observe(q, k, None, **rule, wants=wants, backend="triton")
    plain = observe(q, k, k, **rule, wants=wants, backend="reference")
    wide = [x.double() for x in (q, k, k)]
    truth = observe(*wide, **rule, wants=replace(wants, weights=True), backend="reference")
    assert truth.top is not None and truth.map is not None and truth.received is not None
    assert truth.weights is not None and plain.top is not None and plain.received is not None
    for ours in (seen, blind):
        assert ours.top is not None and ours.map is not None and ours.received is not None
        for one, judge, exact in (
            (ours.top.weight, plain.top.weight, truth.top.weight),
            (ours.map, plain.map, truth.map),
            (ours.received.total, plain.received.total, truth.received.total),
        ):
            assert judge is not None
            gap, limit = compare(one.double(), judge.double(), exact)
            assert gap <= limit
        named = truth.weights.gather(-1, ours.top.key.clamp(min=0))
        named = named.masked_fill(ours.top.key < 0, 0.0)
        gap, limit = compare(named, plain.top.weight.double(), truth.top.weight)
        assert gap <= limit
        order = ours.top.key.sort(-1)[0].diff(dim=-1)
        assert ((order > 0) | (ours.top.key.sort(-1)[0][..., 1:] < 0)).all(), "none is named twice"


@pytest.mark.gpu
def test_on_a_gpu_equal_scores_are_told_by_key_and_nan_stays_in_its_row() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 640, 64, device="cuda").bfloat16()
    top = observe(q.round(), torch.ones_like(k), v, wants=Wants(top=8), backend="triton").top
    assert top is not None and (top.key == torch.arange(8, device="cuda")).all()
    q[0, 0, 33] = math.nan
    k[0, 1, -5:] = math.nan
    mask = Lengths(torch.tensor([635], device="cuda"))
    wants = Wants(top=8, received=True, map=(20, 20))
    seen = observe(q, k, v, mask=mask, wants=wants, backend="triton")
    assert seen.top is not None and seen.map is not None and seen.received is not None
    rows = seen.top.weight.isnan().any(-1)
    assert int(rows.sum()) == 1 and bool(rows[0, 0, 33]) and (seen.top.key[0, 0, 33] == -1).all()
    assert not seen.received.total[0, 1].isnan().any() and not seen.map[0, 1].isnan().any()
    assert seen.map[0, 0].isnan().any(-1).tolist() == [n == 1 for n in range(20)]
