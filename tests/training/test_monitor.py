"""A run is shown and logged as it is, cheaply, whatever becomes of the screen or the folder."""

import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from regard.training import monitor as monitor_module
from regard.training import runlog
from regard.training.monitor import EvalReport, Monitor, StepReport, read_log

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = float("nan"), float("inf")


def report(step: int, loss: float = 2.5, **more: Any) -> StepReport:
    return StepReport(
        step=step, loss=loss, lr=3e-4, grad_norm=0.83, tokens=32_768, seconds=0.25, **more
    )


def evaluation(step: int, loss: float = 2.75, **scores: float) -> EvalReport:
    return EvalReport(step=step, loss=loss, perplexity=math.exp(loss), scores=scores)


def quiet() -> Console:
    return Console(file=io.StringIO())


def screen(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def refuse(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Every line of the log, as strict JSON."""
    text = (folder / "log.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in lines_of(folder) if line["kind"] == "step"]


def run(folder: Path, start: int, stop: int, **how: Any) -> str:
    """Steps start + 1 to stop, an evaluation every third; what was shown."""
    console = how.pop("console", None) or quiet()
    shown = console.file
    with Monitor(folder, total=99, start=start, console=console, **how) as monitor:
        for step in range(start + 1, stop + 1):
            monitor.step(report(step))
            if step % 3 == 0:
                monitor.evaluated(evaluation(step, bleu=30.0 + step))
    return str(shown.getvalue())


# ---- The log


def test_the_log_says_what_was_reported_and_reads_back_equal(tmp_path: Path) -> None:
    steps = [report(1, mfu=0.34, memory=2**33), report(2, 0.1 + 0.2), report(5)]
    seen = [evaluation(2), evaluation(5, bleu=41.0, chrf=60.5)]
    with Monitor(tmp_path / "new" / "run", total=5, console=quiet()) as monitor:
        for one in steps:
            monitor.step(one)
        for other in seen:
            monitor.evaluated(other)
        monitor.note("猫\nsat")
    for where in (tmp_path / "new" / "run", tmp_path / "new" / "run" / "log.jsonl"):
        log = read_log(where)
        assert (log.steps, log.evaluations, log.damaged) == (steps, seen, 0)
        assert log.notes == [(5, "猫\nsat")]
    line = lines_of(tmp_path / "new" / "run")[0]
    assert line["kind"] == "step" and line["loss"] == 2.5 and abs(line["time"] - time.time()) < 99
    assert line["mfu"] == 0.34 and line["memory"] == 2**33


def test_a_loss_that_is_no_number_stays_strict_json(tmp_path: Path) -> None:
    with Monitor(tmp_path, total=9, console=quiet()) as monitor:
        for step, loss in enumerate((NAN, INF, -INF), start=1):
            monitor.step(replace(report(step, loss), grad_norm=NAN, mfu=INF))
        monitor.evaluated(EvalReport(step=3, loss=NAN, perplexity=INF, scores={"bleu": NAN}))
    assert [line["loss"] for line in lines_of(tmp_path)] == ["NaN", "Infinity", "-Infinity", "NaN"]
    log = read_log(tmp_path)
    assert math.isnan(log.steps[0].loss) and math.isnan(log.steps[0].grad_norm)
    assert [log.steps[1].loss, log.steps[2].loss, log.steps[0].mfu] == [INF, -INF, INF]
    assert math.isnan(log.evaluations[0].scores["bleu"]) and log.damaged == 0


def test_the_unigram_loss_stands_beside_the_loss_where_it_is_told(tmp_path: Path) -> None:
    console = quiet()
    seen = [replace(evaluation(3), unigram=6.625), evaluation(6)]
    with Monitor(tmp_path, total=9, console=console) as monitor:
        for one in seen:
            monitor.evaluated(one)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 3  eval loss 2.7500  unigram 6.62  perplexity 15.64  (best" in shown
    assert "step 6  eval loss 2.7500  perplexity 15.64\n" in shown
    log = read_log(tmp_path)
    assert log.evaluations == seen and log.damaged == 0
    assert [line.get("unigram") for line in lines_of(tmp_path)] == [6.625, None]
    # Resumed, an evaluation that the log has is not told twice.
    with Monitor(tmp_path, total=9, start=6, console=quiet()) as monitor:
        monitor.evaluated(seen[1])
    assert read_log(tmp_path).evaluations == seen


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    """A kill would end the process here."""
    monitor = Monitor(tmp_path, total=9, console=quiet())
    for step in (1, 2, 3):
        monitor.step(report(step))
        assert steps_of(tmp_path)[-1] == step
    monitor.close()
    monitor.close()
    with pytest.raises(ValueError, match="is closed"):
        monitor.note("too late")


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    run(tmp_path, 0, 11)
    before = (tmp_path / "log.jsonl").read_bytes()
    run(tmp_path, 6, 8)
    assert (
        (tmp_path / "log.jsonl")
        .read_bytes()
        .startswith(before.split(b'{"kind":"step","step":7')[0])
    )
    assert steps_of(tmp_path) == list(range(1, 9))
    run(tmp_path, 8, 13)
    assert steps_of(tmp_path) == list(range(1, 14))
    assert [line["step"] for line in lines_of(tmp_path) if line["kind"] == "eval"] == [3, 6, 9, 12]
    run(tmp_path, 0, 2)
    assert steps_of(tmp_path) == [1, 2]
    run(tmp_path, 20, 21)  # the log may have been lost; what comes is logged all the same
    assert steps_of(tmp_path) == [1, 2, 21]


def test_an_evaluation_done_again_on_resuming_is_logged_once(tmp_path: Path) -> None:
    run(tmp_path, 0, 6)
    with Monitor(tmp_path, total=9, start=6, console=quiet()) as monitor:
        monitor.evaluated(evaluation(6, bleu=36.0))
        assert len(read_log(tmp_path).evaluations) == 2
        monitor.evaluated(evaluation(6, bleu=36.5))  # another result is not dropped
        assert len(read_log(tmp_path).evaluations) == 3


def test_torn_and_foreign_lines_go_when_a_run_resumes(tmp_path: Path) -> None:
    run(tmp_path, 0, 2)
    path = tmp_path / "log.jsonl"
    for junk in (b'{"kind":"step","st', b"\xff\xfe\n", b"[1]\n", b'{"kind":"step"}\n', b"\0\0"):
        path.write_bytes(path.read_bytes() + junk)
        assert [one.step for one in read_log(path).steps] == [1, 2] and read_log(path).damaged == 1
        run(tmp_path, 2, 2)
        assert steps_of(tmp_path) == [1, 2]


def test_a_log_that_cannot_be_cut_back_is_left_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 0, 5)
    before = (tmp_path / "log.jsonl").read_bytes()

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path, 3, 5)
    assert (tmp_path / "log.jsonl").read_bytes() == before
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_steps_must_go_up(tmp_path: Path) -> None:
    with Monitor(tmp_path, total=9, start=3, console=quiet()) as monitor:
        with pytest.raises(ValueError, match="step 3 was reported after step 3"):
            monitor.step(report(3))
        monitor.step(report(4))
        with pytest.raises(ValueError, match="step 4 was reported after step 4"):
            monitor.step(report(4))
    assert steps_of(tmp_path) == [4]
    with pytest.raises(ValueError, match="start=5, total=3"):
        Monitor(tmp_path, total=3, start=5)
    with pytest.raises(ValueError, match="is not there"):
        read_log(tmp_path / "nothing")


# ---- When the disk or the folder fails


def test_a_folder_that_vanished_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    console = quiet()
    shown = console.file
    with Monitor(tmp_path / "run", total=9, console=console) as monitor:
        monitor.step(report(1))
        shutil.rmtree(tmp_path / "run")
        for step in (2, 3, 4):
            monitor.step(report(step))
    assert shown.getvalue().count("log.jsonl' is not there any more") == 1  # type: ignore[attr-defined]
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_told_once_and_what_follows_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [10**6]
    true_write = os.write

    def write(handle: int, data: bytes) -> int:
        taken = min(room[0], len(data))
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= taken
        return true_write(handle, data[:taken])

    console = quiet()
    shown = console.file
    with Monitor(tmp_path, total=9, console=console) as monitor:
        monkeypatch.setattr(runlog.os, "write", write)
        monitor.step(report(1))
        room[0] = 31  # a part of the next line
        for step in (2, 3, 4):
            monitor.step(report(step))
        room[0] = 10**6
        for step in (5, 6):
            monitor.step(report(step))
        monkeypatch.undo()
    assert shown.getvalue().count("cannot be written: No space left on device") == 1  # type: ignore[attr-defined]
    log = read_log(tmp_path)
    assert [one.step for one in log.steps] == [1, 5, 6] and log.damaged == 1


# ---- The display


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_bar_fits_its_terminal(width: int) -> None:
    console = screen(width)
    figures = monitor_module.Figures(10_000, 0)
    live = monitor_module.make_live(figures, "my run", console)
    console.print(live.get_renderable())  # before the first step
    assert "loss –" in console.file.getvalue()  # type: ignore[attr-defined]
    for step in range(1, 4813):
        figures.step(report(step, 2.0 + 8 / step, mfu=0.3412, memory=13 * 2**30))
    figures.evaluated(evaluation(4800, 2.4102, bleu=31.2, chrf=55.5))
    console.file = io.StringIO()
    console.print(live.get_renderable())
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= width
    assert "4812/10000" in lines[0] and ("my run" in lines[0]) == (width >= 70)
    # The most wanted first; what has no room is cut off.
    assert lines[1].startswith("loss 2.0017  eval 2.4102  tokens/s")
    for wanted in ("131,072", "34.1%", "13.0 GiB"):
        assert (wanted in lines[1]) == (width >= 80)
    assert ("31.20" in lines[1] and "55.50" in lines[1]) == (width == 200)
    assert lines[1].endswith("…") == (width < 200)


def test_the_bar_is_left_on_the_screen_and_the_cursor_comes_back(tmp_path: Path) -> None:
    console = screen(80)
    shown = run(tmp_path / "my run", 0, 7, console=console)
    assert "my run" in shown and "7/99" in shown
    assert "step 6  eval loss 2.7500  perplexity 15.64  bleu 36.00" in shown
    assert shown.count("(best so far)") == 1  # an equal one is no better
    assert shown.count("\x1b[?25l") == 1 and shown.rfind("\x1b[?25h") > shown.rfind("7/99")
    assert not isinstance(sys.stdout, type(console.file)) and isinstance(console.file, io.StringIO)


def test_a_note_is_shown_as_it_is(tmp_path: Path) -> None:
    console = screen(80)
    with Monitor(tmp_path, total=9, console=console) as monitor:
        monitor.note("[bold]not markup[/bold] " + "x" * 100)
    assert "[bold]not markup[/bold] " + "x" * 100 in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [screen, lambda width: quiet()])
def test_a_loss_that_is_no_number_is_shown(tmp_path: Path, make: Any) -> None:
    console = make(80)
    shown = console.file
    with Monitor(tmp_path, total=9, console=console) as monitor:
        for step in range(1, 5):
            monitor.step(report(step))
        assert "nan" not in shown.getvalue()
        monitor.step(report(5, NAN))
    assert "nan" in shown.getvalue()


def test_lines_come_by_the_clock_and_not_by_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: now[0])
    console = quiet()
    shown = console.file
    with Monitor(tmp_path, total=1000, console=console) as monitor:
        for step in range(1, 501):
            monitor.step(report(step, memory=2**31))
            now[0] += 0.125
    lines = shown.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("/")[0] for line in lines] == [
        f"step {step}" for step in (1, 81, 161, 241, 321, 401, 481, 500)
    ]
    assert lines[1] == (
        "step 81/1,000  loss 2.5000  tokens/s 131,072  memory 2.0 GiB  lr 3.00e-04  grad 0.83"
        "  0:01:55 left"
    )


def test_figures_are_smoothed_fairly() -> None:
    figures = monitor_module.Figures(100, 0)
    figures.step(report(1, 4.0))
    assert figures.loss == pytest.approx(4.0) and math.isnan(figures.seconds_left)
    for step in range(2, 80):
        figures.step(report(step, 2.0 if step % 2 else 3.0))
    assert 2.3 < figures.loss < 2.75
    assert figures.tokens_per_second == pytest.approx(4 * 32_768)
    figures.step(report(80, NAN))
    assert math.isnan(figures.loss)
    figures.step(report(81, 2.0))
    assert 2.3 < figures.loss < 2.75


def test_without_rich_lines_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with Monitor(tmp_path, total=9) as monitor:
        monitor.step(report(1))
        monitor.note("a note")
    assert capsys.readouterr().out.startswith("step 1/9  loss 2.5000")


def test_a_stream_of_few_letters_gets_question_marks(tmp_path: Path) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    with Monitor(tmp_path, total=9, console=console) as monitor:
        monitor.note("猫 sat")
    assert raw.getvalue() == b"? sat\n"
    assert read_log(tmp_path).notes == [(0, "猫 sat")]


@pytest.mark.parametrize("make", [screen, lambda width: quiet()])
def test_a_screen_that_closes_is_noted_in_the_log(tmp_path: Path, make: Any) -> None:
    console = make(80)
    with Monitor(tmp_path, total=9, console=console) as monitor:
        monitor.step(report(1))
        console.file.close() if hasattr(console.file, "getvalue") else console.file.stream.close()
        monitor.evaluated(evaluation(1))
        for step in range(2, 6):
            monitor.step(report(step))
    log = read_log(tmp_path)
    assert len(log.steps) == 5
    assert [text for _, text in log.notes] == [
        "the display is closed (I/O operation on closed file); the run goes on without it"
    ]


TRAIN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from pathlib import Path
from regard.training.monitor import Monitor, StepReport, EvalReport
from regard.training import monitor
monitor.PLAIN_SECONDS = 0.0
with Monitor(Path(sys.argv[1]), total=int(sys.argv[2])) as monitor:
    for step in range(1, int(sys.argv[2]) + 1):
        monitor.step(
            StepReport(step=step, loss=2.5, lr=0.1, grad_norm=1.0, tokens=7, seconds=0.01)
        )
        time.sleep(float(sys.argv[3]))
print("what a program prints after training")
"""


def start_training(*arguments: object, **how: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-W", "error", "-c", TRAIN, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, **how)


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    """As in `regard train ... | head -1`."""
    run = start_training(tmp_path, 3000, 0, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline().startswith(b"step 1/3,000")
    run.stdout.close()
    errors = run.stderr.read()
    run.stderr.close()
    assert (run.wait(), errors) == (0, b"")
    log = read_log(tmp_path)
    assert len(log.steps) == 3000
    assert [text for _, text in log.notes] == [
        "the display is closed (Broken pipe); the run goes on without it"
    ]


def test_ctrl_c_leaves_the_terminal_clean(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    run = start_training(tmp_path, 3000, 0.01, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while b"loss" not in shown:
        shown += os.read(ours, 65536)
    assert b"\x1b[?25l" in shown  # the cursor is hidden while the bar is drawn
    run.send_signal(signal.SIGINT)
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    assert run.wait() in (-signal.SIGINT, 130)
    after = shown.rpartition(b"\x1b[?25h")[2]
    assert shown.count(b"\x1b[?25l") == 1 and b"\x1b[?25h" in shown
    assert b"/3000" not in after and b"KeyboardInterrupt" in after


# ---- What it costs


@pytest.mark.parametrize("kind", ["plain", "live", "board"])
def test_a_report_costs_microseconds(tmp_path: Path, kind: str) -> None:
    """Of processor time, the best of several hundreds: other work on the machine counts less."""
    console = screen(80) if kind == "live" else quiet()
    best = 1.0
    with Monitor(tmp_path, total=10**6, console=console, tensorboard=kind == "board") as monitor:
        for start in range(1, 2001, 200):
            reports = [report(step, mfu=0.3, memory=2**31) for step in range(start, start + 200)]
            began = time.thread_time()
            for one in reports:
                monitor.step(one)
            best = min(best, (time.thread_time() - began) / 200)
    assert best < 50e-6, f"{best * 1e6:.0f} µs a step"


# ---- TensorBoard


def test_without_tensorboard_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[train\]'"):
        Monitor(tmp_path / "run", total=9, tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_tensorboard_reads_the_run_and_its_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("regard.training.monitor.BOARD_PER_SECOND", 1e9)
    for start, stop, loss in ((0, 7, 2.5), (4, 9, 1.5)):
        if start:
            time.sleep(1.1)  # the files are read in the order of their names, which count seconds
        with Monitor(tmp_path, total=9, start=start, console=quiet(), tensorboard=True) as monitor:
            for step in range(start + 1, stop + 1):
                monitor.step(report(step, loss, mfu=0.25, memory=2**31))
            monitor.evaluated(evaluation(stop, loss, bleu=41.0))
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(step, 2.5 if step <= 4 else 1.5) for step in range(1, 10)]
    assert [(e.step, e.value) for e in found.Scalars("eval/bleu")] == [(9, 41.0)]
    assert found.Scalars("train/tokens_per_second")[-1].value == pytest.approx(4 * 32_768)
    assert {"train/mfu", "train/memory_gib", "train/lr", "train/grad_norm", "eval/loss"} <= set(
        found.Tags()["scalars"]
    )
