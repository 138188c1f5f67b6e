"""The loop: what a run gives hangs on its seed and settings alone, and no stop changes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import assert_within, bound_sum
from tiny_runs import (
    BERT,
    BOS,
    EOS,
    GPT2,
    LLAMA,
    MASK,
    ORIGINAL,
    PAD,
    PLAIN,
    VOCAB,
    Ear,
    Judged,
    Outcome,
    differing,
    fill_disk,
    make_model,
    text_task,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from regard.models import Transformer
from regard.ops import backends
from regard.training.data.packing import MaskedTokens, PackedText
from regard.training.data.store import write_tokens
from regard.training.loop import Diverged, Run, mix, train
from regard.training.optim import rate_share
from regard.training.parallel import Mesh
from regard.training.runlog import EvalReport
from regard.training.snapshot import (
    BadSnapshot,
    list_snapshots,
    load_best,
    load_latest,
    load_snapshot,
)
from regard.training.tasks import LanguageTask

# ---- Seeds


def test_a_seed_says_all(tmp_path: Path) -> None:
    one = Outcome("lm", tmp_path / "1", PLAIN)
    torch.manual_seed(99)
    same = Outcome("lm", tmp_path / "2", PLAIN)
    dropped = Outcome("lm", tmp_path / "3", replace(PLAIN, seed=1))
    ordered = Outcome("lm", tmp_path / "4", PLAIN, task=text_task(tmp_path, seed=4))
    assert one.ear.figures == same.ear.figures
    assert differing(one.weights, same.weights) == []
    assert len({tuple(run.ear.losses) for run in (one, dropped, ordered)}) == 3


def test_the_seed_of_a_step_hangs_on_each_number() -> None:
    assert len({mix(a, b, c) for a in range(9) for b in range(9) for c in range(9)}) == 729
    assert mix(1, 23) != mix(12, 3)
    assert 0 <= mix(1, 2, 3) < 2**63


# ---- Steps


def bound_tokens(run: Outcome) -> float:
    """By what share two right losses may differ: each is a sum over the tokens of a batch."""
    return bound_sum(max(report.tokens for report in run.ear.steps), 1)


def test_batches_in_a_row_equal_one_batch_of_them_all(tmp_path: Path) -> None:
    """In float64, where only the loss itself, worked out in float32, leaves a difference."""
    words = dict(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    runs = []
    config = replace(PLAIN, clip=1e9, eps=1e-3)
    for accumulate in (1, 3):
        run = Outcome(
            "lm",
            tmp_path / str(accumulate),
            replace(config, accumulate=accumulate),
            model=make_model(GPT2, **words).double(),
            task=text_task(tmp_path, rows=6 // accumulate),
        )
        runs.append(run)
    one, many = runs
    assert one.ear.losses == pytest.approx(many.ear.losses, rel=bound_tokens(one))
    # A token's share of the gradient is rounded to float32 twice, before and after its division
    # by the tokens of all batches. AdamW moves a weight by lr / eps of its gradient at most.
    largest = max(report.grad_norm for report in one.ear.steps)
    moved = config.steps * config.lr / config.eps
    for name, tensor in one.weights.items():
        assert_within(tensor, many.weights[name], bound_sum(2, moved * largest), name)


def test_the_loss_told_is_the_mean_over_the_tokens_asked_for(tmp_path: Path) -> None:
    model = make_model(LLAMA)
    task = text_task(tmp_path)
    batch = task.batch(0)
    assert (batch["targets"] == -100).any()
    logits = model.head(task.vectors(model, batch))  # type: ignore[misc]
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    run = Outcome("lm", tmp_path, PLAIN, model=model, task=task)
    first = run.ear.steps[0]
    assert first.loss == pytest.approx(float(mean.detach()), rel=bound_tokens(run))
    assert first.tokens == batch["ids"].numel()
    assert first.lr == PLAIN.lr * rate_share(PLAIN, 0)


def test_the_norm_told_is_that_before_clipping_and_clipping_counts(tmp_path: Path) -> None:
    loose = Outcome("lm", tmp_path / "1", replace(PLAIN, steps=2, clip=1e9))
    tight = Outcome("lm", tmp_path / "2", replace(PLAIN, steps=2, clip=1e-9))
    assert loose.ear.steps[0].grad_norm == tight.ear.steps[0].grad_norm > 0.1
    begun = dict(make_model(GPT2).named_parameters())
    moved = [
        max(float((x - begun[name].detach()).abs().max()) for name, x in run.weights.items())
        for run in (loose, tight)
    ]
    # AdamW divides by the gradients, so that only those near its eps move the weights less.
    assert moved[0] > 5 * moved[1]


def test_a_model_learns(tmp_path: Path) -> None:
    config = replace(PLAIN, steps=60, lr=2e-2, warmup=5)
    losses = Outcome("lm", tmp_path, config, model=make_model(LLAMA)).ear.losses
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0


def test_a_masked_model_learns_to_read_what_is_around_a_gap(tmp_path: Path) -> None:
    """Each document has one word alone, so whoever reads it knows what is hidden."""
    draw = np.random.default_rng(7)

    def pack(name: str, count: int) -> PackedText:
        rows = [[int(draw.integers(4, VOCAB))] * 11 for _ in range(count)]
        tokens = write_tokens(tmp_path / name, rows, vocab_size=VOCAB, fingerprint=name)
        return PackedText(tokens, context=16, rows=8, seed=3, shifted=False)

    hide = MaskedTokens(MASK, VOCAB, (PAD, BOS, EOS, MASK), 3)
    task = LanguageTask(pack("train", 97), pack("valid", 23), hide)
    config = replace(PLAIN, steps=200, lr=1e-2, warmup=10)
    words = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    run = Outcome("masked", tmp_path, config, model=make_model(BERT, **words), task=task)
    assert run.ear.losses[0] == pytest.approx(math.log(VOCAB), abs=0.2)
    last = run.ear.evaluations[-1]
    assert last.step == 200 and last.unigram is not None and last.unigram == task.unigram
    assert last.unigram > math.log(VOCAB - 4) and last.loss < last.unigram - 1.0


def test_blocks_computed_twice_give_the_same_run(tmp_path: Path) -> None:
    calls: list[int] = []
    runs = []
    for again in (False, True):
        model = make_model(GPT2)
        assert model.decoder is not None
        model.decoder.layers[0].ffn.register_forward_hook(lambda *_: calls.append(1))
        config = replace(PLAIN, recompute=again, eval_every=7)
        runs.append(Outcome("lm", tmp_path / str(again), config, model=model))
    held_out = sum(1 for _ in runs[0].task.held_out())
    assert len(calls) == 7 + 14 + 2 * held_out
    assert runs[0].ear.figures == runs[1].ear.figures
    assert differing(runs[0].weights, runs[1].weights) == []


def test_half_precision_is_near_and_its_weights_are_whole(tmp_path: Path) -> None:
    whole, half = (
        Outcome("lm", tmp_path / kind, replace(PLAIN, precision=kind))  # type: ignore[arg-type]
        for kind in ("float32", "bfloat16")
    )
    gaps = [abs(a - b) for a, b in zip(whole.ear.losses, half.ear.losses, strict=True)]
    assert 1e-5 < max(gaps) < 0.05
    assert half.ear.evaluations[0].loss != whole.ear.evaluations[0].loss
    assert {x.dtype for x in half.weights.values()} == {torch.float32}


def test_compiled_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = torch.compile, []
    monkeypatch.setattr(
        torch, "compile", lambda given, **how: made.append(given) or real(given, **how)
    )
    words = dict(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, n_layer=1)
    plain, compiled = (
        Outcome(
            "lm",
            tmp_path / str(compiled),
            replace(PLAIN, steps=3, compiled=compiled),
            model=make_model(GPT2, **words),
            task=LanguageTask(text_task(tmp_path).text, None),
        )
        for compiled in (False, True)
    )
    assert compiled.ear.losses == pytest.approx(plain.ear.losses, rel=bound_tokens(plain))
    assert made == [compiled.task.vectors]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_graph_is_compiled_for_pairs_of_all_lengths(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which a GPU's backends are asked too; one for training, one for scoring."""
    monkeypatch.setitem(backends.ORDER, "cpu", backends.ORDER[device])
    real, counting = torch.compile, CompileCounter()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(
        torch, "compile", lambda given, **how: real(given, backend=counting, fullgraph=True, **how)
    )
    words = dict(dropout=0.0)
    plain, compiled = (
        Outcome(
            "translate",
            tmp_path / str(compiled),
            replace(PLAIN, compiled=compiled),
            model=make_model(ORIGINAL, **words),
        )
        for compiled in (False, True)
    )
    assert compiled.ear.losses == pytest.approx(plain.ear.losses, rel=bound_tokens(plain))
    shapes = {tuple(compiled.task.batch(number)["source"].shape) for number in range(7)}
    assert len(shapes) > 2
    assert counting.frame_count == 2


