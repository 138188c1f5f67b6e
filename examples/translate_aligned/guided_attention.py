"""An auxiliary loss that tells some heads of a translator's cross-attention where to look.

Why: heads that translate well need not look at the word they translate. One small term in the loss
tells a few heads of one layer to look there, so that a picture of them is an alignment.

How: `LinkTable` turns the links of pairs (`word_alignment.py`) into targets for a batch, `guided`
observes one cross-attention during a normal forward (`regard.observing`), and `guide_loss`
compares:

    with guided(model, layer=2, heads=(0, 1)) as heads:
        logits = model(target_in, source=source, source_real=source_real).logits
        loss = ... + 0.05 * guide_loss(heads.weights(), table.batch(rows, S, T))

Decoder position t has read the token target[t - 1] (the first one has read the start token). The
links of this *input* token are the target there: the model knows it and need not guess.

`AlignedTask` puts the term beside the translation loss of `regard.training`.

Left out: several guided layers at once (nest two blocks), and tensor parallelism, which gives a
device a part of the heads only and is refused.

Letters: B batch, H heads, h guided heads, T decoder positions, S source positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from word_alignment import Links

from regard import MultiHeadAttention, Wants, observing
from regard.layers import Seen
from regard.models import Transformer
from regard.training.tasks import Batch, TranslationTask, pair_dict


@final
class LinkTable:
    """Links by pair, ready to become the targets of a batch."""

    def __init__(self, links: Links, n_pairs: int) -> None:
        pair = np.asarray(links.pair)
        if len(pair) and not 0 <= int(pair.min()) <= int(pair.max()) < n_pairs:
            raise ValueError(
                f"links speak of pairs {pair.min()} to {pair.max()}, but n_pairs is {n_pairs}; "
                "give the number of pairs that were aligned"
            )
        order = np.argsort(pair, kind="stable")
        self.n_pairs = n_pairs
        self._first = np.searchsorted(pair[order], np.arange(n_pairs + 1))
        self._source = np.asarray(links.source_index)[order].astype(np.int64)
        self._target = np.asarray(links.target_index)[order].astype(np.int64)

    def batch(
        self, rows: Sequence[int], S: int, T: int, *, shift: int = 1, offset: int = 0
    ) -> Tensor:
        """(B, T, S): each row [b, t] is uniform over the links of its token, or 0 if it has none.

        rows: which pair each row of the batch is. shift: decoder position of the first target
        token (1: it stands behind the start token). offset: source position of the first source
        token (1 behind a language token, say). On the CPU.
        """
        pairs = np.asarray(rows, np.int64).reshape(-1)
        if len(pairs) and not 0 <= int(pairs.min()) <= int(pairs.max()) < self.n_pairs:
            raise ValueError(
                f"rows name pairs {pairs.min()} to {pairs.max()}, but the table has 0 to "
                f"{self.n_pairs - 1}"
            )
        first, n = self._first[pairs], self._first[pairs + 1] - self._first[pairs]
        b = np.repeat(np.arange(len(pairs)), n)
        at = np.arange(len(b)) + np.repeat(first - (np.cumsum(n) - n), n)
        t, s = self._target[at] + shift, self._source[at] + offset
        outside = (t < 0) | (t >= T) | (s < 0) | (s >= S)
        if outside.any():
            raise ValueError(
                f"pair {pairs[b[outside.argmax()]]} has links beyond T={T}, S={S}; are rows, "
                f"shift={shift} and offset={offset} those of this batch?"
            )
        target_bts = torch.zeros(len(pairs), T, S)
        target_bts[torch.from_numpy(b), torch.from_numpy(t), torch.from_numpy(s)] = 1.0
        return target_bts / target_bts.sum(-1, keepdim=True).clamp(min=1.0)


def guide_loss(weights_bhts: Tensor, target_bts: Tensor, count: Tensor | None = None) -> Tensor:
    """How far the mean of the heads is from the links, in nats per position that has any:

        -1/n · Σ_bt Σ_s target[b, t, s] · log( 1/h · Σ_h weights[b, h, t, s] )

    weights: (B, h, T, S), from `guided`. target: (B, T, S), from `LinkTable`. n is the number of
    positions (b, t) with a target, or `count` where a step has several batches. Without any
    position the loss is 0. A weight of 0 counts as the smallest number of its type.
    """
    target_bts = target_bts.to(weights_bhts.device, weights_bhts.dtype)
    linked_bts = target_bts > 0
    mean_bts = weights_bhts.mean(1).clamp(min=torch.finfo(weights_bhts.dtype).tiny)
    total = -(target_bts * mean_bts.log()).sum()
    if count is None:
        count = linked_bts.any(-1).sum()
    return total / count.clamp(min=1)


@final
class GuidedHeads:
    """What the guided heads of one layer looked at in its last forward."""

    def __init__(self, layer: MultiHeadAttention, heads: tuple[int, ...], seen: Seen) -> None:
        self._layer, self._heads, self._seen = layer, heads, seen

    def weights(self) -> Tensor:
        """(B, h, T, S): softmax weights before dropout, float32, with gradients."""
        if not self._seen:
            raise RuntimeError(
                "the guided layer has not run inside the block; run the model there, in this "
                "process, before asking for its weights"
            )
        weights_bhts = self._seen[""].weights
        assert weights_bhts is not None
        if weights_bhts.shape[1] != self._layer.n_heads:
            raise ValueError(
                f"the guided layer has {self._layer.n_heads} heads and computed "
                f"{weights_bhts.shape[1]} of them here; guide without tensor parallelism"
            )
        learns = any(p.requires_grad for p in self._layer.q_proj.parameters())
        if torch.is_grad_enabled() and learns and not weights_bhts.requires_grad:
            raise RuntimeError(
                "the guided layer ran without gradients, so guiding it would teach nothing; run "
                "the forward with gradients, and checkpoint activations with use_reentrant=False"
            )
        return torch.stack([weights_bhts[:, head] for head in self._heads], 1)


@contextmanager
def guided(model: nn.Module, layer: int, heads: Sequence[int]) -> Iterator[GuidedHeads]:
    """Observe some heads of decoder layer `layer`'s cross-attention, with gradients.

    The model's output is bit-identical with and without, and after the block nothing is left in it.
    """
    attn, chosen = _cross_attention(model, layer), tuple(heads)
    is_known = all(0 <= head < attn.n_heads for head in chosen)
    if not chosen or len(set(chosen)) < len(chosen) or not is_known:
        raise ValueError(
            f"heads is {chosen}; expected at least one head of 0 to {attn.n_heads - 1}, each once"
        )
    with observing(attn, Wants(weights=True)) as seen:
        yield GuidedHeads(attn, chosen, seen)


def _cross_attention(model: nn.Module, layer: int) -> MultiHeadAttention:
    decoder = getattr(model, "decoder", None)
    blocks = getattr(decoder, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise TypeError(
            f"{type(model).__name__} has no decoder.layers; only translators are guided"
        )
    if not 0 <= layer < len(blocks):
        raise ValueError(f"there is no decoder layer {layer}; there are 0 to {len(blocks) - 1}")
    attn = getattr(blocks[layer], "cross_attn", None)
    if not isinstance(attn, MultiHeadAttention):
        raise ValueError(
            f"decoder layer {layer} has no cross-attention, so there is no source to look at; only "
            "encoder–decoder models are guided"
        )
    return attn


# ---- The term in a run


@final
@dataclass(frozen=True, eq=False)
class Guide:
    """Which heads of which decoder layer learn which links, and how much that counts."""

    links: LinkTable
    layer: int
    heads: tuple[int, ...]
    weight: float
    offset: int = 0
    """Tokens that stand before a source, such as the one that names the language."""


@final
class AlignedTask:
    """Translation, with the guided term as its auxiliary loss."""

    targets = TranslationTask.targets
    one_size = TranslationTask.one_size
    unigram = TranslationTask.unigram

    def __init__(self, task: TranslationTask, guide: Guide) -> None:
        self.task, self.guide = task, guide

    @property
    def fingerprint(self) -> str:
        return self.task.fingerprint

    def batch(self, number: int) -> dict[str, Tensor]:
        batch = self.task.pairs.batch(number)
        S, T = batch.source.shape[1], batch.target_in.shape[1]
        links_bts = self.guide.links.batch(batch.rows, S, T, offset=self.guide.offset)
        return {**pair_dict(batch), "links": links_bts}

    def held_out(self) -> Iterator[dict[str, Tensor]]:
        return self.task.held_out()

    def vectors(self, model: Transformer, batch: Batch) -> Tensor:
        return self.task.vectors(model, batch)

    def auxiliary_loss(self, model: Transformer, batch: Batch) -> _GuidedTerm:
        return _GuidedTerm(model, self.guide, batch["links"])


class _GuidedTerm:
    """The guided term of one batch: enter, run the model, leave, ask for the loss."""

    def __init__(self, model: Transformer, guide: Guide, links_bts: Tensor) -> None:
        self._guide, self._links_bts = guide, links_bts
        self._block = guided(model, guide.layer, guide.heads)

    def __enter__(self) -> _GuidedTerm:
        self._heads = self._block.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._block.__exit__(None, None, None)

    def loss(self) -> Tensor:
        with torch.autocast(self._links_bts.device.type, enabled=False):
            return self._guide.weight * guide_loss(self._heads.weights(), self._links_bts)
