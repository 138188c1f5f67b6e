"""A mask of forbidden looks says the same pair by pair, in tiles, and of whole tiles."""

from __future__ import annotations

import pytest
import torch
from plain import plain

from regard.ops import Causal, Dense, attention
from regard.ops.blocked import Blocked
from regard.ops.shape import Shape, Tile
from regard.ops.term import Cut

SHAPE = Shape(2, 3, 11, 17)


def make(seed: int = 1) -> Blocked:
    drawn = torch.Generator().manual_seed(seed)
    queries = torch.rand(2, 3, 11, generator=drawn) < 0.3
    return Blocked(queries, torch.rand(2, 1, 17, generator=drawn) < 0.3)


def test_pairs_and_tiles_agree() -> None:
    mask = make()
    want = ~(mask.queries[..., None] & mask.keys[..., None, :])
    assert torch.equal(mask.dense(SHAPE), want)
    b, h, t, j = (torch.arange(n) for n in SHAPE)
    index = b[:, None, None, None], h[:, None, None], t[:, None] + SHAPE.offset, j
    assert torch.equal(mask.allows(*index, SHAPE), want)
    assert torch.equal(
        mask.block(SHAPE, Tile(2, 5, 3, 9), torch.device("cpu")), want[:, :, 2:5, 3:9]
    )


def test_only_tiles_with_a_forbidden_pair_are_mixed() -> None:
    queries, keys = torch.zeros(1, 3, 11).bool(), torch.zeros(2, 1, 17).bool()
    queries[0, 1, 4] = queries[0, 2, 9] = keys[0, 0, 2] = keys[1, 0, 13] = True
    want = torch.full((4, 5), 2, dtype=torch.int8)
    want[[[1], [3]], [0, 3]] = 1
    assert torch.equal(Blocked(queries, keys).tiles(SHAPE, 3, 4), want)


def test_it_is_cut_to_rows_heads_and_keys() -> None:
    mask = make()
    cut = mask.cut(Cut(row=1, heads=torch.tensor([2]), keys=slice(3, 9)))
    want = mask.dense(SHAPE)[1:2, 2:3, :, 3:9]
    assert torch.equal(cut.dense(Shape(1, 1, 11, 6)), want)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_backends_take_it_as_they_take_a_matrix(backend: str) -> None:
    q, k = torch.randn(2, 3, 11, 5).double(), torch.randn(2, 3, 17, 5).double()
    mask = make(7) & Causal()
    got = attention(q, k, k, mask=mask, backend=backend)
    seen = mask.dense(SHAPE)
    assert torch.allclose(got, plain(q, k, k, seen)[0], atol=1e-12)
    assert torch.allclose(got, attention(q, k, k, mask=Dense(seen)), atol=1e-12)
