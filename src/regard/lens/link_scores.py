"""How strongly each head links words: one number per text and head, for a whole batch.

    links   the mean, over the query words, of how telling their most telling link is

`word_links.py` defines how telling a link is: its weight minus what the head gives that key word
from other words, or minus what it gives any word at that distance, whichever is larger. Links to
the first word, to punctuation and to the word itself do not count. A head that only follows habits
has 0; one that picks a different word for each word has up to 1.

How: whole weight matrices are computed for as many texts at a time as a memory bound allows, summed
to words by two products with 0/1 matrices, and compared on the device. Texts are padded with words
that nobody sees.

Left out: texts of more than `MOST_WORDS` words or `MOST_TOKENS` tokens, which have no such score.

Letters: B texts, H heads, T tokens, Q words that look, K words looked at (as many).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.lens.captured_call import Call
from regard.lens.measure import PIECE, measure
from regard.lens.word_links import MOST_WORDS, Word
from regard.ops import Wants

MOST_TOKENS = 4096


class WordGroups:
    """0/1 matrices of which tokens form the words of each text, and which links count."""

    def __init__(self, words: Sequence[Sequence[Word]], T: int, device: torch.device) -> None:
        most = MOST_WORDS if T <= MOST_TOKENS else 0
        fits = [
            own if len(own) <= most and sum(len(word.tokens) for word in own) == T else ()
            for own in words
        ]
        B, Q = len(fits), max(map(len, fits), default=0)
        member_bqt, plain_bq = torch.zeros(B, Q, T), torch.zeros(B, Q, dtype=torch.bool)
        for b, own in enumerate(fits):
            for q, word in enumerate(own):
                member_bqt[b, q, list(word.tokens)] = 1.0
                plain_bq[b, q] = not word.is_mark
        sizes_bq1 = member_bqt.sum(2, keepdim=True)
        self.sum_bqt = member_bqt.to(device)
        self.mean_bqt = (member_bqt / sizes_bq1.clamp(min=1)).to(device)
        self.there_bq = (sizes_bq1[..., 0] > 0).to(device)
        self.plain_bq = plain_bq.to(device)
        at = torch.arange(Q, device=device)
        elsewhere_qk = (at[:, None] != at) & (at > 0)
        self.counts_bqk = self.plain_bq[:, :, None] & self.plain_bq[:, None] & elsewhere_qk

    def __bool__(self) -> bool:
        return bool(self.there_bq.shape[1])


def score_links(call: Call, groups: WordGroups, causal: bool) -> Tensor:
    """The score of each text and head, (B, H) float64; NaN if no link between words is possible."""
    weights_bhqk = word_weights(call, groups)
    Q = weights_bhqk.shape[2]
    seen_bqk = groups.there_bq[:, :, None] & groups.there_bq[:, None]
    if causal:
        seen_bqk = seen_bqk & torch.ones(Q, Q, dtype=torch.bool, device=seen_bqk.device).tril()
    telling_bhqk = find_telling(weights_bhqk, seen_bqk)
    counts_bqk = groups.counts_bqk & seen_bqk
    best_bhq = telling_bhqk.masked_fill(~counts_bqk[:, None], 0.0).amax(3).clamp(min=0)
    n_words_b1 = groups.plain_bq.sum(1, keepdim=True)
    mean_bh = (best_bhq * groups.plain_bq[:, None]).sum(2) / n_words_b1
    return mean_bh.masked_fill(~counts_bqk.any(2).any(1)[:, None], torch.nan)


def word_weights(call: Call, groups: WordGroups) -> Tensor:
    """The weight of each word on each, (B, H, Q, K) float64: as W in `word_links.py`.

    Small batches are computed for all heads at once, longer ones for some heads of one text at a
    time.
    """
    B, H, T = call.shape.B, call.shape.H, call.shape.T

    def gather(part: Call, rows: slice) -> Tensor:
        weights_bhts = measure(part, Wants(weights=True)).weights
        assert weights_bhts is not None
        sums_bhtk = weights_bhts @ groups.sum_bqt[rows, None].mT.to(weights_bhts.dtype)
        return (groups.mean_bqt[rows, None].to(sums_bhtk.dtype) @ sums_bhtk).double()

    if B * H * T * T <= PIECE:
        return gather(call, slice(None))
    n_heads = max(PIECE // (T * T), 1)
    parts = [list(range(first, min(first + n_heads, H))) for first in range(0, H, n_heads)]
    rows = [
        torch.cat([gather(call.of(row, heads), slice(row, row + 1)) for heads in parts], 1)
        for row in range(B)
    ]
    return torch.cat(rows)


def find_telling(weights_bhqk: Tensor, seen_bqk: Tensor) -> Tensor:
    """How telling each link is, as `word_links.telling_of`, but for a batch; -1 where hidden."""
    seen_b1qk = seen_bqk[:, None]
    kept_bhqk = weights_bhqk.masked_fill(~seen_b1qk, 0.0)
    one_b1qk = seen_b1qk.to(kept_bhqk.dtype)
    others = one_b1qk.sum(2, keepdim=True) - one_b1qk
    elsewhere = (kept_bhqk.sum(2, keepdim=True) - kept_bhqk) / others.clamp(min=1)
    at_gap = (sum_gaps(kept_bhqk) - kept_bhqk) / (sum_gaps(one_b1qk) - one_b1qk).clamp(min=1)
    telling = kept_bhqk - torch.maximum(elsewhere, at_gap)
    return telling.masked_fill(~seen_b1qk, -1.0)


def sum_gaps(values_bhqk: Tensor) -> Tensor:
    """For each pair the sum over all pairs at the same distance.

    Rows are shifted until each diagonal is a column. There is no scatter or gather, so that the
    order of summation is the same on every device.
    """
    B, H, Q, K = values_bhqk.shape
    wide = torch.nn.functional.pad(values_bhqk.flip(2), (0, Q)).flatten(2)
    by_gap = wide[:, :, : Q * (Q + K - 1)].view(B, H, Q, Q + K - 1).sum(2)
    return by_gap.unfold(2, K, 1).flip(2)
