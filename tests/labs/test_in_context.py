"""In-context learning: constructed attention is gradient descent, judges are what they say."""

import json
from dataclasses import replace

import pytest
import torch

from regard.labs.in_context import (
    ALMOST_NONE,
    FULL,
    LAB,
    TINY,
    Prompts,
    Regressor,
    answers_of,
    apart_at,
    attend_by_softmax,
    attend_linearly,
    descend,
    draw_prompts,
    errors_of,
    find,
    measure_construction,
    measure_plan,
    name_descent,
    name_transformer,
    solve_ridge,
    sum_examples,
    tune_rates,
    update_weights,
)
from regard.labs.parts import Run
from regard.labs.report import make_figure
from regard.labs.small_training import generator_of

# Examples (1, 2) and (3, 1), asked for x = 2. One step of rate 1: w = (1·2 + 3·1)/2 = 5/2, so 5.
BY_HAND = torch.tensor([[[1.0, 2.0], [3.0, 1.0], [2.0, 0.0]]], dtype=torch.float64)


def test_one_layer_is_one_step_of_gradient_descent_worked_by_hand() -> None:
    after = attend_linearly(BY_HAND, 2, rate=1.0)
    # Residuals: 2 - 5/2, 1 - 15/2; the query's is -5.
    expected = torch.tensor([[[1.0, -0.5], [3.0, -6.5], [2.0, -5.0]]], dtype=torch.float64)
    assert torch.equal(after, expected)
    assert torch.equal(update_weights(BY_HAND, 2, rate=1.0), expected)
    # A second step: w = 5/2 + (-1/2 · 1 - 13/2 · 3)/2 = -15/2.
    assert attend_linearly(after, 2, rate=1.0)[0, 2, 1].item() == 15.0


def test_layers_are_steps_and_both_forms_are_one_in_float64() -> None:
    for plan in (TINY, replace(FULL, n_tests=64)):
        found = measure_construction(plan)
        assert found["answer"] > 0.1
        assert max(found[name] for name in ("layer", "dual", "layers")) < 1e-12
        assert found["softmax"] < 1e-5


def test_softmax_heads_come_nearer_as_their_scores_shrink() -> None:
    exact = attend_linearly(BY_HAND, 2, rate=1.0)
    far, near = (
        (attend_by_softmax(BY_HAND, 2, 1.0, small) - exact).abs().max().item()
        for small in (1e-1, 1e-2)
    )
    # What is left is of the order of the square.
    assert 0 < near < far / 50


def test_ridge_least_squares_and_descent_worked_by_hand() -> None:
    x, y = BY_HAND[..., :1], BY_HAND[..., 1]
    sums = sum_examples(Prompts(w_bd=torch.ones(1, 1), x_btd=x, y_bt=y))
    # With both examples Σ x² = 10, Σ x y = 5; with the first 1 and 2; with none 0.
    assert sums.xx_btdd.flatten().tolist() == [0.0, 1.0, 10.0]
    assert solve_ridge(sums, 2.0).flatten().tolist() == pytest.approx([0.0, 2 / 3, 5 / 12])
    assert solve_ridge(sums, ALMOST_NONE).flatten().tolist() == pytest.approx([0.0, 2.0, 0.5])
    assert descend(sums, 0.1, 1).flatten().tolist() == pytest.approx([0.0, 0.2, 0.25])
    assert descend(sums, 0.1, 400)[0, 2, 0].item() == pytest.approx(0.5)


def test_least_squares_is_the_shortest_solution() -> None:
    prompts = draw_prompts(FULL, 5, generator_of(3))
    found = solve_ridge(sum_examples(prompts), ALMOST_NONE)
    for n in (3, 19):
        x, y = prompts.x_btd[:, :n].double(), prompts.y_bt[:, :n].double()
        expected = (torch.linalg.pinv(x) @ y[..., None])[..., 0]
        torch.testing.assert_close(found[:, n], expected, rtol=1e-4, atol=1e-4)


def test_ridge_with_the_noises_square_errs_least() -> None:
    prompts = draw_prompts(TINY, 20_000, generator_of(4))
    sums = sum_examples(prompts)
    own, weaker, stronger = (
        errors_of(answers_of(solve_ridge(sums, TINY.noise**2 * factor), prompts), prompts)
        for factor in (1.0, 0.2, 5.0)
    )
    assert own[0] == pytest.approx(1.0, abs=0.05), "without examples the answer is 0"
    assert bool((own[1:] < weaker[1:]).all()) and bool((own[1:] < stronger[1:]).all())


