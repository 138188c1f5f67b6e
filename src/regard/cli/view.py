"""`regard view`: open a record again, or two beside each other; the model need not be there."""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from regard.cli.look import show_page, tell
from regard.cli.outputs import check_outputs
from regard.cli.printing import refusing
from regard.cli.progress import working

if TYPE_CHECKING:
    import typer

VIEW_HELP = """Open a record that `regard look --save` or record.save() wrote; two are compared.

  regard view run.regard

  regard view one.regard other.regard

A page opens in the browser, answered from this machine alone until Ctrl-C. --html writes it to a
file in its place, as far as that holds the weights.
"""


def add_view(app: "typer.Typer") -> None:
    from rich.console import Console
    from typer import Argument, Option

    @app.command("view", help=VIEW_HELP)
    def view_command(
        records: Annotated[list[Path], Argument(help="One .regard file, or two.")],
        html: Annotated[Path | None, Option(help="Write the page to this file.")] = None,
        token: Annotated[str | None, Option(help="The word to ask about.")] = None,
    ) -> None:
        from regard.lens.findings import choose_word
        from regard.lens.record import Record
        from regard.lens.word_links import words_of

        notes = Console(stderr=True)
        with refusing(notes):
            if len(records) > 2:
                raise ValueError(f"{len(records)} records were given; expected one, or two")
            check_outputs({"--html": html}, records)
            with working(notes, "opening the record"):
                opened = [Record.open(path).check() for path in records]
            other = opened[1] if len(opened) == 2 else None
            choose_word(words_of(opened[0])[0], token)  # refused before any work
            server = show_page(opened[0], notes, other=other, html=html, serve=html is None)
            tell(opened[0], server, token)
