"""What attention by our kernels is tried on, case by case, on any device that can run them.

`gaps` gives for each answer and each gradient its largest error against the float64 reference, and
what is allowed: twice the error of the plain formula in the case's own type, and a few roundings of
the largest number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from plain import plain
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Wants,
    Window,
    observe,
)
from regard.ops.blockwise import NOTHING, Ask
from regard.ops.call import Call, make_call
from regard.ops.kernels import flash_op
from regard.ops.observe import by_reference as observe_by_reference
from regard.ops.shape import Shape, Tile

ROUNDINGS = 32
SMALL = {"B": 2, "H": 2, "G": 1, "T": 37, "S": 53, "D": 11, "E": 11}


@dataclass
class Case:
    """Sizes that differ from `SMALL`, the call, and by name the shapes of what is learned in it."""

    sizes: dict[str, int] = field(default_factory=dict)
    call: Callable[..., dict[str, Any]] = lambda: {}
    learned: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def draw(self, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """q, k, v and what is learned, the same numbers in every type."""
        size = {**SMALL, **self.sizes}
        noise = torch.Generator().manual_seed(7)
        shapes = {"q": "BHTD", "k": "BGSD", "v": "BGSE"}
        wanted = {name: tuple(size[x] for x in letters) for name, letters in shapes.items()}
        return {
            name: torch.randn(*shape, generator=noise).to(device, dtype)
            for name, shape in {**wanted, **self.learned}.items()
        }

    def make(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """The call's arguments, its tensors on the device of the inputs."""
        given = self.call(**{name: inputs[name] for name in self.learned})
        device = inputs["q"].device
        numbers = {name: x for name, x in given.items() if isinstance(x, int | float)}
        return {name: x.to(device) for name, x in given.items() if name not in numbers} | numbers


def coin(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5)) < 0.6


def holes(added: Tensor) -> Tensor:
    """A learned dense bias that hides pairs, all of the last rows."""
    shown = coin(37, 53)
    shown[20:] = False
    return added.masked_fill(~shown.to(added.device), -math.inf)


def shuffled(*shape: int) -> Tensor:
    """Ids of documents, each in several runs."""
    return torch.randint(-2, 2, shape, generator=torch.Generator().manual_seed(5)) * 2**62


