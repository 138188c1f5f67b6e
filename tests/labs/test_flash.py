"""The online softmax by hand; what the formula needs; sentences that follow the numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.labs import flash
from regard.labs.flash import EAGER, LAB, OURS, TRITON, WAYS
from regard.labs.parts import Run
from regard.labs.peak_memory import measure_peak
from regard.labs.report import make_figure

CPU = torch.device("cpu")


def test_the_online_softmax_of_three_numbers_by_hand() -> None:
    rows = flash.online_softmax([1.0, 3.0, 2.0])
    assert [row["maximum"] for row in rows] == [1.0, 3.0, 3.0]
    # 1; then 1 shrinks by exp(1 - 3), and the new one counts 1; then exp(2 - 3) more.
    by_hand = [1.0, math.exp(-2) + 1, math.exp(-2) + 1 + math.exp(-1)]
    assert [row["sum"] for row in rows] == pytest.approx(by_hand, rel=1e-15)


def test_the_online_softmax_is_the_softmax() -> None:
    found = flash.online_weights(flash.NUMBERS)
    assert len(found["rows"]) == 10
    assert found["apart"] < 1e-15
    assert sum(found["weights"]) == pytest.approx(1.0, abs=1e-14)
    far = flash.online_weights([-700.0, 700.0, 0.0])  # plain exp would overflow
    assert far["weights"][1] == 1.0 and far["apart"] < 1e-15


@pytest.mark.parametrize("way", [way for way in WAYS if way != TRITON])
def test_every_way_gives_the_formulas_answer(way: str) -> None:
    # The weights of a row sum to 1, so that an output is as exact as the scores, whose error grows
    # with the root of the width and with the values' size.
    apart = flash.measure_apart(way, replace(flash.TINY, width=16), CPU)
    assert apart is not None and apart < 100 * torch.finfo(torch.float32).eps


def test_our_kernels_say_why_they_do_not_run_here() -> None:
    assert flash.measure_apart(TRITON, flash.TINY, CPU) is None
    found = flash.measure_way(TRITON, 64, flash.TINY, CPU)
    assert "our kernels run on a GPU" in found["refused"]


def test_the_formula_takes_what_its_size_says() -> None:
    n_heads, length, width = 3, 256, 8
    q, k, v = torch.randn(3, 1, n_heads, length, width)
    peak = measure_peak(lambda: flash.attend_eagerly(q, k, v), CPU)
    needed = flash.eager_bytes(n_heads, length, 4)
    assert needed == (2 * 3 * 4 + 1) * 256 * 256
    assert needed <= peak < 1.05 * needed


def test_the_formula_is_not_run_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    length, size = 64, replace(flash.TINY, n_heads=2)
    needed = (2 * 2 * 4 + 1) * 64 * 64
    monkeypatch.setattr(flash, "CPU_BYTES", int(1.05 * needed))
    assert flash.measure_way(EAGER, length, size, CPU) == {
        "needed": needed,
        "free": int(1.05 * needed),
    }
    monkeypatch.setattr(flash, "CPU_BYTES", int(1.2 * needed))
    assert "peak" in flash.measure_way(EAGER, length, size, CPU)


def test_the_whole_run_gives_numbers_that_json_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flash, "FULL", replace(flash.FULL, n_heads=2, lengths=(64, 128, 256)))
    monkeypatch.setattr(flash, "CPU_BYTES", 310_000)  # the formula goes to 128 tokens
    results = LAB.measure(Run(tmp_path / "parts", {"tiny": False}, CPU, None))
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    said = " ".join(LAB.find(results))
    assert "At 256 tokens it would need 1.06 MiB, and 303 KiB are free" in said
    assert "At 128 tokens the formula takes" in said
    assert "At 256 tokens it takes" in said
    LAB.draw(results, make_figure())


def invent(eager: float, ours: float) -> dict[str, Any]:
    """Results in which the formula and our attention take these times and memories."""

    def rows(factor: float) -> list[dict[str, Any]]:
        return [
            {"peak": int(factor * n), "seconds": [factor * n, 1.001 * factor * n], "chosen": "sdpa"}
            for n in (1000, 4000)
        ]

    ways: dict[str, Any] = dict.fromkeys(WAYS, rows(ours)) | {EAGER: rows(eager)}
    return {
        "heads": 2,
        "width": 8,
        "lengths": [128, 256],
        "softmax": flash.online_weights(flash.NUMBERS),
        "apart": dict.fromkeys(WAYS, 1e-6),
        "ways": ways | {TRITON: [{"refused": "no GPU"}] * 2},
    }


def test_the_sentences_turn_with_the_numbers() -> None:
    said = " ".join(LAB.find(invent(eager=3.0, ours=1.0)))
    assert f"the formula takes 3 times the memory of {OURS}." in said
    assert f"The formula takes 3 times as long as {OURS}." in said
    assert "(4 times that at 128)" in said
    assert "Our kernels were not run: no GPU." in said
    said = " ".join(LAB.find(invent(eager=0.5, ours=1.0)))
    assert f"takes 0.5 times the memory of {OURS}, against the prediction." in said
    assert f"The formula is faster than {OURS}, against the prediction." in said
    said = " ".join(LAB.find(invent(eager=1.0005, ours=1.0)))
    assert f"Whether the formula takes longer than {OURS} is not clear." in said
    results = invent(3.0, 1.0)
    results["softmax"]["apart"] = 0.1
    assert "are not equal, against the prediction, to" in LAB.find(results)[-1]
