"""Which path runs: one table, one loop, a sentence from each that refuses.

A backend is a name, a function that says why it refuses a call (None when it does not), and what it
does. `choose` takes the first in the device's order that does not refuse; `backend=` names the only
candidate. No option is dropped on the way: a backend honours all of a call or refuses it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard._check import is_empty, is_transformed
from regard.ops import decode, flex, observe, reference, sdpa
from regard.ops.bias import Bias, DenseBias, Sum
from regard.ops.blockwise_op import run_blockwise
from regard.ops.dropout import draw_seed
from regard.ops.kernels import row_stats
from regard.ops.kernels.inputs import find_bounds
from regard.ops.rule import Rule
from regard.ops.shape import Shape
from regard.ops.wants import Observation, Wants

MASK_ENTRIES = 2**26
"""The largest T × S mask that is rendered whole for a kernel on a device."""
WIDEST = 256
"""The widest head our kernels take."""
LITTLE = 2**16
"""Weights below which tiles look at them, where nothing has to be compiled first."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One call of attention, checked and complete."""

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    wants: Wants | None = None
    transformed: bool = False
    """Whether a tensor of the call is being carried through a `torch.func` transform."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.q, self.k, self.v

    @property
    def drop(self) -> tuple[float, Tensor | None]:
        """The dropout probability and its seed, drawn now when none was given."""
        drawn = self.dropout > 0.0 and self.seed is None
        return self.dropout, draw_seed(self.q.device) if drawn else self.seed

    def tensors(self) -> list[Tensor]:
        """Every tensor of the call."""
        given = (self.q, self.k, self.v, self.sinks)
        return [t for t in given if t is not None] + self.rule.tensors()


@dataclass(frozen=True)
class Backend:
    """A path to the output: why it refuses, and how it runs."""

    name: str
    refusal: Callable[[Call], str | None]
    attend: Callable[[Call], Tensor]
    observe: Callable[[Call], Observation] | None = None


@dataclass(frozen=True)
class Explanation:
    """The verdict of each backend on a call, in order; `chosen` is the one that runs."""

    chosen: str
    verdicts: dict[str, str | None]

    def __str__(self) -> str:
        lines = []
        for name, reason in self.verdicts.items():
            mark = "runs" if name == self.chosen else "could" if reason is None else "refuses"
            lines.append(f"{name:<10} {mark:<8} {reason or ''}".rstrip())
        return "\n".join(lines)


def refuse_reference(call: Call) -> str | None:
    """The definition takes everything."""
    return None


def refuse_blockwise(call: Call) -> str | None:
    """Everything but the whole matrix and forward-mode derivatives."""
    if call.wants is not None and call.wants.weights:
        return "it never builds the T × S matrix that `weights` asks for; reference does"
    if has_tangent(call):
        return "it has no forward-mode derivative; reference has"
    if call.wants is not None and call.wants.second_pass() and is_unread(call):
        return "its second pass reads values, which tracing and torch.func do not give"
    return None


def refuse_sdpa(call: Call) -> str | None:
    """What torch's fused kernels cannot say exactly."""
    reason = refuse_always(call)
    if reason is not None:
        return reason
    if call.rule.softcap is not None:
        return "torch's fused kernels have no softcap"
    if call.sinks is not None:
        return "torch's fused kernels have no sinks"
    if call.dropout > 0.0 and call.q.device.type != "cuda":
        return "torch's fused kernels have dropout on CUDA alone"
    if call.dropout >= 1.0:
        return "torch's fused kernels cannot drop every weight"
    if call.rule.bias is not None:
        if any(leaf.requires_grad for leaf in call.rule.bias_leaves()):
            return "torch's fused kernels give no gradient to the bias"
        wide = any(leaf.dtype != torch.float16 for leaf in dense_values(call.rule.bias))
        if call.q.dtype == torch.float16 and wide:
            return "the kernel adds a bias in float16, whose range a wider bias may leave"
    if call.transformed:
        return "torch's fused kernels do not run inside torch.func transforms"
    if is_empty(call.q, call.k):
        return "torch's fused kernels are not asked for empty inputs"
    if sdpa.flags(call.rule) is None and call.q.device.type != "cpu":
        entries = call.rule.shape.T * call.rule.shape.S
        if entries > MASK_ENTRIES:
            return f"torch's fused kernels would need a rendered mask of over {MASK_ENTRIES:,}"
    return None


