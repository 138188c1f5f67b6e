"""NaN and infinity: what nobody may see never matters, what a query sees never passes for a number.

`reference` and `blockwise` keep what is not finite to the queries that may see it, and so does the
default on a CPU outside of graphs. Fused kernels may spread it over its head.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    Wants,
    Window,
    attention,
    explain,
    observe,
)
from regard.ops.shape import Shape

B, H, G, T, S, D = 2, 4, 2, 11, 13, 8
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
HIDDEN = torch.zeros(B, 1, 1, S)
HIDDEN[1, ..., 4:] = -math.inf
EVERY_NTH = torch.arange(S) % (torch.arange(1, H + 1)[:, None, None] * 2) == 0
IDS, QUERY_IDS = torch.tensor([0] * 5 + [1] * 5 + [2] * 3), torch.tensor([0] * 4 + [1] * 7)
SLOTS = torch.tensor([3, 0, 1, -1, 2, -1, 4, 5, 6, -1, 7, 8, 9])
RULES: dict[str, dict[str, Any]] = {
    "lengths": {"mask": Lengths(torch.tensor([7, 3]))},
    "no real token": {"mask": Lengths(torch.tensor([7, 0]))},
    "left padding": {"mask": Causal() & Lengths(torch.tensor([9, 4]), side="left")},
    "causal from the start": {"mask": Causal(align="start")},
    "window": {"mask": Window(1, 0)},
    "documents nobody reads": {"mask": Documents(IDS, QUERY_IDS)},
    "prefix": {"mask": Prefix(torch.tensor([4, 6]))},
    "empty slots": {"mask": Causal().at(torch.arange(T) - 1, SLOTS)},
    "dense": {"mask": Dense(torch.arange(S) % 3 != 1)},
    "dense of heads": {"mask": Dense(EVERY_NTH)},
    "bias of -inf": {"bias": DenseBias(HIDDEN)},
    "alibi": {"mask": Lengths(torch.tensor([7, 3])), "bias": ALiBi(H)},
    "softcap and sinks": {"mask": Lengths(torch.tensor([7, 3])), "softcap": 3.0, "sinks": True},
}  # fmt: skip
COVERING: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"mask": Causal()}}
"""Rules under which every key is seen by somebody."""


def ask(device: str, name: str) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Inputs, the call, and which pairs may be seen, (B, H, T, S)."""
    inputs = [torch.randn(B, n, s, D, device=device) for n, s in ((H, T), (G, S), (G, S))]
    rule = dict((COVERING | RULES)[name])
    if rule.pop("sinks", False):
        rule["sinks"] = torch.zeros(H, device=device)
    seen = torch.ones(B, H, T, S, dtype=torch.bool)
    if "mask" in rule:
        seen = seen & rule["mask"].dense(Shape(B, H, T, S))
    if name == "bias of -inf":
        seen = seen & (HIDDEN == 0)
    return inputs, rule, seen.to(device)


def backends(inputs: list[Tensor], rule: dict[str, Any], device: str) -> list[str]:
    free = explain(*inputs, **rule).verdicts
    names = ["auto", "reference", "blockwise"]
    if device == "cuda":
        names += [name for name in ("triton", "flex") if free[name] is None]
    return names + (["sdpa"] if free["sdpa"] is None else [])


def run(inputs: list[Tensor], rule: dict[str, Any], backend: str) -> list[Tensor]:
    if backend == "triton":  # few queries, of which it has no backward pass
        return [attention(*inputs, **rule, backend=backend)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves, **rule, backend=backend)
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@DEVICES
@BAD
@pytest.mark.parametrize("name", RULES)
def test_what_nobody_of_its_sample_may_see_never_matters(
    name: str, bad: float, device: str
) -> None:
    inputs, rule, seen = ask(device, name)
    unseen = ~seen.any(2).view(B, G, H // G, S).any(2)
    assert unseen.any(), "a case that hides no key says nothing"
    dirty = [inputs[0], *(x.masked_fill(unseen[..., None], bad) for x in inputs[1:])]
    for backend in backends(inputs, rule, device):
        torch._dynamo.reset()
        for clean, ours in zip(run(inputs, rule, backend), run(dirty, rule, backend), strict=True):
            assert ours.isfinite().all(), backend
            torch.testing.assert_close(ours, clean, atol=1e-5, rtol=1e-5)


@BAD
@pytest.mark.parametrize("name", RULES)
def test_what_nobody_may_see_never_matters_in_a_compiled_graph(name: str, bad: float) -> None:
    torch._dynamo.reset()
    inputs, rule, seen = ask("cpu", name)
    unseen = ~seen.any(2).view(B, G, H // G, S).any(2)
    dirty = [inputs[0], *(x.masked_fill(unseen[..., None], bad) for x in inputs[1:])]
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, **rule), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*dirty), attention(*inputs, **rule), atol=1e-5, rtol=1e-5)


