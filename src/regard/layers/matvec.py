"""A linear layer for a single row, as a Triton kernel: one pass over the weights.

Why: with one row a product takes as long as reading its weights, and a general matrix kernel does
not use the full memory bandwidth.

How: `project` runs a layer. Inside a compiled graph on a GPU, without gradients, and with one row
in all, it runs our kernel instead: every program reads a few whole rows of the weight and sums in
float32.

Letters: M outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def project(layer: nn.Linear, x: Tensor) -> Tensor:
    if x.is_cuda and is_one_row(x) and type(layer) is nn.Linear and not layer._forward_hooks:
        return linear_row(x, layer.weight, layer.bias)
    answer: Tensor = layer(x)
    return answer


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weightᵀ + bias, by our kernel where it applies."""
    if x.is_cuda and is_one_row(x):
        return linear_row(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def is_one_row(x: Tensor) -> bool:
    return (
        x.is_cuda
        and torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and x.shape[:-1].numel() == 1
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and not torch.is_autocast_enabled("cuda")
    )


def linear_row(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False) -> Tensor:
    """x weightᵀ + bias for an x with one row. gated: silu(gate) · up, where the first half of the
    weight's rows are the gates, the second half the ups."""
    row: Tensor = _matvec_op(x.reshape(-1), weight, bias, gated)
    return row.view(*x.shape[:-1], -1)


def _matvec(x_k: Tensor, weight_mk: Tensor, bias_m: Tensor | None, gated: bool) -> Tensor:
    from regard.layers import matvec_kernels

    out_m = x_k.new_empty(weight_mk.shape[0] // (2 if gated else 1))
    matvec_kernels.run(x_k, weight_mk, bias_m, out_m)
    return out_m


_matvec_op = torch.library.custom_op(
    "regard::matvec",
    _matvec,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, bool gated) -> Tensor",
)


@_matvec_op.register_fake
def _(x_k: Tensor, weight_mk: Tensor, bias_m: Tensor | None, gated: bool) -> Tensor:
    return x_k.new_empty(weight_mk.shape[0] // (2 if gated else 1))
