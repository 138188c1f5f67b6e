"""How long the host takes to hand a call of attention to a GPU, measured without one.

    python bench/host_cpu.py [--rounds 300] [--tiny] [--out bench/results/host_cpu.md]

Calls go the way of CUDA tensors and their kernels are compiled for an H100 or H200, but the tensors
are the CPU's, and what stands for a GPU (tests/no_gpu.py) takes launches and does nothing. So what
is timed is our Python, torch's dispatch and Triton's, and not the driver. SDPA in its shortest call
stands beside them as a scale. Plain and causal calls go to SDPA itself: there a function that gives
a view of the queries stands for it, alone and behind ours, so that what we add is told; also
behind the function of transformers for SDPA, and ours for its models.

Between calls that are timed the rest of a layer runs, so that a call finds the caches of the CPU as
in a model. Times are of this thread on the CPU, in µs, and of the fastest tenth, as the others were
slowed down by what else ran. Operations are torch's, without views and allocations: on a GPU each
launches a kernel. They are counted in the first call with a mask and in the next, which finds what
was rendered; launches are those of our own kernels. Calls are those of Python functions of ours.
"""

from __future__ import annotations

import datetime
import functools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from attention_peers import Rule, Sizes, masking_rules, scoring_rules
from decode_gpu import rule_of
from racing import Bench, name_machine, options_of, write
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import regard
import regard.hf
from regard.ops import backends, decode_relaunch, sdpa
from regard.ops.kernels import backend, flash_hopper, render_cache

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from no_gpu import Driver

FORWARD = Sizes(2, 2, 2, 128, 128, 128)
"""The fewest queries that the kernels for Hopper take."""
DECODE = Sizes(1, 32, 8, 1, 1024, 128)
PLAIN: dict[str, tuple[Sizes, dict[str, Any], bool]] = {
    "one query over a cache": (DECODE, {}, False),
    "one query over a cache, causal": (DECODE, {"mask": regard.Causal()}, False),
    "causal": (FORWARD, {"mask": regard.Causal()}, False),
    "plain, with gradients": (FORWARD, {}, True),
    "causal, with gradients": (FORWARD, {"mask": regard.Causal()}, True),
}
"""Calls that go to SDPA: their sizes, their rule, and whether gradients are recorded."""
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "BERT": (12, {"is_causal": False}),
    "LLaMA, causal": (3, {"is_causal": True, "num_key_value_groups": 4}),
}
"""Attention of models of transformers: its key heads, and what it says of itself."""
HOUSE = str(Path(regard.__file__).parent)
DECODING = ("a cache's mask", "padded", "window 1,024", "ALiBi")


class Counted(NamedTuple):
    """What a call hands to a GPU: torch's operations that launch a kernel, and our own launches."""

    operations: int
    launches: int


