"""What each want means: small matrices worked by hand, on both backends, and what is refused.

`looking` makes queries and keys that give exactly the weights asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounding import bound_sum
from torch import Tensor

from regard.ops import Causal, Lengths, Map, Wants, Window, blockwise, explain, observe
from regard.ops.wants import Peak

BOTH = pytest.mark.parametrize("backend", ["reference", "blockwise"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles smaller than even these inputs."""
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 3)


def near(ours: Tensor, by_hand: list[Any]) -> None:
    truth = torch.tensor(by_hand, dtype=ours.dtype)
    eps = 8 * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.reshape(truth.shape), truth, rtol=eps, atol=eps)


def looking(weights: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """One head's q and k that with scale=1 have these weights: scores are their logarithms."""
    rows = torch.as_tensor(weights, dtype=dtype)
    return rows.log()[None, None], torch.eye(rows.shape[1], dtype=dtype)[None, None]


HALVES = [[0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.125, 0.125]]
FOUR = [*HALVES, [0.125, 0.125, 0.25, 0.5], [0.25, 0.25, 0.25, 0.25]]


def see(weights: Any, backend: str, **asked: Any) -> Any:
    return observe(*looking(weights), None, scale=1.0, wants=Wants(**asked), backend=backend)


@BOTH
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 10, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_attention_spread_evenly_over_n_keys(n: int, backend: str, dtype: torch.dtype) -> None:
    q, k = torch.zeros(1, 1, 3, 5, dtype=dtype), torch.randn(1, 1, 13, 5, dtype=dtype)
    wants = Wants(
        lse=True, entropy=True, peak=True, distance=True, mass=torch.arange(13) < 1,
        received=True, top=2, above=1 / n, map=(1, 1), rows=[1],
    )  # fmt: skip
    mask = Lengths(torch.tensor([n]))
    seen: Any = observe(q, k, None, mask=mask, wants=wants, backend=backend)
    evenly = [1 / n] * n + [0.0] * (13 - n)
    near(seen.entropy, [math.log(n)] * 3)
    near(seen.lse, [math.log(n)] * 3)
    near(seen.peak.weight, [1 / n] * 3)
    assert ((seen.peak.key >= 0) & (seen.peak.key < n)).all()
    # Queries sit at 10, 11 and 12; the keys 0 .. n-1 lie at (n-1)/2 on average.
    near(seen.distance, [i - (n - 1) / 2 for i in (10, 11, 12)])
    near(seen.mass, [1 / n] * 3)
    near(seen.received.total, [3 * x for x in evenly])
    near(seen.received.mean, evenly)
    assert (seen.top.key >= 0).sum(-1).flatten().tolist() == [min(n, 2)] * 3
    near(seen.map, [1 / 13])
    near(seen.rows, evenly)
    # Every weight is 1/n to the last bit, so all of them are at the threshold and count.
    assert seen.above.offsets.tolist() == [0, n, 2 * n, 3 * n]


@BOTH
def test_attention_on_one_key_has_no_entropy_and_one_peak(backend: str) -> None:
    k = torch.eye(5, dtype=torch.float64)[None, None]
    q = torch.tensor([[0.0, 0, 1000, 0, 0], [1000, 0, 0, 0, 0]], dtype=torch.float64)[None, None]
    wants = Wants(lse=True, entropy=True, peak=True, distance=True, top=1, above=1.0, received=True)
    seen: Any = observe(q, k, None, scale=1.0, wants=wants, backend=backend)
    assert seen.lse.flatten().tolist() == [1000, 1000]
    assert seen.entropy.flatten().tolist() == [0, 0]
    assert seen.peak.weight.flatten().tolist() == [1, 1]
    assert seen.peak.logit.flatten().tolist() == [1000, 1000]
    assert seen.peak.key.flatten().tolist() == seen.top.key.flatten().tolist() == [2, 0]
    assert seen.distance.flatten().tolist() == [3 - 2, 4 - 0]
    assert seen.above.key.tolist() == [2, 0]
    assert seen.received.total.flatten().tolist() == [1, 0, 1, 0, 0]


@BOTH
def test_entropy_and_lse_are_in_nats(backend: str) -> None:
    seen = see([[0.5, 0.25, 0.25]], backend, entropy=True, lse=True)
    near(seen.entropy, [1.5 * math.log(2)])
    near(seen.lse, [0.0])
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 10, 1)
    lse = observe(q, k, None, wants=Wants(lse=True), backend=backend).lse
    assert float(lse) == pytest.approx(2.302585, abs=1e-6)  # type: ignore[arg-type]


