"""What heads do, on attention made by hand whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard.lens.captured_call import Call
from regard.lens.head_scores import last_seen
from regard.lens.mask_runs import find_runs
from regard.lens.measure import measure, spot_weights
from regard.lens.record import Record
from regard.lens.token_labels import is_separator
from regard.lens.watch import watch
from regard.ops import Causal, Wants

IDS = torch.tensor([[3, 8, 5, 3, 8, 8, 5, 9, 3, 8, 5]])
"""a b c a b b c d a b c"""
N = 11


class Made(nn.Module):
    """A model whose weights are given: scores are their logarithms, and q and k say nothing."""

    def __init__(self, weights_hts: Tensor) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 3)
        self.log_weights = weights_hts.log()

    def forward(self, ids: Tensor) -> Tensor:
        self.words(ids)
        H, T, S = self.log_weights.shape
        q, k = torch.zeros(1, H, T, 1), torch.zeros(1, H, S, 1)
        return regard.attention(q, k, k, bias=self.log_weights)


def look(*rows: dict[int, float]) -> Tensor:
    """Weights (1, T, S) from each row's keys; what is left over goes to key 0."""
    made = torch.zeros(1, len(rows), N)
    for t, keys in enumerate(rows):
        for s, weight in keys.items():
            made[0, t, s] = weight
        made[0, t, 0] += 1 - sum(keys.values())
    return made


def record_of(weights_hts: Tensor, keep: str = "qk", **told: object) -> Record:
    model = Made(weights_hts)
    with torch.no_grad(), watch(model, keep=keep) as record:
        model(IDS)
    return record.describe(**told)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", ["qk", "statistics"])
def test_single_keys(keep: str) -> None:
    """Four heads, each with one habit at its own strength."""
    previous = look(*({t - 1: 0.75} if t else {0: 1.0} for t in range(N)))
    following = look(*({t + 1: 0.5} if t < N - 1 else {t: 1.0} for t in range(N)))
    same = look(*({t: 0.875} for t in range(N)))
    first = look(*({} if t % 2 else {t: 0.5} for t in range(N)))
    record = record_of(torch.cat([previous, following, same, first]), keep)
    scores = {name: values[0] for name, values in record.heads().items()}
    # Of 10 queries with a key before their own, nine put 0.75 there; the second puts all on key 0.
    assert scores["previous"][0] == pytest.approx((9 * 0.75 + 1.0) / 10, abs=1e-6)
    assert scores["next"][1] == pytest.approx(0.5, abs=1e-6)
    assert scores["same"][2] == pytest.approx((10 * 0.875 + 1.0) / 11, abs=1e-6)
    # Queries 1 to 10: five odd ones put all on the first key, five even ones a half.
    assert scores["first"][3] == pytest.approx(0.75, abs=1e-6)
    assert scores["same"][0] == pytest.approx(1 / 11, abs=1e-6)


def test_induction_looks_behind_the_last_time() -> None:
    """a b c a b b c d a b c: queries 3, 4, 6, 8, 9, 10 and 5 know their token from before."""
    behind = {3: 1, 4: 2, 5: 2, 6: 3, 8: 4, 9: 6, 10: 7}
    assert last_seen(IDS[0].numpy()).tolist() == [-1, -1, -1, 0, 1, 1, 2, -1, 3, 5, 6]
    record = record_of(look(*({behind[t]: 0.625} if t in behind else {} for t in range(N))))
    assert record.heads()["induction"][0, 0] == pytest.approx(0.625, abs=1e-6)
    plain = record_of(look(*({t: 1.0} for t in range(N))))
    assert plain.heads()["induction"][0, 0] == 0


def test_local_and_broad() -> None:
    near = look(*({t: 0.5, max(t - 2, 0): 0.5} if t > 2 else {t: 1.0} for t in range(N)))
    far = torch.full((1, N, N), 1 / N)
    record = record_of(torch.cat([near, far]))
    scores = record.heads()
    # Eight queries (3 to 10) look 0 and 2 back by halves: 1 on average; the others at themselves.
    assert scores["local"][0, 0] == pytest.approx(8 / 11, abs=1e-5)
    assert scores["broad"][0, 0] == pytest.approx(8 / 11 * math.log(2), abs=1e-5)
    assert scores["broad"][0, 1] == pytest.approx(math.log(N), abs=1e-5)
    # The mean of |t - s| over 11 queries and 11 keys: what lies left and right does not cancel.
    assert scores["local"][0, 1] == pytest.approx(40 / 11, abs=1e-5)


