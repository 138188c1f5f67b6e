r"""Words of a record, and which heads link them.

Why: heads look at tokens, people read words; and of all that a head looks at, most says nothing: a
first token that takes what nobody wants, or whatever stands just before.

How: tokens become words by the text they stand for: letters and digits with their apostrophes, one
word a sign; of scripts without spaces each token is a word. A word's weight on another is the mean
over its tokens of the sum over the other's,

    W[q, k] = 1/|q| · Σ_{t ∈ q} Σ_{s ∈ k} w[t, s]

and how *telling* it is, is what is left of it over what the head gives that word from elsewhere,
and over what it gives any word at that distance:

    W[q, k] - max( mean_{p ≠ q} W[p, k],  mean_{p ≠ q} W[p, k + p - q] )

over the words p that could look there. A head that always looks at the first word, or one back, has
nothing to tell; one that looks from "it" to "animal" and does so nowhere else, has.

Left out: texts of more than `MOST_WORDS` words, of which only chosen words are looked at.

Letters: T queries, S keys, Q words that look, K words looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.lens.lazy_weights import Array
from regard.lens.record import Record, is_separator

MOST_WORDS = 400
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_SPACELESS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)


@dataclass(frozen=True)
class Word:
    """A word: how it reads, and the tokens that it is made of. Marks say nothing of themselves."""

    text: str
    tokens: tuple[int, ...]
    is_mark: bool


@dataclass(frozen=True)
class Link:
    """One head in which one word looks at another."""

    query: int
    key: int
    place: int
    head: int
    weight: float
    telling: float


def find_words(text: str, tokens: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[Word]:
    """The words of a text, in order; a token that covers no text is a word of its own."""
    if sum(end - start for start, end in spans) > 4 * len(text):
        # Bytes of one character may be several tokens; no tokenizer reads a text more often.
        spans = [(0, 0)] * len(spans)
    word_at = np.full(len(text) + 1, -1)
    for number, found in enumerate(_WORD.finditer(text)):
        if not _SPACELESS.search(found.group()):
            word_at[found.start() : found.end()] = number
    # Where, from each character on, the next word begins or goes on.
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
        marked = end <= start or not any(sign.isalnum() for sign in said)
        words.append(Word(said or tokens[group[0]], tuple(group), marked))
    return words


def words_of(record: Record) -> tuple[list[Word], list[Word]]:
    """The words that look, and those looked at in cross-attention (else the same)."""
    spans = record.spans or [(0, 0)] * len(record.tokens)
    own = find_words(record.text, record.tokens, spans)
    if record.source_tokens is None:
        return own, own
    there = enumerate(record.source_tokens)
    return own, [Word(label.strip() or label, (n,), is_separator(label)) for n, label in there]


def reads_source(record: Record, place: int) -> bool:
    """Whether an encoder–decoder's encoder reads here: by name, else by a length of the source."""
    here = record.places[place]
    if record.source_tokens is None or here.kind == "cross":
        return False
    alone = here.n_keys == len(record.source_tokens) != len(record.tokens)
    return here.stack == "encoder" or (here.stack == "" and alone)


@dataclass(frozen=True)
class Alignment:
    """The firmest cross-attention head, and `pairs` (word, its word of the source, weight)."""

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
    """Each head of a place and its W (Q, K); none where its weights or other words were kept."""
    here = record.places[place]
    sizes = tuple(sum(len(word.tokens) for word in words) for words in (queries, keys))
    if (here.n_queries, here.n_keys) != sizes or not record.has_weights(place):
        return
    for head in range(here.n_heads):
        weights_ts = record.map(place, head, (0, sizes[0], 0, sizes[1]), (sizes[0], sizes[1]))
        yield head, sum_words(weights_ts, queries, keys)


def sum_words(weights_ts: Array, queries: Sequence[Word], keys: Sequence[Word]) -> Array:
    return _by_word(_by_word(weights_ts.T, keys, mean=False).T, queries, mean=True)


def _by_word(values_n: Array, words: Sequence[Word], mean: bool) -> Array:
    """Each word's sum, or mean, of what its tokens have along the first axis."""
    sizes = np.array([len(word.tokens) for word in words])
    order = np.concatenate([word.tokens for word in words]).astype(int)
    sums = np.add.reduceat(values_n[order], np.r_[0, np.cumsum(sizes)[:-1]], axis=0)
    return sums / sizes.reshape(-1, *[1] * (sums.ndim - 1)) if mean else sums


