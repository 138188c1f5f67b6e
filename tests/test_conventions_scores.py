"""The conventions of docs/conventions.md that speak of numbers: scores, weights and what is told.

Each class holds the convention that its first line names; `test_conventions.py` checks that none is
missing. The answers are worked out here with `math`, not with the package.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops import Causal, Map, Received, Wants, Window, attention, observe
from regard.ops.dropout import keep_factor
from regard.ops.shape import Shape

BACKENDS = ["reference", "blockwise", "sdpa"]
TILES = pytest.mark.parametrize("backend", ["reference", "blockwise"])

# The row that the page draws under "Order on scores".
PRODUCT, BIAS, SEES = [8.0, 4.0, 2.0, 6.0], [0.0, 1.0, 0.0, 0.0], [True, True, True, False]
RULE: dict[str, Any] = {
    "bias": torch.tensor(BIAS),
    "mask": torch.tensor(SEES),
    "scale": 0.5,
    "softcap": 3.0,
}
SCORES = [3 * math.tanh(0.5 * x / 3) + b for x, b in zip(PRODUCT, BIAS, strict=True)]


def row_of(scores: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """One query and keys with these products, and values that make the output the weights."""
    S = len(scores)
    k = torch.tensor(scores, dtype=torch.float64).view(1, 1, S, 1)
    return torch.ones_like(k[:, :, :1]), k, torch.eye(S, dtype=torch.float64).view(1, 1, S, S)


def weights_of(q: Tensor, k: Tensor, **rule: Any) -> Tensor:
    weights = observe(q, k, None, wants=Wants(weights=True), **rule).weights
    assert weights is not None
    return weights


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def area_mean(matrix: Tensor, cells: tuple[int, int], fine: int) -> Tensor:
    """The picture by brute force: every weight cut into fine × fine squares, then averaged."""
    squares = matrix.repeat_interleave(fine, 0).repeat_interleave(fine, 1)
    rows = squares.unflatten(0, (cells[0], -1)).mean(1)
    return rows.unflatten(1, (cells[1], -1)).mean(2)


class TestOrderOnScores:
    """Order on scores: scale, softcap, bias, mask, softmax, dropout"""

    @TILES
    def test_scale_then_softcap_then_bias_then_mask_then_softmax(self, backend: str) -> None:
        q, k, v = row_of(PRODUCT)
        shares = [math.exp(x) if sees else 0.0 for x, sees in zip(SCORES, SEES, strict=True)]
        weights = torch.tensor([x / sum(shares) for x in shares], dtype=torch.float64)
        seen = attention(q, k, v, **RULE, backend=backend)[0, 0, 0]
        torch.testing.assert_close(seen, weights)
        assert [round(x, 2) for x in seen.tolist()] == [0.43, 0.49, 0.08, 0.0]

    def test_the_scale_is_one_over_the_root_of_the_width_unless_given(self) -> None:
        q, k = normal(1, 1, 3, 7), normal(1, 1, 5, 7)
        expected = (q @ k.mT / math.sqrt(7)).softmax(-1)
        torch.testing.assert_close(weights_of(q, k), expected)
        torch.testing.assert_close(weights_of(q, k, scale=0.3), (q @ k.mT * 0.3).softmax(-1))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @TILES
    def test_softmax_runs_in_float32_for_half_types(self, backend: str, dtype: torch.dtype) -> None:
        """300 · 300 is beyond float16, and 90,000 beside 90,001 one number in bfloat16."""
        q = torch.tensor([300.0, 1.0], dtype=dtype).view(1, 1, 1, 2)
        k = torch.tensor([[300.0, 0.0], [300.0, 1.0]], dtype=dtype).view(1, 1, 2, 2)
        wants = Wants(rows=[0], lse=True)
        seen = observe(q, k, k, scale=1.0, wants=wants, backend=backend)
        assert seen.output is not None and seen.rows is not None and seen.lse is not None
        assert (seen.output.dtype, seen.rows.dtype) == (dtype, torch.float32)
        expected = torch.tensor([1 / (1 + math.e), math.e / (1 + math.e)])
        torch.testing.assert_close(seen.rows[0, 0, 0], expected, atol=1e-2, rtol=0)
        assert abs(float(seen.lse) - (90001 + math.log(1 + 1 / math.e))) < 1e-2

    def test_float64_stays_float64(self) -> None:
        q, k, _ = row_of([0.0, 1e-12])
        weights = weights_of(q, k)
        assert weights.dtype == torch.float64
        assert 0 < float(weights[0, 0, 0, 1] - weights[0, 0, 0, 0]) < 1e-12

    @TILES
    def test_dropout_comes_after_the_softmax_and_nothing_is_shared_out_again(
        self, backend: str
    ) -> None:
        q, k, v = row_of(PRODUCT)
        plain = attention(q, k, v, backend=backend)
        dropped = attention(q, k, v, dropout=0.5, seed=2, backend=backend)
        kept = dropped != 0
        assert kept.any() and not kept.all()
        torch.testing.assert_close(dropped[kept], 2 * plain[kept])


class TestSinks:
    """Sinks: a share of each row that goes nowhere"""

    @TILES
    def test_a_sink_takes_its_share_and_gives_no_value(self, backend: str) -> None:
        q, k, v = row_of([1.0, 2.0])
        seen = attention(q, k, v, sinks=torch.tensor([0.5]), backend=backend)[0, 0, 0]
        whole = math.exp(1) + math.exp(2) + math.exp(0.5)
        expected = torch.tensor([math.exp(1) / whole, math.exp(2) / whole], dtype=torch.float64)
        torch.testing.assert_close(seen, expected)
        assert 1 - float(seen.sum()) == pytest.approx(math.exp(0.5) / whole)

    @TILES
    def test_neither_scale_nor_softcap_nor_bias_nor_mask_touches_a_sink(self, backend: str) -> None:
        q, k, v = row_of([1.0, 2.0, 9.0])
        two_first = torch.tensor([True, True, False])
        rule: dict[str, Any] = {
            "scale": 0.1,
            "softcap": 0.3,
            "bias": torch.full((3,), -2.0),
            "mask": two_first,
        }
        seen = attention(q, k, v, **rule, sinks=torch.tensor([5.0]), backend=backend)[0, 0, 0]
        shares = [math.exp(0.3 * math.tanh(x / 3) - 2) for x in (1.0, 2.0)]
        expected = [x / (sum(shares) + math.exp(5)) for x in shares] + [0.0]
        torch.testing.assert_close(seen, torch.tensor(expected, dtype=torch.float64))


class TestBias:
    """Bias: -inf and the lowest number forbid a look"""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_the_lowest_number_of_its_own_type_means_may_not_look(
        self, backend: str, dtype: torch.dtype
    ) -> None:
        lowest = torch.finfo(dtype).min
        bias = torch.tensor([[0, -math.inf, 0], [0, lowest, 0], [lowest] * 3], dtype=dtype)
        q, k, v = torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1), torch.eye(3).view(1, 1, 3, 3)
        weights = attention(q, k, v, bias=bias, backend=backend)[0, 0]
        assert weights.tolist() == [[0.5, 0, 0.5], [0.5, 0, 0.5], [0, 0, 0]]

    @pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
    def test_the_lowest_number_of_bfloat16_counts_in_wider_types(self, wide: torch.dtype) -> None:
        bias = torch.full((1, 3), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).to(wide)
        q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 3, 1)
        assert weights_of(q, k, bias=bias)[0, 0].tolist() == [[0, 0, 0]]

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float16).min], ids=str)
    def test_any_other_number_is_added_and_cancels_in_a_row_that_is_full_of_it(
        self, backend: str, low: float
    ) -> None:
        q, k, v = row_of([0.0, 0.0, 0.0])
        bias = torch.full((1, 3), low)
        seen = attention(q, k, v, bias=bias, backend=backend)[0, 0]
        torch.testing.assert_close(seen, torch.full_like(seen, 1 / 3))
        bias[0, 1:] = 0
        assert attention(q, k, v, bias=bias, backend=backend)[0, 0].tolist() == [[0, 0.5, 0.5]]


class TestNotFinite:
    """Not finite: unseen it never matters, seen it never passes for a number"""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
    @pytest.mark.parametrize("which", ["key", "value", "query"])
    def test_a_row_is_nan_when_it_looks_at_one_and_no_other_is(
        self, which: str, bad: float, backend: str
    ) -> None:
        clean = {name: normal(1, 2, 5, 3) for name in ("query", "key", "value")}
        spoilt = {name: x.clone() for name, x in clean.items()}
        spoilt[which][0, 0, 2, 1] = bad
        before = attention(*clean.values(), mask=Causal(), backend=backend)
        after = attention(*spoilt.values(), mask=Causal(), backend=backend)
        rows = [False, False, True, False, False] if which == "query" else [False] * 2 + [True] * 3
        nan = torch.tensor([rows, [False] * 5])[..., None].expand(2, 5, 3)
        assert torch.equal(after[0].isnan(), nan)
        torch.testing.assert_close(after[0][~nan], before[0][~nan])

    @TILES
    def test_every_answer_about_a_nan_row_is_nan_and_no_other(self, backend: str) -> None:
        """Weights, rows and maps at the keys it may see; a key that it may see receives NaN."""
        q, k = torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 4, 1)
        q[0, 0, 2] = math.nan
        wants = Wants(
            lse=True,
            entropy=True,
            peak=True,
            distance=True,
            mass=torch.tensor([True, False, False, False]),
            received=True,
            top=2,
            above=0.2,
            map=(4, 4),
            rows=range(4),
            weights=backend == "reference",
        )
        seen: Any = observe(q, k, None, mask=Causal(), wants=wants, backend=backend)
        told = [seen.lse, seen.entropy, seen.peak.weight, seen.distance, seen.mass]
        for row in (*told, *seen.top.weight.unbind(-1)):
            assert row[0, 0].isnan().tolist() == [False, False, True, False]
        matrices = [seen.rows, seen.map] + ([seen.weights] if backend == "reference" else [])
        third = torch.tensor([math.nan, math.nan, math.nan, 0.0])
        expected = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
        expected[2] = third
        for matrix in matrices:
            torch.testing.assert_close(matrix[0, 0], expected, equal_nan=True)
        assert seen.received.total[0, 0].isnan().tolist() == [True, True, True, False]
        assert [len(seen.above.row(0, 0, t)[0]) for t in range(4)] == [1, 2, 0, 4]

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_nan_query_with_nothing_to_see_is_zeros(self, backend: str) -> None:
        q, k = torch.zeros(1, 1, 2, 1), torch.ones(1, 1, 2, 1)
        q[0, 0] = math.nan
        before = Causal() & ~Window(0, 0)
        out = attention(q, k, k, mask=before, backend=backend)
        assert out[0, 0, 0] == 0 and out[0, 0, 1].isnan()


class TestLogSum:
    """Logsumexp: in nats, with the sink"""

    @TILES
    def test_the_log_sum_is_in_nats_and_counts_the_sink(self, backend: str) -> None:
        x, wants = torch.zeros(1, 1, 3, 1), Wants(lse=True)
        rule: dict[str, Any] = {"mask": Causal(), "wants": wants, "backend": backend}
        alone = observe(x, x, None, **rule).lse
        beside = observe(x, x, None, sinks=torch.tensor([0.0]), **rule).lse
        assert alone is not None and beside is not None
        assert alone[0, 0].tolist() == pytest.approx([math.log(1), math.log(2), math.log(3)])
        assert beside[0, 0].tolist() == pytest.approx([math.log(2), math.log(3), math.log(4)])

    @TILES
    def test_the_log_sum_is_of_the_scores_that_the_softmax_sees(self, backend: str) -> None:
        q, k, _ = row_of(PRODUCT)
        seen = observe(q, k, None, **RULE, wants=Wants(lse=True, rows=[0]), backend=backend)
        assert seen.lse is not None and seen.rows is not None
        assert float(seen.lse) == pytest.approx(math.log(sum(map(math.exp, SCORES[:3]))))
        weights = [math.exp(x - float(seen.lse)) for x in SCORES[:3]]
        assert seen.rows[0, 0, 0, :3].tolist() == pytest.approx(weights)

    @TILES
    def test_where_there_is_nothing_to_see_the_log_sum_is_the_sink_alone(
        self, backend: str
    ) -> None:
        x, hidden = torch.zeros(1, 1, 2, 1), torch.zeros(2, 2, dtype=torch.bool)
        seen = observe(
            x, x, x, mask=hidden, sinks=torch.tensor([0.7]), wants=Wants(lse=True), backend=backend
        )
        assert seen.lse is not None and seen.output is not None
        assert seen.lse[0, 0].tolist() == pytest.approx([0.7, 0.7]) and (seen.output == 0).all()


class TestMap:
    """Map: a cell is the mean of its area"""

    @TILES
    @pytest.mark.parametrize("cells", [(2, 2), (7, 5), (3, 11), (1, 1), (14, 10)], ids=str)
    def test_a_cell_is_the_mean_of_its_area_at_any_resolution(
        self, backend: str, cells: tuple[int, int]
    ) -> None:
        q, k = normal(1, 1, 7, 3), normal(1, 1, 5, 3)
        picture = observe(q, k, None, mask=Causal(), wants=Wants(map=cells), backend=backend).map
        assert picture is not None
        weights = weights_of(q, k, mask=Causal())[0, 0]
        expected = area_mean(weights, cells, cells[0] * cells[1])
        torch.testing.assert_close(picture[0, 0], expected)

    @TILES
    def test_a_map_of_a_window_shows_the_window_alone(self, backend: str) -> None:
        q, k = normal(1, 1, 7, 3), normal(1, 1, 5, 3)
        window = Map(height=2, width=2, queries=(1, 6), keys=(2, 5))
        picture = observe(q, k, None, wants=Wants(map=window), backend=backend).map
        assert picture is not None
        torch.testing.assert_close(
            picture[0, 0], area_mean(weights_of(q, k)[0, 0, 1:6, 2:], (2, 2), 2)
        )


class TestReceived:
    """Received: what a key gets from the queries that may see it"""

    @TILES
    def test_sum_mean_and_maximum_are_over_the_queries_that_may_see_the_key(
        self, backend: str
    ) -> None:
        x, ramp = torch.zeros(1, 1, 3, 1), torch.tensor([1.0, 2.0, 3.0])

        def columns(**asked: Any) -> Any:
            wants = Wants(received=Received(**asked))
            seen = observe(x, x, None, mask=Causal(), wants=wants, backend=backend)
            assert seen.received is not None
            return pytest.approx(seen.received.value.flatten().tolist())

        assert columns() == [1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]
        assert columns(by="mean") == [11 / 6 / 3, 5 / 6 / 2, 1 / 3]
        assert columns(by="max") == [1, 1 / 2, 1 / 3]
        assert columns(queries=slice(-2, None)) == [1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]
        assert columns(rows=ramp) == [1 + 2 / 2 + 3 / 3, 2 / 2 + 3 / 3, 3 / 3]
        assert columns(rows=ramp, by="mean") == [3 / 6, 2 / 5, 1 / 3]

    @TILES
    @pytest.mark.parametrize("by", ["sum", "mean", "max"])
    def test_a_key_that_nobody_sees_gets_0(self, by: str, backend: str) -> None:
        q, k, mask = normal(1, 1, 5, 3), normal(1, 1, 7, 3), torch.arange(7) != 4
        wants = Wants(received=Received(by=by, rows=-torch.ones(5)))
        seen = observe(q, k, None, mask=mask, wants=wants, backend=backend)
        assert seen.received is not None
        value = seen.received.value[0, 0]
        assert value[4] == 0 and (value[mask] > 0 if by == "mean" else value[mask] < 0).all()


class TestDropout:
    """Dropout: a seed says which weights are dropped"""

    def test_the_seed_fixes_which_weights_are_dropped_on_every_path_and_machine(self) -> None:
        q, k = torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 6, 1)
        v = torch.eye(6).view(1, 1, 6, 6)
        kept = torch.tensor(
            [[0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]]
        )
        for backend in ("reference", "blockwise", "auto"):
            seen = attention(q, k, v, dropout=0.5, seed=3, backend=backend)[0, 0]
            torch.testing.assert_close(seen, kept / 6 / (1 - 0.5))

    def test_another_seed_or_head_drops_others(self) -> None:
        shape = Shape(2, 2, 31, 37)
        one, other = (keep_factor(torch.tensor(seed), 0.5, shape) for seed in (3, 4))
        drawn = [*one.flatten(0, 1), *other.flatten(0, 1)]
        for n, first in enumerate(drawn):
            for second in drawn[:n]:
                assert 0.4 < (first == second).float().mean() < 0.6

    @TILES
    def test_the_backward_pass_drops_the_same_weights(self, backend: str) -> None:
        q, k, v = (normal(2, 3, 5, 7).requires_grad_() for _ in range(3))
        out = attention(q, k, v, dropout=0.3, seed=11, backend=backend)
        keep = keep_factor(torch.tensor(11), 0.3, Shape(2, 3, 5, 5), dtype=torch.float64)
        by_hand = ((q @ k.mT / math.sqrt(7)).softmax(-1) * keep) @ v
        torch.testing.assert_close(out, by_hand)
        mix = normal(2, 3, 5, 7)
        for ours, theirs in zip(
            torch.autograd.grad((out * mix).sum(), (q, k, v)),
            torch.autograd.grad((by_hand * mix).sum(), (q, k, v)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)

    @TILES
    def test_what_is_observed_is_before_dropout(self, backend: str) -> None:
        q, k, v = (normal(1, 1, 5, 3) for _ in range(3))
        rule: dict[str, Any] = {"wants": Wants(rows=range(5)), "backend": backend}
        dropped, plain = observe(q, k, v, dropout=0.5, seed=3, **rule), observe(q, k, v, **rule)
        assert dropped.output is not None and plain.output is not None
        assert dropped.rows is not None and plain.rows is not None
        torch.testing.assert_close(dropped.rows, plain.rows)
        assert not torch.allclose(dropped.output, plain.output)

    def test_without_a_seed_torchs_generator_draws_one(self) -> None:
        q, k, v = (normal(1, 1, 5, 3) for _ in range(3))
        torch.manual_seed(1)
        first, second = (attention(q, k, v, dropout=0.5) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(attention(q, k, v, dropout=0.5), first)
        assert not torch.equal(first, second)
