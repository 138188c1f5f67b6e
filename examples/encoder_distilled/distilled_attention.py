"""Masked words, and beside them the attention of a teacher: `DistilledTask`.

Why: about ten million weights do not find a pronoun's antecedent by masked words alone. A larger
encoder does, and where each of its heads looks can be taught like anything else.

How: half of a batch's rows have gaps to fill; the other half are read whole by student and teacher,
and there two kinds of distributions are matched by their Kullback–Leibler divergence, layer by
layer and head by head: the attention weights, and the softmax of values with values, which says
what a state holds without asking both to be equally wide (after MiniLM's self-attention
distillation). `regard.observing` gives the student's weights with gradients.

Letters: B rows, T tokens, H heads, D head width, C model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, final

import numpy as np
import torch
from sentence_rows import Ids
from torch import Tensor, nn

from regard import MultiHeadAttention, Wants, observing
from regard.models import Transformer
from regard.training.data.packing import NOTHING, MaskedTokens, TextBatch, mask_tokens
from regard.training.tasks import Batch

PAD = 0


class Heads(Protocol):
    """What one forward left of every layer: weights (B, H, T, T) and values (B, T, H, D)."""

    weights: list[Tensor]
    values: list[Tensor]


@final
class ReadHeads:
    """In its block, weights and values of every attention layer of a model's forward."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
        self._stack = ExitStack()
        self._values: dict[int, Tensor] = {}

    def __enter__(self) -> ReadHeads:
        self._seen = [
            self._stack.enter_context(observing(layer, Wants(weights=True)))
            for layer in self.layers
        ]
        for n, layer in enumerate(self.layers):
            hook = layer.v_proj.register_forward_hook(self._keep(n))
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _keep(self, n: int) -> Any:
        def keep(module: nn.Module, args: Any, values_btc: Tensor) -> None:
            self._values[n] = values_btc.unflatten(-1, (self.layers[n].n_heads, -1))

        return keep

    @property
    def weights(self) -> list[Tensor]:
        found = [seen[""].weights for seen in self._seen]
        return [one for one in found if one is not None]

    @property
    def values(self) -> list[Tensor]:
        return [self._values[n] for n in range(len(self.layers))]


def divergence(teacher: Tensor, student: Tensor, real_bt: Tensor) -> Tensor:
    """KL(teacher ‖ student) in nats, the mean over heads and over rows that are real tokens."""
    tiny = torch.finfo(torch.float32).tiny
    one, other = teacher.float(), student.float()
    each_bhts = one * (one.clamp(min=tiny).log() - other.clamp(min=tiny).log())
    rows_bt = each_bhts.sum(-1).mean(1)
    return (rows_bt * real_bt).sum() / real_bt.sum().clamp(min=1)


def relate(values_bthd: Tensor, real_bt: Tensor) -> Tensor:
    """(B, H, T, T): the softmax of each value with all others of its row."""
    values_bhtd = values_bthd.transpose(1, 2).float()
    scores = values_bhtd @ values_bhtd.mT / values_bhtd.shape[-1] ** 0.5
    return scores.masked_fill(~real_bt[:, None, None, :], float("-inf")).softmax(-1)


@final
class DistilledTask:
    """Rows to fill and rows to look at as the teacher does; one half of each batch each."""

    targets = "targets"
    one_size = True
    unigram = None

    def __init__(
        self,
        rows: Ids,
        valid: Ids,
        masked: MaskedTokens,
        teacher: Transformer,
        teacher_ids: Tensor,
        *,
        n_rows: int,
        weight: float,
    ) -> None:
        self.rows, self.valid, self.masked, self.n_rows = rows, valid, masked, n_rows
        self.teacher, self.teacher_ids, self.weight = teacher, teacher_ids, weight

    @property
    def fingerprint(self) -> str:
        return f"{self.rows.shape} {int(self.rows.astype(np.int64).sum())}"

    def batch(self, number: int) -> dict[str, Tensor]:
        drawn = np.random.default_rng((self.masked.seed, number))
        chosen = drawn.integers(0, len(self.rows), self.n_rows)
        ids = torch.from_numpy(self.rows[chosen].astype(np.int64))
        half = len(ids) // 2
        gaps = self._hide(ids[:half], number)
        targets = torch.full_like(ids, NOTHING)
        targets[:half] = gaps.targets
        return {"ids": torch.cat([gaps.ids, ids[half:]]), "targets": targets}

    def held_out(self) -> Iterator[dict[str, Tensor]]:
        for number, first in enumerate(range(0, len(self.valid), self.n_rows)):
            ids = torch.from_numpy(self.valid[first : first + self.n_rows].astype(np.int64))
            gaps = self._hide(ids, number)
            yield {"ids": gaps.ids, "targets": gaps.targets}

    def vectors(self, model: Transformer, batch: Batch) -> Tensor:
        return model.run(batch["ids"], real=batch["ids"] != PAD)

    def auxiliary_loss(self, model: Transformer, batch: Batch) -> AttentionTerm:
        return AttentionTerm(model, self, batch["ids"])

    def _hide(self, ids: Tensor, number: int) -> TextBatch:
        targets = torch.where(ids == PAD, NOTHING, ids)
        return mask_tokens(TextBatch(ids, targets, None, None), self.masked, number)


@final
class AttentionTerm:
    """The distilled term of one batch: enter, run the student, leave, ask for the loss."""

    def __init__(self, model: Transformer, task: DistilledTask, ids_bt: Tensor) -> None:
        self.task, self.ids_bt = task, ids_bt
        self.student = ReadHeads(model)

    def __enter__(self) -> AttentionTerm:
        self.student.__enter__()
        return self

    def __exit__(self, *left: object) -> None:
        self.student.__exit__(*left)

    def loss(self) -> Tensor:
        half = len(self.ids_bt) // 2
        ids_bt = self.ids_bt[half:]
        real_bt = ids_bt != PAD
        teacher = self.task.teacher
        with torch.no_grad(), ReadHeads(teacher) as told:
            teacher.run(self.task.teacher_ids[ids_bt], real=real_bt)
        pairs = zip(told.weights, self.student.weights, strict=True)
        terms = [divergence(one, other[half:], real_bt) for one, other in pairs]
        values = zip(told.values, self.student.values, strict=True)
        terms += [
            divergence(relate(one, real_bt), relate(other[half:], real_bt), real_bt)
            for one, other in values
        ]
        return self.task.weight * torch.stack(terms).mean()


def heads_agree(model: Transformer, task: DistilledTask, ids: Ids) -> Sequence[float]:
    """For each layer: the share of rows of weights whose largest is where the teacher's is."""
    read = torch.from_numpy(ids.astype(np.int64)).to(next(model.parameters()).device)
    real_bt = read != PAD
    with torch.no_grad(), ReadHeads(model) as mine, ReadHeads(task.teacher) as told:
        model.run(read, real=real_bt)
        task.teacher.run(task.teacher_ids[read], real=real_bt)
    return [
        float((a.argmax(-1) == b.argmax(-1)).float().mean(1)[real_bt].mean())
        for a, b in zip(mine.weights, told.weights, strict=True)
    ]
