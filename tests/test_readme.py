"""What is written for people holds: the code runs, the commands are CI's, the links lead somewhere.

Every python block of README.md and docs/*.md is executed, in order, one namespace a file.
"""

import ast
import io
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

from regard import cli, look

ROOT = Path(__file__).resolve().parent.parent
RUN_DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_DOCUMENTS = [*RUN_DOCUMENTS, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
PROMPT = "$ "


class Block(NamedTuple):
    language: str
    line: int
    text: str


def read_blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document, each with the line number of its first line."""
    blocks: list[Block] = []
    language: str | None = None
    held: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("```"):
            held.append(line)
        elif language is None:
            language, held = line.removeprefix("```").strip(), []
        else:
            blocks.append(Block(language, number - len(held), "\n".join(held) + "\n"))
            language = None
    assert language is None, f"{path.name}: a block is never closed"
    return blocks


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", RUN_DOCUMENTS, ids=name_of)
def test_python_blocks_run_in_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in read_blocks(path) if block.language == "python"]
    namespace: dict[str, object] = {"__name__": f"blocks_of_{path.stem}"}
    for block in blocks:
        # Empty lines in front make a traceback point at the line in the document.
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, str(path), "exec"), namespace)
    assert blocks or path.name != "README.md"


@pytest.mark.parametrize("path", ALL_DOCUMENTS, ids=name_of)
def test_every_block_names_a_language_we_know(path: Path) -> None:
    """A block called `py` would be shown as code and never run."""
    known = {"python", "bash", "text"}
    assert [block for block in read_blocks(path) if block.language not in known] == []


def readme_commands() -> list[str]:
    """The commands of the first bash block: what a newcomer types."""
    first = next(block for block in read_blocks(ROOT / "README.md") if block.language == "bash")
    return [line for line in first.text.splitlines() if line and not line.startswith("#")]


def test_the_two_commands_of_the_readme_are_those_of_ci() -> None:
    commands = readme_commands()
    assert len(commands) == 2
    assert "regard look" in commands[0]
    assert "pytest" in commands[1]
    ci_lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    stripped = [line.strip() for line in ci_lines]
    assert [command for command in commands if command not in stripped] == []


def test_the_picture_in_the_readme_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    shown = [
        block.text.split("\n", 1)
        for block in read_blocks(ROOT / "README.md")
        if block.language == "text" and block.text.startswith(PROMPT)
    ]
    assert len(shown) == 1
    [[command, picture]] = shown
    page = io.StringIO()
    record = look(cli.EXAMPLE_TEXT)
    cli.digest.write_digest(record, Console(file=page, width=80))
    assert command == f'{PROMPT}regard look "{cli.EXAMPLE_TEXT}"'
    assert picture == page.getvalue()


@pytest.mark.parametrize("path", ALL_DOCUMENTS, ids=name_of)
def test_links_inside_the_project_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not (path.parent / target).exists()] == []


@pytest.mark.parametrize(
    ("said", "table", "measured"),
    [
        ("opened in 0.2 s", "lens_cpu", "| 0.18 |"),
        (
            "under 0.1 s for 95% of the tiles",
            "lens_cpu",
            "| all tiles (bound p95 < 300) | 1129 | 6.1 | 72.7 |",
        ),
        ("2.3 GB of memory", "lens_cpu", "| 2.25 |"),
        ("1.5 to 2 s and 6 GB", "lens_gpu", "| 1.59 | 2.23 | 5.92 |"),
        ("takes 86 ms", "lens_gpu", "| forward, watched | 86.3 |"),
        ("it is 49 ms", "lens_gpu", "| forward | 49.5 |"),
        ("509 ms and 80 GB", "lens_gpu", "508.6 ms and 80.33 GiB"),
        ("2,501 tokens/s", "generate_gpu", "| gpt2, 1 | 2,501 | 596 |"),
        ("at 1,041, which is 61%", "generate_gpu", "| llama-1b, 1 | 1,041 | 374 | 2.78 | 61% |"),
        ("reaches 596 and 374", "generate_gpu", "| 2,501 | 596 |"),
        ("loss of 1.454", "training_runs", "validation loss 1.4539"),
        ("41.9 BLEU (published: 41.0)", "training_runs", "BLEU 41.93"),
    ],
)
def test_a_measured_number_is_in_the_table_that_is_linked(
    said: str, table: str, measured: str
) -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert said in readme
    assert measured in (ROOT / "bench" / "results" / f"{table}.md").read_text(encoding="utf-8")
    assert f"(bench/results/{table}.md)" in readme[readme.index(said) :]


def test_every_tool_of_the_extras_is_pinned_in_constraints() -> None:
    """One place for versions: each requirement has its pin there, and none has one here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(need for needs in extras.values() for need in needs)]
    needs = [Requirement(need) for need in wanted]
    assert [need for need in needs if "==" in str(need.specifier)] == []
    names = {canonicalize_name(need.name) for need in needs} - {"regard"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)] == []
    assert names - {pin.split("==")[0] for pin in pins} == set()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^\s*rev:|==", hooks, flags=re.MULTILINE) == []


def test_every_skip_is_listed_with_its_reason() -> None:
    """A skip is a call or a mark; its file has a row in SKIPS.md, and every row its file."""
    tests = ROOT / "tests"
    words = {"skip", "skipif", "importorskip", "skipIf", "skipUnless"}
    skipping = set()
    for path in tests.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.Attribute) and node.attr in words for node in ast.walk(tree)):
            skipping.add(path.relative_to(tests).as_posix())
    listed = re.findall(
        r"^\| `([^`]+\.py)` \|.*\|.*\S.*\|$",
        (tests / "SKIPS.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert set(listed) == skipping
