"""`regard` as a command, run in the test's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard import cli


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Its exit code and words; an error that is not said in words comes through."""
    with pytest.raises(SystemExit) as left:
        cli.main([str(word) for word in arguments])
    caught = capsys.readouterr()
    code = left.value.code
    assert "Traceback" not in caught.out + caught.err
    return (0 if code is None else int(code)), caught.out, caught.err
