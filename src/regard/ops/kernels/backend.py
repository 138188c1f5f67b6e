"""The backend "triton": which calls our kernels refuse, and which kernel runs the others.

Few queries per sample, without gradients and dropout, run on the decode kernel (`decode.py`), which
also computes the wants of one pass. All other calls run on `flash_op.py`, whose output, logsumexp
and entropy have gradients. Wants that need a second pass (`row_stats.py`) have none.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from regard._check import is_empty
from regard.ops.call import Call
from regard.ops.kernels.decode import MOST_QUERIES
from regard.ops.kernels.rendered import renders_whole
from regard.ops.shape import Shape
from regard.ops.wants import Wants

WIDEST = 256
"""The widest head that our kernels accept."""
LITTLE = 2**16
"""Fewer weights than this are observed in tiles, for which nothing has to be compiled first."""


def refuse(call: Call) -> str | None:
    """Why our kernels cannot run a call; they need a GPU."""
    reason = refuse_tensors(call.q, max(call.q.shape[3], call.v.shape[3]))
    if reason is not None:
        return reason
    if call.wants is not None and not is_one_pass(call):
        reason = _refuse_looking(call, call.wants)
    elif call.wants is None and not is_decoding(call):
        reason = refuse_many_queries(call)
    if reason is not None:
        return reason
    # Imported late: without a GPU nobody should wait for this import.
    from regard.ops.kernels import flash_op

    reason = flash_op.refuse(call)
    if reason is not None:
        return reason
    if is_empty(call.q, call.k, *(() if call.wants is not None else (call.v,))):
        return "our kernels are not asked for empty inputs"
    return None


def refuse_tensors(q: Tensor, width: int) -> str | None:
    """Why none of our kernels can run such tensors; width: that of the widest heads."""
    if q.device.type != "cuda":
        return f"our kernels run on a GPU, and q is on {q.device.type}"
    if q.dtype == torch.float64:
        return "our kernels compute scores in float32, which float64 does not allow"
    if width > WIDEST:
        return f"our kernels take head widths up to {WIDEST}"
    # The compiler itself needs triton for a GPU, so for compiled graphs there is nothing to check.
    if not torch.compiler.is_compiling() and not has_triton():
        return "the package triton is not installed"
    return None


def is_one_pass(call: Call) -> bool:
    """Whether the decode kernel computes everything wanted, along with the output."""
    wants = call.wants
    if wants is None or wants.weights or wants.second_pass():
        return False
    return is_decoding(call)


def is_few(n_queries: int) -> bool:
    """Whether there are surely no more queries per sample than the decode kernel accepts."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        # Comparing a symbolic length would specialise the graph to the answer.
        return statically_known_true(n_queries <= MOST_QUERIES)
    return n_queries <= MOST_QUERIES


def is_decoding(call: Call) -> bool:
    """Whether the decode kernel runs a call: few queries, no gradient, no dropout, no vmap."""
    plain = call.dropout == 0.0 and not call.transformed
    return plain and is_few(call.rule.shape.T) and not call.needs_grad()


def refuse_many_queries(call: Call) -> str | None:
    """Why the kernels for any number of queries cannot run a call."""
    if call.dropout >= 1.0:
        return "our kernels cannot drop every weight"
    if renders_whole(call.rule):
        return "its kernels would need this bias as one large matrix; blockwise renders it in tiles"
    return None


def _refuse_looking(call: Call, wants: Wants) -> str | None:
    """Why our kernels cannot answer the wants of a call."""
    if wants.weights:
        return "it never builds the T × S matrix that `weights` asks for; reference does"
    if call.is_unreadable():
        return "it is not run inside compiled graphs and torch.func, where blockwise is"
    if wants.second_pass() and call.needs_grad():
        return "its second pass is not run where gradients are needed; blockwise is"
    return refuse_many_queries(call)


def is_little(shape: Shape) -> bool:
    """Whether there are so few weights that compiling kernels would take longer than observing."""
    return shape.B * shape.H * shape.T * shape.S < LITTLE


@functools.cache
def has_triton() -> bool:
    """Whether the package triton is installed."""
    return importlib.util.find_spec("triton") is not None
