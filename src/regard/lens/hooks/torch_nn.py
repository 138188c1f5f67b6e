"""The door to torch.nn's attention modules, whose fast paths call nothing that could be tapped.

Why: in evaluation `TransformerEncoderLayer` and `MultiheadAttention` run as one fused call. Under a
torch-function mode, or with a hook on any module inside, they take the slow path, whose last bits
differ; so seeing them by either would change what they compute.

How: for the time of the block their `forward` is shadowed on the instance. The shadow works out
the queries and keys from the arguments, beside the call, tells them, takes the tap away and calls
the module's own `forward` as it came. Inside an encoder that turned padding into nested tensors a
row has its real tokens only.

Left out: subclasses with a `forward` of their own; what they call is seen by other doors.

Letters: B batch, T queries, C model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.lens.captured_call import Call
from regard.lens.hooks.mha_arguments import read_heads

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder

Tell = Callable[["Recorder", Any, dict[str, Any]], Call | None]


@contextmanager
def module_door(recorder: Recorder) -> Iterator[None]:
    """Shadow `forward` of torch.nn's attention modules in the model."""
    shadowed: list[nn.Module] = []
    try:
        for module in recorder.model.modules():
            tell = teller_of(module)
            if tell is not None and "forward" not in vars(module):
                module.forward = shadow(recorder, module, tell)
                shadowed.append(module)
        yield
    finally:
        for module in shadowed:
            del module.forward


def teller_of(module: nn.Module) -> Tell | None:
    """How a module's calls are told; None for modules that are no attention of torch.nn's."""
    forward = type(module).forward
    if isinstance(module, nn.MultiheadAttention) and forward is nn.MultiheadAttention.forward:
        return tell_attention
    if type(module) is nn.TransformerEncoderLayer:
        return tell_layer
    if type(module) is nn.TransformerEncoder and all(
        type(layer) is nn.TransformerEncoderLayer for layer in module.layers
    ):
        return tell_nothing
    return None


def shadow(recorder: Recorder, module: nn.Module, tell: Tell) -> Callable[..., Any]:
    """A `forward` that tells, and then runs the module's own without the tap."""
    forward = module.forward
    signature = inspect.signature(forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if recorder.busy:
            return forward(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with recorder.untapped():
            with recorder.alone():
                call = tell(recorder, module, bound.arguments)
            if call is None:
                return forward(*args, **kwargs)
            recorder.take(call)
            with recorder.alone():
                return forward(*args, **kwargs)

    return run


def tell_nothing(recorder: Recorder, module: Any, given: dict[str, Any]) -> None:
    """An encoder itself: its layers tell."""
    return None


def tell_attention(recorder: Recorder, module: Any, given: dict[str, Any]) -> Call | None:
    """A call of `MultiheadAttention`."""
    name = recorder.name_of(module) or ""
    query, key = given["query"], given["key"]
    cross = key is not query
    if query.is_nested:
        query = key = nested_row(recorder, query)
        call = attention_call(name, module, query, key, {**given, "key_padding_mask": None}, False)
        return one_row(call)
    return attention_call(name, module, query, key, given, cross)


def tell_layer(recorder: Recorder, module: Any, given: dict[str, Any]) -> Call | None:
    """A call of `TransformerEncoderLayer`: its self-attention, on either path."""
    attention = module.self_attn
    x, nested = given["src"], given["src"].is_nested
    if nested:
        x = nested_row(recorder, x)
    with torch.no_grad():
        x = module.norm1(x) if module.norm_first else x
    passed = {
        "attn_mask": given["src_mask"],
        "key_padding_mask": None if nested else given["src_key_padding_mask"],
        "is_causal": given["is_causal"],
        "need_weights": False,
    }
    name = recorder.name_of(attention) or ""
    call = attention_call(name, attention, x, x, passed, False)
    return one_row(call) if nested else call


def attention_call(
    name: str, module: Any, query: Tensor, key: Tensor, given: dict[str, Any], cross: bool
) -> Call:
    """A call of a `MultiheadAttention`, as its functional twin would have it."""
    if module.batch_first and query.dim() == 3:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    apart = not module._qkv_same_embed_dim
    return read_heads(
        name,
        {
            "query": query,
            "key": key,
            "num_heads": module.num_heads,
            "in_proj_weight": module.in_proj_weight,
            "in_proj_bias": module.in_proj_bias,
            "q_proj_weight": module.q_proj_weight,
            "k_proj_weight": module.k_proj_weight,
            "use_separate_proj_weight": apart,
            "bias_k": module.bias_k,
            "add_zero_attn": module.add_zero_attn,
            "key_padding_mask": given.get("key_padding_mask"),
            "attn_mask": given.get("attn_mask"),
            "need_weights": given.get("need_weights", True),
            "is_causal": given.get("is_causal", False),
        },
        cross,
    )


def nested_row(recorder: Recorder, x: Tensor) -> Tensor:
    """The recorded row of a nested tensor, as a batch of one."""
    rows = x.unbind()
    if recorder.row is None and len(rows) > 1:
        raise ValueError(
            f"the batch has {len(rows)} rows, and a record is of one: name it, watch(model, row=0)"
        )
    return rows[recorder.row or 0][None]


def one_row(call: Call) -> Call:
    """The call, marked as being of the recorded row alone."""
    return replace(call, is_row=True)
