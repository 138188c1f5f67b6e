"""Splits a text into sentences, joins sentences to a text, and finds the script of a text.

Why: translation models are trained on single sentences, but users have texts.

How: 。！？ end a sentence anywhere outside brackets; . ! ? end one if white space follows that is
not followed by a small letter, and the word before is no title (Mr.) and no initial (J. S. Bach,
e.g.). Closing quotes belong to the sentence. A new line always ends one. The white space between
two sentences is kept, so that a text can be joined again. The time is linear in the text's length.

Left out: whatever requires understanding the text, such as a full stop after p.m. or etc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

WIDE = "。｡．！？"
ENDS = WIDE + ".!?"
OPENING, CLOSING = "「『（(【《〈［[", "」』）)】》〉］]"
QUOTES = "\"'”’»"
TITLES = frozenset({"mr", "mrs", "ms", "dr", "prof", "st", "mt", "vs", "fig", "gen", "capt", "rev"})
SPACELESS = ("ja", "zh")
"""Languages that are written without spaces between sentences."""

_INITIAL = re.compile(r"(?:^|[\s(\"'“‘])(?:[A-HJ-Z]|(?:[A-Za-z]\.)+[A-Za-z])$")
_WORD = re.compile(r"([A-Za-z]+)$")
_LINES = re.compile(r"(\s*\n\s*)")
_JAPANESE = re.compile(
    "[\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d\U00020000-\U000323af]"
)
_LATIN = re.compile("[A-Za-zÀ-ÖØ-öø-\u024f\u1e00-\u1effＡ-Ｚａ-ｚ]")
_BREAKS = re.compile(r"[、，,;；:：]\s*|\s+")


@final
@dataclass(frozen=True)
class Sentence:
    """One sentence, and the white space between it and the next."""

    text: str
    gap: str = ""


def split_sentences(text: str) -> list[Sentence]:
    """The sentences of a text, none of them empty; white space around the text is dropped."""
    parts = _LINES.split(text.strip())
    found: list[Sentence] = []
    for line, newline in zip(parts[::2], [*parts[1::2], ""], strict=True):
        inside = _split_line(line)
        found += inside[:-1]
        found += [Sentence(last.text, newline) for last in inside[-1:]]
    return found


def _split_line(line: str) -> list[Sentence]:
    found: list[Sentence] = []
    start = at = depth = 0
    while at < len(line):
        sign = line[at]
        depth += (sign in OPENING) - (sign in CLOSING and depth > 0)
        at += 1
        if sign not in ENDS or depth:
            continue
        mark = at - 1
        while at < len(line) and line[at] in ENDS + CLOSING + QUOTES:
            at += 1
        if at < len(line) and _ends(line, mark, at):
            after = at
            while after < len(line) and line[after].isspace():
                after += 1
            found.append(Sentence(line[start:at], line[at:after]))
            start = at = after
    return [*found, Sentence(line[start:])] if start < len(line) else found


def _ends(line: str, mark: int, after: int) -> bool:
    """Whether the signs from `mark` to `after` end a sentence, given that more text follows."""
    if any(sign in WIDE for sign in line[mark:after]):
        return True
    follows = line[after : after + 8].lstrip()[:1]
    if not line[after].isspace() or follows.islower():
        return False
    if line[mark:after] != ".":
        return True
    before = line[max(mark - 16, 0) : mark]
    word = _WORD.search(before)
    said = word.group(1).lower() if word else ""
    numbered = said == "no" and follows.isdigit()
    return said not in TITLES and not numbered and _INITIAL.search(before) is None


def join_sentences(texts: list[str], gaps: list[str], to: str | None) -> str:
    """Join translated sentences to one text; new lines are kept, spaces follow the language."""
    joined: list[str] = []
    for text, gap in zip(texts, [*gaps[:-1], ""], strict=True):
        spaced = "" if to in SPACELESS else gap or " "
        joined += [text.strip(), gap if "\n" in gap else spaced]
    return "".join(joined[:-1])


def halve(sentence: Sentence) -> tuple[Sentence, Sentence]:
    """Two parts, split at the comma or space nearest to the middle, else in the middle itself."""
    text, middle = sentence.text, len(sentence.text) // 2
    ends = [found.end() for found in _BREAKS.finditer(text)]
    cuts = [end for end in ends if 1 < end < len(text)]
    cut = min(cuts, key=lambda end: abs(end - middle), default=middle)
    head = text[:cut].rstrip()
    return Sentence(head, text[len(head) : cut]), Sentence(text[cut:], sentence.gap)


def has_letters(text: str) -> bool:
    return any(sign.isalpha() for sign in text)


def find_language(text: str) -> str | None:
    """ "ja" where there is a kanji or kana, "en" where most letters are Latin, else None."""
    if _JAPANESE.search(text):
        return "ja"
    n_letters = sum(sign.isalpha() for sign in text)
    return "en" if 2 * len(_LATIN.findall(text)) >= max(n_letters, 1) else None
