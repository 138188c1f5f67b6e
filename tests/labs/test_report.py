"""What docs/labs says is what was measured: its pages are made again from their JSON."""

from pathlib import Path

import pytest

from regard.labs import NAMES, find_lab
from regard.labs.report import make_figure, read_report, write_entry, write_markdown

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "labs"
KEPT = sorted(path.stem for path in DOCS.glob("*.json"))


@pytest.mark.parametrize("name", KEPT)
def test_every_number_of_a_page_is_of_its_json(name: str) -> None:
    report = read_report(DOCS / f"{name}.json")
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert page == write_markdown(find_lab(name), report)
    assert "--tiny" not in report.command, "pages are of whole runs"


@pytest.mark.parametrize("name", KEPT)
def test_every_figure_can_be_drawn_again(name: str) -> None:
    figure = make_figure()
    find_lab(name).draw(read_report(DOCS / f"{name}.json").results, figure)
    assert figure.axes
    assert (DOCS / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_the_list_of_labs_says_what_was_found() -> None:
    lines = (DOCS / "README.md").read_text(encoding="utf-8").splitlines()
    entries = [write_entry(find_lab(name), read_report(DOCS / f"{name}.json")) for name in NAMES]
    assert [line for line in lines if line.startswith("- ")] == entries


def test_every_lab_has_a_page() -> None:
    assert set(KEPT) == set(NAMES)
