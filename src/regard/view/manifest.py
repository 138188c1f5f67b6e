"""What a page must know before it draws anything: words, places, and what the heads do.

A manifest is one JSON object, the same for all three hosts of a page (file, server, widget); the
page's own script calls it the outline. Records check themselves (`lens/schema.py`); here labels are
cut to what a page can show, and scores that a head does not have, NaN, become null, which the page
shows as "not measured".

Left out: weights. Those are asked for piece by piece (see queries.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.lens.head_names import (
    SCORE_WORDS,
    known_scores,
    label_places,
    length_note,
    short_model_name,
)
from regard.lens.record import Record
from regard.lens.word_links import find_alignment, reads_source

FORMAT = 1
MAX_TOKENS = 4_000_000
LABEL_LENGTH = 80  # characters of a token that a page is given
NAME_LENGTH = 200
MOST_ALIGNED = 30_000_000  # weights of all cross-attention heads, to choose the first view by
Floats = npt.NDArray[np.float32]


class BadView(ValueError):
    """A record that cannot be shown, or a question that no record answers; says which and why."""


def make_manifest(records: Sequence[Record], host: str) -> dict[str, Any]:
    if not 1 <= len(records) <= 2:
        raise BadView(f"a page shows one record or compares two; {len(records)} were given")
    words = {name: {"what": each.what, "does": each.does} for name, each in SCORE_WORDS.items()}
    # "door" is how the page's script names its host.
    return {
        "format": FORMAT,
        "door": host,
        "words": words,
        "records": [_tell_record(each) for each in records],
    }


def _tell_record(record: Record) -> dict[str, Any]:
    if not record.places:
        raise BadView("the record has 0 places, so there is nothing to show")
    tokens, source_tokens = _labels(record.tokens), None
    note = length_note(record)
    pieces = _pieces(record.text, record.spans, len(tokens))
    if record.source_tokens is not None:
        source_tokens = _labels(record.source_tokens)
    return {
        "model": cut(short_model_name(record.model), NAME_LENGTH),
        "created": cut(record.created, NAME_LENGTH),
        # As people write them: the text that a token stands for, where that is known.
        "tokens": [
            own if own.strip() else token
            for token, (_, own) in zip(tokens, pieces or [["", ""]] * len(tokens), strict=True)
        ],
        "pieces": pieces,
        "source_tokens": source_tokens,
        "source_pieces": None,
        "notes": [] if note is None else [note],
        "places": [
            {**_tell_place(record, number), "label": cut(label, NAME_LENGTH)}
            for number, label in enumerate(label_places(record))
        ],
        "scores": {
            name: [
                [finite(value) for value in row[: place.n_heads].tolist()]
                for row, place in zip(values, record.places, strict=True)
            ]
            for name, values in known_scores(record).items()
        },
        "alignment": _alignment(record),
    }


def _tell_place(record: Record, number: int) -> dict[str, Any]:
    place = record.places[number]
    queries, keys = sides_of(record, number)
    plain = ("layer", "kind", "n_heads", "n_queries", "n_keys", "causal")
    return {
        "name": cut(place.name, NAME_LENGTH),
        **{name: getattr(place, name) for name in plain},
        "heads": list(place.heads),
        "grid": record.grid(number),
        "queries": queries,
        "keys": keys,
    }


def sides_of(record: Record, number: int) -> tuple[str, str]:
    """Whose words label queries and keys: the target's, the source's, or "positions": nobody's."""
    place = record.places[number]
    queries = "source" if reads_source(record, number) else "target"
    keys = "source" if place.kind == "cross" else queries
    known = {"target": len(record.tokens), "source": len(record.source_tokens or ())}
    return (
        queries if known[queries] == place.n_queries else "positions",
        keys if known[keys] == place.n_keys else "positions",
    )


def _alignment(record: Record) -> tuple[int, int] | None:
    """The place and head where a page opens: the firmest between target and source, if any."""
    weights = sum(
        place.n_heads * place.n_queries * place.n_keys
        for number, place in enumerate(record.places)
        if sides_of(record, number) == ("target", "source")
    )
    found = find_alignment(record) if 0 < weights <= MOST_ALIGNED else None
    return None if found is None else (found.place, found.head)


def finite(value: float) -> float | None:
    """The number with the digits that a float32 has, or None, which JSON can say."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _labels(tokens: Sequence[str]) -> list[str]:
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise BadView(f"the record has {len(tokens)} tokens; a page shows 1 to {MAX_TOKENS:,}")
    return [cut(token, LABEL_LENGTH) for token in tokens]


def cut(text: str, length: int) -> str:
    """The beginning of a text, with an ellipsis where something was left out."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _pieces(
    text: str, spans: Sequence[tuple[int, int]] | None, count: int
) -> list[list[str]] | None:
    """Each token's text and what stands before it; None where spans do not lie in the text."""
    if spans is None or len(spans) != count:
        return None
    pieces, done = [], 0
    for start, end in spans:
        if start == end:  # a token that stands for no characters, such as <s>
            pieces.append(["", ""])
            continue
        if not done <= start < end <= len(text):
            return None
        # Many tokenizers give a word the space before it; a shade on that would look ragged.
        bare = end - len(text[start:end].lstrip())
        start = start if bare == end else bare
        pieces.append([cut(text[done:start], LABEL_LENGTH), cut(text[start:end], LABEL_LENGTH)])
        done = end
    return pieces
