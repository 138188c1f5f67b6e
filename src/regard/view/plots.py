"""Figures for papers: one head, one layer or all heads, as PNG, SVG or PDF, by matplotlib.

With up to `LABELS` tokens on an axis each has its label; with more, the axis shows positions.
However long the text, a map has at most `CELLS` cells on a side, each the exact mean of its
weights, so that five thousand tokens make a file of the size of five hundred. Labels in scripts
that matplotlib's own font lacks are drawn in an installed font that has them; if there is none, one
warning names the characters.

Left out: pages, zooming. Figures are made without pyplot, so no global state changes; a notebook
shows them all the same, since they can render themselves as PNG.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Unpack

import numpy as np

from regard._files import replace_file
from regard.lens.head_names import label_places
from regard.lens.lazy_weights import Window
from regard.lens.record import Record
from regard.view.manifest import label_sides
from regard.view.pieces import cut
from regard.view.plot_options import PlotOptions, Style, chance_cells
from regard.view.queries import BadView, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 512  # the most on a side of one head's map
SMALL = 64  # the most on a side of each map of many heads
SCREEN_DPI = 100  # in a notebook
INCHES = 0.075  # the width of a letter of a title
LABELS = 64  # tokens on a side that still get labels
FORMATS = (".png", ".svg", ".pdf")
PLAIN = Style()
INK, PALE = "#1b2430", "#5f6b78"
TIDE = ("#fdfcfa", "#d5e5e0", "#93c4bf", "#4f9aa6", "#2a6b8b", "#1c3f66", "#111c38")
# Fonts tried first, before other installed ones, for characters that DejaVu Sans lacks.
FALLBACKS = ("Noto Sans CJK JP", "Noto Sans JP", "Hiragino Sans", "Yu Gothic", "Noto Sans")


def plot(
    record: Record,
    path: str | os.PathLike[str] | None = None,
    *,
    place: int | None = None,
    head: int | None = None,
    title: str | None = None,
    dpi: int = 200,
    **options: Unpack[PlotOptions],
) -> Figure:
    """Draw a record as a matplotlib figure.

    Args:
        record: A `Record`.
        path: Where to write the figure, if anywhere: .png, .svg or .pdf.
        place: Draw one place, by its index. None: every head of all places.
        head: Draw one head of that place, as a map. None: all of its heads.
        title: Instead of the one that says what is drawn.
        dpi: The resolution of a .png.
        options: size, the inches of the map's longer side; palette: "tide", "viridis" or "cividis";
            scale of the colours: "root", "linear", "log", or "chance" (weights divided by the
            weight of attention spread evenly); window: (t0, t1, s0, s1) of one head's map; tokens:
            False writes positions instead of tokens.

    Returns:
        The figure.
    """
    style = Style(**options)
    out = None if path is None else Path(os.fsdecode(path))
    if out is not None and out.suffix.lower() not in FORMATS:
        raise ValueError(f"a picture is written as one of {FORMATS}, not {out.suffix!r}")
    if not 20 <= dpi <= 1200:
        raise ValueError(f"dpi must be from 20 to 1200, got {dpi}")
    if style.window is not None and head is None:
        raise ValueError("window is a part of one head's map: give place and head too")
    if head is not None and place is None:
        raise ValueError("head is one of a place's heads: give place too")
    if place is not None and not 0 <= place < len(record.places):
        raise ValueError(f"place {place} is out of range; there are {len(record.places)}")
    if place is not None and head is not None:
        n_heads = record.places[place].n_heads
        if not 0 <= head < n_heads:
            raise ValueError(f"head {head} is out of range; place {place} has {n_heads}")
        figure = _plot_head(record, place, head, title, style)
    else:
        places = range(len(record.places)) if place is None else [place]
        figure = _plot_heads(record, list(places), title, style)
    if out is not None:
        with replace_file(out) as file:
            _write(figure, file, out.suffix.lower().removeprefix("."), dpi)
    return figure


def _make_figure(width: float, height: float) -> Figure:
    try:
        with _quiet():
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'regard[view]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    # Notebooks call this method; without pyplot nothing has registered a formatter for figures.
    figure._repr_png_ = partial(_to_png, figure)  # type: ignore[attr-defined, unused-ignore]
    return figure


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what matplotlib logs on first import: that it builds its font list, and where."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def cells_of(record: Record, place: int, head: int, most: int, style: Style = PLAIN) -> Floats:
    """Pool the map of a head to at most `most` cells on a side, or to the grid that was kept."""
    here, grid = record.places[place], record.grid(place)
    if grid is None:
        raise BadView(f"{cut(here.name, 80)} kept no map")
    window = style.window or (0, here.n_queries, 0, here.n_keys)
    if record.has_weights(place):
        grid = (min(window[1] - window[0], most), min(window[3] - window[2], most))
    cells = record.map(place, head, window, grid)
    if style.scale != "chance":
        return cells
    if not record.has_weights(place):
        raise BadView(
            f'{cut(here.name, 80)} kept a coarse map only; scale="chance" needs keep="qk"'
        )
    chance = chance_cells(record, place, window, grid)
    return np.divide(cells, chance, out=np.zeros_like(cells), where=chance > 0)


def _plot_head(record: Record, place: int, head: int, title: str | None, style: Style) -> Figure:
    here = record.places[place]
    weights = cells_of(record, place, head, CELLS, style)
    t0, t1, s0, s1 = style.window or (0, here.n_queries, 0, here.n_keys)
    rows, columns = _labels(record, place, (t0, t1, s0, s1)) if style.tokens else ([], [])
    longest = max((len(word) for word in (*rows, *columns)), default=4)
    margin = 0.8 + min(longest, 20) * 0.07
    # Inches: comfortable cells if there are few, a page's width if there are many, and at least 1.2
    # on either side, so that a map of two rows is not a hair line.
    cell = min(0.42, 6.0 / max(t1 - t0, s1 - s0))
    if style.size is not None:
        cell = style.size / max(t1 - t0, s1 - s0)
    height, width = (max(1.2, n_tokens * cell) for n_tokens in (t1 - t0, s1 - s0))
    name = f"{label_places(record)[place]} · head {here.heads[head]}" if title is None else title
    name = printable(f"layer {name}" if title is None and name[0].isdecimal() else name, 90)
    wide = width + margin + 0.6
    titled = 0.6 + INCHES * len(name)
    figure = _make_figure(max(wide, titled), height + margin)
    axes = figure.add_subplot()
    extent = (s0 - 0.5, s1 - 0.5, t1 - 0.5, t0 - 0.5)
    shown = _draw(axes, weights, extent, style)
    # Square cells, unless a side was widened above or a long title makes the figure wider.
    if height / (t1 - t0) == width / (s1 - s0) and titled <= wide:
        axes.set_aspect("equal", anchor="NW")
    _label_axis(axes, "x", columns, width / (s1 - s0), s0)
    _label_axis(axes, "y", rows, height / (t1 - t0), t0)
    axes.set_title(name, fontsize=9, color=INK, loc="left", pad=8)
    beyond = "max" if np.nanmax(weights, initial=0.0) > top_of(weights) else "neither"
    bar = figure.colorbar(shown, ax=axes, shrink=0.6, aspect=28, pad=0.02, extend=beyond)
    bar.ax.tick_params(labelsize=7, color=PALE, labelcolor=PALE, length=2)
    unit = "times chance" if style.scale == "chance" else "attention weight"
    bar.set_label(unit, fontsize=7, color=PALE)
    bar.outline.set_visible(False)  # type: ignore[operator, unused-ignore]
    return figure


def _draw(
    axes: Axes, weights: Floats, extent: tuple[float, float, float, float], style: Style
) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, PowerNorm

    tide = LinearSegmentedColormap.from_list("tide", list(TIDE))
    plain = tide if style.palette == "tide" else colormaps[style.palette]
    # Weights of 0 have no logarithm: draw them as below the scale, not as missing.
    colours = plain.with_extremes(bad="#d0489b", under=plain(0.0))
    top = top_of(weights)
    norm: Any = PowerNorm(gamma=0.5 if style.scale == "root" else 1.0, vmin=0.0, vmax=top)
    if style.scale in ("log", "chance"):
        low = top / 1e4 if style.scale == "log" else min(0.1, top / 10)
        norm = LogNorm(vmin=low, vmax=top)
        weights = np.where(weights < low, low, weights)  # keeps NaN
    for spine in axes.spines.values():
        spine.set(color="#cfcbc2", linewidth=0.6)
    return axes.imshow(
        np.ma.masked_invalid(weights),
        cmap=colours,
        norm=norm,
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )


def top_of(weights: Floats) -> float:
    """Upper end of the colour scale: the largest weight, or in large maps the 99.5% quantile."""
    seen = weights[np.isfinite(weights) & (weights > 0)]
    if not seen.size:
        return 1.0
    return float(np.quantile(seen, 0.995) if seen.size > 4096 else seen.max())


def _labels(record: Record, place: int, window: Window) -> tuple[list[str], list[str]]:
    t0, t1, s0, s1 = window
    rows, columns = (
        [printable(word) for word in words[a:z]] if words and z - a <= LABELS else []
        for words, a, z in zip(label_sides(record, place), (t0, s0), (t1, s1), strict=True)
    )
    return rows, columns


def printable(word: str, length: int = 24) -> str:
    """Make a label one line that matplotlib can draw and does not read as a formula."""
    if word and not word.strip(" \u00a0\u3000"):
        return "␣"
    seen = "".join(_sign(character) for character in cut(word.lstrip("▁Ġ ") or word, length))
    return seen.replace("$", r"\$") or "∅"


def _sign(character: str) -> str:
    if character in "\n\t\r":
        return {"\n": "⏎", "\t": "⇥", "\r": "␍"}[character]
    code = ord(character)
    hidden = code < 32 or 0x7F <= code < 0xA0 or 0x2028 <= code <= 0x202E or 0xD800 <= code < 0xE000
    return f"⟨{code:04X}⟩" if hidden or 0x2066 <= code <= 0x2069 or code == 0xFEFF else character


def _label_axis(axes: Axes, which: str, words: Sequence[str], inches: float, first: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_tick_params(length=2, color=PALE, labelcolor=INK, labelsize=7)
    axis.set_label_text("key" if which == "x" else "query", fontsize=7, color=PALE)
    if which == "x":
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
    if not words:
        axis.set_major_locator(MaxNLocator(6, integer=True))
        return
    size = max(3.5, min(9.0, inches * 72 * 0.72))
    families = fonts_for("".join(words))
    slant = 90 if inches < 0.25 else 55
    axis.set_ticks(range(first, first + len(words)), labels=list(words))
    style: dict[str, Any] = {"fontfamily": families, "fontsize": size}
    if which == "x":
        across = "center" if slant == 90 else "baseline"
        style |= {"rotation": slant, "rotation_mode": "anchor", "ha": "left", "va": across}
    for label in axis.get_ticklabels():
        label.update(style)


def _plot_heads(record: Record, places: list[int], title: str | None, style: Style) -> Figure:
    across = min(max(record.places[number].n_heads for number in places), 16)
    rows = [(n, head) for n in places for head in range(0, record.places[n].n_heads, across)]
    if len(rows) > 200:
        what = f"{len(rows)} rows of heads do not fit on one picture"
        raise ValueError(f"{what}; give place= to draw one place")
    shrink = 1.0 if style.size is None else style.size / (0.75 * max(across, len(rows)))
    figure = _make_figure(0.7 + across * 0.75 * shrink, 0.4 + len(rows) * 0.85 * shrink)
    if title is not None:
        figure.suptitle(printable(title, 90), fontsize=9, color=INK)
    grid = figure.subplots(len(rows), across, squeeze=False)
    labels = label_places(record)
    for line, (number, first) in enumerate(rows):
        here = record.places[number]
        for column in range(across):
            axes, head = grid[line][column], first + column
            if head >= here.n_heads:
                axes.set_visible(False)
                continue
            weights = cells_of(record, number, head, SMALL, style)
            _draw(axes, weights, (0, 1, 1, 0), style)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_box_aspect(1)
            name = f"{labels[number]}·{here.heads[head]}"
            axes.set_title(printable(name, 22), fontsize=5.5, color=PALE, pad=2)
    return figure


@lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    from matplotlib import font_manager

    # "Last resort" fonts claim every character, but draw boxes.
    fonts = font_manager.fontManager.ttflist
    return {font.name: font.fname for font in fonts if "last resort" not in font.name.lower()}


@lru_cache(maxsize=64)
def _characters(file: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


def fonts_for(text: str) -> list[str]:
    """List DejaVu Sans and, for the characters that it lacks, installed fonts that have them."""
    installed = _installed()
    families = ["DejaVu Sans"]
    # Joiners, variation selectors and direction marks have no glyph of their own.
    missing = {ord(character) for character in text} - {0x200D, 0xFE0F, 0x200E, 0x200F}
    missing -= _characters(installed["DejaVu Sans"]) if "DejaVu Sans" in installed else set()
    if missing and not any(family in installed for family in FALLBACKS):
        installed = _look_again()
    for family in (*FALLBACKS, *sorted(set(installed) - set(FALLBACKS))):
        if not missing:
            break
        if family in installed and missing & _characters(installed[family]):
            families.append(family)
            missing -= _characters(installed[family])
    if missing:
        _warn_missing("".join(sorted(map(chr, missing))))
    return families


def _look_again() -> dict[str, str]:
    """Add fonts that were installed after matplotlib built its font list to that list."""
    from matplotlib import font_manager

    known = {font.fname for font in font_manager.fontManager.ttflist}
    for file in set(font_manager.findSystemFonts()) - known:
        with contextlib.suppress(OSError, RuntimeError):  # what FreeType does not read
            font_manager.fontManager.addfont(file)
    _installed.cache_clear()
    return _installed()


@lru_cache(maxsize=256)
def _warn_missing(characters: str) -> None:
    """Warn of characters that no font has; the cache makes it once for the same characters."""
    shown = cut(characters, 20)
    warnings.warn(
        f"no installed font has {shown!r}, which will be drawn as boxes; install one that does, "
        "for example: apt-get install fonts-noto-cjk",
        UserWarning,
        stacklevel=2,
    )


def _to_png(figure: Figure) -> bytes:
    png = io.BytesIO()
    _write(figure, png, "png", SCREEN_DPI)
    return png.getvalue()


def _write(figure: Figure, to: IO[bytes], kind: str, dpi: int) -> None:
    """Save the figure, without matplotlib's warnings of missing glyphs: `fonts_for` has warned."""
    import matplotlib

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        # Keep text as text, so that it can be searched, copied and edited in the paper's figure.
        with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
            figure.savefig(to, format=kind, dpi=dpi)
