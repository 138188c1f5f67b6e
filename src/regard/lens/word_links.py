r"""Words of a record, and which heads link them.

Why: heads attend to tokens, people read words; and most of what a head attends to says nothing: a
first token that collects surplus weight, or whatever comes just before.

How: tokens become words by the text that they cover: letters and digits with their apostrophes, one
word per punctuation mark; in scripts without spaces each token is a word. A word's weight on
another is the mean over its tokens of the sum over the other's,

    W[q, k] = 1/|q| · Σ_{t ∈ q} Σ_{s ∈ k} w[t, s]

and how *telling* a link is, is its weight minus what the head gives that key from elsewhere, or
minus what it gives any word at that distance, whichever is larger:

    W[q, k] - max( mean_{p ≠ q} W[p, k],  mean_{p ≠ q} W[p, k + p - q] )

over the words p that could look there. A head that always attends to the first word, or one back,
has no telling link; one that attends from "it" to "animal" and does so nowhere else, has. Links to
the first token of the text, which collects surplus weight, to special tokens, to punctuation and to
the word itself are never reported.

Each head's map is computed once, and for each pair of words only the best head is kept.

Left out: texts of more than `MOST_WORDS` words, for which links are only found for a chosen word.

Letters: T queries, S keys, Q words that look, K words looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from regard.lens.lazy_weights import Array
from regard.lens.record import Record
from regard.lens.token_labels import is_separator

MOST_WORDS = 400
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
SPACELESS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)


@dataclass(frozen=True)
class Word:
    """A word: its text, and its tokens; `is_mark`: punctuation or a special token."""

    text: str
    tokens: tuple[int, ...]
    is_mark: bool


@dataclass(frozen=True)
class Link:
    """A link: one head in which one word attends to another."""

    query: int
    key: int
    place: int
    head: int
    weight: float
    telling: float


def find_words(text: str, tokens: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[Word]:
    """The words of a text, in order; a token that covers no text is a word of its own."""
    if sum(end - start for start, end in spans) > 4 * len(text):
        # The bytes of one character may be several tokens; but no tokenizer covers a text more
        # often than this.
        spans = [(0, 0)] * len(spans)
    word_at = np.full(len(text) + 1, -1)
    for number, found in enumerate(_WORD.finditer(text)):
        if not SPACELESS.search(found.group()):
            word_at[found.start() : found.end()] = number
    # For each character, where the next word begins or continues.
    steps = np.where(word_at >= 0, np.arange(len(word_at)), len(word_at))
    next_at = np.minimum.accumulate(steps[::-1])[::-1]
    groups: list[list[int]] = []
    last = -1
    for token, (start, end) in enumerate(spans):
        at = next_at[min(start, len(text))]
        here = int(word_at[at]) if at < min(end, len(text)) else -1
        if here >= 0 and here == last:
            groups[-1].append(token)
        else:
            groups.append([token])
        last = here
    words = []
    for group in groups:
        start, end = spans[group[0]][0], spans[group[-1]][1]
        said = text[start:end].strip() if end > start else tokens[group[0]]
        marked = end <= start or is_separator(said)
        words.append(Word(said or tokens[group[0]], tuple(group), marked))
    return words


def words_of(record: Record) -> tuple[list[Word], list[Word]]:
    """The query words, and the key words of cross-attention (else the same)."""
    spans = record.spans or [(0, 0)] * len(record.tokens)
    own = find_words(record.text, record.tokens, spans)
    if record.source_tokens is None:
        return own, own
    there = enumerate(record.source_tokens)
    return own, [Word(label.strip() or label, (n,), is_separator(label)) for n, label in there]


def reads_source(record: Record, place: int) -> bool:
    """Whether a place is in an encoder–decoder's encoder: by name, else by the source's length."""
    here = record.places[place]
    if record.source_tokens is None or here.kind == "cross":
        return False
    alone = here.n_keys == len(record.source_tokens) != len(record.tokens)
    return here.stack == "encoder" or (here.stack == "" and alone)


@dataclass(frozen=True)
class Alignment:
    """The clearest cross-attention head; `pairs`: (word, its source word, weight)."""

    place: int
    head: int
    pairs: tuple[tuple[int, int, float], ...]


def find_alignment(record: Record) -> Alignment | None:
    """The cross-attention head whose words have the largest mean peak on words of the source."""
    own, source = words_of(record)
    plain_q = [n for n, word in enumerate(own) if not word.is_mark]
    plain_k = np.array([not word.is_mark for word in source])
    best: tuple[float, Alignment] | None = None
    for number, place in enumerate(record.places):
        if place.kind != "cross" or not plain_q or not plain_k.any():
            continue
        for head, weights_qk in _word_weights(record, number, own, source):
            weights_qk = np.where(plain_k, weights_qk, 0.0)
            firm = float(weights_qk[plain_q].max(1).mean())
            if best is None or firm > best[0]:
                pairs = [(q, int(weights_qk[q].argmax())) for q in plain_q]
                weighed = tuple((q, k, float(weights_qk[q, k])) for q, k in pairs)
                best = firm, Alignment(number, head, weighed)
    return None if best is None else best[1]


def _word_weights(
    record: Record, place: int, queries: Sequence[Word], keys: Sequence[Word]
) -> Iterator[tuple[int, Array]]:
    """Yield each head and its W (Q, K); nothing if weights were not kept, or words do not fit."""
    here = record.places[place]
    sizes = tuple(sum(len(word.tokens) for word in words) for words in (queries, keys))
    if (here.n_queries, here.n_keys) != sizes or not record.has_weights(place):
        return
    rows, columns = _group(queries), _group(keys)
    for head in range(here.n_heads):
        weights_ts = record.map(place, head, (0, sizes[0], 0, sizes[1]), (sizes[0], sizes[1]))
        yield head, rows.mean(columns.sum(weights_ts, axis=1))


def sum_words(weights_ts: Array, queries: Sequence[Word], keys: Sequence[Word]) -> Array:
    return _group(queries).mean(_group(keys).sum(weights_ts, axis=1))


@dataclass(frozen=True, eq=False)
class Groups:
    """Which tokens form each word; `order` is None if the tokens are in the words' order."""

    sizes: Array
    order: Array | None

    def sum(self, values: Array, axis: int = 0) -> Array:
        """Sum over each word's tokens along an axis."""
        if self.order is not None:
            values = values.take(self.order, axis)
        if self.sizes.max() == 1:
            return values
        starts = np.r_[0, np.cumsum(self.sizes)[:-1]]
        return np.asarray(np.add.reduceat(values, starts, axis=axis))

    def mean(self, values: Array) -> Array:
        sizes = self.sizes.astype(values.dtype)
        return np.asarray(self.sum(values) / sizes.reshape(-1, *[1] * (values.ndim - 1)))


