"""A Gluon kernel without a GPU: its Python body, with numpy where Gluon would be.

`bind` gives the functions of a module new globals. Layouts mean nothing here, and one program runs
after the other, each partition of it as one thread: so this tells whether the right numbers are
multiplied, masked and added to the right ones, not what warps do to each other. Partitions take
turns (`Turns`). What is asynchronous may happen as soon or as late as it can (`Clock`): TMA when it
is asked for, or when its barrier is waited for, by which time nothing is left of what lay there;
products when they are asked for, or when somebody waits for them, from what lies in shared memory
by then. A wait that would never end fails.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.language import constexpr

BITS: dict[Any, Any] = {"float32": np.float32, "int32": np.int32}


def raw(x: Any) -> Any:
    """What numpy makes of a value of a kernel."""
    return x.of if isinstance(x, Value) else x.value if isinstance(x, constexpr) else x


class Value:
    """A number or a tensor of a kernel."""

    def __init__(self, of: Any) -> None:
        self.of = np.asarray(of)
        self.shape = self.of.shape
        self.dtype = "any"
        self.type = SimpleNamespace(layout=None)

    def to(self, dtype: str | None, bitcast: bool = False) -> Value:
        if bitcast:
            known = np.float32 if self.of.dtype.kind == "f" else np.int32
            return Value(self.of.astype(known).view(BITS[str(dtype)]))
        if dtype in BITS:
            return Value(self.of.astype(BITS[dtype]))
        return Value(self.of * 1) if self.of.dtype == bool else self

    def reshape(self, shape: Any) -> Value:
        return Value(self.of.reshape([int(raw(size)) for size in shape]))

    def permute(self, axes: Any) -> Value:
        return Value(self.of.transpose(axes))

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


ARITHMETIC = "add", "sub", "mul", "mod", "floordiv", "truediv", "and_", "xor", "rshift", "lshift"
for _name in ARITHMETIC:
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
    """Some barriers: what is under way for each, arrivals and bytes of a phase, and which."""

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


class Turns:
    """The partitions of a program, of which one runs at a time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running, self.alive, self.stuck = 0, {0}, set[int]()
        self.error: BaseException | None = None

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Let the others go on until something is so."""
        while not is_ready():
            self.stuck.add(self.running)
            self._pause()

    def let_later(self) -> None:
        """Let the partitions behind this one, which load for it, go on now."""
        if max(self.alive) > self.running:
            self._pause()

    def _pause(self) -> None:
        own = self.running
        self._pass_on()
        with self.changed:
            self.changed.wait_for(lambda: self.running == own or self.error is not None)
        if self.error is not None:
            raise self.error

    def _pass_on(self) -> None:
        free = self.alive - self.stuck
        assert free, "waits for ever"
        with self.changed:
            self.running = max(free - {self.running} or free)
            self.changed.notify_all()

    def run(self, parts: list[tuple[Callable[..., None], Any]], *_: Any) -> None:
        """All partitions to their ends; the last one begins."""

        def follow(n: int) -> None:
            with self.changed:
                self.changed.wait_for(lambda: self.running == n or self.error is not None)
            try:
                if self.error is None:
                    parts[n][0](*parts[n][1])
                    self.alive.remove(n)
                    if self.alive:
                        self._pass_on()
            except BaseException as error:
                with self.changed:
                    self.error = self.error or error
                    self.changed.notify_all()

        self.alive, self.running = set(range(len(parts))), len(parts) - 1
        threads = [threading.Thread(target=follow, args=(n,)) for n in self.alive]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


class Clock:
    """What happens at once, or late; and the products that are under way."""

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self.products: list[Product] = []
        self.turns = Turns()

    def async_load(self, source: Descriptor, at: Any, barrier: Barrier, to: Shared) -> None:
        b, h, first, _ = (int(raw(x)) for x in at)
        (cell,) = barrier.cells

        def copy() -> None:
            rows = source.of[b, h, first : first + to.shape[-2]]
            to.of[...] = 0.0
            to.of.reshape(to.shape[-2:])[: len(rows)] = rows
            cell["come"] += to.of.size * 2
            self._complete(cell)

        to.of[...] = np.nan
        self.turns.stuck.clear()
        if self.is_late:
            cell["under way"].append(copy)
        else:
            copy()

    def _complete(self, cell: dict[str, Any]) -> None:
        if cell["arrived"] == cell["count"] and cell["come"] == cell["expected"]:
            cell.update(arrived=0, come=0, expected=0, phases=cell["phases"] + 1)

    def expect(self, barrier: Barrier, size: Any) -> None:
        (cell,) = barrier.cells
        cell["expected"] += int(raw(size))
        self.arrive(barrier)

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        (cell,) = barrier.cells
        if raw(pred):
            cell["arrived"] += count
            assert cell["arrived"] <= cell["count"], "a barrier is used while it is in use"
            self._complete(cell)
            self.turns.stuck.clear()
            # What was released too early is overwritten at once.
            self.turns.let_later()

    def wait(self, barrier: Barrier, phase: Any) -> None:
        (cell,) = barrier.cells

        def is_over() -> bool:
            while cell["under way"]:
                cell["under way"].pop(0)()
            return bool(cell["phases"] % 2 != raw(phase))

        self.turns.wait_until(is_over)

    def multiply(
        self, a: Any, b: Shared, acc: Value, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        def run() -> Any:
            return a.of.astype(np.float64) @ b.of + (acc.of if use_acc else 0.0)

        if not is_async:
            return Value(run().astype(np.float32))
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


def _load(at: Pointer, mask: Any = True, other: Any = 0) -> Value:
    real = np.broadcast_to(raw(mask), np.shape(at.at))
    at = Pointer(at.flat, np.where(real, at.at, 0))
    assert np.min(at.at) >= 0 and np.max(at.at) < at.flat.size, "reads beyond a tensor"
    return Value(np.where(real, at.flat[at.at], other))


def _store(at: Pointer, x: Value, mask: Any = True) -> None:
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


def _allocate(dtype: Any, shape: Any, layout: Any) -> Any:
    sizes = [int(raw(size)) for size in shape]
    if layout == "barriers":
        fresh = {"count": 1, "arrived": 0, "expected": 0, "come": 0, "phases": 0}
        return Barrier([fresh | {"under way": []} for _ in range(sizes[0])])
    kind = BITS.get(dtype, np.float32)
    return Shared(np.full(sizes, np.nan if kind == np.float32 else -(2**31), kind))


def _init(barrier: Barrier, count: int) -> None:
    for cell in barrier.cells:
        cell["count"] = count


def _full(shape: Any, x: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(np.full(list(map(raw, shape)), raw(x), BITS.get(dtype, np.float32)))


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
        int32="int32",
        int64=None,
        num_warps=lambda: warps,
        program_id=lambda _: Value(np.int64(program)),
        cdiv=_on_raw(lambda a, b: -(-a // b)),
        minimum=_on_raw(np.minimum),
        maximum=_on_raw(np.maximum),
        where=_on_raw(np.where),
        exp2=_on_raw(np.exp2),
        expand_dims=_on_raw(np.expand_dims),
        abs=_on_raw(np.abs),
        max=_on_raw(np.max),
        min=_on_raw(np.min),
        sum=_on_raw(np.sum),
        arange=lambda first, past, layout=None: Value(np.arange(raw(first), raw(past))),
        full=_full,
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
    gl.warp_specialize = clock.turns.run
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=_init,
        expect=clock.expect,
        arrive=clock.arrive,
        wait=clock.wait,
    )
    ours: dict[str, Any] = {
        "gl": gl,
        "tl": gl,
        "mbarrier": mbarrier,
        "async_load": clock.async_load,
        "sync_threads": lambda: None,
        "fence_async_shared": lambda: None,
        "warpgroup_mma": clock.multiply,
        "warpgroup_mma_wait": clock.wait_products,
    }
    found: dict[str, Any] = {}

    def globals_of(module: Any) -> dict[str, Any]:
        """The globals of a module, and of those that its functions come from."""
        if module.__name__ in found:
            return found[module.__name__]  # type: ignore[no-any-return]
        known = found[module.__name__] = dict(ours)
        for each, value in vars(module).items():
            if each in ours:
                continue
            if hasattr(value, "fn"):
                code = value.fn
                around = globals_of(sys.modules[code.__module__])
                known[each] = FunctionType(code.__code__, around, each, code.__defaults__)
            else:
                known[each] = raw(value)
        return known

    return globals_of(module)[name]  # type: ignore[no-any-return]


def as_argument(x: Any) -> Any:
    """An argument of a launch as the kernel gets it; tensors by their memory."""
    if isinstance(x, torch.Tensor):
        return Pointer(x.numpy().reshape(-1))
    if isinstance(x, tuple):
        return (
            type(x)(*map(as_argument, x)) if hasattr(x, "_fields") else tuple(map(as_argument, x))
        )
    return Value(np.int64(x)) if isinstance(x, int) else x
