"""Positions of tokens, and which of them an edit covers.

How: every query and key of a call has a position in its text, in a KV cache too: a `Standing`. The
positions that an edit gives become `Span`s once the length of the text is known, which is when its
first tokens are read. Numbers and ranges must exist; slices, as in Python, cover what there is, and
tokens that are generated later. Words are located in a text by its tokens, as in `regard look`.

Letters: N rows of a batch, or 1 where all are alike; T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from regard.lens.edit.values import Block, Edit, Patch, Where, as_tuple
from regard.lens.lazy_weights import Array
from regard.lens.word_links import Word, find_words

AnEdit = TypeVar("AnEdit", bound=Edit)


class Standing(NamedTuple):
    """The positions of queries (N, T) and of keys (N, S); negative for padding and empty slots.

    `query_lengths` and `key_lengths` (N, 1) count the tokens read so far of the queries' text and
    of the keys', those of this call included.
    """

    queries: Array
    keys: Array
    query_lengths: Array
    key_lengths: Array

    @property
    def begins(self) -> bool:
        """Whether a text begins with this call; else it continues in a cache."""
        real = self.queries[self.queries >= 0]
        return bool(len(real) and real.min() == 0)


def in_line(n_queries: int, n_keys: int, before: int, padding_n1: Array) -> Standing:
    """A standing for tokens in order, after `before` tokens in earlier calls.

    A cache may have more slots than tokens, or keep fewer keys.
    """
    end = before + n_queries
    queries = before + np.arange(n_queries)[None] - padding_n1
    keys = max(0, end - n_keys) + np.arange(n_keys)[None] - padding_n1
    lengths = end - padding_n1
    return Standing(queries, keys, lengths, lengths)


def across(queries_nt: Array, n_keys: int) -> Standing:
    """A standing for cross-attention, whose other text is read at once."""
    lengths = queries_nt.max(1, keepdims=True, initial=-1) + 1
    return Standing(queries_nt, np.arange(n_keys)[None], lengths, np.full((1, 1), n_keys))


@dataclass(frozen=True, eq=False)
class Span:
    """Positions start, start + step, ... below stop, each (N, 1); a stop of -1 means no end."""

    start: Array
    stop: Array
    step: int

    def holds(self, positions: Array) -> Array:
        inside = (positions >= np.maximum(self.start, 0)) & (positions >= 0)
        inside &= (self.stop < 0) | (positions < self.stop)
        return np.asarray(inside & ((positions - self.start) % self.step == 0))


def find_spans(where: Where, lengths: Array) -> list[Span]:
    """The spans that `where` names in texts of these lengths, (N, 1); refuse missing numbers."""
    return [_span(part, lengths) for part in as_tuple(where) or ()]


def _span(part: Any, lengths: Array) -> Span:
    if isinstance(part, slice):
        start, stop = (
            None if side is None else np.where(side < 0, np.maximum(lengths + side, 0), side)
            for side in (part.start, part.stop)
        )
        none = np.full_like(lengths, -1)
        begin = np.zeros_like(lengths) if start is None else start
        return Span(begin, none if stop is None else stop, part.step or 1)
    numbers = [part] if isinstance(part, int) else [part.start, part[-1]] if part else []
    for number in numbers:
        short = int(lengths.min())
        if not -short <= number < short:
            raise ValueError(
                f"position {number} does not exist: the text has {short:,} tokens, 0 to "
                f"{short - 1:,}; slice({number}, None) includes tokens yet to be generated"
            )
    if not numbers:
        raise ValueError(f"{part!r} is empty; give a range with at least one position")
    first, last = (np.where(n < 0, lengths + n, n) for n in (numbers[0], numbers[-1]))
    return Span(first, last + 1, getattr(part, "step", 1))


def holds(spans: Sequence[Span], positions: Array) -> Array:
    """Whether each position is in one of the spans, (N, positions)."""
    found = [span.holds(positions) for span in spans]
    return np.asarray(np.logical_or.reduce(found))


def with_numbers(edit: AnEdit, words: Sequence[Word] | None) -> AnEdit:
    """The edit with words replaced by positions."""
    if isinstance(edit, Block):
        queries, keys = (_number(where, words) for where in (edit.queries, edit.keys))
        return replace(edit, queries=queries, keys=keys)
    if isinstance(edit, Patch):
        return replace(edit, positions=_number(edit.positions, words))
    return edit


def _number(where: Any, words: Sequence[Word] | None) -> Any:
    parts = as_tuple(where)
    if parts is None or not any(isinstance(part, str) for part in parts):
        return where
    found: list[Any] = []
    for part in parts:
        found += find_word(words, part) if isinstance(part, str) else (part,)
    return tuple(found)


def find_word(words: Sequence[Word] | None, asked: str) -> tuple[int, ...]:
    """The tokens of a word, which must occur in the text exactly once, ignoring case."""
    if words is None:
        raise ValueError(f"{asked!r} is a word, and no text is given to find it in: give text=")
    found = [word.tokens for word in words if word.text.lower() == asked.strip().lower()]
    if not found:
        known = ", ".join(word.text for word in words if not word.is_mark)
        raise ValueError(f"no word of the text is {asked!r}; expected one of {known[:300]}")
    if len(found) > 1:
        numbers = ", ".join(str(tokens[0]) for tokens in found)
        raise ValueError(
            f"{asked!r} stands {len(found)} times in the text, at the tokens {numbers}: give "
            "the position of the one that is meant, or all of them"
        )
    return found[0]


class Reading(NamedTuple):
    """A tokenized text: ids, labels, and the characters of each token."""

    ids: list[int]
    labels: list[str]
    spans: list[tuple[int, int]]


def read_text(tokenizer: Any, text: str) -> Reading:
    """Tokenize a text by our tokenizer, or a fast one of Hugging Face's, which has offsets."""
    if tokenizer is None:
        raise ValueError(
            "the model has no tokenizer beside its weights: give tokenizer=, or positions"
        )
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say which characters its tokens are; take "
                "the fast tokenizer, or give positions"
            )
        said = tokenizer(text, return_offsets_mapping=True)
        ids, spans = list(said["input_ids"]), [tuple(span) for span in said["offset_mapping"]]
        pieces = tokenizer.convert_ids_to_tokens(ids)
    else:
        said = tokenizer.encode(text)
        ids, spans, pieces = said.ids, said.offsets, said.tokens
    labels = [
        text[start:end] if end > start else piece
        for (start, end), piece in zip(spans, pieces, strict=True)
    ]
    return Reading(ids, labels, spans)


def words_in(text: str, reading: Reading) -> list[Word]:
    return find_words(text, reading.labels, reading.spans)
