"""Nothing covers anything else, is cut off, or is called by the wrong name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import view_fakes

from regard.view import Server

Show = Callable[..., Any]


def ready(page: Any) -> None:
    page.wait_for_function(
        "() => [...document.querySelectorAll('.map canvas')].every(c => c.dataset.ready === 'yes')"
    )
    page.wait_for_timeout(150)


def save_svg(page: Any, tmp_path: Path, number: int = 0) -> str:
    with page.expect_download() as waiting:
        page.locator(".savers").nth(number).locator("button", has_text="SVG").click()
    out = tmp_path / "saved.svg"
    waiting.value.save_as(out)
    return out.read_text()


LETTERS = """text => {
  const svg = new DOMParser().parseFromString(text, 'image/svg+xml').documentElement;
  document.body.append(document.adoptNode(svg));
  const flat = [...svg.querySelectorAll('text')].filter(t => !t.closest('[transform^=rotate]'));
  const all = flat.map(t => [t.textContent, t.getBoundingClientRect()]);
  const left = svg.getBoundingClientRect().left;
  svg.remove();
  return all.map(([word, b]) => ({word, left: b.left - left, right: b.right - left, top: b.top,
    bottom: b.bottom}));
}"""


def test_what_is_told_of_a_cell_covers_nothing_below_it(show: Show) -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(150)], layers=2, n_heads=4)
    record.notes = ["The text was read in windows of 128 tokens that overlap by half."]
    page = show(record, "head?place=1&head=2&token=140&mate=139", budget=60_000)
    page.wait_for_function("() => /±/.test(document.querySelector('.weight')?.innerText)")
    bottom = "e => e.getBoundingClientRect().bottom"
    inside = page.locator(".readout > *").evaluate_all(f"all => all.map({bottom})")
    assert max(inside) <= page.locator(".readout").evaluate(bottom)


def test_the_beginning_of_a_long_text_takes_two_lines(show: Show) -> None:
    page = show(view_fakes.decoder([f"word{i}" for i in range(60)]), "start")
    title = page.locator(".start h1")
    assert title.inner_text().startswith("word0 word1 ")
    assert title.bounding_box()["height"] < 2.2 * 25 * 1.3


def test_a_long_word_stays_in_its_column(show: Show) -> None:
    """A link is one word; what stands out names it."""
    words = ["https://example.org/" + "a-long-path/" * 6, "was", "w" * 80, "read", "here", "."]
    page = show(view_fakes.decoder(words), "start")
    page.wait_for_selector(".start[data-ready]")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for finding in page.locator(".finding").all():
            right = finding.bounding_box()["x"] + finding.bounding_box()["width"]
            lines = finding.locator("li, h3").evaluate_all(
                "all => all.map(e => e.getBoundingClientRect().left + e.scrollWidth)"
            )
            assert max(lines) <= right + 1


def test_the_names_of_the_axes_are_whole_and_apart_from_the_labels(
    show: Show, tmp_path: Path
) -> None:
    """Of one query, whose label is short; and of positions, where the chosen word has its place."""
    place = view_fakes.make_place("cross", 0, "cross", 2, 1, 300, False)
    one = view_fakes.FakeRecord(
        tokens=["<s>"], source_tokens=[f"s{i}" for i in range(300)], places=[place]
    )
    many = view_fakes.decoder([f"word{i}" for i in range(97)], layers=1, n_heads=1)
    for record, line in ((one, "head?place=0&head=0"), (many, "head?token=50&mate=13")):
        page = show(record, line)
        page.set_viewport_size({"width": 640, "height": 600})
        ready(page)
        letters = page.evaluate(LETTERS, save_svg(page, tmp_path))
        titles = [each for each in letters if each["word"] in ("keys →", "queries ↓")]
        assert len(titles) == 2 and all(each["left"] >= 0 for each in titles)
        for at, a in enumerate(letters):
            for b in letters[at + 1 :]:
                across = min(a["right"], b["right"]) - max(a["left"], b["left"])
                down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
                # Boxes of letters have some air above and below.
                assert across <= 0 or down <= 5, (a["word"], b["word"])


def test_a_saved_overview_has_the_maps_that_were_never_in_view(show: Show, tmp_path: Path) -> None:
    page = show(view_fakes.decoder(layers=12, n_heads=2))
    page.set_viewport_size({"width": 1280, "height": 400})
    assert page.locator(".card:not([data-ready])").count() > 6
    saved = save_svg(page, tmp_path)
    empty = page.evaluate("document.createElement('canvas').toDataURL()")
    pictures = re.findall(r'href="(data:image/png[^"]+)"', saved)
    assert len(pictures) == 24 and empty not in pictures


def test_very_many_maps_are_images(show: Show, tmp_path: Path) -> None:
    """A browser that has to lay out 5,000 canvases stands still for half a minute."""
    few, many = view_fakes.decoder(layers=16, n_heads=8), view_fakes.decoder(layers=16, n_heads=40)
    drawn = []
    for record, kind in ((few, "canvas"), (many, "img")):
        page = show(record)
        page.set_viewport_size({"width": 1400, "height": 900})
        page.wait_for_function(
            "() => [...document.querySelectorAll('.card')].every(c => c.dataset.ready === 'yes')"
        )
        page.wait_for_timeout(300)
        assert page.locator(f".card {kind}").count() == page.locator(".card").count()
        drawn.append(
            page.locator(f".card {kind}")
            .nth(3)
            .evaluate(
                "e => { const c = document.createElement('canvas'); c.width = c.height = 12;"
                " const d = c.getContext('2d'); d.drawImage(e, 0, 0, 12, 12);"
                " return [...d.getImageData(0, 0, 12, 12).data]; }"
            )
        )
    assert np.abs(np.array(drawn[0]) - np.array(drawn[1])).mean() < 12
    assert np.std(drawn[1]) > 20
    assert len(re.findall('href="data:image/png', save_svg(page, tmp_path))) == 640


def test_nothing_is_said_to_lie_beyond_a_scale_that_ends_at_the_largest(show: Show) -> None:
    """Head 0 is even but for one weight, which lies beyond its own scale, not beyond head 1's."""
    record = view_fakes.decoder([f"w{i}" for i in range(300)], layers=1, n_heads=2)
    record.places = [view_fakes.make_place("attn", 0, "self", 2, 300, 300, False)]
    even = np.full((300, 300), 1 / 300, np.float32)
    even[:2, :2] = 0.5
    even[:2, 2:] = 0
    whole = [even, np.eye(300, dtype=np.float32)]
    whole[1][:2, :2] = 1
    record.weights = lambda place, head, t0, t1: whole[head][t0:t1]  # type: ignore[method-assign]
    page = show(record)
    page.wait_for_function("() => document.querySelectorAll('[data-ready=yes]').length === 2")
    page.wait_for_timeout(200)
    assert page.locator(".legend .ends span").last.inner_text() == "1"


def test_a_word_of_131072_is_shown_on_the_map_with_its_largest_weight(page: Any) -> None:
    with Server(view_fakes.ramp(131_072)) as server:
        page.goto(server.url + "#head?place=0&head=0&token=131071")
        page.wait_for_selector(".pair bdi")
        assert page.inner_text(".pair").startswith("w131071131071 looks at w131071131071")
        page.goto("about:blank")


def test_a_difference_names_the_words_of_both_records(show: Show, tmp_path: Path) -> None:
    other = view_fakes.decoder(["wide" if word == "tired" else word for word in view_fakes.ENGLISH])
    page = show(view_fakes.decoder(), "compare?token=10&mate=8", other=other)
    ready(page)
    assert page.inner_text(".weights").split("\n")[0] == "tired | wide → was"
    words = [each["word"] for each in page.evaluate(LETTERS, save_svg(page, tmp_path, 2))]
    assert "tired | wide" in words and "tired" not in words
    for number, own in enumerate(("tired", "wide")):
        words = [each["word"] for each in page.evaluate(LETTERS, save_svg(page, tmp_path, number))]
        assert own in words and "tired | wide" not in words
