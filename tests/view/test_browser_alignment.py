"""The alignment page of a real translation: it opens where 猫 looks at cat; choices win."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import view_fakes

import regard
from regard._look import see_translation
from regard.lens.record import Record
from regard.lens.word_links import find_alignment

Show = Callable[..., Any]
ENGLISH = "The cat sat on the mat."


@pytest.fixture(scope="module")
def translation() -> Record:
    """As `regard translate --look` makes it."""
    model = regard.load("embedded:translate")
    return see_translation(model, "embedded:translate", ENGLISH, "猫はマットに座った。", None)


def chosen(page: Any) -> list[str]:
    """What the two lists of the panel say: the layer and the head."""
    return page.locator(".picker select").evaluate_all(
        "all => all.map(s => s.selectedOptions[0].text)"
    )


def strongest(page: Any, word: str) -> str:
    """The source word that a target word looks at most, by the page's own ranking."""
    page.locator(".words.query .word", has_text=word).first.click()
    page.wait_for_selector(".ranking li")
    return page.locator(".ranking li .name bdi").first.inner_text()


def firmest(record: Any) -> str:
    found = find_alignment(record)
    assert found is not None
    return f"place={found.place}&head={found.head}"


def test_neko_looks_at_cat_and_so_on_when_the_page_opens(show: Show, translation: Record) -> None:
    page = show(translation, "align")
    page.wait_for_selector(".lines path")
    assert chosen(page) == ["Cross 1", "Head 1"]
    for target, source in (("猫", "cat"), ("座", "sat"), ("マ", "mat")):
        assert strongest(page, target) == source
    row = page.locator(".words.key .word").all_inner_texts()
    lit = page.locator(".words.key .lit bdi").all_inner_texts()
    assert lit == ["mat"] and any("%" in word for word in row)
    found = find_alignment(translation)
    assert found is not None
    neko = translation.tokens.index("猫")
    weights = translation.rows(found.place, found.head, neko)
    assert translation.source_tokens is not None
    assert translation.source_tokens[int(weights.argmax())].strip() == "cat"


@pytest.mark.parametrize("way", ["key", "tab"])
def test_the_alignment_opens_on_its_best_head_from_any_page(
    show: Show, translation: Record, way: str
) -> None:
    page = show(translation)
    if way == "key":
        page.keyboard.press("5")
    else:
        page.locator("nav a", has_text="Alignment").click()
    page.wait_for_selector(".page.align")
    assert page.evaluate("location.hash") == f"#align?{firmest(translation)}"
    page.evaluate("() => { location.hash = '#head?place=0&head=3'; }")  # the encoder's
    page.wait_for_selector(".page.head")
    page.keyboard.press("5")
    page.wait_for_selector(".page.align")
    assert page.evaluate("location.hash") == f"#align?{firmest(translation)}"


def test_what_a_link_or_a_control_says_wins(show: Show, translation: Record) -> None:
    page = show(translation, "align?head=layer")
    assert chosen(page) == ["Cross 1", "Mean of this layer"]
    first = next(n for n, place in enumerate(translation.places) if place.kind == "cross")
    page = show(translation, f"align?place={first}")
    assert chosen(page) == ["Cross 0", "Head 0"]
    page.locator(".picker select").nth(1).select_option("layer")
    page.keyboard.press("Escape")
    page.locator("nav a", has_text="Text").click()
    page.wait_for_selector(".page.text")
    page.locator("nav a", has_text="Alignment").click()
    page.wait_for_selector(".page.align")
    assert chosen(page) == ["Cross 0", "Mean of this layer"]
    assert page.evaluate("location.hash").startswith(f"#align?place={first}&head=layer")


def test_of_two_records_each_has_its_own_best_head(show: Show, translation: Record) -> None:
    other = view_fakes.translator()
    assert firmest(other) != firmest(translation)
    page = show(translation, "align?record=1", other=other)
    page.locator(".words.key .word", has_text="cat").first.click()
    assert firmest(other) in page.evaluate("location.hash")
