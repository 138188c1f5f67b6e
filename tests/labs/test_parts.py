"""A lab is run in parts: stopped and started again it goes on, and never with foreign parts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.labs.parts import Run

ABOUT = {"lab": "x", "tiny": True, "of": [1]}


def make_run(path: Path, about: dict[str, Any] | None = None) -> Run:
    return Run(path, about or ABOUT, torch.device("cpu"), None)


def test_parts_that_are_there_are_not_measured_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def square(n: int) -> int:
        asked.append(n)
        if n == 5 and len(asked) < 4:
            raise KeyboardInterrupt
        return n * n

    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path / "parts").map("squares", square, [2, 3, 5])
    assert asked == [2, 3, 5]
    again = make_run(tmp_path / "parts")
    assert again.map("squares", square, [2, 3, 5, 7]) == [4, 9, 25, 49]
    assert asked == [2, 3, 5, 5, 7]
    assert again.map("others", square, [2]) == [4], "another name is another part"


def test_a_line_that_a_kill_tore_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    make_run(path).map("squares", lambda n: n * n, [2, 3])
    path.write_text(path.read_text()[:-9])
    asked: list[int] = []
    assert make_run(path).map("squares", lambda n: asked.append(n) or n * n, [2, 3]) == [4, 9]
    assert asked == [3]
    assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == [
        None,
        "squares: 2",
        "squares: 3",
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"[1]",
        b'{"a": 1}',
        b'{"key": "squares: 3", "seconds": "x", "value": 1}',
        b'{"key": "squares: 3", "seconds": NaN, "value": 1}',
        b'{"key": "squares: 3", "seconds": 1, "value": NaN}',
        b'{"key": ["squares: 3"], "seconds": 1, "value": 1}',
        b"\xff\xfe\x00",
        b"[" * 9_999,
    ],
    ids=["null", "list", "other", "word", "nan", "value", "key", "bytes", "deep"],
)
def test_a_line_that_is_no_part_is_measured_again(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "parts"
    make_run(path).map("squares", lambda n: n * n, [2])
    whole = path.read_bytes()
    asked: list[int] = []
    for data, kept in ((whole + line + b"\n", [3]), (line + b"\n" + whole, [2, 3])):
        path.write_bytes(data)
        asked.clear()
        again = make_run(path)
        assert again.map("squares", lambda n: asked.append(n) or n * n, [2, 3]) == [4, 9]
        assert asked == kept and 0 <= again.seconds < 60


def test_parts_of_other_settings_are_not_taken(tmp_path: Path) -> None:
    make_run(tmp_path / "parts").map("squares", lambda n: n, [2])
    other = make_run(tmp_path / "parts", {**ABOUT, "of": [2]})
    assert other.map("squares", lambda n: n * n, [2]) == [4]
    assert make_run(tmp_path / "parts").kept == {}


def test_the_time_is_that_of_all_its_runs(tmp_path: Path) -> None:
    first = make_run(tmp_path / "parts")
    first.map("squares", lambda n: n, [2, 3])
    again = make_run(tmp_path / "parts")
    assert again.seconds == pytest.approx(first.seconds) and first.seconds > 0


def test_results_are_what_json_holds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "parts")
    assert run.map("pairs", lambda n: {"pair": (n, n)}, [1]) == [{"pair": [1, 1]}]
    with pytest.raises(ValueError, match="JSON"):
        run.map("nan", lambda n: float("nan"), [1])


def test_progress_is_told_before_and_after_each_part(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    run = Run(tmp_path / "p", ABOUT, torch.device("cpu"), lambda *said: told.append(said))
    run.map("squares", lambda n: n, [2, 3])
    assert told == [("squares", 0, 2), ("squares", 1, 2), ("squares", 2, 2)]
