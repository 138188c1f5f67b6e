"""Relaunching a step of generation: a call like an earlier one skips checks and planning.

Why: a step reads a KV cache in the time in which Python makes a few dozen calls. Checking a call
and planning its kernel launch took longer than that, and their result depends only on the form of
the call.

How: the form is everything but the contents of the tensors: shapes, strides and dtypes, and which
masks and biases hold which tensors. The first call of a form runs as any other, and a `Step` is
kept for it, if the kernel reads only tensors of the call itself, and nothing that was rendered or
copied for it. A later call of this form differs in addresses only, and is launched with its own. It
need not be checked again: errors follow from the form, as no value is read on a GPU. A call whose
mask hides nothing, such as a window over fewer keys, is kept as a plain one.

Left out, and run as any other: masks and biases that the kernel cannot read unrendered, gradients,
transforms, autocast, graphs that are being traced.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from regard._torch import is_plainly_eager
from regard.ops import decode
from regard.ops.bias import ALiBi, BiasAt
from regard.ops.call import Call, Given
from regard.ops.kernels.decode import MOST_QUERIES, SUMS, Plan, attend, find_plan, kernel_terms
from regard.ops.kernels.launch import PLANS
from regard.ops.mask import And, At
from regard.ops.masks import Causal, Documents, Lengths, Window
from regard.ops.sdpa import attend_plain
from regard.ops.term import Term

runs_here = attrgetter("is_cuda")
"""Whether a tensor is on a device on which our kernels run."""
FIELDS: dict[type[Any], tuple[str, ...]] = {
    At: ("inner", "queries", "keys"),
    And: ("one", "other"),
    Causal: ("align",),
    Window: ("left", "right"),
    Lengths: ("lengths", "side"),
    Documents: ("ids", "query_ids"),
    BiasAt: ("inner", "queries", "keys"),
    ALiBi: ("slopes",),
}
"""For each class of term that the kernel can read unrendered: the fields that define a value."""
READ = (0, 1, 2, 3, 4, 5, 7, 8, 6)
"""The order of the `TERMS` in the kernel's arguments, by index."""


class Form(NamedTuple):
    """What calls of one form share, as `name`; a call's q, k, v, sinks and tensors of the rule."""

    name: tuple[Any, ...]
    tensors: list[Tensor]
    addresses: list[int]


class Step(NamedTuple):
    """How calls of one form run."""

    plan: Plan
    sizes: tuple[int, int, int, int]
    """The sizes of the output, in the order of memory."""
    is_transposed: bool
    """Whether `sizes` are (B, T, H, E); for one query (B, H, T, E) is the same memory."""
    scratch: int
    """How many numbers of scratch memory the parts need; 0 where there is one part."""
    read: tuple[tuple[int, int, int], ...]
    """For each term that the kernel reads: its place among the kernel's arguments, the index of the
    tensor in `Form` whose memory it is, and its byte offset there. q stands in for all others."""


def attend_again(form: Form) -> Tensor | None:
    """The output of a call of a form that is kept; None for any other."""
    step: Step | str | None = PLANS.get(form.name)
    if step is None:
        return None
    if isinstance(step, str):
        q, k, v = form.tensors
        return attend_plain(q, k, v, None, form.name[1])
    plan, sizes, is_transposed, n_scratch, read = step
    device = plan.parts.current_device()
    run, join = plan.parts.variant(device), plan.join.variant(device)
    if run is None or (n_scratch and join is None):
        # Another GPU than the one it was compiled for.
        return None
    q, addresses = form.tensors[0], form.addresses
    at_q, at_k, at_v = addresses[:3]
    terms = [at_q] * len(READ)
    for number, i, behind in read:
        terms[number] = addresses[i] + behind
    output = q.new_empty(*sizes)
    written = output.data_ptr(), at_q, at_q
    if not n_scratch:
        run(at_q, at_k, at_v, *terms, at_q, *written, *plan.numbers)
    else:
        scratch = q.new_empty(n_scratch, dtype=torch.float32)
        at = scratch.data_ptr()
        run(at_q, at_k, at_v, *terms, at, *written, *plan.numbers)
        join(at, terms[-1], *written, plan.n_parts, plan.n_rows)  # type: ignore[misc]
    return output.transpose(1, 2) if is_transposed else output


