"""Any edits, of any call, on every backend and in every cache: what the plain formula gives.

Hypothesis draws the calls and the edits; what these mean is filled in here pair by pair, and shares
nothing with the package. The compiled backends and our kernels are in `ops/test_edit_hook.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import plain
from torch import Tensor, nn

import regard
from regard import Ablate, Block, Causal, KVCache, MultiHeadAttention, Patch, Window
from regard.ops import Dense, DenseBias, Lengths

H, G, D = 4, 2, 5
BACKENDS = ("auto", "reference", "blockwise", "sdpa")


class Attend(nn.Module):
    def __init__(self, **call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, **self.call)


@dataclass
class Asked:
    """A call of attention, and the same as dense tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: dict[str, Any]
    seen: Tensor
    bias: Tensor | None


def normal(seed: int, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def calls(draw: st.DrawFn) -> Asked:
    """Rows of T queries at the end of S keys, under some rule."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    S = T + draw(st.sampled_from([0, 0, 0, 1, 2, 4]))
    seed = draw(st.integers(0, 999))
    i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)[None]
    rule = draw(st.sampled_from(["none", "causal", "window", "lengths", "dense", "bias"]))
    seen, call, bias = torch.ones(B, H, T, S, dtype=torch.bool), {}, None
    if rule == "causal":
        call, seen = {"mask": Causal()}, seen & (j <= i)
    elif rule == "window":
        call, seen = {"mask": Window(2, 1)}, seen & (j >= i - 2) & (j <= i + 1)
    elif rule == "lengths":
        lengths = torch.randint(1, S + 1, (B,), generator=torch.Generator().manual_seed(seed))
        call, seen = {"mask": Lengths(lengths)}, seen & (j < lengths[:, None, None, None])
    elif rule == "dense":
        coin = normal(seed + 1, B, H, T, S) < 0.7
        call, seen = {"mask": Dense(coin)}, coin
    elif rule == "bias":
        bias = normal(seed + 1, H, T, S)
        call = {"bias": DenseBias(bias)}
    if draw(st.booleans()):
        call["softcap"] = 1.7
    q, k, v = normal(seed, B, H, T, D), normal(seed + 2, B, G, S, D), normal(seed + 3, B, G, S, D)
    return Asked(q, k, v, call, seen, bias)


def wheres(first: int, last: int) -> st.SearchStrategy[Any]:
    """Positions from first to last, which is that of the last token, in any way of saying it."""
    number = st.integers(first, last) | st.integers(first - last - 1, -1)
    runs = st.tuples(st.integers(first, last), st.integers(first, last), st.integers(1, 3))
    spans = runs.map(lambda x: range(min(x[:2]), max(x[:2]) + 1, x[2]))
    slices = runs.map(lambda x: slice(min(x[:2]), None if x[2] == 1 else max(x[:2]) + 1, x[2]))
    one = number | spans | slices
    return one | st.lists(one, min_size=1, max_size=3).map(tuple)


def expand(where: Any, n_tokens: int) -> set[int]:
    """The positions that are meant, in a text of so many tokens."""
    parts = where if isinstance(where, tuple) else (where,)
    every = range(n_tokens)
    return {
        at
        for part in parts
        for at in (every[part] if isinstance(part, slice) else part if isinstance(part, range)
                   else [every[part]])
    }  # fmt: skip


heads = st.none() | st.integers(0, H - 1) | st.sets(st.integers(0, H - 1), min_size=1).map(tuple)


def edits(asked: Asked, source: Any) -> st.SearchStrategy[Any]:
    T, S = asked.seen.shape[2:]
    queries, keys = wheres(S - T, S - 1), wheres(0, S - 1)
    layers = st.sampled_from([None, 0, "", (0, "")])
    blocks = st.builds(Block, queries, keys, layers, heads)
    to = st.sampled_from(["zero", "mean"] if T == S else ["zero"])
    off = st.builds(Ablate, layers, heads, to)
    other = st.builds(
        lambda layer, head, at: Patch(layer, head, source=source, positions=at),
        *(layers, heads, queries),
    )
    return st.lists(blocks | off | other, min_size=1, max_size=4)


def numbers_of(some: Any) -> list[int]:
    return list(range(H)) if some is None else [some] if isinstance(some, int) else list(some)


def apply(asked: Asked, chosen: list[Any], source: Tensor) -> Tensor:
    """What the edits mean: looks are forbidden first, then heads are changed in their order."""
    B, _, T, S = asked.seen.shape
    seen = asked.seen.clone()
    for each in chosen:
        if isinstance(each, Block):
            for at in expand(each.queries, S):
                for key in expand(each.keys, S):
                    seen[:, numbers_of(each.heads), at - (S - T), key] = False
    softcap = asked.call.get("softcap")
    out, _ = plain(asked.q, asked.k, asked.v, seen, asked.bias, None, softcap)
    for each in chosen:
        for head in numbers_of(getattr(each, "heads", ())):
            if isinstance(each, Patch):
                for at in expand(each.positions, S):
                    out[:, head, at - (S - T)] = source[:, head, at]
            elif isinstance(each, Ablate) and each.to == "zero":
                out[:, head] = 0.0
            elif isinstance(each, Ablate):
                for b in range(B):
                    # Tokens that may not see themselves in the first head's rule are padding.
                    real = [t for t in range(T) if asked.seen[b, 0, t, t + S - T]] or range(T)
                    out[b, head] = out[b, head, list(real)].mean(0)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_edits_of_any_call_are_the_formulas(backend: str, data: st.DataObject) -> None:
    asked = data.draw(calls())
    if backend == "sdpa":
        asked.call.pop("softcap", None)  # which it refuses, with and without edits
    module = Attend(**asked.call, backend=backend)
    inputs = asked.q, asked.k, asked.v
    whole = normal(7, asked.q.shape[0], H, asked.k.shape[2], D)
    with regard.head_outputs(plainly := Attend()) as source:
        plainly(whole, asked.k, asked.v)
    chosen = data.draw(edits(asked, source))
    before = module(*inputs)
    with regard.edit(module, *chosen):
        got = module(*inputs)
    want = apply(asked, chosen, source[""])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    untouched = [
        head for head in range(H) if not any(head in numbers_of(each.heads) for each in chosen)
    ]
    assert torch.equal(got[:, untouched], before[:, untouched])
    assert torch.equal(module(*inputs), before)
    with regard.edit(module):
        assert torch.equal(module(*inputs), before)


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    kind=st.sampled_from(["growing", "fixed", "windowed"]),
    queries=st.integers(0, 9),
    keys=wheres(0, 8),
    head=heads,
    off=heads,
)
def test_any_edits_in_any_cache_are_those_of_the_whole_text(
    cuts: list[int], kind: str, queries: int, keys: Any, head: Any, off: Any
) -> None:
    """Positions are absolute, however a text is cut into calls; what it has not yet is a slice."""
    torch.manual_seed(3)
    n, window = sum(cuts), (4, 0) if kind == "windowed" else None
    layer = MultiHeadAttention(12, H, causal=True, window=window).double()
    x = normal(5, 1, n, 12)
    ahead = expand(keys, 9) & set(range(n))
    made = {"growing": KVCache.growing, "fixed": lambda: KVCache.fixed(n + 3)}
    cache = made[kind]() if kind in made else KVCache.windowed(4)
    block = Block(slice(queries, None), tuple(slice(at, at + 1) for at in sorted(ahead)) or 0)
    chosen = [Block(block.queries, block.keys, heads=head), Ablate(0, off)]
    if queries >= n or not ahead:
        chosen = chosen[1:]
    with torch.no_grad(), regard.edit(layer, *chosen):
        want = layer(x)
        got = torch.cat([layer(part, cache=cache) for part in x.split(cuts, 1)], 1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
