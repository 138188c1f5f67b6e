"""The scores in the card of a trained encoder, of its weights as they are stored.

    python card_scores.py embedded:encoder articles.txt novels.txt --teacher all-MiniLM-L6-v2

Prints JSON: for each held-out text the share of its hidden words that are the likeliest one, beside
that of the most frequent token; and how often the best head finds a pronoun's antecedent, in all
and by what tells the noun, for the encoder and its teacher.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from antecedent_score import antecedent_score, read_twins
from distilled_attention import PAD
from sentence_rows import make_rows
from tokenizers import Tokenizer
from torch import Tensor

import regard
from regard.models import Transformer
from regard.training.data.packing import NOTHING, MaskedTokens, TextBatch, mask_tokens
from regard.training.data.reading import read_documents

HERE = Path(__file__).resolve().parent
BATCH = 128


def hide(rows: Tensor, masked: MaskedTokens, number: int) -> TextBatch:
    """Rows with gaps, as training has them."""
    targets = torch.where(rows == PAD, NOTHING, rows)
    return mask_tokens(TextBatch(rows, targets, None, None), masked, number)


@torch.no_grad()
def masked_accuracy(model: Transformer, text: Path, n_rows: int) -> dict[str, Any]:
    """How many hidden words are the likeliest one, or the one that is hidden most."""
    assert model.head is not None and model.tokenizer is not None
    words, width = model.tokenizer, model.config.max_len
    assert width is not None
    tokenizer = Tokenizer.from_str(words.texts["tokenizer.json"])
    rows = make_rows(tokenizer, read_documents(text).texts, width, seed=0)[:n_rows].astype(np.int64)
    masked = MaskedTokens(words.id("[MASK]"), words.vocab_size, words.special.all, seed=0)
    right, wanted = 0, []
    for number, ids in enumerate(torch.from_numpy(rows).split(BATCH)):
        gaps = hide(ids, masked, number)
        assert gaps.targets is not None
        asked = gaps.targets != NOTHING
        guesses = model.head(model.run(gaps.ids, real=gaps.ids != PAD)[asked]).argmax(-1)
        wanted.append(gaps.targets[asked])
        right += int((guesses == wanted[-1]).sum())
    asked_for = torch.cat(wanted)
    most = int(asked_for.bincount().max())
    return {
        "right": right / len(asked_for),
        "most_frequent": most / len(asked_for),
        "n": len(asked_for),
    }


def main(words: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="embedded:encoder, or a folder")
    parser.add_argument("texts", type=Path, nargs="+", help="held-out prose")
    parser.add_argument("--teacher", type=Path, help="a BERT's folder")
    parser.add_argument("--rows", type=int, default=2_000, help="of each text")
    given = parser.parse_args(words)
    model, sentences = regard.load(given.model).eval(), read_twins(HERE / "antecedents.txt")
    found: dict[str, Any] = {
        text.name: masked_accuracy(model, text, given.rows) for text in given.texts
    }
    found["antecedents"] = asdict(antecedent_score(model, sentences))
    if given.teacher is not None:
        teacher = regard.load(given.teacher, dtype=torch.float32).eval()
        found["antecedents_of_teacher"] = asdict(antecedent_score(teacher, sentences))
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
