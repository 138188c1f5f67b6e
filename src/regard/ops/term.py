"""What masks and biases are made of: small frozen values that other code folds over, never walks.

A term is a frozen dataclass whose fields are tensors, numbers, words and other terms. It says in
`axes` which letters each of its tensors has, and so everything that concerns tensors is written
once, here: moving them to a device, cutting them to a row of the batch, to heads or to keys,
listing them, and torch's pytrees, in which every term is a node. A term that is joined of others
(`And`, `Sum`) names them in `parts`; what a whole says follows from what its parts say.

To write one: a frozen dataclass with `allows` (a mask) or `add` (a bias), `axes` for its tensors,
and those of the claims below that hold for it. What is not claimed is not used, and never wrong.

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
"""Some of the keys: a slice with both ends, or their numbers in the order wanted, (S,)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut:
    """What is taken out of a term: one row of the batch, some heads, some keys; None leaves all."""

    row: int | None = None
    heads: Tensor | None = None
    keys: Keys | None = None

    def take(self, values: Tensor, letters: Sequence[str]) -> Tensor:
        """A tensor with these letters, cut; axes that are missing or shared stay so."""
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
        """Where the keys that stay lay before, (S,)."""
        assert self.keys is not None
        if isinstance(self.keys, slice):
            return torch.arange(self.keys.start or 0, self.keys.stop, device=device)
        return self.keys.to(device)


CLAIMS = {"axes", "relative", "positional", "follows_keys", "sees_itself", "hides"}
CLAIMS |= {"gives_gradient", "graph_name", "from_first"}
"""What a class says of all its values, and no value holds."""

_HERE = "<child>"
"""What stands in a structure where a child belongs."""


def field_names(term: Term | type[Term]) -> tuple[str, ...]:
    """The names of a term's fields, of the value or of its class."""
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
    from the tensor, and an axis of size 1 is shared. A letter that is none of B H T S stays."""
    graph_name: ClassVar[str]
    """What it is called in a compiled graph: unique in the process."""

    relative = False
    """Whether it depends on the head and on i - j alone: one band of the matrix tells all of it."""
    positional = False
    """Whether it speaks of positions alone, so that `at` can give it other ones."""
    follows_keys = False
    """Whether what it says of a key goes with the key when others are taken away or added; not for
    one that compares i and j, which then count anew."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name, number = cls.__qualname__, 2
        while name in TERMS:
            name, number = f"{cls.__qualname__} {number}", number + 1
        cls.graph_name = name
        TERMS[name] = cls
        register_pytree(cls, _flatten, lambda children, rest: _unflatten(cls, children, rest))

    def parts(self) -> tuple[Self, ...]:
        """The terms that this one is joined of; none for one that speaks for itself."""
        return ()

    def with_parts(self, change: Callable[[Self], Self]) -> Self:
        """The same joined of other parts; itself where it has none."""
        parts = self.parts()
        return type(self)(*map(change, parts)) if parts else self

    def leaf_terms(self) -> list[Self]:
        """The parts that are not joined of others, in order."""
        parts = self.parts()
        return [leaf for part in parts for leaf in part.leaf_terms()] if parts else [self]

    def held(self) -> dict[str, Any]:
        """Its fields, by name."""
        return {name: getattr(self, name) for name in field_names(self)}

    def with_held(self, change: Callable[[str, Any], Any]) -> Self:
        """The same with every field changed; nothing is checked again."""
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
        """The same with its tensors on a device."""
        return self.with_held(
            lambda _, value: value.to(device) if isinstance(value, (Tensor, Term)) else value
        )

    def cut(self, cut: Cut) -> Self:
        """The same for what is taken out of a call; refused where its tensors have no letters."""

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
        """The same with given positions of queries, (T,) or (B, T), and of keys, or in line."""
        raise NotImplementedError

    def placed(self, queries: Tensor, keys: Tensor) -> Self:
        """The same with positions given to every part that speaks of them."""
        if self.positional:
            return self.at(queries, keys)
        return self.with_parts(lambda part: part.placed(queries, keys))

    def unplaced(self) -> str | None:
        """The name of a part that speaks of keys as they lie, which cannot be given positions."""
        if self.positional or self.relative:
            return None
        if not self.parts():
            return type(self).__name__
        return next((name for part in self.parts() if (name := part.unplaced())), None)


TERMS: dict[str, type[Term]] = {}
"""Every class of terms there is, by its name."""


class Joined(Term):
    """A term of other terms: what holds for all of its parts holds for it."""

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
    """A term, `inner`, with positions given: how a cache speaks, where slots are not positions.

    queries (T,) or (B, T), keys (S,) or (B, S) or None for keys that stand as they lie.
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
        # Keys that stood as they lay, once some are gone.
        keys = cut.key_numbers(self.queries.device)
        return whole.with_held(lambda name, value: keys if name == "keys" else value)

    def positions(self, b: Tensor, i: Tensor, j: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """The positions given to queries and keys."""
        queries = pick_axis(self.queries, b, i - shape.offset)
        return queries, j if self.keys is None else pick_axis(self.keys, b, j)
