"""A Gluon kernel without a GPU: its Python body, with numpy where Gluon would be.

`bind` gives the functions of a module new globals. Layouts mean nothing here, and one program runs
after the other, as one thread: so this tells whether the right numbers are multiplied, masked and
added to the right ones, not what warps do to each other. What is asynchronous may happen as soon or
as late as it can (`Clock`): TMA when it is asked for, or when its barrier is waited for, by which
time nothing is left of what lay there; products when they are asked for, or when somebody waits for
them, from what lies in shared memory by then. A wait that would never end fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.language import constexpr

BITS = {"float32": np.float32}


def raw(x: Any) -> Any:
    """What numpy makes of a value of a kernel."""
    return x.of if isinstance(x, Value) else x.value if isinstance(x, constexpr) else x


class Value:
    """A number or a tensor of a kernel."""

    def __init__(self, of: Any) -> None:
        self.of = np.asarray(of)
        self.shape = self.of.shape
        self.dtype = "any"

    def to(self, dtype: str | None) -> Value:
        return Value(self.of.astype(BITS[dtype])) if dtype in BITS else self

    def __index__(self) -> int:
        return int(self.of)

    def __bool__(self) -> bool:
        return bool(self.of)


def _calculate(name: str, turned: bool) -> Callable[[Value, Any], Any]:
    apply = getattr(operator, name)

    def run(one: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        pair = (raw(other), one.of) if turned else (one.of, raw(other))
        return Value(apply(*pair))

    return run


for _name in ("add", "sub", "mul", "mod", "floordiv", "and_", "rshift"):
    setattr(Value, f"__{_name.strip('_')}__", _calculate(_name, False))
    setattr(Value, f"__r{_name.strip('_')}__", _calculate(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _calculate(_name, False))


class Pointer:
    """Some places of a tensor's memory."""

    dtype = SimpleNamespace(element_ty="any")

    def __init__(self, flat: Any, at: Any = 0) -> None:
        self.flat, self.at = flat, at

    def __add__(self, far: Any) -> Pointer:
        return Pointer(self.flat, self.at + raw(far))

    __radd__ = __add__

    def to(self, _: Any) -> Pointer:
        return self


class Shared:
    """Shared memory; at first nothing is a number."""

    dtype = "any"

    def __init__(self, of: Any) -> None:
        self.of, self.shape = of, of.shape

    def index(self, n: Any) -> Shared:
        return Shared(self.of[int(raw(n))])

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.of.reshape([int(raw(size)) for size in shape]))

    def permute(self, axes: Any) -> Shared:
        return Shared(self.of.transpose(axes))

    def store(self, x: Any) -> None:
        self.of[...] = raw(x)

    def load(self, _: Any) -> Value:
        return Value(self.of.copy())


class Barrier:
    """Some barriers: what is under way for each, the bytes expected and come, phases completed."""

    def __init__(self, cells: list[dict[str, Any]]) -> None:
        self.cells = cells

    def index(self, n: Any) -> Barrier:
        return Barrier([self.cells[int(raw(n))]])


class Descriptor(NamedTuple):
    """What TMA reads."""

    of: Any
    layout: None = None
    dtype: str = "any"


class Product:
    """A product that may still be under way."""

    def __init__(self, multiply: Callable[[], Any]) -> None:
        self.multiply, self.result = multiply, None

    def finish(self) -> Any:
        if self.result is None:
            self.result = self.multiply()
        return self.result


class Clock:
    """What happens at once, or late; and the products that are under way."""

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self.products: list[Product] = []

    def async_load(self, source: Descriptor, at: Any, barrier: Barrier, to: Shared) -> None:
        b, h, first, _ = (int(raw(x)) for x in at)
        (cell,) = barrier.cells

        def copy() -> None:
            rows = source.of[b, h, first : first + to.shape[-2]]
            to.of[...] = 0.0
            to.of.reshape(to.shape[-2:])[: len(rows)] = rows
            cell["come"] += to.of.size * 2
            cell["phases"] += cell["come"] == cell["expected"]

        to.of[...] = np.nan
        if self.is_late:
            cell["under way"].append(copy)
        else:
            copy()

    def expect(self, barrier: Barrier, size: Any) -> None:
        (cell,) = barrier.cells
        assert cell["come"] == cell["expected"], "a barrier is used while it is in use"
        cell["expected"] += int(raw(size))

    def wait(self, barrier: Barrier, phase: Any) -> None:
        (cell,) = barrier.cells
        while cell["under way"]:
            cell["under way"].pop(0)()
        assert cell["phases"] > 0 and (cell["phases"] - 1) % 2 == raw(phase), "waits for ever"

    def multiply(self, a: Any, b: Shared, acc: Value, *, use_acc: bool = True, **_: Any) -> Product:
        def run() -> Any:
            return a.of.astype(np.float64) @ b.of + (acc.of if use_acc else 0.0)

        self.products.append(Product(run))
        if not self.is_late:
            self.products[-1].finish()
        return self.products[-1]

    def wait_products(self, left: int, deps: list[Any]) -> Any:
        while len(self.products) > left:
            self.products.pop(0).finish()
        late = any(x is other for x in deps for other in self.products)
        assert not late, "what is waited for is still under way"
        found = [
            Value(x.finish().astype(np.float32)) if isinstance(x, Product) else x for x in deps
        ]
        return found if len(found) > 1 else found[0]


