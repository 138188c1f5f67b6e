"""Texts as rows of an encoder: [CLS], a few sentences, [SEP], padding: `make_rows`.

Why: an encoder is asked about sentences that begin and end, as its teacher was; windows cut
anywhere out of a long text would teach other habits.

How: documents are cut into sentences at their signs; neighbours are joined up to a length that is
drawn anew for each row, so that short and long rows both come.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Ids = npt.NDArray[np.uint16]
SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[A-Z0-9])|\n{2,}")
SHORTEST = 12  # tokens; a row is meant to have at least so many, and at most `width`


def make_rows(tokenizer: Tokenizer, texts: Sequence[str], width: int, seed: int) -> Ids:
    """(rows, width) of token numbers, 0 for padding."""
    drawn = np.random.default_rng(seed)
    rows: list[npt.NDArray[np.uint16]] = []
    for ids in join_sentences(tokenizer, texts, width - 2, drawn):
        row = np.zeros(width, np.uint16)
        row[: len(ids) + 2] = [tokenizer.token_to_id("[CLS]"), *ids, tokenizer.token_to_id("[SEP]")]
        rows.append(row)
    return np.stack(rows)


def join_sentences(
    tokenizer: Tokenizer, texts: Sequence[str], most: int, drawn: np.random.Generator
) -> Iterator[list[int]]:
    """Neighbouring sentences of a document, up to a length drawn for each row."""
    for text in texts:
        sentences = [x.strip() for x in SENTENCE.split(text) if x.strip()]
        encoded = tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
        row: list[int] = []
        limit = int(drawn.integers(SHORTEST, most + 1))
        for said in encoded:
            if row and len(row) + len(said.ids) > limit:
                yield row[:most]
                row, limit = [], int(drawn.integers(SHORTEST, most + 1))
            row = row + said.ids
        if len(row) >= SHORTEST:
            yield row[:most]
