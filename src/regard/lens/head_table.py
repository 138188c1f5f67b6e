"""What the heads of a model do over many texts: mean and spread for each head and score.

How: `Moments` are the count, the mean and the sum of squared deviations of each number, in float64.
Two of them are merged by Chan's formulas, so texts can be added block by block, in any number of
processes, without keeping any. Each text counts once, whatever its length; a text without a score
(NaN) does not count for it. The result is a `HeadTable`: a row for each head and score, written as
.csv, .json or .parquet for other programs; as .regard, which opens here again; or as a page.

A .regard file of a table has the layout of a record's (`format.py`). Its description: table (the
version, 1), model, texts, empty, truncated, scores, and heads, each as the name of its place, its
layer and its number. Its arrays, (N, K): count, mean and squares.

Letters: N heads of all places, K scores.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from regard._files import replace_file
from regard.lens import format as files
from regard.lens.lazy_weights import Array
from regard.lens.record import SCORES
from regard.lens.schema import MAX_LABEL, MAX_PLACES, Is, check, listed, one_of, refuse, text, whole
from regard.lens.token_labels import clean_label
from regard.lens.viewers import VIEWERS

ENDINGS = (".parquet", ".csv", ".json", ".regard")
SURVEYED = (*SCORES, "links")
"""The scores of a survey: those of `Record.heads`, and how strongly a head links words."""
VERSION = 1
MOST_TEXTS = 1 << 53
MOST_HEADS = 1 << 18


@dataclass(frozen=True, eq=False)
class Moments:
    """Counts, means and sums of squared deviations from the mean, each (N, K)."""

    count: Array
    mean: Array
    squares: Array

    @staticmethod
    def of(values_xnk: Array) -> Moments:
        """The moments of numbers along the first axis; NaN does not count."""
        there = ~np.isnan(values_xnk)
        count = there.sum(0)
        total = np.where(there, values_xnk, 0.0).sum(0, dtype=np.float64)
        mean = total / np.maximum(count, 1)
        squares = np.where(there, values_xnk - mean, 0.0) ** 2
        return Moments(count, mean, squares.sum(0))

    def merge(self, other: Moments) -> Moments:
        count = self.count + other.count
        n = np.maximum(count, 1)
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / n)
        squares = self.squares + other.squares + gap**2 * (self.count * other.count / n)
        return Moments(count, mean, squares)

    def to_arrays(self) -> dict[str, Array]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array], shape: tuple[int, int]) -> Moments:
        """Validate and read the moments in a file, which is not trusted."""
        if set(arrays) != {"count", "mean", "squares"}:
            refuse("it holds other arrays than count, mean and squares")
        count, mean, squares = (np.array(arrays[name]) for name in ("count", "mean", "squares"))
        if not count.shape == mean.shape == squares.shape == shape:
            refuse(f"its arrays must have the shape {shape}, a row a head and a column a score")
        if count.dtype != np.int64 or mean.dtype != np.float64 or squares.dtype != np.float64:
            refuse("counts must be whole numbers, and the others of double precision")
        if not (np.isfinite(mean).all() and np.isfinite(squares).all()):
            refuse("its numbers are not finite")
        if count.min() < 0 or count.max() > MOST_TEXTS or squares.min() < 0:
            refuse("counts and squares cannot be below 0")
        return Moments(count, mean, squares)

    @property
    def spread(self) -> Array:
        """The standard deviation over texts; NaN with fewer than two."""
        least = np.maximum(self.count - 1, 1)
        return np.where(self.count > 1, np.sqrt(self.squares / least), np.nan)


class Head(NamedTuple):
    """A head: the dotted name of its place, its layer, and its number there."""

    place: str
    layer: int
    head: int


def label_layers(heads: Sequence[Head]) -> list[str]:
    """The layer label of each head: its number, or its place's name where numbers are ambiguous."""
    layers = {(head.place, head.layer) for head in heads}
    plain = len({layer for _, layer in layers}) == len(layers)
    return [str(head.layer) if plain else head.place for head in heads]


class Row(NamedTuple):
    """One head and one score: mean and standard deviation over the texts that had it."""

    place: str
    layer: int
    head: int
    score: str
    mean: float
    std: float
    texts: int


