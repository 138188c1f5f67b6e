"""How long a text can be looked at on this CPU: recorded, saved, opened again, and zoomed into.

    python bench/lens_cpu.py [--length 16384] [--zooms 200] [--out bench/results/lens_cpu.md]

The text is this repository's own prose (docs/conventions.md, README.md, CONTRIBUTING.md,
CHANGELOG.md), repeated and cut to the length; embedded:lm reads it, all 8 layers and 8 heads, with
queries and keys kept. Three processes, one after the other: one records and saves; a fresh one
opens the file and serves it; this one asks. A zoom is a random head and a random pair of tokens,
and goes from the whole map down to the single weight, one tile of 256 × 256 cells a level; a tile
that was asked for before is not asked again. Memory is each process's peak (Linux: VmHWM).

A few weights are also computed from the queries and keys in the file by the plain formula, and
must be the served ones to 1e-5. The run fails where that or one of the bounds does not hold.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import http.client
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
PROSE = ("docs/conventions.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
TILE = 256
MOST_GB, MOST_MS, MOST_OFF = 4.0, 300.0, 1e-5
N_CHECKED = 24


# ---- The processes


def peak_gb() -> float:
    """This process's largest resident memory so far."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if "VmHWM" in line) * 1024 / 1e9


def take_text(tokenizer: Any, length: int) -> str:
    """The prose, as often as it takes, cut after so many tokens."""
    prose = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in PROSE)
    text = prose
    while len(spans := tokenizer.encode(text).offsets) < length:
        text += "\n\n" + prose
    return text[: spans[length - 1][1]]