def refuse_flex(call: Call) -> str | None:
    """What compiled FlexAttention does not do, here or at all."""
    reason = refuse_always(call)
    if reason is not None:
        return reason
    if call.dropout > 0.0:
        return "FlexAttention has no dropout"
    if call.transformed:
        return "FlexAttention does not run inside torch.func transforms"
    if call.q.dtype == torch.float64:
        return "FlexAttention computes scores in float32, which float64 does not allow"
    if is_empty(call.q, call.k, call.v):
        return "FlexAttention does not take empty inputs"
    if (
        call.q.device.type == "cpu"
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in call.tensors())
    ):
        return "FlexAttention has no backward pass on the CPU"
    if call.q.device.type == "cpu" and not flex.runs_on_this_cpu():
        return "FlexAttention has no kernel for a CPU without AVX2"
    if call.q.device.type == "cpu" and call.sinks is not None:
        return "FlexAttention gives no log-sum on the CPU, which sinks need"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention is not asked for on {call.q.device.type}"
    return None


def refuse_triton(call: Call) -> str | None:
    """All but one query a row, or looking at the weights of any; no gradients, on a GPU."""
    reason = refuse_one_query(call) if call.wants is None else refuse_seeing(call, call.wants)
    if reason is not None:
        return reason
    reason = refuse_tensors(call.q, max(call.q.shape[3], call.v.shape[3]))
    if reason is not None:
        return reason
    if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors()):
        return "our kernels have no backward pass so far"
    if call.transformed:
        return "our kernels do not run inside torch.func transforms"
    if is_empty(call.q, call.k) or (call.wants is None and is_empty(call.v)):
        return "our kernels are not asked for empty inputs"
    return None


def refuse_tensors(q: Tensor, width: int) -> str | None:
    """What none of our kernels takes, whatever it is asked for; width: the widest of the heads."""
    if q.device.type != "cuda":
        return f"our kernels run on a GPU, and q is on {q.device.type}"
    if q.dtype == torch.float64:
        return "our kernels compute scores in float32, which float64 does not allow"
    if width > WIDEST:
        return f"our kernels take head widths up to {WIDEST}"
    # A graph for a GPU is compiled by triton itself, so there the question does not arise.
    if not torch.compiler.is_compiling() and not has_triton():
        return "the package triton is not installed"
    return None


def refuse_one_query(call: Call) -> str | None:
    """What the kernel for one query a row does not do."""
    reason = refuse_always(call)
    if reason is not None:
        return reason
    if call.dropout > 0.0:
        return "our kernel for one query has no dropout"
    if call.rule.shape.T != 1:
        # Naming how many there are would tie a graph that is being traced to this one length.
        return "our kernel is for one query a row so far"
    return None


def refuse_seeing(call: Call, wants: Wants) -> str | None:
    """What the kernels that look at weights do not tell."""
    if wants.weights:
        return "it never builds the T × S matrix that `weights` asks for; reference does"
    if wants.mass is not None:
        return "our kernels do not tell the mass on given keys; blockwise does"
    if call.dropout > 0.0:
        return "our kernels that look at weights have no dropout; blockwise has"
    if call.rule.bias is not None:
        return "our kernels that look at weights have no bias; blockwise has"
    if is_unread(call):
        return "it is not run inside compiled graphs and torch.func, where blockwise is"
    if find_bounds(call.rule, call.q.device) is None:
        return "our kernels that look at weights need a mask in which each row sees one interval"
    if has_tangent(call):
        return "it has no forward-mode derivative; reference has"
    return None


def is_little(shape: Shape) -> bool:
    """Whether there are so few weights that compiling kernels to look at them takes longer."""
    return shape.B * shape.H * shape.T * shape.S < LITTLE


@functools.cache
def has_triton() -> bool:
    """Whether the package triton is there."""
    return importlib.util.find_spec("triton") is not None


def dense_values(bias: Bias | None) -> list[Tensor]:
    """The tensors of a bias that are added as they are."""
    if isinstance(bias, Sum):
        return dense_values(bias.one) + dense_values(bias.other)
    return [bias.values] if isinstance(bias, DenseBias) else []


