"""Which tiles are fastest on this GPU: every candidate of a kernel's table, timed on its own.

    python bench/tune_gpu.py [--kernel forward keys ...] [--width 64 128] [--rule causal ...]

Kernels are first compiled for all candidates by several processes, into Triton's cache, and then
timed one after another in one. A candidate that does not fit, or gives another answer than the
table's own tiles, is left out. What is printed is for `ops/kernels/tiles.py`. The forward for
Hopper has tiles of its own, and is left out here.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import regard
from regard.ops.blockwise import Ask
from regard.ops.call import make_call
from regard.ops.kernels import (
    flash,
    flash_backward,
    flash_hopper,
    flash_kernels,
    largest_kernels,
    pooling,
    row_stats_kernels,
)
from regard.ops.kernels.flash_backward import Arriving, Grads, Saved
from regard.ops.kernels.launch import PLANS
from regard.ops.kernels.rendered import Rendered, render
from regard.ops.kernels.row_sums import RowSums
from regard.ops.kernels.tiles import Tiles

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": regard.Causal()},
    "ALiBi": {"mask": regard.Causal(), "bias": "ALiBi"},
    "softcap": {"mask": regard.Causal(), "softcap": 30.0},
    "documents": {"mask": "documents"},
}
ALL = Ask(entropy=True, peak=True, distance=True)
CANDIDATES = [
    Tiles(*each)
    for each in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3))
    if each[0] * each[1] // each[2] in (512, 1024, 2048)
]
CELL = 32
"""Rows and keys of a cell of the map that is pooled."""
MODULES = (flash_kernels, flash_backward, largest_kernels, pooling, row_stats_kernels)


def make(rule: str, width: int, T: int, H: int) -> Rendered:
    """A call of one sample, rendered."""
    given = dict(RULES[rule])
    if given.get("bias") == "ALiBi":
        given["bias"] = regard.ALiBi(H)
    if given.get("mask") == "documents":
        ids = torch.arange(T, device="cuda") * 4 // T
        given["mask"] = regard.Causal() & regard.Documents(ids)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, T, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return render(make_call(q, k, v, **given))


def kernels_of(given: Rendered) -> dict[str, Callable[[], torch.Tensor]]:
    """Every kernel as a call that gives something to compare."""
    blind = given._replace(v=given.v[..., :0])
    output, found = flash.forward(given, Ask(), None)
    sums = RowSums(found["maxima"], found["sums"])
    saved, arriving = Saved(output, found["lse"], None), Arriving(output, None, None)
    size = max(given.shape.T // CELL, 1), max(given.shape.S // CELL, 1)

    def backward(wanted: Grads) -> Grads:
        return flash_backward.backward(given, saved, arriving, wanted)

    return {
        "forward": lambda: flash.forward(given, Ask(), None)[0],
        "forward asked": lambda: flash.forward(given, ALL, None)[0],
        "forward blind": lambda: flash.forward(blind, ALL, None)[1]["entropy"],
        "keys": lambda: backward(Grads(k=True, v=True)).k,
        "queries": lambda: backward(Grads(q=True)).q,
        "pool": lambda: pooling.pool(given, sums, size)[1],
        "search": lambda: largest_kernels.run_largest(given, sums, 8)[0],
        "above": lambda: row_stats_kernels.run_above(given, sums, 0.05)[0],
    }


def set_tiles(tiles: Tiles | None, real: dict[Any, Any]) -> None:
    """Let every kernel have these tiles; None: those of the table."""
    for module in MODULES:
        real.setdefault(module, module.tiles_of)
        module.tiles_of = real[module] if tiles is None else lambda *_: tiles  # type: ignore[attr-defined]
    PLANS.clear()


def compile_one(what: tuple[str, str, int, Tiles]) -> str | None:
    """Compile for a candidate; the reason where that fails."""
    kernel, rule, width, tiles = what
    flash_hopper.runs_on = lambda *_: False
    real: dict[Any, Any] = {}
    try:
        run = kernels_of(make(rule, width, 1024, 16))[kernel]
        set_tiles(tiles, real)
        run()
    except Exception as error:  # A candidate that does not fit tells so in many ways.
        return str(error).splitlines()[0][:80] if str(error) else type(error).__name__
    finally:
        set_tiles(None, real)
    return None


def clock(run: Callable[[], torch.Tensor]) -> float:
    """Milliseconds, the median of some bursts."""
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return statistics.median(times)


def main() -> None:
    kernels = ["forward", "forward asked", "forward blind", "keys", "queries", "pool"]
    kernels += ["search", "above"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", nargs="+", default=kernels, choices=kernels)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rule", nargs="+", default=["plain", "causal"], choices=list(RULES))
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    began = time.perf_counter()
    todo = list(itertools.product(options.kernel, options.rule, options.width, CANDIDATES))
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        failed = dict(zip(todo, pool.map(compile_one, todo, chunksize=1), strict=True))
    print(f"compiled {len(todo)} in {time.perf_counter() - began:.0f} s", flush=True)
    flash_hopper.runs_on = lambda *_: False
    real: dict[Any, Any] = {}
    for rule, width in itertools.product(options.rule, options.width):
        runs = kernels_of(make(rule, width, options.tokens, 2048 // width))
        for kernel in options.kernel:
            set_tiles(None, real)
            expected, found = runs[kernel]().float(), []
            for tiles in CANDIDATES:
                if failed[(kernel, rule, width, tiles)] is not None:
                    continue
                set_tiles(tiles, real)
                if torch.allclose(runs[kernel]().float(), expected, rtol=0.05, atol=0.02):
                    found.append((clock(runs[kernel]), tiles))
                else:
                    print(f"  {kernel}, {rule}, {width}: {tuple(tiles)} gives another answer")
            best = " · ".join(f"{tuple(tiles)} {ms:.3f}" for ms, tiles in sorted(found)[:4])
            print(f"{kernel}, {rule}, {width}: {best}", flush=True)
    for what, reason in failed.items():
        if reason is not None:
            print(f"failed: {what[:3]} {tuple(what[3])}: {reason}")


if __name__ == "__main__":
    main()
