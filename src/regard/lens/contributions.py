"""How much keys add, and what that did: lengths of values, and sums of attention × gradient.

Why: a large weight on a small value moves nothing. What key j adds to query i is weight · f(x_j),
where f(x_j) is its value as the output projection takes it; its length is weight · ‖f(x_j)‖
(Kobayashi et al. 2020), so one number for each key is enough. Likewise the matrix of attention ×
gradient needs not be made for its sums: with O the output and V the values of a head, row i sums
to o_i · dO_i and column j to v_j · dV_j.

How: the output projection is the layer that reads what the heads give, in the module that attends
or beside it. Values come with the call; gradients by hooks on values and on what the projection
reads, when a backward pass runs inside the block.

Left out: the bias of the projection, which no key adds, and projections that are no plain matrix.

Letters: H heads, G key heads, T queries, S keys, E value width, C model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from regard.lens.head_shards import local_part

OUTPUT = re.compile(r"^(o|out|output|wo|w_o|proj|dense)$|^(o|out|c|output)_(proj|lin)|^to_out$|^0$")
"""How layers that read what the heads give are called."""


def find_projection(model: nn.Module, name: str, width: int) -> nn.Module | None:
    """The layer that reads the numbers of all heads, in the module of this name or beside it."""
    modules = {plain_name(path): module for path, module in model.named_modules()}
    beside = ".".join([*name.split(".")[:-1], "output"])  # where BERT and its like have theirs
    # A model that attends itself is called by its class.
    for home in (modules.get(name, model), modules.get(beside)):
        inside: dict[str, nn.Module] = {} if home is None else dict(home.named_modules())
        for path, module in inside.items():
            if OUTPUT.match(path.rpartition(".")[2]) and _width(module) == width:
                return module
    return None


def plain_name(name: str) -> str:
    """The name of a module as it was before a module around it was compiled."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _width(module: nn.Module) -> int | None:
    """How many numbers a layer reads, where it is a plain matrix."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    return local_part(weight).shape[0 if is_transposed(module) else 1]


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (in, out): of Hugging Face's Conv1D."""
    return type(module).__name__ == "Conv1D"


def head_matrices(module: nn.Module, n_heads: int, heads: Sequence[int] | None) -> Tensor:
    """What the projection does to the value of each head, (H, C, E)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    here = local_part(weight.detach())
    weight_co = here.T if is_transposed(module) else here
    weight_hce = weight_co.reshape(len(weight_co), n_heads, -1).transpose(0, 1)
    return weight_hce if heads is None else weight_hce[list(heads)]


def value_norms(v_gse: Tensor, weight_hce: Tensor) -> Tensor:
    """The length of each key's value after the projection, (H, S) float32."""
    group = len(weight_hce) // len(v_gse)
    lengths = [
        (v_gse[h // group].float() @ weight_ce.float().T).norm(dim=-1)
        for h, weight_ce in enumerate(weight_hce)
    ]
    return torch.stack(lengths)


def sum_gradient(x: Tensor, put: Callable[[Tensor], None]) -> None:
    """Give the product of x and its gradient to `put`, as soon as it is known."""
    if x.requires_grad:

        def multiply(dx: Tensor) -> None:
            put(x.detach().float() * dx.float())

        x.register_hook(multiply)  # type: ignore[no-untyped-call]
