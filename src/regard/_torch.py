"""What we use of torch that is private there, in one place, with the versions it was seen in.

Why: private names move without notice. Everything else in the package imports them from here, a
test holds the rest of the tree to that, and CI runs on the newest torch we name; when one moves,
this is the file to change.

Seen in torch 2.11 and 2.13:
- `torch._assert_async`: a condition on a tensor that is checked on its device, without a wait.
- `torch._foreach_mul_`: many tensors multiplied in a few kernels.
- `torch.utils._pytree`: registering a class as a node.
- `torch._C._functorch`: whether a `torch.func` transform is under way, of which kind, and wrapped
  tensors.
- `torch.autograd.forward_ad._current_level`: whether forward-mode derivatives are being taken.
- `torch._subclasses.FakeTensor`: tensors without data, in tracing.
- `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` and its backward: the CPU's kernel,
  with its logsumexp. It takes rows of stride 1 for granted.
- `torch._fused_sdp_choice`: which of torch's kernels a call of SDPA takes.
- `torch.overrides._get_current_function_mode_stack`, `_pop_mode`, `_push_mode`: taking a mode away.
- `torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex`: indices under vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, overrides
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

assert_async = torch._assert_async
multiply_all = torch._foreach_mul_
sdp_choice = torch._fused_sdp_choice
flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def register_pytree(
    kind: type[Any],
    flatten: Callable[[Any], tuple[dict[str, Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Make a class a node of torch's pytrees; flatten gives its children by name, and the rest."""

    def with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, rest = flatten(node)
        return [(_pytree.GetAttrKey(name), child) for name, child in children.items()], rest

    def without_keys(node: Any) -> tuple[list[Any], Any]:
        children, rest = flatten(node)
        return list(children.values()), rest

    _pytree.register_pytree_node(
        kind,
        without_keys,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )


def is_transforming() -> bool:
    """Whether a `torch.func` transform is under way; the compiler handles those of its own."""
    if torch.compiler.is_dynamo_compiling():
        return False
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return inside and not torch.compiler.is_compiling()


def is_transformed(tensor: Tensor) -> bool:
    """Whether the tensor is being carried through a `torch.func` transform (vmap, grad, jvp)."""
    return is_transforming() and bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_only_vmapped() -> bool:
    """Whether every `torch.func` transform that is under way is a vmap."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return all(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def is_batched_gradient(tensor: Tensor) -> bool:
    """Whether the tensor is a batch of gradients, as `is_grads_batched=True` has them."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def takes_tangents() -> bool:
    """Whether forward-mode derivatives are being taken."""
    return forward_ad._current_level >= 0


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no data, as in tracing."""
    return type(tensor) is not Tensor and isinstance(tensor, FakeTensor)


@contextmanager
def without_mode(mode: TorchFunctionMode | None) -> Iterator[None]:
    """Take one torch-function mode away; modes that others put on above it stay."""
    stack: Any = overrides._get_current_function_mode_stack
    pop: Any = overrides._pop_mode
    push: Any = overrides._push_mode
    if mode is None or mode not in stack():
        yield
        return
    depth = stack().index(mode)
    above = [pop() for _ in stack()[depth:]]
    for other in reversed(above[:-1]):
        push(other)
    try:
        yield
    finally:
        above = [pop() for _ in stack()[depth:]]
        push(mode)
        for other in reversed(above):
            push(other)


def indexing_by_vmap() -> AbstractContextManager[Any]:
    """In which functions under vmap may index tensors by their indices, as FlexAttention lets."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