@BOTH
def test_maps_of_a_four_by_four_by_hand(backend: str) -> None:
    near(see(FOUR, backend, map=(2, 2)).map, [[0.375, 0.125], [0.1875, 0.3125]])
    # A third of the axis is 4/3 wide: a whole row or key, and a third of the next.
    third = see(FOUR, backend, map=(3, 3)).map[0, 0]
    near(third[0, 0], [(0.5 + 0.25 / 3 + 0.25 / 3 + 0.5 / 9) / (16 / 9)])
    near(third[1, 1], [(0.5 + 0.125 + 0.125 + 0.25) * (2 / 3) ** 2 / (16 / 9)])
    near(third[2, 0], [(0.125 / 3 + 0.125 / 9 + 0.25 + 0.25 / 3) / (16 / 9)])
    fine = see(FOUR, backend, map=(8, 12)).map[0, 0]
    whole = torch.tensor(FOUR)
    near(fine, whole.repeat_interleave(2, 0).repeat_interleave(3, 1).tolist())
    part = Map(height=1, width=2, queries=(1, 3), keys=(0, 4))
    near(see(FOUR, backend, map=part).map, [0.25, 0.25])
    corner = Map(height=1, width=1, queries=(2, 3), keys=(3, 4))
    near(see(FOUR, backend, map=corner).map, [0.5])
    finer = Map(height=2, width=3, queries=(0, 1), keys=(0, 2))
    near(see(FOUR, backend, map=finer).map, [[0.5, 0.375, 0.25]] * 2)


@BOTH
def test_above_keeps_what_is_at_the_threshold_and_nothing_under_it(backend: str) -> None:
    above = see(FOUR, backend, above=0.25).above
    assert above.offsets.tolist() == [0, 2, 4, 6, 10]
    assert above.key.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2, 3]
    assert above.row(0, 0, 2)[1].tolist() == [0.25, 0.5]
    assert see(FOUR, backend, above=0.25 * (1 + 1e-12)).above.offsets.tolist() == [0, 1, 2, 3, 3]
    dense = see(FOUR, backend, above=0.25).above.to_dense()
    assert dense[0, 0, 0].tolist() == [0.5, 0.25, 0, 0]


@BOTH
def test_top_with_fewer_visible_keys_than_asked_ends_in_zeros_and_no_key(backend: str) -> None:
    q, k = looking(FOUR)
    seen: Any = observe(q, k, None, scale=1.0, mask=Causal(), wants=Wants(top=5), backend=backend)
    assert seen.top.key[0, 0, 0].tolist() == [0, -1, -1, -1, -1]
    assert seen.top.key[0, 0, 1].tolist() == [1, 0, -1, -1, -1]
    assert seen.top.key[0, 0, 2].tolist()[0] == 2
    assert sorted(seen.top.key[0, 0, 3].tolist()) == [-1, 0, 1, 2, 3]
    near(seen.top.weight[0, 0, 0], [1.0, 0, 0, 0, 0])
    near(seen.top.weight[0, 0, 1], [2 / 3, 1 / 3, 0, 0, 0])


