"""Train the translator of embedded:translate, some of whose heads look at what they translate.

    python train.py train.en --target train.ja --valid dev.en --valid-target dev.ja \
        --test test.en --test-target test.ja --lexicon lexicon.tsv --languages en,ja --out run

It is `regard train translate` with one thing more: the words of the training pairs are aligned by
statistics, and an auxiliary loss tells `--heads` heads of decoder layer `--layer` to look from each
token to those it was aligned with. `--lexicon` counts at the end how often they do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from alignment_score import alignment_score
from guided_attention import AlignedTask, Guide, LinkTable
from word_alignment import align_pairs

import regard
from regard.training.config import TrainConfig, split_settings
from regard.training.data.reading import read_pairs
from regard.training.data.store import TokenFile
from regard.training.parallel import Mesh
from regard.training.prepare import Files, Prepared, one_id, side_file
from regard.training.recipes import Recipe, original
from regard.training.run import Tests, run, write_json
from regard.training.tasks import TranslationTask


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Which heads are guided, and the weight of that in the loss."""

    weight: float = 0.1
    layer: int = 1
    heads: int = 2

    def __post_init__(self) -> None:
        if self.weight <= 0 or self.layer < 0 or self.heads < 1:
            raise ValueError(f"{self}; expected weight above 0, layer from 0, heads from 1")


def embedded_translation() -> Recipe:
    """The model that ships as embedded:translate."""
    return Recipe(
        task="translate",
        model=original(256, (4, 3), 8, 1024)
        | {"normalize_before": True, "dropout": 0.3, "attention_dropout": 0.1},
        train=TrainConfig(
            steps=9000,
            lr=2e-3,
            warmup=800,
            beta2=0.98,
            smoothing=0.1,
            weight_decay=0.01,
            average=0.999,
            eval_every=1000,
            save_every=3000,
            precision="bfloat16",
        ),
        vocab_size=8000,
        cutting="scripts",
        max_tokens=12000,
        both_ways=True,
        judge=500,
        tokenize="char",
    )


def train_aligned(
    files: Files,
    recipe: Recipe,
    out: Path,
    guidance: Guidance,
    *,
    tests: Tests | None = None,
    lexicon: Path | None = None,
    mesh: Mesh | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train, write the model to `out`, and give the report."""

    def adapt(prepared: Prepared, folder: Path, say: Callable[[str], None]) -> Prepared:
        return replace(prepared, task=align(prepared, recipe, folder, guidance, say))

    report = run(files, recipe, out, tests=tests, mesh=mesh, resume=resume, adapt=adapt)
    if lexicon is not None and tests is not None and report["ended"] != "interrupted":
        report["tests"]["alignment"] = score(lexicon, tests, files, recipe, out, guidance)
        write_json(out / "report.json", report)
    return report


def align(
    prepared: Prepared,
    recipe: Recipe,
    folder: Path,
    guidance: Guidance,
    say: Callable[[str], None],
) -> AlignedTask:
    """The task with links of its training pairs, for the heads that are guided."""
    task = prepared.task
    if not isinstance(task, TranslationTask):
        raise TypeError(f"{type(task).__name__} has no pairs to align; give a recipe to translate")
    say("aligning words, for the guided heads")
    sources, targets = (TokenFile.open(side_file(folder, "train", side)) for side in (0, 1))
    links, n_pairs, offset = align_pairs(sources, targets), sources.n_documents, 0
    if recipe.both_ways:
        links, n_pairs, offset = links.then(links.turned(), n_pairs), 2 * n_pairs, 1
    say(f"{len(links):,} links in {n_pairs:,} pairs")
    heads = tuple(range(guidance.heads))
    guide = Guide(LinkTable(links, n_pairs), guidance.layer, heads, guidance.weight, offset)
    return AlignedTask(task, guide)


def score(
    lexicon: Path, tests: Tests, files: Files, recipe: Recipe, out: Path, guidance: Guidance
) -> dict[str, Any]:
    """How often the guided heads look from a word to its translation."""
    lines = lexicon.read_text(encoding="utf-8").splitlines()
    entries = [(line.split("\t")[0], line.split("\t")[1]) for line in lines if "\t" in line]
    model = regard.load(out)
    assert model.tokenizer is not None
    language = f"<2{files.languages[1]}>"
    heads = list(range(guidance.heads))
    right = total = 0
    for path in tests.files:
        pairs = read_pairs(path, target_path=tests.target)
        found = alignment_score(
            model,
            model.tokenizer,
            list(zip(pairs.sources, pairs.targets, strict=True)),
            entries,
            layer=guidance.layer,
            heads=heads,
            prefix=(one_id(model.tokenizer, language),) if recipe.both_ways else (),
        )
        right, total = right + found.right, total + found.total
    return {"right": right, "total": total, "layer": guidance.layer, "heads": heads}


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="the pairs, or the sources, to learn from")
    parser.add_argument("--out", "-o", type=Path, required=True, help="the folder for the run")
    for name in ("target", "valid", "valid-target", "test", "test-target", "tokenizer", "lexicon"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--languages", default="en,ja", help="source and target")
    parser.add_argument("--set", action="append", default=[], help="key=value, as regard train has")
    parser.add_argument("--weight", type=float, default=0.1, help="of the guided term in the loss")
    parser.add_argument("--layer", type=int, default=1, help="the decoder layer that is guided")
    parser.add_argument("--heads", type=int, default=2, help="how many of its heads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    given = parser.parse_args(words)
    names = given.languages.split(",")
    if len(names) != 2 or not all(names):
        parser.error(f"--languages {given.languages!r}; expected two, such as en,ja")
    return given


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run what the command line asks for."""
    given = read_arguments(words)
    one, other = given.languages.split(",")
    files = Files(
        data=given.data,
        target=given.target,
        valid=given.valid,
        valid_target=given.valid_target,
        tokenizer=given.tokenizer,
        languages=(one, other),
    )
    return train_aligned(
        files,
        embedded_translation().changed(split_settings(given.set)),
        given.out,
        Guidance(weight=given.weight, layer=given.layer, heads=given.heads),
        tests=Tests(files=[given.test] if given.test else [], target=given.test_target),
        lexicon=given.lexicon,
        mesh=Mesh.alone(torch.device(given.device)),
        resume=given.resume,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
