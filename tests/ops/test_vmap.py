"""`torch.func.vmap` over our kernels, in graphs too, and graphs of them that are exported.

What is refused and what shapes come out is judged here; the numbers in a process of its own, by
Triton's interpreter, against a loop over the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import run_interpreted
from torch import Tensor
from torch._subclasses import FakeTensorMode

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    RelativeTable,
    Wants,
    Window,
    attention,
    explain,
    observe,
)
from regard.ops.call import make_call
from regard.ops.kernels import flash_op
from regard.ops.kernels.rendered import render

N, B, H, G, T, S, D = 3, 2, 4, 2, 19, 23, 5
LENGTHS = torch.tensor([[3, 23], [5, 0], [23, 11]])
Axes = int | None | tuple[int | None, ...]
Parts = tuple[Tensor, ...]


def draw(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def attend(q: Tensor, k: Tensor, v: Tensor, backend: str, **rule: Any) -> Tensor:
    return attention(q, k, v, **rule, backend=backend)


TABLE = draw(8, H)
Q, K, V = draw(N, B, H, T, D), draw(N, B, G, S, D), draw(N, B, G, S, D + 2)
MAPPED: dict[str, tuple[Callable[..., Tensor], Parts, Axes]] = {
    "queries, keys and values": (
        lambda q, k, v, by: attend(q, k, v, by, mask=Causal(), softcap=2.0), (Q, K, V), 0
    ),
    "queries alone": (
        lambda q, k, v, by: attend(q, k, v, by, mask=Window(7, 2), sinks=torch.ones(H)),
        (Q, K[0], V[0]), (0, None, None),
    ),
    "values alone, of one sample": (
        lambda q, k, v, by: attend(q, k, v, by, bias=ALiBi(H)),
        (Q[0, :1], K[0, :1], V[:, :1]), (None, None, 0),
    ),
    "other axes": (
        lambda q, k, v, by: attend(q, k, v, by, bias=RelativeTable(TABLE)),
        (Q.movedim(0, -1), K.movedim(0, 1), V[0]), (-1, 1, None),
    ),
    "lengths": (
        lambda q, k, v, n, by: attend(q, k, v, by, mask=Causal() & Lengths(n)),
        (Q, K, V, LENGTHS), 0,
    ),
    "lengths of every sample alike": (
        lambda q, k, v, by: attend(q, k, v, by, mask=Lengths(LENGTHS[0])), (Q, K, V), 0
    ),
    "documents": (
        lambda q, k, v, ids, by: attend(q, k, v, by, mask=Documents(ids, ids[:, :T])),
        (Q, K, V, torch.randint(0, 3, (N, B, S), generator=torch.Generator().manual_seed(1))), 0,
    ),
    "documents that all share": (
        lambda q, k, v, by: attend(q, k, v, by, mask=Documents(torch.arange(S) // 7)), (Q, K, V), 0
    ),
    "dense mask and bias": (
        lambda q, k, v, seen, added, by: attend(
            q, k, v, by, mask=Dense(seen) & Causal(), bias=DenseBias(added)
        ),
        (Q, K, V, draw(N, 1, T, S) > -0.5, draw(N, B, 1, 1, S)), 0,
    ),
    "positions": (
        lambda q, k, v, at, by: attend(
            q, k, v, by, mask=Causal().at(at, torch.arange(S)),
            bias=ALiBi(H).at(at, torch.arange(S)),
        ),
        (Q, K, V, torch.arange(N * T).view(N, T) % S), 0,
    ),
    "few queries": (
        lambda q, k, v, by: attend(q, k, v, by, mask=Causal()), (Q[:, :, :, :3], K, V), 0
    ),
}  # fmt: skip
OTHERS = ("twice", "operation", "compiled", "compiled, few queries", "exported")


def run_cases() -> None:
    """Every case; printed as JSON."""
    from interpreted import patch_once

    from regard.ops.kernels import backend

    patch_once()
    # A call on the CPU may name our kernels.
    backend.refuse_tensors = lambda q, width: None  # type: ignore[assignment]
    report = {name: mapped_gaps(*case) for name, case in MAPPED.items()}
    for name, run in zip(
        OTHERS, (twice_gaps, operation_gaps, compiled_gaps, few_gaps, export_gaps), strict=True
    ):
        report[name] = run()
    print(json.dumps(report))


def off(ours: Tensor, known: Tensor) -> tuple[float, float]:
    assert ours.shape == known.shape
    eps = torch.finfo(torch.float32).eps
    return float((ours - known).abs().max()), 32 * eps * float(known.abs().max())


def mapped_gaps(run: Callable[..., Tensor], given: Parts, axes: Axes) -> dict[str, Any]:
    """How far vmap is off a loop over the reference, output and gradients."""
    in_dims = axes if isinstance(axes, tuple) else (axes,) * len(given)
    leaves = [[x.clone().requires_grad_(x.is_floating_point()) for x in given] for _ in range(2)]
    ours = torch.func.vmap(lambda *parts: run(*parts, "triton"), in_dims)(*leaves[0])
    each = [
        [
            x if axis is None else x.select(axis, n)
            for x, axis in zip(leaves[1], in_dims, strict=True)
        ]
        for n in range(N)
    ]
    known = torch.stack([run(*parts, "reference") for parts in each])
    found = {"output": off(ours, known)}
    floats = [[x for x in parts if x.requires_grad] for parts in leaves]
    pairs = (
        torch.autograd.grad(out.square().sum(), parts)
        for out, parts in zip((ours, known), floats, strict=True)
    )
    for number, pair in enumerate(zip(*pairs, strict=True)):
        found[f"gradient {number}"] = off(*pair)
    return found


def twice_gaps() -> dict[str, Any]:
    """One vmap in another; and what is not done says so."""
    q = draw(2, N, B, H, T, D)
    k, v = K[0], V[0]

    def nested(backend: str) -> Tensor:
        inner = torch.func.vmap(lambda q: attend(q, k, v, backend, mask=Causal()), -1)
        return torch.func.vmap(inner)(q.movedim(1, -1))

    found = {"nested": off(nested("triton"), nested("reference"))}
    leaf = Q.clone().requires_grad_()
    out = torch.func.vmap(lambda q: attend(q, k, v, "triton"))(leaf)
    try:
        torch.autograd.grad(out.sum(), leaf, create_graph=True)
        silent = 1
    except RuntimeError as error:
        silent = int("what ran inside vmap cannot be differentiated twice" not in str(error))
    return found | {"silent": (silent, 0)}


def operation_gaps() -> dict[str, Any]:
    """The operation itself, with every answer; and by torch's own checks of operations."""
    given = render(make_call(Q[0], K[0], V[0], mask=Causal()))
    mass = (torch.arange(N * S).view(N, 1, S) % 3 == 0).expand(N, 1, S)

    def run(q: Tensor, mass: Tensor) -> list[Tensor]:
        return list(torch.ops.regard.flash(*given._replace(q=q), [True, True, True], mass))

    found = torch.func.vmap(run)(Q, mass)
    each = zip(*(run(q, keys) for q, keys in zip(Q, mass, strict=True)), strict=True)
    pairs = zip(found, map(torch.stack, each), strict=True)
    gaps = {str(n): (float((a - b).abs().max()), 0.0) for n, (a, b) in enumerate(pairs)}
    leaves = (x[0].clone().requires_grad_() for x in (Q, K, V))
    rule: Any = {"mask": Causal() & Lengths(LENGTHS[0]), "bias": ALiBi(H), "sinks": torch.ones(H)}
    args = (*render(make_call(*leaves, **rule)), [True, True, True], mass[0])
    checked = torch.library.opcheck(flash_op._forward_op, args, raise_exception=False)
    failed = sum(said != "SUCCESS" for said in checked.values())
    return gaps | {"opcheck": (failed, 0)}


