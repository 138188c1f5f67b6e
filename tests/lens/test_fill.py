"""Gaps filled: the numbers are those of `transformers`, and what is no gap is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from masked_models import FAMILIES, make_folder, make_tokenizer

import regard
from regard.lens.fill import Candidate, find_mask, use_own_mask
from regard.models import Transformer
from regard.tokens import Tokenizer

GAPS = ["The [MASK] sat on the mat.", "[MASK] cat [MASK] on the [MASK]", "The cat[MASK] sat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("masked")
    for family in FAMILIES:
        make_folder(family, root / family)
    make_folder("bert", root / "headless", head=False)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def bert(folders: dict[str, Path]) -> Transformer:
    return regard.load(folders["bert"])


@pytest.fixture(scope="module")
def small() -> Transformer:
    return regard.load("embedded:lm")


@pytest.mark.parametrize("text", GAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_are_those_of_transformers(
    folders: dict[str, Path], family: str, text: str
) -> None:
    folder = folders[family]
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    theirs = hf.AutoModelForMaskedLM.from_pretrained(folder).eval()
    judge: Any = hf.pipeline("fill-mask", theirs, tokenizer=tokenizer, top_k=7, device="cpu")
    expected = judge(text.replace("[MASK]", tokenizer.mask_token))
    expected = expected if text.count("[MASK]") > 1 else [expected]
    filled = regard.fill(folder, text, 7)
    assert filled.text == text and len(filled.gaps) == len(expected) == text.count("[MASK]")
    ids = tokenizer(text.replace("[MASK]", tokenizer.mask_token))["input_ids"]
    places = [at for at, number in enumerate(ids) if number == tokenizer.mask_token_id]
    assert [gap.position for gap in filled.gaps] == places
    for gap, rows in zip(filled.gaps, expected, strict=True):
        assert [one.id for one in gap.candidates] == [row["token"] for row in rows]
        assert [one.token for one in gap.candidates] == [row["token_str"] for row in rows]
        scores = [row["score"] for row in rows]
        assert [one.probability for one in gap.candidates] == pytest.approx(scores, abs=1e-5)


def test_all_candidates_together_are_certain(bert: Transformer) -> None:
    (gap,) = regard.fill(bert, GAPS[0], 10_000).gaps
    assert len(gap.candidates) == bert.config.vocab_size
    shares = [one.probability for one in gap.candidates]
    assert sum(shares) == pytest.approx(1.0, abs=1e-5) and shares == sorted(shares, reverse=True)


def test_a_gap_is_written_as_the_model_writes_it_or_as_mask(folders: dict[str, Path]) -> None:
    roberta = regard.load(folders["roberta"])
    one = regard.fill(roberta, "The [MASK] sat", 3)
    other = regard.fill(roberta, "The <mask> sat", 3)
    assert one.gaps == other.gaps and (one.text, other.text) == ("The [MASK] sat", "The <mask> sat")
    tokenizer = make_tokenizer("roberta")
    assert use_own_mask(tokenizer, "a [MASK] b <mask>") == "a <mask> b <mask>"
    assert find_mask(tokenizer) == 4 and find_mask(None) is None


def test_an_effect_is_asked_for_at_the_same_gap(folders: dict[str, Path]) -> None:
    roberta = regard.load(folders["roberta"])
    one = regard.effect(roberta, "The [MASK] sat", edges=("sat", "The"))
    other = regard.effect(roberta, "The <mask> sat", edges=("sat", "The"))
    assert one.log_prob == other.log_prob and (one.heads == other.heads).all()
    best = regard.fill(roberta, "The [MASK] sat", 1).gaps[0].candidates[0]
    assert one.token == best.token
    assert one.log_prob == pytest.approx(torch.tensor(best.probability).log().item(), abs=1e-5)


def test_it_reads_as_text_and_says_that_gaps_are_filled_alone(bert: Transformer) -> None:
    one, many = regard.fill(bert, GAPS[0], 2), regard.fill(bert, GAPS[1], 1)
    best = one.gaps[0].candidates[0]
    assert str(one).splitlines()[:2] == [GAPS[0], f"  {best.probability:.3f} {best.token}"]
    assert len(str(one).splitlines()) == 3 and one.notes == ()
    assert "need not go together" in str(many) and "gap 3" in str(many)


def test_a_candidate_of_spaces_is_shown_as_such() -> None:
    shown = {Candidate(token, 0.5, 7).label for token in (" cat", "##s", " ", "\n")}
    assert shown == {"cat", "##s", "' '", "'\\n'"}


def test_a_tokenizer_can_be_given(bert: Transformer, folders: dict[str, Path]) -> None:
    alone = regard.load(folders["bert"])
    alone.tokenizer = None
    with pytest.raises(ValueError, match="has no tokenizer beside its weights, so it cannot read"):
        regard.fill(alone, GAPS[0])
    assert regard.fill(alone, GAPS[0], tokenizer=bert.tokenizer) == regard.fill(bert, GAPS[0])
    bare = Tokenizer.load(folders["bert"] / "tokenizer.json")
    with pytest.raises(ValueError, match="has a tokenizer without a mask"):
        regard.fill(bert, GAPS[0], tokenizer=bare)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the text is empty"),
        (" \n", "the text is empty"),
        ("The cat sat on the mat.", r"has no gap; put \[MASK\] where a word is asked for"),
        ("The <mask> sat", "has no gap"),
        ("a " * 22 + "[MASK]", "has 25 tokens, and the model takes 23; give the part around"),
    ],
)
def test_texts_that_cannot_be_filled_are_refused(bert: Transformer, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        regard.fill(bert, text)


def test_models_that_fill_no_gaps_are_refused_with_what_they_do(
    small: Transformer, folders: dict[str, Path], bert: Transformer
) -> None:
    with pytest.raises(ValueError, match=r"lm \(llama\) is a causal .* `regard generate` is"):
        regard.fill(small, GAPS[0])
    with pytest.raises(ValueError, match="`regard translate` is for it"):
        regard.fill("embedded:translate", GAPS[0])
    with pytest.raises(ValueError, match=r"headless \(bert\) .* no layer that says words"):
        regard.fill(folders["headless"], GAPS[0])
    with pytest.raises(TypeError, match=r"BertForMaskedLM; expected a name, .* save it"):
        theirs: Any = hf.BertForMaskedLM(hf.BertConfig(num_hidden_layers=1, vocab_size=31))
        regard.fill(theirs, GAPS[0])
    with pytest.raises(TypeError, match="text is a list"):
        regard.fill(bert, [GAPS[0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top"):
        regard.fill(bert, GAPS[0], 0)
    bert.train()
    try:
        with pytest.raises(ValueError, match="in training mode"):
            regard.fill(bert, GAPS[0])
    finally:
        bert.eval()
