"""`Received`: every option on both backends against the plain formula, and what it is good for.

About the question as `ops/wants.py` has it and its answers from `ops/observe.py` and
`ops/weight_stats.py`. `expect` is the formula on the whole matrix, written once more.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import CASES, Case, dense_bias, dense_mask, plain
from rounding import assert_within, bound_error
from torch import Tensor, nn

import regard
from regard.ops import Causal, DenseBias, Map, Received, Wants, blockwise, observe
from regard.ops import weight_stats as stats
from regard.ops.wants import ReceivedAttention

BOTH = pytest.mark.parametrize("backend", ["reference", "blockwise"])
BY = pytest.mark.parametrize("by", ["sum", "mean", "max"])


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles far smaller than the inputs, so that every answer is put together from many."""
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 8)


def expect(weights: Tensor, seen: Tensor, asked: Received) -> Tensor:
    """What is asked, off the whole matrix of weights and of what may be seen, (B, H, T, S)."""
    queries = (
        asked.queries if isinstance(asked.queries, slice) else slice(*asked.queries or (None,))
    )
    weights, seen = weights[:, :, queries], seen[:, :, queries]
    rows = torch.ones(weights.shape[2]) if asked.rows is None else asked.rows[..., queries]
    rows = rows.to(weights.dtype)[..., None]
    nobody = ~seen.any(2)
    if asked.by == "max":
        if not weights.shape[2]:
            return weights.sum(2)
        return (rows * weights).masked_fill(~seen, -math.inf).amax(2).masked_fill(nobody, 0.0)
    total = (rows * weights).sum(2)
    if asked.by == "sum":
        return total
    count = (rows * seen).sum(2)
    return torch.where(count == 0, 0.0, total / count)


@functools.cache
def matrix(name: str) -> tuple[Case, Tensor, Tensor]:
    """A case, its weights by the plain formula, and which pairs may be seen."""
    with torch.no_grad():
        made = CASES[name]()
        bias = dense_bias(made)
        seen = dense_mask(made) & (bias != -math.inf)
        numbers = {key: made.call.get(key) for key in ("scale", "softcap", "sinks")}
        return made, plain(made.q, made.k, made.v, seen, bias, **numbers)[1], seen


