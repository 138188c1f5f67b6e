"""Ways and reaches counted by hand; crossings; sentences that follow the numbers."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.labs import fossils
from regard.labs.fossils import FULL, KINDS, LAB, NOTHING, TINY
from regard.labs.parts import Run
from regard.labs.report import make_figure
from regard.labs.small_training import generator_of

CPU = torch.device("cpu")


def test_steps_on_the_way_by_hand() -> None:
    dilations = fossils.dilations_for(2048)
    assert dilations[0] == 1 and dilations[-1] == 1024
    assert fossils.count_steps("LSTM", 2000, dilations) == 2000
    # 1024 + 512 + 256 + 128 + 64 + 16
    assert fossils.count_steps("convolution", 2000, dilations) == 6
    assert fossils.count_steps("convolution", 10, dilations) == 2
    assert fossils.count_steps("convolution", 2048, dilations) is None
    assert fossils.count_steps("attention", 2000, dilations) == 1


def test_no_way_through_the_convolution_is_shorter() -> None:
    dilations = fossils.dilations_for(16)
    shortest: dict[int, int] = {}
    for n in range(len(dilations) + 1):
        for taken in itertools.combinations(dilations, n):
            shortest.setdefault(sum(taken), n)
    found = {d: fossils.count_steps("convolution", d, dilations) for d in range(16)}
    assert found == shortest


def gradient_of(model: nn.Module, length: int) -> Tensor:
    """How much the last answer depends on each token's embedding, (T,)."""
    embedded: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        out.retain_grad()
        embedded.append(out)

    next(m for m in model.modules() if isinstance(m, nn.Embedding)).register_forward_hook(keep)
    model(torch.randint(2, (1, length), generator=generator_of(1)))[0, -1, 0].backward()
    grad = embedded[0].grad
    assert grad is not None
    return grad[0].abs().sum(-1)


@pytest.mark.parametrize(("kind", "reach"), [("LSTM", 21), ("convolution", 16), ("attention", 21)])
def test_the_convolution_alone_has_an_end_of_its_reach(kind: str, reach: int) -> None:
    found = gradient_of(fossils.make_model(kind, replace(TINY, reach=16), 0), 21)
    assert (found[-reach:] > 0).all(), "it reaches so many tokens, the last one counted"
    assert (found[:-reach] == 0).all(), "and nothing before"


@pytest.mark.parametrize("kind", KINDS)
def test_no_model_sees_what_comes_later(kind: str) -> None:
    model = fossils.make_model(kind, TINY, 0).eval()
    ids = torch.randint(4, (1, 19), generator=generator_of(2))
    changed = ids.clone()
    changed[0, 11:] = (ids[0, 11:] + 1) % 4
    with torch.no_grad():
        one, other = model(ids), model(changed)
    torch.testing.assert_close(one[:, :11], other[:, :11], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one[:, 11:], other[:, 11:], rtol=1e-2)


@pytest.mark.parametrize("size", [TINY, FULL], ids=["tiny", "full"])
def test_all_have_about_as_many_parameters(size: fossils.Size) -> None:
    counts = [sum(p.numel() for p in fossils.make_model(k, size, 0).parameters()) for k in KINDS]
    assert max(counts) < 1.05 * min(counts)


def test_the_answer_is_the_marked_letter_from_the_mark_on() -> None:
    texts = fossils.draw_texts(40, 33, 4, generator_of(3))
    marked = texts.ids >= 4
    assert (marked.sum(1) == 1).all()
    assert torch.equal(marked.nonzero()[:, 1:], texts.places)
    assert int(texts.places.max()) < fossils.PLACES
    letters = texts.ids.gather(1, texts.places) - 4
    asked = torch.arange(33) >= texts.places
    assert torch.equal(texts.answers, torch.where(asked, letters, NOTHING))


