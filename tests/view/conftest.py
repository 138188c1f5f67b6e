"""A real browser for the pages: Debian's Chromium, driven by Playwright, with nothing downloaded.

The headless shell draws the same pages as the whole browser, which opens a window with tabs and
buttons for every test and takes more than twice the CPU time; that one is driven where it is alone.

Every page that a test opens is watched: an uncaught error, an error on the console, a blocked
script or style, or a request that leaves this machine fails the test, unless it expects it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from view_fakes import FakeRecord

from regard.view import write_page

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium-headless-shell")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root there is no sandbox to enter; the pages are our own.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Watched:
    """A page, and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", self._hear)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", self._dialog)

    def _hear(self, message: Any) -> None:
        # Tests read pixels back; the page itself never does.
        if message.type in ("error", "warning") and "willReadFrequently" not in message.text:
            self.problems.append(f"console: {message.text}")

    def _dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def left_the_machine(self) -> list[str]:
        return [
            u for u in self.requests if not re.match(r"(file|data|blob):|http://127\.0\.0\.1:", u)
        ]


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 800},
        device_scale_factor=2,
        color_scheme="light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(30_000)
    seen = Watched(context.new_page())
    yield seen
    context.close()
    assert seen.problems == []
    assert seen.left_the_machine() == []


@pytest.fixture
def page(watched: Watched) -> Any:
    return watched.page


@pytest.fixture
def show(page: Any, tmp_path: Path) -> Callable[..., Any]:
    """Write a record's page to a file and open it over file://, at a line of state.

    Unless said otherwise at the overview, or for two records where such a page opens by itself.
    """

    def open_it(record: FakeRecord, line: str | None = None, **options: Any) -> Any:
        if line is None:
            line = "" if "other" in options else "overview"
        path = write_page(tmp_path / "page.html", record, **options)
        page.goto("about:blank")
        page.goto(path.as_uri() + (f"#{line}" if line else ""))
        page.wait_for_selector(".regard .main > *")
        return page

    return open_it
