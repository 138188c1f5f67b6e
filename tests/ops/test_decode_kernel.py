"""The kernel for one query, run by Triton's interpreter on the CPU: equal to the reference.

Triton decides at import whether it interprets, so the kernel runs in a process of its own, which
writes the largest error of each case and what the plain formula's own rounding allows. Its bfloat16
products are not right there, so that type is left to the tests marked `gpu`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cells import ONE_QUERY
from interpreted import run_interpreted

from regard.ops import Causal, Window

pytestmark = pytest.mark.slow

HALF = ("plain", "window", "sinks", "softcap", "alibi causal", "joined")
"""Cases that are run in float16 too."""
PLACED = {
    "placed causal": Causal(),
    "placed window": Causal() & Window(3, None),
    "placed both sides": Window(2, 1),
    "placed open": Window(None, None),
}
"""Rules that the kernel knows by positions alone."""


def run_cases() -> None:
    """Every case of the grid that has a meaning for one query, its last; printed as JSON."""
    import torch
    from plain import CASES

    from regard.ops import attention
    from regard.ops import decode as one_query
    from regard.ops.call import make_call
    from regard.ops.kernels import decode

    report = {}
    decode.STRETCH = 5  # far fewer keys than there are, so that every case has parts to join
    for name in ONE_QUERY:
        for dtype in (torch.float32, torch.float16)[: 1 + (name in HALF)]:
            made = CASES[name]().cast(dtype)
            q = made.q[:, :, -1:].detach()
            k, v = made.k.detach(), made.v.detach()
            call = {key: value for key, value in made.call.items() if key != "backend"}
            sinks = call.pop("sinks", None)
            sinks = None if sinks is None else sinks.detach()
            wide = [x.double() for x in (q, k, v)]
            truth = attention(*wide, **call, sinks=sinks, backend="reference").detach()
            ours = one_query.run(make_call(q, k, v, **call, sinks=sinks)).double()
            theirs = attention(q, k, v, **call, sinks=sinks, backend="reference").double()
            floor = 4 * torch.finfo(dtype).eps * float(truth.abs().max())
            allowed = 2 * float((theirs - truth).abs().max()) + floor
            report[f"{name} {dtype}"] = [float((ours - truth).abs().max()), allowed]
    report |= run_placed() | run_hidden()
    print(json.dumps(report))


def run_placed() -> dict[str, list[float]]:
    """Keys that lie as in a cache: in any order, with empty slots, each row by itself."""
    import torch

    from regard.ops import attention
    from regard.ops import decode as one_query
    from regard.ops.call import make_call

    q, k = torch.randn(2, 6, 1, 5), torch.randn(2, 3, 11, 5)
    keys = torch.stack([torch.randperm(14)[:11] - 2 for _ in range(2)])
    found = {}
    for name, rule in PLACED.items():
        mask = rule.at(torch.tensor([[7], [4]]), keys)
        truth = attention(q.double(), k.double(), k.double(), mask=mask, backend="reference")
        call = make_call(q, k, k, mask=mask)
        assert one_query.find_window(call.rule.mask) is not None, name
        ours = one_query.run(call).double()
        found[name] = [float((ours - truth).abs().max()), 1e-5]
    return found


def run_hidden() -> dict[str, list[float]]:
    """NaN where the query does not look changes nothing; where it does, the output is NaN."""
    import torch

    from regard.ops import Dense
    from regard.ops import decode as one_query
    from regard.ops.call import make_call

    q, k = torch.randn(2, 6, 1, 5), torch.randn(2, 3, 11, 5)
    seen = torch.arange(11) % 3 != 1
    rules = {
        "hidden by a mask": Dense(seen),
        "hidden by position": Causal().at(torch.tensor([20]), torch.where(seen, 3, -1)),
    }
    found = {}
    for name, mask in rules.items():
        clean = one_query.run(make_call(q, k, k, mask=mask))
        for bad in (math.nan, math.inf):
            dirty = k.masked_fill(~seen[:, None], bad)
            gap = (one_query.run(make_call(q, dirty, dirty, mask=mask)) - clean).abs().max()
            found[f"{name} {bad}"] = [float(gap), 0.0]
            spoilt = k.clone()
            spoilt[:, :, 3, 2] = bad
            kept = one_query.run(make_call(q, spoilt, k, mask=mask)).isfinite().any()
            found[f"{name} {bad} seen"] = [float(kept), 0.0]
    return found


@pytest.fixture(scope="module")
def report() -> Any:
    return run_interpreted(Path(__file__))


def test_one_query_equals_the_reference_in_every_case(report: dict[str, list[float]]) -> None:
    wrong = {name: pair for name, pair in report.items() if not pair[0] <= pair[1]}
    assert not wrong, wrong
    assert len(report) == len(ONE_QUERY) + len(HALF) + len(PLACED) + 8


if __name__ == "__main__":
    run_cases()
