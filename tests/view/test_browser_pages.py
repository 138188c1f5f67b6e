"""Every page in a real browser, over file://: what is drawn, by pointer and by keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import view_fakes

Show = Callable[..., Any]


def ready(page: Any, count: int = 1) -> None:
    """All tiles of all maps have come."""
    page.wait_for_function(
        "n => { const all = [...document.querySelectorAll('.map canvas')];"
        " return all.length >= n && all.every(c => c.dataset.ready === 'yes'); }",
        arg=count,
    )


def pixel(page: Any, x: float, y: float) -> list[int]:
    """The colour of the map's canvas at a point of the window."""
    return page.evaluate(
        """([x, y]) => { const c = document.querySelector('.map canvas');
        const b = c.getBoundingClientRect(), s = c.width / b.width;
        return [...c.getContext('2d').getImageData((x - b.left) * s, (y - b.top) * s, 1, 1).data];
        }""",
        [x, y],
    )


def hash_of(page: Any) -> str:
    return page.evaluate("location.hash")


def point_at(page: Any, t: int, s: int) -> tuple[float, float]:
    """Move the pointer, step by step as its readout tells, onto a pair; where it is."""
    x, y = 450.0, 420.0
    for _ in range(60):
        page.mouse.move(x, y)
        here = [int(part) for part in page.locator(".pair sub").all_inner_texts()]
        if here == [t, s]:
            return x, y
        x += 24 * np.sign(s - here[1])
        y += 24 * np.sign(t - here[0])
    raise AssertionError(f"no cell for {t} → {s}")


def test_the_overview_draws_every_head(show: Show) -> None:
    page = show(view_fakes.decoder(layers=3, n_heads=5))
    page.wait_for_function("() => document.querySelectorAll('.card[data-ready=yes]').length === 15")
    assert page.locator(".layer").count() == 3
    assert page.title().startswith("The animal didn't cross")
    names = page.locator(".card").evaluate_all("all => all.map(a => a.getAttribute('aria-label'))")
    assert names[0] == "Layer 0, head 0: previous 0.55"
    colours = page.locator(".card canvas").first.evaluate(
        "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height)"
        ".data.buffer)).size"
    )
    assert colours > 10


def test_the_overview_sorts_and_filters_by_what_heads_do(show: Show) -> None:
    record = view_fakes.decoder(layers=3, n_heads=5)
    page = show(record)
    page.select_option(".controls select", "first")
    assert hash_of(page) == "#overview?sort=first"
    shown = page.locator(".card").evaluate_all(
        "all => all.map(a => [+a.dataset.place, +a.dataset.head])"
    )
    values = [record.heads()["first"][place, head] for place, head in shown]
    assert values == sorted(values, reverse=True)
    assert len(shown) == 15
    page.locator(".controls input").fill("50")
    kept = page.locator(".card").count()
    assert kept == sum(value >= 0.5 for value in values) > 0
    assert hash_of(page) == "#overview?sort=first&least=50"
    page.locator(".controls input").fill("100")
    assert "No head reaches that" in page.inner_text(".heads")


