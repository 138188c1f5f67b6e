"""Predictions and steps of strangers' records: what cannot be is a `BadRecord`, before any use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lens_subjects
import numpy as np
import pytest
import torch

from regard.lens.lazy_weights import BadRecord
from regard.lens.record import Record
from regard.lens.schema import read_description
from regard.lens.watch import watch

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def good() -> Record:
    """A generation of llama: three places, of which the last has the predictions."""
    model: Any = lens_subjects.SUBJECTS["llama"]()
    ids = torch.tensor([[7, 11, 13, 17, 19]])
    with torch.no_grad(), watch(model, keep=("qk", "values", "predictions")) as record:
        model.generate(ids, max_new_tokens=4, do_sample=False)
    return record.describe(vocabulary={3: "three"})


def changed(good: Record, change: Callable[[dict[str, Any], Arrays], None]) -> Record:
    about = good._about.to_json()
    arrays = {name: array.copy() for name, array in good._arrays.all().items()}
    change(about, arrays)
    return Record(read_description(about), arrays)


def put(name: str, value: Any) -> Callable[[dict[str, Any], Arrays], None]:
    """One number of an array of the last place is another one."""

    def change(about: dict[str, Any], arrays: Arrays) -> None:
        arrays[f"{len(about['places']) - 1}.{name}"].reshape(-1)[2] = value

    return change


def swap(name: str, make: Callable[[np.ndarray], np.ndarray | None]) -> Any:
    def change(about: dict[str, Any], arrays: Arrays) -> None:
        full = f"{len(about['places']) - 1}.{name}"
        made = make(arrays.pop(full))
        if made is not None:
            arrays[full] = made

    return change


def describe(value: Any) -> Callable[[dict[str, Any], Arrays], None]:
    return lambda about, arrays: about.update(vocabulary=value)


WRONG = {
    "a probability over 1": put("next_probs", 1.5),
    "a probability below 0": put("next_probs", -0.5),
    "a token that had less than nothing": put("given", -2.0),
    "NaN": put("given", np.nan),
    "an id before the first": put("next_ids", -2),
    "more ids than probabilities": swap("next_ids", lambda x: np.concatenate([x, x], 1)),
    "too many candidates": swap("next_ids", lambda x: np.repeat(x, 99, 1)),
    "no probabilities": swap("next_probs", lambda x: None),
    "no tokens": swap("ids", lambda x: None),
    "a step too many": swap("steps", lambda x: np.append(x, x[-1:])),
    "an empty step": put("steps", 0),
    "no steps": swap("steps", lambda x: x[:0]),
    "a negative length": put("value_norms", -1.0),
    "an endless length": put("value_norms", np.inf),
    "a vocabulary that is none": describe("abc"),
    "an id that is none": describe([["3", "three"]]),
    "a name that is none": describe([[3, 3]]),
    "a name of 1 MB": describe([[3, "x" * 1_000_000]]),
    "a name alone": describe([[3]]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str, good: Record) -> None:
    with pytest.raises(BadRecord):
        changed(good, WRONG[name]).check()


def test_unchanged_it_is_good(good: Record) -> None:
    """So that what is refused above is refused for what was changed."""
    again = changed(good, lambda about, arrays: None).check()
    assert again.vocabulary == {3: "three"}
    found, steps = again.next_tokens(), again.steps()
    assert found is not None and len(found.given) == 8
    assert steps is not None and steps.tolist() == [4, 5, 6, 7]


def test_a_record_of_before_has_none_of_it(good: Record) -> None:
    names = ("next_probs", "next_ids", "given", "steps", "value_norms")

    def drop(about: dict[str, Any], arrays: Arrays) -> None:
        del about["vocabulary"]
        for full in [full for full in arrays if full.split(".")[1] in names]:
            del arrays[full]

    old = changed(good, drop).check()
    assert (old.next_tokens(), old.steps(), old.vocabulary) == (None, None, None)
    assert [old.value_norms(n) for n in range(len(old.places))] == [None] * len(old.places)
