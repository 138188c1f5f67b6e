"""How much keys add to queries: norms of projected values, and sums of attention × gradient.

Why: a large weight on a small value changes little. Key j adds weight · f(x_j) to query i, where
f(x_j) is its value after the output projection; the norm is weight · ‖f(x_j)‖ (Kobayashi et al.
2020), so one number per key is enough. Likewise the matrix of attention × gradient need not be
computed to get its sums: with O the output and V the values of a head, row i sums to o_i · dO_i and
column j to v_j · dV_j.

How: the output projection is the layer that reads what the heads put out, inside the attention
module or next to it. Values come with the call. Gradients come from tensor hooks on the values and
on the projection's input, when a backward pass runs inside the block.

Left out: the projection's bias, which no key adds, and projections that are no plain matrix.

Letters: H heads, G key heads, T queries, S keys, E value width, C model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from regard.lens.head_shards import local_part

OUTPUT = re.compile(r"^(o|out|output|wo|w_o|proj|dense)$|^(o|out|c|output)_(proj|lin)|^to_out$|^0$")
"""Names of output projections: the layers that read what the heads put out."""


def find_projection(model: nn.Module, name: str, width: int) -> nn.Module | None:
    """Find the output projection in or beside the module of this name; it reads `width` numbers."""
    modules = {plain_name(path): module for path, module in model.named_modules()}
    beside = ".".join([*name.split(".")[:-1], "output"])  # where BERT and its like have theirs
    # If the model itself attends, `name` is its class name, which is not in `modules`.
    for home in (modules.get(name, model), modules.get(beside)):
        inside: dict[str, nn.Module] = {} if home is None else dict(home.named_modules())
        for path, module in inside.items():
            if OUTPUT.match(path.rpartition(".")[2]) and _width(module) == width:
                return module
    return None


def plain_name(name: str) -> str:
    """A module's name without the `_orig_mod` parts that torch.compile inserts."""
    if "_orig_mod" not in name:
        return name
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _width(module: nn.Module) -> int | None:
    """A layer's input width if its weight is a plain matrix, else None."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    return local_part(weight).shape[0 if is_transposed(module) else 1]


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored as (in, out), as in Hugging Face's Conv1D."""
    return type(module).__name__ == "Conv1D"


def head_matrices(module: nn.Module, n_heads: int, heads: Sequence[int] | None) -> Tensor:
    """The slice of the projection's weight for each head's value, (H, C, E)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    here = local_part(weight.detach())
    weight_co = here.T if is_transposed(module) else here
    weight_hce = weight_co.reshape(len(weight_co), n_heads, -1).transpose(0, 1)
    return weight_hce if heads is None else weight_hce[list(heads)]


def value_norms(v_gse: Tensor, weight_hce: Tensor) -> Tensor:
    """The norm of each key's value after the output projection, (H, S) float32."""
    group = len(weight_hce) // len(v_gse)
    lengths = [
        (v_gse[h // group].float() @ weight_ce.float().T).norm(dim=-1)
        for h, weight_ce in enumerate(weight_hce)
    ]
    return torch.stack(lengths)


def sum_gradient(x: Tensor, put: Callable[[Tensor], None]) -> None:
    """Register a hook that passes x · dx to `put` once the gradient of x is computed."""
    if x.requires_grad:

        def multiply(dx: Tensor) -> None:
            put(x.detach().float() * dx.float())

        x.register_hook(multiply)  # type: ignore[no-untyped-call]
