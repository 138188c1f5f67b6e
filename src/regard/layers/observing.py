"""How layers hand out attention: `with observing(model, Wants(...)) as seen`.

Why: a model's `forward` returns its output and nothing else, and must stay so. What the heads
looked at comes out beside it.

How: every attention layer is an `Observable`. While its `wants` is set it asks `observe` about the
queries and keys it has in hand, *beside* its normal call of `attention`, and keeps the answer in
`seen`. The normal call is the same with and without, so the output is bit-identical. `observing`
sets `wants` on every such layer inside a model and takes it back at the end, also after an error.

Left out: choosing layers (observe the submodule instead), and models whose attention is not ours;
those are `lens`. Under gradient checkpointing the backward pass runs layers again, and an
observation made then is one more in the list.

Letters: B batch, H heads, G key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from regard.ops import Observation, Wants, observe


class Observable(nn.Module):
    """A layer that attends, and tells about it while `wants` is set.

    A subclass calls `_look` with the queries, keys and rule that it also gives to `attention`.
    """

    wants: Wants | None
    seen: list[Observation]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wants = None
        self.seen = []

    def _look(self, q_bhtd: Tensor, k_bgsd: Tensor, **rule: Any) -> None:
        """Keep what is wanted about one call; `rule` is mask, bias, scale, softcap, sinks."""
        if self.wants is not None:
            self.seen.append(observe(q_bhtd, k_bgsd, None, wants=self.wants, **rule))


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
    """Ask every attention layer of `model` for `wants` while the block runs.

    A layer that is used in several places is found once, under its first name; a model that is
    itself a layer has the name "". The answers stay readable after the block.
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
            f"{type(model).__name__} has no attention layer of ours, so nothing can be observed; "
            "regard.convert(model) swaps torch.nn's layers for ours"
        )
    before = [(layer, layer.wants, layer.seen) for layer in layers.values()]
    seen = Seen({name: [] for name in layers})
    try:
        for name, layer in layers.items():
            layer.wants, layer.seen = wants, seen.calls[name]
        yield seen
    finally:
        for layer, old_wants, old_seen in before:
            layer.wants, layer.seen = old_wants, old_seen
