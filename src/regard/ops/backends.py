"""Which backend runs a call: one table, one loop, and a reason from each backend that refuses.

A backend has a name, `refuse(call)`, which returns a reason or None, `run(call)`, which returns the
output, and `observe(call)`, which also answers the wants. `choose` returns the first backend in the
device's order that does not refuse; `backend=` names the only candidate. No option is silently
ignored: a backend does all that a call asks for, or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.ops import (
    blockwise_op,
    call_hook,
    decode,
    decode_relaunch,
    flex,
    observe,
    reference,
    sdpa,
)
from regard.ops.blockwise import NOTHING, Ask
from regard.ops.call import Call, Given, gather_call, outside_autocast, plain_sizes
from regard.ops.kernels import backend as triton
from regard.ops.kernels import flash_hopper, flash_relaunch
from regard.ops.kernels.launch import on_device_of
from regard.ops.kernels.rendered import is_given_whole, render
from regard.ops.shape import Shape
from regard.ops.wants import Observation


def _never(call: Call) -> str | None:
    return None


def _tell_nothing(call: Call) -> Observation:
    raise AssertionError("a backend that does not refuse wants can observe")


@dataclass(frozen=True)
class Backend:
    """One way to compute attention: why it refuses a call, how it runs it and answers its wants."""

    name: str
    refuse: Callable[[Call], str | None]
    run: Callable[[Call], Tensor]
    observe: Callable[[Call], Observation] = _tell_nothing


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns: which backend runs a call, and why each of the others does not.

    `chosen` is the name of the one that runs; `verdicts` has for each backend, in the order in
    which they are asked, None or the reason why it refuses. `notes` say why they are asked in this
    order, `kernel` which of torch's kernels "sdpa" would take. print() shows all of it.
    """

    chosen: str
    verdicts: dict[str, str | None]
    notes: tuple[str, ...] = ()
    kernel: str | None = None

    def __str__(self) -> str:
        lines = []
        for name, reason in self.verdicts.items():
            mark = "runs" if name == self.chosen else "could" if reason is None else "refuses"
            more = reason or (self.kernel if name == "sdpa" else None) or ""
            lines.append(f"{name:<10} {mark:<8} {more}".rstrip())
        return "\n".join([*lines, *self.notes])


def _run_by_kernels(call: Call) -> Tensor:
    with on_device_of(call.q) if call.q.is_cuda else nullcontext():
        if triton.is_decoding(call):
            return decode.run(call)
        # Imported late, as in `triton.refuse`: without a GPU nobody should wait for this import.
        from regard.ops.kernels import flash_op

        return flash_op.run(call)


def _observe_by_kernels(call: Call) -> Observation:
    with on_device_of(call.q) if call.q.is_cuda else nullcontext():
        if triton.is_one_pass(call):
            return decode.observe(call)
        from regard.ops.kernels import flash_op, row_stats

        return flash_op.observe(call) if call.needs_grad() else row_stats.by_kernels(call)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", _never, reference.run, observe.by_reference),
        Backend("blockwise", blockwise_op.refuse, blockwise_op.run, observe.by_tiles),
        Backend("sdpa", sdpa.refuse, sdpa.run),
        Backend("flex", flex.refuse, flex.run),
        Backend("triton", triton.refuse, _run_by_kernels, _observe_by_kernels),
    )
}

ORDER = {
    "cpu": ("sdpa", "blockwise", "reference", "flex"),
    "cuda": ("sdpa", "triton", "flex", "blockwise", "reference"),
}
"""By measured speed, compile time included: on a CPU FlexAttention runs only when named."""


def asked_first(call: Call) -> tuple[str, str] | None:
    """The backend to try before those in the device's order, and why; None: keep that order."""
    return asked_first_on_gpu(call) if call.q.device.type == "cuda" else None


def asked_first_on_gpu(call: Call) -> tuple[str, str] | None:
    """On a GPU: the backend measured to be faster for this call than the order says, and why."""
    is_little = triton.is_little(call.rule.shape)
    if call.wants is not None and is_little:
        return "blockwise", f"under {triton.LITTLE:,} weights are looked at before kernels compile"
    if sdpa.flags(call.rule) is not None:
        if triton.is_decoding(call) and sdpa.is_planned_anew(call.q, call.k, call.v):
            return "triton", "cuDNN would plan its kernel anew for each number of keys"
        if call.dropout == 0.0 and flash_hopper.is_long(call.q, call.k, call.v):
            return "triton", "without gradients it is faster for long texts of many heads"
        return None
    if triton.is_decoding(call) or not (is_little or is_slow_by_kernels(call)):
        return "triton", "torch's kernels have to be given this mask or bias whole"
    return None