def test_the_overview_by_keyboard(show: Show) -> None:
    page = show(view_fakes.decoder(layers=3, n_heads=5))
    page.locator(".card").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
        "Layer 1, head 1"
    )
    assert page.locator(".card[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    assert hash_of(page) == "#head?place=1&head=1"
    page.go_back()
    page.wait_for_selector(".overview")


def test_the_map_tells_the_exact_weight_under_the_pointer(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=6)
    page = show(record, "head?place=1&head=5")
    ready(page)
    x, y = point_at(page, 5, 3)
    assert page.inner_text(".pair") == "street5 looks at cross3"
    told = page.inner_text(".weight")
    assert float(told) == pytest.approx(record.weight(1, 5, 5, 3), rel=1e-5)
    dark = pixel(page, x + 8, y + 8)
    x, y = point_at(page, 5, 10)
    assert page.inner_text(".weight") == "0"
    light = pixel(page, x + 8, y + 8)
    assert sum(dark[:3]) < sum(light[:3]) - 20


def test_the_map_by_keyboard_and_its_words_for_screen_readers(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=6)
    page = show(record, "head?place=1&head=5")
    ready(page)
    canvas = page.locator(".map canvas")
    assert canvas.get_attribute("role") == "application"
    assert "12 queries from top to bottom" in canvas.get_attribute("aria-label")
    canvas.focus()
    for _ in range(12):
        page.keyboard.press("ArrowUp")
    for _ in range(12):
        page.keyboard.press("ArrowLeft")
    assert page.inner_text(".pair") == "The0 looks at The0"
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text(".pair") == "didn't2 looks at animal1"
    assert float(page.inner_text(".weight")) == pytest.approx(record.weight(1, 5, 2, 1), rel=1e-5)
    live = page.inner_text("[aria-live]")
    assert "looks at" in live and "animal" in live and "%" in live
    page.keyboard.press("+")
    zoomed = float(hash_of(page).split("at=")[1].split(",")[2])
    assert zoomed > 1.2
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("0")
    assert hash_of(page).endswith(",1")
    page.keyboard.press("[")
    assert hash_of(page).startswith("#head?place=1&head=4")
    page.keyboard.press("]")
    page.keyboard.press("{")
    assert hash_of(page).startswith("#head?place=0&head=5")
    assert page.evaluate("document.activeElement.tagName") == "CANVAS"


def test_wheel_drag_and_double_click_move_the_map(show: Show) -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(97)], layers=1, n_heads=2)
    page = show(record, "head?place=0&head=1")
    ready(page)
    page.mouse.move(500, 450)
    before = page.inner_text(".pair")
    page.mouse.wheel(0, -600)
    page.wait_for_function("() => /at=/.test(location.hash)")
    assert page.inner_text(".pair") == before, "what is under the pointer stays there"
    first = hash_of(page)
    page.mouse.down()
    page.mouse.move(420, 400, steps=4)
    page.mouse.up()
    assert hash_of(page) != first
    page.mouse.dblclick(500, 450)
    page.wait_for_function("() => /,1$/.test(location.hash)")


def test_two_fingers_pinch(browser: Any, tmp_path: Any) -> None:
    from regard.view import write_page

    path = write_page(tmp_path / "p.html", view_fakes.decoder([f"w{i}" for i in range(97)], 1, 1))
    context = browser.new_context(viewport={"width": 800, "height": 900}, has_touch=True)
    page = context.new_page()
    page.goto(path.as_uri() + "#head?place=0&head=0")
    ready(page)
    touch = context.new_cdp_session(page)
    for step, spread in enumerate((20, 40, 80, 160)):
        points = [{"x": 400 - spread, "y": 300}, {"x": 400 + spread, "y": 300}]
        kind = "touchMove" if step else "touchStart"
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_function("() => /at=/.test(location.hash)")
    assert float(hash_of(page).split(",")[2]) > 3
    context.close()


def test_labels_appear_when_they_fit(show: Show) -> None:
    """Far away there are positions; close up the words themselves, and then the weights."""
    record = view_fakes.decoder([f"w{i}" for i in range(700)], layers=1, n_heads=1)
    page = show(record, "head?place=0&head=0", budget=4_000_000)
    page.evaluate(
        """() => { window.said = new Set(); const plain = CanvasRenderingContext2D.prototype;
        const old = plain.fillText; plain.fillText = function (text, ...rest) {
        window.said.add(text); return old.call(this, text, ...rest); }; }"""
    )
    page.keyboard.press("3")
    ready(page)
    said = set(page.evaluate("[...window.said]"))
    assert "100" in said and not [word for word in said if word.startswith("w")]
    page.evaluate("() => { window.said.clear(); location.hash = '#head?at=350,350,1000'; }")
    page.wait_for_function("() => window.said.has('w350')")
    ready(page)
    numbers = [w for w in page.evaluate("[...window.said]") if re.fullmatch(r"\.\d\d", w)]
    assert numbers, "close up each cell shows its weight"


