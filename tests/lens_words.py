"""A record of three heads made by hand: one step back, the first word, and "it" to "animal"."""

import torch
from torch import Tensor, nn

from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import Causal, attention

SENTENCE = "The animal didn't cross the street because it was too tired."


class Hand(nn.Module):
    """Attention whose scores are given: queries are their rows, keys the unit vectors."""

    def __init__(self, scores_htt: Tensor) -> None:
        super().__init__()
        self.register_buffer("scores", scores_htt[None])

    def forward(self, x: Tensor) -> Tensor:
        n = self.scores.shape[-1]
        keys = torch.eye(n).expand(1, self.scores.shape[1], n, n)
        return attention(self.scores, keys, keys, mask=Causal(), scale=1.0)


def make_record() -> Record:
    words = [*SENTENCE.rstrip(".").split(), "."]
    n = len(words)
    scores = torch.zeros(3, n, n)
    for t in range(n):
        scores[0, t, max(t - 1, 0)] = 9.0
        scores[1, t, 0] = 9.0
        scores[2, t, t] = 9.0
    it, animal = words.index("it"), words.index("animal")
    scores[2, it] = 0.0
    scores[2, it, animal] = 9.0
    model = nn.Sequential(Hand(scores))
    with watch(model, keep="qk") as record:
        model(torch.zeros(1))
    starts, at = [], 0
    for word in words:
        at = SENTENCE.index(word, at)
        starts.append(at)
        at += len(word)
    spans = [(a, a + len(word)) for a, word in zip(starts, words, strict=True)]
    return record.describe(text=SENTENCE, tokens=words, spans=spans, model="by hand")
