"""A whole run: from data files to a folder with a trained model in it.

How: `run` prepares, trains, and writes the model into the folder, so that `regard.load`,
`regard generate` and, where it knows the architecture, `transformers` open it. The run's own files
(snapshots, token ids, log, recipe) are in its subfolder training/. At the end the model is scored
on the test files, and report.json has the results. `adapt` may change what was prepared, such as
the task, before the first step.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from regard._files import lock_folder, read_json, remove_leftovers, replace_file
from regard.models import Transformer, count_parameters, save
from regard.tokens import Tokenizer
from regard.training.bleu import score, translate_rows
from regard.training.config import TrainConfig
from regard.training.data.packing import NOTHING
from regard.training.data.reading import read_documents, read_pairs
from regard.training.data.store import encode_texts
from regard.training.loop import Judge, Listener, Result, Silence, open_run
from regard.training.loss import summed_loss
from regard.training.monitor import Monitor
from regard.training.parallel import Mesh
from regard.training.plotting import plot_losses
from regard.training.prepare import (
    END,
    Files,
    Prepared,
    Say,
    count_asked,
    find_ends,
    one_id,
    pack,
    prepare,
)
from regard.training.recipes import Recipe
from regard.training.snapshot import list_snapshots, load_latest
from regard.training.tasks import LanguageTask

RECIPE = "recipe.json"
MAX_RECIPE_BYTES = 10_000_000
Adapt = Callable[[Prepared, Path, Say], Prepared]


@dataclass(frozen=True, kw_only=True)
class Tests:
    """Files to score the trained model on; `target`: the targets, if in a file of their own."""

    files: Sequence[Path] = ()
    target: Path | None = None


def run(
    files: Files,
    recipe: Recipe,
    out: Path,
    *,
    tests: Tests | None = None,
    mesh: Mesh | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    adapt: Adapt | None = None,
) -> dict[str, Any]:
    """Train as the recipe says, write the model to `out`, and return the report.

    One run at a time may train into a folder; a second one gets a BlockingIOError at once.
    """
    mesh, tests = mesh or Mesh.alone(), tests or Tests()
    folder, began = out / "training", time.perf_counter()
    notes: list[str] = []
    read_tests(tests, files, recipe)
    with ExitStack() as stack:
        if mesh.is_main:
            stack.enter_context(lock_folder(out))
            notes += open_folder(folder, recipe, resume)
        else:
            mesh.any(False)  # a barrier: wait until the main rank has written its files
        latest = load_latest(folder / "snapshots") if resume else None
        prepared = prepare(files, recipe, folder, notes.append, fixed=latest is not None)
        if adapt is not None:
            prepared = adapt(prepared, folder, notes.append)
        if mesh.is_main:
            mesh.any(False)
        ready = time.perf_counter()
        start = 0 if latest is None else latest.step
        monitor: Listener = Silence()
        if mesh.is_main:
            total = max(recipe.train.steps, start)
            opened = Monitor(folder, total=total, start=start, tensorboard=tensorboard)
            monitor = stack.enter_context(opened)
        for note in notes:
            monitor.note(note)
        judge = make_judge(files, recipe, prepared) if recipe.judge else None
        how: dict[str, Any] = {"mesh": mesh, "resume": resume, "listener": monitor, "judge": judge}
        what = (prepared.model, prepared.task, recipe.train, folder / "snapshots")
        trained = open_run(*what, **how)
        if mesh.is_main:
            # Not earlier: if resuming is refused, the recipe of the run must stay as it was.
            write_json(folder / RECIPE, asdict(recipe))
        result = trained.train()
        times = {"preparing": ready - began, "training": time.perf_counter() - ready}
        report = make_report(recipe, prepared, result, mesh, times)
        whole = whole_model(prepared.model, mesh)
        if result.reason != "interrupted" and whole is not None:
            save(whole, out)
            plot_losses(folder)
            prepared = replace(prepared, model=whole)
            report["tests"] = scores = run_tests(tests, files, recipe, prepared, folder)
            write_json(out / "report.json", report)
            monitor.note(f"the model is in {out}, {tell_weights(result, scores)}")
    return report


def tell_weights(result: Result, scores: Mapping[str, Any]) -> str:
    """Say which weights a run left (best evaluation or last step) and how they scored."""
    tested = f": {json.dumps(scores)}" if scores else ""
    if result.best is None:
        return f"with the weights of the last step, {result.steps:,}{tested}"
    said = [f"{name} {value:.4g}" for name, value in result.best.scores.items()][:1]
    said.append(f"loss {result.best.loss:.4f}")
    if result.best.unigram is not None:
        said.append(f"unigram {result.best.unigram:.4f}")
    step = f"with the weights of step {result.best.step:,}"
    return f"{step}, the best of its evaluations, {', '.join(said)}{tested}"


def open_folder(folder: Path, recipe: Recipe, resume: bool) -> list[str]:
    """Create the run's folder; refuse one with a run in it, unless that run is resumed.

    Returns notes: which of the recipe's own settings differ from those of the resumed run.
    """
    snapshots = list_snapshots(folder / "snapshots")
    if snapshots and not resume:
        what = f"{folder.parent} holds a run, its last snapshot is {snapshots[0].name}"
        raise FileExistsError(f"{what}: go on with --resume, or train into another folder")
    old = old_recipe(folder.parent, guided=True) if snapshots else None
    changed = [] if old is None else changed_settings(old, recipe)
    for name, said in changed:
        if name in ("vocab_size", "cutting"):
            what = f"{said}: the run in {folder.parent} has its vocabulary already"
            raise ValueError(f"{what}; leave it out, or train into another folder")
    if not resume:
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for written in (folder.parent, folder):
        remove_leftovers(written)
    if not snapshots:
        write_json(folder / RECIPE, asdict(recipe))
    told = ", ".join(said for _, said in changed)
    return [f"this run goes on with other settings: {told}"] if told else []


def changed_settings(old: Recipe, new: Recipe) -> list[tuple[str, str]]:
    """Settings that differ, as (name, sentence); those of `train` are reported by the loop."""

    def settings(recipe: Recipe) -> dict[str, Any]:
        own = {n: value for n, value in vars(recipe).items() if n not in ("model", "train")}
        return own | {f"model.{word}": value for word, value in recipe.model.items()}

    was, now = settings(old), settings(new)
    return [
        (name, f"{name} was {was.get(name)}, is {now.get(name)}")
        for name in (was | now)
        if was.get(name) != now.get(name)
    ]


def whole_model(model: Transformer, mesh: Mesh) -> Transformer | None:
    """Gather a sharded model into an unsharded one on the main rank; None on the other ranks."""
    if mesh.size == 1:
        return model
    tensors = mesh.state(model)
    if tensors is None:
        return None
    whole = Transformer(model.config)
    whole.tokenizer = model.tokenizer
    Mesh.alone().restore(whole, (), tensors)
    return whole.to(mesh.device).eval()


def old_recipe(out: Path, *, guided: bool = False) -> Recipe | None:
    """Read the recipe of the run in a folder; None if there is none.

    guided: accept also a run that guides attention heads, which only the example can resume.
    """
    path = out / "training" / RECIPE
    if not path.is_file():
        return None
    fields = read_json(path, MAX_RECIPE_BYTES, ValueError)
    # Recipes of older versions have these fields; guiding heads has become an example.
    weight, heads = fields["train"].pop("guide", 0), fields.pop("guide_heads", 0)
    fields.pop("guide_layer", None)
    if weight and heads and not guided:
        command = "the command of examples/translate_aligned and --resume"
        raise ValueError(f"the run in {out} guides attention heads; go on with it by {command}")
    return Recipe(**{**fields, "train": TrainConfig(**fields["train"])})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replace_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))


def make_report(
    recipe: Recipe, prepared: Prepared, result: Result, mesh: Mesh, times: Mapping[str, float]
) -> dict[str, Any]:
    device = platform.processor() or platform.machine()
    if mesh.device.type == "cuda":
        device = torch.cuda.get_device_name(mesh.device)
    return {
        "ended": result.reason,
        "steps": result.steps,
        "n_parameters": count_parameters(prepared.model.config),
        "vocab_size": prepared.tokenizer.vocab_size,
        "best": None if result.best is None else asdict(result.best),
        **{f"seconds_{name}": round(seconds, 1) for name, seconds in times.items()},
        "device": device,
        "processes": mesh.size,
        "versions": {name: metadata.version(name) for name in ("torch", "numpy")},
        "recipe": asdict(recipe),
    }


# ---- Tests


def read_tests(tests: Tests, files: Files, recipe: Recipe) -> None:
    """Refuse test files that cannot be read or scored before hours of training, not after."""
    if recipe.task == "translate" and (tests.files or recipe.judge):
        score(["a"], ["a"], recipe.tokenize)
    for path in tests.files:
        if recipe.task == "translate":
            read_pairs(path, target_path=tests.target)
        else:
            read_documents(path, separator=files.separator)


def make_judge(files: Files, recipe: Recipe, prepared: Prepared) -> Judge:
    if files.valid is None:
        raise ValueError("judging by BLEU needs a file of held-out pairs: give --valid")
    pairs = read_pairs(files.valid, target_path=files.valid_target)
    references = pairs.targets[: recipe.judge]
    language = files.languages[1] if recipe.both_ways else None
    rows = source_rows(prepared.tokenizer, pairs.sources[: recipe.judge], language)

    def judge(model: Transformer) -> Mapping[str, float]:
        texts = translate_rows(model, prepared.tokenizer, rows, beams=1)
        scores = score(texts, references, recipe.tokenize)
        return {"bleu": scores.bleu, "chrf": scores.chrf}

    return judge


def source_rows(tokenizer: Tokenizer, texts: list[str], language: str | None) -> list[list[int]]:
    """Encode texts for the encoder: the target language's token if any, the text, the end token."""
    before = [] if language is None else [one_id(tokenizer, f"<2{language}>")]
    encodings = tokenizer.encode_batch(texts, special=False).rows
    return [[*before, *encoding.ids, one_id(tokenizer, END)] for encoding in encodings]


