"""Calls as kernels read them: documents, what lies between two rows, and how rows lie in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import LAYOUTS, lay_out
from torch import Tensor

from regard.ops import Causal, Documents, Lengths, Mask, Prefix, Window
from regard.ops.call import make_call
from regard.ops.kernels.rendered import aligned, find_documents, render
from regard.ops.shape import Shape

MOST = 2**63 - 1
CPU = torch.device("cpu")


def documents(ids: Any, query_ids: Any = None) -> tuple[Documents, Shape]:
    ids = torch.tensor(ids)
    mask = Documents(ids, None if query_ids is None else torch.tensor(query_ids))
    queries = ids if mask.query_ids is None else mask.query_ids
    return mask, Shape(2, 1, queries.shape[-1], ids.shape[-1])


RUNS: dict[str, tuple[Any, Any]] = {
    "ascending": ([0, 0, 3, 3, 3, 7], None),
    "padding at the end": ([1, 1, 2, 4, 4, 0], None),
    "padding at the beginning": ([-1, -1, 2, 2, 3, 3], None),
    "one document": ([5, 5, 5], None),
    "as far apart as ids can be": ([0, 0, MOST, -MOST - 1, -1], None),
    "one row of ids for each sample": ([[0, 0, 1, 1], [2, 0, 0, 1]], None),
    "queries of their own": ([0, 0, 2, 2, 5], [5, 0, 1, 9, 2, 2, -3]),
    "keys for all, queries for each sample": ([0, 0, 2, 2, 5], [[5, 0], [2, 1]]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_documents_run_of_keys_is_what_its_queries_see(name: str) -> None:
    mask, shape = documents(*RUNS[name])
    lo, hi, scattered = find_documents(mask, shape, CPU)
    assert not scattered.any()
    j = torch.arange(shape.S)
    found = (j >= lo[..., None]) & (j < hi[..., None])
    assert torch.equal(found[:, None].expand(2, 1, shape.T, shape.S), seen_of(mask, shape))


def seen_of(mask: Mask, shape: Shape) -> Tensor:
    return mask.dense(shape).expand(shape)


@pytest.mark.parametrize("ids", [[1, 0, 1], [0, 1, 2, 0], [1, 2, 0, 1], [3, 2, 1, 0, 3]])
def test_a_document_in_two_runs_is_told(ids: list[int]) -> None:
    """Each has an id in two runs; the last sample shows that one sample does not mark another."""
    mask, shape = documents([ids, sorted(ids)])
    lo, hi, scattered = find_documents(mask, shape, CPU)
    assert scattered.tolist() == [True, False]
    assert lo[0].eq(0).all() and hi[0].eq(shape.S).all(), "where ids decide, no key is left out"


JOINED: dict[str, tuple[Mask | None, int, bool]] = {
    "no mask": (None, 7, True),
    "causal": (Causal(), 5, True),
    "causal from the start": (Causal(align="start"), 5, True),
    "a window": (Window(2, 0), 5, True),
    "documents": (Documents(torch.arange(7) // 3), 7, True),
    "documents, causal, padded": (
        Documents(torch.arange(7) // 3) & Causal() & Lengths(torch.tensor([6])), 7, True,
    ),
    "documents of the last queries": (Documents(torch.arange(7) // 3), 5, False),
    "documents of queries": (
        Documents(torch.arange(7) // 3, torch.tensor([0, 0, 2, 2, 2, 2, 2])), 7, False,
    ),
    "documents that see the past": (
        Documents(torch.arange(7) // 3) & Causal().at(torch.arange(7) - 2), 7, False,
    ),
    "a window at positions": (Window(1, 0).at(torch.tensor([0, 1, 2, 5, 6])), 5, False),
    "a prefix": (Causal() | Prefix(2), 5, True),
    "a prefix, padded on the left": (
        (Causal() | Prefix(2)) & Lengths(torch.tensor([6]), side="left"), 7, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_keys_between_those_of_two_queries_are_told_of(name: str) -> None:
    mask, T, is_joined = JOINED[name]
    q, k = torch.zeros(1, 1, T, 2), torch.zeros(1, 1, 7, 2)
    given = render(make_call(q, k, k, mask=mask))
    assert given.joined == is_joined
    if is_joined and mask is not None:
        seen = seen_of(mask, given.shape)[0, 0]
        for t in range(T - 1):
            some = (seen[t] | seen[t + 1]).nonzero()[:, 0]
            assert len(some) == 0 or len(some) == some[-1] - some[0] + 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 13, 64, 72, 80, 128])
def test_half_types_are_laid_out_as_tiles_are_loaded_by_vectors(width: int, layout: str) -> None:
    x = lay_out(torch.randn(2, 3, 5, width).bfloat16(), layout)
    found = aligned(x)
    assert found[..., :width].equal(x) and not found[..., width:].any()
    assert found.shape[3] % 16 == 0 and found.stride(3) == 1 and found.data_ptr() % 16 == 0
    assert all(step % 16 == 0 for step in found.stride()[:3])


def test_what_is_aligned_is_not_copied() -> None:
    x = torch.randn(2, 5, 3, 80).half().transpose(1, 2)
    packed = torch.randn(2, 5, 3, 3, 64).bfloat16()[:, :, 1].transpose(1, 2)
    for given in (
        x,
        packed,
        x[:, :1].expand(2, 6, 5, 80),
        x[:, :, 2:],
        x.float()[..., 3:7],
        x[..., :0],
    ):
        assert aligned(given) is given
