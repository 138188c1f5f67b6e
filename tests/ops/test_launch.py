"""Launches that are used again: they must be what Triton would have found, and cost little.

Kernels are looked up as for a GPU, and not run; what they tell is judged in test_flash_kernels.py,
test_decode_kernel.py and test_gpu.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from no_gpu import Driver
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import regard
from regard.ops import (
    ALiBi,
    Causal,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Wants,
    Window,
    attention,
)
from regard.ops import decode as few
from regard.ops.blockwise import Ask
from regard.ops.call import make_call
from regard.ops.kernels import (
    backend,
    decode_kernels,
    flash,
    flash_backward,
    flash_hopper,
    flash_kernels,
    launch,
)
from regard.ops.kernels.flash_backward import Arriving, Grads, Saved
from regard.ops.kernels.launch import PLANS, Launch, Plans
from regard.ops.kernels.rendered import render


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are made here for what stands for a GPU, and must not stay."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    PLANS.clear()
    yield
    PLANS.clear()


class Launched(NamedTuple):
    """A launch: the variant that Triton would find for it, and what it is given."""

    kernel: Any
    specialization: Any
    options: Any
    n_programs: int
    args: Any


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """The launches, which are not carried out; those by one `Launch` must be of one variant."""
    found: list[Launched] = []
    variants: dict[Launch, Any] = {}

    def look(self: Launch, kernel: Any, *args: Any) -> None:
        binder = kernel.device_caches[99][4]
        _, specialization, options = binder(*args, **self.options)
        assert variants.setdefault(self, (kernel, specialization)) == (kernel, specialization)
        given = [described(x) for x in args]
        found.append(Launched(kernel, specialization, options, self.n_programs, given))

    monkeypatch.setattr(Launch, "__call__", look)
    return found


def described(x: Any) -> Any:
    """An argument, with how a tensor lies in its stead."""
    if isinstance(x, TensorDescriptor):
        return described(x.base), x.shape, x.strides, x.block_shape, x.layout
    if isinstance(x, tuple):
        return [described(part) for part in x]
    return launch.layout_of(x) if isinstance(x, Tensor) else x


def check_again(calls: Sequence[Callable[[], Any]], launched: list[Launched]) -> None:
    """Calls after all the others must launch what they launch when they are the first."""
    for call in calls:
        call()
    n_plans = len(PLANS)
    for call in calls:
        launched.clear()
        call()
        warm = [*launched]
        known = dict(PLANS)
        PLANS.clear()
        launched.clear()
        call()
        assert warm and warm == launched
        PLANS.clear()
        PLANS.update(known)
    assert len(PLANS) == n_plans, "a call that came before made another plan"


def shift(x: Tensor, n: int) -> Tensor:
    """The same numbers, so many places further on in another piece of memory."""
    return torch.cat([x.new_zeros(n), x.flatten()])[n:].view(x.shape)


class Kind(NamedTuple):
    """What changes from call to call: keys, type, where q, k and v begin, strides; all else."""

    S: int
    dtype: torch.dtype
    n: int
    turned: bool
    other: bool

    def draw(self, heads: int, size: int, width: int) -> Tensor:
        shape = (1, size, heads, width) if self.turned else (1, heads, size, width)
        x = shift(torch.zeros(shape, dtype=self.dtype), self.n)
        return x.transpose(1, 2) if self.turned else x

    def lay(self, x: Tensor) -> Tensor:
        """A tensor beside q, k and v, at an odd address or not."""
        return shift(x, int(self.other))


KINDS = [*itertools.product((torch.bfloat16, torch.float32), (0, 1), *[(False, True)] * 2)]
RULES: dict[str, Callable[[Kind], dict[str, Any]]] = {
    "plain": lambda kind: {"scale": -0.5 if kind.other else 0.5},
    "dropout": lambda kind: {"dropout": 0.5 if kind.other else 0.25, "seed": 3},
    "window": lambda kind: {"mask": Window(16 + kind.other, 0)},
    "padding": lambda kind: {"mask": Causal() & Lengths(kind.lay(torch.tensor([9])))},
    "documents": lambda kind: {"mask": Documents(kind.lay(torch.arange(kind.S) // 50))},
    "prefix": lambda kind: {"mask": Causal() | Prefix(16 + kind.other)},
    "bits": lambda kind: {"mask": ~Window(16 + kind.other, 0)},
    "slopes, sinks": lambda kind: {
        "bias": ALiBi(4), "sinks": kind.lay(torch.zeros(4)), "mask": Causal(),
    },
    "table, numbers": lambda kind: {
        "bias": RelativeTable(torch.zeros(8, 4)) + DenseBias(kind.lay(torch.zeros(1, kind.S))),
        "softcap": 3.0 + kind.other,
    },
}  # fmt: skip


@pytest.mark.parametrize("on_hopper", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_what_is_launched_again_is_what_would_be_launched_anew(
    name: str, on_hopper: bool, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_hopper, "runs_on", lambda _: on_hopper)

    def attend(kind: Kind) -> None:
        q, k, g = (kind.draw(heads, kind.S, 64) for heads in (4, 2, 4))
        given = render(make_call(q, k, k, **RULES[name](kind)))
        mass = kind.lay(torch.ones(1, kind.S)) if kind.n else None
        flash.forward(given, Ask(entropy=kind.turned), mass)
        lse, lse_grad = torch.zeros(1, 4, kind.S), kind.lay(torch.zeros(1, 4, kind.S))
        learned = {x: getattr(given, x) is not None for x in ("band", "dense", "slopes")}
        wanted = Grads(q=True, k=True, v=True, **(learned if kind.turned else {}))
        arriving = Arriving(g, lse_grad if kind.n else None, None)
        flash_backward.backward(given, Saved(q, lse, None), arriving, wanted)

    kinds = [Kind(S, *each) for S in (160, 163) for each in KINDS]
    check_again([partial(attend, kind) for kind in kinds], launched)


@pytest.mark.parametrize("name", [name for name in RULES if name != "dropout"])
def test_a_step_of_generation_is_launched_again_as_it_would_be_anew(
    name: str, launched: list[Launched]
) -> None:
    def attend(kind: Kind, T: int) -> None:
        q, k = kind.draw(4, T, 16), kind.draw(2, kind.S, 16)
        call = make_call(q, k, k, **RULES[name](kind))
        few.run(call)
        mass = kind.lay(torch.ones(kind.S, dtype=torch.bool))
        few.observe(replace(call, wants=Wants(lse=True, peak=kind.n == 1, mass=mass)))

    kinds = [Kind(S, *each) for S in (33, 2000) for each in KINDS]
    check_again([partial(attend, kind, T) for kind in kinds for T in (1, 3)], launched)


def test_a_number_or_an_address_that_triton_compiles_for_makes_another_plan() -> None:
    """Each is one that Triton looks at: a stride of 1, a multiple of 16, an odd address."""
    sizes = torch.zeros(2, 3, 32, 16)
    others = [sizes, sizes.mT.contiguous().mT, sizes[:, :, :31], shift(sizes, 1), sizes.half()]
    assert len({launch.layout_of(x) for x in others}) == len(others)
    assert launch.layout_of(shift(sizes, 4)) == launch.layout_of(sizes.clone())


@triton.jit(do_not_specialize=["n"])
def _add(x, rest, n, SIZE: tl.constexpr, TWICE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(x + i, tl.load(rest.y + i * rest.step), mask=i < n)


class Rest(NamedTuple):
    """What a kernel is given as one."""

    y: Any
    step: Any


def test_what_is_handed_over_is_what_triton_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[tuple[Any, ...]] = []

    class Handing(Driver):
        device = 99

        @staticmethod
        def launcher_cls(*_: Any) -> Any:
            return lambda *args: handed.append(args)

        def get_current_device(self) -> int:
            return self.device

    driver = Handing()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    found: list[int] = []
    plain = triton.JITFunction.run

    def bind(self: Any, *args: Any, **options: Any) -> Any:
        found.append(driver.device)
        return plain(self, *args, **options)

    monkeypatch.setattr(triton.JITFunction, "run", bind)
    options = {"SIZE": 16, "TWICE": True, "num_warps": 1, "enable_fp_fusion": True}
    run = Launch(7, options)
    tensors = [(torch.zeros(16), torch.zeros(16)) for _ in range(3)]
    for x, y in tensors:
        run(_add, x, Rest(y, 2), 5)
    driver.device = 98
    run(_add, *tensors[0][:1], Rest(tensors[0][1], 2), 5)
    assert found == [99, 98], "Triton is asked once on each device"
    for args, (x, y) in zip(handed, [*tensors, tensors[0]], strict=True):
        assert args[:3] == (7, 1, 1)
        assert (
            args[-5] is x and args[-4][0] is y and args[-4][1] == 2 and args[-3:] == (5, 16, True)
        )


def test_hooks_hear_of_launches_like_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    class Calling(Driver):
        @staticmethod
        def launcher_cls(*_: Any) -> Any:
            def launch(*args: Any) -> None:
                about, *hooks = args[6:9]
                for hook in hooks:
                    if hook is not None:
                        hook(about)

            return launch

        def get_current_device(self) -> int:
            return 97

    monkeypatch.setattr(triton.runtime.driver, "_active", Calling())
    run = Launch(7, {"SIZE": 16, "TWICE": True, "num_warps": 1, "enable_fp_fusion": True})
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(triton.knobs.runtime, name)
        for added in (False, True, False):
            heard.clear()
            if added:
                chain.add(tell := lambda about: heard.append(about.get()["name"]))
            run(_add, torch.zeros(16), Rest(torch.zeros(16), 2), 5)
            if added:
                chain.remove(tell)
            assert heard == (["_add"] if added else [])


def test_variants_of_other_gpus_are_found_by_triton_each_time() -> None:
    asked: list[int] = []
    target = SimpleNamespace(backend="hip")
    variant = SimpleNamespace(metadata=SimpleNamespace(target=target))

    class Kernel(triton.JITFunction):  # type: ignore[misc,type-arg]
        def __init__(self) -> None:
            pass

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: asked.append(grid[0]) or variant

    run = Launch(3, {})
    for _ in range(2):
        run(Kernel(), 1)
    assert asked == [3, 3]


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST", 5)
    plans, made = Plans(), []
    for n in range(23):
        assert plans.find(n, lambda n=n: made.append(n) or n + 1) == n + 1
        assert plans.find(n, lambda: 0) == n + 1 and len(plans) <= 5
    assert made == [*range(23)]


class Nothing:
    """Stands for a kernel, and does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