def run_tests(
    tests: Tests, files: Files, recipe: Recipe, prepared: Prepared, folder: Path
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    one, other = files.languages
    for path in tests.files:
        if recipe.task != "translate":
            figures[path.name] = score_text(path, files, recipe, prepared, folder)
            continue
        pairs = read_pairs(path, target_path=tests.target)
        there = pairs.sources, pairs.targets, recipe.tokenize
        directions = {"": there}
        if recipe.both_ways:
            back = pairs.targets, pairs.sources, "13a"
            directions = {f"{one}-{other}": there, f"{other}-{one}": back}
        for name, (sources, references, tokenize) in directions.items():
            rows = source_rows(prepared.tokenizer, sources, name.rpartition("-")[2] or None)
            texts = translate_rows(prepared.model, prepared.tokenizer, rows)
            figures[f"{path.name} {name}".strip()] = asdict(score(texts, references, tokenize))
            lines = "".join(text.replace("\n", " ") + "\n" for text in texts)
            (folder / f"translations.{name or 'test'}.txt").write_text(lines, encoding="utf-8")
    return figures


@torch.no_grad()
def score_text(
    path: Path, files: Files, recipe: Recipe, prepared: Prepared, folder: Path
) -> dict[str, float]:
    """Loss per target, perplexity, and bits per byte, or the unigram loss if masked, of a text."""
    task, model = prepared.task, prepared.model
    assert isinstance(task, LanguageTask) and model.head is not None
    texts = read_documents(path, separator=files.separator).texts
    n_bytes = sum(len(text.encode()) for text in texts)
    ends = find_ends(prepared.tokenizer, recipe, single=len(texts) == 1)
    where = folder / f"{path.name}.tokens"
    tokens = encode_texts(texts, prepared.tokenizer, where, **ends._asdict())
    if count_asked(tokens, prepared.tokenizer, recipe) == 0:
        return {"tokens": 0, "bytes": n_bytes}
    tested = LanguageTask(task.text, pack(tokens, recipe, ends, shorten=True), task.masked)
    device = next(model.parameters()).device
    total, n_tokens = 0.0, 0
    for batch in tested.held_out():
        own = {name: x.to(device) for name, x in batch.items()}
        total += float(summed_loss(model.head, task.vectors(model, own), own["targets"]))
        n_tokens += int((batch["targets"] != NOTHING).sum())
    figures = {"loss": total / n_tokens, "perplexity": math.exp(min(total / n_tokens, 700.0))}
    if tested.unigram is None:
        figures["bits_per_byte"] = total / math.log(2.0) / n_bytes
    else:
        figures["unigram"] = tested.unigram
    return figures | {"tokens": n_tokens, "bytes": n_bytes}
