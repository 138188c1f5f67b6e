"""Survey a corpus: means of every head's scores over any number of texts, in bounded memory.

How: texts are split into blocks of a fixed number. A block is read in batches of texts with the
same number of tokens (`batch_scores.py`), and becomes `Moments`. Processes that torchrun started
take one block each, round by round; after a round all of them merge its blocks, in the order of the
texts. So the result does not depend on the number of processes.

After a round a checkpoint (the state) is written atomically, if the last one is old enough: a
survey that was killed resumes after the last block of its state. The state identifies the model, by
its name and samples of all its weights, and the texts, by a hash over those that were read. A state
of another model or other texts is refused.

Left out: tokenization (`encode` does it), and where texts come from (`corpus.py`).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard._check import check_count
from regard.lens import format as files
from regard.lens.batch_scores import score_batch
from regard.lens.corpus import Hashed
from regard.lens.head_table import SURVEYED, Head, HeadTable, Moments
from regard.lens.lazy_weights import Array
from regard.lens.word_links import Word

VERSION = 2
SAMPLES = 256
"""Numbers sampled from each weight to identify a model."""
EVERY_S = 10.0
"""Seconds between two states."""
Progress: TypeAlias = Callable[[int], None]
"""Called with the approximate number of texts read so far."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenized text; `truncated`: it was longer than the model accepts.

    `words` are formed by its tokens, for the score of links; empty if they are not known.
    """

    ids: list[int]
    labels: list[str]
    truncated: bool = False
    words: Sequence[Word] = ()


@dataclass(frozen=True, eq=False)
class Reader:
    """A model as a survey needs it: `encode` tokenizes a text, `run` runs the model on ids (B, T).

    An empty text has no ids.
    """

    name: str
    module: nn.Module
    encode: Callable[[str], Tokens]
    run: Callable[[Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many texts make a block and a batch, and the path of the state, if one is kept."""

    block: int = 256
    batch: int = 32
    limit: int | None = None
    state: Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        check_count("block", self.block)
        check_count("batch", self.batch)
        if self.limit is not None:
            check_count("limit", self.limit)


@dataclass(frozen=True, eq=False)
class Found:
    """The result over some texts; the heads are unknown before the first text that is not empty."""

    heads: Sequence[Head] = ()
    moments: Moments | None = None
    n_texts: int = 0
    n_empty: int = 0
    n_truncated: int = 0

    def merge(self, other: Found) -> Found:
        if self.moments is None or other.moments is None:
            known = other if self.moments is None else self
            heads, moments = known.heads, known.moments
        else:
            _check_heads(self.heads, other.heads)
            heads, moments = self.heads, self.moments.merge(other.moments)
        counts = ("n_texts", "n_empty", "n_truncated")
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return Found(heads, moments, **sums)


def _check_heads(known: Sequence[Head], others: Sequence[Head]) -> None:
    if list(known) != list(others):
        differ = sorted({head.place for head in set(known) ^ set(others)})
        raise ValueError(
            f"not every text goes through the same heads: {', '.join(differ[:3])} are not always "
            "called; a mean over texts would mix different heads"
        )


def survey_texts(
    reader: Reader, texts: Iterable[str], plan: Plan, progress: Progress | None = None
) -> HeadTable:
    """Survey all texts; every process that takes part returns the same table."""
    if isinstance(texts, str):
        raise TypeError("texts is one str; expected several texts, such as a list of str")
    with join_processes() as processes:
        state, hashed = State(reader, plan), Hashed(texts, plan.limit)
        found = state.read()
        hashed.pass_over(found.n_texts)
        state.check(found, hashed.digest)
        if len(set(processes.gather(found.n_texts))) > 1:
            raise ValueError(
                f"the processes do not all see the same state, {plan.state}; put it where every "
                "machine can read it"
            )
        for blocks in hashed.rounds(plan.block, processes.size):
            n_blocks, own = len(blocks), Found()
            if processes.rank < n_blocks:
                shown = _scale(progress, found.n_texts, n_blocks)
                own = read_block(reader, blocks[processes.rank], plan.batch, shown)
            for part in processes.gather(own)[:n_blocks]:
                found = found.merge(part)
            # A block that is not full is the last one; with more texts it would be a different
            # block.
            if processes.rank == 0 and len(blocks[-1]) == plan.block:
                state.write(found, hashed.digest)
    if found.moments is None:
        counted = f"{found.n_texts:,} texts, {found.n_empty:,} of them empty"
        raise ValueError(f"there is nothing to survey: {counted}; give texts with words in them")
    counts = found.n_texts, found.n_empty, found.n_truncated
    return HeadTable(reader.name, found.heads, found.moments, *counts)


def _scale(progress: Progress | None, n_before: int, n_blocks: int) -> Progress:
    """Scale the progress of one block to that of all blocks that are read in parallel."""
    return lambda n: None if progress is None else progress(n_before + n * n_blocks)