class Operations(TorchDispatchMode):
    """Counts the operations of a block that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        allocates = function.name().startswith(("aten::empty", "aten::new_empty"))
        self.n += not (function.is_view or allocates)
        return function(*args, **(kwargs or {}))


class CountingDriver(Driver):
    """What stands for a GPU, and counts what it is handed."""

    n = 0

    @staticmethod
    def launcher_cls(*_: Any) -> Any:
        def launch(*_: Any) -> None:
            CountingDriver.n += 1

        return launch


def pretend_a_gpu() -> None:
    """Let calls of CPU tensors go the way of CUDA tensors on an H100 or H200."""
    driver: Any = triton.runtime.driver
    driver.set_active(CountingDriver())
    backend.refuse_tensors = lambda q, width: None  # type: ignore[assignment]
    decode_relaunch.runs_here = attrgetter("is_cpu")
    backends.ORDER["cpu"] = backends.ORDER["cuda"]
    backends.asked_first = backends.asked_first_on_gpu
    flash_hopper.runs_on = lambda device: True  # type: ignore[assignment]
    sdpa.ON_GPU = "is_cpu"
    sdpa.torchs_order_is_right = functools.cache(lambda device: True)
    # The mode that counts operations is no reason to render anew.
    render_cache.is_intercepted = lambda: False  # type: ignore[assignment]


def count(run: Callable[[], Any]) -> Counted:
    CountingDriver.n = 0
    with Operations() as seen:
        run()
    return Counted(seen.n, CountingDriver.n)


def count_calls(run: Callable[[], Any]) -> int:
    """How many Python functions of ours a run calls."""
    n = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal n
        n += event == "call" and frame.f_code.co_filename.startswith(HOUSE)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return n


class Clock:
    """Times single calls, with the rest of a layer in between."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.rest = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        )
        self.x = torch.randn(8, 64)

    def time(self, run: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> float:
        """µs of a run, which is given what was prepared for it, untimed."""
        times = []
        for turn in range(-3, self.rounds):
            given = prepare()
            with torch.no_grad():
                self.rest(self.x)
            began = time.thread_time_ns()
            found = run(given)
            if turn >= 0:
                times.append(time.thread_time_ns() - began)
            del found
        return statistics.quantiles(times, n=10)[0] / 1e3


def draw(sizes: Sizes, learned: bool) -> list[Tensor]:
    return [x.requires_grad_(learned) for x in sizes.draw("cpu")]


def forward_rules() -> dict[str, Rule]:
    """By name, with masks that nothing was rendered of yet."""
    torch.manual_seed(0)
    rules = masking_rules(FORWARD, "cpu") + scoring_rules(FORWARD, "cpu")
    return {rule.name: rule for rule in rules}


def show_forward(name: str, clock: Clock) -> str:
    """A row: without gradients, with them, and the backward."""
    rule, inputs, leaves = forward_rules()[name], draw(FORWARD, False), draw(FORWARD, True)
    g = torch.randn_like(inputs[0])

    def attend(tensors: list[Tensor]) -> Tensor:
        return regard.attention(*tensors, **rule.ours)

    def differentiate(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, g)

    output = attend(leaves)
    attend(inputs), differentiate(output)
    rule = forward_rules()[name]
    first, following = count(lambda: attend(leaves)), count(lambda: attend(leaves))
    output = attend(leaves)
    back = count(lambda: differentiate(output))
    with torch.no_grad():
        plain = clock.time(lambda _: attend(inputs))
    learning = clock.time(lambda _: attend(leaves))
    backward = clock.time(differentiate, lambda: attend(leaves))
    return (
        f"| {name} | {plain:.0f} | {learning:.0f} | {backward:.0f} | {first.operations}, then "
        f"{following.operations} | {following.launches} | {back.operations} | {back.launches} |"
    )


def stand_in(q: Tensor, *_: Any, **more: Any) -> Tensor:
    """What stands for SDPA."""
    return q.view_as(q)


def show_plain(name: str, clock: Clock) -> str:
    """A row: what stands for SDPA alone, ours with it, and the same of the backward."""
    sizes, rule, learned = PLAIN[name]
    inputs = draw(sizes, learned)
    g = torch.randn_like(inputs[0])

    def attend(_: Any = None) -> Tensor:
        return regard.attention(*inputs, **rule)

    def alone(_: Any = None) -> Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=bool(rule), enable_gqa=True)

    def differentiate(output: Tensor) -> Any:
        return torch.autograd.grad(output, inputs[0], g)

    with mock.patch.object(F, "scaled_dot_product_attention", stand_in):
        forward = clock.time(alone), clock.time(attend)
        cells = [f"{forward[0]:.1f}", f"{forward[1]:.1f}", f"{forward[1] - forward[0]:.1f}", "–"]
        if learned:
            backward = clock.time(differentiate, alone), clock.time(differentiate, attend)
            cells[3] = f"{backward[1] - backward[0]:.1f}"
        return f"| {name} | {' | '.join(cells)} | {count_calls(attend)} |"


