"""The hook on compiled models: in a block they run graphs of their own, with our hooks in them.

Why: a graph that was traced outside of a block has no hooks in it, so its calls are not seen; and
one with hooks would be slower outside.

How: in a block, what `torch.compile(model)`, `model.compile()` and transformers' `generate` call is
replaced by the same model, compiled once more in the same way. Its graph is traced with our hooks
in it (`module_hooks.py`, `ops/call_hook.py`), and kept for later blocks. Our torch-function mode is
removed before, since the compiler would trace it too.

Left out: functions that call a model and are compiled themselves. These are seen if the model
attends by `regard.attention`, or if they are first called in a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from regard._torch import compile_alike
from regard.lens.open_recorders import recorders_around
from regard.lens.shared_patch import patched

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder


@contextmanager
def hook_compiled(recorder: Recorder) -> Iterator[None]:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    package = sys.modules.get("transformers.modeling_utils")
    pretrained = getattr(package, "PreTrainedModel", None)
    with ExitStack() as patches:
        if dynamo is not None:
            patches.enter_context(patched(dynamo.OptimizedModule, "__call__", call_watched))
        if hasattr(pretrained, "get_compiled_call"):
            patches.enter_context(patched(pretrained, "get_compiled_call", hand_out_watched))
        for module in recorder.modules:
            if getattr(module, "_compiled_call_impl", None) is not None:
                wrap = partial(replace_compiled, module)
                patches.enter_context(patched(module, "_compiled_call_impl", wrap))
        yield


def run_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def run_inside(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def call_watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `OptimizedModule.__call__`, for modules that are watched or contain a watched one."""

    @wraps(call)
    def run(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorders_around():
            return call(compiled, *args, **kwargs)
        recorders = find_recorders(compiled)
        if not recorders:
            # Not by OptimizedModule's own method, which warns about global module hooks: ours do
            # not affect other modules.
            return nn.Module.__call__(compiled, *args, **kwargs)
        watched = compile_alike(compiled, run_module)
        with recorders[0].unseen():
            return watched(compiled._orig_mod, *args, **kwargs)

    return run


def hand_out_watched(get: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_compiled_call`, for models that are watched."""

    @wraps(get)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = get(model, *args, **kwargs)
        if not find_recorders(model) or not hasattr(compiled, "get_compiler_config"):
            return compiled
        return partial(compile_alike(compiled, run_module), model)

    return run


def replace_compiled(module: nn.Module, compiled: Any) -> Callable[..., Any]:
    """Wrap what `module.compile()` stored in a module."""

    @wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        recorders = find_recorders(module)
        if not recorders:
            return compiled(*args, **kwargs)
        with recorders[0].unseen():
            return compile_alike(compiled, run_inside)(module, *args, **kwargs)

    return run


def find_recorders(module: nn.Module) -> list[Recorder]:
    """The recorders around a call whose models contain the module or a part of it."""
    return [
        recorder
        for recorder in recorders_around()
        if any(id(inner) in recorder.names for inner in module.modules())
    ]
