"""Lines of self-attention: queries left, keys right, several heads in colour, so many a word.

Chinese, Japanese and Korean run from left to right, in two rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]


def paths(page: Any) -> list[dict[str, Any]]:
    """Every line: the heights of its two ends, and the colour it is drawn in."""
    page.wait_for_selector(".lines path", state="attached")
    return page.locator(".lines path").evaluate_all(
        r"""all => all.map(p => { const n = p.getAttribute('d').match(/[\d.]+/g).map(Number);
        return {from: n[1], to: n[n.length - 1], colour: getComputedStyle(p).stroke}; })"""
    )


def pairs(page: Any) -> set[tuple[int, int]]:
    """The lines as (word on the left, word on the right), a word every 30 pixels."""
    return {(round((p["from"] - 15) / 30), round((p["to"] - 15) / 30)) for p in paths(page)}


def choose_lines(page: Any, words: str) -> None:
    page.locator(".field", has_text="Lines").locator("select").select_option(label=words)


def test_queries_are_on_the_left_and_have_so_many_lines(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record, "align?place=1&head=2")
    assert page.inner_text("nav [aria-current]") == "Lines" == page.inner_text(".panel h1")
    columns = page.locator(".words").evaluate_all("all => all.map(c => c.className)")
    assert ["query" in columns[0], "key" in columns[1]] == [True, True]
    left, right = (page.locator(".words").nth(n).bounding_box()["x"] for n in (0, 1))
    assert left < right
    weights = record.weights(1, 2, 0, 12)
    for words, count in (("1 a word", 1), ("3 a word", 3), ("all", 12)):
        choose_lines(page, words)
        order = np.argsort(-weights, axis=1)[:, :count]
        want = {(t, int(s)) for t in range(12) for s in order[t] if weights[t, s] >= 0.12}
        assert pairs(page) == want


def test_several_heads_are_drawn_together_each_in_its_colour(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=8)
    page = show(record, "align?place=0&head=2")
    choose_lines(page, "1 a word")
    alone = len(paths(page))
    for head in ("5", "0"):
        page.locator(".beside button", has_text=head).click()
    assert page.evaluate("location.hash") == "#align?place=0&head=2&also=5,0"
    found = paths(page)
    colours = {path["colour"] for path in found}
    assert len(colours) == 3 and len(found) > alone
    firm = [(record.weights(0, head, 0, 12).max(1) >= 0.12).sum() for head in (2, 5, 0)]
    counts = sorted(sum(path["colour"] == colour for path in found) for colour in colours)
    assert counts == sorted(firm)
    pressed = page.locator(".beside [aria-pressed=true]").all_inner_texts()
    assert pressed == ["0", "2", "5"]
    page.locator(".words.query .word").nth(7).click()
    assert page.inner_text(".sentence").endswith("looks at, in head 2")
    page.locator(".beside button", has_text="5").click()
    assert page.evaluate("location.hash").count("also=0") == 1


def test_no_more_heads_than_there_are_colours(show: Show) -> None:
    page = show(
        view_fakes.decoder(layers=1, n_heads=12), "align?place=0&head=0&also=1,2,3,4,5,6,99"
    )
    page.wait_for_selector(".lines path", state="attached")
    assert page.locator(".beside [aria-pressed=true]").count() == 6
    page.locator(".beside button", has_text="9").click()
    assert page.locator(".beside [aria-pressed=true]").count() == 6


def test_cross_attention_keeps_its_source_on_the_left(show: Show) -> None:
    page = show(view_fakes.translator(), "align?place=3&head=0")
    page.wait_for_selector(".lines path", state="attached")
    columns = page.locator(".words").evaluate_all("all => all.map(c => c.className)")
    assert "key" in columns[0] and page.locator(".beside").count() == 0
    assert page.inner_text("nav [aria-current]") == "Alignment"


@pytest.mark.parametrize("width", [390, 1440])
def test_lines_fit_the_window(show: Show, width: int) -> None:
    page = show(view_fakes.decoder(layers=1, n_heads=12), "align?place=0&head=0&also=1,2")
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_selector(".lines path", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ends = [page.locator(".words").nth(n).bounding_box() for n in (0, 1)]
    assert ends[0]["x"] >= 0 and ends[1]["x"] + ends[1]["width"] <= width


JAPANESE = [*"吾輩は猫である", "。", "名前", "は", "まだ", "無い"]


def test_japanese_words_stand_in_two_rows_with_lines_between_them(show: Show) -> None:
    record = view_fakes.decoder(JAPANESE, layers=1, n_heads=2)
    page = show(record, "align?place=0&head=0")
    choose_lines(page, "1 a word")
    page.wait_for_selector(".lines path", state="attached")
    boxes = [
        page.locator(f".words.{which} .word").evaluate_all(
            "all => all.map(w => { const b = w.getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })"
        )
        for which in ("query", "key")
    ]
    for row in boxes:
        across, down = np.array(row).T
        assert (np.diff(across) > 20).all() and np.ptp(down) < 1
    assert boxes[0][0][1] < boxes[1][0][1]
    ends = page.locator(".lines path").evaluate_all(
        """all => all.map(p => { const box = p.ownerSVGElement.getBoundingClientRect();
        const n = p.getAttribute('d').match(/[\\d.]+/g).map(Number);
        return [box.left + n[0], box.left + n[6]]; })"""
    )
    weights = record.weights(0, 0, 0, len(JAPANESE))
    firm = [(t, int(row.argmax())) for t, row in enumerate(weights) if row.max() >= 0.12]
    want = sorted((boxes[0][t][0], boxes[1][s][0]) for t, s in firm)
    assert np.array(sorted(ends)) == pytest.approx(np.array(want), abs=1)


def test_arrows_follow_the_rows(show: Show) -> None:
    page = show(view_fakes.decoder(JAPANESE, layers=1, n_heads=2), "align?place=0&head=0")
    page.locator(".words.query .word").nth(3).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#align?place=0&head=0&token=4&side=key"


def test_rows_that_are_wider_than_the_window_scroll_in_their_stage(show: Show) -> None:
    page = show(view_fakes.decoder(JAPANESE * 3, layers=1, n_heads=1), "align?place=0&head=0")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector(".lines path", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator(".words.key .word").last.click()
    assert page.evaluate("location.hash").endswith("token=35&side=key")


def test_english_with_a_japanese_word_stays_in_two_columns(show: Show) -> None:
    page = show(view_fakes.decoder(["the", "word", "猫", "means", "cat"], layers=1, n_heads=1))
    page.evaluate("location.hash = '#align?place=0&head=0'")
    page.wait_for_selector(".lines path", state="attached")
    assert page.locator(".across").count() == 0
