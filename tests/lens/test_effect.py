"""What heads are worth: a batch of variants gives what one run after another gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from lens_subjects import BERT, SUBJECTS, text_model
from lens_words import SENTENCE

import regard
from regard import Ablate, Block, Effect
from regard.lens import effect as effects

TEXT = SENTENCE.removesuffix(" tired.")


class Letters:
    """A tokenizer by Hugging Face's methods: each letter a token, one of them a mask."""

    is_fast = True
    mask_token_id: int | None = None

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        ids = [5 + ord(letter) % 64 for letter in text]
        ids = [3 if letter == "_" else number for letter, number in zip(text, ids, strict=True)]
        return {"input_ids": ids, "offset_mapping": [(n, n + 1) for n in range(len(text))]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.decode([number]) for number in ids]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join("_" if number == 3 else chr(64 + (number - 5) % 64) for number in ids)


def log_prob(model: Any, ids: list[int], at: int, target: int, *edits: Any) -> float:
    with torch.no_grad(), regard.edit(model, *edits):
        logits = model(torch.tensor([ids])).logits[0, at]
    return float(logits.log_softmax(-1)[target])


@pytest.fixture(scope="module")
def small() -> Any:
    return regard.load("embedded:lm")


def assert_one_by_one(found: Effect, change: Any, shape: tuple[int, int]) -> None:
    """`change(layer, head)` is the same by a run of its own."""
    assert found.heads.shape == shape and found.layers.shape == shape[:1]
    for layer in {0, 1, shape[0] - 1}:
        assert found.layers[layer] == pytest.approx(change(layer, None), abs=2e-5)
        for head in {0, shape[1] - 1}:
            assert found.heads[layer, head] == pytest.approx(change(layer, head), abs=2e-5)
    assert found.whole == pytest.approx(change(None, None), abs=2e-5)
    assert np.abs(found.heads).max() > 1e-3


def test_every_head_is_what_a_run_of_its_own_gives(small: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(effects, "BATCH_TOKENS", {"cpu": 130})
    ids = small.tokenizer.encode(TEXT).ids
    found = regard.effect(small, TEXT)
    with torch.no_grad():
        target = int(small(torch.tensor([ids])).logits[0, -1].argmax())
    assert found.token == small.tokenizer.decode([target])
    base = log_prob(small, ids, -1, target)
    assert found.log_prob == pytest.approx(base, abs=1e-5)

    def change(layer: int | None, head: int | None) -> float:
        return log_prob(small, ids, -1, target, Ablate(layer, head)) - base

    assert_one_by_one(found, change, (8, 8))
    layer, head, most = found.top(1)[0]
    assert abs(most) == np.abs(found.heads).max() and found.heads[layer, head] == most
    assert found.title in str(found) and f"{layer}.{head}" in str(found)
    mean = regard.effect(small, TEXT, to="mean")
    want = log_prob(small, ids, -1, target, Ablate(3, 2, to="mean")) - base
    assert mean.heads[3, 2] == pytest.approx(want, abs=2e-5)


def test_a_look_is_forbidden_in_each_head_and_a_continuation_counts_whole(small: Any) -> None:
    said = small.tokenizer.encode(TEXT + " tired of it")
    words = {(TEXT + " tired of it")[a:z].strip(): n for n, (a, z) in enumerate(said.offsets)}
    n = len(small.tokenizer.encode(TEXT).ids)
    found = regard.effect(small, TEXT, "tired of it", edges=("it", "animal"))
    at = small.tokenizer.encode(TEXT)
    query = next(n for n, (a, z) in enumerate(at.offsets) if TEXT[a:z].strip() == "it")

    def total(*edits: Any) -> float:
        steps = range(n, len(said.ids))
        return sum(log_prob(small, said.ids, at - 1, said.ids[at], *edits) for at in steps)

    base = total()
    assert found.log_prob == pytest.approx(base, abs=1e-5)
    for layer, head in ((2, 3), (5, 1), (7, 7)):
        want = total(Block(query, words["animal"], layer, head)) - base
        assert found.heads[layer, head] == pytest.approx(want, abs=2e-5)
    assert found.whole == pytest.approx(total(Block(query, words["animal"])) - base, abs=2e-5)
    assert "it → animal" in found.title and found.token == " tired of it"


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "gpt_neox", "opt", "qwen2"])
def test_hugging_faces_models_are_asked_in_one_batch(name: str) -> None:
    model, letters = SUBJECTS[name](), Letters()
    found = regard.effect(model, "looking back", tokenizer=letters)
    ids = letters("looking back")["input_ids"]
    with torch.no_grad():
        target = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    base = log_prob(model, ids, -1, target)

    def change(layer: int | None, head: int | None) -> float:
        return log_prob(model, ids, -1, target, Ablate(layer, head)) - base

    shape = found.heads.shape[0], found.heads.shape[1]
    assert shape[0] > 1 and shape[1] > 1
    assert_one_by_one(found, change, shape)