@pytest.mark.parametrize("keep", ["qk", "statistics"])
def test_looking_as_far_to_the_left_as_to_the_right_is_far(keep: str) -> None:
    both = look(*({t - 3: 0.5, t + 3: 0.5} if 3 <= t < N - 3 else {t: 1.0} for t in range(N)))
    back = look(*({max(t - 2, 0): 1.0} for t in range(N)))
    record = record_of(torch.cat([both, back]), keep)
    # Of 11 queries five look 3 away on either side; nine look two back, one one, one at itself.
    assert record.heads()["local"][0].tolist() == pytest.approx([15 / 11, 19 / 11], abs=1e-5)
    assert record.statistics(0)["distance"][0].tolist() == pytest.approx([0.0] * N, abs=1e-5)


def test_an_older_record_tells_how_far_by_its_weights() -> None:
    """One that kept the signed distance alone, in which left and right cancel."""
    ways = {-3: 0.25, 0: 0.5, 3: 0.25}
    both = look(*({t + by: ways[by] for by in ways if 0 <= t + by < N} for t in range(3, N - 3)))
    record = record_of(torch.cat([torch.eye(N)[None, :3], both, torch.eye(N)[None, -3:]], 1))
    arrays = {name: x for name, x in record._arrays.all().items() if not name.endswith("reach")}
    older = Record(record._about, arrays)
    assert "reach" in record.statistics(0) and "reach" not in older.statistics(0)
    assert older.heads()["local"][0, 0] == pytest.approx(7.5 / 11, abs=1e-5)


def test_separator_needs_labels() -> None:
    on_four = look(*({4: 0.25, 7: 0.5} for _ in range(N)))
    record = record_of(on_four)
    # Numbers are the labels where none were given, and no separators.
    assert np.isnan(record.heads()["separator"]).all()
    tokens = ["The", "Ġcat", "##s", "sat", ".", "▁on", "the", "</s>", "mat", "3", "猫"]
    record.describe(tokens=tokens)
    assert record.heads()["separator"][0, 0] == pytest.approx(0.75, abs=1e-6)


@pytest.mark.parametrize(
    "label", [".", ",", "Ġ,", "▁", "\n", "[SEP]", "</s>", "<|end|>", "—", "。"]
)
def test_separators(label: str) -> None:
    assert is_separator(label)


@pytest.mark.parametrize("label", ["a", "Ġthe", "##ing", "7", "猫", "é", "<", "it's"])
def test_no_separators(label: str) -> None:
    assert is_separator(label) == (label == "<")


def test_pairs() -> None:
    record = record_of(look(*({3: 0.25} if t == 7 else {2: 0.5} for t in range(N))))
    assert record.pairs([(7, 3)])[0, 0] == pytest.approx(0.25, abs=1e-6)
    assert record.pairs([(7, 3), (8, 2), (9, 4)])[0, 0] == pytest.approx(0.25, abs=1e-6)
    assert np.isnan(record.pairs([(7, 30)])).all()
    with pytest.raises(ValueError, match="at least one pair"):
        record.pairs([])


def test_padding_does_not_count() -> None:
    """A row padded on the right: its two padded queries look like others, and are left out."""
    weights = look(*({t: 0.5} if t < 9 else {1: 0.5} for t in range(N)))
    model = Made(weights)
    model.log_weights[:, :, 9:] = -math.inf
    with torch.no_grad(), watch(model, keep="qk") as record:
        model(IDS)
    assert record.heads()["same"][0, 0] == pytest.approx((8 * 0.5 + 1) / 9, abs=1e-6)
    # Half of it goes to the first key, by eight real queries after it and by none of the others.
    assert record.heads()["first"][0, 0] == pytest.approx(0.5, abs=1e-6)
    # Query 1 looks at the one before with its other half; padded query 9 would look there too.
    assert record.heads()["previous"][0, 0] == pytest.approx(0.5 / 8, abs=1e-6)
    assert record.heads()["broad"][0, 0] == pytest.approx(8 / 9 * math.log(2), abs=1e-5)


