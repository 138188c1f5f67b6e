"""Calls of many queries that are launched again: with what they would be launched with anew.

Launches are caught on their way to what stands for a GPU (no_gpu.py), and not carried out. What
they give on a GPU is judged in test_gpu_relaunch.py.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
import triton
from no_gpu import Driver
from relaunch_cases import MANY
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import regard
from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Lengths,
    RelativeTable,
    Window,
    attention,
    backends,
)
from regard.ops.call import Rule
from regard.ops.kernels import (
    backend,
    flash_backward_hopper_kernels,
    flash_backward_kernels,
    flash_hopper,
    flash_hopper_kernels,
    flash_kernels,
    flash_op,
    flash_relaunch,
    tile_lists_kernels,
)
from regard.ops.kernels.launch import PLANS

HOUSE = str(Path(regard.__file__).parent)
B, H, G, T = 2, 4, 2, 136
KERNELS = {
    flash_kernels: ("_forward",),
    flash_hopper_kernels: ("_alone", "_shared"),
    flash_backward_kernels: ("_delta", "_finish", "_keys", "_queries"),
    flash_backward_hopper_kernels: ("_fused",),
    tile_lists_kernels: ("_list",),
}
Inputs = tuple[Tensor, Tensor, Tensor]
Made = Callable[[], dict[str, Any]]


class Launched(NamedTuple):
    """A kernel, how many programs of it, and what it is given: tensors as their addresses."""

    name: str
    n_programs: int
    given: Any
    held: Any
    """Keeps memory from being used twice."""


class Kernel(triton.JITFunction):  # type: ignore[misc,type-arg]
    """Stands for a kernel and for what Triton compiles of it; keeps what it is launched with."""

    metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
    function = packed_metadata = None

    def __init__(self, kernel: Any, launched: list[Launched]) -> None:
        self.arg_names, self.launched, self.name = kernel.arg_names, launched, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            names = self.arg_names[len(args) :]
            self.run(
                *grid, 1, 1, None, None, None, None, None, None, *args, *map(options.get, names)
            )
            return self

        return launch

    def run(self, n: int, *args: Any) -> None:
        self.launched.append(Launched(self.name, n, address(args[8:]), args))


def address(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.data_ptr()
    if isinstance(x, flash_hopper_kernels.Described):
        return address((x.base, x.shape, x.strides, x.block_shape, x.layout, x.padding))
    return tuple(map(address, x)) if isinstance(x, (tuple, list)) else x


@pytest.fixture(autouse=True)
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """What a GPU that is not there is handed."""
    found: list[Launched] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(getattr(module, name), found))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(backend, "refuse_tensors", lambda q, width: None)
    monkeypatch.setitem(backends.ORDER, "cpu", backends.ORDER["cuda"])
    monkeypatch.setattr(flash_hopper, "runs_on", lambda device: True)
    PLANS.clear()
    yield found
    PLANS.clear()


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call from now on, whether it was launched again."""
    found: list[bool] = []
    plain = flash_relaunch.find

    def find(*args: Any) -> Any:
        known = plain(*args)
        found.append(known is not None)
        return known

    monkeypatch.setattr(flash_relaunch, "find", find)
    return found


def draw(width: int = 64, learned: bool = False, turned: bool = True, size: int = T) -> Inputs:
    def one(heads: int) -> Tensor:
        shape = (B, size, heads, width) if turned else (B, heads, size, width)
        x = torch.randn(shape).to(torch.bfloat16)
        return (x.transpose(1, 2) if turned else x).requires_grad_(learned)

    return one(H), one(G), one(G)


KNOWN: dict[str, Made] = {name: partial(made, B, H, T) for name, made in MANY.items()}
OTHER: dict[str, Made] = {
    "bits": lambda: {"mask": ~Window(16, 0)},
    "a bool tensor": lambda: {"mask": Dense(torch.ones(T) > 0), "softcap": 3.0},
    "a table": lambda: {"bias": RelativeTable(torch.zeros(8, H))},
    "numbers": lambda: {"bias": DenseBias(torch.zeros(T)), "softcap": 3.0},
    "slopes at positions": lambda: {"bias": ALiBi(H).at(torch.arange(T))},
    "slopes that learn": lambda: {"bias": ALiBi(slopes=Parameter(torch.ones(H)))},
    "sinks that learn": lambda: {"mask": Causal(), "sinks": Parameter(torch.zeros(H))},
    "sinks with gaps": lambda: {"mask": Window(9, 0), "sinks": torch.zeros(2 * H)[::2]},
}


