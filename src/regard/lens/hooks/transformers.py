"""The hook on Hugging Face models as they are: their attention interface.

Why: a model asks the attention interface for its function in every call, by the name in its config.
Registering another function under another name would work, but the name itself is checked in many
places: for which mask to make, for which kernel to load, for what is supported. A model whose name
is changed may take another path; one whose name stays computes the same bits.

How: for the duration of the block the interface is patched. For modules of the watched model it
returns a function that records q, k, the mask and all other arguments, and then calls the function
that the model would have had, with the same arguments. The model keeps its implementation, and with
it its mask function, so causality cannot be lost on the way. What the arguments mean depends on the
implementation. "No mask" means causal for some (SDPA, flash, and functions that somebody
registered, where the module says that it is causal; then the record notes it), and nothing hidden
for eager. A mask of flash attention has padding only. Flex attention has a mask that is a function.

Left out: paged caches and variable-length batches of flash attention, which raise an error.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.lens.call_edits import caller_of, edited_mask
from regard.lens.captured_call import Call
from regard.lens.hooks.flex import flex_rule
from regard.lens.module_hooks import trace_unseen
from regard.lens.open_recorders import recorders_of, run_recorded
from regard.lens.shared_patch import patched
from regard.ops import Bias, Causal, Dense, DenseBias, Mask, Window, call_hook
from regard.ops.call import make_call

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder

Attend = Callable[..., Any]
FIRST = "query", "key", "value", "attention_mask"
"""The interface's arguments after the module, in order; functions may name them differently."""
# Cached, since reading a signature takes longer than all else that reading a call needs.
signature_of = functools.lru_cache(maxsize=16)(inspect.signature)


@contextmanager
def hook_transformers(recorder: Recorder) -> Iterator[None]:
    """Hook the interface if `transformers` is loaded; otherwise no model can be of that package."""
    loaded = sys.modules.get("transformers.modeling_utils")
    interface = getattr(loaded, "AttentionInterface", None)
    if interface is None:
        yield
        return
    with ExitStack() as patches:
        for name in ("get_interface", "__getitem__"):
            if hasattr(interface, name):
                patches.enter_context(patched(interface, name, record_handed_out))
        yield


