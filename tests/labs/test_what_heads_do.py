"""The lab on what heads do: looks and losses worked by hand, and sentences that follow numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_model
from tokenmakers import word_pieces

from regard import Ablate, Transformer, load
from regard.labs import what_heads_do as lab
from regard.labs.parts import Run
from regard.labs.report import make_figure
from regard.labs.word_pairs import RELATIONS, read_sentence
from regard.lens.word_links import Word
from regard.tokens import Tokenizer

CPU = torch.device("cpu")
SENTENCE = read_sentence("The *birds sing ^unhappy, the bird sings!")


@pytest.fixture(scope="module")
def decoder() -> Transformer:
    return load("embedded:lm").eval()


@pytest.fixture(scope="module")
def translator() -> Transformer:
    return load("embedded:translate").eval()


@pytest.fixture(scope="module")
def encoder() -> Transformer:
    """A random BERT that fills in masked words."""
    model: Transformer = make_model("bert")
    model.__dict__["tokenizer"] = Tokenizer.from_parts(
        word_pieces(), {"mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    )
    return model


def test_the_largest_look_at_a_word_is_judged_with_its_tokens_merged() -> None:
    words = [Word("[CLS]", (0,), True), Word("birds", (1, 2), False), Word("sing", (3,), False)]
    words += [Word("too", (4, 5), False), Word(".", (6,), True)]
    spans = [(0, 0), (0, 4), (4, 5), (5, 10), (10, 13), (13, 14), (14, 15)]
    reading = lab.Reading([0] * 7, [""] * 7, spans, words)
    sentence = read_sentence("*birds sing ^too.")
    rows = {
        # of the two tokens of "too", on each token: the sum on "birds" is larger than on "sing"
        (0, 0): ([0, 0.2, 0.2, 0.3, 0, 0, 0.3], [0, 0.2, 0.2, 0.3, 0, 0, 0.3]),
        # the mean over its tokens decides, here for "sing"
        (0, 1): ([0, 0.5, 0, 0.4, 0, 0, 0.1], [0, 0, 0, 1.0, 0, 0, 0]),
        # itself, signs and special tokens do not count
        (1, 0): ([0.3, 0.1, 0.0, 0.05, 0.2, 0.2, 0.15], [0.3, 0.1, 0, 0.05, 0.2, 0.2, 0.15]),
    }
    weights = np.zeros((2, 2, 7, 7))
    for (layer, head), pair in rows.items():
        weights[layer, head, 4:6] = pair
    weights[1, 1, 4:6, 3] = 1.0
    assert lab.finds(weights, reading, sentence).tolist() == [[1, 0], [1, 0]]


def test_a_word_is_found_by_its_characters_in_every_tokenizer(
    decoder: Transformer, translator: Transformer, encoder: Transformer
) -> None:
    sentence = RELATIONS["verb"][0]
    for model, first in ((decoder, "<|endoftext|>"), (translator, "<2ja>")):
        reading = lab.read(model, sentence.text)
        assert reading.words[reading.word_at(sentence.gold)].text == "keys"
        assert reading.words[reading.word_at(sentence.asked)].text == "are"
        assert reading.words[0].is_mark and reading.words[-1].is_mark
        assert reading.labels[0] == first and reading.labels[-1] in (".", "<|endoftext|>")
    assert lab.read(decoder, "A dog.").ids[0] == decoder.config.tokens.bos
    reading = lab.read(encoder, SENTENCE.text)
    assert reading.labels[0] == "[CLS]" and reading.labels[-1] == "[SEP]"
    assert reading.words[reading.word_at(SENTENCE.asked)].tokens == (5, 6)


def test_a_decoder_is_asked_for_each_token_after_the_word(decoder: Transformer) -> None:
    sentences = [RELATIONS["verb"][n] for n in (0, 1, 2)]
    after, whole = (lab.ask(decoder, sentences, after=x) for x in (True, False))
    assert decoder.tokenizer is not None
    for asking, every, sentence in zip(after, whole, sentences, strict=True):
        assert decoder.tokenizer.decode(asking.targets) == sentence.text[sentence.asked[1] :]
        assert decoder.tokenizer.decode(every.targets) == sentence.text
        assert [asking.ids[n + 1] for n in asking.positions] == asking.targets
    assert len({len(asking.ids) for asking in after}) > 1  # so that rows are padded
    found = lab.answer(decoder, after, None)
    for asking, value in zip(after, found, strict=True):
        with torch.no_grad():
            logits = decoder(torch.tensor([asking.ids])).logits
        assert logits is not None
        logs = logits[0].log_softmax(-1)[asking.positions, asking.targets]
        assert value == pytest.approx(float(logs.mean()), abs=1e-4)


def test_an_encoder_is_asked_for_each_token_masked_alone(encoder: Transformer) -> None:
    askings = lab.ask(encoder, [SENTENCE, SENTENCE], after=True)
    ids = lab.read(encoder, SENTENCE.text).ids
    assert len(askings) == 2 * 6  # ", the bird sing ##s !"
    for asking in askings:
        (at,), (target,) = asking.positions, asking.targets
        assert asking.ids[at] == 4 and target == ids[at] and asking.ids.count(4) == 1
        assert [*asking.ids[:at], target, *asking.ids[at + 1 :]] == ids
    one, two = lab.answer(encoder, askings, None)
    assert one == pytest.approx(two, abs=1e-5) and one < 0
    assert lab.says(encoder) == "masked words"


def test_a_translator_is_asked_for_its_own_translation(translator: Transformer) -> None:
    sentences = [RELATIONS["adjective"][n] for n in (0, 4)]
    askings = lab.ask(translator, sentences, after=True)
    found = lab.answer(translator, askings, None)
    assert all(asking.source is not None for asking in askings) and (found > -1.5).all()
    layer = "encoder.layers.0.self_attn"
    changed = lab.answer(translator, askings, Ablate(layer, tuple(range(8)))) - found
    assert (changed < 0).all()  # without what it reads in its first layer, it is less sure


def test_a_head_that_is_off_changes_what_its_own_edit_does(decoder: Transformer) -> None:
    askings = lab.ask(decoder, RELATIONS["verb"][:3], after=True)
    layer = "decoder.layers.2.self_attn"
    base, heads = lab.answer(decoder, askings, None), lab.draw_heads(3, 8)
    found = lab.switch_off(decoder, askings, base, layer, heads)
    change = lab.answer(decoder, askings, Ablate(layer, 3)) - base
    assert found["change"]["mean"] == pytest.approx(float(change.mean()))
    assert heads[0] == 3 and len(set(heads)) == 5 and found["others"] == heads[1:]
    assert sorted(lab.draw_heads(1, 3)) == [0, 1, 2]
    assert found["log_prob"] == pytest.approx(float(base.mean()))
    more = found["change others"]["mean"] - found["change"]["mean"]
    assert found["more"]["mean"] == pytest.approx(more)


def test_the_best_head_is_chosen_on_one_half_and_scored_on_the_other() -> None:
    sentences = RELATIONS["pronoun"][:20]
    values = np.zeros((20, 2, 3))
    values[::2, 1, 2] = 1.0  # always right where it is chosen, never where it is scored
    values[1::2, 0, 1] = 1.0
    found = lab.pick_best(values, sentences, "pronoun")
    assert (found["layer"], found["head"], found["found"]["mean"]) == (1, 2, 0.0)
    assert found["found"]["n"] == 10 and found["first"]["mean"] == 1.0
    assert found["over first"]["high"] == -1.0


def test_a_model_that_is_not_there_is_said_to_be_missing() -> None:
    missing = lab.Source("gone", "no_such_package_here", "model")
    assert missing.find() is None and lab.Source("embedded:lm").find() == "embedded:lm"
    found = lab.measure_model(missing, 4, CPU)
    assert found == {"name": "gone", "missing": "not installed here"}
    assert lab.find({"models": [found], "left_out": []}) == ["gone: not installed here."]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A full run of two sentences a half, with one model inside and one that is missing."""
    path: Path = tmp_path_factory.mktemp("heads") / "parts"
    few = {name: sentences[::15] for name, sentences in RELATIONS.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lab, "RELATIONS", few)
        patched.setattr(lab, "MODELS", (lab.Source("embedded:lm"), lab.Source("b", "no_such_x")))
        results = lab.measure(Run(path, {"tiny": False}, CPU, None))
    found: dict[str, Any] = json.loads(json.dumps(results, allow_nan=False))
    return found