def alike(launched: list[Launched], known: list[int]) -> list[Any]:
    """Launches with the number of its first use for each address that is not known."""
    seen: dict[int, int] = {}

    def name(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(name, x))
        return ("new", seen.setdefault(x, len(seen))) if is_new(x) else x

    def is_new(x: Any) -> bool:
        return type(x) is int and x > 2**36 and x not in known

    return [name(tuple(each[:3])) for each in launched]


def attend(inputs: Inputs, g: Tensor | None, rule: dict[str, Any]) -> list[Tensor]:
    """The output, and gradients where one comes in."""
    output = attention(*inputs, **rule)
    return [output] if g is None else [output, *torch.autograd.grad(output, inputs, g)]


@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize("width", [64, 128, 48])
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_launched_again_is_what_would_be_launched_anew(
    name: str,
    width: int,
    on_hopper: bool,
    handed: list[Launched],
    again: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_hopper, "runs_on", lambda device: on_hopper)
    for learned, turned in ((False, True), (False, False), (True, True), (True, False)):
        rule, g = KNOWN[name](), draw(width, turned=not turned)[0] if learned else None
        for _ in range(2):
            attend(draw(width, learned, turned), g, rule)
        again.clear()
        inputs = draw(width, learned, turned)
        known = [x.data_ptr() for x in (*inputs, *([] if g is None else [g]))]
        handed.clear()
        found = attend(inputs, g, rule)
        assert again == [True]
        ours = [*handed]
        PLANS.clear()
        handed.clear()
        anew = attend(inputs, g, rule)
        assert again == [True, False]
        assert alike(ours, known) == alike(handed, known)
        assert [x.stride() for x in found] == [x.stride() for x in anew]
        assert found[0].transpose(1, 2).is_contiguous() == turned


@pytest.mark.parametrize("name", OTHER)
def test_what_is_rendered_for_a_call_is_rendered_for_each(name: str, again: list[bool]) -> None:
    inputs, rule = draw(), OTHER[name]()
    for _ in range(3):
        attention(*inputs, **rule)
    assert True not in again


def test_tensors_that_learn_in_one_call_alone_send_that_one_the_long_way(again: list[bool]) -> None:
    sinks, slopes = Parameter(torch.zeros(H)), Parameter(torch.ones(H))
    for rule in ({"mask": Causal(), "sinks": sinks}, {"bias": ALiBi(slopes=slopes)}):
        with torch.no_grad():
            for _ in range(3):
                attention(*draw(), **rule)
        assert attention(*draw(), **rule).requires_grad
        assert not again[0] and again[-2:] == [True, False]
        again.clear()


@torch.no_grad()
def test_a_mask_that_is_written_to_is_rendered_anew(
    handed: list[Launched], again: list[bool]
) -> None:
    lengths = torch.full((B,), 9)
    mask, inputs = Lengths(lengths, side="left"), draw()
    for change in (0, 0, 0, 5, 0):
        if change:
            lengths += change
        attention(*inputs, mask=mask)
    assert again == [False, False, True, False, True]
    ready = next(iter(PLANS["rule", id(mask), id(None)].calls.values()))[0]
    assert ready.saved[0].tolist() == [T - 14] * B
    assert handed[-1].given[4][3][:2] == tuple(ready.addresses[:2])


def test_a_mask_that_was_written_to_since_gives_no_wrong_gradient() -> None:
    lengths = torch.full((B,), 9)
    mask, inputs = Lengths(lengths), draw(learned=True)
    attention(*inputs, mask=mask)
    output = attention(*inputs, mask=mask)
    lengths += 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@torch.no_grad()
