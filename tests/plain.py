"""Attention once more, written another way, and the cases it is tried on.

`plain` is the formula as a textbook has it, in one type from start to end, on a dense mask and a
dense bias that were filled in by loops over single pairs. Nothing of it is shared with the package.
`CASES` names the features of the operation: for each the inputs, the arguments as a user gives
them, and the same thing as dense tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Window,
)
from regard.ops.bias import Sum

B, H, G, T, S, D, E = 2, 6, 2, 37, 53, 11, 11


@dataclass
class Case:
    """One feature: the inputs in float64, the call, and what it means pair by pair."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: dict[str, Any] = field(default_factory=dict)
    sees: Callable[[int, int, int, int], bool] | None = None
    adds: Callable[[int, int, int, int], float] | None = None

    def cast(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        """The case in another type, with gradients asked of every input that may have one."""

        def move(x: Any) -> Any:
            if isinstance(x, Tensor) and x.is_floating_point():
                return x.to(device=device, dtype=dtype).detach().requires_grad_(x.requires_grad)
            if isinstance(x, Tensor):
                return x.to(device)
            return x

        def rebuild(value: Any) -> Any:
            if isinstance(value, Sum):
                return rebuild(value.one) + rebuild(value.other)
            if isinstance(value, (RelativeTable, DenseBias, ALiBi)):
                held = {"table", "values", "slopes"} & set(vars(value))
                name = next(iter(held))
                given = {k: v for k, v in vars(value).items() if k != "n_heads"}
                return type(value)(**{**given, name: move(getattr(value, name))})
            return move(value)

        q, k, v = (move(x.requires_grad_()) for x in (self.q, self.k, self.v))
        call = {name: rebuild(value) for name, value in self.call.items()}
        return Case(q, k, v, call, self.sees, self.adds)

    def leaves(self) -> list[Tensor]:
        """Every tensor that asks for a gradient."""
        found = [self.q, self.k, self.v]
        for value in self.call.values():
            inside = (
                [value]
                if isinstance(value, Tensor)
                else list(getattr(value, "__dict__", {}).values())
            )
            found += [x for x in inside if isinstance(x, Tensor) and x.requires_grad]
        return found


def dense_mask(case: Case) -> Tensor:
    """Which pairs may be seen, filled in one by one."""
    shape = (case.q.shape[0], case.q.shape[1], case.q.shape[2], case.k.shape[2])
    seen = torch.ones(shape, dtype=torch.bool)
    if case.sees is not None:
        for b, h, t, s in torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist():
            seen[b, h, t, s] = case.sees(b, h, t + shape[3] - shape[2], s)
    return seen


def dense_bias(case: Case) -> Tensor:
    """What is added to each score, filled in one by one."""
    shape = (case.q.shape[0], case.q.shape[1], case.q.shape[2], case.k.shape[2])
    added = torch.zeros(shape, dtype=torch.float64)
    if case.adds is not None:
        for b, h, t, s in torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist():
            added[b, h, t, s] = case.adds(b, h, t + shape[3] - shape[2], s)
    return added


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and weights by the formula, every step in the type of q."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    weights = weights[..., : k.shape[2]]
    return weights @ v, weights


def draw(
    *, b: int = B, h: int = H, g: int = G, t: int = T, s: int = S, d: int = D, e: int = E
) -> Case:
    """Random inputs of the given sizes, the same in every run."""
    made = torch.Generator().manual_seed(11)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=made, dtype=torch.float64)

    return Case(normal(b, h, t, d), normal(b, g, s, d), normal(b, g, s, e))


def case(
    sees: Callable[[int, int, int, int], bool] | None = None,
    adds: Callable[[int, int, int, int], float] | None = None,
    sizes: dict[str, int] | None = None,
    **call: Any,
) -> Case:
    """A case from what the user writes and what it means."""
    made = draw(**(sizes or {}))
    made.call, made.sees, made.adds = call, sees, adds
    return made


def t5_bucket_by_hand(distance: int, n_buckets: int, max_distance: int) -> int:
    """The bucket of j - i, both directions, as T5's paper tells it."""
    half = n_buckets // 2
    start = half if distance > 0 else 0
    far, exact = abs(distance), half // 2
    if far < exact:
        return start + far
    grown = math.log(far / exact) / math.log(max_distance / exact) * (half - exact)
    return start + min(exact + int(grown + 1e-9), half - 1)