SPY = """() => { window.said = new Set(); const plain = CanvasRenderingContext2D.prototype;
    const old = plain.fillText; plain.fillText = function (text, ...rest) {
    window.said.add(text); return old.call(this, text, ...rest); }; }"""


def test_no_weight_is_written_as_nothing_and_the_axes_have_names(show: Show) -> None:
    record = view_fakes.decoder(["a", "b", "c"], layers=1, n_heads=1)
    whole = np.array([[1, 0, 0], [0.998, 0.002, 0], [0.5, 0, 0.5]], np.float32)
    record.map = lambda place, head, w, size: whole[w[0]:w[1], w[2]:w[3]]  # type: ignore # fmt: skip
    page = show(record, "overview")
    page.evaluate(SPY)
    page.keyboard.press("3")
    ready(page)
    said = set(page.evaluate("[...window.said]"))
    assert {"<.01", "1.00", ".50", "keys →", "queries ↓"} <= said
    assert not {".00", "-.00"} & said


def test_a_key_that_is_hidden_is_unlike_one_that_gets_nothing(show: Show) -> None:
    """Both weigh 0: key 9 comes later than query 5, key 5 does not interest query 9."""
    record = view_fakes.decoder(layers=1, n_heads=1)
    whole = np.eye(12, dtype=np.float32)[[0] * 12]
    record.map = lambda place, head, w, size: whole[w[0]:w[1], w[2]:w[3]]  # type: ignore # fmt: skip
    page = show(record, "head?place=0&head=0")
    ready(page)

    def colours(t: int, s: int) -> int:
        x, y = point_at(page, t, s)
        page.mouse.move(2, 2)
        page.wait_for_timeout(60)
        return len({tuple(pixel(page, x + at, y)) for at in range(-12, 12)})

    assert colours(9, 5) == 1
    assert colours(5, 9) > 1
    assert "Hatched" in page.inner_text(".panel")


def test_a_pixel_of_the_static_page_is_the_exact_mean_of_its_cell(show: Show) -> None:
    """The page pools whole matrices itself; its means are those of numpy."""
    n = 701
    record = view_fakes.decoder([f"w{i}" for i in range(n)], layers=1, n_heads=1)
    page = show(record, budget=4_000_000)
    page.set_viewport_size({"width": 760, "height": 560})
    page.evaluate("() => { location.hash = '#head?place=0&head=0'; }")
    ready(page)
    canvas = page.locator(".map canvas")
    canvas.focus()
    page.keyboard.press("ArrowDown")
    told = re.search(r"mean of (\d) × (\d) weights: (\S+)", page.inner_text(".readout .hint"))
    assert told and told.groups()[:2] == ("2", "2")
    t, s = (int(part) for part in page.locator(".pair sub").all_inner_texts())
    cell = record.weights(0, 0, t // 2 * 2, t // 2 * 2 + 2)[:, s // 2 * 2 : s // 2 * 2 + 2]
    assert float(told.group(3)) == pytest.approx(float(cell.mean(dtype=np.float64)), rel=1e-5)
    box = canvas.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 20)
    page.mouse.move(2, 2)
    for _ in range(20):  # the last row of cells is one query high: 701 is odd
        page.keyboard.press("ArrowDown")
    assert page.locator(".pair sub").first.inner_text() == str(n - 1)
    told = re.search(r"mean of 1 × 2 weights: (\S+)", page.inner_text(".readout .hint"))
    s = int(page.locator(".pair sub").last.inner_text()) // 2 * 2
    assert told
    last = record.weights(0, 0, n - 1, n)[0, s : s + 2]
    assert float(told.group(1)) == pytest.approx(float(last.mean(dtype=np.float64)), rel=1e-5)


