"""Recipes: all of them build, settings reach where they belong, and strangers are refused."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest

from regard.models import config_of, count_parameters
from regard.models.families import FAMILIES
from regard.training.recipes import RECIPES, Recipe, as_json, named_recipe, sized


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_model_that_takes_its_texts(name: str) -> None:
    recipe = named_recipe(name)
    config = config_of({**recipe.model, "vocab_size": recipe.vocab_size, "pad_token_id": 0})
    longest = recipe.max_len if recipe.task == "translate" else recipe.context
    assert config.max_len is None or config.max_len >= longest
    assert bool(config.encoder and config.decoder) == (recipe.task == "translate")
    assert bool(config.decoder) == (recipe.task != "masked")
    if recipe.task == "translate":
        assert recipe.max_tokens >= recipe.max_len


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back_from_json(name: str) -> None:
    recipe = named_recipe(name)
    told = json.loads(json.dumps(asdict(recipe)))
    train = type(recipe.train)(**told.pop("train"))
    assert Recipe(train=train, **told) == recipe


def test_sizes_that_the_project_promised() -> None:
    def parameters(name: str) -> int:
        recipe = named_recipe(name)
        return count_parameters(config_of({**recipe.model, "vocab_size": recipe.vocab_size}))

    assert parameters("multi30k") <= 15_000_000
    with pytest.raises(ValueError, match="examples/translate_aligned"):
        named_recipe("embedded-translate")
    assert 8_000_000 <= parameters("embedded-lm") <= 10_000_000


def test_the_papers_recipe_is_the_papers() -> None:
    recipe, pre = named_recipe("paper"), named_recipe("paper-pre-norm")
    train = recipe.train
    assert (train.schedule, train.smoothing, train.beta2, train.eps) == (
        "inverse_sqrt",
        0.1,
        0.98,
        1e-9,
    )
    assert (recipe.model["normalize_before"], pre.model["normalize_before"]) == (False, True)
    assert replace(pre, model=recipe.model) == recipe
    # The paper's highest rate is 1/√(dim · warmup); this one is √2 times that.
    assert train.lr == pytest.approx((recipe.model["d_model"] * train.warmup / 2) ** -0.5)


def test_settings_go_to_the_run_the_recipe_or_the_model() -> None:
    recipe = named_recipe("lm-small")
    words = {
        "lr": "0.5",
        "rows": "3",
        "documents": "false",
        "cutting": "characters",
        "model.hidden_size": "64",
        "model.hidden_act": "gelu",
        "model.tie_word_embeddings": "false",
        "model.rope_theta": "500.0",
    }
    made = recipe.changed(words)
    assert (made.train.lr, made.rows, made.documents) == (0.5, 3, False)
    assert made.cutting == "characters"
    assert made.model["hidden_size"] == 64 and made.model["hidden_act"] == "gelu"
    assert made.model["tie_word_embeddings"] is False and made.model["rope_theta"] == 500.0
    assert recipe == named_recipe("lm-small") and recipe.changed({}) == recipe


@pytest.mark.parametrize(
    ("name", "word", "said"),
    [
        ("foo", "1", "no setting is named 'foo'; there are steps, lr"),
        ("rows", "many", "rows='many'; expected a whole number"),
        ("rows", "0", "rows"),
        ("documents", "maybe", "documents='maybe'; expected true or false"),
        ("cutting", "bytes", "cutting is 'bytes'; expected one of 'bpe'"),
        ("task", "lm", "no setting is named 'task'"),
        ("model.hidden_sise", "64", "no setting is named 'model.hidden_sise'; a model of the kind"),
        ("model.hidden_size", "wide", "hidden_size is 'wide'; expected a whole number"),
        ("model.num_attention_heads", "7", "config.json makes no llama model"),
        ("model.model_type", "rnn", "rnn"),
        ("cutting", "wordpiece", "cutting is 'wordpiece'; expected one of 'bpe', 'scripts'"),
        ("model.vocab_size", "50", "model.vocab_size is what the vocabulary says: set vocab_size"),
        ("model.eos_token_id", "3", "model.eos_token_id is what the vocabulary says: leave it out"),
        ("model.bad_words_ids", "[[3]]", "model.bad_words_ids is what the vocabulary says"),
        ("max_len", "9", "max_len is a setting of `regard train translate` alone"),
        ("both_ways", "true", "both_ways is a setting of `regard train translate` alone"),
        ("tokenize", "none", "tokenize is a setting of `regard train translate` alone"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(name: str, word: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        named_recipe("lm-small").changed({name: word})


@pytest.mark.parametrize("name", RECIPES)
def test_no_word_of_a_recipe_is_taken_for_a_stranger(name: str) -> None:
    recipe = named_recipe(name)
    words = {f"model.{word}": json.dumps(value) for word, value in recipe.model.items()}
    assert recipe.changed(words) == recipe


def test_pairs_have_no_settings_of_running_text() -> None:
    for name, word in (("context", "9"), ("rows", "3"), ("documents", "false")):
        with pytest.raises(ValueError, match=f"^{name} is a setting of running text alone"):
            named_recipe("translate-small").changed({name: word})


def test_an_unknown_setting_lists_those_of_the_recipe_too() -> None:
    with pytest.raises(ValueError, match="no setting is named 'mask_share'") as refused:
        named_recipe("mlm-small").changed({"mask_share": "0.3"})
    listed = re.split("; there are |, ", str(refused.value))
    assert {"steps", "lr", "seed", "vocab_size", "cutting", "context", "rows"} <= {*listed}
    assert not {"max_len", "both_ways", "task", "train", "model"} & {*listed}


def test_values_are_read_as_json_where_they_are() -> None:
    read = [as_json(word) for word in ("3", "0.5", "true", "null", "gelu", '["A"]', "1e-3")]
    assert read == [3, 0.5, True, None, "gelu", ["A"], 0.001]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no recipe is named 'x'; there are lm-small, .*paper"):
        named_recipe("x")
    with pytest.raises(ValueError, match=r"no size is named 'x'; there are .*gpt2-medium.*"):
        sized(named_recipe("lm-small"), "x")


def test_masked_models_take_the_kinds_of_tokens_in_which_a_gap_is_a_gap() -> None:
    recipe = named_recipe("mlm-small")
    assert recipe.cutting == "wordpiece"
    assert [recipe.changed({"cutting": kind}).cutting for kind in ("bpe", "characters")]
    with pytest.raises(ValueError, match="cutting is 'words'; expected one of 'bpe', 'char"):
        recipe.changed({"cutting": "words"})


def test_a_bert_of_a_named_size_learns_gaps_alone() -> None:
    made = sized(named_recipe("mlm-small"), "bert-mini").model
    assert made == {**FAMILIES["bert"].sizes["bert-mini"], "architectures": ["BertForMaskedLM"]}
    other = sized(named_recipe("mlm-small"), "roberta-base").model
    assert other == FAMILIES["roberta"].sizes["roberta-base"]


def test_every_named_size_can_be_asked_for() -> None:
    recipe = named_recipe("lm-small")
    for family in FAMILIES.values():
        for size, words in family.sizes.items():
            assert sized(recipe, size).model == words
    assert sized(recipe, "gpt2").train == recipe.train
