"""The notebook's widget: what travels with it, what the kernel answers, and JupyterLab itself."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.view import Server, make_widget

ROOT = Path(__file__).resolve().parents[2]


def ask(widget: Any, content: Any) -> list[tuple[Any, Any]]:
    """What the widget sends back for one message from the page."""
    sent: list[tuple[Any, Any]] = []
    widget.send = lambda answer, buffers=None: sent.append((answer, buffers))
    widget._handle_custom_msg(content, [])
    return sent


def test_the_kernel_answers_with_the_numbers_of_the_record() -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    [(answer, [buffer])] = ask(make_widget(record), {"id": 7, "question": "row/0/1/2/5"})
    assert answer == {"id": 7}
    np.testing.assert_array_equal(np.frombuffer(buffer, "<f4"), record.rows(1, 2, 5))


def test_a_question_without_an_answer_is_told() -> None:
    widget = make_widget(view_fakes.decoder(layers=1, n_heads=1))
    [(answer, buffers)] = ask(widget, {"id": 8, "question": "row/0/0/0/99"})
    assert answer["id"] == 8 and "out of range" in answer["error"]
    assert buffers is None


@pytest.mark.parametrize("content", [None, [], "row/0/0/0/1", {"id": 1}, {"question": 5}])
def test_a_message_that_is_no_question_is_left_alone(content: Any) -> None:
    assert ask(make_widget(view_fakes.decoder(layers=1, n_heads=1)), content) == []


def test_a_small_record_travels_with_the_notebook_and_a_long_one_in_part() -> None:
    parts = json.loads(make_widget(view_fakes.decoder(layers=1, n_heads=2)).manifest)["parts"]
    assert {"whole/0/0/0", "whole/0/0/1"} <= set(parts)
    long = json.loads(make_widget(view_fakes.ramp(4099)).manifest)["parts"]
    assert not [name for name in long if name.startswith("whole/")]
    assert [name for name in long if name.startswith("map/")]


def test_what_was_recorded_beside_weights_travels_and_is_answered() -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    n = len(record.tokens)
    record.norms = [np.full((3, n), 2.5, np.float32)] * 2
    data = json.loads(make_widget(record).manifest)
    assert {"norms/0/1/2", "whole_rollout/0"} <= set(data["parts"])
    assert data["records"][0]["rollout"] == [0, 1] and data["records"][0]["places"][1]["values"]
    small = make_widget(record, budget=0)
    assert not json.loads(small.manifest)["parts"]
    [(_, [rolled])] = ask(small, {"id": 1, "question": "rollout/0/5"})
    want = record.rollout()[5].astype("<f4")
    np.testing.assert_array_equal(np.frombuffer(rolled, "<f4"), want)
    [(_, [norms])] = ask(small, {"id": 2, "question": "norms/0/1/layer"})
    np.testing.assert_array_equal(np.frombuffer(norms, "<f4"), np.full(n, 2.5, "<f4"))


def test_the_line_opens_a_view() -> None:
    widget = make_widget(view_fakes.decoder(), line="text?token=3")
    assert widget.line == "text?token=3"
    assert widget.get_state()["line"] == "text?token=3"


def test_where_widgets_do_not_run_the_text_is_named_and_harmless() -> None:
    record = view_fakes.decoder(["Ein", "\x1b[2J\u202e"], layers=1, n_heads=1)
    assert repr(make_widget(record)) == r"'Ein \x1b[2J\u202e · regard' (run the cell to see it)"
    assert "' and '" in repr(make_widget(record, record))


def test_a_saved_notebook_has_a_picture_and_the_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two outputs: the picture for where nothing runs, then the widget, whose style hides it."""
    import IPython
    from IPython import display

    shown: list[Any] = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: "a notebook")
    monkeypatch.setattr(display, "display", lambda bundle, raw: shown.append(bundle))
    widget = make_widget(view_fakes.decoder(["Ein", "<b>Wort"], layers=1, n_heads=2))
    bundle = widget._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data
    [still] = shown
    assert 'class="regard-still"' in still["text/html"] and "data:image/png" in still["text/html"]
    assert ".regard-still" in widget._css and "display:none" in widget._css
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    widget._repr_mimebundle_()
    assert len(shown) == 1


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


