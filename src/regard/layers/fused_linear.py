"""Linear layers with the same input, fused: one joint weight, one matrix product.

Why: with one token per row a product takes as long as reading its weights, and three short reads
take longer than one long one.

How: `FusedLinear` copies the weights into one joint tensor and makes each layer's own weight a view
of its part: nothing is stored twice, and layers are still saved and loaded one by one. When a
layer's weight is replaced, say by `.to()`, `holds` is False, and the layers run one by one. A
compiled graph cannot check this: it reads the joint weight only if it was traced inside `trusting`.

Left out: gradients, since autograd does not know the joint weight; and copies: a copy of a layer is
not fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.layers.matvec import linear, project

trusted = False
"""Whether the code that compiles a graph also checks `holds` before the graph is used again."""


@contextmanager
def trusting() -> Iterator[None]:
    """A context in which compiled graphs read the joint weights without checking `holds`."""
    global trusted
    trusted = True
    try:
        yield
    finally:
        trusted = False


class FusedLinear:
    """Linear layers with the same input, whose weights are views of one joint weight."""

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
        """Whether every layer's weight is still a view of the joint weight."""
        parts = zip(self.layers, torch.split(self.weight, self.sizes), strict=True)
        return all([layer.weight.data_ptr() == part.data_ptr() for layer, part in parts])

    def __call__(self, x: Tensor) -> list[Tensor]:
        return list(torch.split(linear(x, self.weight, self.bias), self.sizes, -1))


def is_usable(fused: FusedLinear) -> bool:
    """Whether the joint weight may be used in this call instead of the layers' own weights."""
    if torch.is_grad_enabled():
        return False
    return trusted if torch.compiler.is_compiling() else fused.holds()


def run_fused(fused: FusedLinear | None, layers: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """Each layer's output for x, by one product if `fused` holds and gradients are off."""
    if fused is not None and is_usable(fused):
        return fused(x)
    answers = []
    for layer in layers:
        answers.append(project(layer, x) if x.is_cuda else layer(x))
    return answers
