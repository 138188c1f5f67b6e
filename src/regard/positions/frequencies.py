"""Frequencies, and the checks that every scheme of positions shares.

Why: an angle is position × frequency, and it must be right at position 1,000,003 too, where
float32 has lost three digits, bfloat16 all of them.

How: frequencies are computed at every call, from plain numbers, on the device, in float64. None is
ever stored, so there is no buffer that `.bfloat16()`, `to_empty()` or a longer text seen earlier
could spoil, and nothing in a state_dict. Only elementwise operations are used; autocast lowers
none of them.

Left out: a cache of angles. A model makes them once a pass and hands them down.

Letters: R pairs of numbers, each with one frequency.
"""

import math

import torch
from torch import Tensor


def make_frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    """base^(-2r / dim) for each pair r of `dim` numbers; an odd last number counts as a pair."""
    # Apple's GPUs have no float64.
    exact = torch.float32 if device.type == "mps" else torch.float64
    pair_r = torch.arange((dim + 1) // 2, dtype=exact, device=device)
    return torch.exp(pair_r * (-2 * math.log(base) / dim))


def check_positions(positions: Tensor) -> None:
    if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
        raise TypeError(f"positions are {positions.dtype}; expected whole numbers, use .long()")
    if positions.ndim not in (1, 2):
        raise ValueError(f"positions have shape {tuple(positions.shape)}; expected (T,) or (B, T)")


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a whole number, 1 or more")


def check_number(name: str, value: object, above: float = 0.0) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected a number")
    if not (math.isfinite(value) and value > above):
        raise ValueError(f"{name} is {value!r}; expected a finite number above {above:g}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")
