"""A run leaves its files, and every lab can be named."""

import json
from pathlib import Path

import pytest

from regard.labs import NAMES, find_lab, run_lab


def test_a_lab_leaves_three_files_and_no_parts(tmp_path: Path) -> None:
    report = run_lab("scaling", tmp_path, tiny=True, device="cpu")
    assert {path.name for path in tmp_path.iterdir()} == {
        "scaling.json",
        "scaling.md",
        "scaling.png",
    }
    assert json.loads((tmp_path / "scaling.json").read_text())["results"] == report.results
    assert report.command == "regard lab scaling --tiny"


def test_every_lab_has_its_name_a_question_and_a_prediction() -> None:
    for name in NAMES:
        lab = find_lab(name)
        assert lab.name == name
        assert lab.question.endswith("?") and lab.prediction.endswith(".")
        assert lab.method.endswith(".")


def test_an_unknown_lab_and_a_file_as_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no lab is named 'scalling'; there are scaling"):
        run_lab("scalling", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no folder"):
        run_lab("scaling", tmp_path / "file", tiny=True)
    with pytest.raises(ValueError, match="no folder"):
        run_lab("scaling", tmp_path / "file" / "below", tiny=True)
    with pytest.raises(ValueError, match="device is 'abacus'; expected a device of torch"):
        run_lab("scaling", tmp_path / "new", tiny=True, device="abacus")
    assert not (tmp_path / "new").exists()
