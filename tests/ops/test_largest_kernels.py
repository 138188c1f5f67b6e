"""The largest weights by lists of candidates, held to the reference: which rows tell, and what.

What Gluon does is run by numpy, the rest by Triton's interpreter, in a process of its own. On a GPU
the same is held to the reference in test_gpu.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreted import run_interpreted

pytestmark = pytest.mark.slow

CASES = (
    "plain", "heads share keys", "causal", "few queries", "window", "slopes", "softcap",
    "documents", "padding", "sinks", "neighbours", "all the same", "two rows ascend",
    "a wrong bound", "NaN",
)  # fmt: skip


def rule_of(name: str) -> dict[str, Any]:
    """What is asked for in a case, beside the sizes."""
    import torch

    from regard.ops import ALiBi, Causal, Documents, Lengths, Window

    return {
        "causal": {"mask": Causal()},
        "few queries": {"mask": Causal()},
        "window": {"mask": Window(200, 40)},
        "slopes": {"mask": Causal(), "bias": ALiBi(2)},
        "softcap": {"softcap": 3.0},
        "documents": {"mask": Documents(torch.arange(300) % 3)},
        "padding": {"mask": Lengths(torch.tensor([277, 5]))},
        "sinks": {"sinks": torch.tensor([0.3, -2.0])},
        "neighbours": {"mask": Causal()},
        "NaN": {"mask": Causal()},
    }.get(name, {})


def count_wrong(name: str, few: int) -> tuple[int, int]:
    """How many rows tell something wrong, and how many bands were left to the plain walk."""
    import torch
    from gluon_on_numpy import Descriptor, as_argument, bind

    from regard.ops import Wants, observe
    from regard.ops.call import make_call
    from regard.ops.kernels import largest_hopper_kernels, largest_kernels, row_stats
    from regard.ops.kernels.arguments import rule_of as as_rule
    from regard.ops.kernels.flash_hopper_kernels import is_plain
    from regard.ops.kernels.rendered import Rendered

    flags = []

    def run(
        given: Rendered, bounds: Any, lists: Any, heads: tuple[int, int], n_top: int, _: int
    ) -> None:
        (_, H, T, D), (_, G, S, _) = given.q.shape, given.k.shape
        if name == "a wrong bound":
            bounds = bounds + 1.0
        for program in range(heads[1] * -(-T // 128)):
            bind(largest_hopper_kernels, "_candidates", program, 8, few > 1)(
                *(Descriptor(x.float().numpy()) for x in (given.q, given.k)),
                *map(as_argument, (as_rule(given), bounds, lists, heads[0], n_top, few, H, T, S)),
                R=H // G, WIDTH=D, PLAIN=is_plain(given),
            )  # fmt: skip

    def run_lists(*args: Any) -> None:
        plain_run(*args)
        flags.append(args[5].clone())

    plain_run = largest_kernels._run_lists
    largest_kernels._run_lists = run_lists  # type: ignore[assignment]
    largest_kernels.LIST_NUMBERS = 1
    largest_kernels.takes_lists = lambda *_: True  # type: ignore[assignment]
    largest_hopper_kernels.run_candidates = run  # type: ignore[assignment]
    T, S, G = {
        "heads share keys": (200, 300, 1), "few queries": (131, 700, 2), "window": (150, 500, 2),
        "two rows ascend": (131, 700, 2),
    }.get(name, (300, 300, 2))  # fmt: skip
    torch.manual_seed(len(name))
    q, k = torch.randn(2, 2, T, 64), torch.randn(2, G, S, 64)
    if name == "neighbours":
        walk = torch.nn.functional.avg_pool1d(torch.randn(4, 64, S + 31), 32, 1)
        k = torch.nn.functional.normalize(walk.mT.reshape(2, 2, S, 64), dim=-1)
        q = 20 * k
    if name == "all the same":
        q, k = q.round(), torch.ones_like(k)
    ascends = torch.zeros_like(q[..., 0], dtype=torch.bool)
    if name == "two rows ascend":
        # Up to keys that come too late for the list, and too early for a bound of its own.
        ascends[0, 1, 130] = ascends[1, 0, 10] = True
        k[..., 0] = torch.arange(S) % 300 - 900.0 * (torch.arange(S) >= 300)
        q[..., 0] = 0.0
        q[ascends] = torch.eye(64)[0] * 2.0**-22
    if name == "NaN":
        q[0, 1, 30, 5] = torch.nan
        k[1, 0, 299] = torch.nan
    wants = Wants(top=5)
    call = make_call(q, k, k[..., :0], **rule_of(name))
    seen = row_stats.by_kernels(replace(call, wants=wants), q[..., :0]).top
    largest_kernels._run_lists = plain_run
    truth = observe(
        q.double(), k.double(), None, wants=Wants(top=5, weights=True), backend="reference",
        **rule_of(name),
    )  # fmt: skip
    assert seen is not None and truth.top is not None and truth.weights is not None
    named = truth.weights.gather(-1, seen.key.clamp(min=0)).masked_fill(seen.key < 0, 0.0)
    wrong = (seen.weight - truth.top.weight).abs() > 1e-5
    wrong |= ((named - truth.top.weight).abs() > 1e-5) & ~truth.top.weight.isnan()
    wrong |= seen.weight.isnan() != truth.top.weight.isnan()
    wrong |= (seen.key >= 0) != (truth.top.key >= 0)
    order = seen.key.sort(-1)[0]
    twice = ((order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)).any(-1)
    if name == "all the same":
        twice |= (seen.key != torch.arange(5)).any(-1)
    twice |= ascends & (seen.key != 299 - torch.arange(5)).any(-1)
    return int((wrong.any(-1) | twice).sum()), int((flags[0] != 0).sum())


def run_cases() -> None:
    """Every case, with bounds from all tiles and from the last two; printed as JSON."""
    from interpreted import patch_once

    patch_once()
    print(json.dumps({name: [count_wrong(name, few) for few in (32, 1)] for name in CASES}))


@pytest.fixture(scope="module")
def report() -> Any:
    return run_interpreted(Path(__file__))


@pytest.mark.parametrize("name", CASES)
def test_lists_tell_the_largest_weights(name: str, report: Any) -> None:
    assert [wrong for wrong, _ in report[name]] == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_only_rows_whose_lists_do_not_tell_are_left_to_the_plain_walk(
    name: str, report: Any
) -> None:
    from_all, from_some = (left for _, left in report[name])
    assert (from_all > 0) == (name in ("all the same", "a wrong bound"))
    if name == "two rows ascend":
        assert from_some == 2


if __name__ == "__main__":
    run_cases()
