"""The tile sizes of our kernels: a small table of measured ones, and safe ones for other GPUs.

There is no autotuning on a first call. `bench/tune_gpu.py` times candidates; the best are listed
here, by compute capability, kernel and width of heads. A device that nobody measured gets tiles
that fit everywhere, and `regard doctor` says so.

A name of several words is a special case of its first one: a table may leave it out.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from regard.ops.kernels.arguments import width_of
from regard.ops.kernels.rendered import Rendered


class Tiles(NamedTuple):
    """Rows and keys of a tile, and the warps and pipeline stages of its program."""

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """Launch options. Fused multiply-add has to be named for later versions of Triton."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


Table = dict[str, tuple[Tiles, Tiles, Tiles]]
"""By kernel: for heads of width up to 64, 128 and 256."""
WIDTHS = (64, 128, 256)

HOPPER: Table = {
    "forward": (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 32, 8, 2)),
    "forward asked": (Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 32, 8, 2)),
    "forward listed": (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 8, 2)),
    "forward blind": (Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 2)),
    "keys": (Tiles(32, 128, 4, 3), Tiles(32, 128, 8, 3), Tiles(32, 64, 8, 1)),
    "keys windowed": (Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 3), Tiles(32, 64, 8, 1)),
    "keys biased": (Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 8, 1)),
    "keys listed": (Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 8, 1)),
    "hopper": (Tiles(32, 128, 4, 3), Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 3)),
    "hopper windowed": (Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 3)),
    "hopper biased": (Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 3)),
    "hopper listed": (Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 3)),
    "queries": (Tiles(128, 64, 4, 3), Tiles(128, 32, 4, 3), Tiles(64, 32, 8, 1)),
    "queries windowed": (Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 3), Tiles(64, 32, 8, 1)),
    "queries biased": (Tiles(128, 64, 4, 3), Tiles(64, 32, 4, 3), Tiles(64, 32, 8, 1)),
    "queries listed": (Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 8, 1)),
    "bias": (Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 32, 4, 1)),
    "pool": (Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2)),
    "search": (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2)),
    "above": (Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2)),
}
SAFE: Table = {
    "forward": (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
    "keys": (Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 1)),
    "queries": (Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1)),
    "bias": (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    "pool": (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 1)),
    "search": (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 1)),
    "above": (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 1)),
}
"""Fits into the 99 KiB of shared memory of a small GPU."""
WHOLE: Table = {
    "forward": (Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    "keys": (Tiles(32, 64, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
    "queries": (Tiles(64, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
    "bias": (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    "pool": (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    "search": (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    "above": (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
}
"""For float32, whose products need registers instead of tensor cores; on every device."""
MEASURED: dict[tuple[int, int], Table] = {(9, 0): HOPPER}
"""By compute capability."""


def tiles_of(kernel: str, given: Rendered) -> Tiles:
    """The tiles of a kernel for the heads of a call."""
    table = WHOLE if given.q.dtype.itemsize == 4 else table_of(given.q.device)
    row = table.get(kernel) or table[kernel.split()[0]]
    return row[WIDTHS.index(widest_of(given))]


def widest_of(given: Rendered) -> int:
    """The entry of `WIDTHS` for the heads of a call."""
    width = width_of(max(given.q.shape[3], given.v.shape[3]))
    return next(widest for widest in WIDTHS if width <= widest)


def table_of(device: torch.device) -> Table:
    """The measured tiles of a device, or the safe ones."""
    if device.type != "cuda":
        # Only Triton's interpreter and compiler get other tensors: they use the measured tiles.
        return HOPPER
    return MEASURED.get(capability_of(device), SAFE)


def describe_tiles(capability: tuple[int, int]) -> str:
    """Whether our kernels have tiles that were measured on this generation of GPUs."""
    name = "sm_{}{}".format(*capability)
    if capability in MEASURED:
        return f"our kernels have tiles measured on {name}"
    known = ", ".join("sm_{}{}".format(*each) for each in MEASURED)
    return f"our kernels were measured on {known}, not on {name}: safe tiles, maybe slow ones"


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)
