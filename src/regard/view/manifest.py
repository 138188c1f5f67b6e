"""The manifest of a page, needed before it draws anything: tokens, places, head scores, findings.

A manifest is one JSON object, the same for all three hosts of a page (file, server, widget).
Records are already checked (`lens/schema.py`); here labels are truncated to what a page can show,
and scores that a head does not have (NaN) become null, which the page shows as "not measured".

Left out: weights, which a page requests piece by piece (see queries.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from regard.lens.findings import choose_word, find_sections
from regard.lens.head_names import (
    SCORE_WORDS,
    known_scores,
    label_places,
    length_note,
    short_model_name,
)
from regard.lens.record import SCORES, Record
from regard.lens.word_links import find_alignment, reads_source, words_of
from regard.view.distances import rank_distances
from regard.view.pieces import LABEL_LENGTH, cut, find_spans, make_pieces
from regard.view.queries import BadView

FORMAT = 1
MAX_TOKENS = 4_000_000
SMALL_CELLS = 200  # the most on a side of the overview's maps; at least 100 if there are as many
NAME_LENGTH = 200
N_WORTH = 8  # heads listed that change the log-probability most
MOST_ALIGNED = 30_000_000  # cross-attention weights; with more, no alignment is looked for


def make_manifest(records: Sequence[Record], host: str) -> dict[str, Any]:
    if not 1 <= len(records) <= 2:
        raise BadView(f"a page shows one record or compares two; {len(records)} were given")
    return {
        "format": FORMAT,
        "host": host,
        "words": tell_words(SCORES),
        "records": [_tell_record(each) for each in records],
        "differences": rank_distances(*records) if len(records) == 2 else None,
        "small": SMALL_CELLS,
    }


def tell_words(scores: Iterable[str]) -> dict[str, dict[str, str]]:
    """The words for each score: what it measures, and what a head with a high score does."""
    return {name: asdict(SCORE_WORDS[name]) for name in scores}


def _tell_record(record: Record) -> dict[str, Any]:
    if not record.places:
        raise BadView("the record has 0 places, so there is nothing to show")
    too_long = length_note(record)
    tokens, source = _both_sides(record)
    return {
        "model": cut(short_model_name(record.model), NAME_LENGTH),
        "created": cut(record.created, NAME_LENGTH),
        **tokens,
        **{f"source_{name}": value for name, value in source.items()},
        "notes": [note for note in (too_long, *record.notes) if note is not None],
        **_tell_findings(record),
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
        "effects": _tell_effects(record),
        "alignment": _alignment(record),
        "rollout": rollout_places(record),
        **_tell_next(record),
        **_tell_steps(record),
    }


def _tell_effects(record: Record) -> list[dict[str, Any]]:
    """The recorded effects: how the log-probability changes with each layer and head edited."""
    return [
        {
            "edit": cut(found.edit, NAME_LENGTH),
            "token": cut(found.token, LABEL_LENGTH),
            "log_prob": finite(found.log_prob),
            "whole": finite(found.whole),
            "query": None if found.edge is None else list(found.edge[0]),
            "key": None if found.edge is None else list(found.edge[1]),
            "layers": [finite(found.layers[place.layer]) for place in record.places],
            "heads": [
                [finite(found.heads[place.layer, head]) for head in place.heads]
                for place in record.places
            ],
        }
        for found in record.effects()
    ]


def _tell_worth(record: Record) -> list[dict[str, Any]]:
    """The heads that change the log-probability most, as in the terminal's digest."""
    at = {
        (place.layer, head): (number, n)
        for number, place in enumerate(record.places)
        for n, head in enumerate(place.heads)
    }
    sections = []
    for found in record.effects():
        best = [[*at[layer, head], finite(change)] for layer, head, change in found.top(N_WORTH)]
        line = {"text": "changes most", "heads": best, "query": None, "key": None, "note": ""}
        sections.append({"title": cut(found.title, NAME_LENGTH), "lines": [line], "signed": True})
    return sections


def rollout_places(record: Record) -> list[int]:
    """The places that rollout multiplies; [] unless they are several and have all their weights."""
    stack = record.rollout_places()
    return stack if len(stack) > 1 and all(record.has_weights(place) for place in stack) else []


def _tell_next(record: Record) -> dict[str, Any]:
    """How many next-token candidates each token has (k), and the candidates' labels by id."""
    found = record.next_tokens()
    if found is None or len(found.given) != len(record.tokens):
        return {"next": None}
    names = record.vocabulary or {}
    ids = np.unique(found.ids[found.ids >= 0]).tolist()
    vocabulary = {str(number): cut(names.get(number, str(number)), LABEL_LENGTH) for number in ids}
    return {"next": {"k": found.ids.shape[1], "vocabulary": vocabulary}}


def _tell_steps(record: Record) -> dict[str, Any]:
    """For a generation: the index of the last token that each forward pass read."""
    ends = record.steps()
    known = ends is not None and ends[-1] == len(record.tokens) - 1
    return {"steps": ends.tolist() if known and ends is not None else None}


