"""Relaunching our kernels for many queries: a call like an earlier one skips checks and planning.

Why: every layer of a model makes the same call, with its own q, k and v. In a small call, checking
it, rendering its rule and preparing the launches took longer than the GPU needs, forward and
backward.

How: calls are kept by their rule, which is known by the identity of its mask and bias, and by the
shapes, strides and dtypes of their tensors (`find`). From all these follow the errors that a call
may raise, what the rule is rendered to, and how kernels are launched; only addresses are new. A
rule with tensors counts as the same while torch has seen no write to them, and on the same stream
(`state_of`), as in `render_cache.py`. The first call of its kind runs as any other, and is kept if
all its tensors begin at multiples of 16 bytes and its rule needs neither bits, tables nor numbers
for each pair; without gradients from the second call with its mask on. The backward is kept
likewise, by the strides of what arrives (`flash_backward_relaunch.py`).

Left out, and run as any other: rules whose own tensors learn, dropout, transforms, autocast, graphs
that are traced, captured graphs where the rule has tensors; for the backward, gradients that are
themselves differentiated, or not all three of q, k and v.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from regard._torch import current_stream, is_batched_gradient, is_plainly_eager
from regard.ops.bias import ALiBi, Bias
from regard.ops.blockwise import NOTHING
from regard.ops.call import Call, Given
from regard.ops.kernels import flash
from regard.ops.kernels.arguments import form_of, rule_of
from regard.ops.kernels.flash_backward import Arriving, Saved
from regard.ops.kernels.flash_backward_relaunch import Given as Backward
from regard.ops.kernels.flash_backward_relaunch import Relaunch, relaunch_of
from regard.ops.kernels.launch import PLANS, Launch, layout_of
from regard.ops.kernels.rendered import TENSORS, Rendered, render
from regard.ops.mask import Mask
from regard.ops.pack import Packed, pack

MOST = 64
"""The most calls that are kept for one rule."""
ALIGNED = 16
"""What addresses are multiples of: for other ones Triton compiles other kernels."""
OWN = 4
"""The fields of `Rendered` that belong to a call: q, k, v and the sinks; a rule has the rest."""


class Ready(NamedTuple):
    """A rule as kernels read it, for all calls that share its mask and bias."""

    rule: tuple[Any, ...]
    """`arguments.Rule`, with addresses for tensors."""
    held: tuple[Any, ...]
    """The same with the tensors, some of which may be copies that only this holds."""
    rendered: tuple[Any, ...]
    """The fields of `Rendered` after those of a call."""
    packed: Packed | None
    """The rule itself, without its tensors; None where no gradient was asked of the call."""
    saved: tuple[Tensor, ...]
    """What a backward pass needs beside the tensors of a call: the rendered tensors, then those
    of the packed rule."""
    addresses: list[int]
    """Where `saved` begin."""
    learned: tuple[Tensor, ...]
    """The tensors to which a gradient may flow, if they require one."""
    state: tuple[Any, ...] | None
    """`state_of` the rule; None where nothing was rendered, which holds for ever."""


class Step(NamedTuple):
    """How the forward of calls of one form runs."""

    launch: Launch
    arguments: Callable[..., tuple[Any, ...]]
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    form: object
    """Stands for the form, in the names of its backward."""


class Kept(NamedTuple):
    """What is kept for a mask and a bias, as long as both exist."""

    mask: Callable[[], Mask | None]
    bias: Callable[[], Bias | None]
    tensors: list[Tensor]
    calls: dict[tuple[Any, ...], tuple[Ready, Step]]


class Known(NamedTuple):
    """A call like one that is kept."""

    ready: Ready
    step: Step
    inputs: tuple[Tensor, Tensor, Tensor]
    sinks: Tensor | None
    learns: bool


def find(q: Tensor, k: Tensor, v: Tensor, given: Given) -> Known | None:
    """What is kept for such a call; None where nothing is, or where the call may run otherwise."""
    # First of all, as a graph that is traced must not depend on what is kept.
    if not (type(q) is type(k) is type(v) is Tensor and is_plainly_eager()):
        return None
    mask, bias, sinks = given["mask"], given["bias"], given["sinks"]
    kept: Kept | None = PLANS.get(("rule", id(mask), id(bias)))
    if kept is None or kept.mask() is not mask or kept.bias() is not bias:
        return None
    if q.is_nested or k.is_nested or v.is_nested or not has_known_kinds(given):
        return None
    found = kept.calls.get(name_of(q, k, v, given))
    if found is None:
        return None
    ready, step = found
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNED:
        return None
    if ready.state is not None and ready.state != state_of(kept.tensors, q.device):
        return None
    learns = is_learned(q, k, v)
    if torch.is_grad_enabled() and may_learn(ready, sinks):
        return None
    if learns and ready.packed is None:
        return None
    return Known(ready, step, (q, k, v), sinks, learns)


def has_known_kinds(given: Given) -> bool:
    """Whether the numbers and sinks of a call are of a kind that is compared by its name."""
    scale, softcap, sinks = given["scale"], given["softcap"], given["sinks"]
    if not (scale is None or type(scale) is float) or not (
        softcap is None or type(softcap) is float
    ):
        return False
    return sinks is None or type(sinks) in (Tensor, Parameter)


def name_of(q: Tensor, k: Tensor, v: Tensor, given: Given) -> tuple[Any, ...]:
    """All that sets calls of one rule apart, but for values and addresses."""
    sinks = given["sinks"]
    return (
        *(q.shape, q.stride(), q.dtype, q.device),
        *(k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device),
        given["scale"],
        given["softcap"],
        None if sinks is None else (type(sinks), sinks.device, *layout_of(sinks)),
    )


def is_learned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a gradient may be asked of q, k or v."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def may_learn(ready: Ready, sinks: Tensor | None) -> bool:
    """Whether a gradient may flow to something beside q, k and v."""
    if sinks is not None and sinks.requires_grad:
        return True
    return bool(ready.learned) and any([x.requires_grad for x in ready.learned])


def state_of(tensors: list[Tensor], device: torch.device) -> tuple[Any, ...] | None:
    """What a rendered rule depends on beside its terms; None where it must not be kept."""
    stream = None
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = current_stream(device)
    writes = [(x._version, x.data_ptr()) for x in tensors]
    # A rendering made in inference mode cannot be saved for a backward pass.
    return stream, torch.is_inference_mode_enabled(), writes


def attend_again(known: Known) -> Tensor | None:
    """The output of such a call; None if it has to be launched on another device."""
    launch = known.step.launch
    if launch.variant(launch.current_device()) is None:
        return None
    if not known.learns:
        return launch_forward(known)[0]
    apply: Any = _Again.apply
    output: Tensor = apply(known.ready, known.step, known.sinks, *known.inputs)[0]
    return output


def launch_forward(known: Known) -> tuple[Tensor, Tensor]:
    """The output, and the logsumexp of its rows."""
    ready, step, inputs, sinks, _ = known
    run = step.launch.variant(step.launch.current_device())
    assert run is not None
    q, strides = inputs[0], step.strides
    output = q.new_empty_strided(step.sizes, strides)
    lse = q.new_empty(step.sizes[:3], dtype=torch.float32)
    at_sinks = None if sinks is None else sinks.data_ptr()
    out = (output.data_ptr(), *strides)
    run(*step.arguments(inputs, out, ready.rule, at_sinks, lse.data_ptr()))
    return output, lse


class _Again(torch.autograd.Function):
    """A call that is launched again, differentiable in q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, ready: Ready, step: Step, sinks: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = inputs
        output, lse = launch_forward(Known(ready, step, (q, k, v), sinks, True))
        ctx.ready, ctx.step, ctx.has_sinks = ready, step, sinks is not None
        ctx.set_materialize_grads(False)
        # In the order in which `flash_op` saves them, as checkpointing counts on it.
        own = inputs if sinks is None else (*inputs, sinks)
        ctx.save_for_backward(output, lse, *own, *ready.saved)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        output, lse, q, k, v, *rest = ctx.saved_tensors
        ready: Ready = ctx.ready
        sinks = rest.pop(0) if ctx.has_sinks else None
        needed, (g, lse_grad) = ctx.needs_input_grad[3:], grads
        name = None
        if g is not None and lse_grad is None and all(needed) and is_where_it_was(ready, rest):
            name = name_backward(ctx.step, (q, k, v, output, g), sinks)
            relaunch: Relaunch | None = PLANS.get(name)
            at_sinks = None if sinks is None else sinks.data_ptr()
            given = Backward(q, k, v, g, output, lse, ready.rule, at_sinks)
            if relaunch is not None and (found := relaunch(given)) is not None:
                return None, None, None, *found
        # Imported late: without a GPU nobody should wait for this import.
        from regard.ops.kernels import flash_op

        tensors, numbers = fill(ready, (q, k, v, sinks), rest)
        fixed = flash_op.Fixed(numbers, NOTHING, ready.packed)
        flags = (*needed, *(False,) * (len(tensors) - 3))
        saved, arriving = Saved(output, lse, None), Arriving(g, lse_grad, None)
        first = flash_op.find_gradients(fixed, tensors, saved, arriving, flags)
        if name is not None:
            rendered = Rendered(*tensors[:TENSORS], *numbers)  # type: ignore[arg-type]
            PLANS.find(name, lambda: relaunch_of(rendered, saved, arriving))
        return None, None, None, *first[:3]


