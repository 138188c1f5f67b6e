"""Show records: a page that opens offline, a local server, a notebook widget, figures.

`make_page` and `write_page` make one HTML file, `Server` and `serve` answer a browser on this
machine, `make_widget` is for notebooks, `plot` draws PNG, SVG and PDF; `make_heads` and
`write_heads` make the page of a survey. All of them know records and tables, not models, and none
needs torch. Each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.view.heads_page import make_heads as make_heads
    from regard.view.heads_page import write_heads as write_heads
    from regard.view.page import BUDGET as BUDGET
    from regard.view.page import make_page as make_page
    from regard.view.page import write_page as write_page
    from regard.view.plot_options import PlotOptions as PlotOptions
    from regard.view.plots import plot as plot
    from regard.view.queries import BadView as BadView
    from regard.view.server import Server as Server
    from regard.view.server import serve as serve
    from regard.view.widget import make_widget as make_widget

_HOMES = {
    "BUDGET": "page",
    "BadView": "queries",
    "PlotOptions": "plot_options",
    "Server": "server",
    "make_heads": "heads_page",
    "make_page": "page",
    "make_widget": "widget",
    "plot": "plots",
    "serve": "server",
    "write_heads": "heads_page",
    "write_page": "page",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"regard.view.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'regard.view' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
