"""Labels for token ids: what a record's pictures call its tokens.

A tokenizer is recognised by its methods: ours has `spans` and `token`, Hugging Face's has
`convert_ids_to_tokens` and `decode`. Ours knows the characters of each token, so labels are parts
of the text; the tokens of one character (emoji, Japanese in bytes) all get that character as label.
Otherwise labels are the vocabulary's own pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from regard.lens.schema import MAX_LABEL


@dataclass(frozen=True)
class Labels:
    """A text, the labels of its tokens, and the characters of each, if known."""

    text: str
    tokens: list[str]
    spans: list[tuple[int, int]] | None


def label(tokenizer: Any, ids: Sequence[int]) -> Labels:
    numbers = [int(number) for number in ids]
    if hasattr(tokenizer, "spans") and hasattr(tokenizer, "token"):
        pieces = [str(tokenizer.token(number)) for number in numbers]
        try:
            said = tokenizer.spans(numbers)
        except ValueError:  # its decoder rewrites text across tokens, and says so
            return Labels(str(tokenizer.decode(numbers)), pieces, None)
        shown = [
            said.text[first:last] if last > first else piece
            for (first, last), piece in zip(said.spans, pieces, strict=True)
        ]
        return Labels(said.text, shown, list(said.spans))
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(numbers)]
        return Labels(str(tokenizer.decode(numbers)), pieces, None)
    raise TypeError(
        f"{type(tokenizer).__name__} is no tokenizer that is known here: expected regard's, or one "
        "with convert_ids_to_tokens and decode; record.describe(tokens=...) takes any labels"
    )


def name_ids(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """Token ids as text, each decoded alone: with a leading space, if it has one."""
    numbers = [int(number) for number in ids]
    plain = hasattr(tokenizer, "spans") and hasattr(tokenizer, "token")
    keep = {"skip_special": False} if plain else {"skip_special_tokens": False}
    return {number: str(tokenizer.decode([number], **keep)) for number in numbers}


def is_separator(label: str) -> bool:
    """Whether a token is punctuation, white space, or a special one such as [SEP] or </s>."""
    word = label.removeprefix("##").strip("\u2581\u0120\u010a \n\t")
    special = len(word) > 2 and (word[0], word[-1]) in (("<", ">"), ("[", "]"))
    return special or not any(character.isalnum() for character in word)


def clean(text: str) -> str:
    """The text with lone surrogates replaced by question marks, so that UTF-8 can encode it."""
    return text.encode("utf-8", "replace").decode()


def clean_label(text: str) -> str:
    """A label that can be written to a file: as `clean`, and cut to `MAX_LABEL` characters."""
    whole = clean(text)
    return whole if len(whole) <= MAX_LABEL else whole[: MAX_LABEL - 1] + "…"
