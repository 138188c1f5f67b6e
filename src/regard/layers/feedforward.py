"""The feed-forward layer: two projections with an activation between, applied to each token alone.

Why: attention moves information between tokens; this layer processes each token by itself.

How: down(activation(up(x))), or gated: down(activation(gate(x)) · up(x)). SwiGLU is "silu" gated,
GeGLU "gelu" gated. The activation is a name, a module, or any function. A module becomes a
submodule, so its parameters are trained, copied, moved and saved with the layer.

Left out: mixtures of experts.

Letters: B batch, T tokens, C model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from regard._check import check_choice, check_count, check_probability
from regard.layers.dropout import Dropout
from regard.layers.fused_linear import FusedLinear, is_usable, run_fused
from regard.layers.matvec import is_one_row, linear_row, project
from regard.layers.norm import Factory

ActivationWord = Literal["relu", "gelu", "gelu_tanh", "silu"]
Activation: TypeAlias = ActivationWord | nn.Module | Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """(B, T, C) -> (B, T, C) through a hidden width F = ffn_dim."""

    activation: Callable[[Tensor], Tensor]

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: Activation = "relu",
        *,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make its projections.

        Args:
            dim: The width C of x and of the output.
            ffn_dim: The hidden width F.
            activation: "relu", "gelu", "gelu_tanh", "silu", a module, or a function of one tensor.
            gated: Whether the hidden layer is activation(gate(x)) · up(x): with "silu", SwiGLU.
            bias: Whether the projections have a bias.
            dropout: Of the hidden layer, in training mode only.
            device, dtype: Of the parameters.
        """
        super().__init__()
        where: Factory = {"device": device, "dtype": dtype}
        check_count("dim", dim)
        check_count("ffn_dim", ffn_dim)
        self.up_proj = nn.Linear(dim, ffn_dim, bias, **where)
        self.gate_proj = nn.Linear(dim, ffn_dim, bias, **where) if gated else None
        self.down_proj = nn.Linear(ffn_dim, dim, bias, **where)
        self.activation = make_activation(activation)
        self.dropout = Dropout(check_probability("dropout", dropout))
        self.fused: FusedLinear | None = None

    def fuse(self) -> None:
        if self.gate_proj is not None:
            self.fused = FusedLinear((self.gate_proj, self.up_proj))

    def forward(self, x_btc: Tensor) -> Tensor:
        if self.gate_proj is None:
            hidden_btf = self.activation(project(self.up_proj, x_btc))
        elif (
            self.fused is not None
            and is_one_row(x_btc)
            and isinstance(self.activation, nn.SiLU)
            and is_usable(self.fused)
        ):
            hidden_btf = linear_row(x_btc, self.fused.weight, self.fused.bias, gated=True)
        else:
            layers = (self.gate_proj, self.up_proj)
            gate_btf, up_btf = run_fused(self.fused, layers, x_btc)
            hidden_btf = self.activation(gate_btf) * up_btf
        if self.training:
            hidden_btf = self.dropout(hidden_btf)
        return project(self.down_proj, hidden_btf)


def make_activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The activation with this name; a module or function is returned as it is."""
    if not isinstance(activation, str):
        if callable(activation):
            return activation
        raise TypeError(
            f"activation is a {type(activation).__name__}; expected one of "
            f"{', '.join(get_args(ActivationWord))}, a module, or a function of one tensor"
        )
    check_choice("activation", activation, get_args(ActivationWord))
    if activation in ("relu", "silu"):
        return nn.ReLU() if activation == "relu" else nn.SiLU()
    return nn.GELU(approximate="tanh" if activation == "gelu_tanh" else "none")
