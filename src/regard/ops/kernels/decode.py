"""The decode kernel in Triton: few queries per sample against all keys, a step of generation.

Why: a step reads the KV cache once and does little else. Torch's fused kernels need the mask
rendered and the grouped heads repeated first, which is more reading than the cache itself.

How: a program takes one key head of one sample, all queries of all heads that share it, and a
stretch of keys, and keeps a running softmax and the statistics asked for; stretches are joined by a
second, small kernel, which a short cache does not need. Which keys are seen follows from a window
around each query's position, over keys at default or at given positions, from how many keys of each
sample are real, and from the documents of queries and keys. ALiBi follows from positions, too. Any
other mask or bias comes rendered in `added`, one number per pair.

Left out: gradients, dropout, more than 16 queries.

Letters: B batch, T queries, S keys, H query heads, G key heads, R query heads a key head, D head
width, E value width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.kernels import vmap
from regard.ops.kernels.launch import PLANS, Launch, layout_of
from regard.ops.kernels.rendered import aligned, is_aligned

MOST_QUERIES = 16
"""The most queries per sample."""
OPEN = 2**62
"""A side of a window that has no end."""
LSE, ENTROPY, PEAK, DISTANCE = 1, 2, 4, 8
"""What may be asked about the weights, as bits; the mass on given keys is asked by giving them."""
STATS = ("lse", "entropy", "peak", "distance", "mass")
"""The names of these statistics and of the mass."""
TERMS = ("query", "keys", "counts", "added", "slopes", "mass", "sinks", "query_ids", "key_ids")
"""The names of the operation's `terms`, in order."""
SUMS = 6
"""Numbers of scratch memory that a part of a row needs beside its output."""

ALONE = 2**17
"""Bytes of keys and values that one program reads in the time a second kernel takes to start."""
STRETCH = 64
"""The fewest keys that are worth a program of their own."""
PROGRAMS = 264
"""How many programs fill a large GPU twice."""
MANY = 4 * PROGRAMS
"""How many even out the times at which they end, where there are more than PROGRAMS anyway."""
SCRATCH = 160 * 1024
"""Bytes of keys and values that a program holds at once."""
TRIM = 1024
"""Stretches of this many keys are first cut to those whose positions are in the window."""
CHUNK = 64
"""The most parts that are loaded and joined at once."""


class KeyRule(NamedTuple):
    """Which keys a query sees and what is added to its scores, as the kernel reads it.

    query (B or 1, T), keys (B or 1, S): positions; None: the default ones. A query at i sees
    positions i - left to i + right; `placed`: these are the given positions of keys, where
    negative ones are empty slots. counts (B or 1,): how many keys are real, the first (side 1) or
    the last (2). query_ids (B or 1, T), key_ids (B or 1, S): a query sees only keys of its own
    document. slopes (H,): ALiBi's. added: everything else, broadcasts to (B, H, T, S), -inf where
    hidden.
    """

    query: Tensor | None = None
    keys: Tensor | None = None
    left: int = OPEN
    right: int = OPEN
    placed: bool = False
    counts: Tensor | None = None
    side: int = 0
    slopes: Tensor | None = None
    added: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None


class Answers(NamedTuple):
    """The output (B, H, T, E), the statistics named by `name_stats`, keys of peaks (B, H, T)."""

    output: Tensor
    stats: Tensor | None = None
    key: Tensor | None = None


class Tiles(NamedTuple):
    """How the work is cut: rows and keys of a tile, stages and warps of a program, parts of S."""

    rows: int
    keys: int
    stages: int
    warps: int
    parts: int


