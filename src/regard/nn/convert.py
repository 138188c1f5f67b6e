"""`convert(model)`: torch.nn's attention and Transformer modules in a model become ours, in place.

Why: so that a model built with torch.nn can be observed, and has the other properties listed in
`multihead.py`, without being rebuilt.

How: our classes hold the same parameters and submodules under the same names, so a module is
swapped by assigning its `__class__`. It stays the same object with the same parameters: tied
weights stay tied, optimizers and hooks keep working.

Modules that differ from torch's are skipped and reported: subclasses with methods of their own,
replaced `forward`s, parametrized weights. Attention inside such a layer is still swapped; torch's
fast path, which would bypass it, is then switched off for that layer.

Left out: modules that torch.jit has compiled, which are no longer torch.nn's. Keep
`copy.deepcopy(model)` if the original is still needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils import parametrize

from regard.nn import multihead, transformer

OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: multihead.MultiheadAttention,
    nn.TransformerEncoderLayer: transformer.TransformerEncoderLayer,
    nn.TransformerDecoderLayer: transformer.TransformerDecoderLayer,
    nn.TransformerEncoder: transformer.TransformerEncoder,
    nn.TransformerDecoder: transformer.TransformerDecoder,
    nn.Transformer: transformer.Transformer,
}
HARMLESS = {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__constants__"}
HARMLESS |= {"__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__"}
"""Attributes that a subclass may define without computing anything else than torch's class."""


@dataclass(frozen=True)
class Conversion:
    """What was swapped (dotted name: class) and what was not (dotted name: why)."""

    model: nn.Module
    swapped: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"swapped  {name or '(the model)'}: {kind}" for name, kind in self.swapped.items()]
        lines += [f"skipped  {name or '(the model)'}: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines) or "nothing of torch.nn's attention was found"


def convert(model: nn.Module) -> Conversion:
    """Swap the attention and Transformer modules of torch.nn in a model for regard's, in place.

    Weights, parameter names, hooks and optimizers stay as they are. To keep the original, convert
    `copy.deepcopy(model)`.

    Args:
        model: Any module.

    Returns:
        A `Conversion`: `swapped` and `skipped`, by dotted name. Subclasses with methods of their
        own, replaced `forward`s and parametrized weights are skipped, with the reason. print() it.

    Raises:
        TypeError: What is no torch.nn.Module.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 8, batch_first=True)
        >>> len(regard.convert(layer).swapped)
        2
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    done = Conversion(model)
    for name, module in model.named_modules():
        kind = next((kind for kind in OURS if isinstance(module, kind)), None)
        if kind is None or isinstance(module, OURS[kind]):
            continue
        if (reason := reason_to_skip(module, kind)) is not None:
            done.skipped[name] = reason
        else:
            module.__class__ = OURS[kind]
            done.swapped[name] = OURS[kind].__name__
        # The fast path of a layer that stays torch's would bypass our attention inside it.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer):
            # torch uses its fast path for relu and gelu only, and reads this attribute for that.
            module.activation_relu_or_gelu = 0
    return done


def reason_to_skip(module: nn.Module, kind: type[nn.Module]) -> str | None:
    if "forward" in vars(module):
        return "its forward was replaced on this one module, and would be lost"
    if parametrize.is_parametrized(module):
        names = ", ".join(module.parametrizations.keys())  # type: ignore[union-attr, operator]
        return (
            f"its {names} is parametrized; remove the parametrization, convert, then register it "
            "again (torch.nn.utils.parametrize)"
        )
    between = [c for c in type(module).__mro__ if c not in kind.__mro__]
    own = sorted({name for c in between for name in vars(c)} - HARMLESS)
    if not own:
        return None
    base = f"torch.nn.{kind.__name__}"
    return f"{type(module).__name__} is a subclass of {base} with its own {', '.join(own)}"
