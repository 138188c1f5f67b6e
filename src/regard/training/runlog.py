"""The log of a run: reports of steps and evaluations in `log.jsonl`, one JSON object a line.

    {"kind":"step","step":1,"time":...,"loss":10.8,"lr":...,"grad_norm":...,"tokens":...,"seconds":...}
    {"kind":"eval","step":100,"time":...,"loss":...,"perplexity":...,"scores":{"bleu":...}}
    {"kind":"note","step":100,"time":...,"text":"..."}

Each line is handed to the operating system at once, so a kill loses none. JSON has no numbers that
are not finite; these are written as the strings "NaN", "Infinity" or "-Infinity", and read back as
numbers. A run that resumes at a step drops all lines after it (the file is rewritten beside and
renamed), so no step is logged twice; a line torn by a power cut is dropped, too.

A log that cannot be written does not stop the run: each kind of fault is reported once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

from regard._files import replace_file, spell_path

LOG = "log.jsonl"

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@final
@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of training; `step` counts finished steps, so the first is 1.

    `tokens` (read) and `seconds` are those of this step, `mfu` is a share (0.34 for 34%), `memory`
    is in bytes.
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
    """One evaluation, after `step` finished steps; `scores` by name, such as {"bleu": 41.0}.

    `unigram` is the loss of predicting by token frequencies alone; None if the task has none.
    """

    step: int
    loss: float
    perplexity: float
    scores: Mapping[str, float] = field(default_factory=dict)
    unigram: float | None = None


@final
@dataclass(frozen=True)
class Log:
    """A log that was read; `damaged` counts lines that are torn or not of a known form."""

    steps: list[StepReport]
    evaluations: list[EvalReport]
    notes: list[tuple[int, str]]
    damaged: int


@final
class RunLog:
    """The open log of a run, cut back to `start` steps (0: a new log); faults go to `say`."""

    def __init__(self, folder: Path, start: int, say: Callable[[str], None]) -> None:
        self.path = folder / LOG
        self._last_step, self._say = start, say
        self._last_eval = _cut_back(self.path, start)
        self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._is_torn = False
        self._said: set[str] = set()

    def step(self, report: StepReport) -> None:
        if report.step <= self._last_step:
            what = f"step {report.step} was reported after step {self._last_step}"
            raise ValueError(f"{what}; steps go up, from the one after the start of the run")
        self._last_step = int(report.step)
        self._put("step", {name: x for name, x in vars(report).items() if x is not None})

    def evaluated(self, report: EvalReport) -> None:
        """Log an evaluation, unless it is the one that a resumed log ends with."""
        fields = {name: x for name, x in asdict(report).items() if x is not None}
        if _strict(fields) != self._last_eval:
            self._put("eval", fields)

    def note(self, step: int, text: str) -> None:
        self._put("note", {"step": step, "text": text})

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _put(self, kind: str, fields: dict[str, Any]) -> None:
        if self._handle < 0:
            raise ValueError(f"{spell_path(self.path)} is closed; report before closing")
        line = {"kind": kind, "step": fields["step"], "time": time.time(), **_strict(fields)}
        # The rest of a line that was written only in part must not run into this one.
        data = (("\n" if self._is_torn else "") + _encode(line) + "\n").encode("ascii")
        fault = ""
        try:
            self._is_torn = os.write(self._handle, data) < len(data)
            # Writing to a file that was moved or deleted succeeds, but nobody would find the lines.
            if not os.path.samestat(os.stat(self.path), os.fstat(self._handle)):
                raise FileNotFoundError
        except FileNotFoundError:
            fault = "is not there any more: it, or its folder, was moved or deleted"
        except OSError as error:
            fault = f"cannot be written: {error.strerror or error}"
        if fault and fault not in self._said:
            self._said.add(fault)
            self._say(f"{spell_path(self.path)} {fault}. The run goes on; its log will lack lines")


def _strict(value: Any) -> Any:
    """Convert the value to strict JSON: numbers that are not finite become their names."""
    if isinstance(value, Mapping):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, str | int):
        return value
    if math.isfinite(value):
        return float(value)
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


# ---- Reading


def _read_lines(path: Path) -> Iterator[tuple[bytes, str, int, dict[str, Any]]]:
    """Yield each line's bytes, kind ("" if torn or of no known form), step and fields."""
    with path.open("rb") as file:
        for raw in file:
            kind, step, fields = "", -1, {}
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
                found = json.loads(raw if raw.endswith(b"\n") else b"")
                if isinstance(found["kind"], str) and type(found["step"]) is int:
                    kind, step, fields = found.pop("kind"), found["step"], found
            yield raw, kind, step, fields


def _cut_back(path: Path, start: int) -> dict[str, Any] | None:
    """Cut an old log back to `start` steps; return its last evaluation."""
    kept: list[bytes] = []
    is_whole, last_step, evaluation = True, 0, None
    for raw, kind, step, fields in _read_lines(path) if path.exists() else ():
        is_again = kind == "step" and step <= last_step
        if not start or not kind or step > start or is_again:
            is_whole = False
            continue
        kept.append(raw)
        if kind == "step":
            last_step = step
        elif kind == "eval":
            evaluation = {name: x for name, x in fields.items() if name != "time"}
    if not is_whole:
        with replace_file(path) as file:
            file.writelines(kept)
    return evaluation


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a log, given as the file or as the run's folder."""
    path = Path(os.fsdecode(path))
    path = path / LOG if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{spell_path(path)} is not there; expected a run's folder or its {LOG}")
    log, damaged = Log([], [], [], 0), 0
    for _, kind, step, fields in _read_lines(path):
        try:
            if kind == "step":
                log.steps.append(StepReport(**_numbers(fields, StepReport)))
            elif kind == "eval":
                scores = _numbers(fields.pop("scores", {}))
                log.evaluations.append(EvalReport(**_numbers(fields, EvalReport), scores=scores))
            elif kind == "note":
                log.notes.append((step, str(fields["text"])))
            damaged += not kind
        except (KeyError, TypeError, ValueError, AttributeError):
            damaged += 1
    return replace(log, damaged=damaged)


def _numbers(found: Mapping[str, Any], kind: Any = None) -> dict[str, Any]:
    """Select the numbers, or those of a kind of report; ValueError if one is not a number."""
    names = [name for name in found if kind is None or name in kind.__annotations__]
    if not all(type(found[name]) in (int, float, str) for name in names):
        raise ValueError("not a number")
    return {n: float(found[n]) if isinstance(found[n], str) else found[n] for n in names}
