"""Tiny models, tasks and listeners for the tests of training, made from numbers alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.models import Transformer, config_of
from regard.training import snapshot as snapshots
from regard.training.config import TrainConfig
from regard.training.data.packing import MaskedTokens, PackedText
from regard.training.data.pairs import PairedText
from regard.training.data.store import write_tokens
from regard.training.init import start
from regard.training.loop import Result, train
from regard.training.runlog import EvalReport, StepReport
from regard.training.snapshot import load_latest
from regard.training.tasks import LanguageTask, Task, TranslationTask

VOCAB = 53
PAD, BOS, EOS, MASK = 0, 1, 2, 3

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": VOCAB,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 32,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 17,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "pad_token_id": PAD,
}
ORIGINAL = {
    "model_type": "original",
    "vocab_size": VOCAB,
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 19,
    "dropout": 0.1,
    "normalize_before": True,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
PLAIN = TrainConfig(steps=7, lr=5e-3, warmup=2, eval_every=100, save_every=100)
MODELS = {"lm": GPT2, "masked": BERT, "translate": ORIGINAL}


def make_model(words: dict[str, Any], seed: int = 5, **more: Any) -> Transformer:
    model = Transformer(config_of({**words, **more}))
    start(model, seed)
    return model


def sentences(count: int, seed: int, longest: int = 11) -> list[list[int]]:
    """Rows of ids in which each token makes the next one likely, so there is something to learn."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        row = [int(draw.integers(4, VOCAB))]
        for _ in range(int(draw.integers(2, longest))):
            likely = 4 + (row[-1] * 7 + 3) % (VOCAB - 4)
            row.append(likely if draw.random() < 0.7 else int(draw.integers(4, VOCAB)))
        rows.append(row)
    return rows


def text_task(
    folder: Path, *, rows: int = 4, context: int = 16, seed: int = 3, masked: bool = False
) -> LanguageTask:
    """Two files of documents, each ended by EOS."""

    def pack(name: str, count: int, drawn: int) -> PackedText:
        documents = [[*row, EOS] for row in sentences(count, drawn)]
        tokens = write_tokens(
            folder / name, documents, vocab_size=VOCAB, fingerprint=f"{name} {count} {drawn}"
        )
        return PackedText(tokens, context=context, rows=rows, seed=seed, shifted=not masked)

    hide = MaskedTokens(MASK, VOCAB, (PAD, BOS, EOS, MASK), seed, 0.3) if masked else None
    return LanguageTask(pack("train.tokens", 97, 1), pack("valid.tokens", 13, 2), hide)


def pair_task(folder: Path, *, seed: int = 3) -> TranslationTask:
    """Targets are sources with every id moved on by one."""

    def pair(name: str, count: int, drawn: int) -> PairedText:
        sources = sentences(count, drawn)
        targets = [[4 + (token - 3) % (VOCAB - 4) for token in row] for row in sources]
        sides = [
            write_tokens(
                folder / f"{name}.{side}",
                rows,
                vocab_size=VOCAB,
                fingerprint=f"{name} {side} {count} {drawn}",
            )
            for side, rows in (("source", sources), ("target", targets))
        ]
        return PairedText(*sides, max_tokens=64, bos=BOS, eos=EOS, pad=PAD, seed=seed)

    return TranslationTask(pair("train", 61, 1), pair("valid", 7, 2))


def make_task(kind: str, folder: Path, *, seed: int = 3) -> Task:
    if kind == "translate":
        return pair_task(folder, seed=seed)
    return text_task(folder, seed=seed, masked=kind == "masked")


class Ear:
    """A listener that keeps all it hears; at the step `stop_at` it presses Ctrl-C."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[StepReport] = []
        self.evaluations: list[EvalReport] = []
        self.notes: list[str] = []
        self.stop_at = stop_at

    def step(self, report: StepReport) -> None:
        self.steps.append(report)
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    def evaluated(self, report: EvalReport) -> None:
        self.evaluations.append(report)

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def figures(self) -> list[tuple[int, float, float, float, int]]:
        return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in self.steps]

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.steps]


class Judged:
    """A judge whose figures are given, one for each evaluation."""

    def __init__(self, *scores: float) -> None:
        self.scores = list(scores)

    def __call__(self, model: Transformer) -> dict[str, float]:
        assert not model.training
        return {"bleu": self.scores.pop(0), "chrf": 0.0}


class Outcome:
    """A run with all that came of it."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        config: TrainConfig,
        *,
        data: Path | None = None,
        stop_at: int | None = None,
        model: Transformer | None = None,
        task: Task | None = None,
        **how: Any,
    ) -> None:
        self.ear = Ear(stop_at)
        self.model = make_model(MODELS[kind]) if model is None else model
        self.folder = folder
        self.task = make_task(kind, data or folder / "data") if task is None else task
        self.result: Result = train(
            self.model, self.task, config, folder / "snapshots", listener=self.ear, **how
        )

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @property
    def snapshot(self) -> dict[str, Tensor]:
        found = load_latest(self.folder / "snapshots")
        assert found is not None
        return found.tensors


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names under which two states do not hold the same bits."""
    names = sorted(set(one) ^ set(other))
    return names + [
        name
        for name in one.keys() & other.keys()
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]


def fill_disk(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the disk be full when so many snapshots have begun to be written."""
    real, count = snapshots._write_data, 0

    def write(*given: Any) -> str:
        nonlocal count
        count += 1
        if count == at:
            raise OSError(28, "No space left on device")
        return real(*given)

    monkeypatch.setattr(snapshots, "_write_data", write)
