"""How fast attention is on this CPU, as ratios against torch in one run.

    python bench/attention_cpu.py [--quick] [--out bench/results/attention_cpu.md]
    python bench/attention_cpu.py --blockwise [--out bench/results/attention_cpu_blockwise.md]

Each row times regard and a peer on the same inputs, alternating, and prints the medians and their
ratio (peer ÷ regard: above 1 means that regard is faster). Memory is the growth of the process's
peak, in a process of its own. With `--blockwise`, the tiled path is measured against the matrix
product instead, and seeing against the plain forward.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.ops import ALiBi, Causal, Lengths, Wants, Window, attention, observe
from regard.ops.blockwise import cut_heads, tile_sizes
from regard.ops.call import make_call

Run = Callable[[], object]


def race(ours: Run, theirs: Run, rounds: int) -> tuple[float, float]:
    """Median milliseconds of two runs that take turns, each as often first as second."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(-2, rounds):
        pair = list(zip((ours, theirs), times, strict=True))
        for run, found in pair if turn % 2 else pair[::-1]:
            start = time.perf_counter()
            run()
            if turn >= 0:
                found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


def trained(run: Callable[..., Tensor], *inputs: Tensor) -> Run:
    """The run with its backward pass."""

    def step() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        run(*leaves).sum().backward()

    return step


