"""Orders: whole, their own for each place, and the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest

from regard.training.data.shuffle import check_seed, check_step, draw_order, draw_shares


def test_an_order_is_whole_and_its_own_for_each_place() -> None:
    orders = [draw_order(101, *place) for place in ((3, 1, 0), (3, 1, 1), (3, 2, 0), (4, 1, 0))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(101))
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert (draw_order(101, 3, 1, 0) == orders[0]).all()


def test_the_order_of_one_place_is_pinned() -> None:
    assert draw_order(11, 20170612, 2, 0).tolist() == [5, 0, 6, 2, 9, 8, 10, 1, 3, 7, 4]


def test_shares_lie_evenly_between_0_and_1() -> None:
    shares = draw_shares(100_003, 7, 1)
    assert shares.min() >= 0 and shares.max() < 1
    counts = np.histogram(shares, 10, (0, 1))[0] / len(shares)
    assert np.abs(counts - 0.1).max() < 0.005


def test_a_seed_is_one_that_torch_takes_too() -> None:
    check_seed(2**63 - 1)
    with pytest.raises(ValueError, match=r"expected a whole number from 0 on, below 2\*\*63"):
        check_seed(2**63)


@pytest.mark.parametrize("wrong", [-1, 1.0, None, "1"])
def test_what_is_no_seed_or_step_is_refused(wrong: object) -> None:
    for check in (check_seed, check_step):
        with pytest.raises(ValueError, match="expected a whole number from 0 on"):
            check(wrong)  # type: ignore[arg-type]