NOTEBOOK = {
    "cells": [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": "one",
            "metadata": {},
            "outputs": [],
            "source": "import view_fakes; from regard.view import make_widget\n"
            "make_widget(view_fakes.ramp(4099), line='head?place=0&head=1')",
        }
    ],
    "metadata": {"kernelspec": {"display_name": "p", "language": "python", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


def test_the_widget_in_a_real_jupyterlab(browser: Any, tmp_path: Path) -> None:
    """A cell is run, the picture appears, and single weights come from the kernel."""
    (tmp_path / "look.ipynb").write_text(json.dumps(NOTEBOOK))
    port, token = free_port(), "t" * 24
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "JUPYTER_CONFIG_DIR": str(tmp_path / "c"),
                   "JUPYTER_DATA_DIR": str(tmp_path / "d"), "HOME": str(tmp_path)}  # fmt: skip
    log = (tmp_path / "lab.log").open("w")
    options = [f"--ServerApp.port={port}", f"--IdentityProvider.token={token}", "--no-browser"]
    options += [
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        "--LabApp.news_url=",
        "--expose-app-in-browser",
    ]
    lab = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}/api?token={token}")
        page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
        page.set_default_timeout(40_000)
        page.goto(f"http://127.0.0.1:{port}/lab/tree/look.ipynb?token={token}")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
        run_cell(page)
        page.wait_for_selector(".regard .map canvas[data-ready=yes]")
        box = page.locator(".regard .map canvas").bounding_box()
        page.mouse.move(box["x"] + 260, box["y"] + 420)
        page.wait_for_function(
            "() => /^[0-9.e-]+$/.test(document.querySelector('.regard .weight')?.innerText ?? '')"
        )
        t, s = (int(part) for part in page.locator(".regard .pair sub").all_inner_texts())
        told = float(page.inner_text(".regard .weight"))
        assert told == pytest.approx(view_fakes.ramp(4099).weight(0, 1, t, s), rel=1e-5)
        page.locator(".regard .map canvas").focus()
        for key in ("1", "x", "3"):  # in a notebook: a heading, cut the cell, a smaller heading
            page.keyboard.press(key)
        page.wait_for_selector(".regard .page.head")
        assert page.locator(".jp-CodeCell").count() == 1
        assert page.locator(".jp-MarkdownCell").count() == 0
        page.locator(".regard nav a", has_text="Text").click()
        page.wait_for_selector(".regard .flow .word")
        assert page.locator(".regard-still").is_hidden()
        assert page.locator(".regard").get_attribute("data-theme") == "light"  # as the notebook's
        page.evaluate("document.body.dataset.jpThemeLight = 'false'")  # what its dark theme sets
        page.wait_for_selector(".regard[data-theme=dark]")
        page.evaluate("document.body.dataset.jpThemeLight = 'true'")
        page.wait_for_selector(".regard[data-theme=light]")
        if shots := os.environ.get("REGARD_SHOTS"):
            page.screenshot(path=f"{shots}/jupyter.png")
        look_without_a_kernel(page, tmp_path, f"http://127.0.0.1:{port}/doc/tree/saved.ipynb")
    finally:
        lab.terminate()
        try:
            lab.wait(timeout=30)
        except subprocess.TimeoutExpired:  # a kernel that is only starting holds it up
            lab.kill()
            lab.wait(timeout=30)
        log.close()
        shutil.rmtree(tmp_path / "d", ignore_errors=True)


def look_without_a_kernel(page: Any, folder: Path, address: str) -> None:
    """Save the notebook, and open a copy that nobody has run: it shows the picture."""
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Control+s")
    for _ in range(60):
        saved = json.loads((folder / "look.ipynb").read_text())
        if saved["cells"][0]["outputs"]:
            break
        page.wait_for_timeout(250)
    (folder / "saved.ipynb").write_text(json.dumps(saved))
    page.goto(address)
    page.wait_for_function(
        "() => [...document.querySelectorAll('.regard-still img')].some("
        "i => i.naturalWidth > 100 && i.getBoundingClientRect().width > 100)"
    )
    assert "Run the cell to look closer" in page.inner_text(".regard-still")


