"""torch.nn's Transformer layers and stacks, with its names, calls and state_dict keys, in one path.

Why: so that changing `torch.nn` to `regard.nn` is the whole migration; see `multihead.py` for what
differs in attention.

How: a layer is attention and a feed-forward net, each with a residual around it and a norm before
(`norm_first`) or after it. `_sa_block`, `_mha_block` and `_ff_block` are these parts under torch's
names, for subclasses that override them. A stack copies its layer and looks once whether its mask
is the causal one, and says so to its layers.

Unlike torch's: evaluation runs the same code as training, so outputs agree, hooks on every
submodule fire and outputs keep their length under padding. `enable_nested_tensor` and `mask_check`
are kept and do nothing: padded keys are skipped anyway. A module given as activation survives
copying, stacking and saving.

Left out: nested tensors and TorchScript, both refused in words.

Letters: B batch, T target length, S source length, C model width (d_model).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.errors import CallError, refuse_nested, refuse_script
from regard.nn.masks import as_float, is_causal_mask
from regard.nn.multihead import MultiheadAttention

Activation = Callable[[Tensor], Tensor]


class TransformerEncoderLayer(nn.Module):
    """Self-attention and a feed-forward net.

    src (S, B, C), or (B, S, C) with `batch_first`, or (S, C).
    """

    activation: Activation
    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout=dropout, batch_first=batch_first, **made
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, **made)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **made)
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, **made)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, **made)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.activation = named_activation(activation)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        restore_activation(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """One layer; masks as in `MultiheadAttention` (bool True = may not look)."""
        refuse_nested(src)
        masks = (src_mask, src_key_padding_mask)
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), *masks, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, *masks, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))  # type: ignore[no-any-return]

    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
    ) -> Tensor:
        x = attend_to(self.self_attn, x, x, attn_mask, key_padding_mask, is_causal)
        return self.dropout1(x)  # type: ignore[no-any-return]

    def _ff_block(self, x: Tensor) -> Tensor:
        x = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return self.dropout2(x)  # type: ignore[no-any-return]


class TransformerDecoderLayer(nn.Module):
    """Self-attention, attention to the memory, and a feed-forward net.

    tgt (T, B, C) and memory (S, B, C), or batch first, or without a batch.
    """

    activation: Activation
    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout=dropout, batch_first=batch_first, **made
        )
        self.multihead_attn = MultiheadAttention(
            d_model, nhead, dropout=dropout, batch_first=batch_first, **made
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, **made)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **made)
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, **made)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, **made)
        self.norm3 = nn.LayerNorm(d_model, eps=layer_norm_eps, **made)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)
        self.activation = named_activation(activation)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        restore_activation(self)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """One layer; masks as in `MultiheadAttention` (bool True = may not look)."""
        refuse_nested(tgt, memory)
        own = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        other = (memory_mask, memory_key_padding_mask, memory_is_causal)
        if self.norm_first:
            x = tgt + self._sa_block(self.norm1(tgt), *own)
            x = x + self._mha_block(self.norm2(x), memory, *other)
            return x + self._ff_block(self.norm3(x))
        x = self.norm1(tgt + self._sa_block(tgt, *own))
        x = self.norm2(x + self._mha_block(x, memory, *other))
        return self.norm3(x + self._ff_block(x))  # type: ignore[no-any-return]

    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
    ) -> Tensor:
        x = attend_to(self.self_attn, x, x, attn_mask, key_padding_mask, is_causal)
        return self.dropout1(x)  # type: ignore[no-any-return]

    def _mha_block(
        self,
        x: Tensor,
        mem: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
    ) -> Tensor:
        x = attend_to(self.multihead_attn, x, mem, attn_mask, key_padding_mask, is_causal)
        return self.dropout2(x)  # type: ignore[no-any-return]

    def _ff_block(self, x: Tensor) -> Tensor:
        x = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return self.dropout3(x)  # type: ignore[no-any-return]


class TransformerEncoder(nn.Module):
    """`num_layers` copies of an encoder layer, and a norm behind them if given."""

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__()
        self.layers = copies(encoder_layer, num_layers)
        self.num_layers = num_layers
        self.norm = norm
        self.enable_nested_tensor = enable_nested_tensor
        self.use_nested_tensor = False
        self.mask_check = mask_check

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """All layers in turn; `is_causal=None` looks whether `mask` is the causal one."""
        refuse_nested(src)
        causal = is_causal if is_causal is not None else mask is not None and is_causal_mask(mask)
        output = src
        for layer in self.layers:
            given = (mask, src_key_padding_mask)
            if not isinstance(layer, TransformerEncoderLayer):
                # A layer of the user's own gets what torch's encoder would hand it: floats.
                given = (as_float(mask, src.dtype), as_float(src_key_padding_mask, src.dtype))
            output = layer(
                output, src_mask=given[0], is_causal=causal, src_key_padding_mask=given[1]
            )
        return output if self.norm is None else self.norm(output)


class TransformerDecoder(nn.Module):
    """`num_layers` copies of a decoder layer, and a norm behind them if given."""

    __prepare_scriptable__ = refuse_script

    def __init__(
        self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.layers = copies(decoder_layer, num_layers)
        self.num_layers = num_layers
        self.norm = norm

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """All layers in turn; `tgt_is_causal=None` looks whether `tgt_mask` is the causal one."""
        refuse_nested(tgt, memory)
        causal = tgt_is_causal
        if causal is None:
            causal = tgt_mask is not None and is_causal_mask(tgt_mask)
        output = tgt
        for layer in self.layers:
            output = layer(
                output,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=causal,
                memory_is_causal=memory_is_causal,
            )
        return output if self.norm is None else self.norm(output)


class Transformer(nn.Module):
    """An encoder and a decoder.

    src (S, B, C) and tgt (T, B, C) give (T, B, C); or batch first, or without a batch.
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        sizes = (d_model, nhead, dim_feedforward, dropout, activation)
        order = (layer_norm_eps, batch_first, norm_first)
        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(*sizes, *order, **made)
            norm = nn.LayerNorm(d_model, eps=layer_norm_eps, **made)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, norm)
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(*sizes, *order, **made)
            norm = nn.LayerNorm(d_model, eps=layer_norm_eps, **made)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm)
        self.encoder = custom_encoder
        self.decoder = custom_decoder
        self._reset_parameters()
        self.d_model = d_model
        self.nhead = nhead
        self.batch_first = batch_first

    def _reset_parameters(self) -> None:
        """Draw every matrix again, in torch's order."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Encode src, then decode tgt; the memory is masked only by its own masks."""
        refuse_nested(src, tgt)
        axis_b = 0 if self.batch_first else 1
        if src.dim() == 3 and (tgt.dim() != 3 or src.shape[axis_b] != tgt.shape[axis_b]):
            raise CallError(
                f"src and tgt must have one batch size (batch_first={self.batch_first}), "
                f"got src {tuple(src.shape)} and tgt {tuple(tgt.shape)}"
            )
        if src.shape[-1] != self.d_model or tgt.shape[-1] != self.d_model:
            raise CallError(
                f"src and tgt must have the width d_model={self.d_model}, "
                f"got src {tuple(src.shape)} and tgt {tuple(tgt.shape)}"
            )
        memory = self.encoder(
            src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal
        )
        return self.decoder(  # type: ignore[no-any-return]
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The causal mask as a float tensor, (sz, sz): -inf for later keys, 0 elsewhere."""
        return torch.full((sz, sz), float("-inf"), device=device, dtype=dtype).triu(1)


def attend_to(
    layer: nn.Module,
    x: Tensor,
    to: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """The output of an attention layer; no weights are asked for."""
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
    return layer(x, to, to, need_weights=False, **masks)[0]  # type: ignore[no-any-return]


def copies(layer: nn.Module, n: int) -> nn.ModuleList:
    """n copies of a layer, with its weights as they are now."""
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(n))


def named_activation(activation: str | Activation) -> Activation:
    """The activation itself, for a name or as given."""
    if not isinstance(activation, str):
        return activation
    if activation not in ("relu", "gelu"):
        raise CallError(
            f'activation should be "relu", "gelu" or a function of one tensor, not {activation!r}'
        )
    return F.relu if activation == "relu" else F.gelu


def restore_activation(layer: nn.Module) -> None:
    """Give a layer from an old file, which has no activation, the one of that time."""
    if not hasattr(layer, "activation"):
        layer.activation = F.relu  # type: ignore[assignment]
