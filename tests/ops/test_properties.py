"""Whatever is asked, every path gives the reference's answer: hypothesis draws the questions.

Masks of any class nested in any way, biases added to each other, sizes from 0 on, any group ratio,
float type, layout in memory, scale, softcap, sinks, dropout and wants. What single masks and biases
mean is in `test_mask.py` and `test_bias.py`; here they only have to agree with themselves on every
path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, lay_out
from plain import plain
from torch import Tensor

from regard.ops import (
    ALiBi,
    Bias,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Map,
    Mask,
    Prefix,
    RelativeTable,
    Wants,
    Window,
    attention,
    blockwise,
    explain,
    flash_cpu,
    observe,
    sdpa,
)
from regard.ops.call import Rule
from regard.ops.pack import pack, unpack
from regard.ops.shape import Shape, Tile

ROUNDINGS = 6
HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]
MakeBias = Callable[[torch.dtype], Bias]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def examples(n: int) -> settings:
    """n draws, or as many times more as the chosen profile makes more than the usual hundred."""
    return settings(max_examples=max(n, n * settings.default.max_examples // 100))


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Tiles and bands smaller than most inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "TILE_ENTRIES", 1)
        patch.setattr(blockwise, "SMALLEST", 3)
        patch.setattr(flash_cpu, "BAND", 3)
        patch.setattr(flash_cpu, "PIECE_COST", 0)
        yield


def normal(seed: int, *sizes: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=made, dtype=torch.float64)


def whole(seed: int, low: int, high: int, *sizes: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(low, max(high, low + 1), sizes, generator=made)


seeds = st.integers(0, 2**20)
sides = st.none() | st.integers(0, 5)


def joined(masks: st.SearchStrategy[Mask], leaves: int) -> st.SearchStrategy[Mask]:
    """Masks put together with & | ~."""
    return st.recursive(
        masks,
        lambda part: (
            st.builds(lambda a, b: a & b, part, part)
            | st.builds(lambda a, b: a | b, part, part)
            | st.builds(lambda a: ~a, part)
        ),
        max_leaves=leaves,
    )


def positional(shape: Shape) -> st.SearchStrategy[Mask]:
    """Masks that speak of positions only."""
    return joined(
        st.builds(Causal, st.sampled_from(["end", "start"]))
        | st.builds(Window, sides, sides)
        | st.builds(Prefix, st.integers(0, shape.S + 2))
        | st.builds(lambda n: Prefix(whole(n, 0, shape.S + 2, shape.B)), seeds),
        3,
    )


def documents(shape: Shape, n: int, asked: bool, batched: bool) -> Mask:
    lead = (shape.B,) if batched else ()
    ids = whole(n, 0, 3, *lead, shape.S)
    ids = ids if n % 2 else ids.sort(-1)[0]
    asked = asked or shape.T > shape.S
    return Documents(ids, whole(n + 1, 0, 3, *lead, shape.T) if asked else None)


def runs(shape: Shape) -> st.SearchStrategy[Mask]:
    """Masks that leave each query one run of keys, and both of them."""
    flags = st.booleans()
    one = (
        st.builds(Causal, st.sampled_from(["end", "start"]))
        | st.builds(Window, sides, sides)
        | st.builds(lambda n: Prefix(whole(n, 0, shape.S + 2, shape.B)), seeds)
        | st.builds(lambda n: Lengths(whole(n, 0, shape.S + 1, shape.B)), seeds)
        | st.builds(lambda n: Lengths(whole(n, 0, shape.S + 1, 1), "left"), seeds)
        | st.builds(lambda n, batched: documents(shape, 2 * n, False, batched), seeds, flags)
    )
    return one | st.builds(lambda a, b: a & b, one, one)


def masks(shape: Shape) -> st.SearchStrategy[Mask]:
    """Any mask expression that fits the shape."""
    B, _, T, S = shape

    def dense(n: int, ones: tuple[bool, ...], share: float) -> Mask:
        size = [1 if one else have for one, have in zip(ones, shape, strict=True)]
        return Dense(normal(n, *size).abs() < share)

    def at(mask: Mask, n: int, batched: bool, keyed: bool) -> Mask:
        lead = (B,) if batched else ()
        keys = whole(n + 1, -2, S + 3, *lead, S) if keyed else None
        return mask.at(whole(n, -1, S + 3, *lead, T), keys)

    flags = st.booleans()
    simple = (
        positional(shape)
        | runs(shape)
        | st.builds(lambda n, asked: documents(shape, n, asked, True), seeds, flags)
        | st.builds(dense, seeds, st.tuples(*[flags] * 4), st.sampled_from([0.2, 0.7, 3.0]))
        | st.builds(at, positional(shape), seeds, flags, flags)
    )
    return joined(simple, 4)


def biases(shape: Shape) -> st.SearchStrategy[MakeBias]:
    """Any bias that fits the shape, to be made in any type, each number of it to be learned."""
    B, H, T, S = shape

    def leaf(values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).requires_grad_()

    def dense(n: int, ones: tuple[bool, ...], holes: bool) -> MakeBias:
        size = [1 if one else have for one, have in zip(ones, shape, strict=True)]
        values = normal(n, *size)
        if holes:
            values = values.masked_fill(normal(n + 1, *size) > 1.0, -math.inf)
        return lambda dtype: DenseBias(leaf(values, dtype))

    def alibi(n: int) -> MakeBias:
        return lambda dtype: ALiBi(slopes=leaf(normal(n, H).abs() / 3, dtype))

    def table(n: int, both_ways: bool, far: int) -> MakeBias:
        return lambda dtype: RelativeTable(leaf(normal(n, 9, H), dtype), both_ways, far)

    def at(make: MakeBias, n: int, batched: bool, keyed: bool) -> MakeBias:
        lead = (B,) if batched else ()
        keys = whole(n + 1, -2, S + 3, *lead, S) if keyed else None
        return lambda dtype: make(dtype).at(whole(n, 0, S + 3, *lead, T), keys)

    flags = st.booleans()
    relative = st.builds(alibi, seeds) | st.builds(table, seeds, flags, st.integers(6, 20))
    simple = (
        relative
        | st.builds(dense, seeds, st.tuples(*[flags] * 4), flags)
        | st.builds(at, relative, seeds, flags, flags)
    )
    pair = st.builds(lambda a, b: lambda dtype: a(dtype) + b(dtype), simple, simple)
    return simple | pair


@dataclass
class Question:
    """One call of attention, to be made in any float type."""

    shape: Shape
    seed: int
    groups: int
    widths: tuple[int, int]
    mask: Mask | None
    bias: MakeBias | None
    sinks: bool
    numbers: dict[str, Any]
    layouts: tuple[str, str, str, str] = ("plain",) * 4

    def ask(
        self, dtype: torch.dtype, device: str = "cpu", rounded: torch.dtype | None = None
    ) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
        """The inputs, the call, and every tensor to which gradients flow.

        rounded: the type in which q, k and v are rounded first.
        """
        B, H, T, S = self.shape
        sizes = ((B, H, T, self.widths[0]), *((B, self.groups, S, width) for width in self.widths))
        inputs = []
        for n, (size, layout) in enumerate(zip(sizes, self.layouts, strict=False)):
            drawn = normal(self.seed + n, *size).to(device, rounded or dtype).to(dtype)
            inputs.append(lay_out(drawn, layout).requires_grad_())
        call: dict[str, Any] = {"mask": self.mask, **self.numbers}
        leaves = list(inputs)
        if self.bias is not None:
            call["bias"] = self.bias(dtype)
            leaves += call["bias"].leaves()
        if self.sinks:
            call["sinks"] = (3 * normal(self.seed + 5, H)).to(device, dtype).requires_grad_()
            leaves.append(call["sinks"])
        return inputs, call, leaves


@st.composite
def questions(draw: st.DrawFn, dropout: bool = True, rare: int = 1) -> Question:
    """Any question; with `rare` only one in so many has what the fused kernels refuse."""
    H, G = draw(st.sampled_from([(3, 3), (6, 2), (5, 1), (3, 1), (1, 1)]))
    B = draw(st.sampled_from([3, 2, 1]))
    T, S = (draw(st.sampled_from([5, 7, 11, 13, 3, 1])) for _ in range(2))
    D, E = (draw(st.sampled_from([3, 5, 1])) for _ in range(2))
    empty = draw(st.sampled_from("--------BHTSDE"))
    B, H, G, T, S, D, E = (
        0 if letter == empty else size
        for letter, size in zip("BHHTSDE", (B, H, G, T, S, D, E), strict=True)
    )
    shape = Shape(B, H, T, S)
    looks = draw(st.sampled_from([runs, masks, masks, None]))
    odd = draw(st.integers(1, rare)) == 1
    numbers: dict[str, Any] = {
        "scale": draw(st.sampled_from([None, None, 0.7, 3.0, -0.5, 0.0])),
        "softcap": draw(st.sampled_from([None, None, 0.5, 20.0])) if odd else None,
    }
    if dropout and draw(st.booleans()):
        numbers |= {"dropout": draw(st.sampled_from([0.3, 1.0])), "seed": draw(seeds)}
    return Question(
        shape=shape,
        seed=draw(seeds),
        groups=G,
        widths=(D, E),
        mask=draw(looks(shape)) if looks is not None else None,
        bias=draw(biases(shape)) if draw(st.booleans()) else None,
        sinks=odd and draw(st.booleans()),
        numbers=numbers,
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 4)),
    )


@st.composite
def wants(draw: st.DrawFn, shape: Shape) -> Wants:
    B, _, T, S = shape
    names = ("lse", "entropy", "peak", "distance", "received")
    flags = {name: draw(st.booleans()) for name in names}
    batched = draw(st.booleans())
    picture = None
    if T and S and draw(st.booleans()):
        t0, s0 = draw(st.integers(0, T - 1)), draw(st.integers(0, S - 1))
        picture = Map(
            height=draw(st.integers(1, 13)),
            width=draw(st.integers(1, 13)),
            queries=(t0, draw(st.integers(t0 + 1, T))),
            keys=(s0, draw(st.integers(s0 + 1, S))),
        )
    return Wants(
        **flags,
        mass=draw(st.none() | st.just(whole(3, 0, 2, *((B,) if batched else ()), S).bool())),
        top=draw(st.none() | st.integers(1, 7)),
        above=draw(st.none() | st.sampled_from([0.01, 0.1, 0.5, 1.0])),
        map=picture,
        rows=draw(st.none() | st.lists(st.integers(0, T - 1), max_size=3)) if T else None,
    )


def gradients(outputs: list[Tensor], leaves: list[Tensor], layout: str = "plain") -> list[Tensor]:
    """Gradients of a fixed mixture of the outputs, zeros where none flows.

    layout: how the gradient that comes to the first of them, which is the output, lies in memory.
    """
    pulls = []
    for n, output in enumerate(outputs):
        pull = normal(n, *output.shape).to(output.device, output.dtype)
        pulls.append(lay_out(pull, layout) if n == 0 else pull.masked_fill(output == -math.inf, 0))
    made = torch.autograd.grad(outputs, leaves, pulls, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, made, strict=True)]


def largest_score(q: Tensor, k: Tensor, scale: float) -> float:
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    scores = (q @ k.mT * scale).detach().abs()
    return float(scores.max()) if scores.numel() else 0.0


def roundings_of(leaf: Tensor, shape: Shape, call: dict[str, Any]) -> float:
    """A learned number gathers from all pairs, each rounded by chance; a slope, times distances."""
    is_slope = leaf.dim() == 1 and leaf is not call.get("sinks")
    return math.sqrt(shape.B * shape.T * shape.S) * (max(shape.T, shape.S) if is_slope else 1)


def close(ours: Tensor, truth: Tensor, what: str) -> None:
    torch.testing.assert_close(
        ours, truth, rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


@examples(100)
@given(st.data())
def test_any_mask_expression_says_the_same_in_every_rendering(data: st.DataObject) -> None:
    shape = Shape(*(data.draw(st.sampled_from(n)) for n in ([3, 2], [3], [5, 7, 1], [7, 5, 1])))
    mask = data.draw(masks(shape))
    dense = mask.dense(shape).expand(*shape)
    t0, s0 = data.draw(st.integers(0, shape.T - 1)), data.draw(st.integers(0, shape.S - 1))
    tile = Tile(t0, data.draw(st.integers(t0 + 1, shape.T)), s0, shape.S)
    block = mask.block(shape, tile, torch.device("cpu"))
    inside = dense[:, :, tile.t0 : tile.t1, tile.s0 : tile.s1]
    assert torch.equal(block.expand_as(inside), inside)
    one = [data.draw(st.integers(0, n - 1)) for n in shape]
    assert bool(mask.flex(shape)(*(torch.tensor(x) for x in one))) == bool(dense[tuple(one)])
    again = unpack(pack(Rule(shape=shape, mask=mask)), shape).mask
    assert again is not None and torch.equal(again.dense(shape).expand(*shape), dense)
    assert torch.equal((~mask).dense(shape).expand(*shape), ~dense)
    run = mask.interval(torch.arange(shape.T)[None] + shape.offset, shape)
    if run is not None:
        low, high = (x.expand(shape.B, shape.T)[:, None, :, None] for x in run)
        j = torch.arange(shape.S)
        assert torch.equal(((low <= j) & (j < high)).expand(*shape), dense)
    if mask.is_causal_flag(shape):
        assert torch.equal(dense, torch.ones(shape.T, shape.S).tril().bool().expand(*shape))
    picture = mask.tiles(shape, 2, 3)
    for row, band in enumerate(dense.split(2, 2)):
        for column, part in enumerate(band.split(3, 3)):
            assert int(picture[row, column]) in (1, 2 if part.all() else int(part.any()))


@DEVICES
@examples(100)
@given(question=questions())
def test_blockwise_is_the_reference_with_all_its_gradients(question: Question, device: str) -> None:
    told = []
    for backend in ("reference", "blockwise"):
        (q, k, v), call, leaves = question.ask(torch.float64, device)
        output = attention(q, k, v, **call, backend=backend)
        told.append([output, *gradients([output], leaves, question.layouts[3])])
    for n, (ours, truth) in enumerate(zip(told[1], told[0], strict=True)):
        close(ours, truth, f"part {n}")


@DEVICES
@examples(250)
@given(question=questions(dropout=False, rare=5))
def test_sdpa_is_the_reference_or_refuses_with_a_sentence(question: Question, device: str) -> None:
    (q, k, v), call, leaves = question.ask(torch.float64, device)
    for leaf in leaves[3:]:
        leaf.requires_grad_(False)
    reason = explain(q, k, v, **call, backend="reference").verdicts["sdpa"]
    if reason is not None:
        with pytest.raises(ValueError) as refused:
            attention(q, k, v, **call, backend="sdpa")
        assert f'"sdpa" refuses this call: {reason}; backend="auto" finds' in str(refused.value)
        assert len(reason.split()) >= 5, "a sentence"
        return
    told = []
    for backend in ("reference", "sdpa"):
        output = attention(q, k, v, **call, backend=backend)
        told.append([output, *gradients([output], [q, k, v], question.layouts[3])])
    for n, (ours, truth) in enumerate(zip(told[1], told[0], strict=True)):
        close(ours, truth, f"part {n}")


@DEVICES
@examples(150)
@given(
    question=questions(dropout=False, rare=2),
    dtype=st.sampled_from(HALF_AND_SINGLE),
    learned=st.booleans(),
)
def test_narrow_types_err_at_most_twice_as_much_as_the_plain_formula(
    question: Question, dtype: torch.dtype, learned: bool, device: str
) -> None:
    (q, k, v), call, leaves = question.ask(dtype, device)
    if not learned:
        for leaf in leaves[3:]:
            leaf.requires_grad_(False)
        leaves = leaves[:3]
    shape, pull = question.shape, question.layouts[3]
    seen = None if question.mask is None else question.mask.dense(shape).to(device)
    bias = call["bias"].dense(shape, dtype=dtype).to(device) if question.bias else None
    scale = call["scale"] if call["scale"] is not None else max(q.shape[3], 1) ** -0.5
    assume(k.shape[1])
    narrow = plain(q, k, v, seen, bias, scale, call["softcap"], call.get("sinks"))[0]
    theirs = [narrow, *gradients([narrow], leaves, pull)]
    # The same rounded numbers, once more in float64.
    (q8, k8, v8), call8, leaves8 = question.ask(torch.float64, device, rounded=dtype)
    with torch.no_grad():
        for wide, rounded in zip(leaves8[3:], question.ask(dtype, device)[2][3:], strict=True):
            wide.copy_(rounded)
    leaves8 = leaves8[: len(leaves)]
    exact = attention(q8, k8, v8, **call8, backend="reference")
    truth = [exact, *gradients([exact], leaves8, pull)]
    largest = max((float(x.detach().abs().max()) for x in truth if x.numel()), default=0.0)
    # Rounded, a score changes a weight by score · eps of it.
    most = max(ROUNDINGS, largest_score(q8, k8, scale))
    told = explain(q, k, v, **call)
    # FlexAttention would compile for each of these rules; its cells are in the grid.
    backends = ["reference", "blockwise"] + (["auto"] if told.chosen != "flex" else [])
    for backend in backends + (["sdpa"] if not told.verdicts["sdpa"] else []):
        output = attention(q, k, v, **call, backend=backend)
        ours = [output, *gradients([output], leaves, pull)]
        for n, (o, p, t) in enumerate(zip(ours, theirs, truth, strict=True)):
            assert o.dtype == dtype and o.shape == t.shape
            if t.numel():
                allowed = 2 * (p.double() - t).abs().max()
                terms = roundings_of(leaves[n - 1], shape, call) if n > 3 else 0.0
                allowed += max(most, terms) * torch.finfo(dtype).eps * largest
                error = (o.double() - t).abs().max()
                assert error <= allowed, f"{backend}, part {n}: {error:.3g}, allowed {allowed:.3g}"


@examples(80)
@given(st.data())
def test_both_ways_of_observing_tell_the_same(data: st.DataObject) -> None:
    question = data.draw(questions())
    asked = data.draw(wants(question.shape))
    (q, k, v), call, _ = question.ask(torch.float64)
    with torch.no_grad():
        truth: Any = observe(q, k, v, **call, wants=asked, backend="reference")
        ours: Any = observe(q, k, v, **call, wants=asked, backend="blockwise")
        weights = observe(q, k, None, **call, wants=Wants(weights=True)).weights
    assert weights is not None
    for name in ("output", "lse", "entropy", "distance", "mass", "map", "rows"):
        if getattr(truth, name) is None:
            assert getattr(ours, name) is None
        else:
            close(getattr(ours, name), getattr(truth, name), name)
    if asked.received:
        close(ours.received.total, truth.received.total, "received")
        assert torch.equal(ours.received.seen_by, truth.received.seen_by)
    for name in ("peak", "top"):
        one, other = getattr(ours, name), getattr(truth, name)
        if one is None:
            continue
        close(one.weight, other.weight, name)
        assert torch.equal(one.key < 0, other.key < 0), name
        if question.shape.S:  # equal weights may be named in any order
            key = one.key if name == "top" else one.key[..., None]
            there = weights.gather(-1, key.clamp(min=0)).masked_fill(key < 0, 0.0)
            close(there.view_as(one.weight), one.weight, name)
    if asked.above is not None:
        sure = weights * (weights >= asked.above * (1 + 1e-9))
        dense = ours.above.to_dense()
        close(dense[sure > 0], sure[sure > 0], "above")
        close(dense, weights * (dense > 0), "above")
        assert (dense[dense > 0] >= asked.above).all()


@examples(60)
@given(questions())
def test_gradients_of_output_log_sum_and_entropy_agree(question: Question) -> None:
    told = []
    for backend in ("reference", "blockwise"):
        (q, k, v), call, leaves = question.ask(torch.float64)
        seen = observe(q, k, v, **call, wants=Wants(lse=True, entropy=True), backend=backend)
        assert seen.output is not None and seen.lse is not None and seen.entropy is not None
        told.append(gradients([seen.output, seen.lse, seen.entropy], leaves))
    for n, (ours, truth) in enumerate(zip(told[1], told[0], strict=True)):
        close(ours, truth, f"gradient {n}")


@examples(80)
@given(questions(), st.sampled_from([torch.float64, *HALF_AND_SINGLE]), st.booleans())
def test_explain_names_the_backend_that_runs(
    question: Question, dtype: torch.dtype, learned: bool
) -> None:
    (q, k, v), call, leaves = question.ask(dtype)
    for leaf in () if learned else leaves:
        leaf.requires_grad_(False)
    said = {name: value for name, value in call.items() if name != "seed"}
    told = explain(q, k, v, **said)
    free = [name for name, reason in told.verdicts.items() if reason is None]
    assert told.chosen == free[0], "the first that does not refuse"
    assert "reference" in free and "blockwise" in free
    line = next(line for line in str(told).splitlines() if line.startswith(told.chosen))
    assert line.split()[1] == "runs"
    chosen = attention(q, k, v, **call, backend=told.chosen)
    assert torch.equal(attention(q, k, v, **call), chosen)
    short = sdpa.attend_plain(q, k, v, call["mask"], call["scale"])
    others = (call.get("bias"), call["softcap"], call.get("sinks"), call.get("dropout"))
    if short is not None and not any(x is not None for x in others):
        assert told.chosen == "sdpa" and torch.equal(short, chosen)
    for name in set(told.verdicts) - set(free):
        assert f"{name:<10} refuses  {told.verdicts[name]}" in str(told)
