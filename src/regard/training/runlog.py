"""The log of a run: what a step and an evaluation tell, in `log.jsonl`, one JSON object a line.

    {"kind":"step","step":1,"time":...,"loss":10.8,"lr":...,"grad_norm":...,"tokens":...,"seconds":...}
    {"kind":"eval","step":100,"time":...,"loss":...,"perplexity":...,"scores":{"bleu":...}}
    {"kind":"note","step":100,"time":...,"text":"..."}

Each line goes to the system at once, so a kill loses none. JSON has no word for what is not a
finite number; such a figure is written as "NaN", "Infinity" or "-Infinity", in quotes, and comes
back as the number. A run that resumes at a step drops all lines after it (the file is rewritten
beside and renamed), so no step is told twice; a line torn by a power cut goes too.

A log that cannot be written does not stop a run: `trouble` says what is wrong, once for each kind.

Left out: locking against a second run in the same folder.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, final

from regard._files import replace_file, spell_path

LOG = "log.jsonl"
LOOK_SECONDS = 1.0  # how often to look whether the file is still where it was

_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode


@final
@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of training; `step` counts finished steps, so that the first is 1.

    `tokens` and `seconds` are this step's own, `mfu` is a share (0.34 for 34%), `memory` in bytes.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    mfu: float | None = None
    memory: int | None = None


@final
@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """One evaluation, after `step` finished steps; `scores` by name, such as {"bleu": 41.0}."""

    step: int
    loss: float
    perplexity: float
    scores: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Log:
    """A log as it was read; `damaged` counts lines that are not ours or not whole."""

    steps: list[StepReport]
    evaluations: list[EvalReport]
    notes: list[tuple[int, str]]
    damaged: int


# ---- Numbers in strict JSON


def _to_json(number: float) -> float | str:
    number = float(number)
    if math.isfinite(number):
        return number
    return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"


def _from_json(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("not a number")
    return float(value)


# ---- Writing


@final
class RunLog:
    """The open log of a run that goes on after `start` finished steps (0: a new log)."""

    def __init__(self, folder: Path, start: int) -> None:
        self.path = folder / LOG
        self.last_step = start
        self._had = _drop_after(self.path, start)
        self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._is_torn = self._is_gone = self._is_refused = False
        self._looked = time.monotonic()
        self._told: list[str] = []

    def step(self, report: StepReport) -> None:
        if report.step <= self.last_step:
            raise ValueError(
                f"step {report.step} was reported after step {self.last_step}; steps count "
                "finished ones and go up, and a resumed run begins with the one after its start"
            )
        self.last_step = int(report.step)
        line = {
            "kind": "step",
            "step": self.last_step,
            "time": time.time(),
            "loss": _to_json(report.loss),
            "lr": _to_json(report.lr),
            "grad_norm": _to_json(report.grad_norm),
            "tokens": int(report.tokens),
            "seconds": _to_json(report.seconds),
        }
        if report.mfu is not None:
            line["mfu"] = _to_json(report.mfu)
        if report.memory is not None:
            line["memory"] = int(report.memory)
        self._put(line)

    def evaluated(self, report: EvalReport) -> None:
        """Log an evaluation, but for one that the log had already when the run resumed."""
        line = {
            "kind": "eval",
            "step": int(report.step),
            "time": time.time(),
            "loss": _to_json(report.loss),
            "perplexity": _to_json(report.perplexity),
            "scores": {name: _to_json(score) for name, score in report.scores.items()},
        }
        if {**line, "time": 0} != self._had:
            self._put(line)

    def note(self, step: int, text: str) -> None:
        self._put({"kind": "note", "step": int(step), "time": time.time(), "text": text})

    def take_trouble(self) -> list[str]:
        """What went wrong with the log since this was last asked."""
        told, self._told = self._told, []
        return told

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _put(self, line: Mapping[str, Any]) -> None:
        if self._handle < 0:
            raise ValueError(f"{spell_path(self.path)} is closed; report before closing")
        data = (_encode(line) + "\n").encode("ascii")
        if self._is_torn:
            data = b"\n" + data  # what there was of the last line stays a line of its own
        try:
            written = os.write(self._handle, data)
            self._is_torn = written < len(data)
            self._look()
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                self._told.append(
                    f"{spell_path(self.path)} cannot be written: {error.strerror or error}. The "
                    "run goes on; lines are missing from its log"
                )

    def _look(self) -> None:
        """Lines still find their way into a file that was moved or deleted; nobody else does."""
        now = time.monotonic()
        if self._is_gone or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            self._is_gone = not os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except FileNotFoundError:
            self._is_gone = True
        if self._is_gone:
            self._told.append(
                f"{spell_path(self.path)} is not there any more: it, or its folder, was moved, "
                "replaced or deleted. The run goes on; what it logs from here on may be lost"
            )


def _drop_after(path: Path, start: int) -> dict[str, Any] | None:
    """Cut an old log back to `start` steps; give its last evaluation, as if of the time 0."""
    if start == 0 or not path.exists():
        if path.exists():
            with replace_file(path):
                pass
        return None
    kept: list[bytes] = []
    dropped, last_step, evaluation = 0, 0, None
    for raw, line in _read_lines(path):
        told = None if line is None else _check_line(line)
        if (
            line is None
            or told is None
            or told[1] > start
            or (told[0] == "step" and told[1] <= last_step)
        ):
            dropped += 1
            continue
        kept.append(raw)
        if told[0] == "step":
            last_step = told[1]
        elif told[0] == "eval":
            evaluation = {**line, "time": 0}
    if dropped:
        with replace_file(path) as file:
            file.writelines(kept)
    return evaluation


# ---- Reading


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line with what it says; None for one that is torn or no JSON object."""
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                line = None
            yield raw, line if isinstance(line, dict) else None


def _check_line(line: Mapping[str, Any]) -> tuple[str, int] | None:
    """The line's kind and step, or None if it has none."""
    kind, step = line.get("kind"), line.get("step")
    if isinstance(kind, str) and isinstance(step, int) and not isinstance(step, bool):
        return kind, step
    return None


_STEP_NUMBERS = [f.name for f in fields(StepReport) if f.name not in ("step", "mfu", "memory")]


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a log: the file, or the run's folder that it lies in."""
    path = Path(os.fsdecode(path))
    path = path / LOG if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{spell_path(path)} is not there; expected a run's folder or its {LOG}")
    log, damaged = Log([], [], [], 0), 0
    for _, line in _read_lines(path):
        try:
            _add_line(log, line)
        except (KeyError, TypeError, ValueError, AttributeError):
            damaged += 1
    return Log(log.steps, log.evaluations, log.notes, damaged)


def _add_line(log: Log, line: dict[str, Any] | None) -> None:
    told = None if line is None else _check_line(line)
    if line is None or told is None:
        raise ValueError("no line of a log")
    kind, step = told
    if kind == "step":
        numbers: dict[str, Any] = {name: _from_json(line[name]) for name in _STEP_NUMBERS}
        numbers["tokens"] = int(numbers["tokens"])
        mfu, memory = line.get("mfu"), line.get("memory")
        log.steps.append(
            StepReport(
                step=step,
                **numbers,
                mfu=None if mfu is None else _from_json(mfu),
                memory=None if memory is None else int(memory),
            )
        )
    elif kind == "eval":
        scores = {name: _from_json(score) for name, score in line["scores"].items()}
        loss, perplexity = _from_json(line["loss"]), _from_json(line["perplexity"])
        log.evaluations.append(
            EvalReport(step=step, loss=loss, perplexity=perplexity, scores=scores)
        )
    elif kind == "note":
        log.notes.append((step, str(line["text"])))
