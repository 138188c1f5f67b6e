"""Tasks: batches by their number alone, documents and padding that nobody else feels, links."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    BERT,
    BOS,
    EOS,
    GPT2,
    LLAMA,
    MASK,
    ORIGINAL,
    PAD,
    VOCAB,
    make_model,
    make_task,
    pair_task,
    sentences,
    text_task,
)
from torch import Tensor

from regard.models import Transformer
from regard.training import tasks
from regard.training.data.packing import MaskedTokens, PackedText
from regard.training.data.store import write_tokens
from regard.training.tasks import LanguageTask, TranslationTask, unigram_loss

KINDS = ("lm", "masked", "translate")


def logits_of(model: Transformer, x_btc: Tensor) -> Tensor:
    assert model.head is not None
    logits: Tensor = model.head(x_btc)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_function_of_its_number(tmp_path: Path, kind: str) -> None:
    task = make_task(kind, tmp_path)
    asked = {number: task.batch(number) for number in (3, 0, 100, 1)}
    again = make_task(kind, tmp_path)
    for number in (0, 1, 100, 3):
        batch = again.batch(number)
        assert batch.keys() == asked[number].keys()
        assert all(torch.equal(x, asked[number][name]) for name, x in batch.items())
    other = make_task(kind, tmp_path, seed=4).batch(0)
    assert any(x.shape != other[n].shape or (x != other[n]).any() for n, x in asked[0].items())
    assert asked[0][task.targets].dtype == torch.int64


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_out_comes_in_the_same_order_each_time(tmp_path: Path, kind: str) -> None:
    task = make_task(kind, tmp_path)
    first, second = list(task.held_out()), list(task.held_out())
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_without_held_out_data_there_is_none(tmp_path: Path) -> None:
    task, pairs = text_task(tmp_path), pair_task(tmp_path)
    assert list(LanguageTask(task.text, None).held_out()) == []
    assert list(TranslationTask(pairs.pairs, None).held_out()) == []


def test_data_and_fingerprint_go_together(tmp_path: Path) -> None:
    task, pairs = text_task(tmp_path), pair_task(tmp_path)
    assert task.fingerprint == task.text.tokens.fingerprint
    assert task.valid is not None
    assert LanguageTask(task.valid, None).fingerprint != task.fingerprint
    assert pairs.pairs.sources.fingerprint in pairs.fingerprint
    assert pairs.pairs.targets.fingerprint in pairs.fingerprint


# ---- Packing


@pytest.mark.parametrize(
    ("words", "masked"),
    [(GPT2, False), (LLAMA, False), (BERT, True)],
    ids=["gpt2", "llama", "bert"],
)
def test_a_packed_document_gets_the_scores_it_gets_alone(
    tmp_path: Path, words: dict[str, Any], masked: bool
) -> None:
    """No token sees another document: a window's documents answer as if each were by itself."""
    model = make_model(words).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)  # so that what is seen weighs
    task = text_task(tmp_path, masked=masked)
    n_documents = 0
    for number in range(3):
        batch = task.batch(number)
        packed = logits_of(model, task.vectors(model, batch))
        for row in range(len(packed)):
            for document in batch["documents"][row].unique():
                here = batch["documents"][row] == document
                alone = {"ids": batch["ids"][row, here][None]}
                expected = logits_of(model, task.vectors(model, alone))[0]
                torch.testing.assert_close(packed[row, here], expected, rtol=1e-5, atol=1e-5)
                n_documents += 1
    assert n_documents > 20


def test_a_change_in_one_document_reaches_no_other(tmp_path: Path) -> None:
    model = make_model(LLAMA).eval()
    task = text_task(tmp_path)
    batch = task.batch(0)
    before = task.vectors(model, batch)
    first = batch["documents"] == 0
    assert first.any(1).all() and not first.all(1).any()
    changed = batch | {"ids": torch.where(first, 4 + batch["ids"] % 40, batch["ids"])}
    after = task.vectors(model, changed)
    assert torch.equal(after[~first], before[~first])
    assert (after[first] != before[first]).any()


# ---- Gaps


def test_gaps_are_asked_for_and_nothing_else(tmp_path: Path) -> None:
    task = text_task(tmp_path, masked=True)
    plain = task.text.batch(5)
    batch = task.batch(5)
    asked = batch["targets"] != -100
    assert 0 < asked.float().mean() < 0.6
    assert torch.equal(batch["targets"][asked], plain.ids[asked])
    assert torch.equal(batch["ids"][~asked], plain.ids[~asked])
    assert (batch["ids"][asked] == MASK).any()
    special = torch.tensor([PAD, BOS, EOS, MASK])
    assert not torch.isin(plain.ids[asked], special).any()
    # Each batch has gaps of its own: two have as many in common as chance gives them.
    gaps = torch.stack([task.batch(number)["targets"] != -100 for number in range(20)]).float()
    assert (gaps[1:] * gaps[:-1]).mean() < 1.5 * gaps.mean() ** 2
    for held in task.held_out():
        asked = held["targets"] != -100
        assert 0 < asked.float().mean() < 0.6 and (held["ids"][asked] == MASK).any()