class Nudged:
    """A task with an auxiliary loss: the weight of the output table, three times, each step."""

    targets, one_size, unigram = "targets", True, None

    def __init__(self, task: LanguageTask) -> None:
        self.task, self.entered = task, 0
        self.fingerprint, self.batch = task.fingerprint, task.batch
        self.held_out, self.vectors = task.held_out, task.vectors

    def auxiliary_loss(self, model: Transformer, batch: Any) -> Nudged:
        self.weight = next(model.parameters())
        return self

    def __enter__(self) -> Nudged:
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.entered += 1

    def loss(self) -> Tensor:
        assert self.entered % 2 == 0  # asked after the forward pass
        return 3.0 + self.weight.square().mean()


def test_an_auxiliary_loss_is_learned_from_and_left_out_of_evaluation(tmp_path: Path) -> None:
    config = replace(PLAIN, eval_every=1, steps=2, clip=1e9, optimizer="adamw", lr=1e-9)
    task = text_task(tmp_path / "data")
    nudged = Nudged(task)
    plain = Outcome("lm", tmp_path / "0", config, task=task)
    with_term = Outcome("lm", tmp_path / "1", config, task=nudged)  # type: ignore[arg-type]
    term = 3.0 + float(next(plain.model.parameters()).detach().square().mean())
    assert with_term.ear.losses[0] == pytest.approx(plain.ear.losses[0] + term, rel=1e-5)
    assert with_term.ear.steps[0].grad_norm != plain.ear.steps[0].grad_norm
    first = [run.ear.evaluations[0].loss for run in (plain, with_term)]
    assert first[1] == pytest.approx(first[0], rel=1e-5)
    assert nudged.entered == 4  # two steps, no evaluation


