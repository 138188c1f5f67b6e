"""Track where queries and keys come from, to tell self-attention from cross-attention.

Why: a module does not say whether its keys are of another text, and lengths do not tell: an image
of 64 tokens may attend to 77 words, or to 64.

How: each tensor that a function of torch returns inherits the origin of an argument: of the first
activation, or in elementwise functions of the largest, since others are factors and positions. So
projections, norms, rotations and reshapes keep the origin. A tensor that existed before the model
ran, or that was looked up in an embedding, is an origin of its own. A sum that is accumulated in an
empty tensor, as experts' shares are, has the origin of what was added. Queries and keys of one
origin are self-attention. More keys than queries are that too if something was concatenated before
the keys, as from a cache, but not before the queries: a single query that was taken out of a text
need not be its last token.

Left out: what is computed by code that does not go through torch's functions. It has no origin, and
the caller decides by other means.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._torch import on_this_rank

ELEMENTWISE = {
    *(torch.add, torch.sub, torch.mul, torch.div, torch.where, torch.true_divide),
    *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.where, Tensor.true_divide),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__, Tensor.__truediv__),
    *(Tensor.__mul__, Tensor.__rmul__, torch.addcmul, Tensor.addcmul, Tensor.__iadd__),
    *(Tensor.add_, Tensor.mul_, Tensor.sub_, Tensor.__imul__, Tensor.__isub__),
}
JOINING = {torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack}
WRITING = {
    *(Tensor.copy_, Tensor.index_copy_, Tensor.__setitem__, Tensor.scatter_, Tensor.index_put_),
    *(Tensor.slice_scatter, Tensor.index_copy, torch.index_copy, torch.slice_scatter),
}
ADDING = {torch.index_add, Tensor.index_add, Tensor.index_add_}
ADDING |= {torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_}
BEGINNING = {F.embedding, F.softmax, torch.softmax, Tensor.softmax, F.scaled_dot_product_attention}
PROJECTING = {
    *(F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.addmm, torch.einsum),
    *(F.conv1d, F.conv2d, torch.bmm, torch.mm, Tensor.mm),
}
NOT_PLAIN = ELEMENTWISE | JOINING | WRITING | BEGINNING | PROJECTING
MOST = 1 << 15
"""The most tensors that are remembered; a model's own loop may make any number."""


Value = TypeVar("Value")


class Origin(NamedTuple):
    """The source of a tensor, and what happened to it on the way.

    `joined`: how often something was concatenated to it; `projected`: it was multiplied by weights.
    """

    source: int
    joined: int = 0
    projected: bool = False


class Moved(NamedTuple):
    """Scores whose entries were moved: by which function, and their shape before."""

    by: str
    shape: tuple[int, ...]


