"""What a run shows while it goes: a live panel on a terminal, a plain line now and then elsewhere.

Both are made from the same `Progress`, which smooths the loss, the pace and the time left. The
panel is drawn by a thread of `rich`, so a step only leaves its figures here; without `rich`, or
without a terminal, one line is printed every `PLAIN_SECONDS`.

A screen that goes away (a closed pipe, a closed terminal) must not end a run of hours: the stream
is wrapped, and after its first error all that is shown is dropped, and `trouble` tells of it.

Left out: several runs on one screen, notebooks (they get the plain lines).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TextIO, final

from regard.training.runlog import EvalReport, StepReport

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

PLAIN_SECONDS = 10.0
REFRESH_PER_SECOND = 2  # drawing takes milliseconds that the steps could have had
MEMORY_OF_STEPS = 50  # over about so many steps are the figures smoothed
_TRACE = 512
_BARS = "▁▂▃▄▅▆▇█"


# ---- Figures


@final
class Smooth:
    """A mean that forgets; fair from the first value on. What is not finite is passed over."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            share = 1.0 / MEMORY_OF_STEPS
            self._sum += share * (value - self._sum)
            self._weight += share * (1.0 - self._weight)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else math.nan


@final
class Progress:
    """Where a run is, from its reports."""

    def __init__(self, total: int, start: int) -> None:
        self.total, self.done = total, start
        self.began = time.monotonic()
        self.last: StepReport | None = None
        self.last_eval: EvalReport | None = None
        self.best_eval = math.inf
        self.trace: list[float] = []  # the smoothed loss from start to now, evenly thinned out
        self._loss, self._tokens, self._seconds, self._wall = Smooth(), Smooth(), Smooth(), Smooth()
        self._stepped_at = 0.0
        self._stride = 1

    def step(self, report: StepReport) -> None:
        now = time.monotonic()
        if self.last is not None:  # the first step's time is mostly compiling
            self._wall.add((now - self._stepped_at) / max(1, report.step - self.done))
        self._stepped_at, self.done, self.last = now, report.step, report
        self._loss.add(report.loss)
        self._tokens.add(report.tokens)
        self._seconds.add(report.seconds)
        if report.step % self._stride == 0 and math.isfinite(self._loss.value):
            self.trace.append(self._loss.value)
            if len(self.trace) >= _TRACE:
                self.trace, self._stride = self.trace[1::2], self._stride * 2

    def evaluated(self, report: EvalReport) -> bool:
        """Take the report; whether its loss is the lowest so far."""
        is_best = report.loss < self.best_eval
        self.last_eval = report
        self.best_eval = report.loss if is_best else self.best_eval
        return is_best

    @property
    def loss(self) -> float:
        """Smoothed, but never hiding that the last one was not a number."""
        if self.last is not None and not math.isfinite(self.last.loss):
            return self.last.loss
        return self._loss.value

    @property
    def tokens_per_second(self) -> float:
        seconds = self._seconds.value
        return self._tokens.value / seconds if seconds > 0 else math.nan

    @property
    def seconds_left(self) -> float:
        return 0.0 if self.done >= self.total else self._wall.value * (self.total - self.done)


# ---- Figures in words