def test_smoothing_is_left_out_of_evaluation(tmp_path: Path) -> None:
    config = replace(PLAIN, steps=1, lr=1e-9, eval_every=1)
    plain, smooth = (
        Outcome("lm", tmp_path / str(e), replace(config, smoothing=e)) for e in (0.0, 0.5)
    )
    assert plain.ear.losses != smooth.ear.losses
    found = smooth.ear.evaluations[0].loss
    _, count = held_out_loss(plain)
    expected = plain.ear.evaluations[0].loss
    assert found == pytest.approx(expected, rel=bound_sum(count, 1))


@pytest.mark.parametrize("kind", ["lm", "translate"])
def test_r_drop_reads_a_batch_twice_with_other_draws(kind: str, tmp_path: Path) -> None:
    config = replace(PLAIN, steps=1, lr=1e-9, eval_every=1)
    plain, weak, strong = (
        Outcome(kind, tmp_path / str(alpha), replace(config, r_drop=alpha))
        for alpha in (None, 1e-6, 1e4)
    )
    # Without much of it, the mean of two readings; the draws of dropout differ, so they disagree.
    assert weak.ear.losses[0] == pytest.approx(plain.ear.losses[0], rel=0.05)
    assert weak.ear.losses != plain.ear.losses
    assert strong.ear.losses[0] > 1.2 * weak.ear.losses[0]
    first = [run.ear.evaluations[0].loss for run in (plain, weak, strong)]
    assert first == pytest.approx(first[:1] * 3, rel=bound_tokens(plain))  # evaluation has none
    assert {run.ear.steps[0].tokens for run in (plain, weak)} == {plain.ear.steps[0].tokens}


def test_r_drop_without_dropout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="r_drop compares draws of dropout"):
        Outcome("lm", tmp_path, replace(PLAIN, r_drop=5.0), model=make_model(LLAMA))


# ---- Evaluation, the best, and early stops


@pytest.mark.parametrize("average", [None, 0.9])
def test_evaluation_leaves_no_trace(tmp_path: Path, average: float | None) -> None:
    config = replace(PLAIN, average=average)
    seldom = Outcome("lm", tmp_path / "1", config)
    often = Outcome("lm", tmp_path / "2", replace(config, eval_every=1))
    assert len(often.ear.evaluations) == 7 and len(seldom.ear.evaluations) == 1
    assert often.ear.figures == seldom.ear.figures
    assert differing(often.snapshot, seldom.snapshot) == []


