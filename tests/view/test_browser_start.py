"""Where a record opens: what stands out, and which heads link two words; in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes
from lens_words import make_record

from regard.lens.findings import find_sections, head_label
from regard.view import Server

Show = Callable[..., Any]


def ready(page: Any) -> None:
    page.wait_for_selector(".start[data-ready=yes]")


def told(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def ranked(page: Any) -> list[tuple[str, float]]:
    names = page.locator(".heads-ranking b").all_inner_texts()
    values = page.locator(".heads-ranking .value").all_inner_texts()
    return [(name, float(value.lstrip("<"))) for name, value in zip(names, values, strict=True)]


def test_a_record_opens_on_what_stands_out_in_the_words_of_the_digest(show: Show) -> None:
    record = make_record()
    page = show(record, "")
    ready(page)
    assert page.inner_text("nav [aria-current]") == "Start"
    assert page.inner_text(".headline").startswith("The animal didn't cross the street")
    sections = find_sections(record)
    assert page.locator(".finding h3").all_inner_texts() == [each.title for each in sections]
    for number, section in enumerate(sections):
        lines = page.locator(".finding").nth(number).locator("li")
        for line, shown in zip(section.lines, lines.all(), strict=True):
            heads = [f"{head_label(record, p, h)} {told(value)}" for p, h, value in line.heads]
            assert shown.locator("a").all_inner_texts() == heads
            assert shown.inner_text().startswith(line.text)


def test_a_finding_opens_its_head_on_its_two_words(show: Show) -> None:
    page = show(make_record(), "")
    page.locator(".finding", has_text='"it" looks at').locator("li", has_text="animal").locator(
        "a"
    ).click()
    page.wait_for_function("() => document.querySelector('.pair')?.innerText.includes('looks at')")
    assert page.inner_text(".pair") == "it7 looks at animal1"
    assert page.inner_text(".panel h1") == "Layer 0, head 2"
    page.go_back()
    ready(page)


def test_two_words_are_ranked_over_all_heads_at_once(show: Show) -> None:
    """it → animal: the head that was made for it comes first; every number is the record's."""
    record = make_record()
    page = show(record, "")
    ready(page)
    assert page.locator(".chips .own").inner_text() == "it"  # as the digest asks
    page.locator(".chips .word", has_text="animal").click()
    ready(page)
    assert page.inner_text(".answer") == "it → animal: 0.2 1.00, 0.0 <0.01, 0.1 <0.01"
    weights = {f"0.{head}": record.weight(0, head, 7, 1) for head in range(3)}
    order = sorted(weights, key=lambda name: -weights[name])
    assert [name for name, _ in ranked(page)] == order
    for name, value in ranked(page):
        assert value == pytest.approx(weights[name], abs=0.0101)
        cell = page.locator(f".matrix [data-head='{name}']").get_attribute("aria-label")
        assert float(cell.split()[1]) == pytest.approx(weights[name], abs=0.00051)
    assert "token=7&mate=1" in page.evaluate("location.hash")


def test_a_word_and_anything_names_the_word_of_each_head(show: Show) -> None:
    record = view_fakes.decoder(layers=3, n_heads=4)
    page = show(record, "start?place=0&head=0&token=7")
    ready(page)
    best = []
    for place in range(3):
        for head in range(4):
            row = record.rows(place, head, 7).copy()
            row[[0, 7, 11]] = -1  # the first, the word itself, the full stop
            best.append((f"{place}.{head}", float(row.max()), record.tokens[int(row.argmax())]))
    best.sort(key=lambda each: -each[1])
    words = page.locator(".heads-ranking bdi").all_inner_texts()
    assert [(name, word) for name, _, word in best[:8]] == list(
        zip([name for name, _ in ranked(page)], words, strict=True)
    )
    assert "left out" in page.inner_text(".told")
    page = show(record, "start?place=0&head=0&token=3&side=key")
    ready(page)
    assert page.inner_text(".answer").startswith("anything → cross: ")
    top = max(
        (float(record.column(p, h, 3)[[1, 2, *range(4, 11)]].max()), f"{p}.{h}")
        for p in range(3)
        for h in range(4)
    )
    assert ranked(page)[0] == (top[1], pytest.approx(top[0], abs=0.0051))


