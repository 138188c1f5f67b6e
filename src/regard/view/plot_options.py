"""Options of figures: size, colours, scale, and the window of the map that is shown.

They are typed twice: `PlotOptions` for the keyword arguments of `plot`, `Style` for the same with
defaults, checked.

Left out: what is drawn (place, head) and the file, which are arguments of `plot` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import numpy as np

from regard.lens.lazy_weights import Window, shares
from regard.lens.record import Record
from regard.view.queries import Floats

Palette = Literal["tide", "viridis", "cividis"]
Scale = Literal["root", "linear", "log", "chance"]


class PlotOptions(TypedDict, total=False):
    """size: inches of the map's longer side. palette: its colours. scale: that of the colours;
    "chance" shows weights divided by those of attention spread evenly. window: (t0, t1, s0, s1),
    queries t0 to t1 - 1 and keys s0 to s1 - 1 of one head's map. tokens: False writes positions."""

    size: float | None
    palette: Palette
    scale: Scale
    window: Window | None
    tokens: bool


@dataclass(frozen=True, kw_only=True)
class Style:
    size: float | None = None
    palette: Palette = "tide"
    scale: Scale = "root"
    window: Window | None = None
    tokens: bool = True

    def __post_init__(self) -> None:
        for name, known in (("palette", get_args(Palette)), ("scale", get_args(Scale))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}"
                )
        if self.size is not None and not 0.5 <= self.size <= 40:
            raise ValueError(f"size is {self.size} inches; expected 0.5 to 40")


def chance_cells(record: Record, place: int, window: Window, size: tuple[int, int]) -> Floats:
    """The weights of attention spread evenly, pooled to `size` cells of a window: the mean over a
    cell's pairs of 1 / (keys the query may see), or 0 for keys after the query if causal."""
    here, (t0, t1, s0, s1) = record.places[place], window
    visible = record.visible(place)[t0:t1]
    _, down = shares(size[0], (t0, t1), (t0, t1))
    _, across = shares(size[1], (s0, s1), (s0, s1))
    sums = np.pad(np.cumsum(across, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
    last = np.full(t1 - t0, s1)
    if here.causal:
        last = np.clip(np.arange(t0, t1) + here.n_keys - here.n_queries + 1, s0, s1)
    rows = sums[:, last - s0].T / np.maximum(visible, 1)[:, None]
    return np.asarray(down @ rows, np.float32)
