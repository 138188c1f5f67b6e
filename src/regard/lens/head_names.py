"""Names of layers and heads, and what heads do in words: the same ones everywhere.

Why: the digest in a terminal, the page and the plots name the same heads, and readers go from one
to the other.

How: `label_places` names the layers of a record, `known_scores` returns the scores of heads for
which there is enough evidence, `SCORE_WORDS` describes each score in words, and `length_note` warns
if a text is longer than its model was trained for. The page gets all of it in its manifest.

Left out: the scores themselves (`head_scores.py`), and the words of the text (`word_links.py`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from regard.lens.lazy_weights import Array
from regard.lens.record import Record
from regard.lens.word_links import reads_source


@dataclass(frozen=True)
class ScoreWords:
    """A score in words: what is attended to, or measured; and what heads with a high score do."""

    what: str
    does: str


def _looks_at(what: str) -> ScoreWords:
    return ScoreWords(what, f"looks at {what}")


SCORE_WORDS = {
    "previous": _looks_at("the token before"),
    "next": _looks_at("the token after"),
    "same": _looks_at("the token itself"),
    "first": _looks_at("the first token"),
    "induction": _looks_at("what came after the same token"),
    "separator": _looks_at("signs and ends"),
    "local": ScoreWords("distance in tokens", "stays near"),  # the smaller, the more local
    "broad": ScoreWords("entropy in nats", "spreads wide"),
    "links": ScoreWords("words, beyond habit", "links words"),  # in surveys only
}
LEAST_EVIDENCE = 5
"""How many queries must have an earlier token like their own for an induction score to be given."""
_PATH = re.compile(r"(?:[A-Za-z]:)?[\\/]|\.{1,2}[\\/]|~")


def label_places(record: Record) -> list[str]:
    """A short label for each place, such as "3" or "cross 3"; its dotted name if labels repeat."""
    stacks = [_stack_of(record, number) for number in range(len(record.places))]
    told = len(set(stacks)) > 1
    labels = [
        f"{stack} {place.layer}".strip() if told else f"{place.layer}"
        for stack, place in zip(stacks, record.places, strict=True)
    ]
    often = Counter(labels)
    return [
        label if often[label] == 1 else place.name
        for label, place in zip(labels, record.places, strict=True)
    ]


def _stack_of(record: Record, number: int) -> str:
    place = record.places[number]
    if place.kind == "cross":
        return "cross"
    if reads_source(record, number):
        return "encoder"
    crossed = any(other.kind == "cross" for other in record.places)
    return place.stack or ("decoder" if crossed else "")


def known_scores(record: Record) -> dict[str, Array]:
    """`Record.heads`, with induction scores that rest on too few queries set to NaN."""
    scores, counts = record.heads(), record.counts()
    if "induction" in scores:
        few = counts["induction"] < LEAST_EVIDENCE
        scores["induction"] = np.where(few, np.nan, scores["induction"])
    return scores


def length_note(record: Record) -> str | None:
    """A sentence if the text was read in windows or is longer than the model was trained for."""
    if record.window is not None:
        return (
            f"The text was read in windows of {record.window:,} tokens that overlap by half; a "
            "token looks only at those of its own window, which has its own special tokens."
        )
    most, n_read = record.trained_len, record.n_read
    if most is None or n_read <= most:
        return None
    return (
        f"The text has {n_read:,} tokens, and this model was trained on texts of at most {most:,}: "
        "what its heads do beyond that may be an artefact."
    )


def name_model(name: str) -> str:
    """The name to show for a model loaded by this name: for a path, its last part."""
    return short_model_name(os.path.abspath(name) if os.path.exists(name) else name)


def short_model_name(name: str) -> str:
    """The name of the folder or file, if the model is named by a path; else the name as it is."""
    if not _PATH.match(name):
        return name
    parts = [part for part in re.split(r"[\\/]", name) if part not in ("", ".", "..", "~")]
    for part in reversed(parts):
        if part.startswith("models--"):  # a cache of the hub
            return part.removeprefix("models--").replace("--", "/")
    return parts[-1] if parts else name
