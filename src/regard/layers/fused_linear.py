"""Linear layers side by side in one piece of memory, run as one product.

Why: with one token a row a product costs what reading its weights costs, and three short reads cost
more than one long one.

How: `FusedLinear` lays the weights out in a new piece of memory and makes each layer's own weight a
view of its part: nothing is held twice, and layers are saved and loaded one by one. When a layer's
weight is replaced, say by `.to()`, `holds` is False, and the layers answer one by one. A compiled
graph cannot look: it reads the joint memory only where it is traced inside of `trusting`.

Left out: gradients; autograd does not know the joint memory. Copies: a copy of a layer is not
fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.layers.matvec import linear, project

trusted = False
"""Whether who compiles makes sure, before each run of the graph, that the weights still hold."""


@contextmanager
def trusting() -> Iterator[None]:
    """In which compiled graphs read the joint memory."""
    global trusted
    trusted = True
    try:
        yield
    finally:
        trusted = False


class FusedLinear:
    """Linear layers with the same input."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self.sizes = [layer.out_features for layer in self.layers]
        with torch.no_grad():
            self.weight = torch.cat([layer.weight for layer in self.layers])
            for layer, part in zip(self.layers, torch.split(self.weight, self.sizes), strict=True):
                layer.weight.data = part
            self.bias: Tensor | None = None
            if any(layer.bias is not None for layer in self.layers):
                self.bias = self.weight.new_zeros(sum(self.sizes))
                parts = torch.split(self.bias, self.sizes)
                for layer, part in zip(self.layers, parts, strict=True):
                    if layer.bias is not None:
                        layer.bias.data = part.copy_(layer.bias)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def holds(self) -> bool:
        """Whether every layer still reads its weights from here."""
        parts = zip(self.layers, torch.split(self.weight, self.sizes), strict=True)
        return all([layer.weight.data_ptr() == part.data_ptr() for layer, part in parts])

    def __call__(self, x: Tensor) -> list[Tensor]:
        return list(torch.split(linear(x, self.weight, self.bias), self.sizes, -1))


def is_usable(fused: FusedLinear) -> bool:
    """Whether the joint memory may stand for the layers' own weights, here and now."""
    if torch.is_grad_enabled():
        return False
    return trusted if torch.compiler.is_compiling() else fused.holds()


def run_fused(fused: FusedLinear | None, layers: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """Each layer's answer to x, by one product where `fused` holds and no gradient is asked for."""
    if fused is not None and is_usable(fused):
        return fused(x)
    answers = []
    for layer in layers:
        answers.append(project(layer, x) if x.is_cuda else layer(x))
    return answers