def test_the_same_text_has_other_gaps_in_each_epoch(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "t", [range(4, 49)], vocab_size=VOCAB, fingerprint="")
    text = PackedText(tokens, context=45, rows=1, seed=3, shifted=False)
    task = LanguageTask(text, None, MaskedTokens(MASK, VOCAB, (PAD, BOS, EOS, MASK), 3))
    assert text.n_windows == 1  # so each batch is an epoch, wherever it begins
    gaps = [
        frozenset(batch["targets"][batch["targets"] != -100].tolist())
        for batch in map(task.batch, range(12))
    ]
    assert len(set(gaps)) > 10


def test_held_out_gaps_are_the_same_whatever_the_seed_and_the_rows(tmp_path: Path) -> None:
    def gaps(seed: int, rows: int) -> list[int]:
        task = text_task(tmp_path, seed=seed, rows=rows, masked=True)
        return [i for batch in task.held_out() for i in batch["targets"].flatten().tolist()]

    assert gaps(3, 4) == gaps(4, 4) == gaps(3, 3)
    assert any(i != -100 for i in gaps(3, 4))


def test_the_unigram_loss_by_hand(tmp_path: Path) -> None:
    """Tokens 4, 5 and 6 are text; each was seen once more than it is there."""
    tokens = write_tokens(tmp_path / "t", [[0, 4, 4, 4, 5, 0]], vocab_size=7, fingerprint="")
    targets = [torch.tensor([[4, -100], [5, 6]]), torch.tensor([[-100, -100]])]
    want = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    assert unigram_loss(tokens, (0, 1, 2, 3), targets) == pytest.approx(want, rel=1e-12)
    assert unigram_loss(tokens, (0, 1, 2, 3), targets[1:]) is None


def test_the_unigram_loss_is_of_the_gaps_that_are_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "COUNTED", 29)  # so that there are several parts to count
    task = text_task(tmp_path, masked=True)
    special = (PAD, BOS, EOS, MASK)
    counts = Counter(int(i) for i in task.text.tokens.ids if i not in special)
    total = sum(counts.values()) + VOCAB - len(special)
    asked = [i for b in task.held_out() for i in b["targets"].flatten().tolist() if i != -100]
    want = -sum(math.log((counts[i] + 1) / total) for i in asked) / len(asked)
    assert task.unigram == pytest.approx(want, rel=1e-12)
    assert text_task(tmp_path).unigram is None and pair_task(tmp_path).unigram is None


# ---- Pairs


def test_a_pair_in_a_batch_gets_the_scores_it_gets_alone(tmp_path: Path) -> None:
    model = make_model(ORIGINAL).eval()
    task = pair_task(tmp_path)
    n_padded = 0
    for number in range(4):
        batch = task.batch(number)
        together = logits_of(model, task.vectors(model, batch))
        for row, real in enumerate(batch["target_out"] != -100):
            source = batch["source"][row, batch["source_real"][row]][None]
            target = batch["target_in"][row, real][None]
            alone = model(target, source=source).logits
            assert alone is not None
            torch.testing.assert_close(together[row, real], alone[0], rtol=1e-5, atol=1e-5)
            n_padded += int((~real).sum()) + int((~batch["source_real"][row]).sum())
    assert n_padded > 10


def test_targets_are_those_of_the_pair_and_its_end(tmp_path: Path) -> None:
    task = pair_task(tmp_path)
    sources = sentences(61, 1)
    batch, rows = task.batch(2), task.pairs.batch(2).rows
    for row, number in enumerate(rows):
        source = batch["source"][row, batch["source_real"][row]].tolist()
        assert source == [*sources[number], EOS]
        target = [4 + (token - 3) % (VOCAB - 4) for token in sources[number]]
        out = batch["target_out"][row]
        assert out[out != -100].tolist() == [*target, EOS]
        assert batch["target_in"][row, : len(target) + 1].tolist() == [BOS, *target]


# ---- The auxiliary loss


def test_tasks_of_the_library_have_no_auxiliary_loss(tmp_path: Path) -> None:
    model = make_model(ORIGINAL)
    for task in (pair_task(tmp_path), text_task(tmp_path)):
        assert task.auxiliary_loss(model, task.batch(0)) is None
