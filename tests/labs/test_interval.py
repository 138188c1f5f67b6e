"""Intervals against published quantiles, hand-worked numbers, and what they promise."""

import numpy as np
import pytest

from regard.labs.interval import (
    mean_interval,
    median_interval,
    share_interval,
    spell_interval,
    t_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (100, 1.9840)]
)
def test_quantiles_of_t_are_those_of_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=2e-4)


def test_an_interval_worked_by_hand() -> None:
    # 1, 2, 6: mean 3, deviation √7, t of two degrees 4.3027, half √(7/3) · 4.3027 = 6.572.
    found = mean_interval([1, 2, 6])
    assert found["mean"] == 3 and found["n"] == 3
    assert found["high"] - 3 == pytest.approx(6.5724, abs=1e-3)
    assert 3 - found["low"] == pytest.approx(found["high"] - 3)


def test_intervals_hold_the_true_mean_in_19_of_20() -> None:
    drawn = np.random.default_rng(0).normal(size=(2000, 5))
    found = [mean_interval(list(row)) for row in drawn]
    inside = np.mean([one["low"] <= 0 <= one["high"] for one in found])
    # Three deviations of a share of 2,000 trials at 0.95 are 0.015.
    assert inside == pytest.approx(0.95, abs=0.015)


def test_wilsons_interval_worked_by_hand_and_at_the_ends() -> None:
    # 8 of 10: centre (0.8 + 0.19207) / 1.38415, half 1.96 · √(0.016 + 0.0096) / 1.38415.
    found = share_interval(8, 10)
    assert (found["low"], found["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    assert share_interval(0, 7)["low"] == pytest.approx(0, abs=1e-12)
    assert share_interval(7, 7)["high"] == pytest.approx(1, abs=1e-12)


def test_what_has_no_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two values, and 1 came"):
        mean_interval([1.0])
    for right, trials in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="is no share"):
            share_interval(right, trials)


def test_a_sentence_has_the_mean_and_both_ends() -> None:
    assert spell_interval({"mean": 1.25, "low": 1, "high": 1.5}) == "1.25 (95% interval 1 to 1.5)"


def test_the_interval_of_a_median_ends_at_the_values_that_tables_name() -> None:
    """Of 6 values the smallest and the largest, of 9 the second ones, of 15 the fourth ones."""
    for n, k in ((6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6)):
        found = median_interval(list(range(n, 0, -1)))
        assert found == {"median": (n + 1) / 2, "low": k, "high": n + 1 - k, "n": n}


def test_five_values_have_no_95_percent_interval_of_a_median() -> None:
    with pytest.raises(ValueError, match="at least six values, and 5 came"):
        median_interval([1.0, 2.0, 3.0, 4.0, 5.0])


def test_one_slow_repeat_moves_no_end_of_nine() -> None:
    quiet = median_interval([1.0] * 8 + [1.1])
    assert median_interval([1.0] * 8 + [50.0]) == quiet


def test_a_median_is_spelled_as_a_mean_is() -> None:
    found = {"median": 2.0, "low": 1.0, "high": 3.5, "n": 9}
    assert spell_interval(found) == "2 (95% interval 1 to 3.5)"
