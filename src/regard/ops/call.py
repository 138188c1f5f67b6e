"""One call of attention, as a value: everything that was asked for, checked.

`Rule` says how scores are computed and which of them count: scale, softcap, bias, mask, at one
shape. `Call` is a rule with q, k, v, sinks, dropout and wants; a backend is a function of it.
`make_call` checks what a user gave, and everything after it may assume a valid call. Where a kernel
needs a tensor of numbers instead of a mask and a bias, these are rendered here, by `Rule.block`,
and nowhere else.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard._check import FLOAT_TYPES, check_float, check_probability, check_shapes
from regard._torch import (
    is_plainly_eager,
    is_traced_by_fx,
    is_transformed,
    is_transforming,
    takes_tangents,
)
from regard.ops.bias import Bias, DenseBias
from regard.ops.dropout import as_seed, draw_seed
from regard.ops.mask import Mask
from regard.ops.masks import Dense
from regard.ops.shape import Shape, Tile
from regard.ops.wants import Wants


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """How scores are computed and which count: scale, softcap, bias, mask, in this order."""

    shape: Shape
    scale: float | None = None
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None

    def factor(self, head_dim: int) -> float:
        """What q kᵀ is multiplied by: the scale given, else 1/√D (1 when there is no width)."""
        return self.scale if self.scale is not None else max(head_dim, 1) ** -0.5

    def hides(self) -> bool:
        """Whether some pair may be hidden: by the mask, or by a bias of -inf."""
        return self.mask is not None or self.bias_hides()

    def bias_hides(self) -> bool:
        """Whether the bias may be -inf somewhere, and so hide a pair."""
        return self.bias is not None and self.bias.hides

    def is_relative(self) -> bool:
        """Whether every number of the rule depends on the head and on i - j alone."""
        return (self.mask is None or self.mask.relative) and (
            self.bias is None or self.bias.relative
        )

    def bias_leaves(self) -> list[Tensor]:
        """The float tensors to which gradients of the bias may flow."""
        return [] if self.bias is None else self.bias.leaves()

    def tensors(self) -> list[Tensor]:
        """Every tensor the rule holds."""
        return [t for term in (self.mask, self.bias) if term is not None for t in term.tensors()]

    def on(self, device: torch.device) -> Rule:
        """The same rule with its tensors on a device."""
        mask, bias = self.mask, self.bias
        if (mask is None and bias is None) or all(t.device == device for t in self.tensors()):
            return self
        return replace(
            self,
            mask=None if mask is None else mask.to(device),
            bias=None if bias is None else bias.to(device),
        )

    def block(self, tile: Tile, like: Tensor, with_mask: bool = True) -> Tensor:
        """What is added to the scores of a tile, -inf where no look is allowed.

        In the type and on the device of `like`; (B or 1, H or 1, t, s).
        """
        bias = allowed = None
        if self.bias is not None:
            bias = self.bias.block(self.shape, tile, like.device, like.dtype)
        if self.mask is not None and with_mask:
            allowed = self.mask.block(self.shape, tile, like.device)
        return _join(bias, allowed, like, (tile.t1 - tile.t0, tile.s1 - tile.s0))

    def band(self, i: Tensor, j: Tensor, like: Tensor) -> Tensor:
        """What is added to the scores at positions i (t, 1) and j (s,), -inf where hidden.

        Only for a rule that is relative; (1, H or 1, t, s).
        """
        h, bias, allowed = torch.arange(self.shape.H, device=like.device)[:, None, None], None, None
        if self.bias is not None:
            bias = self.bias.add(h, h, i, j, self.shape, like.dtype)
        if self.mask is not None:
            allowed = self.mask.allows(h, h, i, j, self.shape)
        return _join(bias, allowed, like, (i.shape[0], j.shape[0]))


def _join(
    bias: Tensor | None, allowed: Tensor | None, like: Tensor, size: tuple[int, int]
) -> Tensor:
    """Bias and mask as one tensor to add, -inf where hidden; four axes, the last two full-size."""
    values = like.new_zeros((1, 1)) if bias is None else bias
    if allowed is not None:
        values = torch.where(allowed, 0.0 if bias is None else bias, -math.inf).to(like.dtype)
    lead = (1,) * (4 - values.dim()) + tuple(values.shape[:-2])
    return values.expand(*lead[-2:], *size)


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
    caller: int | None = None
    """The id of the module that made the call, where a compiled graph recorded it."""
    rule_number: int | None = None
    """The number of the rule's tensors, where a compiled graph has one (`rule_numbers.py`)."""
    rows: dict[str, Tensor] | None = None
    """Row statistics of the pass that computed the output, if a hook asked for any (`flash.py`)."""

    def tensors(self) -> list[Tensor]:
        """Every tensor of the call."""
        given = (self.q, self.k, self.v, self.sinks)
        return [t for t in given if t is not None] + self.rule.tensors()

    def seeded(self) -> Call:
        """The call with a seed for its dropout, drawn now if none was given."""
        if self.dropout == 0.0 or self.seed is not None:
            return self
        return replace(self, seed=draw_seed(self.q.device))

    def needs_grad(self) -> bool:
        """Whether a gradient may be asked of some tensor of the call."""
        if not torch.is_grad_enabled():
            return False
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        return any([t.requires_grad for t in self.tensors()])

    def is_unreadable(self) -> bool:
        """Whether values of tensors cannot be read now: while tracing, or inside a transform."""
        return torch.compiler.is_compiling() or is_traced_by_fx() or self.transformed

    def has_tangent(self) -> bool:
        """Whether a forward-mode derivative is, or may be, taken through the call.

        Below a reverse-mode transform (a Hessian) tangents do not show, so any transformed tensor
        counts.
        """
        if not takes_tangents() or torch.compiler.is_compiling():
            return False
        return any(
            t.is_floating_point()
            and (is_transformed(t) or forward_ad.unpack_dual(t).tangent is not None)  # type: ignore[no-untyped-call]
            for t in self.tensors()
        )


