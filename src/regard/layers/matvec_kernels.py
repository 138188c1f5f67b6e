"""The Triton side of `matvec.py`: this module needs triton, and is imported where it runs.

Letters: M outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

SHAPES = [
    triton.Config({"ROWS": rows, "COLUMNS": columns}, num_warps=warps)
    for rows, columns, warps in (
        (1, 512, 2),
        (1, 1024, 4),
        (1, 2048, 4),
        (2, 512, 4),
        (2, 1024, 4),
        (2, 2048, 8),
        (4, 512, 4),
        (4, 1024, 8),
        (8, 256, 4),
        (8, 512, 8),
        (16, 256, 8),
    )
]
"""Rows of the weight a program reads, and how much of them at a time."""


@triton.autotune(configs=SHAPES, key=["M", "K"])
@triton.jit
def _matvec(
    x, weight, bias, out, M, K, stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS outputs: each the sum of a row of the weight times x."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = m < M
    sums_mk = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        x_k = tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
        weight_mk = tl.load(
            weight + m[:, None] * stride + k[None, :],
            mask=inside[:, None] & (k < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        sums_mk += weight_mk * x_k[None, :]
    sum_m = tl.sum(sums_mk, 1)
    if BIAS:
        sum_m += tl.load(bias + m, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m, sum_m.to(out.dtype.element_ty), mask=inside)


def run(x_k: Tensor, weight_mk: Tensor, bias_m: Tensor | None, out_m: Tensor) -> None:
    """out = weight x + bias."""
    M, K = weight_mk.shape
    weight_mk = weight_mk if weight_mk.stride(1) == 1 else weight_mk.contiguous()
    launch: Any = _matvec[lambda chosen: (triton.cdiv(M, chosen["ROWS"]),)]
    bias = out_m if bias_m is None else bias_m
    launch(x_k, weight_mk, bias, out_m, M, K, weight_mk.stride(0), BIAS=bias_m is not None)