@functools.cache  # one for all blocks: compiled graphs are guarded by it
def record_handed_out(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def hand_out(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = method(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return traced(function) if call_hook.listening else function
        if not callable(function) or hasattr(function, "_records") or not recorders_of():
            return function
        if implementation(function) == "regard":  # recorded by the hook on our own attention
            return function
        return recording(function)

    return hand_out


def traced(function: Attend) -> Attend:
    """Wrap a function so that a compiled graph reports its calls."""
    kind = implementation(function)

    def attend_traced(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if kind in ("flex", "paged") or kwargs.get("cu_seq_lens_q") is not None:
            trace_unseen(module)
            return function(module, query, key, value, *args, **kwargs)
        given = {"query": query, "key": key, **kwargs}
        if args:
            given["attention_mask"] = args[0]
        mask, bias, k = read_rule(module, kind, given)
        sinks, scale = given.get("s_aux"), given.get("scaling")
        call = make_call(
            query,
            k,
            value[:, :, : k.shape[2]],
            mask=mask,
            bias=bias,
            scale=scale,
            softcap=given.get("softcap"),
            sinks=None if sinks is None else sinks.reshape(-1),
        )
        call_hook.trace_call(call)
        return function(module, query, key, value, *args, **kwargs)

    # One of the two patched methods calls the other, so a function may be wrapped already.
    twice = getattr(function, "__name__", "") == "attend_traced"
    return function if twice or kind == "regard" else attend_traced


def recording(function: Attend) -> Attend:
    @wraps(function)
    def record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorders = recorders_of(module)
        if not recorders:
            return function(module, *args, **kwargs)

        def read(recorder: Recorder) -> Call:
            given = name_arguments(function, args, kwargs)
            return read_call(recorder, module, function, given)

        return run_recorded(recorders, read, function, module, *args, **kwargs)

    record._records = function  # type: ignore[attr-defined]
    return record


def name_arguments(function: Attend, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A function's arguments except the module, by the names of the interface."""
    more = list(signature_of(function).parameters)[1 + len(FIRST) :] if args[len(FIRST) :] else []
    return {**dict(zip((*FIRST, *more), args, strict=False)), **kwargs}


def read_call(
    recorder: Recorder, module: nn.Module, function: Attend, given: dict[str, Any]
) -> Call:
    name, query, key = recorder.name_of(module) or "", given["query"], given["key"]
    if given.get("cu_seq_lens_q") is not None or given.get("cache") is not None:
        raise ValueError(
            f"{name} attends over texts packed without padding or over a paged cache, which cannot "
            "be watched yet; give it a padded batch"
        )
    kind = implementation(function)
    mask, bias, k = read_rule(module, kind, given)
    if kind == "own" and given.get("attention_mask") is None and mask is not None:
        what = f"{getattr(function, '__name__', 'a function')} was given no mask; it is taken to be"
        recorder.takes.remarks[f"{what} causal, as modules say that call it (is_causal)"] = None
    mask = edited_mask(caller_of(module), given["query"], k, mask, bias)
    scale, sinks = given.get("scaling"), given.get("s_aux")
    cross = is_cross(recorder, module, query, key)
    return Call(
        name=name,
        q=query,
        k=k,
        v=given["value"] if given["key"] is k else given["value"][:, :, : k.shape[2]],
        mask=mask,
        bias=bias,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=given.get("softcap"),
        sinks=sinks.reshape(-1) if isinstance(sinks, Tensor) else None,
        cross=cross,
    )


def is_cross(recorder: Recorder, module: nn.Module, query: Tensor, key: Tensor) -> bool | None:
    """Whether a module does cross-attention: as it declares, else by the tensors' origins."""
    said = getattr(module, "is_cross_attention", None)
    if isinstance(said, bool):
        return said
    return recorder.origins.relate(query, key, query.shape[2], key.shape[2])


def implementation(function: Attend) -> str:
    """Which of the library's functions it is, or "own" if somebody registered it."""
    named = getattr(getattr(function, "func", function), "__name__", "")
    kinds = ("flex", "sdpa", "flash", "paged", "regard", "eager")
    return next((kind for kind in kinds if kind in named), "own")


def read_rule(
    module: nn.Module, kind: str, given: dict[str, Any]
) -> tuple[Mask | None, Bias | None, Tensor]:
    """The mask, the bias, and the keys that the function actually uses."""
    q, k, seen = given["query"], given["key"], given.get("attention_mask")
    T, S = q.shape[2], k.shape[2]
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    mask: Mask | None = None
    bias: Bias | None = None
    if kind == "flash":
        if given.get("indices") is not None:
            raise ValueError(
                f"{type(module).__name__} gives its kernel the indices of keys for each query, "
                "which cannot be recorded yet; use eager attention or SDPA"
            )
        mask = flash_mask(seen, bool(causal), given.get("sliding_window"), T, S)
    elif kind == "flex" and seen is not None and not isinstance(seen, Tensor):
        mask = flex_rule(seen.mask_mod, q, k)
    elif isinstance(seen, Tensor):
        # Masks that are longer than the keys are cut, as all of these functions do.
        seen = seen[..., :S]
        mask, bias = (Dense(seen), None) if seen.dtype == torch.bool else (None, DenseBias(seen))
    elif kind in ("sdpa", "own") and causal and T > 1:
        k = k[:, :, :T] if S > T else k
        mask = Causal(align="start")
    more = given.get("position_bias")
    if isinstance(more, Tensor):
        extra = DenseBias(more[..., : k.shape[2]])
        bias = extra if bias is None else bias + extra
    return mask, bias, k


def flash_mask(
    seen: Tensor | None, causal: bool, window: int | None, T: int, S: int
) -> Mask | None:
    """The mask of flash attention: padding from a mask of keys, causality and window from flags."""
    parts: list[Mask] = [Causal()] if causal and T > 1 else []
    if window is not None and window < S:
        parts.append(Window(window - 1, 0 if causal else window - 1))
    if seen is not None:
        parts.append(Dense(seen[:, None, None, :S].bool()))
    return functools.reduce(operator.and_, parts) if parts else None
