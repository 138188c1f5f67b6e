"""Attention by our kernels as one operation, for autograd and for compiled graphs.

What kernels read is tensors and numbers (`rendered.py`), rendered outside of the operation: so
gradients of slopes, bands and dense biases flow on to the tensors these were computed from. In
eager mode the kernels are launched directly, inside an autograd function where a gradient is
needed. While a graph is being traced they are the custom ops `regard::flash` and
`regard::flash_backward`, each with a fake implementation that gives the shapes; the second is the
gradient of the first.

Our backward cannot itself be differentiated. Where that is asked for (`create_graph=True`), and for
a batch of gradients (`is_grads_batched=True`), the gradient is computed by the backward pass of the
tiles (`blockwise_backward.py`), which consists of torch's operations: for this the rule is kept
beside its rendering, and the tensors of its biases get the gradient directly.

Inside `torch.func.vmap` the mapped axis is folded into the batch (`vmap.py`).

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._torch import is_batched_gradient, is_fake
from regard.ops import blockwise_backward
from regard.ops.blockwise import NOTHING, Ask, Rows
from regard.ops.call import Call
from regard.ops.kernels import flash, flash_backward, vmap
from regard.ops.kernels.flash_backward import Arriving, Grads, Saved
from regard.ops.kernels.rendered import TENSORS, Rendered, render
from regard.ops.observe import key_sets, refusing_gradients, row_answers
from regard.ops.pack import Packed, pack, unpack
from regard.ops.wants import Observation

LEARNED = tuple(Rendered._fields.index(name) for name in Grads._fields)
"""The indices of those fields of `Rendered` that have gradients."""


def refuse(call: Call) -> str | None:
    """Why kernels cannot run a call, whatever its tensors are."""
    if call.has_tangent():
        return "our kernels have no forward-mode derivative; reference has"
    return vmap.refuse(call)


def run(call: Call, given: Rendered | None = None) -> Tensor:
    """Attention by our kernels, the output alone; given: the call as kernels read it, if known."""
    return _attend(call, NOTHING, None, given)[0]


def attend(call: Call, ask: Ask, mass: Tensor | None) -> Rows:
    """Attention by our kernels; `rows.output`, `rows.lse` and `rows.entropy` carry gradients."""
    found = _attend(call, ask, mass)
    none = dict.fromkeys(Rows._fields, found[1].new_empty(0))
    return Rows(**none | dict(zip(_row_fields(ask, mass), found, strict=True)))


def _attend(
    call: Call, ask: Ask, mass: Tensor | None, given: Rendered | None = None
) -> Sequence[Tensor]:
    """The tensors that `_row_fields` names, by our kernels."""
    call = call.seeded()
    given = render(call) if given is None else given
    if torch.compiler.is_compiling():
        traced: list[Tensor] = _forward_op(*given, list(ask), mass)
        return traced
    # Inside vmap, `requires_grad` does not show whether a tensor needs a gradient.
    if not call.transformed and not call.needs_grad():
        return _run_forward(given, ask, mass)
    packed = pack(call.rule)
    fixed = Fixed(given[TENSORS:], ask, Packed(packed.form, [], packed.ints, packed.floats))
    apply: Any = (_MappedFlash if call.transformed else _Flash).apply
    found: tuple[Tensor, ...] = apply(fixed, mass, *given[:TENSORS], *packed.tensors)
    return found


def _row_fields(ask: Ask, mass: Tensor | None) -> list[str]:
    """The fields of `Rows` that the operation returns, in order: those with gradients are first."""
    names = ["output", "lse"]
    names += ["entropy"] if ask.entropy else []
    names += ["peak", "peak_key", "peak_logit"] if ask.peak else []
    names += ["distance"] if ask.distance else []
    return names if mass is None else [*names, "mass"]


def observe(call: Call) -> Observation:
    """The output and every want that one pass answers; gradients flow as in `attend`."""
    wants = call.wants
    assert wants is not None
    ask, mass = Ask(wants.entropy, wants.peak, wants.distance), key_sets(wants)
    rows = attend(call, ask, None if mass is None else mass.to(call.q.device))
    return refusing_gradients(Observation(rows.output, **row_answers(rows, wants)), rows.lse, wants)


def _run_forward(given: Rendered, ask: Ask, mass: Tensor | None) -> list[Tensor]:
    """Launch the kernels; for fake tensors call the custom op instead, which knows the shapes."""
    if not is_fake(given.q):
        return _launch(given, ask, mass)
    found: list[Tensor] = _forward_op(*given, list(ask), mass)
    return found


def _run_backward(*args: Any) -> Sequence[Tensor | None]:
    if is_fake(args[0]):
        found: list[Tensor] = _backward_op(*args)
        return found
    return _find_gradients(*args)


def _forward(*args: Any) -> list[Tensor]:
    *rendered, asked, mass = args
    return _launch(Rendered(*rendered), Ask(*asked), mass, like_queries=False)


def _launch(
    given: Rendered, ask: Ask, mass: Tensor | None, like_queries: bool = True
) -> list[Tensor]:
    """Launch the forward kernels; returns the tensors that `_row_fields` names."""
    output, found = flash.forward(given, ask, mass, with_sums=False, like_queries=like_queries)
    if ask == NOTHING and mass is None:
        return [output, found["lse"]]
    rows = {"output": output, **found}
    if ask.peak:
        rows |= {"peak_key": found["key"], "peak_logit": found["logit"]}
    return [rows[name] for name in _row_fields(ask, mass)]


def _vmap_forward(info: Any, in_dims: Any, *args: Any) -> Any:
    folded, samples = vmap.fold_call(args[:TENSORS], in_dims[:TENSORS], info.batch_size)
    mass = vmap.fold_rule(args[-1], in_dims[-1], info.batch_size, samples)
    found = _forward_op(*folded, *args[TENSORS:-1], mass)
    return vmap.unfold(found, info.batch_size)


def _find_gradients(*args: Any) -> Grads:
    *rendered, saved, arriving, wanted = args
    given = Rendered(*rendered)
    return flash_backward.backward(given, Saved(*saved), Arriving(*arriving), Grads(*wanted))


def _backward(*args: Any) -> list[Tensor]:
    """The gradients wanted, in the order of `Grads`; empty tensors where none is."""
    found, wanted, q = _find_gradients(*args), args[-1], args[0]
    none = [x is None or not wants for x, wants in zip(found, wanted, strict=True)]
    return [q.new_empty(0) if no else x for x, no in zip(found, none, strict=True)]


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? first, Tensor? past, Tensor? lo, "
    "Tensor? hi, Tensor? query_ids, Tensor? key_ids, Tensor? scattered, Tensor? words, "
    "Tensor? slopes, Tensor? query_places, Tensor? key_places, Tensor? band, Tensor? dense, "
    "Tensor? seed, float factor, float? cap, float dropout, bool covered, bool joined, "
    "SymInt? left, SymInt? right, bool hides"
)
_forward_op = torch.library.custom_op(
    "regard::flash",
    _forward,
    mutates_args=(),
    schema=f"({_CALL}, bool[] asked, Tensor? mass) -> Tensor[]",
)
_backward_op = torch.library.custom_op(
    "regard::flash_backward",
    _backward,
    mutates_args=(),
    schema=f"({_CALL}, Tensor?[] saved, Tensor?[] arriving, bool[] wanted) -> Tensor[]",
)


_forward_op.register_vmap(_vmap_forward)


@_forward_op.register_fake
def _(*args: Any) -> list[Tensor]:
    *rendered, asked, mass = args
    given, ask = Rendered(*rendered), Ask(*asked)
    shape = given.q.shape[:3]
    types = {"peak_key": torch.int64}
    rows = [
        given.q.new_empty(shape, dtype=types.get(name, torch.float32))
        for name in _row_fields(ask, mass)[1:]
    ]
    return [given.q.new_empty((*shape, given.v.shape[3])), *rows]


@_backward_op.register_fake
def _(*args: Any) -> list[Tensor]:
    *rendered, _saved, _arriving, wanted = args
    given = Rendered(*rendered)
    owners: list[Any] = [given[number] for number in LEARNED]
    return [
        torch.empty_like(x) if wants else given.q.new_empty(0)
        for x, wants in zip(owners, wanted, strict=True)
    ]


class Fixed(NamedTuple):
    """The constants of a call: numbers of `Rendered`, and the rule without its tensors.

    packed: None where a vmap was folded into the batch, for which the rule does not hold.
    """

    numbers: tuple[Any, ...]
    ask: Ask
    packed: Packed | None


def _begin(fixed: Fixed, mass: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    given = Rendered(*tensors[:TENSORS], *fixed.numbers)  # type: ignore[arg-type]
    return tuple(_run_forward(given, fixed.ask, mass))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the backward needs."""
    ctx.fixed, _, *tensors = inputs
    n_learned = 2 + ctx.fixed.ask.entropy
    ctx.mark_non_differentiable(*output[n_learned:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*_saved(output, ctx.fixed.ask), *tensors)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, arriving, tensors = _arrive(ctx.saved_tensors, grads)
    needed = ctx.needs_input_grad[2:]
    return None, None, *find_gradients(ctx.fixed, tensors, saved, arriving, needed)


def find_gradients(
    fixed: Fixed,
    tensors: list[Tensor | None],
    saved: Saved,
    arriving: Arriving,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients of tensors: those of `Rendered`, then those of the rule."""
    if _is_differentiated(arriving):
        return _by_tiles(fixed, tensors, saved, arriving, needed)
    given = (*tensors[:TENSORS], *fixed.numbers)
    return _by_kernels(_run_backward, given, saved, arriving, needed)


class _Flash(torch.autograd.Function):
    """Our kernels, differentiable in q, k, v, sinks and every rendered bias; see the module."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _begin(*inputs)
        _keep(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)


class _MappedFlash(torch.autograd.Function):
    """`_Flash` inside vmap, which needs a `setup_context`; torch is slower with that form."""

    forward = staticmethod(_begin)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_differentiate)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fixed: Fixed, mass: Tensor | None, *tensors: Any) -> Any:
        n, axes = info.batch_size, in_dims[2 : 2 + TENSORS]
        folded, samples = vmap.fold_call(tensors[:TENSORS], axes, n)
        mass = vmap.fold_rule(mass, in_dims[1], n, samples)
        run: Any = _MappedFlash.apply
        found, dims = vmap.unfold(run(fixed._replace(packed=None), mass, *folded), n)
        return tuple(found), tuple(dims)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.numbers = inputs[TENSORS:-2]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*_saved(output, Ask(*inputs[-2])), *inputs[:TENSORS])