class Given(TypedDict):
    """The arguments beside q, k and v that `attention`, `observe` and `explain` share."""

    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
) -> Call:
    """Check all arguments and build a call from them."""
    q, k, v = under_autocast(q, k, v)
    rule: Given = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    call = gather_call(q, k, v, check_inputs(q, k, v), rule)
    if dropout != 0.0:
        dropout = check_probability("dropout", dropout)
        drawn = as_seed(seed, q.device) if dropout > 0.0 and seed is not None else None
        call = replace(call, dropout=dropout, seed=drawn)
    if is_transforming() and any(is_transformed(t) for t in call.tensors()):
        return replace(call, transformed=True)
    return call


def gather_call(q: Tensor, k: Tensor, v: Tensor, shape: Shape, given: Given) -> Call:
    """Build a call from inputs of a checked shape; all other arguments are checked here."""
    mask, bias = as_mask(given["mask"]), as_bias(given["bias"])
    scale, softcap, sinks = given["scale"], given["softcap"], given["sinks"]
    if mask is not None:
        mask.check(shape)
        # One query on the last key sees all keys, so a step of causal generation is a plain call.
        if mask.hides_nothing(shape):
            mask = None
    if bias is not None:
        bias.check(shape)
    rule = Rule(
        shape=shape,
        scale=check_number("scale", scale) if scale is not None else None,
        mask=mask,
        bias=bias,
        softcap=check_number("softcap", softcap, positive=True) if softcap is not None else None,
    ).on(q.device)
    if sinks is not None:
        check_shapes({"q": (q, "B H T D"), "sinks": (sinks, "H")})
        check_float("sinks", sinks)
    return Call(q=q, k=k, v=v, rule=rule, sinks=sinks)


