"""What a language model said would come next: candidates after each token, and how they fared.

Why: where a head looks is half of the story; what the model makes of it is the other half.

How: the candidates after a token are its few likeliest next tokens, and a token's own probability
is what it was given before it was read. Both are small arrays of a record (`record.py`), by query
of the place that read the tokens. Read with numpy alone; `predictions.py` makes them.

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
    """`probs` and `ids` (N, K): the likeliest to come after each token, likeliest first; id -1 and
    0 where the model said nothing. `given` (N,): the probability that a token had before it was
    read, NaN where none is known, as of the first. `came` (N,): the id after each token, or -1."""

    probs: Array
    ids: Array
    given: Array
    came: Array


def read_next_tokens(get: Callable[[str], Array]) -> NextTokens:
    """From the arrays of a place, by name."""
    given, read = np.asarray(get("given")), np.asarray(get("ids"))
    probs, ids = get("next_probs"), get("next_ids")
    if probs.shape != ids.shape or not 1 <= ids.shape[1] <= MOST_CANDIDATES:
        refuse(f"candidates must be 1 to {MOST_CANDIDATES}, each with a probability and an id")
    known = np.where(given < 0, np.nan, given)
    return NextTokens(probs, ids, known, np.append(read[1:], -1))
