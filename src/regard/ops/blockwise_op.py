"""The tiled passes as one operation, for autograd, for `torch.func` and for compiled graphs.

Autograd and compilers pass tensors and constants, so masks and biases are flattened to these
(`pack.py`). In eager mode the passes are called directly. While a graph is being traced they are
the custom ops `regard::blockwise` and `regard::blockwise_backward`, opaque to the compiler: one
node of the graph, whatever the length. Each has a fake implementation that gives the shapes.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.blockwise import NOTHING, Ask, Rows, first_pass
from regard.ops.blockwise_backward import Given, backward_pass
from regard.ops.call import Call, score_dtype
from regard.ops.pack import Form, Packed, pack, spell, unpack
from regard.ops.shape import Shape


class Flat(NamedTuple):
    """A call flattened to the tensors and constants that autograd and compilers can carry."""

    form: Form | str
    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    dropout: float
    seed: Tensor | None

    def call(self) -> Call:
        """Rebuild the call."""
        (B, H, T, _), S = self.q.shape, self.k.shape[2]
        rule = unpack(Packed(*self[:4]), Shape(B, H, T, S))
        return Call(
            q=self.q,
            k=self.k,
            v=self.v,
            rule=rule,
            sinks=self.sinks,
            dropout=self.dropout,
            seed=self.seed,
        )


def _forward(*args: Any) -> list[Tensor]:
    *flat, asked, mass = args
    # Contiguous, as the fake implementation says, whatever the strides of the inputs.
    return [x.contiguous() for x in first_pass(Flat(*flat).call(), Ask(*asked), mass)]


def _backward(*args: Any) -> list[Tensor]:
    *flat, rows, given, wants_bias = args
    grads = backward_pass(Flat(*flat).call(), Rows(*rows), Given(*given), wants_bias)
    return [x.contiguous() for x in (grads.q, grads.k, grads.v, grads.sinks, *grads.leaves)]


_CALL = (
    "str form, Tensor[] tensors, SymInt[] ints, float[] floats, Tensor q, Tensor k, Tensor v, "
    "Tensor? sinks, float dropout, Tensor? seed"
)
_forward_op = torch.library.custom_op(
    "regard::blockwise",
    _forward,
    mutates_args=(),
    schema=f"({_CALL}, bool[] asked, Tensor? mass) -> Tensor[]",
)
_backward_op = torch.library.custom_op(
    "regard::blockwise_backward",
    _backward,
    mutates_args=(),
    schema=f"({_CALL}, Tensor[] rows, Tensor?[] given, bool wants_bias) -> Tensor[]",
)


@_forward_op.register_fake
def _(*args: Any) -> list[Tensor]:
    *taken, asked, mass = args
    flat, ask = Flat(*taken), Ask(*asked)
    B, H, T, _D = flat.q.shape
    row = flat.q.new_empty((B, H, T), dtype=score_dtype(flat.q.dtype))

    def answer(yes: bool, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(row, dtype=dtype) if yes else row.new_empty(0, dtype=dtype)

    return list(
        Rows(
            output=flat.q.new_empty((B, H, T, flat.v.shape[3])),
            lse=torch.empty_like(row),
            total=torch.empty_like(row),
            entropy=answer(ask.entropy, row.dtype),
            peak=answer(ask.peak, row.dtype),
            peak_key=answer(ask.peak, torch.int64),
            peak_logit=answer(ask.peak, row.dtype),
            distance=answer(ask.distance, row.dtype),
            mass=answer(mass is not None, row.dtype),
            row_max=torch.empty_like(row),
            denominator=torch.empty_like(row),
        )
    )


@_backward_op.register_fake
def _(*args: Any) -> list[Tensor]:
    *flat, _rows, _given, wants_bias = args
    call = Flat(*flat).call()
    leaves = call.rule.bias_leaves() if wants_bias else []
    sinks = call.q.new_empty(0) if call.sinks is None else call.sinks
    return [x.new_empty(x.shape) for x in (call.q, call.k, call.v, sinks, *leaves)]


class _Fixed(NamedTuple):
    """The constants of a call; leaves: indices of the rule's tensors that may have a gradient."""

    form: Form | str
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    dropout: float
    ask: Ask
    leaves: tuple[int, ...]


