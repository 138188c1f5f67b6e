"""The Triton side of `decode.py`: this module needs triton, and is imported where it runs.

Strides are passed for every tensor, so views of any layout do, and offsets are 64-bit, so caches of
any size do. Scores and sums are float32.

Letters: B batch, S keys, H query heads, G key heads, R query heads a key head, D and E widths,
P parts of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SCRATCH = 160 * 1024
"""Bytes of keys and values that a program holds at once."""


@triton.jit
def _part(
    q, k, v, at, keys, added, part, sums,
    q_b, q_h, q_d, k_b, k_g, k_s, k_d, v_b, v_g, v_s, v_e,
    at_b, keys_b, keys_s, added_b, added_h, added_s,
    S, D, E, n_parts, stretch, left, right, scale, softcap,
    R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr,
    SEEN: tl.constexpr, ADDED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The running softmax of one stretch of keys, for the query heads of one key head."""
    b = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    p = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, ROWS)
    h = g * R + r
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, VALUES)
    real = r < R
    q_rd = tl.load(
        q + b * q_b + h[:, None] * q_h + d[None, :] * q_d,
        mask=real[:, None] & (d < D)[None, :],
        other=0.0,
    )
    place = tl.load(at + b * at_b)
    peak_r = tl.full((ROWS,), float("-inf"), tl.float32)
    sum_r = tl.zeros((ROWS,), tl.float32)
    out_re = tl.zeros((ROWS, VALUES), tl.float32)
    for start in range(p * stretch, tl.minimum((p + 1) * stretch, S), KEYS):
        s = start + tl.arange(0, KEYS).to(tl.int64)
        inside = (s < S) & (s < (p + 1) * stretch)
        k_sd = tl.load(
            k + b * k_b + g * k_g + s[:, None] * k_s + d[None, :] * k_d,
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if EXACT:
            scores_rs = tl.dot(q_rd, tl.trans(k_sd), input_precision="ieee") * scale
        else:
            scores_rs = tl.dot(q_rd, tl.trans(k_sd)) * scale
        # An infinity in q or k must not pass for a weight of 0, or hide behind the cap.
        scores_rs = tl.where(tl.abs(scores_rs) == float("inf"), float("nan"), scores_rs)
        if CAPPED:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows nor cancels badly here.
            scores_rs = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores_rs / softcap) + 1.0))
        allowed = inside
        if SEEN:
            stands = tl.load(keys + b * keys_b + s * keys_s, mask=inside, other=-1)
            allowed = (stands >= 0) & (place - stands <= left) & (stands - place <= right)
        allowed_rs = allowed[None, :] & real[:, None]
        if ADDED:
            added_rs = tl.load(
                added + b * added_b + h[:, None] * added_h + s[None, :] * added_s,
                mask=allowed_rs,
                other=float("-inf"),
            ).to(tl.float32)
            allowed_rs = allowed_rs & (added_rs > float("-inf"))
            allowed = tl.max(allowed_rs.to(tl.int32), 0) > 0
            scores_rs += added_rs
        scores_rs = tl.where(allowed_rs, scores_rs, float("-inf"))
        v_se = tl.load(
            v + b * v_b + g * v_g + s[:, None] * v_s + e[None, :] * v_e,
            mask=allowed[:, None] & (e < E)[None, :],
            other=0.0,
        )
        highest_r = tl.maximum(peak_r, tl.max(scores_rs, 1))
        # A row that has seen nothing yet keeps a finite peak, so that no -inf meets a -inf.
        base_r = tl.where(highest_r == float("-inf"), 0.0, highest_r)
        weights_rs = tl.exp(scores_rs - base_r[:, None])
        fade_r = tl.exp(peak_r - base_r)
        sum_r = sum_r * fade_r + tl.sum(weights_rs, 1)
        out_re *= fade_r[:, None]
        if EXACT:
            out_re += tl.dot(weights_rs.to(v_se.dtype), v_se, input_precision="ieee")
        else:
            out_re += tl.dot(weights_rs.to(v_se.dtype), v_se)
        peak_r = highest_r
    row = (b * tl.num_programs(1) * R + h) * n_parts + p
    tl.store(part + row[:, None] * E + e[None, :], out_re, mask=real[:, None] & (e < E)[None, :])
    tl.store(sums + row * 2, peak_r, mask=real)
    tl.store(sums + row * 2 + 1, sum_r, mask=real)


@triton.jit
def _join(
    part, sums, sinks, out, H, E, n_parts,
    PARTS: tl.constexpr, VALUES: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """All stretches of one query head, and its sink, put together."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    e = tl.arange(0, VALUES)
    there = p < n_parts
    peak_p = tl.load(sums + (row * n_parts + p) * 2, mask=there, other=float("-inf"))
    sum_p = tl.load(sums + (row * n_parts + p) * 2 + 1, mask=there, other=0.0)
    peak = tl.max(peak_p, 0)
    if SINKS:
        sink = tl.load(sinks + row % H).to(tl.float32)
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    fade_p = tl.exp(peak_p - base)
    total = tl.sum(sum_p * fade_p, 0)
    if SINKS:
        total += tl.exp(sink - base)
    part_pe = tl.load(
        part + (row * n_parts + p)[:, None] * E + e[None, :],
        mask=there[:, None] & (e < E)[None, :],
        other=0.0,
    )
    out_e = tl.sum(part_pe * fade_p[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * E + e, out_e.to(out.dtype.element_ty), mask=e < E)


def run_parts(
    tensors: tuple[Tensor, ...],
    window: tuple[int, int, int],
    numbers: tuple[float, float],
    has: tuple[bool, bool],
) -> None:
    """Every stretch of every row and key head, each by a program."""
    q, k, v, at, keys, added, part, sums = tensors
    left, right, stretch = window
    scale, softcap = numbers
    B, H, D = q.shape
    G, S, E = k.shape[1], k.shape[2], v.shape[3]
    n_parts, width = part.shape[2], max(16, triton.next_power_of_2(max(D, E)))
    # Values that are loaded by a mask wait for it: then large tiles are better than many.
    n_keys, stages = (128, 2) if has[0] or has[1] else (64, 3)
    while n_keys > 16 and 2 * stages * n_keys * width * q.element_size() > SCRATCH:
        n_keys //= 2
    launch: Any = _part[(B, G, n_parts)]
    launch(
        q, k, v, at, keys, added, part, sums,
        *q.stride(), *k.stride(), *v.stride(),
        at.stride(0), *keys.stride(), *added.stride(),
        S, D, E, n_parts, stretch, left, right, scale, softcap,
        R=H // G, ROWS=max(16, triton.next_power_of_2(H // G)), KEYS=n_keys,
        WIDTH=max(16, triton.next_power_of_2(D)), VALUES=max(16, triton.next_power_of_2(E)),
        SEEN=has[0], ADDED=has[1], CAPPED=softcap > 0.0, EXACT=q.dtype == torch.float32,
        num_warps=4, num_stages=stages,
    )  # fmt: skip


def join_parts(part: Tensor, sums: Tensor, sinks: Tensor | None, out: Tensor) -> None:
    """The output (B, H, E) of all rows, from their stretches."""
    B, H, n_parts, E = part.shape
    launch: Any = _join[(B * H,)]
    launch(
        part, sums, sums if sinks is None else sinks, out, H, E, n_parts,
        PARTS=triton.next_power_of_2(n_parts), VALUES=max(16, triton.next_power_of_2(E)),
        SINKS=sinks is not None, num_warps=1,
    )  # fmt: skip