def draw_rows(*shape: int, signed: bool = False) -> Tensor:
    """Numbers for the queries, every fifth of them 0."""
    rows = torch.rand(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = 2 * rows - 1 if signed else rows
    return torch.where(torch.arange(shape[-1]) % 5 == 2, 0.0, rows)


def questions(B: int, H: int, T: int) -> list[Received]:
    """Every option, alone and with the others."""
    last, some = slice(-min(7, T), None), (T // 3, T // 3 + max(T // 4, 1))
    asked = [Received(), Received(by="mean"), Received(by="max")]
    asked += [
        Received(rows=draw_rows(T)),
        Received(rows=draw_rows(H, T, signed=True)),
        Received(rows=draw_rows(B, 1, T), by="mean"),
        Received(rows=draw_rows(B, H, T, signed=True), by="max"),
        Received(rows=-draw_rows(1, 1, T), by="max"),
        Received(rows=torch.zeros(T), by="mean"),
    ]
    if T:
        asked += [
            Received(queries=last),
            Received(queries=last, by="mean"),
            Received(queries=some, by="max"),
            Received(queries=slice(None, T // 2 + 1), rows=draw_rows(B, H, T)),
            Received(queries=some, rows=draw_rows(H, T), by="mean"),
            Received(queries=slice(-1, None), rows=draw_rows(1, H, T, signed=True), by="max"),
        ]
    return asked


@BOTH
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("small_tiles")
def test_every_question_is_the_plain_formula_under_every_rule(name: str, backend: str) -> None:
    made, weights, seen = matrix(name)
    B, H, T, _ = weights.shape
    for asked in questions(B, H, T):
        # With values there is an output to make, without them only the rows asked about are walked.
        for v in (made.v, None):
            call = {**made.call, "backend": backend, "wants": Wants(received=asked)}
            with torch.no_grad():
                found: Any = observe(made.q, made.k, v, **call).received
            truth = expect(weights, seen, asked)
            torch.testing.assert_close(found.value, truth, rtol=1e-11, atol=1e-12)
            counted = seen[:, :, slice(*asked.span(T))].sum(2)
            assert torch.equal(found.seen_by.long(), counted)
            assert found.by == asked.by and (found.row_weight is None) == (asked.rows is None)


@BOTH
@pytest.mark.usefixtures("small_tiles")
def test_questions_by_hand(backend: str) -> None:
    """Four evenly spread causal rows: 1; 1/2 1/2; 1/3 1/3 1/3; and 1/4 each."""
    x, rows = torch.zeros(1, 1, 4, 1).double(), torch.tensor([1.0, 0.0, 3.0, -4.0])

    def ask(**asked: Any) -> list[float]:
        wants = Wants(received=Received(**asked))
        found: Any = observe(x, x, None, mask=Causal(), wants=wants, backend=backend).received
        return [round(float(number), 12) for number in found.value.flatten()]

    assert ask(queries=slice(-2, None)) == [round(7 / 12, 12)] * 3 + [0.25]
    assert ask(queries=(1, 2)) == [0.5, 0.5, 0, 0]
    assert ask(queries=(1, 3), by="mean") == [round(5 / 12, 12)] * 2 + [round(1 / 3, 12), 0]
    assert ask(by="max") == [1, 0.5, round(1 / 3, 12), 0.25]
    assert ask(rows=rows) == [1 + 1 - 1, 0, 0, -1]
    # The last key is seen by one query, whose number is -4: its maximum is below 0.
    assert ask(rows=rows, by="max") == [1, 1, 1, -1]
    two = round(2 / 7, 12)
    assert ask(rows=rows.abs().view(1, 1, 4), by="mean") == [3 / 8, two, two, 0.25]
    assert ask(rows=rows, by="mean")[0] == 0, "numbers that add up to 0"
    assert ask(rows=torch.zeros(4), by="mean") == [0, 0, 0, 0]


@BOTH
@pytest.mark.usefixtures("small_tiles")
def test_true_is_the_plain_question_in_the_same_bits(backend: str) -> None:
    made, _, _ = matrix("joined")
    call = {**made.call, "backend": backend}
    flag: Any = observe(made.q, made.k, None, **call, wants=Wants(received=True)).received
    asked: Any = observe(made.q, made.k, None, **call, wants=Wants(received=Received())).received
    ones = Received(rows=torch.ones(made.q.shape[2]))
    alike: Any = observe(made.q, made.k, None, **call, wants=Wants(received=ones)).received
    for other in (asked, alike):
        for part in ("total", "seen_by", "mean"):
            assert torch.equal(getattr(flag, part), getattr(other, part)), part
    assert Wants(received=False).receiving() is None and not Wants().second_pass()


def test_a_result_tells_total_and_mean_of_a_sum_and_says_where_else_to_look() -> None:
    two = torch.tensor([4.0, 3.0, 0.0])
    told = ReceivedAttention(two, torch.tensor([2.0, 1.0, 0.0]))
    assert told.total is two and told.mean.tolist() == [2, 3, 0]
    assert ReceivedAttention(two, two, by="mean").mean is two
    weighted = ReceivedAttention(two, two, torch.tensor([8.0, 0.5, 0.0]))
    assert weighted.mean.tolist() == [0.5, 6, 0]
    for by, part in (("max", "total"), ("max", "mean"), ("mean", "total")):
        with pytest.raises(AttributeError, match=f"this is a {by}: read `value`"):
            getattr(ReceivedAttention(two, two, by=by), part)


@BOTH
@BY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_every_type_is_within_its_rounding(dtype: torch.dtype, by: str, backend: str) -> None:
    made = CASES["everything"]().cast(dtype)
    asked = Received(by=by, rows=draw_rows(6, 37), queries=(5, 31))
    wants = Wants(received=asked)
    with torch.no_grad():
        found: Any = observe(made.q, made.k, None, **made.call, wants=wants, backend=backend)
        seen, held = dense_mask(made), (made.call["bias"].values, made.call["sinks"])

        def formula(dtype: torch.dtype) -> Tensor:
            q, k, bias, sinks = (x.detach().to(dtype) for x in (made.q, made.k, *held))
            return expect(plain(q, k, k, seen, bias, 0.4, 2.1, sinks)[1], seen, asked)

        narrow = torch.float64 if dtype == torch.float64 else torch.float32
        exact = formula(torch.float64)
        bound = bound_error(formula(narrow), exact, 26 + 53, narrow)
    assert found.received.value.dtype == narrow
    assert_within(found.received.value, exact, bound)


@BOTH
@BY
@pytest.mark.parametrize(
    "sizes", [(0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0), (2, 3, 1, 1)]
)
def test_empty_inputs_receive_nothing(sizes: tuple[int, ...], by: str, backend: str) -> None:
    B, H, T, S = sizes
    q, k = torch.randn(B, H, T, 4), torch.randn(B, min(H, 1), S, 4)
    for rows in (None, torch.ones(T), torch.ones(B, H, T)):
        wants = Wants(received=Received(by=by, rows=rows))
        found: Any = observe(q, k, k, mask=Causal(), wants=wants, backend=backend).received
        assert found.value.shape == found.seen_by.shape == (B, H, S)
        assert (found.value == (1.0 if T == S == 1 else 0.0)).all()
    if not T:
        with pytest.raises(ValueError, match="must lie inside T=0 queries"):
            observe(q, k, k, wants=Wants(received=Received(queries=slice(-3, None))))


FIVE = torch.ones(5)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "by": (lambda: Received(by="min"), ValueError, 'by must be "sum", "mean" or "max", got'),
    "whole rows": (lambda: Received(rows=FIVE.long()), TypeError, "got torch.int64 of shape (5,)"),
    "list rows": (lambda: Received(rows=[1.0]), TypeError, "rows must be a float tensor"),  # type: ignore[arg-type]
    "deep rows": (lambda: Received(rows=FIVE.view(1, 1, 1, 5)), TypeError, "shape (1, 1, 1, 5)"),
    "no axis": (lambda: Received(rows=FIVE[0]), TypeError, "rows must be a float tensor"),
    "step": (lambda: Received(queries=slice(0, 5, 2)), ValueError, "a slice with step 2"),
    "back": (lambda: Received(queries=slice(None, None, -1)), ValueError, "with step -1"),
    "half": (lambda: Received(queries=slice(0.5, None)), TypeError, "a slice of whole numbers"),
    "three": (lambda: Received(queries=(1, 2, 3)), TypeError, "(first, past the last)"),  # type: ignore[arg-type]
    "one number": (lambda: Received(queries=3), TypeError, "(first, past the last), got 3"),  # type: ignore[arg-type]
    "a word": (lambda: Wants(received="max"), TypeError, "or a Received(...), got 'max'"),  # type: ignore[arg-type]
    "a class": (lambda: Wants(received=Received), TypeError, "received must be True"),  # type: ignore[arg-type]
    "long rows": (
        lambda: Received(rows=torch.ones(7)),
        ValueError,
        "B=2, H=3, T=5, got shape (7,)",
    ),
    "one row": (lambda: Received(rows=FIVE[:1]), ValueError, "T=5, got shape (1,)"),
    "heads": (lambda: Received(rows=torch.ones(2, 5)), ValueError, "got shape (2, 5)"),
    "batch": (lambda: Received(rows=torch.ones(3, 3, 5)), ValueError, "got shape (3, 3, 5)"),
    "empty": (lambda: Received(queries=(3, 3)), ValueError, "(3, 3) of Received must not be empty"),
    "swapped": (lambda: Received(queries=slice(4, 2)), ValueError, "must not be empty"),
    "late": (lambda: Received(queries=slice(5, None)), ValueError, "must lie inside T=5 queries"),
    "outside": (lambda: Received(queries=(2, 6)), ValueError, "must lie inside T=5 queries"),
    "negative": (lambda: Received(queries=(-2, 5)), ValueError, "must lie inside T=5 queries"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_refused_in_words(name: str) -> None:
    make, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)):
        asked = make()
        observe(torch.ones(2, 3, 5, 4), torch.ones(2, 1, 7, 4), None, wants=Wants(received=asked))


def test_a_window_longer_than_the_text_is_the_text() -> None:
    assert Received(queries=slice(-32, None)).span(5) == (0, 5)
    assert Received(queries=slice(-32, -2)).span(37) == (5, 35)
    assert Received(queries=slice(1, 99)).span(5) == (1, 5)


@BOTH
@BY
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.usefixtures("small_tiles")
def test_a_nan_reaches_the_keys_that_its_row_sees_and_no_others(
    weighted: bool, by: str, backend: str
) -> None:
    q, k = (torch.randn(1, 2, 19, 3, dtype=torch.float64) for _ in range(2))
    rows = draw_rows(19) if weighted else None

    def ask(q: Tensor, rows: Tensor | None, queries: Any) -> Tensor:
        wants = Wants(received=Received(by=by, rows=rows, queries=queries))
        found: Any = observe(q, k, None, mask=Causal(), wants=wants, backend=backend).received
        return found.value

    spoilt = q.clone()
    spoilt[0, 0, 12, 1] = math.nan  # row 12, whose own number is 0 where they are weighted
    for queries in (None, slice(10, 15)):
        found, clean = ask(spoilt, rows, queries), ask(q, rows, queries)
        assert found[0, 0].isnan().tolist() == [j <= 12 for j in range(19)]
        assert torch.equal(found[0, 0, 13:], clean[0, 0, 13:])
        assert torch.equal(found[0, 1], clean[0, 1])
    for queries in ((0, 12), (13, 19)):
        assert torch.equal(ask(spoilt, rows, queries), ask(q, rows, queries))
    if rows is not None:
        # Also where row weights come to 0, and a mean would be 0.
        assert ask(spoilt, torch.zeros(19), None)[0, 0, :13].isnan().all()
        for bad in (math.nan, math.inf):
            numbers = rows.clone()
            numbers[5] = bad
            found = ask(q, numbers, None)
            finite = by == "mean" and bad == math.inf  # something over infinity is 0, or NaN
            assert finite or not found[..., :6].isfinite().any()
            assert torch.equal(found[..., 6:], ask(q, rows, None)[..., 6:])


@BOTH
@pytest.mark.parametrize("leaf", ["q", "k", "sinks", "bias", "rows"])
@pytest.mark.parametrize("with_values", [False, True])
def test_a_gradient_is_refused_in_words_whatever_it_is_asked_of(
    with_values: bool, leaf: str, backend: str
) -> None:
    leaves = {"q": torch.randn(1, 3, 5, 2), "k": torch.randn(1, 1, 7, 2), "sinks": torch.randn(3)}
    leaves |= {"bias": torch.randn(5, 7), "rows": torch.rand(3, 5)}
    leaves[leaf].requires_grad_()
    wants = Wants(received=Received(rows=leaves["rows"], by="mean", queries=(1, 4)))
    v = torch.randn(1, 1, 7, 2) if with_values else None
    rule: dict[str, Any] = {"sinks": leaves["sinks"], "bias": DenseBias(leaves["bias"])}
    found: Any = observe(leaves["q"], leaves["k"], v, **rule, wants=wants, backend=backend).received
    for part in (found.value, found.mean, found.seen_by, found.row_weight):
        with pytest.raises(RuntimeError, match="`received` has no gradient: gradients flow thro"):
            torch.autograd.grad(part.sum(), leaves[leaf], retain_graph=True)
    with torch.no_grad():
        quiet: Any = observe(leaves["q"], leaves["k"], v, **rule, wants=wants, backend=backend)
    assert not quiet.received.value.requires_grad


@BY
def test_compiled_equals_eager(by: str) -> None:
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        asked = Received(by=by, rows=rows, queries=slice(-7, None))
        seen: Any = observe(q, k, None, mask=Causal(), wants=Wants(received=asked)).received
        return seen.value, seen.seen_by

    given = torch.randn(2, 6, 11, 5), torch.randn(2, 2, 11, 5), torch.rand(6, 11)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), run(*given))


def test_one_compiled_graph_serves_the_last_queries_of_texts_of_all_lengths() -> None:
    torch._dynamo.reset()
    graphs, wants = [], Wants(received=Received(by="max", queries=slice(-7, -1)))

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(q: Tensor) -> Tensor:
        seen: Any = observe(q, q, None, mask=Causal(), wants=wants, backend="reference").received
        return seen.value

    compiled = torch.compile(run, fullgraph=True, backend=keep, dynamic=True)
    for n in (11, 13, 17):
        q = torch.randn(2, 3, n, 5)
        torch.testing.assert_close(compiled(q), run(q))
    assert len(graphs) == 1


def test_row_weights_may_be_vectorised_over_and_refuse_a_gradient_there_too() -> None:
    q, many = torch.randn(1, 2, 7, 4), torch.rand(3, 7)

    def ask(rows: Tensor) -> Tensor:
        seen: Any = observe(q, q, None, mask=Causal(), wants=Wants(received=Received(rows=rows)))
        return seen.received.total

    torch.testing.assert_close(torch.vmap(ask)(many), torch.stack([ask(rows) for rows in many]))
    with pytest.raises(RuntimeError, match="`received` has no gradient"):
        torch.func.grad(lambda rows: ask(rows).sum())(many[0])


@BOTH
@pytest.mark.usefixtures("small_tiles")
def test_a_range_beside_other_wants_leaves_all_of_them_whole(backend: str) -> None:
    """Together they need more rows than each of them alone."""
    made, weights, seen = matrix("causal")
    picture, asked = Map(height=2, width=3, queries=(0, 2), keys=(5, 11)), Received(queries=(9, 30))
    for more in ({}, {"top": 3}, {"above": 0.2}, {"rows": [33, 2]}, {"entropy": True}):
        wants = Wants(received=asked, map=picture, **more)  # type: ignore[arg-type]
        found: Any = observe(made.q, made.k, None, **made.call, wants=wants, backend=backend)
        torch.testing.assert_close(found.received.value, expect(weights, seen, asked))
        cells = weights[:, :, 0:2, 5:11].unflatten(-1, (3, 2)).mean(-1)
        torch.testing.assert_close(found.map, cells)
        if "top" in more:
            torch.testing.assert_close(found.top.weight, weights.topk(3)[0])
        if "entropy" in more:
            torch.testing.assert_close(found.entropy, torch.special.entr(weights).sum(-1))
        if "rows" in more:
            torch.testing.assert_close(found.rows, weights[:, :, [33, 2]])
    alone: Any = observe(made.q, made.k, None, **made.call, wants=Wants(rows=[7]), backend=backend)
    torch.testing.assert_close(alone.rows, weights[:, :, [7]])
    none: Any = observe(made.q, made.k, None, **made.call, wants=Wants(rows=[]), backend=backend)
    assert none.rows.shape == (2, 6, 0, 53)


LONG, LAST = 131_072, 32


@pytest.mark.parametrize("with_values", [False, True])
def test_only_tiles_of_the_range_are_walked(
    with_values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_made = {"first pass": 0, "second pass": 0}

    def count(name: str, make: Any) -> Any:
        def counting(*given: Any) -> Any:
            scores = make(*given)
            scores_made[name] += scores.numel()
            return scores

        return counting

    monkeypatch.setattr(blockwise._Band, "score", count("first pass", blockwise._Band.score))
    monkeypatch.setattr(stats, "raw_scores", count("second pass", stats.raw_scores))
    q, k = torch.randn(1, 1, 4096, 4), torch.randn(1, 1, 4096, 4)
    wants = Wants(received=Received(queries=slice(-LAST, None)))
    observe(q, k, k if with_values else None, mask=Causal(), wants=wants)
    # With values every row has an output, for which all are walked once.
    first = scores_made["first pass"]
    assert first > 4096**2 / 2 if with_values else first == LAST * 4096
    assert scores_made["second pass"] == LAST * 4096


GROWTH = """
import torch
from regard.ops import Causal, Received, Wants, observe
torch.set_num_threads(1)
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
torch.manual_seed(1)
q, k = torch.randn(1, 2, {long}, 8), torch.randn(1, 1, {long}, 8)
def look(q, k):
    asked = Received(queries=slice(-{last}, None), rows=torch.linspace(0, 1, q.shape[2]))
    return observe(q, k, None, mask=Causal(), wants=Wants(received=asked)).received.total
look(q[:, :, :4001], k[:, :, :4001])
before = peak()
found = look(q, k)
grown = peak() - before
part = q[:, :, -{last}:] @ k.mT / 8 ** 0.5
hidden = torch.ones({last}, {long}, dtype=torch.bool).triu(1 + {long} - {last})
weights = part.masked_fill(hidden, -torch.inf).softmax(-1)
truth = (torch.linspace(0, 1, {long})[-{last}:, None] * weights).sum(2)
print(grown, float((found - truth).abs().max() / truth.max()))
"""


def test_131072_tokens_in_one_call_take_memory_for_rows_and_keys_alone() -> None:
    script = GROWTH.format(long=LONG, last=LAST)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown, off = map(float, done.stdout.split())
    # q is 8 MiB, and the walk holds a few arrays of its size; all weights would be 128 GiB.
    assert grown < 100, f"the peak grew by {grown} MiB"
    assert off < LAST * torch.finfo(torch.float32).eps


def test_layers_answer_it_and_a_record_says_that_it_keeps_the_plain_sum() -> None:
    torch.manual_seed(5)
    layer, x = regard.MultiHeadAttention(12, 3, causal=True), torch.randn(1, 7, 12)
    asked = Received(by="max", queries=slice(-3, None))
    with torch.no_grad():
        weights: Any = layer.observe(x, wants=Wants(weights=True)).weights
        seen: Any = layer.observe(x, wants=Wants(received=asked)).received
        model = nn.Sequential(layer)
        with regard.observing(model, Wants(received=asked)) as calls:
            model(x)
        beside: Any = calls["0"].received
    torch.testing.assert_close(seen.value, weights[:, :, -3:].amax(2))
    torch.testing.assert_close(beside.value, seen.value)
    words = "a record keeps the plain sum that keys receive from all queries: received=True"
    with pytest.raises(ValueError, match=words), regard.watch(model, Wants(received=asked)):
        model(x)
    with torch.no_grad(), regard.watch(model, Wants(received=Received())) as record:
        model(x)
    torch.testing.assert_close(torch.from_numpy(record.received(0)), weights[0].sum(1))
