"""The public doors: `attention`, `observe`, `explain`.

A call is checked here, once, in letters: shapes, types, the rule against the shape. Then the first
backend that does not refuse runs it. Everything after the door may assume a call that makes sense.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard._check import (
    check_float,
    check_probability,
    check_shapes,
    is_transformed,
    is_transforming,
)
from regard.ops import call_hook
from regard.ops.backends import Call, Explanation, choose
from regard.ops.backends import explain as explain_call
from regard.ops.bias import Bias
from regard.ops.dropout import as_seed
from regard.ops.mask import Mask
from regard.ops.rule import Rule, as_bias, as_mask
from regard.ops.sdpa import attend_plain
from regard.ops.shape import Shape
from regard.ops.wants import Observation, Wants


def attention(
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
    backend: str = "auto",
) -> Tensor:
    """softmax(softcap(scale · q kᵀ) + bias, where allowed) v.

    q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) give (B, H, T, E); G divides H, and neighbouring
    query heads share a key head.

    mask: what each query may look at, a `Mask` or a bool tensor (True = may look); None sees all.
    bias: added to the scores, a `Bias` or a float tensor that broadcasts to (B, H, T, S). scale:
    1/√D unless given. softcap: c · tanh(score / c). sinks: (H,), one more score in each row's sum.
    dropout: probability with which a weight is dropped, here and now (pass 0 in evaluation). seed:
    fixes which, on every backend the same; without one a fused kernel may draw its own. backend:
    "auto", or the only one allowed: "reference", "blockwise", "sdpa", "flex", "triton".
    """
    if call_hook.heard_by is not None:
        call_hook.tell(q, k, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
    if bias is None and softcap is None and sinks is None and dropout == 0.0 and backend == "auto":
        output = attend_plain(q, k, v, mask, scale)
        if output is not None:
            return output
    call = make_call(q, k, v, mask, bias, scale, softcap, sinks, (dropout, seed))
    if not is_autocast(call.q.device.type):
        return choose(call, backend).attend(call)
    with outside_autocast(call.q.device.type):
        return choose(call, backend).attend(call)


def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    wants: Wants,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Observation:
    """The output and what was asked about the weights (`Wants`); v=None looks at these alone.

    Everything else is as `attention` has it.
    """
    value = v if v is not None else k[..., :0]
    call = make_call(q, k, value, mask, bias, scale, softcap, sinks, (dropout, seed))
    wants.check(call.rule.shape)
    call = replace(call, wants=wants)
    with outside_autocast(call.q.device.type):
        chosen = choose(call, backend)
        assert chosen.observe is not None, "a backend that does not refuse wants can observe"
        seen = chosen.observe(call)
    return seen if v is not None else replace(seen, output=None)


def explain(
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
    wants: Wants | None = None,
    backend: str = "auto",
) -> Explanation:
    """Which backend would run this call, and why each of the others would not; print it."""
    call = make_call(q, k, v, mask, bias, scale, softcap, sinks, (dropout, None))
    return explain_call(replace(call, wants=wants), backend)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    drop: tuple[float, int | Tensor | None],
) -> Call:
    """Check everything and gather it into a call."""
    q, k, v = under_autocast(q, k, v)
    shape = check_inputs(q, k, v)
    mask, bias = as_mask(mask), as_bias(bias)
    if mask is not None:
        mask.check(shape)
        # One query on the last key sees all of them: so every step of generation is a plain call.
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
    dropout = check_probability("dropout", drop[0])
    seed = as_seed(drop[1], q.device) if dropout > 0.0 and drop[1] is not None else None
    call = Call(q=q, k=k, v=v, rule=rule, sinks=sinks, dropout=dropout, seed=seed)
    if is_transforming() and any(is_transformed(t) for t in call.tensors()):
        return replace(call, transformed=True)
    return call


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """The sizes of a call whose tensors fit each other; else an error that says what does not."""
    fits = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not fits or q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        check_shapes({"q": (q, "B H T D"), "k": (k, "B G S D"), "v": (v, "B G S E")})
    (B, H, T, D), (b, G, S, d), of_v = q.shape, k.shape, v.shape
    if b != B or d != D or of_v[0] != B or of_v[1] != G or of_v[2] != S:
        check_shapes({"q": (q, "B H T D"), "k": (k, "B G S D"), "v": (v, "B G S E")})
    check_float("q", q)
    dtype, device = q.dtype, q.device
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype or x.device != device:
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
    number = float(value)
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(
            f"{name} must be a finite number{' above 0' if positive else ''}, got {value}"
        )
    return number


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside autocast inputs take its type, as torch's own attention does; float64 stays."""
    if not isinstance(q, Tensor) or not is_autocast(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    if any(x.dtype == torch.float64 for x in (q, k, v)):
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast has had its say at the door; inside, types are chosen with care and must stay."""
    if is_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def is_autocast(device_type: str) -> bool:
    """Whether autocast is on; the meta device has none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