def is_where_it_was(ready: Ready, saved: list[Tensor]) -> bool:
    """Whether what was saved of a rule was not moved since, as hooks on saved tensors may do."""
    return [x.data_ptr() for x in saved] == ready.addresses


def name_backward(
    step: Step, tensors: tuple[Tensor, ...], sinks: Tensor | None
) -> tuple[Any, ...] | None:
    """The name of a backward that may be kept; tensors: q, k, v, the output and its gradient."""
    q, k, v, output, g = tensors
    if torch.is_grad_enabled() or type(g) is not Tensor or not is_plainly_eager():
        return None
    if is_batched_gradient(g) or torch.are_deterministic_algorithms_enabled():
        return None
    at = q.data_ptr() | k.data_ptr() | v.data_ptr() | output.data_ptr() | g.data_ptr()
    if at % ALIGNED:
        return None
    lying = None if sinks is None else layout_of(sinks)
    strides = q.stride(), k.stride(), v.stride(), output.stride(), g.stride()
    return "backward", step.form, lying, *strides


def fill(
    ready: Ready, own: tuple[Tensor | None, ...], saved: list[Tensor]
) -> tuple[list[Tensor | None], tuple[Any, ...]]:
    """The tensors of `Rendered` and of the rule, as they were saved; and the numbers."""
    given, rest = [*own], iter(saved)
    tensors = ready.rendered[: TENSORS - OWN]
    given += [None if x is None else next(rest) for x in tensors]
    return [*given, *rest], ready.rendered[TENSORS - OWN :]


