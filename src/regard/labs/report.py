"""The output of a run: NAME.json, NAME.png, and NAME.md, which is generated from the JSON alone.

Why: a number in a text should be checkable. The page's sentences are functions of the JSON; a test
generates them again and compares.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._files import read_json, replace_file
from regard.labs.lab import Lab

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_JSON = 10_000_000  # bytes


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run: results, command, date, device, versions of packages, and seconds taken."""

    lab: str
    command: str
    date: str
    device: str
    versions: Mapping[str, str]
    seconds: float
    results: Mapping[str, Any]


def read_report(path: Path) -> Report:
    return Report(**read_json(path, MAX_JSON, ValueError))


def write_report(lab: Lab, report: Report, folder: Path) -> None:
    """Write all three files, the JSON last, so that it exists only if the others do."""
    picture = draw_png(lab, report)
    page = write_markdown(lab, report)
    numbers = json.dumps(asdict(report), indent=1, allow_nan=False) + "\n"
    for ending, data in ((".png", picture), (".md", page.encode()), (".json", numbers.encode())):
        with replace_file(folder / f"{lab.name}{ending}") as file:
            file.write(data)


def draw_png(lab: Lab, report: Report) -> bytes:
    figure = make_figure()
    lab.draw(report.results, figure)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()


def make_figure() -> Figure:
    """Make an empty figure of a page's width."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("figures of labs need matplotlib: pip install 'regard[view]'") from None

    return Figure(figsize=(9, 4), dpi=150, layout="constrained")


def write_entry(lab: Lab, report: Report) -> str:
    """The entry in a list of labs: the question, and the sentence that answers it."""
    return f"- [{lab.name}]({lab.name}.md): {lab.question} {lab.find(report.results)[0]}"


def write_markdown(lab: Lab, report: Report) -> str:
    """Build the page: question, prediction, method, findings, figure, and the command."""
    answer, *more = lab.find(report.results)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = [
        f"# {lab.name}: {lab.question}",
        f"**Predict first.** {lab.prediction}",
        f"**Method.** {lab.method}",
        f"**Finding.** {answer}",
        f"![{lab.question}]({lab.name}.png)",
        "\n".join(f"- {sentence}" for sentence in more),
        f"`{report.command}`: {report.device}, {report.seconds:,.0f} s, {versions}, {report.date}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
