"""Train a small encoder on masked words, with the attention of a larger one as its teacher.

    python distill.py prose.txt --valid held_out.txt --teacher all-MiniLM-L6-v2 --out run

`embedded:encoder` was trained this way. The run's folder holds the model as `regard.load` and
`transformers` open it, and report.json with its scores: masked words that are right, how often
heads agree with the teacher's, and how often the best head finds a pronoun's antecedent, beside the
teacher and two guesses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from antecedent_score import CHOOSING, antecedent_score, read_twins
from distilled_attention import DistilledTask, heads_agree
from sentence_rows import make_rows
from student_vocabulary import make_vocabulary

import regard
from regard.models import Transformer
from regard.models.families import config_of
from regard.tokens import Tokenizer
from regard.training.config import TrainConfig, split_settings
from regard.training.data.packing import NOTHING, MaskedTokens
from regard.training.data.reading import read_documents
from regard.training.init import start
from regard.training.loop import train
from regard.training.monitor import Monitor
from regard.training.parallel import Mesh

HERE = Path(__file__).resolve().parent
MODEL = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 288,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TRAIN = TrainConfig(
    steps=12_000,
    lr=1e-3,
    warmup=500,
    beta2=0.98,
    weight_decay=0.01,
    average=0.999,
    eval_every=2_000,
    save_every=4_000,
    precision="bfloat16",
)
CONFIG = {"tokenizer_class": "BertTokenizerFast", "do_lower_case": True}
ROLES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def build_task(given: argparse.Namespace, config: TrainConfig) -> tuple[Transformer, DistilledTask]:
    """The student, and what it learns from."""
    device = torch.device(given.device)
    texts, held = (read_documents(path).texts for path in (given.data, given.valid))
    vocabulary = make_vocabulary(given.teacher / "tokenizer.json", texts, given.vocab_size)
    rows = make_rows(vocabulary.tokenizer, texts, given.width, config.seed)
    valid = make_rows(vocabulary.tokenizer, held, given.width, config.seed)[: given.held_out]
    roles = {f"{role}_token": token for role, token in ROLES.items()}
    # Positions that no row reaches would not be learned.
    named = {**CONFIG, "model_max_length": given.width, **roles}
    tokenizer = Tokenizer.from_parts(vocabulary.tokenizer.to_str(), named)
    size = tokenizer.vocab_size
    sizes = {"vocab_size": size, "pad_token_id": 0, "max_position_embeddings": given.width}
    model = Transformer(config_of({**MODEL, **sizes}))
    model.tokenizer = tokenizer
    start(model, config.seed)
    teacher = regard.load(given.teacher, dtype=torch.float32).to(device).eval()
    teacher_ids = torch.from_numpy(vocabulary.teacher_ids).to(device)
    masked = MaskedTokens(tokenizer.id("[MASK]"), size, tokenizer.special.all, config.seed)
    task = DistilledTask(
        rows, valid, masked, teacher, teacher_ids, n_rows=given.rows, weight=given.weight
    )
    return model.to(device), task


@torch.no_grad()
def masked_accuracy(model: Transformer, task: DistilledTask) -> dict[str, float]:
    """How often the hidden word of a held-out text is the likeliest one."""
    assert model.head is not None
    right = total = 0
    for batch in task.held_out():
        own = {name: x.to(next(model.parameters()).device) for name, x in batch.items()}
        asked = own["targets"] != NOTHING
        guesses = model.head(task.vectors(model, own)[asked]).argmax(-1)
        right += int((guesses == own["targets"][asked]).sum())
        total += int(asked.sum())
    return {"right": right, "total": total, "share": right / total}


def score(model: Transformer, task: DistilledTask) -> dict[str, Any]:
    """What the card says: of the student, its teacher, and two guesses."""
    sentences = read_twins(HERE / "antecedents.txt")
    return {
        "masked": masked_accuracy(model, task),
        "heads_agree": heads_agree(model, task, task.valid[:256]),
        "antecedents": asdict(antecedent_score(model, sentences)),
        "antecedents_of_teacher": asdict(antecedent_score(task.teacher, sentences)),
        "first_noun": float(np.mean([s.means == 0 for s in sentences[CHOOSING:]])),
        "nearest_noun": float(np.mean([s.means == 1 for s in sentences[CHOOSING:]])),
    }


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="prose; documents end with a line <|endoftext|>")
    parser.add_argument("--valid", type=Path, required=True, help="held-out prose")
    parser.add_argument("--teacher", type=Path, required=True, help="a BERT's folder")
    parser.add_argument("--out", "-o", type=Path, required=True, help="the folder for the run")
    parser.add_argument("--set", action="append", default=[], help="key=value, as regard train has")
    parser.add_argument("--weight", type=float, default=2.0, help="of the teacher's term")
    parser.add_argument("--rows", type=int, default=128, help="of a batch; half have gaps")
    parser.add_argument("--width", type=int, default=128, help="tokens of a row at most")
    parser.add_argument("--vocab-size", type=int, default=16_000)
    parser.add_argument("--held-out", type=int, default=2_000, help="rows to evaluate on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> dict[str, Any]:
    given = read_arguments(words)
    config = TRAIN.with_settings(split_settings(given.set))
    if given.device == "cpu":
        config = replace(config, precision="float32")
    model, task = build_task(given, config)
    folder = given.out / "training"
    folder.mkdir(parents=True, exist_ok=True)
    began, mesh = time.perf_counter(), Mesh.alone(torch.device(given.device))
    with Monitor(folder, total=config.steps) as monitor:
        result = train(
            model,
            task,
            config,
            folder / "snapshots",
            mesh=mesh,
            resume=given.resume,
            listener=monitor,
        )
    report = {"ended": result.reason, "steps": result.steps, "rows": len(task.rows)}
    report["seconds"] = round(time.perf_counter() - began, 1)
    if result.reason != "interrupted":
        model.eval()
        regard.save(model, given.out)
        report |= score(model, task)
        (given.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
