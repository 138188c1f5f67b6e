"""Means of heads over texts: merged exactly, and written so that other programs read them."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_files import join, parts

from regard.lens.head_table import (
    SURVEYED,
    Head,
    HeadTable,
    Moments,
    check_table_path,
    is_table,
    label_layers,
)
from regard.lens.lazy_weights import BadRecord
from regard.lens.record import Record

K = len(SURVEYED)


def make_values() -> np.ndarray:
    drawn = np.random.default_rng(3)
    values = 1e6 + drawn.normal(size=(11, 2, K))  # a mean that is large beside the spread
    values[:, 1, 3] = np.nan
    values[4:, 0, 5] = np.nan
    return values


def make_table() -> HeadTable:
    values = make_values() - 1e6
    heads = [Head("layers.0.attn", 0, 0), Head("layers.0.attn", 0, 1)]
    return HeadTable("tiny, model", heads, Moments.of(values), 12, 1, 2)


def test_moments_are_count_mean_and_spread_and_merge_to_those_of_the_whole() -> None:
    values = make_values()
    whole = Moments.of(values)
    parts = [Moments.of(part) for part in (values[:4], values[4:5], values[5:5], values[5:])]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert np.array_equal(merged.count, (~np.isnan(values)).sum(0))
    there = merged.count > 0
    np.testing.assert_allclose(merged.mean[there], np.nanmean(values[:, there], 0), rtol=1e-15)
    spread = np.nanstd(values[:, there], 0, ddof=1)
    np.testing.assert_allclose(merged.spread[there], spread, rtol=1e-9)
    np.testing.assert_allclose(whole.spread[there], spread, rtol=1e-9)
    assert not there[1, 3] and np.isnan(merged.spread[1, 3]) and merged.mean[1, 3] == 0
    empty = Moments.of(values[:0])
    for both in (whole.merge(empty), empty.merge(whole)):
        assert np.array_equal(both.mean, whole.mean)
        assert np.array_equal(both.squares, whole.squares)


def test_the_top_heads_have_most_of_a_score_and_of_distance_least() -> None:
    table = make_table()
    means = table.means
    for score, sign in (("previous", -1), ("local", 1)):
        k = SURVEYED.index(score)
        order = np.argsort(sign * means[:, k])
        assert [row.head for row in table.top(score)] == order.tolist()
        assert [row.head for row in table.top(score, 1)] == order[:1].tolist()
    [only] = table.top("induction")  # the other head had none in any text
    assert (only.head, only.texts, only.mean) == (0, 11, means[0, 3])
    with pytest.raises(ValueError, match="score is 'gaze'; expected one of previous, next"):
        table.top("gaze")


def test_csv_and_json_hold_every_number_and_nothing_where_there_is_none(tmp_path: Path) -> None:
    table = make_table()
    for name in ("heads.csv", "heads.json"):
        table.save(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"heads.csv", "heads.json"}
    whole = json.loads((tmp_path / "heads.json").read_bytes())
    about = {"model": "tiny, model", "texts": 12, "empty": 1, "truncated": 2}
    assert {name: whole[name] for name in about} == about
    with (tmp_path / "heads.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(whole["heads"]) == 2 * K
    for row, in_csv, in_json in zip(table.rows(), written, whole["heads"], strict=True):
        assert in_json["mean"] == (None if np.isnan(row.mean) else row.mean)
        assert in_csv["mean"] == ("" if np.isnan(row.mean) else repr(row.mean))
        assert (int(in_csv["texts"]), in_csv["score"]) == (row.texts, row.score)
    assert written[K + 3]["std"] == "" and whole["heads"][K + 3]["std"] is None


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = make_table()
    table.save(tmp_path / "heads.parquet")
    found = parquet.read_table(tmp_path / "heads.parquet")
    rows = [row._asdict() for row in table.rows()]
    for name in rows[0]:
        np.testing.assert_array_equal(found[name].to_pylist(), [row[name] for row in rows])
    assert json.loads(found.schema.metadata[b"regard"])["texts"] == 12


def test_a_regard_file_opens_again_with_every_bit(tmp_path: Path) -> None:
    table, path = make_table(), tmp_path / "heads.regard"
    table.save(path)
    again = HeadTable.open(path)
    for name in ("count", "mean", "squares"):
        one, other = getattr(table.moments, name), getattr(again.moments, name)
        assert one.dtype == other.dtype and np.array_equal(one, other)
    for name in ("model", "heads", "n_texts", "n_empty", "n_truncated"):
        assert getattr(table, name) == getattr(again, name)
    assert is_table(path)
    with pytest.raises(BadRecord, match="lacks something, or has more"):
        Record.open(path)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version": lambda told: told.update(table=2),
    "other scores": lambda told: told.update(scores=["gaze"]),
    "no heads": lambda told: told.update(heads=[]),
    "a head twice": lambda told: told["heads"].__setitem__(1, told["heads"][0]),
    "more heads": lambda told: told["heads"].append(["x", 1, 1]),
    "a head that is none": lambda told: told["heads"].__setitem__(1, ["x", 0]),
    "a head below 0": lambda told: told["heads"].__setitem__(1, ["x", 0, -1]),
    "texts that are none": lambda told: told.update(texts="many"),
    "more than belongs there": lambda told: told.update(more=1),
}
NUMBERS = {"mean": np.nan, "squares": -1.0, "count": -1}


@pytest.mark.parametrize("name", [*WRONG, *NUMBERS])
def test_a_strangers_table_is_not_believed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "heads.regard"
    make_table().save(path)
    header, told, arrays = parts(path.read_bytes())
    if name in WRONG:
        WRONG[name](told)
    else:
        first, _ = header[name]["data_offsets"]
        kind = np.int64 if name == "count" else np.float64
        arrays = arrays[:first] + np.array(NUMBERS[name], kind).tobytes() + arrays[first + 8 :]
    path.write_bytes(join(header, told, arrays))
    with pytest.raises(BadRecord):
        HeadTable.open(path)


def test_layers_are_numbers_where_no_two_are_alike() -> None:
    heads = [Head("encoder.0", 0, 0), Head("encoder.1", 1, 0)]
    assert label_layers(heads) == ["0", "1"]
    alike = [*heads, Head("decoder.0", 0, 0)]
    assert label_layers(alike) == ["encoder.0", "encoder.1", "decoder.0"]


def test_what_could_not_be_written_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"'heads.xlsx'; expected a name that ends in .parquet, "):
        check_table_path(Path("heads.xlsx"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'regard\[survey\]', or name a .cs"):
        check_table_path(Path("heads.parquet"))
    check_table_path(Path("heads.csv"))
