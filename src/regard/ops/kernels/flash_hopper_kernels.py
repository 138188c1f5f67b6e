"""The forward of `flash.py` for Hopper GPUs, in Gluon: loads, products and softmax overlap.

Tiles of keys and values are loaded by TMA, and the scores of the next tile are issued before the
weights of the last one are multiplied with their values: so the tensor cores have work while the
softmax runs. What it computes, and how, is as in `flash_kernels.py`, which remains the reference
and runs what `flash_hopper.py` leaves to it.
This module needs triton, and is imported where it runs.

Heads of 64 (`_alone`): one warpgroup takes 64 rows; three such programs share a multiprocessor.

Heads of 128 (`_shared`): programs of 64 rows would read more shared memory than there is time for.
So two warpgroups of 64 rows, the consumers, share the tiles that a single warp loads. Barriers
synchronise them; for tile m, slot = m % STAGES, use = m // STAGES:
- k_full, v_full: the bytes are there; both consumers wait for the parity of `use`.
- k_empty, v_empty: both consumers have read them; the loader waits for the parity of use - 1, which
  a fresh barrier has.
- turn: consumer 0 issues products m after consumer 1 has issued its m - 1, and consumer 1 issues m
  after consumer 0 has issued its m: so one multiplies while the other computes its softmax.
Why there is no deadlock: the loader's order is K0, K1, V0, K2, V1, ..; the load of tile m waits for
the release of tile m - STAGES, for which only loads before it are needed. A barrier cannot complete
twice before all that wait for it have seen the first time, as each of them is needed for the
second. Both consumers walk the tiles of all rows, even one whose own rows are beyond the last.

Letters: B batch, T queries, S keys, H query heads, R query heads a key head, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from regard.ops.kernels.arguments import BITS, rule_of, share, view
from regard.ops.kernels.flash_kernels import UNASKED, Answers, Forward, KeySet, with_crests
from regard.ops.kernels.hopper_tile_kernels import (
    KEYS,
    ROWS,
    STAGES,
    clear_unseen,
    first_key,
    load_tile,
    open_rows,
    scale_rows,
    sync_threads,
    walk,
    weigh,
    write_rows,
)
from regard.ops.kernels.launch import Launch
from regard.ops.kernels.rendered import Rendered

CONSUMER_REGISTERS, LOADER_REGISTERS = 232, 40
"""Registers per thread; two warpgroups and the loader's use 504 per lane, of 65,536 in all."""
LEAST_FACTOR = 1e-30
"""Scores can be multiplied last, after their maximum, by a factor above this."""
ALONE_REGISTERS = 168
"""Registers per thread where three programs of one warpgroup share a multiprocessor."""
ASKED_REGISTERS: int | None = ALONE_REGISTERS
"""Registers per thread where row statistics are asked for; the compiler would use more."""


