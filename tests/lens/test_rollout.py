"""Attention rollout: by hand, against the product of whole matrices, and of one token at length."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from rounding import assert_within, bound_sum
from torch import Tensor, nn

import regard
from regard.lens import rollout
from regard.lens.record import Record
from regard.lens.schema import Description, Place
from regard.lens.watch import watch
from regard.ops import Causal, Wants


class Layers(nn.Module):
    """Layers of attention alone, each with its own queries, keys and rule."""

    def __init__(self, *calls: dict[str, Any]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self) -> None:
        for call in self.calls:
            regard.attention(**{"v": call["k"], **call})


def record_of(*calls: dict[str, Any], keep: str = "qk", wants: Wants | None = None) -> Record:
    model = Layers(*calls)
    with torch.no_grad(), watch(model, wants, keep=keep) as record:
        model()
    return record


def draw(n: int, H: int, G: int, seed: int, **rule: Any) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    q, k = torch.randn(1, H, n, 5, generator=made), torch.randn(1, G, n, 5, generator=made)
    return {"q": q, "k": k, **rule}


def multiply(calls: list[dict[str, Any]]) -> Tensor:
    """Rollout as it is defined: whole matrices in float64, the first layer rightmost."""
    n = calls[0]["q"].shape[2]
    total = torch.eye(n, dtype=torch.float64)
    for call in calls:
        wide = {key: x.double() if isinstance(x, Tensor) else x for key, x in call.items()}
        weights = regard.observe(v=None, wants=Wants(weights=True), **wide).weights
        assert weights is not None
        layer = 0.5 * weights[0].mean(0) + 0.5 * torch.eye(n)
        total = layer / layer.sum(1, keepdim=True) @ total
    return total


def bound(n: int, n_layers: int) -> float:
    """Weights, at most 1, are float32, of products of five numbers; rows of them add up to 1."""
    return n_layers * bound_sum(5 + n, 4)


def test_rollout_by_hand() -> None:
    """Two layers over three tokens, each one head."""
    one = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])
    two = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 0, 0]])
    q = torch.zeros(1, 1, 3, 1)
    record = record_of(*({"q": q, "k": q, "bias": weights.log()} for weights in (one, two)))
    a, b = (0.5 * (x + torch.eye(3)) for x in (one, two))
    # Weights are at most 1 and their logarithms at most log 4; two products of three terms.
    small = bound_sum(2 * 3, 1) + bound_sum(1, math.log(4))
    assert_within(record.rollout(), b @ a, small)
    assert_within(record.rollout()[2], [0.5625, 0.0625, 0.375], small)
    for last in (2, -1, np.int64(2)):
        assert_within(record.rollout(tokens=last), [0.5625, 0.0625, 0.375], small)
    assert_within(record.rollout([1, 0, -1]), (b @ a)[[1, 0, 2]], small)
    assert record.rollout([2]).shape == (1, 3)


RULES: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {}, {}],
    "causal": [{"mask": Causal()}] * 3,
    "window": [{"mask": Causal() & regard.Window(3, 0)}, {"mask": Causal()}],
    "rows that see nothing": [{"mask": Causal() & ~regard.Window(0, 0)}] * 3,
    "padding": [{"mask": regard.Lengths(torch.tensor([11]), side="left") & Causal()}] * 2,
    "sinks": [{"sinks": torch.tensor([0.5, -1.0, 2.0, 0.1]), "mask": Causal()}, {"softcap": 0.7}],
    "bias": [{"bias": regard.ALiBi(4)}, {"scale": 0.9, "mask": Causal()}],
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["own keys", "grouped", "shared"])
@pytest.mark.parametrize("name", RULES)
def test_rollout_is_the_product_of_the_layers(
    name: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In strips and blocks of a few rows, which neither 17 nor each other divide."""
    calls = [draw(17, *heads, seed=n, **rule) for n, rule in enumerate(RULES[name])]
    record, truth = record_of(*calls), multiply(calls)
    whole = record.rollout()
    assert_within(whole, truth, bound(17, len(calls)))
    assert_within(whole.sum(1), np.ones(17), 17 * len(calls) * np.finfo(np.float64).eps * 4)
    monkeypatch.setattr(rollout, "STRIP", 3 * 17)
    monkeypatch.setattr(rollout, "BLOCK", 5 * 17)
    # The scores of a strip are one product, whose sums may run in another order.
    assert_within(record.rollout(), truth, bound(17, len(calls)))
    assert_within(record.rollout([16, 3, 3, -17]), truth[[16, 3, 3, 0]], bound(17, len(calls)))
    assert_within(record.rollout(-5), truth[12], bound(17, len(calls)))
    for token in (0, 9, -1):
        assert_within(record.drawn_on(token), truth[:, token], bound(17, len(calls)))


