"""The picture shows the losses that the log holds."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from regard.training import plotting
from regard.training.monitor import EvalReport, Monitor, StepReport
from regard.training.plotting import plot_losses, plot_runs, smooth

NAN = float("nan")


def write_run(folder: Path, losses: list[float], seen: dict[int, float] | None = None) -> Path:
    console = Console(file=io.StringIO())
    with Monitor(folder, total=len(losses), console=console) as monitor:
        for step, loss in enumerate(losses, start=1):
            monitor.step(
                StepReport(step=step, loss=loss, lr=0.1, grad_norm=1.0, tokens=7, seconds=0.1)
            )
        for step, loss in (seen or {}).items():
            monitor.evaluated(EvalReport(step=step, loss=loss, perplexity=1.0))
    return folder


def falling(count: int) -> list[float]:
    return [2.0 + 8.0 * 0.97**step + 0.1 * (step % 3) for step in range(count)]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were drawn, beside their files."""
    made: list[Figure] = []
    true_make = plotting._make_figure

    def make() -> Figure:
        made.append(true_make())
        return made[-1]

    monkeypatch.setattr(plotting, "_make_figure", make)
    return made


def curves(figure: Figure) -> list[Any]:
    """The lines with anything on them; the legend's own are empty."""
    return [line for line in figure.axes[0].lines if len(line.get_xdata()) > 1]


def legend_of(figure: Figure) -> list[str]:
    legend = figure.axes[0].get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_smoothing_worked_by_hand() -> None:
    values = np.array([9.0, 3.0, 6.0, 0.0, 3.0])
    assert smooth(values, 3).tolist() == [9.0, 6.0, 3.0, 3.0, 1.5]
    assert smooth(values, 5).tolist() == [9.0, 6.0, 4.2, 3.0, 3.0]
    assert smooth(values, 1).tolist() == values.tolist()
    broken = smooth(np.array([9.0, NAN, 6.0, np.inf, 3.0]), 5)
    assert np.isnan(broken[[1, 3]]).all() and broken[[0, 2, 4]].tolist() == [9.0, 6.0, 4.5]


def test_a_run_is_drawn_beside_its_log(tmp_path: Path, figures: list[Figure]) -> None:
    losses = falling(301)
    folder = write_run(tmp_path / "my run", losses, {100: 2.9, 200: 2.5, 300: 2.6})
    assert plot_losses(folder) == folder / "loss.png"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    raw, mean, seen = curves(figures[0])
    assert np.allclose(raw.get_ydata(), losses) and raw.get_xdata()[0] == 1
    assert np.allclose(mean.get_ydata(), smooth(np.array(losses), 301 // 40))
    assert list(seen.get_xdata()) == [100, 200, 300] and list(seen.get_ydata()) == [2.9, 2.5, 2.6]
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["2.5"]
    assert axes.get_title("left") == "my run"
    assert legend_of(figures[0]) == ["my run: training", "my run: evaluation"]
    low, high = axes.get_ylim()
    assert low < 2.0 and high < losses[0]  # the first steps do not press the rest flat
    first = (folder / "loss.png").read_bytes()
    assert plot_losses(folder / "log.jsonl") == folder / "loss.png"
    assert (folder / "loss.png").read_bytes() == first


def test_runs_lie_over_each_other_in_their_own_colours(
    tmp_path: Path, figures: list[Figure]
) -> None:
    a = write_run(tmp_path / "a", falling(150), {150: 2.2})
    b = write_run(tmp_path / "b", falling(250), {100: 2.4, 200: 2.3})
    plot_runs({"post-norm": a, "_$x^2$ 語": b / "log.jsonl"}, tmp_path / "deep" / "both.png")
    assert (tmp_path / "deep" / "both.png").stat().st_size > 10_000
    _, first, _, second, seen = curves(figures[0])
    assert (len(first.get_xdata()), len(second.get_xdata())) == (150, 250)
    assert first.get_color() != second.get_color() == seen.get_color()
    labels = ["post-norm", "\u200b_$x^2$ 語"]
    kinds = ("training", "evaluation")
    assert legend_of(figures[0]) == [f"{label}: {kind}" for label in labels for kind in kinds]


def test_a_loss_that_broke_is_marked(tmp_path: Path, figures: list[Figure]) -> None:
    write_run(tmp_path, [*falling(150), NAN, NAN], {50: NAN, 100: 3.0})
    plot_losses(tmp_path)
    assert [text.get_text() for text in figures[0].axes[0].texts] == [
        "not finite from step 151",
        "3",
    ]
    assert all(np.isfinite(figures[0].axes[0].get_ylim()))


@pytest.mark.parametrize("losses", [[2.5], [2.5, 2.5, 2.5], [3.0, NAN, NAN], falling(20)])
def test_short_runs_are_drawn_too(tmp_path: Path, losses: list[float]) -> None:
    write_run(tmp_path, losses)
    assert plot_losses(tmp_path).stat().st_size > 5_000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not there"):
        plot_losses(tmp_path)
    write_run(tmp_path, [NAN, NAN])
    with pytest.raises(ValueError, match="no step with a finite loss"):
        plot_losses(tmp_path)
    with pytest.raises(ValueError, match="no runs"):
        plot_runs({}, tmp_path / "x.png")
    assert not list(tmp_path.glob("*.png"))


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[train\]'"):
        plot_losses(write_run(tmp_path, [2.0]))


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    """No window, no backend, no figure in anyone's list."""
    write_run(tmp_path, falling(9))
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2] / "src")!r})
from regard.training.plotting import plot_losses
assert "matplotlib" not in sys.modules
plot_losses({str(tmp_path)!r})
print("matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
