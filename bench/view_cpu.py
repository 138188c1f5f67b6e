"""How long the commands take that show a text, and how large a page is, on this CPU.

    python bench/view_cpu.py MODEL.gguf FOLDER [--out bench/results/view_cpu.md]

MODEL.gguf is a real language model of many heads (SmolLM2-135M: 270), FOLDER a BERT of 512 tokens
(all-MiniLM-L6-v2). The text is this repository's own prose, cut to so many tokens. Each row is one
command in a process of its own, from its start to its end, page, record and digest included; the
CPU seconds are those of all its threads. The run fails where a bound does not hold.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import regard

ROOT = Path(__file__).resolve().parent.parent
PROSE = ("docs/conventions.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@dataclass(frozen=True)
class Row:
    """A command, the file it writes, and the bounds on its seconds and on that file's megabytes."""

    what: str
    arguments: list[str]
    page: Path
    most_s: float | None = None
    most_mb: float | None = None


@dataclass(frozen=True)
class Found:
    seconds: float
    cpu: float
    mb: float
    said: str


def take_words(model: str, n_tokens: int) -> str:
    """The beginning of the prose that is so many tokens of a model."""
    prose = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in PROSE)
    tokenizer = regard.load(model).tokenizer
    assert tokenizer is not None
    while len(spans := tokenizer.encode(prose).offsets) < n_tokens:
        prose += "\n\n" + prose
    return prose[: spans[n_tokens - 1][1]]


def run(row: Row) -> Found:
    """One command from start to end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, "-m", "regard", *row.arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Found(seconds, cpu, row.page.stat().st_size / 1e6, done.stdout + done.stderr)


def make_rows(gguf: str, bert: str, here: Path) -> list[Row]:
    """The commands, in the order in which they run: the second opens what the first saved."""
    for name, model, n_tokens in (("short", gguf, 353), ("long", "embedded:lm", 10_000)):
        (here / name).write_text(take_words(model, n_tokens), encoding="utf-8")
    words = (here / "long").read_text(encoding="utf-8").split()[:3000]
    (here / "words").write_text(" ".join(words), encoding="utf-8")
    pages = [here / f"{name}.html" for name in ("look", "view", "long", "window")]
    record = str(here / "short.regard")
    look = ["look", str(here / "short"), "-m", gguf, "--html", str(pages[0]), "--save", record]
    view = ["view", record, "--html", str(pages[1])]
    long = ["look", str(here / "long"), "--html", str(pages[2])]
    window = ["look", str(here / "words"), "-m", bert, "--window", "--html", str(pages[3])]
    return [
        Row("look, 353 tokens, 270 heads", look, pages[0]),
        Row("view of that record", view, pages[1], most_s=10, most_mb=10),
        Row("look, 10,000 tokens, embedded:lm", long, pages[2], most_s=60, most_mb=10),
        Row("look --window, 3,000 words, a BERT of 512 tokens", window, pages[3], most_mb=10),
    ]


def spell_out(bound: float | None) -> str:
    return "–" if bound is None else f"{bound:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gguf")
    parser.add_argument("bert")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        cpu = next((line.split(":")[1].strip() for line in info if "model name" in line), "a CPU")
    load = os.getloadavg()[0]
    lines = ["| command | seconds | bound | CPU seconds | page, MB | bound |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    notes, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for row in make_rows(options.gguf, options.bert, Path(folder)):
            found = run(row)
            lines.append(
                f"| {row.what} | {found.seconds:.1f} | {spell_out(row.most_s)} | {found.cpu:.1f} | "
                f"{found.mb:.2f} | {spell_out(row.most_mb)} |"
            )
            print(lines[-1], flush=True)
            told = re.findall(r"(?:the file has|weights in the file).*", found.said)
            notes += [f"- {row.what}: {note}" for note in told]
            if found.seconds > (row.most_s or np.inf) or found.mb > (row.most_mb or np.inf):
                failed.append(row.what)
    today = datetime.date.today().isoformat()
    versions = (
        f"Python {platform.python_version()} · numpy {np.__version__} · torch {torch.__version__}"
    )
    head = f"{today} · {cpu}, {os.cpu_count()} threads · {versions} · regard {regard.__version__}"
    text = "\n".join(
        [
            "# Pages on a CPU",
            "",
            f"{head} · load before {load:.1f}, after {os.getloadavg()[0]:.1f}",
            "",
            "Command: `python bench/view_cpu.py SmolLM2-135M-Instruct.Q4_1.gguf all-MiniLM-L6-v2`.",
            "The text is docs/conventions.md, README.md, CONTRIBUTING.md, CHANGELOG.md, cut.",
            "",
            *lines,
            "",
            *notes,
            "",
        ]
    )
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if failed:
        print(f"over a bound: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
