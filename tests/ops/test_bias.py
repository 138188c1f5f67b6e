"""Biases: every rendering of every bias against numbers filled in one by one with plain Python.

`claims` writes each bias twice: as a user does, and as a sentence about one query and one key. The
gradients of the numbers a bias holds are compared with autograd through the dense rendering.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from regard.ops import (
    ALiBi,
    Bias,
    Causal,
    DenseBias,
    RelativeTable,
    attention,
    blockwise,
    observe,
)
from regard.ops.bias import Sum, alibi_slopes, t5_bucket
from regard.ops.blockwise_backward import add_part
from regard.ops.call import Rule
from regard.ops.flex import score_function
from regard.ops.pack import pack, unpack
from regard.ops.shape import SampleTile, Shape, Tile
from regard.ops.wants import Wants

Adds = Callable[[int, int, int, int], float]

B, H = 3, 5
SHAPES = {
    "more keys": Shape(B, H, 7, 11),
    "more queries": Shape(B, H, 11, 7),
    "one query": Shape(B, H, 1, 13),
}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def bucket_by_hand(distance: int, both_ways: bool, n_buckets: int, max_distance: int) -> int:
    """T5's bucket of j - i as its paper tells it, in whole numbers wherever it can be."""
    start = 0
    if both_ways:
        n_buckets //= 2
        start = n_buckets if distance > 0 else 0
        far = abs(distance)
    else:
        far = max(-distance, 0)
    exact = n_buckets // 2
    if far < exact:
        return start + far
    steps = n_buckets - exact
    # The largest m with exact · (max_distance / exact)^(m / steps) <= far.
    grown = [m for m in range(steps) if far**steps * exact**m >= exact**steps * max_distance**m]
    return start + exact + max(grown)


@functools.cache
def claims(shape: Shape) -> dict[str, tuple[Bias, Adds]]:
    """Each bias with what it adds for sample b, head h, a query at position i and a key j."""
    T, S, off = shape.T, shape.S, shape.offset
    made = torch.Generator().manual_seed(7)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=made, dtype=torch.float64).requires_grad_()

    def whole(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=made)

    slopes, table, small = normal(H), normal(32, H), normal(9, H)
    every, heads, flat, keys = normal(B, H, T, S), normal(H, T, S), normal(T, S), normal(S)
    rows, samples, one = normal(B, 1, T, 1), normal(B, 1, 1, S), normal()
    at_t, at_bt = whole(0, 40, T), whole(0, 40, B, T)
    at_s, at_bs = torch.arange(S) - 2, whole(-3, 40, B, S)
    published = [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0]

    def n(x: Tensor) -> float:
        return float(x.detach())

    def near(h: int, gap: int) -> float:
        return -n(slopes[h]) * abs(gap)

    def looked_up(h: int, gap: int) -> float:
        return n(table[bucket_by_hand(gap, True, 32, 128), h])

    def earlier(h: int, gap: int) -> float:
        return n(small[bucket_by_hand(gap, False, 9, 13), h])

    def gap(b: int, i: int, j: int) -> int:
        return int(at_bs[b, j]) - int(at_bt[b, i - off])

    alibi, t5 = ALiBi(slopes=slopes), RelativeTable(table)
    back = RelativeTable(small, bidirectional=False, max_distance=13)
    return {
        "alibi": (ALiBi(H), lambda b, h, i, j: -published[h] * abs(i - j)),
        "learned alibi": (alibi, lambda b, h, i, j: near(h, i - j)),
        "table": (t5, lambda b, h, i, j: looked_up(h, j - i)),
        "one-way table": (back, lambda b, h, i, j: earlier(h, j - i)),
        "dense": (DenseBias(every), lambda b, h, i, j: n(every[b, h, i - off, j])),
        "dense of heads": (DenseBias(heads), lambda b, h, i, j: n(heads[h, i - off, j])),
        "dense of pairs": (DenseBias(flat), lambda b, h, i, j: n(flat[i - off, j])),
        "dense of keys": (DenseBias(keys), lambda b, h, i, j: n(keys[j])),
        "dense of queries": (DenseBias(rows), lambda b, h, i, j: n(rows[b, 0, i - off, 0])),
        "dense of samples": (DenseBias(samples), lambda b, h, i, j: n(samples[b, 0, 0, j])),
        "dense of one": (DenseBias(one), lambda b, h, i, j: n(one)),
        "alibi at": (alibi.at(at_t), lambda b, h, i, j: near(h, int(at_t[i - off]) - j)),
        "alibi at slots": (
            alibi.at(at_bt, at_s),
            lambda b, h, i, j: near(h, int(at_bt[b, i - off]) - j + 2),
        ),
        "table at slots": (t5.at(at_bt, at_bs), lambda b, h, i, j: looked_up(h, gap(b, i, j))),
        "table at": (t5.at(at_t), lambda b, h, i, j: looked_up(h, j - int(at_t[i - off]))),
        "sum": (DenseBias(flat) + alibi, lambda b, h, i, j: n(flat[i - off, j]) + near(h, i - j)),
        "sum with itself": (alibi + alibi, lambda b, h, i, j: 2 * near(h, i - j)),
        "sum at slots": (
            (alibi + back).at(at_bt, at_bs) + DenseBias(keys),
            lambda b, h, i, j: near(h, gap(b, i, j)) + earlier(h, gap(b, i, j)) + n(keys[j]),
        ),
    }


