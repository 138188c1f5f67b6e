"""What observe tells: every want, on both backends, against the plain formula's matrix.

`EXPECTED` reads each want off the whole matrix of weights with as little shared with the package
as possible; small matrices are worked by hand. `looking` makes queries and keys that give exactly
the weights asked for.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from plain import CASES, Case, dense_bias, dense_mask, plain
from torch import Tensor

from regard.ops import (
    Causal,
    DenseBias,
    Lengths,
    Map,
    Observation,
    Wants,
    Window,
    attention,
    blockwise,
    explain,
    observe,
)

BOTH = pytest.mark.parametrize("backend", ["reference", "blockwise"])
NAMES = [
    *("plain", "causal", "window", "lengths", "joined", "given positions", "alibi", "bias of -inf"),
    *("scale", "softcap", "sinks", "one group", "no groups", "more queries than keys", "one query"),
    *("no keys", "everything"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles far smaller than the inputs, so that every answer is put together from many."""
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 8)


class Matrix:
    """The whole matrix of a case: weights, log-sums, and what may be seen."""

    def __init__(self, made: Case) -> None:
        call, bias = made.call, dense_bias(made)
        self.seen = dense_mask(made) & (bias != -math.inf)
        numbers = {name: call.get(name) for name in ("scale", "softcap", "sinks")}
        self.output, self.weights = plain(made.q, made.k, made.v, self.seen, bias, **numbers)
        k = made.k.repeat_interleave(made.q.shape[1] // made.k.shape[1], 1)
        scores = made.q @ k.mT * (call.get("scale") or made.q.shape[3] ** -0.5)
        if "softcap" in call:
            scores = call["softcap"] * torch.tanh(scores / call["softcap"])
        scores = (scores + bias).masked_fill(~self.seen, -math.inf)
        self.logit = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(-1)
        if "sinks" in call:
            column = call["sinks"].view(-1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        self.lse = scores.exp().sum(-1).log()
        self.T, self.S = self.weights.shape[2:]


@functools.cache
def matrix(name: str) -> tuple[Case, Matrix]:
    with torch.no_grad():
        made = CASES[name]()
        return made, Matrix(made)


def mean_by_area(weights: Tensor, picture: Map) -> Tensor:
    """The picture in exact shares: how much of each row and key lies in each cell."""
    T, S = weights.shape[2:]

    def shares(cells: int, first: int, last: int, size: int) -> Tensor:
        step = Fraction(last - first, cells)
        rows = []
        for x in range(cells):
            a, z = first + x * step, first + (x + 1) * step
            inside = [max(Fraction(0), min(z, n + 1) - max(a, Fraction(n))) for n in range(size)]
            rows.append([float(part / step) for part in inside])
        return torch.tensor(rows, dtype=weights.dtype)

    down = shares(picture.height, *(picture.queries or (0, T)), T)
    across = shares(picture.width, *(picture.keys or (0, S)), S)
    return torch.einsum("xt,bhts,ys->bhxy", down, weights, across)


def same(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth.to(ours.dtype), rtol=1e-11, atol=1e-12)


def check_lse(seen: Any, m: Matrix) -> None:
    same(seen.lse, m.lse)


def check_entropy(seen: Any, m: Matrix) -> None:
    same(seen.entropy, torch.special.entr(m.weights).sum(-1))


def check_peak(seen: Any, m: Matrix) -> None:
    same(seen.peak.weight, m.weights.amax(-1) if m.S else m.weights.sum(-1))
    none = ~m.seen.any(-1)
    assert torch.equal(seen.peak.key == -1, none)
    if m.S:
        there = m.weights.gather(-1, seen.peak.key.clamp(min=0)[..., None])[..., 0]
        same(there.masked_fill(none, 0.0), seen.peak.weight)
    same(seen.peak.logit, m.logit)


def check_distance(seen: Any, m: Matrix) -> None:
    i, j = torch.arange(m.T)[:, None] + m.S - m.T, torch.arange(m.S)
    same(seen.distance, (m.weights * (i - j)).sum(-1))


def check_mass(seen: Any, m: Matrix) -> None:
    same(seen.mass, m.weights[..., torch.arange(m.S) % 3 == 1].sum(-1))


def check_received(seen: Any, m: Matrix) -> None:
    same(seen.received.total, m.weights.sum(2))
    count = m.seen.sum(2)
    assert torch.equal(seen.received.seen_by.long(), count)
    same(seen.received.mean, m.weights.sum(2) / count.clamp(min=1))


def check_top(seen: Any, m: Matrix) -> None:
    ranked = torch.nn.functional.pad(m.weights, (0, 5)).sort(-1, descending=True)[0][..., :5]
    same(seen.top.weight, ranked)
    few = m.seen.sum(-1, keepdim=True) <= torch.arange(5)
    assert torch.equal(seen.top.key == -1, few)
    if m.S:
        there = m.weights.gather(-1, seen.top.key.clamp(min=0)).masked_fill(few, 0.0)
        same(there, seen.top.weight)
        keys = torch.where(few, -torch.arange(1, 6), seen.top.key).sort(-1)[0]
        assert (keys.diff(dim=-1) != 0).all(), "a key was named twice"


def check_above(seen: Any, m: Matrix) -> None:
    same(seen.above.to_dense(), m.weights * (m.weights >= 0.03))
    assert len(seen.above.offsets) == m.lse.numel() + 1
    for b, h, t in ((0, 0, 0), (1, 5, m.T - 1), (1, 2, m.T // 2)):
        keys, weights = seen.above.row(b, h, t)
        assert keys.tolist() == (m.weights[b, h, t] >= 0.03).nonzero().flatten().tolist()
        same(weights, m.weights[b, h, t, keys])


PICTURES = {
    "map": Map(height=5, width=7),
    "fine map": Map(height=101, width=103),
    "map of a window": Map(height=3, width=5, queries=(0, 1), keys=(2, 29)),
}


def check_map(seen: Any, m: Matrix, picture: Map = PICTURES["map"]) -> None:
    same(seen.map, mean_by_area(m.weights, picture))


def check_rows(seen: Any, m: Matrix) -> None:
    same(seen.rows, m.weights[:, :, [m.T - 1, 0, m.T // 2, 0]])


def check_weights(seen: Any, m: Matrix) -> None:
    same(seen.weights, m.weights)


Asked = tuple[Callable[[int, int], dict[str, Any]], Callable[[Any, Matrix], None]]
EXPECTED: dict[str, Asked] = {
    "lse": (lambda T, S: {"lse": True}, check_lse),
    "entropy": (lambda T, S: {"entropy": True}, check_entropy),
    "peak": (lambda T, S: {"peak": True}, check_peak),
    "distance": (lambda T, S: {"distance": True}, check_distance),
    "mass": (lambda T, S: {"mass": torch.arange(S) % 3 == 1}, check_mass),
    "received": (lambda T, S: {"received": True}, check_received),
    "top": (lambda T, S: {"top": 5}, check_top),
    "above": (lambda T, S: {"above": 0.03}, check_above),
    "map": (lambda T, S: {"map": (5, 7)}, check_map),
    "rows": (lambda T, S: {"rows": [T - 1, 0, T // 2, 0]}, check_rows),
    "weights": (lambda T, S: {"weights": True}, check_weights),
}
STATISTICS = [want for want in EXPECTED if want != "weights"]


def fitting(wanted: list[str], T: int, S: int) -> Wants:
    """All of the wanted that a matrix of T × S can answer."""
    asked: dict[str, Any] = {}
    for want in wanted:
        if want != "map" or (T and S):
            asked |= EXPECTED[want][0](T, S)
    return Wants(**asked)


@BOTH
@pytest.mark.parametrize("name", NAMES)
def test_every_want_is_what_the_plain_matrix_says(name: str, backend: str) -> None:
    made, m = matrix(name)
    wanted = [want for want in EXPECTED if want != "weights" or backend == "reference"]
    wants = fitting(wanted, m.T, m.S)
    seen = observe(made.q, made.k, made.v, **made.call, wants=wants, backend=backend)
    assert seen.output is not None
    same(seen.output, m.output)
    for want in wanted:
        if getattr(wants, want) is not None:
            EXPECTED[want][1](seen, m)


@BOTH
@pytest.mark.parametrize("want", STATISTICS)
def test_want_asked_alone_is_told_alone_and_the_same(want: str, backend: str) -> None:
    made, m = matrix("everything")
    call = {**made.call, "backend": backend}
    alone = observe(made.q, made.k, made.v, **call, wants=fitting([want], m.T, m.S))
    EXPECTED[want][1](alone, m)
    told = [name for name, value in vars(alone).items() if value is not None]
    assert told == ["output", want]


@BOTH
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("name", ["joined", "one query", "sinks"])
def test_map_of_any_resolution_and_window_is_the_mean_by_area(
    name: str, picture: str, backend: str
) -> None:
    made, m = matrix(name)
    wants = Wants(map=PICTURES[picture])
    seen = observe(made.q, made.k, None, **made.call, wants=wants, backend=backend)
    check_map(seen, m, PICTURES[picture])


@BOTH
def test_mass_may_differ_from_sample_to_sample(backend: str) -> None:
    made, m = matrix("plain")
    keys = torch.rand(2, m.S) < 0.5
    seen: Any = observe(made.q, made.k, None, wants=Wants(mass=keys), backend=backend)
    for b in (0, 1):
        same(seen.mass[b], m.weights[b][..., keys[b]].sum(-1))


@BOTH
def test_above_keeps_at_most_one_over_t_in_a_row(backend: str) -> None:
    made, _ = matrix("no groups")
    for t in (0.2, 0.11, 0.07):
        seen = observe(made.q, made.k, None, wants=Wants(above=t), backend=backend)
        assert 0 < int(seen.above.offsets.diff().max()) <= 1 / t  # type: ignore[union-attr]


def parts_of(seen: Observation) -> dict[str, Tensor]:
    """Every tensor of a record by name."""
    found: dict[str, Tensor] = {}
    for name, value in vars(seen).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif value is not None:
            inside = {part: x for part, x in vars(value).items() if isinstance(x, Tensor)}
            found |= {f"{name}.{part}": x for part, x in inside.items()}
    return found


def assert_same_bits(one: Observation, other: Observation, but: tuple[str, ...] = ()) -> None:
    left, right = parts_of(one), parts_of(other)
    assert left.keys() - but == right.keys() - but
    for name in left.keys() - but:
        assert torch.equal(left[name], right[name]), name


@BOTH
@pytest.mark.parametrize("name", ["plain", "joined", "everything"])
def test_looking_twice_gives_the_same_bits_and_changes_no_output(name: str, backend: str) -> None:
    made, m = matrix(name)
    call = {**made.call, "backend": backend}
    wants = fitting(STATISTICS, m.T, m.S)
    once = observe(made.q, made.k, made.v, **call, wants=wants)
    assert_same_bits(once, observe(made.q, made.k, made.v, **call, wants=wants))
    assert torch.equal(once.output, attention(made.q, made.k, made.v, **call))  # type: ignore[arg-type]
    nothing = observe(made.q, made.k, made.v, **call, wants=Wants())
    assert list(parts_of(nothing)) == ["output"]
    assert torch.equal(once.output, nothing.output)  # type: ignore[arg-type]


@BOTH
def test_without_values_everything_else_is_told_in_the_same_bits(backend: str) -> None:
    made, m = matrix("everything")
    call = {**made.call, "backend": backend, "wants": fitting(STATISTICS, m.T, m.S)}
    blind = observe(made.q, made.k, None, **call)
    assert blind.output is None
    assert_same_bits(blind, observe(made.q, made.k, made.v, **call), but=("output",))


@BOTH
def test_dropout_changes_the_output_and_no_statistic(backend: str) -> None:
    made, m = matrix("everything")
    call = {**made.call, "backend": backend, "dropout": 0.3, "seed": 7}
    wants = fitting(STATISTICS, m.T, m.S)
    dropped = observe(made.q, made.k, made.v, **call, wants=wants)
    whole = observe(made.q, made.k, made.v, **made.call, backend=backend, wants=wants)
    assert_same_bits(dropped, whole, but=("output",))
    assert not torch.equal(dropped.output, whole.output)  # type: ignore[arg-type]
    assert torch.equal(dropped.output, attention(made.q, made.k, made.v, **call))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_half_types_are_float32_and_the_same_on_both(kind: torch.dtype) -> None:
    made = CASES["joined"]().cast(kind)
    wants = fitting(["lse", "entropy", "peak", "distance", "mass", "received", "map"], 37, 53)
    with torch.no_grad():
        both = [
            parts_of(observe(made.q, made.k, made.v, **made.call, wants=wants, backend=backend))
            for backend in ("reference", "blockwise")
        ]
    for name in both[0].keys() - {"output", "peak.key"}:
        assert both[1][name].dtype == torch.float32
        torch.testing.assert_close(both[1][name], both[0][name], rtol=1e-4, atol=1e-5)
    assert both[1]["output"].dtype == kind


def flows(want: str, backend: str) -> None:
    """First and second derivatives of one answer to everything that goes into it."""
    sizes = ((1, 3, 3, 2), (1, 1, 5, 2), (3,), (3, 5), (1, 1, 5, 2))[: 5 if want == "output" else 4]
    mask = (~Window(3, 0) | Lengths(torch.tensor([1]))) & ~(Window(0, 0) & Causal("start"))

    def answer(q: Tensor, k: Tensor, sinks: Tensor, bias: Tensor, v: Tensor | None = None) -> Any:
        wants = Wants(**({want: True} if want != "output" else {}))
        call = {"softcap": 2.3, "scale": 0.7, "sinks": sinks, "bias": DenseBias(bias)}
        return getattr(observe(q, k, v, mask=mask, **call, wants=wants, backend=backend), want)

    leaves = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in sizes]
    assert torch.autograd.gradcheck(answer, leaves)
    assert torch.autograd.gradgradcheck(answer, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("want", ["output", "lse", "entropy", "weights"])
def test_gradients_flow(want: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "SMALLEST", 2)
    if want == "weights" and backend == "blockwise":
        with pytest.raises(
            ValueError, match='"blockwise" refuses this call: it never builds the T'
        ):
            flows(want, backend)
    else:
        flows(want, backend)


@BOTH
def test_gradients_of_rows_with_nothing_to_see_are_zeros(backend: str) -> None:
    q, k, v = (torch.randn(2, 1, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = Lengths(torch.tensor([2, 0]))
    wants = Wants(lse=True, entropy=True)
    seen: Any = observe(q, k, v, mask=mask, wants=wants, backend=backend)
    (seen.output.sum() + seen.lse[0].sum() + seen.entropy.sum()).backward()
    for x in (q, k, v):
        assert x.grad is not None and x.grad[0].isfinite().all() and x.grad[0].any()
        assert not x.grad[1].any()


@BOTH
@pytest.mark.parametrize("want", [w for w in STATISTICS if w not in ("lse", "entropy")])
def test_what_has_no_gradient_refuses_one_in_words(want: str, backend: str) -> None:
    made, m = matrix("joined")
    q, k, v = (x.clone().requires_grad_() for x in (made.q, made.k, made.v))
    seen = observe(q, k, v, **made.call, wants=fitting([want], m.T, m.S), backend=backend)
    floats = {name: x for name, x in parts_of(seen).items() if x.is_floating_point()}
    assert floats.pop("output").requires_grad
    if want == "received":
        floats["received.mean"] = seen.received.mean  # type: ignore[union-attr]
    assert floats
    for x in floats.values():
        words = f"`{want}` has no gradient: gradients flow through output, lse, entropy and weights"
        with pytest.raises(RuntimeError, match=re.escape(words)):
            torch.autograd.grad(x.sum(), q, retain_graph=True)
    with torch.no_grad():
        silent = observe(q, k, v, **made.call, wants=fitting([want], m.T, m.S), backend=backend)
    assert not any(x.requires_grad for x in parts_of(silent).values())
    EXPECTED[want][1](silent, m)


@BOTH
def test_row_that_looks_at_nan_is_nan_in_every_answer_and_no_other_row_is(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(3))
    wants = Wants(
        lse=True, entropy=True, peak=True, distance=True, mass=torch.ones(5, dtype=torch.bool),
        received=True, top=2, above=0.01, map=(5, 5), rows=range(5),
    )  # fmt: skip
    call: dict[str, Any] = {"mask": Causal(), "wants": wants, "backend": backend}
    clean: Any = observe(q, k, v, **call)
    q[0, 0, 2, 1] = math.nan
    seen: Any = observe(q, k, v, **call)
    bad = torch.zeros(1, 2, 5, dtype=torch.bool)
    bad[0, 0, 2] = True
    of_rows = ("output", "lse", "entropy", "distance", "mass", "rows", "peak.weight", "peak.logit")
    for name in (*of_rows, "top.weight"):
        ours, whole = parts_of(seen)[name], parts_of(clean)[name]
        assert torch.equal(ours[~bad], whole[~bad]), name
        assert ours[bad].flatten()[0].isnan(), f"{name} tells a number for a row that has none"
    assert torch.equal(seen.peak.key[~bad], clean.peak.key[~bad])
    assert seen.map[0, 0, 2, :3].isnan().all()
    assert torch.equal(seen.map[~bad], clean.map[~bad])
    assert seen.received.total[0, 0, :3].isnan().all(), "the keys that the row may see"
    assert torch.equal(seen.received.total[0, 1], clean.received.total[0, 1])
    assert not seen.above.row(0, 0, 2)[1].isfinite().any()
    for h, t in ((0, 0), (0, 4), (1, 2)):
        assert torch.equal(seen.above.row(0, h, t)[1], clean.above.row(0, h, t)[1])


@pytest.mark.parametrize(
    "sizes", [(0, 3, 5, 7, 2), (2, 0, 5, 7, 2), (2, 3, 0, 7, 2), (2, 3, 5, 0, 2), (2, 3, 5, 7, 0)]
)
def test_empty_inputs_have_empty_answers_on_both(sizes: tuple[int, ...]) -> None:
    B, H, T, S, D = sizes
    q, k = torch.randn(B, H, T, D), torch.randn(B, min(H, 1), S, D)
    wants = fitting([want for want in STATISTICS if T or want != "rows"], T, S)
    both = [
        observe(q, k, k, mask=Causal(), wants=wants, backend=backend)
        for backend in ("reference", "blockwise")
    ]
    for name, ours in parts_of(both[1]).items():
        if D or not name.endswith(".key"):  # without a width all weights are alike
            torch.testing.assert_close(ours, parts_of(both[0])[name])
    assert both[0].above.to_dense().shape == (B, H, T, S)  # type: ignore[union-attr]
    if not T or not S:
        with pytest.raises(ValueError, match="must not be empty"):
            observe(q, k, k, wants=Wants(map=(2, 2)))


def test_weights_come_from_reference_everything_else_from_tiles_nothing_from_fused() -> None:
    q = torch.randn(1, 1, 3, 5)
    assert explain(q, q, q, wants=Wants(lse=True)).chosen == "blockwise"
    assert explain(q, q, q, wants=Wants(weights=True)).chosen == "reference"
    for backend in ("sdpa", "flex"):
        with pytest.raises(
            ValueError, match="refuses this call: it tells nothing about the weights"
        ):
            observe(q, q, q, wants=Wants(lse=True), backend=backend)


TOKENS, PART, WIDTH = 32768, 4096, 64
LONG = {
    "lse": True, "entropy": True, "peak": True, "distance": True, "received": True,
    "top": 5, "above": 0.01, "map": (61, 67), "rows": [3, 1999],
}  # fmt: skip


def test_every_want_of_4096_tokens_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k = (torch.randn(1, 1, TOKENS, WIDTH)[:, :, :PART] for _ in range(2))
    wants = Wants(**LONG, mass=torch.arange(PART) % 7 == 0)
    ours: Any = observe(q, k, k, mask=Causal(), wants=wants, backend="blockwise")
    truth: Any = observe(q, k, k, mask=Causal(), wants=wants, backend="reference")
    left, right = parts_of(ours), parts_of(truth)
    for name in left.keys() - {"peak.key", "top.key", "above.key", "above.weight", "above.offsets"}:
        torch.testing.assert_close(left[name], right[name], rtol=2e-5, atol=2e-6, msg=name)
    assert (left["peak.key"] == right["peak.key"]).float().mean() > 0.999
    # Weights within rounding of the threshold may fall on either side of it.
    strict: Any = observe(q, k, None, mask=Causal(), wants=Wants(above=0.0101), backend="reference")
    dense, least = ours.above.to_dense(), strict.above.to_dense()
    torch.testing.assert_close(dense[least > 0], least[least > 0], rtol=2e-5, atol=0)
    weights = truth.above.to_dense()[dense > 0]
    assert (weights > 0).float().mean() > 0.999 and (dense[dense > 0] >= 0.01).all()


GROWTH = """
import torch
from regard.ops import Wants, observe
torch.set_num_threads(1)
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
def look(q, k, v):
    asked = {asked}
    return observe(q, k, v, wants=Wants(mass=torch.arange(k.shape[2]) % 7 == 0, **asked))
q, k, v = (torch.randn(1, 1, {tokens}, {width}) for _ in range(3))
look(*(x[:, :, :2003] for x in (q, k, v)))
before = peak()
look(q, k, v)
print(peak() - before)
"""


def test_observe_on_32768_tokens_needs_under_200_MB() -> None:
    script = GROWTH.format(asked=LONG, tokens=TOKENS, width=WIDTH)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200 * 1000**2 / 2**20, f"the peak grew by {done.stdout.strip()} MiB"
