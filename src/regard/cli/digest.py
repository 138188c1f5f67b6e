"""A record in a few lines of a terminal: what heads do, which words they link, what a word sees.

Why: the shortest answer to "what does it look at?" is read before any page opens.

How: three parts. What heads do best, one line for each kind of head. The most telling links of the
text (`lens/word_links.py`). And for one word what it looks at, and who looks at it, each with the
head in which that shows most. Heads are named layer.head, both counted from 0. Weights are shades
where the terminal has colours, and bars where not.

Left out: links between all words of a long text; of such a text the digest has heads and one word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from regard.cli.printing import count, make_printable, write_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from regard.lens.record import Record
    from regard.lens.word_links import Link, Word

N_HEADS, N_LINKS, N_SIDES = 4, 8, 5
LEAST = 0.2  # a head that gives a kind less than this does something else
BAR_CELLS = 10
# A full block, then what is left over in eighths of a cell.
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
PALE_RGB, DEEP_RGB = (236, 240, 248), (16, 62, 138)
# Those that stand for something of the text are asked about before those that may just join.
PRONOUNS = (
    ("it", "he", "she", "they", "him", "her", "them", "itself", "himself", "herself", "themselves"),
    ("his", "hers", "its", "their", "theirs"),
    ("this", "these", "those", "who", "whom", "which", "that"),
)


def write_digest(record: Record, console: Console, word: str | None = None) -> None:
    """Write all of it; `word` is the one to ask about, or its number among the words."""
    from regard.lens.head_names import length_note, short_model_name
    from regard.lens.word_links import MOST_WORDS, words_of

    say = partial(write_line, console)
    n_heads = sum(place.n_heads for place in record.places)
    said = (
        count(len(record.tokens), "token"),
        count(len(record.places), "attention layer"),
        count(n_heads, "head"),
    )
    say(f"{make_printable(short_model_name(record.model), console.encoding)}: {', '.join(said)}")
    note = length_note(record)
    if note is not None:
        say(note)
    say("\nWhat heads look at most (layer.head and the mean weight there)")
    say("\n".join(tell_heads(record)))
    own, source = words_of(record)
    short = max(len(own), len(source)) <= MOST_WORDS
    lines = tell_alignment(record, console, own, source) if short else []
    for line in lines or tell_links(record, console, own, choose_word(own, word), short):
        say(line)


def tell_heads(record: Record) -> list[str]:
    import numpy as np

    from regard.lens.head_names import SCORE_WORDS, known_scores

    lines, counts = [], record.counts()
    for name, values in known_scores(record).items():
        if name in ("local", "broad"):  # no weights
            continue
        # A head without this score has NaN, which is not above anything: it is left out.
        found = [(values[place, head], place, head) for place, head in np.argwhere(values >= LEAST)]
        found.sort(key=lambda each: -each[0])
        best = [f"{head_name(record, *at)} {value:.2f}" for value, *at in found[:N_HEADS]]
        if name == "induction":
            best.append(f"(seen at {count(int(counts[name].max()), 'token')})")
        if found:
            lines.append(f"  {SCORE_WORDS[name].what:<31} {'   '.join(best)}")
    return lines or ["  nothing that has a name"]


def head_name(record: Record, place: int, head: int) -> str:
    from regard.lens.head_names import label_places

    return f"{label_places(record)[place]}.{record.places[place].heads[head]}"


def tell_alignment(
    record: Record, console: Console, own: Sequence[Word], source: Sequence[Word]
) -> list[Text | str]:
    """Which word of a translation looks at which of its source; nothing where there is none."""
    from regard.lens.word_links import Link, find_alignment

    aligned = find_alignment(record)
    if aligned is None:
        return []
    at = aligned.place, aligned.head
    title = "Which word looks at which of the source, in the firmest head, "
    lines: list[Text | str] = ["", title + head_name(record, *at)]
    for query, key, weight in aligned.pairs:
        words = f"{own[query].text} → {source[key].text}"
        lines.append(draw_line(console, words, Link(query, key, *at, weight, weight), record))
    return lines


def tell_links(
    record: Record, console: Console, own: Sequence[Word], chosen: int | None, short: bool
) -> list[Text | str]:
    """The most telling links of a short text, and those of one word."""
    from regard.lens.word_links import Survey, links_of_word, survey

    if short:
        found = survey(record, chosen)
    elif chosen is not None:
        sides = [links_of_word(record, own, chosen, looking=looking) for looking in (True, False)]
        found = Survey(iter(()), *sides)
    else:
        return []
    lines: list[Text | str] = []
    most_telling = pick_links(found.links)
    if most_telling:
        lines += ["", "The most telling looks from word to word"]
    for link in most_telling:
        words = f"{own[link.query].text} → {own[link.key].text}"
        lines.append(draw_line(console, words, link, record))
    if chosen is None:
        return lines
    said = own[chosen].text
    for title, links in (("looks at", found.looks_at), ("is looked at by", found.looked_at_by)):
        first = list(islice(links, N_SIDES))
        if first:
            lines += ["", make_printable(f'"{said}" {title}', console.encoding)]
        for link in first:
            other = link.key if link.query == chosen else link.query
            lines.append(draw_line(console, own[other].text, link, record))
    return lines


def pick_links(links: Iterable[Link]) -> list[Link]:
    """The most telling ones, each word looking twice at most, so that one word is not all."""
    picked: list[Link] = []
    for link in links:
        if sum(other.query == link.query for other in picked) < 2:
            picked.append(link)
        if len(picked) == N_LINKS:
            break
    return picked


def choose_word(words: Sequence[Word], asked: str | None) -> int | None:
    """The number of the word asked for; unasked the first pronoun, else the last real word."""
    plain = [number for number, word in enumerate(words) if not word.is_mark]
    if asked is None:
        for kind in PRONOUNS:
            found = [n for n in plain if words[n].text.lower() in kind and n > 0]
            if found:
                return found[0]
        return plain[-1] if plain else None
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
