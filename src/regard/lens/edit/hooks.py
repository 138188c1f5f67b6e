"""Hooks that edit attention other than ours: Hugging Face's interface, and torch.nn's modules.

How: while any block is open, the attention interface of `transformers` returns functions that call
the original and then let editors change its output. torch.nn's modules compute their heads in fused
code; modules of an edited model are made to run plain functions instead (a torch-function mode that
does nothing disables the fused path), and their call of `scaled_dot_product_attention` is edited.
The patches belong to no block: they ask which editors are open where they are called, and outside
of blocks do nothing. The first block installs them, and the last one removes them.

If a function returns weights too, they are recomputed if a look in its call is forbidden.

Left out: attention that a model writes out in its own code, and direct calls of torch's functions.

Letters: B batch, H heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.lens.call_edits import caller_of, is_edited, torchs_caller
from regard.lens.hooks.torch_nn import FORWARDS, patched_forwards
from regard.lens.hooks.transformers import implementation, name_arguments, read_rule
from regard.lens.shared_patch import patched
from regard.ops import Causal, DenseBias, Wants
from regard.ops.call import Call, make_call
from regard.ops.edit_hook import Edited, edit_call, open_editors
from regard.ops.op import observe_call


@contextmanager
def hook_models(model: nn.Module) -> Iterator[None]:
    """Install the hooks for every kind of attention that a model may have."""
    loaded = sys.modules.get("transformers.modeling_utils")
    interface = getattr(loaded, "AttentionInterface", None)
    with ExitStack() as patches:
        if interface is not None:
            for name in ("get_interface", "__getitem__"):
                patches.enter_context(patched(interface, name, hand_out_edited))
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None:
            patches.enter_context(patched(dynamo.OptimizedModule, "__call__", refuse_compiled))
        pretrained = getattr(loaded, "PreTrainedModel", None)
        if hasattr(pretrained, "get_compiled_call"):
            patches.enter_context(patched(pretrained, "get_compiled_call", hand_out_plain))
        modules = list(model.modules())
        wrappers = dict.fromkeys(FORWARDS, run_plainly) | {nn.MultiheadAttention: attend_edited}
        patches.enter_context(patched_forwards(modules, wrappers))
        if any(isinstance(module, tuple(FORWARDS)) for module in modules):
            patches.enter_context(patched(F, "scaled_dot_product_attention", edit_sdpa))
        yield


def refuse_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `OptimizedModule.__call__`: refuse an edited model, whose edits it would not see."""

    @wraps(call)
    def run(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        if not open_editors():
            return call(compiled, *args, **kwargs)
        if any(map(is_edited, compiled.modules())):
            raise ValueError(
                "compiled code cannot be edited, as it runs unseen: in the block call the model "
                "that was compiled (model._orig_mod)"
            )
        # Not by OptimizedModule's own method, which warns about global module hooks: ours do not
        # affect other modules.
        return nn.Module.__call__(compiled, *args, **kwargs)

    return run


def hand_out_plain(get: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_compiled_call`, which `generate` uses: an edited model runs without compilation."""

    @wraps(get)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        return model.__call__ if is_edited(model) else get(model, *args, **kwargs)

    return run


def weights_of(call: Call) -> Tensor:
    """The weights (B, H, T, S) of a call."""
    found = observe_call(replace(call, v=call.k[..., :0]), Wants(weights=True)).weights
    assert found is not None
    return found


def hand_out_edited(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def hand_out(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = method(self, *args, **kwargs)
        # Our own function is edited where it calls `regard.attention`.
        ours = not callable(function) or implementation(function) == "regard"
        if ours or hasattr(function, "_edits") or not open_editors():
            return function
        return edit_function(function)

    return hand_out


def edit_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function of `transformers`, and edit its output (B, T, H, D)."""

    @wraps(function)
    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_edited(module):
            return function(module, *args, **kwargs)
        call = read_function(module, function, name_arguments(function, args, kwargs))
        edited = edit_call(call, caller_of(module))
        output_bthd, weights = function(module, *args, **kwargs)
        if edited is None:
            return output_bthd, weights
        changed_bhtd = edited.change(output_bthd.transpose(1, 2))
        if isinstance(weights, Tensor) and weights.dim() == 4 and edited.call is not call:
            weights = weights_of(edited.call).to(weights.dtype)
        return changed_bhtd.transpose(1, 2).contiguous(), weights

    attend._edits = function  # type: ignore[attr-defined]
    return attend


def read_function(module: nn.Module, function: Callable[..., Any], given: dict[str, Any]) -> Call:
    if given.get("cu_seq_lens_q") is not None or given.get("cache") is not None:
        raise ValueError(
            "attention over texts packed without padding or over a paged cache cannot be edited; "
            "give a padded batch"
        )
    mask, bias, k = read_rule(module, implementation(function), given)
    scale, sinks = given.get("scaling"), given.get("s_aux")
    return make_call(
        given["query"],
        k,
        given["value"][:, :, : k.shape[2]],
        mask=mask,
        bias=bias,
        scale=None if scale is None else float(scale),
        softcap=given.get("softcap"),
        sinks=sinks.reshape(-1) if isinstance(sinks, Tensor) else None,
        dropout=given.get("dropout") or 0.0,
    )


class PlainPath(TorchFunctionMode):
    """Does nothing; while it is on, torch.nn's modules do not take their fused path."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def run_plainly(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_edited(module):
            return forward(module, *args, **kwargs)
        with PlainPath():
            return forward(module, *args, **kwargs)

    return run


@dataclass(eq=False)
class Attending:
    """A running module of torch.nn's, how many keys it was given, and its call after edits."""

    module: nn.Module
    cross: bool
    n_keys: int
    call: Call | None = None


_attending: ContextVar[Attending | None] = ContextVar("regard_attending", default=None)


def attend_edited(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `MultiheadAttention.forward`: run unfused; get weights from the edited call."""
    signature = inspect.signature(forward)

    @wraps(forward)
    def run(module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if not is_edited(module):
            return forward(module, *args, **kwargs)
        bound = signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        key, wants_weights = given["key"], given["need_weights"]
        given["need_weights"] = False
        axis = 1 if module.batch_first and key.dim() == 3 else 0
        attending = Attending(module, key is not given["query"], key.shape[axis])
        token = _attending.set(attending)
        try:
            with PlainPath():
                output, _ = forward(*bound.args, **bound.kwargs)
        finally:
            _attending.reset(token)
        if not wants_weights or attending.call is None:
            return output, None
        weights = weights_of(attending.call)
        weights = weights.mean(1) if given["average_attn_weights"] else weights
        return output, weights if key.dim() == 3 else weights[0]

    return run


def edit_sdpa(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        attending = _attending.get()
        output = function(*args, **kwargs)
        if attending is None:
            return output
        attending.call, edited = read_sdpa(attending, *args, **kwargs)
        return output if edited is None else edited.change(output)

    return attend


def read_sdpa(
    attending: Attending,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> tuple[Call, Edited | None]:
    """The call in `multi_head_attention_forward` after edits; learned keys come last."""
    call = make_call(
        q,
        k,
        v,
        mask=Causal(align="start") if is_causal else None,
        bias=None if attn_mask is None else DenseBias(attn_mask),
        dropout=dropout_p,
    )
    edited = edit_call(
        call, torchs_caller(attending.module, attending.cross, q, k, attending.n_keys)
    )
    return call if edited is None else edited.call, edited
