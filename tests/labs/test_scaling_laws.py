"""The lab on scaling laws: its language has the entropy it says; sentences follow numbers."""

import json
from dataclasses import replace

import pytest
import torch

from regard.labs.parts import Run
from regard.labs.report import make_figure
from regard.labs.scaling_laws import (
    FULL,
    GRAIN,
    LAB,
    PRIME,
    TINY,
    Plan,
    find,
    hash_contexts,
    make_model,
    measure_plan,
    spell_count,
    write_text,
    zipf_tokens,
)
from regard.labs.small_training import generator_of
from regard.models import Transformer

SMALL = replace(TINY, vocab_size=11, orders=(0.2, 0.3, 0.5), length=7)


def chances(plan: Plan, last: list[int]) -> list[float]:
    """The language's own distribution after these tokens, the newest first; in plain Python."""
    zipf = zipf_tokens(plan.vocab_size).tolist()
    found = [plan.orders[0] * zipf.count(token) / GRAIN for token in range(plan.vocab_size)]
    hashed = 0
    for order, token in zip(plan.orders[1:], last, strict=True):
        hashed = (hashed + token * 7_919 + 104_729) ** 2 % PRIME
        each = (hashed + 32_452_843) ** 2 % PRIME
        found[zipf[(each + 86_028_121) ** 2 % PRIME % GRAIN]] += order
    return found


def test_a_tokens_surprise_is_minus_the_log_of_its_chance() -> None:
    ids, surprise = write_text(SMALL, 13, generator_of(0))
    assert ids.shape == (13, 8) and bool((surprise[:, :2] == 0).all())
    for row in range(13):
        for t in range(2, 8):
            after = chances(SMALL, [int(ids[row, t - 1]), int(ids[row, t - 2])])
            assert sum(after) == pytest.approx(1.0)
            chance = after[int(ids[row, t])]
            assert float(surprise[row, t]) == pytest.approx(
                -torch.tensor(chance).log().item(), rel=1e-4
            )


def test_tokens_come_as_often_as_their_chance() -> None:
    ids, _ = write_text(replace(SMALL, length=3), 60_000, generator_of(1))
    alike = ids[(ids[:, 0] == 0) & (ids[:, 1] == 1)]
    expected = torch.tensor(chances(SMALL, [1, 0]))
    counted = torch.bincount(alike[:, 2], minlength=11) / len(alike)
    assert len(alike) > 1000
    bound = 5 * (expected * (1 - expected) / len(alike)).sqrt() + 1e-9
    assert bool(((counted - expected).abs() <= bound).all())


def test_zipfs_law_gives_rank_r_its_share() -> None:
    counts = torch.bincount(zipf_tokens(64), minlength=64)
    assert counts.sum() == GRAIN
    assert float(counts[0] / counts[7]) == pytest.approx(8**1.2, rel=1e-3)


def test_a_hash_tells_contexts_apart_and_knows_no_others() -> None:
    last = torch.tensor([[3, 5, 7], [3, 5, 8], [4, 5, 7]])
    found = hash_contexts(last)
    assert found.shape == (3, 3)
    assert bool((found[0, :2] == found[1, :2]).all()), "the last two are the same"
    assert found[0, 2] != found[1, 2]
    assert bool((found[0] != found[2]).all())


def test_full_models_have_a_tenth_to_thirty_million_parameters_without_their_table() -> None:
    sizes = [make_model(FULL, dim)[1] for dim in FULL.widths]
    assert len(set(sizes)) >= 14 and sizes == sorted(sizes)
    assert min(sizes) <= 1.0e5 and max(sizes) >= 3.0e7
    config, n_params = make_model(FULL, 64)
    model = Transformer(config)
    table = 512 * 64
    assert n_params == sum(p.numel() for p in model.parameters()) - table


def test_the_full_plan_measures_what_json_and_a_figure_hold(tmp_path) -> None:
    plan = replace(
        FULL, widths=(32, 64, 96), tokens=(128, 256, 512), n_rows=1, n_held_out=8, least_models=3
    )
    run = Run(tmp_path / "parts", {"tiny": False}, torch.device("cpu"), None)
    results = measure_plan(run, plan)
    assert len(results["runs"]) == 9
    assert [row["n_tokens"] for row in results["runs"][:3]] == [128, 256, 512]
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert all(row["loss"] > results["entropy"] for row in results["runs"])
    assert all(sentence.endswith(".") for sentence in find(results))
    LAB.draw(results, make_figure())
    few = measure_plan(run, replace(plan, max_compute=6 * 100_000 * 512))
    assert len(few["runs"]) == 7, "two of the widest take more compute, and are left out"


