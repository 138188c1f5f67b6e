"""One HTML file that shows a record offline: manifest, small maps, and as many weights as fit.

Until the byte budget is used up, a page gets: the manifest; what every key receives, and what was
recorded beside weights; a small pooled map of every head, unless all weights fit; the whole matrix
of each head, the most telling heads first; for the other heads each query's largest weights; and
the rollout. From a whole matrix the page computes every tile, row and column itself. If a matrix
did not fit, the page says which part needs `regard view`.

If the matrices take too many bytes as float32, a file has them rounded, to the finest of `LEVELS`
at which all of them fit, or to the coarsest, and its small maps in float16. The page and the
command state the largest rounding error.

Left out: fetching anything. The page's content security policy forbids network access.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from regard._files import replace_file
from regard.lens.head_names import short_model_name
from regard.lens.record import Record
from regard.view.assets import inline_json, whole_page
from regard.view.manifest import SMALL_CELLS, make_manifest, rollout_places
from regard.view.packing import HALF, LEVELS, find_bound, pack, tell_bound
from regard.view.pieces import cut
from regard.view.queries import BadView, Floats, answer, whole_level

BUDGET = 9_700_000  # bytes of data in a page; the bundle comes on top
MOST_CELLS = 1 << 24  # of a matrix that a page contains whole
_SAMPLED = 16  # heads, at most, that are packed in part to estimate the bytes of all heads
_SAMPLED_ROWS = 64  # rows of each of these heads
_MARGIN = 0.93  # the share of the remaining bytes that an estimate may use
_SMALLER = (
    SMALL_CELLS,
    100,
    64,
    50,
    32,
)  # cells on a side of the overview's maps: the first that fits is used
_SHARE = 0.55  # the most of the remaining budget that small maps may use; half of it for sums
_TOP_SHARE = 0.3  # of the rest, kept for the largest weights of heads whose matrix does not fit
_Head = tuple[int, int, int]  # record, place, head
_ROLLED = 1 << 26  # the most weights of all layers for which the whole rollout is computed
_TELLING = ("previous", "next", "same", "induction")  # without scores of sinks, which tell little


def make_page(record: Record, other: Record | None = None, *, budget: int = BUDGET) -> str:
    """Build the page as a string of HTML; the arguments are those of `write_page`."""
    records = [record] if other is None else [record, other]
    return whole_page(page_title(record), make_data(records, "static", budget))


def write_page(
    path: str | os.PathLike[str],
    record: Record,
    other: Record | None = None,
    *,
    budget: int = BUDGET,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """Write a page that opens offline, atomically, and return its path.

    Args:
        path: The file.
        record: What it shows.
        other: A second record, to compare with.
        budget: The most bytes of weights in it; what does not fit is rounded, or left out.
        tell: Called with a sentence that says what was rounded or left out.
    """
    records = [record] if other is None else [record, other]
    data = make_data(records, "static", budget)
    text = whole_page(page_title(record), data)
    out = Path(os.fsdecode(path))
    with replace_file(out) as file:
        file.write(text.encode())
    notes = [_tell_missing(records, data["parts"]), tell_bound(data["bound"])]
    if tell is not None and any(notes):
        tell("; ".join(note for note in notes if note))
    return out


def _tell_missing(records: Sequence[Record], parts: Mapping[str, str]) -> str:
    """State in a sentence which weights did not fit; "" if all did."""
    heads = [
        f"{which}/{number}/{head}"
        for which, record in enumerate(records)
        for number, place in enumerate(record.places)
        if record.has_weights(number)
        for head in range(place.n_heads)
    ]
    whole = sum(f"whole/{head}" in parts for head in heads)
    top = sum(f"top/{head}" in parts for head in heads)
    if whole == len(heads):
        return ""
    rest = f", of {top:,} others each word's largest" if top else ""
    return (
        f"the file has every weight of {whole:,} of {len(heads):,} heads{rest}; "
        "`regard view` shows all of a saved record"
    )


def page_title(record: Record) -> str:
    """The beginning of the text, with lone surrogates, which UTF-8 cannot encode, replaced by ?."""
    title = cut(
        f"{' '.join(record.text[:200].split()) or short_model_name(record.model)} · regard", 80
    )
    return title.encode("utf-8", "replace").decode()


def make_data(records: Sequence[Record], host: str, budget: int) -> dict[str, Any]:
    manifest = make_manifest(records, host)
    parts = _Parts(budget - len(inline_json(manifest)))
    if parts.left < 0:
        raise BadView(
            f"the words and places of this record alone need {budget - parts.left:,} bytes and "
            f"the page's budget is {budget:,}; raise the budget, or use `regard view`"
        )
    order = _most_telling(records, [each["findings"] for each in manifest["records"]])
    _put_sums(parts, records)
    _put_extras(parts, records)
    # A widget has no rounded weights: it requests what is missing from the kernel.
    rounds = host == "static"
    levels, fits = _choose_levels(records, order, parts.left, LEVELS if rounds else ())
    # A page with all weights computes its small maps itself.
    small = SMALL_CELLS if fits else _put_small(parts, records, HALF if rounds else None)
    parts.reserve(0.0 if fits else _TOP_SHARE)
    for each in order:
        if not _put_whole(parts, records, each, levels):
            break
    parts.reserve(0.0)
    for which, place, head in order:
        name = f"{which}/{place}/{head}"
        if f"whole/{name}" not in parts.held and "top_keys" in records[which].statistics(place):
            parts.put(f"top/{name}", pack(answer(records, f"top/{name}")))
    _put_rollouts(parts, records)
    more = {"small": small, "parts": parts.held, "budget": budget, "bound": find_bound(parts.held)}
    return {**manifest, **more}


def _choose_levels(
    records: Sequence[Record], order: Sequence[_Head], budget: int, levels: Sequence[int]
) -> tuple[int | None, bool]:
    """Choose the finest rounding at which all matrices fit, else the coarsest; and say if they fit.

    The size of packed matrices is estimated from some rows of some heads.
    """
    cells = [math.prod(records[which].grid(place) or (0,)) for which, place, _ in order]
    if max(cells) > MOST_CELLS:
        return (levels[-1] if levels else None), False
    strips = [
        _strip(records[which], place, head)
        for which, place, head in order[:: -(-len(order) // _SAMPLED)]
    ]
    choices = (None, *levels)
    for choice in choices:
        packed = sum(len(pack(strip, choice)) for strip in strips)
        if packed * sum(cells) <= _MARGIN * budget * sum(strip.size for strip in strips):
            return choice, True
    return choices[-1], False


def _strip(record: Record, place: int, head: int) -> Floats:
    """Rows from the middle of a head's matrix, which see the average number of keys if causal."""
    here, grid = record.places[place], record.grid(place)
    if grid is None or not record.has_weights(place):
        return _matrix(record, place, head)
    rows = min(_SAMPLED_ROWS, here.n_queries)
    first = (here.n_queries - rows) // 2
    return record.map(place, head, (first, first + rows, 0, here.n_keys), (rows, here.n_keys))


