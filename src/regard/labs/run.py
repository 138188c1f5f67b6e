"""Run a lab: measure, and write the results; a run that was stopped resumes.

How: the settings of a run (its size, the device, the labs' sources and the versions) are written
before its parts (`parts.py`), so that it does not reuse parts measured with other settings.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from regard._files import spell_path
from regard._version import __version__
from regard.labs.lab import Lab
from regard.labs.parts import Progress, Run
from regard.labs.report import Report, write_report
from regard.models.weights import find_device


def run_lab(
    name: str,
    out: str | os.PathLike[str] = "labs",
    *,
    tiny: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a lab and write NAME.json, NAME.png and NAME.md into the folder `out`.

    A run that was stopped resumes where it was; a finished one starts over.
    """
    from regard.labs import find_lab

    lab = find_lab(name)
    folder = Path(os.fsdecode(out))
    where = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        what = f"out is {spell_path(folder)}, which is no folder, or lies in something that is none"
        raise ValueError(f"{what}; name a folder") from None
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
    """The settings that must be equal in two runs if one is to reuse the other's parts."""
    own = Path(str(importlib.import_module(lab.measure.__module__).__file__))
    source = hashlib.sha256()
    # Labs share files for training, timing and counting, so the sources of all labs are hashed.
    for file in sorted({own, *Path(__file__).parent.glob("*.py")}):
        source.update(file.read_bytes())
    versions = [__version__, str(torch.__version__)]
    of = [source.hexdigest(), *versions]
    return {"lab": lab.name, "tiny": tiny, "device": str(device), "of": of}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
