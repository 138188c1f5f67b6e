"""More than weights, where a record has it: predictions, values, rollout, gradients, generations.

Topic: the text page's and the head page's other measures, each number against the plain formula;
and that a record without them has no control for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.lens.next_tokens import NextTokens
from regard.view import Server, write_page

Show = Callable[..., Any]
K = 3


def predict(n: int) -> tuple[NextTokens, dict[int, str]]:
    """Predictions of n tokens whose ids are 0, 1, 2, ...: after t come t + 1, 100 + t, 200 + t."""
    t = np.arange(n)
    ids = np.stack([t + 1, 100 + t, 200 + t], 1).astype(np.int32)
    ids[4, 0] = 150  # what came after token 4 was not among the likeliest
    probs = np.stack([0.4 + t * 0.03, 0.2 + 0 * t, 0.1 + 0 * t], 1).astype(np.float32)
    given = np.append(np.nan, probs[:-1, 0]).astype(np.float32)
    given[5:6] = 0.02
    names = {int(number): f"word {number}" for number in np.unique(ids)}
    return NextTokens(probs, ids, given, np.append(t[1:], -1)), names


def full() -> view_fakes.FakeRecord:
    """A record that has everything."""
    record = view_fakes.decoder(layers=3, n_heads=4)
    n = len(record.tokens)
    record.predicted, record.vocabulary = predict(n)
    drawn = np.random.default_rng(3)
    record.norms = [drawn.uniform(0.2, 3, (4, n)).astype(np.float32) for _ in range(3)]
    record.sums = [(drawn.normal(size=(4, n)), drawn.normal(size=(4, n))) for _ in range(3)]
    record.ends = [4, 5, 6, 7, 8, 9, 10, 11]
    return record


def choose(page: Any, measure: str) -> None:
    page.locator(".field", has_text="Measure").locator("select").select_option(measure)


def titles(page: Any) -> list[str]:
    return page.locator(".flow .word").evaluate_all("all => all.map(w => w.title)")


def says(page: Any, words: str) -> None:
    page.wait_for_function(
        "words => document.querySelector('.sentence')?.innerText.includes(words)", arg=words
    )


def numbers(page: Any) -> list[float]:
    """The numbers of the tooltips, as shares."""
    found = [title.split(" of the")[0].split(" to each")[0].split()[-1] for title in titles(page)]
    return [float(x.strip("<%")) / (100 if "%" in x else 1) for x in found]


def test_a_record_without_them_has_no_control(show: Show) -> None:
    page = show(view_fakes.decoder(layers=1), "text?place=0&head=0&token=4&by=values&step=2")
    says(page, "the4 looks at")
    assert page.locator(".field", has_text="Measure").count() == 0
    assert page.locator("[aria-label=Measure], .player, .candidates *").count() == 0
    assert page.evaluate("document.querySelector('.later')") is None
    page.keyboard.press("3")
    page.wait_for_selector(".page.head")
    assert page.locator("[aria-label=Measure]").count() == 0


def test_each_measure_is_offered_alone_where_it_alone_was_recorded(show: Show) -> None:
    def offered(record: view_fakes.FakeRecord) -> list[str]:
        page = show(record, "text?place=0&head=0")
        page.wait_for_selector(".ranking li")
        return page.locator(
            "[aria-label=Measure] button, .field:has-text('Measure') option"
        ).all_inner_texts()

    everything = full()
    plain = {"predicted": None, "norms": None, "sums": None, "ends": None}
    two = replace(everything, **plain)
    assert offered(two) == ["Weights", "Across layers (rollout)"]
    one = replace(two, places=two.places[:1])
    assert offered(one) == []
    assert offered(replace(one, norms=everything.norms)) == ["Weights", "Value-weighted"]
    assert offered(replace(one, sums=everything.sums)) == ["Weights", "Attention × gradient"]
    assert offered(replace(one, predicted=everything.predicted)) == ["Weights", "Token probability"]


def candidates(page: Any) -> list[tuple[str, str, bool]]:
    return page.locator(".candidates li").evaluate_all(
        "all => all.map(li => [li.querySelector('.name').innerText,"
        " li.querySelector('.value').innerText, li.classList.contains('came')])"
    )


def test_the_next_token_is_told_beside_the_chosen_word(show: Show) -> None:
    page = show(full(), "text?place=0&head=0&token=2")
    page.wait_for_selector(".candidates li")
    assert candidates(page) == [
        ["word 3", "46.0%", True],
        ["word 102", "20.0%", False],
        ["word 202", "10.0%", False],
    ]
    page.locator(".flow .word").nth(4).click()
    page.wait_for_function("() => document.querySelectorAll('.candidates li').length === 4")
    assert candidates(page)[0] == ["word 150", "52.0%", False]
    assert candidates(page)[3] == ["street", "2.00%", True]
    page.locator(".flow .word").nth(11).click()
    page.wait_for_function("() => document.querySelectorAll('.candidates .came').length === 0")
    assert [name for name, *_ in candidates(page)] == ["word 12", "word 111", "word 211"]


def test_words_are_shaded_by_the_probability_that_they_had(show: Show) -> None:
    record = full()
    assert record.predicted is not None
    page = show(record, "text?place=0&head=0")
    choose(page, "probability")
    says(page, "the probability that the model gave them")
    assert page.evaluate("location.hash") == "#text?place=0&head=0&by=probability"
    told = titles(page)
    assert told[0] == "no probability is known"
    shares = [float(title.split("%")[0].split()[-1]) / 100 for title in told[1:]]
    assert shares == pytest.approx(record.predicted.given[1:], abs=6e-4)
    first = page.locator(".ranking li").first
    assert first.locator(".name").inner_text() == "street5"
    assert first.locator(".value").inner_text() == "2.00%"
    colours = page.locator(".flow .word").evaluate_all("a => a.map(w => w.style.backgroundColor)")
    assert colours[0] == "" and colours[11] != colours[5]


def test_a_character_of_several_tokens_has_the_product_of_their_probabilities(show: Show) -> None:
    record = view_fakes.decoder(["a", "吾", "吾", "吾", "b"], layers=1, n_heads=1)
    record.text, record.spans = "a吾b", [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    found, record.vocabulary = predict(5)
    given = np.array([np.nan, 0.5, 0.4, 0.5, 0.25], np.float32)
    record.predicted = replace(found, given=given)
    page = show(record, "text?place=0&head=0&by=probability")
    says(page, "the probability")
    assert titles(page)[1:] == [
        "was given 10.0% before it was read, 3 tokens together",
        "was given 25.0% before it was read",
    ]


def test_rollout_is_what_the_layers_multiply_to_in_both_directions(show: Show) -> None:
    record = full()
    page = show(record, "text?place=0&head=0&token=7")
    choose(page, "rollout")
    says(page, "draws on, by way of all layers")
    whole = record.rollout()
    assert numbers(page) == pytest.approx(whole[7], abs=6e-4)
    page.locator("[data-value=key]").click()
    says(page, "is drawn on by, by way of all layers")
    assert numbers(page) == pytest.approx(whole[:, 7], abs=6e-4)
    page.keyboard.press("Escape")
    says(page, "Choose a word")


def test_rollout_that_did_not_fit_into_a_file_says_so(show: Show) -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(150)], layers=2, n_heads=4)
    page = show(record, "text?place=0&head=3&token=9&by=rollout", budget=150_000)
    page.wait_for_selector(".message.error")
    assert "rollout did not fit" in page.inner_text(".message.error")


def test_a_served_page_has_all_of_it_too(page: Any) -> None:
    record = full()
    with Server(record) as server:
        page.goto(f"{server.url}#text?place=1&head=2&token=7&by=rollout")
        says(page, "draws on")
        assert numbers(page) == pytest.approx(record.rollout()[7], abs=6e-4)
        page.wait_for_selector(".candidates li")
        assert candidates(page)[0][0] == "word 8"
        choose(page, "values")
        says(page, "takes from")
        want = record.rows(1, 2, 7) * record.norms[1][2]
        assert numbers(page) == pytest.approx(want, abs=6e-3)
        page.goto("about:blank")


@pytest.mark.parametrize("head", ["2", "layer", "all"])
def test_value_weighted_words_are_weights_times_norms(show: Show, head: str) -> None:
    record = full()
    assert record.norms is not None
    heads = {
        "2": [(1, 2)],
        "layer": [(1, h) for h in range(4)],
        "all": [(place, h) for place in range(3) for h in range(4)],
    }[head]
    whole = np.mean([record.weights(p, h, 0, 12) * record.norms[p][h] for p, h in heads], 0)
    page = show(record, f"text?place=1&head={head}&token=7&by=values")
    says(page, "takes from")
    assert numbers(page) == pytest.approx(whole[7], rel=6e-3)
    page.locator("[data-value=key]").click()
    says(page, "gives to")
    assert numbers(page) == pytest.approx(whole[:, 7], rel=6e-3)
    page.keyboard.press("Escape")
    says(page, "Choose a word")
    want = whole.sum(0) / np.arange(12, 0, -1)
    assert numbers(page) == pytest.approx(want, rel=6e-3)


def test_value_weighted_cells_of_a_map(show: Show) -> None:
    record = full()
    page = show(record, "head?place=1&head=2&token=7&mate=3")
    page.wait_for_function("() => (document.querySelector('.weight')?.innerText ?? '…') !== '…'")
    page.locator("[data-value=values]").click()
    assert page.evaluate("location.hash").endswith("by=values")
    want = record.weight(1, 2, 7, 3) * record.norms[1][2, 3]
    page.wait_for_function(
        "want => Math.abs(Number(document.querySelector('.weight')?.innerText) - want) < 1e-5",
        arg=float(want),
    )
    assert page.inner_text(".times") == ""
    assert "‖weight · f(x)‖" in page.inner_text(".panel")


def test_a_cell_of_many_keys_is_the_mean_of_weights_times_norms(show: Show) -> None:
    """600 keys of which two are a cell where the map is small, from three tiles."""
    n = 601
    record = view_fakes.decoder([f"w{i}" for i in range(n)], layers=1, n_heads=1)
    drawn = np.random.default_rng(3)
    record.norms = [drawn.uniform(0.2, 3, (1, n)).astype(np.float32)]
    page = show(record, "head?place=0&head=0&by=values")
    page.wait_for_function("() => document.querySelector('.map canvas')?.dataset.ready === 'yes'")
    page.set_viewport_size({"width": 700, "height": 520})
    page.wait_for_timeout(300)
    box = page.locator(".map canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + box["height"] * 0.8)
    page.wait_for_function("() => document.querySelector('.readout .hint')?.innerText.length > 0")
    hint = page.inner_text(".readout .hint")
    rows, columns = (int(x) for x in hint.split("mean of ")[1].split(" weights")[0].split(" × "))
    t, s = (int(x) for x in page.locator(".pair sub").all_inner_texts())
    t, s = t // rows * rows, s // columns * columns
    whole = record.weights(0, 0, 0, n) * record.norms[0][0]
    assert rows * columns > 1
    want = whole[t : t + rows, s : s + columns].mean()
    assert float(hint.split(": ")[1]) == pytest.approx(want, rel=1e-4)


def test_attention_times_gradient_has_rows_and_columns_in_words(show: Show) -> None:
    record = full()
    assert record.sums is not None
    page = show(record, "text?place=2&head=1")
    choose(page, "gradient")
    for side, words in (("query", "Rows:"), ("key", "Columns:")):
        page.locator(f"[data-value={side}]").click()
        says(page, words)
        want = record.sums[2][0 if side == "query" else 1][1]
        found = [float(title) for title in titles(page)]
        assert found == pytest.approx(want, rel=6e-3)
        order = np.argsort(-np.abs(want))[:8]
        shown = page.locator(".ranking .name sub").all_inner_texts()
        assert [int(x) for x in shown] == order.tolist()
    negative, positive = int(np.argmin(want)), int(np.argmax(want))
    colours = page.locator(".flow .word").evaluate_all("a => a.map(w => w.style.backgroundColor)")
    assert colours[negative] != colours[positive]


def shown(page: Any) -> list[str]:
    return page.locator(".flow .word").evaluate_all(
        "all => all.filter(w => getComputedStyle(w).visibility === 'visible').map(w => w.innerText)"
    )


def test_a_generation_is_played_step_by_step(show: Show) -> None:
    record = full()
    page = show(record, "text?place=1&head=2")
    assert page.inner_text(".player output") == "The whole text; 8 steps"
    assert len(shown(page)) == 12
    page.get_by_label("Next step").click()
    says(page, "the4 looks at")
    assert shown(page) == record.tokens[:5]
    assert page.evaluate("location.hash") == "#text?place=1&head=2&token=4&step=0"
    assert numbers(page)[:5] == pytest.approx(record.rows(1, 2, 4)[:5], abs=6e-4)
    page.keyboard.press(".")
    page.keyboard.press(".")
    says(page, f"{record.tokens[6]}6 looks at")
    assert shown(page) == record.tokens[:7]
    page.keyboard.press(",")
    says(page, f"{record.tokens[5]}5 looks at")
    assert "Step 2 of 8" in page.inner_text(".player output")
    page.reload()
    says(page, f"{record.tokens[5]}5 looks at")
    assert shown(page) == record.tokens[:6]


def test_a_generation_plays_by_itself_to_its_end(show: Show) -> None:
    record = full()
    record.ends = [8, 9, 10, 11]
    page = show(record, "text?place=0&head=layer&step=1")
    says(page, f"{record.tokens[9]}9 looks at")
    page.get_by_label("Play").focus()
    page.keyboard.press("Enter")
    assert page.get_by_label("Pause").count() == 1
    says(page, f"{record.tokens[11]}11 looks at")
    assert page.get_by_label("Play").count() == 1 and len(shown(page)) == 12


@pytest.mark.parametrize("line", ["text?step=99", "text?step=-7", "text?by=nonsense&step=x"])
def test_a_bad_link_to_a_step_or_measure_shows_the_page(show: Show, line: str) -> None:
    page = show(full(), line)
    page.wait_for_selector(".ranking li")
    assert page.locator(".message.error").count() == 0


@pytest.mark.parametrize("width", [390, 1440])
def test_the_controls_fit_the_window(show: Show, width: int) -> None:
    page = show(full(), "text?place=1&head=2&step=3")
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_selector(".candidates li")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator(".player").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_the_page_has_its_budget_in_mind(tmp_path: Path) -> None:
    path = write_page(tmp_path / "page.html", full(), budget=90_000)
    assert path.stat().st_size < 90_000 + 220_000
