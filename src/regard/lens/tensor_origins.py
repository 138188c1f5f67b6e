"""Where queries and keys come from: whether a place looks at its own text or at another.

Why: a module does not say whether it was given keys of another text, and lengths do not tell: an
image of 64 tokens may look at 77 words, or at 64.

How: each tensor that a function of torch makes has the origin of what it was made from: of the
first activation among the arguments, or the largest in sums and products number by number, where
others are factors and positions. So projections, norms, rotations and changes of shape keep the
origin, and what was made before the model ran, or by looking words up, is one of its own. What is
added up in empty places, as experts' shares are, comes from what was added. Queries and keys of one
origin are a text that looks at itself; more keys than queries are its own where something was put
before them, as a cache does, and not before the queries too: one token that was taken out of a text
does not stand at its end.

Left out: what is computed by code that torch's functions are not part of; it has no origin, and
others say what it is.
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
"""Tensors that are remembered; a loop of the model's own may make any number."""


Value = TypeVar("Value")


class Origin(NamedTuple):
    """Which source a tensor comes from, and what happened on the way.

    `joined`: how often something was put beside it; `projected`: it was multiplied by weights.
    """

    source: int
    joined: int = 0
    projected: bool = False


class Moved(NamedTuple):
    """Scores that were put in other places: by which function, and their shape before."""

    by: str
    shape: tuple[int, ...]


class TensorTable(Generic[Value]):
    """Something about each tensor, as long as it lives; quicker than a dictionary of weak keys.

    One that is spread over ranks is known by what is here, which it was made from and gives back.
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
    """Also `moved`: scores that were put in other places on their way."""

    def __init__(self) -> None:
        self.moved: TensorTable[Moved] = TensorTable()
        self._origins: TensorTable[Origin] = TensorTable()
        self._numbers = itertools.count()
        self.is_whole = True
        """Whether all was followed; else nothing is known of what comes from what."""

    def clear(self) -> None:
        self.is_whole = True
        self.moved.known.clear()
        self._origins.known.clear()

    def relate(self, q: Tensor, k: Tensor, n_queries: int, n_keys: int) -> bool | None:
        """Whether keys come from elsewhere than queries; None where it is not known."""
        if q is k:
            return False
        if not self.is_whole:
            return None
        of_q, of_k = self._origins.get(q), self._origins.get(k)
        if of_q is None or of_k is None:
            # One was made here and the other was there before: keys of another text, or learned
            # queries. Or keys of a cache that no function of torch writes to, and these are many.
            known = of_q or of_k
            made_here = known is not None and known.projected
            return True if made_here and (of_q is None or n_keys <= n_queries) else None
        if of_q.source != of_k.source:
            return True
        return n_keys != n_queries and of_k.joined <= of_q.joined

    def follow(self, func: Any, args: Any, result: Any) -> None:
        """Remember where the result of a function comes from."""
        if type(result) is Tensor and args and func not in NOT_PLAIN:
            # Most functions: a view, a norm or an activation of one tensor.
            known = self._origins.get(args[0])
            if known is not None:
                self._origins.put(result, known)
                return
        if func in WRITING:
            self._write(args, result)
        elif isinstance(result, Tensor):
            if func in BEGINNING or not is_activation(result):
                return
            operand = find_operand(func, args[1:] if func in ADDING else args)
            if operand is not None and func in ADDING:
                # Each part where it belongs, and nothing beside it.
                self._origins.put(result, self._origin(operand)._replace(joined=0))
            elif operand is not None:
                joined = func in JOINING and operand.shape[-1] == result.shape[-1]
                projected = func in PROJECTING and any(map(is_parameter, args))
                self._origins.put(result, self._origin(operand, joined, projected))
        elif isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
            operands = [x for x in args if isinstance(x, Tensor)]
            for n, each in enumerate(result):
                if isinstance(each, Tensor) and operands:
                    # One result for each argument, as rotations of q and k have, or parts of one.
                    alike = n < len(operands) and operands[n].shape == each.shape
                    self._origins.put(each, self._origin(operands[n if alike else 0]))

    def _origin(self, tensor: Tensor, joined: bool = False, projected: bool = False) -> Origin:
        known = self._origins.get(tensor)
        if known is None:
            known = Origin(next(self._numbers))
            self._origins.put(tensor, known)
        return Origin(known.source, known.joined + joined, projected or known.projected)

    def _write(self, args: Any, result: Any) -> None:
        """What is written into comes from what was written, with the rest of another beside it."""
        written = [x for x in args[1:] if isinstance(x, Tensor) and x.is_floating_point()]
        if not written:
            return
        rest, source = self._origins.get(args[0]), self._origin(written[-1]).source
        origin = self._origin(written[-1], joined=rest is None or rest.source != source)
        for tensor in (args[0], args[0]._base, result):
            if isinstance(tensor, Tensor):
                self._origins.put(tensor, origin)


def is_parameter(x: Any) -> bool:
    return type(x) is not Tensor and isinstance(x, nn.Parameter)


def is_activation(x: Tensor) -> bool:
    # Asked of every function's result: most are plain tensors, and only others can be parameters.
    plain = type(x) is Tensor or not isinstance(x, nn.Parameter)
    return plain and (x.is_floating_point() or x.is_complex())


def find_operand(func: Any, args: Any) -> Tensor | None:
    """The argument that a result comes from: an activation, not a weight."""
    best: Tensor | None = None
    for given in args:
        # Of what is joined the last, which is the newest in a cache.
        x = given[-1] if isinstance(given, (tuple, list)) and given else given
        if not isinstance(x, Tensor) or not is_activation(x):
            continue
        if func not in ELEMENTWISE:
            return x
        if best is None or x.numel() > best.numel():
            best = x
    return best
