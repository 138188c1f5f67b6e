"""The lab on induction heads: its texts and edits by hand, and sentences that follow numbers."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard import edit
from regard.labs import induction
from regard.labs.parts import Run
from regard.labs.report import make_figure

CPU = torch.device("cpu")
SMALL = replace(
    induction.TINY,
    vocab_size=11,
    n_tokens=14,
    dim=20,
    n_heads=5,
    n_texts=3,
    steps=10,
    seeds=2,
    n_evaluated=7,
    n_read=3,
    half=5,
)


class Copies(nn.Module):
    """Says what came after the same token before, with certainty; of a new token, token 0."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, ids_bt: Tensor) -> Tensor:
        logits_btv = torch.zeros(*ids_bt.shape, self.vocab_size)
        for b, row in enumerate(ids_bt.tolist()):
            for t, token in enumerate(row):
                after = row[row.index(token) + 1] if token in row[:t] else 0
                logits_btv[b, t, after] = 100.0
        return logits_btv


def test_a_text_repeats_its_segment_and_knows_what_can_be_known() -> None:
    order = torch.tensor([[5, 3, 7, 1], [2, 9, 4, 8]])
    texts = induction.repeat_texts(order, torch.tensor([[3], [4]]), 6)
    assert texts.ids.tolist() == [[5, 3, 7, 5, 3, 7], [2, 9, 4, 8, 2, 9]]
    assert texts.targets.tolist() == [[3, 7, 5, 3, 7, 5], [9, 4, 8, 2, 9, 4]]
    assert texts.repeated.int().tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]


def test_texts_have_segments_of_many_lengths_and_no_token_twice_in_one() -> None:
    texts = induction.draw_texts(induction.TINY, 0, 0, 50, CPU)
    lengths = (~texts.repeated).sum(1)
    assert lengths.min() >= 8 and lengths.max() <= 16 and len(set(lengths.tolist())) > 5
    for row, n in zip(texts.ids.tolist(), lengths.tolist(), strict=True):
        assert len(set(row[:n])) == n and set(row) == set(row[:n])
    again = induction.draw_texts(induction.TINY, 0, 0, 50, CPU)
    other = induction.draw_texts(induction.TINY, 0, 1, 50, CPU)
    assert torch.equal(texts.ids, again.ids) and not torch.equal(texts.ids, other.ids)


def test_what_copies_has_no_loss_on_repeated_tokens_and_all_of_it_elsewhere() -> None:
    texts = induction.draw_texts(SMALL, 0, 0, 9, CPU)
    assert float(induction.loss_of(Copies(SMALL.vocab_size), texts)) < 1e-6
    first = replace(texts, repeated=~texts.repeated)
    assert float(induction.loss_of(Copies(SMALL.vocab_size), first)) > 50


def test_an_untrained_model_is_near_chance_and_its_heads_score_low() -> None:
    torch.manual_seed(3)
    model = induction.AttentionOnly(SMALL, 2)
    seen = induction.evaluate(model, induction.draw_texts(SMALL, 0, 0, 40, CPU))
    assert seen.accuracy < 0.3 and -5 < seen.log_prob < -1.5
    assert seen.scores["induction"].shape == (2, 5) == seen.scores["previous"].shape
    assert seen.scores["induction"].max() < 0.4


def test_the_step_of_a_share_of_the_way_by_hand() -> None:
    trained = {"steps": [0, 10, 20, 30], "accuracy": [0.1, 0.1, 0.3, 0.9]}
    assert induction.way_of(trained, "accuracy").tolist() == pytest.approx([0, 0, 0.25, 1])
    assert induction.step_of(trained, "accuracy", 0.1) == pytest.approx(14)
    assert induction.step_of(trained, "accuracy", 0.25) == pytest.approx(20)
    assert induction.step_of(trained, "accuracy", 0.5) == pytest.approx(20 + 10 / 3)


def test_heads_are_split_at_half_of_the_highest_score() -> None:
    assert induction.split_heads(np.array([0.2, 0.4, 0.8, 0.39])) == ([1, 2], [0, 3])
    assert induction.split_heads(np.array([0.5, 0.5])) == ([0, 1], [])


def test_others_are_as_many_heads_of_the_same_layers() -> None:
    heads = [[1, 0], [1, 3], [4, 2]]
    for seed in range(5):
        others = induction.draw_others(heads, 5, np.random.default_rng(seed))
        assert [layer for layer, _ in others] == [1, 1, 4]
        assert not [head for head in others if head in heads]
    # Of a layer in which most heads do it, those that are left.
    assert induction.draw_others([[0, 0], [0, 2]], 3, np.random.default_rng(0)) == [[0, 1]]


