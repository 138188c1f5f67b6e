"""The text that each token stands for, as a page lays it out.

A tokenizer of bytes cuts a rare character into several tokens, all of which span that character.
The first of them has it; the others are *joined*: a page shows the character once, and tells its
tokens apart by number ("猫 1/3").

Left out: texts whose tokens cannot be found in them, of which a page shows the tokens' labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

LABEL_LENGTH = 80  # characters of a token that a page is given


def cut(text: str, length: int) -> str:
    """The beginning of a text, with an ellipsis where something was left out."""
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(frozen=True)
class Pieces:
    """Of each token what stands before it and its own text, and which tokens are joined."""

    texts: list[list[str]]
    joined: list[int]

    def name(self, labels: Sequence[str]) -> list[str]:
        """The labels as people write them, where their text is known; joined ones are numbered."""
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
    """None where the spans do not lie in the text, one after the other."""
    if spans is None or len(spans) != count:
        return None
    texts: list[list[str]] = []
    joined: list[int] = []
    first = last = -1  # the tokens of the text that was seen last
    before = begin = done = 0  # where the gap before that text begins, where it begins and ends
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
        # Many tokenizers give a word the space before it; a shade on that would look ragged.
        bare = done - len(text[begin:done].lstrip())
        shown = begin if bare == done else bare
        texts[first] = [cut(text[before:shown], LABEL_LENGTH), cut(text[shown:done], LABEL_LENGTH)]
    return Pieces(texts, joined)


def find_spans(text: str, labels: Sequence[str]) -> list[tuple[int, int]] | None:
    """Where in a text its tokens lie, by their labels; None where one is not found in its turn.

    A character that is written once and labels several tokens in a row is cut into those tokens;
    one that is written twice in a row has its half of them.
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
    """Where the white space from here on ends."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _names_no_text(label: str) -> bool:
    return not label or (label[0], label[-1]) in (("<", ">"), ("[", "]"))