def compiled_gaps() -> dict[str, Any]:
    """vmap in a graph, with gradients."""

    def run(q: Tensor, n: Tensor) -> Tensor:
        return attend(q, K[0], V[0], "triton", mask=Lengths(n), sinks=torch.ones(H))

    graph = torch.compile(torch.func.vmap(run), fullgraph=True, backend="aot_eager")
    q = Q.clone().requires_grad_()
    pairs = [
        (out, torch.autograd.grad(out.square().sum(), q)[0])
        for out in (f(q, LENGTHS) for f in (graph, torch.func.vmap(run)))
    ]
    names = ("output", "gradient")
    return {name: off(*pair) for name, pair in zip(names, zip(*pairs, strict=True), strict=True)}


def few_gaps() -> dict[str, Any]:
    """The kernel for few queries, which graphs have inside of vmap too."""

    def run(q: Tensor, n: Tensor, backend: str) -> tuple[Tensor, ...]:
        wants = Wants(lse=True, peak=True)
        seen: Any = observe(
            q, K[0], V[0], mask=Lengths(n), sinks=torch.ones(H), wants=wants, backend=backend
        )
        return seen.output, seen.lse, seen.peak.weight, seen.peak.key.float()

    graph = torch.compile(
        torch.func.vmap(lambda q, n: run(q, n, "triton"), (1, 0)),
        fullgraph=True,
        backend="aot_eager",
    )
    q = Q[:, :, :, :3]
    assert explain(q[0], K[0], V[0], wants=Wants(peak=True), backend="triton").chosen == "triton"
    found = graph(q.movedim(0, 1), LENGTHS)
    each = zip(*(run(q[n], LENGTHS[n], "reference") for n in range(N)), strict=True)
    pairs = zip(found, map(torch.stack, each), strict=True)
    gaps = {str(n): off(*pair) for n, pair in enumerate(pairs)}
    leaf = q.clone().requires_grad_()
    attend_few = torch.func.vmap(lambda q: attend(q, K[0], V[0], "triton"))
    silent = 1
    try:
        torch.compile(attend_few, fullgraph=True, backend="aot_eager")(leaf).sum().backward()
    except Exception as error:
        silent = int("our kernel for few queries has no gradient" not in str(error))
    return gaps | {"silent": (silent, 0)}


