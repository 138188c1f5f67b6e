"""Batches of sentence pairs of similar lengths, each a function of seed and step alone.

Why: sentences are padded to the longest of their batch, and a step should cost the same whether
its sentences are long or short.

How: pairs are put into buckets once, by the length of their longer side, rounded up to a multiple
of `MULTIPLE`. A bucket has one width, and batches of at most `max_tokens // width` rows; a bucket
too small for a batch is filled up with the next shorter pairs. Each epoch shuffles the pairs within
their buckets, and the batches, from (seed, epoch); it reads every pair once. Sources get the end
token, targets the start token before (`target_in`) and the end token after (`target_out`).

Left out: cutting long sentences (pairs over `max_len` are dropped, and counted).

Letters: B pairs, S tokens of the source, T tokens of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard._check import check_count
from regard.training.data.packing import NOTHING
from regard.training.data.reading import BadData, Notice
from regard.training.data.shuffle import check_seed, check_step, draw_order, draw_words
from regard.training.data.store import TokenFile

MULTIPLE = 8  # widths of batches are multiples of this

_PAIRS, _BATCHES = 4, 5

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Sources (B, S) and targets (B, T); at padding `_real` is False and `target_out` is -100."""

    source: Tensor
    source_real: Tensor
    target_in: Tensor
    target_out: Tensor
    target_real: Tensor
    rows: tuple[int, ...]  # the numbers of the pairs in the token files


class _Epoch(NamedTuple):
    """The pairs of an epoch's batches, one batch after another, and the order of the batches."""

    number: int
    pairs: Int
    batches: Int


