"""What we use of torch that is private there, in one place, with the versions it was seen in.

Why: private names move without notice. Everything else in the package imports them from here, a
test holds the rest of the tree to that, and CI runs on the newest torch we name; when one moves,
this is the file to change.

Seen in torch 2.11 and 2.13:
- `torch._assert_async`: a condition on a tensor that is checked on its device, without a wait.
- `torch._foreach_copy_`, `torch._foreach_mul_`: many tensors copied or multiplied in a few kernels.
- `torch._C._cuda_endAllocateToPool`, `torch._C._cuda_releasePool`: what the end of a capture does.
- `torch.utils._pytree`: registering a class as a node.
- `torch._C._functorch`: whether a `torch.func` transform is under way, of which kind, and wrapped
  tensors.
- `torch._C._is_any_autocast_enabled`: whether autocast is on, whatever the device.
- `torch.autograd.forward_ad._current_level`: whether forward-mode derivatives are being taken.
- `torch._subclasses.FakeTensor`: tensors without data, in tracing.
- `torch._C._len_torch_dispatch_stack`: whether a mode sees every operation, as in tracing.
- `torch._C._get_dispatch_mode`, `_TorchDispatchModeKey.PROXY`: whether `make_fx` is tracing.
- `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` and its backward: the CPU's kernel,
  with its logsumexp. It takes rows of stride 1 for granted.
- `torch._fused_sdp_choice`: which of torch's kernels a call of SDPA takes.
- `torch._C._get_sdp_priority_order`, `_set_sdp_priority_order`: in which order SDPA asks them.
- `torch.overrides._get_current_function_mode_stack`, `_pop_mode`, `_push_mode`: taking a mode away.
- `torch._C._current_graph_task_id`: whether the backward pass is running.
- `torch._C._dynamo.eval_frame`: whether compiled code is running (`get_eval_frame_callback`), and
  functions that are not compiled where it calls them (`set_code_exec_strategy`).
- `OptimizedModule.dynamo_ctx`, and the same in a compiled function: how something was compiled.
- `torch.nn.modules.module._global_forward_hooks` and their like: hooks on all modules, under one
  key for good, as compiled graphs are guarded by keys.
- `torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex`: indices under vmap.
- `torch._C._get_tracing_state`: whether `torch.jit` is tracing.
- `DTensor._local_tensor`: what a rank has of it; `to_local` gives a view, another tensor.
- `kwargs` in the frame of `torch.nn.modules.module` that calls a hook on all modules, which is not
  given what the module was given by name.
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
PROXY = torch._C._TorchDispatchModeKey.PROXY
flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def end_allocation(device: int, pool: tuple[int, int]) -> None:
    """Let go of a pool of GPU memory for a capture whose end has failed, if torch has not."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # The end failed later than that.
    torch._C._cuda_releasePool(device, pool)


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
    inside = peek_interpreter_stack() is not None
    return inside and not torch.compiler.is_compiling()


def is_plainly_eager() -> bool:
    """Whether operations run as they are called: nothing traces, transforms or converts tensors.

    Such as graphs, `torch.func`, forward-mode derivatives, and autocast of whichever device.
    """
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    return forward_ad._current_level < 0 and not is_any_autocast_enabled()


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


def is_intercepted() -> bool:
    """Whether a mode sees every operation, and may give tensors that are not plain."""
    return int(torch._C._len_torch_dispatch_stack()) > 0


def is_traced_by_fx() -> bool:
    """Whether `make_fx` is tracing; of tensors that have data, too, it is told no values."""
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 and torch._C._get_dispatch_mode(PROXY) is not None


@contextmanager
def without_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Take torch-function modes of one kind away; others stay, in their order."""
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
    """Take a torch-function mode off this thread's stack, wherever it is; whether it was there."""
    stack: Any = overrides._get_current_function_mode_stack
    modes = stack()
    if mode in modes:
        set_modes([other for other in modes if other is not mode])
    return mode in modes


def set_modes(modes: list[TorchFunctionMode]) -> None:
    """Make these the torch-function modes of this thread, the innermost last."""
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
    """Whether the backward pass is running, in which checkpointing runs layers again."""
    return int(torch._C._current_graph_task_id()) != -1


def is_traced() -> bool:
    """Whether `make_fx` or `torch.jit.trace` is tracing, outside of `torch.compile`."""
    # One function, not two: a step of generation asks this many times.
    modes = torch._C._len_torch_dispatch_stack()
    by_fx = modes > 0 and torch._C._get_dispatch_mode(PROXY) is not None
    return by_fx or torch._C._get_tracing_state() is not None


def is_traced_by_jit() -> bool:
    """Whether `torch.jit.trace` is at work, into which all that is called goes."""
    return torch._C._get_tracing_state() is not None


def is_called_by_compiled() -> bool:
    """Whether compiled code is running, part of which is left to Python."""
    # What compiled code calls is compiled in turn, and so may this be.
    return torch.compiler.is_compiling() or callable(
        torch._C._dynamo.eval_frame.get_eval_frame_callback()
    )


def run_uncompiled(*functions: Any, inside: bool) -> None:
    """Compile these neither where compiled code calls them; nor what they call, if `inside`.

    The compiler still traces them where it traces a call of them.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    for function in functions:
        strategy = frames._FrameExecStrategy(skip, skip if inside else default)
        frames.set_code_exec_strategy(function.__code__, strategy)


def compile_alike(compiled: Any, function: Any) -> Any:
    """A function compiled as a module or function was, once for each, with graphs of its own."""
    if isinstance(compiled, torch.nn.Module):
        context: Any = compiled.dynamo_ctx
    else:
        context = compiled.get_compiler_config.__closure__[0].cell_contents
    if "_regard_alike" not in vars(context):
        # Graphs are kept with the code.
        code, names = function.__code__.replace(), function.__globals__
        context._regard_alike = context(FunctionType(code, names, function.__name__))
    return context._regard_alike


HOOK_KEY = -1
"""Of our hooks on all modules; those that others register have keys from 0 on."""


def set_module_hooks(enter: Any, leave: Any) -> None:
    """Call these before and after the forward of every module, also where it fails; or None."""
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
    """What the module is given by name, in a hook on all modules; nothing where it is not known."""
    frame, home = sys._getframe(1).f_back, torch.nn.modules.module.__file__
    for _ in range(16):
        if frame is None:
            break
        if frame.f_code.co_filename == home and "kwargs" in frame.f_locals:
            return dict(frame.f_locals["kwargs"])
        frame = frame.f_back
    return {}


def on_this_rank(x: Any) -> Any:
    """What this rank has of a tensor that is spread over several; anything else as it is."""
    return getattr(x, "_local_tensor", x)


def indexing_by_vmap() -> AbstractContextManager[Any]:
    """In which functions under vmap may index tensors by their indices, as FlexAttention lets."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