class TensorTable(Generic[Value]):
    """A weak table of values by tensor, faster than a dictionary of weak keys.

    A DTensor is represented by its local tensor.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def get(self, tensor: Any) -> Value | None:
        tensor = tensor if type(tensor) is Tensor else on_this_rank(tensor)
        found = self.known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def put(self, tensor: Tensor, value: Value) -> None:
        if len(self.known) >= MOST:
            self.known.clear()
        tensor = tensor if type(tensor) is Tensor else on_this_rank(tensor)
        self.known[id(tensor)] = weakref.ref(tensor), value


class TensorOrigins:
    """The origins of tensors; also `moved`: scores whose entries were moved on their way."""

    def __init__(self) -> None:
        self.moved: TensorTable[Moved] = TensorTable()
        self._origins: TensorTable[Origin] = TensorTable()
        self._numbers = itertools.count()
        self.is_whole = True
        """Whether every function was followed; if not, all origins are unknown."""

    def clear(self) -> None:
        self.is_whole = True
        self.moved.known.clear()
        self._origins.known.clear()

    def relate(self, q: Tensor, k: Tensor, n_queries: int, n_keys: int) -> bool | None:
        """Whether keys have another origin than queries; None if unknown."""
        if q is k:
            return False
        if not self.is_whole:
            return None
        of_q, of_k = self._origins.get(q), self._origins.get(k)
        if of_q is None or of_k is None:
            # One has an origin and the other does not: keys of another text, or learned queries. Or
            # keys in a cache that no function of torch writes to; then there are more keys than
            # queries.
            known = of_q or of_k
            made_here = known is not None and known.projected
            return True if made_here and (of_q is None or n_keys <= n_queries) else None
        if of_q.source != of_k.source:
            return True
        return n_keys != n_queries and of_k.joined <= of_q.joined

    def follow(self, func: Any, args: Any, result: Any) -> None:
        """Store the origin of a function's result."""
        if type(result) is Tensor and args:
            known = self._origins.get(args[0])
            if known is not None and (func not in NOT_PLAIN or leads(func, args, result)):
                # The common cases: a view, a norm or an activation of one tensor, which in a sum
                # or product is the larger one.
                self._origins.put(result, known)
                return
        if func in WRITING:
            self._write(args, result)
        elif isinstance(result, Tensor):
            if func in BEGINNING or not is_activation(result):
                return
            operand = find_operand(func, args[1:] if func in ADDING else args)
            if operand is not None and func in ADDING:
                # Parts are added at their own positions; nothing is concatenated.
                self._origins.put(result, self._origin(operand)._replace(joined=0))
            elif operand is not None:
                joined = func in JOINING and operand.shape[-1] == result.shape[-1]
                projected = func in PROJECTING and any(map(is_parameter, args))
                self._origins.put(result, self._origin(operand, joined, projected))
        elif isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
            operands = [x for x in args if isinstance(x, Tensor)]
            for n, each in enumerate(result):
                if isinstance(each, Tensor) and operands:
                    # One result per argument, as from a rotation of q and k, or several parts of
                    # one argument.
                    alike = n < len(operands) and operands[n].shape == each.shape
                    self._origins.put(each, self._origin(operands[n if alike else 0]))

    def _origin(self, tensor: Tensor, joined: bool = False, projected: bool = False) -> Origin:
        known = self._origins.get(tensor)
        if known is None:
            known = Origin(next(self._numbers))
            self._origins.put(tensor, known)
        return Origin(known.source, known.joined + joined, projected or known.projected)

    def _write(self, args: Any, result: Any) -> None:
        """A tensor that is written into gets the origin of what was written, joined to the rest."""
        written = [x for x in args[1:] if isinstance(x, Tensor) and x.is_floating_point()]
        if not written:
            return
        rest, source = self._origins.get(args[0]), self._origin(written[-1]).source
        origin = self._origin(written[-1], joined=rest is None or rest.source != source)
        for tensor in (args[0], args[0]._base, result):
            if isinstance(tensor, Tensor):
                self._origins.put(tensor, origin)


def leads(func: Any, args: Any, result: Tensor) -> bool:
    """Whether the first argument of an elementwise function is the one that counts."""
    if func not in ELEMENTWISE or len(args) > 2 or not result.is_floating_point():
        return False
    first, other = args[0], args[-1]
    if type(first) is not Tensor or not first.is_floating_point():
        return False
    return type(other) in (int, float) or (type(other) is Tensor and other.numel() <= first.numel())


def is_parameter(x: Any) -> bool:
    return type(x) is not Tensor and isinstance(x, nn.Parameter)


def is_activation(x: Tensor) -> bool:
    # Checked for every function's result: most are plain tensors, and only others can be
    # parameters.
    plain = type(x) is Tensor or not isinstance(x, nn.Parameter)
    return plain and (x.is_floating_point() or x.is_complex())


def find_operand(func: Any, args: Any) -> Tensor | None:
    """The argument whose origin a result inherits: an activation, not a weight."""
    best: Tensor | None = None
    for given in args:
        # Of concatenated tensors the last, which is the newest in a cache.
        x = given[-1] if isinstance(given, (tuple, list)) and given else given
        if not isinstance(x, Tensor) or not is_activation(x):
            continue
        if func not in ELEMENTWISE:
            return x
        if best is None or x.numel() > best.numel():
            best = x
    return best
