"""A `GenerationConfig` is right or refused; no setting is dropped."""

import dataclasses
from typing import Any

import pytest

from regard.generation import GenerationConfig
from regard.generation.config import make_config


def test_the_default_is_greedy_and_temperature_0_too() -> None:
    assert not GenerationConfig().samples
    assert not GenerationConfig(temperature=0).samples
    assert GenerationConfig(temperature=0.1).samples


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "more than"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1.0, "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"temperature": 1.0, "min_p": 1.1}, "min_p"),
        ({"top_k": 5}, "give temperature=1.0 too"),
        ({"top_p": 0.5}, "give temperature=1.0 too"),
        ({"min_p": 0.5, "temperature": 0.0}, "give temperature=1.0 too"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2, "temperature": 1.0}, "give one of them"),
        ({"num_beams": 2, "compiled": True}, "not compiled"),
        ({"num_beams": 2, "stop": "x"}, "stop strings"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3"),
        ({"length_penalty": 2.0}, "num_beams is 1"),
        ({"early_stopping": True}, "num_beams is 1"),
        ({"num_beams": 2, "early_stopping": "ever"}, "'never'"),
        ({"num_beams": 2, "length_penalty": float("inf")}, "length_penalty"),
        ({"stop": ["a", ""]}, "empty string"),
        ({"stop_tokens": [-1]}, "stop_tokens"),
        ({"stop_tokens": 3}, "stop_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": [1, "2"]}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GenerationConfig(**options)


def test_stop_is_one_string_or_several() -> None:
    assert GenerationConfig(stop="ab").stop == ("ab",)
    assert GenerationConfig(stop=["ab", "c"]).stop == ("ab", "c")
    with pytest.raises(TypeError, match="expected a string or a list of strings"):
        GenerationConfig(stop=[3])  # type: ignore[list-item]


def test_options_or_a_config_are_given_not_both_and_none_is_unknown() -> None:
    config = GenerationConfig(max_new_tokens=3)
    assert make_config(config, {}) is config
    assert make_config(None, {"max_new_tokens": 3}) == config
    with pytest.raises(TypeError, match="not both"):
        make_config(config, {"max_new_tokens": 4})
    with pytest.raises(TypeError, match="no option is named 'max_tokens'; there are max_new"):
        make_config(None, {"max_tokens": 4})
    with pytest.raises(TypeError, match="expected a GenerationConfig"):
        make_config({"max_new_tokens": 3}, {})  # type: ignore[arg-type]


def test_a_config_is_frozen_and_can_be_hashed() -> None:
    config = GenerationConfig(stop=["a"], stop_tokens=[3], seed=[1, 2])
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]