def attend_first(call: Call, given: Given) -> Tensor:
    """The output of a call that is not known; it is kept, if it can be launched again."""
    # Imported late, as above.
    from regard.ops.kernels import flash_op

    rendered, learns = render(call), is_learned(call.q, call.k, call.v)
    ready = None
    if learns or is_seen(given["mask"]):
        ready = make_ready(call, rendered, given)
    if ready is None:
        return flash_op.run(call, rendered)
    name = "step", *form_of(rendered)
    step: Step | None = PLANS.get(name)
    output = None
    if step is not None:
        inputs = call.q, call.k, call.v
        output = attend_again(Known(ready, step, inputs, call.sinks, learns))
    if output is None:
        output = flash_op.run(call, rendered)
        step = PLANS.find(name, lambda: make_step(call, rendered))
    if step is not None:
        keep(call, given, ready, step)
    return output


def is_seen(mask: Any) -> bool:
    """Whether a mask was asked about before; one that is made for each call is not worth keeping.

    With gradients it is, as then the backward is launched again too.
    """
    if mask is None:
        return True
    name = "seen", id(mask)
    seen = PLANS.get(name)
    if seen is not None and seen() is mask:
        return True
    if isinstance(mask, Mask):
        PLANS.find(name, lambda: follow(mask, name))
    return False


