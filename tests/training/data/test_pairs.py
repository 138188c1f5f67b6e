"""Pairs: each once an epoch, in batches of about one length, from seed and step alone."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.training.data import pairs as pairs_module
from regard.training.data.packing import NOTHING
from regard.training.data.pairs import PairBatch, PairedText
from regard.training.data.reading import BadData
from regard.training.data.store import TokenFile, write_tokens

V = 101
ROLES: dict[str, Any] = {"bos": 1, "eos": 2, "pad": 0, "seed": 7}


@pytest.fixture(autouse=True)
def odd_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples of five, which no length is by chance."""
    monkeypatch.setattr(pairs_module, "MULTIPLE", 5)


def make_side(folder: Path, name: str, lengths: list[int]) -> tuple[TokenFile, list[list[int]]]:
    rng = np.random.default_rng(len(name))
    rows = [rng.integers(3, V, size).tolist() for size in lengths]
    return write_tokens(folder / name, rows, vocab_size=V, fingerprint=""), rows


def make(
    folder: Path, count: int = 397, **more: Any
) -> tuple[PairedText, list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 30, count)
    lengths[::97] = 51
    other = np.maximum(0, lengths + rng.integers(-3, 4, count))
    sources, source_rows = make_side(folder, "a", lengths.tolist())
    targets, target_rows = make_side(folder, "bc", other.tolist())
    options = {"max_tokens": 211, **ROLES, **more}
    return PairedText(sources, targets, **options), source_rows, target_rows


def same(one: PairBatch, other: PairBatch) -> bool:
    names = ("source", "source_real", "target_in", "target_out", "target_real")
    equal = all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    return equal and one.rows == other.rows


def check_by_hand(batch: PairBatch, sources: list[list[int]], targets: list[list[int]]) -> None:
    assert batch.source.dtype == batch.target_in.dtype == batch.target_out.dtype == torch.int64
    wide, long = batch.source.shape[1], batch.target_in.shape[1]
    for row, number in enumerate(batch.rows):
        source, target = sources[number], targets[number]
        gap, rest = wide - len(source) - 1, long - len(target) - 1
        assert batch.source[row].tolist() == [*source, 2, *[0] * gap]
        assert batch.source_real[row].tolist() == [True] * (len(source) + 1) + [False] * gap
        assert batch.target_in[row].tolist() == [1, *target, *[0] * rest]
        assert batch.target_out[row].tolist() == [*target, 2, *[NOTHING] * rest]
        assert batch.target_real[row].tolist() == [True] * (len(target) + 1) + [False] * rest


def test_every_pair_is_seen_once_an_epoch_and_is_right(tmp_path: Path) -> None:
    made, sources, targets = make(tmp_path)
    orders = set()
    for epoch in range(3):
        steps = range(epoch * made.n_batches, (epoch + 1) * made.n_batches)
        batches = [made.batch(step) for step in steps]
        for batch in batches:
            check_by_hand(batch, sources, targets)
        seen = Counter(row for batch in batches for row in batch.rows)
        assert seen == Counter(range(397))
        orders.add(tuple(row for batch in batches for row in batch.rows))
    assert len(orders) == 3


def test_batches_keep_to_their_size_and_are_of_about_one_length(tmp_path: Path) -> None:
    made, sources, targets = make(tmp_path)
    shapes, shares, sizes = set(), [], []
    for step in range(made.n_batches):
        batch = made.batch(step)
        rows, width = batch.source.shape
        assert rows * width <= 211 and width % 5 == 0
        assert batch.target_in.shape == batch.target_out.shape == (rows, width)
        longest = max(max(len(sources[row]), len(targets[row])) + 1 for row in batch.rows)
        assert longest <= width
        shapes.add(width)
        shares.append(batch.source_real.double().mean())
        sizes.append(rows * width)
    assert len(shapes) <= 8
    # At random these pairs would fill less than half: each batch would be as wide as its longest.
    assert sum(shares) / len(shares) > 0.7
    assert min(sizes) > 0.4 * 211


def test_a_pair_moves_to_other_companions_in_the_next_epoch(tmp_path: Path) -> None:
    made, _, _ = make(tmp_path)
    first, second = (
        {frozenset(made.batch(step).rows) for step in range(start, start + made.n_batches)}
        for start in (0, made.n_batches)
    )
    assert len(first & second) < 0.2 * len(first)
    widths = [
        [made.batch(step).source.shape[1] for step in range(start, start + made.n_batches)]
        for start in (0, made.n_batches)
    ]
    assert widths[0] != widths[1] and sorted(widths[0]) == sorted(widths[1]) != widths[0]