def test_maps_that_tell_every_weight_will_do_and_others_are_refused() -> None:
    calls = [draw(13, 4, 2, seed=n, mask=Causal()) for n in range(2)]
    truth = multiply(calls)
    for cells in (13, 26):
        wants = Wants(map=(cells, cells), entropy=True)
        record = record_of(*calls, keep="statistics", wants=wants)
        assert_within(record.rollout(-1), truth[-1], bound(13, 2))
        assert_within(record.rollout(), truth, bound(13, 2))
    coarse = record_of(*calls, keep="statistics", wants=Wants(map=(5, 5)))
    for tokens in (None, 3):
        with pytest.raises(ValueError, match='keep="qk"'):
            coarse.rollout(tokens)


def test_rollout_refuses_cross_attention_and_tokens_that_are_not_there() -> None:
    cross = {"q": torch.randn(1, 3, 7, 5), "k": torch.randn(1, 3, 11, 5)}
    with pytest.raises(ValueError, match="as many queries as keys"):
        record_of(cross).rollout()
    assert record_of(cross).rollout_places() == []
    record = record_of(draw(13, 3, 3, seed=1))
    for token in (13, -14):
        with pytest.raises(IndexError, match=f"token {token} is out of range; there are 13"):
            record.rollout([0, token])
        with pytest.raises(IndexError, match=f"token {token} is out of range; there are 13"):
            record.drawn_on(token)
    for wrong in (0.5, [], ["a"], [True, False]):
        with pytest.raises(TypeError, match="tokens must be the number of a token, or several"):
            record.rollout(wrong)  # type: ignore[arg-type]


def test_only_rows_that_are_drawn_on_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer is asked for one row; a causal one for none after the token."""
    monkeypatch.setattr(rollout, "STRIP", 1)
    asked: list[tuple[int, int]] = []

    def strip(a: int, z: int) -> np.ndarray:
        asked.append((a, z))
        return np.tril(np.ones((7, 7)))[a:z] / np.arange(1, 8)[a:z, None]

    rollout.roll_rows(np.array([4]), 7, [strip, strip])
    assert asked == [(4, 5), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def record_evenly(n: int, n_layers: int) -> Record:
    """A record of causal layers, in which every query looks at all tokens up to it alike."""
    about = Description(model="even", created="2026-01-01T00:00:00Z", kept="qk")
    seen = np.arange(1, n + 1)
    arrays = {
        "q": np.zeros((1, n, 1), np.float32),
        "k": np.zeros((1, n, 1), np.float32),
        "lse": np.log(seen, dtype=np.float64)[None],
        "first": np.arange(n + 1),
        "pairs": np.stack([np.zeros(n), seen], 1).astype(np.int32),
    }
    for layer in range(n_layers):
        sizes = {"n_heads": 1, "n_queries": n, "n_keys": n, "causal": True, "heads": (0,)}
        about.places.append(Place(name=f"layers.{layer}", layer=layer, kind="self", **sizes))  # type: ignore[arg-type]
        rule = {"scale": 1.0, "softcap": None, "key_heads": [0], "cell": 0, "biases": []}
        about.rules.append(rule)
    layers = range(n_layers)
    return Record(about, {f"{p}.{name}": x for p in layers for name, x in arrays.items()})


def test_one_token_of_20011_needs_memory_for_rows_alone() -> None:
    n = 20_011
    record = record_evenly(n, 2)
    tracemalloc.start()
    try:
        found = record.rollout(tokens=-1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A strip of 4 Mi numbers in float64, and its pieces in float32; a matrix would be 3 GiB.
    assert peak < 150 * 2**20, f"{peak / 2**20:.0f} MiB"
    drawn = np.full(n, 0.5 / n)
    drawn[-1] += 0.5
    truth = 0.5 * drawn + 0.5 * np.cumsum((drawn / np.arange(1, n + 1))[::-1])[::-1]
    # A weight is exp(-lse) in float32, whose exponent is up to log n.
    assert np.abs(found / truth - 1).max() < 2 * bound_sum(1, math.log(n))


def test_all_of_2311_tokens_come_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 2311
    monkeypatch.setattr(rollout, "BLOCK", 1009 * n)
    even = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    truth = 0.5 * (even + np.eye(n))
    assert_within(record_evenly(n, 1).rollout(), truth, 2 * bound_sum(1, math.log(n)))
