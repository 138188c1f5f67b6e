"""Strangers' records and tokens: shown, cut or refused in words; never run, never a broken page."""

from __future__ import annotations

import base64
import json
import re
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.view import make_page

Show = Callable[..., Any]

HOSTILE = [
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "</script><script>window.ran = 1</script>",
    "\"'><svg onload=window.ran=1>",
    "{{constructor.constructor('window.ran=1')()}}",
    "javascript:window.ran=1",
    "\u202eevil\u202c",
    "\u2066\u2067\u202b",
    "a\u0000b\u0007",
    "\ud83d",
    "é" * 3000,
    "x" * 1_000_000,
    "",
    "   ",
    "\n\n\n",
    "__proto__",
]
WORLD = ["猫", "👩‍👩‍👧‍👦", "🇯🇵", "שלום", "مرحبا", "ไทย", "हिन्दी", "e\u0301", "ﷺ"]


def nothing_ran(page: Any) -> None:
    assert page.evaluate("() => window.ran") is None
    assert page.locator("#regard script, #regard img").count() == 0


@pytest.mark.parametrize("line", ["overview", "head", "text?token=3", "align?token=2"])
def test_hostile_tokens_are_only_text(show: Show, line: str) -> None:
    record = view_fakes.decoder(list(HOSTILE), layers=2, n_heads=2, model=HOSTILE[0])
    page = show(record, line)
    page.wait_for_timeout(300)
    nothing_ran(page)
    assert page.locator(".page").count() == 1
    assert page.locator(".message.error").count() == 0
    longest = page.evaluate(
        "() => Math.max(...document.body.innerText.split(/\\s/).map(w => w.length))"
    )
    assert longest < 500


def test_hostile_tokens_under_the_pointer_are_only_text(show: Show) -> None:
    record = view_fakes.decoder(list(HOSTILE), layers=1, n_heads=1, spans=None)
    page = show(record, "head?place=0&head=0")
    page.locator(".map canvas").focus()
    for key in ["ArrowUp"] * 16 + ["ArrowLeft"] * 16 + ["ArrowDown", "ArrowRight"] * 15:
        page.keyboard.press(key)
        nothing_ran(page)
    assert page.inner_text(".pair").startswith("__proto__15 looks at __proto__15")


def test_marks_that_turn_the_direction_are_shown_as_signs(show: Show) -> None:
    record = view_fakes.decoder(["a", "\u202eabc\u202c", "b"], layers=1, n_heads=1)
    page = show(record, "text?place=0&head=0&token=1")
    page.wait_for_selector(".ranking li")
    shown = page.locator(".word").nth(1).inner_text()
    assert shown == "⟨202E⟩abc⟨202C⟩"
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page.inner_text(".flow"))


def test_words_of_the_world_come_out_whole(show: Show) -> None:
    record = view_fakes.decoder(list(WORLD), layers=1, n_heads=1)
    page = show(record, "text?place=0&head=0")
    page.wait_for_selector(".ranking li")
    assert page.locator(".word").all_inner_texts() == WORLD
    names = page.locator(".ranking bdi").all_inner_texts()
    assert set(names) <= set(WORLD)


def test_right_to_left_text_runs_from_the_right_and_its_keys_follow(show: Show) -> None:
    words = ["החתול", "ישב", "על", "השטיח"]
    page = show(view_fakes.decoder(words, layers=1, n_heads=1), "text?place=0&head=0&token=0")
    page.wait_for_selector(".ranking li")
    boxes = [word.bounding_box()["x"] for word in page.locator(".word").all()]
    assert boxes == sorted(boxes, reverse=True)
    page.locator(".word").first.focus()
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".flow [aria-selected=true]") == "ישב"
    assert page.evaluate("() => getComputedStyle(document.querySelector('#regard')).direction") == (
        "ltr"
    )


def test_weights_that_are_not_numbers_are_told(show: Show) -> None:
    record = view_fakes.decoder(layers=1, n_heads=1)
    bad = record.weights(0, 0, 0, 12)
    bad[3, :] = np.nan
    bad[4, 2] = np.inf
    record.map = lambda place, head, w, size: bad[w[0]:w[1], w[2]:w[3]]  # type: ignore # fmt: skip
    page = show(record, "head?place=0&head=0")
    page.locator(".map canvas").focus()
    for key in ["ArrowUp"] * 12 + ["ArrowLeft"] * 12 + ["ArrowDown"] * 3:
        page.keyboard.press(key)
    assert page.inner_text(".weight") == "not a number"
    page.keyboard.press("ArrowDown")
    assert float(page.inner_text(".weight")) < 1
    page.evaluate("() => { location.hash = '#text?place=0&head=0&token=3'; }")
    page.wait_for_selector(".page.text")
    assert page.locator(".word").first.get_attribute("title") in ("not a number", None)


