"""Rotary positions: rotated queries and keys, whose dot product depends only on their distance.

Why: after rotating, q at position i times k at position j depends on i - j, and nothing is added to
the embeddings.

How: a head's first `rotary_dim` numbers form pairs; pair (a, b) at position t becomes (a cos - b
sin, b cos + a sin) with the angle t × frequency. `pairing` says which numbers are a pair: "halves"
is x[r] with x[r + R] (Hugging Face's LLaMA, NeoX), "neighbours" is x[2r] with x[2r + 1] (the
paper, GPT-J, Meta's LLaMA files). Weights are never permuted. `phases` computes (cos, sin) once per
forward pass; `rotate` uses them in every layer.

Phases are float32 whatever the model's type; the rotation is computed in float32 or wider and
rounded once, to the type of x. Nothing is kept between calls.

Left out: rotating in place, and complex numbers.

Letters: B batch, T tokens, H heads, D head width, R pairs that rotate (rotary_dim / 2).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from regard._check import (
    check_choice,
    check_count,
    check_float,
    check_number,
    check_positions,
    check_shapes,
)
from regard.positions.frequencies import make_frequencies
from regard.positions.scaling import DynamicNTK, LongRoPE, Scaling

Pairing = Literal["halves", "neighbours"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """The settings of rotary positions, which every checkpoint fixes.

    Args:
        head_dim: The width D of a head.
        base: The base of the frequencies, Hugging Face's rope_theta.
        rotary_dim: How many of the first numbers of a head are rotated, an even number: Hugging
            Face's partial_rotary_factor × head_dim. None: all of them.
        pairing: Which numbers are rotated together. "halves": r and r + D/2 (Hugging Face's LLaMA,
            NeoX). "neighbours": 2r and 2r + 1 (GPT-J, Meta's LLaMA files).
        scaling: For texts longer than those of the training: `Linear`, `DynamicNTK`, `YaRN`,
            `Llama3`, `LongRoPE`, or `scaling_from_dict(...)`. None: no scaling.

    Example:
        >>> rotary = regard.positions.RotaryConfig(head_dim=8, base=500_000.0)
        >>> layer = regard.MultiHeadAttention(64, 8, causal=True, rotary=rotary)
    """

    head_dim: int
    base: float = 10000.0
    rotary_dim: int | None = None
    pairing: Pairing = "halves"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check_count("head_dim", self.head_dim)
        check_number("base", self.base, above=1)
        check_choice("pairing", self.pairing, get_args(Pairing))
        if self.rotary_dim is not None:
            check_count("rotary_dim", self.rotary_dim)
        n_rotated = 2 * self.n_pairs
        if n_rotated != (self.rotary_dim or self.head_dim) or n_rotated > self.head_dim:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim} with head_dim {self.head_dim}; expected an even "
                "number, head_dim at most: set rotary_dim to how many numbers of a head rotate"
            )
        scaling = self.scaling
        if scaling is not None and not isinstance(scaling, Scaling):
            raise TypeError(
                f"scaling is a {type(scaling).__name__}; expected one of "
                f"{', '.join(kind.__name__ for kind in get_args(Scaling))}, or None. "
                "A Hugging Face dict is read by scaling_from_dict"
            )
        if isinstance(scaling, LongRoPE) and len(scaling.short_factor) != self.n_pairs:
            raise ValueError(
                f"LongRoPE has {len(scaling.short_factor)} divisors; expected one for each of the "
                f"{self.n_pairs} pairs that rotate (rotary_dim / 2)"
            )
        if isinstance(scaling, DynamicNTK) and self.n_pairs == 1:
            raise ValueError("DynamicNTK needs two pairs or more; rotary_dim 2 has one")

    @property
    def n_pairs(self) -> int:
        return (self.rotary_dim or self.head_dim) // 2


class Phases(NamedTuple):
    """cos and sin of each pair's angle, float32, (T, R) or (B, T, R)."""

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """Rotates queries and keys by their positions. It has no parameters and no buffers.

    Args:
        config: A `RotaryConfig`.

    Example:
        >>> rotary = regard.positions.Rotary(regard.positions.RotaryConfig(head_dim=8))
        >>> q = rotary.rotate(torch.randn(2, 4, 11, 8), torch.arange(11))  # (B, H, T, D), (T,)
    """

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.config = config

    def phases(self, positions: Tensor, *, length: int | Tensor | None = None) -> Phases:
        """cos and sin for positions (T,) or (B, T), in any order, with gaps or negative.

        `length`, an int or (B,), is the length of the whole text. It matters to DynamicNTK and
        LongRoPE only; by default it is each row's largest position + 1, so no row depends on
        another. With a cache, give it: one step alone does not know how long the text will be.
        """
        check_positions(positions)
        config, scaling = self.config, self.config.scaling
        frequencies_r = make_frequencies(2 * config.n_pairs, config.base, positions.device)
        amplitude = 1.0
        if scaling is not None:
            measured = None
            if scaling.needs_length:
                measured = _measure(positions, length).to(frequencies_r.dtype)
            frequencies_r = scaling.scale(frequencies_r, config.base, measured)
            amplitude = scaling.amplitude
        angles_tr = positions[..., None] * frequencies_r
        cos, sin = (angles_tr.cos() * amplitude).float(), (angles_tr.sin() * amplitude).float()
        if torch.compiler.is_compiling() and cos.is_cuda:
            # Without this, the compiler would recompute the angles in every layer.
            cos, sin = _settle_op(torch.stack((cos, sin))).unbind()
        return Phases(cos, sin)

    def rotate(
        self, x_bhtd: Tensor, at: Tensor | Phases, *, length: int | Tensor | None = None
    ) -> Tensor:
        """x rotated, in its own type. `at` is positions, (T,) or (B, T), or their phases.

        Queries and keys are rotated in the same way, each by their own positions.
        """
        if isinstance(at, Tensor):
            at = self.phases(at, length=length)
        elif length is not None:
            raise ValueError("length came with phases, which have theirs; pass it to phases()")
        cos = at[0]
        check_float("x", x_bhtd)
        if cos.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"phases are {cos.dtype}; expected float32, as phases() makes them")
        letters = "T R" if cos.ndim == 2 else "1 T R" if cos.shape[0] == 1 else "B T R"
        sizes = check_shapes({"x": (x_bhtd, "B H T D"), "positions or phases": (cos, letters)})
        if sizes["D"] != self.config.head_dim or sizes["R"] != self.config.n_pairs:
            raise ValueError(
                f"x has D={sizes['D']} and is rotated in R={sizes['R']} pairs, but the config has "
                f"D=head_dim={self.config.head_dim}, R={self.config.n_pairs}; use this layer's own"
            )
        return rotate_pairs(x_bhtd, Phases(*at), self.config)

    forward = rotate

    def extra_repr(self) -> str:
        return str(self.config)


