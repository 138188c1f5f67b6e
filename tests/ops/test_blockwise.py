"""How the matrix is cut into tiles and parts, and that no cut shows in the numbers."""

from __future__ import annotations

import math
import subprocess
import sys
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
    Wants,
    Window,
    attention,
    blockwise,
    observe,
)
from regard.ops.call import Rule, make_call
from regard.ops.shape import Shape

MASKS = {
    "causal": Causal(),
    "window": Window(11, 3),
    "causal from the start": Causal(align="start"),
    "hole": Causal() & ~Window(5, 5),
    "lengths": Lengths(torch.tensor([31, 53])),
    "gaps": Dense(torch.arange(67) // 5 % 2 == 0),
    "documents": Documents(torch.arange(67) // 13) & Causal(),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 rows and 24 keys, cut in steps of 5."""
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 8 * 24)
    monkeypatch.setattr(blockwise, "HEAD_ENTRIES", 8 * 24)
    monkeypatch.setattr(blockwise, "SMALLEST", 1)
    monkeypatch.setattr(blockwise, "TALLEST", 8)
    monkeypatch.setattr(blockwise, "EDGE", 5)


@pytest.mark.parametrize("name", MASKS)
def test_cut_tiles_hold_every_visible_pair_once(name: str, small_tiles: None) -> None:
    shape = Shape(2, 1, 59, 67)
    rule = Rule(shape=shape._replace(B=1) if name != "lengths" else shape, mask=MASKS[name])
    assert rule.mask is not None
    height, width = blockwise.tile_sizes(rule.shape)
    seen = rule.mask.dense(rule.shape).expand(*rule.shape)
    times = torch.zeros(59, 67, dtype=torch.int64)
    for (t0, t1), tiles in blockwise.bands(rule, step=5):
        for tile, full in tiles:
            assert tile[:2] == (t0, t1) and t1 - t0 <= height and 0 < tile.s1 - tile.s0 <= width
            times[t0:t1, tile.s0 : tile.s1] += 1
            assert not full or seen[:, :, t0:t1, tile.s0 : tile.s1].all()
    assert times.max() == 1 and (times[seen.any(0).any(0)] == 1).all()


def test_cut_tiles_follow_the_edge_closer_than_the_grid(small_tiles: None) -> None:
    rule = Rule(shape=Shape(1, 1, 67, 67), mask=Causal())

    def area(step: int | None) -> tuple[int, int]:
        tiles = [found for _, row in blockwise.bands(rule, step=step) for found in row]
        sizes = [((t1 - t0) * (s1 - s0), full) for (t0, t1, s0, s1), full in tiles]
        return sum(size for size, _ in sizes), sum(size for size, full in sizes if not full)

    (all_of_grid, masked_of_grid), (all_cut, masked_cut) = area(None), area(5)
    assert all_cut < all_of_grid and masked_cut < masked_of_grid / 2


def everything(q: Tensor, k: Tensor, v: Tensor, backend: str, **rule: Any) -> list[Tensor]:
    mass = torch.arange(q.shape[0] * k.shape[2]).view(q.shape[0], -1) % 3 == 0
    wants = Wants(lse=True, entropy=True, peak=True, distance=True, mass=mass)
    seen: Any = observe(q, k, v, wants=wants, backend=backend, **rule)
    assert torch.equal(seen.output, attention(q, k, v, backend=backend, **rule))
    row = [seen.output, seen.lse, seen.entropy, seen.distance, seen.mass]
    return [*row, seen.peak.weight, seen.peak.key]


@pytest.mark.parametrize("mask", [None, Causal(), Window(7, 2)])
@pytest.mark.parametrize("heads", [(2, 5, 5), (3, 6, 2), (5, 1, 1)])
def test_heads_in_parts_give_the_rows_of_the_reference(
    mask: Mask | None, heads: tuple[int, int, int], small_tiles: None
) -> None:
    B, H, G = heads
    q, k, v = (torch.randn(B, n, s, 7).double() for n, s in ((H, 29), (G, 61), (G, 61)))
    sinks = torch.randn(H).double()
    parts = blockwise.cut_heads(make_call(q, k, v, mask=mask, sinks=sinks), None, False)
    assert len(parts) * len(parts[0]) > 1
    ours = everything(q, k, v, "blockwise", mask=mask, sinks=sinks)
    truth = everything(q, k, v, "reference", mask=mask, sinks=sinks)
    torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize(
    "given",
    [
        {"mask": Lengths(torch.tensor([31, 53]))},
        {"bias": ALiBi(3)},
        {"dropout": 0.5, "seed": 3},
    ],
)
def test_what_tells_heads_apart_is_not_cut(given: dict[str, Any], small_tiles: None) -> None:
    q, k = torch.randn(2, 3, 59, 7), torch.randn(2, 3, 67, 7)
    call = make_call(q, k, k, **given)
    assert [len(heads) for heads in blockwise.cut_heads(call, None, False)] == [1]
    ours, truth = (attention(q, k, k, **given, backend=b) for b in ("blockwise", "reference"))
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 31, 32, 64, 96, 97])
def test_argmax_is_the_first_largest(width: int) -> None:
    scores = torch.randint(0, 3, (37, width)).float()
    scores[5] = -math.inf
    largest = scores.amax(-1, keepdim=True)
    first = [row.index(True) for row in (scores == largest).tolist()]
    assert blockwise.argmax(scores).tolist() == first


@pytest.mark.parametrize("scale", [0.125, 2.0])
def test_long_rows_are_as_exact_as_the_formula(scale: float) -> None:
    q, k, v = (torch.randn(1, 2, n, 64) for n in (131, 3001, 3001))
    ours = everything(q, k, v, "blockwise", scale=scale)
    plain = everything(q, k, v, "reference", scale=scale)
    truth = everything(q.double(), k.double(), v.double(), "reference", scale=scale)
    for one, other, exact in zip(ours[:6], plain, truth, strict=False):
        allowed = 2 * (other - exact).abs().max()
        assert (one - exact).abs().max() <= allowed


@pytest.mark.parametrize("carried", ["v", "bias", "sinks"])
def test_vmap_over_one_input_alone_equals_a_loop(carried: str, small_tiles: None) -> None:
    q, k = torch.randn(1, 2, 13, 5), torch.randn(1, 2, 37, 5)
    many = {"v": torch.randn(3, 1, 2, 37, 5), "bias": torch.randn(3, 2, 13, 37)}
    many["sinks"] = torch.randn(3, 2)

    def run(one: Tensor) -> Tensor:
        given: dict[str, Any] = {"v": k, carried: one}
        return attention(q, k, given.pop("v"), mask=Causal(), **given, backend="blockwise")

    each = torch.stack([run(one) for one in many[carried]])
    torch.testing.assert_close(torch.func.vmap(run)(many[carried]), each)


GROWTH = """
import torch
from regard.ops import ALiBi, Causal, Window, attention
torch.set_num_threads(1)
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
def train(n):
    x, slopes = (torch.randn(*size, requires_grad=True) for size in ((1, 1, n, 64), (1,)))
    rule = {"mask": Causal() & Window(512, 0), "bias": ALiBi(slopes=slopes)}
    attention(x, x, x, **rule, backend="blockwise").sum().backward()
train(2048)
before = peak()
train(16384)
print(peak() - before)
"""


def test_a_learned_bias_of_16384_tokens_takes_memory_for_rows_and_keys_alone() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # One number a pair would be 1,024 MiB.
    assert float(done.stdout) < 1024 / 3, f"the peak grew by {done.stdout.strip()} MiB"