@BOTH
def test_mass_rows_and_distance_by_hand(backend: str) -> None:
    mass = torch.tensor([True, False, False, True])
    seen = see(FOUR, backend, mass=mass, rows=[3, 1], distance=True, peak=True)
    near(seen.mass, [0.625, 0.375, 0.625, 0.5])
    near(seen.rows, [FOUR[3], FOUR[1]])
    near(seen.distance, [-0.875, 1 - 1.125, 2 - 2.125, 1.5])
    near(seen.peak.weight, [0.5, 0.5, 0.5, 0.25])
    assert seen.peak.key.flatten().tolist()[:3] == [0, 1, 3]


@BOTH
def test_mean_received_divides_by_the_queries_that_could_see_the_key(backend: str) -> None:
    q, k = torch.zeros(1, 1, 3, 5), torch.zeros(1, 1, 3, 5)
    wants = Wants(received=True)
    got: Any = observe(q, k, None, mask=Causal(), wants=wants, backend=backend).received
    near(got.total, [1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])
    assert got.seen_by.flatten().tolist() == [3, 2, 1]
    near(got.mean, [11 / 18, 5 / 12, 1 / 3])
    holes = torch.tensor([0.0, -math.inf, 0.0])
    got = observe(q, k, None, bias=holes, wants=wants, backend=backend).received
    assert got.seen_by.flatten().tolist() == [3, 0, 3]
    assert got.mean.flatten().tolist() == [0.5, 0, 0.5]


@BOTH
def test_row_with_nothing_to_see_is_zeros_and_no_key(backend: str) -> None:
    q, k, v = (torch.randn(1, 1, 3, 5, dtype=torch.float64) for _ in range(3))
    wants = Wants(
        lse=True, entropy=True, peak=True, distance=True, mass=torch.ones(3, dtype=torch.bool),
        received=True, top=2, above=0.01, map=(3, 3), rows=[0, 1, 2],
    )  # fmt: skip
    mask = Causal() & ~Window(1, 0)
    seen: Any = observe(q, k, v, mask=mask, wants=wants, backend=backend)
    assert seen.lse[0, 0, :2].tolist() == [-math.inf] * 2
    for part in (seen.entropy, seen.distance, seen.mass, seen.peak.weight, seen.output):
        assert not part[0, 0, :2].any()
    near(seen.mass, [0.0, 0, 1])
    near(seen.peak.weight, [0.0, 0, 1])
    assert seen.peak.key.flatten().tolist() == [-1, -1, 0]
    assert (
        seen.peak.logit[0, 0, :2].tolist() == [-math.inf] * 2 and seen.peak.logit.isfinite().any()
    )
    assert seen.top.key[0, 0].tolist() == [[-1, -1], [-1, -1], [0, -1]]
    assert seen.above.offsets.tolist() == [0, 0, 0, 1]
    near(seen.rows, [[0.0, 0, 0], [0, 0, 0], [1, 0, 0]])
    near(seen.map, [[0.0, 0, 0], [0, 0, 0], [1, 0, 0]])
    assert seen.received.seen_by.flatten().tolist() == [1, 0, 0]
    near(seen.received.mean, [1.0, 0, 0])