def record(path: Path, length: int) -> dict[str, Any]:
    """Read, watched and unwatched, and save; what it took."""
    import torch

    import regard

    start = time.perf_counter()
    model = regard.load("embedded:lm")
    text = take_text(model.tokenizer, length)
    ids = torch.tensor([model.tokenizer.encode(text).ids])
    found: dict[str, Any] = {"load s": time.perf_counter() - start, "tokens": ids.shape[1]}
    found["sha256"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    with torch.inference_mode():
        start = time.perf_counter()
        model.run(ids)
        found["forward s"] = time.perf_counter() - start
        start = time.perf_counter()
        with regard.watch(model, keep="qk") as seen:
            model.run(ids)
        found["record s"] = time.perf_counter() - start
    seen.read(model.tokenizer)
    start = time.perf_counter()
    seen.save(path)
    found["save s"] = time.perf_counter() - start
    found["file gb"] = path.stat().st_size / 1e9
    found["threads"] = torch.get_num_threads()
    found["versions"] = f"torch {torch.__version__} · regard {regard.__version__}"
    return {**found, "peak gb": peak_gb()}


def serve(path: Path) -> None:
    """Open and serve until a line comes in; what it took is printed, the peak at the end."""
    start = time.perf_counter()
    from regard.lens.record import Record
    from regard.view.server import Server

    imported = time.perf_counter()
    opened = Record.open(path)
    with Server(opened) as server:
        ready = time.perf_counter()
        found = {"url": server.url, "import s": imported - start, "open s": ready - imported}
        print(json.dumps(found), flush=True)
        sys.stdin.readline()
    print(json.dumps({"peak gb": peak_gb(), "torch": "torch" in sys.modules}), flush=True)


def run_child(*arguments: str) -> dict[str, Any]:
    """This file in a process of its own, which prints what it found."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def served(path: Path, found: dict[str, Any]) -> Iterator[None]:
    """The server in a process of its own while this runs; `found` is filled with what it says."""
    command = [sys.executable, __file__, "--serve", str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        found |= json.loads(child.stdout.readline())
        yield
        child.stdin.write("\n")
        child.stdin.flush()
        found |= json.loads(child.stdout.readline())


# ---- Asking


class Asker:
    """One connection to the server, and how long each answer took."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self.line = http.client.HTTPConnection("127.0.0.1", where.port or 80, timeout=60)
        self.root = where.path
        self.asked: set[str] = set()
        self.times: dict[int, list[float]] = {}

    def ask(self, question: str, level: int | None = None) -> np.ndarray:
        """The numbers of one answer; timed under a level the first time it is asked."""
        start = time.perf_counter()
        self.line.request("GET", f"{self.root}data/{question}")
        answer = self.line.getresponse()
        body = answer.read()
        spent = 1e3 * (time.perf_counter() - start)
        assert answer.status == 200, (question, body[:300])
        if level is not None and question not in self.asked:
            self.asked.add(question)
            self.times.setdefault(level, []).append(spent)
        return np.frombuffer(body, "<f4")

    def zoom(self, place: int, head: int, t: int, s: int, length: int) -> None:
        """From the whole map to one weight; level -1 is the weight itself."""
        top = 0
        while TILE << top < length:
            top += 1
        for level in range(top, -1, -1):
            at = f"{t // (TILE << level)}/{s // (TILE << level)}"
            question = f"map/0/{place}/{head}/{level}/{level}/{at}"
            if question not in self.asked:
                self.ask(question, level)
        self.ask(f"weight/0/{place}/{head}/{t}/{s}", -1)


def check_weights(path: Path, asker: Asker, draw: random.Random) -> tuple[float, float]:
    """The largest gap to the plain formula: of single weights, and of cells of the finest tile."""
    gaps = (0.0, 0.0)
    with safe_open(path, framework="numpy") as file:
        told = json.loads(file.metadata()["regard"])
        for _ in range(N_CHECKED):
            place = draw.randrange(len(told["places"]))
            q_htd, k_gsd = (file.get_slice(f"{place}.{name}") for name in "qk")
            heads, length, width = q_htd.get_shape()
            head, t = draw.randrange(heads), draw.randrange(length)
            group = head // (heads // k_gsd.get_shape()[0])
            q_d = q_htd[head : head + 1, t : t + 1][0, 0].astype(np.float64)
            k_sd = k_gsd[group : group + 1, : t + 1][0].astype(np.float64)
            scores = k_sd @ q_d / width**0.5
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            s = draw.choice([int(weights.argmax()), draw.randrange(t + 1)])
            single = float(asker.ask(f"weight/0/{place}/{head}/{t}/{s}")[0])
            tile = asker.ask(f"map/0/{place}/{head}/0/0/{t // TILE}/{s // TILE}")
            cell = tile.reshape(min(TILE, length - t // TILE * TILE), -1)[t % TILE, s % TILE]
            gaps = (max(gaps[0], abs(single - weights[s])), max(gaps[1], abs(cell - weights[s])))
    return gaps


# ---- The table


def measure(length: int, n_zooms: int, path: Path) -> dict[str, Any]:
    """All figures."""
    found: dict[str, Any] = {"before": os.getloadavg()[0]}
    found["recorder"] = run_child("--record", str(path), "--length", str(length))
    found["server"] = {}
    draw = random.Random(7)
    with served(path, found["server"]):
        asker = Asker(found["server"]["url"])
        with safe_open(path, framework="numpy") as file:
            places = json.loads(file.metadata()["regard"])["places"]
        for _ in range(n_zooms):
            place, t = draw.randrange(len(places)), draw.randrange(length)
            head, s = draw.randrange(places[place]["n_heads"]), draw.randrange(t + 1)
            asker.zoom(place, head, t, s, length)
        found["off"] = check_weights(path, asker, draw)
        asker.line.close()
    found["times"] = asker.times
    found["peak gb"] = peak_gb()
    found["after"] = os.getloadavg()[0]
    return found


def quantiles(times: list[float]) -> str:
    """p50, p95 and the longest, as cells of a table."""
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{statistics.median(ordered):.1f} | {p95:.1f} | {ordered[-1]:.1f}"


def report(length: int, n_zooms: int, found: dict[str, Any]) -> tuple[str, list[str]]:
    """The table as text, and what does not hold."""
    recorder, server = found["recorder"], found["server"]
    tiles = [ms for level, each in found["times"].items() if level >= 0 for ms in each]
    p95 = sorted(tiles)[min(len(tiles) - 1, int(0.95 * len(tiles)))]
    total = recorder["peak gb"] + server["peak gb"] + found["peak gb"]
    wrong = []
    if total >= MOST_GB:
        wrong.append(f"{total:.2f} GB in all, expected under {MOST_GB}")
    if p95 >= MOST_MS:
        wrong.append(f"a tile takes {p95:.0f} ms at the 95th percentile, under {MOST_MS:.0f}")
    if max(found["off"]) > MOST_OFF:
        wrong.append(f"served weights are off by {max(found['off']):.1e}, at most {MOST_OFF}")
    if server["torch"]:
        wrong.append("the server loaded torch")
    lines = [
        "# A long text on a CPU",
        "",
        f"{datetime.date.today()} · {cpu_name()}, {recorder['threads']} threads · Python "
        f"{platform.python_version()} · numpy {np.__version__} · {recorder['versions']} · float32 "
        f"· load before {found['before']:.1f}, after {found['after']:.1f}",
        "",
        f"Command: `python bench/lens_cpu.py --length {length} --zooms {n_zooms}`. The text is "
        f"{', '.join(PROSE)}, repeated and cut to {recorder['tokens']:,} tokens (sha256 "
        f'{recorder["sha256"]}…); embedded:lm, 8 layers × 8 heads, keep="qk".',
        "",
        "| step | seconds |",
        "| --- | ---: |",
        f"| forward, not watched | {recorder['forward s']:.2f} |",
        f"| forward, recorded | {recorder['record s']:.2f} |",
        f"| saved, {recorder['file gb']:.2f} GB | {recorder['save s']:.2f} |",
        f"| opened and served by a fresh process, without torch (imports "
        f"{server['import s']:.2f} s) | {server['open s']:.2f} |",
        "",
        "| process | peak GB |",
        "| --- | ---: |",
        f"| recording | {recorder['peak gb']:.2f} |",
        f"| serving | {server['peak gb']:.2f} |",
        f"| asking | {found['peak gb']:.2f} |",
        f"| all three together (bound {MOST_GB:.0f}) | {total:.2f} |",
        "",
        f"{n_zooms} random zooms from the whole map to a single weight, one question at a time:",
        "",
        "| answer | asked | p50 ms | p95 ms | longest ms |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| all tiles (bound p95 < {MOST_MS:.0f}) | {len(tiles)} | {quantiles(tiles)} |",
    ]
    for level in sorted(found["times"], reverse=True):
        name = "one weight" if level < 0 else f"tile, cells of {1 << level} × {1 << level} weights"
        times = found["times"][level]
        lines.append(f"| {name} | {len(times)} | {quantiles(times)} |")
    lines += [
        "",
        f"{N_CHECKED} weights computed from the file's q and k by the plain formula in float64: "
        f"the served weight is off by {found['off'][0]:.1e} at most, the cell of the finest tile "
        f"by {found['off'][1]:.1e} (bound {MOST_OFF:.0e}).",
    ]
    return "\n".join(lines) + "\n", wrong


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--length", type=int, default=16384, help="tokens of the text")
    parser.add_argument("--zooms", type=int, default=200, help="how many random zooms")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record:
        print(json.dumps(record(given.record, given.length)))
        return
    if given.serve:
        serve(given.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.length, given.zooms, Path(folder) / "long.regard")
    text, wrong = report(given.length, given.zooms, found)
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
