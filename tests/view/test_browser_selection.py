"""One selection: layer, head, query and key stay chosen from page to page, and in the link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]
CHOSEN = "place=1&head=2&token=7&mate=3"


def hash_of(page: Any) -> str:
    return page.evaluate("location.hash")


def ready(page: Any) -> None:
    page.wait_for_function("() => document.querySelector('.map canvas')?.dataset.ready === 'yes'")


def test_a_pair_chosen_on_the_map_is_in_the_link_and_on_every_page(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record, "head?place=1&head=2")
    ready(page)
    page.locator(".map canvas").focus()
    for key in ["ArrowUp"] * 12 + ["ArrowLeft"] * 12 + ["ArrowDown"] * 7 + ["ArrowRight"] * 3:
        page.keyboard.press(key)
    assert hash_of(page).startswith(f"#head?{CHOSEN}")
    page.keyboard.press("4")
    assert page.inner_text(".flow [aria-selected=true]") == "it"
    assert page.inner_text(".flow .mate") == "cross"
    assert hash_of(page) == f"#text?{CHOSEN}"
    page.keyboard.press("5")
    page.wait_for_selector(".lines path")
    assert page.locator(".words.query .chosen").get_attribute("data-at") == "7"
    assert page.locator(".words.key .mate").get_attribute("data-at") == "3"
    page.keyboard.press("2")
    page.wait_for_selector(".card")
    page.locator(".card[data-place='0'][data-head='1']").click()
    page.wait_for_function("() => document.querySelector('.pair')?.innerText.includes('looks at')")
    assert page.inner_text(".pair") == "it7 looks at cross3"
    page.wait_for_function(
        "() => /^[0-9.]+$/.test(document.querySelector('.weight')?.innerText ?? '')"
    )
    told = float(page.inner_text(".weight"))
    assert told == pytest.approx(record.weight(0, 1, 7, 3), rel=1e-5)


def test_a_link_opens_the_pair(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record, f"head?{CHOSEN}")
    ready(page)
    assert page.inner_text(".pair") == "it7 looks at cross3"
    page.keyboard.press("[")
    ready(page)
    assert page.inner_text(".pair") == "it7 looks at cross3"
    page = show(record, "text?place=1&head=2&token=3&side=key&mate=7")
    assert page.inner_text(".flow .mate") == "it"
    page.locator(".flow .word").nth(5).click()
    assert page.locator(".flow .mate").count() == 0
    assert hash_of(page) == "#text?place=1&head=2&token=5&side=key"


@pytest.mark.parametrize("side", ["query", "key"])
def test_a_word_alone_is_shown_on_the_map_with_its_largest_weight(show: Show, side: str) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    line = f"token=7{'&side=key' if side == 'key' else ''}"
    page = show(record, f"head?place=1&head=2&{line}")
    page.wait_for_function("() => document.querySelector('.pair')?.innerText.includes('looks at')")
    weights = record.rows(1, 2, 7) if side == "query" else record.column(1, 2, 7)
    best = int(np.argmax(weights))
    t, s = (7, best) if side == "query" else (best, 7)
    assert page.inner_text(".pair") == f"{record.tokens[t]}{t} looks at {record.tokens[s]}{s}"


def test_two_records_are_compared_at_the_pair(show: Show) -> None:
    one, two = view_fakes.decoder(), view_fakes.decoder(strength=0.6)
    page = show(one, f"compare?{CHOSEN}", other=two)
    page.wait_for_function(
        "() => /A [0-9]/.test(document.querySelector('.weights')?.innerText ?? '')"
    )
    assert page.inner_text(".weights").startswith("it → cross")


def test_a_place_of_another_size_lets_the_pair_go(show: Show) -> None:
    page = show(view_fakes.translator(), "head?place=2&head=0&token=9&mate=9")
    page.keyboard.press("{")
    assert hash_of(page) == "#head?place=1&head=0"