def test_cross_attention_has_first_alone() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross_attn = Made(look({1: 0.5}, {2: 1.0}, {3: 0.25}))

        def forward(self, ids: Tensor) -> Tensor:
            return self.cross_attn(ids)

    model = Cross()
    with torch.no_grad(), watch(model) as record:
        model(IDS[:, :3])
    scores = {name: values[0, 0] for name, values in record.heads().items()}
    assert record.places[0].kind == "cross"
    assert scores["first"] == pytest.approx((0.5 + 0.0 + 0.75) / 3, abs=1e-6)
    assert all(math.isnan(scores[name]) for name in ("previous", "next", "same", "induction"))


def test_spot_weights_are_the_matrix() -> None:
    torch.manual_seed(3)
    call = Call(
        name="",
        q=torch.randn(3, 6, 7, 5),
        k=torch.randn(3, 2, 11, 5),
        mask=Causal() & regard.Window(6, 0) & regard.Lengths(torch.tensor([11, 10, 11])),
        bias=regard.ALiBi(6),
        softcap=1.5,
        sinks=torch.randn(6),
    )
    seen = measure(call, Wants(weights=True, lse=True))
    assert seen.weights is not None and seen.lse is not None
    b = torch.tensor([0, 2, 0, 1, 2, 1])
    t, s = torch.tensor([0, 3, 6, 6, 2, 6]), torch.tensor([4, 0, 10, 5, 9, 10])
    found = spot_weights(call, seen.lse, b, t, s)
    assert torch.allclose(found, seen.weights[b, :, t, s].T, atol=1e-6)
    assert found[:, [1, 4, 5]].max() == 0 and found[:, [0, 2, 3]].min() > 0


@pytest.mark.parametrize("n_heads", [1, 3])
def test_runs_are_the_mask(n_heads: int) -> None:
    torch.manual_seed(4)
    seen = torch.rand(1, n_heads, 7, 13) > 0.4
    seen[:, :, 2] = False
    seen[:, :, 5] = True
    call = Call(
        name="", q=torch.zeros(1, 3, 7, 5), k=torch.zeros(1, 3, 13, 5), mask=regard.Dense(seen)
    )
    runs = find_runs(call.rule)
    assert runs is not None and runs.counts.shape == (n_heads, 7)
    back, at = torch.zeros(n_heads, 7, 13, dtype=torch.bool), 0
    for h in range(n_heads):
        for t in range(7):
            for _ in range(int(runs.counts[h, t])):
                lo, hi = runs.pairs[at].tolist()
                back[h, t, lo:hi], at = True, at + 1
    assert torch.equal(back, seen[0]) and at == len(runs.pairs)


@pytest.mark.parametrize(
    ("mask", "n_keys", "ahead", "seen"),
    [
        (None, 5, 4, [0, 1, 2, 3, 4]),
        (Causal(), 5, 0, [0, 1, 2, 3, 4]),
        (Causal(), 9, 4, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (regard.Window(1, 1), 5, 1, [0, 1, 2, 3, 4]),
        (Causal() & regard.Window(1, 0), 9, 4, [3, 4, 5, 6, 7, 8]),
        (regard.Lengths(torch.tensor([2])), 5, 1, [0, 1]),
        (regard.Dense(torch.zeros(5, 5, dtype=torch.bool)), 5, -5, []),
    ],
)
def test_what_follows_from_runs(
    mask: regard.Mask | None, n_keys: int, ahead: int, seen: list[int]
) -> None:
    """Five queries; `ahead` above the keys before the first one's own means a look ahead."""
    q, k = torch.zeros(1, 3, 5, 2), torch.zeros(1, 3, n_keys, 2)
    runs = find_runs(Call(name="", q=q, k=k, mask=mask).rule)
    assert runs is not None
    assert runs.ahead == ahead
    assert np.flatnonzero(runs.seen).tolist() == seen
