"""Pages on a phone, on paper, and in colours that the system forces: what is told stays told."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]


@pytest.fixture
def phone(browser: Any, tmp_path: Any) -> Any:
    """Opens a record's page on a phone; gives the page and its touch screen."""
    from regard.view import write_page

    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    )

    def open_it(record: Any, line: str) -> tuple[Any, Any]:
        page = context.new_page()
        page.goto(write_page(tmp_path / "phone.html", record).as_uri() + f"#{line}")
        page.wait_for_function("() => document.querySelector('.map canvas')?.dataset.ready")
        page.wait_for_timeout(200)
        return page, context.new_cdp_session(page)

    yield open_it
    context.close()


def swipe(page: Any, screen: Any, way: int) -> None:
    """With one finger, over the middle of the map."""
    box = page.locator(".map canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for step in range(11):
        point = {"x": x, "y": y + way * step / 10}
        kind = "touchMove" if step else "touchStart"
        screen.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [point]})
        page.wait_for_timeout(16)
    screen.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_timeout(300)


def test_a_tapped_cell_is_told_on_the_screen_of_a_phone(phone: Any) -> None:
    record = view_fakes.decoder()
    page, _ = phone(record, "head?place=0&head=2")
    box = page.locator(".map canvas").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".weight:not(:empty)")
    told = page.locator(".weight").bounding_box()
    assert told["y"] + told["height"] < 844 and page.evaluate("scrollY") == 0


def test_one_finger_scrolls_a_map_that_is_all_in_view_and_moves_one_that_is_not(
    phone: Any,
) -> None:
    page, screen = phone(view_fakes.decoder([f"w{i}" for i in range(97)], 1, 1), "head")
    swipe(page, screen, -150)
    assert page.evaluate("scrollY") > 70 and "at=" not in page.evaluate("location.hash")
    page.evaluate("scrollTo(0, 0)")
    points = [{"x": 150, "y": 300}, {"x": 230, "y": 300}]
    # The second finger comes a little after the first.
    screen.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": points[:1]})
    screen.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": points})
    for apart in (40, 80, 110):
        points = [{"x": 190 - apart, "y": 300}, {"x": 190 + apart, "y": 300}]
        screen.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": points})
    screen.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_function("() => /at=/.test(location.hash)")
    before = page.evaluate("location.hash")
    assert float(before.split(",")[2]) > 2
    swipe(page, screen, 100)
    assert page.evaluate("scrollY") == 0 and page.evaluate("location.hash") != before


def colours_of_pdf(pdf: bytes) -> np.ndarray:
    """What the streams of a PDF fill with, (n, 3) from 0 to 1."""
    found = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        try:
            text = zlib.decompressobj().decompress(stream)
        except zlib.error:
            continue
        found += re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) rg\b", text)
    return np.array(found, dtype=float)


@pytest.mark.parametrize(
    ("line", "selector"), [("start?token=5", ".matrix a.cell"), ("text?token=5", ".flow .word")]
)
def test_shades_are_printed(show: Show, line: str, selector: str) -> None:
    page = show(view_fakes.decoder(), line)
    page.wait_for_timeout(500)
    darkest = min(
        page.locator(selector).evaluate_all(
            "all => all.map(e => e.style.backgroundColor).filter(Boolean)"
            ".map(c => c.match(/\\d+/g).map(Number))"
        ),
        key=sum,
    )
    printed = colours_of_pdf(page.pdf(format="A4"))
    off = np.abs(printed - np.array(darkest) / 255).max(1).min()
    assert off < 0.004, f"{darkest} is not on the paper"


def test_a_printed_map_keeps_its_shape(show: Show) -> None:
    page = show(view_fakes.decoder(), "head")
    page.wait_for_timeout(300)
    page.emulate_media(media="print")
    canvas = page.locator(".map canvas")
    assert canvas.evaluate("c => getComputedStyle(c).objectFit") == "contain"
    assert not page.locator(".zoomers").is_visible() and not page.locator("nav").is_visible()


@pytest.mark.parametrize(
    ("line", "selector"),
    [("start?token=5", ".matrix a.cell"), ("start?token=5", ".heads-ranking .fill")],
)
def test_forced_colours_leave_what_is_told_by_colour(show: Show, line: str, selector: str) -> None:
    page = show(view_fakes.decoder(), line)
    page.wait_for_selector(".start[data-ready]")
    read = "all => [...new Set(all.map(e => getComputedStyle(e).backgroundColor))].sort()"
    before = page.locator(selector).evaluate_all(read)
    page.emulate_media(forced_colors="active")
    assert page.locator(selector).evaluate_all(read) == before


def test_forced_colours_tell_which_page_and_choice_is_on(show: Show) -> None:
    page = show(view_fakes.decoder(), "head")
    page.emulate_media(forced_colors="active")
    line = "e => getComputedStyle(e).borderBottomColor"
    on, off = page.locator("nav [aria-current]"), page.locator("nav a:not([aria-current])").first
    assert on.evaluate(line) != off.evaluate(line)
    frame = "e => getComputedStyle(e).outlineStyle"
    assert page.locator(".strip [aria-checked=true]").first.evaluate(frame) == "solid"
    assert page.locator(".strip [aria-checked=false]").first.evaluate(frame) == "none"
