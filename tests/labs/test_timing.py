"""Times of calls: how many are made, and what their medians are."""

import numpy as np
import torch

from regard.labs.timing import median_time, resample, time_calls


def test_the_first_call_is_not_counted() -> None:
    made: list[int] = []
    seconds = time_calls(lambda: made.append(1), torch.device("cpu"), 3)
    assert len(made) == 4 and len(seconds) == 3
    assert all(each > 0 for each in seconds)


def test_a_median_lies_inside_of_what_resampling_gives() -> None:
    found = median_time([1.0, 2.0, 3.0, 4.0, 50.0])
    assert found["mean"] == 3.0 and found["n"] == 5
    assert 1.0 <= found["low"] <= 3.0 <= found["high"] <= 50.0
    assert median_time([2.0, 2.0]) == {"mean": 2.0, "low": 2.0, "high": 2.0, "n": 2}
    assert np.array_equal(resample(np.arange(5.0)), resample(np.arange(5.0)))
