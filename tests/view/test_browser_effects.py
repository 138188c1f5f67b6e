"""What heads are worth, beside what they look at: every number on the page is that of `effect`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

import regard
from regard.lens.head_effects import Effect

Show = Callable[..., Any]
TEXT = "The animal didn't cross the street because it was too"
HOSTILE = " </script><b>x"


def make_record(layers: int = 3, n_heads: int = 4) -> view_fakes.FakeRecord:
    """Head 2 of the last layer matters most, and one look of it is worth a little less."""
    record = view_fakes.decoder(layers=layers, n_heads=n_heads)
    heads = np.random.default_rng(3).normal(size=(layers, n_heads)) * 0.1
    heads[0, 0], heads[0, 1], heads[-1, 2] = 0.0, 2e-5, -1.7
    off = Effect(heads, heads.sum(1), -9.5, float(np.log(0.773)), " Paris", "switching off a head")
    look = heads * 0.9
    said = "forbidding it → animal in a head", record.text, ((7,), (1,))
    record.worth = [off, Effect(look, look.sum(1), -3.25, off.log_prob, HOSTILE, *said)]
    return record


def number(text: str) -> float:
    """The change that a text begins its numbers with, or ends with."""
    found = re.findall(r"[−+]\d+\.\d+|≈0|\b0\b", text)
    return 0.0 if found[0] in ("≈0", "0") else float(found[0].replace("−", "-"))


def changes(page: Any, attribute: str = "title") -> np.ndarray:
    said = page.locator("a.change-cell").evaluate_all(
        f"all => all.map(c => c.getAttribute('{attribute}').split(': ')[1])"
    )
    return np.array([number(each) for each in said])


def test_a_real_record_shows_the_numbers_of_effect(show: Show) -> None:
    model = regard.load("embedded:lm")
    found = regard.effect(model, TEXT)
    page = show(regard.look(TEXT, model, effect=True, edges=("it", "animal")))
    page.wait_for_selector("a.change-cell")
    assert changes(page) == pytest.approx(found.heads.reshape(-1), abs=6e-4)
    layer, head, most = found.top(1)[0]
    before, after = np.exp(found.log_prob), np.exp(found.log_prob + most)
    page.goto(page.url.split("#")[0] + f"#head?place={layer}&head={head}&token=8&mate=1")
    page.wait_for_selector(".worth li")
    said = page.locator(".worth li").all_inner_texts()
    assert said[0].startswith("Switching off this head: “⁨late⁩” ")
    assert number(said[0]) == pytest.approx(most, abs=6e-4)
    assert f"({before:.1%} → {after:.2%})" in said[0]
    look = regard.effect(model, TEXT, edges=("it", "animal"))
    assert number(said[1]) == pytest.approx(look.heads[layer, head], abs=6e-4)
    page.wait_for_function("() => document.querySelector('.look')?.innerText.includes('→')")
    assert number(page.inner_text(".look")) == pytest.approx(look.heads[layer, head], abs=6e-4)


def test_each_head_has_a_cell_beside_its_map_with_sign_number_and_colour(show: Show) -> None:
    record = make_record()
    page = show(record)
    page.wait_for_selector("a.change-cell")
    assert page.locator(".titles h2").all_inner_texts() == ["Looks at", "Matters"]
    assert changes(page) == pytest.approx(record.worth[0].heads.reshape(-1), abs=6e-4)
    assert changes(page, "aria-label") == pytest.approx(changes(page))
    deep = page.locator("a.change-cell[data-place='2'][data-head='2']")
    assert deep.inner_text() == "−1.70"
    colour, ink = deep.evaluate("c => [getComputedStyle(c).backgroundColor, c.style.color]")
    assert colour == "rgb(138, 59, 0)" and ink == "rgb(255, 255, 255)"
    ends = page.locator(".legend.changes .ends span").all_inner_texts()
    assert ends == ["-1.7", "0", "1.7"]
    rows = page.locator(".layer:not(.titles)").evaluate_all(
        "all => all.map(l => [...l.querySelectorAll('.thumb, .change-cell')]"
        ".map(c => c.getBoundingClientRect().top))"
    )
    assert all(np.ptp(tops) < 2 for tops in rows)
    page.keyboard.press("t")
    page.wait_for_function(
        "() => getComputedStyle(document.querySelector(\"a.change-cell[data-place='2']"
        "[data-head='2']\")).backgroundColor === 'rgb(255, 184, 119)'"
    )


def test_pointing_and_keys_read_a_head_and_nothing_moves(show: Show) -> None:
    page = show(make_record())
    page.wait_for_selector("a.change-cell")
    top = page.locator(".heads").evaluate("g => [g.offsetTop, g.offsetHeight]")
    page.locator(".card[data-place='2'][data-head='2']").hover()
    said = page.locator(".said-change")
    assert said.inner_text() == "Layer 2, head 2: −1.700 (77.3% → 14.1%)"
    assert page.locator(".pointed").count() == 2
    assert page.locator(".heads").evaluate("g => [g.offsetTop, g.offsetHeight]") == top
    page.locator("a.change-cell").first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.className").startswith("change-cell")
    assert "Layer 2, head 2: −1.700" in said.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector(".page.head")
    assert page.inner_text("h1") == "Layer 2, head 2"


def test_heads_are_sorted_by_what_they_change_and_each_card_says_it(show: Show) -> None:
    record = make_record()
    page = show(record, "overview?sort=matters")
    page.wait_for_selector(".chip")
    shown = page.locator(".card").evaluate_all(
        "all => all.map(c => [Number(c.dataset.place), Number(c.dataset.head)])"
    )
    want = [(layer, head) for layer, head, _ in record.worth[0].top(99)]
    assert [tuple(at) for at in shown] == want
    chips = page.locator(".chip").all_inner_texts()
    assert chips[0] == "matters −1.700" and "matters ≈0" in chips and "matters 0" in chips
    page.locator(".controls input[type=range]").fill("50")
    page.wait_for_function("() => document.querySelectorAll('.card').length === 1")
    assert page.inner_text(".controls output") == "0.85"


def test_a_look_has_its_number_where_it_was_measured_and_names_are_escaped(show: Show) -> None:
    record = make_record()
    page = show(record, "overview?effect=1")
    page.wait_for_selector("a.change-cell")
    assert changes(page) == pytest.approx(record.worth[1].heads.reshape(-1), abs=6e-4)
    assert "</script><b>x" in page.inner_text(".sayings") and page.locator("b b").count() == 0
    page.goto(page.url.split("#")[0] + "#head?place=2&head=2&token=7&mate=1")
    page.wait_for_function("() => document.querySelector('.look')?.innerText.includes('−1.530')")
    assert page.inner_text(".look").startswith("Without this look “⁨</script><b>x⁩” −1.530")
    height = page.locator(".readout").bounding_box()["height"]
    page.locator(".map canvas").focus()
    for there, back in (("ArrowDown", "ArrowUp"), ("ArrowRight", "ArrowLeft")):
        page.keyboard.press(there)
        page.wait_for_function("() => document.querySelector('.look')?.innerText === ''")
        page.keyboard.press(back)
        page.wait_for_function("() => document.querySelector('.look')?.innerText !== ''")
    page.keyboard.press("ArrowRight")
    assert page.locator(".readout").bounding_box()["height"] == height
    page.locator("select[data-focus=Head]").select_option("layer")
    page.wait_for_function(
        "() => document.querySelector('.worth li')?.innerText.includes('all heads of this layer')"
    )
    told = number(page.locator(".worth li").first.inner_text())
    assert told == pytest.approx(record.worth[0].layers[2], abs=6e-4)
    page.goto(page.url.split("#")[0] + "#text?place=2&head=all&token=7")
    page.wait_for_selector(".page.text .worth li")
    assert "Switching off all heads: “⁨Paris⁩” −9.500" in page.inner_text(".worth")


@pytest.mark.parametrize("layers", [3, 30])
def test_on_a_phone_both_heats_have_the_width_of_the_window(show: Show, layers: int) -> None:
    page = show(make_record(layers, 7))
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector("a.change-cell")
    edges = page.locator("a.change-cell").evaluate_all(
        "all => all.map(c => c.getBoundingClientRect().right)"
    )
    assert max(edges) <= 390 and page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_record_without_effects_has_no_second_heat(show: Show) -> None:
    page = show(view_fakes.decoder(layers=2), "overview?sort=matters&effect=3")
    page.wait_for_selector(".card[data-ready=yes]")
    assert page.locator(".two, .titles, .change-cell, .matters-controls, .chip").count() == 0
    assert "matters" not in page.inner_text(".controls")
    assert page.evaluate("location.hash") == "#overview?sort=matters&effect=3"
    for line in ("head?place=0&head=0", "text?place=0&head=0"):
        page.goto(page.url.split("#")[0] + f"#{line}")
        page.wait_for_selector(f".page.{line.split('?')[0]}")
        assert page.locator(".worth, .look").count() == 0
