"""Attributes that several blocks replace: whichever ends first, the others stay, none is left."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from lens_subjects import SUBJECTS, draw
from torch import nn
from transformers import AttentionInterface

import regard
from regard import Ablate
from regard.lens import shared_patch
from regard.lens.shared_patch import patched


class Owner:
    def own(self) -> str:
        return "x"


class Heir(Owner):
    pass


def add(letter: str, function: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda self: letter + function(self)


@pytest.mark.parametrize("owner", [Owner, Heir])
@pytest.mark.parametrize("order", list(itertools.permutations("aabc"))[::5])
def test_each_wrapper_is_there_while_one_of_its_blocks_is(owner: Any, order: tuple[str]) -> None:
    before = vars(owner).get("own")
    blocks = [(letter, ExitStack()) for letter in "aabc"]
    for letter, block in blocks:
        block.enter_context(patched(owner, "own", functools.partial(add, letter)))
    assert owner().own() == "cbax"
    for letter in order:
        at = next(n for n, (known, _) in enumerate(blocks) if known == letter)
        blocks.pop(at)[1].close()
        left = dict.fromkeys(known for known, _ in blocks)
        assert owner().own() == "".join(reversed([*left])) + "x"
    assert vars(owner).get("own") is before and not shared_patch._patches


def test_what_someone_else_put_there_since_is_left() -> None:
    with patched(Heir, "own", functools.partial(add, "a")):
        ours = Heir.own
        Heir.own = lambda self: "theirs" + ours(self)  # type: ignore[method-assign]
    assert Heir().own() == "theirsax"
    del Heir.own


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_that_watch_and_that_edit_may_end_in_any_order(order: tuple[int, ...]) -> None:
    model, ids = nn.ModuleList([SUBJECTS["llama"](), nn.MultiheadAttention(4, 2)]), draw(1, 7)
    places = [vars(AttentionInterface).get(name) for name in ("get_interface", "__getitem__")]
    forward = nn.MultiheadAttention.forward

    def run() -> Any:
        with torch.no_grad():
            return model[0](ids, use_cache=False).logits

    before = run()
    with regard.edit(model, Ablate(1, 2)):
        edited = run()
    blocks = [regard.edit(model, Ablate(1, 2)), regard.watch(model), regard.watch(model)]
    records = [block.__enter__() for block in blocks]
    assert torch.equal(run(), edited)
    for n, at in enumerate(order):
        blocks[at].__exit__(None, None, None)
        assert torch.equal(run(), before if 0 in order[: n + 1] else edited)
    assert all(len(record.places) >= 3 for record in records[1:])
    now = [vars(AttentionInterface).get(name) for name in ("get_interface", "__getitem__")]
    assert now == places and nn.MultiheadAttention.forward is forward
    assert not shared_patch._patches