def test_a_link_restores_the_view(show: Show) -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(97)], layers=2, n_heads=3)
    line = "head?place=1&head=2&at=40,30,5&colours=cividis&scale=log"
    page = show(record, line)
    ready(page)
    assert hash_of(page) == f"#{line}"
    assert page.inner_text(".panel h1") == "Layer 1, head 2"
    assert page.locator("[data-value=log]").get_attribute("aria-checked") == "true"
    page.evaluate("location.hash = '#text?place=0&head=1&token=5'")
    page.wait_for_selector(".page.text [aria-selected=true]")
    assert page.inner_text(".flow [aria-selected=true]") == "w5"
    page.go_back()
    page.wait_for_selector(".page.head")


@pytest.mark.parametrize(
    "line",
    ["nonsense", "head?place=99&head=-4&at=NaN,1e999,-3", "text?token=1e9&head=<script>",
     "overview?sort=__proto__&least=7000", "head?at=5,5,99999999", "%00%ff?&&&==="],
)  # fmt: skip
def test_a_bad_link_shows_a_page_all_the_same(show: Show, line: str) -> None:
    page = show(view_fakes.decoder(layers=1, n_heads=2), line)
    assert page.locator(".page").count() == 1
    assert page.locator(".message.error").count() == 0


def test_the_text_is_shaded_by_what_the_chosen_word_looks_at(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=6)
    page = show(record, "text?place=0&head=2")
    page.locator(".word", has_text=re.compile("^it$")).click()
    row = record.rows(0, 2, 7)
    best = int(np.argmax(row))
    page.wait_for_function(
        "() => document.querySelector('.sentence')?.textContent.includes('looks at')"
    )
    assert page.inner_text(".ranking li .name").split("\n")[0].startswith(record.tokens[best])
    told = page.locator(".word").evaluate_all("all => all.map(w => w.title)")
    assert told[best] == f"{row[best] * 100:.1f}%"
    light = page.locator(".word").evaluate_all(
        "all => all.map(w => (w.style.backgroundColor.match(/\\d+/g) || [255, 255, 255])"
        ".reduce((a, b) => a + +b, 0))"
    )
    assert light[best] == min(light)
    order = np.argsort(-row, kind="stable")
    assert [light[i] for i in order] == sorted(light)
    assert hash_of(page) == "#text?place=0&head=2&token=7"
    page.locator("[data-value=key]").click()
    column = record.column(0, 2, 7)
    expected = record.tokens[int(np.argmax(column))]
    page.wait_for_function(
        "w => document.querySelector('.ranking .name')?.textContent.startsWith(w)", arg=expected
    )


@pytest.mark.parametrize("head", ["layer", "all"])
def test_the_text_for_a_layer_and_for_all(show: Show, head: str) -> None:
    record = view_fakes.decoder(layers=3, n_heads=4)
    page = show(record, f"text?place=1&head={head}&token=9")
    page.wait_for_selector(".ranking li")
    places = range(3) if head == "all" else [1]
    mean = np.mean([record.rows(p, h, 9) for p in places for h in range(4)], axis=0)
    best = int(np.argmax(mean))
    first = page.locator(".ranking li").first
    assert first.locator("bdi").inner_text() == record.tokens[best]
    shown = float(first.locator(".value").inner_text().rstrip("%"))
    assert shown == pytest.approx(mean[best] * 100, abs=0.06)


