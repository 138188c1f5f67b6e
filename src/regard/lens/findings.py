"""What stands out in a record, as a few sections of lines: the digest of the terminal and the page.

Why: the shortest answer to "what does it look at?", the same wherever it is shown.

How: up to four sections. What heads attend to most, one line for each kind of head. The most
telling links of the text (`word_links.py`), or for a translation, which word attends to which
source word. And for one word, which words it attends to and which attend to it, each with the head
in which the link is strongest.

Left out: links between all words of a long text, for which only heads and one word are reported;
and the layout of a section, which is up to the code that shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from regard.lens.head_names import SCORE_WORDS, known_scores, label_places
from regard.lens.record import Record
from regard.lens.word_links import (
    MOST_WORDS,
    Link,
    Survey,
    Word,
    find_alignment,
    links_of_word,
    survey,
    words_of,
)

N_HEADS, N_LINKS, N_SIDES = 4, 8, 5
LEAST = 0.2  # a head that gives a kind of token less weight than this does something else
# Pronouns that refer to something in the text come before words that may just be conjunctions.
PRONOUNS = (
    ("it", "he", "she", "they", "him", "her", "them", "itself", "himself", "herself", "themselves"),
    ("his", "hers", "its", "their", "theirs"),
    ("this", "these", "those", "who", "whom", "which", "that"),
)


@dataclass(frozen=True)
class Line:
    """A line of a section: its text, heads with their numbers, and the tokens of a link."""

    text: str
    heads: tuple[tuple[int, int, float], ...]
    query: int | None = None
    key: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    lines: tuple[Line, ...]


def find_sections(record: Record, word: str | None = None) -> list[Section]:
    """Find all sections; `word` is the word to report on, or its index among the words."""
    own, source = words_of(record)
    short = max(len(own), len(source)) <= MOST_WORDS
    aligned = _alignment(record, own, source) if short else []
    told = aligned or _links(record, own, choose_word(own, word), short)
    return [_roles(record), *told]


def head_label(record: Record, place: int, head: int) -> str:
    """A head as layer.head: "3.1", "encoder 3.1"."""
    return f"{label_places(record)[place]}.{record.places[place].heads[head]}"


def _roles(record: Record) -> Section:
    lines, counts = [], record.counts()
    for name, values in known_scores(record).items():
        if name in ("local", "broad"):  # these are not attention weights
            continue
        # NaN marks a head without this score; it is not >= LEAST, so it is left out.
        found = [(float(values[at]), *at) for at in map(tuple, np.argwhere(values >= LEAST))]
        found.sort(key=lambda each: -each[0])
        best = tuple((int(place), int(head), value) for value, place, head in found[:N_HEADS])
        n_seen = int(counts[name].max()) if name == "induction" else 0
        note = f"(seen at {n_seen:,} token{'' if n_seen == 1 else 's'})" if n_seen else ""
        if best:
            lines.append(Line(SCORE_WORDS[name].what, best, note=note))
    title = "What heads look at most (layer.head and the mean weight there)"
    return Section(title, tuple(lines) or (Line("nothing that has a name", ()),))


def _alignment(record: Record, own: Sequence[Word], source: Sequence[Word]) -> list[Section]:
    """Which word of a translation attends to which source word; empty if there is no alignment."""
    aligned = find_alignment(record)
    if aligned is None:
        return []
    at = aligned.place, aligned.head
    title = "Which word looks at which of the source, in the firmest head, "
    links = (Link(query, key, *at, weight, weight) for query, key, weight in aligned.pairs)
    return [
        Section(title + head_label(record, *at), tuple(_line(link, own, source) for link in links))
    ]


def _links(record: Record, own: Sequence[Word], chosen: int | None, short: bool) -> list[Section]:
    """The most telling links (of a short text only), and those of the chosen word."""
    if short:
        found = survey(record, chosen)
    elif chosen is not None:
        sides = [links_of_word(record, own, chosen, looking=looking) for looking in (True, False)]
        found = Survey(iter(()), *sides)
    else:
        return []
    telling = tuple(_line(link, own, own) for link in _pick(found.links))
    sections = [Section("The most telling looks from word to word", telling)]
    if chosen is not None:
        said = own[chosen].text
        for verb, links in (("looks at", found.looks_at), ("is looked at by", found.looked_at_by)):
            looking = verb == "looks at"
            lines = [
                _line(link, own, own, own[link.key if looking else link.query].text)
                for link in islice(links, N_SIDES)
            ]
            sections.append(Section(f'"{said}" {verb}', tuple(lines)))
    return [section for section in sections if section.lines]


def _line(link: Link, own: Sequence[Word], other: Sequence[Word], text: str | None = None) -> Line:
    query, key = own[link.query], other[link.key]
    said = f"{query.text} → {key.text}" if text is None else text
    return Line(said, ((link.place, link.head, link.weight),), query.tokens[0], key.tokens[0])


def _pick(links: Iterable[Link]) -> list[Link]:
    """The most telling links, at most two per query word, so that no word fills the list."""
    picked: list[Link] = []
    for link in links:
        if sum(other.query == link.query for other in picked) < 2:
            picked.append(link)
        if len(picked) == N_LINKS:
            break
    return picked


def choose_word(words: Sequence[Word], asked: str | None) -> int | None:
    """The index of the word asked for; by default the first pronoun, else the last real word."""
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
