"""Kernels launched again without working out how: for calls that lie as an earlier one did.

Why: Triton finds the variant of a kernel that was compiled for some arguments by looking at each of
them, and we find tiles, grids and constants from sizes. A small call would wait for that longer
than for anything else, and a model makes the same call in every layer.

How: all of it follows from the form of a call: how its tensors lie (`Layout`), which are there, and
its numbers. So a plan is kept for each form (`PLANS`). In it a `Launch` keeps the variant that
Triton found for the first call, and gives it the arguments of the next ones as they are. What
Triton looks at is told by the form: which arguments there are, their types, and which addresses and
numbers are 1 or multiples of 16. A variant takes arguments itself, as in Triton's tutorials. Its
way there calls hooks, of which there are none unless someone profiles, and asks the driver about
each tensor's address: both are left out where nothing needs them (`hand_over`).

Left out: GPUs for which Triton also looks at how much memory a tensor shares with others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from regard._torch import is_fake

T = TypeVar("T")
MOST = 1024
"""Forms of which plans are kept: lengths that change with every call make any number of them."""


Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""How a tensor lies in memory, all that Triton compiles for, and more: its shape, strides and type,
and whether it begins at a multiple of 16 bytes. Plain, as a named one takes as long as the rest."""


def layout_of(x: Tensor) -> Layout:
    """How a tensor lies in memory."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """In which kernels run where a tensor is: Triton launches them on the current device."""
    if not x.is_cuda or torch.compiler.is_compiling() or is_fake(x):
        return nullcontext()
    if x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


class Launch:
    """So many programs of a kernel with its constants, for calls of one form."""

    def __init__(self, n_programs: int, options: dict[str, Any]) -> None:
        from triton.runtime import JITFunction, driver

        self.n_programs, self.options = n_programs, options
        self._driver, self._compiled_kind = driver, JITFunction
        self._variants: dict[int, Callable[..., None]] = {}

    def __call__(self, kernel: Any, *args: Any) -> None:
        """Run the kernel, which is the same in every call."""
        if not isinstance(kernel, self._compiled_kind):
            # Triton's interpreter has no variants.
            kernel[(self.n_programs,)](*args, **self.options)
            return
        run = self._variants.get(self.current_device()) if self._variants else None
        if run is not None:
            run(*args)
            return
        variant: Any = kernel[(self.n_programs,)](*args, **self.options)
        if variant is not None and variant.metadata.target.backend == "cuda":
            device = self.current_device()
            constants = tuple(self.options[name] for name in kernel.arg_names[len(args) :])
            self._variants[device] = hand_over(variant, self.n_programs, device, constants)

    def current_device(self) -> int:
        """The number of the device that kernels are launched on now."""
        number: int = self._driver.active.get_current_device()
        return number

    def variant(self, device: int) -> Callable[..., None] | None:
        """What takes the next arguments on a device, tensors or their addresses; None before."""
        return self._variants.get(device)


def hand_over(
    variant: Any, n_programs: int, device: int, constants: tuple[Any, ...]
) -> Callable[..., None]:
    """Launches of a variant that Triton compiled, on the current stream of a device."""
    from triton import knobs
    from triton.runtime import driver

    by_triton = variant[(n_programs, 1, 1)]
    run, function, metadata = variant.run, variant.function, variant.packed_metadata
    find_stream, hooks = driver.active.get_current_stream, knobs.runtime

    def launch(*args: Any) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # Chains of hooks are there when nobody is in them, too.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            by_triton(*args, *constants)
            return
        stream = find_stream(device)
        run(n_programs, 1, 1, stream, function, metadata, None, None, None, *args, *constants)

    return launch


Sized = tuple[int, dict[str, Any]]
"""How many programs run, and with which options: a kernel's constants, and how it is compiled."""


class Plans(dict[Hashable, Any]):
    """What was worked out for calls, by their form; or for those of one form, by what it is."""

    def find(self, name: Hashable, make: Callable[[], T]) -> T:
        """What is known by this name; the first who asks has it made."""
        known: T | None = self.get(name)
        if known is None:
            if len(self) >= MOST:
                self.clear()
            known = self[name] = make()
        return known

    def run(self, name: Hashable, kernel: Any, size: Callable[[], Sized], *args: Any) -> None:
        """Launch a kernel; by a name, the same kernel of the same size."""
        self.find(name, lambda: Launch(*size()))(kernel, *args)


PLANS = Plans()
"""By form. Whoever changes what plans follow from, such as the tables of tiles, clears it."""
