"""Two records on one page: one scale, heads paired where they are alike, ranked by distance."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]


def ready(page: Any, count: int) -> None:
    page.wait_for_function(
        "n => { const all = [...document.querySelectorAll('.map canvas')];"
        " return all.length >= n && all.every(c => c.dataset.ready === 'yes'); }",
        arg=count,
    )
    page.wait_for_timeout(150)


def colours_of(page: Any, selector: str, number: int) -> set[tuple[int, ...]]:
    """All colours of a canvas that many pixels have."""
    pixels = page.locator(selector).nth(number).evaluate(
        "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " const n = {}; for (let i = 0; i < d.length; i += 4) {"
        " const k = `${d[i]},${d[i + 1]},${d[i + 2]}`; n[k] = (n[k] || 0) + 1; }"
        " return Object.keys(n).filter(k => n[k] > 400); }"
    )  # fmt: skip
    return {tuple(int(part) for part in pixel.split(",")) for pixel in pixels}


def flat(weight: float) -> view_fakes.FakeRecord:
    """A record in which each query gives one weight to the first key."""
    record = view_fakes.decoder(["a", "b", "c"], layers=1, n_heads=1)
    whole = np.zeros((3, 3), np.float32)
    whole[:, 0] = weight

    def cells(place: int, head: int, window: Any, size: Any) -> np.ndarray:
        return whole[window[0] : window[1], window[2] : window[3]]

    record.map = cells  # type: ignore[method-assign]
    return record


def test_two_maps_have_one_scale_and_its_legend_is_true_of_both(show: Show) -> None:
    page = show(flat(0.9), "compare?place=0&head=0&scale=linear", other=flat(0.3))
    ready(page, 3)
    ends = page.locator(".legend").first.locator(".ends span").all_inner_texts()
    assert ends[2] == "0.9"
    ramp = np.array(
        page.locator(".legend canvas").first.evaluate(
            "c => [...c.getContext('2d').getImageData(0, 0, 256, 1).data]"
        )
    ).reshape(256, 4)[:, :3]
    full, third = tuple(ramp[255].tolist()), tuple(ramp[85].tolist())
    assert full in colours_of(page, ".map canvas", 0)
    seen = colours_of(page, ".map canvas", 1)
    assert full not in seen
    assert min(max(abs(a - b) for a, b in zip(third, one, strict=True)) for one in seen) <= 2


def distance(one: view_fakes.FakeRecord, two: view_fakes.FakeRecord, place: int, head: int) -> Any:
    n = one.places[place].n_queries
    gap = one.weights(place, head, 0, n) - two.weights(place, head, 0, n)
    return np.abs(gap).sum(1).mean() / 2


def test_heads_are_ranked_by_how_much_of_their_weight_lies_elsewhere(show: Show) -> None:
    one, two = view_fakes.decoder(layers=3), view_fakes.decoder(layers=3, strength=0.4)
    plain = two.heads
    two.heads = lambda: {k: np.zeros_like(v) for k, v in plain().items()}  # type: ignore[method-assign]
    page = show(one, other=two)
    shown = page.locator(".differing button").all_inner_texts()
    far = {(p, h): distance(one, two, p, h) for p in range(3) for h in range(8)}
    best = sorted(far, key=lambda at: -far[at])[:12]
    assert [text.split("\n")[0] for text in shown] == [f"Layer {p} · {h}" for p, h in best]
    told = [float(text.split("\n")[1].rstrip("%")) for text in shown]
    assert told == pytest.approx([far[at] * 100 for at in best], abs=0.06)
    page.locator(".differing button").nth(1).click()
    assert re.match(
        rf"#compare\?place={best[1][0]}&head={best[1][1]}", page.evaluate("location.hash")
    )


def test_of_texts_of_two_lengths_no_heads_are_ranked(show: Show) -> None:
    page = show(view_fakes.decoder(), other=view_fakes.decoder(["a", "b", "c"]))
    assert page.locator(".differing").count() == 0
    assert "The two texts differ in length" in page.inner_text(".panel")


def renamed(record: view_fakes.FakeRecord) -> view_fakes.FakeRecord:
    record.places = [
        replace(place, name=f"bert.encoder.layer.{place.layer}") for place in record.places
    ]
    return record


@pytest.mark.parametrize("heads", [8, 3])
def test_heads_of_two_models_are_not_paired_by_number(show: Show, heads: int) -> None:
    one, two = view_fakes.decoder(), renamed(view_fakes.decoder(n_heads=heads, model="other"))
    page = show(one, "compare?place=2&head=7", other=two)
    ready(page, 3)
    assert page.inner_text(".panel h1") == "Two models"
    assert page.locator(".differing").count() == 0
    assert "none are paired" in page.inner_text(".panel")
    names = page.locator(".picker .field > span").all_inner_texts()
    assert names[:4] == ["A: Layer", "A: Head", "B: Layer", "B: Head"]
    page.locator(".picker select").nth(2).select_option(label="Layer 1")
    page.locator(".picker select").nth(3).select_option(label="Head 2")
    assert page.evaluate("location.hash") == "#compare?place=2&head=7&other=1.2"
    ready(page, 3)
    page.locator(".map canvas").first.focus()
    for key in ["ArrowUp"] * 12 + ["ArrowLeft"] * 12 + ["ArrowDown"]:
        page.keyboard.press(key)
    told = page.inner_text(".weights").split("\n")
    assert float(told[1].removeprefix("A ")) == pytest.approx(one.weight(2, 7, 1, 0), rel=1e-5)
    assert float(told[2].removeprefix("B ")) == pytest.approx(two.weight(1, 2, 1, 0), rel=1e-5)


def test_maps_are_called_by_their_texts_and_those_of_one_text_by_their_models(show: Show) -> None:
    one, two = view_fakes.decoder(), view_fakes.decoder(["A", "dog", "slept"])
    page = show(one, other=two)
    captions = page.locator("figcaption").all_inner_texts()
    assert (
        captions[0].startswith("A · The animal didn't cross") and captions[1] == "B · A dog slept"
    )
    page = show(view_fakes.decoder(), other=view_fakes.decoder(model="fake:other"))
    assert page.locator("figcaption").all_inner_texts()[:2] == ["A · fake:lm", "B · fake:other"]


def test_texts_that_begin_alike_are_called_by_where_they_part(show: Show) -> None:
    """And a caption ends before the buttons beside it."""
    words = "The animal didn't cross the street because it was too"
    one, two = (view_fakes.decoder([*words.split(), end, "."]) for end in ("tired", "wide"))
    page = show(one, "compare?place=0&head=0", other=two)
    page.wait_for_selector("figcaption")
    captions = page.locator("figcaption").all_inner_texts()[:2]
    assert captions == ["A · … because it was too tired .", "B · … because it was too wide ."]
    for figure in page.locator("figure").all()[:2]:
        caption, buttons = (
            figure.locator(part).first.bounding_box() for part in ("figcaption bdi", ".savers")
        )
        assert caption["x"] + caption["width"] <= buttons["x"]


def test_the_cell_that_is_pointed_at_is_shown_in_all_maps_with_the_difference(show: Show) -> None:
    one, two = view_fakes.decoder(), view_fakes.decoder(strength=0.4)
    page = show(one, "compare?place=1&head=2", other=two)
    ready(page, 3)
    box = page.locator(".map canvas").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.7)
    told = page.inner_text(".weights").split("\n")
    hovered = page.locator(".map canvas").evaluate_all("all => all.map(c => c.dataset.hover)")
    assert hovered[1] == hovered[2] and hovered[1]
    t, s = (int(part) for part in hovered[1].split(","))
    a, b = one.weight(1, 2, t, s), two.weight(1, 2, t, s)
    assert told[0] == f"{one.tokens[t]} → {one.tokens[s]}"
    values = [float(line.rpartition(" ")[2]) for line in told[1:]]
    assert values == pytest.approx([a, b, b - a], rel=1e-4, abs=1e-7)
    assert told[3].startswith("B − A ")


def test_every_page_can_show_either_record(show: Show) -> None:
    one, two = view_fakes.decoder(), view_fakes.decoder(["A", "dog", "slept"], layers=2, n_heads=3)
    page = show(one, other=two)
    assert page.locator(".which button").count() == 0
    for key, name in zip("12345", ("start", "overview", "head", "text", "align"), strict=True):
        page.keyboard.press(key)
        page.wait_for_selector(f".page.{name}")
        assert page.locator(".which [aria-checked=true]").inner_text() == "A"
        page.locator(".which button", has_text="B").click()
        assert "record=1" in page.evaluate("location.hash")
        assert page.locator(".which [aria-checked=true]").inner_text() == "B"
        page.locator(".which button", has_text="A").click()
    page = show(one, "head?place=3&head=7&token=9&mate=2", other=two)
    page.locator(".which button", has_text="B").click()
    assert page.inner_text(".panel h1") == "Layer 1, head 2"  # the last it has
    assert "token" not in page.evaluate("location.hash")
    page.set_viewport_size({"width": 390, "height": 844})
    page = show(one, "align?place=0", other=two)
    tab, nav = (page.locator(each).bounding_box() for each in ("nav [aria-current]", "nav"))
    assert tab["x"] >= nav["x"] - 1 and tab["x"] + tab["width"] <= nav["x"] + nav["width"] + 1
    page = show(one, "overview?record=1", other=two)
    assert page.inner_text(".headline h1") == "A dog slept"
    assert "record=1" in page.locator(".card").first.get_attribute("href")
