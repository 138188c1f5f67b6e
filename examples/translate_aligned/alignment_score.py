"""How often heads look from a word to its translation, as a lexicon has it: `alignment_score`.

Why: a picture of attention is an alignment only where somebody has counted.

How: the reference translation goes through the decoder, and the guided heads are observed at the
positions that read a word of the lexicon.

Letters: B batch, h heads asked, T decoder positions, S source positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from guided_attention import guided
from torch import Tensor

from regard import Tokenizer
from regard.models import Transformer
from regard.tokens import Encoding

ROWS_AT_ONCE = 64
"""Pairs in one forward of `alignment_score`."""

Entry = tuple[str, str]


@dataclass(frozen=True)
class AlignmentScore:
    """How many questions the attention answered right; `by_entry` says (right, total) for each."""

    right: int
    total: int
    by_entry: Mapping[Entry, tuple[int, int]]

    @property
    def share(self) -> float:
        """right / total; NaN when nothing was asked."""
        return self.right / self.total if self.total else math.nan


@dataclass(frozen=True)
class Question:
    """Does the attention of these decoder positions peak at one of these source positions?"""

    entry: Entry
    pair: int
    positions: tuple[int, ...]
    answers: tuple[int, ...]


@torch.no_grad()
def alignment_score(
    model: Transformer,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    lexicon: Sequence[Entry],
    *,
    layer: int,
    heads: Sequence[int],
    prefix: Sequence[int] = (),
    reverse: bool = False,
) -> AlignmentScore:
    """How often heads look at "cat" where they read 猫. Pairs, lexicon: (English, Japanese).

    One question for each pair and each entry whose two words occur in it: the English one as a
    whole word in any case (no letter, digit or underscore beside it), the Japanese one anywhere.
    The reference translation is fed to the decoder. Taken are the decoder positions whose *input*
    token has a character of the Japanese word, by the tokenizer's offsets; the weights are averaged
    over these positions and the heads, and the answer is right when the source token with the most
    has a character of the English word. Words that occur several times count with all occurrences.
    Every source token can win, also `prefix` and the end of the sentence.

    prefix: ids before the source's tokens, such as a language token. The end-of-sentence token and
    the decoder's start are the model's. reverse: from Japanese to English, with the parts of the
    two words exchanged.
    """
    spoken = [said[::-1] if reverse else said for said in pairs]
    sources = _encode(tokenizer, [source for source, _ in spoken])
    targets = _encode(tokenizer, [target for _, target in spoken])
    asked = _questions(sources, targets, lexicon, len(prefix), reverse)
    needed = sorted({question.pair for question in asked})
    feed = _Feed(model, tokenizer, tuple(prefix))
    was_training = model.training
    model.eval()
    looks: dict[int, Tensor] = {}
    try:
        with guided(model, layer, heads) as asked_heads:
            # Like lengths together: less padding, the same answers.
            needed.sort(key=lambda pair: (len(sources[pair].ids), pair))
            for first in range(0, len(needed), ROWS_AT_ONCE):
                rows = needed[first : first + ROWS_AT_ONCE]
                feed.run([sources[r].ids for r in rows], [targets[r].ids for r in rows])
                looks.update(zip(rows, asked_heads.weights().mean(1).cpu(), strict=True))
    finally:
        model.train(was_training)
    counts = {entry: [0, 0] for entry in dict.fromkeys(q.entry for q in asked)}
    for question in asked:
        look_s = looks[question.pair][list(question.positions)].mean(0)
        if look_s.isnan().any():
            raise ValueError(
                f"the attention to {sources[question.pair].text!r} is NaN; the model is broken"
            )
        counts[question.entry][0] += int(look_s.argmax()) in question.answers
        counts[question.entry][1] += 1
    by_entry = {entry: (right, total) for entry, (right, total) in counts.items()}
    return AlignmentScore(sum(right for right, _ in by_entry.values()), len(asked), by_entry)


@final
class _Feed:
    """Source and target ids as the model was trained on them, padded, through the model."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, prefix: tuple[int, ...]) -> None:
        known = model.config.tokens
        start = known.decoder_start if known.decoder_start is not None else known.bos
        start = start if start is not None else tokenizer.special.bos
        if start is None:
            raise ValueError(
                "neither the model's config (tokens.decoder_start, tokens.bos) nor the tokenizer "
                "names the token that a translation begins with"
            )
        end = known.eos[:1] or tuple(x for x in [tokenizer.special.eos] if x is not None)
        self.model, self.prefix, self.start, self.end = model, list(prefix), start, list(end)
        self.filler = known.pad if known.pad is not None else 0

    def run(self, sources: list[list[int]], targets: list[list[int]]) -> None:
        source, source_real = self._pad([self.prefix + ids + self.end for ids in sources])
        target, target_real = self._pad([[self.start, *ids] for ids in targets])
        memory = self.model.encode(source, source_real)
        self.model.run(target, real=target_real, memory=memory)

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows))
        device = next(self.model.parameters()).device
        ids = [row + [self.filler] * (width - len(row)) for row in rows]
        real = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
        return torch.tensor(ids, device=device), torch.tensor(real, device=device)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    return tokenizer.encode_batch(texts, special=False).rows


def _questions(
    sources: list[Encoding],
    targets: list[Encoding],
    lexicon: Sequence[Entry],
    offset: int,
    reverse: bool,
) -> list[Question]:
    """Every entry in every pair that has both words, in the order of pairs and lexicon."""
    shapes = {
        (english, japanese): (
            re.compile(rf"(?<!\w){re.escape(english)}(?!\w)", re.IGNORECASE),
            re.compile(re.escape(japanese)),
        )
        for english, japanese in lexicon
    }
    asked = []
    for pair, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for entry, patterns in shapes.items():
            here, there = patterns[::-1] if reverse else patterns
            answers = _covering(source, here)
            positions = _covering(target, there)
            if answers and positions:
                asked.append(
                    Question(
                        entry,
                        pair,
                        tuple(at + 1 for at in positions),  # behind the start token
                        tuple(at + offset for at in answers),
                    )
                )
    return asked


def _covering(said: Encoding, pattern: re.Pattern[str]) -> list[int]:
    """The tokens with a character of a match."""
    found = [match.span() for match in pattern.finditer(said.text)]
    return [
        at
        for at, (first, last) in enumerate(said.offsets)
        if any(first < end and start < last for start, end in found)
    ]
