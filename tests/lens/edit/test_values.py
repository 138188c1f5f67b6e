"""Edits are values: equal where they say the same, and checked when they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import Ablate, Block, HeadOutputs, Patch
from regard.lens.edit.values import as_tuple


def test_edits_are_equal_where_they_say_the_same_and_cannot_be_changed() -> None:
    assert Block(3, "it", layers=(1, "decoder")) == Block(3, "it", (1, "decoder"))
    assert Block(3, 1) != Block(1, 3) and Ablate(1, 2) != Ablate(1, 2, to="mean")
    assert len({Ablate(1, 2), Ablate(1, 2), Ablate(2, 1)}) == 2
    with pytest.raises(AttributeError):
        Ablate(1).heads = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Block(2.5, 0), "queries must be positions: a number, a word, a range"),
        (lambda: Block(0, ()), "keys must be positions"),
        (lambda: Block(True, 0), "queries must be positions"),
        (lambda: Block(0, slice(3, 0, -1)), "keys must count forward"),
        (lambda: Block(0, 1, heads="all"), "heads must be numbers, or None for all of them"),
        (lambda: Ablate(1.5), "layers must be numbers or names"),
        (lambda: Ablate(-1), "layers count from 0; got -1"),
        (lambda: Ablate(0, (0, -2)), r"heads count from 0; got \(0, -2\)"),
        (lambda: Ablate(to="one"), 'to must be "zero" or "mean", got \'one\''),
        (lambda: Patch(source={}), "source is a dict; expected what `with"),
    ],
)
def test_what_is_no_edit_is_refused_when_it_is_made(make: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        make()


def test_one_or_several_are_a_tuple() -> None:
    assert as_tuple(None) is None and as_tuple(3) == (3,) and as_tuple("it") == ("it",)
    assert as_tuple(range(3)) == (range(3),) and as_tuple([1, "it"]) == (1, "it")


def test_outputs_that_are_not_there_are_refused_by_name() -> None:
    outputs = HeadOutputs()
    outputs._outputs["a"] = torch.zeros(1, 2, 3, 4)
    assert repr(outputs) == "HeadOutputs({'a': (1, 2, 3, 4)})" and len(outputs) == 1
    with pytest.raises(KeyError, match="no module named 'b' attended; there are"):
        outputs["b"]