def _load(at: Pointer) -> Value:
    assert np.min(at.at) >= 0 and np.max(at.at) < at.flat.size, "reads beyond a tensor"
    return Value(at.flat[at.at])


def _store(at: Pointer, x: Value, mask: Any) -> None:
    places, numbers, real = np.broadcast_arrays(at.at, x.of, raw(mask))
    at.flat[places[real]] = numbers[real]


def _assemble(text: str, _constraints: str, operands: Any, **_: Any) -> Value | None:
    """The two things that assembler is used for: a zero, and a sum in memory."""
    if not text.startswith("red"):
        return Value(np.int64(0))
    places, numbers = np.broadcast_arrays(operands[0].at, raw(operands[1]))
    assert len(np.unique(places)) == places.size, "two numbers for one sum"
    operands[0].flat[places] += numbers
    return None


def _allocate(_dtype: Any, shape: Any, layout: Any) -> Any:
    sizes = [int(raw(size)) for size in shape]
    if layout == "barriers":
        cells = [{"under way": [], "expected": 0, "come": 0, "phases": 0} for _ in range(sizes[0])]
        return Barrier(cells)
    return Shared(np.full(sizes, np.nan, np.float32))


def _on_raw(function: Callable[..., Any]) -> Callable[..., Value]:
    return lambda *args: Value(function(*map(raw, args)))


def language(program: int, warps: int) -> SimpleNamespace:
    """What stands for `gl` and `tl`."""
    layouts = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout")
    nothing = dict.fromkeys((*layouts, "SwizzledSharedLayout", "static_assert"), lambda *_: None)
    return SimpleNamespace(
        **nothing,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
        constexpr=constexpr,
        float32="float32",
        int32=None,
        int64=None,
        num_warps=lambda: warps,
        program_id=lambda _: Value(np.int64(program)),
        cdiv=_on_raw(lambda a, b: -(-a // b)),
        minimum=_on_raw(np.minimum),
        maximum=_on_raw(np.maximum),
        where=_on_raw(np.where),
        exp2=_on_raw(np.exp2),
        expand_dims=_on_raw(np.expand_dims),
        arange=lambda first, past, layout=None: Value(np.arange(raw(first), raw(past))),
        full=lambda shape, x, _, layout=None: Value(np.full(list(map(raw, shape)), x, np.float32)),
        convert_layout=lambda x, _: x,
        static_range=lambda n: range(int(raw(n))),
        load=_load,
        store=_store,
        allocate_shared_memory=_allocate,
        inline_asm_elementwise=_assemble,
    )


def bind(module: Any, name: str, program: int, warps: int, is_late: bool) -> Callable[..., None]:
    """A kernel of a module as a function that numpy runs, for one program."""
    gl, clock = language(program, warps), Clock(is_late)
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=lambda *_, count: None,
        expect=clock.expect,
        wait=clock.wait,
    )
    known: dict[str, Any] = {
        "gl": gl,
        "tl": gl,
        "mbarrier": mbarrier,
        "async_load": clock.async_load,
        "sync_threads": lambda: None,
        "fence_async_shared": lambda: None,
        "warpgroup_mma": clock.multiply,
        "warpgroup_mma_wait": clock.wait_products,
    }
    for each, value in vars(module).items():
        if each in known:
            continue
        if hasattr(value, "fn"):
            code = value.fn
            known[each] = FunctionType(code.__code__, known, each, code.__defaults__)
        else:
            known[each] = raw(value)
    return known[name]


def as_argument(x: Any) -> Any:
    """An argument of a launch as the kernel gets it; tensors by their memory."""
    if isinstance(x, torch.Tensor):
        return Pointer(x.numpy().reshape(-1))
    if isinstance(x, tuple):
        return (
            type(x)(*map(as_argument, x)) if hasattr(x, "_fields") else tuple(map(as_argument, x))
        )
    return Value(np.int64(x)) if isinstance(x, int) else x
