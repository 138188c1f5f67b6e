"""Which kernels a backward takes: one for q, k and v together, or two that repeat their bits.

The one that is written for Hopper is compiled here, without a GPU. What they tell is judged in
test_flash_kernels.py, and on a GPU in test_gpu.py and test_flash_backward_hopper_kernels.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import triton
from gluon_on_numpy import Descriptor, as_argument, bind
from no_gpu import Driver
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Documents,
    Lengths,
    Prefix,
    Wants,
    Window,
    observe,
)
from regard.ops.call import make_call
from regard.ops.kernels import flash_backward, flash_hopper
from regard.ops.kernels.arguments import TileLists, rule_of, view
from regard.ops.kernels.flash_backward import Grads, RowGrads
from regard.ops.kernels.launch import Plans
from regard.ops.kernels.rendered import render
from regard.ops.kernels.tiles import HOPPER, Tiles

ALL = Grads(q=True, k=True, v=True)


def passed(T: int = 300, width: int = 128, **rule: Any) -> flash_backward._Pass:
    q, k = (torch.zeros(1, n, m, width, dtype=torch.bfloat16) for n, m in ((4, T), (2, 300)))
    given = render(make_call(q, k, k, **rule).seeded())
    row = torch.zeros(1, 4, 384)
    return flash_backward._Pass(given, rule_of(given), q, RowGrads(row, row, None, 384), Plans())


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_hopper, "runs_on", lambda _: True)


@pytest.mark.usefixtures("on_hopper")
def test_one_kernel_is_for_all_three_gradients_together() -> None:
    assert flash_backward._is_fused(passed(), ALL)
    assert flash_backward._is_fused(passed(), Grads(q=True, k=True))
    for wanted in (ALL._replace(q=False), Grads(q=True), ALL._replace(slopes=True)):
        assert not flash_backward._is_fused(passed(), wanted)


@pytest.mark.usefixtures("on_hopper")
def test_deterministic_algorithms_keep_two_kernels() -> None:
    step = passed()
    try:
        for options in ({}, {"warn_only": True}):
            torch.use_deterministic_algorithms(True, **options)
            assert not flash_backward._is_fused(step, ALL)
    finally:
        torch.use_deterministic_algorithms(False)
    assert flash_backward._is_fused(step, ALL)


def test_other_devices_keep_two_kernels() -> None:
    assert not flash_backward._is_fused(passed(), ALL)


def test_each_kind_of_call_is_switched_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        "windowed": {"mask": Causal() & Window(5, 0)},
        "biased": {"mask": Causal(), "bias": ALiBi(4)},
        "listed": {"mask": Documents(torch.zeros(300, dtype=torch.int64))},
    }
    for chosen in kinds:
        monkeypatch.setattr(flash_backward, "HOPPER", {chosen: (128,)})
        for kind, rule in kinds.items():
            assert flash_backward._suits_hopper(passed(**rule)) == (kind == chosen)
            assert not flash_backward._suits_hopper(passed(width=64, **rule))


CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "narrow": ({"width": 64, "mask": Causal()}, True),
    "causal": ({"mask": Causal()}, True),
    "slopes": ({"mask": Causal(), "bias": ALiBi(4)}, True),
    "slopes of both sides": ({"mask": Window(9, 1), "bias": ALiBi(4)}, False),
    "slopes of all keys": ({"bias": ALiBi(4)}, False),
    "narrow slopes": ({"width": 64, "bias": ALiBi(4)}, False),
    "few queries": ({"T": 127}, False),
    "another width": ({"width": 96}, False),
    "keys that nobody sees": ({"mask": Lengths(torch.tensor([200]))}, True),
    "rows of their own": ({"mask": Causal() | Prefix(9)}, True),
    "documents": ({"mask": Documents(torch.zeros(300, dtype=torch.int64))}, True),
    "documents of others": ({"T": 200, "mask": Documents(torch.arange(300) // 50)}, False),
    "bits": ({"mask": ~Window(3, 3)}, False),
    "softcap": ({"softcap": 3.0}, False),
    "dropout": ({"dropout": 0.1, "seed": 3}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_for_hopper_takes_the_plainest_calls(name: str) -> None:
    call, is_taken = CALLS[name]
    step = passed(**call)
    assert flash_backward._suits_hopper(step) == is_taken
    hot = step.rows._replace(heat=step.rows.lse)
    for other in (
        step._replace(rows=hot),
        step._replace(g=None),
        step._replace(g=step.given.q[:, :1].expand(step.given.q.shape)),
    ):
        assert not flash_backward._suits_hopper(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, is_taken) in CALLS.items() if is_taken])
def test_the_kernel_for_hopper_compiles_as_it_is_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.ops.kernels import flash_backward_hopper_kernels as kernels
    from regard.ops.kernels import tile_lists_kernels

    step = passed(**CALLS[name][0])
    grads = [torch.empty_like(x) for x in step.given[:3]]
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(tile_lists_kernels, "run_lists", lambda *_: None)
    flash_backward._run_fused(step, *grads, flash_backward._allot_sums(step))
    caches = kernels._fused.device_caches.values()
    text = [one for cache in caches for one in cache[0].values()][-1].asm["ptx"]
    assert "wgmma" in text and "red.relaxed.gpu.global.add.v4.f32" in text


IDS = torch.arange(400) * 7 // 3 % 4
RULES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((384, 384, 2, 2), {}),
    "ragged, three heads a key head": ((300, 290, 6, 2), {}),
    "causal": ((384, 384, 2, 1), {"mask": Causal()}),
    "fewer queries": ((200, 390, 2, 1), {"mask": Causal()}),
    "more queries": ((390, 200, 2, 1), {"mask": Causal()}),
    "window": ((200, 500, 2, 2), {"mask": Window(100, 20)}),
    "slopes": ((200, 390, 4, 2), {"mask": Causal(), "bias": ALiBi(4)}),
    "padding": ((400, 400, 2, 2), {"mask": Lengths(torch.tensor([300, 0]))}),
    "padding on the left": (
        (400, 400, 2, 2), {"mask": Lengths(torch.tensor([300, 1]), side="left") & Causal()},
    ),
    "documents": ((400, 400, 4, 2), {"mask": Documents(IDS) & Causal()}),
    "prefix": ((400, 400, 2, 2), {"mask": Causal() | Prefix(50)}),
}  # fmt: skip
"""Queries, keys, query heads and key heads, and what is asked for."""


def lists_of(seen_bts: Tensor, rows: int, keys: int) -> TileLists:
    """For each tile of keys the tiles of rows that see some of it, in order."""
    B, T, S = seen_bts.shape
    across, down = -(-S // keys), -(-T // rows)
    tiles = torch.zeros(B, across, down, dtype=torch.int32)
    counts = torch.zeros(B, across, dtype=torch.int32)
    for b, line, n in itertools.product(range(B), range(across), range(down)):
        tile = seen_bts[b, n * rows : (n + 1) * rows, line * keys : (line + 1) * keys]
        if tile.any():
            tiles[b, line, counts[b, line]] = 2 * n + int(int(tile.sum()) != rows * keys)
            counts[b, line] += 1
    return TileLists(tiles, counts, counts, down, across, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "tiles", "is_late"),
    [(128, Tiles(64, 128, 8, 3), True), (64, Tiles(32, 64, 4, 2), False)],
)
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_for_hopper_gives_the_gradients_of_the_reference(
    name: str, width: int, tiles: Tiles, is_late: bool
) -> None:
    """By numpy, with NaN in every row that sees nothing and every key that nobody sees."""
    from regard.ops.kernels import flash_backward_hopper_kernels as kernels

    (T, S, H, G), asked = RULES[name]
    torch.manual_seed(T)
    shapes = ((H, T), (G, S), (G, S), (H, T))
    q, k, v, g = (torch.randn(2, *shape, width, dtype=torch.float64) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    observed = observe(*leaves, **asked, wants=Wants(lse=True), backend="reference")
    assert observed.output is not None and observed.lse is not None
    exact = torch.autograd.grad(observed.output, leaves, g)
    given = render(make_call(*(x.detach().bfloat16() for x in leaves), **asked))
    n, shape, mask = -(-T // 128) * 128, given.shape, asked.get("mask")
    seen = torch.ones(2, 1, T, S) > 0 if mask is None else mask.dense(shape, "cpu")
    seen = seen.expand(2, 1, T, S)
    lse, delta = torch.full((2, H, n), math.inf), torch.zeros(2, H, n)
    unseeing, unseen = ~seen.any(3), ~seen.any(2)
    lse[..., :T] = (observed.lse.detach() / math.log(2)).masked_fill(unseeing, math.inf)
    delta[..., :T] = -(g * observed.output).detach().sum(-1).masked_fill(unseeing, math.nan)
    inputs = (x.detach().float() for x in (q, k, v, g))
    hidden = (unseeing, unseen, unseen, unseeing)
    dirty = [x.masked_fill(no[..., None], math.nan) for x, no in zip(inputs, hidden, strict=True)]
    rule = rule_of(given)
    lists = lists_of(seen[:, 0], *tiles[:2]) if flash_backward._is_listed(rule) else None
    sums, (dk, dv) = torch.zeros(2, H, n, width), (torch.full_like(dirty[1], 9.0) for _ in range(2))
    rest = (view(dk), view(dv), sums, rule, lists, RowGrads(lse, delta, None, n), H, T, S)
    hides = any(x is not None for x in (rule.window, rule.span, lists)) or S % tiles.keys > 0
    for program in range(2 * G * -(-S // tiles.keys)):
        run = bind(kernels, "_fused", program, tiles.warps, is_late)
        run(
            *(Descriptor(x.numpy()) for x in dirty), *map(as_argument, rest), R=H // G, WIDTH=width,
            ROWS=tiles.rows, KEYS=tiles.keys, STAGES=tiles.stages,
            HIDES=hides, COVERED=given.covered, APART=2, LOADER=24,
        )  # fmt: skip
    parts = sums.view(2, H, n // 8, width // 16, 8, 4, 2, 2).permute(0, 1, 2, 5, 7, 3, 6, 4)
    dq = parts.reshape(2, H, n, width)[:, :, :T] * (rule.factor * math.log(2))
    for part, ours, theirs in zip("qkv", (dq, dk, dv), exact, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max()), part


def test_one_slot_for_rows_would_wait_for_ever() -> None:
    tiles = Tiles(64, 128, 8, 1)
    with pytest.raises(AssertionError, match="waits for ever"):
        test_the_kernel_for_hopper_gives_the_gradients_of_the_reference("plain", 64, tiles, False)
    rows = [row for name, rows in HOPPER.items() if name.startswith("hopper") for row in rows]
    assert rows and all(row.stages > 1 for row in rows)