def held_out_loss(run: Outcome) -> tuple[float, int]:
    """By torch alone, of the model that was given out."""
    total, count = 0.0, 0
    for batch in run.task.held_out():
        logits = run.model.head(run.task.vectors(run.model, batch))  # type: ignore[misc]
        flat = logits.flatten(0, 1), batch["targets"].flatten()
        total += float(torch.nn.functional.cross_entropy(*flat, reduction="sum").detach())
        count += int((batch["targets"] != -100).sum())
    return total / count, count


def test_evaluation_is_the_mean_over_all_held_out_tokens(tmp_path: Path) -> None:
    run = Outcome("lm", tmp_path, replace(PLAIN, steps=1))
    mean, count = held_out_loss(run)
    assert count > 50
    report = run.ear.evaluations[0]
    assert report.loss == pytest.approx(mean, rel=bound_sum(count, 1))
    assert report.perplexity == pytest.approx(math.exp(mean), rel=bound_sum(count, mean))


def test_the_average_follows_every_step(tmp_path: Path) -> None:
    """Step n keeps (1 + n) / (10 + n) of it at first, and never more than it is told to."""
    config = replace(PLAIN, steps=4, average=0.2, save_every=1, keep=9)
    Outcome("lm", tmp_path, config)
    expected = dict(make_model(GPT2).named_parameters())
    for n, path in enumerate(reversed(list_snapshots(tmp_path / "snapshots"))):
        tensors = load_snapshot(path).tensors
        kept = min(0.2, (1 + n) / (10 + n))
        for name in expected:
            now = tensors[f"model/{name}"]
            expected[name] = kept * expected[name].detach() + (1 - kept) * now
            torch.testing.assert_close(tensors[f"average/{name}"], expected[name])
    assert n == 3


def test_the_model_ends_with_its_best_weights_and_they_are_kept(tmp_path: Path) -> None:
    config = replace(PLAIN, eval_every=1, save_every=1, keep=1)
    scores = (1.0, 5.0, 3.0, 2.0, 4.0, 1.0, 0.0)
    run = Outcome("lm", tmp_path / "run", config, data=tmp_path / "data", judge=Judged(*scores))
    assert run.result.best is not None and run.result.best.step == 2
    assert run.result.best.scores == {"bleu": 5.0, "chrf": 0.0}
    best = load_best(tmp_path / "run" / "snapshots")
    assert best is not None and best.step == 2
    kept = {n.removeprefix("model/"): x for n, x in best.tensors.items() if n.startswith("model/")}
    assert differing(run.weights, kept) == []
    short = Outcome(
        "lm", tmp_path / "2", replace(config, steps=7), stop_at=1, data=tmp_path / "data"
    )
    assert differing(run.weights, short.weights) == []
    assert not run.model.training
    steps = [path.stem for path in list_snapshots(tmp_path / "run" / "snapshots")]
    assert steps == ["step-00000007", "step-00000002"]


def test_without_a_judge_the_lowest_loss_is_the_best(tmp_path: Path) -> None:
    config = replace(PLAIN, eval_every=1, lr=3.0, schedule="constant")
    run = Outcome("lm", tmp_path, config)
    losses = [report.loss for report in run.ear.evaluations]
    best = run.result.best
    assert (
        best is not None and best.loss == min(losses) and best.step == 1 + losses.index(best.loss)
    )
    assert best.step < 7  # else the last would do as well


def test_what_is_evaluated_and_given_out_is_the_average(tmp_path: Path) -> None:
    config = replace(PLAIN, average=0.5, steps=3, eval_every=3)
    run = Outcome("lm", tmp_path / "1", config)
    average = {n: x for n, x in run.snapshot.items() if n.startswith("average/")}
    given = {f"average/{name}": x for name, x in run.weights.items()}
    assert differing(average, given) == []
    raw = {f"average/{n[6:]}": x for n, x in run.snapshot.items() if n.startswith("model/")}
    assert len(differing(average, raw)) == len(raw)
    mean, count = held_out_loss(run)
    assert run.ear.evaluations[0].loss == pytest.approx(mean, rel=bound_sum(count, 1))
    nothing = LanguageTask(text_task(tmp_path).text, None)
    bare = Outcome("lm", tmp_path / "2", config, task=nothing)
    assert bare.ear.evaluations == [] and bare.result.best is None
    assert differing(bare.weights, run.weights) == []


