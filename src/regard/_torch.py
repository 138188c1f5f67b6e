"""All private names of torch that regard uses, with the torch versions in which they were seen.

Why: private names change without notice. The rest of the package imports them from here, which a
test checks, and CI runs on the newest torch named here; when a name changes, only this file does.

Seen in torch 2.11 and 2.13:
- `torch._assert_async`: an assertion on a tensor that is checked on its device, without a sync.
- `torch._foreach_copy_`, `torch._foreach_mul_`: many tensors copied or multiplied in a few kernels.
- `torch._C._cuda_endAllocateToPool`, `torch._C._cuda_releasePool`: what ending a CUDA graph capture
  does with its memory pool.
- `torch.utils._pytree`: registering a class as a node.
- `torch._C._functorch`: whether a `torch.func` transform is running, its kind, and its wrapped
  tensors.
- `torch._C._is_any_autocast_enabled`: whether autocast is on for any device.
- `torch.autograd.forward_ad._current_level`: whether forward-mode derivatives are being computed.
- `torch._subclasses.FakeTensor`: tensors without data, in tracing.
- `torch._C._len_torch_dispatch_stack`: whether a dispatch mode is active, as in tracing.
- `torch._C._get_dispatch_mode`, `_TorchDispatchModeKey.PROXY`: whether `make_fx` is tracing.
- `torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode`, and `unwrap_proxy` of its tracer: the
  graph that `make_fx` traces, and the node that computes a tensor.
- `torch._ops.OpOverload`, its `_schema`, and its attribute `is_view`: what an operation does.
- `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` and its backward: the CPU kernel,
  with its logsumexp. It assumes, unchecked, that the last axis has stride 1.
- `torch._fused_sdp_choice`: the kernel that SDPA would choose for a call.
- `torch._C._get_sdp_priority_order`, `_set_sdp_priority_order`: the order in which SDPA tries its
  kernels.
- `torch.overrides._get_current_function_mode_stack`, `_pop_mode`, `_push_mode`: removing a
  torch-function mode.
- `torch._C._cuda_getCurrentRawStream`: the current stream of a GPU, as Triton reads it.
- `torch._C._current_graph_task_id`: whether the backward pass is running.
- `torch._C._dynamo.eval_frame`: whether compiled code is running (`get_eval_frame_callback`), and
  excluding functions that it calls from compilation (`set_code_exec_strategy`).
- `OptimizedModule.dynamo_ctx`, and its counterpart in a compiled function: the compile options.
- `torch.nn.modules.module._global_forward_hooks` and similar: hooks on all modules, always under
  the same key, since compiled graphs have guards on the keys.
- `torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex`: indexing under vmap.
- `torch._C._get_tracing_state`: whether `torch.jit` is tracing.
- `DTensor._local_tensor`: this rank's part itself; `to_local` returns a view, another tensor.
- `kwargs` in the frame of `torch.nn.modules.module` that calls a hook on all modules: such hooks
  are not passed the module's keyword arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, overrides
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

assert_async = torch._assert_async
copy_all = torch._foreach_copy_
multiply_all = torch._foreach_mul_
sdp_choice = torch._fused_sdp_choice
sdp_order = torch._C._get_sdp_priority_order
set_sdp_order = torch._C._set_sdp_priority_order
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
ProxyMode = ProxyTorchDispatchMode
PROXY = torch._C._TorchDispatchModeKey.PROXY
flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def end_allocation(device: int, pool: tuple[int, int]) -> None:
    """Release a graph capture's memory pool after ending the capture failed, if torch did not."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # Torch had ended the allocation before the failure.
    torch._C._cuda_releasePool(device, pool)


def writes(target: Any) -> bool:
    """Whether the target of a graph's node is an operation that writes to one of its tensors."""
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def is_view(target: Any) -> bool:
    """Whether the target of a graph's node is an operation that returns a view."""
    return isinstance(target, torch._ops.OpOverload) and bool(target.is_view)


def current_stream(device: torch.device) -> int:
    """The current stream of a GPU, as its address."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def register_pytree(
    kind: type[Any],
    flatten: Callable[[Any], tuple[dict[str, Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Register a class as a pytree node; flatten returns (children by name, everything else)."""

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
    """Whether a `torch.func` transform is running; False in compilation, which handles its own."""
    if torch.compiler.is_dynamo_compiling():
        return False
    inside = peek_interpreter_stack() is not None
    return inside and not torch.compiler.is_compiling()


def is_plainly_eager() -> bool:
    """Whether operations run just as they are called: nothing traces, transforms or casts tensors.

    False in compilation and tracing, `torch.func`, forward-mode derivatives, and any autocast.
    """
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    return forward_ad._current_level < 0 and not is_any_autocast_enabled()


