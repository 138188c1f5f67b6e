"""The `regard` command, run in this process with its output caught, and once as a real process."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from commands import run_command as run
from rich.console import Console

from regard import cli
from regard._version import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_a_line_is_written_as_it_is() -> None:
    page = io.StringIO()
    cli.printing.write_line(
        Console(file=page, width=20, force_terminal=True), "[red]7[/] :smile: " * 9
    )
    assert page.getvalue() == "[red]7[/] :smile: " * 9 + "\n"


def test_help_teaches_the_first_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["look", "--help"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert 'regard look "The animal didn' in out
    assert "without it a small one inside the package reads" in " ".join(out.split())


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("arguments", [["look"], ["gaze"], ["look", "--loudly", "a b c"]])
def test_what_is_not_understood_leaves_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "--help" in err


def test_doctor_tells_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert f"regard           {__version__}\n" in out
    assert f"torch            {torch.__version__}\n" in out
    verdicts = out.split("asked for a causal call in float32:\n")[1]
    for backend in ("reference", "blockwise", "sdpa", "flex"):
        assert backend in verdicts


def test_a_package_that_is_not_there_is_said_so() -> None:
    assert cli.doctor.version_of("no-such-package-anywhere") == "not installed"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_gives_one_sentence_that_names_it(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = run(capsys, "look", "I love Transformers")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "pip install 'regard[cli]'" in err


def test_python_dash_m_regard_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regard", "generate", "\udcff"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"},
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"surrogate" in done.stderr and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("command", "code"), [("doctor >&- 2>&- <&-", 0), ("fill '[MASK]' >&-", 0), ("look - <&-", 2)]
)
def test_streams_that_are_closed_are_empty_ones(command: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    shell = ["sh", "-c", f'"$0" -m regard {command}', sys.executable]
    done = subprocess.run(shell, capture_output=True, env=environment, text=True)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr


def test_lines_of_a_windows_file_end_as_others_do(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfOne\r\n\r\ntwo\r\n")
    assert cli.printing.read_utf8(file) == "One\n\ntwo\n"


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee more"),
    ],
)
def test_too_little_memory_is_one_line(fault: BaseException) -> None:
    page = io.StringIO()
    with pytest.raises(typer.Exit) as left, cli.printing.refusing(Console(file=page)):
        raise fault
    said = page.getvalue()
    assert left.value.exit_code == 2
    assert said.startswith("there is not enough memory: give") and said.count("\n") == 1
    assert str(fault).partition("\n")[0] in said


def test_faults_of_our_own_are_no_refusals() -> None:
    with pytest.raises(RuntimeError, match="shapes"), cli.printing.refusing(Console()):
        raise RuntimeError("shapes differ")
