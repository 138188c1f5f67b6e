"""The server's page in a real browser: long records down to single weights, and refusals."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.view import Server


def long_record(n: int) -> view_fakes.FakeRecord:
    """A record that answers as quickly as a real one: means of its cells in closed form."""
    return view_fakes.ramp(n)


def ready(page: Any) -> None:
    page.wait_for_function("() => document.querySelector('.map canvas')?.dataset.ready === 'yes'")


def test_every_page_opens_from_the_server(page: Any) -> None:
    with Server(view_fakes.translator()) as server:
        page.goto(server.url + "#overview")
        page.wait_for_function(
            "() => document.querySelectorAll('.card[data-ready=yes]').length > 5"
        )
        for key, name in (("3", "head"), ("4", "text"), ("5", "align")):
            page.keyboard.press(key)
            page.wait_for_selector(f".page.{name}")
        page.wait_for_selector(".lines path")
        page.keyboard.press("4")
        page.locator(".flow .word").nth(2).click()
        page.wait_for_selector(".ranking li")
        page.goto("about:blank")


def test_two_records_are_compared_from_the_server(page: Any) -> None:
    with Server(view_fakes.decoder(), view_fakes.decoder(strength=0.5)) as server:
        page.goto(server.url)
        page.wait_for_selector("figure:nth-of-type(3)")
        page.goto("about:blank")  # a page that still asks would complain of the server's end


def test_sixteen_thousand_tokens_are_zoomed_down_to_single_weights(watched: Any) -> None:
    n = 16_384
    record = long_record(n)
    page = watched.page
    with Server(record) as server:
        page.goto(server.url + "#head?place=0&head=1")
        ready(page)
        tiles = [url for url in watched.requests if "/data/map/" in url]
        assert tiles
        levels = {tuple(url.split("/data/map/")[1].split("/")[3:5]) for url in tiles}
        assert levels == {("7", "7"), ("4", "4")}, "the whole first, then one cell a pixel"
        assert len(tiles) <= 12, "what a causal rule hides is not asked for"
        page.mouse.move(500, 500)
        page.wait_for_function(
            "() => /^[0-9.e-]+$/.test(document.querySelector('.weight')?.innerText ?? '')"
        )
        assert "16 × 16 weights" in page.inner_text(".readout .hint")
        t, s = (int(part) for part in page.locator(".pair sub").all_inner_texts())
        told = float(page.inner_text(".weight"))
        assert told == pytest.approx(record.weight(0, 1, t, s), rel=1e-5)
        page.evaluate("() => { location.hash = '#head?place=0&head=1&at=9000.5,8000.5,100000'; }")
        page.wait_for_function("() => /at=9000/.test(location.hash)")
        ready(page)
        page.mouse.move(500, 420)
        page.wait_for_function(
            "() => /^[0-9.e-]+$/.test(document.querySelector('.weight')?.innerText ?? '')"
        )
        t, s = (int(part) for part in page.locator(".pair sub").all_inner_texts())
        assert abs(t - 9000) < 20 and abs(s - 8000) < 20
        assert float(page.inner_text(".weight")) == pytest.approx(
            record.weight(0, 1, t, s), rel=1e-5
        )
        assert page.inner_text(".readout .hint") == ""
        page.goto("about:blank")


def test_zooming_by_wheel_goes_through_every_level(watched: Any) -> None:
    n = 16_384
    page = watched.page
    with Server(long_record(n)) as server:
        page.goto(server.url + "#head?place=0&head=0")
        ready(page)
        page.mouse.move(500, 600)
        for _ in range(14):
            page.mouse.wheel(0, -300)
            page.wait_for_timeout(60)
        ready(page)
        asked = {
            int(url.split("/data/map/")[1].split("/")[3])
            for url in watched.requests
            if "/data/map/" in url
        }
        assert {0, 1, 2, 3, 4} <= asked
        page.goto("about:blank")


def test_a_long_text_is_shown_in_windows(page: Any) -> None:
    record = long_record(16_384)
    with Server(record) as server:
        started = time.monotonic()
        page.goto(server.url + "#text?place=0&head=1&token=9001")
        page.wait_for_selector(".flow [aria-selected=true]")
        assert page.inner_text(".flow [aria-selected=true]") == "w9001"
        page.wait_for_selector(".ranking li")
        assert time.monotonic() - started < 6
        best = int(np.argmax(record.rows(0, 1, 9001)))
        assert page.locator(".ranking bdi").first.inner_text() == f"w{best}"
        page.locator(".pager button", has_text="Later").click()
        assert page.locator(".word").first.inner_text() == "w10000"
        assert page.locator(".word").count() == 2000
        page.goto("about:blank")


def test_an_answer_that_fails_is_told_and_the_next_head_is_drawn(watched: Any) -> None:
    record = view_fakes.decoder(layers=1, n_heads=3)
    honest = record.map

    def failing(place: int, head: int, window: Any, size: Any) -> Any:
        if head == 1:
            raise ValueError("this head is <b>broken</b>")
        return honest(place, head, window, size)

    page = watched.page
    with Server(record) as server:
        record.map = failing  # type: ignore[method-assign]
        page.goto(server.url + "#head?place=0&head=1")
        page.wait_for_selector(".trouble .message.error")
        assert page.inner_text(".trouble") == "this head is <b>broken</b>"
        page.keyboard.press("]")
        ready(page)
        assert page.locator(".message.error").count() == 0
    watched.problems[:] = [p for p in watched.problems if "400" not in p]


def test_a_server_that_is_gone_is_told(watched: Any) -> None:
    page = watched.page
    with Server(view_fakes.decoder(layers=1, n_heads=3)) as server:
        page.goto(server.url + "#head?place=0&head=0")
        ready(page)
    page.keyboard.press("]")
    page.wait_for_selector(".trouble .message.error")
    told = page.inner_text(".trouble")
    assert "was stopped" in told and "Run the command again" in told
    watched.problems[:] = [p for p in watched.problems if "ERR_CONNECTION" not in p]


def test_another_page_can_neither_read_nor_frame_it(watched: Any) -> None:
    """From a page of another origin: fetch is refused, an iframe stays empty."""
    page = watched.page
    with Server(view_fakes.decoder()) as server, Server(view_fakes.decoder()) as stranger:
        page.route(
            f"{stranger.url}stranger",
            lambda route: route.fulfill(content_type="text/html", body="<p>stranger</p>"),
        )
        page.goto(f"{stranger.url}stranger")
        got = page.evaluate(
            "url => fetch(url).then(r => r.text()).catch(e => 'refused')", f"{server.url}manifest"
        )
        assert got == "refused"
        blind = page.evaluate(
            "url => fetch(url, {mode: 'no-cors'}).then(r => r.type).catch(e => 'refused')",
            f"{server.url}manifest",
        )
        assert blind == "refused"
        page.set_content(f'<iframe src="{server.url}"></iframe>')
        page.wait_for_timeout(400)
        assert page.frames[1].evaluate("() => document.querySelector('.regard')") is None
    watched.problems.clear()
