"""How likely a model finds a text: `score`, log-probabilities of texts or of continuations.

Why: to choose between answers, as tasks like PIQA ask, or to compare texts and models.

How: texts are read in batches, in one forward pass, and the log-probabilities of their tokens are
summed. A pair (context, continuation) is tokenized and read as one text, and only the tokens of the
continuation count: those with a character after the context. A text without a context begins after
the model's bos token; if the model has none, the first token is not counted, since nothing precedes
it.

Left out: encoders, which give texts no probability, and encoder–decoders.

Letters: B rows, T tokens of the longest, C model width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.generation.prompts import Model, check_model, need_tokenizer, open_model
from regard.generation.stopping import find_tokens
from regard.models import Transformer
from regard.tokens import Tokenizer

Pair = tuple[str, str]
BATCH_TOKENS = 4096
MOST_LOGITS = 1 << 26  # computed at once


@final
@dataclass(frozen=True)
class Score:
    """A text's log-probability: natural logarithms, summed over the tokens that count."""

    log_prob: float
    n_tokens: int
    """How many tokens count."""
    n_bytes: int
    """The length of the text, or of the continuation, in UTF-8."""
    greedy: bool
    """Whether each of these tokens was the likeliest."""

    @property
    def per_token(self) -> float:
        return self.log_prob / self.n_tokens

    @property
    def per_byte(self) -> float:
        """For comparing answers of different lengths, independent of the tokenizer."""
        return self.log_prob / self.n_bytes

    @property
    def perplexity(self) -> float:
        return math.exp(-self.per_token)


@dataclass(frozen=True)
class _Row:
    """A text to read, and which of its tokens count."""

    number: int
    ids: list[int]
    counts: list[int]
    n_bytes: int


@torch.no_grad()
def score(
    model: Model,
    texts: Sequence[str | Pair],
    *,
    tokenizer: Tokenizer | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Score]:
    """How likely a language model finds texts, or continuations after their contexts.

    Args:
        model: What `regard.load` returned, or what it takes.
        texts: Texts, or pairs (context, continuation), of which only the continuation counts. The
            space between the two belongs to the continuation, for most models.
        tokenizer: Instead of the model's own.
        batch_tokens: How many tokens are read at once at most, padding included.

    Returns:
        A `Score` for each text: log_prob (natural logarithm, summed), n_tokens, n_bytes, greedy,
        and per_token, per_byte, perplexity.

    Raises:
        ValueError: An encoder–decoder, an empty text, or one longer than the model takes.
        TypeError: What is no text and no pair of texts.

    Example:
        >>> pairs = [("The cat sat on the", " mat."), ("The cat sat on the", " equation.")]
        >>> first, second = regard.score("embedded:lm", pairs)
        >>> first.per_byte > second.per_byte
        True
    """
    if isinstance(texts, str):
        raise TypeError("texts is one text, expected a list of texts, or of pairs of them")
    if type(batch_tokens) is not int or batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens!r}; expected a whole number, at least 1")
    model = open_model(model)
    check_model(model)
    if model.config.encoder:
        raise ValueError(
            f"this {model.config.family} model reads one text and writes another; score is for "
            "language models, which go on with what they read"
        )
    reader = need_tokenizer(model, tokenizer)
    rows = [_read(model, reader, number, given) for number, given in enumerate(texts)]
    found: dict[int, Score] = {}
    for batch in _batches(rows, batch_tokens):
        found |= _score_batch(model, batch)
    return [found[number] for number in range(len(rows))]


def _read(model: Transformer, tokenizer: Tokenizer, number: int, given: str | Pair) -> _Row:
    parts = ("", given) if isinstance(given, str) else given
    good = isinstance(parts, tuple) and len(parts) == 2
    if not good or not all(isinstance(part, str) for part in parts):
        raise TypeError(f"text {number} is {given!r:.80}; expected a str, or a pair of them")
    context, text = parts
    if not text:
        raise ValueError(f"text {number} is empty, so there is nothing to score")
    said = tokenizer.encode(context + text)
    ids, spans = list(said.ids), list(said.offsets)
    bos = find_tokens(model).bos
    if not context and bos is not None and ids[:1] != [bos]:
        ids, spans = [bos, *ids], [(0, 0), *spans]
    counts = [at for at, (a, z) in enumerate(spans) if at and z > a and z > len(context)]
    most = model.config.max_len
    if most is not None and len(ids) > most:
        raise ValueError(
            f"text {number} has {len(ids):,} tokens, and the model takes {most:,}; give a shorter "
            "context or text"
        )
    if not counts:
        raise ValueError(
            f"text {number}, {text!r:.40}, is one token with nothing before it, so it has no "
            "log-probability; give a context, as (context, text)"
        )
    return _Row(number, ids, counts, len(text.encode("utf-8", "replace")))


def _batches(rows: Sequence[_Row], batch_tokens: int) -> Iterator[list[_Row]]:
    """Batches of rows of similar length; a row longer than batch_tokens is a batch by itself."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if batch and (len(batch) + 1) * len(batch[0].ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _score_batch(model: Transformer, rows: Sequence[_Row]) -> dict[int, Score]:
    assert model.head is not None
    device = model.head.weight.device
    ids_bt = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)
    last_btc = model.run(ids_bt.to(device))  # causal: no token sees the padding on the right
    at = torch.tensor([(b, t) for b, row in enumerate(rows) for t in row.counts])
    before = last_btc[at[:, 0].to(device), at[:, 1].to(device) - 1]
    logs, likeliest = _judge(model, before, ids_bt[at[:, 0], at[:, 1]].to(device))
    found: dict[int, Score] = {}
    sizes = [len(row.counts) for row in rows]
    ends = itertools.accumulate(sizes)
    for row, size, end in zip(rows, sizes, ends, strict=True):
        own, first = logs[end - size : end], likeliest[end - size : end]
        total = float(own.double().sum())
        found[row.number] = Score(total, len(own), row.n_bytes, bool(first.all()))
    return found


def _judge(model: Transformer, states_nc: Tensor, ids_n: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each id given the state before it, and whether it is the likeliest."""
    assert model.head is not None
    logs, likeliest = [], []
    rows = max(1, MOST_LOGITS // model.config.vocab_size)
    for start in range(0, len(ids_n), rows):
        ids = ids_n[start : start + rows]
        logits = model.head(states_nc[None, start : start + rows])[0].float()
        logs.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
        likeliest.append(logits.argmax(-1) == ids)
    return torch.cat(logs).cpu(), torch.cat(likeliest).cpu()
