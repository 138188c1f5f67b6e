"""The hook on torch.nn's attention modules, whose fast paths call nothing that a mode could see.

Why: in eval mode `TransformerEncoderLayer` and `MultiheadAttention` run as one fused call. Under a
torch-function mode, or with a hook on any module inside, they take the slow path, whose last bits
differ; so observing them by either would change what they compute.

How: for the duration of the block the `forward` of their classes is patched, so that instances can
be pickled and copied as before. For modules of a watched model the patch computes the queries and
keys from the arguments, in addition to the call, records them, turns our mode off and calls the
original with the same arguments; for others it only calls the original. A module whose own
`forward` was replaced, as `accelerate` does, is seen if it holds the class's `forward` in an
attribute; if not, and if it may run fused, it runs without our mode, and is left out. Inside an
encoder that turned padding into nested tensors a row has its real tokens only. `read_heads`
computes what torch's multi-head attention computes before its heads attend, from the same
arguments.

Left out: subclasses with a `forward` of their own; what they call is seen by other hooks.

Letters: B batch, T queries, S keys, H heads, D head width, C model width.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lens.call_edits import edited_mask, is_edited, torchs_caller
from regard.lens.captured_call import Call
from regard.lens.open_recorders import recorders_of, run_recorded
from regard.lens.shared_patch import StandIn, original_of, patched
from regard.ops import Bias, Causal, Dense, DenseBias, Mask

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder

OWN = (
    *("num_heads", "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight"),
    *("bias_k", "add_zero_attn"),
)
"""The arguments of `multi_head_attention_forward` that a module holds as attributes."""
Read = Callable[["Recorder", Any, dict[str, Any]], Call | None]
FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    kind: kind.forward
    for kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
}
"""torch.nn's classes with a fused path, and their original `forward`."""


@contextmanager
def hook_torch_nn(recorder: Recorder) -> Iterator[None]:
    readers: tuple[Read, ...] = (read_attention, read_layer, read_stack)
    wrappers = {
        kind: functools.partial(record_forward, read)
        for kind, read in zip(FORWARDS, readers, strict=True)
    }
    for module in recorder.modules:
        kind = next((kind for kind in FORWARDS if isinstance(module, kind)), None)
        if kind and "forward" in vars(module) and not held_forwards(module, kind):
            recorder.hidden.add(id(module))
    with patched_forwards(recorder.modules, wrappers):
        yield


