"""The models inside the package: their names, their size, and what is said where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from translators import make_translator

import regard
from regard.models import embedded

FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
WRITING = {"generation_config.json"}
MOST_BYTES = {"encoder": 12_000_000, "lm": 10_000_000, "translate": 10_000_000}


def test_the_embedded_models_are_whole_small_and_no_others() -> None:
    root = Path(regard.__file__).parent / "embedded"
    assert root == embedded.ROOT
    assert sorted(path.name for path in root.iterdir()) == sorted(embedded.NAMES)
    for name in embedded.NAMES:
        files = {path.name: path.stat().st_size for path in (root / name).rglob("*")}
        assert set(files) == FILES | (set() if name == "encoder" else WRITING), name
        size = sum(files.values())
        assert size <= MOST_BYTES[name], f"{name} takes {size:,} bytes"
        told = json.loads((root / name / "config.json").read_text(encoding="utf-8"))
        assert told["quantization_config"]["kind"] == "regard-int8-rows"


def test_the_translator_translates_both_ways() -> None:
    model = regard.load("embedded:translate")
    assert regard.translate(model, "The cat sat on the mat.") == "猫はマットに座った。"
    assert regard.translate(model, "明日は雨が降るでしょう。") == "It will rain tomorrow."


def test_the_language_model_finds_english_likelier_than_its_words_shuffled() -> None:
    model = regard.load("embedded:lm")
    assert model.tokenizer is not None

    def loss(text: str) -> float:
        ids = torch.tensor([model.tokenizer.encode(text).ids])  # type: ignore[union-attr]
        logits = model(ids).logits
        return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))

    with torch.no_grad():
        straight = loss("The house stood on a hill near the river, and the road led to the town.")
        shuffled = loss("river the on house The hill and, near a led stood the road town the to.")
    assert straight < 4.5 < 6.0 < shuffled


def test_the_encoder_fills_gaps_and_one_of_its_heads_looks_from_it_at_the_animal() -> None:
    filled = regard.fill("embedded:encoder", "He opened the [MASK] and went out.", 1)
    assert filled.gaps[0].candidates[0].token == "door"
    record = regard.look("The animal didn't cross the street because it was too tired.")
    words = [record.text[start:end] for start, end in record.spans]
    at = words.index("it")
    weights = dict(zip(words, record.rows(3, 1, at), strict=True))
    assert weights["animal"] > 1.2 * weights["street"] > 0.2


def test_the_card_of_the_encoder_has_its_size_and_its_tokens() -> None:
    model = regard.load("embedded:encoder")
    card = (embedded.ROOT / "encoder" / "README.md").read_text(encoding="utf-8")
    assert f"{sum(x.numel() for x in model.parameters()):,} parameters" in card
    assert f"{model.config.vocab_size:,} pieces" in card
    assert f"up to {model.config.max_len} tokens" in card


def test_an_embedded_model_is_loaded_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_translator(tmp_path / "root" / "translate", int8=True)
    monkeypatch.setattr(embedded, "ROOT", tmp_path / "root")
    model = regard.load("embedded:translate")
    assert model.origin == tmp_path / "root" / "translate"
    assert model.tokenizer is not None and model.tokenizer.id("<2ja>")
    written = regard.translate(model, "The cat sat on the mat.")
    half = regard.load("embedded:translate", dtype=torch.bfloat16)
    assert next(half.parameters()).dtype == torch.bfloat16
    regard.save(model, tmp_path / "plain")
    assert regard.translate(regard.load(tmp_path / "plain"), "The cat sat on the mat.") == written


@pytest.mark.parametrize("name", ["embedded:", "embedded:LM", "embedded:../lm", "embedded:x" * 99])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    known = r"embedded:encoder \(.*; embedded:translate \(.*; embedded:lm \("
    with pytest.raises(ValueError, match=known) as refused:
        regard.load(name)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", list(embedded.NAMES))
def test_one_that_is_not_there_is_said_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match=f"embedded:{name} is not in this copy of regard"):
        regard.load(f"embedded:{name}")


def test_revisions_and_paths_are_not_for_embedded_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_translator(tmp_path / "root" / "lm")
    monkeypatch.setattr(embedded, "ROOT", tmp_path / "root")
    with pytest.raises(ValueError, match="revision"):
        regard.load("embedded:lm", revision="main")
    make_translator(tmp_path / "embedded:translate")
    monkeypatch.chdir(tmp_path)
    assert regard.load(Path("embedded:translate")).origin == Path("embedded:translate")
