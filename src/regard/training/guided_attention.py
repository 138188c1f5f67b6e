"""What a translator's cross-attention is told about links, and how it is scored with a lexicon.

Why: heads that translate well need not look at the word they translate. One small term in the loss
tells a few heads of one layer to look there, so that a picture of them is an alignment.

How: `LinkTable` turns the links of pairs (`aligning`) into targets for a batch, `guided` catches
what one cross-attention computes during a normal forward, and `guide_loss` compares:

    with guided(model, layer=2, heads=(0, 1)) as caught:
        logits = model(target_in, source=source, source_real=source_real).logits
        loss = ... + 0.05 * guide_loss(caught.log_weights(), table.batch(rows, S, T))

Decoder position t has read the token target[t - 1] (the first one has read the start token). The
links of this *input* token are the target there: the model knows it and need not guess.

The weights are worked out beside the model's own call, by the definition, in float32, for the named
heads only, before dropout; gradients flow through them to queries and keys. The model's output is
bit-identical with and without, and after the block nothing is left in the model. It works under
`torch.compile`, where it is one more graph: with and without.

`alignment_score` asks a trained model about words that a lexicon knows.

Left out: several guided layers at once (nest two blocks), and tensor parallelism, which gives a
device a part of the heads only and is refused.

Letters: B batch, H heads, G key heads, h guided heads, T decoder positions, S source positions,
D head width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from regard._check import check_shapes
from regard.layers import MultiHeadAttention
from regard.layers.observing import callers
from regard.models.transformer import Transformer
from regard.ops.call import Call, Rule, outside_autocast
from regard.ops.call_hook import hooked
from regard.ops.reference import append, raw_scores
from regard.ops.shape import Shape, Tile
from regard.tokens import Encoding, Tokenizer
from regard.training.word_alignment import Links

ROWS_AT_ONCE = 64
"""Pairs in one forward of `alignment_score`."""


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


def guide_loss(log_weights_bhts: Tensor, target_bts: Tensor, count: Tensor | None = None) -> Tensor:
    """How far the mean of the heads is from the links, in nats per position that has any:

        -1/n · Σ_bt Σ_s target[b, t, s] · log( 1/h · Σ_h weights[b, h, t, s] )

    log_weights: (B, h, T, S), from `guided`. target: (B, T, S), from `LinkTable`. n is the number
    of positions (b, t) with a target, or `count` where a step has several batches. Without any
    position the loss is 0. A link to a source position that is masked gives infinity.
    """
    check_shapes({"log_weights": (log_weights_bhts, "B h T S"), "target": (target_bts, "B T S")})
    target_bts = target_bts.to(log_weights_bhts.device, log_weights_bhts.dtype)
    linked_bts = target_bts > 0
    # Where nothing is asked a weight may be 0 and its log -inf, which 0 · -inf would make NaN.
    asked_bhts = log_weights_bhts.masked_fill(~linked_bts[:, None], 0.0)
    mean_bts = torch.logsumexp(asked_bhts, 1) - math.log(log_weights_bhts.shape[1])
    total = -(target_bts * mean_bts).sum()
    if count is None:
        count = linked_bts.any(-1).sum()
    return total / count.clamp(min=1)


@final
class Caught:
    """What a guided cross-attention computed in its last forward."""

    def __init__(self, layer: MultiHeadAttention, heads: tuple[int, ...]) -> None:
        self._layer, self._heads = layer, heads
        self._log_weights: Tensor | None = None

    def log_weights(self) -> Tensor:
        """(B, h, T, S): the logarithms of the weights, -inf where no look is allowed."""
        found = self._log_weights
        if found is None:
            raise RuntimeError(
                "the guided layer has not run inside the block; run the model there, in this "
                "process, before asking for its weights"
            )
        learns = any(p.requires_grad for p in self._layer.q_proj.parameters())
        if torch.is_grad_enabled() and learns and not found.requires_grad:
            raise RuntimeError(
                "the guided layer ran without gradients, so guiding it would teach nothing; run "
                "the forward with gradients, and checkpoint activations with use_reentrant=False"
            )
        return found

    def weights(self) -> Tensor:
        """(B, h, T, S): the weights themselves."""
        return self.log_weights().exp()

    def catch(self, call: Call) -> None:
        """Keep the weights of one call of the layer."""
        if call.q.shape[1] != self._layer.n_heads:
            raise ValueError(
                f"the guided layer has {self._layer.n_heads} heads and computed "
                f"{call.q.shape[1]} of them here; guide without tensor parallelism"
            )
        rule = call.rule
        self._log_weights = log_weights_of(
            self._heads,
            call.q,
            call.k,
            mask=rule.mask,
            bias=rule.bias,
            scale=rule.scale,
            softcap=rule.softcap,
            sinks=call.sinks,
        )


def catch(call: Call) -> None:
    """The hook: keep the weights of a call of a layer that is being guided."""
    if callers:
        for caught in callers[-1].__dict__.get("guided_by", ()):
            caught.catch(call)


@contextmanager
def guided(model: nn.Module, layer: int, heads: Sequence[int]) -> Iterator[Caught]:
    """Catch the weights of some heads of decoder layer `layer`'s cross-attention, with gradients.

    Each forward inside the block replaces what the one before left in `caught`.
    """
    attn = _cross_attention(model, layer)
    chosen = tuple(heads)
    if (
        not chosen
        or len(set(chosen)) < len(chosen)
        or not all(0 <= h < attn.n_heads for h in chosen)
    ):
        raise ValueError(
            f"heads is {chosen}; expected at least one head of 0 to {attn.n_heads - 1}, each once"
        )
    caught = Caught(attn, chosen)
    blocks: list[Caught] = attn.__dict__.setdefault("guided_by", [])
    blocks.append(caught)
    try:
        with hooked(catch):
            yield caught
    finally:
        blocks.remove(caught)
        if not blocks:
            del attn.__dict__["guided_by"]


def log_weights_of(
    heads: Sequence[int],
    q_bhtd: Tensor,
    k_bgsd: Tensor,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The logarithms of the weights of some heads, by the definition in `attention.reference`."""
    H, S = q_bhtd.shape[1], k_bgsd.shape[2]
    shape = Shape(q_bhtd.shape[0], H, q_bhtd.shape[2], S)
    rule = Rule(shape=shape, scale=scale, mask=mask, bias=bias, softcap=softcap).on(q_bhtd.device)
    tile, group = Tile(0, shape.T, 0, S), H // k_bgsd.shape[1]

    def pick(x: Tensor) -> Tensor:
        """The chosen heads of a tensor over (B, H, T, S), or what all heads share."""
        x = x[(None,) * (4 - x.dim())]
        return x if x.shape[1] == 1 else torch.stack([x[:, h] for h in heads], 1)

    with outside_autocast(q_bhtd.device.type):
        k_bhsd = torch.stack([k_bgsd[:, h // group] for h in heads], 1)
        scores_bhts = raw_scores(torch.stack([q_bhtd[:, h] for h in heads], 1), k_bhsd, rule)
        if rule.bias is not None:
            scores_bhts = scores_bhts + pick(
                rule.bias.block(shape, tile, scores_bhts.device, scores_bhts.dtype)
            )
        if rule.mask is not None:
            allowed_bhts = pick(rule.mask.block(shape, tile, scores_bhts.device))
            scores_bhts = scores_bhts.masked_fill(~allowed_bhts, -math.inf)
        if sinks is not None:
            scores_bhts = append(scores_bhts, torch.stack([sinks[h] for h in heads]))
        # A row of -inf has no softmax, and its gradient would be NaN: numbers first, -inf after.
        empty_bht1 = (scores_bhts == -math.inf).all(-1, keepdim=True)
        log_bhts = torch.log_softmax(scores_bhts.masked_fill(empty_bht1, 0.0), -1)
        return log_bhts.masked_fill(empty_bht1, -math.inf)[..., :S]


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


Entry = tuple[str, str]


@dataclass(frozen=True)
class AlignmentScore:
    """How many questions the attention answered right; `by_entry` says (right, total) for each."""

    right: int
    total: int
    by_entry: Mapping[Entry, tuple[int, int]]

    @property
    def share(self) -> float:
        """right / total; NaN when nothing was asked."""
        return self.right / self.total if self.total else math.nan


@dataclass(frozen=True)
class Question:
    """Does the attention of these decoder positions peak at one of these source positions?"""

    entry: Entry
    pair: int
    positions: tuple[int, ...]
    answers: tuple[int, ...]


@torch.no_grad()
def alignment_score(
    model: Transformer,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    lexicon: Sequence[Entry],
    *,
    layer: int,
    heads: Sequence[int],
    prefix: Sequence[int] = (),
    reverse: bool = False,
) -> AlignmentScore:
    """How often heads look at "cat" where they read 猫. Pairs, lexicon: (English, Japanese).

    One question for each pair and each entry whose two words occur in it: the English one as a
    whole word in any case (no letter, digit or underscore beside it), the Japanese one anywhere.
    The reference translation is fed to the decoder. Taken are the decoder positions whose *input*
    token has a character of the Japanese word, by the tokenizer's offsets; the weights are averaged
    over these positions and the heads, and the answer is right when the source token with the most
    has a character of the English word. Words that occur several times count with all occurrences.
    Every source token can win, also `prefix` and the end of the sentence.

    prefix: ids before the source's tokens, such as a language token. The end-of-sentence token and
    the decoder's start are the model's. reverse: from Japanese to English, with the parts of the
    two words exchanged.
    """
    spoken = [said[::-1] if reverse else said for said in pairs]
    sources = _encode(tokenizer, [source for source, _ in spoken])
    targets = _encode(tokenizer, [target for _, target in spoken])
    asked = _questions(sources, targets, lexicon, len(prefix), reverse)
    needed = sorted({question.pair for question in asked})
    feed = _Feed(model, tokenizer, tuple(prefix))
    was_training = model.training
    model.eval()
    looks: dict[int, Tensor] = {}
    try:
        with guided(model, layer, heads) as caught:
            # Like lengths together: less padding, the same answers.
            needed.sort(key=lambda pair: (len(sources[pair].ids), pair))
            for first in range(0, len(needed), ROWS_AT_ONCE):
                rows = needed[first : first + ROWS_AT_ONCE]
                feed.run([sources[r].ids for r in rows], [targets[r].ids for r in rows])
                looks.update(zip(rows, caught.weights().mean(1).cpu(), strict=True))
    finally:
        model.train(was_training)
    counts = {entry: [0, 0] for entry in dict.fromkeys(q.entry for q in asked)}
    for question in asked:
        look_s = looks[question.pair][list(question.positions)].mean(0)
        if look_s.isnan().any():
            raise ValueError(
                f"the attention to {sources[question.pair].text!r} is NaN; the model is broken"
            )
        counts[question.entry][0] += int(look_s.argmax()) in question.answers
        counts[question.entry][1] += 1
    by_entry = {entry: (right, total) for entry, (right, total) in counts.items()}
    return AlignmentScore(sum(right for right, _ in by_entry.values()), len(asked), by_entry)


@final
class _Feed:
    """Source and target ids as the model was trained on them, padded, through the model."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, prefix: tuple[int, ...]) -> None:
        known = model.config.tokens
        start = known.decoder_start if known.decoder_start is not None else known.bos
        start = start if start is not None else tokenizer.special.bos
        if start is None:
            raise ValueError(
                "neither the model's config (tokens.decoder_start, tokens.bos) nor the tokenizer "
                "names the token that a translation begins with"
            )
        end = known.eos[:1] or tuple(x for x in [tokenizer.special.eos] if x is not None)
        self.model, self.prefix, self.start, self.end = model, list(prefix), start, list(end)
        self.filler = known.pad if known.pad is not None else 0

    def run(self, sources: list[list[int]], targets: list[list[int]]) -> None:
        source, source_real = self._pad([self.prefix + ids + self.end for ids in sources])
        target, target_real = self._pad([[self.start, *ids] for ids in targets])
        memory = self.model.encode(source, source_real)
        self.model.run(target, real=target_real, memory=memory)

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows))
        device = next(self.model.parameters()).device
        ids = [row + [self.filler] * (width - len(row)) for row in rows]
        real = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
        return torch.tensor(ids, device=device), torch.tensor(real, device=device)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    return tokenizer.encode_batch(texts, special=False).rows


def _questions(
    sources: list[Encoding],
    targets: list[Encoding],
    lexicon: Sequence[Entry],
    offset: int,
    reverse: bool,
) -> list[Question]:
    """Every entry in every pair that has both words, in the order of pairs and lexicon."""
    shapes = {
        (english, japanese): (
            re.compile(rf"(?<!\w){re.escape(english)}(?!\w)", re.IGNORECASE),
            re.compile(re.escape(japanese)),
        )
        for english, japanese in lexicon
    }
    asked = []
    for pair, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for entry, patterns in shapes.items():
            here, there = patterns[::-1] if reverse else patterns
            answers = _covering(source, here)
            positions = _covering(target, there)
            if answers and positions:
                asked.append(
                    Question(
                        entry,
                        pair,
                        tuple(at + 1 for at in positions),  # behind the start token
                        tuple(at + offset for at in answers),
                    )
                )
    return asked


def _covering(said: Encoding, pattern: re.Pattern[str]) -> list[int]:
    """The tokens with a character of a match."""
    found = [match.span() for match in pattern.finditer(said.text)]
    return [
        at
        for at, (first, last) in enumerate(said.offsets)
        if any(first < end and start < last for start, end in found)
    ]
