"""What we use of torch that is private there, in one place, with the versions it was seen in.

Why: private names move without notice. Everything else in the package imports them from here, a
test holds the rest of the tree to that, and CI runs on the newest torch we name; when one moves,
this is the file to change.

Seen in torch 2.11 and 2.13:
- `torch.utils._pytree`: registering a class as a node.
- `torch._C._functorch`: whether a `torch.func` transform is under way, and wrapped tensors.
- `torch.autograd.forward_ad._current_level`: whether forward-mode derivatives are being taken.
- `torch._subclasses.FakeTensor`: tensors without data, in tracing.
- `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` and its backward: the CPU's kernel,
  with its logsumexp. It takes rows of stride 1 for granted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils import _pytree

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def register_pytree(kind: type[Any], flatten: Callable[..., Any], unflatten: Any) -> None:
    """Make a class a node of torch's pytrees."""
    _pytree.register_pytree_node(kind, flatten, unflatten)


def is_transforming() -> bool:
    """Whether a `torch.func` transform is under way; the compiler handles those of its own."""
    if torch.compiler.is_dynamo_compiling():
        return False
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return inside and not torch.compiler.is_compiling()


def is_transformed(tensor: Tensor) -> bool:
    """Whether the tensor is being carried through a `torch.func` transform (vmap, grad, jvp)."""
    return is_transforming() and bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_batched_gradient(tensor: Tensor) -> bool:
    """Whether the tensor is a batch of gradients, as `is_grads_batched=True` has them."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def takes_tangents() -> bool:
    """Whether forward-mode derivatives are being taken."""
    return forward_ad._current_level >= 0


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no data, as in tracing."""
    return type(tensor) is not Tensor and isinstance(tensor, FakeTensor)
