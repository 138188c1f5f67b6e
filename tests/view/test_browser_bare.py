"""Weights without sinks: special tokens and the first left out, the others made to add up to 1."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.view import Server

Show = Callable[..., Any]
TOKENS = ["[CLS]", "The", "cat", "sat", "on", "the", "mat", "[SEP]"]
LEFT_OUT = [0, 7]


def encoder() -> view_fakes.FakeRecord:
    record = view_fakes.decoder(list(TOKENS), layers=2, n_heads=3)
    n = len(TOKENS)
    record.places = [
        view_fakes.make_place(f"layers.{at}.attn", at, "self", 3, n, n, False) for at in range(2)
    ]
    words = " ".join(TOKENS[1:-1])
    starts = np.cumsum([0, *(len(word) + 1 for word in TOKENS[1:-2])]).tolist()
    inner = [(a, a + len(word)) for a, word in zip(starts, TOKENS[1:-1], strict=True)]
    record.text, record.spans = words, [(0, 0), *inner, (0, 0)]
    return record


def without(weights: np.ndarray, keys: list[int]) -> np.ndarray:
    """The plain formula: those columns 0, every row divided by what is left."""
    kept = weights.astype(np.float64).copy()
    kept[:, keys] = 0
    left = kept.sum(1, keepdims=True)
    return np.divide(kept, left, out=np.zeros_like(kept), where=left > 0)


def ready(page: Any) -> None:
    page.wait_for_function("() => document.querySelector('.map canvas')?.dataset.ready === 'yes'")


def test_the_choice_is_said_on_every_page_and_kept_in_the_link(show: Show) -> None:
    page = show(encoder(), "start")
    page.get_by_text("Without sinks").click()
    for key, name in zip("12345", ("start", "overview", "head", "text", "align"), strict=True):
        page.keyboard.press(key)
        page.wait_for_selector(f".page.{name}")
        note = page.inner_text(".sinks [role=note]")
        assert "[CLS]" in note and "[SEP]" in note and "add up to 1" in note
        assert "without=sinks" in page.evaluate("location.hash")
    page.get_by_text("All keys").click()
    assert page.locator(".sinks [role=note]").count() == 0


@pytest.mark.parametrize("head", ["1", "layer", "all"])
def test_every_number_is_that_of_the_plain_formula(show: Show, head: str) -> None:
    """A row, a column, what is received, and a single weight; of a head, a layer, and all."""
    record = encoder()
    heads = {"1": [(1, 1)], "layer": [(1, h) for h in range(3)]}
    heads["all"] = [(p, h) for p in range(2) for h in range(3)]
    want = np.mean([without(record.weights(p, h, 0, 8), LEFT_OUT) for p, h in heads[head]], axis=0)

    def shares(line: str) -> list[float]:
        page = show(record, f"text?place=1&head={head}&without=sinks{line}")
        page.wait_for_selector(".ranking li")
        titles = page.locator(".word").evaluate_all("all => all.map(w => w.title)")
        found = [re.findall(r"(<?)([\d.]+)%", title) for title in titles]
        return [float(each[0][1]) for each in found]

    assert shares("&token=3") == pytest.approx((100 * want[3]).tolist(), abs=0.051)
    assert shares("&token=3&side=key") == pytest.approx((100 * want[:, 3]).tolist(), abs=0.051)
    assert shares("") == pytest.approx((100 * want.mean(0)).tolist(), abs=0.051)
    page = show(record, f"head?place=1&head={head}&token=4&mate=2&without=sinks")
    ready(page)
    page.wait_for_function(
        "() => /^[0-9.e-]+$/.test(document.querySelector('.weight')?.innerText ?? '')"
    )
    assert float(page.inner_text(".weight")) == pytest.approx(want[4, 2], rel=1e-4)
    assert page.inner_text(".times") == ""


def test_the_first_token_is_left_out_too_and_its_own_query_gives_nothing(show: Show) -> None:
    record = view_fakes.decoder(layers=1, n_heads=2)  # causal: the first sees itself alone
    want = without(record.weights(0, 1, 0, 12), [0])
    for token in (0, 5):
        page = show(
            record, f"head?place=0&head=1&token={token}&mate={max(0, token - 1)}&without=sinks"
        )
        ready(page)
        assert "the first token" in page.inner_text(".sinks [role=note]")
        page.wait_for_function(
            "() => /^[0-9.e-]+$/.test(document.querySelector('.weight')?.innerText ?? '')"
        )
        told = float(page.inner_text(".weight"))
        assert told == pytest.approx(want[token, max(0, token - 1)], rel=1e-4)


def test_a_map_of_several_tiles_is_renormalised_whole(show: Show) -> None:
    record = view_fakes.decoder([f"w{n}" for n in range(301)], layers=1, n_heads=2)
    page = show(record, "head?place=0&head=1&token=290&mate=270&without=sinks")
    ready(page)
    page.wait_for_function(
        "() => /^[0-9.e-]+$/.test(document.querySelector('.weight')?.innerText ?? '')"
    )
    want = without(record.weights(0, 1, 0, 301), [0])
    assert float(page.inner_text(".weight")) == pytest.approx(want[290, 270], rel=1e-4)


def test_what_cannot_be_renormalised_is_said_and_not_guessed(show: Show, page: Any) -> None:
    """Of a head whose largest weights alone are in the file; and a map of very many weights."""
    record = view_fakes.decoder([f"w{n}" for n in range(301)], layers=2, n_heads=4)
    shown = show(record, "text?place=1&head=3&token=250&without=sinks", budget=50_000)
    shown.wait_for_selector(".trouble .message")
    assert "regard view" in shown.inner_text(".trouble")
    with Server(view_fakes.ramp(2003)) as server:  # type: ignore[arg-type]
        page.goto(server.url + "#head?place=0&head=0&without=sinks")
        page.wait_for_selector(".trouble .message")
        assert "too many" in page.inner_text(".trouble")
        page.goto(server.url + "#text?place=0&head=0&token=1999&without=sinks")
        page.wait_for_selector(".ranking li")
        row = view_fakes.ramp(2003).rows(0, 0, 1999)[None]
        best = 100 * without(row, [0]).max()
        told = page.locator(".ranking .value").first.inner_text()
        assert float(told.rstrip("%")) == pytest.approx(best, abs=0.0051)
        page.goto("about:blank")