@BOTH
def test_sink_takes_its_share_and_is_in_the_log_sum(backend: str) -> None:
    q, k = torch.zeros(1, 2, 1, 3).double(), torch.zeros(1, 1, 2, 3).double()
    sinks = torch.tensor([math.log(2), math.log(6)], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    wants = Wants(lse=True, rows=[0], entropy=True, peak=True, distance=True, received=True)
    seen: Any = observe(q, k, None, mask=mask, sinks=sinks, wants=wants, backend=backend)
    near(seen.rows, [1 / 4, 1 / 4, 1 / 8, 1 / 8])
    near(seen.lse, [math.log(4), math.log(8)])
    near(seen.entropy, [math.log(4) / 2, math.log(8) / 4])
    near(seen.peak.weight, [1 / 4, 1 / 8])
    near(seen.distance, [1 / 4, 1 / 8])
    near(seen.received.total, [1 / 4, 1 / 4, 1 / 8, 1 / 8])
    alone: Any = observe(q, k, None, mask=~mask, sinks=sinks, wants=wants, backend=backend)
    near(alone.lse, sinks.tolist())
    assert not alone.rows.any() and not alone.entropy.any() and not alone.peak.weight.any()
    assert alone.peak.key.flatten().tolist() == [-1, -1]
    assert seen.peak.logit.flatten().tolist() == [0, 0], "a sink is no key"
    assert alone.peak.logit.flatten().tolist() == [-math.inf] * 2


@BOTH
def test_the_largest_logit_is_after_scale_softcap_bias_and_mask_and_before_the_softmax(
    backend: str,
) -> None:
    q = torch.tensor([[1.0], [-2.0], [1.0]], dtype=torch.float64)[None, None]
    k = torch.tensor([[8.0], [4.0], [2.0], [6.0]], dtype=torch.float64)[None, None]
    bias = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]] * 2 + [[False] * 4])
    rule: dict[str, Any] = {"scale": 0.5, "softcap": 3.0, "bias": bias, "mask": mask}
    seen: Any = observe(q, k, None, **rule, wants=Wants(peak=True), backend=backend)
    # Of 4, 2 and 1, and of -8, -4 and -2, the second is ahead by its bias.
    near(seen.peak.logit[0, 0, :2], [3 * math.tanh(2 / 3) + 1, 3 * math.tanh(-4 / 3) + 1])
    assert seen.peak.key.flatten().tolist() == [1, 1, -1]
    assert seen.peak.logit[0, 0, 2] == -math.inf


def test_a_peak_of_weight_and_key_alone_is_still_one() -> None:
    weight, key = torch.ones(1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.int64)
    peak = Peak(weight, key)
    assert peak.weight is weight and peak.key is key and peak.logit is None


@BOTH
def test_rows_with_large_scores_are_told_to_the_last_digits(backend: str) -> None:
    q = torch.tensor([[4001.0], [-3001.0]])[None, None]
    k = 1 + torch.arange(11.0)[None, None, :, None] / 4096  # scores are exact in float32
    wants = Wants(rows=[0, 1], entropy=True, top=3)
    seen: Any = observe(q, k, None, scale=1.0, wants=wants, backend=backend)
    truth: Any = observe(q.double(), k.double(), None, scale=1.0, wants=wants, backend="reference")
    # A weight is an exponential over a sum of 11 of them; entropy is a sum of 11 such weights.
    weight = bound_sum(11 + 2, 1)
    torch.testing.assert_close(seen.rows.double(), truth.rows, rtol=weight, atol=0)
    torch.testing.assert_close(seen.top.weight.double(), truth.top.weight, rtol=weight, atol=0)
    entropy = bound_sum(11 + 2 + 11, 1)
    torch.testing.assert_close(seen.entropy.double(), truth.entropy, rtol=entropy, atol=0)


