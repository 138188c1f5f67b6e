"""Loss curves of one run, or of several in one plot: from `log.jsonl` to a PNG, by matplotlib.

The training loss of a long run is smoothed over a fortieth of it. Evaluations are points on a
dashed line; the lowest has its value written beside it. The loss axis leaves out the first steps,
which would flatten the rest of the curve. Steps whose loss is not finite are gaps, and the first
of them is marked.

Left out: scores such as BLEU, which have a scale of their own; TensorBoard shows those.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from regard._files import replace_file, spell_path
from regard.training.runlog import LOG, EvalReport, Log, StepReport, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT = "loss.png"

Floats = npt.NDArray[np.float64]


def plot_losses(folder: str | os.PathLike[str]) -> Path:
    """Draw the run in `folder` (or of that log file) into `loss.png` beside its log."""
    path = Path(os.fsdecode(folder))
    path = path if path.is_dir() else path.parent
    plot_runs({path.resolve().name: folder}, path / PLOT)
    return path / PLOT


def plot_runs(runs: Mapping[str, str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Draw several runs (label -> folder or log file) in one plot, as a PNG."""
    if not runs:
        raise ValueError("there are no runs to draw; give at least one label with its folder")
    logs = {label: read_log(path) for label, path in runs.items()}
    for label, log in logs.items():
        if not np.isfinite(_curve([*log.steps, *log.evaluations])[1]).any():
            where = spell_path(Path(os.fsdecode(runs[label])))
            raise ValueError(f"{where} has no step with a finite loss in its {LOG}; train first")
    figure = _make_figure()
    axes = figure.add_subplot()
    in_view = [_draw(axes, label, log, f"C{n}") for n, (label, log) in enumerate(logs.items())]
    losses = np.concatenate(in_view)
    margin = float(np.ptp(losses)) * 0.08 or 1.0
    axes.set_ylim(float(losses.min()) - margin, float(losses.max()) + margin)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(axis="y", alpha=0.3)
    # Dollar signs in names are not formulas.
    axes.set_title(next(iter(logs)) if len(logs) == 1 else "", loc="left", parse_math=False)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        # A label in a script that the font lacks is drawn as boxes, which is better than no plot.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(drawn, format="png", metadata={"Software": None})
    path = Path(os.fsdecode(out))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(drawn.getbuffer())


def _make_figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        what = "drawing losses needs the matplotlib package"
        raise ImportError(f"{what}: pip install 'regard[train]'") from error
    # Without pyplot: no window, and no state shared with the caller's plots.
    return Figure(figsize=(8.0, 4.5), dpi=160, layout="constrained")


def smooth(values: Floats, window: int) -> Floats:
    """Average the `window` finite values around each value; values not finite become NaN (gaps)."""
    # Near the beginning, where losses fall fast, the window shrinks on both sides alike.
    finite = np.isfinite(values)
    sums = np.cumsum(np.append(0.0, np.where(finite, values, 0.0)))
    counts = np.cumsum(np.append(0, finite))
    index = np.arange(len(values))
    half = np.minimum(index, window // 2)
    first, last = index - half, np.minimum(index + half + 1, len(values))
    means = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    return np.where(finite, means, np.nan)


def _curve(reports: list[StepReport | EvalReport]) -> tuple[Floats, Floats]:
    losses = {report.step: report.loss for report in reports}
    return np.array(list(losses), np.float64), np.array(list(losses.values()), np.float64)


def _draw(axes: Axes, label: str, log: Log, colour: str) -> Floats:
    """Draw one run; return the losses that the axis must show."""
    # matplotlib's legend skips labels that begin with _; a zero-width space in front keeps them.
    label = "\u200b" + label if label.startswith("_") else label
    steps, losses = _curve([*log.steps])
    if len(losses) >= 100:
        axes.plot(steps, losses, color=colour, alpha=0.2, linewidth=0.7)
        losses = smooth(losses, len(losses) // 40)
    axes.plot(steps, losses, color=colour, label=f"{label}: training")
    for broken in steps[~np.isfinite(losses)][:1].tolist():
        axes.axvline(broken, color=colour, linestyle=":")
        words, scales = f"not finite from step {int(broken):,}", ("data", "axes fraction")
        axes.annotate(words, (broken, 0.97), xycoords=scales, ha="right", va="top")
    seen_steps, seen = _curve([*log.evaluations])
    if len(seen):
        axes.plot(seen_steps, seen, "o--", color=colour, label=f"{label}: evaluation")
    if np.isfinite(seen).any():
        best = int(np.argmin(np.where(np.isfinite(seen), seen, np.inf)))
        at = (float(seen_steps[best]), float(seen[best]))
        axes.annotate(f"{seen[best]:.4g}", at, color=colour, ha="right", va="top")
    # Early losses are far higher, and the first evaluation may be of the untrained model.
    late = np.concatenate([losses[len(losses) // 50 :], seen[len(seen) > 1 :]])
    late = late if np.isfinite(late).any() else np.concatenate([losses, seen])
    return np.asarray(late[np.isfinite(late)], np.float64)