def telling_of(weights_qk: Array, causal: bool) -> Array:
    """How telling each entry of W is, (Q, K)."""
    Q, K = weights_qk.shape
    q, k = np.indices((Q, K))
    seen = (k <= q) if causal else np.ones((Q, K), bool)
    kept = np.where(seen, weights_qk, 0.0)
    n_others = seen.sum(0)[None] - seen
    elsewhere = (kept.sum(0)[None] - kept) / np.maximum(n_others, 1)
    gap = (q - k) + K
    by_gap = np.bincount(gap.ravel(), kept.ravel(), minlength=Q + K + 1)
    n_gap = np.bincount(gap.ravel(), seen.ravel().astype(float), minlength=Q + K + 1)
    at_gap = (by_gap[gap] - kept) / np.maximum(n_gap[gap] - seen, 1)
    return np.where(seen, kept - np.maximum(elsewhere, at_gap), -1.0)


def find_links(record: Record) -> list[Link]:
    """For each two words the head that tells most of them, the most telling first."""
    own, source = words_of(record)
    return _best(all_links(record, own, source), lambda link: (link.query, link.key))


def links_of_word(
    record: Record, own: Sequence[Word], word: int, *, looking: bool, telling: bool
) -> list[Link]:
    """What a word looks at or who looks at it, each other's best head; by weight if not telling."""
    places = [
        number
        for number, place in enumerate(record.places)
        if place.kind == "self"
        and place.n_queries == len(record.tokens)
        and not reads_source(record, number)
        and record.has_weights(number)
    ]
    if telling:
        asked = {"query": word} if looking else {"key": word}
        found = all_links(record, own, own, places, **asked)
    else:
        found = [link for n in places for link in _row_links(record, own, n, word, looking)]
    return _best(found, lambda link: link.key if looking else link.query)


def _best(links: Iterable[Link], key: Callable[[Link], Any]) -> list[Link]:
    """The most telling link of each key, the most telling first."""
    best: dict[Any, Link] = {}
    for link in links:
        if link.telling > best.setdefault(key(link), link).telling:
            best[key(link)] = link
    return sorted(best.values(), key=lambda link: -link.telling)


def _row_links(
    record: Record, own: Sequence[Word], place: int, word: int, looking: bool
) -> list[Link]:
    """The links of one word at one place, from its rows or columns alone; the first word aside."""
    others = [n for n, them in enumerate(own) if n not in (0, word) and not them.is_mark]
    read = record.rows if looking else record.column
    found = []
    for head in range(record.places[place].n_heads):
        each_tn = np.stack([read(place, head, token) for token in own[word].tokens])
        sums_n = each_tn.mean(0) if looking else each_tn.sum(0)
        weights = _by_word(sums_n, own, mean=not looking).tolist()
        for other in others:
            query, key = (word, other) if looking else (other, word)
            found.append(Link(query, key, place, head, weights[other], weights[other]))
    return found


def all_links(
    record: Record,
    own: Sequence[Word],
    source: Sequence[Word],
    places: Sequence[int] | None = None,
    query: int | None = None,
    key: int | None = None,
) -> list[Link]:
    """Of each head the most telling link of each word; or all from the query and to the key."""
    if max(len(own), len(source)) > MOST_WORDS:
        raise ValueError(
            f"{max(len(own), len(source)):,} words are too many to look for links between all of "
            f"them; expected at most {MOST_WORDS}: choose a word"
        )
    found = []
    for number, place in enumerate(record.places):
        if (places is not None and number not in places) or reads_source(record, number):
            continue
        keys = source if place.kind == "cross" else own
        plain = np.array([[not (a.is_mark or b.is_mark) for b in keys] for a in own])
        if place.kind != "cross":
            np.fill_diagonal(plain, False)
        for head, weights_qk in _word_weights(record, number, own, keys):
            telling_qk = np.where(plain, telling_of(weights_qk, place.causal), -1.0)
            chosen = telling_qk > -1.0
            if query is None and key is None:
                best_k = telling_qk.argmax(1)[:, None]
                chosen = (np.arange(len(keys)) == best_k) & (telling_qk > 0.0)
            for q, k in np.argwhere(chosen).tolist():
                if query in (None, q) and key in (None, k):
                    weight, telling = float(weights_qk[q, k]), float(telling_qk[q, k])
                    found.append(Link(q, k, number, head, weight, telling))
    return found