@final
class PairedText:
    """Batches of pairs with at most `max_tokens` tokens on each side, padding included."""

    def __init__(
        self,
        sources: TokenFile,
        targets: TokenFile,
        *,
        max_tokens: int,
        bos: int,
        eos: int,
        pad: int,
        seed: int,
        max_len: int | None = None,
    ) -> None:
        """`max_len`: pairs with more tokens on a side, end token included, are left out."""
        check_count("max_tokens", max_tokens)
        check_seed(seed)
        if sources.n_documents != targets.n_documents:
            sides = (f"{side.path} has {side.n_documents:,}" for side in (sources, targets))
            raise BadData(f"{' sentences and '.join(sides)}; expected as many of both")
        for name, number in (("bos", bos), ("eos", eos), ("pad", pad)):
            for file in (sources, targets):
                if not 0 <= number < (size := file.vocab_size):
                    what = f"{name} is {number}, expected 0 to {size - 1}"
                    raise ValueError(f"{what} as in {file.path}")
        self.sources, self.targets = sources, targets
        self.max_tokens, self.seed = max_tokens, seed
        self.bos, self.eos, self.pad = bos, eos, pad
        lengths = np.maximum(np.diff(sources.bounds), np.diff(targets.bounds)) + 1
        keep = np.arange(len(lengths))
        self.notices: tuple[Notice, ...] = ()
        if max_len is not None:
            check_count("max_len", max_len)
            keep = np.flatnonzero(lengths <= max_len)
            if lost := len(lengths) - len(keep):
                words = "pair was" if lost == 1 else "pairs were"
                text = f"{lost:,} {words} longer than {max_len:,} tokens and left out"
                self.notices = (Notice(text, lost),)
        if not len(keep):
            raise BadData(f"{sources.path}: no pair is left of {len(lengths):,}; expected some")
        self._keep = keep
        self._widths = _round_up(lengths[keep])  # of each pair, by its longer side
        _check_fit(self._widths, keep, max_tokens)
        self._bucket, wide = _make_buckets(self._widths, max_tokens)
        counts = np.bincount(self._bucket)
        sizes = [_deal(int(n), max_tokens // int(w)) for n, w in zip(counts, wide, strict=True)]
        self._width_of = np.repeat(wide, [len(some) for some in sizes])
        self._ends = np.cumsum(np.concatenate(sizes))
        self._epoch = _Epoch(-1, keep, keep)

    @property
    def n_pairs(self) -> int:
        return len(self._keep)

    @property
    def n_batches(self) -> int:
        return len(self._ends)

    def batch(self, step: int) -> PairBatch:
        """Make the batch of a step, counted from 0 through all epochs; always the same one."""
        check_step(step)
        epoch, place = divmod(int(step), self.n_batches)
        drawn = self._draw(epoch)
        number = int(drawn.batches[place])
        start = int(self._ends[number - 1]) if number else 0
        rows = drawn.pairs[start : int(self._ends[number])]
        return self._make(rows, int(self._width_of[number]), int(self._width_of[number]))

    def in_order(self, max_tokens: int | None = None) -> Iterator[PairBatch]:
        """Yield every pair once, the longest first, for evaluation; `rows` has their numbers."""
        limit = self.max_tokens if max_tokens is None else max_tokens
        check_count("max_tokens", limit)
        _check_fit(self._widths, self._keep, limit)
        order = np.argsort(-self._widths, kind="stable")
        at = 0
        while at < len(order):
            width = int(self._widths[order[at]])
            some = order[at : at + limit // width]
            at += len(some)
            rows = self._keep[some]
            spans = (_spans(side, rows) for side in (self.sources, self.targets))
            source_width, target_width = (int(_round_up(np.diff(x).max() + 1)) for x in spans)
            yield self._make(rows, source_width, target_width)

    def _draw(self, epoch: int) -> _Epoch:
        drawn = self._epoch
        if drawn.number != epoch:
            words = draw_words(self.n_pairs, self.seed, _PAIRS, epoch)
            pairs = self._keep[np.lexsort((words, self._bucket))]
            batches = draw_order(self.n_batches, self.seed, _BATCHES, epoch)
            self._epoch = drawn = _Epoch(epoch, pairs, batches)
        return drawn

    def _make(self, rows: Int, source_width: int, target_width: int) -> PairBatch:
        source, source_len = _gather(self.sources, rows, source_width, self.pad)
        source[np.arange(len(rows)), source_len] = self.eos
        target, target_len = _gather(self.targets, rows, target_width, self.pad)
        source_real = np.arange(source_width) <= source_len[:, None]
        target_real = np.arange(target_width) <= target_len[:, None]
        shifted = np.full_like(target, self.bos)
        shifted[:, 1:] = target[:, :-1]
        target[np.arange(len(rows)), target_len] = self.eos
        out = np.where(target_real, target, NOTHING)
        arrays = (source, source_real, shifted, out, target_real)
        fields: list[Any] = [*map(torch.from_numpy, arrays), tuple(rows.tolist())]
        return PairBatch(*fields)


def _round_up(lengths: Int) -> Int:
    return -(-lengths // MULTIPLE) * MULTIPLE


def _check_fit(widths: Int, keep: Int, max_tokens: int) -> None:
    longest = int(widths.argmax())
    if widths[longest] > max_tokens:
        what = (
            f"max_tokens is {max_tokens:,}, but pair {keep[longest]} alone is {widths[longest]:,}"
        )
        raise ValueError(f"{what} wide; raise max_tokens, or leave long pairs out with max_len")


def _make_buckets(widths: Int, max_tokens: int) -> tuple[Int, Int]:
    """Assign each pair a bucket; return these and the width of each bucket, the widest first.

    A bucket has all pairs of one width or, if these do not fill a batch, one batch of them and the
    next shorter ones.
    """
    order = np.argsort(-widths, kind="stable")
    falling = -widths[order]
    bucket = np.empty(len(widths), np.int64)
    found: list[int] = []
    start = 0
    while start < len(order):
        width = -int(falling[start])
        of_this_width = int(np.searchsorted(falling, -width, side="right"))
        end = max(of_this_width, start + max_tokens // width)
        bucket[order[start:end]] = len(found)
        found.append(width)
        start = end
    return bucket, np.array(found, np.int64)


def _deal(n_pairs: int, rows: int) -> Int:
    """How many pairs each batch of a bucket gets: at most `rows`, and as evenly as possible."""
    n_batches = -(-n_pairs // rows)
    return np.bincount(np.arange(n_pairs) % n_batches)


def _spans(side: TokenFile, rows: Int) -> Int:
    """The start and end of each sentence in the ids: (B, 2)."""
    return np.stack((side.bounds[rows], side.bounds[rows + 1]), axis=1)


def _gather(side: TokenFile, rows: Int, width: int, pad: int) -> tuple[Int, Int]:
    """Gather sentences into rows of one width, padded on the right; return also their lengths."""
    spans = _spans(side, rows)
    lengths = spans[:, 1] - spans[:, 0]
    padded = np.full((len(rows), width), pad, np.int64)
    real = np.arange(width) < lengths[:, None]
    padded[real] = side.ids[(spans[:, :1] + np.arange(width))[real]]
    return padded, lengths
