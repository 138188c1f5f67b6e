"""Losses as a picture: one run, or several over each other, from their `log.jsonl` to a PNG.

The training loss is smoothed over a fortieth of the run; for one run alone the raw one shows
faintly behind it. Evaluations are points on a line, the lowest of a single run with its figure. The
axis of the loss is cut where the curves live, so that the first steps do not press the rest flat;
steps whose loss was not a number are gaps, and the first of them is marked.

Left out: scores such as BLEU, which have a scale of their own; TensorBoard shows those.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from regard._files import replace_file, spell_path
from regard.training.runlog import LOG, Log, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT = "loss.png"
MAX_POINTS = 2000  # more than a picture has columns
# Told apart by most eyes, also in print (Okabe and Ito), the darkest first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, PALE = "#333333", "#8a8a8a"

Floats = npt.NDArray[np.float64]


def plot_losses(folder: str | os.PathLike[str]) -> Path:
    """Draw the run in `folder` from its `log.jsonl` into its `loss.png`; give the picture's path.

    The log itself may be given too; the picture then lies beside it.
    """
    path = Path(os.fsdecode(folder))
    path = path if path.is_dir() else path.parent
    out = path / PLOT
    plot_runs({path.resolve().name: folder}, out)
    return out


def plot_runs(runs: Mapping[str, str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Draw several runs (label -> folder or log) over each other into a PNG."""
    if not runs:
        raise ValueError("there are no runs to draw; give at least one label with its folder")
    logs = {label: read_log(path) for label, path in runs.items()}
    for label, log in logs.items():
        if not len(_finite_losses(log)):
            where = spell_path(Path(os.fsdecode(runs[label])))
            raise ValueError(f"{where} has no step with a finite loss in its {LOG}; train first")
    figure = _make_figure()
    axes = figure.add_subplot()
    alone = len(logs) == 1
    seen = [
        _draw_run(axes, log, COLOURS[number % len(COLOURS)], alone=alone)
        for number, log in enumerate(logs.values())
    ]
    if not alone:
        _explain_lines(axes, logs)
    _dress(axes, np.concatenate(seen), title=next(iter(logs)) if alone else "")
    _save(figure, Path(os.fsdecode(out)))