def doctored(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A page whose data was changed after it was made, as a stranger could."""
    page = make_page(view_fakes.decoder(layers=2, n_heads=2))
    found = re.search(r'(id="regard-data">)(.*?)(</script>)', page)
    assert found
    data = json.loads(found.group(2))
    change(data)
    text = json.dumps(data).replace("<", "\\u003c")
    path.write_text(page[: found.start(2)] + text + page[found.end(2) :], encoding="utf-8")
    return path


def change_at(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return change


RECORD = ("records", 0)
PLACE = ("records", 0, "places", 0)


@pytest.mark.parametrize(
    "change",
    [
        change_at("format", to=2),
        change_at("records", to=[]),
        change_at("records", to="<script>"),
        change_at(*RECORD, "tokens", to=[]),
        change_at(*RECORD, "tokens", to=["a"] * 5),
        change_at(*RECORD, "tokens", to=[{"toString": "x"}] * 12),
        change_at(*RECORD, "places", to=None),
        change_at(*PLACE, "n_heads", to=1e9),
        change_at(*PLACE, "n_heads", to=-1),
        change_at(*PLACE, "n_queries", to="12"),
        change_at(*PLACE, "n_keys", to=13),
        change_at(*PLACE, "kind", to="constructor"),
        change_at(*PLACE, "grid", to=[0, 12]),
        change_at(*RECORD, "scores", to={"previous": [[1]]}),
        change_at(*RECORD, "scores", to=[]),
        change_at(*RECORD, "alignment", to=[99, 0]),
        change_at(*RECORD, "alignment", to=[0, 2]),
        change_at(*RECORD, "alignment", to=["<script>", 0]),
        change_at("parts", to={"whole/0/0/0": 5}),
    ],
)
def test_a_doctored_manifest_is_told_in_words(
    page: Any, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    page.goto(doctored(tmp_path / "bad.html", change).as_uri())
    page.wait_for_selector(".message.error")
    assert page.inner_text(".message.error").startswith("This record cannot be shown: ")
    nothing_ran(page)


BOMB = base64.b64encode(zlib.compress(bytes(50_000_000), 9)).decode()


@pytest.mark.parametrize("part", ["", "not base64!", "AAAA", BOMB, "eJwDAAAAAAE="])
def test_a_doctored_part_is_told_and_the_rest_stays(page: Any, tmp_path: Path, part: str) -> None:
    path = doctored(tmp_path / "bad.html", change_at("parts", "whole/0/0/0", to=part))
    started = time.monotonic()
    page.goto(path.as_uri() + "#head?place=0&head=0")
    page.wait_for_selector(".trouble .message.error")
    assert time.monotonic() - started < 8
    page.keyboard.press("]")
    page.wait_for_function("() => document.querySelector('.map canvas')?.dataset.ready === 'yes'")
    assert page.locator(".message.error").count() == 0


def test_data_that_is_no_json_is_told(page: Any, tmp_path: Path) -> None:
    text = make_page(view_fakes.decoder()).replace('id="regard-data">{', 'id="regard-data">{{')
    (tmp_path / "bad.html").write_text(text, encoding="utf-8")
    page.goto((tmp_path / "bad.html").as_uri())
    page.wait_for_selector(".message.error")


def test_a_script_put_into_the_file_does_not_run(watched: Any, tmp_path: Path) -> None:
    """The page's policy lets its own script run, by its hash, and no other."""
    text = make_page(view_fakes.decoder())
    text = text.replace("</body>", "<script>window.ran = 1</script></body>")
    text = text.replace("<noscript>", "<img src='data:,' onerror='window.ran = 1'><noscript>")
    (tmp_path / "bad.html").write_text(text, encoding="utf-8")
    watched.page.goto((tmp_path / "bad.html").as_uri())
    watched.page.wait_for_selector(".finding")
    assert watched.page.evaluate("() => window.ran") is None
    assert len(watched.problems) >= 1
    assert all("Content Security Policy" in problem for problem in watched.problems)
    watched.problems.clear()
