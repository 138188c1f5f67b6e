"""`regard lab` lists, runs and refuses."""

from pathlib import Path

import pytest
from commands import run_command

from regard.labs import NAMES, run


def test_labs_are_listed_with_their_questions(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(capsys, "lab")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(NAMES)
    assert "Why are scores divided by √d?" in out


def test_a_lab_says_question_prediction_and_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command(capsys, "lab", "scaling", "--tiny", "--out", tmp_path)
    assert code == 0
    question, prediction, *_ = out.splitlines()
    assert question.endswith("√d?") and prediction.startswith("Predict first: ")
    assert out.count("Finding: ") in (3, 4)
    assert "scaling.md" in err and (tmp_path / "scaling.md").is_file()


def test_all_run_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = run.run_lab

    def note(name: str, out: Path, **settings: object) -> run.Report:
        asked.append(name)
        return real("scaling", out, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr("regard.labs.run.run_lab", note)
    monkeypatch.setattr("regard.labs.NAMES", ("scaling", "scaling"))
    assert run_command(capsys, "lab", "--all", "--tiny", "--out", tmp_path)[0] == 0
    assert asked == ["scaling", "scaling"]


def test_what_cannot_be_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_command(capsys, "lab", "nothing", "--out", tmp_path)
    assert code == 2 and "no lab is named 'nothing'" in err
    code, _, err = run_command(capsys, "lab", "scaling", "--all", "--out", tmp_path)
    assert code == 2 and "leave out 'scaling'" in err
