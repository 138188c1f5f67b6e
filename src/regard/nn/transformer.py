"""torch.nn's Transformer layers and stacks, with the same names, arguments and state_dict keys.

Why: so that changing `torch.nn` to `regard.nn` is the whole migration; see `multihead.py` for what
differs in attention.

How: each class is a subclass of torch's with our attention and without the fast path: evaluation
runs the same code as training. `enable_nested_tensor` and `mask_check` are accepted and do nothing:
padded keys are skipped anyway. A stack checks once whether its mask is the causal one, and passes
this on to its layers.

Left out: nested tensors and TorchScript; both are refused with a reason.

Letters: B batch, T target length, S source length, C model width (d_model).
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor, nn

from regard.nn.errors import CallError, refuse_nested, refuse_script
from regard.nn.masks import as_float, is_causal_mask
from regard.nn.multihead import adopt, check_heads, signed_as

LAYER = "d_model nhead dim_feedforward dropout activation layer_norm_eps batch_first norm_first"
LAYER += " bias device dtype"


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Self-attention and a feed-forward net.

    src (S, B, C), or (B, S, C) with `batch_first`, or (S, C).
    """

    __prepare_scriptable__ = refuse_script

    @signed_as(nn.TransformerEncoderLayer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_options(nn.TransformerEncoderLayer, *args, **kwargs)
        super().__init__(*args, **kwargs)
        adopt(self.self_attn)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Run one layer; masks as in `MultiheadAttention` (bool True = may not attend)."""
        refuse_nested(src)
        masks = (src_mask, src_key_padding_mask)
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), *masks, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, *masks, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))  # type: ignore[no-any-return]


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """Self-attention, attention to the memory, and a feed-forward net.

    tgt (T, B, C) and memory (S, B, C), or batch first, or without a batch.
    """

    __prepare_scriptable__ = refuse_script

    @signed_as(nn.TransformerDecoderLayer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_options(nn.TransformerDecoderLayer, *args, **kwargs)
        super().__init__(*args, **kwargs)
        adopt(self.self_attn)
        adopt(self.multihead_attn)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's own would replace an activation that is a module by relu.
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        if not hasattr(self, "activation"):
            self.activation = nn.functional.relu


class TransformerEncoder(nn.TransformerEncoder):
    """`num_layers` copies of an encoder layer, followed by a norm if one is given."""

    __prepare_scriptable__ = refuse_script

    @signed_as(nn.TransformerEncoder.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = signature(nn.TransformerEncoder).bind(*args, **kwargs).arguments
        super().__init__(**{**given, "enable_nested_tensor": False})
        self.enable_nested_tensor = given.get("enable_nested_tensor", True)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Run all layers; `is_causal=None` checks whether `mask` is the causal one."""
        refuse_nested(src)
        causal = is_causal if is_causal is not None else mask is not None and is_causal_mask(mask)
        output = src
        for layer in self.layers:
            own, padding = mask, src_key_padding_mask
            if not isinstance(layer, TransformerEncoderLayer):
                # A layer of another class gets what torch's encoder would pass to it: floats.
                own, padding = as_float(own, src.dtype), as_float(padding, src.dtype)
            output = layer(output, src_mask=own, is_causal=causal, src_key_padding_mask=padding)
        return output if self.norm is None else self.norm(output)


class TransformerDecoder(nn.TransformerDecoder):
    """`num_layers` copies of a decoder layer, followed by a norm if one is given."""

    __prepare_scriptable__ = refuse_script

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
        """Run all layers; `tgt_is_causal=None` checks whether `tgt_mask` is the causal one."""
        refuse_nested(tgt, memory)
        if tgt_is_causal is None:
            tgt_is_causal = tgt_mask is not None and is_causal_mask(tgt_mask)
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        return super().forward(tgt, memory, *masks, tgt_is_causal, memory_is_causal)


class Transformer(nn.Transformer):
    """An encoder and a decoder.

    src (S, B, C) and tgt (T, B, C) give (T, B, C); or batch first, or without a batch axis.
    """

    __prepare_scriptable__ = refuse_script

    @signed_as(nn.Transformer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = signature(nn.Transformer).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        sizes = [given[name] for name in LAYER.split()]
        parts: dict[str, tuple[Any, Any]] = {
            "encoder": (TransformerEncoder, TransformerEncoderLayer),
            "decoder": (TransformerDecoder, TransformerDecoderLayer),
        }
        for name, (stack, layer) in parts.items():
            if given[f"custom_{name}"] is None:
                where = {key: given[key] for key in ("bias", "device", "dtype")}
                norm = nn.LayerNorm(given["d_model"], eps=given["layer_norm_eps"], **where)
                given[f"custom_{name}"] = stack(layer(*sizes), given[f"num_{name}_layers"], norm)
        super().__init__(**given)

    @signed_as(nn.Transformer.forward)
    def forward(self, src: Tensor, tgt: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Encode src, then decode tgt; the memory is masked only by its own masks."""
        refuse_nested(src, tgt)
        axis_b = 0 if self.batch_first else 1
        came = f"got src {tuple(src.shape)} and tgt {tuple(tgt.shape)}"
        if src.dim() == 3 and (tgt.dim() != 3 or src.shape[axis_b] != tgt.shape[axis_b]):
            what = f"one batch size (batch_first={self.batch_first})"
            raise CallError(f"src and tgt must have {what}, {came}")
        if src.shape[-1] != self.d_model or tgt.shape[-1] != self.d_model:
            raise CallError(f"src and tgt must have the width d_model={self.d_model}, {came}")
        return super().forward(src, tgt, *args, **kwargs)


def check_options(layer: type[nn.Module], *args: Any, **kwargs: Any) -> None:
    """Refuse what torch refuses, with its exception types and our messages."""
    given = signature(layer).bind(*args, **kwargs).arguments
    check_heads(given["d_model"], given["nhead"])
    activation = given.get("activation")
    if isinstance(activation, str) and activation not in ("relu", "gelu"):
        raise CallError(
            f'activation should be "relu", "gelu" or a function of one tensor, not {activation!r}'
        )