def test_the_text_by_keyboard(show: Show) -> None:
    page = show(view_fakes.decoder(), "text?place=0&head=0")
    page.wait_for_selector(".ranking li")
    assert "shaded by what they get, on average" in page.inner_text(".sentence")
    page.locator(".word[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert hash_of(page).endswith("token=2")
    assert page.evaluate("document.activeElement.textContent") == "didn't"
    page.wait_for_function(
        "() => document.querySelector('.unseen[aria-live]')?.textContent.includes('looks at')"
    )
    page.keyboard.press("End")
    assert hash_of(page).endswith("token=11")
    page.keyboard.press("Escape")
    assert "token" not in hash_of(page)
    page.keyboard.press("d")
    page.wait_for_selector("[data-value=key][aria-checked=true]")


def test_the_alignment_has_a_line_for_each_weight_that_matters(show: Show) -> None:
    record = view_fakes.translator()
    page = show(record)
    page.locator("nav a", has_text="Alignment").click()
    page.wait_for_selector(".lines path")
    page.evaluate("location.hash = '#align?place=3&head=1'")
    page.wait_for_function("() => document.querySelector('.field select:last-of-type') !== null")
    weights = record.weights(3, 1, 0, 10)
    page.wait_for_function(
        "n => document.querySelectorAll('.lines path').length === n",
        arg=int((weights >= 0.12).sum()),
    )
    page.locator(".words.query .word", has_text="猫").click()
    lit = page.locator(".words.key .lit").evaluate_all("all => all.map(b => b.innerText)")
    wanted = [
        f"{word}\n{weights[1, at] * 100:.{1 if weights[1, at] >= 0.1 else 2}f}%"
        for at, word in enumerate(record.source_tokens or ())
        if weights[1, at] >= 0.12
    ]
    assert [re.sub(r"\s+", " ", text) for text in lit] == [
        re.sub(r"\s+", " ", text) for text in wanted
    ]
    assert hash_of(page) == "#align?place=3&head=1&token=1"
    page.locator("input[type=range]").fill("60")
    assert page.locator(".lines path").count() == int((weights >= 0.6).sum())
    page.locator("input[type=range]").fill("12")


def test_the_alignment_by_keyboard(show: Show) -> None:
    page = show(view_fakes.translator(), "align?place=3&head=0")
    page.wait_for_selector(".lines path")
    page.locator(".words.query .word").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.innerText").startswith("猫")
    assert page.inner_text(".sentence").startswith("猫")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.innerText").startswith("The")
    assert "is looked at by" in page.inner_text(".sentence")
    page.keyboard.press("Enter")
    assert hash_of(page) == "#align?place=3&head=0&token=1&side=key"


def test_two_records_are_compared_side_by_side_and_move_together(show: Show) -> None:
    one, two = view_fakes.decoder(), view_fakes.decoder(strength=0.6, model="tuned")
    page = show(one, other=two)
    assert page.locator("nav [aria-current]").inner_text() == "Compare"
    ready(page, 3)
    captions = page.locator("figcaption").all_inner_texts()
    assert captions == ["A · fake:lm", "B · tuned", "B − A"]
    page.locator(".map canvas").first.focus()
    for _ in range(12):
        page.keyboard.press("ArrowUp")
    for _ in range(12):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    told = page.inner_text(".weights").split("\n")
    assert told[0] == "animal → The"
    assert float(told[1].removeprefix("A ")) == pytest.approx(one.weight(0, 0, 1, 0), rel=1e-5)
    assert float(told[2].removeprefix("B ")) == pytest.approx(two.weight(0, 0, 1, 0), rel=1e-5)
    page.locator(".differing button").first.click()
    assert re.match(r"#compare\?place=\d&head=\d", hash_of(page))


def test_records_of_other_sizes_are_compared_without_a_difference(show: Show) -> None:
    other = view_fakes.decoder(["a", "b", "c"], layers=2, n_heads=3)
    page = show(view_fakes.decoder(layers=2, n_heads=3), other=other)
    ready(page, 2)
    assert page.locator("figure").count() == 2
    assert "differ in size" in page.inner_text(".panel")


def test_light_and_dark_and_the_colours_of_each(show: Show) -> None:
    page = show(view_fakes.decoder(), "head?place=0&head=5")
    ready(page)
    paper = "getComputedStyle(document.querySelector('#regard')).backgroundColor"
    assert page.evaluate(paper) == "rgb(250, 249, 246)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(paper) == "rgb(14, 18, 22)"
    page.keyboard.press("t")
    assert page.evaluate(paper) == "rgb(250, 249, 246)"
    # The browser hands a write on to its storage in its own time: a reload at once can outrun it.
    for _ in range(5):
        page.wait_for_timeout(200)
        page.reload()
        if page.evaluate(paper) == "rgb(250, 249, 246)":
            return
        page.keyboard.press("t")
    raise AssertionError("the choice is not remembered")


def test_the_help_lists_the_keys_and_closes(show: Show) -> None:
    page = show(view_fakes.decoder())
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    assert page.locator("dialog kbd").count() > 8
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    for number, name in enumerate(("start", "overview", "head", "text", "align"), start=1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f".page.{name}")


def test_every_control_has_a_name(show: Show) -> None:
    for line in ("start", "overview?sort=first", "head", "text?token=3", "align"):
        page = show(view_fakes.translator(), line)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('a, button, select, input, [role]')]
            .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim()
              || e.closest('label')?.textContent.trim())).map(e => e.outerHTML)"""
        )
        assert nameless == []
        assert page.locator("html").get_attribute("lang") == "en"


def test_scales_run_evenly_from_light_to_dark(show: Show) -> None:
    """In grey, and so to colour-blind eyes, more weight is always darker, or always lighter."""
    for dark in (False, True):
        for name in ("regard", "viridis", "cividis"):
            page = show(view_fakes.decoder(layers=1, n_heads=1), f"head?colours={name}")
            page.emulate_media(color_scheme="dark" if dark else "light")
            page.wait_for_timeout(50)
            grey = np.array(
                page.locator(".legend canvas").first.evaluate(
                    "c => [...c.getContext('2d').getImageData(0, 0, 256, 1).data]"
                )
            ).reshape(256, 4)[:, :3] @ [0.2126, 0.7152, 0.0722]
            steps = np.diff(grey)
            assert (steps >= -0.7).all() or (steps <= 0.7).all(), name
            assert abs(grey[-1] - grey[0]) > 120, name


def test_a_page_too_small_for_its_record_says_what_needs_the_server(show: Show) -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(150)], layers=2, n_heads=4)
    page = show(record, "head?place=0&head=3", budget=50_000)
    page.wait_for_selector(".message.error")
    assert "regard view" in page.inner_text(".message.error")
    page.mouse.move(450, 450)
    assert "The mean of 4 × 4 weights" in page.inner_text(".readout")
    page.evaluate("location.hash = '#text?place=0&head=3&token=4'")
    page.wait_for_selector(".page.text .message.error")
    assert page.locator(".word").count() == 150


def test_a_rounded_weight_is_shown_with_its_bound(show: Show) -> None:
    """In a file that holds every weight of 150 words in 60,000 bytes; hidden pairs are 0."""
    record = view_fakes.decoder([f"w{i}" for i in range(150)], layers=2, n_heads=4)
    for t, s in ((140, 139), (97, 3), (120, 60)):
        page = show(record, f"head?place=1&head=2&token={t}&mate={s}", budget=60_000)
        ready(page)
        page.wait_for_function("() => /[0-9]/.test(document.querySelector('.weight')?.innerText)")
        told, weight = page.inner_text(".weight"), record.weights(1, 2, 0, 150)[t, s]
        if told.startswith("at most"):
            assert weight <= float(told.removeprefix("at most "))
        else:
            value, bound = map(float, told.split(" ± "))
            assert bound == 0.00049 and abs(value - weight) <= bound
        assert "rounded, each by at most 0.00049" in page.inner_text(".rounded")
    page = show(record, "head?place=1&head=2&token=20&mate=100", budget=60_000)
    ready(page)
    page.wait_for_function("() => document.querySelector('.weight')?.innerText === '0'")


def test_a_record_of_statistics_shows_its_picture_and_says_so(show: Show) -> None:
    page = show(view_fakes.coarse(), "head?place=0&head=1")
    ready(page)
    assert "128 × 128 cells" in page.inner_text(".panel .message")
    page.mouse.move(400, 600)
    assert "look at positions from" in page.inner_text(".pair")
    page.evaluate("location.hash = '#align?place=0&head=1'")
    page.wait_for_function("() => document.body.innerText.includes('no lines to draw')")


def test_a_narrow_window_has_no_sideways_scroll(show: Show) -> None:
    page = show(view_fakes.decoder())
    page.set_viewport_size({"width": 390, "height": 800})
    for number in (1, 2, 3, 4):
        page.keyboard.press(str(number))
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
