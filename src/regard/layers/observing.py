"""Observing layers: `with observing(model, Wants(...)) as seen: model(x)`.

Why: a model's `forward` returns its output and nothing else, and should stay so. Attention weights
and row statistics are collected separately.

How: `attention` passes every call to a hook (`ops/call_hook.py`), and each attention layer records
that it is the caller. Inside the `with` block the hook runs `observe` on the queries and keys of
each call, in addition to the call, and appends the result to the layer's `seen`. The call itself is
unchanged, so the output is bit-identical. The hook and the layers are the same objects in every
`with` block, so a compiled model is compiled once for all of them.

Left out: selecting layers (observe the submodule instead), and models whose attention is not ours;
for those there is `lens`. Under gradient checkpointing the backward pass runs layers again, which
appends another observation to the list.

Letters: B batch, H heads, G key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from regard.ops import Observation, Wants, attention, call_hook
from regard.ops.call import Call
from regard.ops.op import observe_call


class Observable(nn.Module):
    """Base class of layers that call `attention` through `_attention` and so can be observed."""

    wants: Wants | None = None
    seen: list[Observation] = []  # noqa: RUF012 - replaced by `observing`, before anything is added

    def _attention(self, q_bhtd: Tensor, k_bgsd: Tensor, v_bgse: Tensor, **given: Any) -> Tensor:
        """Call `attention`; while a hook is set, this layer is the last of `callers`."""
        if call_hook.active is None:
            return attention(q_bhtd, k_bgsd, v_bgse, **given)
        callers.append(self)
        try:
            return attention(q_bhtd, k_bgsd, v_bgse, **given)
        finally:
            callers.pop()


callers: list[Observable] = []
"""While a hook is set: the layers whose `_attention` is running, the innermost last."""


def look(call: Call) -> None:
    """The call hook: if the calling layer is observed, observe the call and append to `seen`."""
    if callers and callers[-1].wants is not None:
        weights_alone = replace(call, v=call.k[..., :0])
        seen = observe_call(weights_alone, callers[-1].wants)
        callers[-1].seen.append(replace(seen, output=None))


class Seen(Mapping[str, Observation]):
    """What each layer saw in its last call, by dotted name; `calls` has all of its calls in order.

    Layers that were not called are not among the keys.
    """

    def __init__(self, calls: dict[str, list[Observation]]) -> None:
        self.calls = calls

    def __getitem__(self, name: str) -> Observation:
        if name not in self.calls:
            raise KeyError(f"no attention layer is named {name!r}; there are {list(self.calls)}")
        if not self.calls[name]:
            raise KeyError(f"the layer {name!r} has not been called while it was observed")
        return self.calls[name][-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, calls in self.calls.items() if calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Seen({ {name: len(calls) for name, calls in self.calls.items()} })"


@contextmanager
def observing(model: nn.Module, wants: Wants) -> Iterator[Seen]:
    """Observe every attention layer of regard's in a model, while the block runs.

    For models of other libraries, and for records in files, use `regard.watch`.

    Args:
        model: A module with layers of `regard.layers` or `regard.nn`; `regard.convert` makes them
            of torch.nn's.
        wants: What to tell about each call, as in `observe`.

    Yields:
        A mapping from the layer's dotted name (as in `named_modules`; "" if the model is itself a
        layer) to the `Observation` of its last call, without output; `.calls[name]` is the list
        of all its calls. It stays readable after the block. The model's outputs are the same, bit
        for bit.

    Raises:
        ValueError: The model has no such layer.

    Example:
        >>> layer, x = regard.MultiHeadAttention(64, 8, causal=True), torch.randn(2, 11, 64)
        >>> with regard.observing(layer, regard.Wants(entropy=True)) as seen:
        ...     out = layer(x)
        >>> seen[""].entropy.shape
        torch.Size([2, 8, 11])
    """
    if not isinstance(wants, Wants):
        raise TypeError(f"wants must be a Wants(...), got {type(wants).__name__}")
    layers = {
        name.replace("_orig_mod.", "").removesuffix("_orig_mod"): layer
        for name, layer in model.named_modules()
        if isinstance(layer, Observable)
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer of regard, so nothing can be observed; "
            "regard.convert(model) swaps torch.nn's layers for regard's, and regard.watch takes "
            "any model"
        )
    before = [(vars(layer), dict(vars(layer))) for layer in layers.values()]
    seen = Seen({name: [] for name in layers})
    try:
        for name, layer in layers.items():
            layer.wants, layer.seen = wants, seen.calls[name]
        with call_hook.hooked(look, shared=True):
            yield seen
    finally:
        for held, as_it_was in before:
            for name in ("wants", "seen"):
                held.pop(name)
                if name in as_it_was:
                    held[name] = as_it_was[name]
