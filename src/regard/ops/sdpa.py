"""The backend "sdpa": torch's fused kernels.

On the CPU the matrix is cut to what the mask leaves (`flash_cpu.py`). On other devices, and while a
graph is being traced, one kernel call is made: with the kernel's own flags where these mean exactly
the mask, else with the rendered mask. Kernels differ in what they return for a row that sees
nothing, and all of them let hidden NaNs and infinities through: such rows are given something to
see and zeros afterwards, and such keys and values are cleared. NaNs and infinities that are seen
pass through the kernels of a GPU.

Torch's kernels assume a scale above 0, contiguous rows that begin at multiples of 16 bytes, and a
gradient with the strides of the output; the code below makes sure of that.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from regard._check import is_empty, is_one, readable
from regard._torch import is_fake, is_plainly_eager, sdp_choice, sdp_order, set_sdp_order
from regard.ops.bias import Bias
from regard.ops.call import Call, Rule, plain_sizes
from regard.ops.flash_cpu import attend_on_cpu, in_rows
from regard.ops.kernels import flash_hopper
from regard.ops.kernels.decode import MOST_QUERIES
from regard.ops.kernels.launch import Plans
from regard.ops.mask import Mask
from regard.ops.masks import Causal
from regard.ops.reference import repeat_heads, spoil
from regard.ops.shape import Shape, Tile
from regard.ops.term import Placed
from regard.ops.unseen import clear, covers

MASK_ENTRIES = 2**26
"""The largest T × S for which a mask is rendered whole, on devices other than the CPU."""
ON_GPU = "is_cuda"
"""What is true of tensors for which `run_on_gpu` calls torch's kernels."""
CUDNN_FIRST = {(9, 0)}
"""Compute capabilities of GPUs on which cuDNN's kernels are faster than FlashAttention 2.

Measured on an H200: bench/results/attention_gpu.md. On an A100 cuDNN's are the slower ones.
"""


def flags(rule: Rule) -> bool | None:
    """The kernel's `is_causal` flag where it expresses the whole rule; None if a mask is needed."""
    if rule.bias is not None:
        return None
    if rule.mask is None:
        return False
    return True if rule.mask.is_causal_flag(rule.shape) else None


class Plain(NamedTuple):
    """What torch's kernel is told beside the tensors and the scale."""

    causal: bool
    shared: bool
    """Whether query heads share key heads."""


PLAIN = Plans()
"""Calls that torch's kernel takes as they are, by all that it depends on but addresses."""


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, scale: float | None
) -> Tensor | None:
    """Fast path for the most frequent calls, plain or `Causal`: the output, or None for any other.

    It checks at once what `make_call`, `choose` and `run` would find step by step: `explain` names
    sdpa for every call that runs here. A call on a GPU like an earlier one is not checked again.
    """
    if mask is not None and not isinstance(mask, Causal):
        return None
    if scale is not None and type(scale) is not float:
        return None
    name = None
    if type(q) is type(k) is type(v) is Tensor and getattr(q, ON_GPU) and is_plainly_eager():
        if q.is_nested or k.is_nested or v.is_nested:
            return None
        align = None if mask is None else mask.align
        # One tuple, as each function call would take as long as all of this.
        name = (
            *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
            *(v.shape, v.stride(), v.dtype, v.device, scale, align),
        )
        plain: Plain | None = PLAIN.get(name)
        if plain is not None and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            output = F.scaled_dot_product_attention(
                q, k, v, None, 0.0, plain.causal, scale=scale, enable_gqa=plain.shared
            )
            if output.requires_grad:
                give_back_alike(output)
            return output
    sizes = plain_sizes(q, k, v)
    if sizes is None or (scale is not None and not 0.0 < scale < math.inf):
        return None
    _, H, T, S = sizes
    if mask is not None and T != S and (T != 1 or mask.align != "end"):
        return None
    # One query on the last key sees all of them.
    causal = mask is not None and (T != 1 or S == 1)
    is_long = T >= flash_hopper.LONG
    if is_long and flash_hopper.is_long(q, k, v):
        return None
    by_cudnn = T < S and is_cudnn_first(q.device)
    if by_cudnn and is_planned_anew(q, k, v):
        return None
    if name is None:
        return attend_plain_on_cpu(q, k, v, causal, scale)
    is_kept = not by_cudnn and not is_long and torchs_order_is_right(q.device)
    if is_kept and are_lined_up(q, k, v):
        # Not by a lambda, whose variables would slow down all that is above.
        PLAIN.find(name, partial(Plain, causal, k.shape[1] != H))
    return run_on_gpu(q, k, v, None, 0.0, causal, scale)