class _Blockwise(torch.autograd.Function):
    """One pass over the tiles; differentiable in q, k, v, sinks and the bias, to any order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        fixed: _Fixed,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        seed: Tensor | None,
        mass: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        run = _forward_op if torch.compiler.is_compiling() else _forward
        rule = (fixed.form, list(tensors), list(fixed.ints), list(fixed.floats))
        return tuple(run(*rule, q, k, v, sinks, fixed.dropout, seed, list(fixed.ask), mass))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.fixed, q, k, v, sinks, seed, _, *tensors = inputs
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, seed, *output[:4], *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, seed, output, lse, total, entropy, *tensors = ctx.saved_tensors
        fixed: _Fixed = ctx.fixed
        wants_bias = any(ctx.needs_input_grad[7 + number] for number in fixed.leaves)
        given = [grads[0], grads[1], grads[2], grads[3] if entropy.dim() > 1 else None]
        rows = [output, lse, total, entropy, *[lse] * 7]
        run = _backward_op if torch.compiler.is_compiling() else _backward
        rule = (fixed.form, tensors, list(fixed.ints), list(fixed.floats))
        found = run(*rule, q, k, v, sinks, fixed.dropout, seed, rows, given, wants_bias)
        result: list[Tensor | None] = [None] * (7 + len(tensors))
        result[1:4] = found[:3]
        result[4] = found[3] if sinks is not None else None
        for number, grad in zip(fixed.leaves, found[4:], strict=wants_bias):
            result[7 + number] = grad
        return tuple(result)


def refuse(call: Call) -> str | None:
    """Why the tiles cannot run a call, such as for `weights` or a forward-mode derivative."""
    if call.wants is not None and call.wants.weights:
        return "it never builds the T × S matrix that `weights` asks for; reference does"
    if call.has_tangent():
        return "it has no forward-mode derivative; reference has"
    if call.wants is not None and call.wants.second_pass() and call.is_unreadable():
        return "its second pass reads values, which tracing and torch.func do not give"
    bias = call.rule.bias
    learned = bias is not None and any(leaf.requires_grad for leaf in bias.leaves())
    if bias is not None and not bias.gives_gradient and learned and torch.is_grad_enabled():
        return f"{type(bias).__name__} does not tell its gradient (`grad_at`); reference has it"
    return None


def run(call: Call) -> Tensor:
    """Attention over tiles."""
    return run_blockwise(call).output


def run_blockwise(call: Call, ask: Ask = NOTHING, mass: Tensor | None = None) -> Rows:
    """Attention over tiles; `rows.output`, `rows.lse` and `rows.entropy` carry gradients."""
    call = call.seeded()
    inputs, sinks, seed, dropout = (call.q, call.k, call.v), call.sinks, call.seed, call.dropout
    packed, leaves = pack(call.rule), call.rule.bias_leaves()
    floats = (*inputs, sinks, *leaves)
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats)
    if torch.compiler.is_compiling():
        assert not isinstance(packed.form, str)
        packed = packed._replace(form=spell(packed.form))
        # A traced autograd function accepts no tensor twice, as in attention(x, x, x).
        inputs = (call.q, call.k.view_as(call.k), call.v.view_as(call.v))
        if not wants_grad:
            return Rows(*_forward_op(*packed, *inputs, sinks, dropout, seed, list(ask), mass))
    learned = tuple(n for n, t in enumerate(packed.tensors) if any(t is leaf for leaf in leaves))
    fixed = _Fixed(packed.form, tuple(packed.ints), tuple(packed.floats), dropout, ask, learned)
    rows = _Blockwise.apply(fixed, *inputs, sinks, seed, mass, *packed.tensors)  # type: ignore[no-untyped-call]
    return Rows(*rows)