def _group(words: Sequence[Word]) -> Groups:
    sizes = np.array([len(word.tokens) for word in words])
    order = np.concatenate([word.tokens for word in words]).astype(int)
    in_order = np.array_equal(order, np.arange(len(order)))
    return Groups(sizes, None if in_order else order)


def telling_of(weights_qk: Array, causal: bool) -> Array:
    """How telling each entry of W is, (Q, K)."""
    Q, K = weights_qk.shape
    seen, share_others, share_gap = _pairs_seen(Q, K, causal, weights_qk.dtype.str)
    kept = np.where(seen, weights_qk, 0) if causal else weights_qk
    elsewhere = (kept.sum(0)[None] - kept) * share_others
    at_gap = (_spread_gaps(_sum_gaps(kept), K) - kept) * share_gap
    telling_qk = kept - np.maximum(elsewhere, at_gap)
    return np.where(seen, telling_qk, -1) if causal else telling_qk


@lru_cache(maxsize=2)
def _pairs_seen(Q: int, K: int, causal: bool, dtype: str) -> tuple[Array, Array, Array]:
    """Which pairs are visible, and 1 / the number of others with that key, and at that distance."""
    seen = np.tri(Q, K, dtype=bool) if causal else np.ones((Q, K), bool)
    n_others = seen.sum(0)[None] - seen
    n_at_gap = _spread_gaps(_sum_gaps(seen.astype(float)), K) - seen
    shares = (1 / np.maximum(n, 1) for n in (n_others, n_at_gap))
    return seen, *(share.astype(dtype) for share in shares)


def _sum_gaps(values_qk: Array) -> Array:
    """Sums over the diagonals k - q from 1 - Q to K - 1; shifted rows make diagonals columns."""
    Q, K = values_qk.shape
    wide = np.zeros((Q, Q + K), values_qk.dtype)
    wide[:, :K] = values_qk[::-1]
    return np.asarray(wide.ravel()[: Q * (Q + K - 1)].reshape(Q, Q + K - 1).sum(0))


def _spread_gaps(by_gap: Array, K: int) -> Array:
    """For each pair the sum of its diagonal, (Q, K)."""
    return sliding_window_view(by_gap, K)[::-1]


