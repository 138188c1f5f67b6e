"""Training tasks: next-token prediction, masked language modelling, translation.

Why: the loop should not know what a batch consists of.

How: a task gives batches as plain dicts of tensors, each a pure function of its number; computes
the model's last hidden states for a batch (`vectors`, which the loop may compile); and names the
targets. A task may add an auxiliary loss, as examples/translate_aligned does.

Letters: B rows, T tokens, S tokens of the source, C model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from regard.models import Transformer
from regard.ops import Documents
from regard.training.data.packing import NOTHING, MaskedTokens, PackedText, TextBatch, mask_tokens
from regard.training.data.pairs import PairBatch, PairedText
from regard.training.data.store import TokenFile

Batch = Mapping[str, Tensor]
HELD_OUT_SEED = 15  # held-out text is masked alike in every run, whatever its seed
COUNTED = 1 << 22  # tokens that are counted at a time


class AuxiliaryLoss(AbstractContextManager[Any], Protocol):
    """A term beside the cross-entropy: a context for the forward pass; `loss` is called after."""

    def loss(self) -> Tensor:
        """The weighted term, as a mean over tokens."""


class Task(Protocol):
    """What the loop needs from a task."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data; a run resumes only on data with the same fingerprint."""

    @property
    def targets(self) -> str:
        """The key of the targets in a batch; targets of -100 are ignored."""

    @property
    def one_size(self) -> bool:
        """Whether all batches have one shape; if not, the model is compiled with dynamic shapes."""

    @property
    def unigram(self) -> float | None:
        """The held-out loss of predicting by token frequencies alone; None if not computed."""

    def batch(self, number: int) -> dict[str, Tensor]:
        """Make the batch of that number, on the CPU."""

    def held_out(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of held-out data; none if there is no such data."""

    def vectors(self, model: Transformer, batch: Batch) -> Tensor:
        """Compute the model's last hidden states (B, T, C), one for each target."""

    def auxiliary_loss(self, model: Transformer, batch: Batch) -> AuxiliaryLoss | None:
        """Make the auxiliary loss of a training batch; None if the task has none."""


@final
class LanguageTask:
    """Next-token prediction on a text; with `masked`, masked language modelling."""

    targets = "targets"
    one_size = True

    def __init__(
        self, text: PackedText, valid: PackedText | None, masked: MaskedTokens | None = None
    ) -> None:
        self.text, self.valid, self.masked = text, valid, masked

    @property
    def fingerprint(self) -> str:
        return self.text.tokens.fingerprint

    def batch(self, number: int) -> dict[str, Tensor]:
        batch = self.text.batch(number)
        if self.masked is not None:
            batch = mask_tokens(batch, self.masked, number * self.text.rows)
        return text_dict(batch)

    def held_out(self) -> Iterator[dict[str, Tensor]]:
        if self.valid is None:
            return
        fixed = None if self.masked is None else replace(self.masked, seed=HELD_OUT_SEED)
        first = 0
        for batch in self.valid.in_order():
            yield text_dict(batch if fixed is None else mask_tokens(batch, fixed, first))
            first += len(batch.ids)

    @cached_property
    def unigram(self) -> float | None:
        if self.masked is None:
            return None
        targets = (batch["targets"] for batch in self.held_out())
        return unigram_loss(self.text.tokens, self.masked.special, targets)

    def vectors(self, model: Transformer, batch: Batch) -> Tensor:
        mask = Documents(batch["documents"]) if "documents" in batch else None
        return model.run(batch["ids"], positions=batch.get("positions"), mask=mask)

    def auxiliary_loss(self, model: Transformer, batch: Batch) -> None:
        return None


@final
class TranslationTask:
    """Translation: predict the target's tokens, given the source."""

    targets = "target_out"
    one_size = False
    unigram = None

    def __init__(self, pairs: PairedText, valid: PairedText | None) -> None:
        self.pairs, self.valid = pairs, valid

    @property
    def fingerprint(self) -> str:
        return f"{self.pairs.sources.fingerprint} {self.pairs.targets.fingerprint}"

    def batch(self, number: int) -> dict[str, Tensor]:
        return pair_dict(self.pairs.batch(number))

    def held_out(self) -> Iterator[dict[str, Tensor]]:
        if self.valid is not None:
            yield from map(pair_dict, self.valid.in_order())

    def vectors(self, model: Transformer, batch: Batch) -> Tensor:
        memory = model.encode(batch["source"], batch["source_real"])
        # Padding is on the right and the decoder is causal, so it needs no padding mask.
        return model.run(batch["target_in"], memory=memory)

    def auxiliary_loss(self, model: Transformer, batch: Batch) -> None:
        return None


def unigram_loss(
    tokens: TokenFile, special: Collection[int], targets: Iterable[Tensor]
) -> float | None:
    """The mean of -log p over the targets, with p from `count_tokens`; None without targets."""
    with np.errstate(divide="ignore"):
        losses = -np.log(count_tokens(tokens, special))
    total, n_asked = 0.0, 0
    for one in targets:
        asked = one[one != NOTHING].numpy()
        total += float(losses[asked].sum())
        n_asked += len(asked)
    return total / n_asked if n_asked else None


def count_tokens(tokens: TokenFile, special: Collection[int]) -> npt.NDArray[np.float64]:
    """The share of each token in a text (V,), with one added to every count.

    Special tokens are never targets, so they have share 0.
    """
    counts = count_ids(tokens) + 1
    counts[list(special)] = 0
    return np.asarray(counts / counts.sum())


def count_ids(tokens: TokenFile) -> npt.NDArray[np.int64]:
    """How often each token occurs, (V,)."""
    counts = np.zeros(tokens.vocab_size, np.int64)
    for start in range(0, tokens.n_tokens, COUNTED):
        counts += np.bincount(tokens.ids[start : start + COUNTED], minlength=tokens.vocab_size)
    return counts


def text_dict(batch: TextBatch) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in vars(batch).items() if tensor is not None}


def pair_dict(batch: PairBatch) -> dict[str, Tensor]:
    names = ("source", "source_real", "target_in", "target_out")
    return {name: getattr(batch, name) for name in names}
