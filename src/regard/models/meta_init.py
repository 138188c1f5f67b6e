"""A model without numbers, on the meta device: what a file's tensors are checked against.

Why: torch draws random numbers for every new layer, also on the meta device, where there are none
to draw; and the first draw there loads torch's whole compiler, which takes longer than loading a
small model does otherwise.

How: while the model is made, calls that would draw give their tensor back as it is.

Left out: models with numbers; `Transformer(config)` makes those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.overrides import TorchFunctionMode

from regard.models.config import ModelConfig
from regard.models.transformer import Transformer

DRAWS = ("normal_", "uniform_")
"""How the names of all those end that fill a tensor by chance, in torch.nn.init and of tensors."""


def make_blank(config: ModelConfig) -> Transformer:
    with _Undrawn():
        return Transformer(config, device="meta")


@final
class _Undrawn(TorchFunctionMode):
    """While this is on, nothing is drawn."""

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
