"""The kernels that look at weights, run by Triton's interpreter, tell what the reference tells.

In a process of its own, as Triton decides at import whether it interprets; bfloat16 is left to the
tests marked `gpu`.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreted import run_interpreted
from row_stats_cases import RECEIVED, SEEN, SINGLES

pytestmark = pytest.mark.slow

HALF = ("causal", "window", "softcap")
"""Cases that are run in float16 too."""
IN_PARTS = (
    "window",
    "fewer queries than keys",
    "both sides",
    "large even cells",
    "even cells of a part",
)
"""Cases that are run with little memory: one band of rows at a time, in small tiles."""


def run_cases() -> None:
    """Every case; printed as JSON."""
    import torch
    from interpreted import patch_once
    from row_stats_cases import gaps, received_gaps, singles_gap

    from regard.ops.kernels import pooling, row_stats, row_stats_kernels
    from regard.ops.kernels.tiles import Tiles

    patch_once()
    report = {}
    for name in SEEN:
        for dtype in (torch.float32, torch.float16)[: 1 + (name in HALF)]:
            report[f"{name} {dtype}"] = gaps(name, dtype, "cpu", row_stats.by_kernels)
    report["NaN"] = {"wrong": (count_wrong_nans(), 0)}
    report["top"] = {f"{n} largest": (count_wrong_tops(n), 0) for n in (1, 8, 11, 32)}
    report["above"] = {"of tiles eight by eight": (count_wrong_above(), 0)}
    row_stats_kernels.GROUP = 2
    report["above"]["of tiles two by two"] = count_wrong_above(), 0
    # One band of rows at a time, in tiles smaller than a cell; and the largest weights from torch's
    # tiles, as when many are asked for.
    pooling.SCRATCH, row_stats.MOST_TOP = 1, 2
    pooling.tiles_of = lambda kernel, given: Tiles(16, 32, 4, 1)
    for name in IN_PARTS:
        report[f"{name} in parts"] = gaps(name, torch.float32, "cpu", row_stats.by_kernels)
    report["singles"] = {name: singles_gap(name, "cpu") for name in SINGLES}
    report["received"] = {
        what: gap
        for name in RECEIVED
        for what, gap in received_gaps(name, "cpu", row_stats.by_kernels).items()
    }
    report["output"] = {"wrong": output_gap(), "rows without dropout": (count_undropped(), 0)}
    print(json.dumps(report))


def count_wrong_nans() -> int:
    """How many numbers are NaN and should not be, or the other way round."""
    import torch

    from regard.ops import Causal, DenseBias, Received, Wants
    from regard.ops.call import make_call
    from regard.ops.kernels import row_stats

    T = 37
    q, k = torch.randn(2, 1, 1, T, 8)
    q[0, 0, 20, 3] = math.nan
    # What nobody sees may be anything.
    k[0, 0, 30] = math.nan
    bias = torch.zeros(T, T)
    bias[:, [7, 30]] = -math.inf
    keys = torch.arange(T)
    keys = (keys <= 20) & (keys != 7)
    rows = torch.zeros(1, 1, T, dtype=torch.bool)
    rows[0, 0, 20] = True
    cells = torch.zeros(T, T, dtype=torch.bool)
    cells[20] = keys
    asked = {"lse": True, "entropy": True, "peak": True, "distance": True, "received": True}
    wrong = 0
    for picture in ((T, T), (T - 1, T)):
        wants = Wants(
            **asked, map=picture, top=5, above=0.01, rows=[20, 21], mass=torch.ones(T) > 0
        )
        call = replace(make_call(q, k, k, mask=Causal(), bias=DenseBias(bias)), wants=wants)
        seen = row_stats.by_kernels(call, q[..., :0])
        assert seen.map is not None and seen.received is not None and seen.peak is not None
        peak = seen.peak.weight, seen.peak.logit
        assert seen.top is not None and seen.above is not None and seen.rows is not None
        if picture == (T, T):
            wrong += int((seen.map[0, 0].isnan() != cells).sum())
        else:
            # A cell that begins inside of row 19 or 20 has a part of row 20.
            touched = cells[20].repeat(2, 1)
            wrong += int((seen.map[0, 0, 19:21].isnan() != touched).sum())
            wrong += int(seen.map[0, 0, :19].isnan().sum() + seen.map[0, 0, 21:].isnan().sum())
        wrong += int((seen.received.total[0, 0].isnan() != keys).sum())
        for found in (seen.lse, seen.entropy, seen.distance, *peak, seen.mass):
            assert found is not None
            wrong += int((found.isnan() != rows).sum())
        wrong += int((seen.top.weight.isnan() != rows[..., None]).sum())
        wrong += int((seen.top.key[0, 0, 20] != -1).sum())
        wrong += len(seen.above.row(0, 0, 20)[0]) + int(seen.above.weight.isnan().sum())
        wrong += int((seen.rows[0, 0].isnan() != torch.stack([keys, keys & ~keys])).sum())
        wrong += int(seen.peak.key[0, 0, 20] != -1)
    for by in ("sum", "max"):
        # A row of NaN tells nothing, also where it does not count.
        for weights in (None, torch.zeros(T)):
            for queries in ((0, T), (21, T)):
                asked = Wants(received=Received(rows=weights, by=by, queries=queries))
                answer = row_stats.by_kernels(replace(call, wants=asked), q[..., :0]).received
                assert answer is not None
                wrong += int((answer.value[0, 0].isnan() != (keys & (queries[0] == 0))).sum())
    return wrong


def count_wrong_above() -> int:
    """How many weights above a threshold are missing, wrong, or there and should not be.

    A query looks at one key far away, or at its own, and so most tiles have none.
    """
    import torch

    from regard.ops import Causal, Wants
    from regard.ops.call import make_call
    from regard.ops.kernels import row_stats

    T = 300
    k = torch.nn.functional.normalize(torch.randn(1, 2, T, 16), dim=-1)
    t = torch.arange(T)
    q = 40 * (k[:, :, torch.where(t % 3 == 0, t, t // 5)] + k[:, :, t])
    call = replace(make_call(q, k, k, mask=Causal(), scale=1.0), wants=Wants(above=0.1))
    found = row_stats.by_kernels(call, q[..., :0]).above
    assert found is not None
    scores = q @ k.mT
    seen = scores.masked_fill(t > t[:, None], -math.inf).softmax(-1)
    # A score is rounded as a product, in bits, and less the maximum, which is rounded apart.
    bound = 4 * torch.finfo(torch.float32).eps * float(scores.abs().max())
    wrong = 0
    for h, n in itertools.product(range(2), range(T)):
        keys, weights = found.row(0, h, n)
        expected = (seen[0, h, n] >= 0.1).nonzero().flatten()
        close = keys.equal(expected) and (weights - seen[0, h, n, expected]).abs().max() < bound
        wrong += not close
    return wrong


def count_wrong_tops(n_top: int) -> int:
    """How many of the largest weights are on a wrong key.

    Scores ascend, so that every tile has larger ones; descend; or are all the same.
    """
    import torch

    from regard.ops import Causal, Wants
    from regard.ops.call import make_call
    from regard.ops.kernels import row_stats

    T, S = 37, 101
    n, t = torch.arange(n_top), torch.arange(T)[:, None]
    last = t + S - T
    first = n.expand(T, n_top)
    wrong = 0
    for slope, wanted in ((1.0, last - n), (-1.0, first), (0.0, first)):
        k = torch.linspace(0.0, slope, S)[None, None, :, None]
        call = make_call(torch.ones(1, 1, T, 1), k, k, mask=Causal())
        seen = row_stats.by_kernels(replace(call, wants=Wants(top=n_top)), k[..., :0])
        assert seen.top is not None
        wrong += int((seen.top.key[0, 0] != wanted).sum())
    return wrong


def output_gap() -> tuple[float, float]:
    """How far the output is off where it is asked for too; values have a width of their own."""
    import torch

    from regard.ops import Causal, Wants, observe
    from regard.ops.call import make_call
    from regard.ops.kernels import row_stats

    q, k, v = torch.randn(2, 4, 37, 8), torch.randn(2, 2, 41, 8), torch.randn(2, 2, 41, 24)
    wants = Wants(received=True, top=3)
    seen = row_stats.by_kernels(replace(make_call(q, k, v, mask=Causal()), wants=wants))
    truth = observe(q, k, v, mask=Causal(), wants=wants, backend="reference")
    assert seen.output is not None and truth.output is not None
    assert seen.received is not None and truth.received is not None
    gaps = (seen.output - truth.output, seen.received.total - truth.received.total)
    return max(float(gap.abs().max()) for gap in gaps), 1e-5


def count_undropped() -> int:
    """How many rows keep all of their weights under dropout without a seed."""
    import torch

    from regard.ops import Wants
    from regard.ops.call import make_call
    from regard.ops.kernels import row_stats

    q, v = torch.zeros(1, 1, 37, 8), torch.eye(41)[None, None]
    call = make_call(q, torch.zeros(1, 1, 41, 8), v, dropout=0.5)
    seen = row_stats.by_kernels(replace(call, wants=Wants(received=True)))
    assert seen.output is not None and seen.received is not None
    assert torch.allclose(seen.received.total, torch.tensor(37 / 41))
    return int((seen.output > 0).all(-1).sum())


@pytest.fixture(scope="module")
def report() -> Any:
    return run_interpreted(Path(__file__))


@pytest.mark.parametrize(
    "name",
    [
        *SEEN,
        *(f"{name} in parts" for name in IN_PARTS),
        "NaN",
        "top",
        "above",
        "singles",
        "received",
        "output",
    ],
)
def test_kernels_tell_what_the_reference_tells(name: str, report: Any) -> None:
    found = {key: pairs for key, pairs in report.items() if key.split(" torch")[0] == name}
    assert len(found) == 1 + (name in HALF)
    for pairs in found.values():
        wrong = {what: pair for what, pair in pairs.items() if not pair[0] <= pair[1]}
        assert not wrong, wrong


if __name__ == "__main__":
    run_cases()