def show_model(name: str, clock: Clock) -> str:
    """A row: transformers' function for SDPA and ours, without and with gradients, and backward."""
    n_keys, about = MODELS[name]
    module = nn.Module()
    for what, value in about.items():
        setattr(module, what, value)
    heads = (12, n_keys, n_keys)
    sizes = [torch.zeros(2, 128, n, 64, dtype=torch.bfloat16) for n in heads]
    cells = []
    for learned in (False, True):
        inputs = [x.clone().transpose(1, 2).requires_grad_(learned) for x in sizes]
        for attend in (sdpa_attention_forward, regard.hf.regard_attention):

            def run(_: Any = None, attend: Any = attend, inputs: Any = inputs) -> Tensor:
                found: Tensor = attend(module, *inputs, None, dropout=0.0, scaling=0.125)[0]
                return found

            def differentiate(output: Tensor, inputs: Any = inputs) -> Any:
                return torch.autograd.grad(output, inputs[0], sizes[0])

            with mock.patch.object(F, "scaled_dot_product_attention", stand_in):
                cells.append(f"{clock.time(run):.1f}")
                if learned:
                    cells.append(f"{clock.time(differentiate, run):.1f}")
    theirs, ours, *learning = cells
    ordered = [theirs, ours, learning[0], learning[2], learning[1], learning[3]]
    return f"| {name} | {' | '.join(ordered)} |"


def show_decode(name: str, clock: Clock) -> str:
    rule, _ = rule_of(name, DECODE, "cpu")
    inputs = draw(DECODE, False)

    def attend(_: Any = None) -> Tensor:
        return regard.attention(*inputs, **rule.ours)

    attend()
    found = count(attend)
    cells = f"{clock.time(attend):.1f} | {count_calls(attend)}"
    return f"| {name} | {cells} | {found.operations} | {found.launches} |"


def main() -> None:
    options = options_of(__doc__).parse_args()
    options.rounds = options.rounds or (5 if options.tiny else 300)
    torch.set_num_threads(1)
    pretend_a_gpu()
    bench, clock = Bench(device="cpu", options=options), Clock(options.rounds)
    bench.say("# Time of the host, without a GPU", "")
    bench.say(f"{datetime.date.today()}, {name_machine(bench)}.", "")
    inputs = draw(Sizes(1, 1, 1, 1, 1, 8), False)
    no_grad: AbstractContextManager[Any] = torch.no_grad()
    with no_grad:
        scale = clock.time(lambda _: F.scaled_dot_product_attention(*inputs))
    bench.say(f"`python bench/host_cpu.py`: the fastest tenth of {options.rounds} calls, in µs.")
    bench.say(f"SDPA on one query and one key of a CPU: {scale:.0f} µs.", "")
    bench.say("## Calls that go to SDPA, which a function stands for", "")
    bench.say(
        "| call | SDPA's | ours | added | added to the backward | calls |", f"|{' --- |' * 6}"
    )
    for name, (_, _, learned) in PLAIN.items():
        with torch.set_grad_enabled(learned):
            bench.say(show_plain(name, clock))
    bench.say("", "## The same in transformers, whose function for SDPA stands beside ours", "")
    columns = ["model", "theirs", "ours", "with gradients, theirs", "ours"]
    columns += ["backward, theirs", "ours"]
    bench.say(f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|")
    for name in MODELS:
        bench.say(show_model(name, clock))
    bench.say("")
    bench.say(f"## Forward and backward, {FORWARD}", "")
    columns = ["rule", "forward", "with gradients", "backward", "torch's operations"]
    columns += ["launches", "in the backward", "launches"]
    bench.say(f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|")
    for name in forward_rules():
        bench.say(show_forward(name, clock))
    bench.say("", f"## One query over a cache, {DECODE.S:,} keys, 32 over 8 heads of 128", "")
    bench.say("| rule | µs | calls | torch's operations | launches |", f"|{' --- |' * 5}")
    with torch.no_grad():
        for name in DECODING:
            bench.say(show_decode(name, clock))
    write(bench)


if __name__ == "__main__":
    main()
