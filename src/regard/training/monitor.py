"""The monitor of a run: it shows how training goes, logs it, and can feed TensorBoard.

The loop reports each step and each evaluation; `runlog.py` writes them to `log.jsonl`, `display.py`
shows them, and TensorBoard's files lie in `tensorboard/` beside the log if they are asked for. None
of these may cost the run anything that matters: a step's report takes tens of microseconds (so
TensorBoard gets at most `BOARD_PER_SECOND` steps a second; the log has them all), and a screen that
closed, a folder that vanished or a disk that is full is said once, where it still can be, and the
run goes on. Snapshots are what a full disk must stop, and `snapshot.py` does.

Left out: judging the figures. A loss that is not a number is shown as NaN; the loop stops for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from regard.training.display import Progress, choose_display, spell_eval
from regard.training.runlog import EvalReport, RunLog, StepReport, read_log

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EvalReport", "Monitor", "StepReport", "read_log"]

BOARD_PER_SECOND = 5


@final
class Monitor:
    """Shows and logs a run in `folder`; use it in a `with`, which leaves the terminal clean.

    total:       the step at which the run will end
    start:       how many steps were done before (0 begins a new log; else the old one goes on)
    tensorboard: whether to write TensorBoard's files too
    console:     a `rich` console to show it on; by default standard output
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
        # The optional package first: if it is missing, nothing has been touched.
        make_board = _load_board() if tensorboard else None
        path.mkdir(parents=True, exist_ok=True)
        self._progress = Progress(total, start)
        self._display = choose_display(self._progress, path.resolve().name, console)
        self._log = RunLog(path, start)
        self._board = None if make_board is None else make_board(path / "tensorboard", start)
        self._is_open = True

    def __enter__(self) -> Self:
        try:
            self._display.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(self, report: StepReport) -> None:
        """Take the report of a finished step; steps must go up."""
        self._log.step(report)
        self._progress.step(report)
        self._display.step()
        if self._board is not None:
            self._board.step(report, self._progress.tokens_per_second)
        self._tell_trouble()

    def evaluated(self, report: EvalReport) -> None:
        """Take the report of an evaluation; it is shown at once."""
        self._log.evaluated(report)
        is_best = self._progress.evaluated(report)
        self._display.say(spell_eval(report, is_best))
        if self._board is not None:
            self._board.evaluated(report)
        self._tell_trouble()

    def note(self, text: str) -> None:
        """Show and log a sentence."""
        self._log.note(self._progress.done, text)
        self._display.say(text)
        self._tell_trouble()

    def close(self) -> None:
        """End the display and close the files; may be done again."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._display.stop()
            self._tell_trouble()
        finally:
            self._log.close()
            if self._board is not None:
                self._board.close()

    def _tell_trouble(self) -> None:
        """What the log could not take is shown; what could not be shown is logged."""
        for text in self._log.take_trouble():
            self._display.say(text)
        screen = self._display.screen
        if screen.trouble:
            told, screen.trouble = screen.trouble, []
            for text in told:
                self._log.note(self._progress.done, text)


# ---- TensorBoard


def _load_board() -> type[_Board]:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "writing TensorBoard's files needs the tensorboard package: pip install 'regard[train]'"
        ) from error
    return _Board


@final
class _Board:
    """TensorBoard's files; a resumed run tells it to forget the steps after its start."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard.writer import FileWriter

        events: Any = import_module("tensorboard.compat.proto.event_pb2")  # has no types
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer: Any = FileWriter(str(folder), flush_secs=10)
        self._next = 0.0
        if start:
            begun = events.SessionLog(status=events.SessionLog.START)
            self._writer.add_event(events.Event(session_log=begun), start + 1)

    def step(self, report: StepReport, tokens_per_second: float) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1 / BOARD_PER_SECOND
        figures = {
            "train/loss": report.loss,
            "train/lr": report.lr,
            "train/grad_norm": report.grad_norm,
            "train/tokens_per_second": tokens_per_second,
        }
        if report.mfu is not None:
            figures["train/mfu"] = report.mfu
        if report.memory is not None:
            figures["train/memory_gib"] = report.memory / 2**30
        self._add(report.step, figures)

    def evaluated(self, report: EvalReport) -> None:
        figures = {"eval/loss": report.loss, "eval/perplexity": report.perplexity}
        figures.update({f"eval/{name}": score for name, score in report.scores.items()})
        self._add(report.step, figures)

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, figures: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in figures.items()
        ]
        self._writer.add_summary(self._summary(value=values), step)
