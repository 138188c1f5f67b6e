"""Streaming decode: ids in one at a time, text out as soon as it is certain.

Why: a token may be only a part of a character, and its text may depend on its neighbours: the first
one loses its space, bytes wait for the rest of their character. So the texts of single tokens,
joined, are not the text.

How: a window of the latest ids is decoded at each step, and new text at its end is returned, except
for what a later token can still change:

- a last U+FFFD, which may stand for the first bytes of a character;
- a run of byte tokens (`<0xE6>`) under byte fallback, which is valid or invalid as a whole, and so
  is held back until another kind of token ends it.

The window starts a few tokens early, so that special treatment of a first token only affects text
that was already returned. The cost of a step does not grow with the text.

Left out: decoders that rewrite text across tokens, or that are not known here. With these nothing
is certain before the end, and `finish` returns all of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

HALF = "\N{REPLACEMENT CHARACTER}"
LONGEST, SHORTEST = 48, 16  # ids in the window: when it exceeds LONGEST it is cut to SHORTEST
PER_TOKEN = {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Metaspace", "Replace", "WordPiece"}


def decoder_kinds(decoder: Any) -> list[str]:
    """The types of a decoder's steps, as in `tokenizer.json`, with sequences flattened."""
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for step in decoder["decoders"] for kind in decoder_kinds(step)]
    if decoder.get("type") == "Strip" and decoder.get("stop"):
        return ["Strip at the end"]  # a kind of its own: it has no meaning before the text ends
    return [str(decoder.get("type"))]


def is_steady(kinds: Sequence[str]) -> bool:
    """Whether later tokens never change the text of earlier ones, except what is held back."""
    if {"ByteFallback", "ByteLevel"} <= set(kinds):
        return False  # two kinds of byte tokens, each of which could complete the other's character
    joined = False
    for kind in kinds:
        if kind in ("Fuse", "Strip"):
            joined = joined or kind == "Fuse"
        elif joined or kind not in PER_TOKEN:
            return False  # it would see all tokens as one text, and could rewrite any of it
        else:
            joined = kind == "ByteLevel"
    return True


@final
class TextStream:
    """Made by `Tokenizer.decode_stream`. The texts of all steps and of `finish`, joined, are
    exactly what `Tokenizer.decode` returns for all ids."""

    def __init__(
        self, decode: Callable[[list[int]], str], piece: Callable[[int], str], kinds: Sequence[str]
    ) -> None:
        """`decode`: ids to text; `piece`: the stored form of a token, "" for one to skip."""
        self._decode = decode
        self._piece = piece
        self._steady = is_steady(kinds)
        self._partial = "ByteLevel" in kinds
        self._bytes = "ByteFallback" in kinds
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were returned
        self._total = 0  # characters returned since the beginning
        self._finished = False
        self.in_run = False
        """Whether the latest token is a byte token of a run that may continue."""
        self.waiting = False
        """Whether something is held back now."""
        self.start = 0
        """The index in the whole text at which the latest token starts; bytes in a run do not
        update it."""

    def step(self, token: int) -> str:
        """The text that became certain with this id; "" while a character is incomplete."""
        if self._finished:
            raise ValueError("this stream is finished; ask the tokenizer for a new one")
        piece = self._piece(token)
        if not piece:
            return ""
        in_run = self._bytes and _is_byte(piece)
        new = ""
        if self._steady and self.in_run and not in_run:
            new = self._give(self._decode(self._window))
        self._window.append(token)
        self.in_run = in_run
        if in_run or not self._steady:
            self.waiting = True
            return new
        self.start = self._total
        text = self._decode(self._window)
        # Bytes that a later token may complete are always the last U+FFFD; earlier ones are final.
        self.waiting = self._partial and text.endswith(HALF)
        new += self._give(text[:-1] if self.waiting else text)
        if len(self._window) > LONGEST:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """The text that was held back. No `step` may follow."""
        self._finished = True
        self.waiting = self.in_run = False
        return self._give(self._decode(self._window)) if self._window else ""

    def _give(self, certain: str) -> str:
        new = certain[self._given :]
        self._given += len(new)
        self._total += len(new)
        return new

    def _shorten(self, text: str) -> None:
        """Drop old ids from the window, if the rest alone still decodes to the same ending."""
        late = self._window[-SHORTEST:]
        shorter = self._decode(late)
        held = len(text) - self._given
        shown = shorter[: len(shorter) - held]
        # Some visible text must stay at the start: a decoder that strips blanks then stops there.
        if shown.strip() and text.endswith(shorter[len(shown) - 1 :]):
            self._window, self._given = late, len(shown)


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