def test_a_run_that_gets_no_better_is_stopped(tmp_path: Path) -> None:
    config = replace(PLAIN, steps=20, eval_every=2, patience=2)
    judge = Judged(1.0, 3.0, 2.0, 3.0, 9.0)
    run = Outcome("lm", tmp_path, config, judge=judge)
    assert (run.result.reason, run.result.steps) == ("patience", 8)
    assert run.result.best is not None and run.result.best.step == 4
    assert any("2 evaluations in a row were no better" in note for note in run.ear.notes)
    # And it stays stopped, unless it is given more patience.
    again = Outcome("lm", tmp_path, config, judge=judge, resume=True)
    assert (again.result.reason, again.ear.steps) == ("patience", [])
    more = Outcome("lm", tmp_path, replace(config, steps=10, patience=3), judge=judge, resume=True)
    assert more.result.reason == "done" and more.result.best is not None
    assert more.result.best.step == 10


def test_patience_is_remembered_over_a_stop(tmp_path: Path) -> None:
    config = replace(PLAIN, steps=20, eval_every=2, patience=3)
    judge = Judged(5.0, 4.0, 3.0, 2.0, 1.0)
    Outcome("lm", tmp_path, config, judge=judge, stop_at=4)
    run = Outcome("lm", tmp_path, config, judge=judge, resume=True)
    assert (run.result.reason, run.result.steps) == ("patience", 8)
    assert run.result.best is not None and run.result.best.step == 2


def test_time_ends_a_run_with_an_evaluation_and_a_snapshot(tmp_path: Path) -> None:
    run = Outcome("lm", tmp_path, replace(PLAIN, minutes=1e-9))
    assert (run.result.reason, run.result.steps) == ("time", 1)
    assert [report.step for report in run.ear.evaluations] == [1]
    assert [path.stem for path in list_snapshots(tmp_path / "snapshots")] == ["step-00000001"]


# ---- What goes wrong


class Poisoned:
    """A task whose batches break the model from a step on."""

    targets = "targets"
    one_size, unigram = True, None

    def __init__(self, task: LanguageTask, model: Transformer, at: int) -> None:
        self.task, self.model, self.at = task, model, at
        self.fingerprint = task.fingerprint
        self.count = 0

    def batch(self, number: int) -> dict[str, Tensor]:
        return self.task.batch(number)

    def held_out(self) -> Iterator[dict[str, Tensor]]:
        return self.task.held_out()

    def vectors(self, model: Transformer, batch: Any) -> Tensor:
        self.count += model.training
        if self.count == self.at:
            with torch.no_grad():
                next(model.parameters())[5, 0] = math.nan
        return self.task.vectors(model, batch)

    def auxiliary_loss(self, model: Transformer, batch: Any) -> None:
        return None


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_snapshot(
    tmp_path: Path,
) -> None:
    model, task = make_model(LLAMA), text_task(tmp_path, rows=9)
    ear = Ear()
    config = replace(PLAIN, save_every=2, eval_every=2)
    with pytest.raises(Diverged) as told:
        train(
            model,
            Poisoned(task, model, 6),
            config,
            tmp_path / "run",
            listener=ear,  # type: ignore[arg-type]
        )
    assert says(str(told.value), "step 6: the loss is nan", "the snapshot after 4 steps is whole")
    assert "lower lr" in str(told.value)
    assert [report.step for report in ear.steps] == [1, 2, 3, 4, 5, 6]
    left = load_latest(tmp_path / "run")
    assert left is not None and left.step == 4
    assert all(tensor.isfinite().all() for tensor in left.tensors.values())
    # From there it goes on, with the fault mended, to where a healthy run ends.
    healthy = Outcome("lm", tmp_path / "healthy", config, model=make_model(LLAMA), task=task)
    mended = make_model(LLAMA)
    train(mended, task, config, tmp_path / "run", resume=True)
    assert differing(dict(mended.named_parameters()), dict(healthy.model.named_parameters())) == []


def says(text: str, *parts: str) -> bool:
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in {text!r}"
    return True


