"""Scores that can be compared: sacrebleu's, with their signatures; and translating in batches."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from translators import make_translator

from regard.generation import GenerationConfig, generate_ids
from regard.models import Transformer, load
from regard.training.bleu import score, translate_rows


def test_bleu_by_hand() -> None:
    """Of five words four are right: 4/5, 3/4, 2/3 and 1/2 of the words, pairs, threes and fours."""
    made = score(["a b c d e"], ["a b c d f"], "none")
    assert made.bleu == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert made.n_sentences == 1


def test_what_is_equal_is_100_and_what_is_strange_is_0() -> None:
    texts = ["The cat sat on the mat.", "It was too tired to go on."]
    same = score(texts, texts)
    assert (same.bleu, same.chrf) == (pytest.approx(100.0), pytest.approx(100.0))
    strange = score(["x y z v w", "q q q q"], texts)
    assert strange.bleu < 5 and strange.chrf < 5


def test_signatures_say_how_it_was_counted() -> None:
    for tokenize in ("13a", "char", "none"):
        made = score(["猫が座った。"], ["猫は座った。"], tokenize)
        assert f"tok:{tokenize}" in made.bleu_signature and "nrefs:1" in made.bleu_signature
        assert "chrF" in made.chrf_signature or "nc:6" in made.chrf_signature


def test_how_texts_are_cut_changes_the_score() -> None:
    translations, references = ["猫がマットに座った。"], ["猫はマットに座った。"]
    assert score(translations, references, "char").bleu > 50
    assert score(translations, references, "none").bleu < 1


def test_one_reference_for_each_translation() -> None:
    with pytest.raises(ValueError, match="2 translations and 1 references; expected as many"):
        score(["a", "b"], ["a"])


def test_without_sacrebleu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'regard[train]'")):
        score(["a"], ["a"])


def test_ways_to_cut_texts_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="tokenize is '13b'; expected one of 'none', 'zh', '13a'"):
        score(["a"], ["a"], "13b")
    monkeypatch.setitem(sys.modules, "MeCab", None)
    with pytest.raises(ModuleNotFoundError, match=r"tokenize='ja-mecab': .* pip install s"):
        score(["a"], ["a"], "ja-mecab")


# ---- Translating rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load(make_translator(tmp_path_factory.mktemp("scores"), directions=None))


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_come_back_in_their_order_and_as_if_alone(model: Transformer, beams: int) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    drawn = torch.Generator().manual_seed(3)
    lengths = (9, 2, 5, 2, 13, 1, 7)
    rows = [torch.randint(3, 60, (n,), generator=drawn).tolist() for n in lengths]
    how = {"beams": beams, "max_new_tokens": 6}
    together = translate_rows(model, tokenizer, rows, **how)  # type: ignore[arg-type]
    alone = [translate_rows(model, tokenizer, [row], **how)[0] for row in rows]  # type: ignore[arg-type]
    some = translate_rows(model, tokenizer, rows, at_once=3, **how)  # type: ignore[arg-type]
    assert together == alone == some
    assert len(set(together)) > 3
    config = GenerationConfig(max_new_tokens=6, **({"num_beams": 3} if beams > 1 else {}))
    plain = generate_ids(model, source=[rows[4]], config=config).rows()[0]
    assert together[4] == tokenizer.decode(plain)


def test_nothing_to_translate_is_nothing(model: Transformer, tmp_path: Path) -> None:
    assert model.tokenizer is not None
    assert translate_rows(model, model.tokenizer, []) == []
