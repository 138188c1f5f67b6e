"""The log of a run: what a step and an evaluation tell, in `log.jsonl`, one JSON object a line.

    {"kind":"step","step":1,"time":...,"loss":10.8,"lr":...,"grad_norm":...,"tokens":...,"seconds":...}
    {"kind":"eval","step":100,"time":...,"loss":...,"perplexity":...,"scores":{"bleu":...}}
    {"kind":"note","step":100,"time":...,"text":"..."}

Each line goes to the system at once, so a kill loses none. JSON has no word for what is not a
finite number; such a figure is written as "NaN", "Infinity" or "-Infinity", in quotes, and comes
back as the number. A run that resumes at a step drops all lines after it (the file is rewritten
beside and renamed), so no step is told twice; a line torn by a power cut goes too.

A log that cannot be written does not stop a run: `take_trouble` says what is wrong, once for each
kind of fault.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from regard._files import replace_file, spell_path

LOG = "log.jsonl"

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


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


@final
class RunLog:
    """The open log of a run that goes on after `start` finished steps (0: a new log)."""

    def __init__(self, folder: Path, start: int) -> None:
        self.path = folder / LOG
        self.last_step = start
        self._last_eval = _cut_back(self.path, start)
        self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._is_torn = self._is_gone = self._is_refused = False
        self._trouble: list[str] = []

    def step(self, report: StepReport) -> None:
        if report.step <= self.last_step:
            raise ValueError(
                f"step {report.step} was reported after step {self.last_step}; steps count "
                "finished ones and go up, and a resumed run begins with the one after its start"
            )
        self.last_step = int(report.step)
        self._put("step", {name: x for name, x in vars(report).items() if x is not None})

    def evaluated(self, report: EvalReport) -> None:
        """Log an evaluation, but for one that the log had already when the run resumed."""
        if _strict(asdict(report)) != self._last_eval:
            self._put("eval", asdict(report))

    def note(self, step: int, text: str) -> None:
        self._put("note", {"step": step, "text": text})

    def take_trouble(self) -> list[str]:
        """What went wrong with the log since this was last asked."""
        trouble, self._trouble = self._trouble, []
        return trouble

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _put(self, kind: str, fields: dict[str, Any]) -> None:
        if self._handle < 0:
            raise ValueError(f"{spell_path(self.path)} is closed; report before closing")
        line = {"kind": kind, "step": fields["step"], "time": time.time(), **_strict(fields)}
        # What there was of a torn line stays a line of its own.
        data = (("\n" if self._is_torn else "") + _encode(line) + "\n").encode("ascii")
        try:
            self._is_torn = os.write(self._handle, data) < len(data)
            if not self._is_gone and not self._is_there():
                self._is_gone = True
                self._trouble.append(
                    f"{spell_path(self.path)} is not there any more: it, or its folder, was moved, "
                    "replaced or deleted. The run goes on; what it logs from here on may be lost"
                )
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                self._trouble.append(
                    f"{spell_path(self.path)} cannot be written: {error.strerror or error}. The "
                    "run goes on; lines are missing from its log"
                )

    def _is_there(self) -> bool:
        """Lines still find their way into a file that was moved or deleted; nobody else does."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except FileNotFoundError:
            return False


def _strict(value: Any) -> Any:
    """The value as strict JSON has it: what is not finite by its name."""
    if isinstance(value, Mapping):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, str | int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"


# ---- Reading

_Report = TypeVar("_Report", StepReport, EvalReport)


class _Line(NamedTuple):
    raw: bytes
    kind: str
    step: int
    fields: dict[str, Any]
    """Empty for a line that is torn, or none of ours."""


def _read_lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as file:
        for raw in file:
            try:
                fields = json.loads(raw) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                fields = None
            fields = fields if isinstance(fields, dict) else {}
            kind, step = fields.get("kind"), fields.get("step")
            if isinstance(kind, str) and type(step) is int:
                yield _Line(raw, kind, step, fields)
            else:
                yield _Line(raw, "", -1, {})


def _cut_back(path: Path, start: int) -> dict[str, Any] | None:
    """Cut an old log back to `start` steps; give its last evaluation."""
    kept: list[bytes] = []
    n_lines, last_step, evaluation = 0, 0, None
    for line in _read_lines(path) if path.exists() else ():
        n_lines += 1
        is_new = line.kind != "step" or line.step > last_step
        if not start or not line.fields or line.step > start or not is_new:
            continue
        kept.append(line.raw)
        if line.kind == "step":
            last_step = line.step
        elif line.kind == "eval":
            evaluation = {k: x for k, x in line.fields.items() if k not in ("kind", "time")}
    if len(kept) < n_lines:
        with replace_file(path) as file:
            file.writelines(kept)
    return evaluation


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a log: the file, or the run's folder that it lies in."""
    path = Path(os.fsdecode(path))
    path = path / LOG if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{spell_path(path)} is not there; expected a run's folder or its {LOG}")
    log, damaged = Log([], [], [], 0), 0
    for line in _read_lines(path):
        try:
            _add_line(log, line)
        except (KeyError, TypeError, ValueError, AttributeError):
            damaged += 1
    return Log(log.steps, log.evaluations, log.notes, damaged)


def _add_line(log: Log, line: _Line) -> None:
    if line.kind == "step":
        log.steps.append(_to_report(StepReport, line.fields))
    elif line.kind == "eval":
        log.evaluations.append(_to_report(EvalReport, line.fields))
    elif line.kind == "note":
        log.notes.append((line.step, str(line.fields["text"])))
    elif not line.kind:
        raise ValueError("no line of a log")


def _to_report(kind: type[_Report], found: Mapping[str, Any]) -> _Report:
    """The report of a line; ValueError or TypeError where a figure is missing or no number."""
    types = {one.name: str(one.type) for one in fields(kind) if one.name in found}
    return kind(**{name: _to_number(found[name], types[name]) for name in types})


def _to_number(value: Any, type_name: str) -> Any:
    if isinstance(value, dict) and type_name.startswith("Mapping"):
        return {name: _to_number(item, "float") for name, item in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    return int(value) if type_name.startswith("int") else float(value)