@final
@dataclass(frozen=True, eq=False)
class HeadTable:
    """The result of a survey; `means`, `stds` and `counts` are (heads, len(scores))."""

    model: str
    heads: Sequence[Head]
    moments: Moments
    n_texts: int
    n_empty: int
    n_truncated: int

    scores = SURVEYED

    @staticmethod
    def open(path: str | os.PathLike[str]) -> HeadTable:
        """Read a .regard file; `BadRecord` says what is wrong with it."""
        about, arrays = files.read(path)
        check(about, "the description", ABOUT)
        if tuple(about["scores"]) != SURVEYED:
            refuse(f"its scores are {about['scores']}; expected {list(SURVEYED)}")
        heads = [Head(*head) for head in about["heads"]]
        if len(set(heads)) < len(heads):
            refuse("it names a head twice")
        moments = Moments.from_arrays(arrays, (len(heads), len(SURVEYED)))
        counts = about["texts"], about["empty"], about["truncated"]
        return HeadTable(about["model"], heads, moments, *counts)

    @property
    def means(self) -> Array:
        """NaN where no text had such a score."""
        return np.where(self.moments.count > 0, self.moments.mean, np.nan)

    @property
    def stds(self) -> Array:
        return self.moments.spread

    @property
    def counts(self) -> Array:
        return self.moments.count

    def top(self, score: str, n: int = 5) -> list[Row]:
        """The n heads with the highest mean of a score; for "local", a distance, the lowest."""
        if score not in SURVEYED:
            raise ValueError(f"score is {score!r}; expected one of {', '.join(SURVEYED)}")
        rows = [row for row in self.rows() if row.score == score and row.texts]
        rows.sort(key=lambda row: row.mean if score == "local" else -row.mean)
        return rows[:n]

    def rows(self) -> list[Row]:
        means, stds, counts = self.means, self.stds, self.counts
        return [
            Row(*head, score, float(means[n, k]), float(stds[n, k]), int(counts[n, k]))
            for n, head in enumerate(self.heads)
            for k, score in enumerate(SURVEYED)
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all, in the form that its ending names."""
        path = Path(path)
        check_table_path(path)
        if path.suffix.lower() == ".regard":
            return self._regard(path)
        write = {".csv": self._csv, ".json": self._json, ".parquet": self._parquet}
        data = write[path.suffix.lower()]()
        with replace_file(path) as file:
            file.write(data)

    def html(self, path: str | os.PathLike[str]) -> Any:
        """Write a page that opens offline, by `regard.view.write_heads`."""
        return VIEWERS["write_heads"](path, self)

    def _regard(self, path: Path) -> None:
        heads = [[clean_label(head.place), head.layer, head.head] for head in self.heads]
        said = {"model": clean_label(self.model), "scores": list(SURVEYED), "heads": heads}
        about = {"table": VERSION, **self._about(), **said}
        files.write(path, about, self.moments.to_arrays())

    def _about(self) -> dict[str, Any]:
        counts = {"texts": self.n_texts, "empty": self.n_empty, "truncated": self.n_truncated}
        return {"model": self.model, **counts}

    def _csv(self) -> bytes:
        page = io.StringIO()
        table = csv.writer(page, lineterminator="\n")
        table.writerow(Row._fields)
        for row in self.rows():
            table.writerow("" if _is_nan(value) else value for value in row)
        return page.getvalue().encode()

    def _json(self) -> bytes:
        rows = [
            {name: None if _is_nan(value) else value for name, value in row._asdict().items()}
            for row in self.rows()
        ]
        return json.dumps({**self._about(), "heads": rows}, ensure_ascii=False).encode()

    def _parquet(self) -> bytes:
        arrow: Any = importlib.import_module("pyarrow")
        columns = dict(zip(Row._fields, zip(*self.rows(), strict=True), strict=True))
        about = {"regard": json.dumps(self._about(), ensure_ascii=False)}
        table = arrow.table({name: list(values) for name, values in columns.items()})
        sink = io.BytesIO()
        parquet: Any = importlib.import_module("pyarrow.parquet")
        parquet.write_table(table.replace_schema_metadata(about), sink)
        return sink.getvalue()


def is_head(x: Any) -> bool:
    kinds = text(MAX_LABEL), whole(0, MAX_PLACES), whole(0, MAX_PLACES)
    return (
        isinstance(x, list)
        and len(x) == 3
        and all(kind.fits(part) for kind, part in zip(kinds, x, strict=True))
    )


ABOUT = {
    "table": one_of(VERSION),
    "model": text(MAX_LABEL),
    **{name: whole(0, MOST_TEXTS) for name in ("texts", "empty", "truncated")},
    "scores": listed(text(MAX_LABEL), 1, 99),
    "heads": listed(Is(is_head, "a place, its layer and a number"), 1, MOST_HEADS),
}


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a .regard file holds a table; raises `BadRecord` if it is no such file at all."""
    return "table" in files.read(path)[0]


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def check_table_path(path: Path) -> None:
    """Refuse a path that could not be written at the end, before any work is done."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(
            f"the table is to go to {path.name!r}; expected a name that ends in "
            f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        )
    if path.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ModuleNotFoundError(
            "a .parquet file is written by pyarrow, which is not installed: "
            "pip install 'regard[survey]', or name a .csv or .json file",
            name="pyarrow",
        )
