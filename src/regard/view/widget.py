"""The page as a notebook widget, by anywidget: the same bundle, with the record in the kernel.

Up to `WIDGET_BUDGET` bytes of the record are embedded in the widget; the rest is requested from the
kernel piece by piece, as the server's page does. A saved notebook has no kernel, and most keep no
widgets: for those a static picture is displayed before the widget, which hides it while it is live.

Left out: notebooks without anywidget, where `record.html(...)` works. The class is built on first
use, because anywidget is an extra: pip install 'regard[view]'.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from regard.lens.record import Record
from regard.view import assets
from regard.view.manifest import make_manifest
from regard.view.page import make_data, page_title
from regard.view.queries import answer
from regard.view.still import STILL, still_html

WIDGET_BUDGET = 2_000_000  # bytes of data in a notebook; the rest is requested from the kernel


def make_widget(
    record: Record, other: Record | None = None, *, line: str = "", budget: int = WIDGET_BUDGET
) -> Any:
    """A notebook widget that shows the page of a record; put it last in a cell.

    Args:
        record: What it shows.
        other: A second record, to compare with.
        line: Which view to open first, as after the # in a page's address.
        budget: The most bytes of weights that are saved in the notebook.
    """
    records = [record] if other is None else [record, other]
    manifest = assets.inline_json(make_manifest(records, "widget"))
    data = make_data(records, "widget", budget + len(manifest))
    widget = _widget_class()(manifest=assets.inline_json(data), line=line)
    widget.records = records
    return widget


@cache
def _widget_class() -> Any:
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        what = "showing a record in a notebook needs the anywidget package: pip install"
        raise ImportError(f"{what} 'regard[view]'; record.html(...) works without it") from error

    class RecordWidget(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
        """The page as a widget. `line` is the view that is open; setting it opens another."""

        _esm = assets.script()
        # Notebooks put each output into a box; hide the box of the static picture with it.
        _css = f"{assets.style()}.{STILL},.jp-OutputArea-child:has(.{STILL}){{display:none}}"
        manifest = traitlets.Unicode().tag(sync=True)
        line = traitlets.Unicode().tag(sync=True)

        def __init__(self, **fields: Any) -> None:
            self.records: list[Record] = []
            super().__init__(**fields)
            self.on_msg(self._heard)

        def __repr__(self) -> str:
            """The text that a saved notebook shows if widgets do not run."""
            names = " and ".join(repr(page_title(record)) for record in self.records)
            return f"{names} (run the cell to see it)"

        def _repr_mimebundle_(self, **options: Any) -> Any:
            from IPython import display, get_ipython

            if get_ipython() is not None:  # type: ignore[no-untyped-call, unused-ignore]
                still = {"text/html": still_html(self.records), "text/plain": repr(self)}
                display.display(still, raw=True)  # type: ignore[no-untyped-call, unused-ignore]
            return super()._repr_mimebundle_(**options)

        def _heard(self, _: Any, content: Any, buffers: Any) -> None:
            """Answer a query from the page; the answer carries the query's id."""
            if not isinstance(content, dict) or not isinstance(content.get("question"), str):
                return
            number = content.get("id")
            try:
                values = answer(self.records, content["question"]).astype("<f4")
            except (ValueError, IndexError) as problem:
                self.send({"id": number, "error": str(problem)})
            else:
                self.send({"id": number}, buffers=[values.tobytes()])

    return RecordWidget