def is_transformed(tensor: Tensor) -> bool:
    """Whether the tensor is wrapped by a running `torch.func` transform (vmap, grad, jvp)."""
    return is_transforming() and bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_only_vmapped() -> bool:
    """Whether every running `torch.func` transform is a vmap."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return all(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def is_batched_gradient(tensor: Tensor) -> bool:
    """Whether the tensor is a batch of gradients, as with `is_grads_batched=True`."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def takes_tangents() -> bool:
    """Whether forward-mode derivatives are being computed."""
    return forward_ad._current_level >= 0


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor is a FakeTensor, which has a shape but no data, as in tracing."""
    return type(tensor) is not Tensor and isinstance(tensor, FakeTensor)


def is_intercepted() -> bool:
    """Whether a dispatch mode is active, which may return tensors that are not plain."""
    return int(torch._C._len_torch_dispatch_stack()) > 0


def is_traced_by_fx() -> bool:
    """Whether `make_fx` is tracing, which must not read values, even of tensors with data."""
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 and torch._C._get_dispatch_mode(PROXY) is not None


@contextmanager
def without_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Remove torch-function modes of one class inside a `with`; others stay, in their order."""
    stack: Any = overrides._get_current_function_mode_stack
    modes = stack()
    if not any(isinstance(mode, kind) for mode in modes):
        yield
        return
    set_modes([mode for mode in modes if not isinstance(mode, kind)])
    try:
        yield
    finally:
        set_modes(modes)


def push_mode(mode: TorchFunctionMode) -> None:
    push: Any = overrides._push_mode
    push(mode)


def remove_mode(mode: TorchFunctionMode) -> bool:
    """Remove a torch-function mode from this thread's stack; return whether it was there."""
    stack: Any = overrides._get_current_function_mode_stack
    modes = stack()
    if mode in modes:
        set_modes([other for other in modes if other is not mode])
    return mode in modes


def set_modes(modes: list[TorchFunctionMode]) -> None:
    """Set the stack of torch-function modes of this thread, the innermost last."""
    stack: Any = overrides._get_current_function_mode_stack
    pop: Any = overrides._pop_mode
    push: Any = overrides._push_mode
    old = stack()
    same = 0
    while same < min(len(old), len(modes)) and old[same] is modes[same]:
        same += 1
    for _ in old[same:]:
        pop()
    for mode in modes[same:]:
        push(mode)


def is_backward() -> bool:
    """Whether the backward pass is running, where checkpointing reruns layers' forward."""
    return int(torch._C._current_graph_task_id()) != -1


def is_traced() -> bool:
    """Whether `make_fx` or `torch.jit.trace` is tracing, outside of `torch.compile`."""
    # One function, not two: a step of generation asks this many times.
    modes = torch._C._len_torch_dispatch_stack()
    by_fx = modes > 0 and torch._C._get_dispatch_mode(PROXY) is not None
    return by_fx or torch._C._get_tracing_state() is not None


def is_traced_by_jit() -> bool:
    """Whether `torch.jit.trace` is running, which records every operation into its trace."""
    return torch._C._get_tracing_state() is not None


def is_called_by_compiled() -> bool:
    """Whether compiled code is running; parts of it, such as this call, may be left to Python."""
    # Functions that compiled code calls are compiled too, so this one may be.
    return torch.compiler.is_compiling() or callable(
        torch._C._dynamo.eval_frame.get_eval_frame_callback()
    )


def run_uncompiled(*functions: Any, inside: bool) -> None:
    """Do not compile these functions when compiled code calls them; nor their callees, if `inside`.

    The compiler still traces into them when it traces a call of them.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    for function in functions:
        strategy = frames._FrameExecStrategy(skip, skip if inside else default)
        frames.set_code_exec_strategy(function.__code__, strategy)


def compile_alike(compiled: Any, function: Any) -> Any:
    """Compile a function with the options of `compiled`; once for each, with graphs of its own."""
    if isinstance(compiled, torch.nn.Module):
        context: Any = compiled.dynamo_ctx
    else:
        context = compiled.get_compiler_config.__closure__[0].cell_contents
    if "_regard_alike" not in vars(context):
        # Graphs are cached per code object, hence the copy.
        code, names = function.__code__.replace(), function.__globals__
        context._regard_alike = context(FunctionType(code, names, function.__name__))
    return context._regard_alike


HOOK_KEY = -1
"""The key of our hooks on all modules; torch gives other hooks keys from 0 on."""


def set_module_hooks(enter: Any, leave: Any) -> None:
    """Set global hooks before and after every module's forward, even if it raises; None: remove."""
    hooks: Any = torch.nn.modules.module
    given = (
        (hooks._global_forward_pre_hooks, enter),
        (hooks._global_forward_hooks, leave),
        (hooks._global_forward_hooks_always_called, None if leave is None else True),
    )
    for held, value in given:
        if value is None:
            held.pop(HOOK_KEY, None)
        else:
            held[HOOK_KEY] = value


def given_by_name() -> dict[str, Any]:
    """In a hook on all modules: the module's keyword arguments, or {} if they cannot be found."""
    frame, home = sys._getframe(1).f_back, torch.nn.modules.module.__file__
    for _ in range(16):
        if frame is None:
            break
        if frame.f_code.co_filename == home and "kwargs" in frame.f_locals:
            return dict(frame.f_locals["kwargs"])
        frame = frame.f_back
    return {}


def on_this_rank(x: Any) -> Any:
    """This rank's local part of a DTensor; anything else is returned as it is."""
    return getattr(x, "_local_tensor", x)


def indexing_by_vmap() -> AbstractContextManager[Any]:
    """A context in which functions under vmap may index tensors, as in FlexAttention."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
