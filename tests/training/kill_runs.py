"""Kills whole training runs at random moments, and lets each go on to its end. Run as a program.

`kill_runs.py FOLDER N` prints one JSON object: where the N kills fell, and every difference between
a run that was killed and resumed and the one that was left in peace.

A run is all that `regard train lm` does, from the text file to the model's folder, but for the
plot. It saves after each step and evaluates after every second one, so that many kills fall into
the writing of a snapshot. Each run is a fork of this program, since a fresh interpreter would take
seconds to load torch; this program itself computes nothing, so that it has no threads to lose.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.ma  # noqa: F401  what a run would import is imported once, here
import rich.console  # noqa: F401
import tokenizers  # noqa: F401
import torch
import torch._dynamo  # what torch's optimizers load

from regard.training import loop, run
from regard.training.config import TrainConfig
from regard.training.prepare import Files
from regard.training.recipes import Recipe
from regard.training.runlog import read_log
from regard.training.snapshot import list_snapshots, load_latest

SEED = 20170612
BEST = 4
MODEL = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 6000,  # a long table: snapshots that take a while to write
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
}
RECIPE = Recipe(
    task="lm",
    model=MODEL,
    train=TrainConfig(
        steps=8,
        lr=2e-2,
        warmup=3,
        optimizer="muon",
        average=0.5,
        save_every=1,
        eval_every=2,
        keep=2,
    ),
    vocab_size=300,
    context=16,
    rows=3,
)


def write_text(path: Path) -> None:
    draw = random.Random(SEED)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(50)]
    lines = (" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(150))
    path.write_text("\n<|endoftext|>\n".join(lines), encoding="utf-8")


def fork(run: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:
            print(f"the run itself failed: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child


def train(text: Path, out: Path) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    run.plot_losses = lambda *_: None  # type: ignore[assignment]
    # The best evaluation is told, so that it is neither the first nor the last on any machine.
    loop.figure_of = lambda report: -abs(report.step - BEST)  # type: ignore[assignment]
    run.run(Files(data=text), RECIPE, out, resume=True)


def live(text: Path, out: Path, seconds: float | None) -> tuple[int, float]:
    """One life of a run: how it ended, and how long it took; it is killed after `seconds`."""
    began = time.perf_counter()
    child = fork(lambda: train(text, out))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return status, time.perf_counter() - began


def find_place(out: Path) -> str:
    """Where a kill fell, by what it left."""
    inside = out / "training"
    snapshots = inside / "snapshots"
    if not snapshots.is_dir() or not os.listdir(snapshots):
        return "before the first snapshot"
    if any(name.startswith(".") for name in os.listdir(snapshots)):
        return "inside a snapshot"
    latest = load_latest(snapshots)
    assert latest is not None
    best = latest.facts["best"]
    if best is not None and best["step"] == latest.step:
        line = snapshots / "best.json"
        if not line.exists() or latest.path.name not in line.read_text():
            return "before the best was named"
    return "at the end" if latest.step == RECIPE.train.steps else "between snapshots"


def faults_in(out: Path, whole: Path) -> list[str]:
    """What differs from the run that was never stopped."""
    found = []
    if (out / "model.safetensors").read_bytes() != (whole / "model.safetensors").read_bytes():
        found.append("the model's weights")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (out / name).read_bytes() != (whole / name).read_bytes():
            found.append(name)
    states = [load_latest(folder / "training" / "snapshots") for folder in (out, whole)]
    assert states[0] is not None and states[1] is not None
    mine, theirs = states[0].tensors, states[1].tensors
    found += sorted(set(mine) ^ set(theirs))
    found += [name for name in mine if name in theirs and not torch.equal(mine[name], theirs[name])]
    if states[0].facts != states[1].facts:
        found.append(f"facts: {states[0].facts} and {states[1].facts}")
    kept = [[p.name for p in list_snapshots(f / "training" / "snapshots")] for f in (out, whole)]
    if kept[0] != kept[1]:
        found.append(f"snapshots: {kept[0]} and {kept[1]}")
    logs = [read_log(folder / "training") for folder in (out, whole)]
    told = [[(s.step, s.loss, s.grad_norm, s.lr, s.tokens) for s in log.steps] for log in logs]
    if told[0] != told[1] or logs[0].evaluations != logs[1].evaluations:
        found.append("the log's losses")
    return found


def main(root: Path, times: int) -> dict[str, Any]:
    text, whole = root / "text.txt", root / "whole"
    write_text(text)
    status, _ = live(text, whole, None)
    _, seconds = live(text, root / "timed", None)
    assert status == 0, "the run that is left in peace failed"
    draw, faults, places = random.Random(SEED), [], Counter[str]()
    number = 0
    while sum(places.values()) < times:
        number += 1
        out = root / f"run{number}"
        moment = draw.uniform(0.0, seconds)
        status, _ = live(text, out, moment)
        if not os.WIFSIGNALED(status):
            continue  # it was faster than the kill
        place = find_place(out)
        places[place] += 1
        status, _ = live(text, out, None)
        if status != 0:
            faults.append(f"killed {place}, after {moment:.3f} s: it could not go on")
            continue
        faults += [f"killed {place}, after {moment:.3f} s: {f}" for f in faults_in(out, whole)]
    report = json.loads((whole / "report.json").read_text())
    return {
        "kills": sum(places.values()),
        "places": dict(places),
        "faults": faults,
        "best_step": report["best"]["step"],
        "seconds": seconds,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
