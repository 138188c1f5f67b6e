"""One query a row against all kept keys: the step of generation, as a Triton kernel.

Why: a step reads the cache once and does little else. Torch's fused kernels want the mask rendered
and the grouped heads repeated first, which is more reading than the cache itself.

How: a program takes one key head of one row, all query heads that share it, and a stretch of keys,
and keeps a running softmax; stretches are joined by a second, small kernel. Which keys are seen
follows from positions, as a cache has them: key j is seen from position i when j >= 0 and
i - left <= j <= i + right. Any other mask or bias comes rendered in `added`, one number a key.

Left out: gradients, dropout, several queries.

Letters: B batch, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

OPEN = 2**62
"""A side of a window that has no end."""
STRETCH = 64
"""The fewest keys that are worth a program of their own."""
PROGRAMS = 264
"""How many programs fill a large GPU twice."""
MANY = 4 * PROGRAMS
"""How many level out their ends, where there are more than that anyway."""


class KeyWindow(NamedTuple):
    """Which keys a query sees: its position (B or 1,), the keys' (B or 1, S), and the window."""

    query: Tensor
    keys: Tensor
    left: int
    right: int


def attend(
    q_bhd: Tensor,
    k_bgsd: Tensor,
    v_bgse: Tensor,
    window: KeyWindow | None,
    added: Tensor | None,
    numbers: tuple[float, float | None],
    sinks_h: Tensor | None,
) -> Tensor:
    """(B, H, E). `added` broadcasts to (B, H, S); `numbers` are the scale and the softcap."""
    left, right = (OPEN, OPEN) if window is None else (window.left, window.right)
    query, keys = (None, None) if window is None else (window.query, window.keys)
    scale, softcap = numbers
    output: Tensor = _decode_op(
        q_bhd, k_bgsd, v_bgse, query, keys, added, sinks_h, left, right, scale, softcap or 0.0
    )
    return output


def _decode(
    q_bhd: Tensor,
    k_bgsd: Tensor,
    v_bgse: Tensor,
    query: Tensor | None,
    keys: Tensor | None,
    added: Tensor | None,
    sinks_h: Tensor | None,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> Tensor:
    from regard.ops.kernels import decode_kernels

    (B, H), (G, S), E = q_bhd.shape[:2], k_bgsd.shape[1:3], v_bgse.shape[3]
    seen = keys is not None and query is not None
    # What the kernel will not read is stood for by q, which costs nothing.
    nothing = q_bhd[:1, :1, 0]
    at_b = (nothing if query is None else query).reshape(-1, 1)[:, 0].expand(B)
    at_bs = (nothing if keys is None else keys).expand(B, S)
    extra_bhs = (nothing if added is None else added).expand(B, H, S)
    wanted = PROGRAMS if B * G < PROGRAMS else MANY
    n_parts = max(1, min(-(-S // STRETCH), -(-wanted // (B * G))))
    stretch = -(-S // n_parts)
    part_bhpe = q_bhd.new_empty(B, H, n_parts, E, dtype=torch.float32)
    sums_bhp2 = q_bhd.new_empty(B, H, n_parts, 2, dtype=torch.float32)
    decode_kernels.run_parts(
        (q_bhd, k_bgsd, v_bgse, at_b, at_bs, extra_bhs, part_bhpe, sums_bhp2),
        (left, right, stretch),
        (scale, softcap),
        (seen, added is not None),
    )
    out_bhe = torch.empty_like(
        q_bhd[..., :1].expand(B, H, E), memory_format=torch.contiguous_format
    )
    decode_kernels.join_parts(part_bhpe, sums_bhp2, sinks_h, out_bhe)
    return out_bhe


_decode_op = torch.library.custom_op(
    "regard::decode",
    _decode,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? query, Tensor? keys, Tensor? added, "
    "Tensor? sinks, int left, int right, float scale, float softcap) -> Tensor",
)


@_decode_op.register_fake
def _(q_bhd: Tensor, k_bgsd: Tensor, v_bgse: Tensor, *args: Any) -> Tensor:
    return q_bhd.new_empty(*q_bhd.shape[:2], v_bgse.shape[3])
