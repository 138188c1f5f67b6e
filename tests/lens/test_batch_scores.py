"""Scores of a batch are those of records, text by text, whoever's model it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_model
from torch import Tensor, nn

import regard
from regard.lens.batch_scores import score_batch
from regard.lens.record import SCORES
from regard.lens.watch import watch

LABELS = [["a", ",", "b", "a", "c", "d", "e"], ["a", "b", "a", "b", "c", "a", "a"], [*"abcdefg"]]
IDS = torch.tensor([[5, 6, 7, 5, 8, 9, 10], [5, 7, 5, 7, 8, 5, 5], [5, 7, 8, 9, 10, 11, 12]])


def own(family: str) -> tuple[nn.Module, Callable[[Tensor], object]]:
    model = make_model(family)
    return model, model.run


def foreign(family: str) -> tuple[nn.Module, Callable[[Tensor], object]]:
    from lens_subjects import SUBJECTS

    model = SUBJECTS[family]()
    return model, lambda ids_bt: model(input_ids=ids_bt)


@pytest.mark.parametrize(
    ("make", "family"),
    [(own, name) for name in ("llama", "bert", "bloom", "mistral")]
    + [(foreign, name) for name in ("gpt_oss", "bert")],
)
def test_scores_are_those_of_a_record_of_each_text(make: Any, family: str) -> None:
    model, run = make(family)
    found = score_batch(model, run, IDS, LABELS)
    for row, labels in enumerate(LABELS):
        with torch.no_grad(), watch(model, tokens=labels) as record:
            run(IDS[row : row + 1])
        expected = record.heads()
        assert [place.name for place in found] == [place.name for place in record.places]
        assert [place.layer for place in found] == [place.layer for place in record.places]
        for number, scores_bhk in enumerate(found.values()):
            for k, name in enumerate(SCORES):
                np.testing.assert_allclose(
                    scores_bhk[row, :, k], expected[name][number], rtol=2e-5, atol=1e-6
                )
    last = next(iter(found.values()))
    assert np.isnan(last[2, :, SCORES.index("induction")]).all()
    assert not np.isnan(last[1, :, SCORES.index("induction")]).any()
    assert np.isnan(last[1, :, SCORES.index("separator")]).all()


class Pooled(nn.Module):
    """Attends to every second token only, so that keys are no tokens of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 6)

    def forward(self, ids: Tensor) -> Tensor:
        q = self.words(ids)[:, None]
        return regard.attention(q, q[:, :, ::2], q[:, :, ::2])


def test_a_model_that_reads_no_text_as_it_is_is_refused_in_words() -> None:
    model = Pooled()
    with pytest.raises(ValueError, match="attends from 7 to 4 tokens in 3 rows"):
        score_batch(model, model, IDS, LABELS)
    with pytest.raises(ValueError, match="no attention was seen in Embedding"):
        score_batch(model.words, model.words, IDS, LABELS)