def is_slow_by_kernels(call: Call) -> bool:
    """Whether torch's kernels were measured to be faster than ours for many queries."""
    return call.q.dtype == torch.float32 or is_given_whole(call.rule)


def order_of(call: Call) -> tuple[str, ...]:
    """The names of the backends in the order in which they are tried."""
    order = ORDER.get(call.q.device.type, ("sdpa", "blockwise", "reference"))
    first = asked_first(call)
    if first is None:
        return order
    return (first[0], *(name for name in order if name != first[0]))


def attend_by_kernels(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor | None:
    """Fast path for calls that our kernels run: the output, or None for any other call.

    Like `attend_plain`, it checks at once what `make_call` and `choose` would find step by step.
    `explain` names triton for the calls that run here; those kept as plain (`decode_relaunch`)
    run on torch's kernels, as `explain` says.
    """
    form = decode_relaunch.form_of(q, k, v, given)
    if form is not None and (output := decode_relaunch.attend_again(form)) is not None:
        return output
    known = flash_relaunch.find(q, k, v, given)
    if known is not None and (output := flash_relaunch.attend_again(known)) is not None:
        return output
    if type(q) is not Tensor or q.is_nested or q.dim() != 4:
        return None
    if triton.refuse_tensors(q, q.shape[3]) is not None:
        return None
    sizes = plain_sizes(q, k, v)
    if sizes is None:
        return None
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with on_device_of(q):
            return attend_by_kernels(q, k, v, given)
    shape = Shape(*sizes)
    call = gather_call(q, k, v, shape, given)
    is_decoding = triton.is_decoding(call)
    by_torch = not is_decoding and (triton.is_little(shape) or is_slow_by_kernels(call))
    is_plain = sdpa.flags(call.rule) is not None
    by_torch = by_torch or (is_plain and not sdpa.is_planned_anew(q, k, v))
    if by_torch and call.rule.softcap is None and call.sinks is None:
        # Torch's kernels come first here; a softcap and sinks are what they refuse for certain.
        if form is not None and call.rule.mask is None and call.rule.bias is None:
            decode_relaunch.keep_plain(form)
        return None
    if is_decoding:
        return decode.run(call) if form is None else decode_relaunch.attend_first(call, form)
    if triton.refuse_many_queries(call) is not None:
        return None
    return flash_relaunch.attend_first(call, given)


def attend_and_tell(call: Call) -> Tensor | None:
    """Run a call that hooks observe, and give them the row statistics of the same pass.

    None where no hook asks for any, or where without hooks another kernel would run, whose
    output has other bits.
    """
    wants = call_hook.asked_of_rows(call)
    if wants is None or call.transformed or call.needs_grad():
        return None
    if triton.is_decoding(call) or choose(call, "auto") is not BACKENDS["triton"]:
        return None
    given, ask = render(call), Ask(wants.entropy, wants.peak, wants.distance)
    if not all(flash_hopper.takes(given, each, None) for each in (NOTHING, ask)):
        return None
    # Imported late, as in `triton.refuse`.
    from regard.ops.kernels import row_stats

    try:
        with outside_autocast(call.q.device.type), on_device_of(call.q):
            output, rows = row_stats.first_pass(given, wants)
    except RuntimeError:
        # Such as too little memory for the statistics: the output must be computed all the same.
        return None
    call_hook.tell(replace(call, rows=rows))
    return output


def choose(call: Call, backend: str) -> Backend:
    """The first backend in order that does not refuse, or the one named, whose refusal raises."""
    if backend == "auto":
        for name in order_of(call):
            if BACKENDS[name].refuse(call) is None:
                return BACKENDS[name]
    if backend not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ValueError(f"unknown backend {backend!r}; expected one of {known}")
    chosen = BACKENDS[backend]
    reason = chosen.refuse(call)
    if reason is not None:
        raise ValueError(
            f'backend "{backend}" refuses this call: {reason}; '
            'backend="auto" finds one that does not'
        )
    return chosen


def explain(call: Call, backend: str) -> Explanation:
    """Which backend runs the call, and the verdict of each."""
    chosen, first, notes = choose(call, backend), asked_first(call), []
    if first is not None:
        notes.append(f"{first[0]} is asked first: {first[1]}")
    verdicts = {name: BACKENDS[name].refuse(call) for name in order_of(call)}
    kernel = sdpa.name_kernel(call) if verdicts["sdpa"] is None else None
    return Explanation(chosen.name, verdicts, tuple(notes), kernel)