def run_cell(page: Any) -> None:
    """Lab takes keys before its kernel is there, and forgets them; so more than once if need be."""
    from playwright.sync_api import TimeoutError as TooLong

    for _ in range(6):
        if page.locator(".jp-Dialog .jp-mod-accept").count():  # such as: which kernel?
            page.locator(".jp-Dialog .jp-mod-accept").first.click()
        page.locator(".jp-Cell .cm-content").first.click()
        page.keyboard.press("Control+Enter")
        try:
            page.wait_for_selector(".regard", timeout=10_000)
        except TooLong:
            continue
        return
    raise AssertionError("the cell did not run")


def wait_for(url: str) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(url, timeout=2).read()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"nothing answers at {url}")


TWO_VIEWS = """async manifest => {
  const {default: widget} = await import('./regard.js');
  const heard = new Set(), turned = new Set();
  const model = {
    line: 'text?place=1&head=2&token=4', waiting: 0,
    get: name => name === 'manifest' ? manifest : model.line,
    set: () => {}, save_changes: () => {},
    on: (event, listen) => (event === 'msg:custom' ? heard : turned).add(listen),
    off: (event, listen) => (event === 'msg:custom' ? heard : turned).delete(listen),
    send: async ({id, question}) => {
      const reply = await fetch(`data/${question}`);
      const bytes = new DataView(await reply.arrayBuffer());
      await new Promise(done => setTimeout(done, 40));
      for (const listen of heard) listen({id}, [bytes]);
    },
  };
  const views = [document.createElement('div'), document.createElement('div')];
  document.body.replaceChildren(...views);
  widget.render({model, el: views[0]});
  await new Promise(done => setTimeout(done, 400));
  model.line = 'start?token=5&mate=3';
  for (const listen of turned) listen();
  widget.render({model, el: views[1]});
  while (document.querySelectorAll('.start[data-ready]').length < 2)
    await new Promise(done => setTimeout(done, 50));
  return views.map(view => Object.fromEntries([...view.querySelectorAll('a.cell')].map(
    cell => cell.getAttribute('aria-label').split(' '))));
}"""


def test_two_views_of_one_widget_each_hear_their_own_answers(page: Any) -> None:
    """As two cells that show it, or a view in a window of its own: one kernel answers both."""
    record = view_fakes.decoder(layers=3, n_heads=4)
    manifest = make_widget(record, budget=0).manifest
    with Server(record) as server:  # type: ignore[arg-type]
        page.goto(server.url)
        page.wait_for_selector(".start[data-ready]")
        views = page.evaluate(TWO_VIEWS, manifest)
        page.goto("about:blank")
    want = {
        f"{place}.{head}": f"{record.weight(place, head, 5, 3):.3f}"
        for place in range(3)
        for head in range(4)
    }
    assert views == [want, want]


NARROW = """async manifest => {
  const {default: widget} = await import('./regard.js');
  const model = {get: name => (name === 'manifest' ? manifest : 'start?token=5'),
    set: () => {}, save_changes: () => {}, on: () => {}, off: () => {}, send: () => {}};
  const el = document.createElement('div');
  el.style.width = '640px';
  document.body.replaceChildren(el);
  widget.render({model, el});
  while (!document.querySelector('.start[data-ready]'))
    await new Promise(done => setTimeout(done, 50));
  const end = el.getBoundingClientRect().right;
  const inside = '.tools button, .matrix .cell, .heads-ranking .value';
  const nav = el.querySelector('nav');
  return [nav.scrollWidth <= nav.clientWidth,
    ...[...el.querySelectorAll(inside)].map(e => e.getBoundingClientRect().right <= end - 24 + 8)];
}"""


def test_a_narrow_cell_in_a_wide_window_shows_all_tabs_and_the_whole_heat(page: Any) -> None:
    record = view_fakes.decoder(layers=3, n_heads=12)
    manifest = make_widget(record).manifest
    page.set_viewport_size({"width": 1440, "height": 900})
    with Server(record) as server:  # type: ignore[arg-type]
        page.goto(server.url)
        page.wait_for_selector(".start[data-ready]")
        fits = page.evaluate(NARROW, manifest)
        page.goto("about:blank")
    assert len(fits) > 40 and all(fits)
