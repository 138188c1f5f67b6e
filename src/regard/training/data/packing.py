"""Packing: batches of fixed windows of running text, each a function of seed and step alone.

Why: documents that are laid end to end and cut into windows need no padding; but a window may then
hold several documents, and none may see another.

How: all tokens form a ring (after the last comes the first). An epoch cuts the ring into windows
from an offset of its own on and shuffles them; window s · rows + r is row r of step s. So an epoch
reads every token once, except for fewer than a window's worth at the seam, which the offset moves.
In a window, documents are numbered 0, 1, 2, ... and positions restart at 0 in each: with the mask
`Causal() & Documents(batch.documents)` each gives the outputs that it would give alone. A
document's last token, the end token, has no target. With `documents=False` the text is one stream,
as in nanoGPT.

A masked model reads each document between two tokens, BERT's [CLS] and [SEP]. The file has them
around each document; with `frame` they also replace the first and last token of each window.
Windows then overlap by two, so that the replaced tokens are targets in the windows before and
after.

Letters: B rows, T tokens of a window.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard._check import check_count
from regard.training.data.reading import BadData
from regard.training.data.shuffle import check_seed, check_step, draw_order, draw_shares, draw_words
from regard.training.data.store import TokenFile

NOTHING = -100  # the target that torch's cross-entropy ignores

# Purposes of random draws: with one seed, different purposes must give different numbers.
_PHASE, _WINDOWS, _MASKED = 1, 2, 3

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Ids and targets (B, T); the number of each token's document in its row, and its position.

    Tokens without a target have -100. `documents` and `positions` are None if every row is within
    one document, or if documents are not kept apart.
    """

    ids: Tensor
    targets: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None


