"""The alignment page of long texts and of speech: what is on the first screen, and what is ranked.

Topic: more than 256 sources. Short texts are in test_browser_alignment.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]


def far_looker(n: int = 600) -> view_fakes.FakeRecord:
    """Each query looks at key 500 by 0.6, and at key 3 by 0.3."""
    record = view_fakes.decoder([f"w{i}" for i in range(n)], layers=1, n_heads=1)
    whole = np.zeros((n, n), np.float32)
    whole[:, 500], whole[:, 3], whole[:, 4] = 0.6, 0.3, 0.1
    record.weights = lambda place, head, t0, t1: whole[t0:t1]  # type: ignore[method-assign]
    return record


def ranking(page: Any) -> list[str]:
    page.wait_for_function(
        "() => document.querySelector('.ranking li') &&"
        " document.querySelector('.sentence')?.innerText.includes('within the part') === false"
    )
    return [text.split("\n")[0] for text in page.locator(".ranking li").all_inner_texts()]


def test_what_a_word_looks_at_is_ranked_over_all_keys(show: Show) -> None:
    page = show(far_looker(), "align?place=0&head=0")
    page.wait_for_selector(".lines path")
    page.locator("button", has_text="‹ keys").click()
    page.wait_for_selector(".words.key .word[data-at='0']")
    page.locator(".words.query .word").nth(7).click()
    assert ranking(page) == ["w500500", "w33", "w44"]
    assert page.inner_text(".sentence") == "w77 looks at"
    page.locator(".words.key .word").nth(3).click()
    assert len(ranking(page)) == 6
    assert page.inner_text(".sentence") == "w33 is looked at by"


def test_where_the_other_keys_are_not_in_the_file_the_part_is_named(show: Show) -> None:
    """Of this head the file has the lines of a part, and nothing else of its weights."""
    record = far_looker()
    page = show(record, "align?place=0&head=0")
    page.wait_for_selector(".lines path")
    # As of a file without the whole matrix, from which rows are made.
    page.evaluate("() => { Float32Array.prototype.slice = () => { throw new Error('gone'); }; }")
    page.locator(".words.query .word").nth(7).click()
    page.wait_for_timeout(300)
    assert page.inner_text(".sentence") == "w77 looks at, within the part shown"


def test_a_long_alignment_opens_on_the_part_that_is_looked_at(show: Show) -> None:
    page = show(far_looker(), "align?place=0&head=0")
    page.wait_for_selector(".lines path")
    assert "keys from 256," in page.inner_text(".pager")
    assert page.locator(".lines path").count() == 256


def speech(n: int = 1500, words: int = 11) -> view_fakes.FakeRecord:
    """A decoder that looks at positions of sound, evenly from the first to the last."""
    tokens = ["<s>", *(f"word{i}" for i in range(words - 1))]
    record = view_fakes.decoder(tokens, layers=0)
    record.places = [view_fakes.make_place("decoder.0.cross", 0, "cross", 2, words, n, False)]
    return record


@pytest.mark.parametrize("height", [900, 600])
def test_an_alignment_of_speech_opens_on_words_and_lines(show: Show, height: int) -> None:
    record = speech()
    page = show(record, "align?place=0&head=0")
    page.set_viewport_size({"width": 1440, "height": height})
    page.wait_for_selector(".lines path")
    seen = """selector => [...document.querySelectorAll(selector)].filter(e => {
        const b = e.getBoundingClientRect();
        return b.top >= 0 && b.bottom <= innerHeight && b.height > 0; }).length"""
    assert page.evaluate(seen, ".words.query .word") >= 2
    assert page.evaluate(seen, ".words.key .word") >= 10
    assert page.evaluate(seen, ".lines path") >= 1
    assert page.locator(".pager").count() == 0
    rows = page.locator(".words.key .word bdi").all_inner_texts()
    assert rows[:2] == ["0–31", "32–63"] and rows[-1] == "1472–1499"
    page.locator(".words.query .word").nth(10).click()
    row = record.rows(0, 0, 10)
    sums = np.add.reduceat(row, np.arange(0, 1500, 32))
    first = page.locator(".ranking li").first
    best = int(sums.argmax())
    assert first.locator("bdi").inner_text() == f"{best * 32}–{min(1500, best * 32 + 32) - 1}"
    shown = float(first.locator(".value").inner_text().rstrip("%"))
    assert shown == pytest.approx(sums[best] * 100, abs=0.06)
    page.locator(".words.key .word").nth(3).click()
    assert page.evaluate("location.hash").endswith("token=96&side=key")
    assert page.inner_text(".sentence") == "96–127 is looked at by"


def test_rows_say_that_they_are_words_read_and_which_comes_next(show: Show) -> None:
    page = show(view_fakes.translator(), "align?place=3&head=0")
    page.wait_for_selector(".lines path")
    assert "while about to write the next" in page.inner_text(".facts")
    titles = page.locator(".words.query .word").evaluate_all("all => all.map(w => w.title)")
    assert titles[0] == "about to write “\u2068猫\u2069”" and titles[-1] == ""
    record = view_fakes.decoder(layers=1, n_heads=1)
    record.places = [view_fakes.make_place("encoder.0", 0, "self", 1, 12, 12, False)]
    page = show(record, "align?place=0&head=0")
    page.wait_for_selector(".lines path")
    assert "about to write" not in page.inner_text(".facts")


def test_a_part_without_a_weight_that_matters_says_so(show: Show) -> None:
    record = far_looker()
    even = np.full((600, 600), 1 / 600, np.float32)
    record.weights = lambda place, head, t0, t1: even[t0:t1]  # type: ignore[method-assign]
    page = show(record, "align?place=0&head=0")
    page.wait_for_selector(".words .word")
    assert "No weight here reaches 12.0%" in page.inner_text(".stage .message")
