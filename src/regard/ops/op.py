"""The public functions: `attention`, `observe`, `explain`.

A call is checked (`call.py`), hooks are told of it (`call_hook.py`), and the first backend that
does not refuse runs it (`backends.py`). In a block of edits it is edited first (`edit_hook.py`).

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._torch import is_transformed
from regard.ops import call_hook, edit_hook
from regard.ops.backends import Explanation, attend_and_tell, attend_by_kernels, choose
from regard.ops.backends import explain as explain_call
from regard.ops.bias import Bias
from regard.ops.call import Call, Given, is_autocast, make_call, outside_autocast
from regard.ops.mask import Mask
from regard.ops.sdpa import attend_plain
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
    rule: Given = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    edited = None
    if edit_hook.n_open:
        edited = edit_hook.edit_call(make_call(q, k, v, **rule, dropout=dropout))
    if call_hook.active is not None:
        if torch.compiler.is_compiling():
            call_hook.active(make_call(q, k, v, **rule) if edited is None else edited.call)
        else:
            with call_hook.quiet():
                heard = make_call(q, k, v, **rule) if edited is None else edited.call
                output = attend_and_tell(heard) if dropout == 0.0 and backend == "auto" else None
                if output is None:
                    call_hook.active(heard)
            if output is not None:
                return output if edited is None else edited.change(output)
    if dropout == 0.0 and backend == "auto":
        output = None
        if bias is None and softcap is None and sinks is None:
            output = attend_plain(q, k, v, mask, scale)
        if output is None:
            output = attend_by_kernels(q, k, v, rule)
        if output is not None:
            return output if edited is None else edited.change(output)
    call = make_call(q, k, v, **rule, dropout=dropout, seed=seed)
    if not is_autocast(call.q.device.type):
        output = choose(call, backend).run(call)
    else:
        with outside_autocast(call.q.device.type):
            output = choose(call, backend).run(call)
    return output if edited is None else edited.change(output)


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

    Everything else is as `attention` has it. In a block of edits v=None is left as it is.
    """
    rule: Given = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    value = v if v is not None else k[..., :0]
    call = make_call(q, k, value, **rule, dropout=dropout, seed=seed)
    edited = edit_hook.edit_call(call) if v is not None and edit_hook.n_open else None
    call = call if edited is None else edited.call
    if v is not None and call_hook.active is not None:
        call_hook.active(call)
    seen = observe_call(call, wants, backend)
    if edited is not None and seen.output is not None:
        return replace(seen, output=edited.change(seen.output))
    return seen if v is not None else replace(seen, output=None)


def observe_call(call: Call, wants: Wants, backend: str = "auto") -> Observation:
    """What is wanted about a call that has been checked; hooks do not hear of it."""
    call = wanting(call, wants)
    with outside_autocast(call.q.device.type):
        return choose(call, backend).observe(call)


def wanting(call: Call, wants: Wants) -> Call:
    """A call that is asked about its weights, where they can be."""
    if not isinstance(wants, Wants):
        raise TypeError(f"wants must be a Wants(...), got {wants!r}")
    wants.check(call.rule.shape)
    asked = wants.receiving()
    inside = asked is not None and asked.rows is not None and is_transformed(asked.rows)
    return replace(call, wants=wants, transformed=call.transformed or inside)


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
    rule: Given = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    call = make_call(q, k, v, **rule, dropout=dropout)
    return explain_call(call if wants is None else wanting(call, wants), backend)
