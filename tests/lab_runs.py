"""What tests of labs share: a run in a folder, and what every lab's numbers must allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from regard.labs.lab import Lab
from regard.labs.parts import Run
from regard.labs.report import make_figure


def measure_lab(lab: Lab, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """What `measure` gives on a CPU, as JSON holds it; sentences and the figure are made of it."""
    run = Run(folder / "parts.jsonl", {"tiny": tiny}, torch.device("cpu"), None)
    results: dict[str, Any] = json.loads(json.dumps(lab.measure(run), allow_nan=False))
    sentences = lab.find(results)
    assert sentences and all(each.endswith(".") for each in sentences), sentences
    assert not [each for each in sentences if "nan" in each or "inf " in each], sentences
    figure = make_figure()
    lab.draw(results, figure)
    assert all(axes.get_title() and axes.get_ylabel() for axes in figure.axes)
    return results