def test_slopes_of_the_host_are_kept_like_those_of_a_gpu(
    again: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some tensor is elsewhere, mask and bias are both copied for the call."""

    def on(rule: Rule, device: torch.device) -> Rule:
        assert rule.mask is not None and rule.bias is not None
        return replace(rule, mask=copy(rule.mask), bias=copy(rule.bias))

    monkeypatch.setattr(Rule, "on", on)
    rule = KNOWN["slopes"]()
    for _ in range(3):
        attention(*draw(), **rule)
    assert again == [False, False, True]


@torch.no_grad()
def test_a_mask_for_one_call_alone_is_not_kept() -> None:
    for _ in range(3):
        attention(*draw(), mask=Window(9, 0))
    assert not [name for name in PLANS if name[0] in ("rule", "seen", "step")]


@torch.no_grad()
def test_what_is_kept_goes_with_its_mask(handed: list[Launched]) -> None:
    inputs, mask = draw(), Lengths(torch.full((B,), 9))
    for _ in range(2):
        attention(*inputs, mask=mask)
    name = "rule", id(mask), id(None)
    rendered = ref(next(iter(PLANS[name].calls.values()))[0].saved[0])
    assert rendered() is not None
    handed.clear()
    del mask
    assert name not in PLANS and rendered() is None


@torch.no_grad()
def test_calls_of_one_mask_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_relaunch, "MOST", 3)
    mask, inputs = Window(9, 0), draw()
    for n in range(9):
        attention(*inputs, mask=mask, scale=0.1 + n)
        assert not n or len(PLANS["rule", id(mask), id(None)].calls) <= 3


def test_a_call_that_lies_otherwise_is_another(again: list[bool]) -> None:
    mask = Lengths(torch.full((B,), 9))
    q, k, v = draw()
    attention(q, k, v, mask=mask, scale=9.0)
    again.clear()
    odd = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    wide = torch.zeros(B, G, T, 128, dtype=q.dtype)
    calls: list[tuple[Inputs, dict[str, Any]]] = [
        ((q, k, v), {}),
        (draw(turned=False), {}),
        ((q.half(), k.half(), v.half()), {}),
        ((q[:, :2], k, v), {}),
        ((q, k[:, :, :130], v[:, :, :130]), {}),
        ((q, wide[..., :64], v), {}),
        ((q, k, wide[..., 64:]), {}),
        ((q, k, v), {"scale": 0.5}),
        ((q, k, v), {"softcap": 0.5}),
        ((q, k, v), {"sinks": torch.zeros(H)}),
        ((odd, k, v), {}),
    ]
    for inputs, rule in calls:
        attention(*inputs, **rule, mask=mask)
    assert True not in again
    again.clear()
    for inputs, rule in calls:
        attention(*inputs, **rule, mask=mask)
    assert again == [True] * (len(calls) - 1) + [False], "odd addresses are for other kernels"
    again.clear()
    attention(q, k, v, mask=Lengths(torch.full((B,), 9)))
    attention(q, k, v, mask=mask, bias=ALiBi(H))
    assert True not in again


def test_errors_come_after_a_call_that_had_none() -> None:
    mask, (q, k, v) = Lengths(torch.full((B,), 9)), draw()
    for _ in range(3):
        attention(q, k, v, mask=mask)
    wrong: list[tuple[Inputs, dict[str, Any], str]] = [
        ((q[:1], k[:1], v[:1]), {}, r"lengths must be \(B,\) with B=1"),
        ((q, k[:, :, 1:], v), {}, "has S=136, but k has S=135"),
        ((q, k, v), {"sinks": torch.zeros(3)}, "sinks .* has H=4|sinks .* has H=3"),
        ((q, k, v), {"scale": float("nan")}, "scale must be a finite number"),
        ((q, k, v), {"softcap": 0.0}, "softcap must be a finite number"),
    ]
    for inputs, rule, words in wrong:
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                attention(*inputs, mask=mask, **rule)
    kinds: list[tuple[Any, dict[str, Any], str]] = [
        (k.half(), {}, "one type and one device"),
        (k, {"sinks": 3}, "sinks"),
        (k, {"scale": [1.0]}, "float"),
        (k, {"softcap": [1.0]}, "float"),
        (nested(k), {}, "NestedTensor"),
    ]
    for keys, rule, words in kinds:
        with pytest.raises(TypeError, match=words):
            attention(q, keys, v, mask=mask, **rule)


def nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([*x])


@dataclass(frozen=True, eq=False)
class Listing(Window):
    """A window that holds what no graph can carry."""

    names: list[str] = field(default_factory=list)


@torch.no_grad()
def test_what_cannot_be_saved_for_a_gradient_is_kept_without(again: list[bool]) -> None:
    mask = Listing(9, 0, ["a"])
    for _ in range(3):
        attention(*draw(), mask=mask)
    assert again == [False, False, True]
    with torch.enable_grad(), pytest.raises(TypeError, match="got a list"):
        attention(*draw(learned=True), mask=mask)


def test_what_else_goes_on_sends_a_call_the_long_way() -> None:
    mask, (q, k, v) = Causal(), draw()
    rule: Any = dict.fromkeys(("bias", "scale", "sinks")) | {"mask": mask, "softcap": 3.0}
    for _ in range(3):
        attention(q, k, v, mask=mask, softcap=3.0)
    assert flash_relaunch.find(q, k, v, rule) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_relaunch.find(q, k, v, rule) is None
    with torch.autograd.forward_ad.dual_level():
        assert flash_relaunch.find(q, k, v, rule) is None
    inside: list[Any] = []
    torch.func.vmap(lambda x: inside.append(flash_relaunch.find(x, k, v, rule)) or x)(q[None])
    assert inside == [None]
    for other in (Parameter(q), None, 3):
        assert flash_relaunch.find(other, k, v, rule) is None  # type: ignore[arg-type]
        assert flash_relaunch.find(q, k, other, rule) is None  # type: ignore[arg-type]


def test_a_compiled_graph_serves_a_mask_that_is_kept_and_any_other() -> None:
    counting = CompileCounter()  # type: ignore[no-untyped-call]

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return attention(q, k, v, mask=mask)

    compiled = torch.compile(run, fullgraph=True, backend=counting)
    inputs, masks = draw(), [Lengths(torch.full((B,), n)) for n in (9, 8, 7)]
    for _ in range(3):
        attention(*inputs, mask=masks[0])
    for mask in masks:
        compiled(*inputs, mask)
    assert counting.frame_count == 1


@torch.no_grad()
def test_a_call_on_another_gpu_than_the_current_one_is_not_launched_on_that(
    handed: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]
    monkeypatch.setattr(Driver, "get_current_device", lambda _: current[0])
    inputs, mask = draw(), Window(9, 0)
    for _ in range(2):
        attention(*inputs, mask=mask)
    given: Any = dict.fromkeys(("bias", "scale", "softcap", "sinks")) | {"mask": mask}
    known = flash_relaunch.find(*inputs, given)
    assert known is not None
    for current[0] in (0, 1):
        handed.clear()
        output = flash_relaunch.attend_again(known)
        assert (output is not None) == bool(handed) == (current[0] == 0)


@pytest.mark.parametrize("name", ["padding", "documents", "sinks"])
def test_checkpoints_find_what_the_first_call_saved(name: str, again: list[bool]) -> None:
    """It is recomputed by a relaunch, and must save the same tensors in the same order."""
    inputs, rule = draw(learned=True), KNOWN[name]()

    def run(*inputs: Tensor) -> Tensor:
        return attention(*inputs, **rule)

    output: Any = checkpoint(run, *inputs, use_reentrant=False)
    output.sum().backward()
    assert again == [False, True] and all(x.grad is not None for x in inputs)


def test_what_was_saved_elsewhere_goes_the_long_way_back(handed: list[Launched]) -> None:
    inputs, rule = draw(learned=True), KNOWN["padding on the left"]()
    g = draw()[0]
    for _ in range(3):
        attend(inputs, g, rule)
    kept = PLANS["rule", id(rule["mask"]), id(None)]
    ready = next(iter(kept.calls.values()))[0]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        moved = attention(*inputs, **rule)
    for output, is_moved in ((moved, True), (attention(*inputs, **rule), False)):
        handed.clear()
        torch.autograd.grad(output, inputs, g)
        (fused,) = [each for each in handed if each.name == "_fused"]
        assert (fused.given[7][3][0] != ready.addresses[0]) == is_moved


def test_a_gradient_that_lies_otherwise_is_read_as_it_lies(handed: list[Launched]) -> None:
    inputs, rule = draw(learned=True), KNOWN["padding"]()
    for turned in (True, True, True, False, False, False):
        g = draw(turned=turned)[0]
        handed.clear()
        attend(inputs, g, rule)
        (delta,) = [each for each in handed if each.name == "_delta"]
        assert delta.given[1] == (g.data_ptr(), *g.stride())


def test_deterministic_algorithms_are_heard_of_after_other_calls(handed: list[Launched]) -> None:
    inputs, rule, g = draw(learned=True), KNOWN["padding"](), draw()[0]
    for _ in range(3):
        attend(inputs, g, rule)
    handed.clear()
    torch.use_deterministic_algorithms(True)
    try:
        attend(inputs, g, rule)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [each.name for each in handed] == ["_alone", "_delta", "_keys", "_queries"]


def test_parts_of_scratch_memory_do_not_overlap(
    handed: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, rule, g = draw(learned=True), KNOWN["documents"](), draw()[0]
    for _ in range(2):
        attend(inputs, g, rule)
    output = attention(*inputs, **rule)
    made: dict[torch.dtype, Tensor] = {}
    plain = Tensor.new_empty

    def new_empty(self: Tensor, *sizes: Any, dtype: torch.dtype) -> Tensor:
        made[dtype] = plain(self, *sizes, dtype=dtype)
        return made[dtype]

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    handed.clear()
    torch.autograd.grad(output, inputs, g)
    launched = {each.name: each.given for each in handed}
    floats, ints = made[torch.float32], made[torch.int32]
    lse, delta, _, n = launched["_delta"][3]
    sums = launched["_delta"][4]
    rows = 4 * B * H * n
    assert (lse, delta, sums) == tuple(floats.data_ptr() + m * rows for m in range(3))
    assert 4 * floats.numel() == rows * (2 + 64) and sums == launched["_finish"][0]
    tiles, full, mixed, n, stride, _ = launched["_list"][1]
    assert tiles == ints.data_ptr() and full - tiles == 4 * B * stride * n
    assert mixed - full == 4 * B * stride and ints.numel() == B * stride * (n + 2)


def test_second_derivatives_and_batches_of_gradients_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, again: list[bool]
) -> None:
    rule = KNOWN["padding on the left"]()
    inputs = draw(learned=True)
    for _ in range(2):
        attend(inputs, draw()[0], rule)
    again.clear()

    def reference(known: flash_relaunch.Known) -> tuple[Tensor, Tensor]:
        seen = regard.observe(
            *(x.detach() for x in known.inputs), **rule, wants=regard.Wants(lse=True),
            backend="reference",
        )  # fmt: skip
        assert seen.output is not None and seen.lse is not None
        # As it lies in memory what is kept would be found, where it must not be.
        return seen.output.transpose(1, 2).contiguous().transpose(1, 2), seen.lse

    monkeypatch.setattr(flash_relaunch, "launch_forward", reference)
    # The kernels are not there for the last gradient, which is not differentiated.
    monkeypatch.setattr(flash_op, "_is_differentiated", lambda arriving: True)
    output = attention(*inputs, **rule)
    assert again == [True]
    g = torch.randn_like(output).requires_grad_()
    theirs = attention(*inputs, **rule, backend="reference")
    for one, other in zip(twice(output, inputs, g), twice(theirs, inputs, g), strict=True):
        assert (one - other).abs().max() <= 2**-5 * other.abs().max()
    batch = torch.stack([g, 2 * g]).detach()
    ours, expected = (
        torch.autograd.grad(x, inputs, batch, is_grads_batched=True, retain_graph=True)
        for x in (output, theirs)
    )
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max() <= 2**-5 * other.abs().max()


def twice(output: Tensor, inputs: Inputs, g: Tensor) -> tuple[Tensor, ...]:
    """The derivatives of the sum of squares of all gradients."""
    grads = torch.autograd.grad(output, inputs, g, create_graph=True)
    total = torch.stack([x.float().square().sum() for x in grads]).sum()
    return torch.autograd.grad(total, (*inputs, g), retain_graph=True)


@pytest.mark.parametrize("learned", [False, True])
def test_a_call_that_is_launched_again_makes_few_calls(learned: bool) -> None:
    inputs, rule = draw(learned=learned), KNOWN["padding"]()
    g = torch.ones_like(inputs[0]) if learned else None
    for _ in range(2):
        attend(inputs, g, rule)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        output = attention(*inputs, **rule)
    finally:
        sys.setprofile(None)
    assert calls.total() <= (27 if learned else 26), calls
    del output
