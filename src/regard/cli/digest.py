"""A record in a few lines of a terminal: what heads do, which words they link, what a word sees.

Why: the shortest answer to "what does it look at?" is read before any page opens.

How: three parts. What heads do best, one line for each kind of head. The most telling links of the
text (`lens/word_links.py`). And for one word what it looks at, and who looks at it, each with the
head in which that shows most. Heads are named layer.head, both counted from 0. Weights are shades
where the terminal has colours, and bars where not.

Left out: links between all words of a long text; of such a text the digest has heads and one word.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from regard.cli.printing import make_printable, write_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from regard.lens.record import Record
    from regard.lens.word_links import Link, Word

KINDS = {
    "previous": "the token before",
    "next": "the token after",
    "same": "the token itself",
    "first": "the first token",
    "induction": "what came after the same token",
    "separator": "signs and ends",
}
N_HEADS, N_LINKS, N_SIDES = 4, 8, 5
LEAST = 0.2  # a head that gives a kind less than this does something else
BAR_CELLS = 10
# A full block, then what is left over in eighths of a cell.
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
PALE_RGB, DEEP_RGB = (236, 240, 248), (16, 62, 138)
PRONOUNS = ("it", "he", "she", "they", "them", "him", "her", "this", "that", "who", "which")


def write_digest(record: Record, console: Console, word: str | None = None) -> None:
    """Write all of it; `word` is the one to ask about, or its number among the words."""
    from regard.lens.word_links import MOST_WORDS, Link, find_alignment, find_links, words_of

    say = partial(write_line, console)
    n_heads = sum(place.n_heads for place in record.places)
    say(
        f"{make_printable(record.model, console.encoding)}: {len(record.tokens):,} tokens, "
        f"{len(record.places)} attention layers, {n_heads} heads"
    )
    say("\nWhat heads look at most (layer.head and the mean weight there)")
    say("\n".join(tell_heads(record)))
    own, source = words_of(record)
    short = max(len(own), len(source)) <= MOST_WORDS
    aligned = find_alignment(record) if short else None
    links: list[Link] = []
    if aligned is not None:
        at = aligned.place, aligned.head
        title = "Which word looks at which of the source, in the firmest head, "
        title += head_name(record, *at)
        links = [Link(query, key, *at, weight, weight) for query, key, weight in aligned.pairs]
    elif short:
        title, links = "The most telling looks from word to word", pick_links(find_links(record))
    if links:
        say(f"\n{title}")
    for link in links:
        keys = source if record.places[link.place].kind == "cross" else own
        words = f"{own[link.query].text} → {keys[link.key].text}"
        say(draw_line(console, words, link, record))
    chosen = choose_word(own, word) if aligned is None else None
    if chosen is not None:
        for line in tell_word(record, console, own, chosen, short):
            say(line)


def tell_heads(record: Record) -> list[str]:
    lines = []
    for name, values in record.heads().items():
        if name not in KINDS:
            continue
        # A head without this score has NaN, which is not above anything: it is left out.
        found = [(values[place, head], place, head) for place, head in np.argwhere(values >= LEAST)]
        found.sort(key=lambda each: -each[0])
        best = [f"{head_name(record, *at)} {value:.2f}" for value, *at in found[:N_HEADS]]
        if best:
            lines.append(f"  {KINDS[name]:<31} {'   '.join(best)}")
    return lines or ["  nothing that has a name"]


def head_name(record: Record, place: int, head: int) -> str:
    here = record.places[place]
    several = len({each.kind for each in record.places}) > 1
    stack = "encoder " if here.stack == "encoder" and several else ""
    return f"{stack}{'cross ' if here.kind == 'cross' else ''}{here.layer}.{here.heads[head]}"


def pick_links(links: Sequence[Link]) -> list[Link]:
    """The most telling ones, each word looking twice at most, so that one word is not all."""
    picked: list[Link] = []
    for link in links:
        if sum(other.query == link.query for other in picked) < 2:
            picked.append(link)
    return picked[:N_LINKS]


def choose_word(words: Sequence[Word], asked: str | None) -> int | None:
    """The number of the word asked for; unasked the first pronoun, else the last real word."""
    plain = [number for number, word in enumerate(words) if not word.is_mark]
    if asked is None:
        pronouns = [n for n in plain if words[n].text.lower() in PRONOUNS and n > 0]
        return next(iter(pronouns or plain[-1:]), None)
    if asked.isdecimal() and int(asked) < len(words):
        return int(asked)
    for number in plain:
        if words[number].text.lower() == asked.lower():
            return number
    known = ", ".join(words[number].text for number in plain[:20])
    raise ValueError(
        f"no word of the text is {asked!r}; expected one of {known}"
        f"{' ...' if len(plain) > 20 else ''}, or its number from 0 on"
    )


def tell_word(
    record: Record, console: Console, own: Sequence[Word], chosen: int, short: bool
) -> list[Text | str]:
    from regard.lens.word_links import links_of_word

    said = own[chosen].text
    lines: list[Text | str] = []
    for title, looking in ((f'"{said}" looks at', True), (f'"{said}" is looked at by', False)):
        links = links_of_word(record, own, chosen, looking=looking, telling=short)
        if not links:
            continue
        lines += ["", make_printable(title, console.encoding)]
        for link in links[:N_SIDES]:
            other = link.key if link.query == chosen else link.query
            lines.append(draw_line(console, own[other].text, link, record))
    return lines


def draw_line(console: Console, said: str, link: Link, record: Record) -> Text:
    """A word or two, the head, the weight as a number and as a shade or bar."""
    from rich.text import Text

    label = Text(f"  {make_printable(said, console.encoding)}")
    label.truncate(33, overflow="ellipsis", pad=True)
    line = Text.assemble(label, f" {head_name(record, link.place, link.head):<12} ")
    number = f" {link.weight:.2f} "
    if console.color_system is not None and not console.no_color:
        return line.append(number, shade(link.weight))
    blocks = console.encoding.lower().startswith("utf")
    line.append(number + draw_bar(link.weight, blocks))
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
