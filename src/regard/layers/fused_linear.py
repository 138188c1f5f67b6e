"""Linear layers side by side in one piece of memory, run as one product.

Why: with one token a row a product costs what reading its weights costs, and three short reads cost
more than one long one.

How: `SideBySide` lays the weights out in a new piece of memory and makes each layer's own weight a
view of its part. So the layers stay what they are, are trained, saved and loaded one by one, and
nothing is held twice. When a layer's weight is replaced, say by `.to()`, `holds` tells it.

Left out: gradients. The weights are read through the joint memory, which autograd does not know, so
this is for inference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.layers.matvec import linear, project


class SideBySide:
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
                self.bias = torch.cat([self._bias_of(layer) for layer in self.layers])
                for layer, part in zip(
                    self.layers, torch.split(self.bias, self.sizes), strict=True
                ):
                    if layer.bias is not None:
                        layer.bias.data = part

    @staticmethod
    def _bias_of(layer: nn.Linear) -> Tensor:
        none = layer.weight.new_zeros(layer.out_features)
        return none if layer.bias is None else layer.bias

    def holds(self) -> bool:
        """Whether every layer still reads its weights from here."""
        parts = zip(self.layers, torch.split(self.weight, self.sizes), strict=True)
        return all(layer.weight.data_ptr() == part.data_ptr() for layer, part in parts)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Each layer's answer to x."""
        return list(torch.split(linear(x, self.weight, self.bias), self.sizes, -1))


def run_side_by_side(
    joint: SideBySide | None, layers: Sequence[nn.Linear], x: Tensor
) -> list[Tensor]:
    """Each layer's answer to x, by one product where `joint` holds and no gradient is asked for."""
    if joint is None or torch.is_grad_enabled():
        return [project(layer, x) for layer in layers]
    trusted = torch.compiler.is_compiling() or joint.holds()
    return joint(x) if trusted else [project(layer, x) for layer in layers]
