"""A model without data, on the meta device: a file's tensors are checked against its shapes.

Why: torch initializes every new layer at random, even on the meta device, where there is no data;
and the first random operation there imports torch's whole compiler, which takes longer than loading
a small model otherwise.

How: while the model is built, random initializers return their tensor unchanged.

Left out: models with data; `Transformer(config)` makes those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.overrides import TorchFunctionMode

from regard.models.config import ModelConfig
from regard.models.transformer import Transformer

DRAWS = ("normal_", "uniform_")
"""Endings of the names of random initializers, in torch.nn.init and among tensor methods."""


def make_blank(config: ModelConfig) -> Transformer:
    with _Undrawn():
        return Transformer(config, device="meta")


@final
class _Undrawn(TorchFunctionMode):
    """A mode in which random initializers do nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "").endswith(DRAWS):
            return args[0] if args else given["tensor"]
        return func(*args, **given)
