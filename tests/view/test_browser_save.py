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
