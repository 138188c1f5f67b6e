"""The hook on torch.nn's attention modules, whose fast paths call nothing that a mode could see.

Why: in evaluation `TransformerEncoderLayer` and `MultiheadAttention` run as one fused call. Under a
torch-function mode, or with a hook on any module inside, they take the slow path, whose last bits
differ; so seeing them by either would change what they compute.

How: for the time of the block their `forward` is shadowed on the instance. The shadow works out
the queries and keys from the arguments, beside the call, records them, takes our mode away and
calls the module's own `forward` as it came. Inside an encoder that turned padding into nested
tensors a row has its real tokens only.

Left out: subclasses with a `forward` of their own; what they call is seen by other hooks.

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

OWN = (
    *("num_heads", "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight"),
    *("bias_k", "add_zero_attn"),
)
"""The arguments of `multi_head_attention_forward` that a module holds itself."""
Read = Callable[["Recorder", Any, dict[str, Any]], Call | None]


@contextmanager
def hook_torch_nn(recorder: Recorder) -> Iterator[None]:
    """Shadow `forward` of torch.nn's attention modules in the model."""
    shadowed: list[nn.Module] = []
    try:
        for module in recorder.model.modules():
            read = reader_of(module)
            if read is not None and "forward" not in vars(module):
                module.forward = shadow(recorder, module, read)
                shadowed.append(module)
        yield
    finally:
        for module in shadowed:
            del module.forward


def reader_of(module: nn.Module) -> Read | None:
    """How a module's calls are read; None for modules that are no attention of torch.nn's."""
    forward = type(module).forward
    if isinstance(module, nn.MultiheadAttention) and forward is nn.MultiheadAttention.forward:
        return read_attention
    if type(module) is nn.TransformerEncoderLayer:
        return read_layer
    if type(module) is nn.TransformerEncoder and all(
        type(layer) is nn.TransformerEncoderLayer for layer in module.layers
    ):
        return lambda recorder, module, given: None  # its layers are read
    return None


def shadow(recorder: Recorder, module: nn.Module, read: Read) -> Callable[..., Any]:
    """A `forward` that records the call, and then runs the module's own without our mode."""
    forward = module.forward
    signature = inspect.signature(forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if recorder.busy:
            return forward(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with recorder.unseen():
            with recorder.alone():
                call = read(recorder, module, bound.arguments)
            if call is None:
                return forward(*args, **kwargs)
            recorder.take(call)
            with recorder.alone():
                return forward(*args, **kwargs)

    return run


def read_attention(recorder: Recorder, module: Any, given: dict[str, Any]) -> Call:
    """A call of `MultiheadAttention`."""
    query, key, nested = given["query"], given["key"], given["query"].is_nested
    if nested:
        query = key = nested_row(recorder, query)
        given = {**given, "key_padding_mask": None}
    call = read_module(recorder, module, query, key, given, cross=key is not query)
    return replace(call, is_row=nested)


def read_layer(recorder: Recorder, module: Any, given: dict[str, Any]) -> Call:
    """A call of `TransformerEncoderLayer`: its self-attention, on either path."""
    nested = given["src"].is_nested
    x = nested_row(recorder, given["src"]) if nested else given["src"]
    with torch.no_grad():
        x = module.norm1(x) if module.norm_first else x
    passed = {
        "attn_mask": given["src_mask"],
        "key_padding_mask": None if nested else given["src_key_padding_mask"],
        "is_causal": given["is_causal"],
        "need_weights": False,
    }
    call = read_module(recorder, module.self_attn, x, x, passed, cross=False)
    return replace(call, is_row=nested)


def read_module(
    recorder: Recorder, module: Any, query: Tensor, key: Tensor, given: dict[str, Any], cross: bool
) -> Call:
    """A call of a `MultiheadAttention`, as its functional twin would have it."""
    if module.batch_first and query.dim() == 3:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    own = {name: getattr(module, name) for name in OWN}
    own["use_separate_proj_weight"] = not module._qkv_same_embed_dim
    name = recorder.name_of(module) or ""
    return read_heads(name, {**given, **own, "query": query, "key": key}, cross)


def nested_row(recorder: Recorder, x: Tensor) -> Tensor:
    """The recorded row of a nested tensor, as a batch of one."""
    rows = x.unbind()
    if recorder.row is None and len(rows) > 1:
        raise ValueError(
            f"the batch has {len(rows)} rows, and a record is of one: name it, watch(model, row=0)"
        )
    return rows[recorder.row or 0][None]