@functools.lru_cache(maxsize=128)
def tiles(n_heads: int, n_rows: int, n_keys: int, widths: tuple[int, int], item: int) -> Tiles:
    """The cut for n_heads = B · G key heads, each with n_rows rows and n_keys keys to read.

    widths: of a key and its value; item: bytes of a number.
    """
    width = pad_width(widths[0]) + (pad_width(widths[1]) if widths[1] else 0)
    rows = min(64 if item < 4 else 16, max(16, power_of_2(n_rows)))
    programs, each = n_heads * -(-n_rows // rows), width * item
    keys, stages, parts = 64, 3, 1
    if n_keys * each <= ALONE:
        # Nothing hides the latency of the first keys, so as many as fit are loaded at once.
        keys, stages = 128, 4
    else:
        wanted = PROGRAMS if programs < PROGRAMS else MANY
        parts = max(1, min(-(-n_keys // STRETCH), -(-wanted // programs)))
    while keys > 16 and stages * keys * each > SCRATCH:
        keys //= 2
    # A part consists of whole tiles, so that fewer parts may be enough.
    stretch = -(-n_keys // parts // keys) * keys
    parts = -(-n_keys // stretch)
    return Tiles(rows, keys, stages, 8 if rows * width > 64 * 256 else 4, parts)


def name_stats(asked: int, has_mass: bool) -> list[str]:
    """The statistics that are computed, in order; the largest logit comes with the peak."""
    bits = {"lse": LSE, "entropy": ENTROPY, "peak": PEAK, "logit": PEAK, "distance": DISTANCE}
    names = [name for name, bit in bits.items() if asked & bit]
    return [*names, "mass"] if has_mass else names


def pad_width(n: int) -> int:
    """The width of a tile for heads of width n."""
    return max(16, power_of_2(n))


def power_of_2(n: int) -> int:
    """The next power of two, as sizes of Triton's tiles must be."""
    return 1 << max(n - 1, 0).bit_length()


class Form(NamedTuple):
    """What a kernel is compiled for, beside sizes."""

    positioned: bool
    placed: bool
    seen: bool
    windowed: bool
    padded: int
    added: bool
    documents: bool
    alibi: bool
    capped: bool
    exact: bool
    sinks: bool
    trimmed: bool
    asked: int
    mass: bool

    def slots(self) -> dict[str, int]:
        """The index of each statistic in the result, from 1 on; 0 where it is not asked for."""
        names = name_stats(self.asked, self.mass)
        return {name.upper(): 1 + names.index(name) if name in names else 0 for name in STATS}


class Plan(NamedTuple):
    """How calls of one form run: in how many parts, and by which launches."""

    n_rows: int
    n_parts: int
    numbers: tuple[Any, ...]
    """The arguments of the first kernel beside tensors."""
    parts: Launch
    join: Launch
    kernels: Any
    """The module of the kernels."""


def make_plan(
    inputs: tuple[Tensor, Tensor, Tensor],
    terms: list[Tensor | None],
    ints: list[int],
    floats: list[float],
) -> Plan | None:
    """The plan for all calls with these layouts; None where inputs have to be copied first."""
    from regard.ops.kernels import decode_kernels

    if not all(map(is_aligned, inputs)):
        return None
    q, k, v = inputs
    query, keys, counts, added, slopes, mass, sinks, query_ids, key_ids = terms
    left, right, placed, side, asked = ints
    (B, H, T, D), (_, G, S, E) = q.shape, v.shape
    windowed = keys is None and (left < OPEN or right < OPEN)
    # At default positions keys are read no further than the window reaches.
    span = min(S, left + right + T) if windowed and (query is None or T == 1) else S
    cut = tiles(B * G, H // G * T, span, (D, E), q.dtype.itemsize)
    form = Form(
        query is not None, keys is not None, bool(placed), windowed, side, added is not None,
        key_ids is not None, slopes is not None, floats[1] > 0.0, q.dtype == torch.float32,
        sinks is not None, bool(placed) and span >= TRIM * cut.parts, asked, mass is not None,
    )  # fmt: skip
    n_rows = B * H * T
    strides = (
        *steps(q, 4), *steps(k, 4), *steps(v, 4), *steps(query, 2), *steps(keys, 2),
        *steps(counts, 1), *steps(added, 4), *steps(mass, 2), *steps(query_ids, 2),
        *steps(key_ids, 2),
    )  # fmt: skip
    return Plan(
        n_rows,
        cut.parts,
        (*strides, S, cut.parts, n_rows, left, right, *floats),
        Launch(
            B * G * cut.parts * -(-H // G * T // cut.rows), options(cut, form, (G, H // G, T, D, E))
        ),
        Launch(n_rows, join_options(cut.parts, form, (H, T, E))),
        decode_kernels,
    )


def options(cut: Tiles, form: Form, sizes: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """The options of the first kernel; sizes: G, R, T, D, E."""
    flags = {name.upper(): value for name, value in form._asdict().items() if name != "asked"}
    named = dict(zip("GRTDE", sizes, strict=True))
    widths = {"WIDTH": pad_width(sizes[3]), "VALUES": pad_width(sizes[4])}
    shape = {"ROWS": cut.rows, "KEYS": cut.keys, "JOINED": cut.parts > 1}
    launch = {"num_warps": cut.warps, "num_stages": cut.stages}
    return {**named, **widths, **shape, **flags, **form.slots(), **launch}


def join_options(n_parts: int, form: Form, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """The options of the second kernel; sizes: H, T, E."""
    most = power_of_2(n_parts)
    tile = {"PARTS": most, "CHUNK": min(most, CHUNK), "VALUES": pad_width(sizes[2])}
    named = dict(zip("HTE", sizes, strict=True))
    return {**named, **tile, "SINKS": form.sinks, **form.slots(), "num_warps": 4}


def steps(x: Tensor | None, n_axes: int) -> tuple[int, ...]:
    """Strides of the last n_axes axes, 0 along those that are shared or missing."""
    if x is None:
        return (0,) * n_axes
    own = [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    return (*(0,) * (n_axes - len(own)), *own)


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    rule: KeyRule,
    numbers: tuple[float, float | None],
    sinks_h: Tensor | None = None,
    asked: int = 0,
    mass: Tensor | None = None,
) -> Answers:
    """Attention of q (B, H, T, D) to k and v; numbers: the scale and the softcap.

    asked: the bits of the statistics wanted. mass: keys (B or 1, S) whose total weight is wanted.
    A v of width 0 gives no output.
    """
    terms, ints, floats = kernel_terms(rule, numbers, sinks_h, asked, mass)
    plain = type(inputs[0]) is Tensor and not torch.compiler.is_compiling()
    run: Any = _decode if plain else _decode_op
    found = run(*inputs, terms, ints, floats)
    return Answers(found[0].transpose(1, 2), *found[1:])


def kernel_terms(
    rule: KeyRule,
    numbers: tuple[float, float | None],
    sinks_h: Tensor | None,
    asked: int = 0,
    mass: Tensor | None = None,
) -> tuple[list[Tensor | None], list[int], list[float]]:
    """The arguments of the operation beside q, k and v: tensors as in `TERMS`, ints, floats."""
    # These are read without strides.
    slopes, sinks = (None if x is None else x.contiguous() for x in (rule.slopes, sinks_h))
    terms = [rule.query, rule.keys, rule.counts, rule.added, slopes, mass, sinks]
    ints = [rule.left, rule.right, int(rule.placed), rule.side, asked]
    return [*terms, rule.query_ids, rule.key_ids], ints, [numbers[0], numbers[1] or 0.0]


def find_plan(
    inputs: tuple[Tensor, Tensor, Tensor],
    terms: list[Tensor | None],
    ints: list[int],
    floats: list[float],
) -> Plan | None:
    """The plan for a call, made for the first with its layouts; None where copies are needed."""
    lying = [None if x is None else layout_of(x) for x in (*inputs, *terms)]
    # Each GPU has plans of its own: a step is launched again where its plan was compiled.
    form = ("decode", inputs[0].device, *lying, *ints, *floats)
    return PLANS.find(form, lambda: make_plan(inputs, terms, ints, floats))


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: list[Tensor | None],
    ints: list[int],
    floats: list[float],
) -> list[Tensor]:
    """The output (B, T, H, E), and the numbers (n, B, H, T) and keys (B, H, T) asked for."""
    query, keys, counts, added, slopes, mass, sinks, query_ids, key_ids = terms
    plan = find_plan((q, k, v), terms, ints, floats)
    if plan is None:
        found = _decode(aligned(q), aligned(k), aligned(v), terms, ints, floats)
        return [found[0][..., : v.shape[3]].contiguous(), *found[1:]]
    B, H, T, _ = q.shape
    E = v.shape[3]
    outputs = _allocate(q, (B, H, T, E), ints[4], mass is not None)
    scratch = q
    if plan.n_parts > 1:
        scratch = q.new_empty(plan.n_rows * plan.n_parts * (E + SUMS), dtype=torch.float32)
    # q stands in for tensors that the kernel will not read or write, which costs nothing.
    read = (query, keys, counts, added, slopes, mass, query_ids, key_ids, sinks)
    given = [q if x is None else x for x in read]
    written = (*outputs, q, q)[:3]
    kernels = plan.kernels
    plan.parts(kernels._parts, q, k, v, *given, scratch, *written, *plan.numbers)
    if plan.n_parts > 1:
        plan.join(kernels._join, scratch, given[-1], *written, plan.n_parts, plan.n_rows)
    return outputs


def _allocate(
    q: Tensor, sizes: tuple[int, int, int, int], asked: int, has_mass: bool
) -> list[Tensor]:
    """Allocate the output, and then statistics and keys where any are asked for."""
    B, H, T, E = sizes
    outputs = [torch.empty(B, T, H, E, dtype=q.dtype, device=q.device)]
    if asked or has_mass:
        n_stats = len(name_stats(asked, has_mass))
        outputs.append(torch.empty(n_stats, B, H, T, dtype=torch.float32, device=q.device))
    if asked & PEAK:
        outputs.append(torch.empty(B, H, T, dtype=torch.int64, device=q.device))
    return outputs


_decode_op = torch.library.custom_op(
    "regard::decode",
    _decode,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor?[] terms, int[] ints, float[] floats)"
    " -> Tensor[]",
)


@_decode_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, terms: list[Tensor | None], ints: list[int], floats: Any
) -> list[Tensor]:
    return _allocate(q, (*q.shape[:3], v.shape[3]), ints[4], terms[5] is not None)


@_decode_op.register_vmap
def _(
    info: Any,
    in_dims: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: list[Tensor | None],
    ints: list[int],
    floats: list[float],
) -> Any:
    n, samples = info.batch_size, vmap.count_samples(q, in_dims[0])
    inputs = (vmap.fold(x, axis, n, samples) for x, axis in zip((q, k, v), in_dims, strict=False))
    folded = [
        vmap.keep(x, axis, name) if name in vmap.SHARED else vmap.fold_rule(x, axis, n, samples)
        for name, x, axis in zip(TERMS, terms, in_dims[3], strict=True)
    ]
    found = _decode_op(*inputs, folded, ints, floats)
    axes = [0, 1, 0][: len(found)]
    return [vmap.split(x, axis, n) for x, axis in zip(found, axes, strict=True)], axes


def _refuse_gradient(ctx: Any, grads: list[Tensor | None]) -> None:
    raise RuntimeError(
        "our kernel for few queries has no gradient, and vmap in a compiled graph hid that one is "
        'needed; backend="reference" gives it'
    )


_decode_op.register_autograd(_refuse_gradient)