def test_a_masked_word_is_asked_for_where_it_stands() -> None:
    model = text_model(hf.BertConfig(**BERT), hf.BertForMaskedLM)
    letters = Letters()
    letters.mask_token_id = 3
    found = regard.effect(model, "lo_king", "o", tokenizer=letters)
    ids, target = letters("lo_king")["input_ids"], letters("o")["input_ids"][0]
    want = log_prob(model, ids, 2, target, Ablate(1, 2)) - log_prob(model, ids, 2, target)
    assert found.heads[1, 2] == pytest.approx(want, abs=2e-5)
    likeliest = regard.effect(model, "lo_king", tokenizer=letters)
    assert likeliest.log_prob >= found.log_prob
    with pytest.raises(ValueError, match="has 0 masked words; expected one: put _ where"):
        regard.effect(model, "looking", tokenizer=letters)
    with pytest.raises(ValueError, match="which is 3 tokens; expected 1"):
        regard.effect(model, "lo_king", "ooo", tokenizer=letters)


def test_what_cannot_be_asked_is_refused(small: Any) -> None:
    with pytest.raises(ValueError, match="no word of the text is 'dog'"):
        regard.effect(small, TEXT, edges=("it", "dog"))
    with pytest.raises(ValueError, match="position 99 does not exist"):
        regard.effect(small, TEXT, edges=(99, 0))
    with pytest.raises(ValueError, match="no tokenizer beside its weights"):
        regard.effect(SUBJECTS["gpt2"](), TEXT)
    with pytest.raises(ValueError, match="returns no logits"):
        regard.effect(SUBJECTS["distilbert"](), "looking", tokenizer=Letters())
    with pytest.raises(ValueError, match="has 0 stacks of attention layers that can be edited"):
        regard.effect(SUBJECTS["gptj"](), "looking", tokenizer=Letters())
    with pytest.raises(TypeError, match="on is a int; expected str"):
        regard.effect(small, TEXT, on=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model is a str; expected a torch\.nn\.Module"):
        regard.effect("embedded:lm", TEXT)  # type: ignore[arg-type]
    small.train()
    try:
        with pytest.raises(ValueError, match="in training mode"):
            regard.effect(small, TEXT)
    finally:
        small.eval()


def test_two_texts_and_half_an_edge_are_refused(small: Any) -> None:
    for model in (SUBJECTS["bart"](), regard.load("embedded:translate")):
        with pytest.raises(ValueError, match="is an encoder–decoder"):
            regard.effect(model, "The cat", tokenizer=Letters())
    for edges in (("it",), "it"):
        with pytest.raises(ValueError, match="a query and a key"):
            regard.effect(small, TEXT, edges=edges)


def test_heads_that_a_layer_lacks_are_not_among_the_top() -> None:
    heads = np.array([[0.1, math.nan], [-0.3, 0.2]])
    found = Effect(heads, heads[:, 0], -1.0, math.log(0.25), " x", "switching off a head")
    assert found.top(9) == [(1, 0, -0.3), (1, 1, 0.2), (0, 0, 0.1)]
    assert "to ' x' (log-probability -1.386, 25.0%)" in str(found)


@pytest.mark.parametrize(
    ("text", "on", "read"),
    [
        ("ab", "c", "ab c"),
        ("ab", ".", "ab."),
        ("猫が", "好き", "猫が好き"),
        ("猫が", "ab", "猫がab"),
    ],
)
def test_a_space_is_put_between_words_where_a_script_has_spaces(
    text: str, on: str, read: str
) -> None:
    asked = effects.find_asked(torch.nn.Identity(), text, on, Letters())
    assert asked.ids == Letters()(read)["input_ids"]
