"""What seeing costs on a GPU: `regard.observe` beside the blind forward of regard and of SDPA.

    python bench/seeing_gpu.py [--rounds 12] [--tiny] [--out bench/results/seeing_gpu.md]

bfloat16, one text of 16,384 tokens, 16 heads of width 64 and 128, without a mask and causal; last
131,072 tokens, causal. "blind" is `regard.attention` by our own kernels without looking; each
column adds what is asked. MiB is the memory that one call takes beyond its inputs at its peak, the
output and the answers included. Outputs are compared with SDPA's before anything is timed. How it
is timed stands in racing.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention_peers import Rule, Sizes, check_near, make_regard, make_sdpa, plain_rules
from racing import REFUSALS, Bench, Run, begin, end, head_of, options_of, race, write
from torch import Tensor

import regard

WANTS: dict[str, dict[str, Any]] = {
    "logsumexp": {"lse": True},
    "rows": {"lse": True, "entropy": True, "peak": True, "distance": True},
    "received + map": {"received": True, "map": (512, 512)},
    "received + map + top 8": {"received": True, "map": (512, 512), "top": 8},
    "above 0.05": {"above": 0.05},
}


def look(rule: Rule, wants: regard.Wants) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`regard.observe`; its output is what is compared."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = regard.observe(q, k, v, **rule.ours, wants=wants).output
        assert output is not None
        return output

    return call


def enter(sizes: Sizes, rule: Rule, bench: Bench) -> tuple[dict[str, Run], dict[str, str]]:
    """The contestants whose output is SDPA's, and the dashes of the others."""
    torch.manual_seed(0)
    inputs = sizes.draw(bench.device)
    sdpa = make_sdpa(sizes, rule)
    expected = sdpa(*inputs)
    side = 16 if bench.options.tiny else 512
    calls = {"SDPA": sdpa, "blind": make_regard(rule, backend="triton")}
    for name, asked in WANTS.items():
        asked = {**asked, "map": (side, side)} if "map" in asked else asked
        calls[name] = look(rule, regard.Wants(**asked))
    runs: dict[str, Run] = {}
    dashes: dict[str, str] = {}
    for name, call in calls.items():
        try:
            check_near(call(*inputs), expected, "its output")
            runs[name] = partial(call, *inputs)
        except REFUSALS as error:
            dashes[name] = bench.dash(f"{name}: {str(error).splitlines()[0]}")
    return runs, dashes


def memory(run: Run, bench: Bench) -> float:
    """MiB that a call takes at its peak."""
    if bench.device != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@torch.no_grad()
def main() -> None:
    bench = begin(options_of(__doc__), "Seeing on a GPU")
    plain, causal = plain_rules()
    rows = [
        (Sizes(1, 16, 16, 16384, 16384, D), rule) for D in (64, 128) for rule in (plain, causal)
    ]
    rows.append((Sizes(1, 16, 16, 131072, 131072, 128), causal))
    if bench.options.tiny:
        rows = [(Sizes(1, 4, 4, 96, 96, 16), rule) for rule in (plain, causal)]
    columns = ("SDPA", "blind", *WANTS)
    bench.say("", "ms a call, times blind, times SDPA; MiB.", "")
    bench.say(*head_of("", columns))
    for sizes, rule in rows:
        runs, dashes = enter(sizes, rule, bench)
        times = race(runs, columns, bench)
        middle = {name: statistics.median(found) for name, found in times.items()}
        cells = []
        for name in columns:
            if name not in middle:
                cells.append(dashes[name])
                continue
            ratios = [f"{middle[name] / middle[x]:.2f}" for x in ("blind", "SDPA") if x in middle]
            size = f"{memory(runs[name], bench):.0f} MiB"
            cells.append(", ".join([f"{middle[name]:.3g}", *ratios, size]))
        bench.say(f"| {sizes}, {rule.name} | {' | '.join(cells)} |")
        del runs
        bench.free()
        write(bench)
    end(bench)


if __name__ == "__main__":
    main()
