"""The rule of one call: mask, bias, scale and softcap together, at one shape.

A `Rule` is what the reference, the tiled passes and the fused kernels are all given. `pack` takes a
rule apart into its form, a nested tuple, and the tensors and numbers that stand in it, and `unpack`
puts it together again: so a rule can pass through autograd, which has to be handed every tensor by
itself. Compiled graphs carry tensors and constants only; for them the form is spelled as text,
which is parsed once for each form that occurs.
"""

from __future__ import annotations

import ast
import threading
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard.ops import bias as biases
from regard.ops import mask, masks
from regard.ops.bias import Bias
from regard.ops.mask import Mask
from regard.ops.shape import Shape


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
        return self.mask is not None or self.bias_hides()

    def bias_hides(self) -> bool:
        """Whether the bias may be -inf somewhere, and so hide a pair."""
        return self.bias is not None and self.bias.hides

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
        if (self.mask is None and self.bias is None) or all(
            t.device == device for t in self.tensors()
        ):
            return self
        return replace(self, mask=moved(self.mask, device), bias=moved(self.bias, device))

    def tensors(self) -> list[Tensor]:
        """Every tensor the rule holds."""
        return tensors_of(self.mask) + tensors_of(self.bias)


_NODES: dict[str, type[Any]] = {
    name: thing
    for module in (mask, masks, biases)
    for name, thing in vars(module).items()
    if isinstance(thing, type) and issubclass(thing, (Mask, Bias))
}


Form: TypeAlias = "tuple[Any, ...]"
"""A rule without its tensors and numbers: a mask or bias is (its class, its fields ...)."""


class Slot(NamedTuple):
    """What stands in a form for a tensor (kind 0), an int (1) or a float (2): its place in line."""

    kind: int
    place: int


class Packed(NamedTuple):
    """A rule taken apart: its form, spelled or not, and the tensors and numbers in it."""

    form: Form | str
    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]


def pack(rule: Rule) -> Packed:
    """A rule without its shape."""
    packed = Packed((), [], [], [])
    parts = (rule.scale, rule.mask, rule.bias, rule.softcap)
    return packed._replace(form=tuple([_take_apart(part, packed) for part in parts]))


def unpack(packed: Packed, shape: Shape) -> Rule:
    """The rule that `pack` took apart, at the given shape."""
    form = parse(packed.form) if isinstance(packed.form, str) else packed.form
    scale, mask, bias, softcap = (_put_together(part, packed) for part in form)
    return Rule(shape=shape, scale=scale, mask=mask, bias=bias, softcap=softcap)


def _take_apart(part: Any, packed: Packed) -> Any:
    if part is None or isinstance(part, (bool, str)):
        return part
    if isinstance(part, (Mask, Bias)):
        names = field_names(part)
        return (type(part), *[_take_apart(getattr(part, name), packed) for name in names])
    held: tuple[tuple[type, list[Any]], ...] = (
        (Tensor, packed.tensors),
        (int, packed.ints),
        (float, packed.floats),
    )
    for kind, (what, line) in enumerate(held):
        if isinstance(part, what):
            line.append(part)
            return Slot(kind, len(line) - 1)
    raise AssertionError(f"a rule holds no {type(part)}")


def _put_together(part: Any, packed: Packed) -> Any:
    if isinstance(part, Slot):
        return (packed.tensors, packed.ints, packed.floats)[part.kind][part.place]
    if not isinstance(part, tuple):
        return part
    made = object.__new__(part[0])
    for name, value in zip(field_names(part[0]), part[1:], strict=True):
        object.__setattr__(made, name, _put_together(value, packed))
    return made


def spell(form: Form) -> str:
    """A form as text, by plain string work that a compiler can trace."""
    return "[" + ", ".join([_spell(part) for part in form]) + "]"


def _spell(part: Any) -> str:
    if isinstance(part, Slot):
        return f"({part.kind}, {part.place})"
    if isinstance(part, tuple):
        return "[" + ", ".join([f"'{part[0].__name__}'", *map(_spell, part[1:])]) + "]"
    return f"'{part}'" if isinstance(part, str) else f"{part}"


_FORMS: dict[str, Form] = {}
_PARSING = threading.Lock()


def parse(text: str) -> Form:
    """The form that was spelled; each text is parsed once, by one thread at a time.

    Python's parser is not safe to be called from several threads at once.
    """
    if text not in _FORMS:
        with _PARSING:
            _FORMS[text] = tuple(_parse(part) for part in ast.literal_eval(text))
    return _FORMS[text]


def _parse(part: Any) -> Any:
    if isinstance(part, tuple):
        return Slot(*part)
    return (_NODES[part[0]], *map(_parse, part[1:])) if isinstance(part, list) else part


def field_names(part: Any) -> list[str]:
    """The names of a mask's or bias's fields, of the value or of its class."""
    return list(part.__dataclass_fields__)


def tensors_of(part: Any) -> list[Tensor]:
    """The tensors of a mask or bias and of its parts, in the order `pack` lists them."""
    if part is None:
        return []
    if isinstance(part, Tensor):
        return [part]
    if not isinstance(part, (Mask, Bias)):
        return []
    return [t for name in field_names(part) for t in tensors_of(getattr(part, name))]


def moved(part: Any, device: torch.device) -> Any:
    """A mask or bias with its tensors on a device."""
    if isinstance(part, Tensor):
        return part.to(device)
    if not isinstance(part, (Mask, Bias)):
        return part
    values = {name: moved(getattr(part, name), device) for name in field_names(part)}
    return replace(part, **values)  # type: ignore[type-var]


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """A mask as given, or a bool tensor as one."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Bias):
        raise TypeError(f"{type(mask).__name__} is a bias: pass it as bias=, not mask=")
    return masks.Dense(mask)


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
