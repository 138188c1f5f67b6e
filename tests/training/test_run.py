"""Whole runs: what they leave in their folder, how they are judged, and what goes on."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Judged

from regard.models import load
from regard.training import run as run_module
from regard.training.config import TrainConfig
from regard.training.prepare import Files, Prepared, Say
from regard.training.recipes import Recipe, llama, original
from regard.training.run import old_recipe, run, write_json
from regard.training.runlog import read_log
from regard.training.snapshot import list_snapshots
from regard.training.tasks import LanguageTask

ROOT = Path(__file__).resolve().parents[2]
TRAIN = TrainConfig(steps=4, lr=1e-2, warmup=1, eval_every=2, save_every=2)
LM = Recipe(
    task="lm", model=llama(12, 1, 3, 1, 17), train=TRAIN, vocab_size=300, context=16, rows=3
)
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
}
PAIRS = Recipe(
    task="translate",
    model=original(12, (1, 1), 2, 17),
    train=TRAIN,
    vocab_size=320,
    max_tokens=128,
    max_len=40,
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(50)]
    lines = (" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(120))
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    lines = [f"the {a} {b} cat\tdie {b} {a} Katze" for a in "klmnop" for b in "qrstuv"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than these runs; one test has one."""
    monkeypatch.setattr(run_module, "plot_losses", lambda folder: None)


