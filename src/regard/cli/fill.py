"""`regard fill`: what a masked language model puts into the gaps of a text.

Why: the shortest question to BERT and its like, and the first to one that was just trained.

How: the model reads the text once (`_fill.py`); the candidates of each gap go to standard output, a
line each, with their probabilities as numbers and bars.

Left out: several texts at once, and words of several tokens.
"""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
from typing import TYPE_CHECKING, Annotated

from regard._fill import fill
from regard.cli.digest import draw_bar
from regard.cli.loading import few_threads, is_small, load_model
from regard.cli.printing import make_printable, read_utf8, refusing, write_line, write_or_drop

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from regard.lens.fill import Filled

DEFAULT_MODEL = "embedded:encoder"
EXAMPLE = "The [MASK] sat on the mat."
FILL_HELP = f"""Fill the gaps of a text with a masked language model, as BERT is.

Examples:

  regard fill "{EXAMPLE}"

  regard fill --model ./roberta-base --top 10 "The [MASK] sat on the [MASK]."

  cat letter.txt | regard fill --model ./bert-base-uncased -

[MASK] in the text is a gap, whatever the model's own mask token is called. For each gap come the
tokens that the model finds likeliest there, with their probabilities over its whole vocabulary; a
part of a word is written as the vocabulary has it, such as ##ing. Each gap is filled by itself,
with the others left open, so that candidates of two gaps need not go together.

MODEL is a folder in Hugging Face's layout (config.json, model.safetensors, tokenizer.json), or a
name on the Hugging Face hub, of a model that was saved with its masked-word head: BertForMaskedLM,
RobertaForMaskedLM, or what `regard train mlm book.txt --out run` has trained; without it the small
encoder inside the package, {DEFAULT_MODEL}, fills them. Language models that go on with a text fill
no gaps: `regard generate` is for them.
"""


def write_filled(filled: "Filled", console: "Console") -> None:
    """The text, and for each gap its candidates."""
    write_line(console, make_printable(filled.text, console.encoding, kept="\n"))
    for note in filled.notes:
        write_line(console, note)
    blocks = console.encoding.lower().startswith("utf")
    labels = [one.label for gap in filled.gaps for one in gap.candidates]
    shown = [make_printable(label, console.encoding) for label in labels]
    width = max(map(len, shown))
    words = iter(shown)
    for number, gap in enumerate(filled.gaps, start=1):
        write_line(console, f"\ngap {number}" if len(filled.gaps) > 1 else "")
        for one in gap.candidates:
            bar = draw_bar(one.probability, blocks)
            line = f"  {next(words):<{width}}  {one.probability:.3f} {bar}"
            write_line(console, line.rstrip())


def add_fill(app: "typer.Typer") -> None:
    from rich.console import Console
    from typer import Argument, Option

    @app.command("fill", help=FILL_HELP)
    def fill_command(
        text: Annotated[list[str], Argument(help='The text; "-" reads standard input.')],
        model: Annotated[
            str, Option("--model", "-m", help="Folder or hub name of a masked model.")
        ] = DEFAULT_MODEL,
        top: Annotated[int, Option(help="Candidates for each gap.")] = 5,
        device: Annotated[
            str | None, Option(help="cpu, cuda, ...; by default a GPU, if there is one.")
        ] = None,
    ) -> None:
        notes, console = Console(stderr=True), Console()
        with refusing(notes):
            if top < 1:
                raise ValueError(f"--top is {top}; expected 1 or more candidates for each gap")
            whole = read_utf8(None).rstrip("\n") if text == ["-"] else " ".join(text)
            if not whole.strip():
                raise ValueError(f'the text is empty; try: regard fill "{EXAMPLE}"')
            loaded = load_model(model, notes, device=device)
            with few_threads(is_small(loaded)):
                filled = fill(loaded, whole, top)
            with console.capture() as caught:
                write_filled(filled, console)
            write_or_drop(caught.get())
