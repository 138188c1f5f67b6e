"""The base class of masks and biases: small frozen values, with the recursions over their tensors.

A term is a frozen dataclass whose fields are tensors, numbers, strings and other terms. It says in
`axes` which letters each of its tensors has, and so everything that concerns tensors is written
once, here: moving them to a device, cutting them to a row of the batch, to heads or to keys,
listing them, and torch's pytrees, in which every term is a node. Other code calls these instead of
walking the tree of terms. A term that is joined of others (`And`, `Sum`) returns them from `parts`;
what holds for the whole follows from its parts.

To write one: a frozen dataclass with `allows` (a mask) or `add` (a bias), `axes` for its tensors,
and those of the flags below that hold for it. A flag that is not set is never wrong: it only makes
less possible.

Letters: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from regard._torch import register_pytree
from regard.ops.shape import Shape, check_axis, check_counts, pick_axis

Keys = slice | Tensor
"""Some of the keys: a slice with an end, or their indices in the order wanted, (S,)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut:
    """What a term is cut to: one row of the batch, some heads, some keys; None leaves all."""

    row: int | None = None
    heads: Tensor | None = None
    keys: Keys | None = None

    def take(self, values: Tensor, letters: Sequence[str]) -> Tensor:
        """A tensor whose axes have these letters, cut; missing axes and axes of size 1 stay so."""
        values = values.detach()
        for axis, letter in enumerate(reversed(letters), 1):
            if axis > values.dim() or values.shape[-axis] == 1:
                continue
            if letter == "B" and self.row is not None:
                values = values.narrow(-axis, self.row, 1)
            elif letter == "H" and self.heads is not None:
                values = values.index_select(-axis, self.heads.to(values.device))
            elif letter == "S" and self.keys is not None:
                values = values.index_select(-axis, self.key_numbers(values.device))
        return values

    def key_numbers(self, device: torch.device) -> Tensor:
        """The indices before the cut of the keys that are kept, (S,)."""
        assert self.keys is not None
        if isinstance(self.keys, slice):
            return torch.arange(self.keys.start or 0, self.keys.stop, device=device)
        return self.keys.to(device)


CLAIMS = {"axes", "relative", "positional", "follows_keys", "sees_itself", "hides"}
CLAIMS |= {"gives_gradient", "graph_name", "from_first"}
"""Class attributes that say something about all values of a class; they are not fields."""

_HERE = "<child>"
"""The placeholder for a child in the structure of a pytree node."""


def field_names(term: Term | type[Term]) -> tuple[str, ...]:
    """The names of the fields of a term, given as a value or as its class."""
    # Not by `dataclasses.fields`, which a compiler does not trace here.
    names: Any = term.__dataclass_fields__  # type: ignore[union-attr]
    return tuple([name for name in names if name not in CLAIMS])


def rebuild(kind: type[Any], values: Sequence[Any]) -> Any:
    """A term from the values of its fields, which are not checked again."""
    term = object.__new__(kind)
    for name, value in zip(field_names(kind), values, strict=True):
        object.__setattr__(term, name, value)
    return term


def _flatten(term: Term) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """For pytrees: tensors and terms are children, the rest goes with the structure."""
    held = term.held()
    children = {name: x for name, x in held.items() if isinstance(x, (Tensor, Term))}
    return children, tuple(_HERE if name in children else x for name, x in held.items())


def _unflatten(kind: type[Term], children: Sequence[Any], rest: tuple[Any, ...]) -> Term:
    given = iter(children)
    values = [next(given) if value == _HERE else value for value in rest]
    term: Term = rebuild(kind, values)
    return term