def _saved(output: Sequence[Tensor], ask: Ask) -> Saved:
    """The outputs of the forward that the backward needs."""
    return Saved(output[0], output[1], output[2] if ask.entropy else None)


def _traced_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    saved, arriving, tensors = _arrive(ctx.saved_tensors, grads)
    given, needed = (*tensors, *ctx.numbers), ctx.needs_input_grad
    return tuple(_by_kernels(_backward_op, given, saved, arriving, needed))


_forward_op.register_autograd(_traced_backward, setup_context=_save)


def _arrive(
    saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Saved, Arriving, list[Tensor | None]]:
    """The saved statistics of rows, their incoming gradients, and the tensors of the call."""
    rows = Saved(*saved[:3])
    arriving = Arriving(grads[0], grads[1], None if rows.entropy is None else grads[2])
    return rows, arriving, [*saved[3:]]


def _by_kernels(
    run: Callable[..., Sequence[Tensor | None]],
    given: tuple[Any, ...],
    saved: Saved,
    arriving: Arriving,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients by our kernels, one for each input; None where it is not needed."""
    wanted = [needed[number] for number in LEARNED]
    found = run(*given, list(saved), list(arriving), wanted)
    result: list[Tensor | None] = [None] * len(needed)
    for number, wants, grad in zip(LEARNED, wanted, found, strict=True):
        result[number] = grad if wants else None
    return result


def _is_differentiated(arriving: Arriving) -> bool:
    """Whether the backward is itself to be differentiated, or gets a batch of gradients."""
    if torch.is_grad_enabled():
        return True
    return any(grad is not None and is_batched_gradient(grad) for grad in arriving)


def _by_tiles(
    fixed: Fixed,
    tensors: list[Tensor | None],
    saved: Saved,
    arriving: Arriving,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients by differentiable operations; the bias's own tensors get theirs directly."""
    given = Rendered(*tensors[:TENSORS], *fixed.numbers)  # type: ignore[arg-type]
    if fixed.packed is None:
        raise RuntimeError(
            "what ran inside vmap cannot be differentiated twice by our kernels, nor by a batch of "
            'gradients; backend="blockwise" can'
        )
    held = [x for x in tensors[TENSORS:] if x is not None]
    rule = unpack(fixed.packed._replace(tensors=held), given.shape)
    call = Call(
        q=given.q,
        k=given.k,
        v=given.v,
        rule=rule,
        sinks=given.sinks,
        dropout=given.dropout,
        seed=given.seed,
    )
    leaves = rule.bias_leaves()
    places = [next(n for n, x in enumerate(held) if x is leaf) for leaf in leaves]
    wants_bias = any(needed[TENSORS + n] for n in places)
    if wants_bias and rule.bias is not None and not rule.bias.gives_gradient:
        raise RuntimeError(
            f"{type(rule.bias).__name__} does not tell its gradient (`grad_at`), so it cannot be "
            'differentiated twice by our kernels; backend="reference" can'
        )
    total = torch.ones_like(saved.lse)
    if given.sinks is not None:
        total = total - (given.sinks.float()[:, None] - saved.lse).exp()
    spread = saved.lse if saved.entropy is None else saved.entropy
    rows = Rows(saved.output, saved.lse, total, spread, *[saved.lse] * 7)
    incoming = blockwise_backward.Given(arriving.output, arriving.lse, None, arriving.entropy)
    found = blockwise_backward.backward_pass(call, rows, incoming, wants_bias)
    result: list[Tensor | None] = [None] * len(needed)
    result[:3] = found.q, found.k, found.v
    result[3] = None if given.sinks is None else found.sinks
    for number, grad in zip(places, found.leaves, strict=wants_bias):
        result[TENSORS + number] = grad
    return result
