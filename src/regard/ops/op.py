"""The public functions: `attention`, `observe`, `explain`.

A call is checked (`call.py`), given to hooks (`call_hook.py`), and run by the first backend that
does not refuse it (`backends.py`). Inside `regard.edit` it is edited first (`edit_hook.py`).

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._check import name_kind
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
    """Multi-head attention: softmax(softcap(scale · q kᵀ) + bias, where the mask allows) v.

    Args:
        q: Queries, (B, H, T, D): batch, query heads, queries, head width.
        k: Keys, (B, G, S, D): G key heads, S keys. G divides H, and neighbouring query heads share
            a key head: G = H is multi-head attention, G < H grouped-query attention.
        v: Values, (B, G, S, E). q, k and v have one dtype and one device; any strides will do.
        mask: Which keys each query may look at: a `Mask` such as `Causal() & Window(256, 0)`, or a
            bool tensor that broadcasts to (B, H, T, S), where True means "may look". None: all of
            them. A query that may look at no key gets zeros, never NaN.
        bias: Added to the scores: a `Bias` such as `ALiBi(H)`, or a float tensor that broadcasts to
            (B, H, T, S). A bias of -inf hides the key, as a mask does.
        scale: What the products q kᵀ are multiplied by; 1/√D by default.
        softcap: A number c > 0: scores become c · tanh(score / c), before the bias. None: no cap.
        sinks: (H,): for each head one more score in the softmax, with no value behind it, so that
            the weights of a row add up to less than 1.
        dropout: The probability with which each weight becomes 0; the others are divided by
            1 - dropout. There is no training flag: pass 0.0 in evaluation.
        seed: An int, or a 0-dim int64 tensor, that fixes which weights are dropped: the same ones
            on every backend. None: drawn from torch's generator.
        backend: "auto" takes the first backend that can run the call; `explain` shows which, and
            why not the others. "reference", "blockwise", "sdpa", "flex" or "triton" insists on one.

    Returns:
        (B, H, T, E), in the dtype of q. Softmax runs in float32 (in float64 for float64).

    Raises:
        ValueError: Shapes that do not fit together, or a named backend that refuses the call.
        TypeError: A float tensor as mask, a bool tensor as bias, or dtypes or devices that differ.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 100, 64)
        >>> regard.attention(q, k, v, mask=regard.Causal(), bias=regard.ALiBi(8)).shape
        torch.Size([2, 8, 100, 64])
    """
    # Fast paths: the same backend as at the end would choose, with less work on the host.
    is_free = dropout == 0.0 and backend == "auto"
    is_simple = is_free and bias is None and softcap is None and sinks is None
    edited, is_hooked = None, edit_hook.n_open or call_hook.active is not None
    if is_simple and not is_hooked and (plain := attend_plain(q, k, v, mask, scale)) is not None:
        return plain
    rule: Given = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    if edit_hook.n_open:
        edited = edit_hook.edit_call(make_call(q, k, v, **rule, dropout=dropout))
    if call_hook.active is not None:
        if torch.compiler.is_compiling():
            call_hook.active(make_call(q, k, v, **rule) if edited is None else edited.call)
        else:
            with call_hook.quiet():
                heard = make_call(q, k, v, **rule) if edited is None else edited.call
                # Row statistics that a hook asks for may come from the pass that gives the output.
                output = attend_and_tell(heard) if is_free else None
                if output is None:
                    call_hook.active(heard)
            if output is not None:
                return output if edited is None else edited.change(output)
    if is_free:
        output = attend_plain(q, k, v, mask, scale) if is_simple and is_hooked else None
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
    """Attention, and what you want to know about its weights, without building the T × S matrix.

    Args:
        q, k, v, mask, bias, scale, softcap, sinks, dropout, seed, backend: As in `attention`.
            v may be None: then only the weights are looked at, and there is no output.
        wants: What to tell: `Wants(entropy=True, top=5)`. Its fields are described there.

    Returns:
        An `Observation`: `output` as `attention` returns it (None where v is None), and one field
        for each want, None where it was not asked for. What it tells of the weights is before
        dropout. Inside `regard.edit` the output is of the edited heads; a call with v=None is
        not edited.

    Raises:
        ValueError, TypeError: As in `attention`, and for wants that do not fit the shapes.
        RuntimeError: In backward(), for an answer that has no gradient (see `Wants`).

    Example:
        >>> x = torch.randn(1, 8, 100, 64)
        >>> wants = regard.Wants(entropy=True, top=3)
        >>> seen = regard.observe(x, x, x, mask=regard.Causal(), wants=wants)
        >>> seen.output.shape, seen.entropy.shape, seen.top.key.shape
        (torch.Size([1, 8, 100, 64]), torch.Size([1, 8, 100]), torch.Size([1, 8, 100, 3]))
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
    """Answer wants about a checked call; it is not passed to hooks."""
    call = wanting(call, wants)
    with outside_autocast(call.q.device.type):
        return choose(call, backend).observe(call)


def wanting(call: Call, wants: Wants) -> Call:
    """The call with its wants, checked against its shape."""
    if not isinstance(wants, Wants):
        raise TypeError(f"wants must be a Wants(...), got {name_kind(wants)}")
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
    """Which backend would run this call, and why each of the others would not.

    Args:
        q, k, v, mask, bias, scale, softcap, sinks, dropout: As in `attention`.
        wants: As in `observe`; None: the call is one of `attention`.
        backend: "auto", or the one that the call would name.

    Returns:
        An `Explanation`: print it, or read `chosen` and `verdicts` ({backend: reason or None}).

    Raises:
        ValueError, TypeError: As `attention` raises them.

    Example:
        >>> x = torch.randn(1, 8, 100, 64)
        >>> regard.explain(x, x, x, mask=regard.Causal()).chosen
        'sdpa'
    """
    rule: Given = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    call = make_call(q, k, v, **rule, dropout=dropout)
    return explain_call(call if wants is None else wanting(call, wants), backend)
