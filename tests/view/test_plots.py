"""Pictures for paper: sizes, labels, formats, and text in every script."""

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes
from matplotlib.text import Text

from regard.lens.lazy_weights import shares
from regard.view import plots
from regard.view.plots import CELLS, LABELS, cells_of, fonts_for, plot, printable, top_of

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def labels_of(figure: Any, axis: str) -> list[str]:
    axes = figure.axes[0]
    found = axes.get_xticklabels() if axis == "x" else axes.get_yticklabels()
    return [label.get_text() for label in found]


def picture_of(figure: Any) -> np.ndarray:
    return np.asarray(figure.axes[0].get_images()[0].get_array())


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_the_ending_says_the_format(tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"picture{ending}"
    plot(view_fakes.decoder(), out, place=1, head=5)
    assert out.read_bytes().startswith(MAGIC[ending])
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_five_tokens_have_their_labels_and_their_exact_weights() -> None:
    record = view_fakes.decoder(list("abcde"), layers=1)
    figure = plot(record, place=0, head=1)
    np.testing.assert_array_equal(picture_of(figure), record.weights(0, 1, 0, 5))
    assert labels_of(figure, "x") == labels_of(figure, "y") == list("abcde")
    width, height = figure.get_size_inches()
    assert 2 < width < 5 and 2 < height < 5


def test_five_thousand_tokens_have_positions_and_means(tmp_path: Path) -> None:
    record = view_fakes.ramp(5000)
    figure = plot(record, tmp_path / "long.png", place=0, head=0)
    assert picture_of(figure).shape == (CELLS, CELLS)
    assert not [label for label in labels_of(figure, "x") if label.startswith("w")]
    assert max(figure.get_size_inches()) < 10
    assert (tmp_path / "long.png").stat().st_size < 600_000


def test_labels_end_where_they_no_longer_fit() -> None:
    for count in (LABELS, LABELS + 1):
        record = view_fakes.decoder([f"w{i}" for i in range(count)], layers=1, n_heads=1)
        words = [w for w in labels_of(plot(record, place=0, head=0), "y") if w.startswith("w")]
        assert len(words) == (count if count == LABELS else 0)


@pytest.mark.filterwarnings("ignore:no installed font has")  # Japanese
def test_cross_attention_has_source_across_and_target_down() -> None:
    record = view_fakes.translator()
    figure = plot(record, place=3, head=0)
    assert labels_of(figure, "x") == record.source_tokens
    assert labels_of(figure, "y") == record.tokens
    assert picture_of(figure).shape == (10, 9)


def test_every_head_has_its_small_map() -> None:
    figure = plot(view_fakes.translator())
    assert len([axes for axes in figure.axes if axes.get_images()]) == 24
    assert len([a for a in plot(view_fakes.translator(), place=2).axes if a.get_images()]) == 4


def test_a_record_of_statistics_is_drawn_from_its_picture() -> None:
    record = view_fakes.coarse()
    assert cells_of(record, 0, 0, CELLS).shape == (128, 128)
    assert picture_of(plot(record, place=0, head=0)).shape == (128, 128)


def test_hostile_labels_are_drawn_and_run_nothing(tmp_path: Path) -> None:
    tokens = [
        "<script>",
        "$\\frac{1}{0}$",
        "\u202eabc",
        "a\nb",
        "\ud800",
        "",
        "x" * 100_000,
        "&\"'",
    ]
    record = view_fakes.decoder(tokens, layers=1, n_heads=1, spans=None)
    plot(record, tmp_path / "hostile.svg", place=0, head=0, title="$x^{$ <b>")
    text = (tmp_path / "hostile.svg").read_text(encoding="utf-8")
    assert "<script" not in text


def test_weights_that_are_not_numbers_have_a_colour_of_their_own(tmp_path: Path) -> None:
    record = view_fakes.decoder(layers=1, n_heads=1)
    weights = np.full((12, 12), np.nan, np.float32)
    record.map = lambda *_: weights  # type: ignore[method-assign]
    figure = plot(record, tmp_path / "nan.png", place=0, head=0)
    assert picture_of(figure).shape == (12, 12)
    weights[3, 2] = np.inf
    weights[4, 4] = 0.5
    assert top_of(weights) == 0.5


def test_japanese_is_drawn_in_a_font_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_installed", lambda: {"DejaVu Sans": "d", "Noto Sans CJK JP": "n"})
    glyphs = {"d": frozenset(map(ord, "abc")), "n": frozenset(map(ord, "猫a"))}
    monkeypatch.setattr(plots, "_characters", glyphs.__getitem__)
    assert fonts_for("abc") == ["DejaVu Sans"]
    assert fonts_for("a猫") == ["DejaVu Sans", "Noto Sans CJK JP"]


def test_a_script_without_a_font_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_installed", lambda: {"DejaVu Sans": "d"})
    monkeypatch.setattr(plots, "_look_again", lambda: {"DejaVu Sans": "d"})
    monkeypatch.setattr(plots, "_characters", lambda file: frozenset(map(ord, "abc")))
    plots._warn_missing.cache_clear()
    with pytest.warns(UserWarning, match="no installed font has '犬猫'"):
        fonts_for("ab猫犬")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fonts_for("ab猫犬") == ["DejaVu Sans"]
    plots._warn_missing.cache_clear()


def test_a_font_of_placeholders_is_no_font_that_has_a_script() -> None:
    """matplotlib brings one with a box for every character, such as this one of nobody's."""
    plots._warn_missing.cache_clear()
    with pytest.warns(UserWarning, match="no installed font has"):
        assert fonts_for("a\U0010fffd") == ["DejaVu Sans"]
    plots._warn_missing.cache_clear()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": 1}, "give place too"),
        ({"place": 4}, "place 4 is out of range"),
        ({"place": 0, "head": 8}, "head 8 is out of range"),
        ({"place": -1}, "out of range"),
        ({"path": "x.gif"}, "one of"),
        ({"path": "x.png", "dpi": 5}, "dpi"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plot(view_fakes.decoder(), **options)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("Ġcat", "cat"),
        ("a\nb", "a⏎b"),
        ("\u202e", "⟨202E⟩"),
        ("a\u2028b\ufeff", "a⟨2028⟩b⟨FEFF⟩"),
        (" ", "␣"),
        ("\u3000", "␣"),
        ("$5", r"\$5"),
        ("", "∅"),
        ("猫", "猫"),
    ],
)
def test_labels_are_one_visible_line(word: str, shown: str) -> None:
    assert printable(word) == shown


