"""Characters that are several tokens, on the text page: shown once, weighed together, told apart.

Topic: bytes of one character. The rest of the text page is in test_browser_pages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]


def bytes_of(text: str, parts: dict[str, int]) -> view_fakes.FakeRecord:
    """A record whose tokens are the characters of a text; some are cut into several tokens."""
    spans = [(at, at + 1) for at, sign in enumerate(text) for _ in range(parts.get(sign, 1))]
    record = view_fakes.decoder([text[a:z] for a, z in spans], layers=1, n_heads=1)
    record.text, record.spans = text, spans
    return record


TEXTS = {
    "吾輩は猫である": {"吾": 3, "輩": 3},
    "a🙂b🙂🙂": {"🙂": 4},
    "didn’t": {"’": 3},
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_of_several_tokens_is_written_once(show: Show, text: str) -> None:
    page = show(bytes_of(text, TEXTS[text]), "text?place=0&head=0")
    page.wait_for_selector(".ranking li")
    assert page.inner_text(".flow") == text
    assert page.locator(".word").all_inner_texts() == list(text)
    assert show(bytes_of(text, TEXTS[text])).inner_text(".headline h1") == text


def together(record: view_fakes.FakeRecord, query: list[int], key: list[int]) -> float:
    weights = record.weights(0, 0, 0, len(record.tokens))
    return float(weights[np.ix_(query, key)].sum(1).mean())


def test_its_tokens_are_weighed_together(show: Show) -> None:
    """Tokens: a 0, 吾 1–3, b 4, 輩 5–7, c 8."""
    record = bytes_of("a吾b輩c", {"吾": 3, "輩": 3})
    page = show(record, "text?place=0&head=0")
    page.locator(".word", has_text="c").click()
    page.wait_for_function("() => document.querySelector('.sentence')?.innerText.includes('looks')")
    share = together(record, [8], [1, 2, 3])
    titles = page.locator(".word").evaluate_all("all => all.map(w => w.title)")
    assert titles[1] == f"{share * 100:.{1 if share > 0.1 else 2}f}%, 3 tokens together"
    page.locator(".word", has_text="輩").click()
    assert page.evaluate("location.hash").endswith("token=5")
    page.wait_for_function(
        "() => document.querySelector('.sentence')?.innerText.startsWith('輩5–7')"
    )
    named = page.locator(".ranking li", has_text="吾1–3").locator(".value").inner_text()
    assert float(named[:-1]) == pytest.approx(
        together(record, [5, 6, 7], [1, 2, 3]) * 100, abs=0.06
    )
    page.locator("[data-value=key]").click()
    page.wait_for_function("() => document.querySelector('.sentence')?.innerText.includes('by')")
    named = page.locator(".ranking li", has_text="c8").locator(".value").inner_text()
    assert float(named[:-1]) == pytest.approx(together(record, [8], [5, 6, 7]) * 100, abs=0.06)
    page.locator(".word", has_text="輩").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("location.hash").endswith("token=4&side=key")


def test_its_tokens_are_shown_on_demand(show: Show) -> None:
    record = bytes_of("a吾b", {"吾": 3})
    page = show(record, "text?place=0&head=0&token=4")
    page.locator("[data-value=tokens]").click()
    assert page.locator(".word").all_inner_texts() == ["a", "吾 1/3", "吾 2/3", "吾 3/3", "b"]
    assert page.evaluate("location.hash") == "#text?place=0&head=0&token=4&tokens=1"
    row = record.rows(0, 0, 4)
    page.wait_for_selector(".ranking li")
    titles = page.locator(".word").evaluate_all("all => all.map(w => w.title)")
    assert [float(title[:-1]) for title in titles] == pytest.approx(row * 100, abs=0.06)
    page = show(record, "head?place=0&head=0")
    page.locator(".map canvas").focus()
    for key in ["ArrowUp"] * 5 + ["ArrowLeft"] * 5 + ["ArrowDown"] * 2 + ["ArrowRight"]:
        page.keyboard.press(key)
    assert page.inner_text(".pair") == "吾 2/32 looks at 吾 1/31"
    plain = show(view_fakes.decoder(), "text?place=0&head=0")
    assert plain.locator("[data-value=tokens]").count() == 0


def test_the_source_of_a_translation_is_written_as_text_too(show: Show) -> None:
    record = view_fakes.translator()
    source = ["<ja>", "吾", "吾", "吾", "輩", "輩", "輩", "は", "猫", "</s>"]
    record.source_tokens, record.source_text = source, "吾輩は猫"
    t, s = len(record.tokens), len(source)
    record.places = [view_fakes.make_place("decoder.layers.0.cross", 0, "cross", 2, t, s, False)]
    page = show(record, "text?place=0&head=0&token=1")
    page.wait_for_selector(".ranking li")
    assert page.locator(".flow").first.locator(".word:not(.mark)").all_inner_texts() == list(
        "吾輩は猫"
    )
