"""The Triton kernel behind `matvec.py`; it needs triton, so it is imported where it is used.

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
        (1, 256, 1),
        (1, 512, 4),
        (1, 1024, 4),
        (1, 1024, 8),
        (2, 1024, 1),
        (2, 1024, 4),
    )
]
"""How many rows of the weight a program reads, and how many columns at a time: the fastest in
measurements at widths of 768 to 8192 on an H200."""


@triton.jit
def _sum_rows(
    x, weight, bias, m, M, K, stride,
    BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """weight[m] x + bias[m], float32."""
    sums_mk = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        at = weight + m[:, None] * stride + k[None, :]
        # Eviction policies: weights are read once, x is read by every program.
        if EVEN:
            x_k = tl.load(x + k, eviction_policy="evict_last")
            weight_mk = tl.load(at, eviction_policy="evict_first")
        else:
            inside = (m < M)[:, None] & (k < K)[None, :]
            x_k = tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last")
            weight_mk = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
        sums_mk += weight_mk.to(tl.float32) * x_k.to(tl.float32)[None, :]
    sum_m = tl.sum(sums_mk, 1)
    if BIAS:
        sum_m += tl.load(bias + m, mask=m < M, other=0.0).to(tl.float32)
    return sum_m


EVENNESS = {"EVEN": lambda args: args["M"] % args["ROWS"] == 0 and args["K"] % args["COLUMNS"] == 0}


@triton.autotune(configs=SHAPES, key=["M", "K", "GATED"])
@triton.heuristics(EVENNESS)
@triton.jit
def _matvec(
    x, weight, bias, out, M, K, stride, BIAS: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs, each the dot product of a row of the weight with x. GATED: silu(gate) ·
    up, where the first M rows of the weight are the gates, the next M the ups."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sum_m = _sum_rows(x, weight, bias, m, M, K, stride, BIAS, EVEN, ROWS, COLUMNS)
    if GATED:
        # Rounded to the output type where two separate layers would have stored their outputs.
        dtype = out.dtype.element_ty
        gate_m, ups = sum_m.to(dtype).to(tl.float32), weight + M.to(tl.int64) * stride
        up_m = _sum_rows(x, ups, bias + M, m, M, K, stride, BIAS, EVEN, ROWS, COLUMNS)
        silu_m = (gate_m / (1.0 + tl.exp(-gate_m))).to(dtype).to(tl.float32)
        sum_m = silu_m * up_m.to(dtype).to(tl.float32)
    tl.store(out + m, sum_m.to(out.dtype.element_ty), mask=m < M)


def run(x_k: Tensor, weight_mk: Tensor, bias_m: Tensor | None, out_m: Tensor) -> None:
    """out = weight x + bias; if weight has twice as many rows as out: silu(first half) · second."""
    M, K = out_m.shape[0], weight_mk.shape[1]
    weight_mk = weight_mk if weight_mk.stride(1) == 1 else weight_mk.contiguous()
    launch: Any = _matvec[lambda chosen: (triton.cdiv(M, chosen["ROWS"]),)]
    bias, given = (out_m, False) if bias_m is None else (bias_m, True)
    gated = weight_mk.shape[0] != M
    launch(x_k, weight_mk, bias, out_m, M, K, weight_mk.stride(0), BIAS=given, GATED=gated)