@functools.cache
def pairs(name: str, shape: Shape) -> Tensor:
    """What the sentence adds to each score, (B, H, T, S), one by one."""
    adds = claims(shape)[name][1]
    return torch.tensor(
        [
            [
                [[adds(b, h, t + shape.offset, j) for j in range(shape.S)] for t in range(shape.T)]
                for h in range(shape.H)
            ]
            for b in range(shape.B)
        ],
        dtype=torch.float64,
    )


every_bias = pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, id=f"{name}-{kind}".replace(" ", "_"))
        for kind, shape in SHAPES.items()
        for name in claims(shape)
    ],
)


def close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=1e-13, atol=1e-13)


def grid(shape: Shape, height: int, width: int) -> Iterable[Tile]:
    for t in range(0, shape.T, height):
        for s in range(0, shape.S, width):
            yield Tile(t, min(t + height, shape.T), s, min(s + width, shape.S))


@every_bias
def test_dense_adds_what_the_sentence_says_to_every_pair(name: str, shape: Shape) -> None:
    bias = claims(shape)[name][0]
    close(bias.dense(shape, dtype=torch.float64).expand(*shape), pairs(name, shape))
    assert bias.dense(shape).dtype == torch.float32


@every_bias
def test_block_is_the_tile_of_dense(name: str, shape: Shape) -> None:
    for tile in grid(shape, 3, 5):
        t0, t1, s0, s1 = tile
        block = claims(shape)[name][0].block(shape, tile, torch.device("cpu"), torch.float64)
        whole = pairs(name, shape)[:, :, t0:t1, s0:s1]
        close(block.expand(B, H, t1 - t0, s1 - s0), whole)
        for b in range(B):
            part = SampleTile.of(tile, b, b + 1)
            one = claims(shape)[name][0].block(shape, part, torch.device("cpu"), torch.float64)
            close(one.expand(1, H, t1 - t0, s1 - s0), whole[b, None])


@every_bias
def test_flex_function_adds_to_single_scores(name: str, shape: Shape) -> None:
    change = score_function(Rule(shape=shape, bias=claims(shape)[name][0]))
    assert change is not None
    made = torch.Generator().manual_seed(5)
    for place in torch.randint(0, pairs(name, shape).numel(), (29,), generator=made).tolist():
        b, h, t, j = (int(x) for x in torch.unravel_index(torch.tensor(place), tuple(shape)))
        score = change(torch.tensor(0.5), *(torch.tensor(x) for x in (b, h, t, j)))
        assert score.shape == ()
        assert float(score.detach()) == pytest.approx(
            0.5 + float(pairs(name, shape)[b, h, t, j]), rel=1e-5, abs=1e-5
        )


