"""`regard look`: what every head of a model looks at in a text.

Why: the main job. One command from a text to a picture of what each head does with it.

How: what was asked for is checked first. The model reads the text once while it is watched
(`_look.py`); the whole of it goes to a page (`view`): one HTML file, or for long texts a local
server; and when that is there, a digest to the terminal (`digest.py`).

Left out: several texts at once; two records are compared with `regard view one two`.
"""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
import os
import re
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from regard._look import (
    Fit,
    Subject,
    add_effects,
    check_effect,
    choose_fit,
    choose_inside,
    see,
)
from regard.cli.digest import write_digest
from regard.cli.loading import few_threads, is_small, load_subject
from regard.cli.outputs import check_outputs, own_page
from regard.cli.printing import make_printable, read_utf8, refusing, write_line, write_or_drop
from regard.cli.progress import MANY, showing, working

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from regard.lens.record import Record
    from regard.lens.recorder import Progress
    from regard.view.server import Server

EXAMPLE_TEXT = "The animal didn't cross the street because it was too tired."
PATH_START = re.compile(r"\.{0,2}/\S|~/")
PATH_END = re.compile(r"[^\s.]\.(?:txt|text|md|rst|tex|log|csv|json|html?|py)$", re.I)
LONG = 2048  # tokens; a longer text is served, since its weights do not fit a file

LOOK_HELP = f"""Show what every head of a model looks at in a text.

Examples:

  regard look "{EXAMPLE_TEXT}"

  regard look "{EXAMPLE_TEXT}" --token animal

  regard look --model ./bert-base-uncased story.txt --html story.html

  regard look --model smollm2.gguf --layer 13 --head 8 --png head.png "{EXAMPLE_TEXT}"

TEXT is the text itself, a file, or "-" for standard input. MODEL is a folder in Hugging Face's
layout, a GGUF file, or a name on the Hugging Face hub; without it a small one inside the package
reads, which needs no network: embedded:encoder, or where it cannot (a long text, other languages,
--effect without a [MASK]) embedded:lm, and that is said. Architectures that regard does not know
are run by the package transformers, where it is installed.

The page opens: every head as a map, to the single weight. A digest is written here: what heads
do, which words they link, and what one word looks at (--token). Heads are named layer.head; layers
are counted from 0 in the order in which they are called. --html writes the page to a file, --png
draws a picture, --values keeps how long values are, for value-weighted attention on the page,
--effect switches off each head and tells how much less likely the next token becomes, --edge IT
ANIMAL forbids one look in each, --serve answers a browser until Ctrl-C, --save keeps the record,
which `regard view` opens again without the model. Of a text that is longer than the model was made
for, --truncate reads the beginning, --window all of it, in windows that overlap.
"""


def read_text(words: Sequence[str], notes: "Console") -> str:
    """The words of the command line; or what is in the file, or on standard input, they name."""
    if list(words) == ["-"]:
        text = read_utf8(None)
    elif len(words) == 1 and is_readable(words[0]):
        text = read_utf8(Path(words[0]))
    else:
        text = " ".join(words)
        if len(words) == 1:
            check_no_path(words[0], notes)
    if not text.strip():
        raise ValueError(f'the text is empty; try: regard look "{EXAMPLE_TEXT}"')
    return text


def is_readable(word: str) -> bool:
    """Whether this is a file or a pipe, such as the shell makes of <(command)."""
    # Path's raises where a name is too long.
    return os.path.exists(word) and not os.path.isdir(word)


def check_no_path(word: str, notes: "Console") -> None:
    """Refuse what can only be the name of a file that is not there; say what may be one."""
    spaced = any(sign.isspace() for sign in word)
    if not spaced and (PATH_START.match(word) or PATH_END.search(word)):
        there = f"{word!r} is a folder; give a file in it"
        if not os.path.isdir(word):
            there = f"there is no file {word!r}; give one that is there"
        raise ValueError(f"{there}, or a text of several words")
    if os.path.isdir(word) or PATH_END.search(word) or ("/" in word and not spaced):
        what = "a folder" if os.path.isdir(word) else "no file"
        shown = make_printable(repr(word[:99]), notes.encoding)
        write_line(notes, f"{shown} is {what} here: it is read as the text")


def see_showing(
    subject: Subject,
    text: str,
    notes: "Console",
    token: str | None = None,
    fit: Fit = "refuse",
) -> "Record":
    """`see`, with the threads that suit the work, and its progress shown where it is long."""
    said = subject.read(text, fit)
    if fit == "truncate":
        n_tokens, n_read = len(subject.encode(text).ids), len(said.ids)
        if n_read < n_tokens:
            cut = f"the first {n_read:,} of {n_tokens:,} tokens"
            write_line(notes, f"--truncate: {cut} are read, which is what the model was made for")
    note = subject.note_unknown(said)
    if note is not None:
        write_line(notes, note)
    if token is not None:  # before the model reads
        from regard.lens.findings import choose_word
        from regard.lens.word_links import find_words

        choose_word(find_words(text, said.labels, said.spans or [(0, 0)] * len(said.ids)), token)

    @contextmanager
    def progress(n_tokens: int, n_places: int | None) -> "Iterator[Progress | None]":
        small = is_small(subject.module) and n_tokens < MANY
        with few_threads(small), showing(notes, n_tokens, n_places) as tell:
            yield tell

    return see(subject, text, progress, fit)


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
) -> "Server | None":
    """Write or open what was asked for; unasked, a page in the browser of a terminal's user.

    Gives the server that answers until Ctrl-C, where there is one, to be waited for.
    """
    from regard import view

    missing: list[str] = []
    if png is not None:
        with working(notes, "drawing"):
            view.plot(record, png, place=place, head=head)
        write_line(notes, f"picture: {make_printable(str(png), notes.encoding)}")
    if html is not None:
        with working(notes, "writing the page"):
            view.write_page(html, record, other, tell=missing.append)
        write_line(notes, f"page: {make_printable(str(html), notes.encoding)}")
    if serve or (png is None and html is None and len(record.tokens) > LONG):
        with working(notes, "making the manifest"):
            server = view.serve(record, other, open_browser=notes.is_terminal)
        write_line(notes, f"page: {server.url} (Ctrl-C ends it)")
        for note in missing:
            write_line(notes, note)
        return server
    if png is None and html is None:
        path = own_page()
        with working(notes, "writing the page"):
            view.write_page(path, record, other, tell=missing.append)
        write_line(notes, f"page: {make_printable(str(path), notes.encoding)}")
        if notes.is_terminal:
            webbrowser.open(path.as_uri())
    for note in missing:
        write_line(notes, note)
    return None