def _tell_findings(record: Record) -> dict[str, Any]:
    """The findings of the terminal's digest, and the words of the text.

    "groups" is the number of tokens of each word, null if a word's tokens are not contiguous;
    "asked" is the first token of the word that the page opens with.
    """
    own, _ = words_of(record)
    in_order = [token for word in own for token in word.tokens] == list(range(len(record.tokens)))
    chosen = choose_word(own, None)
    sections = [
        {
            "title": cut(section.title, NAME_LENGTH),
            "signed": False,
            "lines": [
                {
                    "text": cut(line.text, NAME_LENGTH),
                    "heads": [[place, head, finite(value)] for place, head, value in line.heads],
                    "query": line.query,
                    "key": line.key,
                    "note": line.note,
                }
                for line in section.lines
            ],
        }
        for section in find_sections(record)
    ]
    return {
        "findings": [*sections, *_tell_worth(record)],
        "groups": [len(word.tokens) for word in own] if in_order else None,
        "asked": None if chosen is None else own[chosen].tokens[0],
    }


def _tell_place(record: Record, number: int) -> dict[str, Any]:
    place = record.places[number]
    queries, keys = sides_of(record, number)
    plain = ("layer", "kind", "stack", "n_heads", "n_queries", "n_keys", "causal")
    return {
        "name": cut(place.name, NAME_LENGTH),
        **{name: getattr(place, name) for name in plain},
        "heads": list(place.heads),
        "grid": record.grid(number),
        "queries": queries,
        "keys": keys,
        "values": record.value_norms(number) is not None,
        "gradient": record.gradients(number) is not None,
        **_tell_visible(record, number),
    }


def _tell_visible(record: Record, number: int) -> dict[str, Any]:
    """How many keys each query may attend to, and how many queries may attend to each key.

    null if they follow from the shape and the causal flag, so that the page can compute them.
    """
    place = record.places[number]
    T, S = place.n_queries, place.n_keys
    known = np.full(T, S), np.full(S, T)
    if place.causal:
        known = np.clip(np.arange(T) + S - T + 1, 0, S), np.clip(S - np.arange(S), 0, T)
    seen_by = record.statistics(number).get("seen_by")
    told = record.visible(number), known[1] if seen_by is None else np.max(seen_by, axis=0)
    names = ("visible", "seen_by")
    return {
        name: None if np.array_equal(there, rule) else np.asarray(there).astype(int).tolist()
        for name, there, rule in zip(names, told, known, strict=True)
    }


def _both_sides(record: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    """The token fields of the target and of the source side."""
    tokens = _words(record.tokens, record.text, record.spans)
    if record.source_tokens is None:
        return tokens, _words(None, "", None)
    text = record.source_text or ""
    spans = find_spans(text, record.source_tokens)
    return tokens, _words(record.source_tokens, text, spans)


def label_sides(record: Record, number: int) -> tuple[list[str] | None, list[str] | None]:
    """The token labels of a place's queries and keys; None where they are positions."""
    target, source = (side["tokens"] for side in _both_sides(record))
    known = {"target": target, "source": source, "positions": None}
    queries, keys = sides_of(record, number)
    return known[queries], known[keys]


def sides_of(record: Record, number: int) -> tuple[str, str]:
    """Which tokens label queries and keys: "target", "source", or none of them ("positions")."""
    place = record.places[number]
    queries = "source" if reads_source(record, number) else "target"
    keys = "source" if place.kind == "cross" else queries
    known = {"target": len(record.tokens), "source": len(record.source_tokens or ())}
    return (
        queries if known[queries] == place.n_queries else "positions",
        keys if known[keys] == place.n_keys else "positions",
    )


def _alignment(record: Record) -> tuple[int, int] | None:
    """The place and head of the firmest alignment of target and source, which a page opens on."""
    weights = sum(
        place.n_heads * place.n_queries * place.n_keys
        for number, place in enumerate(record.places)
        if sides_of(record, number) == ("target", "source")
    )
    found = find_alignment(record) if 0 < weights <= MOST_ALIGNED else None
    return None if found is None else (found.place, found.head)


def finite(value: float) -> float | None:
    """Round to the digits of a float32; None (JSON's null) if the number is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _words(
    tokens: Sequence[str] | None, text: str, spans: Sequence[tuple[int, int]] | None
) -> dict[str, Any]:
    """The tokens of one side, and the pieces of text that they stand for, if known."""
    if tokens is None:
        return {"tokens": None, "pieces": None, "joined": []}
    labels = _labels(tokens)
    pieces = make_pieces(text, spans, len(labels))
    if pieces is None:
        return {"tokens": labels, "pieces": None, "joined": []}
    return {"tokens": pieces.name(labels), "pieces": pieces.texts, "joined": pieces.joined}


def _labels(tokens: Sequence[str]) -> list[str]:
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise BadView(f"the record has {len(tokens)} tokens; a page shows 1 to {MAX_TOKENS:,}")
    return [cut(token, LABEL_LENGTH) for token in tokens]
