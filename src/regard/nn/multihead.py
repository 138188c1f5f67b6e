"""`MultiheadAttention` with torch.nn's arguments, parameters and state_dict, on regard's attention.

Why: so that changing `torch.nn` to `regard.nn` is the whole migration. The same seed draws the same
weights, and each loads the other's state_dict.

Unlike torch's: training and evaluation run the same code. Asking for weights changes no bit of the
output. A fully masked row gives zeros, in output and weights, forward and backward. `is_causal` is
a hint that can only make a call faster. Masks may be of any float type, and a bool mask may be
combined with a float one. `observing(model, Wants(...))` shows what the heads attend to; the keys
that `add_bias_kv` and `add_zero_attn` add come last.

Left out: nested tensors and TorchScript; both are refused with a reason.

Letters: B batch, T queries, S keys, H heads, D head width, C model width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from regard.layers.observing import Observable
from regard.nn.errors import InputError, refuse_script
from regard.nn.heads import Projection, attend, learned_pair, read_inputs
from regard.nn.masks import Masks

Method = TypeVar("Method", bound=Callable[..., Any])


def signed_as(theirs: Method) -> Callable[[Callable[..., Any]], Method]:
    """A decorator that gives a method the signature of torch's, for help() and type checkers."""
    return cast(Any, wraps(theirs))  # type: ignore[no-any-return]


class MultiheadAttention(Observable, nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, without a separate fast path, so that it can be observed.

    query (T, B, C), key (S, B, kdim), value (S, B, vdim); with `batch_first` (B, T, C) and so on;
    without a batch (T, C). Returns the output, shaped like query, and the weights averaged over
    heads, (B, T, S), or per head, (B, H, T, S).
    """

    __prepare_scriptable__ = refuse_script

    @signed_as(nn.MultiheadAttention.__init__)
    def __init__(self, embed_dim: int, num_heads: int, *args: Any, **kwargs: Any) -> None:
        check_heads(embed_dim, num_heads)
        super().__init__(embed_dim, num_heads, *args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also load modules that were pickled before torch had `batch_first`."""
        super().__setstate__({"batch_first": False, **state})  # type: ignore[no-untyped-call]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; masks as in torch.nn: bool True = may not attend, float = added to the scores."""
        masks = Masks(attn_mask, key_padding_mask, is_causal)
        masks.check_kinds()
        inputs = read_inputs(query, key, value, self.batch_first)
        dropout = self.dropout if self.training else 0.0
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = Projection(
            dim=self.embed_dim,
            n_heads=self.num_heads,
            packed=self.in_proj_weight,
            apart=None if self._qkv_same_embed_dim else apart,
            bias=self.in_proj_bias,
            pair=learned_pair(self.bias_k, self.bias_v),
            zero=self.add_zero_attn,
        )
        output, shown = attend(inputs, weights, masks, dropout, need_weights, by=self._attention)
        return inputs.give_back(self.out_proj(output), shown, average_attn_weights)


def check_heads(embed_dim: int, num_heads: int) -> None:
    given = f"got embed_dim={embed_dim} and num_heads={num_heads}"
    if embed_dim <= 0 or num_heads <= 0:
        raise ValueError(f"embed_dim and num_heads must be greater than 0, {given}")
    if embed_dim % num_heads:
        raise InputError(f"embed_dim must be divisible by num_heads, {given}")


def adopt(module: nn.MultiheadAttention) -> None:
    """Convert torch's module to ours in place: the same object with the same parameters."""
    module.__class__ = MultiheadAttention