def tell(record: "Record", server: "Server | None", token: str | None = None) -> None:
    """Write the digest, when pages and files are there, and answer the browser to the end."""
    from rich.console import Console

    console = Console()
    with console.capture() as caught:
        write_digest(record, console, token)
    write_or_drop(caught.get())
    if server is not None:
        server.wait()


def check_layer(subject: Subject, layer: int | None, head: int | None, png: Path | None) -> None:
    """Refuse what the model cannot have, before it reads, and what nothing would come of."""
    if layer is None and head is not None:
        raise ValueError("--head is one of a layer's heads: give --layer too")
    for option, asked, n in (("layer", layer, subject.n_layers), ("head", head, subject.n_heads)):
        if asked is not None and n is not None and not 0 <= asked < n:
            raise ValueError(f"--{option} is {asked}; the model has {option}s 0 to {n - 1}")
    if layer is not None and png is None:
        raise ValueError("--layer says which layer --png draws: give --png too, or leave it out")


def find_place(record: "Record", layer: int | None, head: int | None) -> int | None:
    if layer is None:
        return None
    for number, place in enumerate(record.places):
        if place.layer == layer:
            if head is not None and not 0 <= head < place.n_heads:
                raise ValueError(f"--head is {head}, of heads 0 to {place.n_heads - 1}")
            return number
    last = max(place.layer for place in record.places)
    raise ValueError(f"--layer is {layer}; the model has layers 0 to {last}")


def add_look(app: "typer.Typer") -> None:
    from rich.console import Console
    from typer import Argument, Option

    @app.command("look", help=LOOK_HELP)
    def look_command(
        text: Annotated[list[str], Argument(help='The text, a file, or "-".')],
        model: Annotated[
            str | None, Option("--model", "-m", help="Folder, GGUF file or hub name.")
        ] = None,
        token: Annotated[str | None, Option(help="The word to ask about.")] = None,
        layer: Annotated[int | None, Option(help="For --png: only this layer.")] = None,
        head: Annotated[int | None, Option(help="For --png: only this head of the layer.")] = None,
        html: Annotated[Path | None, Option(help="Write the page to this file.")] = None,
        png: Annotated[Path | None, Option(help="Draw to .png, .svg or .pdf.")] = None,
        serve: Annotated[bool, Option("--serve", help="Serve the page to a browser.")] = False,
        save: Annotated[Path | None, Option(help="Keep the record (.regard).")] = None,
        truncate: Annotated[
            bool, Option("--truncate", help="Read what the model was made for, not more.")
        ] = False,
        window: Annotated[
            bool, Option("--window", help="Read a long text in overlapping windows.")
        ] = False,
        values: Annotated[
            bool, Option("--values", help="Keep the norms of values, for value-weighted attention.")
        ] = False,
        effect: Annotated[
            bool, Option("--effect", help="Switch off each head: what changes in the next token.")
        ] = False,
        edge: Annotated[
            tuple[str, str] | None,
            Option(help="Two words: forbid this look in each head, as --effect does heads."),
        ] = None,
        device: Annotated[
            str | None, Option(help="cpu, cuda, ...; by default a GPU, if there is one.")
        ] = None,
    ) -> None:
        notes = Console(stderr=True)
        with refusing(notes):
            given = [*text[:1], *([] if model is None else [model])]
            check_outputs({"--html": html, "--png": png, "--save": save}, given)
            fit = choose_fit(truncate, window)
            whole = read_text(text, notes)
            asks_next = effect or edge is not None
            if model is None:
                model = choose_inside(whole, fit, asks_next, partial(write_line, notes))
            subject = load_subject(model, notes, device=device)
            check_layer(subject, layer, head, png)
            subject = replace(subject, keep=(*subject.keep, "values")) if values else subject
            if asks_next:
                check_effect(subject, whole, fit, edge)
            record = see_showing(subject, whole, notes, token, fit)
            place = find_place(record, layer, head)
            if asks_next:
                with working(notes, "switching off heads"):
                    add_effects(subject, record, effect, edge)
            if save is not None:
                with working(notes, "saving the record"):
                    record.save(save)
                write_line(notes, f"record: {make_printable(str(save), notes.encoding)}")
            server = show_page(
                record, notes, html=html, png=png, serve=serve, place=place, head=head
            )
            tell(record, server, token)
