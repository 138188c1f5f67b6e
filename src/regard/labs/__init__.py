"""Labs: claims of lectures on attention, each tested by a measurement.

Why: predict, run, see the true number.

How: one file per question, each with a `LAB` (`lab.py`): the question, the prediction, the method,
the measurement, findings as sentences built from the measured numbers, and the figure. `run_lab`
(`run.py`) runs a lab and resumes one that was stopped; `report.py` writes JSON, PNG and one page.
The results of full runs are kept in docs/labs.

Left out: anything that the library needs; labs use the library, never the other way round.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.labs.lab import Lab
    from regard.labs.run import run_lab
    from regard.labs.scaling_fits import fit_chinchilla, fit_kaplan

__all__ = ["NAMES", "find_lab", "fit_chinchilla", "fit_kaplan", "run_lab"]

NAMES = (
    "scaling",
    "heads",
    "positions",
    "norm",
    "fossils",
    "activations",
    "cache",
    "scaling_laws",
    "in_context",
    "induction",
    "what_heads_do",
    "flash",
)

_HOME = {
    "fit_chinchilla": "regard.labs.scaling_fits",
    "fit_kaplan": "regard.labs.scaling_fits",
    "run_lab": "regard.labs.run",
}


def find_lab(name: str) -> Lab:
    """Import the lab of that name."""
    if name not in NAMES:
        raise ValueError(f"no lab is named {name!r}; there are {', '.join(NAMES)}")
    lab: Lab = importlib.import_module(f"regard.labs.{name}").LAB
    return lab


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'regard.labs' has no attribute {name!r}")
