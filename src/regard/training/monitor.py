"""The monitor of a run: shows the progress of training, logs it, and can feed TensorBoard.

The loop reports each step and each evaluation. They go to `log.jsonl` (`runlog.py`), to the screen
(a progress bar of `rich` on a terminal, a plain line every `PLAIN_SECONDS` elsewhere or without
`rich`), and, if asked for, to TensorBoard files beside the log. None of these may slow or stop the
run: a step's report takes tens of microseconds (a thread draws the bar, and TensorBoard gets at
most `BOARD_PER_SECOND` steps a second; the log has all of them), and a closed screen, a vanished
folder or a full disk is reported once, wherever that is still possible, and the run continues. Only
a snapshot that cannot be written stops a run (`snapshot.py`).

Left out: judging the numbers. A loss that is not finite is shown as such; the loop stops for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from regard.training.runlog import EvalReport, RunLog, StepReport, read_log

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

__all__ = ["EvalReport", "Monitor", "StepReport", "read_log"]

PLAIN_SECONDS = 10.0
REFRESH_PER_SECOND = 2  # low, since drawing takes milliseconds from the steps
BOARD_PER_SECOND = 5
SMOOTHING_STEPS = 50


@final
class Monitor:
    """Shows and logs a run in `folder`; use it in a `with`, which restores the terminal.

    total:       the step at which the run will end
    start:       how many steps were done before (0 begins a new log; else the old one continues)
    tensorboard: whether to write TensorBoard files too
    console:     the `rich` console to draw on; by default standard output
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        total: int,
        start: int = 0,
        tensorboard: bool = False,
        console: Console | None = None,
    ) -> None:
        if start < 0 or total < start:
            raise ValueError(f"start={start}, total={total}; expected 0 <= start <= total")
        path = Path(os.fsdecode(folder))
        # First, so that nothing has been touched if the package is missing.
        self._board = Board(path / "tensorboard", start) if tensorboard else None
        path.mkdir(parents=True, exist_ok=True)
        self._figures = Figures(total, start)
        # Faults of the log are shown on the screen; faults of the screen are logged.
        self._log = RunLog(path, start, self._say)
        if console is None:
            with contextlib.suppress(ImportError):
                from rich.console import Console as RichConsole

                console = RichConsole()
        self._screen = Screen(sys.stdout if console is None else console.file, self._note)
        self._live: Live | None = None
        if console is not None and console.is_terminal and not console.is_dumb_terminal:
            self._live = make_live(self._figures, path.resolve().name, console)
        self._next_at, self._shown = 0.0, start
        self._is_open = True

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.console.file = self._screen  # type: ignore[assignment]
            try:
                self._live.start()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, report: StepReport) -> None:
        """Log and show the report of a finished step; step numbers must increase."""
        self._log.step(report)
        self._figures.step(report)
        now = time.monotonic()
        if self._live is None and now >= self._next_at:
            self._next_at = now + PLAIN_SECONDS
            self._show_line()
        if self._board is not None:
            self._board.step(report, self._figures)

    def evaluated(self, report: EvalReport) -> None:
        """Log the report of an evaluation and show it at once."""
        self._log.evaluated(report)
        self._say(self._figures.evaluated(report))
        if self._board is not None:
            self._board.evaluated(report)

    def note(self, text: str) -> None:
        self._note(text)
        self._say(text)

    def close(self) -> None:
        """End the display and close the files; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._live is not None:
                self._live.stop()
            elif self._figures.done != self._shown:
                self._show_line()
        finally:
            if self._live is not None:
                # Needed if a second Ctrl-C interrupted `stop`.
                self._live.console.show_cursor(True)
                self._live.console.file = self._screen.stream
            self._log.close()
            if self._board is not None:
                self._board.close()

    def _note(self, text: str) -> None:
        self._log.note(self._figures.done, text)

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._screen.write(text + "\n")
            self._screen.flush()

    def _show_line(self) -> None:
        figures = self._figures
        self._shown, left = figures.done, figures.seconds_left
        tail = f"  {timedelta(seconds=round(left))} left" if left > 0 else ""
        self._say(f"step {figures.done:,}/{figures.total:,}  {figures}{tail}")


@final
class Figures:
    """The numbers on display, from the reports; loss and pace are means over the last steps."""

    def __init__(self, total: int, start: int) -> None:
        self.total, self.done = total, start
        self.recent: deque[StepReport] = deque(maxlen=SMOOTHING_STEPS)
        self.last_eval: EvalReport | None = None
        self.best_eval = math.inf
        self._first_at, self._first_step = 0.0, -1

    def step(self, report: StepReport) -> None:
        if self._first_step < 0:  # timed from here: the first step is mostly compilation
            self._first_at, self._first_step = time.monotonic(), report.step
        self.done = report.step
        self.recent.append(report)

    def evaluated(self, report: EvalReport) -> str:
        """Remember the report and return it as one line of text."""
        best = "  (best so far)" if report.loss < self.best_eval else ""
        self.last_eval = report
        self.best_eval = report.loss if best else self.best_eval
        unigram = {} if report.unigram is None else {"unigram": report.unigram}
        figures = {**unigram, "perplexity": report.perplexity, **report.scores}
        words = "  ".join(f"{name} {value:.2f}" for name, value in figures.items())
        return f"step {report.step:,}  eval loss {report.loss:.4f}  {words}{best}"

    @property
    def loss(self) -> float:
        """The mean of recent finite losses, or the last loss if that is not finite."""
        losses = [math.nan, *(report.loss for report in tuple(self.recent))]
        finite = [loss for loss in losses if math.isfinite(loss)]
        return sum(finite) / len(finite) if math.isfinite(losses[-1]) else losses[-1]

    @property
    def tokens_per_second(self) -> float:
        reports = tuple(self.recent)
        seconds = sum(report.seconds for report in reports)
        return sum(report.tokens for report in reports) / seconds if seconds > 0 else math.nan

    @property
    def seconds_left(self) -> float:
        """Estimated from the pace so far, evaluations and snapshots included; NaN at first."""
        n_steps = self.done - self._first_step
        if self._first_step < 0 or not n_steps:
            return math.nan
        return (time.monotonic() - self._first_at) / n_steps * (self.total - self.done)

    def __str__(self) -> str:
        if not self.recent:
            return "loss –"
        last, seen = self.recent[-1], self.last_eval
        parts = {"loss": f"{self.loss:.4f}"}
        if seen is not None:
            parts["eval"] = f"{seen.loss:.4f}"
        parts["tokens/s"] = f"{self.tokens_per_second:,.0f}"
        if last.mfu is not None:
            parts["MFU"] = f"{100 * last.mfu:.1f}%"
        if last.memory is not None:
            parts["memory"] = f"{last.memory / 2**30:.1f} GiB"
        parts |= {"lr": f"{last.lr:.2e}", "grad": f"{last.grad_norm:.3g}"}
        if seen is not None:
            parts |= {name: f"{score:.2f}" for name, score in seen.scores.items()}
        return "  ".join(f"{name} {value}" for name, value in parts.items())


# ---- The screen


@final
class Screen:
    """A text stream that after its first error (a closed pipe) reports it and writes no more."""

    def __init__(self, stream: Any, say: Callable[[str], None]) -> None:
        self.stream, self._say = stream, say
        self._is_dead = stream is None

    def write(self, text: str) -> int:
        try:
            if not self._is_dead:
                self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: it was closed in this process
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            if not self._is_dead:
                self.stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _give_up(self, error: Exception) -> None:
        self._is_dead = True
        reason = getattr(error, "strerror", None) or str(error)
        self._say(f"the display is closed ({reason}); the run goes on without it")
        if self.stream in (sys.__stdout__, sys.__stderr__):
            # Python flushes its buffer when the process ends, which would fail again.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self.stream.fileno())
                os.close(devnull)


def make_live(figures: Figures, title: str, console: Console) -> Live:
    """Build the progress bar with a line of numbers below, which a narrow terminal truncates."""
    from rich import progress
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    name = title if console.width >= 70 else ""
    task = bar.add_task(name, total=figures.total, completed=figures.done)

    def draw() -> Group:
        bar.update(task, completed=figures.done)
        style = "bold" if math.isfinite(figures.loss) or not figures.recent else "bold red"
        line = Text(str(figures), style=style, no_wrap=True, overflow="ellipsis")
        return Group(bar.get_renderable(), line)

    return Live(get_renderable=draw, console=console, refresh_per_second=REFRESH_PER_SECOND)


# ---- TensorBoard


@final
class Board:
    """Writer of TensorBoard files; a resumed run purges the steps after its start."""

    def __init__(self, folder: Path, start: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            what = "writing TensorBoard's files needs the tensorboard package"
            raise ImportError(f"{what}: pip install 'regard[train]'") from error
        purge = start + 1 if start else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)
        self.close = self._writer.close
        self._next_at = 0.0

    def step(self, report: StepReport, figures: Figures) -> None:
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + 1 / BOARD_PER_SECOND
        scalars = {name: getattr(report, name) for name in ("loss", "lr", "grad_norm", "mfu")}
        scalars["tokens_per_second"] = figures.tokens_per_second
        scalars["memory_gib"] = None if report.memory is None else report.memory / 2**30
        self._add("train", report.step, scalars)

    def evaluated(self, report: EvalReport) -> None:
        scalars = {"loss": report.loss, "perplexity": report.perplexity, **report.scores}
        scalars |= {} if report.unigram is None else {"unigram": report.unigram}
        self._add("eval", report.step, scalars)

    def _add(self, group: str, step: int, scalars: Mapping[str, float | None]) -> None:
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)
