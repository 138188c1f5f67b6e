"""Laws fitted to runs: known ones are found again, and intervals are as wide as they say."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import regard.labs
from regard.labs.scaling_fits import (
    ChinchillaFit,
    KaplanFit,
    fit_chinchilla,
    fit_kaplan,
    huber_sum,
)

HOFFMANN = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
REFITTED = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
KAPLAN = {"N_c": 8.8e13, "D_c": 5.4e13, "alpha_N": 0.076, "alpha_D": 0.103}


def draw_runs(law, n_runs: int, noise: float, seed: int = 0):
    """Sizes and token counts as of the Chinchilla runs, and losses by the law, off by factors."""
    rng = np.random.default_rng(seed)
    n = np.exp(rng.uniform(math.log(6e7), math.log(1.6e10), n_runs))
    d = np.exp(rng.uniform(math.log(5e9), math.log(5e11), n_runs))
    return n, d, law.predict(n, d) * np.exp(noise * rng.standard_normal(n_runs))


@pytest.mark.parametrize("known", [HOFFMANN, REFITTED], ids=["hoffmann", "refitted"])
@pytest.mark.parametrize("noise", [1e-3, 1e-2])
def test_published_chinchilla_laws_lie_in_the_intervals_of_240_runs(known, noise) -> None:
    fit = fit_chinchilla(*draw_runs(ChinchillaFit(**known, objective=0.0), 240, noise, seed=1))
    for name, value in known.items():
        low, high = fit.intervals[name]
        assert low <= value <= high, name
        assert low < getattr(fit, name) < high
    assert fit.alpha == pytest.approx(known["alpha"], rel=0.15)
    assert fit.beta == pytest.approx(known["beta"], rel=0.15)


@pytest.mark.parametrize("noise", [1e-3, 1e-2])
def test_kaplans_published_law_lies_in_the_intervals_of_240_runs(noise) -> None:
    fit = fit_kaplan(*draw_runs(KaplanFit(**KAPLAN, objective=0.0), 240, noise, seed=2))
    for name, value in KAPLAN.items():
        low, high = fit.intervals[name]
        assert low <= value <= high, name
    assert fit.alpha_N == pytest.approx(KAPLAN["alpha_N"], rel=0.1)


@pytest.mark.parametrize(
    ("fit_law", "kind", "known"),
    [
        (fit_chinchilla, ChinchillaFit, HOFFMANN),
        (fit_chinchilla, ChinchillaFit, REFITTED),
        (fit_kaplan, KaplanFit, KAPLAN),
    ],
)
def test_runs_without_noise_give_the_law_back(fit_law, kind, known) -> None:
    runs = draw_runs(kind(**known, objective=0.0), 61, noise=0.0)
    fit = fit_law(*runs, bootstraps=3)
    for name, value in known.items():
        assert getattr(fit, name) == pytest.approx(value, rel=1e-6), name
    np.testing.assert_allclose(fit.predict(*runs[:2]), runs[2], rtol=1e-9)


def count_covered(known, noise: float, n_runs: int, draws: int) -> dict[str, int]:
    """In how many draws the interval holds the truth; and it is no wider than that needs."""
    law = ChinchillaFit(**known, objective=0.0)
    fits = [
        fit_chinchilla(*draw_runs(law, n_runs, noise, seed), bootstraps=80) for seed in range(draws)
    ]
    covered = {}
    for name, value in known.items():
        covered[name] = sum(f.intervals[name][0] <= value <= f.intervals[name][1] for f in fits)
        logs = [math.log(getattr(f, name)) for f in fits]
        widths = [math.log(f.intervals[name][1] / f.intervals[name][0]) for f in fits]
        # 95% of a normal distribution are 3.92 standard deviations.
        assert 2.0 < np.median(widths) / np.std(logs, ddof=1) < 8.0, name
    return covered


STEEP = {"E": 0.7, "A": 30.0, "B": 9000.0, "alpha": 0.2, "beta": 0.4}


@pytest.mark.parametrize(("known", "noise"), [(HOFFMANN, 2e-3), (STEEP, 1e-3)])
def test_intervals_cover_the_truth(known, noise) -> None:
    covered = count_covered(known, noise, n_runs=37, draws=10)
    # At 95% each, 6 or fewer of 10 come once in 1,000.
    assert min(covered.values()) >= 7, covered


@pytest.mark.slow
@pytest.mark.parametrize(("known", "noise"), [(HOFFMANN, 1e-2), (REFITTED, 1e-3), (STEEP, 5e-3)])
def test_intervals_cover_the_truth_nearly_as_often_as_they_say(known, noise) -> None:
    covered = count_covered(known, noise, n_runs=101, draws=60)
    # 95% of 60 are 57; fewer than 51 come once in 1,000.
    assert min(covered.values()) >= 51, covered


def test_one_run_that_went_wrong_hardly_moves_the_law() -> None:
    n, d, losses = draw_runs(ChinchillaFit(**HOFFMANN, objective=0.0), 61, 1e-3)
    before = fit_chinchilla(n, d, losses, bootstraps=3)
    losses[7] *= 2.0
    robust = fit_chinchilla(n, d, losses, bootstraps=3)
    squares = fit_chinchilla(n, d, losses, delta=100.0, bootstraps=3)
    assert robust.alpha == pytest.approx(before.alpha, abs=0.01)
    assert abs(squares.alpha - before.alpha) > 3 * abs(robust.alpha - before.alpha)


def test_other_units_of_loss_and_another_order_of_runs_change_nothing_else() -> None:
    n, d, losses = draw_runs(ChinchillaFit(**HOFFMANN, objective=0.0), 61, 1e-3)
    nats = fit_chinchilla(n, d, losses, bootstraps=3)
    bits = fit_chinchilla(n[::-1], d[::-1], losses[::-1] / math.log(2), bootstraps=3)
    assert bits.alpha == pytest.approx(nats.alpha, rel=1e-3)
    assert bits.E * math.log(2) == pytest.approx(nats.E, rel=1e-3)
    assert bits.B * math.log(2) == pytest.approx(nats.B, rel=1e-2)


def test_lists_arrays_and_tensors_give_the_same_fit() -> None:
    runs = draw_runs(ChinchillaFit(**HOFFMANN, objective=0.0), 13, 1e-3)
    plain = fit_chinchilla(*(each.tolist() for each in runs), bootstraps=5)
    assert fit_chinchilla(*runs, bootstraps=5) == plain
    assert fit_chinchilla(*(torch.tensor(each) for each in runs), bootstraps=5) == plain
    assert fit_chinchilla(*runs, bootstraps=5, seed=1).intervals != plain.intervals


def test_a_term_that_vanishes_in_the_fit_comes_back_in_bootstrap_samples() -> None:
    # Of a run of the lab: E is 0 in the best fit, and a start there never sees it again.
    n = np.repeat([3120, 6984, 12384, 24736, 55536], 3)
    d = np.tile([8192, 32768, 131072], 5)
    losses = [2.605, 2.508, 2.121, 2.591, 2.427, 1.967, 2.586, 2.176, 1.857]
    losses += [2.530, 2.220, 1.818, 2.396, 1.988, 1.751]
    fit = fit_chinchilla(n, d, losses)
    assert fit.E < 1e-3
    assert fit.intervals["E"][1] > 0.3


def test_predictions_worked_by_hand() -> None:
    chinchilla = ChinchillaFit(E=1.0, A=8.0, B=27.0, alpha=1 / 3, beta=1 / 3, objective=0.0)
    assert float(chinchilla.predict(8, 27)) == pytest.approx(1 + 8 / 2 + 27 / 3)
    assert chinchilla.predict([8, 64], [[27], [1]]).shape == (2, 2)
    kaplan = KaplanFit(N_c=16.0, D_c=10.0, alpha_N=0.25, alpha_D=0.5, objective=0.0)
    assert float(kaplan.predict(1, 2)) == pytest.approx(math.sqrt(16**0.5 + 10 / 2))
    off = torch.tensor([[0.5, -1.0, 3.0]])
    assert huber_sum(off, torch.tensor([[1.0, 2.0, 1.0]]), 1.0).item() == 0.125 + 2 * 0.5 + 2.5


def test_the_best_spending_of_a_budget_worked_by_hand_and_by_search() -> None:
    even = ChinchillaFit(E=0.0, A=5.0, B=5.0, alpha=0.5, beta=0.5, objective=0.0)
    assert even.optimal(600.0) == pytest.approx((10.0, 10.0))
    for known in (HOFFMANN, REFITTED):
        fit, compute = ChinchillaFit(**known, objective=0.0), 5.76e23
        n, d = fit.optimal(compute)
        assert 6 * n * d == pytest.approx(compute)
        sizes = np.geomspace(n / 3, n * 3, 2001)
        searched = sizes[fit.predict(sizes, compute / 6 / sizes).argmin()]
        assert n == pytest.approx(searched, rel=2e-3)
    # Twice the budget: size by 2^(β/(α+β)).
    grown = fit.optimal(2 * compute).n_params / n
    assert grown == pytest.approx(2 ** (fit.beta / (fit.alpha + fit.beta)))


def test_numbers_made_of_a_fit_have_intervals_too() -> None:
    fit = fit_chinchilla(*draw_runs(ChinchillaFit(**HOFFMANN, objective=0.0), 61, 1e-3))
    assert len(fit.resampled) == 200
    low, high = fit.interval(lambda each: each.optimal(1e21).n_params)
    truth = ChinchillaFit(**HOFFMANN, objective=0.0).optimal(1e21).n_params
    assert low < fit.optimal(1e21).n_params < high and low < truth < high
    assert fit.interval(lambda each: each.alpha) == fit.intervals["alpha"]
    with pytest.raises(ValueError, match="ask the whole fit"):
        fit.resampled[0].interval(lambda each: each.alpha)

    def refuse(each: ChinchillaFit) -> float:
        raise ValueError("no")

    with pytest.raises(ValueError, match="0 of 200 bootstrap fits"):
        fit.interval(refuse)


def test_a_fit_is_a_record() -> None:
    fit = ChinchillaFit(**HOFFMANN, objective=0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.E = 1.0
    flat = dataclasses.replace(fit, alpha=-0.1)
    with pytest.raises(ValueError, match=r"alpha is -0\.1 and beta 0\.28"):
        flat.optimal(1e20)
    with pytest.raises(ValueError, match="compute is 0"):
        fit.optimal(0)


GOOD = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((GOOD, GOOD[:-1], GOOD), "7 n_params, 6 n_tokens, 7 losses"),
        (([*GOOD[:-1], math.nan], GOOD, GOOD), "n_params has nan in it"),
        ((GOOD, [*GOOD[:-1], math.inf], GOOD), "n_tokens has inf in it"),
        ((GOOD, GOOD, [*GOOD[:-1], 0.0]), "losses has 0 in it; expected finite numbers above 0"),
        ((GOOD, [-5.0, *GOOD[:-1]], GOOD), "n_tokens has -5 in it"),
        ((GOOD[:4], GOOD[:4], GOOD[:4]), "4 runs for a law of [45] parameters"),
        (([10.0] * 7, GOOD, GOOD), "n_params has 1 different values"),
        ((GOOD, [GOOD], GOOD), r"n_tokens has shape \(1, 7\)"),
    ],
)
@pytest.mark.parametrize("fit_law", [fit_chinchilla, fit_kaplan])
def test_what_is_no_table_of_runs_is_refused_in_words(fit_law, given, words) -> None:
    with pytest.raises(ValueError, match=words):
        fit_law(*given)


@pytest.mark.parametrize("fit_law", [fit_chinchilla, fit_kaplan])
def test_losses_that_are_all_the_same_tell_no_law(fit_law) -> None:
    n, d, losses = draw_runs(ChinchillaFit(**HOFFMANN, objective=0.0), 13, 1e-3)
    with pytest.raises(ValueError, match=r"^losses has 1 different values; this law needs 2 or m"):
        fit_law(n, d, np.full_like(losses, 3.0))


def test_numbers_of_any_kind_are_read_and_others_named() -> None:
    n, d, losses = draw_runs(ChinchillaFit(**HOFFMANN, objective=0.0), 13, 1e-3)
    plain = fit_chinchilla(n, d, losses, bootstraps=3)
    wanting = torch.tensor(losses, requires_grad=True)
    assert fit_chinchilla(n.tolist(), d.astype(object), wanting, bootstraps=3) == plain
    half = torch.tensor(losses).bfloat16()
    rounded = fit_chinchilla(n, d, half.double().numpy(), bootstraps=3)
    assert fit_chinchilla(n, d, half, bootstraps=3) == rounded
    for wrong in (["a"] * 13, [[1], [2, 3]], {"a": 1}, [10**400] * 13, losses + 1j, [None] * 13):
        with pytest.raises(ValueError, match=r"^n_tokens .*expected"):
            fit_chinchilla(n, wrong, losses)
    masked = np.ma.masked_array(d, mask=[at == 3 for at in range(13)])
    with pytest.raises(ValueError, match="n_tokens has 1 masked numbers; leave these runs out of"):
        fit_chinchilla(n, masked, losses)


@pytest.mark.parametrize("seed", [-1, 1.5, None, 2**63])
def test_a_seed_that_is_none_is_refused(seed) -> None:
    runs = draw_runs(ChinchillaFit(**HOFFMANN, objective=0.0), 13, 1e-3)
    with pytest.raises(ValueError, match="expected a whole number from 0 on"):
        fit_chinchilla(*runs, bootstraps=3, seed=seed)


def test_settings_of_a_fit_are_checked() -> None:
    with pytest.raises(ValueError, match="delta is 0"):
        fit_kaplan(GOOD, GOOD, GOOD, delta=0)
    with pytest.raises(ValueError, match="bootstraps is 0"):
        fit_kaplan(GOOD, GOOD, GOOD, bootstraps=0)


def test_labs_export_the_fits() -> None:
    assert regard.labs.fit_chinchilla is fit_chinchilla
    assert regard.labs.fit_kaplan is fit_kaplan
    assert all(hasattr(regard.labs, name) for name in regard.labs.__all__)
    assert all(before < after for before, after in pairwise(regard.labs.__all__))
