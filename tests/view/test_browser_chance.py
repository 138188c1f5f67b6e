"""Times chance: weights against what looking at all alike would give, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import view_fakes
from torch import nn

from regard.lens.watch import watch
from regard.ops import Causal, Window, attention

Show = Callable[..., Any]
CHECKED = "[role=radio][aria-checked=true]"


def ready(page: Any) -> None:
    page.wait_for_function("() => document.querySelector('.map canvas')?.dataset.ready === 'yes'")


def alike(n: int, **fields: Any) -> view_fakes.FakeRecord:
    """Heads that look at all they may see alike; but head 1 puts half on the query's own key."""
    record = view_fakes.decoder([f"w{i}" for i in range(n)], layers=2, n_heads=2, **fields)

    def weights(place: int, head: int, t0: int, t1: int) -> np.ndarray:
        t, s = np.arange(t0, t1)[:, None], np.arange(n)
        whole = (s <= t) / (t + 1.0)
        return (whole if head == 0 else whole / 2 + (s == t) / 2).astype(np.float32)

    record.weights = weights  # type: ignore[method-assign]
    return record


@pytest.mark.parametrize(("n", "scale"), [(255, "Root"), (256, "× chance"), (1009, "× chance")])
@pytest.mark.parametrize("line", ["overview", "head?place=0&head=0"])
def test_long_causal_maps_are_shown_in_times_chance(
    show: Show, n: int, scale: str, line: str
) -> None:
    page = show(alike(n), line)
    assert page.locator("[aria-label=Scale]").locator(CHECKED).inner_text() == scale
    assert ("Times chance" in page.inner_text(".page")) == (scale != "Root")
    page.locator("[aria-label=Scale] [data-value=linear]").click()
    assert page.locator("[aria-label=Scale]").locator(CHECKED).inner_text() == "Linear"
    assert "scale=linear" in page.evaluate("location.hash")


def test_a_text_that_is_not_causal_keeps_its_scale(show: Show) -> None:
    record = alike(301)
    record.places = [
        view_fakes.make_place(f"layers.{n}.attn", n, "self", 2, 301, 301, False) for n in range(2)
    ]
    page = show(record, "head?place=0&head=0")
    assert page.locator("[aria-label=Scale]").locator(CHECKED).inner_text() == "Root"


@pytest.mark.parametrize("n", [257, 1009])
def test_where_all_is_chance_every_cell_has_one_colour(show: Show, n: int) -> None:
    """Whatever a cell covers: single weights, several, or some that the causal rule hides."""
    page = show(alike(n), "overview?scale=chance")
    page.wait_for_selector(".card[data-place='0'][data-head='0'][data-ready=yes]")
    page.wait_for_timeout(200)
    pixels = page.locator(".card[data-place='0'][data-head='0'] canvas").evaluate(
        "c => [c.width, ...new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)]"
    )
    seen = np.array(pixels[1:]).reshape(-1, pixels[0])
    rows, columns = np.mgrid[: seen.shape[0], : seen.shape[1]]
    # Below the diagonal by more than a cell's width.
    lower = seen[rows > columns + seen.shape[1] / 50]
    assert len(np.unique(lower)) == 1
    upper = seen[columns > rows + seen.shape[1] / 50]
    # On the diagonal too, where some of a cell's pairs are hidden: there is no third colour.
    assert set(np.unique(seen).tolist()) == {int(lower[0]), int(upper[0])}
    # A head that looks at itself by half has half of chance there, and much more on the diagonal.
    other = page.locator(".card[data-place='0'][data-head='1'] canvas").evaluate(
        "c => [...new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)]"
    )
    half = np.unique(np.array(other).reshape(seen.shape)[rows > columns + seen.shape[1] / 50])
    assert len(half) <= 2 and half[0] != lower[0]


def test_a_weight_is_told_in_times_chance(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record, "head?place=1&head=2&token=7&mate=3")
    ready(page)
    page.wait_for_function("() => document.querySelector('.times')?.innerText")
    told = page.inner_text(".times")
    times = float(re.match(r"([\d.e-]+) times chance", told).group(1))  # type: ignore[union-attr]
    assert times == pytest.approx(record.weight(1, 2, 7, 3) * 8, rel=0.006)
    assert told.endswith("may look at 8 keys")


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()

    def forward(self) -> None:
        torch.manual_seed(3)
        q, k = torch.randn(2, 1, 3, 11, 5).unbind(0)
        attention(q, k, k, mask=Causal() & Window(2, 0))


def test_behind_a_window_chance_is_one_of_what_it_leaves(show: Show) -> None:
    """Of eleven tokens each sees itself and two before; each is seen by three, the last by one."""
    model = Windowed()
    with watch(model, keep="qk") as record:
        model()
    tokens = [f"w{n}" for n in range(11)]
    record.describe(text=" ".join(tokens), tokens=tokens)
    page = show(record, "head?place=0&head=1&token=7&mate=6")
    ready(page)
    page.wait_for_function("() => document.querySelector('.times')?.innerText")
    assert page.inner_text(".times").endswith("may look at 3 keys")
    page = show(record, "text?place=0&head=1")
    page.wait_for_selector(".ranking li")
    told = page.locator(".word").evaluate_all("all => all.map(w => w.title)")
    found = [re.findall(r"gets ([\d.]+)% of .* of the (\d+) token", each)[0] for each in told]
    weights = np.stack([record.rows(0, 1, t) for t in range(11)])
    lookers = [3] * 9 + [2, 1]
    assert [int(many) for _, many in found] == lookers
    means = 100 * weights.sum(0) / lookers
    assert [float(share) for share, _ in found] == pytest.approx(means.tolist(), abs=0.051)