def _make_figure() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing losses needs the matplotlib package: pip install 'regard[train]'"
        ) from error
    figure = Figure(figsize=(8.0, 4.5), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # drawn into memory: no window, no state shared with anyone's plots
    return figure


# ---- Curves


def smooth(values: Floats, window: int) -> Floats:
    """The mean over `window` values around each; what is not finite is left out, and stays a gap.

    Towards the beginning, where losses fall fast, the window shrinks on both sides alike.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    half = np.minimum(places, window // 2)
    first, last = places - half, np.minimum(places + half + 1, len(values))
    means = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    return np.where(finite, means, np.nan)


def _thin(*columns: Floats) -> list[Floats]:
    """At most `MAX_POINTS` of each, the first and the last among them."""
    size = len(columns[0])
    if size <= MAX_POINTS:
        return list(columns)
    places = np.linspace(0, size - 1, MAX_POINTS).round().astype(int)
    return [column[places] for column in columns]


def _finite_losses(log: Log) -> Floats:
    losses = [report.loss for report in log.steps] + [report.loss for report in log.evaluations]
    values = np.array(losses, dtype=np.float64)
    return values[np.isfinite(values)]


def _draw_run(axes: Axes, log: Log, colour: str, *, alone: bool) -> Floats:
    """Draw one run; give the losses that must be in sight."""
    parts = [np.empty(0)]
    if log.steps:
        parts.append(_draw_training(axes, log, colour, alone=alone))
    if log.evaluations:
        parts.append(_draw_evaluations(axes, log, colour, alone=alone))
    seen = np.concatenate(parts)
    seen = seen[np.isfinite(seen)]
    return seen if len(seen) else _finite_losses(log)


def _draw_training(axes: Axes, log: Log, colour: str, *, alone: bool) -> Floats:
    steps = np.array([report.step for report in log.steps], dtype=np.float64)
    raw = np.array([report.loss for report in log.steps], dtype=np.float64)
    is_long = len(raw) >= 100
    mean = smooth(raw, len(raw) // 40) if is_long else raw
    if alone and is_long:
        axes.plot(*_thin(steps, raw), color=colour, alpha=0.22, linewidth=0.7)
    name = ("training (smoothed)" if is_long else "training") if alone else None
    axes.plot(*_thin(steps, mean), color=colour, linewidth=1.6, label=name)
    _mark_break(axes, steps, raw, colour)
    return mean[len(mean) // 50 :]  # the first steps fall from far above


def _draw_evaluations(axes: Axes, log: Log, colour: str, *, alone: bool) -> Floats:
    by_step = {report.step: report.loss for report in log.evaluations}  # the last of each step
    x = np.array(sorted(by_step), dtype=np.float64)
    y = np.array([by_step[int(step)] for step in x], dtype=np.float64)
    colour = COLOURS[1] if alone else colour
    look: dict[str, Any] = {"linewidth": 1.3, "linestyle": "-" if alone else "--"}
    if len(x) <= 40:
        look.update(marker="o", markersize=3.5)
    axes.plot(x, y, color=colour, label="evaluation" if alone else None, **look)
    if alone and np.isfinite(y).any():
        _mark_best(axes, x, y, colour)
    return y[min(1, len(y) - 1) :]  # the first one may be of the untrained model


def _mark_best(axes: Axes, x: Floats, y: Floats, colour: str) -> None:
    place = int(np.nanargmin(np.where(np.isfinite(y), y, np.nan)))
    axes.plot([x[place]], [y[place]], "o", color=colour, markersize=7, fillstyle="none")
    axes.annotate(
        f"{y[place]:.4g}",
        (float(x[place]), float(y[place])),
        xytext=(0, -9),
        textcoords="offset points",
        ha="right" if place > len(x) // 2 else "left",
        va="top",
        color=colour,
        fontsize=9,
        fontweight="bold",
    )


def _mark_break(axes: Axes, steps: Floats, raw: Floats, colour: str) -> None:
    """Where the loss first was no number."""
    broken = steps[~np.isfinite(raw)]
    if len(broken):
        axes.axvline(broken[0], color=colour, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"not finite from step {int(broken[0]):,}",
            (float(broken[0]), 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            color=colour,
            fontsize=8,
        )


# ---- Around the curves


def _explain_lines(axes: Axes, logs: Mapping[str, Log]) -> None:
    """Several runs: a colour for each, and once for all what the two kinds of line are."""
    for number, label in enumerate(logs):
        # A label that begins with _ would be left out of the legend; an empty mark keeps it in.
        shown = "\u200b" + label if label.startswith("_") else label
        axes.plot([], [], color=COLOURS[number % len(COLOURS)], linewidth=3.0, label=shown)
    if any(log.evaluations for log in logs.values()):
        axes.plot([], [], color=PALE, linewidth=1.6, label="training (smoothed)")
        axes.plot([], [], color=PALE, linewidth=1.3, linestyle="--", label="evaluation")


def _dress(axes: Axes, seen: Floats, *, title: str) -> None:
    low, top = float(seen.min()), float(seen.max())
    room = (top - low) or max(abs(top), 1.0)
    axes.set_ylim(low - 0.10 * room, top + 0.08 * room)
    axes.margins(x=0.015)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss", color=INK)
    if title:
        axes.set_title(
            title, loc="left", color=INK, fontsize=11, fontweight="bold", parse_math=False
        )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    legend = axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a label may have dollar signs


def _save(figure: Figure, out: Path) -> None:
    """Draw first, then put the file in place, so that no error leaves half a picture."""
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        # A label in a script that the font lacks gets boxes; that is no reason to have no picture.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(drawn, format="png", metadata={"Software": None})

    out.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(out) as file:
        file.write(drawn.getbuffer())