def _matrix(record: Record, place: int, head: int) -> Floats:
    """Every weight of a head, or the pooled map if only that was kept."""
    here, grid = record.places[place], record.grid(place)
    if grid is None:
        return np.zeros((0, 0), np.float32)
    return record.map(place, head, (0, here.n_queries, 0, here.n_keys), grid)


@final
class _Parts:
    def __init__(self, budget: int) -> None:
        self.held: dict[str, str] = {}
        self.left = budget
        self._reserved = 0

    def reserve(self, share: float) -> None:
        self.left += self._reserved
        self._reserved = int(max(0, self.left) * share)
        self.left -= self._reserved

    def put(self, name: str, packed: str) -> bool:
        cost = len(packed) + len(name) + 6
        if cost > self.left:
            return False
        self.held[name] = packed
        self.left -= cost
        return True


def _put_small(parts: _Parts, records: Sequence[Record], levels: int | None) -> int:
    """Put in a small map of every whole head; return the most cells that it has on a side."""
    everywhere = [
        (which, number, grid)
        for which, record in enumerate(records)
        for number in range(len(record.places))
        if (grid := record.grid(number)) is not None
    ]
    for cells in _SMALLER:
        tiles = []
        cost = 0.0
        for which, number, grid in everywhere:
            place = records[which].places[number]
            lt, ls = (whole_level(length, cells) for length in grid)
            tiles += [f"map/{which}/{number}/{h}/{lt}/{ls}/0/0" for h in range(place.n_heads)]
            cost += place.n_heads * _cost(-(-grid[0] >> lt), -(-grid[1] >> ls), place.causal)
        if cost * (0.5 if levels == HALF else 1.0) <= parts.left * _SHARE:
            for tile in tiles:
                parts.put(tile, pack(answer(records, tile), levels))
            return cells
    return _SMALLER[-1]


