"""A small encoder learns from a tiny teacher: same tokens, matched heads, a folder that opens."""

import json
from pathlib import Path

import card_scores
import numpy as np
import pytest
import torch
from antecedent_score import read_twins
from distill import main
from distilled_attention import DistilledTask, ReadHeads, divergence, relate
from rounding import assert_within
from sentence_rows import make_rows
from student_vocabulary import SPECIAL, make_vocabulary
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import regard
from regard.models.families import config_of
from regard.training.data.packing import NOTHING

WORDS = [
    "the",
    "animal",
    "street",
    "did",
    "not",
    "cross",
    "because",
    "it",
    "was",
    "too",
    "tired",
    "wide",
    "dog",
    "sees",
    "old",
    "big",
    ".",
    "a",
]
PROSE = "The animal did not cross the street. The dog sees a big animal because it was old. " * 30
BERT = {
    "model_type": "bert",
    "hidden_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 31,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    letters = [chr(n) for n in range(ord("a"), ord("z") + 1)]
    unused = [f"[unused{n}]" for n in range(7)]
    pieces = ["[PAD]", *unused, *SPECIAL[1:], *WORDS, *letters[1:], *(f"##{x}" for x in letters)]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # type: ignore[arg-type]
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(token, vocab[token]) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(list(SPECIAL))
    torch.manual_seed(5)
    model = regard.Transformer(config_of({**BERT, "vocab_size": len(pieces)})).eval()
    model.tokenizer = regard.Tokenizer.from_parts(made.to_str())
    regard.save(model, folder)
    return folder


def test_both_read_the_same_tokens(teacher: Path) -> None:
    size = len(SPECIAL) + 52 + 8
    found = make_vocabulary(teacher / "tokenizer.json", [PROSE], size)
    whole = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    assert found.tokenizer.get_vocab_size() == size
    said = found.tokenizer.encode("The animal sees a zebra.")
    assert said.tokens[0] == "[CLS]" and said.ids[0] == 2, "special tokens come first"
    assert [whole.id_to_token(int(found.teacher_ids[n])) for n in said.ids] == said.tokens
    assert "[UNK]" not in said.tokens, "letters spell what is not there whole"


def test_rows_hold_whole_sentences_between_their_marks(teacher: Path) -> None:
    tokenizer = make_vocabulary(teacher / "tokenizer.json", [PROSE], 80).tokenizer
    rows = make_rows(tokenizer, [PROSE, PROSE], 31, seed=1)
    assert rows.shape[1] == 31 and (rows[:, 0] == 2).all()
    lengths = (rows != 0).sum(1)
    assert (rows[np.arange(len(rows)), lengths - 1] == 3).all()
    assert len(set(lengths.tolist())) > 2 and lengths.max() <= 31
    for row in rows[:7]:
        text = tokenizer.decode(row.tolist())
        assert text.startswith("the ") and text.endswith(".")


def test_a_student_that_is_the_teacher_has_nothing_to_learn_of_it(teacher: Path) -> None:
    model = regard.load(teacher, dtype=torch.float32).eval()
    ids = torch.tensor([[8, 13, 14, 15, 9, 0, 0], [8, 17, 18, 19, 20, 21, 9]])
    real = ids != 0
    with torch.no_grad(), ReadHeads(model) as seen:
        model.run(ids, real=real)
    for one, values in zip(seen.weights, seen.values, strict=True):
        assert float(divergence(one, one, real)) == 0
        related = relate(values, real)
        assert_within(related.sum(-1), torch.ones(2, 12, 7), 7 * torch.finfo(torch.float32).eps)
        assert (related[0, :, :, 5:] == 0).all(), "padding is nobody's"
    half = torch.tensor([[[[0.5, 0.5], [1.0, 0.0]]]])
    other = torch.tensor([[[[0.25, 0.75], [1.0, 0.0]]]])
    first = 0.5 * np.log(2.0) + 0.5 * np.log(2.0 / 3.0)
    found = divergence(half, other, torch.tensor([[True, True]]))
    assert float(found) == pytest.approx(first / 2, rel=1e-6)
    assert float(divergence(half, other, torch.tensor([[True, False]]))) == pytest.approx(first)


def test_a_run_teaches_heads_and_leaves_a_folder_that_opens(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.MODEL", {**BERT, "architectures": ["BertForMaskedLM"]})
    for name in ("distill", "antecedent_score"):
        monkeypatch.setattr(f"{name}.CHOOSING", 4)
    monkeypatch.setattr("distill.read_twins", lambda path: read_twins(path)[:12])
    data = tmp_path / "prose.txt"
    data.write_text(PROSE)
    settings = ["steps=24", "warmup=3", "eval_every=24", "save_every=24", "average=none", "lr=0.01"]
    words = [str(data), "--valid", str(data), "--teacher", str(teacher), "--out"]
    words += [str(tmp_path / "run"), "--rows", "12", "--width", "64", "--vocab-size", "80"]
    report = main([*words, "--device", "cpu", *(x for s in settings for x in ("--set", s))])
    assert report["ended"] == "done" and 0 < report["masked"]["share"] <= 1
    assert len(report["heads_agree"]) == 6
    assert (report["first_noun"], report["nearest_noun"]) == (0.5, 0.5)
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    log = (tmp_path / "run" / "training" / "log.jsonl").read_text()
    losses = [float(json.loads(x)["loss"]) for x in log.splitlines() if '"loss"' in x]
    assert losses[-1] < losses[0]
    model = regard.load(tmp_path / "run")
    assert model.tokenizer is not None and model.head is not None
    monkeypatch.setattr(card_scores, "BATCH", 12)
    monkeypatch.setattr(card_scores, "read_twins", lambda path: read_twins(path)[:12])
    found = card_scores.main([str(tmp_path / "run"), str(data), "--teacher", str(teacher)])
    assert found["prose.txt"]["n"] == report["masked"]["total"]
    assert found["prose.txt"]["right"] == report["masked"]["share"]
    assert found["antecedents"] == report["antecedents"]
    assert found["antecedents_of_teacher"] == report["antecedents_of_teacher"]


def test_half_of_a_batch_has_gaps_and_the_other_is_whole(teacher: Path) -> None:
    vocabulary = make_vocabulary(teacher / "tokenizer.json", [PROSE], 80)
    rows = make_rows(vocabulary.tokenizer, [PROSE], 31, seed=1)
    from regard.training.data.packing import MaskedTokens

    masked = MaskedTokens(4, 80, (0, 1, 2, 3, 4), 7)
    ids = torch.from_numpy(vocabulary.teacher_ids)
    task = DistilledTask(rows, rows, masked, None, ids, n_rows=8, weight=1.0)  # type: ignore[arg-type]
    batch = task.batch(3)
    assert (batch["targets"][4:] == NOTHING).all() and (batch["ids"][4:] != 4).all()
    asked = batch["targets"] != NOTHING
    assert asked[:4].any() and not (asked & (batch["ids"] == 0)).any()
    assert torch.equal(task.batch(3)["ids"], batch["ids"])
    assert not torch.equal(task.batch(4)["ids"], batch["ids"])
