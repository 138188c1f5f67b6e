"""`regard.attention` on a GPU beside its peers: forward, backward and decoding, in one process.

    python bench/attention_gpu.py [--only plain|rules|decode] [--rounds 30] [--flex] [--inference]
                                  [--tiny] [--out bench/results/attention_gpu.md]

Everything is bfloat16 and random; q (B, H, T, D), k and v (B, G, S, D) are contiguous. The peers
are torch's `scaled_dot_product_attention` (SDPA) as called, where torch chooses the kernel, and
held to cuDNN, flash or the memory-efficient kernel; compiled FlexAttention; and the eager formula.
A peer's block mask or dense mask is made before the clock starts, as a model would make it once;
regard is given its mask as a value and pays for the rest in each call. FlexAttention compiles for
seconds for each new shape, so of the first table it runs in two rows; --flex has it in all. The
rules and the contestants are in attention_peers.py.

How it is timed: in each round the contestants of a row run one after another in a new random order,
so that heat and clocks are the same for all. A turn is one call that is not timed, then a burst of
calls between two CUDA events: the host prepares a call while the GPU is busy with the one before,
as in a model, and a call that takes longer to prepare than to compute shows it. The two contestants
of a ratio run in every round, the others in every third. Times are medians; a ratio is the median
of the ratios of single rounds, ± half the distance between its quartiles. Forward calls record what
the backward pass needs; with --inference they do not, and no backward pass is timed. "Backward" is
`torch.autograd.grad` of one output, alone. Host µs is the time until a forward call returns, the
GPU being idle before it.

Nothing wrong is timed: 64 rows of each output are compared with the formula in float32, and the
gradients with those of the first peer that has them. A contestant that refuses, fails or is wrong
gets a dash, and its reason stands below the tables.

In decoding one query reads a whole KV cache; TB/s counts the bytes of k and v. "Graph" replays one
call captured as a CUDA graph, which leaves the host out; a small cache may then stay in the GPU's
L2 cache, for all contestants alike. --tiny runs the same code with tiny sizes, also without a GPU:
there the wall clock stands for the events and a plain call for the graph, and FlexAttention is not
compiled.
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
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_peers import (
    KERNELS,
    Attend,
    Rule,
    Sizes,
    cache_rule,
    check_near,
    formula,
    hold,
    make_dense,
    make_eager,
    make_flex,
    make_regard,
    make_sdpa,
    masking_rules,
    plain_rules,
    plain_sizes,
    refuse,
    scoring_rules,
)
from torch import Tensor
from torch._functorch import config as functorch_config

import regard

Run = Callable[[], Any]
Pair = tuple[str, str]
Times = dict[str, list[float]]

CLAIM = 1.03
"""What the ratio of plain and causal attention to SDPA as called is to stay within."""
BURST_MS = 5.0
"""How long a burst is to take."""
REFUSALS = (RuntimeError, ValueError, TypeError)
PLAIN = ("regard", "SDPA", *KERNELS, "FlexAttention", "eager")
RULES = ("regard", "FlexAttention", "SDPA, dense mask")
DECODE = (
    "regard",
    "SDPA",
    "regard, graph",
    "SDPA, graph",
    "regard with a cache's mask, graph",
    "regard triton, graph",
)


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


@dataclass
class Entries:
    """The contestants of a row that gave the right answer, and the dashes of the others."""

    forward: dict[str, Run] = field(default_factory=dict)
    backward: dict[str, Run] = field(default_factory=dict)
    dashes: dict[str, str] = field(default_factory=dict)


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


def race(runs: dict[str, Run], pair: Pair, bench: Bench) -> Times:
    """Milliseconds of each contestant by rounds; those of the pair run in all of them."""
    bursts = {}
    for name, run in runs.items():
        clock(run, 2, bench)
        bursts[name] = min(max(math.ceil(BURST_MS / clock(run, 3, bench)), 1), 200)
    if all(name in runs for name in pair):
        bursts[pair[0]] = bursts[pair[1]]
    times: Times = {name: [] for name in runs}
    rng = random.Random(0)
    for turn in range(bench.options.rounds):
        order = [name for name in runs if name in pair or turn % 3 == 0]
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


def enter(calls: dict[str, Attend], sizes: Sizes, rule: Rule, bench: Bench) -> Entries:
    """Call each contestant once and compare; what passes is ready to be timed."""
    torch.manual_seed(0)
    blind = bench.options.inference
    q, k, v = inputs = sizes.draw(bench.device, rule.sharp)
    for x in inputs:
        x.requires_grad_(not blind)
    some = torch.randperm(sizes.T)[:62].tolist()
    rows = torch.tensor([0, sizes.T - 1, *some], device=bench.device)
    with torch.no_grad():
        expected = formula(q, k, v, rule, rows)
    grad = torch.randn_like(inputs[0])
    entries, first = Entries(), None
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                out = call(*inputs)
                check_near(out[:, :, rows], expected, "its output")
                entries.forward[name] = partial(call, *inputs)
                if blind:
                    continue
                back = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
                grads = back()
                first = grads if first is None else first
                for letter, one, other in zip("qkv", grads, first, strict=True):
                    check_near(one.flatten(), other.flatten(), f"its gradient of {letter}")
                entries.backward[name] = back
            except REFUSALS as error:
                entries.dashes[name] = bench.dash(f"{name}: {why(error, told)}")
    return entries


def why(error: Exception, told: list[warnings.WarningMessage]) -> str:
    """The first line of an error; torch tells why it has no kernel in warnings before it."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "No available kernel" in line:
        reasons = [str(warning.message).splitlines()[0] for warning in told]
        reasons = [r for r in reasons if "because" not in r and "disabled" not in r]
        line = reasons[-1] if reasons else line
    return line.split(" (Triggered internally")[0]


