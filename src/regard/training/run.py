"""A whole run: from files to a folder with a trained model in it.

Why: `regard train` is one command, and all that it does can be called.

How: `run` prepares, trains, and writes the model to the folder itself, so that `regard.load`,
`regard generate` and, where it knows the architecture, `transformers` open it. What the run needs
for itself lies below: training/ has the snapshots, token ids, log and recipe. At the end the model
is put to the tests that were asked for, and report.json says what came of it all.

Letters: none.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.models import Transformer, count_parameters, save
from regard.tokens import Tokenizer
from regard.training.bleu import score, translate_rows
from regard.training.config import TrainConfig
from regard.training.data.packing import NOTHING, PackedText
from regard.training.data.reading import read_documents, read_pairs
from regard.training.data.store import encode_documents
from regard.training.guided_attention import alignment_score
from regard.training.loop import Result, Silence, train
from regard.training.loss import summed_loss
from regard.training.monitor import Monitor
from regard.training.parallel import Fleet
from regard.training.plotting import plot_losses
from regard.training.prepare import END, Files, Prepared, one_id, prepare
from regard.training.recipes import Recipe
from regard.training.snapshot import list_snapshots, load_latest
from regard.training.tasks import LanguageTask

if TYPE_CHECKING:
    from rich.console import Console


RECIPE = "recipe.json"


@dataclass(frozen=True, kw_only=True)
class Tests:
    """What the trained model is put to: held-out files, and a lexicon for the alignment score."""

    files: Sequence[Path] = ()
    target: Path | None = None
    lexicon: Path | None = None


def run(
    files: Files,
    recipe: Recipe,
    out: Path,
    *,
    tests: Tests | None = None,
    fleet: Fleet | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train as the recipe says, write the model to `out`, and give the report."""
    fleet = fleet or Fleet.alone()
    inside = out / "training"
    began = time.perf_counter()
    said: list[str] = []
    if fleet.is_main:
        if not resume:
            make_way(inside)
        inside.mkdir(parents=True, exist_ok=True)
        write_json(inside / RECIPE, asdict(recipe))
    else:
        fleet.any(False)  # the main rank's files are there when it answers
    prepared = prepare(files, recipe, inside, said.append)
    if fleet.is_main:
        fleet.any(False)
    ready = time.perf_counter()
    steps = recipe.train.steps
    start = find_start(inside / "snapshots") if resume else 0
    total = max(steps, start)
    speaker = (
        Monitor(inside, total=total, start=start, tensorboard=tensorboard, console=console)
        if fleet.is_main
        else nullcontext(Silence())
    )
    with speaker as monitor:
        for line in said:
            monitor.note(line)
        judge = make_judge(files, recipe, prepared) if recipe.judge else None
        result = train(
            prepared.model,
            prepared.task,
            recipe.train,
            inside / "snapshots",
            fleet=fleet,
            resume=resume,
            listener=monitor,
            judge=judge,
        )
        trained = time.perf_counter()
        report = tell(recipe, prepared, result, (ready - began, trained - ready), fleet)
        whole = whole_model(prepared.model, fleet)
        if result.reason != "interrupted" and whole is not None:
            prepared = replace(prepared, model=whole)
            save(whole, out)
            plot_losses(inside)
            report["tests"] = put_to(tests or Tests(), files, recipe, prepared, inside)
            write_json(out / "report.json", report)
            monitor.note(f"the model is in {out}: {json.dumps(report['tests'])}")
    return report


def whole_model(model: Transformer, fleet: Fleet) -> Transformer | None:
    """The model in one piece, where several ranks hold parts of it; None but on the main rank."""
    if fleet.size == 1:
        return model
    tensors = fleet.state(model)
    if tensors is None:
        return None
    whole = Transformer(model.config)
    whole.tokenizer = model.tokenizer
    Fleet.alone().restore(whole, (), tensors)
    return whole.to(fleet.device).eval()


def make_way(inside: Path) -> None:
    """Refuse a folder with a run in it; what is left of one that saved nothing does not count."""
    left = list_snapshots(inside / "snapshots")
    if left:
        raise FileExistsError(
            f"{inside.parent} holds a run, its last snapshot is {left[0].name}: go on with "
            "--resume, or train into another folder"
        )
    shutil.rmtree(inside / "tokenizer", ignore_errors=True)


def old_recipe(out: Path) -> Recipe | None:
    """What the run in a folder was told; None where there is none."""
    path = out / "training" / RECIPE
    if not path.is_file():
        return None
    told = json.loads(path.read_text(encoding="utf-8"))
    return Recipe(**{**told, "train": TrainConfig(**told["train"])})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write beside, then rename."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)


def find_start(snapshots: Path) -> int:
    """After how many steps a run goes on."""
    latest = load_latest(snapshots)
    return 0 if latest is None else latest.step


def tell(
    recipe: Recipe,
    prepared: Prepared,
    result: Result,
    seconds: tuple[float, float],
    fleet: Fleet,
) -> dict[str, Any]:
    """What was trained, on what, for how long, and how well."""
    device = platform.processor() or platform.machine()
    if fleet.device.type == "cuda":
        device = torch.cuda.get_device_name(fleet.device)
    best = result.best
    return {
        "ended": result.reason,
        "steps": result.steps,
        "n_parameters": count_parameters(prepared.model.config),
        "vocab_size": prepared.tokenizer.vocab_size,
        "best": None if best is None else asdict(best),
        "seconds_preparing": round(seconds[0], 1),
        "seconds_training": round(seconds[1], 1),
        "device": device,
        "processes": fleet.size,
        "versions": {name: metadata.version(name) for name in ("torch", "numpy")},
        "recipe": asdict(recipe),
    }


