"""Where commands may write, and where not."""

from pathlib import Path

import pytest

from regard.cli.outputs import check_outputs, own_page


@pytest.fixture(autouse=True)
def inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_new_files_and_earlier_ones_of_the_same_kind_are_fine(tmp_path: Path) -> None:
    for name in ("a.html", "a.regard", "a.png"):
        (tmp_path / name).write_text("before")
    for html in ("a.html", "new.html", "new", "B.HTM"):
        check_outputs({"--html": Path(html), "--save": Path("a.regard"), "--png": Path("a.png")})
    check_outputs({"--html": None, "--png": None})
    assert (tmp_path / "a.html").read_text() == "before"


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--html", "folder", "a folder; name a file in it"),
        ("--html", "no/x.html", "there is no folder 'no'"),
        ("--html", "notes.txt", "does not end in .html: it is not replaced"),
        ("--save", "notes.txt", "does not end in .regard: it is not replaced"),
        ("--png", "x.gif", "--png ends in '.gif'; expected .png, .svg or .pdf"),
        ("--out", "x.xlsx", "--out ends in '.xlsx'; expected .parquet, .csv, .json or .regard"),
        ("--html", "read.html", "which is read"),
    ],
)
def test_what_cannot_be_written_or_would_destroy_is_refused(
    tmp_path: Path, option: str, name: str, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "read.html").write_text("mine")
    with pytest.raises(ValueError, match=said):
        check_outputs({option: Path(name)}, ["read.html", "some text", "x" * 300])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_may_not_be_written_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="where nothing may be written"):
        check_outputs({"--html": Path("x.html")})


def test_two_outputs_in_one_file_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are both 'x\.html'"):
        check_outputs({"--html": Path("x.html"), "--save": Path("x.html")})


def test_a_picture_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.cli.outputs.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pictures need matplotlib"):
        check_outputs({"--png": Path("x.png")})


def test_a_page_that_nobody_named_has_one_place_and_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = own_page()
    assert page == own_page() and page.parent.stat().st_mode & 0o777 == 0o700
    page.parent.rmdir()
    (tmp_path / "elsewhere").mkdir()
    page.parent.symlink_to(tmp_path / "elsewhere")
    assert own_page().parent not in (page.parent, tmp_path / "elsewhere")
