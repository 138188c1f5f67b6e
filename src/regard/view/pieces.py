"""The piece of text that each token stands for, as a page lays it out.

A byte-level tokenizer may split a rare character into several tokens, all of which span that
character. The first of them gets the character, the others are *joined*: a page shows the character
once and numbers its tokens ("猫 1/3").

Left out: texts whose tokens cannot be found in them; a page shows the tokens' labels instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

LABEL_LENGTH = 80  # the most characters of a token in a page


def cut(text: str, length: int) -> str:
    """Truncate a text to a length, with an ellipsis if something was left out."""
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(frozen=True)
class Pieces:
    """For each token [the text before it, its own text]; and the numbers of joined tokens."""

    texts: list[list[str]]
    joined: list[int]

    def name(self, labels: Sequence[str]) -> list[str]:
        """Name tokens by their text, else by their label; tokens of one character get numbers."""
        joined = set(self.joined)
        starts = [number for number in range(len(labels)) if number not in joined]
        names: list[str] = []
        for start, end in zip(starts, [*starts[1:], len(labels)], strict=True):
            own = self.texts[start][1]
            name = own if own.strip() else labels[start]
            several = [f"{name} {part}/{end - start}" for part in range(1, end - start + 1)]
            names += several if end - start > 1 else [name]
        return names


def make_pieces(text: str, spans: Sequence[tuple[int, int]] | None, count: int) -> Pieces | None:
    """Cut a text by the tokens' spans; None if these are not in the text, one after the other."""
    if spans is None or len(spans) != count:
        return None
    texts: list[list[str]] = []
    joined: list[int] = []
    first = last = -1  # the first and last token of the latest piece
    before = begin = done = 0  # where the gap before that piece begins, where it begins and ends
    for number, (start, end) in enumerate(spans):
        texts.append(["", ""])
        if start == end:  # a token that stands for no characters, such as <s>
            continue
        if not 0 <= start < end <= len(text):
            return None
        if start < done:
            if start != done - 1 or last != number - 1:  # tokens share one character at most
                return None
            joined.append(number)
            done = max(done, end)
        else:
            first, before, begin, done = number, done, start, end
        last = number
        # Many tokens include the space before the word; shading it would look ragged.
        bare = done - len(text[begin:done].lstrip())
        shown = begin if bare == done else bare
        texts[first] = [cut(text[before:shown], LABEL_LENGTH), cut(text[shown:done], LABEL_LENGTH)]
    return Pieces(texts, joined)


def find_spans(text: str, labels: Sequence[str]) -> list[tuple[int, int]] | None:
    """Find the spans of tokens in a text by their labels; None if one is not found in order.

    If several tokens in a row have the same label and the text has it once, all of them span it; if
    the text has it twice in a row, each occurrence is spanned by half of them.
    """
    spans: list[tuple[int, int]] = []
    done = 0
    for label, run in groupby(label.strip(" \n\t\u2581\u0120") for label in labels):
        count, found = len(list(run)), list[int]()
        while label and len(found) < count and text.startswith(label, at := _skip(text, done)):
            found.append(at)
            done = at + len(label)
        if not found and _names_no_text(label):
            spans += [(0, 0)] * count
        elif not found or count % len(found):
            return None
        spans += [(at, at + len(label)) for at in found for _ in range(count // len(found))]
    return spans


def _skip(text: str, start: int) -> int:
    """The index of the first character from `start` on that is not white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _names_no_text(label: str) -> bool:
    return not label or (label[0], label[-1]) in (("<", ">"), ("[", "]"))
