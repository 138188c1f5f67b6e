"""What the pages write beside their pictures: scores, layers, sizes, tooltips, colours of text.

Topic: words and numbers on every page, in a real browser. The maps are in test_browser_pages.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes

import regard.view
from regard.lens.head_names import SCORE_WORDS

Show = Callable[..., Any]
STYLE = Path(regard.view.__file__).parent / "web" / "src" / "style.css"


def bars(page: Any, name: str) -> float:
    """How full the bar of a score is, in percent."""
    bar = page.locator(f".bars li[data-score={name}] .fill")
    width = bar.evaluate("e => e.style.width")
    return float(width.rstrip("%"))


def with_scores(**scores: list[list[float]]) -> view_fakes.FakeRecord:
    record = view_fakes.decoder(layers=2, n_heads=3)
    plain = record.heads()
    told = {**plain, **{name: np.array(values) for name, values in scores.items()}}
    record.heads = lambda: told  # type: ignore[method-assign]
    return record


def test_the_most_local_head_comes_first_and_has_the_fullest_bar(show: Show) -> None:
    """The score is a distance in tokens, so little of it is much of the habit."""
    record = with_scores(local=[[7.0, 0.5, 31.0], [3.0, 12.0, 1.5]])
    page = show(record, "overview?sort=local")
    shown = page.locator(".card").evaluate_all(
        "all => all.map(a => a.dataset.place + a.dataset.head)"
    )
    assert shown == ["01", "12", "10", "00", "11", "02"]
    assert "stays near" in page.inner_text(".hint")
    assert "0.50 tokens away" in page.locator(".card").first.get_attribute("title")
    page.locator(".controls input").fill("90")
    assert page.locator(".card").count() == 3  # within 10% of the farthest
    assert page.locator(".controls .field", has=page.locator("output")).inner_text().split() == [
        "At",
        "most",
        "3.10",
    ]
    nearest, farthest = (show(record, f"head?place=0&head={head}") and bars(page, "local")
                         for head in (1, 2))  # fmt: skip
    assert (nearest, farthest) == (pytest.approx(100 * (1 - 0.5 / 31), abs=0.01), 0)


@pytest.mark.parametrize("name", ["broad", "previous"])
def test_of_the_other_scores_much_comes_first(show: Show, name: str) -> None:
    record = with_scores(**{name: [[0.7, 0.05, 2.5], [0.3, 1.2, 0.15]]})
    page = show(record, f"overview?sort={name}")
    shown = page.locator(".card").evaluate_all(
        "all => all.map(a => a.dataset.place + a.dataset.head)"
    )
    assert shown == ["02", "11", "00", "10", "12", "01"]
    page.locator(".controls input").fill("40")
    kept = {"broad": 2, "previous": 3}[name]  # at least 1.0 of 2.5, at least 0.4 of 1
    assert page.locator(".card").count() == kept


def test_right_to_left_text_after_a_special_token_runs_from_the_right(show: Show) -> None:
    words = ["[CLS]", "החתול", "ישב", "על", "השטיח", "[SEP]"]
    record = view_fakes.decoder(words, layers=1, n_heads=1)
    record.text = " ".join(words[1:-1])
    starts = [0, *np.cumsum([len(word) + 1 for word in words[1:-1]]).tolist()]
    spans = [(at, at + len(word)) for at, word in zip(starts, words[1:-1], strict=False)]
    for known in ([(0, 0), *spans, (0, 0)], None):
        record.spans = known
        page = show(record, "text?place=0&head=0&token=1")
        page.wait_for_selector(".ranking li")
        boxes = [word.bounding_box()["x"] for word in page.locator(".word").all()[1:5]]
        assert boxes == sorted(boxes, reverse=True)
        page = show(record, "overview")
        found = page.locator(".headline bdi").first.evaluate("e => getComputedStyle(e).direction")
        assert found == "rtl"


@pytest.mark.parametrize("token", [-1, 3])
def test_no_word_is_told_to_get_more_than_all(show: Show, token: int) -> None:
    """What a word gets is told by the number of those that may look at it: never 224%."""
    record = view_fakes.decoder(layers=1, n_heads=2)
    page = show(record, f"text?place=0&head=1&token={token}")
    page.wait_for_selector(".ranking li")
    told = page.locator(".word").evaluate_all("all => all.map(w => w.title)")
    received = record.statistics(0)["received"][1]
    assert received.max() > 2
    if token < 0:
        assert told[0].endswith("of each of the 12 tokens that may look at it, on average")
        means = 100 * received / np.arange(12, 0, -1)  # a causal text
        found = [float(re.findall(r"gets ([\d.]+)%", each)[0]) for each in told]
        assert found == pytest.approx(means.tolist(), abs=0.051)
    shares = [float(found) for found in re.findall(r"([\d.]+)%", " ".join(told))]
    assert max(shares) <= 100


def uneven() -> view_fakes.FakeRecord:
    """An encoder of four layers before a decoder of two."""
    record = view_fakes.translator()
    t, s = len(record.tokens), len(record.source_tokens or ())
    make = view_fakes.make_place
    record.places = [make(f"encoder.layers.{n}.attn", n, "self", 2, s, s, False) for n in range(4)]
    for n in range(2):
        record.places.append(make(f"decoder.layers.{n}.self_attn", n, "self", 2, t, t, True))
        record.places.append(make(f"decoder.layers.{n}.cross_attn", n, "cross", 2, t, s, False))
    return record


UNEVEN = [f"Encoder {n}" for n in range(4)] + ["Decoder 0", "Cross 0", "Decoder 1", "Cross 1"]


def test_each_layer_of_two_stacks_says_which_stack_it_is_of(show: Show) -> None:
    page = show(uneven())
    assert page.locator(".layer .name").all_inner_texts() == UNEVEN
    page = show(uneven(), "head?place=3&head=1")
    assert page.inner_text(".panel h1") == "Encoder 3, head 1"
    options = page.locator(".picker select").first.locator("option").all_inner_texts()
    assert options[:8] == UNEVEN
    page = show(uneven(), "overview?sort=first")
    cards = page.locator(".card .id").all_inner_texts()
    assert {card.rpartition(" ")[0] for card in cards} == {f"{name} ·" for name in UNEVEN}


def test_without_words_of_the_source_the_names_of_the_places_tell_the_stacks(show: Show) -> None:
    """As of a speech model, whose source is no text."""
    record = uneven()
    record.source_tokens = record.source_text = None
    page = show(record)
    assert page.locator(".layer .name").all_inner_texts() == UNEVEN


def test_a_mean_over_layers_names_no_single_layer(show: Show) -> None:
    record = view_fakes.decoder(layers=3, n_heads=2)
    page = show(record, "head?place=1&head=all")
    assert page.inner_text(".panel h1") == "Mean of all layers"
    assert "layers.1" not in page.inner_text(".panel")
    chosen = page.locator(".picker select").evaluate_all(
        "all => all.map(s => s.selectedOptions[0].text)"
    )
    assert chosen[:2] == ["All layers", "Mean of all heads"]
    page.locator(".picker select").first.select_option(label="Layer 2")
    assert page.inner_text(".panel h1") == "Layer 2, mean of its heads"
    page.locator(".picker select").first.select_option(label="All layers")
    assert page.inner_text(".panel h1") == "Mean of all layers"
    page = show(uneven(), "head?place=5&head=all")
    assert page.inner_text(".panel h1") == "Mean of all cross-attention layers"
    options = page.locator(".picker select").first.locator("option").all_inner_texts()
    assert options[8:] == [
        "All encoder layers", "All decoder layers", "All cross-attention layers"
    ]  # fmt: skip


def test_one_of_a_kind_is_told_in_the_singular(show: Show) -> None:
    page = show(view_fakes.decoder(["word"], layers=1, n_heads=1))
    facts = page.inner_text(".headline .facts")
    assert "1 token ·" in facts and facts.endswith("1 head in 1 attention layer")
    page = show(view_fakes.decoder(layers=2, n_heads=2))
    assert page.inner_text(".headline .facts").endswith("12 tokens · 4 heads in 2 attention layers")


@pytest.mark.parametrize("width", [1440, 1300, 390])
def test_no_caption_is_clipped_and_the_tabs_have_no_scrollbars(show: Show, width: int) -> None:
    for line in ("overview", "overview?sort=separator", "overview?sort=local"):
        page = show(uneven(), line)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(50)
        clipped = page.evaluate(
            """() => [...document.querySelectorAll('.caption, .caption span, nav a, .layer .name')]
            .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
            .map(e => `${e.className}: ${e.textContent} ${e.scrollWidth}>${e.clientWidth}`)"""
        )
        assert clipped == []
    sizes = page.locator("nav").evaluate("n => [n.scrollHeight - n.clientHeight, n.scrollWidth]")
    assert sizes[0] == 0
    assert width == 390 or sizes[1] == page.locator("nav").evaluate("n => n.clientWidth")


def test_every_page_has_its_tab_on_a_phone_s_screen(show: Show) -> None:
    for record, other in (
        (view_fakes.decoder(), None),
        (view_fakes.translator(), None),
        (view_fakes.translator(), view_fakes.translator()),
    ):
        page = show(record, "overview", other=other)
        page.set_viewport_size({"width": 390, "height": 844})
        boxes = page.locator("nav a").evaluate_all(
            "all => all.map(a => a.getBoundingClientRect()).map(box => [box.left, box.right])"
        )
        assert len(boxes) == (6 if other else 5)
        assert all(left >= 0 and right <= 390 for left, right in boxes)
        assert page.locator("nav").evaluate("n => n.scrollWidth - n.clientWidth") == 0


@pytest.mark.parametrize("line", ["head?place=4&head=0", "text?place=4", "align?place=4"])
def test_no_control_is_wider_than_its_panel(show: Show, line: str) -> None:
    page = show(uneven(), line)
    wide = page.locator(".panel").evaluate(
        "p => [...p.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right"
        " > p.getBoundingClientRect().right).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes() -> list[dict[str, str]]:
    """The colours of each block of the style that sets them: light, dark, dark by the system."""
    blocks = re.findall(r"\{([^{}]*--paper:[^{}]*)\}", STYLE.read_text(encoding="utf-8"))
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block)) for block in blocks]


@pytest.mark.parametrize("theme", [0, 1, 2])
@pytest.mark.parametrize("ink", ["ink", "muted", "accent", "error", "water"])
@pytest.mark.parametrize("ground", ["paper", "card", "soft"])
def test_text_can_be_read_on_every_ground(theme: int, ink: str, ground: str) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    found = themes()
    assert len(found) == 3 and found[1] == found[2]
    assert contrast(found[theme][ink], found[theme][ground]) >= 4.5


@pytest.mark.parametrize("theme", [0, 1, 2])
def test_lines_of_every_head_stand_out_from_the_ground(theme: int) -> None:
    found = themes()[theme]
    lines = [found[f"line{number}"] for number in range(6)]
    assert len(set(lines)) == 6
    assert min(contrast(line, found["paper"]) for line in lines) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("palette", ["regard", "viridis", "cividis"])
def test_words_can_be_read_on_every_shade(show: Show, dark: bool, palette: str) -> None:
    """Shaded words, whose ink follows their ground."""
    tokens = [f"w{n}" for n in range(60)]
    record = view_fakes.decoder(tokens, layers=1, n_heads=1)
    ramp = np.linspace(0, 1, 60, dtype=np.float32)
    record.statistics = lambda place: {"received": ramp[None]}  # type: ignore[method-assign]
    page = show(record, f"text?place=0&head=0&colours={palette}&scale=linear")
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.wait_for_selector(".ranking li")
    page.wait_for_timeout(300)  # the shades are faded in
    seen = page.locator(".word").evaluate_all(
        "all => all.filter(w => w.style.backgroundColor).map(w => {"
        " const s = getComputedStyle(w); return [s.color, s.backgroundColor]; })"
    )

    def as_hex(colour: str) -> str:
        return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])

    assert len(seen) > 50
    assert min(contrast(as_hex(ink), as_hex(ground)) for ink, ground in seen) >= 4.5


def test_page_and_digest_have_the_same_words_for_every_score(show: Show) -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    page = show(record, "head?place=0&head=0")
    told = page.locator(".bars li").evaluate_all(
        "all => all.map(e => [e.dataset.score, e.querySelector('.name').textContent, e.title])"
    )
    assert told == [[name, *vars(SCORE_WORDS[name]).values()] for name in record.heads()]
    page = show(record, "overview?sort=first")
    options = page.locator(".controls select").first.locator("option").all_inner_texts()[1:]
    assert options == [f"{name}: {SCORE_WORDS[name].does}" for name in record.heads()]
    assert page.inner_text(".overview > .hint").endswith("each looks at the first token.")


@pytest.mark.parametrize("line", ["overview", "head?place=0", "text?place=0", "align?place=0"])
def test_a_text_longer_than_the_model_was_made_for_is_noted_on_every_page(
    show: Show, line: str
) -> None:
    page = show(view_fakes.decoder(n_read=12, trained_len=7), line)
    note = page.inner_text("[role=note]")
    assert "12 tokens" in note and "at most 7" in note and "artefact" in note
    assert (
        show(view_fakes.decoder(n_read=12, trained_len=12), line).locator("[role=note]").count()
        == 0
    )


@pytest.mark.parametrize("line", ["", "overview", "head?place=0&head=0", "text?place=0&head=0"])
def test_a_text_read_in_windows_says_so_on_every_page(show: Show, line: str) -> None:
    page = show(view_fakes.decoder(n_read=12, trained_len=7, window=7), line)
    note = page.inner_text("[role=note]")
    assert "windows of 7 tokens" in note and "artefact" not in note
