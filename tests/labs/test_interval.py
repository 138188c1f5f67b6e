"""Intervals of labs, against values worked out by hand or known from tables."""

from __future__ import annotations

import pytest

from regard.labs.interval import median_interval, spell_interval


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