def _put_sums(parts: _Parts, records: Sequence[Record]) -> None:
    """Put in what each key receives, if that takes a small part of the budget."""
    places = [
        (which, number, place)
        for which, record in enumerate(records)
        for number, place in enumerate(record.places)
    ]
    if sum(place.n_heads * place.n_keys * 6 for _, _, place in places) > parts.left * _SHARE / 2:
        return
    for which, number, place in places:
        if "received" in records[which].statistics(number):
            for head in range(place.n_heads):
                name = f"received/{which}/{number}/{head}"
                parts.put(name, pack(answer(records, name)))


def _put_extras(parts: _Parts, records: Sequence[Record]) -> None:
    """Put in what was recorded beside weights: a number for each token of a text, or of a head."""
    for which, record in enumerate(records):
        if record.next_tokens() is not None:
            for kind in ("given", "next"):
                parts.put(f"{kind}/{which}", pack(answer(records, f"{kind}/{which}")))
        for number, place in enumerate(record.places):
            kinds = ["norms"] if record.value_norms(number) is not None else []
            kinds += (
                [] if record.gradients(number) is None else ["gradient_rows", "gradient_columns"]
            )
            for kind in kinds:
                for head in range(place.n_heads):
                    name = f"{kind}/{which}/{number}/{head}"
                    parts.put(name, pack(answer(records, name)))


def _put_rollouts(parts: _Parts, records: Sequence[Record]) -> None:
    """Put in the whole matrix of the rollout, if it fits."""
    for which, record in enumerate(records):
        stack = rollout_places(record)
        weights = sum(record.places[n].n_heads * record.places[n].n_keys ** 2 for n in stack)
        if 0 < weights <= _ROLLED:
            parts.put(f"whole_rollout/{which}", pack(record.rollout()))


def _most_telling(
    records: Sequence[Record], findings: Sequence[list[dict[str, Any]]]
) -> list[_Head]:
    """Order all heads as (record, place, head): cross-attention, heads of findings, then others."""
    ranked = []
    for which, record in enumerate(records):
        lines = (line for section in findings[which] for line in section["lines"])
        named = {
            tuple(at[:2]) for line in lines if line["query"] is not None for at in line["heads"]
        }
        scores = record.heads()
        # A score that a place does not have is NaN, which fmax ignores.
        best = np.fmax.reduce([scores[name] for name in _TELLING])
        for number, place in enumerate(record.places):
            for head in range(place.n_heads):
                # Cross-attention first: such heads are few, and the alignment needs all of them.
                value = -1.0 if np.isnan(best[number, head]) else best[number, head]
                first = place.kind != "cross", (number, head) not in named, -value
                ranked.append((*first, which, number, head))
    return [(which, number, head) for *_, which, number, head in sorted(ranked)]


def _cost(height: int, width: int, causal: bool) -> float:
    """Estimate the bytes of a head's packed map: base64 adds to it, causal zeros compress."""
    return 4 * height * width * 1.25 * (0.5 if causal else 1.0)


def _put_whole(
    parts: _Parts, records: Sequence[Record], which_head: _Head, levels: int | None
) -> bool:
    """Put in the matrix of one head unless it is too large; return False if no bytes are left."""
    which, place, head = which_head
    record = records[which]
    if math.prod(record.grid(place) or (0,)) not in range(1, MOST_CELLS + 1):
        return True
    matrix = _matrix(record, place, head)
    packed = pack(matrix, levels if record.has_weights(place) else None)
    return parts.put(f"whole/{which}/{place}/{head}", packed)