def refuse_always(call: Call) -> str | None:
    """What no kernel of torch's does as the reference does."""
    if call.wants is not None:
        return "it tells nothing about the weights"
    if call.dropout > 0.0 and call.seed is not None:
        return "it draws its own dropout, not the one the seed fixes for every path"
    if has_tangent(call):
        return "it has no forward-mode derivative; reference has"
    return None


def has_tangent(call: Call) -> bool:
    """Whether a forward-mode derivative is, or may be, taken through the call.

    Below a reverse-mode transform (a Hessian) tangents do not show, so any transformed tensor
    counts.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(
        t.is_floating_point()
        and (is_transformed(t) or forward_ad.unpack_dual(t).tangent is not None)  # type: ignore[no-untyped-call]
        for t in call.tensors()
    )


def is_unread(call: Call) -> bool:
    """Whether values cannot be looked at now."""
    return torch.compiler.is_compiling() or call.transformed


def _attend_reference(call: Call) -> Tensor:
    return reference.attend(*call.inputs, call.rule, call.sinks, *call.drop)


def _attend_blockwise(call: Call) -> Tensor:
    return run_blockwise(call.inputs, call.rule, call.sinks, call.drop).output


def _observe_reference(call: Call) -> Observation:
    assert call.wants is not None
    return observe.by_reference(call.inputs, call.rule, call.sinks, call.drop, call.wants)


def _observe_blockwise(call: Call) -> Observation:
    assert call.wants is not None
    return observe.by_tiles(call.inputs, call.rule, call.sinks, call.drop, call.wants)


def _observe_triton(call: Call) -> Observation:
    assert call.wants is not None
    output = call.q.new_zeros((*call.q.shape[:3], 0))
    if call.v.shape[3]:
        blind = replace(call, wants=None)
        output = choose(blind, "auto").attend(blind)
    return row_stats.by_kernels(call.q, call.k, call.rule, call.sinks, call.wants, output)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", refuse_reference, _attend_reference, _observe_reference),
        Backend("blockwise", refuse_blockwise, _attend_blockwise, _observe_blockwise),
        Backend(
            "sdpa", refuse_sdpa, lambda call: sdpa.attend(*call.inputs, call.rule, call.dropout)
        ),
        Backend("flex", refuse_flex, lambda call: flex.attend(*call.inputs, call.rule, call.sinks)),
        Backend(
            "triton",
            refuse_triton,
            lambda call: decode.attend(*call.inputs, call.rule, call.sinks),
            _observe_triton,
        ),
    )
}

ORDER = {
    "cpu": ("sdpa", "blockwise", "reference", "flex"),
    "cuda": ("sdpa", "triton", "flex", "blockwise", "reference"),
}
"""By measured speed, compiling counted in: on a CPU FlexAttention runs only when named."""


def order_of(call: Call) -> tuple[str, ...]:
    """The backends to be asked, in turn."""
    order = ORDER.get(call.q.device.type, ("sdpa", "blockwise", "reference"))
    if call.q.device.type != "cuda":
        return order
    if call.wants is not None and is_little(call.rule.shape):
        # Tiles look at so few weights before kernels are compiled for it.
        return ("blockwise", *(name for name in order if name != "blockwise"))
    if sdpa.flags(call.rule) is None:
        # A mask that torch's kernels have to be given whole.
        return ("triton", *(name for name in order if name != "triton"))
    return order


def verdicts(call: Call) -> dict[str, str | None]:
    """Why each backend refuses the call, None for those that do not, in the device's order."""
    return {name: BACKENDS[name].refusal(call) for name in order_of(call)}


def choose(call: Call, backend: str) -> Backend:
    """The first in order that does not refuse, or the one named, or an error that says why not."""
    if backend == "auto":
        for name in order_of(call):
            if BACKENDS[name].refusal(call) is None:
                return BACKENDS[name]
    if backend not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ValueError(f"unknown backend {backend!r}; expected one of {known}")
    reason = BACKENDS[backend].refusal(call)
    if reason is not None:
        raise ValueError(
            f'backend "{backend}" refuses this call: {reason}; '
            'backend="auto" finds one that does not'
        )
    return BACKENDS[backend]


def explain(call: Call, backend: str) -> Explanation:
    """All verdicts, and which backend runs."""
    return Explanation(choose(call, backend).name, verdicts(call))