def rotate_pairs(x_bhtd: Tensor, phases: Phases, config: RotaryConfig) -> Tensor:
    """x rotated, in its own type, by phases whose shape was checked."""
    cos, sin = phases
    if cos.ndim == 3 and cos.shape[0] != 1:
        cos, sin = cos[:, None], sin[:, None]
    n_pairs = cos.shape[-1]
    # cos and sin are float32, so every product is float32 or wider, whatever the type of x.
    head, rest = x_bhtd[..., : 2 * n_pairs], x_bhtd[..., 2 * n_pairs :]
    if config.pairing == "halves":
        a, b = head[..., :n_pairs], head[..., n_pairs:]
        rotated_bhtd = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
    else:
        a, b = head[..., ::2], head[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)
        rotated_bhtd = torch.cat((pairs.flatten(-2), rest), -1)
    return rotated_bhtd.to(x_bhtd.dtype)


def _measure(positions: Tensor, length: int | Tensor | None) -> Tensor:
    """The length of the text as a tensor that broadcasts against (T, R) or (B, T, R)."""
    if isinstance(length, Tensor):
        if length.ndim == 0:
            return length
        if positions.ndim != 2 or length.shape != positions.shape[:1]:
            raise ValueError(
                f"length has shape {tuple(length.shape)} with positions {tuple(positions.shape)}; "
                "expected one number, or (B,) with positions (B, T)"
            )
        return length[:, None, None]
    if length is not None:
        return torch.full((), length, device=positions.device)
    if positions.shape[-1] == 0:
        return torch.zeros((), dtype=torch.int64, device=positions.device)
    return positions.amax(-1, keepdim=True)[..., None] + 1


def _settle(x: Tensor) -> Tensor:
    return x.clone()


_settle_op = torch.library.custom_op(
    "regard::settle", _settle, mutates_args=(), schema="(Tensor x) -> Tensor"
)
"""A copy that compiled graphs do not fuse through: they store it instead of recomputing it."""


@_settle_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
