"""The hook on Hugging Face models in place: the interface from which they take their attention.

Why: a model asks the attention interface for its function in every call, by the name in its config.
Registering another function under another name would work, but the name itself is asked in many
places: for which mask to make, for which kernel to load, for what is supported. A model whose name
is changed may take another way; one whose name stays computes the same in every bit.

How: for the time of the block the interface itself hands out, for modules of the watched model, a
function that records q, k, the mask and all else it was given, and then calls the very function
that the model would have had, with the same arguments. The model keeps its implementation and with
it its mask function, so causality cannot be lost on the way. What the arguments mean depends on the
implementation: "no mask" is causal for some (SDPA, flash), and nothing hidden for eager; a mask of
flash attention has padding only; flex attention has a mask that is a function.

Left out: paged caches and variable-length batches of flash attention, refused in words.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.lens.captured_call import Call
from regard.lens.hooks.flex import flex_rule
from regard.ops import Bias, Causal, Dense, DenseBias, Mask, Window

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder

Attend = Callable[..., Any]
# Read once: it takes longer than all else that reading a call needs.
signature_of = functools.lru_cache(maxsize=16)(inspect.signature)


@contextmanager
def hook_transformers(recorder: Recorder) -> Iterator[None]:
    """Hook the interface, where the package is loaded at all: a model of it cannot be without."""
    loaded = sys.modules.get("transformers.modeling_utils")
    interface = getattr(loaded, "AttentionInterface", None)
    if interface is None:
        yield
        return
    methods = {
        name: getattr(interface, name)
        for name in ("get_interface", "__getitem__")
        if hasattr(interface, name)
    }
    # The class's own entries are put back as they were, whether it had them or inherited them.
    own = {name: interface.__dict__[name] for name in methods if name in interface.__dict__}

    def hook(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def hand_out(self: Any, *args: Any, **kwargs: Any) -> Any:
            return recording(recorder, method(self, *args, **kwargs))

        return hand_out

    for name, method in methods.items():
        setattr(interface, name, hook(method))
    try:
        yield
    finally:
        for name in methods:
            if name in own:
                setattr(interface, name, own[name])
            else:
                delattr(interface, name)


def recording(recorder: Recorder, function: Any) -> Any:
    if not callable(function) or getattr(function, "_recorder", None) is recorder:
        return function

    @wraps(function)
    def record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = recorder.name_of(module)
        if name is None or recorder.busy:
            return function(module, *args, **kwargs)
        bound = signature_of(function).bind(module, *args, **kwargs)
        # Those that the function takes as further ones too.
        call = read_call(name, module, function, {**bound.arguments, **bound.kwargs})
        return recorder.run(call, function, module, *args, **kwargs)

    record._recorder = recorder  # type: ignore[attr-defined]
    return record


def read_call(name: str, module: nn.Module, function: Attend, given: dict[str, Any]) -> Call:
    if given.get("cu_seq_lens_q") is not None or given.get("cache") is not None:
        raise ValueError(
            f"{name} attends over texts packed without padding or over a paged cache, which cannot "
            "be watched yet; give it a padded batch"
        )
    mask, bias, k = read_rule(module, implementation(function), given)
    scale, sinks = given.get("scaling"), given.get("s_aux")
    cross = getattr(module, "is_cross_attention", None)
    return Call(
        name=name,
        q=given["query"],
        k=k,
        v=given["value"] if given["key"] is k else given["value"][:, :, : k.shape[2]],
        mask=mask,
        bias=bias,
        scale=given["query"].shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=given.get("softcap"),
        sinks=sinks.reshape(-1) if isinstance(sinks, Tensor) else None,
        cross=cross if isinstance(cross, bool) else None,
    )


def implementation(function: Attend) -> str:
    named = getattr(function, "__name__", "")
    kinds = ("flex", "sdpa", "flash", "paged", "regard")
    return next((kind for kind in kinds if kind in named), "eager")


def read_rule(
    module: nn.Module, kind: str, given: dict[str, Any]
) -> tuple[Mask | None, Bias | None, Tensor]:
    """Mask and bias, and the keys that the function really looks at."""
    q, k, seen = given["query"], given["key"], given.get("attention_mask")
    T, S = q.shape[2], k.shape[2]
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    mask: Mask | None = None
    bias: Bias | None = None
    if kind == "flash":
        mask = flash_mask(seen, bool(causal), given.get("sliding_window"), T, S)
    elif kind == "flex" and seen is not None and not isinstance(seen, Tensor):
        mask = flex_rule(seen.mask_mod, q, k)
    elif seen is not None and hasattr(seen, "rule"):  # a mask of `regard.hf`
        mask = seen.rule
    elif isinstance(seen, Tensor):
        # Longer masks than keys are cut, as all of these functions do.
        seen = seen[..., :S]
        mask, bias = (Dense(seen), None) if seen.dtype == torch.bool else (None, DenseBias(seen))
    elif kind in ("sdpa", "regard") and causal and T > 1:
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
    """What flash attention hides: padding by a mask of the keys, causality and window by flags."""
    parts: list[Mask] = [Causal()] if causal and T > 1 else []
    if window is not None and window < S:
        parts.append(Window(window - 1, 0 if causal else window - 1))
    if seen is not None:
        parts.append(Dense(seen[:, None, None, :S].bool()))
    return functools.reduce(operator.and_, parts) if parts else None
