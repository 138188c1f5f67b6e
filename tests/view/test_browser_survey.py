"""The page of a survey in a browser: sorted by any score, each number that of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.lens.head_table import SURVEYED, HeadTable
from regard.view import heads_page, write_heads


def show(page: Any, folder: Path, table: HeadTable, line: str = "") -> Any:
    page.goto("about:blank")
    page.goto(write_heads(folder / "heads.html", table).as_uri() + line)
    page.wait_for_selector(".table-frame tbody tr")
    return page


def rows(page: Any) -> list[int]:
    return page.locator("tbody tr").evaluate_all("all => all.map(r => Number(r.dataset.at))")


def first_is(page: Any, at: int) -> None:
    page.wait_for_function(
        "at => Number(document.querySelector('tbody tr')?.dataset.at) === at", arg=int(at)
    )


def test_every_number_stands_in_the_table_and_a_click_sorts_by_it(
    page: Any, tmp_path: Path
) -> None:
    table = view_fakes.surveyed(layers=3, n_heads=5)
    show(page, tmp_path, table)
    cells = page.locator("tbody td").evaluate_all("all => all.map(c => c.innerText)")
    shown = np.array(cells).reshape(15, -1)
    order = np.argsort(-table.means[:, 0])
    assert rows(page) == order.tolist()
    for n, at in enumerate(order):
        for k in range(len(SURVEYED)):
            mean, std = table.means[at, k], table.stds[at, k]
            assert shown[n, k] == ("–" if np.isnan(mean) else f"{mean:.2f} ±{std:.2f}")
    k = SURVEYED.index("induction")
    down = np.argsort(-table.means[:, k])  # NaN comes last
    page.locator("th button", has_text="induction").click()
    first_is(page, down[0])
    assert rows(page) == down.tolist() and rows(page)[-1] == 1
    assert page.evaluate("location.hash") == "#induction"
    page.locator("th button", has_text="induction").click()
    first_is(page, down[-2])
    assert rows(page) == [*down[:-1][::-1].tolist(), 1]
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("induction")
    page.go_back()
    first_is(page, down[0])
    page.locator("select").select_option(label="local: distance in tokens")
    first_is(page, np.argmin(table.means[:, SURVEYED.index("local")]))


def test_the_heat_has_the_numbers_of_its_score_to_read_by_pointer_and_keys(
    page: Any, tmp_path: Path
) -> None:
    table = view_fakes.surveyed(layers=3, n_heads=5)
    show(page, tmp_path, table, "#links")
    said = page.locator(".said-change")

    def told(at: int) -> str:
        k, head = SURVEYED.index("links"), table.heads[at]
        numbers = f"{table.means[at, k]:.3f} ± {table.stds[at, k]:.3f}, in 11 texts"
        return f"{head.layer}.{head.head} words, beyond habit: {numbers}"

    page.locator(".cell[data-at='7']").hover()
    assert said.inner_text() == told(7)
    page.locator(".cell[data-at='7']").click()
    assert page.locator("tr.pointed").get_attribute("data-at") == "7"
    page.locator(".cell").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert said.inner_text() == told(6)
    means = table.means[:, SURVEYED.index("links")]
    dark = page.locator(f".cell[data-at='{means.argmax()}']")
    assert dark.evaluate("c => getComputedStyle(c).backgroundColor") == "rgb(17, 28, 56)"
    page.keyboard.press("t")
    page.wait_for_function("() => document.querySelector('.regard')?.dataset.theme === 'dark'")
    assert dark.evaluate("c => getComputedStyle(c).backgroundColor") == "rgb(251, 246, 207)"
    shown = page.locator(".cell.missing").count()
    page.locator("select").select_option(label="induction: what came after the same token")
    page.wait_for_selector(".cell.missing")
    assert shown == 0 and page.locator(".cell.missing").get_attribute("data-at") == "1"


def test_many_heads_are_shown_when_asked_for_and_a_phone_has_its_width(
    page: Any, tmp_path: Path
) -> None:
    table = view_fakes.surveyed(layers=20, n_heads=16, model="<img src=x onerror=alert(1)>")
    page.set_viewport_size({"width": 390, "height": 844})
    show(page, tmp_path, table)
    assert page.inner_text(".facts").startswith("<img src=x onerror=alert(1)> · 320 heads · 20 ")
    assert len(rows(page)) == 300
    page.get_by_role("button", name="Show 20 more heads").click()
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 320")
    # The button is gone; the first of the rows that came has the focus.
    assert page.evaluate("document.activeElement === document.querySelectorAll('tbody tr')[300]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_what_is_no_table_says_so(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = heads_page._tell
    monkeypatch.setattr(heads_page, "_tell", lambda table: {**whole(table), "heads": [{}]})
    page.goto(write_heads(tmp_path / "x.html", view_fakes.surveyed()).as_uri())
    page.wait_for_selector(".message.error")
    assert "cannot be shown" in page.inner_text(".message.error")