def test_a_batch_is_the_same_whenever_and_wherever_it_is_asked(tmp_path: Path) -> None:
    made, _, _ = make(tmp_path)
    count = 2 * made.n_batches + 3
    first = [made.batch(step) for step in range(count)]
    for step in np.random.default_rng(1).permutation(count).tolist():
        assert same(first[step], made.batch(step))
    again, _, _ = make(tmp_path)
    assert same(first[count - 1], again.batch(count - 1))
    other, _, _ = make(tmp_path, seed=8)
    assert not all(same(first[step], other.batch(step)) for step in range(3))


@pytest.mark.parametrize("limit", [None, 60, 499])
def test_in_order_gives_every_pair_once_the_longest_first(
    tmp_path: Path, limit: int | None
) -> None:
    made, sources, targets = make(tmp_path)
    seen: list[int] = []
    longest = 10**9
    for batch in made.in_order() if limit is None else made.in_order(limit):
        check_by_hand(batch, sources, targets)
        seen += batch.rows
        width = max(batch.source.shape[1], batch.target_in.shape[1])
        assert width <= longest and len(batch.rows) * width <= (limit or 211)
        longest = width
    assert sorted(seen) == list(range(397))


def test_a_bucket_deals_its_pairs_evenly(tmp_path: Path) -> None:
    side, _ = make_side(tmp_path, "a", [4] * 11)
    made = PairedText(side, side, max_tokens=50, **ROLES)
    assert sorted(len(made.batch(step).rows) for step in range(made.n_batches)) == [5, 6]


def test_rare_lengths_share_a_bucket(tmp_path: Path) -> None:
    side, _ = make_side(tmp_path, "a", [4] * 40 + [49, 39, 29])
    made = PairedText(side, side, max_tokens=200, **ROLES)
    shapes = [tuple(made.batch(step).source.shape) for step in range(made.n_batches)]
    # The three long ones do not fill the 4 rows of width 50, so one of the next shorter joins them.
    assert sorted(shapes) == [(4, 50), (39, 5)]


def test_pairs_over_max_len_are_left_out_and_counted(tmp_path: Path) -> None:
    made, _, _ = make(tmp_path, max_len=99)
    assert made.notices == ()
    made, sources, targets = make(tmp_path, max_len=17)
    long = {n for n in range(397) if max(len(sources[n]), len(targets[n])) + 1 > 17}
    assert made.notices[0].count == len(long)
    assert f"{len(long)} pairs were longer than 17 tokens" in made.notices[0].text
    seen = {row for step in range(made.n_batches) for row in made.batch(step).rows}
    assert seen == set(range(397)) - long
    for step in range(made.n_batches):
        check_by_hand(made.batch(step), sources, targets)
    with pytest.raises(BadData, match="no pair is left of 3"):
        side, _ = make_side(tmp_path, "ddd", [5, 6, 7])
        PairedText(side, side, max_tokens=99, max_len=5, **ROLES)


def test_sides_of_different_length_and_pairs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    one, _ = make_side(tmp_path, "a", [3, 4])
    other, _ = make_side(tmp_path, "bc", [3, 4, 90])
    with pytest.raises(BadData, match=r"has 2 sentences and .* has 3"):
        PairedText(one, other, max_tokens=99, **ROLES)
    with pytest.raises(ValueError, match="max_tokens is 94, but pair 2 alone is 95 wide"):
        PairedText(other, other, max_tokens=94, **ROLES)
    made = PairedText(other, other, max_tokens=96, **ROLES)
    with pytest.raises(ValueError, match="max_tokens is 50"):
        next(made.in_order(50))


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({"bos": V}, "bos is 101"), ({"pad": -1}, "pad is -1"), ({"seed": -1}, "seed is -1")],
)
def test_wrong_numbers_are_refused(tmp_path: Path, wrong: dict[str, Any], fault: str) -> None:
    side, _ = make_side(tmp_path, "a", [3, 4])
    with pytest.raises(ValueError, match=fault):
        PairedText(side, side, max_tokens=99, **{**ROLES, **wrong})


def test_a_batch_of_25000_tokens_takes_under_5_ms(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    side, _ = make_side(tmp_path, "a", rng.integers(1, 40, 20_011).tolist())
    made = PairedText(side, side, max_tokens=25_000, **ROLES)
    made.batch(0)
    seconds = []
    for step in range(made.n_batches):
        start = time.process_time()
        made.batch(step)
        seconds.append(time.process_time() - start)
    assert np.median(seconds) < 0.005