def number(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "low": low, "high": high, "n": 200}


def made_up(**changed):
    exponents = {"alpha": number(0.2, 0.1, 0.3), "beta": number(0.2, 0.15, 0.25)}
    chinchilla = {"E": number(1.7, 1.6, 1.8), "A": number(9, 8, 10), "B": number(9, 8, 10)}
    kaplan = {name: number(0.1, 0.05, 0.2) for name in ("N_c", "D_c", "alpha_N", "alpha_D")}
    spent = {
        "n_params": number(2e6, 1e6, 3e6),
        "n_tokens": number(4e7, 3e7, 5e7),
        "ratio": number(20, 10, 50),
    }
    results = {
        "entropy": 1.75,
        "zipf": 1.2,
        "runs": [
            {"n_params": 98624, "n_tokens": 5e5, "loss": 2.5},
            {"n_params": 3e7, "n_tokens": 1.6e7, "loss": 1.9},
        ],
        "fits": {
            "chinchilla": {
                "parameters": chinchilla | exponents,
                "error": 0.01,
                "error ahead": 0.02,
            },
            "kaplan": {"parameters": kaplan, "error": 0.03, "error ahead": 0.05},
        },
        "runs ahead": 3,
        "optimal": [{"compute": 1e15, **spent}],
        "growth": number(0.45, 0.4, 0.55),
        "isoflop": {"curves": [], "exponent": number(0.5, 0.45, 0.6)},
    }
    return results | changed


def test_findings_as_predicted() -> None:
    text = " ".join(find(made_up()))
    assert "98.6 thousand to 30 million parameters" in text
    assert "α = 0.2 (95% interval 0.1 to 0.3), which holds the predicted 0.20" in text
    assert "its interval holds the language's entropy" in text
    assert "Chinchilla's errs less" in text
    assert "which holds the 0.5" in text and "20 (95% interval 10 to 50) tokens a parameter" in text
    assert "not clearly apart from the fit's" in text
    assert "against" not in text


def test_findings_turn_with_the_numbers() -> None:
    fits = made_up()["fits"]
    fits["chinchilla"]["parameters"] |= {
        "alpha": number(0.4, 0.3, 0.5),
        "E": number(1.9, 1.8, 2.0),
    }
    fits["kaplan"]["error ahead"] = 0.01
    curves = {"curves": [], "exponent": number(0.8, 0.7, 0.9)}
    text = " ".join(find(made_up(fits=fits, growth=number(0.3, 0.2, 0.4), isoflop=curves)))
    assert "α = 0.4 (95% interval 0.3 to 0.5), against the predicted 0.20" in text
    assert "which lies above the language's entropy" in text
    assert "Chinchilla's errs no less" in text
    assert "which does not hold the 0.5" in text
    assert "0.9), apart from the fit's" in text
    fits["chinchilla"]["parameters"]["E"] = number(1.5, 1.4, 1.6)
    assert "which lies below the language's entropy" in " ".join(find(made_up(fits=fits)))


def test_a_best_number_beyond_all_runs_is_told() -> None:
    told = find(made_up())[1]
    assert told.startswith("By the fit 1e+15 FLOPs are best spent on 2 million (95% interval 1 ")
    assert " 3 million) parameters and 40 million (" in told
    assert " 50 million) tokens (2.5 times the most of any run), 20 (" in told
    runs = [{"n_params": 1e6, "n_tokens": 4e7, "loss": 2.5}, *made_up()["runs"]]
    assert "the most of any run" not in find(made_up(runs=runs))[1]


def test_a_law_without_a_best_size_is_told() -> None:
    spent = [{"compute": 1e15, "n_params": None, "n_tokens": None, "ratio": None}]
    said = find(made_up(optimal=spent, growth=None))[1]
    assert said.startswith("The runs name no best size: by the fit, or by most of its bootstrap")
    assert "too few minima" in find(made_up(isoflop={"curves": [], "exponent": None}))[2]


def test_counts_are_spelled_in_words() -> None:
    assert [spell_count(x) for x in (98_624, 3.07e7, 2e9, 12)] == [
        "98.6 thousand",
        "30.7 million",
        "2 billion",
        "12",
    ]
