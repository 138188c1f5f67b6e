"""Every number that the pages print of a record, against the eager formula in float64.

Topic: all pages together, on records that `watch` made: causal, padded, seen from both sides,
behind a window, cross, and of 3,001 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import Causal, Lengths, Mask, Window, attention
from regard.view import Server

Show = Callable[..., Any]
H, D = 3, 5


class Attends(nn.Module):
    """One layer, self- or cross-attention by its name, of given queries and keys."""

    def __init__(self, name: str, q: Tensor, k: Tensor, mask: Mask | None) -> None:
        super().__init__()
        self.add_module(name, Inner(q, k, mask))

    def forward(self) -> None:
        for child in self.children():
            child()


class Inner(nn.Module):
    def __init__(self, q: Tensor, k: Tensor, mask: Mask | None) -> None:
        super().__init__()
        self.q, self.k, self.mask = q, k, mask

    def forward(self) -> None:
        attention(self.q, self.k, self.k, mask=self.mask)


def make(case: str) -> tuple[Record, np.ndarray, np.ndarray]:
    """A record, its weights (H, T, S) by the eager formula, and which pairs may be seen."""
    T, S = {"cross": (7, 11), "long": (3001, 3001)}.get(case, (13, 13))
    drawn = torch.Generator().manual_seed(T + S + len(case))
    q = 2.5 * torch.randn(1, H, T, D, generator=drawn)
    k = torch.randn(1, H, S, D, generator=drawn)
    masks: dict[str, Mask] = {"causal": Causal(), "long": Causal(), "window": Window(2, 4)}
    masks["padded"] = Lengths(torch.tensor([9]))
    model = Attends("cross_attn" if case == "cross" else "attn", q, k, masks.get(case))
    with torch.no_grad(), watch(model, keep="qk") as record:
        model()
    i, j = np.arange(T)[:, None] + S - T, np.arange(S)
    seen = np.ones((T, S), bool)
    if case in ("causal", "long"):
        seen = j <= i
    elif case == "window":
        seen = (j >= i - 2) & (j <= i + 4)
    elif case == "padded":
        seen = np.broadcast_to(j < 9, (T, S))
    scores = (q[0].double() @ k[0].double().mT).numpy() / np.sqrt(D)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    words = [f"w{n}" for n in range(T)]
    record.describe(text=" ".join(words), tokens=words)
    if case == "cross":
        source = [f"s{n}" for n in range(S)]
        record.describe(source_text=" ".join(source), source_tokens=source)
    return record, weights / weights.sum(-1, keepdims=True), seen


def percents(titles: list[str]) -> list[float]:
    """Shares as they are told; what is below a hundredth of a percent is told as so little."""
    return [float(re.findall(r"([\d.]+)%", title)[0]) for title in titles]


def check_head(page: Any, weights: np.ndarray, seen: np.ndarray, t: int, s: int) -> None:
    page.wait_for_function(
        "() => /^[0-9.e-]+$/.test(document.querySelector('.weight')?.innerText ?? '')"
    )
    assert float(page.inner_text(".weight")) == pytest.approx(weights[t, s], rel=2e-5, abs=1e-9)
    told = page.inner_text(".times")
    if seen[t, s]:
        times = float(told.split()[0])
        assert times == pytest.approx(weights[t, s] * seen[t].sum(), rel=6e-3)


def check_text(
    show: Show, record: Any, weights: np.ndarray, seen: np.ndarray, t: int, s: int
) -> None:
    # Of cross-attention the source, which is looked at, comes first.
    keys, queries = (0, 1) if weights.shape[0] != weights.shape[1] else (0, 0)
    means = weights.sum(0) / np.maximum(seen.sum(0), 1)
    for line, where, want in (
        (f"&token={t}", keys, weights[t]),
        (f"&token={s}&side=key", queries, weights[:, s]),
        ("", keys, means),
    ):
        page = show(record, f"text?place=0&head=1{line}")
        page.wait_for_selector(".ranking li")
        words = page.locator(".block").nth(where).locator(".word")
        titles = words.evaluate_all("all => all.map(w => w.title)")
        assert percents(titles) == pytest.approx((100 * want).tolist(), abs=0.0501)
        ranked = percents(page.locator(".ranking .value").all_inner_texts())
        best = np.sort(100 * want)[::-1][: len(ranked)]
        assert ranked == pytest.approx(best.tolist(), abs=0.0501)


def check_scores(page: Any, record: Record, weights: np.ndarray) -> None:
    n = len(weights)
    gaps = np.abs(np.arange(n)[:, None] - np.arange(n))
    real = np.ones(n, bool)
    if record._arrays.has(0, "real"):
        real = record._arrays.get(0, "real") == 2
    safe = np.where(weights > 0, weights, 1)
    want = {
        "previous": np.diag(weights, -1)[real[1:]].mean(),
        "same": np.diag(weights)[real].mean(),
        "first": weights[1:, 0][real[1:]].mean(),
        "local": (weights * gaps).sum(1)[real].mean(),
        "broad": -(weights * np.log(safe)).sum(1)[real].mean(),
    }
    told = dict(
        page.locator(".bars li").evaluate_all(
            "all => all.map(e => [e.dataset.score, e.querySelector('.value').textContent])"
        )
    )
    for name, value in want.items():
        if told[name] == "<0.01":
            assert 0 < value < 0.005, name
        else:
            digits = 0.501 if value >= 100 else 0.0501 if value >= 10 else 0.00501
            assert float(told[name]) == pytest.approx(value, abs=digits), name


@pytest.mark.parametrize("case", ["causal", "plain", "padded", "window", "cross"])
def test_every_page_prints_the_numbers_of_the_eager_formula(show: Show, case: str) -> None:
    record, all_weights, seen = make(case)
    weights, (t, s) = all_weights[1], (6, 4)
    page = show(record, f"head?place=0&head=1&token={t}&mate={s}")
    check_head(page, weights, seen, t, s)
    if case != "cross":
        check_scores(page, record, weights)
    check_text(show, record, weights, seen, t, s)
    page = show(record, f"start?place=0&head=0&token={t}&mate={s}")
    page.wait_for_selector(".start[data-ready=yes]")
    told = page.locator(".matrix a.cell").evaluate_all("all => all.map(c => c.ariaLabel)")
    found = [float(each.split()[-1]) for each in told]
    assert found == pytest.approx(all_weights[:, t, s].tolist(), abs=0.000501)
    page = show(record, f"align?place=0&head=1&token={t}")
    page.wait_for_selector(".lines path", state="attached")
    shares = page.locator(".words.key .share").all_inner_texts()
    for told_share, weight in zip(shares, weights[t], strict=True):
        assert bool(told_share) == (weight >= 0.12)
        assert not told_share or percents([told_share])[0] == pytest.approx(
            100 * weight, abs=0.0501
        )
    page = show(record, f"compare?place=0&head=1&token={t}&mate={s}", other=record)
    page.wait_for_function(
        "() => /B − A/.test(document.querySelector('.weights')?.innerText ?? '')"
    )
    a, b, gap = (float(line.split()[-1]) for line in page.inner_text(".weights").split("\n")[1:])
    assert (a, b, gap) == pytest.approx((weights[t, s], weights[t, s], 0), rel=2e-5, abs=1e-9)


def test_three_thousand_tokens_print_the_numbers_of_the_eager_formula(page: Any) -> None:
    record, all_weights, seen = make("long")
    weights, (t, s) = all_weights[1], (2900, 1234)
    with Server(record) as server:
        page.goto(f"{server.url}#head?place=0&head=1&token={t}&mate={s}")
        check_head(page, weights, seen, t, s)
        check_scores(page, record, weights)
        page.goto(f"{server.url}#start?place=0&head=0&token={t}&mate={s}")
        page.wait_for_selector(".start[data-ready=yes]")
        told = page.locator(".matrix a.cell").evaluate_all("all => all.map(c => c.ariaLabel)")
        found = [float(each.split()[-1]) for each in told]
        assert found == pytest.approx(all_weights[:, t, s].tolist(), abs=0.000501)
        page.goto(f"{server.url}#text?place=0&head=1&token={t}")
        page.wait_for_selector(".ranking li")
        ranked = percents(page.locator(".ranking .value").all_inner_texts())
        best = np.sort(100 * weights[t])[::-1][: len(ranked)]
        assert ranked == pytest.approx(best.tolist(), abs=0.0501)
        page.goto("about:blank")
