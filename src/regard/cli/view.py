"""`regard view`: open a record again, or two beside each other, or what a survey found.

The model need not be there.
"""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from regard.cli.look import show_page, tell
from regard.cli.outputs import check_outputs, own_page
from regard.cli.printing import make_printable, refusing, write_line, write_or_drop
from regard.cli.progress import working
from regard.cli.survey import N_HEADS, write_table

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from regard.lens.head_table import HeadTable

VIEW_HELP = """Open a record that `regard look --save` or record.save() wrote; two are compared.

  regard view run.regard

  regard view one.regard other.regard

  regard view heads.regard

The last is what `regard survey --out heads.regard` wrote: all heads by score.

A page opens in the browser, answered from this machine alone until Ctrl-C. --html writes it to a
file in its place, as far as that holds the weights.
"""


def show_heads(table: "HeadTable", notes: "Console", html: Path | None) -> None:
    """Write the page of a survey; unasked where, in the browser of a terminal's user."""
    from rich.console import Console

    path = html or own_page()
    table.html(path)
    write_line(notes, f"page: {make_printable(str(path), notes.encoding)}")
    if html is None and notes.is_terminal:
        webbrowser.open(path.as_uri())
    console = Console()
    with console.capture() as caught:
        write_table(table, N_HEADS, console)
    write_or_drop(caught.get())


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
        from regard.lens.head_table import HeadTable, is_table
        from regard.lens.record import Record
        from regard.lens.word_links import words_of

        notes = Console(stderr=True)
        with refusing(notes):
            if len(records) > 2:
                raise ValueError(f"{len(records)} records were given; expected one, or two")
            check_outputs({"--html": html}, records)
            tables = [path for path in records if is_table(path)]
            if tables and (len(records) > 1 or token is not None):
                what = f"{tables[0].name} is what a survey found: expected it alone"
                raise ValueError(f"{what}, without another file or a word")
            if tables:
                show_heads(HeadTable.open(tables[0]), notes, html)
                return
            with working(notes, "opening the record"):
                opened = [Record.open(path).check() for path in records]
            other = opened[1] if len(opened) == 2 else None
            choose_word(words_of(opened[0])[0], token)  # refused before any work
            server = show_page(opened[0], notes, other=other, html=html, serve=html is None)
            tell(opened[0], server, token)
