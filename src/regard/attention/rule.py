"""The rule of one call: mask, bias, scale and softcap together, at one shape.

A `Rule` is what the reference, the tiled passes and the fused kernels are all given. `pack` writes
a rule down as text and a list of tensors, and `unpack` reads it back: so a rule can pass through
autograd and through compiled graphs, which carry tensors and constants only.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention import bias as biases
from regard.attention import mask as masks
from regard.attention import patterns
from regard.attention.bias import Bias
from regard.attention.mask import Mask
from regard.attention.shape import Shape


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """How scores are made and which of them count: scale, softcap, bias, mask, in this order."""

    shape: Shape
    scale: float | None = None
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None

    def factor(self, head_dim: int) -> float:
        """What q kᵀ is multiplied by: the scale given, else 1/√D (1 when there is no width)."""
        return self.scale if self.scale is not None else max(head_dim, 1) ** -0.5

    def hides(self) -> bool:
        """Whether some pair may be hidden: by the mask, or by a bias of -inf."""
        return self.mask is not None or self.bias is not None

    def is_relative(self) -> bool:
        """Whether every number of the rule depends on the head and on i - j alone."""
        return (self.mask is None or self.mask.relative) and (
            self.bias is None or self.bias.relative
        )

    def bias_leaves(self) -> list[Tensor]:
        """The float tensors to which gradients of the bias may flow."""
        return [] if self.bias is None else self.bias.leaves()

    def on(self, device: torch.device) -> Rule:
        """The same rule with its tensors on a device."""
        if all(t.device == device for t in self.tensors()):
            return self
        return replace(self, mask=moved(self.mask, device), bias=moved(self.bias, device))

    def tensors(self) -> list[Tensor]:
        """Every tensor the rule holds."""
        return tensors_of(self.mask) + tensors_of(self.bias)


_NODES: dict[str, type[Any]] = {
    name: thing
    for module in (masks, patterns, biases)
    for name, thing in vars(module).items()
    if isinstance(thing, type) and issubclass(thing, (Mask, Bias))
}


class Packed(NamedTuple):
    """A rule written down: its form as text, and the tensors and numbers that stand in it."""

    text: str
    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]


def pack(rule: Rule) -> Packed:
    """A rule without its shape, by plain string work that a compiler can trace."""
    packed = Packed("", [], [], [])
    parts = [write(part, packed) for part in (rule.scale, rule.mask, rule.bias, rule.softcap)]
    return packed._replace(text="[" + ", ".join(parts) + "]")


def unpack(packed: Packed, shape: Shape) -> Rule:
    """The rule that `pack` wrote down, at the given shape."""
    scale, mask, bias, softcap = (read(part, packed) for part in ast.literal_eval(packed.text))
    return Rule(shape=shape, scale=scale, mask=mask, bias=bias, softcap=softcap)


def tensors_of(part: Any) -> list[Tensor]:
    """The tensors of a mask or bias and of its parts, in the order `pack` lists them."""
    if isinstance(part, Tensor):
        return [part]
    if not isinstance(part, (Mask, Bias)):
        return []
    return [t for entry in fields(part) for t in tensors_of(getattr(part, entry.name))]  # type: ignore[arg-type]


def moved(part: Any, device: torch.device) -> Any:
    """A mask or bias with its tensors on a device."""
    if isinstance(part, Tensor):
        return part.to(device)
    if not isinstance(part, (Mask, Bias)):
        return part
    values = {
        entry.name: moved(getattr(part, entry.name), device)
        for entry in fields(part)  # type: ignore[arg-type]
    }
    return replace(part, **values)  # type: ignore[type-var]


def write(part: Any, packed: Packed) -> str:
    """One part of a rule as text; tensors and numbers are listed and named by their place."""
    if isinstance(part, (Mask, Bias)):
        values = [write(getattr(part, entry.name), packed) for entry in fields(part)]  # type: ignore[arg-type]
        return "[" + ", ".join([f"'{type(part).__name__}'", *values]) + "]"
    if part is None or isinstance(part, bool):
        return f"{part}"
    if isinstance(part, str):
        return f"'{part}'"
    places: tuple[tuple[type, list[Any]], ...] = (
        (Tensor, packed.tensors),
        (int, packed.ints),
        (float, packed.floats),
    )
    for which, (kind, found) in enumerate(places):
        if isinstance(part, kind):
            found.append(part)
            return f"({which}, {len(found) - 1})"
    raise AssertionError(f"a rule holds no {type(part)}")


def read(part: Any, packed: Packed) -> Any:
    """One part of a rule from its text: a pair is a tensor or number, a list a mask or bias."""
    if isinstance(part, tuple):
        which, place = part
        return (packed.tensors, packed.ints, packed.floats)[which][place]
    if not isinstance(part, list):
        return part
    kind = _NODES[part[0]]
    made = object.__new__(kind)
    for entry, value in zip(fields(kind), part[1:], strict=True):
        object.__setattr__(made, entry.name, read(value, packed))
    return made


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """A mask as given, or a bool tensor as one."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Bias):
        raise TypeError(f"{type(mask).__name__} is a bias: pass it as bias=, not mask=")
    return patterns.Dense(mask)


def as_bias(bias: Bias | Tensor | None) -> Bias | None:
    """A bias as given, or a float tensor as one."""
    if bias is None or isinstance(bias, Bias):
        return bias
    if isinstance(bias, Mask):
        raise TypeError(f"{type(bias).__name__} is a mask: pass it as mask=, not bias=")
    return biases.DenseBias(bias)


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which scores and softmax run: float64 stays, all others use float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
