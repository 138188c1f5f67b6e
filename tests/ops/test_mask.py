"""Masks: every rendering of every mask against pairs filled in one by one with plain Python.

`claims` writes each mask twice: as a user does, and as a sentence about one query and one key. What
a mask renders (the dense tensor, tiles of it, FlexAttention's function, the tile picture, the runs
of visible keys, the kernel's flag) must all say what the sentences say.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    Documents,
    Lengths,
    Mask,
    Prefix,
    Window,
    attention,
    blockwise,
    flash_cpu,
)
from regard.ops.call import Rule
from regard.ops.pack import pack, parse, spell, unpack
from regard.ops.shape import SampleTile, Shape, Tile

Sees = Callable[[int, int, int, int], bool]

B, H = 3, 5
SHAPES = {
    "more keys": Shape(B, H, 7, 11),
    "more queries": Shape(B, H, 11, 7),
    "square": Shape(B, H, 7, 7),
    "one query": Shape(B, H, 1, 13),
}


@functools.cache
def claims(shape: Shape) -> dict[str, tuple[Mask, Sees]]:
    """Each mask with what it says of sample b, head h, a query at position i and a key j."""
    T, S, off = shape.T, shape.S, shape.offset
    made = torch.Generator().manual_seed(7)

    def whole(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=made)

    lengths, prefixes = [S - 2, 0, 3], [2, 0, S + 3]
    runs = (torch.arange(S) * 3 // S).tolist()
    packed = [runs, [4] * 2 + [1] * (S - 2), [2] * S]
    mixed = whole(0, 3, B, S).tolist()
    asking, asking_b = whole(0, 3, T).tolist(), whole(0, 3, B, T).tolist()
    at_t, at_bt = whole(0, S + 2, T).tolist(), whole(-1, S + 2, B, T).tolist()
    at_s, at_bs = [s - 2 for s in range(S)], whole(-2, S, B, S).tolist()
    coin, flat = whole(0, 2, B, H, T, S).bool(), whole(0, 2, T, S).bool()
    keys, heads = whole(0, 2, S).bool(), whole(0, 2, B, H, 1, 1).bool()
    column = whole(0, 2, B, 1, T, 1).bool()
    c, w = Causal(), Window(2, 1)
    n = torch.tensor
    found: dict[str, tuple[Mask, Sees]] = {
        "causal": (c, lambda b, h, i, j: j <= i),
        "causal from the start": (Causal(align="start"), lambda b, h, i, j: j <= i - off),
        "window": (w, lambda b, h, i, j: i - 2 <= j <= i + 1),
        "window of itself": (Window(0, 0), lambda b, h, i, j: i == j),
        "window open left": (Window(None, 2), lambda b, h, i, j: j <= i + 2),
        "window open right": (Window(3, None), lambda b, h, i, j: j >= i - 3),
        "window open": (Window(None, None), lambda b, h, i, j: True),
        "lengths": (Lengths(n(lengths)), lambda b, h, i, j: j < lengths[b]),
        "lengths left": (Lengths(n(lengths), "left"), lambda b, h, i, j: j >= S - lengths[b]),
        "one length": (Lengths(n([5])), lambda b, h, i, j: j < 5),
        "prefix": (Prefix(4), lambda b, h, i, j: j < 4),
        "empty prefix": (Prefix(0), lambda b, h, i, j: False),
        "long prefix": (Prefix(S + 5), lambda b, h, i, j: True),
        "prefix of each": (Prefix(n(prefixes)), lambda b, h, i, j: j < prefixes[b]),
        "dense": (Dense(coin), lambda b, h, i, j: bool(coin[b, h, i - off, j])),
        "dense of pairs": (Dense(flat), lambda b, h, i, j: bool(flat[i - off, j])),
        "dense of keys": (Dense(keys), lambda b, h, i, j: bool(keys[j])),
        "dense of heads": (Dense(heads), lambda b, h, i, j: bool(heads[b, h, 0, 0])),
        "dense of queries": (Dense(column), lambda b, h, i, j: bool(column[b, 0, i - off, 0])),
        "dense of one": (Dense(n(True)), lambda b, h, i, j: True),
        "asked documents": (
            Documents(n(runs), query_ids=n(asking)),
            lambda b, h, i, j: asking[i - off] == runs[j],
        ),
        "asked documents of each": (
            Documents(n(mixed), query_ids=n(asking_b)),
            lambda b, h, i, j: asking_b[b][i - off] == mixed[b][j],
        ),
        "causal at": (c.at(n(at_t)), lambda b, h, i, j: j <= at_t[i - off]),
        "start at": (Causal("start").at(n(at_t)), lambda b, h, i, j: j <= at_t[i - off]),
        "causal at each": (c.at(n(at_bt)), lambda b, h, i, j: j <= at_bt[b][i - off]),
        "window at slots": (
            w.at(n(at_bt), n(at_s)),
            lambda b, h, i, j: at_s[j] >= 0 and -2 <= at_s[j] - at_bt[b][i - off] <= 1,
        ),
        "prefix language model": (
            Causal() | Prefix(n(prefixes)),
            lambda b, h, i, j: j <= i or j < prefixes[b],
        ),
        "prefix at slots": (
            Prefix(n(prefixes)).at(n(at_t), n(at_bs)),
            lambda b, h, i, j: 0 <= at_bs[b][j] < prefixes[b],
        ),
        "joined at slots": (
            (c & ~w | Prefix(2)).at(n(at_bt), n(at_bs)),
            lambda b, h, i, j: (
                at_bs[b][j] >= 0 and (at_bs[b][j] < at_bt[b][i - off] - 2 or at_bs[b][j] in (0, 1))
            ),
        ),
        "and": (c & Lengths(n(lengths)), lambda b, h, i, j: j <= i and j < lengths[b]),
        "and of each": (
            w & Prefix(n(prefixes)) & Lengths(n(lengths), "left"),
            lambda b, h, i, j: i - 2 <= j <= i + 1 and S - lengths[b] <= j < prefixes[b],
        ),
        "or": (c | Prefix(n(prefixes)), lambda b, h, i, j: j <= i or j < prefixes[b]),
        "not": (~w, lambda b, h, i, j: not i - 2 <= j <= i + 1),
        "not not": (~~c, lambda b, h, i, j: j <= i),
        "nested": (
            ~(c & ~Dense(flat)) & (w | Lengths(n(lengths))),
            lambda b, h, i, j: (
                (j > i or bool(flat[i - off, j])) and (i - 2 <= j <= i + 1 or j < lengths[b])
            ),
        ),
        "at joined to memory": (
            c.at(n(at_bt)) & Lengths(n(lengths)) | ~Prefix(5),
            lambda b, h, i, j: (j <= at_bt[b][i - off] and j < lengths[b]) or j >= 5,
        ),
    }
    if T <= S:
        found |= {
            "documents": (Documents(n(runs)), lambda b, h, i, j: runs[i] == runs[j]),
            "packed documents": (
                Documents(n(packed)),
                lambda b, h, i, j: packed[b][i] == packed[b][j],
            ),
            "mixed documents": (Documents(n(mixed)), lambda b, h, i, j: mixed[b][i] == mixed[b][j]),
            "causal documents": (
                Documents(n(packed)) & c,
                lambda b, h, i, j: packed[b][i] == packed[b][j] and j <= i,
            ),
        }
    return found


@functools.cache
def pairs(name: str, shape: Shape) -> Tensor:
    """Which pairs the sentence allows, (B, H, T, S), one by one."""
    sees = claims(shape)[name][1]
    return torch.tensor(
        [
            [
                [[sees(b, h, t + shape.offset, j) for j in range(shape.S)] for t in range(shape.T)]
                for h in range(shape.H)
            ]
            for b in range(shape.B)
        ]
    )


every_mask = pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, id=f"{name}-{kind}".replace(" ", "_"))
        for kind, shape in SHAPES.items()
        for name in claims(shape)
    ],
)

EXACT = {
    *("causal", "causal from the start", "window", "window of itself", "window open left"),
    *("window open right", "window open", "lengths", "lengths left", "one length", "prefix"),
    *("empty prefix", "long prefix", "prefix of each", "documents", "dense", "dense of pairs"),
    *("dense of keys", "dense of heads", "dense of queries", "dense of one", "not", "not not"),
}
ONE_RUN = {
    *(EXACT - {"dense", "dense of pairs", "dense of keys", "dense of heads", "dense of queries"}),
    *("packed documents", "causal documents", "causal at", "start at", "causal at each"),
    *("and", "and of each", "prefix language model"),
} - {"dense of one", "not", "not not"}


@every_mask
def test_dense_says_what_the_sentence_says_of_every_pair(name: str, shape: Shape) -> None:
    dense = claims(shape)[name][0].dense(shape)
    assert dense.dtype == torch.bool
    assert torch.equal(dense.expand(*shape), pairs(name, shape))


@every_mask
def test_block_is_the_tile_of_dense(name: str, shape: Shape) -> None:
    mask, whole = claims(shape)[name][0], pairs(name, shape)
    made = torch.Generator().manual_seed(3)
    for _ in range(5):
        (t0, t1), (s0, s1) = (
            sorted(torch.randint(0, n + 1, (2,), generator=made).tolist()) for n in shape[2:]
        )
        tile = Tile(t0, t1, s0, s1)
        block = mask.block(shape, tile, torch.device("cpu"))
        assert torch.equal(block.expand(B, H, t1 - t0, s1 - s0), whole[:, :, t0:t1, s0:s1])
        for b in range(B):
            one = mask.block(shape, SampleTile.of(tile, b, b + 1), torch.device("cpu"))
            assert torch.equal(one.expand(1, H, t1 - t0, s1 - s0), whole[b, None, :, t0:t1, s0:s1])


@every_mask
def test_flex_function_answers_for_single_indices(name: str, shape: Shape) -> None:
    mask, whole = claims(shape)[name][0], pairs(name, shape)
    ask = mask.flex(shape)
    made = torch.Generator().manual_seed(5)
    for place in torch.randint(0, whole.numel(), (29,), generator=made).tolist():
        b, h, t, j = (int(x) for x in torch.unravel_index(torch.tensor(place), whole.shape))
        answer = ask(*(torch.tensor(x) for x in (b, h, t, j)))
        assert answer.shape == ()
        assert bool(answer) == bool(whole[b, h, t, j]), (b, h, t, j)


@every_mask
def test_tile_picture_calls_no_tile_empty_or_full_that_is_not(name: str, shape: Shape) -> None:
    for height, width in ((1, 1), (3, 2), (2, 5), (5, 3), (101, 103)):
        compare_picture(name, shape, height, width)


def compare_picture(name: str, shape: Shape, height: int, width: int) -> None:
    """The picture is right where it knows, and knows all where that can be told from the edges."""
    picture = claims(shape)[name][0].tiles(shape, height, width)
    whole = pairs(name, shape)
    truth = torch.tensor(
        [
            [
                2 if tile.all() else int(tile.any())
                for s in range(0, shape.S, width)
                for tile in [whole[:, :, t : t + height, s : s + width]]
            ]
            for t in range(0, shape.T, height)
        ]
    )
    assert picture.shape == truth.shape
    assert ((picture == truth) | (picture == 1)).all(), f"{picture}\nbut\n{truth}"
    if name in EXACT:
        assert torch.equal(picture.long(), truth), f"{picture}\nbut\n{truth}"


@every_mask
def test_interval_is_the_run_of_visible_keys(name: str, shape: Shape) -> None:
    i = torch.arange(shape.T)[None] + shape.offset
    run = claims(shape)[name][0].interval(i, shape)
    assert (run is not None) or name not in ONE_RUN, "one run, but not told as one"
    if run is None:
        return
    low, high = (x.expand(B, shape.T)[:, None, :, None] for x in run)
    j = torch.arange(shape.S)
    assert torch.equal(((low <= j) & (j < high)).expand(*shape), pairs(name, shape))


@every_mask
def test_causal_flag_is_raised_only_where_torch_means_this_mask(name: str, shape: Shape) -> None:
    flag = claims(shape)[name][0].is_causal_flag(shape)
    assert flag == (name == "causal from the start" or (name == "causal" and shape.T == shape.S))
    if flag:
        lower = torch.ones(shape.T, shape.S, dtype=torch.bool).tril()
        assert torch.equal(pairs(name, shape), lower.expand(*shape))


@every_mask
def test_relative_mask_is_the_same_along_every_diagonal(name: str, shape: Shape) -> None:
    if not claims(shape)[name][0].relative:
        assert name not in ("causal", "window", "not", "not not")
        return
    whole = pairs(name, shape)
    assert torch.equal(whole, whole[:1, :1].expand(*shape))
    for step in range(-shape.T + 1, shape.S):
        assert len(set(whole[0, 0].diagonal(step).tolist())) == 1


@every_mask
def test_packed_and_unpacked_mask_is_the_same_mask(name: str, shape: Shape) -> None:
    mask = claims(shape)[name][0]
    packed = pack(Rule(shape=shape, mask=mask))
    again = unpack(packed, shape)
    assert again.scale is again.bias is again.softcap is None
    assert type(again.mask) is type(mask)
    assert again.mask is not None
    assert torch.equal(again.mask.dense(shape).expand(*shape), pairs(name, shape))
    assert pack(again).form == packed.form
    assert parse(spell(packed.form)) == packed.form
    tensors = Rule(shape=shape, mask=mask).tensors()
    assert [id(t) for t in packed.tensors] == [id(t) for t in tensors]


@every_mask
@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_attention_looks_where_the_sentence_says(
    name: str, shape: Shape, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 3)
    monkeypatch.setattr(flash_cpu, "BAND", 3)
    monkeypatch.setattr(flash_cpu, "PIECE_COST", 0)
    q, k, v = (torch.randn(B, H, n, 3, dtype=torch.float64) for n in (shape.T, shape.S, shape.S))
    score = torch.einsum("bhtd,bhsd->bhts", q, k) / 3**0.5
    weights = score.exp() * pairs(name, shape)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    seen = attention(q, k, v, mask=claims(shape)[name][0], backend=backend)
    torch.testing.assert_close(seen, weights @ v, rtol=1e-12, atol=1e-12)


WIDE = Shape(B, 1, 3, 257)
COUNTS: dict[str, Callable[[Callable[[list[Any]], Tensor]], Mask]] = {
    "lengths": lambda n: Lengths(n([5, 0, 127])),
    "lengths left": lambda n: Lengths(n([5, 0, 127]), "left"),
    "prefix": lambda n: Prefix(n([5, 0, 127])),
    "documents": lambda n: Documents(n([s % 3 for s in range(257)]), n([0, 1, 2])),
    "window at": lambda n: Window(131, 5).at(n([1, 3, 127])),
    "window at slots": lambda n: Window(5, 131).at(
        n([1, 3, 127]), n([s % 127 for s in range(257)])
    ),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_narrow_whole_numbers_mean_what_wide_ones_mean(name: str, kind: torch.dtype) -> None:
    narrow = COUNTS[name](lambda values: torch.tensor(values, dtype=kind))
    wide = COUNTS[name](torch.tensor)
    assert torch.equal(narrow.dense(WIDE), wide.dense(WIDE))
    assert torch.equal(narrow.tiles(WIDE, 2, 31), wide.tiles(WIDE, 2, 31))
    ask = narrow.flex(WIDE)
    for j in range(0, 257, 17):
        expected = wide.dense(WIDE).expand(*WIDE)[2, 0, 1, j]
        assert bool(ask(*(torch.tensor(x) for x in (2, 0, 1, j)))) == bool(expected)


def test_window_zero_sees_only_itself() -> None:
    dense = Window(0, 0).dense(Shape(1, 1, 3, 5))
    assert dense.tolist() == [[j == i for j in range(5)] for i in (2, 3, 4)]


def test_window_sides_do_not_count_the_query_itself() -> None:
    assert Window(2, 1).dense(Shape(1, 1, 7, 7))[3].nonzero().flatten().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("far", [sys.maxsize, 10**20])
@pytest.mark.parametrize("backend", ["sdpa", "blockwise", "reference"])
def test_a_side_of_a_window_may_be_any_number(far: int, backend: str) -> None:
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (5, 7, 7))
    for mask, same in ((Window(2, far), Window(2, None)), (Window(far, 1), Window(None, 1))):
        seen = attention(q, k, v, mask=mask, backend=backend)
        assert torch.equal(seen, attention(q, k, v, mask=same, backend=backend))


def test_last_query_sits_on_the_last_key_whatever_the_lengths() -> None:
    assert Causal().dense(Shape(1, 1, 2, 5)).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert Causal().dense(Shape(1, 1, 3, 2)).int().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert Causal(align="start").dense(Shape(1, 1, 2, 5)).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
    ]


def test_side_names_where_the_padding_lies() -> None:
    shape = Shape(1, 1, 1, 5)
    assert Lengths(torch.tensor([2])).dense(shape).flatten().int().tolist() == [1, 1, 0, 0, 0]
    left = Lengths(torch.tensor([2]), side="left").dense(shape)
    assert left.flatten().int().tolist() == [0, 0, 0, 1, 1]


def test_key_at_a_negative_position_is_seen_by_nobody() -> None:
    shape, places = Shape(1, 1, 2, 3), torch.tensor([-1, 0, -7])
    for mask in (Window(None, None), ~Prefix(100) | Prefix(100), ~Causal() | Causal()):
        dense = mask.at(torch.tensor([5, 9]), places).dense(shape)
        assert dense.expand(1, 1, 2, 3).flatten().int().tolist() == [0, 1, 0] * 2


def test_empty_matrix_has_an_empty_picture_and_no_pairs() -> None:
    for T, S in ((0, 5), (3, 0), (0, 0)):
        shape = Shape(1, 1, T, S)
        for mask in (Causal(), ~Window(1, 0), Lengths(torch.tensor([0])), Prefix(2)):
            assert mask.dense(shape).expand(*shape).numel() == 0
            assert mask.tiles(shape, 2, 2).numel() == 0


def test_values_that_cannot_be_read_make_every_tile_mixed() -> None:
    shape = Shape(2, 1, 7, 7)
    ids = torch.zeros(7, dtype=torch.int64, device="meta")
    counts = torch.zeros(2, dtype=torch.int64, device="meta")
    for mask in (
        Lengths(counts),
        Prefix(counts),
        Documents(ids),
        Dense(ids.bool()),
        Causal().at(ids),
    ):
        assert mask.tiles(shape, 3, 3).tolist() == [[1] * 3] * 3


INT3, INT7, INT11 = (torch.zeros(n, dtype=torch.int64) for n in (3, 7, 11))
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "align": (lambda: Causal("middle"), ValueError, 'must be "end" or "start", got \'middle\''),
    "left": (lambda: Window(-1, 0), ValueError, "left must be None (open) or a whole number"),
    "right": (lambda: Window(0, 1.5), ValueError, "(itself only) on, got 1.5"),  # type: ignore[arg-type]
    "list": (lambda: Lengths([3]), TypeError, "must be a tensor of whole numbers, got list"),  # type: ignore[arg-type]
    "float": (lambda: Lengths(torch.ones(3)), TypeError, "lengths must hold whole numbers"),
    "0-dim": (lambda: Lengths(torch.tensor(3)), ValueError, "must have one axis (B), got ()"),
    "side": (lambda: Lengths(INT3, "top"), ValueError, 'must be "right" or "left", got \'top\''),
    "prefix": (
        lambda: Prefix(-3),
        ValueError,
        "n must be a whole number from 0 on, or one a sample",
    ),
    "prefixes": (lambda: Prefix(torch.ones(3)), TypeError, "n must hold whole numbers"),
    "ids": (lambda: Documents(torch.ones(3)), TypeError, "ids must hold whole numbers"),
    "asked": (lambda: Documents(INT3, INT3.bool()), TypeError, "query_ids must hold whole numbers"),
    "deep ids": (lambda: Documents(INT3[None, None]), ValueError, "got shape (1, 1, 3)"),
    "float mask": (lambda: Dense(torch.ones(3)), TypeError, "(True = this query may look at this"),
    "hint": (lambda: Dense(torch.ones(3)), TypeError, "got torch.float32. A float tensor"),
    "list mask": (lambda: Dense([True]), TypeError, "a mask must be a bool tensor"),  # type: ignore[arg-type]
    "at": (lambda: Causal().at(torch.ones(3)), TypeError, "queries must hold whole numbers"),
    "at keys": (
        lambda: Causal().at(INT3, torch.ones(3)),
        TypeError,
        "keys must hold whole numbers",
    ),
    "memory": (lambda: Lengths(INT3).at(INT3), ValueError, "at(queries, keys) & Lengths(...)"),
    "joined memory": (
        lambda: (Causal() & Lengths(INT3)).at(INT3),
        ValueError,
        "And counts rows",
    ),
    "at twice": (lambda: Causal().at(INT3).at(INT3), ValueError, "At counts rows and keys"),
    "a tensor": (lambda: Causal() & INT3, TypeError, "write mask & Dense(tensor)"),  # type: ignore[operator]
    "truth": (
        lambda: Causal() and Prefix(1),
        TypeError,
        "join masks with & | ~, not with and / or",
    ),
    "and": (lambda: Causal() & 3, TypeError, "unsupported operand"),  # type: ignore[operator]
    "or": (lambda: Causal() | True, TypeError, "unsupported operand"),  # type: ignore[operator]
}
MISFITS: dict[str, tuple[Mask, str]] = {
    "lengths": (Lengths(INT7), "lengths must be (B,) with B=3, got shape (7,)"),
    "long": (Lengths(INT3 + 12), "must lie between 0 and S=11, got values from 12 to 12"),
    "short": (Lengths(INT3 - 1), "must lie between 0 and S=11, got values from -1 to -1"),
    "prefix": (Prefix(INT7), "n must be (B,) with B=3, got shape (7,)"),
    "ids": (Documents(INT7), "ids must be (S,) or (B, S) with B=3, S=11, got shape (7,)"),
    "batch": (Documents(INT11.expand(2, 11)), "B=3, S=11, got shape (2, 11)"),
    "asked": (Documents(INT11, INT3), "query_ids must be (T,) or (B, T) with B=3, T=7, got shape"),
    "dense": (Dense(INT7.bool()), "mask must broadcast to (B, H, T, S) = (3, 5, 7, 11), got shape"),
    "deep": (Dense(INT11.bool()[(None,) * 4]), "got shape (1, 1, 1, 1, 11)"),
    "at": (Causal().at(INT3), "queries must be (T,) or (B, T) with B=3, T=7, got shape (3,)"),
    "at keys": (Causal().at(INT7, INT7), "keys must be (S,) or (B, S) with B=3, S=11, got shape"),
    "part of an at": (Prefix(INT7).at(INT7), "n must be (B,) with B=3, got shape (7,)"),
    "part of a join": (
        ~(Causal() | Lengths(INT7)),
        "lengths must be (B,) with B=3, got shape (7,)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_mask_is_refused_in_words(name: str) -> None:
    make, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)):
        make()


@pytest.mark.parametrize("name", MISFITS)
def test_mask_that_does_not_fit_is_refused_by_every_rendering(name: str) -> None:
    mask, words = MISFITS[name]
    shape = SHAPES["more keys"]
    q, k = torch.zeros(B, H, 7, 3), torch.zeros(B, H, 11, 3)
    for render in (
        lambda: mask.dense(shape),
        lambda: mask.flex(shape),
        lambda: mask.tiles(shape, 3, 3),
        lambda: attention(q, k, k, mask=mask),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            render()


def test_documents_with_more_queries_than_keys_ask_for_query_ids() -> None:
    with pytest.raises(ValueError, match=r"needs query_ids .* \(T=11\) than keys \(S=7\)"):
        Documents(torch.zeros(7, dtype=torch.int64)).dense(SHAPES["more queries"])


def test_bias_and_float_tensor_are_refused_as_mask() -> None:
    q = torch.zeros(1, 2, 3, 5)
    with pytest.raises(TypeError, match="ALiBi is a bias: pass it as bias=, not mask="):
        attention(q, q, q, mask=ALiBi(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a mask must be a bool tensor"):
        attention(q, q, q, mask=torch.zeros(3, 3))


def test_a_mask_that_says_it_hides_nothing_hides_nothing() -> None:
    """Over small shapes; Causal and Window say so exactly when it is so, wherever S is not 0."""
    told = 0
    for T, S in itertools.product(range(1, 5), repeat=2):
        shape = Shape(2, 3, T, S)
        masks: list[Mask] = [Causal(), Window(0, 0), Window(2, 1), Window(None, 0), Window(3, 3)]
        masks += [Window(3, None), Causal() & Window(2, None), Causal("start"), Prefix(2)]
        masks += [Dense(torch.ones(T, S, dtype=torch.bool)), Causal() | Window(3, 3)]
        for place, mask in enumerate(masks):
            says, is_so = mask.hides_nothing(shape), bool(mask.dense(shape).all())
            told += says
            assert is_so or not says, (mask, shape)
            assert says == is_so or place > 6, (mask, shape)
    assert told > 20


def test_one_query_on_the_last_key_needs_no_mask() -> None:
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 7, 4)
    seen = attention(q, k, k, mask=Causal() & Window(6, None))
    assert torch.equal(seen, attention(q, k, k))
    assert not torch.equal(attention(q, k, k, mask=Causal() & Window(5, None)), seen)


def test_only_a_mask_that_surely_looks_back_says_so() -> None:
    documents = Documents(torch.zeros(3, dtype=torch.int64))
    for mask in (Causal(), documents & Causal(), Window(5, 0), Window(3, 0) | Causal()):
        assert mask.looks_back
    for mask in (Causal("start"), Causal() | ~Causal(), documents, Window(0, None), ~Causal()):
        assert not mask.looks_back


def test_a_window_is_told_of_what_says_nothing_else() -> None:
    assert Causal().window() == (None, 0) and Window(5, None).window() == (5, None)
    assert (Causal() & Window(7, 3) & Window(None, 9)).window() == (7, 0)
    for mask in (Causal("start"), Causal() | Window(1, 1), Causal() & Prefix(3)):
        assert mask.window() is None


@pytest.mark.parametrize(
    "mask",
    [Causal(), Window(0, 0), Causal() | Prefix(2), Prefix(2) | Window(1, 0), Prefix(1) | Prefix(3)],
)
def test_a_mask_that_claims_that_queries_see_themselves_lets_them(mask: Mask) -> None:
    shape = Shape(1, 1, 5, 5)
    itself = mask.dense(shape).expand(shape)[0, 0].diagonal()
    assert itself.all() == mask.sees_itself
