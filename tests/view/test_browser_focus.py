"""The focus stays where it is when a part of a page is built anew: by keyboard alone, a page can be
gone through, and no key falls out of it, in a notebook to the notebook's own commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import view_fakes

from regard.view import Server

Show = Callable[..., Any]
ACTIVE = "document.activeElement.dataset.focus ?? document.activeElement.tagName"


def settle(page: Any) -> None:
    """What is asked for has come, and is on the screen."""
    page.wait_for_timeout(400)


@pytest.mark.parametrize(
    ("line", "mark", "key", "after"),
    [
        ("start", "query-3", "Enter", "query-3"),
        ("overview", "Each map’s scale-shared", "ArrowRight", "Each map’s scale-own"),
        ("head?place=1&head=2", "Scale-root", "ArrowRight", "Scale-linear"),
        ("text?token=4", "Direction-query", "ArrowRight", "Direction-key"),
    ],
)
def test_what_is_built_anew_gives_the_focus_back(
    show: Show, line: str, mark: str, key: str, after: str
) -> None:
    page = show(view_fakes.decoder(), line)
    settle(page)
    page.locator(f'[data-focus="{mark}"]').focus()
    page.keyboard.press(key)
    settle(page)
    assert page.evaluate(ACTIVE) == after


def test_a_list_that_is_written_again_gives_the_focus_back(show: Show) -> None:
    page = show(view_fakes.decoder(), "start?token=5")
    page.wait_for_selector(".start[data-ready]")
    link = page.locator(".heads-ranking a").nth(2)
    link.focus()
    page.keyboard.press("t")  # other colours
    settle(page)
    assert page.evaluate(ACTIVE) == link.get_attribute("data-focus")


def test_choosing_a_record_or_one_of_the_heads_that_differ_keeps_the_focus(show: Show) -> None:
    other = view_fakes.decoder(strength=0.6)
    page = show(view_fakes.decoder(), "head", other=other)
    page.locator('[data-focus="Record-0"]').focus()
    page.keyboard.press("ArrowRight")
    settle(page)
    assert page.evaluate(ACTIVE) == "Record-1"
    assert "record=1" in page.evaluate("location.hash")
    page = show(view_fakes.decoder(), "compare", other=other)
    third = page.locator(".differing button").nth(2)
    third.focus()
    mark = page.evaluate(ACTIVE)
    page.keyboard.press("Enter")
    settle(page)
    assert page.evaluate(ACTIVE) == mark != "BUTTON"
    page.keyboard.press("Tab")
    assert page.evaluate(ACTIVE) == page.locator(".differing button").nth(3).get_attribute(
        "data-focus"
    )


def test_the_heat_of_the_start_page_is_one_stop_and_arrows_go_through_it(show: Show) -> None:
    page = show(view_fakes.decoder(), "start?token=5")
    page.wait_for_selector(".start[data-ready]")
    assert page.locator(".matrix a[tabindex='0']").count() == 1
    page.locator(".matrix a[tabindex='0']").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.head") == "2.1"
    page.keyboard.press("Enter")
    page.wait_for_selector(".page.head")
    assert "place=2&head=1" in page.evaluate("location.hash")


def test_the_last_part_of_a_long_text_hands_the_focus_to_the_way_back(page: Any) -> None:
    with Server(view_fakes.ramp(4099)) as server:
        page.goto(server.url + "#text?place=0&head=0&token=3")
        page.wait_for_selector(".pager button")
        later = page.get_by_role("button", name="Later ›")
        later.focus()
        page.keyboard.press("Enter")
        assert page.evaluate(ACTIVE) == "Later ›"
        page.keyboard.press("Enter")
        assert "4,000–4,098 of 4,099" in page.inner_text(".pager")
        assert page.evaluate(ACTIVE) == "‹ Earlier"
        page.goto("about:blank")
        page.goto(server.url + "#align?place=0&head=0")
        page.wait_for_selector(".pager button")
        for name, first in (("keys ›", 256), ("keys ›", 512), ("‹ keys", 256), ("‹ keys", 0)):
            page.get_by_role("button", name=name).focus()
            page.keyboard.press("Enter")
            settle(page)
            assert f"keys from {first}," in page.inner_text(".pager")
            assert page.evaluate(ACTIVE) == (name if first else "keys ›")
        page.goto("about:blank")


def test_the_first_step_of_a_generation_keeps_the_focus_in_the_player(show: Show) -> None:
    record = view_fakes.decoder()
    record.ends = [4, 5, 6, 7, 8, 9, 10, 11]
    page = show(record, "text?step=0")
    page.get_by_role("button", name="Previous step  ,").focus()
    page.keyboard.press("Enter")
    settle(page)
    assert page.evaluate("document.activeElement.closest('.player') !== null")
    assert page.evaluate("document.activeElement.tagName") == "INPUT"


def test_the_words_of_the_start_page_are_one_stop_and_arrows_go_as_the_text_runs(
    show: Show,
) -> None:
    hebrew = ["שלום", "לכל", "העולם", "הזה", "היפה"]
    for words, onward in ((view_fakes.ENGLISH, "ArrowRight"), (hebrew, "ArrowLeft")):
        page = show(view_fakes.decoder(list(words)), "start?token=1")
        page.wait_for_selector(".start[data-ready]")
        page.locator('[data-focus="search-To"]').focus()
        page.keyboard.press("Tab")
        assert page.evaluate(ACTIVE) == "query-1"  # the chosen one
        page.keyboard.press(onward)
        page.keyboard.press(onward)
        assert page.evaluate(ACTIVE) == "query-3"
        page.keyboard.press("Tab")
        assert page.evaluate(ACTIVE) == "Keys-all"
        page.keyboard.press("Shift+Tab")
        assert page.evaluate(ACTIVE) == "query-3"
        page.keyboard.press("Enter")
        settle(page)
        assert "token=1&mate=3" in page.evaluate("location.hash")
        assert page.evaluate(ACTIVE) == "query-3"
