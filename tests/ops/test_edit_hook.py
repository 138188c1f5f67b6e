"""Edited calls are the plain formula's with those pairs hidden, on every backend, and cost little.

The kernels for GPUs run by Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import run_interpreted
from plain import CASES, Case, dense_bias, dense_mask, plain
from torch import Tensor, nn

import regard
from regard import Block, Causal, Wants
from regard.ops import call_hook, edit_hook
from regard.ops.call import Rule

BACKENDS = ("auto", "reference", "blockwise", "sdpa", "flex")
USED = (
    *("plain", "causal", "causal square", "window", "lengths", "documents", "prefix", "dense"),
    *("joined", "alibi causal", "relative table", "bias of -inf", "two biases", "negative scale"),
    *("softcap", "sinks", "one group", "wide values", "more queries than keys", "one query"),
    *("no keys", "everything"),
)
EDITS = (Block((-1, 17, 19), (0, 5), heads=(1, 4)), Block(slice(20, None), slice(3, 30, 2)))


class Attend(nn.Module):
    """A module that attends as a case says."""

    def __init__(self, **call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, **self.call)


def hidden_pairs(case: Case) -> Tensor:
    """What EDITS forbid, (H, T, S), pair by pair."""
    (_, H, T, _), S = case.q.shape, case.k.shape[2]
    hidden = torch.zeros(H, T, S, dtype=torch.bool)
    for t in range(T):
        at = t + S - T
        for s in range(S):
            hidden[:, t, s] = at >= 20 and s in range(3, 30, 2)
            if at in (S - 1, 17, 19) and s in (0, 5):
                hidden[[1, 4], t, s] = True
    return hidden


@pytest.mark.parametrize("name", USED)
def test_forbidden_looks_are_the_formulas(name: str) -> None:
    case = CASES[name]()
    edits = EDITS if case.k.shape[2] > 5 and case.q.shape[2] > 2 else EDITS[1:]
    hidden = hidden_pairs(case)
    if len(edits) == 1:
        hidden = hidden[:1].expand_as(hidden)
    seen = dense_mask(case) & ~hidden
    numbers = {word: case.call.get(word) for word in ("scale", "softcap", "sinks")}
    want, weights = plain(case.q, case.k, case.v, seen, dense_bias(case), **numbers)
    ran = []
    for backend in BACKENDS:
        module = Attend(**case.call, backend=backend)
        try:
            before = module(case.q, case.k, case.v)
        except (ValueError, NotImplementedError):
            continue  # refused, with and without edits
        ran.append(backend)
        seen_by: list[Any] = []
        editing = regard.edit(module, *(edits if case.k.shape[2] else ()))
        with editing, call_hook.hooked(seen_by.append):
            got = module(case.q, case.k, case.v)
        assert torch.allclose(got, want, rtol=0, atol=1e-9)
        untouched = ~hidden.any(-1)
        assert torch.equal(got[:, untouched], before[:, untouched])
        # Who looks is given the call as edited.
        rule = seen_by[0].rule
        observed = regard.observe(
            *(case.q, case.k, None),
            wants=Wants(weights=True),
            **{"mask": rule.mask, "bias": rule.bias, **numbers},
        )
        assert observed.weights is not None
        assert torch.allclose(observed.weights, weights, rtol=0, atol=1e-9)
    assert {"auto", "reference", "blockwise"} <= set(ran)


def test_gradients_are_the_formulas_and_forbidden_keys_get_none() -> None:
    case = CASES["everything"]().cast(torch.float64)
    seen = dense_mask(case) & ~hidden_pairs(case)
    module = Attend(**case.call)
    with regard.edit(module, *EDITS):
        got = module(case.q, case.k, case.v)
    numbers = {word: case.call.get(word) for word in ("scale", "softcap", "sinks")}
    want, _ = plain(case.q, case.k, case.v, seen, case.call["bias"].values, **numbers)
    toward = torch.randn_like(want)
    leaves = case.leaves()
    for one, other in zip(
        torch.autograd.grad(got, leaves, toward),
        torch.autograd.grad(want, leaves, toward),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


def test_a_row_that_is_left_nothing_gives_zeros() -> None:
    q = torch.randn(1, 2, 7, 5)
    module = Attend(mask=Causal())
    with regard.edit(module, Block(3, slice(None)), Block(5, slice(0, 4), heads=1)):
        got = module(q, q, q)
    assert (got[:, :, 3] == 0).all() and not (got[:, :, 5] == 0).all()
    assert torch.isfinite(got).all()


def test_observe_tells_the_edited_weights_and_without_values_those_without() -> None:
    class Observe(nn.Module):
        def forward(self, q: Tensor, v: Tensor | None) -> Any:
            return regard.observe(q, q, v, mask=Causal(), wants=Wants(weights=True))

    module, q = Observe(), torch.randn(1, 2, 7, 5)
    with regard.edit(module, Block(5, 2)):
        edited, plainly = module(q, q), module(q, None)
    want, weights = plain(q, q, q, torch.ones(7, 7).tril().bool() & ~pair(7, 5, 2))
    assert torch.allclose(edited.weights, weights, atol=1e-6)
    assert torch.allclose(edited.output, want, atol=1e-6)
    assert plainly.weights[0, 0, 5, 2] > 0


def pair(n: int, query: int, key: int) -> Tensor:
    only = torch.zeros(n, n, dtype=torch.bool)
    only[query, key] = True
    return only


def test_nothing_the_size_of_the_matrix_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    n, sizes = 1500, []
    whole = Rule.block

    def count(self: Rule, tile: Any, like: Tensor, with_mask: bool = True) -> Tensor:
        found = whole(self, tile, like, with_mask)
        sizes.append((tile.t1 - tile.t0) * (tile.s1 - tile.s0))
        return found

    monkeypatch.setattr(edit_hook, "PIECE", 300 * n)
    q = torch.randn(1, 1, n, 4)
    module = Attend(mask=Causal())
    before = module(q, q, q)
    monkeypatch.setattr(Rule, "block", count)
    with regard.edit(module, Block((7, -1), 3)):
        few = module(q, q, q)
    assert 0 < max(sizes) <= 2 * n  # the rows alone
    rows = torch.tensor([7, n - 1])
    kept = [row for row in range(n) if row not in rows.tolist()]
    assert torch.equal(few[:, :, kept], before[:, :, kept])
    sizes.clear()
    with regard.edit(module, Block(slice(None), 3)):
        column = module(q, q, q)
    assert max(sizes) <= 300 * n
    assert torch.allclose(column[:, :, rows], few[:, :, rows], atol=1e-6)


def run_kernels() -> None:
    """The flash kernels, and the one for few queries, on an edited call."""
    from interpreted import patch_once

    from regard.ops.backends import choose
    from regard.ops.kernels import backend

    patch_once()
    backend.refuse_tensors = lambda q, width: None  # type: ignore[assignment]
    edit_hook.choose = lambda call, name: choose(call, "triton")  # type: ignore[attr-defined]
    torch.manual_seed(3)
    q, k = torch.randn(1, 4, 37, 16), torch.randn(1, 2, 37, 16)
    module = Attend(mask=Causal(), backend="triton")
    gaps = {}
    for queries in ((30, 36), slice(11, None)):
        with regard.edit(module, Block(queries, (2, 29), heads=(0, 3))):
            got = module(q, k, k)
        rows = range(37)[queries] if isinstance(queries, slice) else queries
        seen = torch.ones(37, 37).tril().bool().expand(4, 37, 37).clone()
        for head in (0, 3):
            for row in rows:
                seen[head, row, [2, 29]] = False
        want, _ = plain(*(x.double() for x in (q, k, k)), seen)
        gaps[str(queries)] = float((got - want).abs().max())
    print(json.dumps(gaps))


def test_our_kernels_compute_edited_rows_as_the_formula_does() -> None:
    gaps = run_interpreted(Path(__file__))
    assert len(gaps) == 2 and max(gaps.values()) < 1e-5, gaps


if __name__ == "__main__":
    run_kernels()