def weights_in(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    left, right = weights_in(one), weights_in(other)
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_a_run_leaves_a_model_a_report_and_what_it_needs_to_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with a plot
    out = tmp_path / "run"
    report = run(Files(data=text), LM, out)
    assert report["ended"] == "done" and report["steps"] == 4
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    model = load(out)
    assert model.tokenizer is not None and model.tokenizer.vocab_size == report["vocab_size"]
    assert report["n_parameters"] == sum(p.numel() for p in model.parameters())
    assert report["best"]["step"] in (2, 4)
    assert report["recipe"] == json.loads(json.dumps(asdict(LM)))
    log = read_log(out / "training")
    assert [step.step for step in log.steps] == [1, 2, 3, 4]
    assert [report.step for report in log.evaluations] == [2, 4]
    assert any("tokens in 114 documents" in note for _, note in log.notes)
    assert (out / "training" / "loss.png").read_bytes().startswith(b"\x89PNG")
    hidden = [path.name for path in out.rglob("*") if path.name.startswith(".")]
    assert hidden == [".regard-lock"]


def test_what_was_prepared_can_be_adapted_before_the_first_step(text: Path, tmp_path: Path) -> None:
    def adapt(prepared: Prepared, folder: Path, say: Say) -> Prepared:
        assert folder == tmp_path / "run" / "training" and (folder / "train.tokens").is_file()
        say("no evaluation, please")
        assert isinstance(prepared.task, LanguageTask)
        return replace(prepared, task=LanguageTask(prepared.task.text, None))

    assert run(Files(data=text), LM, tmp_path / "run", adapt=adapt)["best"] is None
    log = read_log(tmp_path / "run" / "training")
    assert log.evaluations == [] and (0, "no evaluation, please") in log.notes


def test_the_model_that_is_given_out_is_the_best(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(LM, judge=1, train=replace(TRAIN, steps=6, schedule="constant"))
    for out, steps, scores in (("run", 6, (1.0, 5.0, 3.0)), ("short", 4, (1.0, 5.0))):
        judge = Judged(*scores)
        monkeypatch.setattr(run_module, "make_judge", lambda *_, judge=judge: judge)
        told = replace(recipe, train=replace(recipe.train, steps=steps))
        assert run(Files(data=text), told, tmp_path / out)["best"]["step"] == 4
    assert same(tmp_path / "run", tmp_path / "short")


def test_a_run_in_the_folder_is_refused_before_anything_is_touched(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(Files(data=text), LM, out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    other = replace(LM, context=8, train=replace(TRAIN, lr=0.5))
    with pytest.raises(FileExistsError, match="holds a run, its last snapshot is step-00000004"):
        run(Files(data=text), other, out)
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_what_a_run_that_saved_nothing_left_behind_does_not_count(
    text: Path, tmp_path: Path
) -> None:
    """Its tokenizer was made for other settings, and perhaps another text."""
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="fewer than one window"):
        run(
            Files(data=text),
            replace(LM, context=10**6, model={**LM.model, "max_position_embeddings": 10**6}),
            out,
        )
    assert (out / "training" / "tokenizer").is_dir() and not list_snapshots(out)
    report = run(Files(data=text), replace(LM, vocab_size=270), out)
    assert report["vocab_size"] == 270


def test_a_resumed_run_is_the_run_and_its_log_goes_on(text: Path, tmp_path: Path) -> None:
    run(Files(data=text), LM, tmp_path / "whole")
    short = replace(LM, train=replace(TRAIN, schedule="constant"))
    for out, lives in ((tmp_path / "one", (6,)), (tmp_path / "two", (3, 6))):
        for steps in lives:
            recipe = replace(short, train=replace(short.train, steps=steps, eval_every=3))
            run(Files(data=text), recipe, out, resume=True)
    assert same(tmp_path / "one", tmp_path / "two")
    logs = [read_log(tmp_path / name / "training") for name in ("one", "two")]
    assert [s.loss for s in logs[0].steps] == [s.loss for s in logs[1].steps]
    assert [s.step for s in logs[1].steps] == [1, 2, 3, 4, 5, 6]
    assert logs[0].evaluations == logs[1].evaluations
    assert not same(tmp_path / "one", tmp_path / "whole")


def test_what_a_run_was_told_is_kept_beside_it(text: Path, tmp_path: Path) -> None:
    assert old_recipe(tmp_path / "run") is None
    recipe = replace(LM, train=replace(TRAIN, steps=1, average=0.9))
    run(Files(data=text), recipe, tmp_path / "run")
    assert old_recipe(tmp_path / "run") == recipe


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": llama(24, 1, 3, 1, 17)}, "the tensors are of another model"),
        ({"model": llama(12, 2, 3, 1, 17)}, "the tensors are of another model"),
        ({"context": 10**6}, "texts have up to 1000000 tokens, but"),
        ({"train": replace(TRAIN, average=0.9)}, "average was None, is 0.9: the run has no avera"),
        ({"vocab_size": 290}, "vocab_size was 300, is 290: .* has its vocabulary already"),
        ({"cutting": "characters"}, "cutting was bpe, is characters: .* has its vocabulary alr"),
    ],
    ids=["width", "layers", "context", "average", "vocab_size", "cutting"],
)
def test_a_run_stays_as_it_was_where_going_on_is_refused(
    text: Path, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    out = tmp_path / "run"
    run(Files(data=text), LM, out)
    with pytest.raises(ValueError, match=said):
        run(Files(data=text), replace(LM, **changed), out, resume=True)
    assert old_recipe(out) == LM
    longer = replace(LM, train=replace(TRAIN, steps=5))
    assert run(Files(data=text), longer, out, resume=True)["steps"] == 5
    assert old_recipe(out) == longer


def test_weights_that_were_averaged_are_averaged_on(text: Path, tmp_path: Path) -> None:
    """The best evaluation was of averaged weights, which plain ones would stand for."""
    averaged = replace(LM, train=replace(TRAIN, average=0.9))
    run(Files(data=text), averaged, tmp_path / "run")
    plain = replace(LM, train=replace(TRAIN, steps=5))
    with pytest.raises(ValueError, match=r"average was 0\.9, is None: the run has averaged"):
        run(Files(data=text), plain, tmp_path / "run", resume=True)
    longer = replace(averaged, train=replace(averaged.train, steps=5, average=0.8))
    assert run(Files(data=text), longer, tmp_path / "run", resume=True)["steps"] == 5


def test_other_settings_of_a_run_that_goes_on_are_told(text: Path, tmp_path: Path) -> None:
    run(Files(data=text), LM, tmp_path / "run")
    model = {**LM.model, "hidden_act": "relu"}
    other = replace(LM, rows=5, model=model, train=replace(TRAIN, steps=5))
    run(Files(data=text), other, tmp_path / "run", resume=True)
    notes = [note for _, note in read_log(tmp_path / "run" / "training").notes]
    assert any("rows was 3, is 5, model.hidden_act was None, is relu" in note for note in notes)


def test_a_recipe_of_an_older_version_that_guides_nobody_is_read(tmp_path: Path) -> None:
    path = tmp_path / "training" / "recipe.json"
    path.parent.mkdir()
    fields = {**asdict(PAIRS), "guide_layer": 0, "guide_heads": 0}
    fields["train"]["guide"] = 0.0
    path.write_text(json.dumps(fields), encoding="utf-8")
    assert old_recipe(tmp_path) == PAIRS


def test_json_is_written_beside_and_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": "猫"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "猫"\n}\n'

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "猫"}


# ---- Tests at the end


def test_a_text_is_scored_by_token_and_by_byte(text: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.txt"
    held.write_text("abc de fgh 猫\n<|endoftext|>\nabc gh", encoding="utf-8")
    tests = run_module.Tests(files=[held])
    report = run(Files(data=text), LM, tmp_path / "run", tests=tests)
    figures = report["tests"]["held.txt"]
    model = load(tmp_path / "run")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    total, n_tokens = 0.0, 0
    for document in ("abc de fgh 猫", "abc gh"):
        ids = torch.tensor([[*tokenizer.encode(document).ids, tokenizer.id("<|endoftext|>")]])
        logits = model(ids).logits
        assert logits is not None
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        total += loss.item()
        n_tokens += ids.shape[1] - 1
    assert figures["tokens"] == n_tokens and figures["bytes"] == len("abc de fgh 猫abc gh".encode())
    assert figures["loss"] == pytest.approx(total / n_tokens, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(total / n_tokens), rel=1e-5)
    assert figures["bits_per_byte"] == pytest.approx(
        total / math.log(2) / figures["bytes"], rel=1e-5
    )


def test_gaps_are_scored_as_gaps(text: Path, tmp_path: Path) -> None:
    recipe = replace(LM, task="masked", model=BERT)
    other = tmp_path / "other.txt"
    other.write_text("zz " * 40)
    tests = run_module.Tests(files=[text, other])
    report = run(Files(data=text, valid=text), recipe, tmp_path / "run", tests=tests)
    # Of one word that the texts never had; frequencies are theirs, not those of what is scored.
    assert report["tests"]["other.txt"]["unigram"] > 6.0
    figures = report["tests"]["text.txt"]
    # The same text, hidden in the same way, as the evaluation of the best weights.
    assert figures["loss"] == pytest.approx(report["best"]["loss"], rel=1e-5)
    assert figures["unigram"] == pytest.approx(report["best"]["unigram"], rel=1e-12)
    assert "bits_per_byte" not in figures


def test_what_the_model_is_to_be_put_to_is_read_before_it_is_trained(
    text: Path, pairs: Path, tmp_path: Path
) -> None:
    for data, recipe in ((text, LM), (pairs, PAIRS)):
        out, missing = tmp_path / recipe.task, run_module.Tests(files=[data, tmp_path / "none.txt"])
        with pytest.raises(ValueError, match=r"none\.txt: no such file"):
            run(Files(data=data, valid=data), recipe, out, tests=missing)
        assert not out.exists()


def test_how_scores_are_counted_is_judged_before_training(pairs: Path, tmp_path: Path) -> None:
    recipe, out = replace(PAIRS, tokenize="13b"), tmp_path / "run"
    for judge, files in ((5, []), (0, [pairs])):
        with pytest.raises(ValueError, match="tokenize is '13b'; expected one of"):
            tests = run_module.Tests(files=files)
            run(Files(data=pairs, valid=pairs), replace(recipe, judge=judge), out, tests=tests)
        assert not out.exists()
    with pytest.raises(ValueError, match="judge is -1; expected a number of sentences, or 0"):
        replace(PAIRS, judge=-1)


def test_a_text_of_one_token_has_no_score(text: Path, tmp_path: Path) -> None:
    one, whole = tmp_path / "one.txt", tmp_path / "whole.txt"
    one.write_text("a", encoding="utf-8")
    whole.write_text(text.read_text(encoding="utf-8").replace("<|endoftext|>", ""))
    for number, documents in enumerate((True, False)):
        out, tests = tmp_path / str(number), run_module.Tests(files=[one, text])
        report = run(
            Files(data=whole, valid=one), replace(LM, documents=documents), out, tests=tests
        )
        assert report["best"] is None and report["tests"]["one.txt"] == {"tokens": 0, "bytes": 1}
        assert math.isfinite(report["tests"]["text.txt"]["loss"])


def test_a_text_in_which_nothing_can_be_asked_for_has_no_score(text: Path, tmp_path: Path) -> None:
    recipe = replace(LM, task="masked", model=BERT, cutting="wordpiece")
    strange = tmp_path / "strange.txt"
    strange.write_text("猫 " * 40, encoding="utf-8")
    tests = run_module.Tests(files=[strange, text])
    report = run(Files(data=text), recipe, tmp_path / "run", tests=tests)
    figures = report["tests"]
    assert figures["strange.txt"] == {"tokens": 0, "bytes": strange.stat().st_size}
    assert math.isfinite(figures["text.txt"]["loss"])


def test_translations_are_scored_and_written(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    tests = run_module.Tests(files=[pairs])
    report = run(Files(data=pairs, valid=pairs), replace(PAIRS, judge=5), out, tests=tests)
    assert set(report["best"]["scores"]) == {"bleu", "chrf"}
    figures = report["tests"]["pairs.tsv"]
    assert figures["n_sentences"] == 36 and "tok:13a" in figures["bleu_signature"]
    lines = (out / "training" / "translations.test.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 36


def test_both_ways_are_scored(pairs: Path, tmp_path: Path) -> None:
    recipe = replace(PAIRS, both_ways=True, tokenize="char")
    files = Files(data=pairs, valid=pairs, languages=("en", "de"))
    report = run(files, recipe, tmp_path / "run", tests=run_module.Tests(files=[pairs]))["tests"]
    assert "tok:char" in report["pairs.tsv en-de"]["bleu_signature"]
    assert "tok:13a" in report["pairs.tsv de-en"]["bleu_signature"]


def test_judging_needs_pairs_to_judge_by(pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a file of held-out pairs: give --valid"):
        run(Files(data=pairs), replace(PAIRS, judge=5), tmp_path / "run")


# ---- Several processes


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("how", [[], ["--resume"]], ids=["new", "resumed"])
def test_a_second_process_is_refused_at_once_and_touches_nothing(
    text: Path, tmp_path: Path, how: list[str]
) -> None:
    """The first one is held still meanwhile, so that every byte of its files can be compared."""
    out = tmp_path / "run"
    model = ["model.hidden_size=12", "model.num_hidden_layers=1", "model.num_attention_heads=3"]
    model += ["model.num_key_value_heads=1", "model.intermediate_size=17", "vocab_size=300"]
    given = [word for setting in (*model, "context=16", "rows=4") for word in ("--set", setting)]
    command = [sys.executable, "-m", "regard", "train", "lm", str(text), "--out", str(out), *given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    told = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen([*command, "--device", "cpu", "--set", "steps=50"], **told)  # type: ignore[call-overload]
    try:
        # A resumed run is refused by its lock alone, a new one also once there are snapshots.
        sign = out / "training" / ("log.jsonl" if how else "recipe.json")
        while first.poll() is None and not sign.exists():
            time.sleep(0.002)
        first.send_signal(signal.SIGSTOP)
        before = files_in(out)
        assert "training/recipe.json" in before and "report.json" not in before
        other = [*command, "--device", "cpu", "--set", "steps=3", "--set", "lr=0.5", *how]
        second = subprocess.run(other, env=environment, capture_output=True, text=True, timeout=120)
        assert files_in(out) == before
        assert second.returncode == 2
        assert "is being written by another process" in second.stderr and second.stdout == ""
    finally:
        first.send_signal(signal.SIGCONT)
        _, errors = first.communicate()
    assert first.returncode == 0, errors[-3000:]
    recipe = old_recipe(out)
    assert recipe is not None and recipe.train.steps == 50 and recipe.train.lr != 0.5
    assert [step.step for step in read_log(out / "training").steps] == list(range(1, 51))
    # The lock goes with the process: the folder can be trained on.
    assert run(Files(data=text), recipe, out, resume=True)["steps"] == 50


@pytest.mark.parametrize("kind", ["lm", pytest.param("mlm", marks=pytest.mark.slow)])
def test_two_processes_write_one_folder_with_the_same_losses(
    text: Path, tmp_path: Path, kind: str
) -> None:
    settings = ["steps=4", "eval_every=2", "vocab_size=300", "context=16", "rows=4"]
    shape = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    shape |= {"intermediate_size": 17} | ({"num_key_value_heads": 1} if kind == "lm" else {})
    settings += [f"model.{word}={value}" for word, value in shape.items()]
    given = [word for setting in settings for word in ("--set", setting)]
    ranks = ["--nproc-per-node", "2"]
    command = ["regard", "train", kind, str(text), "--out", str(tmp_path / "two"), *given]
    command += ["--device", "cpu", "--data-parallel", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    many = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks, "-m", *command],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert many.returncode == 0, many.stderr[-3000:]
    assert many.stdout.count("step 2  eval loss") == 1  # one process speaks for all
    from regard.cli.train import TextOptions, launch

    options = TextOptions(data=text, out=tmp_path / "one", settings=settings, device="cpu")
    launch("lm" if kind == "lm" else "masked", options)
    logs = [read_log(tmp_path / name / "training") for name in ("one", "two")]
    assert [s.step for s in logs[1].steps] == [1, 2, 3, 4]
    losses = [[s.loss for s in log.steps] for log in logs]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    one, two = weights_in(tmp_path / "one"), weights_in(tmp_path / "two")
    assert one.keys() == two.keys()
    # Shards of ranks that read another snapshot as the best would be off by steps of 2e-3.
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4)
    assert load(tmp_path / "two").tokenizer is not None
