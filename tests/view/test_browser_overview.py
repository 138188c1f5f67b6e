"""The overview's grid: a row a layer at any width, one scale, nothing lost between two pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]


def all_ready(page: Any) -> None:
    page.wait_for_function(
        "() => [...document.querySelectorAll('.card')].every(c => c.dataset.ready === 'yes')"
    )


@pytest.mark.parametrize("width", [1440, 1000, 390])
@pytest.mark.parametrize("n_heads", [12, 32])
def test_all_heads_of_a_layer_are_in_one_row(show: Show, width: int, n_heads: int) -> None:
    page = show(view_fakes.decoder(layers=3, n_heads=n_heads))
    page.set_viewport_size({"width": width, "height": 900})
    boxes = page.locator(".card").evaluate_all(
        "all => all.map(c => { const b = c.querySelector('.thumb').getBoundingClientRect();"
        " return [b.top, b.left, b.width, b.height]; })"
    )
    tops, lefts, widths, heights = np.array(boxes).reshape(3, n_heads, 4).transpose(2, 0, 1)
    assert (np.ptp(tops, axis=1) < 1).all() and (np.diff(tops[:, 0]) > 40).all()
    assert (np.diff(lefts, axis=1) > 0).all() and (np.ptp(lefts, axis=0) < 1).all()
    assert widths.min() >= 39.9 and (np.abs(widths - heights) < 1).all()
    scrolls = page.locator(".heads").evaluate("g => g.scrollWidth > g.clientWidth")
    narrow = n_heads * 40 + (n_heads - 1) * 10 + 96 > width - 80
    assert scrolls == narrow
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_thirty_layers_are_on_one_page_and_each_says_its_number(show: Show) -> None:
    page = show(view_fakes.decoder(layers=30, n_heads=12))
    names = page.locator(".layer .name").all_inner_texts()
    assert names == [f"Layer {n}" for n in range(30)]
    assert page.locator(".heads").bounding_box()["height"] < 30 * 100
    page.locator(".card").last.scroll_into_view_if_needed()
    page.wait_for_selector(".card[data-place='29'][data-head='11'][data-ready=yes]")


def test_on_a_phone_the_text_has_the_width_of_the_window(show: Show) -> None:
    page = show(view_fakes.decoder(layers=2, n_heads=2))
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.locator(".headline h1").bounding_box()["width"] > 300
    assert page.locator(".headline .facts").bounding_box()["width"] > 300


@pytest.mark.parametrize("n_heads", [9, 32])
def test_thirty_layers_are_on_one_screen(show: Show, n_heads: int) -> None:
    record = view_fakes.decoder([f"w{n}" for n in range(61)], layers=30, n_heads=n_heads)
    page = show(record)
    page.set_viewport_size({"width": 1440, "height": 900})
    all_ready(page)
    box = page.locator(".card").last.bounding_box()
    assert box["y"] + box["height"] <= 900 and box["width"] >= 16
    assert page.locator(".layer .name").last.is_visible()
    assert page.locator(".legend").count() == 1
    told = page.locator(".card").evaluate_all("all => all.map(c => c.dataset.cells)")
    assert set(told) == {"61 × 61"}  # as many as the text has, pooled to the screen's pixels


def test_each_map_can_have_a_scale_of_its_own(show: Show) -> None:
    """The darkest of each map is then the end of the colours; in one scale that of one alone."""
    record = view_fakes.decoder(layers=1, n_heads=2)
    pale = np.full((12, 12), 0.01, np.float32)
    pale[5, 3] = 0.04
    deep = np.full((12, 12), 0.05, np.float32)
    deep[8, 2] = 0.9
    record.map = (  # type: ignore[method-assign]
        lambda place, head, window, size: (pale, deep)[head][
            window[0] : window[1], window[2] : window[3]
        ]
    )

    def darkest(page: Any) -> list[int]:
        all_ready(page)
        page.wait_for_timeout(200)
        read = (
            "all => all.map(c => Math.min(...[...new Uint32Array("
            "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)]"
            ".map(p => p & 255)))"
        )
        return page.locator(".card canvas").evaluate_all(read)

    page = show(record)
    shared = darkest(page)
    assert shared[0] > shared[1] + 100
    page.get_by_text("Its own").click()
    own = darkest(page)
    assert abs(own[0] - own[1]) <= 1 and abs(own[1] - shared[1]) <= 1
    assert "own=1" in page.evaluate("location.hash")
    assert "each map" in page.inner_text(".legend")


@pytest.mark.parametrize(("n", "cells"), [(97, 97), (150, 150), (301, 151), (1009, 127)])
def test_a_small_map_has_a_hundred_cells_where_the_text_has_as_many(
    show: Show, n: int, cells: int
) -> None:
    page = show(view_fakes.decoder([f"w{i}" for i in range(n)], layers=1, n_heads=2))
    all_ready(page)
    told = page.locator(".card").evaluate_all("all => all.map(c => c.dataset.cells)")
    assert told == [f"{cells} × {cells}"] * 2


def test_a_page_without_room_for_fine_maps_has_coarse_ones(show: Show) -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(801)], layers=1, n_heads=4)
    for budget, cells in ((200_000, 101), (60_000, 51)):
        page = show(record, budget=budget)
        all_ready(page)
        assert page.locator(".card").first.get_attribute("data-cells") == f"{cells} × {cells}"


def test_a_fine_pattern_is_drawn_as_its_mean_and_makes_no_other_pattern(show: Show) -> None:
    """Every second key gets everything: each pixel that covers several has the mean of them."""
    n = 180
    record = view_fakes.decoder([f"w{i}" for i in range(n)], layers=1, n_heads=12)
    weights = np.zeros((n, n), np.float32)
    weights[:, ::2] = 2 / n

    def cells(place: int, head: int, window: Any, size: Any) -> np.ndarray:
        return weights[window[0] : window[1], window[2] : window[3]]

    record.map = cells  # type: ignore[method-assign]
    page = show(record)
    page.set_viewport_size({"width": 700, "height": 800})
    all_ready(page)
    page.wait_for_timeout(200)
    size, shown, colours = page.locator(".card canvas").first.evaluate(
        "c => [c.width, c.clientWidth * devicePixelRatio, [...new Uint32Array("
        "c.getContext('2d').getImageData(0, 9, c.width, 1).data.buffer)].map(p => p & 255)]"
    )
    assert size == pytest.approx(shown, abs=1) and size < n
    # Pixels cover 2 keys or a bit more: no two differ as black and white do.
    legend = page.locator(".legend canvas").evaluate(
        "c => [...new Uint32Array(c.getContext('2d').getImageData(0, 0, 256, 1).data.buffer)]"
        ".map(p => p & 255)"
    )
    assert max(colours) - min(colours) < 0.45 * (max(legend) - min(legend))


def test_all_heads_have_one_scale_and_one_legend(show: Show) -> None:
    """The legend's colour of a weight is that of every map's cell with that weight."""
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record)
    all_ready(page)
    page.wait_for_timeout(200)
    assert page.locator(".legend").count() == 1
    top = max(record.weights(p, h, 0, 12).max() for p in range(2) for h in range(3))
    ends = page.locator(".legend .ends span").all_inner_texts()
    assert float(ends[2]) == pytest.approx(top, rel=0.06)
    colours = page.locator(".legend canvas").evaluate(
        "c => [...c.getContext('2d').getImageData(0, 0, 256, 1).data]"
    )
    ramp = np.array(colours).reshape(256, 4)
    for place in range(2):
        for head in range(3):
            weight = record.weight(place, head, 9, 4)
            seen = page.locator(f".card[data-place='{place}'][data-head='{head}'] canvas").evaluate(
                "c => [...c.getContext('2d').getImageData("
                "c.width * 4.5 / 12, c.height * 9.5 / 12, 1, 1).data]"
            )
            expected = ramp[round(np.sqrt(weight / top) * 255)]
            assert np.abs(expected - seen).max() <= 3