@BAD
@pytest.mark.parametrize("name", RULES)
def test_one_query_over_a_cache_does_not_read_what_it_may_not_see(name: str, bad: float) -> None:
    inputs, rule, seen = ask("cpu", name)
    rule["mask"] = Dense(seen[:, :, -1:])
    rule.pop("bias", None)
    unseen = ~seen[:, :, -1].view(B, G, H // G, S).any(2)
    inputs[0] = inputs[0][:, :, -1:]
    dirty = [inputs[0], *(x.masked_fill(unseen[..., None], bad) for x in inputs[1:])]
    for backend in backends(inputs, rule, "cpu"):
        torch.testing.assert_close(
            run(dirty, rule, backend), run(inputs, rule, backend), atol=1e-5, rtol=1e-5
        )


@DEVICES
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("name", [*COVERING, *RULES])
def test_a_nan_that_a_query_may_see_makes_its_output_nan(
    name: str, which: int, device: str
) -> None:
    inputs, rule, seen = ask(device, name)
    for at in (0, 2, 5):
        dirty = [x.clone() for x in inputs]
        dirty[which][0, 0, at, 3] = math.nan
        hit = torch.zeros(B, H, T, dtype=torch.bool, device=device)
        if which == 0:
            hit[0, 0, at] = seen[0, 0, at].any()
        else:
            hit[0, : H // G] = seen[0, : H // G, :, at]
        clean = attention(*inputs, **rule, backend="reference")
        for backend in backends(inputs, rule, device):
            torch._dynamo.reset()
            out = attention(*dirty, **rule, backend=backend)
            assert not out.isfinite().all(-1)[hit].any(), f"{backend} gives a plausible number"
            others = ~hit if backend in ("reference", "blockwise") else apart(hit)
            torch.testing.assert_close(out[others], clean[others], atol=1e-5, rtol=1e-5)


def apart(hit_bht: Tensor) -> Tensor:
    """The rows of other samples and other key heads, which no kernel may spoil."""
    spoiled_bg = hit_bht.any(2).view(B, G, H // G).any(2)
    return ~spoiled_bg.repeat_interleave(H // G, 1)[..., None].expand_as(hit_bht)


@pytest.mark.parametrize("bad", [math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_infinity_is_no_plausible_number_on_a_cpu(
    dtype: torch.dtype, which: int, bad: float
) -> None:
    """Torch's own kernel gives it the weight 0, or the whole row zeros, as the signs fall."""
    for n in (1, 5, 40):
        inputs = [torch.randn(1, 2, n, D).to(dtype) for _ in range(3)]
        inputs[which][0, 0, n // 2, 3] = bad
        for rule in ({}, {"mask": Causal()}, {"softcap": 2.0}):
            given: dict[str, Any] = rule
            out = attention(*inputs, **given)
            rows = slice(n // 2, n // 2 + 1) if which == 0 else slice(None)
            rows = slice(n // 2, None) if "mask" in rule and which else rows
            assert not out[0, 0, rows].isfinite().all(-1).any()
            assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_what_is_not_finite_and_hidden_from_a_row_gives_it_no_gradient(backend: str) -> None:
    q, k, v = (torch.randn(1, 1, 7, 4) for _ in range(3))
    k[0, 0, 5], v[0, 0, 6] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mask=Causal(), backend=backend)
    assert out.isfinite().all(-1).view(7).tolist() == [True] * 5 + [False] * 2
    (grad,) = torch.autograd.grad(out[:, :, :5].sum(), leaves[:1])
    assert grad[:, :, :5].isfinite().all()


def test_statistics_of_rows_that_see_a_nan_are_nan_and_name_no_key() -> None:
    q, k = torch.randn(1, 1, 7, 4), torch.randn(1, 1, 7, 4)
    k[0, 0, 4, 1] = math.nan
    wants = Wants(lse=True, entropy=True, peak=True, top=2, received=True, above=0.01)
    for backend in ("reference", "blockwise"):
        seen: Any = observe(q, k, None, mask=Causal(), wants=wants, backend=backend)
        for told in (seen.lse, seen.entropy, seen.peak.weight, seen.top.weight[..., 0]):
            assert told.isnan().view(7).tolist() == [False] * 4 + [True] * 3
        assert (seen.peak.key[0, 0, 4:] == -1).all() and (seen.top.key[0, 0, 4:] == -1).all()
        assert (seen.peak.key[0, 0, :4] >= 0).all()
