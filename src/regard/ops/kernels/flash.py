"""Attention by our own kernels, for every mask and bias, with what is asked about rows beside it.

Why: torch's fused kernels take a mask or a bias only as a whole matrix, and tell nothing about the
weights. Ours read the rule as it is (`rendered.py`), skip the tiles that it empties, and count what
is asked about rows while the weights are at hand.

Letters: B batch, T queries, S keys, H query heads, E value width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from regard.ops.blockwise import Ask
from regard.ops.kernels import flash_hopper
from regard.ops.kernels.rendered import Rendered, aligned_rows

ROW_SUMS = ("maxima", "sums")
"""What is kept of rows for whoever makes their weights again."""


def forward(
    given: Rendered, ask: Ask, mass: Tensor | None, with_sums: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output (B, H, T, E), and by name what is asked about rows, (B, H, T).

    with_sums: with `ROW_SUMS`, and in one piece of memory if that can be.
    """
    from regard.ops.kernels import flash_kernels

    E, given = given.v.shape[3], aligned_rows(given)
    q, shape = given.q, given.q.shape[:3]
    names = ["lse", *(name for name in ask._fields if getattr(ask, name))]
    names += ROW_SUMS if with_sums else ()
    names += ["mass"] if mass is not None else []
    names += ["logit"] if ask.peak else []
    empty = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    # What an operation gives may not share memory; and each begins where kernels are fastest.
    together = with_sums and shape.numel() % 4 == 0
    rows = empty((len(names), *shape)).unbind() if together else [empty(shape) for _ in names]
    found = dict(zip(names, rows, strict=True))
    if ask.peak:
        found["key"] = torch.empty(shape, dtype=torch.int64, device=q.device)
    out = torch.empty((*shape, given.v.shape[3]), dtype=q.dtype, device=q.device)
    keys = None if mass is None else mass.contiguous()
    run = flash_kernels.run_forward
    if flash_hopper.takes(given, ask, keys):
        from regard.ops.kernels import flash_hopper_kernels

        run = flash_hopper_kernels.run_forward
    run(given, out, flash_kernels.Answers(**found), keys)
    return out[..., :E].contiguous(), found
