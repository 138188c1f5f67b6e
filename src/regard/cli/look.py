"""`regard look`: what every head of a model looks at in a text.

Why: the main job. One command from a text to a picture of what each head does with it.

How: the model reads the text once while it is watched (`_look.py`); a digest goes to the terminal
(`digest.py`), the whole of it to a page (`view`): one HTML file, or for long texts a local server.

Left out: several texts at once; two records are compared with `regard view one two`.
"""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
import os
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from regard._look import DEFAULT_MODEL, Subject, see
from regard.cli.digest import write_digest
from regard.cli.loading import few_threads, is_small, load_subject
from regard.cli.printing import make_printable, read_utf8, refusing, write_line
from regard.cli.progress import MANY, showing, working

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from regard.lens.record import Record
    from regard.lens.recorder import Progress

EXAMPLE_TEXT = "The animal didn't cross the street because it was too tired."
LONG = 2048  # tokens; a longer text is served, since its weights do not fit a file

LOOK_HELP = f"""Show what every head of a model looks at in a text.

Examples:

  regard look "{EXAMPLE_TEXT}"

  regard look "{EXAMPLE_TEXT}" --token animal

  regard look --model ./bert-base-uncased story.txt --html story.html

  regard look --model smollm2.gguf --layer 13 --head 8 --png head.png "{EXAMPLE_TEXT}"

TEXT is the text itself, a file, or "-" for standard input. MODEL is a folder in Hugging Face's
layout, a GGUF file, or a name on the Hugging Face hub; without it the small language model inside
the package reads, embedded:lm, which needs no network. Architectures that regard does not know are
run by the package transformers, where it is installed.

A digest is written here: what heads do, which words they link, and what one word looks at
(--token). Heads are named layer.head. Then the page opens: every head as a map, to the single
weight. --html writes it to a file, --png draws a picture, --serve answers a browser until Ctrl-C,
--save keeps the record, which `regard view` opens again without the model.
"""


def read_text(words: Sequence[str]) -> str:
    """The words of the command line; or what is in the file, or on standard input, they name."""
    if list(words) == ["-"]:
        text = read_utf8(None)
    elif len(words) == 1 and os.path.isfile(words[0]):  # Path's raises where a name is too long
        text = read_utf8(Path(words[0]))
    else:
        text = " ".join(words)
    if not text.strip():
        raise ValueError(f'the text is empty; try: regard look "{EXAMPLE_TEXT}"')
    return text


def see_showing(subject: Subject, text: str, notes: "Console") -> "Record":
    """`see`, with the threads that suit the work, and its progress shown where it is long."""

    @contextmanager
    def progress(n_tokens: int, n_places: int | None) -> "Iterator[Progress | None]":
        small = is_small(subject.module) and n_tokens < MANY
        with few_threads(small), showing(notes, n_tokens, n_places) as tell:
            yield tell

    return see(subject, text, progress)


def show_page(
    record: "Record",
    notes: "Console",
    *,
    other: "Record | None" = None,
    html: Path | None = None,
    png: Path | None = None,
    serve: bool = False,
    place: int | None = None,
    head: int | None = None,
) -> None:
    """Write or open what was asked for; unasked, a page in the browser of a terminal's user."""
    from regard import view

    if png is not None:
        with working(notes, "drawing"):
            view.plot(record, png, place=place, head=head)
        write_line(notes, f"picture: {make_printable(str(png), notes.encoding)}")
    if html is not None:
        with working(notes, "writing the page"):
            view.write_page(html, record, other)
        write_line(notes, f"page: {make_printable(str(html), notes.encoding)}")
    if serve or (png is None and html is None and len(record.tokens) > LONG):
        with working(notes, "making the manifest"):
            server = view.serve(record, other, open_browser=notes.is_terminal)
        write_line(notes, f"page: {server.url} (Ctrl-C ends it)")
        server.wait()
    elif png is None and html is None:
        path = Path(tempfile.mkdtemp(prefix="regard-")) / "look.html"
        view.write_page(path, record)
        write_line(notes, f"page: {path}")
        if notes.is_terminal:
            webbrowser.open(path.as_uri())


def find_place(record: "Record", layer: int | None, head: int | None) -> int | None:
    if layer is None:
        if head is not None:
            raise ValueError("--head is one of a layer's heads: give --layer too")
        return None
    for number, place in enumerate(record.places):
        if place.layer == layer:
            if head is not None and not 0 <= head < place.n_heads:
                raise ValueError(f"--head is {head}, of heads 0 to {place.n_heads - 1}")
            return number
    raise ValueError(f"--layer is {layer}; the model has layers 0 to {record.places[-1].layer}")


def add_look(app: "typer.Typer") -> None:
    from rich.console import Console
    from typer import Argument, Option

    @app.command("look", help=LOOK_HELP)
    def look_command(
        text: Annotated[list[str], Argument(help='The text, a file, or "-".')],
        model: Annotated[
            str, Option("--model", "-m", help="Folder, GGUF file or hub name.")
        ] = DEFAULT_MODEL,
        token: Annotated[str | None, Option(help="The word to ask about.")] = None,
        layer: Annotated[int | None, Option(help="For --png: this layer alone.")] = None,
        head: Annotated[int | None, Option(help="For --png: this head of it.")] = None,
        html: Annotated[Path | None, Option(help="Write the page to this file.")] = None,
        png: Annotated[Path | None, Option(help="Draw to .png, .svg or .pdf.")] = None,
        serve: Annotated[bool, Option("--serve", help="Serve the page to a browser.")] = False,
        save: Annotated[Path | None, Option(help="Keep the record (.regard).")] = None,
        device: Annotated[str | None, Option(help="cpu, cuda, ...; else the best.")] = None,
    ) -> None:
        notes = Console(stderr=True)
        with refusing(notes):
            whole = read_text(text)
            subject = load_subject(model, notes, device=device)
            record = see_showing(subject, whole, notes)
            place = find_place(record, layer, head)
            write_digest(record, Console(), token)
            if save is not None:
                with working(notes, "saving the record"):
                    record.save(save)
                write_line(notes, f"record: {make_printable(str(save), notes.encoding)}")
            show_page(record, notes, html=html, png=png, serve=serve, place=place, head=head)
