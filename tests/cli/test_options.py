"""What is given to commands: options that nothing would come of are refused; pipes are read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from commands import run_command as run

TEXT = "The cat sat on the mat."


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["look", "--layer", "1", TEXT], "--layer says which layer --png draws: give --png too"),
        (["translate", "--html", "x.html", TEXT], "--html is where --look writes its page"),
        (["translate", "--look", "--from-file", "lines.txt"], "--look shows one text"),
        (["translate", "--look", "--html", "x.html", "-"], "--look shows one text"),
        (["survey", "lines.txt", "--key", "said"], "--key is for .jsonl, and 'lines.txt' is read"),
        (["survey", "lines.txt", "--top", "0"], "--top is 0; expected 1 or more"),
        (["survey", "lines.txt", "--top", "-1"], "--top is -1; expected 1 or more"),
        (["train", "translate", "p.tsv", "--valid-target", "lines.txt"], "give --valid too"),
        (["train", "translate", "p.tsv", "--test-target", "lines.txt"], "give --test too"),
    ],
)
def test_an_option_that_nothing_would_come_of_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text(f"{TEXT}\n" * 2, encoding="utf-8")
    (tmp_path / "p.tsv").write_text("a cat\tun chat\n" * 30, encoding="utf-8")
    training = ["--out", "run", "--set", "steps=1"] if arguments[0] == "train" else []
    code, out, err = run(capsys, *arguments, *training)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.txt", "p.tsv"]


def test_a_pipe_is_read_as_a_file_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pipe, page = tmp_path / "pipe", tmp_path / "x.html"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[TEXT], daemon=True)
    writer.start()
    code, out, err = run(capsys, "look", pipe, "--html", page)
    assert code == 0, err
    writer.join()
    assert out == run(capsys, "look", TEXT, "--html", page)[1]
