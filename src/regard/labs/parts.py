"""The parts of a run, saved one by one, so that a lab that was stopped can resume.

How: a lab measures by `Run.map`, one part for each item (a width, a seed, a model). Each result is
appended to a file at once; a run that starts again reads the file and measures the rest. Parts
measured with other settings are ignored.

Left out: resuming in the middle of a part. Parts take minutes at most.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from regard._files import parse_json, replace_file

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]


@final
class Run:
    """One run of a lab: its settings, its device, and the parts measured so far."""

    def __init__(
        self, path: Path, about: dict[str, Any], device: torch.device, progress: Progress | None
    ) -> None:
        self.path, self.about, self.device = path, about, device
        self.progress = progress or (lambda doing, done, total: None)
        self.kept = read_parts(path, about)
        self.begun = False  # whether this run has written the file of parts
        # Parts of earlier runs count, so that the time reported is that of the whole measurement.
        self.seconds = sum(part["seconds"] for part in self.kept.values())

    @property
    def tiny(self) -> bool:
        """Whether this is the small run, which takes about a minute on a CPU."""
        return bool(self.about["tiny"])

    def map(self, name: str, measure: Callable[[Item], Any], items: Sequence[Item]) -> list[Any]:
        """Measure each item and return the results as JSON values; parts already saved are reused.

        A part is identified by `name` and the item's repr.
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
            # Rewrite the file, without parts of other settings and without a torn line.
            write_lines(self.path, [self.about, *self.kept.values()])
            self.begun = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(part) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.kept[part["key"]] = part
        self.seconds += part["seconds"]


def read_parts(path: Path, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Read the parts of an earlier run with the same settings, up to a torn or damaged line."""
    try:
        first, *lines = path.read_bytes().splitlines() or [b""]
    except FileNotFoundError:
        return {}
    parts = {}
    try:
        if parse_json(first, "it", ValueError) != about:
            return {}
        for line in lines:
            part = parse_json(line, "it", ValueError)
            if not is_part(part):
                break
            parts[part["key"]] = part
    except ValueError:
        pass  # a kill tore this line, or something else has written it
    return parts


def is_part(found: dict[str, Any]) -> bool:
    known = found.keys() == {"key", "seconds", "value"} and isinstance(found["key"], str)
    return known and isinstance(found["seconds"], int | float) and found["seconds"] >= 0


def write_lines(path: Path, values: Sequence[dict[str, Any]]) -> None:
    with replace_file(path) as file:
        file.write("".join(json.dumps(value) + "\n" for value in values).encode())
