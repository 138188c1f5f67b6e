"""Attention by our kernels, forward and backward, run by Triton's interpreter, is the reference's.

For `flash_kernels.py`, `flash_backward_kernels.py`, `tile_lists_kernels.py` and the operation that
ties them to autograd, `flash_op.py`. The backward is tried by two kernels, as float32 has it, and
by one, which half types have. In a process of its own, as Triton decides at import whether
it interprets; bfloat16 is left to the tests marked `gpu`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from flash_cases import CASES, HALF, OBSERVED, UNSEEN
from interpreted import run_interpreted

pytestmark = pytest.mark.slow

LEAKS = [f"{name}{sinks}" for name in UNSEEN for sinks in ("", " and sinks")]
OTHERS = ("views", "twice", "repeated", "compiled", "refused", "finished", "begun")


def run_cases() -> None:
    """Every case; printed as JSON."""
    import warnings

    import torch
    from flash_cases import (
        count_leaks,
        count_other_bits,
        gaps,
        observed_gaps,
        refused_gradients,
        twice_gaps,
        view_gaps,
    )
    from interpreted import patch_once

    from regard.ops.kernels import backend

    # The interpreter multiplies by numpy, which warns of the lowest number becoming -inf.
    warnings.simplefilter("ignore", RuntimeWarning)
    patch_once()
    report: dict[str, Any] = {}
    for name in CASES:
        for dtype in (torch.float32, torch.float16)[: 1 + (name in HALF)]:
            report[f"{name} {dtype}"] = gaps(name, dtype, "cpu")
    for name in LEAKS:
        of, *sinks = name.split(" and ")
        report[f"leaks: {name}"] = {"numbers": (count_leaks(of, "cpu", bool(sinks)), 0)}
    report["finished"] = {"queries": finished_gap()}
    report["begun"] = {"sums": begun_gap()}
    report["views"], report["twice"] = view_gaps("cpu"), twice_gaps("cpu")
    report["repeated"] = {"numbers": (count_other_bits("cpu"), 0)}
    report["compiled"] = compiled_gaps()
    # From here on a call on the CPU may name our kernels.
    backend.refuse_tensors = lambda q, width: None  # type: ignore[assignment]
    for name in OBSERVED:
        report[f"observed: {name}"] = observed_gaps(name, "cpu")
    report["refused"] = {"answers": (refused_gradients("cpu"), 0)}
    print(json.dumps(report))


def finished_gap() -> tuple[float, float]:
    """How far `_finish` is off what it is given, laid out by the formula of who adds it up."""
    import torch

    from regard.ops.kernels import flash_backward_kernels as kernels
    from regard.ops.kernels.arguments import view

    n, D, T = 128, 64, 100
    wanted = torch.randn(2, 3, n, D)
    t, d = torch.arange(n)[:, None], torch.arange(D)
    place = t // 8 * (D // 16) + d // 16
    place = place * 128 + d % 8 * 16 + t % 8 // 2 * 4 + d // 8 % 2 * 2 + t % 2
    sums = torch.zeros(2, 3, n * D)
    sums[..., place.flatten()] = wanted.flatten(2)
    dq = torch.zeros(2, T, 3, D).transpose(1, 2)
    kernels._finish[(2 * 3 * n // 32,)](sums, view(dq), 1.5, n, 3, T, D, ROWS=32, WIDTH=D)
    eps = torch.finfo(torch.float32).eps
    return float((dq - wanted[:, :, :T] * 1.5 * math.log(2.0)).abs().max()), 8 * eps


def begun_gap() -> tuple[float, float]:
    """How far from zero the sums are that `_finish` reads, after the first kernel."""
    import torch

    from regard.ops.kernels import flash_backward_kernels as kernels
    from regard.ops.kernels.arguments import view
    from regard.ops.kernels.flash_backward import Incoming, RowGrads

    B, H, T, n, D = 2, 3, 100, 128, 64
    out, lse, sums = torch.randn(B, H, T, D), torch.zeros(B, H, T), torch.full((B, H, n, D), 9.0)
    rows = RowGrads(*torch.zeros(2, B, H, n), None, n)
    incoming = Incoming(lse, None, None, None, None)
    kernels._delta[(B * H,)](
        view(out), view(out), incoming, rows, sums, H, T, D, ROWS=n, VALUES=D
    )  # fmt: skip
    return float(sums.abs().max()), 0.0


def compiled_gaps() -> dict[str, tuple[float, float]]:
    """Of one graph, traced once, at two lengths: how far its gradients are off eager ones."""
    import torch
    from torch import Tensor

    from regard.ops import Causal, Documents, RelativeTable
    from regard.ops.blockwise import Ask
    from regard.ops.call import make_call
    from regard.ops.kernels import flash_op

    table, sinks = torch.randn(8, 2, requires_grad=True), torch.randn(2, requires_grad=True)

    def run(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
        rule: Any = {"mask": Causal() & Documents(ids), "bias": RelativeTable(table)}
        rows = flash_op.attend(make_call(q, k, k, **rule, sinks=sinks), Ask(entropy=True), None)
        return rows.output.square().sum() + rows.lse.sum() + rows.entropy.square().sum()

    graph = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = {}
    for length in (19, 31):
        q, k = (torch.randn(1, h, length, 8, requires_grad=True) for h in (2, 1))
        ids = torch.arange(length) // 7
        for x in (q, k):
            torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_dynamic(ids, 0)
        leaves = (q, k, table, sinks)
        pairs = zip(*(torch.autograd.grad(f(q, k, ids), leaves) for f in (graph, run)), strict=True)
        for part, (one, other) in zip(("q", "k", "table", "sinks"), pairs, strict=True):
            eps = torch.finfo(torch.float32).eps * float(other.abs().max())
            found[f"{part} of {length}"] = float((one - other).abs().max()), 8 * eps
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found | {"graphs": (float(graphs), 1.0)}


@pytest.fixture(scope="module")
def report() -> Any:
    return run_interpreted(Path(__file__))


SEEN = [
    *(f"leaks: {name}" for name in LEAKS),
    *(f"observed: {name}" for name in OBSERVED),
]


@pytest.mark.parametrize("name", [*CASES, *SEEN, *OTHERS])
def test_kernels_give_what_the_reference_gives(name: str, report: Any) -> None:
    found = {key: told for key, told in report.items() if key.split(" torch")[0] == name}
    assert len(found) == 1 + (name in HALF)
    for told in found.values():
        wrong = {what: pair for what, pair in told.items() if not pair[0] <= pair[1]}
        assert not wrong, wrong


if __name__ == "__main__":
    run_cases()
