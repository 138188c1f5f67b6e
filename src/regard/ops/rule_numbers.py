"""Number the rules of calls in compiled graphs, so that what is found of a mask is found once.

Why: layers share masks. In eager code they share the tensor, which has an address and a version. A
compiled graph may give each layer a copy, and write the next mask into the memory of the last one
without counting a version.

How: the graph has an operation, `regard::number_rule`, that returns a number for the tensors of a
rule, which is passed on with the call. Calls get the same number only where these tensors have the
same values. AOTAutograd traces graphs in which nothing is written to. In these the operation is put
in once for all tensors that are `made` in the same way, by the same views and conversions of the
same sources, and returns a new number each time it runs. Only if the sources are given to the
graph, it returns the number that it had for them in the run, or graph, before, unless they were
written to since.

Left out: graphs that are not traced by AOTAutograd. There each call gets a number of its own, since
torch 2.11 does not count versions in them.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, fx

from regard._torch import ProxyMode, is_view, writes

MOST_GIVEN = 64
"""How many numbers of tensors that are given to graphs are remembered."""
SMALL = 1 << 16
CONVERSIONS = "aten._to_copy.default", "prims.convert_element_type.default"

_next = itertools.count(1)
_given: dict[tuple[Any, ...], tuple[list[ref[Tensor]], int]] = {}
_lock = threading.Lock()
_traced: WeakKeyDictionary[Any, dict[Any, Tensor]] = WeakKeyDictionary()
"""The numbers in each graph that is being traced, by how the tensors are made."""


def age_of(tensor: Tensor, now: int) -> Any:
    """A value that changes when a tensor is modified in place, as positions in a cache are.

    now: a number that grows. Torch counts no versions in inference mode: small tensors are read,
    and large ones are as they were only for as long as the number stays.
    """
    if not tensor.is_inference():
        return tensor._version
    return tuple(tensor.flatten().tolist()) if tensor.numel() <= SMALL else now


def _number(tensors: list[Tensor], made: str | None) -> Tensor:
    """A number for what is made of these tensors as `made` says; None: a new number."""
    number = next(_next) if made is None else _number_given(tensors, made)
    return torch.tensor(number, device="cpu")


def _number_given(tensors: list[Tensor], made: str) -> int:
    key = made, *((id(x), age_of(x, next(_next))) for x in tensors)
    with _lock:
        alive, number = _given.pop(key, ([], 0))
        if [each() is x for each, x in zip(alive, tensors, strict=False)] != [True] * len(tensors):
            alive, number = [ref(x) for x in tensors], next(_next)
        while len(_given) >= MOST_GIVEN:
            del _given[next(iter(_given))]
        _given[key] = alive, number
    return number


number_rule = torch.library.custom_op(
    "regard::number_rule",
    _number,
    mutates_args=(),
    schema="(Tensor[] tensors, str? made) -> Tensor",
    # Otherwise Inductor writes a tensor that is not in memory yet once more for each operation.
    tags=(torch.Tag.flexible_layout,),
)
number_rule.register_fake(lambda tensors, made: torch.empty((), dtype=torch.int64, device="cpu"))


def _number_traced(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Put the operation into a graph that AOTAutograd traces, once for all equal tensors."""
    graph, nodes = mode.tracer, [_node_of(mode.tracer, x) for x in args[0]]
    if None in nodes or any(writes(node.target) for node in graph.graph.nodes):
        return mode.__torch_dispatch__(op, types, (args[0], None), kwargs)
    sources: dict[fx.Node, int] = {}
    made = str([_describe(node, sources) for node in nodes])
    numbers, key = _traced.setdefault(graph, {}), (made, *sources)
    if key not in numbers:
        numbers[key] = mode.__torch_dispatch__(op, types, (args[0], None), kwargs)
        if all(map(_is_given, sources)):
            node = _node_of(graph, numbers[key])
            assert node is not None
            node.args = list(sources), made
    return numbers[key]


number_rule.register_torch_dispatch(ProxyMode, _number_traced)


def _node_of(tracer: Any, tensor: Tensor) -> fx.Node | None:
    proxy = tracer.unwrap_proxy(tensor)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


def _is_given(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)


def _describe(part: Any, sources: dict[fx.Node, int]) -> Any:
    """How a node is made from its sources, which are numbered as they come."""
    if isinstance(part, (list, tuple)):
        return [_describe(each, sources) for each in part]
    if isinstance(part, dict):
        return {name: _describe(each, sources) for name, each in part.items()}
    if not isinstance(part, fx.Node):
        return part
    op: Any = part.target
    if op in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        return _describe(part.args[0], sources)
    if is_view(op) or str(op) in CONVERSIONS:
        return [str(op), _describe(part.args, sources), _describe(part.kwargs, sources)]
    return f"{sources.setdefault(part, len(sources))}"