@every_bias
def test_packed_and_unpacked_bias_is_the_same_bias(name: str, shape: Shape) -> None:
    bias = claims(shape)[name][0]
    packed = pack(Rule(shape=shape, bias=bias))
    again = unpack(packed, shape).bias
    assert type(again) is type(bias)
    assert again is not None
    close(again.dense(shape, dtype=torch.float64).expand(*shape), pairs(name, shape))
    assert [id(x) for x in again.leaves()] == [id(x) for x in bias.leaves()]
    assert again.relative == bias.relative


def test_packed_and_unpacked_rule_keeps_scale_softcap_mask_and_bias_apart() -> None:
    rule = Rule(
        shape=SHAPES["more keys"],
        scale=0.7,
        softcap=1.3,
        mask=~(Causal("start") | Causal()),
        bias=claims(SHAPES["more keys"])["sum"][0],
    )
    again = unpack(pack(rule), rule.shape)
    assert (again.scale, again.softcap, again.shape) == (0.7, 1.3, rule.shape)
    assert again.mask is not None
    assert again.mask.dense(rule.shape).int().tolist() == rule.mask.dense(rule.shape).int().tolist()  # type: ignore[union-attr]
    assert isinstance(again.bias, Sum)


@every_bias
def test_relative_bias_is_the_same_along_every_diagonal(name: str, shape: Shape) -> None:
    bias = claims(shape)[name][0]
    relative = ("alibi", "learned alibi", "table", "one-way table", "sum with itself")
    assert bias.relative == (name in relative)
    if bias.relative:
        for step in range(-shape.T + 1, shape.S):
            line = pairs(name, shape).diagonal(step, 2, 3)
            close(line, line[:1, :, :1].expand_as(line))


def gather(bias: Bias, grad: Tensor, shape: Shape, tiles: list[Tile]) -> list[Tensor]:
    """The gradients of a bias's leaves, as the tiled path gathers them."""
    parts: list[dict[Tile, Tensor]] = [{} for _ in bias.leaves()]
    for tile in tiles:
        part = grad[:, :, tile.t0 : tile.t1, tile.s0 : tile.s1]
        given = bias.grad_places(tile), bias.grad_block(part, shape, tile)
        for found, place, one in zip(parts, *given, strict=True):
            add_part(found, place, one)
    return bias.grad_join(parts, tiles)


@every_bias
@pytest.mark.parametrize(("height", "width"), [(3, 2), (101, 103)])
def test_gradients_gathered_from_tiles_are_autograds_through_dense(
    name: str, shape: Shape, height: int, width: int
) -> None:
    bias = claims(shape)[name][0]
    grad = torch.randn(*shape, dtype=torch.float64)
    leaves = bias.leaves()
    dense = bias.dense(shape, dtype=torch.float64).expand(*shape)
    expected = torch.autograd.grad(dense, leaves, grad) if dense.requires_grad else None
    gathered = gather(bias, grad, shape, list(grid(shape, height, width))[::-1])
    assert [x.shape for x in gathered] == [x.shape for x in leaves]
    if (
        name == "sum with itself"
    ):  # autograd names the shared slopes twice, each time with the whole
        gathered = [gathered[0] + gathered[1]] * 2
    for ours, theirs in zip(gathered, expected or [], strict=expected is not None):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@every_bias
