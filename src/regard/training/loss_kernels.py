"""The Triton kernel of `loss.py`: logits to losses, and in place to the loss's gradient.

Each program reads a row twice: once for its logsumexp, once to write the gradient. The module needs
triton, and is imported only where the kernel runs.

Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 2048, 4
"""Logits of a row that are read at a time, and the number of warps: the best measured for a
vocabulary of 50,304 on an H200."""


@triton.jit
def _logits_to_gradient(
    logits, targets, losses, smoothing, V, WIDTH, stride,
    SMOOTH: tl.constexpr, LEARNS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row and overwrite the row's logits with the gradient."""
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * stride
    target = tl.load(targets + n)
    counts = target >= 0
    chosen = tl.load(row + tl.where(counts, target, 0)).to(tl.float32)
    highest = float("-inf")
    total = 0.0
    plain = 0.0
    for start in range(0, V, COLUMNS):
        v = start + tl.arange(0, COLUMNS)
        s = tl.load(row + v, mask=v < V, other=float("-inf"), eviction_policy="evict_last")
        s = s.to(tl.float32)
        higher = tl.maximum(highest, tl.max(s, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(s - higher), 0)
        highest = higher
        if SMOOTH:
            plain += tl.sum(tl.where(v < V, s, 0.0), 0)
    lse = highest + tl.log(total)
    loss = lse - (1.0 - smoothing) * chosen - smoothing * (plain / V)
    tl.store(losses + n, tl.where(counts, loss, 0.0))
    if LEARNS:
        # Other threads of this program may still be reading the target's logit.
        tl.debug_barrier()
        for start in range(0, WIDTH, COLUMNS):
            v = start + tl.arange(0, COLUMNS)
            s = tl.load(row + v, mask=v < V, other=float("-inf"), eviction_policy="evict_first")
            gradient = tl.exp(s.to(tl.float32) - lse) - smoothing / V
            gradient = tl.where(v == target, gradient - (1.0 - smoothing), gradient)
            gradient = tl.where((v < V) & counts, gradient, 0.0)
            tl.store(row + v, gradient.to(logits.dtype.element_ty), mask=v < WIDTH)


def run(
    logits_nv: Tensor, targets_n: Tensor, smoothing: float, n_real: int, learns: bool
) -> Tensor:
    n, width = logits_nv.shape
    losses_n = torch.empty(n, dtype=torch.float32, device=logits_nv.device)
    sizes, columns = (n_real, width, logits_nv.stride(0)), triton.next_power_of_2(width)
    how = {"SMOOTH": smoothing > 0.0, "LEARNS": learns, "COLUMNS": min(COLUMNS, columns)}
    _logits_to_gradient[(n,)](
        logits_nv, targets_n, losses_n, smoothing, *sizes, **how, num_warps=WARPS
    )
    return losses_n