def fill_cells(entries: Entries, columns: tuple[str, ...], ahead: Times, behind: Times) -> str:
    """The times of a row: forward / backward."""
    cells = []
    for name in columns:
        found = [f"{statistics.median(t[name]):.3g}" for t in (ahead, behind) if name in t]
        if name in entries.dashes:
            found.append(entries.dashes[name])
        cells.append(" / ".join(found))
    return " | ".join(cells)


def measure_row(
    calls: dict[str, Attend],
    sizes: Sizes,
    rule: Rule,
    columns: tuple[str, ...],
    bench: Bench,
) -> tuple[str, tuple[float, float], str]:
    """A row's cells, the ratios of its first two columns, and the host's time for these."""
    pair = columns[0], columns[1]
    entries = enter(calls, sizes, rule, bench)
    ahead = race(entries.forward, pair, bench)
    behind = race(entries.backward, pair, bench)
    host = " / ".join(host_time(entries.forward.get(name), bench) for name in pair)
    (forward, text), (backward, back_text) = compare(ahead, pair), compare(behind, pair)
    cells = fill_cells(entries, columns, ahead, behind)
    return f"{cells} | {text} | {back_text}", (forward, backward), host


def head_of(first: str, columns: tuple[str, ...], *more: str) -> tuple[str, str]:
    """The first two lines of a table."""
    names = (first, *columns, *more)
    return f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"


def plain_calls(sizes: Sizes, rule: Rule, bench: Bench) -> dict[str, Attend]:
    """The contestants of plain and causal attention; SDPA first, whose gradients judge."""
    sdpa = make_sdpa(sizes, rule)
    options = bench.options
    flex = refuse("left out where not asked for by --flex, since each shape compiles for seconds")
    if options.tiny or options.flex or (sizes.B, sizes.H, sizes.G) == (8, 16, 16):
        flex = make_flex(sizes, rule, bench.device, not options.tiny)
    return {
        "SDPA": sdpa,
        **{name: hold(kernel, sdpa) for name, kernel in KERNELS.items()},
        "FlexAttention": flex,
        "eager": make_eager(sizes, rule, bench.device),
        "regard": make_regard(rule),
    }


def time_plain(bench: Bench) -> None:
    """The first table, and its largest ratio."""
    ratios = ("regard ÷ SDPA, forward", "backward", "host µs, regard / SDPA")
    bench.say("", "## Plain and causal", "", "Forward / backward ms.", "")
    bench.say(*head_of("", PLAIN, *ratios))
    for sizes in plain_sizes(bench.options.tiny):
        for rule in plain_rules():
            calls = plain_calls(sizes, rule, bench)
            cells, both, host = measure_row(calls, sizes, rule, PLAIN, bench)
            bench.say(f"| {sizes}, {rule.name} | {cells} | {host} |")
            kinds = ("forward",) if bench.options.inference else ("forward", "backward")
            for kind, ratio in zip(kinds, both, strict=False):
                bench.ratios[f"{kind}, {sizes}, {rule.name}"] = ratio
            del calls
            bench.free()
    # One that was not timed counts as larger than all others.
    worst = max(bench.ratios, key=lambda name: bench.ratios[name])
    within = sum(ratio <= CLAIM for ratio in bench.ratios.values())
    bench.say("", f"Largest ratio to SDPA as called: {bench.ratios[worst]:.3f} ({worst}).")
    bench.say(f"{within} of {len(bench.ratios)} ratios are at most {CLAIM}.")


