"""Which keys rows see is found alike in every way; matrices of simple rules are recognised."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.lens import mask_runs
from regard.lens.captured_call import Call
from regard.lens.mask_runs import FoundRuns, Seen, find_runs, find_seen
from regard.ops import Causal, Dense, DenseBias, Documents, Lengths, Mask, Prefix, Window

SIMPLE: dict[str, Mask] = {
    "causal": Causal(),
    "window": Window(2, 0),
    "padded left": Lengths(torch.tensor([7, 3, 1]), side="left"),
    "padded right": Lengths(torch.tensor([2, 7, 5])),
    "padded to nothing": Lengths(torch.tensor([0, 7, 0])),
    "causal, padded left": Causal() & Lengths(torch.tensor([7, 3, 0]), side="left"),
    "causal, padded right": Causal() & Lengths(torch.tensor([7, 3, 1])),
    "window, padded left": Window(3, 0) & Lengths(torch.tensor([6, 7, 2]), side="left"),
    "padded on both sides": Lengths(torch.tensor([5, 7, 6]))
    & Lengths(torch.tensor([4, 6, 7]), side="left"),
}
OTHER: dict[str, Mask] = {
    "both sides": Window(2, 1),
    "documents": Documents(torch.tensor([0, 0, 1, 1, 1, 2, 2])) & Causal(),
    "prefix": Causal() | Prefix(3),
    "later keys": ~Causal(),
    "one hole": Causal() & Dense(torch.arange(49).view(7, 7) != 21),
}


def call_of(mask: Mask | None, T: int = 7, S: int = 7) -> Call:
    q, k = torch.randn(3, 2, T, 4), torch.randn(3, 2, S, 4)
    return Call(name="x", q=q, k=k, mask=mask)


def seen_by(mask: Mask | None, T: int = 7, S: int = 7) -> Tensor:
    """Who sees whom, (B, T, S)."""
    b, i, j = torch.arange(3)[:, None, None], torch.arange(T)[:, None], torch.arange(S)
    if mask is None:
        return torch.ones(3, T, S, dtype=torch.bool)
    shape = call_of(None, T, S).shape
    allowed = mask.allows(b, torch.zeros(1, dtype=torch.long), i + S - T, j, shape)
    return allowed.expand(3, T, S)


def matrix_of(runs: FoundRuns | None, T: int = 7, S: int = 7) -> Tensor:
    assert runs is not None
    seen, pairs = torch.zeros(T, S, dtype=torch.bool), iter(runs.pairs.tolist())
    for t, count in enumerate(runs.counts[0].tolist()):
        for lo, hi in (next(pairs) for _ in range(count)):
            seen[t, lo:hi] = True
    return seen


def look(mask: Mask | None, T: int = 7, S: int = 7) -> Seen:
    """What is found of a mask's matrix; each row must be that of the mask."""
    want = seen_by(mask, T, S)
    found = find_seen(call_of(Dense(want[:, None]), T, S))
    for runs, rows in zip(found.runs, want, strict=True):
        assert torch.equal(matrix_of(runs, T, S), rows)
    return found


@pytest.mark.parametrize("sizes", [(7, 7), (3, 7), (1, 7), (7, 1)])
@pytest.mark.parametrize("name", SIMPLE)
def test_a_matrix_of_a_simple_rule_is_measured_as_the_rule(
    name: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    T, S = sizes
    mask = SIMPLE[name]
    if S == 1:
        mask = Causal() if "causal" in name else Lengths(torch.tensor([1, 0, 1]))
    monkeypatch.setattr(mask_runs, "_find_edges", None)
    monkeypatch.setattr(mask_runs, "PIECE", 2 * S)
    found = look(mask, T, S)
    assert found.known is not None
    simple = found.simplify(call_of(Dense(seen_by(mask, T, S)[:, None]), T, S)).mask
    assert not isinstance(simple, Dense)
    assert torch.equal(seen_by(simple, T, S), seen_by(mask, T, S))


@pytest.mark.parametrize("name", OTHER)
def test_other_matrices_stay(name: str) -> None:
    found = look(OTHER[name])
    assert found.known is None
    call = call_of(Dense(seen_by(OTHER[name])[:, None]))
    assert found.simplify(call) is call


def test_any_matrix_is_itself_whether_recognised_or_not() -> None:
    """Small ones at random, of which many are simple by chance."""
    draw, known = torch.Generator().manual_seed(0), 0
    for trial in range(600):
        T, S = (1 + trial % 3, 1 + trial // 3 % 3)
        seen = torch.rand(3, 1, T, S, generator=draw) < 0.2 + 0.3 * (trial % 4)
        found = look(Dense(seen), T, S)
        known += found.known is not None
        if found.known is not None:
            assert torch.equal(seen_by(found.known[0], T, S), seen[:, 0])
    assert 100 < known < 600, "both were met"


def test_what_all_see_needs_no_mask() -> None:
    found = look(Dense(torch.ones(3, 1, 7, 7, dtype=torch.bool)))
    assert found.known == (None,)


def test_rules_that_know_their_rows_stay_as_they_are() -> None:
    for mask in (None, Causal(), Causal() & Lengths(torch.tensor([7, 3, 1]))):
        found = find_seen(call_of(mask))
        assert found.known is None
        for runs, rows in zip(found.runs, seen_by(mask), strict=True):
            assert torch.equal(matrix_of(runs), rows)


def test_heads_that_see_different_keys_stay_apart() -> None:
    seen = torch.ones(3, 2, 7, 7, dtype=torch.bool).tril()
    seen[:, 1, :, 0] = False
    found = find_seen(call_of(Dense(seen)))
    assert found.known is None
    assert all(runs is not None and len(runs.counts) == 2 for runs in found.runs)


def test_what_a_bias_hides_counts_beside_a_matrix() -> None:
    bias = torch.zeros(7, 7).masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf)
    real = torch.arange(7) >= torch.tensor([[0], [4], [6]])
    call = call_of(Dense(real[:, None, None]))
    call = Call(name="x", q=call.q, k=call.k, mask=call.mask, bias=DenseBias(bias))
    found = find_seen(call)
    want = real[:, None] & torch.ones(7, 7).tril().bool()
    for runs, rows in zip(found.runs, want, strict=True):
        assert torch.equal(matrix_of(runs), rows)
    assert found.known is not None and torch.equal(seen_by(found.known[0]), want)


def test_edges_and_intervals_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = call_of(Dense(seen_by(SIMPLE["causal, padded left"])[:, None])).of(1, None).rule
    quick = find_runs(rule)
    monkeypatch.setattr(mask_runs, "_rendered_interval", lambda *_: None)
    slow = find_runs(rule)
    assert quick is not None and slow is not None
    assert torch.equal(quick.counts, slow.counts) and torch.equal(quick.pairs, slow.pairs)
    assert quick.pairs.dtype == slow.pairs.dtype and np.array_equal(quick.seen, slow.seen)
