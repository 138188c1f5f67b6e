"""Launching kernels without Triton's binder, for calls of the same form as an earlier one.

Why: Triton finds the compiled variant of a kernel by inspecting each argument, and we compute
tiles, grids and constants from sizes. In a small call this launch overhead would take longer than
anything else, and a model makes the same call in every layer.

How: all of it follows from the form of a call: the layouts of its tensors (`Layout`), which of them
there are, and its numbers. So a plan is kept for each form (`PLANS`). In it a `Launch` keeps the
variant that Triton found for the first call, and passes it the arguments of later ones as they are.
The form determines what Triton inspects: which arguments there are, their types, and which
addresses and numbers are 1 or multiples of 16. A variant can be called with arguments itself, as in
Triton's tutorials. That calls hooks, of which there are none unless someone profiles, and asks the
driver about each tensor's address: both are left out where nothing needs them (`hand_over`), and
maps for TMA are kept (`tensor_maps.py`).

Left out: GPUs for which Triton also inspects how much memory a tensor shares with others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from regard._torch import is_fake
from regard.ops.kernels.tensor_maps import keep_maps

T = TypeVar("T")
MOST = 1024
"""The most forms with plans: lengths that change with every call make any number of them."""


Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""A tensor's shape, strides and dtype, and whether it begins at a multiple of 16 bytes: all that
Triton compiles for, and more. A plain tuple, as making a named one takes as long as the rest."""


def layout_of(x: Tensor) -> Layout:
    """The layout of a tensor in memory."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context to run kernels on a tensor's device: Triton launches them on the current one."""
    if not x.is_cuda or torch.compiler.is_compiling() or is_fake(x):
        return nullcontext()
    if x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


class Launch:
    """How a kernel is launched for calls of one form: number of programs, and constants."""

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
        """The index of the current device, on which kernels are launched."""
        number: int = self._driver.active.get_current_device()
        return number

    def variant(self, device: int) -> Callable[..., None] | None:
        """What launches on a device, given tensors or addresses; None before the first run."""
        return self._variants.get(device)


def hand_over(
    variant: Any, n_programs: int, device: int, constants: tuple[Any, ...]
) -> Callable[..., None]:
    """A function that launches a compiled variant on the current stream of a device."""
    from triton import knobs
    from triton.runtime import driver

    by_triton = variant[(n_programs, 1, 1)]
    run, function, metadata = keep_maps(variant.run), variant.function, variant.packed_metadata
    find_stream, hooks = driver.active.get_current_stream, knobs.runtime

    def launch(*args: Any) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # A chain of hooks is there even when it is empty.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            by_triton(*args, *constants)
            return
        stream = find_stream(device)
        run(n_programs, 1, 1, stream, function, metadata, None, None, None, *args, *constants)

    return launch


Sized = tuple[int, dict[str, Any]]
"""How many programs run, and with which options: a kernel's constants, and how it is compiled."""


class Plans(dict[Hashable, Any]):
    """A cache of plans by the form of calls, or of parts of one form's plan by their names."""

    def find(self, name: Hashable, make: Callable[[], T]) -> T:
        """The value kept under this name; `make` makes it the first time."""
        known: T | None = self.get(name)
        if known is None:
            if len(self) >= MOST:
                self.clear()
            known = self[name] = make()
        return known

    def run(self, name: Hashable, kernel: Any, size: Callable[[], Sized], *args: Any) -> None:
        """Launch a kernel; under one name it must always be the same kernel and size."""
        self.find(name, lambda: Launch(*size()))(kernel, *args)


PLANS = Plans()
"""Plans by form. Clear it after changing what plans depend on, such as the tables of tiles."""