def rows_of_attention(rounds: int) -> list[tuple[str, float, float]]:
    """`attention` against torch's: its best call for plain and causal, else a mask made before."""
    B, H, T, D = 2, 8, 2048, 64
    q, k, v = (torch.randn(B, H, T, D) for _ in range(3))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    lengths = torch.tensor([T, T // 2])
    window = (j <= i) & (j >= i - 256)
    slopes = regard.ALiBi(H).slopes[:, None, None]
    alibi = (slopes * (j - i)).masked_fill(j > i, float("-inf"))[None]
    padding = (j < lengths[:, None])[:, None, None]
    sdpa = F.scaled_dot_product_attention
    calls: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "plain": (attention, sdpa),
        "causal": (
            lambda q, k, v: attention(q, k, v, mask=Causal()),
            lambda q, k, v: sdpa(q, k, v, is_causal=True),
        ),
        "padded, 3/4 full": (
            lambda q, k, v: attention(q, k, v, mask=Lengths(lengths)),
            lambda q, k, v: sdpa(q, k, v, attn_mask=padding),
        ),
        "causal window 256": (
            lambda q, k, v: attention(q, k, v, mask=Window(256, 0)),
            lambda q, k, v: sdpa(q, k, v, attn_mask=window),
        ),
        "causal ALiBi": (
            lambda q, k, v: attention(q, k, v, mask=Causal(), bias=ALiBi(H)),
            lambda q, k, v: sdpa(q, k, v, attn_mask=alibi),
        ),
    }
    found = []
    for name, (ours, theirs) in calls.items():
        with torch.no_grad():
            pair = race(partial(ours, q, k, v), partial(theirs, q, k, v), rounds)
        found.append((f"attention, {name}: forward", *pair))
        pair = race(trained(ours, q, k, v), trained(theirs, q, k, v), max(rounds // 2, 3))
        found.append((f"attention, {name}: forward + backward", *pair))
    return found


def rows_of_small_calls(rounds: int) -> list[tuple[str, float, float]]:
    """One eager call on 32 tokens, where the way to the kernel counts most; bursts of 100."""
    q, k, v = (torch.randn(1, 8, 32, 64) for _ in range(3))
    lengths = Lengths(torch.tensor([20]))
    padding = (torch.arange(32) < 20)[None, None, None]
    sdpa = F.scaled_dot_product_attention
    calls: dict[str, tuple[Run, Run]] = {
        "plain": (lambda: attention(q, k, v), lambda: sdpa(q, k, v)),
        "causal": (
            lambda: attention(q, k, v, mask=Causal()),
            lambda: sdpa(q, k, v, is_causal=True),
        ),
        "padded": (
            lambda: attention(q, k, v, mask=lengths),
            lambda: sdpa(q, k, v, attn_mask=padding),
        ),
    }

    def burst(run: Run) -> Run:
        return lambda: [run() for _ in range(100)]

    found = []
    for name, (ours, theirs) in calls.items():
        a, b = race(burst(ours), burst(theirs), rounds)
        found.append((f"attention, 32 tokens, {name}: one call", a / 100, b / 100))
    return found


def rows_of_layers(rounds: int) -> list[tuple[str, float, float]]:
    """`regard.nn.MultiheadAttention` against torch's, same weights."""
    from regard import nn as ours_nn

    B, T, C, H = 4, 1024, 512, 8
    x = torch.randn(B, T, C)
    theirs = nn.MultiheadAttention(C, H, batch_first=True)
    ours = ours_nn.MultiheadAttention(C, H, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    found = []
    for weights in (False, True):
        asked = "with weights" if weights else "without weights"

        def call(module: nn.Module, x: Tensor, weights: bool = weights) -> Tensor:
            return module(x, x, x, need_weights=weights)[0]  # type: ignore[no-any-return]

        ours.eval(), theirs.eval()
        with torch.no_grad():
            pair = race(lambda: call(ours, x), lambda: call(theirs, x), rounds)
        found.append((f"MultiheadAttention, eval, {asked}", *pair))
        ours.train(), theirs.train()
        pair = race(
            trained(lambda x: call(ours, x), x),
            trained(lambda x: call(theirs, x), x),
            max(rounds // 2, 3),
        )
        found.append((f"MultiheadAttention, training, {asked}", *pair))
    return found


def eager_statistics(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Entropy, peak and received attention by the formula, the matrix whole."""
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    entropy = -(weights * weights.clamp(min=1e-38).log()).sum(-1)
    return weights @ v, entropy, weights.amax(-1), weights.sum(-2)


def statistics_seen(q: Tensor, k: Tensor, v: Tensor) -> object:
    """The same by `observe`."""
    return observe(q, k, v, wants=Wants(entropy=True, peak=True, received=True))


def rows_of_observing(rounds: int) -> list[tuple[str, float, float]]:
    """`observe` against the formula on 8,192 tokens."""
    q, k, v = (torch.randn(1, 2, 8192, 64) for _ in range(3))
    with torch.no_grad():
        both = race(
            lambda: statistics_seen(q, k, v), lambda: eager_statistics(q, k, v), max(rounds // 2, 3)
        )
        one = race(
            lambda: observe(q, k, v, wants=Wants(entropy=True)),
            lambda: eager_statistics(q, k, v)[:2],
            max(rounds // 2, 3),
        )
    return [("observe 8,192: entropy, peak, received", *both), ("observe 8,192: entropy", *one)]


MEMORY = """
import sys, torch
sys.path.insert(0, {folder!r})
from attention_cpu import {name}
torch.set_num_threads(2)
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line)
q, k, v = (torch.randn(1, 2, 8192, 64) for _ in range(3))
small = (q[:, :, :256], k[:, :, :256], v[:, :, :256])
with torch.no_grad():
    {name}(*small)
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    {name}(q, k, v)
print((peak() - before) / 1024)
"""


def peak_memory(name: str) -> float:
    """MiB by which a fresh process's peak grows while the function runs (Linux)."""
    program = MEMORY.format(folder=str(Path(__file__).parent), name=name)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def report(rounds: int) -> str:
    """All tables as text."""
    rows = rows_of_attention(rounds) + rows_of_small_calls(rounds)
    rows += rows_of_layers(rounds) + rows_of_observing(rounds)
    lines = [
        "# Attention on a CPU",
        "",
        f"{datetime.date.today()} · {cpu_name()}, {torch.get_num_threads()} threads · "
        f"Python {platform.python_version()} · torch {torch.__version__} · "
        f"regard {regard.__version__} · float32",
        "",
        f"Command: `python bench/attention_cpu.py`, medians of {rounds} alternating rounds "
        f"({max(rounds // 2, 3)} with a backward pass).",
        "",
        "| what | regard ms | torch ms | torch ÷ regard |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [f"| {name} | {a:.4g} | {b:.4g} | {b / a:.2f} |" for name, a, b in rows]
    ours, eager = peak_memory("statistics_seen"), peak_memory("eager_statistics")
    lines += [
        "",
        "Peak memory of observing 8,192 tokens, 2 heads (entropy, peak, received): "
        f"regard {ours:.0f} MiB, the eager formula {eager:.0f} MiB, ratio {ours / eager:.3f}.",
    ]
    return "\n".join(lines) + "\n"


SEEN = Wants(lse=True, entropy=True, peak=True, distance=True)


def blockwise_runs(n_heads: int, tokens: int, dtype: torch.dtype) -> dict[str, tuple[Run, float]]:
    """What is timed for one row of the table, and the floating-point operations of each."""
    q, k, v = (torch.randn(1, n_heads, tokens, 64, dtype=dtype) for _ in range(3))
    a, b, out = (torch.randn(2048, 2048) for _ in range(3))
    # Heads are walked a few at a time: what a part is has the tiles of that many heads.
    part = cut_heads(make_call(q, k, v), None, False)[0][0][0]
    heads, (height, width) = part.q.shape[1], tile_sizes(part.rule.shape)
    rows, keys = torch.randn(heads, height, 64), torch.randn(heads, width, 64)
    scores, mixed = torch.empty(heads, height, width), torch.empty(heads, height, 64)

    def tile_products() -> None:
        torch.bmm(rows, keys.mT, out=scores)
        torch.bmm(scores, keys, out=mixed)

    work = 4.0 * tokens**2 * 64 * n_heads
    causal = {"mask": Causal(), "backend": "blockwise"}
    return {
        "product": (lambda: torch.mm(a, b, out=out), 2.0 * 2048**3),
        "tile": (tile_products, 4.0 * heads * height * width * 64),
        "plain": (lambda: attention(q, k, v, backend="blockwise"), work),
        "seeing": (lambda: observe(q, k, v, wants=SEEN, backend="blockwise"), work),
        "causal": (lambda: attention(q, k, v, **causal), work / 2),
        "causal seeing": (lambda: observe(q, k, v, wants=SEEN, **causal), work / 2),
    }


def speeds(runs: dict[str, tuple[Run, float]], rounds: int) -> dict[str, list[float]]:
    """Operations in a second of each run, in rounds in which all take turns.

    On one thread by the time that the process was running, so that others on the machine count
    less; on more by the clock.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, rounds):
        for name, (run, work) in runs.items():
            times = 20 if name == "tile" else 1
            start = clock()
            for _ in range(times):
                run()
            if turn >= 0:
                found[name].append(times * work / (clock() - start))
    return found


def blockwise_report(rounds: int) -> str:
    """The tiled path against the matrix product, and seeing against the plain forward."""
    float32, every = torch.float32, torch.get_num_threads()
    cases = [(1, 8192, float32), (2, 8192, float32), (8, 2048, float32), (8, 2048, torch.bfloat16)]
    lines = [
        "# The tiled path on a CPU",
        "",
        f"{datetime.date.today()} · {cpu_name()} · Python {platform.python_version()} · "
        f"torch {torch.__version__} · regard {regard.__version__}",
        "",
        f"Command: `python bench/attention_cpu.py --blockwise`. Of {rounds} rounds in one process, "
        "in which all runs take turns: the fastest, and in brackets the median. On one thread by "
        f"processor time, else by the clock. Load of the machine: {os.getloadavg()[0]:.1f}.",
        "",
        "Shares are of the speed of a float32 product of 2048³, counting 4·T·S·64 operations a "
        "head, half of it for causal; the tile's are those of its two products alone. Seeing is "
        "lse, entropy, peak and distance.",
        "",
        "| heads × tokens, type, threads | product GFLOP/s | tile's products | "
        "blockwise forward as a share of the matrix product | share of the tile's products | "
        "causal, share | seeing over plain | causal: seeing over plain |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for n_threads in sorted({1, every}):
        torch.set_num_threads(n_threads)
        for n_heads, tokens, dtype in cases:
            with torch.no_grad():
                found = speeds(blockwise_runs(n_heads, tokens, dtype), rounds)
            best = {name: max(rates) for name, rates in found.items()}
            usual = {name: statistics.median(rates) for name, rates in found.items()}
            pairs = [("tile", "product"), ("plain", "product"), ("plain", "tile")]
            pairs += [("causal", "product"), ("plain", "seeing"), ("causal", "causal seeing")]
            cells = [f"{best[a] / best[b]:.2f} ({usual[a] / usual[b]:.2f})" for a, b in pairs]
            kind = str(dtype).removeprefix("torch.")
            name = f"{n_heads} × {tokens:,}, {kind}, {n_threads}"
            lines.append(f"| {name} | {best['product'] / 1e9:.0f} | " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr)
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, for a first look")
    parser.add_argument("--blockwise", action="store_true", help="measure the tiled path alone")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.blockwise:
        text = blockwise_report(2 if given.quick else 5)
    else:
        text = report(5 if given.quick else 21)
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
