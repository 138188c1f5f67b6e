"""Which calls run on the forward for Hopper GPUs: those for which it was measured to be faster.

Left to `flash_kernels.py`: masks of bits, tables and dense biases, dropout, few queries, other
widths, tensors that TMA cannot read, masks that leave keys unseen between those of two queries.

Letters: B batch, T queries, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from regard._torch import is_fake
from regard.ops.blockwise import Ask
from regard.ops.kernels.rendered import Rendered
from regard.ops.kernels.tiles import capability_of

HOPPER = (9, 0)
VERSIONS = ((3, 6), (3, 9))
"""The first and the last Triton whose Gluon the kernels were compiled with."""
WIDTHS = (64, 128)
FEWEST = 128
"""Queries from which on the tiles are filled."""
LONG, LARGE = 8192, 2**31
"""Queries, and pairs of query and key in all heads, from which on ours was measured faster than
torch's kernels for plain and causal calls: bench/results/attention_gpu.md. A call of fewer pairs
ends before a slow host has prepared it."""
FARTHEST = 2**23
"""Positions below this are exact in the bits with which ALiBi is computed."""


def takes(given: Rendered, ask: Ask, mass: Tensor | None) -> bool:
    """Whether the kernels for Hopper can run a call on its device, and are the faster ones."""
    return runs_on(given.q.device) and suits(given, ask, mass)


def is_long(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the forward for Hopper is faster than torch's kernels for a plain or causal call.

    Only without gradients, as cuDNN's backward needs its own forward; and not in compiled graphs,
    which would be specialised to this length.
    """
    D = q.shape[3]
    if torch.compiler.is_compiling() or is_fake(q):
        return False
    B, H, T, _ = q.shape
    if T < LONG or k.shape[2] != T or B * H * T * T < LARGE:
        return False
    if q.dtype.itemsize != 2 or D not in WIDTHS or v.shape[3] != D or not runs_on(q.device):
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return all(map(is_read_by_tma, (q, k, v)))


def runs_on(device: torch.device) -> bool:
    """Whether kernels for Hopper run on a device."""
    return device.type == "cuda" and capability_of(device) == HOPPER and has_gluon()


def suits(given: Rendered, ask: Ask, mass: Tensor | None) -> bool:
    """Whether the kernels for Hopper can run a call, and are faster, if the device is one."""
    D = given.q.shape[3]
    if given.v.shape[3] != D or given.seed is not None or not (given.covered or given.joined):
        return False
    asked = any(ask) or mass is not None
    if D == 64 and given.slopes is not None and not asked:
        return False
    return suits_scores(given) and is_read_by_tma(given.v)


def suits_scores(given: Rendered) -> bool:
    """Whether kernels for Hopper accept the queries and keys of a call, and its rule."""
    q, k = given.q, given.k
    T, S = q.shape[2], k.shape[2]
    if q.dtype.itemsize != 2 or q.shape[3] not in WIDTHS or T < FEWEST:
        return False
    if any(x is not None for x in (given.words, given.band, given.dense)):
        return False
    if given.slopes is not None and max(T, S) >= FARTHEST:
        return False
    return is_read_by_tma(q) and is_read_by_tma(k)


def is_read_by_tma(x: Tensor) -> bool:
    """Whether TMA can read a tensor: contiguous rows that begin at multiples of 16 bytes."""
    even = all(step > 0 and step * x.element_size() % 16 == 0 for step in x.stride()[:3])
    return even and x.stride(3) == 1 and x.data_ptr() % 16 == 0


@functools.cache
def has_gluon() -> bool:
    """Whether the installed Triton has a Gluon that the kernels were compiled with."""
    from importlib import metadata

    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return False
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and VERSIONS[0] <= tuple(map(int, numbers.groups())) <= VERSIONS[1]
