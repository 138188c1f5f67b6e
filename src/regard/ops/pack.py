"""Flatten a rule to tensors and constants, and rebuild it: for autograd and compiled graphs.

Autograd must be given every tensor separately, and compiled graphs carry only tensors and
constants. `pack` splits a rule into its form, a nested tuple, and the tensors and numbers in it;
`unpack` is the inverse. For a compiled graph the form is spelled as text, which is parsed once for
each form that occurs.
"""

from __future__ import annotations

import ast
import threading
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from regard.ops.call import Rule
from regard.ops.shape import Shape
from regard.ops.term import TERMS, Term, field_names, rebuild

Form: TypeAlias = "tuple[Any, ...]"
"""A rule without its tensors and numbers: a mask or bias is (its class, its fields ...)."""


Held: TypeAlias = "tuple[list[Any], list[Any], list[Any]]"
"""The tensors, the ints and the floats of a rule."""


class Slot(NamedTuple):
    """The placeholder in a form for a tensor (kind 0), an int (1) or a float (2): its index."""

    kind: int
    number: int


class Packed(NamedTuple):
    """A flattened rule: its form, spelled or not, and the tensors and numbers in it."""

    form: Form | str
    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]


def pack(rule: Rule) -> Packed:
    """Flatten a rule, without its shape."""
    held: Held = ([], [], [])
    parts = (rule.scale, rule.mask, rule.bias, rule.softcap)
    return Packed(tuple([_take_apart(part, held) for part in parts]), *held)


def unpack(packed: Packed, shape: Shape) -> Rule:
    """The rule that `pack` flattened, at the given shape."""
    form = parse(packed.form) if isinstance(packed.form, str) else packed.form
    scale, mask, bias, softcap = (_put_together(part, packed) for part in form)
    return Rule(shape=shape, scale=scale, mask=mask, bias=bias, softcap=softcap)


def _take_apart(part: Any, held: Held) -> Any:
    if part is None or isinstance(part, (bool, str)):
        return part
    if isinstance(part, Term):
        names = field_names(part)
        return (type(part), *[_take_apart(getattr(part, name), held) for name in names])
    for kind, what in enumerate((Tensor, int, float)):
        if isinstance(part, what):
            held[kind].append(part)
            return Slot(kind, len(held[kind]) - 1)
    raise TypeError(
        "a mask or bias holds tensors, numbers, words, None and other masks or biases; got a "
        f"{type(part).__name__}"
    )


def _put_together(part: Any, packed: Packed) -> Any:
    if isinstance(part, Slot):
        return (packed.tensors, packed.ints, packed.floats)[part.kind][part.number]
    if not isinstance(part, tuple):
        return part
    return rebuild(part[0], [_put_together(value, packed) for value in part[1:]])


def spell(form: Form) -> str:
    """A form as text, by plain string operations that a compiler can trace."""
    return "[" + ", ".join([_spell(part) for part in form]) + "]"


def _spell(part: Any) -> str:
    if isinstance(part, Slot):
        return f"({part.kind}, {part.number})"
    if isinstance(part, tuple):
        return "[" + ", ".join([f"'{part[0].graph_name}'", *map(_spell, part[1:])]) + "]"
    return f"'{part}'" if isinstance(part, str) else f"{part}"


_FORMS: dict[str, Form] = {}
_PARSING = threading.Lock()


def parse(text: str) -> Form:
    """The form that `spell` made a text of; each text is parsed once, by one thread at a time.

    Python's parser is not safe to be called from several threads at once.
    """
    if text not in _FORMS:
        with _PARSING:
            _FORMS[text] = tuple(_parse(part) for part in ast.literal_eval(text))
    return _FORMS[text]


def _parse(part: Any) -> Any:
    if isinstance(part, tuple):
        return Slot(*part)
    return (TERMS[part[0]], *map(_parse, part[1:])) if isinstance(part, list) else part
