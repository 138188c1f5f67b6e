"""How the GPU benches time: contestants in turn, bursts between CUDA events, medians and ratios.

In each round the contestants of a row run one after another in a new random order, so that heat and
clocks are the same for all. A turn is one call that is not timed, then a burst of calls between two
CUDA events: the host prepares a call while the GPU is busy with the one before, as in a model, and
a call that takes longer to prepare than to compute shows it. The two contestants of a ratio run in
every round, the others in every third. Times are medians; a ratio is the median of the ratios of
single rounds, ± half the distance between its quartiles. Without a GPU (--tiny) the wall clock
stands for the events, and a plain call for a CUDA graph.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard

Run = Callable[[], Any]
Pair = tuple[str, str]
Times = dict[str, list[float]]

BURST_MS = 5.0
"""How long a burst is to take."""
REFUSALS = (RuntimeError, ValueError, TypeError)


@dataclass(kw_only=True)
class Bench:
    """How to measure, and what has been found so far."""

    device: str
    options: argparse.Namespace
    lines: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def say(self, *lines: str) -> None:
        """Print lines of the report, and keep them."""
        print("\n".join(lines), flush=True)
        self.lines += lines

    def dash(self, reason: str) -> str:
        """The mark of a contestant that was not timed."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return f"– [{self.reasons.index(reason) + 1}]"

    def wait(self) -> None:
        """Until the GPU has nothing to do."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what the last row held: memory, and graphs, of which torch keeps only a few."""
        torch._dynamo.reset()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{time.perf_counter() - self.began:.0f} s", file=sys.stderr, flush=True)


def clock(run: Run, burst: int, bench: Bench) -> float:
    """Milliseconds a call."""
    run()
    if bench.device != "cuda":
        began = time.perf_counter()
        for _ in range(burst):
            run()
        return 1e3 * (time.perf_counter() - began) / burst
    make: Any = partial(torch.cuda.Event, enable_timing=True)
    start, end = make(), make()
    start.record()
    for _ in range(burst):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / burst


def race(runs: dict[str, Run], always: tuple[str, ...], bench: Bench) -> Times:
    """Milliseconds of each contestant by rounds; those of `always` run in all of them."""
    bursts = {}
    for name, run in runs.items():
        clock(run, 2, bench)
        bursts[name] = min(max(math.ceil(BURST_MS / clock(run, 3, bench)), 1), 200)
    if all(name in runs for name in always[:2]):
        bursts[always[0]] = bursts[always[1]]
    times: Times = {name: [] for name in runs}
    rng = random.Random(0)
    for turn in range(bench.options.rounds):
        order = [name for name in runs if name in always or turn % 3 == 0]
        rng.shuffle(order)
        for name in order:
            times[name].append(clock(runs[name], bursts[name], bench))
    return times


def host_time(run: Run | None, bench: Bench) -> str:
    """Microseconds until a call returns."""
    if run is None:
        return "–"
    times = []
    for _ in range(bench.options.rounds):
        bench.wait()
        began = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - began))
    bench.wait()
    return f"{statistics.median(times):.0f}"


def compare(times: Times, pair: Pair) -> tuple[float, str]:
    """The ratio of a pair, as a number and as text; infinite where one was not timed."""
    if any(name not in times for name in pair):
        return math.inf, "–"
    ratios = [ours / theirs for ours, theirs in zip(*(times[name] for name in pair), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, f"{middle:.3f} ± {(high - low) / 2:.3f}"


def head_of(first: str, columns: tuple[str, ...], *more: str) -> tuple[str, str]:
    """The first two lines of a table."""
    names = (first, *columns, *more)
    return f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"


def capture(run: Run, bench: Bench) -> Run:
    """The run as a CUDA graph. One that waits for the GPU is refused before it spoils a capture."""
    if bench.device != "cuda":
        return run
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            output = run()
    finally:
        # A capture that fails leaves its own stream behind as the current one.
        torch.cuda.set_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return output  # type: ignore[no-any-return]

    return replay


def name_machine(bench: Bench) -> str:
    """The device, its driver, and the versions of what runs on it."""
    parts = [platform.processor() or platform.machine()]
    if bench.device == "cuda":
        parts = [torch.cuda.get_device_name()]
        if shutil.which("nvidia-smi"):
            asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            parts.append(f"driver {found.split()[0]}")
        parts.append(f"cuDNN {torch.backends.cudnn.version()}")
    try:
        import triton

        parts.append(f"triton {triton.__version__}")
    except ImportError:
        parts.append("no triton")
    parts += [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    return ", ".join([*parts, f"regard {regard.__version__}"])


def write(bench: Bench) -> None:
    """What is known so far, beside and renamed, so that a run cut short leaves whole tables."""
    path: Path | None = bench.options.out
    if path is not None:
        beside = path.with_name(f"{path.name}.new")
        beside.write_text("\n".join(bench.lines) + "\n", encoding="utf-8")
        beside.replace(path)


def options_of(text: str) -> argparse.ArgumentParser:
    """The options that all benches have; text: what the bench is about."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="rounds of each row; 30, with --tiny 3")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, also without a GPU")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    return parser


def begin(parser: argparse.ArgumentParser, title: str) -> Bench:
    """Read the options, and say what is measured where."""
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.tiny else 30)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, which quartiles need, got {options.rounds}")
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("there is no GPU here; --tiny runs without one")
    if options.tiny:
        torch.set_num_threads(1)
    bench = Bench(device="cuda" if torch.cuda.is_available() else "cpu", options=options)
    command = shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    bench.say(f"# {title}", "", f"{datetime.date.today()}, {name_machine(bench)}.", "")
    bench.say(f"`{command}`: bfloat16, medians of {options.rounds} rounds.")
    return bench


def end(bench: Bench) -> None:
    """The reasons of all dashes, and the time it took."""
    bench.say("", *(f"[{n}] {reason}  " for n, reason in enumerate(bench.reasons, 1)), "")
    bench.say(f"All of it took {time.perf_counter() - bench.began:.0f} s.")
    write(bench)
