"""The measurement of eviction runs, and counts as it says."""

from __future__ import annotations

import random
import sys

import pytest
import retrieval
import torch
from methods import METHODS

import regard


def test_texts_hold_each_number_once_and_have_the_length_asked_for() -> None:
    model = regard.load("embedded:lm")
    assert model.tokenizer is not None
    ids, numbers = retrieval.make_context(random.Random(3), model, 400)
    text = model.tokenizer.decode(ids)
    assert 380 < len(ids) <= 400 and len(numbers) == retrieval.N_CITIES
    for city, number in numbers.items():
        assert text.count(f"for {city} is {number}.") == 1


def test_a_number_is_found_if_every_token_is_the_first_choice() -> None:
    model = regard.load("embedded:lm")
    ids = torch.tensor([[5, 9, 7, 11]])
    with torch.no_grad():
        written = ids[0].tolist()
        for _ in range(3):
            logits = model(torch.tensor([written])).logits
            assert logits is not None
            written.append(int(logits[0, -1].argmax()))
        for answer, found in ((written[4:], True), ([*written[4:6], written[6] + 1], False)):
            cache = model.make_cache()
            model.run(ids[:, :-1].expand(len(METHODS), -1), cache=cache)
            hits = retrieval.find(model, cache, written[3], answer)
            assert hits == [found] * len(METHODS)


def test_the_table_has_a_row_for_each_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retrieval, "N_CITIES", 2)
    arguments = ["retrieval.py", "--model", "embedded:lm", "--contexts", "1", "--tokens", "120"]
    monkeypatch.setattr(sys, "argv", arguments)
    retrieval.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 questions, ")
    rows = [line.strip("| ").split(" | ") for line in lines[4:]]
    assert [row[0] for row in rows] == ["100.0%", "50.0%", "25.0%", "12.5%", "6.2%"]
    assert len(set(rows[0][1:])) == 1  # the whole cache, whatever the method
