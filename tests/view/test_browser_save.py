"""Saving what is on the screen: letters as letters in SVG, the same cells in SVG and PNG."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]
SVG = "{http://www.w3.org/2000/svg}"


def ready(page: Any) -> None:
    page.wait_for_function(
        "() => [...document.querySelectorAll('.map canvas')].every(c => c.dataset.ready === 'yes')"
    )
    page.wait_for_timeout(100)


def save(page: Any, kind: str, tmp_path: Path, number: int = 0) -> bytes:
    with page.expect_download() as waiting:
        page.locator(".savers").nth(number).locator("button", has_text=kind).click()
    assert waiting.value.suggested_filename.endswith(f".{kind.lower()}")
    out = tmp_path / f"saved{number}.{kind.lower()}"
    waiting.value.save_as(out)
    return out.read_bytes()


def pixels(png: bytes) -> np.ndarray:
    import matplotlib.image

    return np.asarray(matplotlib.image.imread(io.BytesIO(png)))


def test_the_svg_has_the_words_the_titles_and_the_cells(show: Show, tmp_path: Path) -> None:
    record = view_fakes.decoder(layers=1, n_heads=2)
    page = show(record, "head?place=0&head=1")
    ready(page)
    tree = ET.fromstring(save(page, "SVG", tmp_path))
    said = [each.text for each in tree.iter(f"{SVG}text")]
    for word in record.tokens:
        assert said.count(word) == 2  # as a query and as a key
    assert {"keys →", "queries ↓"} <= set(said)
    [image] = tree.iter(f"{SVG}image")
    cells = pixels(base64.b64decode(image.attrib["href"].partition(",")[2]))
    assert cells.shape[:2] == (12, 12)
    order = np.argsort(-cells[..., :3].sum(-1)[11])  # the darkest has most weight, in the last row
    assert order[-1] == record.weights(0, 1, 0, 12)[11].argmax()
    page.wait_for_timeout(200)  # the page itself goes on
    assert page.locator(".map canvas").get_attribute("data-ready") == "yes"


def test_the_saved_svg_looks_as_the_screen_does(show: Show, page: Any, tmp_path: Path) -> None:
    shown = show(view_fakes.decoder(layers=1, n_heads=2), "head?place=0&head=1&scale=linear")
    ready(shown)
    png = pixels(save(shown, "PNG", tmp_path))
    assert png.shape[0] == shown.locator(".map canvas").evaluate("c => c.height")
    canvas = pixels(
        base64.b64decode(
            shown.locator(".map canvas").evaluate("c => c.toDataURL()").partition(",")[2]
        )
    )
    solid = canvas[..., 3] == 1
    assert (np.abs(png - canvas)[solid].max(-1) > 0.25).mean() < 0.02
    (tmp_path / "drawn.svg").write_bytes(save(shown, "SVG", tmp_path))
    page.goto((tmp_path / "drawn.svg").as_uri())
    drawn = pixels(page.screenshot())[: png.shape[0], : png.shape[1], :3]
    differ = np.abs(drawn - png[: drawn.shape[0], : drawn.shape[1], :3]).max(-1) > 0.25
    assert differ.mean() < 0.02  # edges of letters


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_of_two_records_and_their_difference_can_be_saved(
    show: Show, tmp_path: Path, number: int
) -> None:
    page = show(
        view_fakes.decoder(), "compare?place=0&head=1", other=view_fakes.decoder(strength=0.4)
    )
    ready(page)
    tree = ET.fromstring(save(page, "SVG", tmp_path, number))
    assert len(list(tree.iter(f"{SVG}image"))) == 1


PAGES = {
    "start": (".answers", "start?place=0&head=0&token=7&mate=3"),
    "overview": (".heads", "overview"),
    "text": (".stage", "text?place=0&head=1&token=7"),
    "align": (".stage", "align?place=0&head=1"),
}


@pytest.mark.parametrize(("name", "dark"), [*((name, True) for name in PAGES), ("text", False)])
def test_every_page_is_saved_as_it_looks(
    show: Show, page: Any, tmp_path: Path, name: str, dark: bool
) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    part, line = PAGES[name]
    page.emulate_media(color_scheme="dark" if dark else "light")
    shown = show(record, line)
    shown.wait_for_timeout(600)
    screen = pixels(shown.locator(part).screenshot())
    saved = save(shown, "SVG", tmp_path)
    tree = ET.fromstring(saved)
    words = {each.text for each in tree.iter(f"{SVG}text")}
    assert set(record.tokens[:5]) <= words if name in ("text", "align") else words
    n_maps = len(list(tree.iter(f"{SVG}image")))
    assert n_maps == {"start": 1, "overview": 6}.get(name, 0)  # the legend's, the heads'
    grounds = [each.get("fill") for each in tree.iter(f"{SVG}rect")]
    assert name != "text" or len(set(grounds)) > 5  # the page's, and those of shaded words
    assert name != "align" or len(list(tree.iter(f"{SVG}path"))) > 10
    png = pixels(save(shown, "PNG", tmp_path))
    assert np.abs(np.subtract(png.shape[:2], screen.shape[:2])).max() <= 2
    tall, wide = np.minimum(png.shape[:2], screen.shape[:2])
    gap = np.abs(png[:tall, :wide, :3] - screen[:tall, :wide, :3]).max(-1)
    assert (gap > 0.25).mean() < 0.03  # edges of letters and rounded corners


def test_what_is_scrolled_out_of_sight_is_not_saved(show: Show, tmp_path: Path) -> None:
    record = view_fakes.decoder(layers=2, n_heads=60)
    page = show(record)
    page.set_viewport_size({"width": 700, "height": 800})
    page.wait_for_timeout(400)
    tree = ET.fromstring(save(page, "SVG", tmp_path))
    assert 10 < len(list(tree.iter(f"{SVG}image"))) < 60