@final
class BestHeads:
    """For each pair of words, the head with the most telling link so far."""

    def __init__(self, n_queries: int, n_keys: int) -> None:
        self._telling = np.full((n_queries, n_keys), -1.0)
        self._weight = np.zeros((n_queries, n_keys))
        self._head = np.zeros((n_queries, n_keys, 2), np.int32)

    def offer(self, place: int, head: int, telling_qk: Array, weights_qk: Array) -> None:
        q, k = np.nonzero(telling_qk > self._telling)
        self._telling[q, k] = telling_qk[q, k]
        self._weight[q, k] = weights_qk[q, k]
        self._head[q, k] = place, head

    def links(self, first_query: int = 0, first_key: int = 0) -> Iterator[Link]:
        """Yield links, the most telling first; words are numbered from the first ones given."""
        q, k = np.nonzero(self._telling > -1.0)
        order = np.argsort(-self._telling[q, k], kind="stable")
        for at in zip(q[order].tolist(), k[order].tolist(), strict=True):
            place, head = self._head[at].tolist()
            numbers = first_query + at[0], first_key + at[1], place, head
            yield Link(*numbers, float(self._weight[at]), float(self._telling[at]))


@dataclass(frozen=True)
class Survey:
    """The most telling links of a text, and those from and to one word."""

    links: Iterator[Link]
    looks_at: Iterator[Link]
    looked_at_by: Iterator[Link]


def survey(record: Record, word: int | None = None) -> Survey:
    """Find all telling links of a short text, computing each head's map once."""
    own, source = words_of(record)
    shape = len(own), max(len(own), len(source))
    every = BestHeads(*shape)
    row, column = BestHeads(1, len(own)), BestHeads(len(own), 1)
    for place, head, telling_qk, weights_qk in _telling_heads(record, own, source):
        best_k = telling_qk.argmax(1)[:, None]
        firmest = np.full(shape, -1.0)
        values = np.take_along_axis(telling_qk, best_k, 1)
        np.put_along_axis(firmest, best_k, np.where(values > 0.0, values, -1.0), 1)
        every.offer(place, head, firmest, weights_qk)
        if word is not None and record.places[place].kind == "self":
            at = slice(word, word + 1)
            row.offer(place, head, telling_qk[at], weights_qk[at])
            column.offer(place, head, telling_qk[:, at], weights_qk[:, at])
    chosen = word or 0
    return Survey(every.links(), row.links(chosen, 0), column.links(0, chosen))


def _telling_heads(
    record: Record, own: Sequence[Word], source: Sequence[Word]
) -> Iterator[tuple[int, int, Array, Array]]:
    """Yield place, head, telling scores (Q, K), -1 for pairs that do not count, and W (Q, K)."""
    if max(len(own), len(source)) > MOST_WORDS:
        raise ValueError(
            f"{max(len(own), len(source)):,} words are too many to look for links between all of "
            f"them; expected at most {MOST_WORDS}: choose a word"
        )
    for number, place in enumerate(record.places):
        if reads_source(record, number):
            continue
        keys = source if place.kind == "cross" else own
        plain = np.logical_and.outer(
            [not word.is_mark for word in own], [not word.is_mark for word in keys]
        )
        if place.kind == "self":
            np.fill_diagonal(plain, False)
            plain[:, 0] = False
        for head, weights_qk in _word_weights(record, number, own, keys):
            telling_qk = np.where(plain, telling_of(weights_qk, place.causal), -1.0)
            yield number, head, telling_qk, weights_qk


def links_of_word(
    record: Record, own: Sequence[Word], word: int, *, looking: bool
) -> Iterator[Link]:
    """The links from a word, or to it, by weight; only its rows or columns are computed."""
    plain = np.array([not (them.is_mark or n in (0, word)) for n, them in enumerate(own)])
    if not looking and word == 0:
        plain[:] = False  # every word attends to the first one
    shape = (1, len(own)) if looking else (len(own), 1)
    best, groups = BestHeads(*shape), _group(own)
    read = record.rows if looking else record.column
    for number, place in enumerate(record.places):
        mine = place.kind == "self" and place.n_queries == place.n_keys == len(record.tokens)
        if not mine or reads_source(record, number) or not record.has_weights(number):
            continue
        for head in range(place.n_heads):
            each_tn = np.stack([read(number, head, token) for token in own[word].tokens])
            sums_n = each_tn.mean(0) if looking else each_tn.sum(0)
            weights = groups.sum(sums_n) if looking else groups.mean(sums_n)
            told = np.where(plain, weights, -1.0)
            best.offer(number, head, told.reshape(shape), weights.reshape(shape))
    return best.links(word, 0) if looking else best.links(0, word)
