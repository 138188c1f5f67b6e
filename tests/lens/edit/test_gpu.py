"""Edits on a GPU: forbidden looks in long texts, on the kernels that run without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import Block, Causal, Dense

pytestmark = pytest.mark.gpu

N = 131_072
GIB = 2**30


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return regard.attention(q, k, k, mask=Causal())


def test_looks_are_forbidden_in_131072_tokens_without_a_matrix() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 8, N, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2, N, 64, device="cuda", dtype=torch.bfloat16)
    rows, hidden = (7, 70_001, N - 1), torch.tensor([3, 1_000, 70_000], device="cuda")
    edits = Block(rows, hidden.tolist()), Block(slice(N - 300, None), slice(0, 2), heads=(1, 6))
    module = Attend()
    with torch.no_grad():
        before = module(q, k)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() + before.nbytes
        with regard.edit(module, *edits):
            got = module(q, k)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held < GIB
    kept = torch.ones(N, dtype=torch.bool, device="cuda")
    kept[list(rows)] = kept[N - 300 :] = False
    assert torch.equal(got[:, :, kept], before[:, :, kept])
    for row in (7, 70_001, N - 200, N - 1):
        seen = (torch.arange(N, device="cuda") <= row).expand(8, N).clone()
        if row in rows:
            seen[:, hidden] = False
        if row >= N - 300:
            seen[[1, 6], :2] = False
        keys = k.double().repeat_interleave(4, 1)[0]
        scores = torch.einsum("hd,hsd->hs", q[0, :, row].double(), keys) / 8
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        want = torch.einsum("hs,hsd->hd", weights, keys)
        # A few roundings of bfloat16's: of the weights, and of the output.
        bound = 4 * torch.finfo(torch.bfloat16).eps * float(want.abs().max())
        assert float((got[0, :, row] - want).abs().max()) <= bound


@pytest.mark.parametrize("queries", [(3, 200), slice(100, None)])
def test_rows_few_and_many_are_those_of_a_dense_mask(queries: Any) -> None:
    q = torch.randn(2, 4, 257, 64, device="cuda")
    module = Attend()
    seen = torch.ones(257, 257, device="cuda").tril().bool()
    rows = torch.zeros(257, dtype=torch.bool, device="cuda")
    rows[list(queries) if isinstance(queries, tuple) else queries] = True
    seen &= ~(rows[:, None] & (torch.arange(257, device="cuda") % 5 == 2))
    with torch.no_grad(), regard.edit(module, Block(queries, slice(2, None, 5))):
        got = module(q, q)
    want = regard.attention(*(x.double() for x in (q, q, q)), mask=Dense(seen))
    assert float((got - want).abs().max()) < 1e-3
