"""`regard.attention` on a GPU beside its peers, forward and backward, in one process.

    python bench/attention_gpu.py [--only plain|rules] [--rounds 30] [--flex] [--inference]
                                  [--tiny] [--out bench/results/attention_gpu.md]

Everything is bfloat16 and random; q (B, H, T, D), k and v (B, G, S, D) are contiguous. The peers
are torch's `scaled_dot_product_attention` (SDPA) as called, where torch chooses the kernel, and
held to cuDNN, flash or the memory-efficient kernel; compiled FlexAttention; and the eager formula.
"regard triton" is our own kernels, insisted on. A peer's block mask or dense mask is made before
the clock starts, as a model would make it once; regard is given its mask as a value and pays for
the rest in each call. FlexAttention compiles for seconds for each new shape, so of the first table
it runs in two rows; --flex has it in all. The rules and the contestants are in attention_peers.py,
how they are timed stands in racing.py.

Forward calls record what the backward pass needs; with --inference they do not, and no backward
pass is timed. "Backward" is `torch.autograd.grad` of one output, alone. Host µs is the time until a
forward call returns, the GPU being idle before it. "÷ plain × seen" is regard's forward over the
time that SDPA takes without a mask, times the share of the matrix that the rule shows.

Nothing wrong is timed: 64 rows of each output are compared with the formula in float32, and the
gradients with those of the first peer that has them. A contestant that refuses, fails or is wrong
gets a dash, and its reason stands below the tables. --tiny runs the same code with tiny sizes, also
without a GPU; FlexAttention is not compiled there.
"""

from __future__ import annotations

import math
import statistics
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from attention_peers import (
    KERNELS,
    Attend,
    Rule,
    Sizes,
    check_near,
    formula,
    hold,
    indices,
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
from racing import (
    REFUSALS,
    Bench,
    Run,
    Times,
    begin,
    compare,
    end,
    head_of,
    host_time,
    options_of,
    race,
    write,
)
from torch._functorch import config as functorch_config

CLAIM = 1.03
"""What the ratio of plain and causal attention to SDPA as called is to stay within."""
PLAIN = ("regard", "SDPA", "regard triton", *KERNELS, "FlexAttention", "eager")
RULES = ("regard", "FlexAttention", "regard triton", "SDPA, dense mask")


@dataclass
class Entries:
    """The contestants of a row that gave the right answer, and the dashes of the others."""

    forward: dict[str, Run] = field(default_factory=dict)
    backward: dict[str, Run] = field(default_factory=dict)
    dashes: dict[str, str] = field(default_factory=dict)


class Row(NamedTuple):
    """A row's cells, the ratios of its first two columns, the host's time, and regard's forward."""

    cells: str
    ratios: tuple[float, float]
    host: str
    forward_ms: float


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
) -> Row:
    """Race the contestants of a row."""
    pair = columns[0], columns[1]
    entries = enter(calls, sizes, rule, bench)
    ahead = race(entries.forward, pair, bench)
    behind = race(entries.backward, pair, bench)
    host = " / ".join(host_time(entries.forward.get(name), bench) for name in pair)
    (forward, text), (backward, back_text) = compare(ahead, pair), compare(behind, pair)
    cells = fill_cells(entries, columns, ahead, behind)
    ours = statistics.median(ahead[pair[0]]) if pair[0] in ahead else math.inf
    return Row(f"{cells} | {text} | {back_text}", (forward, backward), host, ours)


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
        "regard triton": make_regard(rule, backend="triton"),
    }