@final
class PackedText:
    """Batches of windows. `shifted=False` (for masked models): targets are the ids themselves.

    frame: the tokens to put first and last in each window, for masked models only.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        context: int,
        rows: int,
        seed: int,
        documents: bool = True,
        shifted: bool = True,
        frame: tuple[int, int] | None = None,
    ) -> None:
        check_count("context", context)
        check_count("rows", rows)
        check_seed(seed)
        if frame is not None and (shifted or context < 3):
            what = "shifted targets" if shifted else f"windows of {context}"
            raise ValueError(f"frame is for masked models and windows of 3 or more, not for {what}")
        if tokens.n_tokens < context + int(shifted):
            what = f"{tokens.path}: has {tokens.n_tokens:,} tokens, fewer than one window"
            after = " and the token after it" if shifted else ""
            raise BadData(f"{what} of {context:,}{after}; give more text, or a smaller context")
        self.tokens, self.context, self.rows, self.seed = tokens, context, rows, seed
        self.documents, self.shifted, self.frame = documents, shifted, frame
        self.stride = context if frame is None else context - 2  # from one window to the next
        self.n_windows = tokens.n_tokens // self.stride  # of an epoch
        # Document starts on the ring, listed for two rounds so that a window may cross the seam.
        n_tokens = tokens.n_tokens
        starts = np.asarray(tokens.bounds[:-1]) if documents else np.zeros(1, np.int64)
        self._breaks = np.concatenate((starts, starts + n_tokens, [2 * n_tokens]))
        self._epoch: tuple[int, Int] = (-1, np.zeros(0, np.int64))

    def batch(self, step: int) -> TextBatch:
        """Make the batch of a step, counted from 0 through all epochs; always the same one."""
        check_step(step)
        numbers = int(step) * self.rows + np.arange(self.rows)
        epochs = numbers // self.n_windows
        starts = np.empty(self.rows, np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            starts[here] = self._starts(epoch)[numbers[here] - epoch * self.n_windows]
        return self._cut(starts, np.zeros(self.rows, np.int64))

    def in_order(self, rows: int | None = None) -> Iterator[TextBatch]:
        """Yield the whole text once, from its start, for evaluation; no target comes twice."""
        rows = self.rows if rows is None else rows
        check_count("rows", rows)
        asked = self.tokens.n_tokens - (int(self.shifted) if self.frame is None else 2)
        firsts = np.arange(0, asked, self.stride)
        starts = np.minimum(firsts, asked - self.stride)
        for at in range(0, len(firsts), rows):
            some = slice(at, at + rows)
            yield self._cut(starts[some], firsts[some] - starts[some])

    def _starts(self, epoch: int) -> Int:
        last, starts = self._epoch
        if last == epoch:
            return starts
        phase = int(draw_words(1, self.seed, _PHASE, epoch)[0]) % self.stride
        order = draw_order(self.n_windows, self.seed, _WINDOWS, epoch)
        starts = phase + order * self.stride
        # One assignment, so another thread sees either the old pair or the new one.
        self._epoch = epoch, starts
        return starts

    def _cut(self, starts: Int, skip: Int) -> TextBatch:
        """Cut the windows at `starts`; the first `skip` targets of each become -100."""
        places = starts[:, None] + np.arange(self.context + 1)
        new = self._find_breaks(starts)
        found = self.tokens.ids[places % self.tokens.n_tokens].astype(np.int64)
        ids = found[:, :-1]
        targets = np.where(new[:, 1:], NOTHING, found[:, 1:]) if self.shifted else ids.copy()
        if self.frame is not None:
            ids[:, 0], ids[:, -1] = self.frame
            targets[:, [0, -1]] = NOTHING
            skip = skip + 1
        if skip.any():
            targets[np.arange(self.context) < skip[:, None]] = NOTHING
        documents = positions = None
        if self.documents and new[:, 1:-1].any():
            inside = new[:, :-1].copy()
            inside[:, 0] = False
            count = np.arange(self.context)
            since = np.maximum.accumulate(np.where(inside, count, 0), axis=1)
            documents = torch.from_numpy(np.cumsum(inside, axis=1, dtype=np.int64))
            positions = torch.from_numpy(count - since)
        rows = torch.from_numpy(np.ascontiguousarray(ids))
        return TextBatch(rows, torch.from_numpy(targets), documents, positions)

    def _find_breaks(self, starts: Int) -> npt.NDArray[np.bool_]:
        """Whether a document, or the ring, starts at each token of the windows: (B, T + 1)."""
        width = self.context + 1
        first = np.searchsorted(self._breaks, starts)
        counts = np.searchsorted(self._breaks, starts + width) - first
        rows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        new = np.zeros((len(starts), width), np.bool_)
        new[rows, self._breaks[first[rows] + within] - starts[rows]] = True
        return new


@final
@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """Settings of masked language modelling: it chooses `share` of the tokens not special."""

    mask_id: int
    vocab_size: int
    special: Collection[int]
    seed: int
    share: float = 0.15

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_count("vocab_size", self.vocab_size)
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share!r}, expected a part of all tokens, up to 1")
        if not 0 <= self.mask_id < self.vocab_size:
            raise ValueError(f"mask_id is {self.mask_id}, expected 0 to {self.vocab_size - 1}")


def mask_tokens(batch: TextBatch, how: MaskedTokens, first: int) -> TextBatch:
    """Mask a batch, made with `shifted=False`: only the chosen tokens keep their targets.

    Each token that is not special is chosen with probability `share`, at least one in the batch. Of
    the chosen ones 80% become `mask_id`, 10% a random token that is not special. first: the number
    of the batch's first row among all rows; the draws of a row follow from the seed and the row's
    number alone, however many rows a batch has.
    """
    check_step(first)
    held = np.array(sorted({int(number) for number in how.special} | {int(how.mask_id)}), np.int64)
    plain = np.setdiff1d(np.arange(how.vocab_size), held)
    if not len(plain):
        raise ValueError(f"all {how.vocab_size} tokens are special; there is nothing to mask")
    ids, targets = batch.ids.numpy(), batch.targets.numpy()
    n_rows, width = ids.shape
    numbers = range(int(first), int(first) + n_rows)
    drawn = [draw_shares(3 * width, how.seed, _MASKED, number) for number in numbers]
    draws = np.reshape(drawn, (n_rows, 3, width)).swapaxes(0, 1)
    allowed = (targets != NOTHING) & ~np.isin(ids, held)
    chosen = allowed & (draws[0] < how.share)
    if not chosen.any() and allowed.any():
        chosen.flat[np.argmin(np.where(allowed, draws[0], 2.0))] = True
    shown = ids.copy()
    shown[chosen & (draws[1] < 0.8)] = how.mask_id
    other = chosen & (draws[1] >= 0.9)
    shown[other] = plain[(draws[2][other] * len(plain)).astype(np.int64)]
    asked = torch.from_numpy(np.where(chosen, targets, NOTHING))
    return replace(batch, ids=torch.from_numpy(shown), targets=asked)
