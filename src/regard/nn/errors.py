"""The errors of regard.nn, in types that code written for torch.nn also catches.

Such code may catch what torch raises: AssertionError in some places, RuntimeError in others. The
rest of regard raises ValueError. So an error here is both.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn


class InputError(AssertionError, ValueError):
    """Raised where torch.nn raises AssertionError."""


class CallError(RuntimeError, ValueError):
    """Raised where torch.nn raises RuntimeError."""


def refuse_nested(*tensors: Tensor | None) -> None:
    if any(t is not None and t.is_nested for t in tensors):
        raise InputError(
            "regard.nn.MultiheadAttention does not support NestedTensor outside or inside a "
            "Transformer layer: pad with `t.to_padded_tensor(0.0)` and name the padding with "
            "key_padding_mask (True = padding)"
        )


def refuse_script(module: nn.Module) -> NoReturn:
    raise NotImplementedError(
        f"regard.nn.{type(module).__name__} does not support TorchScript; use torch.compile(model) "
        "or torch.export.export(model, ...) instead of torch.jit.script(model)"
    )