def read_block(reader: Reader, texts: Sequence[str], batch: int, progress: Progress) -> Found:
    """Score some texts, in batches of texts with the same number of tokens."""
    read = [reader.encode(text) for text in texts]
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, tokens in enumerate(read):
        if tokens.ids:
            by_length[len(tokens.ids)].append(number)
    device = next(reader.module.parameters()).device
    heads: list[Head] = []
    values_xnk: Array | None = None
    done = 0
    for numbers in by_length.values():
        for first in range(0, len(numbers), batch):
            now = numbers[first : first + batch]
            ids_bt = torch.tensor([read[number].ids for number in now], device=device)
            labels = [read[number].labels for number in now]
            words = [read[number].words for number in now]
            scores = score_batch(reader.module, reader.run, ids_bt, labels, words)
            own = [
                Head(place.name, place.layer, head)
                for place, scores_bhk in scores.items()
                for head in range(scores_bhk.shape[1])
            ]
            if values_xnk is None:
                heads, values_xnk = own, np.full((len(texts), len(own), len(SURVEYED)), np.nan)
            _check_heads(heads, own)
            values_xnk[now] = np.concatenate(list(scores.values()), 1)
            done += len(now)
            progress(done)
    counts = {
        "n_texts": len(texts),
        "n_empty": sum(not tokens.ids for tokens in read),
        "n_truncated": sum(tokens.truncated for tokens in read),
    }
    moments = None if values_xnk is None else Moments.of(values_xnk)
    return Found(heads, moments, **counts)


class State:
    """A survey's checkpoint: the result so far, and what identifies the texts and the model."""

    def __init__(self, reader: Reader, plan: Plan) -> None:
        self._path, self._resume = plan.state, plan.resume
        self._about: dict[str, Any] = {"survey": VERSION, "block": plan.block}
        if plan.state is not None:
            self._about |= {"model": reader.name, "weights": sample_weights(reader.module)}
        self._digest = ""
        self._written = time.monotonic()

    def read(self) -> Found:
        """The result of earlier blocks; empty if there is no state."""
        if self._path is None or not self._path.exists():
            return Found()
        if not self._resume:
            raise ValueError(
                f"{self._path} is the state of a survey that was stopped: resume it (resume=True, "
                "--resume), or delete this file to begin anew"
            )
        about, arrays = files.read(self._path)
        for name, value in self._about.items():
            if about.get(name) != value:
                raise ValueError(
                    f"{self._path} is of another survey: {_differ(name, about, value)}"
                )
        self._digest = about["texts"]
        heads = [Head(*head) for head in about["heads"]]
        moments = Moments.from_arrays(arrays, (len(heads), len(SURVEYED)))
        counts = {name: about[name] for name in ("n_texts", "n_empty", "n_truncated")}
        return Found(heads, moments, **counts)

    def check(self, found: Found, digest: str) -> None:
        """Refuse to resume with other texts than those that were read."""
        if found.n_texts and digest != self._digest:
            raise ValueError(
                f"{self._path} is of another survey: its first {found.n_texts:,} texts are not the "
                "first of these texts; give the ones it began with, or delete it to begin anew"
            )

    def write(self, found: Found, digest: str) -> None:
        """Write the result so far, unless the last state is still recent."""
        if self._path is None or found.moments is None:
            return
        if time.monotonic() - self._written < EVERY_S:
            return
        counts = {name: getattr(found, name) for name in ("n_texts", "n_empty", "n_truncated")}
        heads = [list(head) for head in found.heads]
        about = {**self._about, **counts, "texts": digest, "heads": heads}
        files.write(self._path, about, found.moments.to_arrays())
        self._written = time.monotonic()


def _differ(name: str, about: dict[str, Any], value: object) -> str:
    if name in ("survey", "block"):
        return f"its {name} is {about.get(name)!r}, and here it is {value!r}"
    known = about.get("model")
    same = "one of the same name with other weights" if name == "weights" else repr(value)
    return f"it read with the model {known!r}, and this is {same}; delete it to begin anew"


def sample_weights(module: nn.Module) -> str:
    """A hash that identifies a model: names, shapes, and some numbers of each weight."""
    found = hashlib.sha256()
    for name, weight in module.state_dict().items():
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        step = max(len(flat) // SAMPLES, 1)
        found.update(flat[::step].to("cpu", torch.float64).numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Processes:
    """The processes that torchrun started together, from the view of one of them."""

    rank: int
    size: int
    group: Any = None

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, in the order of ranks."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


@contextmanager
def join_processes() -> Iterator[Processes]:
    """Join the process group, if there is one; over gloo, since little is exchanged, on the CPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        yield Processes(0, 1)
        return
    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group("gloo")
    try:
        group = dist.new_group(backend="gloo")
        yield Processes(dist.get_rank(), dist.get_world_size(), group)
    finally:
        if owned:
            dist.destroy_process_group()


def is_main() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only process."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0
