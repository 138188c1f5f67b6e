"""The example's command trains a translator whose guided heads were told about links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import train
from guided_attention import AlignedTask
from train import Guidance, align, embedded_translation, main, train_aligned

from regard.models import config_of, count_parameters
from regard.training import run as run_module
from regard.training.config import TrainConfig
from regard.training.prepare import Files, prepare
from regard.training.recipes import Recipe, original
from regard.training.run import old_recipe

PAIRS = Recipe(
    task="translate",
    model=original(12, (1, 1), 2, 17),
    train=TrainConfig(steps=4, lr=1e-2, warmup=1, eval_every=2, save_every=2),
    vocab_size=320,
    max_tokens=128,
    max_len=40,
    both_ways=True,
    tokenize="char",
)
ONE_LAYER = Guidance(weight=0.5, layer=0)


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_module, "plot_losses", lambda folder: None)
    path = tmp_path / "pairs.tsv"
    lines = [f"the {a} {b} cat\tdie {b} {a} Katze" for a in "klmnop" for b in "qrstuv"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_recipe_is_that_of_the_embedded_model() -> None:
    recipe, guidance = embedded_translation(), Guidance()
    config = config_of({**recipe.model, "vocab_size": recipe.vocab_size, "pad_token_id": 0})
    assert (config.dim, len(config.encoder), len(config.decoder)) == (256, 4, 3)
    assert 6_000_000 <= count_parameters(config) <= 10_000_000
    assert guidance.layer < len(config.decoder)
    assert guidance.heads <= config.decoder[0].n_heads
    with pytest.raises(ValueError, match="expected weight above 0"):
        Guidance(weight=0.0)


def test_a_run_is_guided_and_its_heads_are_scored(pairs: Path, tmp_path: Path) -> None:
    lexicon = tmp_path / "lexicon.tsv"
    lexicon.write_text("cat\tKatze\nthe\tdie\n", encoding="utf-8")
    files = Files(data=pairs, valid=pairs, languages=("en", "de"))
    out = tmp_path / "run"
    tests = run_module.Tests(files=[pairs])
    report = train_aligned(files, PAIRS, out, ONE_LAYER, tests=tests, lexicon=lexicon)
    found = report["tests"]["alignment"]
    assert found["total"] == 72 and found["heads"] == [0, 1] and found["layer"] == 0
    assert 0 <= found["right"] <= 72
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    notes = (out / "training" / "log.jsonl").read_text(encoding="utf-8")
    assert "links in 72 pairs" in notes


def test_the_command_line_reaches_the_run(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def keep(files: Files, recipe: Recipe, out: Path, guidance: Guidance, **rest: Any) -> None:
        seen.update(files=files, recipe=recipe, out=out, guidance=guidance, **rest)

    monkeypatch.setattr(train, "train_aligned", keep)
    words = [str(pairs), "--out", str(tmp_path), "--languages", "en,de", "--set", "steps=7"]
    main([*words, "--weight", "0.3", "--heads", "1", "--test", "t.tsv", "--device", "cpu"])
    assert seen["recipe"] == embedded_translation().changed({"steps": "7"})
    assert seen["guidance"] == Guidance(weight=0.3, layer=1, heads=1)
    assert seen["files"].languages == ("en", "de") and seen["tests"].files == [Path("t.tsv")]
    with pytest.raises(SystemExit):
        main([*words, "--languages", "en"])


@pytest.mark.parametrize("both_ways", [False, True])
def test_links_are_found_for_each_direction(tmp_path: Path, both_ways: bool) -> None:
    recipe = replace(PAIRS, both_ways=both_ways)
    # Turned by one place, so that links there and back are not the same.
    three = [(a, b, c) for a in "klmn" for b in "opqr" for c in "stuv"]
    lines = [f"{a} {b} {c}\t{f'{b} {c} {a}'.upper()}" for a, b, c in three]
    data = tmp_path / "p.tsv"
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    notes: list[str] = []
    prepared = prepare(Files(data=data), recipe, tmp_path / "run", notes.append)
    task = align(prepared, recipe, tmp_path / "run", ONE_LAYER, notes.append)
    assert isinstance(task, AlignedTask) and task.guide.offset == int(both_ways)
    assert (task.guide.heads, task.guide.weight) == ((0, 1), 0.5)
    batch, tokenizer, right, n_links = task.batch(0), prepared.tokenizer, 0, 0
    for b, t, s in batch["links"].nonzero().tolist():
        one = tokenizer.decode([int(batch["source"][b, s])]).strip()
        other = tokenizer.decode([int(batch["target_in"][b, t])]).strip()
        right += one.lower() == other.lower() and one != other
        n_links += 1
    assert n_links > len(batch["source"]) and right / n_links > 0.7
    assert any("links in" in note for note in notes)


def test_a_guided_run_of_an_older_version_goes_on_here(pairs: Path, tmp_path: Path) -> None:
    files, out = Files(data=pairs, languages=("en", "de")), tmp_path / "run"
    half = replace(PAIRS, train=replace(PAIRS.train, steps=2, schedule="constant"))
    train_aligned(files, half, out, ONE_LAYER)
    path = out / "training" / "recipe.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields |= {"guide_layer": 0, "guide_heads": 2}
    fields["train"]["guide"] = 0.5
    path.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match="examples/translate_aligned and --resume"):
        old_recipe(out)
    whole = replace(half, train=replace(half.train, steps=4))
    assert train_aligned(files, whole, out, ONE_LAYER, resume=True)["steps"] == 4