# ---- Tests


def make_judge(files: Files, recipe: Recipe, prepared: Prepared) -> Any:
    """BLEU of some held-out sentences, for each evaluation."""
    if files.valid is None:
        raise ValueError("judging by BLEU needs a file of held-out pairs: give --valid")
    pairs = read_pairs(files.valid, target_path=files.valid_target)
    sources, targets = pairs.sources[: recipe.judge], pairs.targets[: recipe.judge]
    way = files.languages[1] if recipe.both_ways else None

    def judge(model: Transformer) -> Mapping[str, float]:
        rows = source_rows(prepared.tokenizer, sources, way)
        made = translate_rows(model, prepared.tokenizer, rows, beams=1)
        scores = score(made, targets, recipe.tokenize)
        return {"bleu": scores.bleu, "chrf": scores.chrf}

    return judge


def source_rows(tokenizer: Tokenizer, texts: Sequence[str], way: str | None) -> list[list[int]]:
    """What an encoder reads: the way, where there are two, the tokens, the end."""
    before = [] if way is None else [one_id(tokenizer, f"<2{way}>")]
    after = [one_id(tokenizer, END)]
    made = tokenizer.encode_batch(list(texts), special=False).rows
    return [[*before, *encoding.ids, *after] for encoding in made]


def put_to(
    tests: Tests, files: Files, recipe: Recipe, prepared: Prepared, folder: Path
) -> dict[str, Any]:
    """The figures of each test."""
    if recipe.task != "translate":
        return {
            path.name: score_text(path, files, recipe, prepared, folder) for path in tests.files
        }
    made: dict[str, Any] = {}
    for path in tests.files:
        pairs = read_pairs(path, target_path=tests.target)
        sides = [("", (pairs.sources, pairs.targets), recipe.tokenize)]
        if recipe.both_ways:
            one, other = files.languages
            sides = [
                (f"{one}-{other}", (pairs.sources, pairs.targets), recipe.tokenize),
                (f"{other}-{one}", (pairs.targets, pairs.sources), "13a"),
            ]
        for name, (sources, targets), tokenize in sides:
            way = name.rpartition("-")[2] or None
            rows = source_rows(prepared.tokenizer, sources, way)
            texts = translate_rows(prepared.model, prepared.tokenizer, rows)
            figures = asdict(score(texts, targets, tokenize))
            made[f"{path.name} {name}".strip()] = figures
            (folder / f"translations.{name or 'test'}.txt").write_text(
                "\n".join(text.replace("\n", " ") for text in texts) + "\n", encoding="utf-8"
            )
        if tests.lexicon is not None:
            made["alignment"] = score_alignment(tests.lexicon, pairs, files, recipe, prepared)
    return made


def score_alignment(
    lexicon: Path, pairs: Any, files: Files, recipe: Recipe, prepared: Prepared
) -> dict[str, Any]:
    """How often the guided heads look from a word to its translation."""
    lines = lexicon.read_text(encoding="utf-8").splitlines()
    cut = [line.split("\t") for line in lines if "\t" in line]
    entries = [(words[0], words[1]) for words in cut]
    way = f"<2{files.languages[1]}>" if recipe.both_ways else None
    made = alignment_score(
        prepared.model,
        prepared.tokenizer,
        list(zip(pairs.sources, pairs.targets, strict=True)),
        entries,
        layer=recipe.guide_layer,
        heads=tuple(range(recipe.guide_heads)),
        prefix=() if way is None else (one_id(prepared.tokenizer, way),),
    )
    return {
        "right": made.right,
        "total": made.total,
        "layer": recipe.guide_layer,
        "heads": list(range(recipe.guide_heads)),
    }


@torch.no_grad()
def score_text(
    path: Path, files: Files, recipe: Recipe, prepared: Prepared, folder: Path
) -> dict[str, float]:
    """Loss a token, perplexity, and bits a byte of a text; of gaps alone, if these are filled."""
    task = prepared.task
    assert isinstance(task, LanguageTask)
    hide = task.masked if recipe.task == "masked" else None
    texts = read_documents(path, separator=files.separator).texts
    n_bytes = sum(len(text.encode()) for text in texts)
    eos = None if len(texts) == 1 else prepared.tokenizer.special.eos
    tokens = encode_documents(texts, prepared.tokenizer, folder / f"{path.name}.tokens", eos=eos)
    packed = PackedText(
        tokens,
        context=min(recipe.context, tokens.n_tokens - 1),
        rows=recipe.rows,
        seed=0,
        documents=recipe.documents,
        shifted=hide is None,
    )
    model, total, n_tokens = prepared.model, 0.0, 0
    device = next(model.parameters()).device
    assert model.head is not None
    for batch in LanguageTask(packed, packed, hide).held_out():
        own = {name: x.to(device) for name, x in batch.items()}
        total += float(summed_loss(model.head, task.vectors(model, own), own["targets"]))
        n_tokens += int((batch["targets"] != NOTHING).sum())
    made = {"loss": total / n_tokens, "perplexity": math.exp(total / n_tokens)}
    if hide is None:
        made["bits_per_byte"] = total / math.log(2.0) / n_bytes
    return made | {"tokens": n_tokens, "bytes": n_bytes}
