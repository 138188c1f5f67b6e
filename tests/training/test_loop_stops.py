"""A run that was stopped and resumed is the run that was never stopped, bit for bit."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import GPT2, PLAIN, Ear, Judged, Outcome, differing, make_model, pair_task, text_task

from regard.training.loop import train
from regard.training.snapshot import list_snapshots, load_best

SETTINGS: dict[str, Any] = {
    "plain": {},
    "accumulated": {"accumulate": 3},
    "averaged": {"average": 0.9, "eval_every": 2},
    "muon": {"optimizer": "muon", "average": 0.9, "schedule": "linear"},
    "half": {"precision": "bfloat16", "optimizer": "muon", "accumulate": 2},
    "recomputed": {"recompute": True, "smoothing": 0.1},
}
CASES = [("lm", name) for name in SETTINGS] + [
    ("masked", "plain"),
    ("masked", "half"),
    ("translate", "muon"),
    ("translate", "half"),
    ("translate", "averaged"),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_stopped_and_resumed_run_ends_as_one_that_was_never_stopped(
    tmp_path: Path, kind: str, name: str
) -> None:
    config = replace(PLAIN, **{"eval_every": 3, **SETTINGS[name]})
    whole = Outcome(kind, tmp_path / "whole", config, data=tmp_path / "data")
    assert whole.result.reason == "done" and len(whole.ear.steps) == 7
    for stop_at in (2, 4):
        folder = tmp_path / f"stopped{stop_at}"
        first = Outcome(kind, folder, config, data=tmp_path / "data", stop_at=stop_at)
        assert (first.result.reason, first.result.steps) == ("interrupted", stop_at + 1)
        second = Outcome(kind, folder, config, data=tmp_path / "data", resume=True)
        assert (second.result.reason, second.result.steps) == ("done", 7)
        assert first.ear.figures + second.ear.figures == whole.ear.figures
        told = first.ear.evaluations + second.ear.evaluations
        assert told == whole.ear.evaluations and second.result.best == whole.result.best
        assert differing(second.snapshot, whole.snapshot) == []
        assert differing(second.weights, whole.weights) == []
    words = {name.split("/")[-1] for name in whole.snapshot if name.startswith("optim/")}
    assert ("momentum_buffer" in words) == (config.optimizer == "muon") and "exp_avg_sq" in words
    assert any(n.startswith("average/") for n in whole.snapshot) == (config.average is not None)


def test_several_stops_in_one_run_change_nothing(tmp_path: Path) -> None:
    whole = Outcome("lm", tmp_path / "whole", PLAIN, data=tmp_path / "data")
    figures = []
    for stop_at in (1, 3, 4, 6, None):
        part = Outcome(
            "lm", tmp_path / "parts", PLAIN, data=tmp_path / "data", stop_at=stop_at, resume=True
        )
        figures += part.ear.figures
    assert figures == whole.ear.figures
    assert differing(part.snapshot, whole.snapshot) == []


def test_a_stop_before_a_due_evaluation_makes_up_for_it(tmp_path: Path) -> None:
    """Else the best of all would not be known to the resumed run."""
    config = replace(PLAIN, eval_every=3)
    how: dict[str, Any] = {"data": tmp_path / "data"}
    whole = Outcome("lm", tmp_path / "whole", config, judge=Judged(9.0, 1.0, 1.0), **how)
    first = Outcome("lm", tmp_path / "part", config, judge=Judged(), stop_at=2, **how)
    assert first.result.steps == 3 and not first.ear.evaluations
    judge = Judged(9.0, 1.0, 1.0)
    second = Outcome("lm", tmp_path / "part", config, judge=judge, resume=True, **how)
    assert [report.step for report in second.ear.evaluations] == [3, 6, 7]
    assert second.ear.evaluations == whole.ear.evaluations
    assert whole.result.best is not None and whole.result.best.step == 3
    assert second.result.best == whole.result.best
    assert differing(second.weights, whole.weights) == []


def test_a_kill_between_a_snapshot_and_its_being_named_the_best_is_healed(tmp_path: Path) -> None:
    """best.json is written after the snapshot, so a kill can fall between the two."""
    config = replace(PLAIN, steps=6, eval_every=3, save_every=3)
    how: dict[str, Any] = {"data": tmp_path / "data"}
    whole = Outcome("lm", tmp_path / "whole", config, judge=Judged(9.0, 1.0), **how)
    assert whole.result.best is not None and whole.result.best.step == 3
    Outcome("lm", tmp_path / "part", config, judge=Judged(9.0), stop_at=3, **how)
    root = tmp_path / "part" / "snapshots"
    for path in list_snapshots(root):
        if path.name != "step-00000003.safetensors":
            path.unlink()
    (root / "best.json").unlink()
    second = Outcome("lm", tmp_path / "part", config, judge=Judged(1.0), resume=True, **how)
    named = load_best(root)
    assert named is not None and named.step == 3
    assert differing(second.weights, whole.weights) == []


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    class Twice(Ear):
        def note(self, text: str) -> None:
            super().note(text)
            if "once more stops at once" in text and len(self.notes) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(
            make_model(GPT2),
            text_task(tmp_path),
            PLAIN,
            tmp_path / "run",
            listener=Twice(stop_at=3),
        )
    assert list_snapshots(tmp_path / "run") == []


def test_a_run_that_is_done_is_left_as_it_is(tmp_path: Path) -> None:
    config = replace(PLAIN, eval_every=3)
    whole = Outcome("lm", tmp_path, config)
    before = {path: path.read_bytes() for path in list_snapshots(tmp_path / "snapshots")}
    again = Outcome("lm", tmp_path, config, resume=True)
    assert (again.result.reason, again.result.steps, again.ear.steps) == ("done", 7, [])
    assert differing(again.weights, whole.weights) == []
    assert before == {p: p.read_bytes() for p in list_snapshots(tmp_path / "snapshots")}


def test_a_run_in_the_folder_is_not_written_over(tmp_path: Path) -> None:
    Outcome("lm", tmp_path, PLAIN)
    with pytest.raises(FileExistsError, match="after 7 steps: resume it, or train into another"):
        Outcome("lm", tmp_path, PLAIN)


def test_other_data_is_refused_and_other_settings_are_told(tmp_path: Path) -> None:
    Outcome("lm", tmp_path, PLAIN, stop_at=1)
    with pytest.raises(ValueError, match="was trained on other data"):
        other = pair_task(tmp_path)
        Outcome("lm", tmp_path, PLAIN, task=other, resume=True)
    more = Outcome("lm", tmp_path, replace(PLAIN, lr=0.25, steps=8), resume=True)
    assert "this run goes on with other settings: lr was 0.005, is 0.25" in more.ear.notes
    assert more.result.steps == 8


def test_a_damaged_snapshot_is_passed_over_and_told(tmp_path: Path) -> None:
    config = replace(PLAIN, save_every=2)
    whole = Outcome("lm", tmp_path / "whole", config, data=tmp_path / "data")
    Outcome("lm", tmp_path / "part", config, data=tmp_path / "data", stop_at=4)
    newest = list_snapshots(tmp_path / "part" / "snapshots")[0]
    newest.write_bytes(newest.read_bytes()[:-5])
    second = Outcome("lm", tmp_path / "part", config, data=tmp_path / "data", resume=True)
    assert [report.step for report in second.ear.steps] == [5, 6, 7]
    assert any(newest.name in note and "cut short" in note for note in second.ear.notes)
    assert differing(second.snapshot, whole.snapshot) == []


def test_a_resumed_run_removes_what_a_kill_left_after_the_last_snapshot(tmp_path: Path) -> None:
    """Killed between the last snapshot and the end of saving it: nothing else would remove it."""
    config = replace(PLAIN, save_every=1, keep=1)
    Outcome("lm", tmp_path / "run", config, data=tmp_path / "data")
    (last,) = list_snapshots(tmp_path / "run" / "snapshots")
    left = last.with_name(last.name.replace("7", "6"))
    left.write_bytes(last.read_bytes())
    assert len(list_snapshots(tmp_path / "run" / "snapshots")) == 2
    Outcome("lm", tmp_path / "run", config, data=tmp_path / "data", resume=True)
    assert list_snapshots(tmp_path / "run" / "snapshots") == [last]
