"""Argument checks of public functions, with errors in terms of the letters B, H, T, S, D.

A caller of `check_shapes` gives the letters of each tensor ("B H T D"); the first tensor with a
letter binds its size, later ones must agree. Errors say what was given and what was expected, in
these letters. `readable` says whether a tensor's values can be read now: not while a graph is being
traced, and not inside a `torch.func` transform. The counts, numbers and names of a config are
checked here, too; the values of tensors are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from regard._torch import is_fake, is_traced, is_transformed, is_transforming

FLOAT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_shapes(tensors: Mapping[str, tuple[Tensor, str]]) -> dict[str, int]:
    """Bind letters to sizes over all tensors and return them; raise if a tensor disagrees.

    `tensors` maps a name to (tensor, letters), for example ``{"q": (q, "B H T D")}``.
    """
    sizes: dict[str, int] = {}
    bound_by: dict[str, str] = {}
    for name, (tensor, spelled) in tensors.items():
        letters = spelled.split()
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a tensor ({', '.join(letters)}), got {name_kind(tensor)}"
            )
        if tensor.dim() != len(letters):
            raise ValueError(
                f"{name} must have {len(letters)} axes ({', '.join(letters)}), "
                f"got shape {tuple(tensor.shape)}"
            )
        for letter, size in zip(letters, tensor.shape, strict=True):
            if letter not in sizes:
                sizes[letter], bound_by[letter] = size, name
            elif sizes[letter] != size:
                raise ValueError(
                    f"{name} ({', '.join(letters)}) has {letter}={size}, "
                    f"but {bound_by[letter]} has {letter}={sizes[letter]}; "
                    f"{name} has shape {tuple(tensor.shape)}"
                )
    return sizes


def name_kind(value: object) -> str:
    """The kind of a value, for an error message: "a list", "the class Causal"."""
    if isinstance(value, type):
        return f"the class {value.__name__}; make one of it, {value.__name__}(...)"
    return "None" if value is None else f"a {type(value).__name__}"


def check_float(name: str, tensor: Tensor) -> None:
    """Refuse what is not a tensor of one of the four float types."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a float tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOAT_TYPES:
        known = ", ".join(str(t).removeprefix("torch.") for t in FLOAT_TYPES)
        raise TypeError(f"{name} must be one of {known}, got {tensor.dtype}; convert it first")


def check_probability(name: str, value: float) -> float:
    """Refuse what is not a probability in [0, 1]."""
    if isinstance(value, str):
        raise TypeError(f"{name} must be a number from 0 to 1, got {value!r}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    return float(value)


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


def all_finite(*tensors: Tensor) -> bool:
    """Whether all entries are finite, judged by their sums, which may overflow: then False too."""
    total = 0.0
    for tensor in tensors:
        plain = tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor
        wide = None if tensor.dtype in (torch.float32, torch.float64) else torch.float32
        total += plain.sum(dtype=wide).item()
    return math.isfinite(total)


def known_finite(*tensors: Tensor) -> bool:
    """Whether all entries are known to be finite; checked on a CPU only, where it is cheap."""
    return tensors[0].device.type == "cpu" and readable(*tensors) and all_finite(*tensors)


def is_empty(*tensors: Tensor) -> bool:
    """Whether a tensor surely has no entries; a size unknown in tracing counts as not zero."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return any(statically_known_true(t.numel() == 0) for t in tensors)
    return 0 in [t.numel() for t in tensors]


def is_one(size: int) -> bool:
    """Whether a size is surely 1; a size unknown in tracing counts as not 1."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(size == 1)
    return size == 1


def readable(*tensors: Tensor | None) -> bool:
    """Whether the tensors' values can be read now: plain tensors with data, outside tracing."""
    if torch.compiler.is_compiling() or is_traced():
        return False
    inside = is_transforming()
    for t in tensors:
        if t is None or (type(t) is Tensor and not inside and not t.is_meta):
            continue
        if t.is_meta or is_fake(t) or is_transformed(t):
            return False
    return True