BOOLS = torch.ones(5, dtype=torch.bool)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "top": (lambda: Wants(top=0), ValueError, "top must be at least 1, got 0"),
    "half a top": (lambda: Wants(top=2.5), TypeError, "top must be a whole number, got 2.5"),  # type: ignore[arg-type]
    "above 0": (lambda: Wants(above=0.0), ValueError, "above must be greater than 0 and at most 1"),
    "above 1": (lambda: Wants(above=1.1), ValueError, "at most 1/above"),
    "above nan": (lambda: Wants(above=math.nan), ValueError, "above must be greater than 0"),
    "float mass": (lambda: Wants(mass=torch.ones(5)), TypeError, "mass must be a bool tensor over"),
    "deep mass": (lambda: Wants(mass=BOOLS[None, None]), TypeError, "(S,) or (B, S)"),
    "list mass": (lambda: Wants(mass=[True]), TypeError, "mass must be a bool tensor"),  # type: ignore[arg-type]
    "map": (lambda: Map(height=0, width=3), ValueError, "at least 1 × 1 cells, got 0 × 3"),
    "mass of": (lambda: Wants(mass=BOOLS[:3]), ValueError, "with B=2, S=5, got shape (3,)"),
    "masses": (lambda: Wants(mass=BOOLS.expand(3, 5)), ValueError, "B=2, S=5, got shape (3, 5)"),
    "cells": (lambda: Wants(map=(3, 0)), ValueError, "at least 1 × 1 cells, got 3 × 0"),
    "rows": (lambda: Wants(rows=[0, 3]), ValueError, "rows must lie between 0 and T-1=2, got 3"),
    "slice": (
        lambda: Map(height=1, width=1, keys=slice(0, 2)),  # type: ignore[arg-type]
        TypeError,
        "keys of a map must be (first, past the last), got slice(0, 2, None)",
    ),
    "tensor": (lambda: Wants(rows=torch.tensor([0, 1])), TypeError, "(2,); a tensor or array bec"),  # type: ignore[arg-type]
    "row -1": (lambda: Wants(rows=[-1]), ValueError, "rows must lie between 0 and T-1=2, got -1"),
    "a dict": (lambda: {"top": 3}, TypeError, "wants must be a Wants(...), got a dict"),
    "the class": (lambda: Wants, TypeError, "got the class Wants; make one of it, Wants(...)"),
    "top as text": (lambda: Wants(top="3"), TypeError, "top must be a whole number, got '3'"),  # type: ignore[arg-type]
    "top as flag": (lambda: Wants(top=True), TypeError, "top must be a whole number, got True"),
    "above as text": (lambda: Wants(above="x"), TypeError, "above must be a number, got 'x'"),  # type: ignore[arg-type]
    "one size": (lambda: Wants(map=5), TypeError, "map must be (height, width) or a Map"),  # type: ignore[arg-type]
    "a size alone": (lambda: Wants(map=(5,)), TypeError, "map must be (height, width)"),  # type: ignore[arg-type]
    "half a cell": (lambda: Wants(map=(5.5, 2)), TypeError, "height must be a whole number"),  # type: ignore[arg-type]
    "one row": (lambda: Wants(rows=3), TypeError, "rows must be a list of whole numbers"),  # type: ignore[arg-type]
    "half a row": (lambda: Wants(rows=[1.5]), TypeError, "each of rows must be a whole number"),  # type: ignore[list-item]
}
WINDOWS = [((2, 4), None), ((1, 1), None), ((-1, 2), None), (None, (0, 6)), (None, (3, 2))]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused_in_words(name: str) -> None:
    make, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)):
        observe(torch.ones(2, 1, 3, 5), torch.ones(2, 1, 5, 5), None, wants=make())
    with pytest.raises(kind, match=re.escape(words)):
        explain(torch.ones(2, 1, 3, 5), *2 * [torch.ones(2, 1, 5, 5)], wants=make())


@pytest.mark.parametrize(("queries", "keys"), WINDOWS)
def test_map_of_a_window_outside_the_matrix_is_refused(queries: Any, keys: Any) -> None:
    wants = Wants(map=Map(height=1, width=1, queries=queries, keys=keys))
    with pytest.raises(ValueError, match="lie inside T=3 queries and S=5 keys"):
        observe(torch.ones(2, 1, 3, 5), torch.ones(2, 1, 5, 5), None, wants=wants)


@BOTH
def test_a_picture_of_a_part_leaves_other_answers_whole(backend: str) -> None:
    """Received attention, the largest weights and a corner of the map, asked for together."""
    corner = Map(height=1, width=1, queries=(2, 3), keys=(3, 4))
    seen = see(FOUR, backend, received=True, top=1, above=0.5, map=corner)
    near(seen.map, [0.5])
    near(seen.received.total, [1.125, 1.125, 0.75, 1.0])
    near(seen.top.weight, [0.5, 0.5, 0.5, 0.25])
    assert seen.above.offsets.tolist() == [0, 1, 2, 3, 3]