def make_ready(call: Call, rendered: Rendered, given: Given) -> Ready | None:
    """The rule of a call, for others of the same mask and bias; None where it is for this alone."""
    mask, bias = given["mask"], given["bias"]
    parts = (rendered.words, rendered.band, rendered.dense, rendered.query_places)
    if any(part is not None for part in parts) or call.sinks is not rendered.sinks:
        return None
    if not (isinstance(mask, Mask | None) and isinstance(bias, ALiBi | None)):
        return None
    if not has_known_kinds(given):
        return None
    if any([x.device != call.q.device for x in terms_tensors(mask, None)]):
        # Writes on another device, from which it is copied each time, may go unseen.
        return None
    if (call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()) % ALIGNED:
        return None
    tensors = terms_tensors(mask, bias)
    if not all([type(x) in (Tensor, Parameter) and not x.is_inference() for x in tensors]):
        return None
    learned = tuple(bias.tensors() if bias is not None else ())
    if torch.is_grad_enabled() and any(
        [x.requires_grad for x in (*learned, call.sinks) if x is not None]
    ):
        return None
    made = tuple([x for x in rendered[OWN:TENSORS] if isinstance(x, Tensor)])
    state = state_of(tensors, call.q.device) if made or tensors else None
    if state is None and (made or tensors):
        return None
    packed = pack(call.rule) if is_learned(call.q, call.k, call.v) else None
    rule, saved = rule_of(rendered), made if packed is None else (*made, *packed.tensors)
    return Ready(
        addressed(rule),
        rule,
        tuple(rendered[OWN:]),
        None if packed is None else packed._replace(tensors=[]),
        saved,
        [x.data_ptr() for x in saved],
        learned,
        state,
    )


def make_step(call: Call, rendered: Rendered) -> Step | None:
    """How the forward of calls of this form runs; None where it needs copies of its inputs."""
    plan = flash.find_plan(rendered, NOTHING, None, False, False, True)
    if plan is None:
        return None
    B, H, T, _ = call.q.shape
    sizes = B, H, T, call.v.shape[3]
    strides = flash.strides_of(call.q, sizes)
    return Step(plan.forward.launch, plan.forward.arguments, sizes, strides, object())


def keep(call: Call, given: Given, ready: Ready, step: Step) -> None:
    """Keep a call for as long as its mask and bias exist."""
    mask, bias = given["mask"], given["bias"]
    name = "rule", id(mask), id(bias)
    kept: Kept | None = PLANS.get(name)
    if kept is None:
        tensors = terms_tensors(mask, bias)
        made = Kept(follow(mask, name), follow(bias, name), tensors, {})
        kept = PLANS.find(name, lambda: made)
    if len(kept.calls) >= MOST:
        kept.calls.clear()
    kept.calls[name_of(call.q, call.k, call.v, given)] = ready, step


def terms_tensors(mask: Any, bias: Any) -> list[Tensor]:
    """The tensors that a mask and a bias hold."""
    return [x for term in (mask, bias) if term is not None for x in term.tensors()]


def addressed(x: Any) -> Any:
    """A tensor's address; tuples with addresses for tensors; anything else as it is."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    return tuple(map(addressed, x)) if isinstance(x, tuple) else x


def follow(term: Any, name: tuple[Any, ...]) -> Callable[[], Any]:
    """A weak reference to a mask or a bias, with which what is kept for it goes; None for None."""
    return ref(term, partial(forget, name)) if term is not None else lambda: None


def forget(name: tuple[Any, ...], _: Any) -> None:
    PLANS.pop(name, None)