def test_weights_that_a_step_made_infinite_are_never_saved(tmp_path: Path) -> None:
    """The step's own loss is finite: it was worked out before."""
    model, task = make_model(LLAMA), text_task(tmp_path)
    config = replace(PLAIN, save_every=1, keep=1, lr=1e38, warmup=0, schedule="constant")
    bare = LanguageTask(task.text, None)
    with pytest.raises(Diverged, match=r"step [12]: .*not .*finite|step 2: the loss is"):
        train(model, bare, replace(config, weight_decay=50.0), tmp_path / "run")
    left = load_latest(tmp_path / "run")
    assert left is None or all(x.isfinite().all() for x in left.tensors.values())


def test_a_held_out_loss_that_is_not_finite_is_no_best(tmp_path: Path) -> None:
    model, task = make_model(LLAMA), text_task(tmp_path)
    ear = Ear()

    class Broken(Poisoned):
        def held_out(self) -> Iterator[dict[str, Tensor]]:
            with torch.no_grad():
                next(self.model.parameters())[:] = math.inf
            return self.task.held_out()

    config = replace(PLAIN, save_every=2, eval_every=3)
    with pytest.raises(Diverged, match=r"step 3: the held-out loss is nan.*after 2 steps is whole"):
        train(model, Broken(task, model, 0), config, tmp_path / "run", listener=ear)  # type: ignore[arg-type]
    left = load_latest(tmp_path / "run")
    assert left is not None and left.step == 2


def test_a_full_disk_is_told_and_the_old_snapshot_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(PLAIN, save_every=2)
    fill_disk(monkeypatch, at=3)
    with pytest.raises(BadSnapshot, match=r"step-00000006.*No space left.*saved before is untouch"):
        Outcome("lm", tmp_path / "run", config, data=tmp_path / "data")
    left = load_latest(tmp_path / "run" / "snapshots")
    assert left is not None and left.step == 4 and left.passed_over == ()
    assert not [p for p in (tmp_path / "run" / "snapshots").iterdir() if p.name.startswith(".")]
    monkeypatch.undo()
    more = Outcome("lm", tmp_path / "run", config, data=tmp_path / "data", resume=True)
    whole = Outcome("lm", tmp_path / "whole", config, data=tmp_path / "data")
    assert differing(more.snapshot, whole.snapshot) == []


def test_a_fault_in_making_batches_is_raised_where_they_are_used(tmp_path: Path) -> None:
    class Torn(Poisoned):
        def batch(self, number: int) -> dict[str, Tensor]:
            if number == 3:
                raise ValueError("the file has gone")
            return self.task.batch(number)

    model, task = make_model(LLAMA), text_task(tmp_path)
    ear = Ear()
    with pytest.raises(ValueError, match="the file has gone"):
        train(model, Torn(task, model, 0), PLAIN, tmp_path / "run", listener=ear)  # type: ignore[arg-type]
    assert [report.step for report in ear.steps] == [1, 2, 3]


def test_the_model_is_left_as_it_was_found(tmp_path: Path) -> None:
    run = Outcome("lm", tmp_path, replace(PLAIN, steps=2, recompute=True))
    assert all("forward" not in vars(module) for module in run.model.modules())
    fresh = make_model(GPT2)
    finite = [getattr(m, "finite", None) for m in run.model.modules()]
    assert finite == [getattr(m, "finite", None) for m in fresh.modules()]


def test_a_model_without_a_head_and_an_average_of_many_devices_are_refused(tmp_path: Path) -> None:
    bare = make_model({**GPT2, "architectures": ["GPT2Model"]})
    if bare.head is not None:
        bare.head = None
    with pytest.raises(ValueError, match="without a head"):
        train(bare, text_task(tmp_path), PLAIN, tmp_path / "run")

    class Many:
        size = 2

    with pytest.raises(ValueError, match="are for one device"):
        Run(
            make_model(GPT2),
            text_task(tmp_path),
            replace(PLAIN, average=0.9),
            tmp_path,
            Many(),  # type: ignore[arg-type]
            Ear(),
            None,
        )
    assert Mesh.alone().size == 1


def test_reports_have_what_a_cpu_knows(tmp_path: Path) -> None:
    run = Outcome("lm", tmp_path, replace(PLAIN, steps=3))
    assert all(report.mfu is None and report.memory is None for report in run.ear.steps)
    assert all(report.seconds > 0 for report in run.ear.steps)
    assert isinstance(run.result.best, EvalReport)
