"""Kills processes that save snapshots, and looks at what they leave. Run as a program.

`kill_savers.py FOLDER lines`: one saver is killed at every line that a save runs through.
`kill_savers.py FOLDER random N`: N savers, each killed at a random moment.
It prints one JSON object: what was counted, and every fault that was found.

This is a program of its own, and forks, since a fresh interpreter for each saver would take
seconds to load torch, and forking the tests' own process would copy its threads' locks.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from regard.training.snapshot import BadSnapshot, list_snapshots, load_best, load_latest
from regard.training.snapshot import save_snapshot as save

KEEP = 2
WATCHED = ("training/snapshot.py", "models/save_folder.py")


def state(step: int, size: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((size,), step, dtype=torch.int64), "step": torch.tensor(step)}


def fork(run: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:
            print(f"the saver itself failed: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child


def faults_in(root: Path, *, last: int, best: int, size: int) -> list[str]:
    """What is wrong in a folder in which the saves of steps `last` and `best` had returned."""
    found = []
    try:
        latest, favourite = load_latest(root), load_best(root)
    except BadSnapshot as error:
        return [str(error)]
    for name, snapshot, least in (("latest", latest, last), ("best", favourite, best)):
        if snapshot is None:
            if least >= 0:
                found.append(f"there is no {name} one, though {least} was saved")
        elif snapshot.step < least:
            found.append(f"{name} is {snapshot.step}, but {least} was saved")
        elif (
            not torch.equal(snapshot.tensors["weights"], state(snapshot.step, size)["weights"])
            or snapshot.facts != {"step": snapshot.step}
            or snapshot.passed_over
        ):
            found.append(f"{name}, step {snapshot.step}, holds something else: {snapshot}")
    return found


def ending(folder: Path) -> str:
    """Which files are there; one word for any that waits to be renamed."""
    words = ["waiting" if name.startswith(".") else name for name in sorted(os.listdir(folder))]
    return " ".join(word.removesuffix(".safetensors") for word in words)


def kill_at_every_line(root: Path) -> dict[str, Any]:
    """Steps 1 (the best so far) to 4 are there; step 5, a new best, is saved and cut short."""
    faults: list[str] = []
    ends: set[str] = set()
    bests: set[str] = set()
    number = 0
    ready = root / "ready"
    for step in range(1, 5):
        save(ready, step, state(step, 3), {"step": step}, keep=KEEP, best=step == 1)
    while True:
        number += 1
        folder = root / f"run{number}"
        shutil.copytree(ready, folder)
        child = fork(lambda folder=folder, number=number: save_up_to_line(folder, number))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
            faults.append(f"the saver ended by itself at line {number}")
        for fault in faults_in(folder, last=4, best=1, size=3):
            faults.append(f"killed at line {number}: {fault}")
        bests.add((folder / "best.json").read_text())
        if ends != (ends := ends | {ending(folder)}):
            # The next save clears up whatever is there.
            save(folder, 6, state(6, 3), {"step": 6}, keep=KEEP)
            if "waiting" in ending(folder) or len(list_snapshots(folder)) > KEEP + 1:
                faults.append(f"killed at line {number}: the next save left {ending(folder)}")
        shutil.rmtree(folder)
        if os.WIFEXITED(status):
            return {"lines": number, "ends": sorted(ends), "bests": len(bests), "faults": faults}


def save_up_to_line(folder: Path, number: int) -> None:
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    os.fsync = lambda _: None  # a kill does not lose what the system has, and disks are slow
    sys.settrace(trace)
    save(folder, 5, state(5, 3), {"step": 5}, keep=KEEP, best=True)
    sys.settrace(None)


def kill_at_random(root: Path, times: int) -> dict[str, Any]:
    """A run of many lives: each goes on from what the last one left, and is killed."""
    size, faults, torn, last, best = 50_021, [], 0, -1, -1
    random.seed(20170612)
    for _ in range(times):
        reading, writing = os.pipe()
        child = fork(lambda start=last, pipe=writing: save_for_ever(root, start, size, pipe))
        os.close(writing)
        said = os.read(reading, 9)  # it has saved once
        time.sleep(random.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while piece := os.read(reading, 65536):
            said += piece
        os.close(reading)
        for word in said.split():
            last = int(word)
            best = last if last % 5 == 0 else best
        torn += any(name.startswith(".") for name in os.listdir(root))
        faults += faults_in(root, last=last, best=best, size=size)
        if len(list_snapshots(root)) > KEEP + 3:
            faults.append(f"too many are left: {os.listdir(root)}")
        latest = None
        with contextlib.suppress(BadSnapshot):
            latest = load_latest(root)
        last = -1 if latest is None else latest.step
    return {"steps": last, "torn": torn, "faults": faults}


def save_for_ever(root: Path, start: int, size: int, pipe: int) -> None:
    step = start
    while True:
        step += 1
        save(root, step, state(step, size), {"step": step}, keep=KEEP, best=step % 5 == 0)
        os.write(pipe, b"%08d " % step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, kind, *rest = sys.argv[1:]
    told = (
        kill_at_every_line(Path(where))
        if kind == "lines"
        else kill_at_random(Path(where), int(rest[0]))
    )
    print(json.dumps(told))