def time_plain(bench: Bench) -> None:
    """The first table, and its largest ratio."""
    ratios = ("regard ÷ SDPA, forward", "backward", "host µs, regard / SDPA")
    bench.say("", "## Plain and causal", "", "Forward / backward ms.", "")
    bench.say(*head_of("", PLAIN, *ratios))
    for sizes in plain_sizes(bench.options.tiny):
        for rule in plain_rules():
            calls = plain_calls(sizes, rule, bench)
            row = measure_row(calls, sizes, rule, PLAIN, bench)
            bench.say(f"| {sizes}, {rule.name} | {row.cells} | {row.host} |")
            kinds = ("forward",) if bench.options.inference else ("forward", "backward")
            for kind, ratio in zip(kinds, row.ratios, strict=False):
                bench.ratios[f"{kind}, {sizes}, {rule.name}"] = ratio
            del calls
            bench.free()
    # One that was not timed counts as larger than all others.
    worst = max(bench.ratios, key=lambda name: bench.ratios[name])
    within = sum(ratio <= CLAIM for ratio in bench.ratios.values())
    bench.say("", f"Largest ratio to SDPA as called: {bench.ratios[worst]:.3f} ({worst}).")
    bench.say(f"{within} of {len(bench.ratios)} ratios are at most {CLAIM}.")


def time_sdpa(sizes: Sizes, bench: Bench) -> float:
    """Milliseconds of SDPA as called, without a mask, forward."""
    inputs = sizes.draw(bench.device)
    for x in inputs:
        x.requires_grad_(not bench.options.inference)
    run = partial(make_sdpa(sizes, Rule(name="plain", ours={})), *inputs)
    return statistics.median(race({"SDPA": run}, ("SDPA", "SDPA"), bench)["SDPA"])


def share_of(rule: Rule, sizes: Sizes, device: str) -> float:
    """The share of the matrix that a rule shows."""
    seen = 0.0
    for rows in torch.arange(sizes.T, device=device).split(1024):
        one = torch.ones((), dtype=torch.bool, device=device)
        visible = one if rule.sees is None else rule.sees(*indices(sizes, rows))
        visible = visible.expand(sizes.B, 1, len(rows), sizes.S)
        seen += visible.double().mean().item() * len(rows)
    return seen / sizes.T


def time_rules(bench: Bench) -> None:
    """The second table."""
    tiny = bench.options.tiny
    shapes = [Sizes(8, 16, 16, 2048, 2048, 128), Sizes(1, 16, 16, 16384, 16384, 128)]
    ratios = ("regard ÷ FlexAttention, forward", "backward", "host µs, regard / FlexAttention")
    ratios += ("regard ÷ plain × seen",)
    bench.say("", "## Masks, biases, softcap and sinks", "", "Forward / backward ms.", "")
    bench.say(*head_of("", RULES, *ratios))
    for sizes in [Sizes(2, 4, 4, 64, 64, 16), Sizes(1, 4, 4, 96, 96, 16)] if tiny else shapes:
        torch.manual_seed(0)
        plain = time_sdpa(sizes, bench)
        for rule in masking_rules(sizes, bench.device) + scoring_rules(sizes, bench.device):
            calls = {
                "FlexAttention": make_flex(sizes, rule, bench.device, not tiny),
                "SDPA, dense mask": make_dense(sizes, rule, bench.device),
                "regard": make_regard(rule),
                "regard triton": make_regard(rule, backend="triton"),
            }
            row = measure_row(calls, sizes, rule, RULES, bench)
            share = share_of(rule, sizes, bench.device)
            least = f"{row.forward_ms / (plain * share):.3f} ({share:.3f} seen)"
            bench.say(f"| {sizes}: {rule.name} | {row.cells} | {row.host} | {least} |")
            del calls
            bench.free()


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", choices=["plain", "rules"], help="one table")
    parser.add_argument("--flex", action="store_true", help="FlexAttention in all rows")
    parser.add_argument("--inference", action="store_true", help="no gradients")
    # A compiled backward pass that gives its inputs' memory away could run only once.
    functorch_config.donated_buffer = False
    bench = begin(parser, "Attention on a GPU")
    for name, table in {"plain": time_plain, "rules": time_rules}.items():
        if bench.options.only in (None, name):
            table(bench)
            write(bench)
    end(bench)


if __name__ == "__main__":
    main()
