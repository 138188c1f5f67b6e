"""What heads are worth, kept with a record: the numbers of `regard.effect`, also from a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lens_subjects import SUBJECTS
from lens_words import SENTENCE, make_record
from record_files import join, parts

import regard
from regard.lens.head_effects import Effect
from regard.lens.lazy_weights import BadRecord
from regard.lens.record import Record
from regard.lens.watch import watch

TEXT = SENTENCE.removesuffix(" tired.")


def assert_same(one: Effect, other: Effect) -> None:
    np.testing.assert_array_equal(one.heads, other.heads)
    np.testing.assert_array_equal(one.layers, other.layers)
    for name in ("whole", "log_prob", "token", "edit", "text", "edge"):
        assert getattr(one, name) == getattr(other, name), name


def test_a_look_keeps_what_each_head_and_one_look_are_worth(tmp_path: Path) -> None:
    model, path = regard.load("embedded:lm"), tmp_path / "x.regard"
    record = regard.look(TEXT, model, effect=True, edges=("it", "animal"))
    want = [regard.effect(model, TEXT), regard.effect(model, TEXT, edges=("it", "animal"))]
    assert [record.tokens[at[0]] for at in want[1].edge or ()] == [" it", " animal"]
    record.save(path)
    for one in (record, Record.open(path).check()):
        for found, expected in zip(one.effects(), want, strict=True):
            assert_same(found, expected)
    opened = Record.open(path)
    opened.add_effect(want[0]).save(tmp_path / "more.regard")
    assert len(Record.open(tmp_path / "more.regard").check().effects()) == 3
    assert regard.look(TEXT, model).effects() == []


def test_heads_are_those_of_the_layers_that_were_recorded() -> None:
    """A model of transformers, of whose heads some were recorded; the others are NaN."""
    model, heads = SUBJECTS["gpt2"](), [2, 0]
    n_layers, n_heads = model.config.n_layer, model.config.n_head
    assert n_layers > 1 and n_heads > 3
    changes = np.arange(n_layers * n_heads).reshape(n_layers, n_heads) / 7 - 1.0
    found = Effect(changes, changes[:, 0], -3.0, -0.5, " x", "switching off a head")
    with torch.no_grad(), watch(model, keep="qk", heads=heads) as record:
        model(torch.arange(5, 12)[None])
    [kept] = record.add_effect(found).effects()
    for number, place in enumerate(record.places):
        assert place.layer == number
        for head in place.heads:
            assert kept.heads[number, head] == changes[number, head]
    assert np.count_nonzero(~np.isnan(kept.heads)) == 2 * n_layers
    np.testing.assert_array_equal(kept.layers, found.layers)


def make_effect(**other: Any) -> Effect:
    heads = np.array([[0.5, -1.25, 0.0]])
    edge = (7,), (1,)
    said = ("switching off a head", SENTENCE, edge)
    return replace(Effect(heads, np.array([0.25]), -2.0, -1.5, " so", *said), **other)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"text": "Another one."}, "of the text 'Another one.', and the record of .The animal"),
        (
            {"heads": np.zeros((1, 2))},
            "1 layers of up to 3 heads, and the effect is of 1 layers of up to 2",
        ),
        ({"heads": np.array([[0.5, np.nan, 0.0]])}, "not finite, or lacks a head"),
        ({"log_prob": -math.inf}, "not finite"),
        ({"edge": ((99,), (1,))}, "names token 99, and the record has 12 tokens"),
    ],
)
def test_an_effect_of_something_else_is_refused(wrong: dict[str, Any], said: str) -> None:
    record = make_record()
    with pytest.raises(ValueError, match=said):
        record.add_effect(make_effect(**wrong))
    assert record.effects() == []


def test_records_of_two_texts_or_of_windows_take_none() -> None:
    translated = regard.look("The cat.", "embedded:translate")
    with pytest.raises(ValueError, match="several texts or several stacks"):
        translated.add_effect(make_effect(text=""))
    for asked in ({"effect": True}, {"edges": ("the", "cat")}):
        with pytest.raises(ValueError, match=r"cannot be used with .*, an encoder–decoder"):
            regard.look("The cat.", "embedded:translate", **asked)
    with pytest.raises(ValueError, match="cannot be measured in windows"):
        regard.look(TEXT, "embedded:lm", effect=True, window=True)
    with pytest.raises(ValueError, match="no word of the text is 'dog'"):
        regard.look(TEXT, "embedded:lm", edges=("it", "dog"))
    record = make_record()
    record._about.window = 5
    with pytest.raises(ValueError, match="a record of windows"):
        record.add_effect(make_effect())
    many = make_record()
    for _ in range(16):
        many.add_effect(make_effect())
    with pytest.raises(ValueError, match="16 effects, the most that a file can keep"):
        many.add_effect(make_effect())


Change = Callable[[dict[str, Any]], None]
WRONG: dict[str, Change] = {
    "more than belongs there": lambda told: told["effects"][0].update(more=1),
    "no token": lambda told: told["effects"][0].pop("token"),
    "a token that is no text": lambda told: told["effects"][0].update(token=3),
    "a probability above 1": lambda told: told["effects"][0].update(log_prob=0.5),
    "a change that is none": lambda told: told["effects"][0].update(whole="-2"),
    "a look to nowhere": lambda told: told["effects"][0].update(key=None),
    "a look at what is not there": lambda told: told["effects"][0].update(key=[12]),
    "a look at nothing": lambda told: told["effects"][0].update(key=[]),
    "effects that are none": lambda told: told.update(effects={}),
    "one more than the changes": lambda told: told["effects"].append(told["effects"][0]),
    "very many": lambda told: told.update(effects=told["effects"] * 17),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_strangers_effects_are_not_believed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.regard"
    make_record().add_effect(make_effect()).save(path)
    header, told, arrays = parts(path.read_bytes())
    assert told["effects"][0]["query"] == [7]
    path.write_bytes(join(header, told, arrays))
    assert Record.open(path).check().effects()
    WRONG[name](told)
    path.write_bytes(join(header, told, arrays))
    with pytest.raises(BadRecord):
        Record.open(path).check()


def test_changes_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.regard"
    make_record().add_effect(make_effect()).save(path)
    header, told, arrays = parts(path.read_bytes())
    first, last = header["0.effect"]["data_offsets"]
    changed = arrays[:first] + np.full(3, np.nan).tobytes() + arrays[last:]
    path.write_bytes(join(header, told, changed))
    with pytest.raises(BadRecord, match="effect of place 0 holds NaN"):
        Record.open(path).check()