def test_no_tiles_give_a_gradient_of_zeros(name: str, shape: Shape) -> None:
    bias = claims(shape)[name][0]
    for leaf, grad in zip(bias.leaves(), gather(bias, torch.zeros(0), shape, []), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize(
    "make",
    [lambda x: ALiBi(slopes=x[0]), RelativeTable, lambda x: DenseBias(x[0, :, None, None])],
    ids=["alibi", "table", "dense"],
)
def test_gradient_over_many_tiles_is_rounded_once(
    make: Callable[[Tensor], Bias], kind: torch.dtype
) -> None:
    shape = Shape(B, H, 101, 103)
    values = torch.rand(32, H)
    grad = torch.rand(*shape) / 128
    gathered = []
    for dtype in (kind, torch.float64):
        bias = make(values.to(dtype))
        part = grad.to(torch.float64 if dtype == torch.float64 else torch.float32)
        gathered.append(gather(bias, part, shape, list(grid(shape, 7, 5)))[0])
    ours, truth = gathered
    assert ours.dtype == kind
    eps = max(torch.finfo(kind).eps, 16 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(ours.double(), truth, rtol=eps, atol=0)


@every_bias
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_attention_adds_the_bias_and_teaches_it(
    name: str, shape: Shape, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 3)
    q, k, v = (torch.randn(B, H, n, 3, dtype=torch.float64) for n in (shape.T, shape.S, shape.S))
    bias, leaves = claims(shape)[name][0], claims(shape)[name][0].leaves()
    later = torch.ones(shape.T, shape.S, dtype=torch.bool).triu(shape.offset + 1)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / 3**0.5
    weights = (scores + bias.dense(shape, dtype=torch.float64)).exp().masked_fill(later, 0.0)
    truth = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v
    seen = attention(q, k, v, mask=Causal(), bias=bias, backend=backend)
    torch.testing.assert_close(seen, truth, rtol=1e-12, atol=1e-12)
    if truth.requires_grad:
        pull = torch.randn_like(truth)
        ours = torch.autograd.grad(seen, leaves, pull)
        for left, right in zip(ours, torch.autograd.grad(truth, leaves, pull), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_lowest_number_of_each_type_and_minus_infinity_both_hide_a_key(
    kind: torch.dtype, backend: str
) -> None:
    q, k, v = (torch.randn(1, 1, n, 3).to(kind) for n in (5, 7, 7))
    hidden = torch.rand(5, 7) < 0.5
    hidden[2] = True
    added = torch.randn(5, 7).to(kind)
    results = [
        attention(q, k, v, bias=added.masked_fill(hidden, low), backend=backend)
        for low in (-math.inf, torch.finfo(kind).min)
    ]
    assert torch.equal(*results)
    assert torch.equal(results[0][0, 0, 2], torch.zeros(3, dtype=kind))
    lowest = DenseBias(added.masked_fill(hidden, torch.finfo(kind).min))
    dense = lowest.dense(Shape(1, 1, 5, 7), dtype=torch.float64)
    assert torch.equal(dense == -math.inf, hidden)
    seen = observe(q, k, v, bias=lowest, wants=Wants(lse=True, peak=True))
    assert float(seen.lse[0, 0, 2]) == -math.inf  # type: ignore[index]
    assert int(seen.peak.key[0, 0, 2]) == -1  # type: ignore[union-attr]


def test_lowest_bfloat16_number_widened_still_hides_a_key() -> None:
    lowest = torch.tensor([0.0, torch.finfo(torch.bfloat16).min], dtype=torch.bfloat16)
    for wide in (torch.float32, torch.float64):
        dense = DenseBias(lowest.to(wide)).dense(Shape(1, 1, 1, 2), dtype=torch.float64)
        assert dense.tolist() == [0.0, -math.inf]


def test_lowest_float16_number_widened_is_a_number() -> None:
    dense = DenseBias(torch.tensor([-65504.0])).dense(Shape(1, 1, 1, 1))
    assert dense.tolist() == [-65504.0]


def test_float32_bias_beyond_float16_is_the_same_on_every_backend() -> None:
    q, k, v = (torch.randn(1, 1, n, 3).half() for n in (3, 5, 5))
    bias = torch.full((3, 5), -1e5)
    truth = attention(q, k, v, bias=bias, backend="reference")
    assert truth.abs().max() > 0
    for backend in ("blockwise", "sdpa"):
        try:
            seen = attention(q, k, v, bias=bias, backend=backend)
        except ValueError as refused:
            assert "refuses this call" in str(refused)
            continue
        torch.testing.assert_close(seen, truth, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_narrow_positions_mean_what_wide_ones_mean(kind: torch.dtype) -> None:
    shape = Shape(1, 2, 3, 5)
    queries, keys = torch.tensor([0, 3, 127]), torch.tensor([0, 127, 5, 126, 2])
    for bias in (ALiBi(2), RelativeTable(torch.randn(32, 2))):
        narrow = bias.at(queries.to(kind), keys.to(kind)).dense(shape)
        assert torch.equal(narrow, bias.at(queries, keys).dense(shape))
        narrow = bias.at(queries.to(kind)).dense(shape)
        assert torch.equal(narrow, bias.at(queries).dense(shape))


def test_slopes_of_a_power_of_two_are_the_powers_of_the_first() -> None:
    assert alibi_slopes(1).tolist() == [2**-8]
    assert alibi_slopes(2).tolist() == [2**-4, 2**-8]
    assert alibi_slopes(8).tolist() == [0.5**n for n in range(1, 9)]
    assert alibi_slopes(16).tolist() == pytest.approx([2 ** (-n / 2) for n in range(1, 17)])


def test_slopes_of_other_counts_take_every_second_one_of_the_next_power() -> None:
    assert alibi_slopes(3).tolist() == [2**-4, 2**-8, 2**-2]
    assert alibi_slopes(5).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1]
    rest = [2 ** (-n / 2) for n in (1, 3, 5, 7)]
    assert alibi_slopes(12).tolist() == pytest.approx([0.5**n for n in range(1, 9)] + rest)


def test_alibi_punishes_both_directions_alike_and_itself_not() -> None:
    dense = ALiBi(slopes=torch.tensor([2.0])).dense(Shape(1, 1, 3, 3))
    assert dense.flatten().tolist() == [0, -2, -4, -2, 0, -2, -4, -2, 0]


def test_buckets_both_ways_by_hand() -> None:
    earlier = t5_bucket(-torch.arange(18), True, 8, 16)
    assert earlier.tolist() == [0, 1] + [2] * 4 + [3] * 12
    later = t5_bucket(torch.arange(1, 18), True, 8, 16)
    assert later.tolist() == [5] + [6] * 4 + [7] * 12


def test_buckets_one_way_by_hand() -> None:
    earlier = t5_bucket(-torch.arange(18), False, 8, 16)
    assert earlier.tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6] + [7] * 6
    assert t5_bucket(torch.arange(1, 5), False, 8, 16).tolist() == [0] * 4


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (9, 13), (4, 3), (17, 211)])
def test_bucket_of_every_distance_is_the_one_made_in_whole_numbers(
    both_ways: bool, n_buckets: int, max_distance: int
) -> None:
    distances = list(range(-307, 308))
    buckets = t5_bucket(torch.tensor(distances), both_ways, n_buckets, max_distance).tolist()
    truth = [bucket_by_hand(d, both_ways, n_buckets, max_distance) for d in distances]
    assert buckets == truth
    assert max(buckets) < n_buckets