@gluon.jit(do_not_specialize=["H", "T", "S"])
def _alone(
    q, k, v, out, rule, sinks, chosen, answers, H, T, S,
    R: gl.constexpr, WIDTH: gl.constexpr, COVERED: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """64 rows of one head, by one warpgroup that loads for itself."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    BYTES: gl.constexpr = KEYS * WIDTH * 2
    dtype: gl.constexpr = q.dtype
    n_bands = gl.cdiv(T, ROWS)
    # Under a causal mask the last rows are the longest, and begin first.
    start = (n_bands - 1 - gl.program_id(0) % n_bands) * ROWS
    head = gl.program_id(0) // n_bands
    b, h = head // H, head % H
    q_buffer = gl.allocate_shared_memory(dtype, [1, 1, ROWS, WIDTH], q.layout)
    k_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, WIDTH], k.layout)
    v_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, WIDTH], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    row, state = open_rows(rule, b, h, start, T, S, PLAIN, S_LAYOUT)
    n_tiles, run, low, past = walk(rule, b, start, T, S, ROWS, 4)
    n_full = run[0]
    load_tile(q, start, b, h, q_full, q_buffer, ROWS * WIDTH * 2)
    for i in gl.static_range(STAGES):
        if i < n_tiles:
            load_tile(k, first_key(i, run), b, h // R, k_full.index(i), k_buffer.index(i), BYTES)
            load_tile(v, first_key(i, run), b, h // R, v_full.index(i), v_buffer.index(i), BYTES)
    out_te = gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=O_LAYOUT)
    zero_ts = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=S_LAYOUT)
    mbarrier.wait(q_full, 0)
    q_td = q_buffer.reshape([ROWS, WIDTH])
    if n_tiles > 0:
        mbarrier.wait(k_full.index(0), 0)
        k_ds = k_buffer.index(0).reshape([KEYS, WIDTH]).permute((1, 0))
        x_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False)
        w_ts, fade_t, state = weigh(
            x_ts, state, 0, first_key(0, run), n_full == 0, rule, chosen, answers, row,
            (T, S), PLAIN, S_LAYOUT,
        )  # fmt: skip
        p_ts = gl.convert_layout(w_ts.to(dtype), P_LAYOUT)
        sync_threads()
        if n_tiles > STAGES:
            load_tile(
                k, first_key(STAGES, run), b, h // R, k_full.index(0), k_buffer.index(0), BYTES
            )
        for n in range(1, n_tiles):
            slot = n % STAGES
            old = (n - 1) % STAGES
            mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
            k_ds = k_buffer.index(slot).reshape([KEYS, WIDTH]).permute((1, 0))
            next_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(old), ((n - 1) // STAGES) & 1)
            if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
                if n - 1 >= n_full:
                    clear_unseen(v_buffer.index(old), first_key(n - 1, run), low, past, WIDTH)
            v_se = v_buffer.index(old).reshape([KEYS, WIDTH])
            next_te = warpgroup_mma(p_ts, v_se, out_te, is_async=True)
            x_ts = warpgroup_mma_wait(1, deps=[next_ts])
            w_ts, fade_t, state = weigh(
                x_ts, state, n, first_key(n, run), n >= n_full, rule, chosen, answers, row,
                (T, S), PLAIN, S_LAYOUT,
            )  # fmt: skip
            out_te, p_ts = warpgroup_mma_wait(0, deps=[next_te, p_ts])
            p_ts = gl.convert_layout(w_ts.to(dtype), P_LAYOUT)
            sync_threads()
            if n + STAGES < n_tiles:
                at = first_key(n + STAGES, run)
                load_tile(k, at, b, h // R, k_full.index(slot), k_buffer.index(slot), BYTES)
            if n - 1 + STAGES < n_tiles:
                at = first_key(n - 1 + STAGES, run)
                load_tile(v, at, b, h // R, v_full.index(old), v_buffer.index(old), BYTES)
            out_te = scale_rows(out_te, fade_t, O_LAYOUT)
        old = (n_tiles - 1) % STAGES
        mbarrier.wait(v_full.index(old), ((n_tiles - 1) // STAGES) & 1)
        if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
            if n_tiles - 1 >= n_full:
                clear_unseen(v_buffer.index(old), first_key(n_tiles - 1, run), low, past, WIDTH)
        out_te = warpgroup_mma(p_ts, v_buffer.index(old).reshape([KEYS, WIDTH]), out_te)
    write_rows(
        out_te, state, out, sinks, answers, (head, b, h), start, T,
        WIDTH, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip


@gluon.jit
def _own(H, T):
    """The first of this program's 128 rows, its index over all heads, its sample, its head."""
    n_bands = gl.cdiv(T, 2 * ROWS)
    band = n_bands - 1 - gl.program_id(0) % n_bands
    head = gl.program_id(0) // n_bands
    return band * 2 * ROWS, head, head // H, head % H


@gluon.jit
def _produce(inputs, buffers, barriers, rule, sizes, R: gl.constexpr, WIDTH: gl.constexpr):
    """Load for both consumers, in the order in which they need it."""
    q, k, v = inputs
    q_buffer, k_buffer, v_buffer = buffers
    q_full, k_full, k_empty, v_full, v_empty, _turn = barriers
    H, T, S = sizes
    BYTES: gl.constexpr = KEYS * WIDTH * 2
    start, _head, b, h = _own(H, T)
    n_tiles, run, _low, _past = walk(rule, b, start, T, S, 2 * ROWS, 1)
    for c in gl.static_range(2):
        at = start + c * ROWS
        load_tile(q, at, b, h, q_full.index(c), q_buffer.index(c), ROWS * WIDTH * 2)
    for n in range(0, n_tiles + 1):
        if n < n_tiles:
            slot = n % STAGES
            mbarrier.wait(k_empty.index(slot), ((n // STAGES) & 1) ^ 1)
            load_tile(
                k, first_key(n, run), b, h // R, k_full.index(slot), k_buffer.index(slot), BYTES
            )
        if n > 0:
            m = n - 1
            slot = m % STAGES
            mbarrier.wait(v_empty.index(slot), ((m // STAGES) & 1) ^ 1)
            load_tile(
                v, first_key(m, run), b, h // R, v_full.index(slot), v_buffer.index(slot), BYTES
            )


@gluon.jit
def _release(barrier):
    """Arrive once for the warpgroup, when all its warps have got here."""
    sync_threads()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _consume(
    C: gl.constexpr, buffers, barriers, out, rule, sinks, chosen, answers, sizes,
    WIDTH: gl.constexpr, COVERED: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """The 64 rows of consumer C."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    q_buffer, k_buffer, v_buffer = buffers
    q_full, k_full, k_empty, v_full, v_empty, turn = barriers
    H, T, S = sizes
    dtype: gl.constexpr = q_buffer.dtype
    start, head, b, h = _own(H, T)
    n_tiles, run, low, past = walk(rule, b, start, T, S, 2 * ROWS, 4)
    n_full = run[0]
    row, state = open_rows(rule, b, h, start + C * ROWS, T, S, PLAIN, S_LAYOUT)
    q_td = q_buffer.index(C).reshape([ROWS, WIDTH])
    out_te = gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=O_LAYOUT)
    zero_ts = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=S_LAYOUT)
    mbarrier.wait(q_full.index(C), 0)
    if n_tiles > 0:
        mbarrier.wait(k_full.index(0), 0)
        mbarrier.wait(turn.index(C), 1 - C)
        k_ds = k_buffer.index(0).reshape([KEYS, WIDTH]).permute((1, 0))
        next_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False, is_async=True)
        mbarrier.arrive(turn.index(1 - C), count=1)
        x_ts = warpgroup_mma_wait(0, deps=[next_ts])
        _release(k_empty.index(0))
        w_ts, fade_t, state = weigh(
            x_ts, state, 0, first_key(0, run), n_full == 0, rule, chosen, answers, row,
            (T, S), PLAIN, S_LAYOUT,
        )  # fmt: skip
        p_ts = gl.convert_layout(w_ts.to(dtype), P_LAYOUT)
        for n in range(1, n_tiles):
            slot = n % STAGES
            old = (n - 1) % STAGES
            old_use = ((n - 1) // STAGES) & 1
            if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
                if n - 1 >= n_full:
                    # Before any product, as it needs registers.
                    mbarrier.wait(v_full.index(old), old_use)
                    clear_unseen(v_buffer.index(old), first_key(n - 1, run), low, past, WIDTH)
            mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
            mbarrier.wait(turn.index(C), (n & 1) ^ (1 - C))
            k_ds = k_buffer.index(slot).reshape([KEYS, WIDTH]).permute((1, 0))
            next_ts = warpgroup_mma(q_td, k_ds, zero_ts, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(old), old_use)
            v_se = v_buffer.index(old).reshape([KEYS, WIDTH])
            next_te = warpgroup_mma(p_ts, v_se, out_te, is_async=True)
            mbarrier.arrive(turn.index(1 - C), count=1)
            x_ts = warpgroup_mma_wait(1, deps=[next_ts])
            _release(k_empty.index(slot))
            w_ts, fade_t, state = weigh(
                x_ts, state, n, first_key(n, run), n >= n_full, rule, chosen, answers, row,
                (T, S), PLAIN, S_LAYOUT,
            )  # fmt: skip
            # Already true; the branch keeps the assembler from moving the wait before the softmax.
            mbarrier.wait(q_full.index(C), 0)
            out_te, p_ts = warpgroup_mma_wait(0, deps=[next_te, p_ts])
            _release(v_empty.index(old))
            p_ts = gl.convert_layout(w_ts.to(dtype), P_LAYOUT)
            out_te = scale_rows(out_te, fade_t, O_LAYOUT)
        old = (n_tiles - 1) % STAGES
        mbarrier.wait(v_full.index(old), ((n_tiles - 1) // STAGES) & 1)
        if not COVERED:  # noqa: SIM102 - this is decided when the kernel is compiled
            if n_tiles - 1 >= n_full:
                clear_unseen(v_buffer.index(old), first_key(n_tiles - 1, run), low, past, WIDTH)
        out_te = warpgroup_mma(p_ts, v_buffer.index(old).reshape([KEYS, WIDTH]), out_te)
        _release(v_empty.index(old))
    write_rows(
        out_te, state, out, sinks, answers, (head, b, h), start + C * ROWS, T,
        WIDTH, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["H", "T", "S"])
def _shared(
    q, k, v, out, rule, sinks, chosen, answers, H, T, S,
    R: gl.constexpr, WIDTH: gl.constexpr, COVERED: gl.constexpr, PLAIN: gl.constexpr,
    CONSUMER: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """128 rows of one head, by two warpgroups and a warp that loads for both."""
    q_buffer = gl.allocate_shared_memory(q.dtype, [2, 1, 1, ROWS, WIDTH], q.layout)
    k_buffer = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, KEYS, WIDTH], k.layout)
    v_buffer = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, KEYS, WIDTH], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    sync_threads()
    buffers = (q_buffer, k_buffer, v_buffer)
    barriers = (q_full, k_full, k_empty, v_full, v_empty, turn)
    sizes = (H, T, S)
    gl.warp_specialize(
        [
            (_consume, (
                0, buffers, barriers, out, rule, sinks, chosen, answers, sizes,
                WIDTH, COVERED, PLAIN,
            )),
            (_consume, (
                1, buffers, barriers, out, rule, sinks, chosen, answers, sizes,
                WIDTH, COVERED, PLAIN,
            )),
            (_produce, ((q, k, v), buffers, barriers, rule, sizes, R, WIDTH)),
        ],
        [4, 1],
        [CONSUMER, LOADER],
    )  # fmt: skip


def is_plain(given: Rendered) -> bool:
    """Whether scores are products times a factor, and nothing else."""
    return given.factor * BITS > LEAST_FACTOR and given.cap is None and given.slopes is None


def plan_forward(given: Rendered, asked: bool) -> Forward:
    """How calls of this form run."""
    (B, H, T, D), S, G = given.q.shape, given.k.shape[2], given.k.shape[1]
    plain = is_plain(given)
    options: dict[str, Any] = {"R": H // G, "WIDTH": D, "COVERED": given.covered, "PLAIN": plain}
    options |= {"num_warps": 4, "enable_fp_fusion": True}
    kernel, rows = _alone, ROWS.value
    if D > 64:
        kernel, rows = _shared, 2 * ROWS.value
        options |= {"CONSUMER": CONSUMER_REGISTERS, "LOADER": LOADER_REGISTERS}
    elif given.query_ids is not None:
        # Fewer registers: what ids are compared with is kept in memory, as comparing them is rare.
        options["maxnreg"] = ALONE_REGISTERS
    n_programs = B * H * triton.cdiv(T, rows)
    launch = loose = Launch(n_programs, options)
    if D <= 64 and asked and given.slopes is None:
        # Whatever is asked fits, but for mass.
        launch = Launch(n_programs, options | {"maxnreg": ASKED_REGISTERS})

    def run(given: Rendered, out: Tensor, answers: Answers, mass: Tensor | None) -> None:
        chosen = None if mass is None else KeySet(mass, share(mass, 0))
        answers = with_crests(answers, S, KEYS.value)
        (launch if mass is None else loose)(
            kernel, describe(given.q, ROWS.value), describe(given.k, KEYS.value),
            describe(given.v, KEYS.value), view(out), rule_of(given), given.sinks, chosen, answers,
            H, T, S,
        )  # fmt: skip

    alike = [describe_alike(x, n.value) for x, n in zip(given[:3], (ROWS, KEYS, KEYS), strict=True)]

    def arguments(
        inputs: tuple[Tensor, ...], out: Any, rule: Any, sinks: int | None, lse: int
    ) -> tuple[Any, ...]:
        read = [describe(x) for describe, x in zip(alike, inputs, strict=True)]
        return (*read, out, rule, sinks, None, (lse, *UNASKED), H, T, S)

    return Forward(run, launch, arguments)


@final
class Described(TensorDescriptor):  # type: ignore[misc]
    """A tensor descriptor for TMA, without Triton's checks: `is_read_by_tma` has made them."""

    def __post_init__(self) -> None:
        pass


def describe(x: Tensor, rows: int) -> Described:
    """A descriptor by which TMA reads `rows` rows of a head (B, H, T, D); 0 beyond the last."""
    size, width = x.shape, x.shape[3]
    return Described(x, size, x.stride(), [1, 1, rows, width], _layout_of(rows, width, x.dtype))


def describe_alike(like: Tensor, rows: int) -> Callable[[Tensor], Described]:
    """What describes tensors of the same layout, as `describe` does."""
    fixed = {**vars(describe(like, rows)), "base": None}

    def describe_again(x: Tensor) -> Described:
        found = object.__new__(Described)
        found.__dict__.update(fixed)
        found.base = x
        return found

    return describe_again


@functools.cache
def _layout_of(rows: int, width: int, dtype: torch.dtype) -> Any:
    """The layout of these rows in shared memory."""
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], kind)
