"""One query over a whole KV cache on a GPU: `regard.attention` and `observe` beside SDPA.

    python bench/decode_gpu.py [--rounds 30] [--tiny] [--out bench/results/decode_gpu.md]

bfloat16, 32 query heads over 8 key heads of width 128. TB/s counts the bytes of k and v that the
rule lets a query see. "Graph" replays one call captured as a CUDA graph, which leaves the host out;
a small cache may then stay in the GPU's L2 cache, for all contestants alike. SDPA is plain in every
row: with a mask it would have to be given one, and with a window it would read all keys.

The second table is of a cache that grows by a key a call, as `generate` and transformers have it
unless told otherwise: no length is met twice, by whomever, so that a kernel which is planned for a
length shows it.

How it is timed stands in racing.py. Each output is compared with the formula in float32 before it
is timed; a contestant that refuses, fails or is wrong gets a dash, and its reason stands below.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial

import torch
from attention_peers import Rule, Sizes, cache_rule, check_near, formula, make_regard, make_sdpa
from racing import (
    REFUSALS,
    Bench,
    Run,
    begin,
    capture,
    clock,
    compare,
    end,
    head_of,
    host_time,
    options_of,
    race,
    write,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard

RULES = ("plain", "a cache's mask", "padded", "window 1,024", "ALiBi")


def rule_of(name: str, sizes: Sizes, device: str) -> tuple[Rule, float]:
    """A rule of decoding, and the share of the cache that it shows."""
    S = sizes.S
    if name == "a cache's mask":
        return cache_rule(sizes, device), 1.0
    if name == "padded":
        lengths = torch.linspace(S // 2, S, sizes.B, device=device).long()

        def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j < lengths[b]

        share = lengths.double().mean().item() / S
        return Rule(name=name, ours={"mask": regard.Lengths(lengths)}, sees=see), share
    if name.startswith("window"):
        width = min(1024, S // 2)
        ours = {"mask": regard.Window(width - 1, 0)}
        return Rule(name=name, ours=ours, sees=lambda b, h, i, j: j >= S - width), width / S
    if name == "ALiBi":
        slopes = 2.0 ** (-8.0 / sizes.H * torch.arange(1, sizes.H + 1, device=device))

        def forget(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * (S - 1 - j)

        return Rule(name=name, ours={"bias": regard.ALiBi(sizes.H)}, change=forget), 1.0
    return Rule(name=name, ours={}), 1.0


def watch_rows(rule: Rule) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`regard.observe`, asked for the entropy and the largest weight; its output is what counts."""
    wants = regard.Wants(entropy=True, peak=True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = regard.observe(q, k, v, **rule.ours, wants=wants).output
        assert output is not None
        return output

    return call


def enter(sizes: Sizes, name: str, bench: Bench) -> tuple[dict[str, Run], dict[str, str], float]:
    """The contestants that give the formula's answer, the dashes of others, the share seen."""
    torch.manual_seed(0)
    rule, share = rule_of(name, sizes, bench.device)
    plain = Rule(name="plain", ours={})
    q, k, v = inputs = sizes.draw(bench.device)
    row = torch.zeros(1, dtype=torch.long, device=bench.device)
    runs: dict[str, Run] = {}
    dashes: dict[str, str] = {}
    calls = {
        "SDPA, plain, graph": (make_sdpa(sizes, plain), plain),
        "regard, graph": (make_regard(rule), rule),
        "entropy + peak, graph": (watch_rows(rule), rule),
        "SDPA, plain": (make_sdpa(sizes, plain), plain),
        "regard": (make_regard(rule), rule),
    }
    for title, (call, meant) in calls.items():
        run: Run = partial(call, *inputs)
        expected = formula(q, k, v, meant, row)
        try:
            check_near(run(), expected, "its output")
            if title.endswith("graph"):
                run = capture(run, bench)
                check_near(run(), expected, "its graph's output")
            runs[title] = run
        except REFUSALS as error:
            dashes[title] = bench.dash(f"{title}: {str(error).splitlines()[0]}")
    return runs, dashes, share


FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def grow(sizes: Sizes, bench: Bench) -> None:
    """A row of the second table."""
    plain, more = Rule(name="plain", ours={}), 200 if bench.options.tiny else 4000
    q, k, v = sizes._replace(S=sizes.S + more).draw(bench.device)
    lengths = itertools.count(sizes.S)
    sdpa, own = make_sdpa(sizes, plain), partial(regard.attention, backend="triton")

    def flash_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(FLASH_FIRST, set_priority=True):
            return sdpa(q, k, v)

    def growing(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
        def run() -> Tensor:
            n = next(lengths)
            return call(q, k[:, :, :n], v[:, :, :n])

        return run

    calls = {"SDPA": sdpa, "SDPA, flash first": flash_first}
    calls |= {"regard": make_regard(plain), "regard triton": own}
    cells = []
    for call in calls.values():
        run = growing(call)
        try:
            times = [clock(run, 8, bench) for _ in range(3)]
            cells.append(f"{1e3 * statistics.median(times):.1f}")
        except REFUSALS as error:
            cells.append(bench.dash(str(error).splitlines()[0]))
    bench.say(f"| {sizes.B} × {sizes.S:,} and growing | {' | '.join(cells)} |")


@torch.no_grad()
def main() -> None:
    bench = begin(options_of(__doc__), "Decoding on a GPU")
    shapes = ((1, 8192), (1, 131072), (16, 8192), (64, 8192))
    rows = [Sizes(B, 32, 8, 1, S, 128) for B, S in shapes]
    rows = [Sizes(3, 4, 2, 1, 64, 16)] if bench.options.tiny else rows
    columns = (
        "SDPA, plain, graph",
        "regard, graph",
        "entropy + peak, graph",
        "SDPA, plain",
        "regard",
    )
    pair = "regard, graph", "SDPA, plain, graph"
    more = ("regard's TB/s ÷ SDPA's", "seeing ÷ regard", "host µs, regard / SDPA")
    bench.say("", "µs a call, and TB/s of what is seen of the cache.", "")
    bench.say(*head_of("batch × keys, rule", columns, *more))
    for sizes in rows:
        for name in RULES:
            runs, dashes, share = enter(sizes, name, bench)
            times = race(runs, (*pair, *columns), bench)
            whole = 2 * 2 * sizes.B * sizes.G * sizes.S * sizes.D
            cells = []
            for title in columns:
                if title not in times:
                    cells.append(dashes[title])
                    continue
                ms = statistics.median(times[title])
                seen = whole * (1.0 if title.startswith("SDPA") else share)
                cells.append(f"{1e3 * ms:.1f}, {seen / ms / 1e9:.2f}")
            ratio, _ = compare(times, pair)
            slower = compare(times, ("entropy + peak, graph", "regard, graph"))[1]
            host = " / ".join(
                host_time(runs.get(title), bench) for title in ("regard", "SDPA, plain")
            )
            rate = f"{share / ratio:.3f}"
            bench.say(
                f"| {sizes.B} × {sizes.S:,}, {name} | {' | '.join(cells)} | {rate} "
                f"| {slower} | {host} |"
            )
            del runs
            bench.free()
            write(bench)
    bench.say("", "µs a call where each has one key more than the one before.", "")
    bench.say(*head_of("batch × keys", ("SDPA", "SDPA, flash first", "regard", "regard triton")))
    for sizes in rows:
        grow(sizes, bench)
        bench.free()
    end(bench)


if __name__ == "__main__":
    main()