def test_a_full_run_of_few_sentences_is_finite_and_drawn(measured: dict[str, Any]) -> None:
    lab.draw(measured, make_figure())
    said = lab.find(measured)
    assert len(said) == 5 and said[4] == "b: not installed here."
    assert said[2].startswith("embedded:lm (8 layers of 8 heads; layer.head, from 0): ")
    model = measured["models"][0]
    assert set(model["roles"]) == set(lab.ROLES)
    assert np.array(model["roles"]["verb"]["all"]).shape == (8, 8)
    assert 0.3 < model["roles"]["previous"]["found"]["mean"] < 1


def test_sentences_turn_with_the_numbers(measured: dict[str, Any]) -> None:
    words = {1: ("more often", "more is lost"), -1: ("less often", "less is lost")}
    words[0] = ("not clearly more often", "no clear difference")
    for side, (found, lost) in words.items():
        results = copy.deepcopy(measured)
        ends = {"mean": side, "low": side - 0.5, "high": side + 0.5, "n": 9}
        for role, best in results["models"][0]["roles"].items():
            best["off"]["more"] = ends
            if role in lab.ASKED:
                best["over first"] = best["over nearest"] = ends
        antecedents, costs, roles, losses, _ = lab.find(results)
        assert antecedents.count("in no model") == (0 if side > 0 else 3)
        assert antecedents.count("in embedded:lm (") == (3 if side > 0 else 0)
        assert costs.startswith("Of 5 roles' heads, switched off one by one, ")
        assert (" 0 (none) cost clearly more" not in costs) == (side > 0)
        assert (" 0 (none) clearly less" not in costs) == ("against" in costs) == (side < 0)
        assert costs.count(" of embedded:lm") == (5 if side else 0)
        assert roles.count(f" sentences, {found} than the ") == 3
        assert losses.count(f": {lost}") == 5


def test_a_model_without_words_is_said_to_have_no_log_probability(
    measured: dict[str, Any],
) -> None:
    results = copy.deepcopy(measured)
    results["models"][0]["says"] = None
    for best in results["models"][0]["roles"].values():
        del best["off"]
    results["left_out"] = ["c", "d"]
    said = lab.find(results)
    assert len(said) == 5
    assert said[2].startswith("embedded:lm says no words: it has no log-probability")
    assert said[-1] == "The short run leaves out c and d."
    lab.draw(results, make_figure())


@pytest.mark.weights
def test_a_head_of_a_real_bert_finds_antecedents_more_often_than_the_first_noun() -> None:
    place = next(model for model in lab.MODELS if model.name == "all-MiniLM-L6-v2").find()
    assert place is not None
    model, sentences = load(place, dtype=torch.float32).eval(), RELATIONS["pronoun"]
    values = np.stack([lab.look(model, one, "pronoun").roles["pronoun"] for one in sentences])
    found = lab.pick_best(values, sentences, "pronoun")
    assert (found["layer"], found["head"]) == (1, 3) and found["found"]["low"] > 0.6
    assert found["over first"]["low"] > 0
