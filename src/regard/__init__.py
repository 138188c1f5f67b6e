"""regard: multi-head attention for PyTorch that you can see.

The names below are the public ones; each is loaded when it is first used, so that `import regard`
costs nothing and parts that do not need torch do not load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard.lens.viewers import VIEWERS

if TYPE_CHECKING:
    from regard import nn
    from regard._fill import fill
    from regard._look import look, survey
    from regard._version import __version__
    from regard.generation import (
        GenerationConfig,
        evict,
        generate,
        generate_batch,
        generate_ids,
        score,
        stream,
        translate,
    )
    from regard.layers import KVCache, MultiHeadAttention, observing
    from regard.lens import Record
    from regard.lens.edit.edit import edit, head_outputs
    from regard.lens.edit.values import Ablate, Block, HeadOutputs, Patch
    from regard.lens.effect import effect
    from regard.lens.head_effects import Effect
    from regard.lens.watch import watch
    from regard.models import Transformer, count_parameters, load, save
    from regard.nn import convert
    from regard.ops import (
        ALiBi,
        Bias,
        Causal,
        Dense,
        DenseBias,
        Documents,
        Explanation,
        Lengths,
        Map,
        Mask,
        Observation,
        Prefix,
        Received,
        RelativeTable,
        Wants,
        Window,
        attention,
        explain,
        observe,
    )
    from regard.tokens import Tokenizer

_HOMES = {
    "regard.ops": (
        "ALiBi Bias Causal Dense DenseBias Documents Explanation Lengths Map Mask Observation "
        "Prefix Received RelativeTable Wants Window attention explain observe"
    ),
    "regard.layers": "KVCache MultiHeadAttention observing",
    "regard.lens": "Record",
    "regard.lens.edit.edit": "edit head_outputs",
    "regard.lens.edit.values": "Ablate Block HeadOutputs Patch",
    "regard.lens.effect": "effect",
    "regard.lens.head_effects": "Effect",
    "regard.lens.watch": "watch",
    "regard._look": "look survey",
    "regard._fill": "fill",
    "regard.nn": "convert",
    "regard.models": "Transformer count_parameters load save",
    "regard.generation": "GenerationConfig evict generate generate_batch generate_ids score stream "
    "translate",
    "regard.tokens": "Tokenizer",
    "regard._version": "__version__",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_PACKAGES = (
    *("generation", "labs", "layers", "lens", "models", "nn", "ops", "positions", "tokens"),
    *("training", "view"),
)
"""Loaded when first named. `regard.hf` is not among them, as importing it registers something."""

__all__ = [
    "ALiBi",
    "Ablate",
    "Bias",
    "Block",
    "Causal",
    "Dense",
    "DenseBias",
    "Documents",
    "Effect",
    "Explanation",
    "GenerationConfig",
    "HeadOutputs",
    "KVCache",
    "Lengths",
    "Map",
    "Mask",
    "MultiHeadAttention",
    "Observation",
    "Patch",
    "Prefix",
    "Received",
    "Record",
    "RelativeTable",
    "Tokenizer",
    "Transformer",
    "Wants",
    "Window",
    "__version__",
    "attention",
    "convert",
    "count_parameters",
    "edit",
    "effect",
    "evict",
    "explain",
    "fill",
    "generate",
    "generate_batch",
    "generate_ids",
    "head_outputs",
    "load",
    "look",
    "nn",
    "observe",
    "observing",
    "save",
    "score",
    "stream",
    "survey",
    "translate",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return importlib.import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})


def _view(name: str) -> Any:
    """A function of the view that loads it when it is first called."""
    return lambda *args, **kwargs: getattr(importlib.import_module("regard.view"), name)(
        *args, **kwargs
    )


VIEWERS.update({name: _view(name) for name in ("plot", "write_page", "make_widget", "write_heads")})
