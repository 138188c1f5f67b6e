"""Maps the names and shapes of a file's tensors ("theirs") to the model's ("ours"), both ways.

Why: every family stores the same numbers under other names, some transposed, some stacked. One
description is used for reading and writing, so that they cannot diverge.

How: a `Link` connects tensors of theirs to tensors of ours, with a function in each direction.
Applied backwards on the meta device it also gives the names and shapes that a file must have.

Left out: changing numbers; a link only moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = list[Tensor]


@dataclass(frozen=True)
class Link:
    """Tensors of theirs and of ours that hold the same numbers, and functions between them."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Callable[[Tensors], Tensors]
    """From tensors of theirs to tensors of ours."""
    write: Callable[[Tensors], Tensors]
    """From tensors of ours to tensors of theirs."""


def same(theirs: str, ours: str) -> Link:
    return Link((theirs,), (ours,), list, list)


def transposed(theirs: str, ours: str) -> Link:
    """A matrix that is (in, out) in the file and (out, in) in our model: GPT-2's Conv1D."""

    def transpose(tensors: Tensors) -> Tensors:
        return [tensors[0].T]

    return Link((theirs,), (ours,), transpose, transpose)


def stacked(theirs: str, ours: Sequence[str], n_rows: int, is_transposed: bool) -> Link:
    """One tensor of theirs with several of ours, `n_rows` each, stacked; transposed in a Conv1D."""

    def read(tensors: Tensors) -> Tensors:
        return list(torch.split(tensors[0].T if is_transposed else tensors[0], n_rows))

    def write(tensors: Tensors) -> Tensors:
        whole = torch.cat(tensors)
        return [whole.T if is_transposed else whole]

    return Link((theirs,), tuple(ours), read, write)


def interleaved(theirs: str, ours: Sequence[str], n_heads: int) -> Link:
    """One tensor of theirs with several of ours head by head: q, k, v of head 0, of head 1, ..."""

    def read(tensors: Tensors) -> Tensors:
        n_rows = tensors[0].shape[0] // (n_heads * len(ours))
        parts = tensors[0].reshape(n_heads, len(ours), n_rows, *tensors[0].shape[1:]).unbind(1)
        return [part.flatten(0, 1) for part in parts]

    def write(tensors: Tensors) -> Tensors:
        n_rows = tensors[0].shape[0] // n_heads
        parts = [tensor.reshape(n_heads, n_rows, *tensor.shape[1:]) for tensor in tensors]
        return [torch.stack(parts, 1).flatten(0, 2)]

    return Link((theirs,), tuple(ours), read, write)


def renamed(theirs: str, ours: str, names: Mapping[str, str], has_bias: bool = True) -> list[Link]:
    """Layers under other names, `names` maps theirs to ours: weight and bias, or weight only."""
    parts = ("weight", "bias") if has_bias else ("weight",)
    return [
        same(f"{theirs}.{name}.{part}", f"{ours}.{our_name}.{part}")
        for name, our_name in names.items()
        for part in parts
    ]


def both(theirs: str, ours: str) -> list[Link]:
    return [same(f"{theirs}.{part}", f"{ours}.{part}") for part in ("weight", "bias")]


def weight(theirs: str, ours: str) -> list[Link]:
    return [same(f"{theirs}.weight", f"{ours}.weight")]