ONES, INT3, INT7 = torch.ones(3), *(torch.zeros(n, dtype=torch.int64) for n in (3, 7))
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "nothing": (ALiBi, ValueError, "either the number of heads or slopes=(H,), one of the two"),
    "both": (lambda: ALiBi(3, slopes=ONES), ValueError, "one of the two"),
    "no heads": (lambda: ALiBi(0), ValueError, "n_heads is 0; expected a whole number"),
    "bare slopes": (lambda: ALiBi(ONES), TypeError, "given by name, ALiBi(slopes=t)"),  # type: ignore[arg-type]
    "half a head": (lambda: ALiBi(3.0), TypeError, "n_heads must be a whole number, got float"),  # type: ignore[arg-type]
    "slopes": (lambda: ALiBi(slopes=ONES[None]), ValueError, "one axis (H), got shape (1, 3)"),
    "int slopes": (lambda: ALiBi(slopes=INT3), TypeError, "slopes must be one of float64"),
    "list slopes": (lambda: ALiBi(slopes=[1.0]), TypeError, "slopes must be"),  # type: ignore[arg-type]
    "table": (lambda: RelativeTable(ONES), ValueError, "(n_buckets, H), got"),
    "int table": (lambda: RelativeTable(INT3[None]), TypeError, "table must be one of float64"),
    "list table": (lambda: RelativeTable([[1.0]]), TypeError, "table must be"),  # type: ignore[arg-type]
    "buckets": (lambda: RelativeTable(ONES[None]), ValueError, "n_buckets=1 and max_distance=128"),
    "near": (lambda: RelativeTable(torch.ones(32, 5), True, 8), ValueError, "above 8"),
    "bucket": (lambda: t5_bucket(INT3, False, 1), ValueError, "expected at least 2 buckets"),
    "bool": (lambda: DenseBias(ONES.bool()), TypeError, "a bool tensor is a mask, not a bias"),
    "int": (lambda: DenseBias(INT3), TypeError, "bias must be one of float64, float32"),
    "list": (
        lambda: DenseBias([1.0]),
        TypeError,
        "a bias must be a float tensor, or a Bias such as ALiBi(n_heads); got a list",
    ),  # type: ignore[arg-type]
    "a tensor": (lambda: ALiBi(3) + ONES, TypeError, "write bias + DenseBias(tensor)"),  # type: ignore[operator]
    "heads as text": (lambda: ALiBi("8"), TypeError, "n_heads must be a whole number, got str"),  # type: ignore[arg-type]
    "at": (lambda: ALiBi(3).at(ONES), TypeError, "queries must hold whole numbers"),
    "at keys": (lambda: ALiBi(3).at(INT3, ONES), TypeError, "keys must hold whole numbers"),
    "dense at": (lambda: DenseBias(ONES).at(INT3), ValueError, "DenseBias counts rows"),
    "sum at": (lambda: (ALiBi(3) + DenseBias(ONES)).at(INT3), ValueError, "Sum counts rows"),
    "plus": (lambda: ALiBi(3) + 1.0, TypeError, "unsupported operand"),  # type: ignore[operator]
}
MISFITS: dict[str, tuple[Bias, str]] = {
    "slopes": (ALiBi(3), "ALiBi has 3 slopes, but q has H=5 heads"),
    "table": (RelativeTable(torch.ones(32, 3)), "table must be (n_buckets, H) with H=5, got"),
    "dense": (DenseBias(torch.ones(7, 7)), "bias must broadcast to (B, H, T, S) = (3, 5, 7, 11)"),
    "at": (ALiBi(H).at(INT3), "queries must be (T,) or (B, T) with B=3, T=7, got shape (3,)"),
    "at keys": (ALiBi(H).at(INT7, INT7), "keys must be (S,) or (B, S) with B=3, S=11, got shape"),
    "part of an at": (ALiBi(3).at(INT7), "ALiBi has 3 slopes"),
    "part of a sum": (ALiBi(H) + ALiBi(3), "ALiBi has 3 slopes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_bias_is_refused_in_words(name: str) -> None:
    make, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)):
        make()


