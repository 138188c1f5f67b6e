"""The kernels that look at weights, run by Triton's interpreter, tell what the reference tells.

In a process of its own, as Triton decides at import whether it interprets; bfloat16 is left to the
tests marked `gpu`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreted import run_interpreted
from row_stats_cases import SEEN, SINGLES

pytestmark = pytest.mark.slow

HALF = ("causal", "window", "softcap")
"""Cases that are run in float16 too."""
IN_PARTS = (
    "window",
    "fewer queries than keys",
    "both sides",
    "even cells",
    "large even cells",
    "even cells of a part",
)
"""Cases that are run with little room: with cells of one row, of broken ones, and of many tiles."""


def run_cases() -> None:
    """Every case; printed as JSON."""
    import torch
    from interpreted import patch_once
    from row_stats_cases import gaps, singles_gap

    from regard.ops.kernels import pooling, row_stats

    patch_once()
    report = {}
    for name in SEEN:
        for dtype in (torch.float32, torch.float16)[: 1 + (name in HALF)]:
            report[f"{name} {dtype}"] = gaps(name, dtype, "cpu", row_stats.by_kernels)
    report["NaN"] = {"wrong": (count_wrong_nans(), 0)}
    # One tile of cells at a time, and small ones, whose edges lie inside of rows; and the largest
    # weights from tiles, as when many are asked for.
    pooling.SCRATCH, pooling.ROWS, pooling.KEYS, row_stats.MOST_TOP = 1, 16, 32, 2
    for name in IN_PARTS:
        report[f"{name} in parts"] = gaps(name, torch.float32, "cpu", row_stats.by_kernels)
    report["singles"] = {name: singles_gap(name, "cpu") for name in SINGLES}
    print(json.dumps(report))


def count_wrong_nans() -> int:
    """How many numbers are NaN and should not be, or the other way round."""
    import torch

    from regard.ops import Causal, Wants
    from regard.ops.call import make_call
    from regard.ops.kernels import row_stats

    q, k = torch.randn(2, 1, 1, 37, 8)
    q[0, 0, 20, 3] = math.nan
    rows = torch.zeros(1, 1, 37, dtype=torch.bool)
    rows[0, 0, 20] = True
    wants = Wants(
        lse=True,
        entropy=True,
        peak=True,
        distance=True,
        received=True,
        map=(37, 37),
        top=5,
    )
    call = replace(make_call(q, k, k, mask=Causal()), wants=wants)
    seen = row_stats.by_kernels(call, q[..., :0])
    assert seen.map is not None and seen.received is not None and seen.peak is not None
    assert seen.top is not None
    cells = torch.zeros(37, 37, dtype=torch.bool)
    cells[20, :21] = True
    wrong = (seen.map[0, 0].isnan() != cells).sum()
    wrong += (seen.received.total[0, 0].isnan() != (torch.arange(37) <= 20)).sum()
    for told in (seen.lse, seen.entropy, seen.distance, seen.peak.weight):
        assert told is not None
        wrong += (told.isnan() != rows).sum()
    wrong += (seen.top.weight.isnan() != rows[..., None]).sum()
    wrong += (seen.top.key[0, 0, 20] != -1).sum()
    return int(wrong) + int(seen.peak.key[0, 0, 20] != -1)


@pytest.fixture(scope="module")
def report() -> Any:
    return run_interpreted(Path(__file__))


@pytest.mark.parametrize(
    "name", [*SEEN, *(f"{name} in parts" for name in IN_PARTS), "NaN", "singles"]
)
def test_kernels_tell_what_the_reference_tells(name: str, report: Any) -> None:
    found = {key: told for key, told in report.items() if key.split(" torch")[0] == name}
    assert len(found) == 1 + (name in HALF)
    for told in found.values():
        wrong = {what: pair for what, pair in told.items() if not pair[0] <= pair[1]}
        assert not wrong, wrong


if __name__ == "__main__":
    run_cases()