class Model(torch.nn.Module):
    """A call that is exported, with weights that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(D, D)

    def forward(self, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        mask = Causal() & Lengths(lengths)
        return attention(self.proj(q), k, k, mask=mask, bias=ALiBi(H), backend="triton")


def export(strict: bool) -> torch.export.ExportedProgram:
    """One graph for batches and lengths of any size."""
    b, t, s = (torch.export.Dim(name, min=2, max=4096) for name in ("b", "t", "s"))
    sizes = ({0: b, 2: t}, {0: b, 2: s}, {0: b})
    given = draw(B, H, T, D), draw(B, G, S, D), LENGTHS[0]
    return torch.export.export(Model(), given, dynamic_shapes=sizes, strict=strict)


def export_gaps() -> dict[str, Any]:
    """How far what is exported is off the model, at other sizes."""
    found = {}
    for strict in (False, True):
        exported = export(strict)
        model = Model()
        model.load_state_dict(exported.state_dict)
        for sizes in ((3, T + 4, S + 6), (5, 3, 9)):
            n, t, s = sizes
            given = draw(n, H, t, D), draw(n, G, s, D), torch.arange(n)
            outs = [run(*given) for run in (exported.module(), model)]
            found[f"{strict} {sizes}"] = off(*outs)
    return found


@pytest.fixture(scope="module")
def report() -> Any:
    return run_interpreted(Path(__file__))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MAPPED, *OTHERS])
def test_vmap_and_exported_graphs_give_what_a_loop_gives(name: str, report: Any) -> None:
    assert report[name]
    wrong = {what: pair for what, pair in report[name].items() if not pair[0] <= pair[1]}
    assert not wrong, wrong


@pytest.mark.parametrize("strict", [False, True])
def test_exported_graphs_hold_one_operation_for_batches_and_lengths_of_any_size(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.ops.kernels.backend.refuse_tensors", lambda q, width: None)
    nodes = [x for x in export(strict).graph.nodes if x.target is torch.ops.regard.flash.default]
    assert len(nodes) == 1
    output = nodes[0].meta["val"][0]
    sizes = [isinstance(size, torch.SymInt) for size in output.shape]
    assert sizes == [True, False, True, False] and output.shape[1::2] == (H, D)


def test_shapes_are_known_without_data_inside_vmap_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.ops.kernels.backend.refuse_tensors", lambda q, width: None)
    with FakeTensorMode():
        q, k = torch.empty(N, B, H, T, D, requires_grad=True), torch.empty(B, G, S, D)
        plain = attention(q[0].detach(), k, k, mask=Causal(), backend="triton")
        output = torch.func.vmap(lambda q: attention(q, k, k, backend="triton"))(q)
        (grad,) = torch.autograd.grad(output.sum(), q)
    assert plain.shape == (B, H, T, D) and output.shape == grad.shape == (N, B, H, T, D)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "sinks": (lambda q, x: make_call(q, q, q, sinks=x), "share sinks, slopes and tables over"),
    "slopes": (
        lambda q, x: make_call(q, q, q, bias=ALiBi(slopes=x)), "share sinks, slopes and tables"
    ),
    "placed slopes": (
        lambda q, x: make_call(q, q, q, bias=ALiBi(slopes=x).at(torch.arange(3), torch.arange(3))),
        "share sinks, slopes and tables over the batch, so vmap cannot map them",
    ),
    "table": (
        lambda q, x: make_call(q, q, q, bias=RelativeTable(x.expand(8, 2))),
        "share sinks, slopes and tables",
    ),
    "dropout": (
        lambda q, x: make_call(q, q, q, dropout=0.5, seed=3),
        "our kernels have no dropout inside vmap; blockwise has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_is_refused_in_words(name: str) -> None:
    make, words = REFUSED[name]
    said: list[str | None] = []

    def run(q: Tensor, x: Tensor) -> Tensor:
        said.append(flash_op.refuse(make(q, x)))
        return q

    torch.func.vmap(run)(draw(2, 1, 2, 3, 4), draw(2, 2))
    assert said[0] is not None and words in said[0]
    torch.func.vmap(run, (0, None))(draw(2, 1, 2, 3, 4), draw(2))
    assert said[1] == (said[0] if name == "dropout" else None), "only what is mapped is refused"


def test_the_operation_itself_refuses_what_cannot_be_mapped() -> None:
    given = render(make_call(*torch.randn(3, 1, 2, 5, 4), sinks=torch.ones(2)))

    def run(sinks: Tensor) -> Any:
        return torch.ops.regard.flash(*given._replace(sinks=sinks), [False] * 3, None)[0]

    with pytest.raises(RuntimeError, match="has one sinks for the batch, which vmap cannot map"):
        torch.func.vmap(run)(torch.ones(3, 2))


if __name__ == "__main__":
    run_cases()