def test_tuned_rates_grow_with_examples_and_fall_with_steps() -> None:
    plan = replace(TINY, n_tests=256)
    once, often = tune_rates(plan, 1), tune_rates(plan, 12)
    assert len(once) == plan.n_examples + 1
    assert once[1] < once[-1] and often[-1] < once[-1]


def test_an_answer_knows_the_examples_before_it_and_no_others() -> None:
    torch.manual_seed(0)
    model = Regressor(TINY, 2, torch.device("cpu"))
    prompts = draw_prompts(TINY, 3, generator_of(5))
    before = model(prompts)
    changed = replace(prompts, y_bt=prompts.y_bt + torch.eye(10)[4])
    after = model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert bool((before[:, 5:] != after[:, 5:]).any(0).all())


def test_the_full_plan_measures_what_json_and_a_figure_hold(tmp_path) -> None:
    plan = replace(FULL, steps=2, n_prompts=4, n_tests=16, n_seeds=2, width=32)
    run = Run(tmp_path / "parts", {"tiny": False}, torch.device("cpu"), None)
    results = json.loads(json.dumps(measure_plan(run, plan), allow_nan=False))
    assert len(results["seeds"]) == 4
    first = results["seeds"][0]
    assert len(first["errors"]["ridge"]) == 25 and len(first["apart"]["ridge"]) == 25
    assert first["errors"]["ridge"] == results["seeds"][2]["errors"]["ridge"], "the seed's prompts"
    assert all(sentence.endswith(".") for sentence in find(results))
    LAB.draw(results, make_figure())


def test_training_teaches_to_use_the_examples(tmp_path) -> None:
    plan = replace(TINY, steps=150, n_tests=256, depths=(2,), n_seeds=1, n_examples=6)
    run = Run(tmp_path / "parts", {"tiny": True}, torch.device("cpu"), None)
    errors = measure_plan(run, plan)["seeds"][0]["errors"][name_transformer(2)]
    assert errors[-1] < 0.75 * errors[0]


def made_up(transformer: float, near: str):
    """Results of two seeds in which the Transformer errs so much, and answers like that method."""
    others = {"ridge": 0.1, "least squares": 0.2, name_descent(1): 0.6, name_descent(2): 0.4}
    seeds = []
    for factor in (1.0, 1.01):
        errors = {name: [error * factor] * 7 for name, error in others.items()}
        errors[name_transformer(2)] = [transformer * factor] * 7
        apart = {name: [(0.01 if name == near else 0.3) * factor] * 7 for name in others}
        seeds.append({"n_layers": 2, "errors": errors, "apart": apart})
    exact = {"layer": 1e-15, "dual": 0.0, "layers": 1e-15, "n_layers": 2, "answer": 0.5}
    return {
        "n_dims": 3,
        "n_examples": 6,
        "depths": [2],
        "gd_steps": [1, 2],
        "construction": exact | {"softmax": 1e-7, "small": 1e-4},
        "seeds": seeds,
    }


def test_findings_turn_with_the_numbers() -> None:
    between = find(made_up(0.3, "ridge"))
    assert between[1].startswith("With 1 example of 3") and between[2].startswith("With 6 examples")
    order = [
        "ridge 0.1",
        "least squares 0.2",
        "Transformer of 2 layers 0.3",
        "2 steps",
        "1 step of",
    ]
    places = [between[2].index(words) for words in order]
    assert places == sorted(places)
    assert "most nearly like ridge" in between[3] and "not clearly nearer" not in between[3]
    assert "3 (95% interval 3 to 3) times that of ridge: clearly more" in between[4]
    assert "times that of 2 steps of gradient descent: clearly less" in between[5]
    worst = find(made_up(0.8, name_descent(1)))
    assert "most nearly like 1 step of gradient descent" in worst[3]
    assert "times that of 2 steps of gradient descent: clearly more" in worst[5]
    best = find(made_up(0.05, "none"))
    assert "not clearly nearer" in best[3]
    assert "times that of ridge: clearly less" in best[4]


def test_seeds_that_disagree_leave_it_open() -> None:
    results = made_up(0.1, "ridge")
    results["seeds"][1]["errors"][name_transformer(2)] = [0.3] * 7
    assert "times that of ridge: not clearly apart" in find(results)[4]
    assert next(iter(apart_at(results, 2, 3))) == "ridge"
