"""The lab on the KV cache: its arithmetic against what runs, and sentences that follow numbers."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import Transformer
from regard.labs import cache
from regard.labs.parts import Run
from regard.labs.report import make_figure

CPU = torch.device("cpu")
SMALL = cache.Size(
    n_layers=3,
    head_dim=6,
    lengths=(5, 7),
    repeats=6,
    n_written=5,
    batch=3,
    batch_len=11,
)


def make_model(n_kv_heads: int = 8, backend: str = "auto") -> Transformer:
    model = cache.make_model(SMALL, n_kv_heads, CPU, torch.float32)
    blocks = tuple(replace(block, backend=backend) for block in model.config.decoder)
    return Transformer(replace(model.config, decoder=blocks)).eval()


@pytest.mark.parametrize("n_kv_heads", [8, 2])
@torch.inference_mode()
def test_the_flops_are_those_that_torch_counts_of_the_formula(n_kv_heads: int) -> None:
    model, n = make_model(n_kv_heads, "reference"), 13
    ids = cache.draw_ids(1, n, CPU)
    full = cache.fill_cache(model, ids[:, :-1])
    with FlopCounterMode(display=False) as counted:
        cache.choose_next(model, ids[:, -1:], full)
    assert counted.get_total_flops() == cache.count_flops(model.config, 1, n)
    with FlopCounterMode(display=False) as counted:
        cache.choose_next(model, ids)
    # The formula multiplies all n · n pairs, of which a causal text needs n (n + 1) / 2.
    needless = 4 * 8 * 6 * 3 * (n * n - n * (n + 1) // 2)
    assert counted.get_total_flops() == cache.count_flops(model.config, n, n) + needless


def test_the_bytes_of_the_formula_by_hand_and_in_a_static_cache() -> None:
    model = make_model(2)
    # 2 · 3 layers · 2 key heads · 6 wide · 11 tokens · 4 bytes
    assert cache.count_cache_bytes(model.config, 11, 4) == 3168
    static = model.make_cache(11)
    with torch.inference_mode():
        model.run(cache.draw_ids(1, 7, CPU), cache=static)
    assert static.nbytes == 3168


@torch.inference_mode()
def test_a_text_written_with_the_cache_is_the_text_written_without() -> None:
    found = cache.measure_writing(SMALL, CPU)
    assert found["same"] == found["n"] == 5


@torch.inference_mode()
def test_a_token_chosen_beside_a_full_cache_is_the_one_chosen_from_all() -> None:
    model, ids = make_model(), cache.draw_ids(3, 11, CPU)
    full = cache.fill_cache(model, ids[:, :-1])
    assert full.length is not None and full.length.tolist() == [10]
    assert torch.equal(cache.choose_next(model, ids), cache.choose_next(model, ids[:, -1:], full))


def measure_small(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    monkeypatch.setattr(cache, "FULL", SMALL)
    results = cache.measure(Run(folder / "parts", {"tiny": False}, CPU, None))
    found: dict[str, Any] = json.loads(json.dumps(results, allow_nan=False))
    return found


def test_a_full_run_of_small_sizes_is_finite_and_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = measure_small(monkeypatch, tmp_path)
    assert [row["n"] for row in results["lengths"]] == [5, 7]
    assert [row["n_kv_heads"] for row in results["groups"]] == [8, 4, 2, 1]
    first, last = results["groups"][0], results["groups"][-1]
    assert first["bytes"] == 8 * last["bytes"] and first["held"] == 8 * last["held"]
    assert first["share"]["median"] == 1.0
    assert all(math.isfinite(row["ratio"]["median"]) for row in results["lengths"])
    cache.draw(results, make_figure())
    assert len(cache.find(results)) == 5


def row(n: int, low: float, high: float) -> dict[str, Any]:
    return {"n": n, "ratio": {"median": (low + high) / 2, "low": low, "high": high}}


def test_the_crossing_is_where_the_cache_wins_for_good() -> None:
    rows = [row(4, 0.5, 0.9), row(8, 1.2, 1.4), row(16, 0.9, 1.3), row(32, 1.1, 2), row(64, 3, 4)]
    said = cache.find_crossing(rows)
    assert "from 32 tokens on; at 16" in said and said.endswith("no clear difference.")
    assert "at 4" in cache.find_crossing([rows[0], *rows[3:]])
    assert cache.find_crossing([rows[0], *rows[3:]]).endswith("slower.")
    assert "from the shortest length on, 32 tokens" in cache.find_crossing(rows[3:])
    assert "not clearly faster at the longest length measured, 16" in cache.find_crossing(rows[:3])


def test_sentences_turn_with_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = measure_small(monkeypatch, tmp_path)
    other = copy.deepcopy(results)
    for found, bounds in ((results, (0.1, 0.2)), (other, (1.3, 1.5))):
        ends = {"median": sum(bounds) / 2, "low": bounds[0], "high": bounds[1], "n": 9}
        found["groups"][-1]["share"] = ends
        found["lengths"][-1]["ratio"] = {**ends, "median": 0.5 if found is results else 99.0}
    assert cache.find(results)[-1].endswith("ms: faster.")
    assert cache.find(other)[-1].endswith("ms: slower.")
    assert "the time tells less, as" in cache.find(results)[0]
    assert "the time tells no less, as" in cache.find(other)[0]
    for found, time in ((results, 0.01), (other, 99.0)):
        found["lengths"][-1]["cached"]["median"] = time * found["lengths"][0]["cached"]["median"]
    assert cache.find(results)[0].endswith("most of its time goes into starting operations.")
    assert cache.find(other)[0].endswith("and 99 times the time.")


def test_rates_are_told_in_the_unit_that_suits_them() -> None:
    assert cache.spell_flops(2.5e9) == "2.5 GFLOP/s"
    assert cache.spell_flops(3.14e14) == "314 TFLOP/s"
    assert [cache.spell_bytes(n) for n in (512, 1536, 3 * 2**30)] == [
        "512 bytes",
        "1.5 KiB",
        "3 GiB",
    ]
