"""stories260K, a real LLaMA of 260 thousand parameters: its known continuation, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.generation import generate_ids
from regard.models import Transformer, count_parameters, load

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260K"

pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="stories260K does not lie beside the clone"),
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load(FOLDER)


@pytest.fixture(scope="module")
def golden() -> Any:
    return json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))


def test_its_greedy_continuation_is_the_one_known_to_be_right(
    model: Transformer, golden: Any
) -> None:
    expected = golden["greedy_ids"][len(golden["prompt_ids"]) :]
    made = generate_ids(model, [golden["prompt_ids"]], max_new_tokens=len(expected))
    assert made.rows() == [expected]


def test_every_step_of_it_is_the_likeliest_without_a_cache(model: Transformer, golden: Any) -> None:
    """The whole text in one call: each token is the argmax of the scores before it."""
    ids = torch.tensor([golden["greedy_ids"]])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    assert logits is not None
    start = len(golden["prompt_ids"]) - 1
    assert torch.equal(logits[:, start:].argmax(-1), ids[:, start + 1 :])


def test_its_size_is_known(model: Transformer) -> None:
    assert count_parameters(model.config) == sum(p.numel() for p in model.parameters()) == 260_032