def test_a_distance_is_asked_there_and_nowhere_else() -> None:
    texts = fossils.draw_texts(5, 33, 4, generator_of(4))
    logits = torch.zeros(5, 33, 4, requires_grad=True)

    class Given(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return logits

    loss = fossils.loss_of(Given(), texts, 7)
    assert loss.item() == pytest.approx(math.log(4))
    loss.backward()
    assert logits.grad is not None
    asked = logits.grad.abs().sum(-1) > 0
    assert torch.equal(asked.nonzero()[:, 1:], texts.places + 7)


def test_where_times_cross_by_hand() -> None:
    lengths = [100, 400, 1600]
    theirs = np.array([2.0, 2.0, 2.0])
    # From half to twice on the way from 100 to 400: in the middle of the logarithms.
    assert fossils.find_crossing(lengths, np.array([1.0, 4.0, 9.0]), theirs) == pytest.approx(200)
    assert fossils.find_crossing(lengths, np.array([1.0, 1.0, 1.9]), theirs) == math.inf
    assert fossils.find_crossing(lengths, np.array([3.0, 4.0, 9.0]), theirs) == 0
    twice = fossils.find_crossing([*lengths, 6400], np.array([1.0, 4.0, 1.0, 4.0]), np.full(4, 2.0))
    assert twice == pytest.approx(3200), "the last one counts"


def test_the_whole_run_gives_numbers_that_json_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = replace(FULL, widths=(5, 6, 8), reach=64, batch=3, steps=(2, 2), seeds=2, texts=7)
    size = replace(size, distances=(3, 40), timed=(17, 33), repeats=2)
    monkeypatch.setattr(fossils, "FULL", size)
    results = LAB.measure(Run(tmp_path / "parts", {"tiny": False}, CPU, None))
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert results["kinds"]["LSTM"]["path"] == [3, 40]
    assert [len(each) for each in results["kinds"]["attention"]["together"]] == [2, 2]
    assert len(LAB.find(results)) == 6
    LAB.draw(results, make_figure())


def invent(shares: dict[str, float], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Results in which each kind recalls so much at the far distance, and takes such times."""
    kinds = {
        kind: {
            "parameters": 100,
            "alone": [[1.0, 1.0], [shares[kind], shares[kind] + 0.001]],
            "together": [[1.0, 1.0], [0.5, 0.7]],
            "path": [3, None if kind == "convolution" else 40],
            "seconds": [[each, each] for each in seconds[kind]],
        }
        for kind in KINDS
    }
    return {
        "seeds": 2,
        "steps": [10, 20],
        "guessing": 0.25,
        "distances": [3, 40],
        "lengths": [100, 400],
        "dilations": [1, 2, 4],
        "kinds": kinds,
    }


def test_the_sentences_turn_with_the_numbers() -> None:
    shares = {"LSTM": 0.3, "convolution": 0.5, "attention": 0.95}
    times = {"LSTM": [2.0, 2.0], "convolution": [9.0, 9.0], "attention": [1.0, 4.0]}
    said = LAB.find(invent(shares, times))
    assert "Attention recalls more than the LSTM and more than the convolution." in said[0]
    assert "LSTM up to 3 tokens away" in said[1] and "attention up to 40 tokens away" in said[1]
    assert "not clearly more or less than the LSTM" in said[2]
    assert "LSTM 40, convolution none, it is out of reach, attention 40" in said[3]
    assert "crosses that of the LSTM at 200 tokens (95% interval 200 to 200)" in said[5]
    assert "is not above that of the convolution in the longest texts (400 tokens)" in said[5]

    shares = {"LSTM": 0.9, "convolution": 0.5, "attention": 0.2}
    times = {"LSTM": [0.5, 0.5], "convolution": [9.0, 9.0], "attention": [1.0, 4.0]}
    said = LAB.find(invent(shares, times))
    assert "less than the LSTM, against the prediction" in said[0]
    assert "is above that of the LSTM from 100 tokens on" in said[5]


def test_a_crossing_that_some_draws_have_is_not_denied() -> None:
    """Half of the calls are above the other's, and half below: whether they cross is not clear."""
    shares = {"LSTM": 0.9, "convolution": 0.5, "attention": 0.2}
    results = invent(shares, {kind: [1.0, 1.0] for kind in shares})
    attention = results["kinds"]["attention"]
    attention["seconds"] = [[0.5] * 5, [0.9, 0.9, 0.9, 1.2, 1.2]]
    said = fossils.spell_crossing(results, "LSTM")
    assert "crosses that of the LSTM beyond 400 tokens (95% interval " in said
    assert said.endswith(" to beyond 400)") and "is not above" not in said
    attention["seconds"] = [[1.2, 1.2, 1.2, 0.9, 0.9], [4.0] * 5]
    said = fossils.spell_crossing(results, "LSTM")
    assert "crosses that of the LSTM under 100 tokens (95% interval under 100 to 1" in said


def test_a_crossing_the_other_way_is_not_denied() -> None:
    """Attention begins above the LSTM and ends below it: their times do cross."""
    results = invent(dict.fromkeys(KINDS, 0.5), {kind: [1.0, 2.0] for kind in KINDS})
    results["kinds"]["attention"]["seconds"] = [[1.2] * 2, [1.8] * 2]
    said = fossils.spell_crossing(results, "LSTM")
    assert said.endswith("is not above that of the LSTM in the longest texts (400 tokens)")


def test_an_interval_that_leaves_what_was_measured_says_so() -> None:
    times = {"LSTM": [2.0, 2.0], "convolution": [9.0, 9.0], "attention": [1.0, 4.0]}
    results = invent(dict.fromkeys(KINDS, 0.5), times)
    results["kinds"]["attention"]["seconds"] = [[1.0, 1.0, 3.0], [1.0, 4.0, 4.0]]
    assert "(95% interval under 100 to beyond 400)" in LAB.find(results)[5]
