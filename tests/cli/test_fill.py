"""`regard fill`: the candidates of every gap, and refusals in one line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from commands import run_command
from masked_models import make_folder

import regard

TEXT = "The [MASK] sat on the mat."


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    return run_command(capsys, "fill", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fill") / "bert"
    make_folder("bert", path)
    return path


def test_it_writes_what_fill_gives(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, err = run(capsys, "-m", folder, "--top", "3", *TEXT.split())
    best = regard.fill(folder, TEXT, 3).gaps[0].candidates
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [TEXT, ""] and len(lines) == 5
    for line, one in zip(lines[2:], best, strict=True):
        word, share = line.split()[:2]
        assert (word, share) == (one.token.strip(), f"{one.probability:.3f}")


def test_each_gap_has_its_own_candidates_and_it_is_said_that_they_are_alone(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    text = "[MASK] cat sat on the [MASK]."
    code, out, _ = run(capsys, "-m", folder, "--top", "2", text)
    assert code == 0 and "Each gap is filled by itself" in out.splitlines()[1]
    parts = out.split("\ngap ")
    assert len(parts) == 3
    for part, gap in zip(parts[1:], regard.fill(folder, text, 2).gaps, strict=True):
        assert [line.split()[0] for line in part.splitlines()[1:] if line] == [
            one.token.strip() for one in gap.candidates
        ]


def test_standard_input_is_a_text(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run(capsys, "-m", folder, TEXT)
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "\n"))
    assert run(capsys, "-m", folder, "-") == said
    raw = io.BytesIO(f"{TEXT}\r\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw, encoding="utf-8"))
    assert run(capsys, "-m", folder, "-") == said, "with Windows' end of line"


def test_unasked_the_encoder_inside_fills(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, TEXT)
    assert said[0] == 0 and said == run(capsys, "--model", "embedded:encoder", TEXT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["The cat sat."], "the text has no gap; put [MASK] where"),
        ([" "], "the text is empty; try: regard fill"),
        (["a " * 22 + "[MASK]"], "has 25 tokens, and the model takes 23"),
        (["--top", "0", TEXT], "--top is 0; expected 1 or more"),
        (["--model", "embedded:lm", TEXT], "is a causal language model"),
        (["--model", "/none/such", TEXT], "/none/such"),
    ],
)
def test_what_cannot_be_filled_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], said: str
) -> None:
    given = arguments if "--model" in arguments else ["--model", str(folder), *arguments]
    code, out, err = run(capsys, *given)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert said in err
