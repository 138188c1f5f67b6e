"""The models inside the package: their names, their size, and what is said where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from translators import make_translator

import regard
from regard.models import embedded

FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "README.md",
}
MOST_BYTES = 10_000_000


def test_the_embedded_models_are_whole_small_and_no_others() -> None:
    root = Path(regard.__file__).parent / "embedded"
    assert root == embedded.ROOT
    assert sorted(path.name for path in root.iterdir()) == sorted(embedded.NAMES)
    for name in embedded.NAMES:
        files = {path.name: path.stat().st_size for path in (root / name).rglob("*")}
        assert set(files) == FILES, name
        assert sum(files.values()) <= MOST_BYTES, f"{name} takes {sum(files.values()):,} bytes"
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
    with pytest.raises(ValueError, match=r"embedded:translate \(.*; embedded:lm \(") as refused:
        regard.load(name)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", ["translate", "lm"])
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
