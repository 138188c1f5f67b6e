"""A record in a few lines of a terminal: what heads do, which words they link, what a word sees.

Why: the shortest answer to "what does it look at?" is read before any page opens.

How: what stands out (`lens/findings.py`), a line each, and where the record has it what heads are
worth (`lens/head_effects.py`). Heads are named layer.head, both counted from 0. Weights are shades
where the terminal has colours, and bars where not.

Left out: what is worth telling; that is the library's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from regard.cli.printing import count, make_printable, write_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from regard.lens.findings import Line
    from regard.lens.head_effects import Effect
    from regard.lens.record import Record

N_EFFECTS = 8
BAR_CELLS = 10
# A full block, then what is left over in eighths of a cell.
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
PALE_RGB, DEEP_RGB = (236, 240, 248), (16, 62, 138)


def write_digest(record: Record, console: Console, word: str | None = None) -> None:
    """Write all of it; `word` is the one to ask about, or its number among the words."""
    from regard.lens.findings import find_sections
    from regard.lens.head_names import length_note, short_model_name

    say = partial(write_line, console)
    n_heads = sum(place.n_heads for place in record.places)
    said = (
        count(len(record.tokens), "token"),
        count(len(record.places), "attention layer"),
        count(n_heads, "head"),
    )
    say(f"{make_printable(short_model_name(record.model), console.encoding)}: {', '.join(said)}")
    for note in (length_note(record), *record.notes):
        if note is not None:
            say(make_printable(note, console.encoding))
    for section in find_sections(record, word):
        say("\n" + make_printable(section.title, console.encoding))
        for line in section.lines:
            say(tell_role(record, line) if line.query is None else draw_line(console, line, record))
    for effect in record.effects():
        write_effect(effect, console)


def write_effect(effect: Effect, console: Console) -> None:
    """Write which heads change most what is said, as bars or shades of their change."""
    from rich.text import Text

    write_line(console, "\n" + make_printable(effect.title, console.encoding))
    blocks = console.encoding.lower().startswith("utf")
    top = effect.top(N_EFFECTS)
    for layer, head, change in top:
        line, number = Text(f"  {f'{layer}.{head}':<8} "), f" {change:+.3f} "
        share = abs(change) / max(abs(top[0][2]), 1e-9)
        if console.color_system is not None and not console.no_color:
            line.append(number, shade(share))
        else:
            line.append(number + draw_bar(share, blocks))
        line.rstrip()
        write_line(console, line)
    write_line(console, f"  all heads {effect.whole:+.3f}")


def tell_role(record: Record, line: Line) -> str:
    """What heads look at, and those that do so most."""
    from regard.lens.findings import head_label

    best = [f"{head_label(record, place, head)} {value:.2f}" for place, head, value in line.heads]
    return f"  {line.text:<31} {'   '.join([*best, line.note])}".rstrip()


def draw_line(console: Console, told: Line, record: Record) -> Text:
    """A word or two, the head, the weight as a number and as a shade or bar."""
    from rich.text import Text

    from regard.lens.findings import head_label

    [(place, head, weight)] = told.heads
    label = Text(f"  {make_printable(told.text, console.encoding)}")
    label.truncate(33, overflow="ellipsis", pad=True)
    line = Text.assemble(label, f" {head_label(record, place, head):<12} ")
    number = f" {weight:.2f} "
    if console.color_system is not None and not console.no_color:
        return line.append(number, shade(weight))
    blocks = console.encoding.lower().startswith("utf")
    line.append(number + draw_bar(weight, blocks))
    line.rstrip()
    return line


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