HOUSE = str(Path(regard.__file__).parent)
CALLS: dict[str, tuple[int, int, Callable[[], dict[str, Any]]]] = {
    "a window": (128, 90, lambda: {"mask": Window(31, 0)}),
    "documents, causal": (128, 165, lambda: {"mask": Causal() & Documents(torch.arange(128) // 9)}),
    "a step of generation": (1, 90, lambda: {"mask": Lengths(torch.tensor([100]))}),
}
"""Queries, the most calls of Python functions of ours, and the rule."""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_the_last_one_makes_few_calls_in_python(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU waits for: more calls than these were made for every one of its launches."""
    monkeypatch.setattr(backend, "refuse_tensors", lambda q, width: None)
    monkeypatch.setattr(decode_kernels, "_parts", Nothing())
    monkeypatch.setattr(decode_kernels, "_join", Nothing())
    monkeypatch.setattr(flash_kernels, "_forward", Nothing())
    T, most, make = CALLS[name]
    rule, q, k = make(), torch.zeros(1, 4, T, 64), torch.zeros(1, 4, 128, 64)
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            calls.append(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")

    for _ in range(2):
        attention(q, k, k, **rule, backend="triton")
    sys.setprofile(count)
    try:
        attention(q, k, k, **rule, backend="triton")
    finally:
        sys.setprofile(None)
    assert len(calls) <= most, calls
