"""Finding a word of a text, on the text page; the start page's fields are in its own tests."""

from __future__ import annotations

from typing import Any

import view_fakes

from regard.view import Server


def test_a_word_of_a_long_text_is_found_by_typing(page: Any) -> None:
    """Each press of Enter goes to the next place, on whichever page of the text it lies."""
    words = [f"w{n}" for n in range(6007)]
    for at in (17, 2500, 5900):
        words[at] = "needle"
    record = view_fakes.ramp(6007)
    record.tokens = words
    record.text, record.spans = view_fakes.spread(words)
    with Server(record) as server:  # type: ignore[arg-type]
        page.goto(server.url + "#text?place=0&head=0&token=3")
        page.wait_for_selector(".flow .word")
        page.get_by_role("searchbox").fill("NEEDLE")
        assert page.inner_text(".search .count") == "3 places"
        assert page.locator(".found button").first.inner_text().split()[:4] == [
            "w14", "w15", "w16", "needle17",
        ]  # fmt: skip
        for number, at in enumerate((17, 2500, 5900), start=1):
            page.get_by_role("searchbox").press("Enter")
            assert f"token={at}" in page.evaluate("location.hash")
            chosen = page.locator(".flow [aria-selected=true]")
            assert chosen.inner_text() == "needle" and chosen.is_visible()
            box = chosen.bounding_box()
            assert 0 <= box["y"] < 800
            assert page.inner_text(".search .count") == f"{number} of 3 places"
        page.get_by_role("searchbox").press("Enter")
        assert "token=17" in page.evaluate("location.hash")
        page.get_by_role("searchbox").press("Escape")
        assert page.locator(".found button").count() == 0
        page.goto("about:blank")
