"""`regard look`: what each head looks at, as a table in the terminal.

Why: the shortest way from an installed package to a picture of what a head looks at.

How: the weights of a worked example of three words, computed by `observe`, drawn as shaded numbers
or, where there is no colour, with bars.

Left out: a trained model. Until `look` uses one it shows the worked example, and says so.

Letters: T queries, S keys, C model width.
"""

# No `from __future__ import annotations` here: typer reads the annotations of the function that is
# defined inside `add_look`, and could not resolve them from strings.
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from regard.cli.printing import make_printable, write_line

if TYPE_CHECKING:
    import typer
    from rich.console import Console
    from rich.text import Text

# The worked example: one vector of width 4 for each of three words, used as Q, K and V alike.
EXAMPLE_TC = (
    (1.0, 0.5, 0.2, 0.1),
    (0.3, 1.0, 0.4, 0.2),
    (0.2, 0.3, 1.0, 0.5),
)
EXAMPLE_TEXT = "I love Transformers"

LOOK_HELP = f"""Show what each head looks at, as a table shaded by weight.

Example:  regard look "{EXAMPLE_TEXT}"

A row is the word that looks; the numbers along it say how its attention is shared out among all
words, and add up to 1.

regard does not carry a trained model yet. The numbers come from a small worked example, three
fixed vectors of width 4: seen first by one head, then split between two heads of width 2. The
words you give name the rows and columns and do not change the numbers.
"""

NUMBER_CELLS = 6  # "0.3963"
BAR_CELLS = 10  # a weight of 1
GAP = "  "
# A full block, then what is left over in eighths of a cell.
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
PALE_RGB, DEEP_RGB = (236, 240, 248), (16, 62, 138)


class CannotLook(ValueError):
    """The text is not one that `regard look` can show; the message says what it can."""


def read_words(text: str) -> list[str]:
    """Split at whitespace into exactly as many words as the worked example has vectors."""
    words = text.split()
    if len(words) != len(EXAMPLE_TC):
        counted = f"{len(words):,} word" + ("s" if len(words) > 1 else "")
        came = f"The text has {counted}" if words else "The text is empty"
        raise CannotLook(
            f"{came}, and regard does not carry a trained model yet. What it can show now is a "
            f"worked example of exactly {len(EXAMPLE_TC)} words, separated by spaces. "
            f'Try: regard look "{EXAMPLE_TEXT}"'
        )
    return words


def weigh_example(n_heads: int) -> list[list[list[float]]]:
    """The attention weights of the worked example, split into `n_heads`: [head][query][key]."""
    import torch

    from regard.attention import Wants, observe

    x_tc = torch.tensor(EXAMPLE_TC)
    T, C = x_tc.shape
    # Split the width first, then move the heads forward: every head keeps all T words.
    x_bhtd = x_tc.view(1, T, n_heads, C // n_heads).transpose(1, 2)
    seen = observe(x_bhtd, x_bhtd, x_bhtd, wants=Wants(weights=True))
    assert seen.weights is not None
    weights: list[list[list[float]]] = seen.weights[0].tolist()
    return weights


def draw_bar(weight: float, blocks: bool) -> str:
    """A bar whose length is the weight, in eighths of a cell or, without block signs, in #."""
    if not blocks:
        return "#" * round(weight * BAR_CELLS)
    full, rest = divmod(round(weight * BAR_CELLS * 8), 8)
    return "█" * full + EIGHTHS[rest]


def shade(depth: float) -> str:
    """A rich style from pale (0) to deep (1) with letters that stay readable on it."""
    red, green, blue = (
        round(pale + (deep - pale) * depth) for pale, deep in zip(PALE_RGB, DEEP_RGB, strict=True)
    )
    letters = "white" if depth > 0.5 else "black"
    return f"{letters} on rgb({red},{green},{blue})"


def draw_head(
    weights_ts: Sequence[Sequence[float]], words: Sequence[str], console: "Console"
) -> list["Text"]:
    """One head as lines: a row for each looking word, a column for each word looked at."""
    from rich.cells import cell_len
    from rich.text import Text

    coloured = console.color_system is not None and not console.no_color
    blocks = console.encoding.lower().startswith("utf")
    with_bar = NUMBER_CELLS + 1 + BAR_CELLS
    room = console.width // (len(words) + 1) - len(GAP)
    column = min(max(room, NUMBER_CELLS), with_bar)

    def fit(label: str, cells: int) -> Text:
        text = Text(label)
        text.truncate(cells, overflow="ellipsis", pad=True)
        return text

    first = min(column, max(cell_len(word) for word in words))
    header = Text(GAP).join([Text(), fit("", first), *(fit(word, column) for word in words)])
    header.rstrip()
    lines = [header]
    largest = max(max(row) for row in weights_ts)
    for word, row in zip(words, weights_ts, strict=True):
        line = Text(GAP).join([Text(), fit(word, first)])
        for weight in row:
            number = f"{weight:.4f}"
            line.append(GAP)
            if coloured:
                line.append(number.center(column), shade(weight / largest))
            elif column == with_bar:
                line.append(fit(f"{number} {draw_bar(weight, blocks)}", column))
            else:
                line.append(fit(number, column))
        if not coloured:
            line.rstrip()
        lines.append(line)
    return lines


def look(text: str, console: "Console") -> None:
    """Write what each head of the worked example looks at, under the words of `text`."""
    words = [make_printable(word, console.encoding) for word in read_words(text)]
    say = partial(write_line, console)
    say("A row is a word that looks, a column a word it looks at; each row adds up to 1.")
    for n_heads in (1, 2):
        width = len(EXAMPLE_TC[0]) // n_heads
        for head, weights_ts in enumerate(weigh_example(n_heads), start=1):
            say()
            say(f"head {head} of {n_heads}, width {width}")
            for line in draw_head(weights_ts, words, console):
                say(line)
    say()
    say("A worked example, not a trained model: three fixed vectors x, and Q = K = V = x.")
    say("Your words only name the rows and columns; any three give the same numbers.")


def add_look(app: "typer.Typer") -> None:
    """`regard look`."""
    import typer
    from rich.console import Console

    @app.command("look", help=LOOK_HELP)
    def look_command(
        text: Annotated[
            list[str], typer.Argument(help="Three words; for now, no more and no fewer.")
        ],
    ) -> None:
        try:
            look(" ".join(text), Console())
        except CannotLook as refusal:
            write_line(Console(stderr=True), str(refusal))
            raise typer.Exit(code=2) from None
