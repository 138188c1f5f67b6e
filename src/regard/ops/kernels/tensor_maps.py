"""Tensor maps, by which TMA reads a tensor, made once for each address instead of once a launch.

Why: Triton's launcher asks the driver for a map of each tensor in each launch, and does so in
Python. A layer's forward and backward have seven, which takes as long as launching their kernels.

How: a map follows from the address, the shape and the strides of a tensor, and from numbers that a
compiled kernel fixes; it owns nothing. A model finds its tensors at the same addresses again, step
after step, so maps are kept by these. What Triton's launcher does beside is done once, ahead.

Left out: launchers that are not made as those of the Triton named here, which run as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

VERSION = (3, 6)
"""The Triton whose launcher is known."""
MOST = 1024
"""The most maps that are kept for one kernel."""
CAPTURED = {"launcher", "tensordesc_indices", "tensordesc_meta"}
"""What the function captured that this Triton puts around launchers of kernels with maps."""


def keep_maps(run: Any) -> Callable[..., None]:
    """A launcher of Triton that keeps its maps; or the same one, where nothing is known of it."""
    import triton

    around = getattr(run, "launch", None)
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version != VERSION or not isinstance(around, FunctionType):
        return run  # type: ignore[no-any-return]
    captured = inspect.getclosurevars(around).nonlocals
    if set(captured) != CAPTURED or run.global_scratch_size or run.profile_scratch_size:
        return run  # type: ignore[no-any-return]
    about = captured["tensordesc_meta"]
    if captured["tensordesc_indices"] != set(range(len(about))) or None in about:
        return run  # type: ignore[no-any-return]
    make = around.__globals__["make_tensordesc_arg"]
    launcher, how = captured["launcher"], (run.launch_cooperative_grid, run.launch_pdl, None, None)
    maps: dict[Any, list[Any]] = {}

    def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        # Four arguments are about the kernel and its hooks; those of the kernel begin with maps.
        given: list[Any] = []
        for n, numbers in enumerate(about, 4):
            one = rest[n]
            name = n, one.base.data_ptr(), one.shape, one.strides
            found = maps.get(name)
            if found is None:
                if len(maps) >= MOST:
                    maps.clear()
                found = maps[name] = make(one, numbers)
            given += found
        launcher(x, y, z, stream, function, *how, *rest[:4], *given, *rest[4 + len(about) :])

    return launch
