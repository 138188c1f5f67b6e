"""IsoFLOP curves of runs that follow a known law have their minima where the law has them."""

import numpy as np
import pytest

from regard.labs.isoflop import isoflop, parabola_minimum, read_curve
from regard.labs.scaling_fits import ChinchillaFit

LAW = ChinchillaFit(E=1.7, A=20.0, B=60.0, alpha=0.3, beta=0.3, objective=0.0)


def grid(law: ChinchillaFit = LAW):
    n, d = np.meshgrid(np.geomspace(1e5, 3e7, 14), np.geomspace(2e6, 1e9, 9))
    n, d = n.ravel(), d.ravel()
    return n, d, law.predict(n, d)


def test_minima_are_those_of_the_law_and_grow_as_it_says() -> None:
    found = isoflop(*grid())
    assert len(found["curves"]) == 5
    inside = [curve for curve in found["curves"] if curve["minimum"] is not None]
    assert len(inside) >= 3
    for curve in inside:
        # A parabola is not the curve itself, and losses are read off lines between runs.
        best = LAW.optimal(curve["compute"]).n_params
        assert curve["minimum"]["mean"] == pytest.approx(best, rel=0.3)
        assert curve["minimum"]["low"] <= curve["minimum"]["mean"] <= curve["minimum"]["high"]
    growth = LAW.beta / (LAW.alpha + LAW.beta)
    assert found["exponent"]["mean"] == pytest.approx(growth, abs=0.05)


def test_a_curve_has_the_models_that_were_trained_on_both_sides_of_the_budget() -> None:
    n = np.log([10.0, 10.0, 20.0, 20.0, 40.0, 40.0])
    d = np.log([5.0, 50.0, 5.0, 20.0, 5.0, 10.0])
    losses = np.log([4.0, 1.0, 3.0, 2.0, 5.0, 4.5])
    sizes, read = read_curve(n, d, losses, float(np.log(6 * 250.0)))
    # 25, 12.5 and 6.25 tokens lie between runs; of 45, 22.5 and 11.25 only 45, of 6 and 3 only 6.
    np.testing.assert_allclose(np.exp(sizes), [10, 20, 40])
    share = np.log(25 / 5) / np.log(50 / 5)
    assert read[0] == pytest.approx(np.log(4.0) * (1 - share))
    assert len(read_curve(n, d, losses, float(np.log(6 * 450.0)))[0]) == 1
    assert len(read_curve(n, d, losses, float(np.log(6 * 60.0)))[0]) == 1


def test_a_parabola_worked_by_hand() -> None:
    x, ones = np.array([0.0, 1.0, 2.0, 5.0]), np.ones(4)
    assert parabola_minimum(x, (x - 1.5) ** 2 + 7, ones) == pytest.approx(1.5)
    assert parabola_minimum(x, -((x - 1.5) ** 2), ones) is None, "it has no minimum"
    assert parabola_minimum(x, (x - 9.0) ** 2, ones) is None, "it lies outside"
    assert parabola_minimum(x[:3], (x[:3] - 1.5) ** 2, ones[:3]) is None, "three points say nothing"


def test_runs_too_few_for_a_curve_give_none() -> None:
    n, d = np.array([1e5, 1e5, 1e6, 1e6]), np.array([1e6, 1e7, 1e6, 1e7])
    assert isoflop(n, d, LAW.predict(n, d)) == {"curves": [], "exponent": None}