def keep_plain(form: Form) -> None:
    """Keep a form as plain: its calls need nothing but q, k, v and a scale."""
    PLANS.find(form.name, lambda: "plain")


def attend_first(call: Call, form: Form) -> Tensor:
    """The output of the first call of a form, for which a `Step` is kept where that is possible."""
    inputs, numbers = (
        (call.q, call.k, call.v),
        (call.rule.factor(call.q.shape[3]), call.rule.softcap),
    )
    rule = decode.find_rule(call.rule, call.q.device)
    output = attend(inputs, rule, numbers, call.sinks).output
    if form.name not in PLANS:
        terms, ints, floats = kernel_terms(rule, numbers, call.sinks)
        plan = find_plan(inputs, terms, ints, floats)
        given = [(number, terms[i]) for number, i in enumerate(READ)]
        found = [(number, _find(term, form)) for number, term in given if term is not None]
        read = tuple((number, *where) for number, where in found if where is not None)
        if plan is not None and len(read) == len(found):
            B, H, T, E = *call.q.shape[:3], call.v.shape[3]
            sizes = (B, T, H, E) if T > 1 else (B, H, T, E)
            scratch = plan.n_rows * plan.n_parts * (E + SUMS) if plan.n_parts > 1 else 0
            PLANS.find(form.name, lambda: Step(plan, sizes, T > 1, scratch, read))
    return output


def _find(term: Tensor, form: Form) -> tuple[int, int] | None:
    """The index in `Form` of the tensor that a term is or surely is a view of, and the byte offset.

    None if there is no such tensor.
    """
    same = [i for i, x in enumerate(form.tensors) if x is term]
    if len(same) != 1:
        memory = term.untyped_storage().data_ptr()
        same = [i for i, x in enumerate(form.tensors) if x.untyped_storage().data_ptr() == memory]
        if len(same) != 1:
            return None
    return same[0], term.data_ptr() - form.addresses[same[0]]


def form_of(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Form | None:
    """The form of a call of few queries on plain tensors; None for calls never relaunched."""
    if type(q) is not Tensor or not is_plainly_eager() or not runs_here(q):
        return None
    if q.dim() != 4 or q.shape[2] > MOST_QUERIES:
        return None
    scale, softcap, sinks = given["scale"], given["softcap"], given["sinks"]
    if not (scale is None or type(scale) is float) or not (
        softcap is None or type(softcap) is float
    ):
        return None
    name: list[Any] = ["a step", scale, softcap]
    tensors = [q, k, v] if sinks is None else [q, k, v, sinks]
    for term in (given["mask"], given["bias"]):
        if term is None:
            name.append(None)
        elif not _tell(term, q.device, name, tensors):
            return None
    addresses: list[int] = []
    learns = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not Tensor and type(x) is not Parameter:
            return None
        at = x.data_ptr()
        addresses.append(at)
        name += (x.shape, x.stride(), x.dtype, x.device, at % 16, learns and x.requires_grad)
    return Form(tuple(name), tensors, addresses)


def _tell(term: Any, device: torch.device, name: list[Any], tensors: list[Tensor]) -> bool:
    """Add a term to a form's name and tensors; False if the kernel cannot read it unrendered."""
    kind = type(term)
    fields = FIELDS.get(kind)
    if fields is None:
        return False
    if kind is ALiBi and term.slopes.device != device:
        if term.slopes.requires_grad or term.slopes.is_inference():
            return False
        # ALiBi keeps this copy, so it is the same in each call.
        term = term.to(device)
    name.append(kind)
    for field in fields:
        x = getattr(term, field)
        if isinstance(x, Tensor):
            # Whether terms share a tensor is part of the form: `decode.stands_in` depends on it.
            place = 0
            while place < len(tensors) and tensors[place] is not x:
                place += 1
            name.append((Tensor, place))
            if place == len(tensors):
                tensors.append(x)
        elif isinstance(x, Term):
            if not _tell(x, device, name, tensors):
                return False
        else:
            name.append(x)
    return True
