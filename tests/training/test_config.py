"""TrainConfig refuses what cannot be meant, and reads the words of a command line by type."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from typing import Any

import pytest

from regard.training.config import TrainConfig, split_settings


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("steps", 0, "steps"),
        ("accumulate", 0, "accumulate"),
        ("accumulate", 1.5, "accumulate"),
        ("eval_every", -1, "eval_every"),
        ("save_every", 0, "save_every"),
        ("keep", 0, "keep"),
        ("lr", 0.0, "lr is 0.0"),
        ("lr", math.inf, "lr is inf; expected a finite number"),
        ("lr", math.nan, "lr is nan"),
        ("eps", -1e-8, "eps"),
        ("clip", 0.0, "clip"),
        ("warmup", -1, "warmup"),
        ("seed", -1, "seed"),
        ("seed", 1.5, "seed is 1.5"),
        ("seed", 2**63, "seed is 9223372036854775808, expected a whole number from 0 on, below"),
        ("warmup", 0.5, "warmup is 0.5"),
        ("weight_decay", -0.1, "weight_decay"),
        ("weight_decay", math.nan, "weight_decay is nan; expected a finite number, 0 or more"),
        ("weight_decay", math.inf, "weight_decay is inf"),
        ("beta1", 1.1, "beta1"),
        ("beta2", -0.1, "beta2"),
        ("beta1", 1.0, "beta1 is 1.0; expected a share below 1"),
        ("beta2", 1.0, "beta2 is 1.0"),
        ("average", 1.0, "average is 1.0; expected a share below 1: averaged weights would stay"),
        ("smoothing", 2.0, "smoothing"),
        ("end_share", 1.5, "end_share"),
        ("schedule", "cosinus", "expected one of 'cosine', 'linear', 'inverse_sqrt', 'constant'"),
        ("optimizer", "sgd", "expected one of 'adamw', 'muon'"),
        ("precision", "float16", "expected one of 'float32', 'bfloat16'"),
        ("average", 1.5, "average"),
        ("patience", 0, "patience"),
        ("minutes", 0.0, "minutes"),
    ],
)
def test_a_field_that_cannot_be_meant_is_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        TrainConfig(**{"steps": 10, field: value})


def test_a_schedule_that_falls_from_its_warmup_needs_one() -> None:
    with pytest.raises(ValueError, match="inverse_sqrt"):
        TrainConfig(steps=10, schedule="inverse_sqrt", warmup=0)


def test_what_is_told_makes_the_same_config_again_through_json() -> None:
    config = TrainConfig(steps=7, lr=0.1 + 0.2, average=0.99, schedule="linear", minutes=2.5)
    assert TrainConfig(**json.loads(json.dumps(asdict(config)))) == config


def test_words_are_read_as_the_type_of_their_field() -> None:
    config = TrainConfig(steps=7, patience=3)
    words = {
        "steps": "20",
        "lr": "2e-3",
        "schedule": "linear",
        "compiled": "True",
        "recompute": "false",
        "average": "0.9",
        "patience": "None",
        "minutes": "5",
    }
    made = config.with_settings(words)
    assert (made.steps, made.lr, made.schedule) == (20, 0.002, "linear")
    assert (made.compiled, made.recompute) == (True, False)
    assert (made.average, made.patience, made.minutes) == (0.9, None, 5.0)
    assert type(made.minutes) is float and type(made.steps) is int
    assert made.beta2 == config.beta2
    assert config.with_settings({}) == config


@pytest.mark.parametrize(
    ("name", "word", "said"),
    [
        ("step", "3", "no setting is named 'step'; there are steps, lr, schedule"),
        ("steps", "3.5", "steps='3.5'; expected a whole number"),
        ("steps", "many", "steps='many'; expected a whole number"),
        ("lr", "fast", "lr='fast'; expected a number"),
        ("lr", "", "lr=''; expected a number"),
        ("compiled", "1", "compiled='1'; expected true or false"),
        ("average", "yes", "average='yes'; expected a number"),
        ("schedule", "cosinus", "schedule is 'cosinus'; expected one of"),
        ("lr", "-1", "lr is -1.0; expected a finite number above 0"),
    ],
)
def test_a_word_that_does_not_fit_is_refused_by_name(name: str, word: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainConfig(steps=7).with_settings({name: word})


def test_settings_are_split_at_the_first_equals_sign() -> None:
    words = ["lr=0.1", " steps = 3 ", "model.name=a=b", "lr=0.2"]
    assert split_settings(words) == {"lr": "0.2", "steps": "3", "model.name": "a=b"}
    for word in ("lr", "=3", ""):
        with pytest.raises(ValueError, match="expected key=value, for example lr="):
            split_settings([word])