def test_a_notebook_can_show_the_figure_and_another_process_can_have_it() -> None:
    figure = plot(view_fakes.decoder(layers=2, n_heads=3), place=1)
    again = pickle.loads(pickle.dumps(figure))
    for each in (figure, again):
        assert each._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"


def test_captions_say_the_stack_and_lie_inside_the_picture() -> None:
    figure = plot(view_fakes.translator())
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles[0] == "encoder 0·0" and "decoder 1·3" in titles and titles[-1] == "cross 1·3"
    two = view_fakes.decoder(["a", "b"], layers=1)
    for title in (None, "a title of some length, as people give them to figures"):
        figure = plot(two, place=0, head=3, title=title)
        figure.draw_without_rendering()
        drawn = figure.axes[0].get_title(loc="left")
        assert drawn == (title or "layer 0 · head 3")
        [box] = [
            text.get_window_extent() for text in figure.findobj(Text) if text.get_text() == drawn
        ]
        assert box.x1 <= figure.bbox.x1 and box.x0 >= 0


def test_matplotlib_says_nothing_of_its_own_when_it_is_loaded(tmp_path: Path) -> None:
    """A folder that it cannot write to, as on many a server."""
    (tmp_path / "file").write_text("")
    code = "from view_fakes import decoder; from regard.view import plot; plot(decoder(layers=1))"
    surroundings = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "file" / "x")}
    here = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({here!r}); {code}"],
        env=surroundings,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_letters_stay_letters_in_files_for_paper(tmp_path: Path) -> None:
    record = view_fakes.decoder(["Alpha", "beta"], layers=1, n_heads=1)
    plot(record, tmp_path / "x.svg", place=0, head=0)
    told = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert ">Alpha<" in told and ">attention weight<" in told and ">query<" in told
    plot(record, tmp_path / "x.pdf", place=0, head=0)
    found = (tmp_path / "x.pdf").read_bytes()
    assert b"/Subtype /Type0" in found and b"/FontFile2" in found  # fonttype 42: TrueType
    assert b"/Subtype /Type3" not in found


def test_axes_and_colours_say_what_they_are_and_cells_are_square() -> None:
    figure = plot(view_fakes.decoder(layers=1), place=0, head=1)
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert figure.axes[1].get_ylabel() == "attention weight"
    assert axes.get_aspect() == 1.0


def test_a_window_shows_its_part_with_its_words() -> None:
    record = view_fakes.decoder(layers=1)
    figure = plot(record, place=0, head=1, window=(3, 8, 1, 6))
    np.testing.assert_array_equal(picture_of(figure), record.weights(0, 1, 3, 8)[:, 1:6])
    assert labels_of(figure, "x") == record.tokens[1:6]
    assert labels_of(figure, "y") == record.tokens[3:8]
    assert figure.axes[0].get_images()[0].get_extent() == [0.5, 5.5, 7.5, 2.5]
    bare = plot(record, place=0, head=1, tokens=False)
    assert not set(labels_of(bare, "x")) & set(record.tokens)


def test_size_and_palette_are_as_asked() -> None:
    record = view_fakes.decoder(layers=1)
    small, large = (plot(record, place=0, head=1, size=inches) for inches in (3.0, 6.0))
    grown = large.get_size_inches() - small.get_size_inches()
    assert grown.tolist() == pytest.approx([3.0, 3.0])
    shown = plot(record, place=0, head=1, palette="viridis").axes[0].get_images()[0]
    assert shown.get_cmap().name.startswith("viridis")
    assert shown.get_cmap()(0.0) == pytest.approx((0.267004, 0.004874, 0.329415, 1.0))


@pytest.mark.parametrize("n", [12, 1201])
def test_times_chance_is_the_weight_over_an_even_share(n: int) -> None:
    """By hand: where all is even it is 1 wherever something may be seen, however cells are cut."""
    record = view_fakes.decoder([f"w{i}" for i in range(n)], layers=1, n_heads=2)
    if n == 12:
        found = picture_of(plot(record, place=0, head=1, scale="chance"))
        want = record.weights(0, 1, 0, 12) * np.arange(1, 13)[:, None]
        low = min(0.1, want.max() / 10)
        np.testing.assert_allclose(found, np.maximum(want, low), rtol=1e-5)
        return
    even = np.tri(n, dtype=np.float64) / np.arange(1, n + 1)[:, None]

    def cells(place: int, head: int, window: Any, size: tuple[int, int]) -> np.ndarray:
        _, down = shares(size[0], (0, n), (0, n))
        _, across = shares(size[1], (0, n), (0, n))
        return np.asarray(down @ (even @ across.T), np.float32)

    record.map = cells  # type: ignore[method-assign]
    found = picture_of(plot(record, place=0, head=0, scale="chance"))
    assert found.shape == (CELLS, CELLS)
    seen = found[found > 0.5]
    assert seen.size >= CELLS * (CELLS + 1) // 2
    np.testing.assert_allclose(seen, 1.0, rtol=1e-4)
