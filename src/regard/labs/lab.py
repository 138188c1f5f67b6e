"""What a lab is: a question, a prediction, a method, and three functions.

How: `measure` gets a `Run` and returns plain JSON values (dicts, lists, numbers, strings). `find`
builds sentences from these alone, so that every number in a text was measured; its first sentence
answers the question. `draw` draws the figure from them. All three are functions of the lab's own
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.labs.parts import Run

Results = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One question. `prediction` is what a reader of textbooks would say before the run."""

    name: str
    question: str
    prediction: str
    method: str
    measure: Callable[[Run], dict[str, Any]]
    find: Callable[[Results], list[str]]
    draw: Callable[[Results, Figure], None]
