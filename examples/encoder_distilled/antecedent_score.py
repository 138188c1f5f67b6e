"""How often a head looks from a pronoun at the noun that it means: `antecedent_score`.

Why: that "it" looks at "animal" is what everyone wants to see. A picture shows it once; here it is
counted, against two guesses that need no model.

How: antecedents.txt has twins, two sentences of nearly the same words in which the pronoun means
the first noun and the nearest one; so each guess ("the first", "the nearest") is right in half of
them. A head's answer is the word with most of the pronoun's weight, words' tokens added up; special
tokens, signs and the pronoun itself do not count, as in `regard look`. The best head is chosen on
the first lines and judged on the others.

Letters: B sentences, H heads, T tokens, W words, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard import Wants, observing
from regard.labs.interval import share_interval
from regard.models import Transformer

CHOOSING = 100  # sentences of the 300 that choose the head
PRONOUNS = ("it", "he", "she", "they")
NOUN, TWIN = re.compile(r"_(\w+)_"), re.compile(r"<([^|>]*)\|([^>]*)>")


@dataclass(frozen=True)
class Sentence:
    """A sentence, its words, and which of them are the nouns and the pronoun; `means`: 0 or 1."""

    kind: str
    words: tuple[str, ...]
    nouns: tuple[int, int]
    pronoun: int
    means: int

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Score:
    """Of the best head: layer, head, and its share with its interval, where it was not chosen."""

    layer: int
    head: int
    share: dict[str, float]
    by_kind: dict[str, float]
    of_the_two: float
    """How often the noun that is meant has more weight than the other one."""


def read_twins(path: Path) -> list[Sentence]:
    """Two sentences for each line."""
    lines = [x for x in path.read_text(encoding="utf-8").splitlines() if x and x[0] != "#"]
    return [make_sentence(line, means) for line in lines for means in (0, 1)]


def make_sentence(line: str, means: int) -> Sentence:
    kind, marked = line.split(": ", 1)
    words = TWIN.sub(lambda found: found[means + 1], marked).split()
    nouns = [n for n, word in enumerate(words) if NOUN.fullmatch(word)]
    pronouns = [n for n, word in enumerate(words) if word in PRONOUNS]
    if len(nouns) != 2 or len(pronouns) != 1 or pronouns[0] < nouns[1]:
        raise ValueError(f"{marked!r} is to have two marked nouns and one pronoun after them")
    plain = tuple(NOUN.sub(r"\1", word) for word in words)
    return Sentence(kind, plain, (nouns[0], nouns[1]), pronouns[0], means)


@torch.no_grad()
def looks_at_words(model: Transformer, sentences: Sequence[Sentence]) -> list[Tensor]:
    """For each sentence (L, H, W): what the pronoun gives each word, in every head."""
    assert model.tokenizer is not None
    device = next(model.parameters()).device
    found = []
    for sentence in sentences:
        said = model.tokenizer.encode(sentence.text)
        with observing(model, Wants(weights=True)) as seen:
            model.run(torch.tensor([said.ids], device=device))
        weights_lhts = torch.stack([one.weights[0].float().cpu() for one in seen.values()])
        of_word = words_of_tokens(sentence.words, said.offsets)
        here = [t for t, word in enumerate(of_word) if word == sentence.pronoun]
        row_lht = weights_lhts[:, :, here].mean(2)
        gives = torch.zeros(*row_lht.shape[:2], len(sentence.words))
        for t, word in enumerate(of_word):
            if word is not None and word != sentence.pronoun:
                gives[..., word] += row_lht[..., t]
        found.append(gives)
    return found


def words_of_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Which word each token is of; None for special tokens and signs."""
    ends, at = [], 0
    for word in words:
        ends.append((at, at + len(word.rstrip(".,;:!?"))))
        at += len(word) + 1
    return [
        next((n for n, (a, b) in enumerate(ends) if first < b and a < last), None)
        for first, last in offsets
    ]


def antecedent_score(model: Transformer, sentences: Sequence[Sentence]) -> Score:
    """The head that finds most antecedents in the first sentences, judged on the rest."""
    looks = looks_at_words(model, sentences)
    right_slh = torch.stack(
        [gives.argmax(-1) == s.nouns[s.means] for gives, s in zip(looks, sentences, strict=True)]
    )
    chosen = right_slh[:CHOOSING].float().mean(0)
    layer, head = divmod(int(chosen.argmax()), chosen.shape[1])
    rest = sentences[CHOOSING:]
    right = right_slh[CHOOSING:, layer, head]
    kinds = {s.kind for s in rest}
    more = [
        bool(gives[layer, head, s.nouns[s.means]] > gives[layer, head, s.nouns[1 - s.means]])
        for gives, s in zip(looks[CHOOSING:], rest, strict=True)
    ]
    return Score(
        layer,
        head,
        share_interval(int(right.sum()), len(rest)),
        {
            kind: float(right[[n for n, s in enumerate(rest) if s.kind == kind]].float().mean())
            for kind in sorted(kinds)
        },
        sum(more) / len(more),
    )