def is_planned_anew(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN would run these few queries, and plan its kernel for this number of keys.

    A growing KV cache has another number in each step, so that no plan is used twice. Our kernel
    runs any number. Not in compiled graphs, where lengths stay.
    """
    T, S = q.shape[2], k.shape[2]
    if torch.compiler.is_compiling() or is_fake(q) or not (T <= MOST_QUERIES and T < S):
        return False
    if q.dtype.itemsize != 2 or not is_cudnn_first(q.device) or not may_reorder():
        return False
    learns = q.requires_grad or k.requires_grad or v.requires_grad
    return not (learns and torch.is_grad_enabled())


def attend_plain_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """Plain or causal attention on the CPU."""
    B, H, T, _ = q.shape
    shape = Shape(B, H, T, k.shape[2])
    rule = Rule(shape=shape, scale=scale, mask=Causal() if causal else None)
    return attend_on_cpu(q, k, v, rule, causal)


def refuse(call: Call) -> str | None:
    """Why torch's fused kernels cannot run a call exactly."""
    reason = refuse_fused(call)
    if reason is not None:
        return reason
    rule = call.rule
    if rule.softcap is not None:
        return "torch's fused kernels have no softcap"
    if call.sinks is not None:
        return "torch's fused kernels have no sinks"
    if call.dropout > 0.0 and call.q.device.type != "cuda":
        return "torch's fused kernels have dropout on CUDA alone"
    if call.dropout >= 1.0:
        return "torch's fused kernels cannot drop every weight"
    if rule.bias is not None:
        if any([leaf.requires_grad for leaf in rule.bias_leaves()]):
            return "torch's fused kernels give no gradient to the bias"
        if call.q.dtype == torch.float16 and is_wide(rule.bias):
            return "the kernel adds a bias in float16, whose range a wider bias may leave"
    if call.transformed:
        return "torch's fused kernels do not run inside torch.func transforms"
    if is_empty(call.q, call.k):
        return "torch's fused kernels are not asked for empty inputs"
    rendered = flags(rule) is None and call.q.device.type != "cpu"
    if rendered and rule.shape.T * rule.shape.S > MASK_ENTRIES:
        return f"torch's fused kernels would need a rendered mask of over {MASK_ENTRIES:,}"
    return None


def is_wide(bias: Bias) -> bool:
    """Whether a bias is given pair by pair, in a dtype with a wider range than float16."""
    by_slot = (part for part in bias.leaf_terms() if not isinstance(part, Placed))
    given = (leaf for part in by_slot if not part.relative for leaf in part.leaves())
    return any(leaf.dtype != torch.float16 for leaf in given)


def refuse_fused(call: Call) -> str | None:
    """Why no fused kernel, of torch or compiled by FlexAttention, can run a call."""
    if call.wants is not None:
        return "it tells nothing about the weights"
    if call.dropout > 0.0 and call.seed is not None:
        return "it draws its own dropout, not the one the seed fixes for every path"
    if call.has_tangent():
        return "it has no forward-mode derivative; reference has"
    return None


def run(call: Call) -> Tensor:
    """Attention by torch's kernels; with dropout they draw which weights are dropped."""
    width = call.v.shape[3]
    q, k, v, rule, causal = fit(call)
    # The rule's tensors are on q's device, and as readable as q.
    if q.device.type == "cpu" and readable(q, k, v):
        output = attend_on_cpu(q, k, v, rule, causal)
    else:
        output = attend_in_one_call(q, k, v, rule, causal, call.dropout)
    return output[..., :width] if output.shape[3] != width else output


def fit(call: Call) -> tuple[Tensor, Tensor, Tensor, Rule, bool | None]:
    """q, k and v as torch's kernels need them, the rule for these, and `is_causal` (`flags`)."""
    q, k, v, rule = call.q, call.k, call.v, call.rule
    causal = flags(rule)
    if rule.scale is not None and rule.scale <= 0:
        q, rule = positive_scale(q, rule.scale, rule)
    if v.shape[3] != q.shape[3]:
        rule = replace(rule, scale=rule.factor(q.shape[3]))
        q, k, v = even_widths(q, k, v)
    if causal and rule.shape.T < rule.shape.S:
        # Causal from the start (align="start"): no query sees the keys from T on.
        k, v = k[:, :, : rule.shape.T], v[:, :, : rule.shape.T]
        rule = replace(rule, shape=rule.shape._replace(S=rule.shape.T))
    return q, k, v, rule, causal


def name_kernel(call: Call) -> str | None:
    """Which of torch's kernels `run` uses for a call, and why; None where that is unknown."""
    q, k, v, rule, causal = fit(call)
    if not readable(q, k, v) or not (q.is_cpu or q.is_cuda):
        return None
    if q.is_cpu:
        return "torch's flash kernel for the CPU, on what the mask leaves"
    mask = None
    if causal is None:
        mask = rule.block(Tile(0, rule.shape.T, 0, rule.shape.S), q)
    ours_first = not torchs_order_is_right(q.device) and may_reorder()
    with preferred_kernel() if ours_first else nullcontext():
        shared = q.shape[1] != k.shape[1]
        q, k, v = in_rows(q), in_rows(k), in_rows(v)
        choice = sdp_choice(
            q, k, v, mask, call.dropout, bool(causal), scale=rule.scale, enable_gqa=shared
        )
    flash = flash_version()
    names = {
        "CUDNN_ATTENTION": "cuDNN",
        "FLASH_ATTENTION": flash,
        "EFFICIENT_ATTENTION": "efficient",
        "MATH": "math",
    }
    kind = next((kind for kind in names if int(getattr(SDPBackend, kind)) == choice), None)
    if kind is None:
        return None
    order = (
        f"cuDNN asked before {flash}, as it is faster here" if ours_first else "in torch's order"
    )
    return f"torch's {names[kind]} kernel, {order}"


def flash_version() -> str:
    """The FlashAttention that torch uses: FA2, or the implementation activated in its place."""
    # Older versions of torch have only FA2, and no function that says so.
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return str((current and current()) or "FA2")


def positive_scale(q: Tensor, scale: float, rule: Rule) -> tuple[Tensor, Rule]:
    """q and the rule with a scale above 0, which torch's kernels assume; its sign moves into q."""
    return q * (-1.0 if scale < 0 else 0.0), replace(rule, scale=-scale or 1.0)


def even_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v padded with zeros to one width, as the kernels need; the result is the same."""
    lack = q.shape[3] - v.shape[3]
    if lack > 0:
        return q, k, F.pad(v, (0, lack))
    return (q, k, v) if lack == 0 else (F.pad(q, (0, -lack)), F.pad(k, (0, -lack)), v)


def attend_in_one_call(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, causal: bool | None, dropout: float
) -> Tensor:
    """One call of `scaled_dot_product_attention`, with the rendered mask where it needs one."""
    mask = empty = None
    if causal is None:
        mask = rule.block(Tile(0, rule.shape.T, 0, rule.shape.S), q)
        if not covers(rule):
            hidden = mask == -math.inf
            unseen, empty = hidden.all(-2), hidden.all(-1, keepdim=True)
            k, v = clear(k, unseen), clear(v, unseen)
            mask = mask.masked_fill(empty, 0.0)
        if is_one(mask.shape[0]) and torch.compiler.is_compiling():
            # A batch of 1 would have to be compared with a batch size that is symbolic.
            mask = mask[0, 0] if is_one(mask.shape[1]) else mask.expand(rule.shape.B, -1, -1, -1)
    output = run_sdpa((q, k, v), mask, dropout, bool(causal), rule.scale)
    if q.device.type == "cpu":
        # While a graph is traced, values cannot be read to see whether all are finite.
        spoil_bg11 = spoil(k, output.dtype).sum(-1)[..., None, None]
        output = output * (1.0 + spoil(q, output.dtype)[..., None])
        output = output * (1.0 + repeat_heads(spoil_bg11, q.shape[1]))
    return output if empty is None else output.masked_fill(empty, 0.0)


def run_sdpa(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """`scaled_dot_product_attention` at any strides, by the faster kernel where torch has two."""
    if inputs[0].is_cuda and not (torch.compiler.is_compiling() or is_fake(inputs[0])):
        return run_on_gpu(*inputs, mask, dropout, causal, scale)
    q, k, v = (in_rows(x) for x in inputs)
    # By a branch: comparing symbolic sizes gives no bool that the kernel accepts.
    more = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, **more)


def run_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """`scaled_dot_product_attention` on a GPU, outside of graphs; q, k and v have one width."""
    _, n_heads, _, width = q.shape
    step = step_of(q)
    q, k, v = lined_up(q, width, step), lined_up(k, width, step), lined_up(v, width, step)
    shared = n_heads != k.shape[1]
    if torchs_order_is_right(q.device):
        output = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, causal, scale=scale, enable_gqa=shared
        )
    else:
        with preferred_kernel():
            output = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, causal, scale=scale, enable_gqa=shared
            )
    if output.requires_grad:
        give_back_alike(output)
    return output


def step_of(q: Tensor) -> int:
    """Of how many numbers strides have to be multiples for torch's kernels.

    Torch chooses its kernel by the width of a head. Where that is a multiple of 16 bytes, the
    kernel reads 16 bytes at a time, and assumes that all rows begin at a multiple of 16.
    """
    each = 16 // q.dtype.itemsize
    return 1 if q.shape[3] % each else each


def are_lined_up(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's kernels can read all three as they are."""
    width, step = q.shape[3], step_of(q)
    return all(is_lined_up(x, width, step) for x in (q, k, v))


def lined_up(x: Tensor, width: int, step: int) -> Tensor:
    """x, copied unless its rows are contiguous, do not overlap, and are aligned.

    As `in_rows`, and strides are multiples of `step` numbers, and x begins at a multiple of 16
    bytes.
    """
    if is_lined_up(x, width, step):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def is_lined_up(x: Tensor, width: int, step: int) -> bool:
    """Whether torch's kernels can read x as it is (`lined_up`)."""
    b, h, t, d = x.stride()
    return d == 1 and t >= width and not (b % step or h % step or t % step or x.data_ptr() % 16)


def give_back_alike(output: Tensor) -> None:
    """Give the incoming gradient the strides of the output, before the kernel reads it.

    Torch caches cuDNN's plan for a backward pass by the strides of q, k and v alone: a gradient
    with other strides would be read by the plan of an earlier one, and give wrong numbers.
    """
    strides = output.stride()

    def match(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if grads[0] is None or (grads[0].stride() == strides and grads[0].data_ptr() % 16 == 0):
            return grads
        laid = torch.empty_strided(
            grads[0].shape, strides, dtype=grads[0].dtype, device=grads[0].device
        )
        return laid.copy_(grads[0]), *grads[1:]

    node = output.grad_fn
    assert node is not None
    node.register_prehook(match)


@contextmanager
def preferred_kernel() -> Iterator[None]:
    """Have torch try cuDNN first; a choice of kernels that the user has made is left alone."""
    if not may_reorder():
        yield
        return
    CUDNN_ASKED.begin()
    try:
        yield
    finally:
        CUDNN_ASKED.end()


class CudnnAsked:
    """Torch's order of kernels, global to all threads, while some of them have cuDNN tried first.

    The first to begin changes it and the last to end restores it: if each did both, one would save
    the changed order of another as torch's own. Not by `sdpa_kernel`, which takes longer than all
    else that is done for a call.
    """

    def __init__(self) -> None:
        self._lock, self._n_calls = threading.Lock(), 0
        self._torchs: list[int] = []

    def begin(self) -> None:
        with self._lock:
            if not self._n_calls:
                self._torchs, cudnn = sdp_order(), int(SDPBackend.CUDNN_ATTENTION)  # type: ignore[call-overload]
                set_sdp_order(sorted(self._torchs, key=lambda kind: kind != cudnn))
            self._n_calls += 1

    def end(self) -> None:
        with self._lock:
            self._n_calls -= 1
            if not self._n_calls:
                set_sdp_order(self._torchs)


CUDNN_ASKED = CudnnAsked()


def may_reorder() -> bool:
    """Whether the user has made no choice between cuDNN and FlashAttention."""
    cuda = torch.backends.cuda
    return bool(cuda.cudnn_sdp_enabled() and cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


@functools.cache
def is_cudnn_first(device: torch.device) -> bool:
    """Whether cuDNN's kernels are the faster ones on this device, and are tried first."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in CUDNN_FIRST


@functools.cache
def torchs_order_is_right(device: torch.device) -> bool:
    """Whether torch tries its kernels in the order of their speed on this GPU.

    Where cuDNN is the faster one, torch does so from cuDNN 9.15 on.
    """
    if not is_cudnn_first(device):
        return True
    put_last = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") not in ("", "0")
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return (version or 0) >= 91500 and not put_last
