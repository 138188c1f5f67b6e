"""Edits are values: what is forbidden, switched off or replaced, in which layers and heads.

Layers are numbers, from 0 in the order in which they are called, or names of modules or of modules
around them; heads are numbers. None means all of them. Positions count the tokens of a text from 0,
without padding. They are given as numbers (negative ones from the end of the text as it is first
read, a prompt), as Python's ranges and slices, as words of a text, or as several of these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, final

if TYPE_CHECKING:
    from torch import Tensor

Where: TypeAlias = "int | str | slice | range | Collection[int | str | slice | range]"
"""Positions in a text."""
Layers: TypeAlias = "int | str | Collection[int | str] | None"
Heads: TypeAlias = "int | Collection[int] | None"
Edit: TypeAlias = "Block | Ablate | Patch"


@final
class HeadOutputs(Mapping[str, "Tensor"]):
    """What heads put out in a run: dotted module name -> tensor (B, H, T, E), before out_proj.

    `regard.head_outputs` makes it. Layers that share one module are name, name@2, name@3, ...
    """

    def __init__(self) -> None:
        self._outputs: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._outputs:
            raise KeyError(f"no module named {name!r} attended; there are {list(self._outputs)}")
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        sizes = {name: tuple(output.shape) for name, output in self._outputs.items()}
        return f"HeadOutputs({sizes})"


@dataclass(frozen=True)
class Block:
    """An edit: some queries may not look at some keys. The other weights of a row sum to 1.

    A query that is left no key to look at gets zeros.

    Args:
        queries: Which tokens look: a position from 0 (negative: from the end of the prompt), a
            range, a slice, a word of the text (`edit(..., text=...)`), or several of these.
        keys: Which tokens they may not look at, named in the same ways.
        layers: Numbers from 0 in the order in which layers are called, or names of modules. None:
            all layers.
        heads: Numbers of heads. None: all heads.

    Example:
        >>> regard.Block("it", "animal", layers=4)
        Block(queries='it', keys='animal', layers=4, heads=None)
    """

    queries: Where
    keys: Where
    layers: Layers = None
    heads: Heads = None

    def __post_init__(self) -> None:
        check_where("queries", self.queries)
        check_where("keys", self.keys)
        check_heads(self.layers, self.heads)


@dataclass(frozen=True)
class Ablate:
    """An edit: heads are switched off, before the output projection.

    Args:
        layers, heads: As in `Block`.
        to: "zero": the head puts out 0. "mean": at every token the mean of what it puts out over
            this text (in each row of a batch, without padding). "mean" is refused where a KV cache
            continues a text, as the mean is not known yet.

    Example:
        >>> regard.Ablate(23, 4)
        Ablate(layers=23, heads=4, to='zero')
    """

    layers: Layers = None
    heads: Heads = None
    to: str = "zero"

    def __post_init__(self) -> None:
        check_heads(self.layers, self.heads)
        if self.to not in ("zero", "mean"):
            raise ValueError(f'to must be "zero" or "mean", got {self.to!r}')


@dataclass(frozen=True)
class Patch:
    """An edit: heads put out what they put out in another run (activation patching).

    Args:
        layers, heads: As in `Block`.
        source: What `with regard.head_outputs(model) as source:` kept of the other run.
        positions: At which tokens, named as in `Block`. None: at all of them; both runs must then
            have the same number of tokens.

    Example: see `regard.head_outputs`.
    """

    layers: Layers = None
    heads: Heads = None
    source: HeadOutputs = field(kw_only=True)
    positions: Where | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_heads(self.layers, self.heads)
        if not isinstance(self.source, HeadOutputs):
            raise TypeError(
                f"source is a {type(self.source).__name__}; expected what `with "
                "regard.head_outputs(model) as outputs:` gives"
            )
        if self.positions is not None:
            check_where("positions", self.positions)


def as_tuple(value: Any) -> tuple[Any, ...] | None:
    """Wrap one value, or several, in a tuple; None stays None."""
    if value is None:
        return None
    many = isinstance(value, Collection) and not isinstance(value, str | range)
    return tuple(value) if many else (value,)


def check_heads(layers: Layers, heads: Heads) -> None:
    """Refuse layers or heads of the wrong type, or below 0."""
    for name, value, kinds in (("layers", layers, (int, str)), ("heads", heads, (int,))):
        parts = as_tuple(value)
        if parts is None:
            continue
        if not parts or not all(type(part) in kinds for part in parts):
            words = "numbers or names" if str in kinds else "numbers"
            raise TypeError(f"{name} must be {words}, or None for all of them; got {value!r}")
        if any(type(part) is int and part < 0 for part in parts):
            raise ValueError(f"{name} count from 0; got {value!r}")


def check_where(name: str, where: Any) -> None:
    parts = as_tuple(where)
    kinds = int, str, slice, range
    if not parts or any(type(part) not in kinds for part in parts):
        raise TypeError(
            f"{name} must be positions: a number, a word, a range, a slice, or several of these; "
            f"got {where!r}"
        )
    for part in parts:
        if isinstance(part, slice | range) and (part.step or 1) < 1:
            raise ValueError(f"{name} must count forward, got {part!r}")
