"""How much heads link words: the number that words and their most telling looks come to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_model

from regard.lens import link_scores
from regard.lens.batch_scores import score_batch
from regard.lens.captured_call import whole_scores
from regard.lens.head_table import SURVEYED
from regard.lens.link_scores import WordGroups, score_links
from regard.lens.watch import watch
from regard.lens.word_links import Word, find_words, sum_words, telling_of
from regard.ops import Causal

# Each text seven tokens: of several words, of one word of four tokens, of signs alone, of a word.
TEXTS = ["ab c, d e f", "abcd e f g", ",,;,;,,", "abcdefg"]
CUTS = ["a b _c , _d _e _f", "a b c d _e _f _g", ", , ; , ; , ,", "a b c d e f g"]


def read(text: str, pieces: str) -> tuple[list[str], list[Word]]:
    labels, spans, at = [piece.replace("_", " ") for piece in pieces.split()], [], 0
    for label in labels:
        spans.append((at, at + len(label)))
        at += len(label)
    assert at == len(text) and len(labels) == 7
    return labels, find_words(text, labels, spans)


def expect(weights_hts: np.ndarray, words: list[Word], causal: bool) -> list[float]:
    """The score of each head of one text, look by look."""
    found = []
    plain = [n for n, word in enumerate(words) if not word.is_mark]
    looks = [(q, k) for q in plain for k in plain if k not in (0, q) and (k < q or not causal)]
    for weights_ts in weights_hts:
        telling_qk = telling_of(sum_words(weights_ts, words, words), causal)
        best = [max([0.0, *(telling_qk[q, k] for q, k in looks if q == look)]) for look in plain]
        found.append(float(np.mean(best)) if looks else np.nan)
    return found


@pytest.mark.parametrize("family", ["llama", "bert", "mistral"])
@pytest.mark.parametrize("piece", [link_scores.PIECE, 150])
def test_scores_are_those_of_every_look_of_a_record(
    family: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two texts, or two heads, are too many weights to be made at a time."""
    monkeypatch.setattr(link_scores, "PIECE", piece)
    model: Any = make_model(family)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5.0 if weight.dim() > 1 else 1.0)  # so that heads have choices
    labels, words = zip(*(read(*pair) for pair in zip(TEXTS, CUTS, strict=True)), strict=True)
    ids = torch.arange(5, 5 + 28).view(4, 7) % 23 + 4
    found = score_batch(model, model.run, ids, labels, words)
    some = 0.0
    for row, own in enumerate(words):
        with torch.no_grad(), watch(model, keep="qk") as record:
            model.run(ids[row : row + 1])
        for number, (place, scores_bhk) in enumerate(
            zip(record.places, found.values(), strict=True)
        ):
            maps = np.stack([record.map(number, head) for head in range(place.n_heads)])
            want = expect(maps.astype(np.float64), own, place.causal)
            got = scores_bhk[row, :, SURVEYED.index("links")]
            np.testing.assert_allclose(got, want, atol=2e-6)
            some = max(some, *(value for value in want if value == value), 0.0)
    assert some > 0.05
    assert all(np.isnan(scores[2:, :, -1]).all() for scores in found.values())


def test_a_habit_links_nothing_and_one_look_of_six_words_is_a_ninth() -> None:
    """By hand: heads that look one back, at the first word, and from word 5 at word 2 alone.

    That look has all the weight, 1. Nobody else looks at word 2; but of the three others that could
    look three back, one does, from word 3 at the first: 1/3. So 2/3 is telling, of one word of six.
    """
    n = 7
    scores = torch.zeros(1, 3, n, n)
    at = torch.arange(n)
    scores[0, 0, at, (at - 1).clamp(min=0)] = 60.0
    scores[0, 1, :, 0] = 60.0
    scores[0, 2, at, 0] = 60.0
    scores[0, 2, 5] = 0.0
    scores[0, 2, 5, 2] = 60.0
    words = [Word(f"w{k}", (k,), k == 3) for k in range(n)]  # one of them a sign
    groups = WordGroups([words], n, scores.device)
    found = score_links(whole_scores("by hand", scores, Causal()), groups, True)
    assert found[0].tolist() == pytest.approx([0.0, 0.0, 1 / 9], abs=1e-6)


def test_texts_of_too_many_words_or_of_unknown_ones_have_no_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = make_model("llama")
    labels, words = read(TEXTS[0], CUTS[0])
    ids = torch.arange(5, 12)[None]

    def score(own: list[list[Word]]) -> np.ndarray:
        return np.stack(
            [s[..., -1] for s in score_batch(model, model.run, ids, [labels], own).values()]
        )

    assert np.isfinite(score([words])).all()
    assert np.isnan(score([])).all()
    assert np.isnan(score([words[:-1]])).all()  # not all tokens are in words
    monkeypatch.setattr(link_scores, "MOST_WORDS", len(words) - 1)
    assert np.isnan(score([words])).all()
