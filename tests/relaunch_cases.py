"""Calls of which only addresses change from one to the next, by their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from regard.ops import ALiBi, Causal, Documents, Lengths, Prefix, Window

B, G, D = 3, 2, 16
Made = Callable[[int, int], dict[str, Any]]
"""A rule for so many queries and keys, of tensors that no other has."""


def draw(T: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    k = torch.zeros(2, B, G, S, D, dtype=torch.bfloat16)
    return torch.zeros(B, 4, T, D, dtype=torch.bfloat16), k[0], k[1]


def at(T: int, S: int) -> tuple[Tensor, Tensor]:
    return torch.arange(S - T, S).repeat(B, 1), torch.arange(S).repeat(B, 1)


KNOWN: dict[str, Made] = {
    "window": lambda T, S: {"mask": Window(16, 0)},
    "two windows": lambda T, S: {"mask": Causal() & Window(16, None), "scale": 0.3},
    "padding": lambda T, S: {"mask": Lengths(torch.full((B,), S - 3)), "softcap": 3.0},
    "padding on the left": lambda T, S: {
        "mask": Causal() & Lengths(torch.full((B,), S - 3, dtype=torch.int32), side="left")
    },
    "a cache's": lambda T, S: {"mask": Causal().at(*at(T, S)), "sinks": torch.zeros(4)},
    "a cache's window": lambda T, S: {
        "mask": Window(9, 0).at(*at(T, S)) & Lengths(at(T, S)[0][:, 0])
    },
    "queries alone": lambda T, S: {"mask": Causal().at(at(T, S)[0][0])},
    "documents": lambda T, S: {"mask": Documents(torch.arange(S).repeat(B, 1) // 5)},
    "documents of one row": lambda T, S: {"mask": Documents(torch.arange(S) // 5)},
    "documents, their own": lambda T, S: {"mask": Documents(at(T, S)[1], at(T, S)[0])},
    "slopes": lambda T, S: {"bias": ALiBi(4), "mask": Causal()},
    "slopes, learned": lambda T, S: {"bias": ALiBi(slopes=Parameter(torch.ones(4)))},
    "slopes, placed": lambda T, S: {"mask": Causal().at(*(p := at(T, S))), "bias": ALiBi(4).at(*p)},
    "sinks alone": lambda T, S: {"sinks": Parameter(torch.zeros(4))},
}  # fmt: skip

MANY: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "padding": lambda B, H, T: {"mask": Lengths(torch.full((B,), T - 3))},
    "padding on the left": lambda B, H, T: {
        "mask": Causal() & Lengths(torch.full((B,), T - 3), side="left"), "scale": 0.3,
    },
    "window": lambda B, H, T: {"mask": Window(16, 0)},
    "documents": lambda B, H, T: {
        "mask": Causal() & Documents(torch.arange(T).repeat(B, 1) // 50)
    },
    "documents of all samples": lambda B, H, T: {"mask": Documents(torch.arange(T) // 50)},
    "prefix": lambda B, H, T: {"mask": Causal() | Prefix(16)},
    "slopes": lambda B, H, T: {"bias": ALiBi(H), "mask": Causal()},
    "softcap": lambda B, H, T: {"softcap": 3.0},
    "sinks": lambda B, H, T: {
        "sinks": torch.zeros(H), "mask": Lengths(torch.full((B,), T)),
    },
}  # fmt: skip
"""By samples, heads, and as many queries as keys."""