def test_forbidden_looks_are_the_induction_looks_of_that_layer_and_no_others() -> None:
    torch.manual_seed(5)
    model, half = induction.AttentionOnly(SMALL, 2), 7
    order = torch.rand(3, SMALL.vocab_size).argsort(1)
    texts = induction.repeat_texts(order, torch.full((3, 1), half), 2 * half)
    plain = induction.evaluate(model, texts).scores["induction"]
    with edit(model, *induction.forbid_looks(half, 1, 1)):
        off = induction.evaluate(model, texts).scores["induction"]
    with edit(model, *induction.forbid_looks(half, 1, 2)):
        beside = induction.evaluate(model, texts).scores["induction"]
    assert np.array_equal(off[0], plain[0]) and not off[1].any() and plain[1].min() > 0
    assert (beside[1] > plain[1]).all()  # their weight goes to the keys that are left


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("induction") / "parts"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(induction, "FULL", SMALL)
        results = induction.measure(Run(path, {"tiny": False}, CPU, None))
    found: dict[str, Any] = json.loads(json.dumps(results, allow_nan=False))
    return found


def test_a_full_run_of_small_sizes_is_finite_and_drawn(measured: dict[str, Any]) -> None:
    assert [(one["n_layers"], one["seed"]) for one in measured["runs"]] == [
        *((2, 0), (2, 1), (1, 0), (1, 1))
    ]
    for one in measured["runs"]:
        assert one["steps"] == [0, 10]
        assert all(math.isfinite(x) for name in induction.METRICS for x in one[name])
    assert [len(row["gains"]) for row in measured["language_model"]] == [3] * 7
    induction.draw(measured, make_figure())
    said = induction.find(measured)
    assert len(said) == 2 and said[0].startswith("0 of 2 models with two layers learn")
    assert "does not learn it" in said[0]


def learned(results: dict[str, Any], turned: bool) -> dict[str, Any]:
    """Results in which both depths go their way: as predicted, or the other way round."""
    found = copy.deepcopy(results)
    for seed, one in enumerate(found["runs"]):
        one["steps"] = [0, 10, 20, 30, 40]
        sharp, smooth = [0.0, 0.0, 0.0, 0.9, 1.0], [-4.0, -3.0, -2.0, -1.0, 0.0]
        if turned:
            sharp, smooth = [0.0, 0.25, 0.5, 0.75, 1.0], [-4.0, -4.0, -4.0, -0.1, 0.0]
        ok = one["n_layers"] == 2 or turned
        one["accuracy"] = [x + seed / 1000 for x in sharp] if ok else [0, 0.1, 0.1, 0.1, 0.1]
        one["log_prob"], one["score"] = smooth, [0, 0, 0, 0.5, 0.9] if turned else [0, 0, 1, 1, 1]
        good, bad = (0.0 + seed / 99, 0.9) if turned else (0.9, 0.0 + seed / 99)
        one["ablated"] = {"look": bad, "other look": good, "n_doing": 2, "others": None}
        one["ablated"] |= {"nothing": 0.99, "induction": bad, "one": 0.9, "previous": bad}
    rows = found["language_model"]
    for row in rows:
        less = 0.1 if (row["off"] == "induction") != turned else 1.0
        row["gains"] = [less, less + 0.01, less + 0.02]
    return found


def test_sentences_turn_with_the_numbers(measured: dict[str, Any]) -> None:
    said = induction.find(learned(measured, turned=False))
    other = induction.find(learned(measured, turned=True))
    for sentence, there, turned in (
        (0, "does not learn it", "learns it in 2, against the prediction"),
        (1, "before it: -", "after it: +"),
        (2, "sharper in the sharp metric", "in the smooth metric, against the prediction"),
        (4, "that look is the cause", "is not the cause, against the prediction"),
        (5, "less than without as many others", "more, against the prediction than"),
    ):
        assert there in said[sentence] and turned in other[sentence]
        assert turned not in said[sentence]
    assert "2 of 5 heads of the last layer" in said[3]
    assert "there are no others in that layer" in said[3]


def test_no_accuracy_is_said_to_be_above_1(measured: dict[str, Any]) -> None:
    found = learned(measured, turned=False)
    two = [one for one in found["runs"] if one["n_layers"] == 2]
    for one, end in zip(two, (0.9, 1.0), strict=True):
        one["accuracy"][-1] = one["score"][-1] = end
        one["ablated"] |= {"nothing": end, "one": end, "other look": end}
    said = " ".join(induction.find(found))
    assert said.count("0.95 (95% interval 0.315 to 1)") == 5


def test_a_look_that_costs_little_is_not_called_the_cause(measured: dict[str, Any]) -> None:
    found = learned(measured, turned=False)
    for seed, one in enumerate(found["runs"]):
        one["ablated"] |= {"look": 0.9 + seed / 9999, "other look": 0.95}
    said = induction.find(found)[4]
    assert said.endswith("that look matters more.") and "cause" not in said


def test_others_of_the_layer_are_told_where_there_are_some(measured: dict[str, Any]) -> None:
    found = learned(measured, turned=False)
    found["runs"][0]["ablated"]["others"] = 0.75
    assert "without the others of that layer, in 1 models, 0.75" in induction.find(found)[3]


def test_a_language_model_without_a_gain_is_said_to_have_none(measured: dict[str, Any]) -> None:
    rows = copy.deepcopy(measured["language_model"])
    rows[0]["gains"] = [-0.1, 0.1, 0.0]
    assert "gains nothing clear" in induction.find_language_model(rows)
