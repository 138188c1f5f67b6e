"""Converts torch.nn's masks into regard's masks and biases.

torch.nn has two mask tensors: `attn_mask`, (T, S) or (B·H, T, S), and `key_padding_mask`, (B, S)
or (S,) without a batch. Each is bool, where True means *may not attend* (the opposite of ours), or
float, added to the scores. Here a bool mask becomes a `Mask`, a float mask a `Bias`, in any
combination. `is_causal` is a hint that `attn_mask` is the causal mask. It is used only after the
mask's values were compared, so it can make a call faster but never change its result.

Where values can be read without waiting (on the CPU, outside tracing), padding at the end becomes
`Lengths`, so that padded keys cost no work. Elsewhere the padding mask is used as it is.

Letters: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._check import readable
from regard.nn.errors import CallError, InputError
from regard.ops import Bias, Causal, Dense, DenseBias, Lengths, Mask
from regard.ops.shape import Shape


class Masks(NamedTuple):
    """The two masks of a call, and the hint that the first is causal."""

    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    is_causal: bool

    def check_kinds(self) -> None:
        for name in ("key_padding_mask", "attn_mask"):
            mask = getattr(self, name)
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise InputError(
                    f"only bool and floating types of {name} are supported, got {mask.dtype}; "
                    f"use {name}.bool() where nonzero means: may not look"
                )

    def check_axes(self, batched: bool) -> None:
        kind, wanted = ("batched (3-D)", 2) if batched else ("unbatched (2-D)", 1)
        for name, allowed in (("key_padding_mask", (wanted,)), ("attn_mask", (2, 3))):
            mask = getattr(self, name)
            if mask is not None and mask.dim() not in allowed:
                axes = " or ".join(f"{n}-D" for n in allowed)
                raise InputError(
                    f"for {kind} `query`, expected `{name}` to be `None` or {axes} "
                    f"but found {mask.dim()}-D tensor instead"
                )

    def check_sizes(self, shape: Shape, batched: bool) -> None:
        """Refuse masks whose shapes do not fit, whether or not they would be used."""
        B, H, T, S = shape
        flat = self.attn_mask is None or self.attn_mask.dim() == 2
        wanted: dict[str, tuple[tuple[int, ...], str]] = {
            "key_padding_mask": ((B, S), "(B, S)") if batched else ((S,), "(S,)"),
            "attn_mask": ((T, S), "(T, S)") if flat else ((B * H, T, S), "(B·H, T, S)"),
        }
        for name, (sizes, letters) in wanted.items():
            mask = getattr(self, name)
            if mask is not None and mask.shape != sizes:
                kind = CallError if name == "attn_mask" and (batched or flat) else InputError
                raise kind(
                    f"Expected `{name}` shape to be {sizes} = {letters} but got {tuple(mask.shape)}"
                )

    def read(self, shape: Shape, extra: int) -> tuple[Mask | None, Bias | None]:
        """The mask and the bias that the two checked masks mean together.

        shape counts the caller's keys; `extra` keys are appended to them, which every query sees.
        """
        attn_mask, padding = self.attn_mask, self.key_padding_mask
        if self.is_causal and attn_mask is None:
            raise CallError(
                "is_causal is a hint that attn_mask is the causal mask, so it needs one: pass "
                "attn_mask=Transformer.generate_square_subsequent_mask(T)"
            )
        masks: list[Mask] = []
        biases: list[Bias] = []
        parts: list[Tensor] = []
        if attn_mask is not None:
            believed = self.is_causal and not extra and not attn_mask.requires_grad
            if believed and is_causal_mask(attn_mask):
                masks.append(Causal(align="start"))
            else:
                parts.append(attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(shape))
        if padding is not None:
            lengths = read_lengths(padding) if not extra else None
            if lengths is not None:
                masks.append(Lengths(lengths))
            else:
                parts.append(padding.reshape(-1, 1, 1, shape.S))
        for part in parts:
            if part.dtype == torch.bool:
                masks.append(Dense(F.pad(~part, (0, extra), value=True) if extra else ~part))
            else:
                biases.append(DenseBias(F.pad(part, (0, extra)) if extra else part))
        return reduce(and_, masks) if masks else None, reduce(add, biases) if biases else None


def is_causal_mask(mask: Tensor) -> bool:
    """Whether a mask (T, S) hides exactly the keys after each query; False if it is unreadable."""
    # Nothing may be read back while a CUDA graph is being captured.
    captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if mask.dim() != 2 or not readable(mask) or captured:
        return False
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, later)
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    return torch.equal(mask <= lowest, later) and torch.equal(mask != 0, later)


def read_lengths(key_padding_mask: Tensor) -> Tensor | None:
    """The real keys of each sample, (B,); None if unreadable, or if padding is not at the end."""
    near = key_padding_mask.device.type == "cpu" and readable(key_padding_mask)
    if key_padding_mask.dtype != torch.bool or not near:
        return None
    padded_bs = key_padding_mask.reshape(-1, key_padding_mask.shape[-1])
    if (padded_bs[:, 1:] < padded_bs[:, :-1]).any():
        return None
    return (~padded_bs).sum(1)


def as_float(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as torch's encoder passes it to its layers: float, -inf where True."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
