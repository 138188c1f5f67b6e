"""What a page must know before it draws anything: words, places, and what the heads do.

An outline is one JSON object, the same behind all three doors (file, server, widget). It is read
from the record once, and everything in it is checked here, because a record may be a stranger's
file: counts have ceilings, labels are cut, scores have the shape they claim. Numbers that are not
finite become null, which the page shows as "not measured".

Left out: weights. Those are asked for piece by piece (see answers.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from regard.lens.lazy_weights import BadRecord
from regard.lens.record import Record
from regard.lens.word_links import find_alignment

FORMAT = 1
MAX_PLACES = 4096
MAX_HEADS = 4096
MAX_TOKENS = 4_000_000
LABEL_LENGTH = 80  # characters of a token that a page is given
NAME_LENGTH = 200
KINDS = ("self", "cross")
MOST_ALIGNED = 30_000_000  # weights of all cross-attention heads, to choose the first view by
COARSE = (512, 256, 128, 64, 32)  # cells on a side that a record's only picture may have


class BadView(ValueError):
    """A record that cannot be shown, or a question that no record answers; says which and why."""


class PlaceLike(Protocol):
    """One place where attention happened, as the view sees it."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_queries(self) -> int: ...
    @property
    def n_keys(self) -> int: ...
    @property
    def causal(self) -> bool: ...


