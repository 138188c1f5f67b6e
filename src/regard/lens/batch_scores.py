"""The scores of every head for each text of a batch, without making records.

Why: a corpus has too many texts for a record of each, and a batch takes hardly longer than a few
texts.

How: the hooks of `watch` hand over each attention call with all rows of the batch. The scores of
`head_scores.py` and `link_scores.py` are computed on the model's device and copied to the CPU when
the model is done. All texts of a batch have the same number of tokens, so there is no padding, and
every token counts.

Left out: texts of different lengths, cross-attention, and windows.

Letters: B texts, T queries, S keys, H heads; N scores of single weights, K scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import torch
from torch import Tensor, nn

from regard.lens.captured_call import Call
from regard.lens.head_scores import spot_keys
from regard.lens.head_table import SURVEYED
from regard.lens.lazy_weights import Array
from regard.lens.link_scores import WordGroups, score_links
from regard.lens.measure import measure, reach, spot_weights
from regard.lens.recorder import Recorder
from regard.lens.row_takes import Chosen, Located
from regard.lens.schema import SPOTS
from regard.lens.token_labels import is_separator
from regard.lens.watch import hooks_to
from regard.lens.word_links import Word
from regard.ops import Wants

WANTS = Wants(lse=True, entropy=True, distance=True, received=True)


def score_batch(
    module: nn.Module,
    run: Callable[[Tensor], object],
    ids_bt: Tensor,
    labels: Sequence[Sequence[str]],
    words: Sequence[Sequence[Word]] = (),
) -> dict[Located, Array]:
    """Compute the scores of every head: place -> (B, H, K), in the order of `SURVEYED`.

    A score that a text does not have is NaN. run: runs the model on `ids_bt`; labels: the token
    labels of each text; words: the words of each text, where they are known.
    """
    texts = _Texts(ids_bt, labels, words)
    found: dict[Located, Tensor] = {}
    chosen = Chosen(WANTS, "statistics", None, None, frozenset())
    recorder = Recorder(module, chosen, None, None)

    def score(call: Call, place: Located) -> None:
        found[place] = _score(call, texts, recorder)

    recorder.on_call = score
    with closing(recorder.copier), hooks_to(recorder), torch.no_grad():
        run(ids_bt)
    left_out = recorder.left_out.notes()
    if left_out:
        raise ValueError("; ".join(left_out))
    if recorder.shards:
        raise ValueError("heads are shared among ranks (tensor parallel): survey on one device")
    if not found:
        recorder.finish()  # raises an error that says why nothing was seen
    return {place: scores_bhk.cpu().numpy() for place, scores_bhk in found.items()}


class _Texts:
    """What all layers share: the key that each score reads, and which tokens are separators."""

    def __init__(
        self, ids_bt: Tensor, labels: Sequence[Sequence[str]], words: Sequence[Sequence[Word]]
    ) -> None:
        T = ids_bt.shape[1]
        every = np.ones(T, np.bool_).tobytes()
        ids = ids_bt.cpu().numpy().astype(np.int64)
        keys = [spot_keys(T, T, every, 0, row.tobytes(), False).keys_bnt[0] for row in ids]
        self.keys_nbt = torch.stack(keys, 1).long().to(ids_bt.device)
        marks = [[is_separator(label) for label in row] for row in labels]
        self.marks_bt = torch.tensor(marks, dtype=torch.float64, device=ids_bt.device)
        self.groups = WordGroups(words, T, ids_bt.device)


def _score(call: Call, texts: _Texts, recorder: Recorder) -> Tensor:
    B, H, T, S = call.q.shape[0], call.shape.H, call.shape.T, call.shape.S
    n_texts, n_tokens = texts.marks_bt.shape
    if (n_texts, n_tokens, n_tokens) != (B, T, S):
        raise ValueError(
            f"{call.name} attends from {T} to {S} tokens in {B} rows, where {n_texts} texts of "
            f"{n_tokens} tokens were read; only models whose layers read each text as it is can be "
            "surveyed"
        )
    seen = measure(call, WANTS)
    assert seen.lse is not None and seen.entropy is not None and seen.distance is not None
    assert seen.received is not None
    runs = recorder.takes.runs_of(call.of(0, None))
    causal = runs is not None and runs.ahead <= 0
    far = seen.distance if causal else reach(call, seen)
    scores_bhk = seen.lse.new_full((B, H, len(SURVEYED)), torch.nan, dtype=torch.float64)
    for n, keys_bt in enumerate(texts.keys_nbt):
        scores_bhk[:, :, SURVEYED.index(SPOTS[n])] = _mean_spot(call, seen.lse, keys_bt)
    received_bhs, marks_b1s = seen.received.total.double(), texts.marks_bt[:, None]
    n_marks_b1 = marks_b1s.sum(-1)
    given_bh = (received_bhs * marks_b1s).sum(-1) / T
    scores_bhk[:, :, SURVEYED.index("separator")] = given_bh.masked_fill(n_marks_b1 == 0, torch.nan)
    scores_bhk[:, :, SURVEYED.index("local")] = far.double().mean(-1)
    scores_bhk[:, :, SURVEYED.index("broad")] = seen.entropy.double().mean(-1)
    if texts.groups:
        scores_bhk[:, :, SURVEYED.index("links")] = score_links(call, texts.groups, causal)
    return scores_bhk


def _mean_spot(call: Call, lse_bht: Tensor, keys_bt: Tensor) -> Tensor:
    """The mean weight on the key named for each query, (B, H); queries with key -1 are left out."""
    B, T = keys_bt.shape
    named_bt = keys_bt >= 0
    b_p = torch.arange(B, device=keys_bt.device).repeat_interleave(T)
    t_p = torch.arange(T, device=keys_bt.device).repeat(B)
    weights_hp = spot_weights(call, lse_bht, b_p, t_p, keys_bt.clamp(min=0).reshape(-1))
    weights_hbt = weights_hp.double().view(-1, B, T).masked_fill(~named_bt, 0.0)
    # If no query has a key, the mean is 0 / 0, NaN.
    return (weights_hbt.sum(-1) / named_bt.sum(-1)).T