def spell_loss(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if value != value else "inf" if value > 0 else "-inf"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def spell_time(seconds: float) -> str:
    """3:07, 1:02:03, 2 d 03:04; a dash where nothing is known yet."""
    if not math.isfinite(seconds):
        return "–"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def spell_rate(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if value >= 1e5 else f"{value:,.0f}"


def spell_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def spell_eval(report: EvalReport, is_best: bool) -> str:
    """One line of an evaluation."""
    parts = [f"eval loss {spell_loss(report.loss)}", f"perplexity {_short(report.perplexity)}"]
    parts += [f"{name} {_short(score)}" for name, score in report.scores.items()]
    return f"step {report.step:,}  " + "  ".join(parts) + ("  (best so far)" if is_best else "")


def _short(value: float) -> str:
    return f"{value:.2f}" if 0.01 <= abs(value) < 1e5 or value == 0 else f"{value:.3g}"


def figures_of(progress: Progress) -> dict[str, str]:
    """What is known, by label, the most wanted first."""
    last, seen = progress.last, progress.last_eval
    if last is None:
        return {"loss": "–"}
    found = {"loss": spell_loss(progress.loss)}
    if seen is not None:
        found["eval"] = spell_loss(seen.loss)
    found["tokens/s"] = spell_rate(progress.tokens_per_second)
    if last.mfu is not None:
        found["MFU"] = f"{100 * last.mfu:.1f}%"
    if last.memory is not None:
        found["memory"] = spell_bytes(last.memory)
    found["lr"] = f"{last.lr:.2e}"
    found["grad"] = _short(last.grad_norm)
    if seen is not None:
        found.update({name: _short(score) for name, score in seen.scores.items()})
    return found


# ---- The stream below


@final
class Screen:
    """A text stream that no longer takes part after its first error, and says so once."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.is_dead = stream is None
        self.trouble: list[str] = []

    def write(self, text: str) -> int:
        if not self.is_dead and self.stream is not None:
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                encoding = self.stream.encoding
                self.write(text.encode(encoding, "replace").decode(encoding))
            except (OSError, ValueError) as error:  # ValueError: it was closed in this process
                self._give_up(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self.is_dead and self.stream is not None:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _give_up(self, error: Exception) -> None:
        self.is_dead = True
        said = getattr(error, "strerror", None) or str(error)
        self.trouble.append(f"the display is closed ({said}); the run goes on without it")
        if self.stream in (sys.__stdout__, sys.__stderr__):
            # What Python still holds for it would fail again when the process ends.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())  # type: ignore[union-attr]
                os.close(nowhere)


# ---- Displays


class Display(Protocol):
    """What shows a run; `trouble` is what could not be shown."""

    screen: Screen

    def start(self) -> None: ...
    def step(self) -> None: ...
    def say(self, text: str) -> None: ...
    def stop(self) -> None: ...


def choose_display(progress: Progress, title: str, console: Console | None) -> Display:
    """The panel where it can be drawn, plain lines otherwise."""
    if console is None:
        try:
            from rich.console import Console as RichConsole
        except ImportError:
            return PlainDisplay(progress, sys.stdout)
        console = RichConsole()
    if console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter:
        return LiveDisplay(progress, title, console)
    return PlainDisplay(progress, console.file)


@final
class PlainDisplay:
    """A line for the first step, one every `PLAIN_SECONDS`, and one for the last."""

    def __init__(self, progress: Progress, stream: Any) -> None:
        self.screen = Screen(stream)
        self._progress = progress
        self._next = 0.0
        self._shown = progress.done

    def start(self) -> None:
        pass

    def step(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PLAIN_SECONDS
            self._show()

    def say(self, text: str) -> None:
        self.screen.write(text + "\n")
        self.screen.flush()

    def stop(self) -> None:
        if self._progress.done != self._shown:
            self._show()

    def _show(self) -> None:
        progress = self._progress
        self._shown = progress.done
        figures = "  ".join(f"{name} {value}" for name, value in figures_of(progress).items())
        left = progress.seconds_left
        tail = f"  {spell_time(left)} left" if math.isfinite(left) and left > 0 else ""
        self.say(f"step {progress.done:,}/{progress.total:,}  {figures}{tail}")


@final
class LiveDisplay:
    """A panel that stays at the foot of the terminal; what is said scrolls by above it."""

    def __init__(self, progress: Progress, title: str, console: Console) -> None:
        from rich.live import Live

        self._progress, self._title, self._console = progress, title, console
        self.screen = Screen(console.file)  # type: ignore[arg-type]
        self._stream = console.file
        self._live = Live(
            get_renderable=self.draw, console=console, refresh_per_second=REFRESH_PER_SECOND
        )

    def start(self) -> None:
        self._console.file = self.screen  # type: ignore[assignment]
        self._live.start()

    def step(self) -> None:
        pass

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        try:
            self._live.stop()
        finally:
            self._console.show_cursor(True)  # also when a second Ctrl-C cut the stopping short
            self._console.file = self._stream

    def draw(self) -> Panel:
        """The panel as it is now, for the console's width."""
        from rich import box
        from rich.console import Group
        from rich.panel import Panel

        width = self._console.width - 4
        rows: list[Table | Text] = [self._draw_bar(), _draw_figures(self._progress, width)]
        trace = self._progress.trace
        if len(trace) > 1 and not self._console.options.ascii_only:
            rows.append(_draw_trace(trace, width))
        look: dict[str, Any] = {"box": box.ROUNDED, "border_style": "dim"}
        return Panel(Group(*rows), title=self._title, title_align="left", **look)

    def _draw_bar(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        progress = self._progress
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_column(no_wrap=True, justify="right")
        share = min(1.0, progress.done / progress.total) if progress.total else 1.0
        is_wide = self._console.width >= 70
        gone = f"{spell_time(time.monotonic() - progress.began)} [dim]gone[/]  "
        row.add_row(
            f"[bold]{progress.done:,}[/] [dim]of[/] {progress.total:,}"
            + (" [dim]steps[/]" if is_wide else ""),
            ProgressBar(total=1.0, completed=share),
            f"{math.floor(100 * share)}%",
            (gone if is_wide else "") + f"{spell_time(progress.seconds_left)} [dim]left[/]",
        )
        return row


def _draw_figures(progress: Progress, width: int) -> Table:
    """Labels over figures, as many as the width has room for."""
    from rich.table import Table
    from rich.text import Text

    shown = _fit(figures_of(progress), width)
    grid = Table.grid(padding=(0, 3), expand=False)
    for _ in shown:
        grid.add_column(no_wrap=True, min_width=8)
    grid.add_row(*(Text(label, style="dim") for label in shown))
    broken = not math.isfinite(progress.loss) and progress.last is not None
    styles = {"loss": "bold red" if broken else "bold cyan", "eval": "bold magenta"}
    grid.add_row(*(Text(value, style=styles.get(name, "bold")) for name, value in shown.items()))
    return grid


def _fit(figures: Mapping[str, str], width: int) -> dict[str, str]:
    shown: dict[str, str] = {}
    used = 0
    for label, value in figures.items():
        used += max(8, len(label), len(value)) + 3
        if used - 3 > width:
            break
        shown[label] = value
    return shown


def _draw_trace(trace: list[float], width: int) -> Text:
    """The smoothed loss from the first step to now, as a row of bars."""
    from rich.text import Text

    first, last = spell_loss(trace[0]), spell_loss(trace[-1])
    room = max(1, width - len(first) - len(last) - 2)
    size = min(room, len(trace))
    edges = [len(trace) * place // size for place in range(size + 1)]
    means = [sum(trace[a:b]) / (b - a) for a, b in pairwise(edges)]
    # The first few fall from far above, and would press the rest flat: they are cut at the top.
    low, high = min(means), max(means[size // 20 :])
    top = len(_BARS) - 1
    scale = top / (high - low) if high > low else 0.0
    bars = "".join(_BARS[min(top, round(scale * (value - low)))] for value in means)
    return Text.assemble((first, "dim"), " ", (bars, "cyan"), " ", (last, "dim"))
