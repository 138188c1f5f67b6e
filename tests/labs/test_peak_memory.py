"""The peak is what lies there at once, and not what was ever allocated."""

import pytest
import torch

from regard.labs.peak_memory import measure_peak

CPU = torch.device("cpu")
N = 2**20
BYTES = 4 * N


def test_what_is_let_go_is_not_counted_twice() -> None:
    def one_after_another() -> None:
        for _ in range(3):
            torch.zeros(N)

    def together() -> None:
        kept = [torch.zeros(N) for _ in range(3)]
        del kept

    assert BYTES <= measure_peak(one_after_another, CPU) < 1.01 * BYTES
    assert 3 * BYTES <= measure_peak(together, CPU) < 3.01 * BYTES


def test_what_lay_there_before_is_not_counted() -> None:
    before = torch.zeros(N)
    assert measure_peak(lambda: before.add_(1), CPU) < 0.01 * BYTES
    assert BYTES <= measure_peak(lambda: before + 1, CPU) < 1.01 * BYTES


def test_devices_whose_memory_nobody_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="not on meta"):
        measure_peak(lambda: None, torch.device("meta"))