def plain_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int] | None:
    """B, H, T and S of inputs that the fast paths accept; None sends the call through `make_call`.

    None: inputs that are empty or do not fit each other, values of another width, subclasses of
    Tensor, tracing, transforms, forward-mode derivatives, autocast.
    """
    if not (type(q) is type(k) is type(v) is Tensor) or q.is_nested or k.is_nested:
        return None
    if not is_plainly_eager():
        return None
    of_q, of_k, dtype, device = q.shape, k.shape, q.dtype, q.device
    if len(of_q) != 4 or len(of_k) != 4 or v.shape != of_k:
        return None
    (B, H, T, D), (b, G, S, d) = of_q, of_k
    if b != B or d != D or not (B and H and T and D and G and S) or H % G:
        return None
    if dtype not in FLOAT_TYPES or k.dtype != dtype or v.dtype != dtype:
        return None
    if k.device != device or v.device != device or not (q.is_cuda or q.is_cpu):
        return None
    return B, H, T, S


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """The mask itself; a bool tensor becomes `Dense`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Bias):
        raise TypeError(f"{type(mask).__name__} is a bias: pass it as bias=, not mask=")
    return Dense(mask)


def as_bias(bias: Bias | Tensor | None) -> Bias | None:
    """The bias itself; a float tensor becomes `DenseBias`."""
    if bias is None or isinstance(bias, Bias):
        return bias
    if isinstance(bias, Mask):
        raise TypeError(f"{type(bias).__name__} is a mask: pass it as mask=, not bias=")
    return DenseBias(bias)


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """The shape of a call; raises an error that says which of its tensors do not fit."""
    fits = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if fits and (q.is_nested or k.is_nested or v.is_nested):
        raise TypeError(
            "q, k and v must be plain tensors, got a NestedTensor: pad with "
            "t.to_padded_tensor(0.0) and name the padding by mask=Lengths(lengths), or pack with "
            "mask=Documents(ids)"
        )
    if not fits or q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        check_shapes({"q": (q, "B H T D"), "k": (k, "B G S D"), "v": (v, "B G S E")})
    (B, H, T, D), (b, G, S, d), of_v = q.shape, k.shape, v.shape
    if b != B or d != D or of_v[0] != B or of_v[1] != G or of_v[2] != S:
        check_shapes({"q": (q, "B H T D"), "k": (k, "B G S D"), "v": (v, "B G S E")})
    dtype, device = q.dtype, q.device
    if dtype not in FLOAT_TYPES:
        check_float("q", q)
    if k.dtype != dtype or v.dtype != dtype or k.device != device or v.device != device:
        name, x = ("k", k) if k.dtype != dtype or k.device != device else ("v", v)
        raise TypeError(
            f"q, k and v must have one type and one device: q is {dtype} on {device}, "
            f"{name} is {x.dtype} on {x.device}"
        )
    if (G == 0) != (H == 0) or (G and H % G):
        raise ValueError(f"the query heads H={H} must be a multiple of the key heads G={G}")
    return Shape(B, H, T, S)


def check_number(name: str, value: float, positive: bool = False) -> float:
    """A finite number, above zero where asked."""
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a number, got a tensor; a learned {name} is multiplied into q instead"
        )
    if isinstance(value, str):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    # By comparisons, which a compiler can trace where the number is symbolic.
    if not -math.inf < number < math.inf or (positive and number <= 0):
        raise ValueError(
            f"{name} must be a finite number{' above 0' if positive else ''}, got {value}"
        )
    return number


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast inputs to autocast's dtype, as torch's own attention does; float64 stays."""
    if not isinstance(q, Tensor) or not is_autocast(q.device.type):
        return q, k, v
    # Anything but float tensors is left to the checks, which raise an error.
    if any(
        not isinstance(x, Tensor) or x.dtype == torch.float64 or not x.is_floating_point()
        for x in (q, k, v)
    ):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast: it was applied to the inputs, and the dtypes after that stay."""
    if is_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def is_autocast(device_type: str) -> bool:
    """Whether autocast is on; the meta device has none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and softmax: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32