def time_rules(bench: Bench) -> None:
    """The second table."""
    tiny = bench.options.tiny
    shapes = [Sizes(8, 16, 16, 2048, 2048, 128), Sizes(1, 16, 16, 16384, 16384, 128)]
    ratios = ("regard ÷ FlexAttention, forward", "backward", "host µs, regard / FlexAttention")
    bench.say("", "## Masks, biases, softcap and sinks", "", "Forward / backward ms.", "")
    bench.say(*head_of("", RULES, *ratios))
    for sizes in [Sizes(2, 4, 4, 64, 64, 16), Sizes(1, 4, 4, 96, 96, 16)] if tiny else shapes:
        torch.manual_seed(0)
        for rule in masking_rules(sizes, bench.device) + scoring_rules(sizes, bench.device):
            calls = {
                "FlexAttention": make_flex(sizes, rule, bench.device, not tiny),
                "SDPA, dense mask": make_dense(sizes, rule, bench.device),
                "regard": make_regard(rule),
            }
            cells, _, host = measure_row(calls, sizes, rule, RULES, bench)
            bench.say(f"| {sizes}: {rule.name} | {cells} | {host} |")
            del calls
            bench.free()


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


def enter_decode(sizes: Sizes, bench: Bench) -> Entries:
    """The contestants of decoding that give the formula's answer."""
    torch.manual_seed(0)
    plain = Rule(name="plain", ours={})
    q, k, v = inputs = sizes.draw(bench.device)
    expected = formula(q, k, v, plain, torch.zeros(1, dtype=torch.long, device=bench.device))
    ours, theirs = make_regard(plain), make_sdpa(sizes, plain)
    cached = make_regard(cache_rule(sizes, bench.device))
    calls = (ours, theirs, ours, theirs, cached, make_regard(plain, backend="triton"))
    entries = Entries()
    for name, call in zip(DECODE, calls, strict=True):
        run: Run = partial(call, *inputs)
        try:
            check_near(run(), expected, "its output")
            if name.endswith("graph"):
                run = capture(run, bench)
                check_near(run(), expected, "its graph's output")
            entries.forward[name] = run
        except REFUSALS as error:
            entries.dashes[name] = bench.dash(f"{name}: {why(error, [])}")
    return entries


@torch.no_grad()
def time_decode(bench: Bench) -> None:
    """The third table."""
    shapes = ((1, 8192), (1, 131072), (16, 8192), (64, 8192))
    rows = [Sizes(B, 32, 8, 1, S, 128) for B, S in shapes]
    rows = [Sizes(3, 4, 2, 1, 64, 16)] if bench.options.tiny else rows
    pair = "regard, graph", "SDPA, graph"
    heads = f"{rows[0].H} heads over {rows[0].G} key heads of width {rows[0].D}"
    bench.say("", "## Decoding", "")
    bench.say(f"One query, {heads}: µs a call, and TB/s of cache read.", "")
    bench.say(*head_of("batch × keys", DECODE, "ratio, graphs", "host µs, regard / SDPA"))
    for sizes in rows:
        entries = enter_decode(sizes, bench)
        times = race(entries.forward, pair, bench)
        n_bytes = 2 * 2 * sizes.B * sizes.G * sizes.S * sizes.D
        cells = []
        for name in DECODE:
            if name in times:
                ms = statistics.median(times[name])
                cells.append(f"{1e3 * ms:.1f}, {n_bytes / ms / 1e9:.2f}")
            else:
                cells.append(entries.dashes[name])
        host = " / ".join(host_time(entries.forward.get(name), bench) for name in DECODE[:2])
        ratio = compare(times, pair)[1]
        bench.say(f"| {sizes.B} × {sizes.S:,} | {' | '.join(cells)} | {ratio} | {host} |")
        del entries
        bench.free()


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


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["plain", "rules", "decode"], help="one table")
    parser.add_argument("--rounds", type=int, help="rounds of each row; 30, with --tiny 3")
    parser.add_argument("--flex", action="store_true", help="FlexAttention in all rows")
    parser.add_argument("--inference", action="store_true", help="no gradients")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, also without a GPU")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.tiny else 30)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, which quartiles need, got {options.rounds}")
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("there is no GPU here; --tiny runs without one")
    return options


def main() -> None:
    options = read_options()
    if options.tiny:
        torch.set_num_threads(1)
    # A compiled backward pass that gives its inputs' memory away could run only once.
    functorch_config.donated_buffer = False
    bench = Bench(device="cuda" if torch.cuda.is_available() else "cpu", options=options)
    command = shlex.join(["python", "bench/attention_gpu.py", *sys.argv[1:]])
    bench.say("# Attention on a GPU", "", f"{datetime.date.today()}, {name_machine(bench)}.", "")
    bench.say(f"`{command}`: bfloat16, medians of {options.rounds} rounds.")
    tables = {"plain": time_plain, "rules": time_rules, "decode": time_decode}
    for name, table in tables.items():
        if options.only in (None, name):
            table(bench)
            write(bench)
    bench.say("", *(f"[{n}] {reason}  " for n, reason in enumerate(bench.reasons, 1)), "")
    bench.say(f"All of it took {time.perf_counter() - bench.began:.0f} s.")
    write(bench)


if __name__ == "__main__":
    main()
