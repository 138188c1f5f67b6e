"""Pointing at a word previews it, on the pages that have words; leaving it brings back the choice.

Topic: the pointer on the start and the text page. Maps and lines have their own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]


def says(page: Any, words: str) -> None:
    """Wait until the text page's sentence begins with these words."""
    page.wait_for_function(
        "words => document.querySelector('.sentence')?.innerText.startsWith(words)", arg=words
    )


def shares(page: Any) -> list[float]:
    titles = page.locator(".flow .word").evaluate_all("all => all.map(w => w.title)")
    return [float(title.split("%")[0].split()[-1].lstrip("<")) for title in titles]


def test_a_word_of_the_text_is_previewed_and_the_chosen_one_comes_back(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record, "text?place=1&head=2&token=7")
    says(page, f"{record.tokens[7]}7")
    before = page.evaluate("location.hash")
    page.locator(".flow .word").nth(10).hover()
    says(page, f"{record.tokens[10]}10 looks at")
    assert shares(page) == pytest.approx(record.rows(1, 2, 10) * 100, abs=0.06)
    assert page.evaluate("location.hash") == before
    assert page.locator(".flow [aria-selected=true]").get_attribute("data-at") == "7"
    page.mouse.move(5, 790)
    says(page, f"{record.tokens[7]}7 looks at")
    assert shares(page) == pytest.approx(record.rows(1, 2, 7) * 100, abs=0.06)


def test_without_a_choice_what_is_received_comes_back(show: Show) -> None:
    record = view_fakes.decoder(layers=1, n_heads=2)
    page = show(record, "text?place=0&head=1")
    says(page, "Choose a word")
    page.locator(".flow .word").nth(4).hover()
    says(page, f"{record.tokens[4]}4 looks at")
    page.mouse.move(5, 790)
    says(page, "Choose a word")
    received = record.statistics(0)["received"][1] / np.arange(12, 0, -1)
    assert shares(page) == pytest.approx(received * 100, abs=0.06)


def test_a_word_that_was_let_go_is_not_previewed_under_the_resting_pointer(show: Show) -> None:
    page = show(view_fakes.decoder(layers=1, n_heads=2), "text?place=0&head=1")
    word = page.locator(".flow .word").nth(4)
    word.hover()
    says(page, "the4")
    word.click()
    assert page.locator(".flow [aria-selected=true]").count() == 1
    word.click()
    says(page, "Choose a word")
    page.wait_for_timeout(200)
    says(page, "Choose a word")


def test_both_sides_of_a_translation_are_previewed(show: Show) -> None:
    record = view_fakes.translator()
    page = show(record, "text?place=3&head=0&token=2")
    says(page, "は2 looks at")
    page.locator(".flow").first.locator(".word").nth(3).hover()
    says(page, "sat3 is looked at by")
    page.mouse.move(5, 790)
    says(page, "は2 looks at")


def link(record: view_fakes.FakeRecord, query: int, key: int) -> str:
    """The head with the largest weight on a pair, and its weight, as the start page writes it."""
    weights = {
        (place, head): record.weight(place, head, query, key)
        for place in range(len(record.places))
        for head in range(record.places[place].n_heads)
    }
    place, head = max(weights, key=lambda each: weights[each])
    return f"{place}.{head} {weights[place, head]:.2f}"


def test_the_start_page_previews_the_link_that_a_click_would_choose(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record, "start?place=0&head=0&token=7")
    page.wait_for_selector(".start[data-ready=yes]")
    answer = page.inner_text(".answer")
    page.locator(".chips .word").nth(4).hover()
    said = f"{record.tokens[7]} → {record.tokens[4]}: {link(record, 7, 4)}"
    page.wait_for_function(
        "w => document.querySelector('.answer')?.innerText.startsWith(w)", arg=said
    )
    assert page.evaluate("location.hash").endswith("token=7")
    page.mouse.move(5, 5)
    page.wait_for_function("w => document.querySelector('.answer')?.innerText === w", arg=answer)
    page.locator(".chips .word").nth(4).click()
    page.wait_for_function(
        "w => document.querySelector('.answer')?.innerText.startsWith(w)", arg=said
    )
    assert page.evaluate("location.hash").endswith("token=7&mate=4")


def test_with_a_pair_chosen_the_start_page_previews_another_word(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record, "start?place=0&head=0&token=7&mate=4")
    page.wait_for_selector(".start[data-ready=yes]")
    answer = page.inner_text(".answer")
    page.locator(".chips .word").nth(9).hover()
    page.wait_for_function(
        "w => document.querySelector('.answer')?.innerText.startsWith(w)",
        arg=f"{record.tokens[9]} → anything: ",
    )
    page.locator(".chips .word").nth(7).hover()
    page.wait_for_function("w => document.querySelector('.answer')?.innerText === w", arg=answer)