class Term:
    """A mask or a bias."""

    axes: ClassVar[Mapping[str, str]] = {}
    """The letters of each tensor it holds, as in ``{"ids": "B S"}``; leading ones may be missing
    from the tensor, and an axis of size 1 is shared. Axes with other letters are never cut."""
    graph_name: ClassVar[str]
    """The name of the class in compiled graphs, unique in the process."""

    relative = False
    """Whether it depends on the head and on i - j alone: one band of the matrix defines it."""
    positional = False
    """Whether it depends on positions, not on indices in memory, so that `at` can set others."""
    follows_keys = False
    """Whether what it says of a key stays true when other keys are removed or added; not so where
    it compares i and j, which are then renumbered."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name, number = cls.__qualname__, 2
        while name in TERMS:
            name, number = f"{cls.__qualname__} {number}", number + 1
        cls.graph_name = name
        TERMS[name] = cls
        register_pytree(cls, _flatten, lambda children, rest: _unflatten(cls, children, rest))

    def parts(self) -> tuple[Self, ...]:
        """The terms that this one is joined of; none for a leaf."""
        return ()

    def with_parts(self, change: Callable[[Self], Self]) -> Self:
        """The term with each of its parts changed; itself where it has none."""
        parts = self.parts()
        return type(self)(*map(change, parts)) if parts else self

    def leaf_terms(self) -> list[Self]:
        """The leaves among its parts, at any depth and in order; itself where it has no parts."""
        parts = self.parts()
        return [leaf for part in parts for leaf in part.leaf_terms()] if parts else [self]

    def held(self) -> dict[str, Any]:
        """Its fields, by name."""
        return {name: getattr(self, name) for name in field_names(self)}

    def with_held(self, change: Callable[[str, Any], Any]) -> Self:
        """A copy with every field changed; nothing is checked again."""
        values = [change(name, value) for name, value in self.held().items()]
        changed: Self = rebuild(type(self), values)
        return changed

    def tensors(self) -> list[Tensor]:
        """Every tensor in it and in the terms it holds, in the order of fields."""
        found: list[Tensor] = []
        for name in field_names(self):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, Term):
                found += value.tensors()
        return found

    def to(self, device: torch.device) -> Self:
        """A copy with its tensors on a device."""
        return self.with_held(
            lambda _, value: value.to(device) if isinstance(value, (Tensor, Term)) else value
        )

    def cut(self, cut: Cut) -> Self:
        """A copy for a cut call; ValueError where `axes` does not name one of its tensors."""

        def change(name: str, value: Any) -> Any:
            if isinstance(value, Term):
                return value.cut(cut)
            return cut.take(value, self.letters(name)) if isinstance(value, Tensor) else value

        return self.with_held(change)

    def letters(self, name: str) -> list[str]:
        """The letters of one of its tensors."""
        if name not in self.axes:
            raise ValueError(
                f"{type(self).__name__} does not say which axes its tensor {name!r} has; "
                f'write axes = {{"{name}": "B S"}}, in the letters B H T S, into the class'
            )
        return self.axes[name].split()

    def check(self, shape: Shape) -> None:
        """Raise ValueError when the term cannot be applied to this shape."""
        for name, spelled in self.axes.items():
            value, letters = getattr(self, name), spelled.split()
            if not isinstance(value, Tensor):
                continue
            sizes = value.shape[::-1]
            for size, letter in zip(sizes, reversed(letters), strict=False):
                if letter in shape._fields and size not in (1, getattr(shape, letter)):
                    raise ValueError(
                        f"{name} of {type(self).__name__} has {letter}={size}, but the call has "
                        f"{letter}={getattr(shape, letter)}"
                    )
            if len(sizes) > len(letters):
                raise ValueError(
                    f"{name} of {type(self).__name__} must have at most {len(letters)} axes "
                    f"({', '.join(letters)}), got shape {tuple(value.shape)}"
                )
        for part in self.parts():
            part.check(shape)

    def at(self, queries: Tensor, keys: Tensor | None = None) -> Self:
        """The term at these positions of queries, (T,) or (B, T), and of keys; None: 0 .. S - 1."""
        raise NotImplementedError

    def placed(self, queries: Tensor, keys: Tensor) -> Self:
        """A copy in which every part that depends on positions alone is `at` these."""
        if self.positional:
            return self.at(queries, keys)
        return self.with_parts(lambda part: part.placed(queries, keys))

    def unplaced(self) -> str | None:
        """The name of a part that depends on indices in memory, and so has no `at`; or None."""
        if self.positional or self.relative:
            return None
        if not self.parts():
            return type(self).__name__
        return next((name for part in self.parts() if (name := part.unplaced())), None)


TERMS: dict[str, type[Term]] = {}
"""Every class of terms, by its `graph_name`."""


class Joined(Term):
    """A term joined of others: a flag holds for it where it holds for all of its parts."""

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return all(part.relative for part in self.parts())

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return all(part.positional for part in self.parts())

    @property
    def follows_keys(self) -> bool:  # type: ignore[override]
        return all(part.follows_keys for part in self.parts())


class Placed(Term):
    """A term, `inner`, at explicit positions, as in a KV cache, whose slots are not positions.

    queries (T,) or (B, T); keys (S,) or (B, S), or None for keys at positions 0 .. S - 1.
    """

    inner: Term
    queries: Tensor
    keys: Tensor | None
    axes: ClassVar = {"queries": "B T", "keys": "B S"}

    def __post_init__(self) -> None:
        check_counts("queries", self.queries)
        if self.keys is not None:
            check_counts("keys", self.keys)

    @property
    def follows_keys(self) -> bool:  # type: ignore[override]
        return self.keys is not None

    def check(self, shape: Shape) -> None:
        check_axis("queries", self.queries, "T", shape)
        if self.keys is not None:
            check_axis("keys", self.keys, "S", shape)
        self.inner.check(shape)

    def cut(self, cut: Cut) -> Self:
        whole = super().cut(cut)
        if cut.keys is None or self.keys is not None:
            return whole
        # Keys at 0 .. S - 1 keep their positions when others are removed.
        keys = cut.key_numbers(self.queries.device)
        return whole.with_held(lambda name, value: keys if name == "keys" else value)

    def positions(self, b: Tensor, i: Tensor, j: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """The explicit positions of the queries and keys at the default positions i and j."""
        queries = pick_axis(self.queries, b, i - shape.offset)
        return queries, j if self.keys is None else pick_axis(self.keys, b, j)