class RecordLike(Protocol):
    """What the view asks of a record; `regard.lens.Record` is one."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> Sequence[str]: ...
    @property
    def model(self) -> str: ...
    @property
    def created(self) -> str: ...
    @property
    def places(self) -> Sequence[Any]: ...
    def statistics(self, place: int) -> dict[str, Any]: ...
    def heads(self) -> dict[str, Any]: ...
    def map(
        self, place: int, head: int, window: tuple[int, int, int, int], size: tuple[int, int]
    ) -> Any: ...
    def rows(self, place: int, head: int, query: int) -> Any: ...
    def column(self, place: int, head: int, key: int) -> Any: ...


def outline(records: Sequence[RecordLike], door: str) -> dict[str, Any]:
    """The outline of one record, or of two that are compared."""
    if not 1 <= len(records) <= 2:
        raise BadView(f"a page shows one record or compares two; {len(records)} were given")
    return {
        "format": FORMAT,
        "door": door,
        "records": [_outline_record(record) for record in records],
    }


def _outline_record(record: RecordLike) -> dict[str, Any]:
    tokens = _labels(record.tokens, "tokens")
    source = getattr(record, "source_tokens", None)
    source_tokens = None if source is None else _labels(source, "source_tokens")
    places = list(record.places)
    if not 1 <= len(places) <= MAX_PLACES:
        raise BadView(f"the record has {len(places)} places; a page shows 1 to {MAX_PLACES}")
    rows = [_outline_place(number, place) for number, place in enumerate(places)]
    for number, row in enumerate(rows):
        row["grid"] = grid_of(record, number)
    sides = {"target": len(tokens), "source": len(source_tokens or ())}
    for row in rows:
        row["queries"], row["keys"] = _sides(row, sides)
    pieces = _pieces(record.text, getattr(record, "spans", None), len(tokens))
    source_pieces = None
    if source_tokens is not None:
        said = getattr(record, "source_text", None), getattr(record, "source_spans", None)
        source_pieces = _pieces(*said, len(source_tokens))
    return {
        "model": cut(_text(record.model, "model"), NAME_LENGTH),
        "created": cut(_text(record.created, "created"), NAME_LENGTH),
        "tokens": _read_as(tokens, pieces),
        "pieces": pieces,
        "source_tokens": None if source_tokens is None else _read_as(source_tokens, source_pieces),
        "source_pieces": source_pieces,
        "places": rows,
        "scores": _scores(record.heads(), rows),
        "alignment": _alignment(record, rows),
    }


def _outline_place(number: int, place: Any) -> dict[str, Any]:
    kind = place.kind
    if kind not in KINDS:
        raise BadView(f"place {number} has kind {cut(str(kind), 40)!r}; expected one of {KINDS}")
    return {
        "name": cut(_text(place.name, "a place's name"), NAME_LENGTH),
        "layer": _count(place.layer, "layer", number, 0, 1_000_000),
        "kind": kind,
        "n_heads": _count(place.n_heads, "n_heads", number, 1, MAX_HEADS),
        "n_queries": _count(place.n_queries, "n_queries", number, 1, MAX_TOKENS),
        "n_keys": _count(place.n_keys, "n_keys", number, 1, MAX_TOKENS),
        "causal": bool(place.causal),
        "heads": _head_numbers(place),
    }


def _head_numbers(place: Any) -> list[int]:
    """The numbers that the recorded heads have in the model."""
    numbers = [int(number) for number in getattr(place, "heads", ())]
    good = len(numbers) == place.n_heads and all(0 <= number < 1 << 20 for number in numbers)
    return numbers if good else list(range(place.n_heads))


def grid_of(record: RecordLike, number: int) -> tuple[int, int] | None:
    """How finely a place's map is known: (T, S), or the cells of its only picture, or not at all.

    A record of statistics answers for its picture's own size alone, so sizes are tried.
    """
    place = record.places[number]
    whole = (place.n_queries, place.n_keys)
    if getattr(place, "exact_zoom", True):
        return whole
    sizes = [whole] if max(whole) <= COARSE[0] else []
    sizes += [(min(whole[0], most), min(whole[1], most)) for most in COARSE]
    for size in sizes:
        try:
            record.map(number, 0, (0, whole[0], 0, whole[1]), size)
        except BadRecord:
            raise
        except ValueError:
            continue
        return size
    return None


def _alignment(record: RecordLike, places: list[dict[str, Any]]) -> tuple[int, int] | None:
    """The place and head that align target and source most firmly: where a page opens.

    None without cross-attention between the words that are known, or where it is too much of it.
    """
    crossed = [row for row in places if (row["queries"], row["keys"]) == ("target", "source")]
    weights = sum(row["n_heads"] * row["n_queries"] * row["n_keys"] for row in crossed)
    if not 0 < weights <= MOST_ALIGNED:
        return None
    found = find_alignment(cast(Record, record))
    return None if found is None else (found.place, found.head)


def _count(value: Any, what: str, number: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise BadView(f"place {number}: {what} is {type(value).__name__}; expected a whole number")
    if not low <= value <= high:
        raise BadView(f"place {number}: {what} is {value}; expected {low} to {high}")
    return int(value)


def _sides(place: dict[str, Any], sides: dict[str, int]) -> tuple[str, str]:
    """Whose words label the queries and the keys: the target's, the source's, or nobody's.

    In an encoder–decoder the encoder's places look from source to source. The name says so; where
    it does not, the lengths do.
    """
    if place["kind"] == "cross":
        wanted = ("target", "source")
    elif sides["source"] and _is_encoders(place, sides):
        wanted = ("source", "source")
    else:
        wanted = ("target", "target")
    lengths = (place["n_queries"], place["n_keys"])
    queries, keys = (
        side if sides[side] == length else "positions"
        for side, length in zip(wanted, lengths, strict=True)
    )
    return queries, keys


def _is_encoders(place: dict[str, Any], sides: dict[str, int]) -> bool:
    if place["n_keys"] != sides["source"]:
        return False
    words = place["name"].lower()
    return "decoder" not in words and ("encoder" in words or place["n_keys"] != sides["target"])


def _scores(scores: dict[str, Any], places: list[dict[str, Any]]) -> dict[str, Any]:
    """Each score as one list a place, of one number a head."""
    wanted = (len(places), max(place["n_heads"] for place in places))
    told: dict[str, Any] = {}
    if len(scores) > 64:
        raise BadView(f"the record has {len(scores)} scores of heads; a page shows at most 64")
    for name, values in scores.items():
        array = np.asarray(values)
        if array.shape != wanted or array.dtype.kind not in "fiu":
            raise BadView(
                f"score {cut(str(name), 40)!r} has shape {array.shape} and type {array.dtype}; "
                f"expected numbers of shape (places, heads) = {wanted}"
            )
        told[cut(str(name), 40)] = [
            [finite(float(value)) for value in row[: place["n_heads"]]]
            for row, place in zip(array, places, strict=True)
        ]
    return told


def finite(value: float) -> float | None:
    """The number with the digits that a float32 has, or None, which JSON can say."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _labels(tokens: Sequence[str], what: str) -> list[str]:
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise BadView(f"the record has {len(tokens)} {what}; a page shows 1 to {MAX_TOKENS}")
    return [cut(_text(token, f"one of the {what}"), LABEL_LENGTH) for token in tokens]


def _read_as(tokens: list[str], pieces: list[list[str]] | None) -> list[str]:
    """Labels as people write them: the text that a token stands for, where that is known."""
    if pieces is None:
        return tokens
    return [own if own.strip() else token for token, (_, own) in zip(tokens, pieces, strict=True)]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadView(f"{what} is {type(value).__name__}; expected text")
    return value


def cut(text: str, length: int) -> str:
    """The beginning of a text, with an ellipsis where something was left out."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _pieces(text: Any, spans: Any, count: int) -> list[list[str]] | None:
    """For each token the text since the token before it, and its own: what the text page shows.

    None where there are no spans, or where they do not lie in order inside the text; the labels
    are shown instead.
    """
    if spans is None or not isinstance(text, str) or len(spans) != count:
        return None
    pieces, done = [], 0
    for span in spans:
        start, end = (int(edge) for edge in span)
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


Floats = npt.NDArray[np.float32]
