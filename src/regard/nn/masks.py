"""torch.nn's masks, read once and turned into ours.

torch.nn speaks in two tensors. `attn_mask`, (T, S) or (B·H, T, S), and `key_padding_mask`, (B, S)
or (S,) without a batch; each bool, where True means *may not look* (the opposite of ours), or
float, added to the scores. Here bool becomes a `Mask`, float a `Bias`, any mixture of the two.
`is_causal` is a hint that `attn_mask` is the causal one: it is believed only after a look at the
mask, so it can make a call faster and never change its result.

Where values can be read without waiting (on the CPU, outside tracing), padding at the end becomes
`Lengths`, so that padded keys cost no work. Elsewhere masks are taken as given.

Letters: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._check import readable
from regard.nn.errors import CallError, InputError
from regard.ops import Bias, Causal, Dense, DenseBias, Lengths, Mask
from regard.ops.shape import Shape


def check_kinds(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> None:
    """Refuse masks that are neither bool nor float."""
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise InputError(
                f"only bool and floating types of {name} are supported, got {mask.dtype}; "
                f"use {name}.bool() where nonzero means: may not look"
            )


def check_dims(attn_mask: Tensor | None, key_padding_mask: Tensor | None, batched: bool) -> None:
    """Refuse masks with the wrong number of axes."""
    kind, wanted = ("batched (3-D)", 2) if batched else ("unbatched (2-D)", 1)
    if key_padding_mask is not None and key_padding_mask.dim() != wanted:
        raise InputError(
            f"for {kind} `query`, expected `key_padding_mask` to be `None` or {wanted}-D "
            f"but found {key_padding_mask.dim()}-D tensor instead"
        )
    if attn_mask is not None and attn_mask.dim() not in (2, 3):
        raise InputError(
            f"for {kind} `query`, expected `attn_mask` to be `None`, 2-D or 3-D "
            f"but found {attn_mask.dim()}-D tensor instead"
        )


def check_sizes(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, shape: Shape, batched: bool
) -> None:
    """Refuse masks that do not fit, whether or not they would be read."""
    B, H, T, S = shape
    if key_padding_mask is not None:
        wanted: tuple[int, ...] = (B, S) if batched else (S,)
        letters = "(B, S)" if batched else "(S,)"
        if key_padding_mask.shape != wanted:
            raise InputError(
                f"Expected `key_padding_mask` shape to be {wanted} = {letters} "
                f"but got {tuple(key_padding_mask.shape)}"
            )
    if attn_mask is None:
        return
    wanted, letters = ((T, S), "(T, S)") if attn_mask.dim() == 2 else ((B * H, T, S), "(B·H, T, S)")
    if attn_mask.shape != wanted:
        kind = CallError if batched or attn_mask.dim() == 2 else InputError
        raise kind(
            f"Expected `attn_mask` shape to be {wanted} = {letters} "
            f"but got {tuple(attn_mask.shape)}"
        )


def read_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    shape: Shape,
    extra: int,
) -> tuple[Mask | None, Bias | None]:
    """The rule that two checked masks mean together.

    shape has the keys that were given; `extra` more stand behind them, which every query sees.
    """
    if is_causal and attn_mask is None:
        raise CallError(
            "is_causal is a hint that attn_mask is the causal mask, so it needs one: pass "
            "attn_mask=Transformer.generate_square_subsequent_mask(T)"
        )
    masks: list[Mask] = []
    biases: list[Bias] = []
    if attn_mask is not None:
        believed = is_causal and not extra and not attn_mask.requires_grad
        if believed and is_causal_mask(attn_mask):
            masks.append(Causal(align="start"))
        else:
            grid = attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(shape)
            add_part(grid, extra, masks, biases)
    if key_padding_mask is not None:
        lengths = read_lengths(key_padding_mask) if not extra else None
        if lengths is not None:
            masks.append(Lengths(lengths))
        else:
            add_part(key_padding_mask.reshape(-1, 1, 1, shape.S), extra, masks, biases)
    mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    bias = biases[0] + biases[1] if len(biases) == 2 else biases[0] if biases else None
    return mask, bias


def add_part(part: Tensor, extra: int, masks: list[Mask], biases: list[Bias]) -> None:
    """Put a mask that broadcasts to (B, H, T, S) on its list, widened for the extra keys."""
    if part.dtype == torch.bool:
        masks.append(Dense(F.pad(~part, (0, extra), value=True) if extra else ~part))
    else:
        biases.append(DenseBias(F.pad(part, (0, extra)) if extra else part))


def is_causal_mask(mask: Tensor) -> bool:
    """Whether a mask, (T, S), hides just the keys after each query; no, where it cannot be read."""
    if mask.dim() != 2 or not readable(mask) or is_being_captured(mask):
        return False
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, later)
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    return torch.equal(mask <= lowest, later) and torch.equal(mask != 0, later)


def is_being_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing may be read back."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def read_lengths(key_padding_mask: Tensor) -> Tensor | None:
    """How many real keys each sample has, (B,); None if unread, or if padding is not at the end."""
    near = key_padding_mask.device.type == "cpu" and readable(key_padding_mask)
    if key_padding_mask.dtype != torch.bool or not near:
        return None
    padded_bs = key_padding_mask.reshape(-1, key_padding_mask.shape[-1])
    if (padded_bs[:, 1:] < padded_bs[:, :-1]).any():
        return None
    return (~padded_bs).sum(1)


def as_float(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as torch's encoder hands it to its layers: float, -inf where no look is allowed."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
