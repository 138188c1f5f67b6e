"""`regard survey`: what every head of a model does over a whole corpus.

Why: one text shows what a head can do; many show what it does.

How: the texts are streamed through the model (`_look.survey_subject`), and the table of means goes
to a file, and to a page; the heads that stand out, to the terminal. Processes that torchrun started
share the work; only the first of them speaks and writes, but each says what it cannot do.

Left out: texts; `regard look` shows one in which a head does what it does.
"""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from regard._look import survey_subject
from regard.cli.loading import few_threads, is_small, load_subject
from regard.cli.outputs import check_outputs
from regard.cli.printing import count, make_printable, refusing, write_line, write_or_drop
from regard.cli.progress import counting

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from regard.lens.head_table import HeadTable, Row

DEFAULT_MODEL = "embedded:lm"  # a corpus may be of any language
N_HEADS = 5
LEAST = 0.005  # a score that no head has more of is not told: it would read 0.00
SURVEY_HELP = """Say what every head of a model does, over many texts.

Examples:

  regard survey texts.txt --out heads.csv --html heads.html

  regard survey reviews.jsonl --key review --model ./bert-base-uncased --out heads.parquet

  regard survey reviews.jsonl --key review --model ./bert-base-uncased --out heads.parquet --resume

  torchrun --nproc-per-node 4 -m regard survey texts.jsonl --out heads.json

TEXTS is a file: .jsonl, with a text under "text" (or --key) in each line, or else a text in each
line. It is streamed: any number of texts takes the same memory. A text that is longer than the
model takes is read as far as it goes. MODEL is what `regard look` takes; without it embedded:lm.

For each head and each score there comes out the mean over the texts, its standard deviation, and
how many texts had it. The scores: previous, next, same and first, the mean weight on the token
before, after, itself, and on the first; induction, on what came after the same token; separator, on
signs and ends; local, the distance in tokens; broad, the entropy in nats; links, what is telling of
the most telling look of each word, beyond the head's habits. Each text counts once.

The table goes to --out: .csv and .json always, .parquet where pyarrow is installed, .regard, which
`regard view` opens again; --html writes a page with all heads by score. Meanwhile the state lies
beside the table; a survey that was stopped, by kill -9 too, goes on with --resume. Under
torchrun several processes share the texts; their number does not change the result.
"""


@contextmanager
def reading(path: Path, limit: int | None, notes: "Console") -> "Iterator[Callable[[int], None]]":
    """How many texts have been read, shown while they are."""
    from regard.lens.corpus import count_lines

    total = min(count_lines(path), limit or 1 << 62)
    doing = f"reading {count(total, 'text')}"
    if not notes.is_terminal:
        write_line(notes, f"{doing} ...")
    with counting(notes, doing, total) as tell:
        yield tell


def write_table(table: "HeadTable", top: int, console: "Console") -> None:
    """The heads that have most of each score, a line a score."""
    from regard.lens.head_names import SCORE_WORDS
    from regard.lens.head_table import Head, label_layers

    said = [count(table.n_texts, "text"), count(len(table.heads), "head")]
    if table.n_truncated:
        said.append(f"{table.n_truncated:,} texts truncated")
    if table.n_empty:
        said.append(f"{table.n_empty:,} empty ones left out")
    write_line(console, f"{make_printable(table.model, console.encoding)}: {', '.join(said)}")
    write_line(console, "\nWhat heads do most (layer.head, mean ± standard deviation over texts)")
    labels = dict(zip(table.heads, label_layers(table.heads), strict=True))
    for score in table.scores:
        rows = table.top(score, top)
        if not rows or rows[0].mean < LEAST:
            continue
        best = "   ".join(tell_head(row, labels[Head(*row[:3])]) for row in rows)
        what = SCORE_WORDS[score].what + (", least" if score == "local" else "")
        write_line(console, f"  {what:<31} {make_printable(best, console.encoding)}".rstrip())


def tell_head(row: "Row", layer: str) -> str:
    """A head as layer.head, and its mean and spread."""
    spread = "" if row.texts < 2 else f" ±{row.std:.2f}"
    return f"{layer}.{row.head} {row.mean:.2f}{spread}"


def own_device(asked: str | None) -> str | None:
    """The device of this process; unasked one GPU each, where torchrun started several."""
    import torch

    local_rank = os.environ.get("LOCAL_RANK")
    if asked is None and local_rank is not None and torch.cuda.is_available():
        return f"cuda:{int(local_rank) % torch.cuda.device_count()}"
    return asked


def add_survey(app: "typer.Typer") -> None:
    from rich.console import Console
    from typer import Argument, Option

    @app.command("survey", help=SURVEY_HELP)
    def survey_command(
        texts: Annotated[Path, Argument(help="A file of texts, .jsonl or one a line.")],
        model: Annotated[
            str, Option("--model", "-m", help="Folder, GGUF file or hub name.")
        ] = DEFAULT_MODEL,
        out: Annotated[
            Path | None, Option(help="Write the table (.parquet, .csv, .json, .regard).")
        ] = None,
        html: Annotated[Path | None, Option(help="Write a page with all heads by score.")] = None,
        key: Annotated[str, Option(help="For .jsonl: the key of the text.")] = "text",
        limit: Annotated[int | None, Option(help="The most texts to read.")] = None,
        batch: Annotated[int, Option(help="How many texts of one length are read at once.")] = 32,
        resume: Annotated[
            bool, Option("--resume", help="Go on with a survey that was stopped.")
        ] = False,
        top: Annotated[int, Option(help="Heads to name for each score.")] = N_HEADS,
        device: Annotated[
            str | None, Option(help="cpu, cuda, ...; by default a GPU, if there is one.")
        ] = None,
    ) -> None:
        from regard.lens.survey import Plan, is_main

        console, notes = Console(quiet=not is_main()), Console(stderr=True, quiet=not is_main())
        with refusing(Console(stderr=True)):
            plan = Plan(limit=limit, batch=batch, resume=resume)
            check_outputs({"--out": out, "--html": html}, [texts, model])
            if top < 1:
                raise ValueError(f"--top is {top}; expected 1 or more heads for each score")
            if key != "text" and texts.suffix.lower() != ".jsonl":
                what = f"--key is for .jsonl, and {str(texts)!r} is read as a text a line"
                raise ValueError(f"{what}: leave --key out, or name the file .jsonl if it is one")
            if resume and out is None:
                raise ValueError("--resume goes on with the state beside --out: give --out too")
            if out is not None:
                from regard.lens.head_table import check_table_path

                check_table_path(out)
            subject = load_subject(model, notes, device=own_device(device))
            with few_threads(is_small(subject.module)), reading(texts, limit, notes) as tell:
                table = survey_subject(subject, texts, plan, key=key, out=out, progress=tell)
            if out is not None:
                write_line(notes, f"table: {make_printable(str(out), notes.encoding)}")
            if html is not None and is_main():
                table.html(html)
                write_line(notes, f"page: {make_printable(str(html), notes.encoding)}")
            with console.capture() as caught:
                write_table(table, top, console)
            write_or_drop(caught.get())