def test_a_word_of_several_tokens_is_the_mean_over_its_own_of_the_sum_over_the_others(
    show: Show,
) -> None:
    tokens = ["The", "anim", "al", "was", "tir", "ed"]
    record = view_fakes.decoder(tokens, layers=1, n_heads=2)
    record.text = "The animal was tired"
    record.spans = [(0, 3), (4, 8), (8, 10), (11, 14), (15, 18), (18, 20)]
    page = show(record, "start?place=0&head=0&token=4&mate=1")
    ready(page)
    assert page.inner_text(".answer").startswith("tired → animal: ")
    assert page.locator(".chips .word").all_inner_texts() == ["The", "animal", "was", "tired"]
    weights = [record.weights(0, head, 4, 6)[:, 1:3].sum(1).mean() for head in range(2)]
    assert ranked(page)[0][1] == pytest.approx(max(weights), abs=0.0051)


def test_the_ends_are_found_by_typing_and_let_go(show: Show) -> None:
    page = show(view_fakes.decoder(layers=2, n_heads=2), "start")
    ready(page)
    page.get_by_role("searchbox", name="To").fill("str")
    [found] = page.locator(".found button").all_inner_texts()
    assert found.split() == ["didn't", "cross", "the", "street5", "because", "it", "was"]
    page.keyboard.press("Enter")
    ready(page)
    assert page.inner_text(".answer").startswith("it → street: ")
    page.get_by_role("searchbox", name="From").fill("tired")
    page.keyboard.press("Enter")
    ready(page)
    assert page.inner_text(".answer").startswith("tired → street: ")
    page.get_by_text("from anything").click()
    ready(page)
    assert page.inner_text(".answer").startswith("anything → street: ")


def test_a_translation_lands_on_its_alignment(show: Show) -> None:
    page = show(view_fakes.translator(), "")
    page.wait_for_selector(".lines path")
    assert page.inner_text("nav [aria-current]") == "Alignment"
    assert "cross" in page.locator(".picker select").first.evaluate(
        "s => s.selectedOptions[0].text.toLowerCase()"
    )
    page = show(view_fakes.translator(), "start?place=3&head=0&token=3&mate=6")
    ready(page)
    assert page.inner_text(".answer").startswith("マット → mat: cross ")
    assert page.locator(".chips .flow").count() == 2


def test_what_is_not_in_the_file_is_said(show: Show) -> None:
    words = [f"w{n}" for n in range(301)]
    record = view_fakes.decoder(words, layers=2, n_heads=4)
    page = show(record, "start?place=0&head=0&token=250&mate=249", budget=100_000)
    ready(page)
    assert page.locator(".matrix .missing").count() > 0
    assert "regard view" in page.inner_text(".finder .message")


def test_a_long_text_starts_from_the_server(page: Any) -> None:
    record = view_fakes.ramp(10_007)
    with Server(record) as server:  # type: ignore[arg-type]
        page.goto(server.url + "#start")
        ready(page)
        assert page.locator(".chips .word").count() == 400
        page.get_by_role("searchbox", name="From").fill("w9001")
        page.keyboard.press("Enter")
        ready(page)
        assert page.inner_text(".chips .own") == "w9001"
        # The text scrolls in its box: the chosen word is in sight, and the answer below it.
        box = page.locator(".chips .flow").bounding_box()
        own = page.locator(".chips .own").bounding_box()
        assert box["height"] <= 200 and box["y"] <= own["y"] < box["y"] + box["height"]
        assert page.locator(".answer").bounding_box()["y"] < 800
        page.get_by_role("searchbox", name="To").fill("w9000")
        page.keyboard.press("Enter")
        ready(page)
        weight = float(record.rows(0, 0, 9001)[9000])
        cell = page.locator(".matrix [data-head='0.0']").get_attribute("aria-label")
        assert float(cell.split()[1]) == pytest.approx(weight, abs=0.00051)
        page.goto("about:blank")


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_is_wider_than_the_window(show: Show, width: int) -> None:
    record = view_fakes.decoder(layers=12, n_heads=32)
    page = show(record, "start")
    page.set_viewport_size({"width": width, "height": 900})
    ready(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    rows = page.locator(".matrix .line").evaluate_all(
        "all => all.map(l => [...l.children].map(c => c.getBoundingClientRect().top))"
    )
    assert all(np.ptp(row) < 12 for row in rows) and len(rows) == 12


def test_a_record_of_statistics_says_that_it_has_no_weights_to_ask_for(show: Show) -> None:
    """Neither that no head looks so, nor that another command would show it."""
    page = show(view_fakes.coarse(), "start?token=5")
    page.wait_for_selector(".start[data-ready]")
    assert page.inner_text(".answer") == "w5 → anything: not known here."
    said = page.inner_text(".finder .message")
    assert "not single weights" in said and 'keep="qk"' in said and "regard view" not in said
    assert page.locator(".matrix .missing").count() == 2