@contextmanager
def patched_forwards(
    modules: Iterable[nn.Module], wrappers: Mapping[type[nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Patch the `forward` of torch.nn's classes that the modules have, and held originals."""
    with ExitStack() as patches:
        for kind, wrap in wrappers.items():
            found = [module for module in modules if isinstance(module, kind)]
            if found:
                patches.enter_context(patched(kind, "forward", wrap))
            for module in found:
                for name in held_forwards(module, kind):
                    held = functools.partial(stand_in, module, kind, wrap)
                    patches.enter_context(patched(module, name, held))
        yield


def held_forwards(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    """The attributes in which a module with a replaced `forward` holds that of its class."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(original_of(value), "__func__", None) is FORWARDS[kind]
    ]


def stand_in(
    module: nn.Module, kind: type[nn.Module], wrap: Callable[..., Any], held: Any
) -> StandIn:
    @wraps(FORWARDS[kind])
    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return held(*args, **kwargs)

    return StandIn(original_of(held), functools.partial(wrap(forward), module))


def record_forward(read: Read, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `forward`: record the call, then run the original without our mode."""
    signature = inspect.signature(forward)

    @wraps(forward)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorders = recorders_of(module)
        if not recorders or not is_plain(module):
            return forward(module, *args, **kwargs)

        def read_call(recorder: Recorder) -> Call | None:
            bound = signature.bind(module, *args, **kwargs)
            bound.apply_defaults()
            return read(recorder, module, bound.arguments)

        with recorders[0].unseen():
            return run_recorded(recorders, read_call, forward, module, *args, **kwargs)

    return run


def is_plain(module: nn.Module) -> bool:
    """Whether a module computes exactly what torch.nn's does; FSDP2 creates subclasses.

    A stack with layers that compute something else keeps our mode, without which they are not seen.
    """
    if isinstance(module, nn.MultiheadAttention):
        return True
    if isinstance(module, nn.TransformerEncoder):
        return all(isinstance(x, nn.TransformerEncoderLayer) for x in module.layers) and all(
            map(is_plain, module.layers)
        )
    kind: Any = type(module)
    plain: Any = nn.TransformerEncoderLayer
    return kind.forward is plain.forward and kind._sa_block is plain._sa_block


def read_stack(recorder: Recorder, module: Any, given: dict[str, Any]) -> None:
    """Return no call: the layers of a stack are read instead."""


def read_attention(recorder: Recorder, module: Any, given: dict[str, Any]) -> Call:
    query, key, nested = given["query"], given["key"], given["query"].is_nested
    if nested:
        query = key = nested_row(recorder, query)
        given = {**given, "value": key, "key_padding_mask": None}
    axis = 1 if module.batch_first and query.dim() == 3 else 0
    cross = is_cross(recorder, query, key, axis)
    return replace(read_module(recorder, module, query, key, given, cross), is_row=nested)


def is_cross(recorder: Recorder, query: Tensor, key: Tensor, axis: int = 0) -> bool:
    """Whether keys are of another text: by their origin, or else if `key` is not `query`."""
    cross = recorder.origins.relate(query, key, query.shape[axis], key.shape[axis])
    return key is not query if cross is None else cross


def read_layer(recorder: Recorder, module: Any, given: dict[str, Any]) -> Call | None:
    if is_edited(module):
        return None  # It runs unfused, and its attention is read where it is called.
    nested = given["src"].is_nested
    x = nested_row(recorder, given["src"]) if nested else given["src"]
    with torch.no_grad():
        x = module.norm1.forward(x) if module.norm_first else x  # without its hooks
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
    value = given.get("value", key)
    if module.batch_first and query.dim() == 3:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    own = {name: getattr(module, name) for name in OWN}
    own["use_separate_proj_weight"] = not module._qkv_same_embed_dim
    name = recorder.name_of(module) or ""
    call = read_heads(recorder, name, {**given, **own, "query": query, "key": key}, cross)
    caller = torchs_caller(module, cross, call.q, call.k, key.shape[0])
    call = replace(call, mask=edited_mask(caller, call.q, call.k, call.mask, call.bias))
    if not recorder.extras.wants_values or call.k.shape[2] != value.shape[0]:
        return call
    return replace(call, v=project_values(value, module))


@torch.no_grad()
def project_values(value_sbc: Tensor, module: Any) -> Tensor:
    """The values of all heads, (B, H, S, E)."""
    wide_sbc = value_sbc if value_sbc.dim() == 3 else value_sbc[:, None]
    weight = module.v_proj_weight
    if module._qkv_same_embed_dim:
        weight = module.in_proj_weight.chunk(3)[2]
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[2]
    v_sbc = F.linear(wide_sbc, weight, bias)
    return v_sbc.reshape(*v_sbc.shape[:2], module.num_heads, -1).permute(1, 2, 0, 3)


def nested_row(recorder: Recorder, x: Tensor) -> Tensor:
    rows, asked = x.unbind(), recorder.takes.rows or (0,)
    if len(asked) > 1 or (recorder.takes.rows is None and len(rows) > 1):
        what = f"the batch has {len(rows)} rows as a nested tensor, of which one can be recorded"
        raise ValueError(f"{what}: watch(model, row=0)")
    return rows[asked[0]][None]


def read_heads(
    recorder: Recorder, name: str, given: dict[str, Any], cross: bool | None = None
) -> Call:
    """Convert a call of `multi_head_attention_forward`, its arguments by name, to ours."""
    query, key = given["query"].detach(), given["key"].detach()
    if query.dim() == 2:
        query, key = query[:, None], key[:, None]
    n_heads = given["num_heads"]
    with torch.no_grad():
        q, k = project(query, key, given)
        k = extend(k, given)
    mask, bias = read_masks(given, k.shape[2], n_heads)
    if cross is None:
        cross = is_cross(recorder, given["query"], given["key"])
    return Call(name=name, q=q, k=k, mask=mask, bias=bias, cross=cross)


def project(query_tbc: Tensor, key_sbc: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    C, n_heads, bias = query_tbc.shape[-1], given["num_heads"], given.get("in_proj_bias")
    if given.get("use_separate_proj_weight"):
        q_weight, k_weight = given["q_proj_weight"], given["k_proj_weight"]
    else:
        q_weight, k_weight, _ = given["in_proj_weight"].chunk(3)
    q_bias, k_bias = (None, None) if bias is None else bias.chunk(3)[:2]
    q = F.linear(query_tbc, q_weight, q_bias)

    def split(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], n_heads, C // n_heads).permute(1, 2, 0, 3)

    static = given.get("static_k")
    if static is not None:
        return split(q), static.detach().view(-1, n_heads, *static.shape[1:])
    return split(q), split(F.linear(key_sbc, k_weight, k_bias))


def extend(k_bhsd: Tensor, given: dict[str, Any]) -> Tensor:
    """The keys, followed by the learned one and the one of zeros, if there are any."""
    B, H, _, D = k_bhsd.shape
    parts = [k_bhsd]
    if given.get("bias_k") is not None:
        parts.append(given["bias_k"].to(k_bhsd).view(1, H, 1, D).expand(B, H, 1, D))
    if given.get("add_zero_attn"):
        parts.append(k_bhsd.new_zeros(B, H, 1, D))
    return torch.cat(parts, 2) if len(parts) > 1 else k_bhsd


def read_masks(given: dict[str, Any], n_keys: int, n_heads: int) -> tuple[Mask | None, Bias | None]:
    """Mask and bias: torch's bool masks are True where a look is forbidden."""
    padding, attn_mask = given.get("key_padding_mask"), given.get("attn_mask")
    alone = padding is None and not given.get("need_weights", True)
    if given.get("is_causal") and alone:
        return Causal(align="start"), None
    mask: Mask | None = None
    bias: Bias | None = None
    for found, is_padding in ((attn_mask, False), (padding, True)):
        if found is None:
            continue
        four = found.detach()
        if is_padding:
            four = (four if four.dim() == 2 else four[None])[:, None, None]
        elif four.dim() == 3:
            four = four.reshape(-1, n_heads, *four.shape[1:])
        four = F.pad(four, (0, n_keys - four.shape[-1]))
        if four.dtype == torch.bool:
            mask = Dense(~four) if mask is None else mask & Dense(~four)
        else:
            bias = DenseBias(four) if bias is None else bias + DenseBias(four)
    return mask, bias
