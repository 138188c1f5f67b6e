"""docs/architecture.md is about the code as it is: its table of packages, files and names."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

from test_imports import PACKAGE, ROOT, UPSTREAM

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILE = re.compile(r"(?<![\w/.])((?:[a-z_]+/)*[a-z_]+\.py)(?:`?: ((?:`?[A-Za-z_]+`?(?:, )?)+))?")


def named_files() -> dict[str, set[str]]:
    """Every file of the package that the page names, with what it is said to define."""
    found: dict[str, set[str]] = {}
    for path, names in FILE.findall(TEXT):
        if path.startswith("tests/"):
            continue
        found.setdefault(path, set()).update(re.findall(r"[A-Za-z_]+", names))
    return found


def defined_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    }


def test_the_table_of_packages_is_the_rule_that_imports_are_held_to() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\| ", TEXT, flags=re.M)
    assert {package: tuple(re.findall(r"`(\w+)`", upper)) for package, upper in rows} == UPSTREAM


def test_every_file_that_the_page_names_is_there() -> None:
    missing = [path for path in named_files() if not (PACKAGE / path).is_file()]
    assert not missing, missing


def test_every_name_stands_in_the_file_that_the_page_gives_it_to() -> None:
    files = named_files()
    assert sum(map(len, files.values())) > 25, "the pattern finds the names"
    wrong = {
        path: names - defined_in(PACKAGE / path)
        for path, names in files.items()
        if (PACKAGE / path).is_file() and names - defined_in(PACKAGE / path)
    }
    assert not wrong, wrong


def test_every_test_file_has_a_source_files_name_or_a_reason() -> None:
    sources = {path.stem.lstrip("_") for path in PACKAGE.rglob("*.py")}
    sources |= {path.name.lstrip("_") for path in PACKAGE.rglob("*") if path.is_dir()}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    reasons = re.findall(r"(?:[\w*]+/)?(test_[\w*]+\.py)", text)
    unexplained = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.stem.removeprefix("test_") not in sources
        and not any(fnmatch(path.name, reason) for reason in reasons if reason != "test_*.py")
        and path.parent.name != "examples"
    ]
    assert not unexplained, unexplained
