"""A model whose every token is told beforehand, to see what generation makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.generation import beams, decode_loop
from regard.models import Memory, Transformer, config_of

MANY = 1000  # more than any tokenizer of the tests has


def make_model(vocab_size: int, *, max_len: int = MANY, **more: object) -> Transformer:
    """A tiny decoder in eval mode with random weights."""
    source = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 14,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 11,
        "max_position_embeddings": max_len,
        **more,
    }
    return Transformer(config_of(source)).eval()


def play(patch: pytest.MonkeyPatch, script: list[list[int]], vocab_size: int) -> None:
    """Row b of a batch writes the tokens script[b], whatever it is asked."""
    n_steps = max(map(len, script))
    rows = torch.tensor([row + [0] * (n_steps - len(row)) for row in script])
    play_scores(patch, torch.nn.functional.one_hot(rows, vocab_size).float())


def play_scores(patch: pytest.MonkeyPatch, scores_btv: Tensor) -> None:
    """Row b has these scores at each step."""

    class Scripted:
        def __init__(
            self,
            model: Transformer,
            *,
            max_len: int,
            memory: Memory | None = None,
            compiled: bool = False,
        ) -> None:
            self.rows, self.at = torch.arange(scores_btv.shape[0]), 0

        def read(self, ids_bt: Tensor, real_bt: Tensor | None = None, chunk: int = 1) -> Tensor:
            return self.step(ids_bt[:, -1])

        def step(self, ids_b: Tensor) -> Tensor:
            self.at += 1
            return scores_btv[self.rows, self.at - 1]

        def reorder(self, index_b: Tensor) -> None:
            self.rows = self.rows[index_b]

        def close(self) -> None:
            pass

    patch.setattr(decode_loop, "Decoding", Scripted)
    patch.setattr(beams, "Decoding", Scripted)