@pytest.mark.parametrize("name", MISFITS)
def test_bias_that_does_not_fit_is_refused(name: str) -> None:
    bias, words = MISFITS[name]
    q, k = torch.zeros(B, H, 7, 3), torch.zeros(B, H, 11, 3)
    with pytest.raises(ValueError, match=re.escape(words)):
        bias.dense(SHAPES["more keys"])
    with pytest.raises(ValueError, match=re.escape(words)):
        attention(q, k, k, bias=bias)


def test_mask_and_bool_tensor_are_refused_as_bias() -> None:
    q = torch.zeros(1, 2, 3, 5)
    with pytest.raises(TypeError, match="Causal is a mask: pass it as mask=, not bias="):
        attention(q, q, q, bias=Causal())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a bool tensor is a mask, not a bias"):
        attention(q, q, q, bias=torch.ones(3, 3, dtype=torch.bool))


def test_slopes_are_copied_to_a_device_once_and_again_when_they_change() -> None:
    bias, device = ALiBi(3), torch.device("meta")
    assert bias.to(device) is bias.to(device)
    assert bias.to(device).slopes.device == device
    first = bias.to(device)
    bias.slopes.mul_(2)
    assert bias.to(device) is not first
    learned = ALiBi(slopes=torch.ones(3, requires_grad=True))
    assert learned.to(device).slopes.grad_fn is not None
    assert learned.to(device) is not learned.to(device)
    with torch.inference_mode():
        assert ALiBi(3).to(device).slopes.device == device
