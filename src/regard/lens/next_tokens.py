"""The next tokens that a language model predicted: candidates after each token, and which one came.

Why: where a head looks is half of the story; what the model predicts is the other half.

How: the candidates after a token are its few likeliest next tokens. A token's own probability is
the one that the model gave it before reading it. Both are small arrays of a record (`record.py`),
by query of the place that read the tokens. Only numpy is needed to read them; `predictions.py`
makes them.

Letters: N tokens, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from regard.lens.lazy_weights import Array
from regard.lens.schema import refuse

MOST_CANDIDATES = 64


@dataclass(frozen=True, eq=False)
class NextTokens:
    """The next tokens that a language model predicted, and those that came.

    `probs` and `ids` (N, K): the likeliest tokens after each token, likeliest first; 0 and -1 where
    there is no prediction. `given` (N,): the probability of each token before it was read; NaN if
    unknown, as for the first. `came` (N,): the id after each token, or -1.
    """

    probs: Array
    ids: Array
    given: Array
    came: Array


def read_next_tokens(get: Callable[[str], Array]) -> NextTokens:
    """Read them from the arrays of a place, which `get` returns by name."""
    given, read = np.asarray(get("given")), np.asarray(get("ids"))
    probs, ids = get("next_probs"), get("next_ids")
    if probs.shape != ids.shape or not 1 <= ids.shape[1] <= MOST_CANDIDATES:
        refuse(f"candidates must be 1 to {MOST_CANDIDATES}, each with a probability and an id")
    known = np.where(given < 0, np.nan, given)
    return NextTokens(probs, ids, known, np.append(read[1:], -1))
