"""Running a lab: in parts that are kept, so that one that was stopped goes on.

How: a lab measures by `Run.map`, one part for each item (a width, a seed, a model). Each result is
appended to a file as it comes; a run that starts again reads what is there and measures the rest.
The parts of another source, device or version of torch, or of another size, are not taken.

Left out: going on in the middle of a part. Parts are minutes at most.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from regard._files import replace_file, spell_path
from regard._version import __version__
from regard.labs.lab import Lab
from regard.labs.report import Report, write_report

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]


@final
class Run:
    """One run of a lab: its size, its device, and the parts that it has so far."""

    def __init__(
        self, path: Path, about: dict[str, Any], device: torch.device, progress: Progress | None
    ) -> None:
        self.path, self.about, self.device = path, about, device
        self.progress = progress or (lambda doing, done, total: None)
        self.kept = read_parts(path, about)
        self.begun = False  # whether the file of parts is this run's
        # What earlier runs took is in the parts, so that the time told is that of the whole.
        self.seconds = sum(part["seconds"] for part in self.kept.values())

    @property
    def tiny(self) -> bool:
        """Whether this is the run of a minute on a CPU."""
        return bool(self.about["tiny"])

    def map(self, name: str, measure: Callable[[Item], Any], items: Sequence[Item]) -> list[Any]:
        """`measure` of each item, as JSON holds it; those that a stopped run has are not repeated.

        `name` and an item's repr tell a part from all others of the lab.
        """
        results = []
        for done, item in enumerate(items):
            self.progress(name, done, len(items))
            key = f"{name}: {item!r}"
            if key not in self.kept:
                begun = time.perf_counter()
                value = json.loads(json.dumps(measure(item), allow_nan=False))
                self._keep({"key": key, "seconds": time.perf_counter() - begun, "value": value})
            results.append(self.kept[key]["value"])
        self.progress(name, len(items), len(items))
        return results

    def _keep(self, part: dict[str, Any]) -> None:
        if not self.begun:
            # Parts that are not taken, and a line that a kill tore, go away with the old file.
            write_lines(self.path, [self.about, *self.kept.values()])
            self.begun = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(part) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.kept[part["key"]] = part
        self.seconds += part["seconds"]


def read_parts(path: Path, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What an earlier run with the same settings has measured; a torn last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    parts = []
    for line in lines:
        try:
            parts.append(json.loads(line))
        except ValueError:
            break  # the run was killed while it wrote this line
    return {part["key"]: part for part in parts[1:]} if parts and parts[0] == about else {}


def write_lines(path: Path, values: Sequence[dict[str, Any]]) -> None:
    with replace_file(path) as file:
        file.write("".join(json.dumps(value) + "\n" for value in values).encode())


def run_lab(
    name: str,
    out: str | os.PathLike[str] = "labs",
    *,
    tiny: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a lab and write NAME.json, NAME.png and NAME.md into the folder `out`.

    A run that was stopped goes on where it was; one that has ended is run anew.
    """
    from regard.labs import find_lab

    lab = find_lab(name)
    folder = Path(os.fsdecode(out))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out is {spell_path(folder)}, which is no folder")
    folder.mkdir(parents=True, exist_ok=True)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    parts = folder / f"{name}{'.tiny' if tiny else ''}.parts.jsonl"
    run = Run(parts, settings_of(lab, tiny, where), where, progress)
    results = json.loads(json.dumps(lab.measure(run), allow_nan=False))
    command = f"regard lab {name}" + (" --tiny" if tiny else "")
    report = Report(
        lab=name,
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        device=device_name(where),
        versions={"regard": __version__, "torch": str(torch.__version__)},
        seconds=round(run.seconds, 1),
        results=results,
    )
    write_report(lab, report, folder)
    parts.unlink(missing_ok=True)
    return report


def settings_of(lab: Lab, tiny: bool, device: torch.device) -> dict[str, Any]:
    """What the parts of two runs have in common if one may go on with the other's."""
    file = importlib.import_module(lab.measure.__module__).__file__
    source = hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()
    versions = [__version__, str(torch.__version__)]
    return {"lab": lab.name, "tiny": tiny, "device": str(device), "of": [source, *versions]}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