IDS = torch.stack([torch.arange(53) // 13, (torch.arange(53) * 7) % 3 * 10**12])
LENGTHS = torch.tensor([29, 0])
AT_QUERIES, AT_KEYS = torch.arange(37).flip(0) * 2, torch.arange(53) - 3
LONG = {"B": 1, "T": 150, "S": 170}

CASES: dict[str, Case] = {
    "everything": Case(),
    "causal": Case(call=lambda: {"mask": Causal()}),
    "causal from the start": Case(call=lambda: {"mask": Causal(align="start")}),
    "causal, several tiles": Case(LONG, lambda: {"mask": Causal()}),
    "square": Case({**LONG, "S": 150}, lambda: {"mask": Causal()}),
    "more queries than keys": Case({"T": 53, "S": 37}, lambda: {"mask": Causal()}),
    "window": Case(call=lambda: {"mask": Window(5, 3)}),
    "window, several tiles": Case(LONG, lambda: {"mask": Window(40, 3)}),
    "open window": Case(call=lambda: {"mask": Window(5, None)}),
    "padding": Case(call=lambda: {"mask": Lengths(LENGTHS)}),
    "tiles of rows that see nothing": Case(
        {"B": 2, "T": 150, "S": 150},
        lambda: {"mask": Causal() & Lengths(torch.tensor([150, 20]), side="left")},
    ),
    "documents": Case(call=lambda: {"mask": Documents(IDS)}),
    "documents and a window": Case(call=lambda: {"mask": Documents(IDS) & Window(9, None)}),
    "documents, several tiles": Case(
        LONG, lambda: {"mask": Documents(torch.arange(170) * 3 // 64 % 2) & Causal()}
    ),
    "documents, the last one with the lowest id": Case(
        LONG, lambda: {"mask": Documents((torch.arange(170) // 50 + 1) % 4) & Causal()}
    ),
    "documents anywhere": Case(
        {**LONG, "B": 2, "H": 4, "G": 2},
        lambda: {"mask": Documents(shuffled(2, 170)) & Causal()},
    ),
    "documents and padding": Case(
        {"T": 150, "S": 150, "H": 3},
        lambda: {"mask": Documents(torch.arange(150) // 70) & Lengths(torch.tensor([150, 90]))},
    ),
    "documents of queries, some of which have none": Case(
        LONG, lambda: {"mask": Documents(torch.arange(170) // 64, torch.arange(150) // 20 * 2 - 3)}
    ),
    "prefix": Case(call=lambda: {"mask": Causal() | Prefix(31)}),
    "dense": Case(call=lambda: {"mask": Dense(coin(2, 2, 37, 53))}),
    "dense shared": Case(call=lambda: {"mask": Dense(coin(37, 53)) & Causal()}),
    "not": Case(call=lambda: {"mask": ~Window(3, 3)}),
    "slopes": Case(
        call=lambda slopes: {"bias": ALiBi(slopes=slopes), "mask": Causal()},
        learned={"slopes": (2,)},
    ),
    "slopes at positions": Case(
        call=lambda slopes: {"bias": ALiBi(slopes=slopes).at(AT_QUERIES, AT_KEYS)},
        learned={"slopes": (2,)},
    ),
    "slopes over documents": Case(
        call=lambda slopes: {"bias": ALiBi(slopes=slopes), "mask": Documents(IDS)},
        learned={"slopes": (2,)},
    ),
    "table": Case(
        call=lambda table: {"bias": RelativeTable(table, max_distance=40)},
        learned={"table": (8, 2)},
    ),
    "table, several tiles": Case(
        {**LONG, "B": 2},
        lambda table: {"bias": RelativeTable(table, max_distance=90), "mask": Window(70, 9)},
        {"table": (8, 2)},
    ),
    "table over bits": Case(
        call=lambda table: {"bias": RelativeTable(table), "mask": Dense(coin(2, 37, 53))},
        learned={"table": (32, 2)},
    ),
    **{
        f"dense bias {shape}": Case(
            call=lambda added: {"bias": DenseBias(added), "mask": Causal()},
            learned={"added": shape},
        )
        for shape in ((2, 2, 37, 53), (37, 53), (2, 1, 1, 53), (2, 37, 1), (1,))
    },
    "dense bias, several tiles": Case(
        {**LONG, "B": 2},
        lambda added: {"bias": DenseBias(added), "mask": Window(70, 9)},
        {"added": (1, 150, 170)},
    ),
    "bias of -inf": Case(
        call=lambda added: {"bias": DenseBias(holes(added))}, learned={"added": (37, 53)}
    ),
    "three biases": Case(
        call=lambda added, table, slopes: {
            "bias": DenseBias(added) + RelativeTable(table) + ALiBi(slopes=slopes),
            "mask": Causal(),
        },
        learned={"added": (37, 1), "table": (8, 2), "slopes": (2,)},
    ),
    "sinks": Case(call=lambda sinks: {"sinks": sinks, "mask": Causal()}, learned={"sinks": (2,)}),
    "sinks of rows that see nothing": Case(
        call=lambda sinks: {"sinks": sinks, "mask": Lengths(LENGTHS)}, learned={"sinks": (2,)}
    ),
    "softcap": Case(call=lambda: {"softcap": 1.3, "mask": Causal()}),
    "softcap, padding and a table": Case(
        call=lambda table: {
            "softcap": 1.3, "mask": Lengths(LENGTHS), "bias": RelativeTable(table)
        },
        learned={"table": (8, 2)},
    ),
    "dropout": Case(call=lambda: {"dropout": 0.3, "seed": 5, "mask": Causal()}),
    "dropout and learned biases": Case(
        call=lambda added, table: {
            "bias": DenseBias(added) + RelativeTable(table), "dropout": 0.3, "seed": 5
        },
        learned={"added": (37, 53), "table": (8, 2)},
    ),
    "negative scale": Case(call=lambda: {"scale": -0.7, "mask": Causal()}),
    "zero scale": Case(call=lambda: {"scale": 0.0, "mask": Causal()}),
    "two heads a key head": Case({"H": 4, "G": 2, "B": 1}, lambda: {"mask": Causal()}),
    "three heads a key head": Case({"H": 6, "G": 2, "B": 1}, lambda: {"mask": Causal()}),
    "as many key heads": Case({"G": 2}),
    "one head": Case({"H": 1}),
    "wide values": Case({"E": 37}, lambda: {"mask": Causal()}),
    "narrow values": Case({"E": 3}),
    "wide heads": Case({"D": 72, "B": 1}, lambda: {"mask": Causal()}),
    "even widths": Case({"D": 16, "E": 32}, lambda: {"mask": Causal()}),
    "one query": Case({"T": 1}),
    "one token": Case({"B": 1, "H": 1, "T": 1, "S": 1, "D": 1, "E": 1}),
}  # fmt: skip

HALF = (
    "everything", "causal, several tiles", "padding", "documents, several tiles", "softcap",
    "slopes", "table", "dense bias (37, 53)", "sinks", "two heads a key head", "even widths",
)  # fmt: skip
"""Cases that are run in half types too."""


Answers = dict[str, Tensor]
Run = Callable[[Call], Answers]


def by_kernels(call: Call) -> Answers:
    rows = flash_op.attend(call, Ask(entropy=True), None)
    return {"output": rows.output, "lse": rows.lse, "entropy": rows.entropy}


def by_reference(call: Call) -> Answers:
    seen = observe_by_reference(replace(call, wants=Wants(lse=True, entropy=True)))
    assert seen.output is not None and seen.lse is not None and seen.entropy is not None
    return {"output": seen.output, "lse": seen.lse, "entropy": seen.entropy}


def by_formula(call: Call) -> Answers:
    """The plain formula, every step in the type of q, on a dense mask and a dense bias."""
    rule, device = call.rule, call.q.device
    seen = None if rule.mask is None else rule.mask.dense(rule.shape, device)
    bias = None if rule.bias is None else rule.bias.dense(rule.shape, device, call.q.dtype)
    output, _ = plain(call.q, call.k, call.v, seen, bias, rule.scale, rule.softcap, call.sinks)
    return {"output": output}


def answers_of(case: Case, inputs: Answers, run: Run, only_output: bool) -> Answers:
    """What a path tells, and the gradients of a fixed mixture of it."""
    inputs = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    found = run(make_call(inputs["q"], inputs["k"], inputs["v"], **case.make(inputs)))
    if only_output:
        found = {"output": found["output"]}
    loss = torch.stack([mix(x).sum() for x in found.values()]).sum()
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    for (name, x), grad in zip(inputs.items(), grads, strict=True):
        assert grad is None or (grad.shape == x.shape and grad.dtype == x.dtype)
        found[f"d{name}"] = torch.zeros_like(x) if grad is None else grad
    return {name: x.detach().double() for name, x in found.items()}


def mix(x: Tensor) -> Tensor:
    """Numbers times others that are as large and go up and down; an infinity counts for nothing."""
    waves = torch.linspace(-1, 1, x.numel(), dtype=torch.float64, device=x.device).mul(97).sin()
    return x.masked_fill(x.isinf(), 0.0).double() * waves.view_as(x)


def gaps(name: str, dtype: torch.dtype, device: str) -> dict[str, tuple[float, float]]:
    """The largest error of each answer and gradient, and what is allowed."""
    case, half = CASES[name], dtype != torch.float32
    inputs = case.draw(dtype, device)
    wide = {key: x.double() for key, x in inputs.items()}
    truth = answers_of(case, wide, by_reference, half)
    ours = answers_of(case, inputs, by_kernels, half)
    theirs = answers_of(case, inputs, by_formula if half else by_reference, half)
    largest = max(float(x.nan_to_num(neginf=0.0).abs().max()) for x in truth.values())
    sizes = dict.fromkeys(truth, largest)
    if "slopes" in inputs:
        sizes["dslopes"] = max(largest, size_of_slopes(case, wide, half))
    found = {}
    for what, exact in truth.items():
        assert torch.equal(ours[what].isinf(), exact.isinf()), what
        error, plain_error = (gap(x[what], exact) for x in (ours, theirs))
        floor = ROUNDINGS * torch.finfo(torch.float32).eps * sizes[what]
        found[what] = error, 2 * plain_error + floor
    return found


def size_of_slopes(case: Case, inputs: Answers, only_output: bool) -> float:
    """What the terms come to, without their signs, whose sum is the gradient of a slope.

    There is one for each pair: the gradient on its score times how far apart they stand.
    """
    q, k, v = (inputs[name] for name in "qkv")
    shape = Shape(*q.shape[:3], k.shape[2])
    added = torch.zeros(shape, dtype=q.dtype, device=q.device, requires_grad=True)
    given, even = (case.make(inputs | {"slopes": x}) for x in (inputs["slopes"], torch.ones(2)))
    given["bias"] += DenseBias(added)
    seen = by_reference(make_call(q, k, v, **given))
    if only_output:
        seen = {"output": seen["output"]}
    (grad,) = torch.autograd.grad(torch.stack([mix(x).sum() for x in seen.values()]).sum(), added)
    leaves = even["bias"].leaf_terms()
    alibi = next(leaf for leaf in leaves if isinstance(getattr(leaf, "inner", leaf), ALiBi))
    far = alibi.dense(shape, q.device, q.dtype)
    return float((grad * far).abs().sum((0, 2, 3)).max())


def gap(found: Tensor, exact: Tensor) -> float:
    shown = ~exact.isinf()
    return float((found - exact)[shown].abs().max()) if shown.any() else 0.0


UNSEEN: dict[str, tuple[Any, Any]] = {
    "padding": (Lengths(torch.tensor([29, 0])), None),
    "documents": (Documents(torch.arange(70) // 29 % 2, torch.zeros(70).long()), None),
    "bits": (Dense((torch.arange(70) < torch.tensor([[29], [0]]))[:, None, None]), None),
    "dense bias": (None, torch.zeros(70).masked_fill(torch.arange(70) >= 29, -math.inf)),
    "table": (None, RelativeTable(torch.tensor([[-math.inf], [0.1], [-math.inf], [-math.inf]]))),
}
"""Masks and biases with keys that nobody sees."""


def count_leaks(name: str, device: str, sinks: bool) -> int:
    """How many numbers change when what is unseen is NaN; unseen things get no gradient.

    By more than rounding: where an output is NaN, the forward walks the tiles once more, in code
    that is compiled apart and may join other products and sums to one step.
    """
    mask, bias = UNSEEN[name]
    noise = torch.Generator().manual_seed(3)
    q, k, v, g = (torch.randn(2, 1, 70, 16, generator=noise).to(device) for _ in range(4))
    sink = torch.ones(1, device=device) if sinks else None
    plain_call = make_call(q, k, v, mask=mask, bias=bias)
    scores = plain_call.rule.block(Tile(0, 70, 0, 70), q).expand(2, 1, 70, 70)
    seen = scores > -math.inf
    blind, unseen = ~seen.any(3, keepdim=True), ~seen.any(2)[..., None]
    assert unseen.any()
    found = []
    for bad in (0.0, math.nan):
        rows = [x.masked_fill(blind, bad).requires_grad_() for x in (q, g)]
        keys = [x.masked_fill(unseen, bad).requires_grad_() for x in (k, v)]
        given = make_call(rows[0], *keys, mask=mask, bias=bias, sinks=sink)
        out = flash_op.attend(given, NOTHING, None).output
        grads = torch.autograd.grad(out, (rows[0], *keys), rows[1].detach())
        found.append([out.detach(), *grads])
        assert not any(x.masked_select(unseen).any() for x in grads[1:])
        assert not grads[0].masked_select(blind).any()
    n_summed, eps = 70, torch.finfo(torch.float32).eps
    return sum(
        int((~((one - other).abs() <= n_summed * eps * one.abs().max())).sum())
        for one, other in zip(*found, strict=True)
    )


def view_gaps(device: str) -> dict[str, tuple[float, float]]:
    """Of views: of one packed tensor, with steps in the last axis; gradients of any strides."""
    noise = torch.Generator().manual_seed(3)
    packed = torch.randn(2, 37, 3, 2, 16, generator=noise).to(device)
    pull = torch.randn(2, 37, 16, 2, generator=noise).to(device)
    found: list[dict[str, Tensor]] = []
    for dtype, run in ((torch.float64, by_reference), (None, by_reference), (None, by_kernels)):
        x = packed.detach().to(dtype or torch.float32).requires_grad_()
        q, k, v = x.unbind(2)
        k = k.permute(0, 2, 3, 1).contiguous().mT
        v = v.transpose(1, 2)[..., ::2]
        seen = run(make_call(q.transpose(1, 2), k, v, mask=Causal()))
        turned = pull.to(x.dtype).permute(0, 3, 1, 2)[..., ::2]
        whole, alike = (
            torch.autograd.grad(seen["output"], x, g, retain_graph=True)[0]
            for g in (turned, turned[:1, :1, :1, :1].expand_as(turned))
        )
        shared = torch.autograd.grad(seen["lse"].sum() + seen["entropy"].sum(), x)[0]
        found.append({"turned": whole, "expanded": alike, "rows": shared})
    truth, theirs, ours = found
    return {name: bound(ours[name], theirs[name], exact) for name, exact in truth.items()}


def twice_gaps(device: str) -> dict[str, tuple[float, float]]:
    """Of gradients of gradients, and of a batch of gradients."""
    case = Case(
        {"D": 5, "E": 7},
        lambda added, table, slopes, sinks: {
            "bias": DenseBias(added) + RelativeTable(table) + ALiBi(slopes=slopes),
            "sinks": sinks, "mask": Window(9, 4), "softcap": 3.0, "dropout": 0.2, "seed": 3,
        },
        {"added": (37, 1), "table": (8, 2), "slopes": (2,), "sinks": (2,)},
    )  # fmt: skip
    found: list[dict[str, Tensor]] = []
    for dtype, run in (
        (torch.float64, by_reference),
        (torch.float32, by_reference),
        (torch.float32, by_kernels),
    ):
        inputs = {name: x.requires_grad_() for name, x in case.draw(dtype, device).items()}
        leaves = list(inputs.values())
        seen = run(make_call(*leaves[:3], **case.make(inputs)))
        loss = torch.stack([mix(x * x).sum() for x in seen.values()]).sum()
        once = torch.autograd.grad(loss, leaves, create_graph=True)
        twice = torch.autograd.grad(
            torch.stack([mix(x * x).sum() for x in once]).sum(), leaves, retain_graph=True
        )
        plain_out = run(make_call(*leaves[:3], mask=Causal()))["output"]
        pulls = torch.stack([mix(torch.ones_like(plain_out) + n) for n in range(2)]).to(dtype)
        many = torch.autograd.grad(plain_out, leaves[:3], pulls, is_grads_batched=True)
        found.append(
            {f"twice {name}": x for name, x in zip(inputs, twice, strict=True)}
            | {f"batched {name}": x for name, x in zip("qkv", many, strict=True)}
        )
    truth, theirs, ours = found
    return {name: bound(ours[name], theirs[name], exact) for name, exact in truth.items()}


OBSERVED: dict[str, Case] = {
    "many queries": Case(
        call=lambda table, sinks: {
            "bias": RelativeTable(table), "sinks": sinks, "mask": Lengths(LENGTHS)
        },
        learned={"table": (8, 2), "sinks": (2,)},
    ),
    "few queries": Case({"T": 3}, lambda slopes: {"bias": ALiBi(slopes=slopes), "mask": Causal()},
                        {"slopes": (2,)}),
    "dropout": Case({"T": 3}, lambda: {"dropout": 0.3, "seed": 5}),
    "no values": Case(call=lambda: {"mask": Causal()}),
}  # fmt: skip


def observed_gaps(name: str, device: str) -> dict[str, tuple[float, float]]:
    """Of the wants of one pass as `observe` has them, and of gradients."""
    case, found = OBSERVED[name], []
    for dtype, backend in (
        (torch.float64, "reference"),
        (torch.float32, "reference"),
        (torch.float32, "triton"),
    ):
        inputs = {what: x.requires_grad_() for what, x in case.draw(dtype, device).items()}
        q, k, v = (inputs[what] for what in "qkv")
        mass = (torch.arange(k.shape[2]) % 3 == 0).to(device)
        wants = Wants(lse=True, entropy=True, peak=True, distance=True, mass=mass)
        value = None if name == "no values" else v
        seen: Any = observe(q, k, value, **case.make(inputs), wants=wants, backend=backend)
        answers = {"lse": seen.lse, "entropy": seen.entropy}
        if value is not None:
            answers["output"] = seen.output
        loss = torch.stack([mix(x).sum() for x in answers.values()]).sum()
        grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        answers |= {"peak": seen.peak.weight, "logit": seen.peak.logit, "mass": seen.mass}
        answers["distance"] = seen.distance
        pairs = zip(inputs.items(), grads, strict=True)
        answers |= {f"d{what}": x * 0.0 if grad is None else grad for (what, x), grad in pairs}
        found.append({what: x.detach().double() for what, x in answers.items()})
    truth, theirs, ours = found
    assert all(torch.equal(ours[what].isinf(), x.isinf()) for what, x in truth.items())
    return {what: bound(ours[what], theirs[what], exact) for what, exact in truth.items()}


def refused_gradients(device: str) -> int:
    """How many answers without a gradient fail to say so."""
    q, k = (torch.randn(1, 2, 19, 8, device=device, requires_grad=True) for _ in range(2))
    wants = Wants(lse=True, peak=True, distance=True)
    seen: Any = observe(q, k, k, wants=wants, backend="triton")
    silent = 0
    for x in (seen.peak.weight, seen.peak.logit, seen.distance):
        try:
            torch.autograd.grad(x.sum(), q, retain_graph=True)
            silent += 1
        except RuntimeError as error:
            silent += "has no gradient: gradients flow through" not in str(error)
    return silent


def bound(ours: Tensor, theirs: Tensor, exact: Tensor) -> tuple[float, float]:
    largest = float(exact.masked_fill(exact.isinf(), 0.0).abs().max())
    floor = ROUNDINGS * torch.finfo(torch.float32).eps * largest
    return gap(ours, exact), 2 * gap(theirs, exact) + floor


def count_other_bits(device: str) -> int:
    """How many numbers of gradients differ between two runs of the same call."""
    case = CASES["three biases"]
    runs = [answers_of(case, case.draw(torch.float32, device), by_kernels, False) for _ in range(2)]
    return sum(int((runs[0][name] != runs[1][name]).sum()) for name in runs[0])