def make_cases() -> dict[str, Callable[[], Case]]:
    """Every feature by name."""
    noise = torch.Generator().manual_seed(5)
    lengths = torch.tensor([29, 0])
    ids = (torch.arange(S) // 17).expand(B, S).clone()
    ids[1] = (torch.arange(S) * 7) % 3
    coin = torch.rand(B, H, T, S, generator=noise) < 0.6
    row_coin = torch.rand(T, S, generator=noise) < 0.6
    added = torch.randn(H, T, S, generator=noise, dtype=torch.float64)
    holes = torch.where(row_coin, added[0], -math.inf)
    lowest = torch.where(row_coin, added[0], torch.finfo(torch.float64).min)
    table = torch.randn(32, H, generator=noise, dtype=torch.float64)
    slopes = torch.rand(H, generator=noise, dtype=torch.float64)
    sinks = torch.randn(H, generator=noise, dtype=torch.float64)
    at_q, at_k = torch.randint(0, 60, (B, T), generator=noise), torch.arange(S) - 3
    published = [2 ** (-8 * n / 4) for n in (1, 2, 3, 4)] + [2 ** (-8 * n / 8) for n in (1, 3)]
    grad = {"learned": True}

    def off(t: int) -> int:
        return t - (S - T)

    return {
        "plain": lambda: case(),
        "causal": lambda: case(lambda b, h, i, j: j <= i, mask=Causal()),
        "causal from the start": lambda: case(
            lambda b, h, i, j: j <= off(i), mask=Causal(align="start")
        ),
        "causal square": lambda: case(lambda b, h, i, j: j <= i, sizes={"s": T}, mask=Causal()),
        "window": lambda: case(lambda b, h, i, j: i - 5 <= j <= i + 3, mask=Window(5, 3)),
        "window of itself": lambda: case(lambda b, h, i, j: j == i, mask=Window(0, 0)),
        "open window": lambda: case(lambda b, h, i, j: j >= i - 5, mask=Window(5, None)),
        "lengths": lambda: case(lambda b, h, i, j: j < lengths[b], mask=Lengths(lengths)),
        "lengths left": lambda: case(
            lambda b, h, i, j: j >= S - lengths[b], mask=Lengths(lengths, side="left")
        ),
        "documents": lambda: case(
            lambda b, h, i, j: bool(ids[b, i] == ids[b, j]), mask=Documents(ids)
        ),
        "prefix": lambda: case(lambda b, h, i, j: j <= i or j < 31, mask=Causal() | Prefix(31)),
        "prefix of each sample": lambda: case(
            lambda b, h, i, j: j <= i or j < (40, 3)[b],
            mask=Causal() | Prefix(torch.tensor([40, 3])),
        ),
        "dense": lambda: case(lambda b, h, i, j: bool(coin[b, h, off(i), j]), mask=Dense(coin)),
        "dense shared": lambda: case(lambda b, h, i, j: bool(row_coin[off(i), j]), mask=row_coin),
        "joined": lambda: case(
            lambda b, h, i, j: j <= i and not (i - 2 <= j <= i) and j < lengths[b],
            mask=Causal() & ~Window(2, 0) & Lengths(lengths),
        ),
        "given positions": lambda: case(
            lambda b, h, i, j: 0 <= j - 3 <= int(at_q[b, off(i)]), mask=Causal().at(at_q, at_k)
        ),
        "alibi": lambda: case(None, lambda b, h, i, j: -published[h] * abs(i - j), bias=ALiBi(H)),
        "alibi causal": lambda: case(
            lambda b, h, i, j: j <= i,
            lambda b, h, i, j: -published[h] * abs(i - j),
            bias=ALiBi(H),
            mask=Causal(),
        ),
        "alibi learned": lambda: case(
            None,
            lambda b, h, i, j: -float(slopes[h]) * abs(i - j),
            bias=ALiBi(slopes=slopes.clone().requires_grad_()),
        ),
        "alibi given positions": lambda: case(
            None,
            lambda b, h, i, j: -published[h] * abs(int(at_q[b, off(i)]) - (j - 3)),
            bias=ALiBi(H).at(at_q, at_k),
        ),
        "relative table": lambda: case(
            None,
            lambda b, h, i, j: float(table[t5_bucket_by_hand(j - i, 32, 128), h]),
            bias=RelativeTable(table),
        ),
        "relative table learned": lambda: case(
            None,
            lambda b, h, i, j: float(table[t5_bucket_by_hand(j - i, 32, 128), h]),
            bias=RelativeTable(table.clone().requires_grad_()),
        ),
        "dense bias": lambda: case(
            None, lambda b, h, i, j: float(added[h, off(i), j]), bias=DenseBias(added)
        ),
        "dense bias learned": lambda: case(
            None,
            lambda b, h, i, j: float(added[h, off(i), j]),
            bias=DenseBias(added.clone().requires_grad_()),
        ),
        "bias of -inf": lambda: case(None, lambda b, h, i, j: float(holes[off(i), j]), bias=holes),
        "bias of the lowest number": lambda: case(
            None, lambda b, h, i, j: float(holes[off(i), j]), bias=lowest
        ),
        "two biases": lambda: case(
            None,
            lambda b, h, i, j: float(added[h, off(i), j]) - published[h] * abs(i - j),
            bias=DenseBias(added) + ALiBi(H),
        ),
        "scale": lambda: case(scale=0.7),
        "negative scale": lambda: case(lambda b, h, i, j: j <= i, scale=-0.7, mask=Causal()),
        "zero scale": lambda: case(lambda b, h, i, j: j <= i, scale=0.0, mask=Causal()),
        "softcap": lambda: case(softcap=1.3),
        "sinks": lambda: case(sinks=sinks.clone().requires_grad_()),
        "one group": lambda: case(sizes={"g": 1}),
        "no groups": lambda: case(sizes={"g": H}),
        "wide values": lambda: case(sizes={"e": 13}),
        "narrow values": lambda: case(sizes={"e": 3}),
        "more queries than keys": lambda: case(
            lambda b, h, i, j: j <= i, sizes={"t": 53, "s": 37}, mask=Causal()
        ),
        "one query": lambda: case(lambda b, h, i, j: j <= i, sizes={"t": 1}, mask=Causal()),
        "one of everything": lambda: case(
            sizes={"b": 1, "h": 1, "g": 1, "t": 1, "s": 1, "d": 1, "e": 1}
        ),
        "no batch": lambda: case(sizes={"b": 0}, mask=Causal()),
        "no queries": lambda: case(sizes={"t": 0}),
        "no keys": lambda: case(sizes={"s": 0}),
        "everything": lambda: case(
            lambda b, h, i, j: j <= i and j < (29, 47)[b],
            lambda b, h, i, j: float(added[h, off(i), j]),
            sizes={"e": 13},
            mask=Causal() & Lengths(torch.tensor([29, 47])),
            bias=DenseBias(added.clone().requires_grad_(grad["learned"])),
            scale=0.4,
            softcap=2.1,
            sinks=sinks.clone().requires_grad_(),
        ),
    }


CASES = make_cases()
