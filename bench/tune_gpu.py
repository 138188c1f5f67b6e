"""Which tiles are fastest on this GPU: every candidate of a kernel's table, timed on its own.

    python bench/tune_gpu.py [--kernel forward] [--width 64 128] [--rule plain causal ...]

Kernels are first compiled for all candidates by several processes, into Triton's cache, and then
timed one after another in one. A candidate that does not fit, or gives another answer than the
table's own tiles, is left out. What is printed is for `ops/kernels/tiles.py`.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch

import regard
from regard.ops.blockwise import Ask
from regard.ops.call import make_call
from regard.ops.kernels import flash, flash_kernels
from regard.ops.kernels.rendered import Rendered, render
from regard.ops.kernels.tiles import Tiles

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": regard.Causal()},
    "ALiBi": {"mask": regard.Causal(), "bias": "ALiBi"},
    "softcap": {"mask": regard.Causal(), "softcap": 30.0},
    "documents": {"mask": "documents"},
    "rows": {"mask": regard.Causal(), "ask": Ask(True, True, True)},
}
CANDIDATES = [
    Tiles(*each)
    for each in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    if each[0] * each[1] // each[2] in (512, 1024, 2048)
]


def make(rule: str, width: int, T: int, H: int) -> tuple[Rendered, Ask]:
    """A call of one sample, rendered."""
    given = dict(RULES[rule])
    ask = given.pop("ask", Ask())
    if given.get("bias") == "ALiBi":
        given["bias"] = regard.ALiBi(H)
    if given.get("mask") == "documents":
        ids = torch.arange(T, device="cuda") * 4 // T
        given["mask"] = regard.Causal() & regard.Documents(ids)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, T, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return render(make_call(q, k, v, **given)), ask


def run(given: Rendered, ask: Ask, tiles: Tiles) -> torch.Tensor:
    """The forward with these tiles."""
    flash_kernels.tiles_of = lambda *_: tiles
    return flash.forward(given, ask, None)[0]


def compile_one(what: tuple[str, int, Tiles]) -> str | None:
    """Compile for a candidate; the reason where that fails."""
    rule, width, tiles = what
    try:
        run(*make(rule, width, 512, 2), tiles)
    except Exception as error:  # A candidate that does not fit tells so in many ways.
        return str(error).splitlines()[0][:80]
    return None


def clock(given: Rendered, ask: Ask, tiles: Tiles) -> float:
    """Milliseconds, the median of some bursts."""
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            run(given, ask, tiles)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rule", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    began = time.perf_counter()
    todo = list(itertools.product(options.rule, options.width, CANDIDATES))
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        failed = dict(zip(todo, pool.map(compile_one, todo, chunksize=1), strict=True))
    print(f"compiled {len(todo)} in {time.perf_counter() - began:.0f} s", flush=True)
    for rule, width in itertools.product(options.rule, options.width):
        H = 2048 // width
        given, ask = make(rule, width, options.tokens, H)
        expected: torch.Tensor | None = None
        found = []
        for tiles in CANDIDATES:
            if failed[(rule, width, tiles)] is not None:
                continue
            out = run(given, ask, tiles).float()
            expected = out if expected is None else expected
            if not torch.allclose(out, expected, rtol=0.05, atol=0.02):
                print(f"  {tiles} gives another answer")
                continue
            found.append((clock(given, ask, tiles), tiles))
        full = 4.0 * H * options.tokens**2 * width / 1e9
        for ms, tiles in sorted(found)[:4]:
            print(
                f"{rule:10} {width:4} {tuple(tiles)!s:20} {ms:7.3f} ms {full / ms:6.0f}", flush=True
            )
    for what, reason in failed.items():
        if reason is not None:
            print(f"failed: {what[0]} {what[1]} {tuple(what[2])}: {reason}")


if __name__ == "__main__":
    main()
