"""`regard train`: from a file to a model that everything opens; refusals in one line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command as run
from safetensors.torch import load_file
from tiny_runs import differing, fill_disk

import regard
from regard import cli
from regard.training import run as run_module
from regard.training.loop import Result
from regard.training.runlog import read_log
from regard.training.snapshot import list_snapshots, load_latest

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "lm": {
        "model.hidden_size": 12,
        "model.num_attention_heads": 3,
        "model.num_key_value_heads": 1,
        "model.intermediate_size": 17,
        "model.num_hidden_layers": 1,
        "vocab_size": 300,
        "context": 16,
        "rows": 3,
    },
    "translate": {
        "model.d_model": 12,
        "model.encoder_layers": 1,
        "model.decoder_layers": 1,
        "model.encoder_attention_heads": 3,
        "model.decoder_attention_heads": 3,
        "vocab_size": 320,
        "max_tokens": 256,
    },
}
TINY["mlm"] = {k: v for k, v in TINY["lm"].items() if "key_value" not in k}
STEPS = {"steps": 3, "eval_every": 2, "save_every": 2}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "plot_losses", lambda folder: None)


def words(kind: str, **more: Any) -> list[str]:
    settings = {**TINY[kind], **STEPS, **more}
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def write_text(folder: Path, count: int = 120) -> Path:
    draw = random.Random(1)
    vocabulary = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(50)]
    lines = (" ".join(draw.choices(vocabulary, k=draw.randint(3, 9))) for _ in range(count))
    folder.mkdir(exist_ok=True)
    path = folder / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(lines), encoding="utf-8")
    return path


def write_pairs(folder: Path) -> Path:
    path = folder / "pairs.tsv"
    lines = [f"the {a} {b} cat\tdie {b} {a} Katze" for a in "klmnop" for b in "qrstuv"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def weights_in(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    left, right = weights_in(one), weights_in(other)
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


# ---- What comes of it opens everywhere


def test_a_language_model_opens_with_regard_and_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "run"
    code, said, _ = run(capsys, "train", "lm", write_text(tmp_path), "-o", out, *words("lm"))
    assert code == 0 and "step 2  eval loss" in said and f"the model is in {out}" in said
    ours = regard.load(out)
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "abc def a feed cab"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ours.tokenizer is not None and ours.tokenizer.encode(text).ids == ids[0].tolist()
    with torch.no_grad():
        logits = ours(ids).logits
        assert logits is not None
        torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    assert tokenizer.eos_token == "<|endoftext|>" and theirs.config.eos_token_id == 0
    code, written, _ = run(capsys, "generate", "abc", "--model", out, "--max-new-tokens", "5")
    assert code == 0
    made = regard.generate(ours, "abc", max_new_tokens=5)
    assert written == cli.printing.make_printable(made, "utf-8", kept="\n\t") + "\n"


@pytest.mark.parametrize("cutting", ["wordpiece", "bpe"])
def test_a_masked_model_opens_with_regard_and_transformers_and_fills_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cutting: str
) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM

    out = tmp_path / "run"
    settings = words("mlm", cutting=cutting)
    code, said, _ = run(capsys, "train", "mlm", write_text(tmp_path), "-o", out, *settings)
    assert code == 0 and "step 2  eval loss" in said and "  unigram " in said
    (last,) = (line for line in said.splitlines() if f"the model is in {out}" in line)
    assert ", loss " in last and ", unigram " in last
    ours = regard.load(out)
    theirs, loaded = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs) is BertForMaskedLM
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "ab [MASK] Fed, x!"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ours.tokenizer is not None and ours.tokenizer.encode(text).ids == ids[0].tolist()
    assert (ids == tokenizer.mask_token_id).sum() == 1
    with torch.no_grad():
        logits = ours(ids).logits
        assert logits is not None
        judge = theirs.eval()(**tokenizer(text, return_tensors="pt")).logits
        torch.testing.assert_close(logits, judge, rtol=1e-5, atol=1e-5)
    code, written, _ = run(capsys, "fill", "--model", out, "--top", "1", text)
    best = regard.fill(out, text, 1).gaps[0].candidates[0]
    assert code == 0 and f"{best.probability:.3f}" in written
    best_judge = judge[0, ids[0] == tokenizer.mask_token_id].softmax(-1).max()
    assert best.probability == pytest.approx(float(best_judge), abs=1e-5)
    code, _, err = run(capsys, "generate", "abc", "--model", out)
    assert code == 2 and "bert" in err


def test_a_translator_opens_with_regard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    code, said, _ = run(
        capsys, "train", "translate", write_pairs(tmp_path), "-o", out, *words("translate")
    )
    assert code == 0 and "34 pairs, " in said
    model = regard.load(out)
    made = regard.translate(model, "the k q cat")
    code, written, _ = run(capsys, "translate", "--model", out, "the k q cat")
    assert code == 0
    assert written == cli.printing.make_printable(made, "utf-8", kept="\n\t") + "\n"


def test_a_named_size_and_a_recipe_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"n_embd": 12, "n_layer": 1, "n_head": 2}
    settings = {f"model.{name}": value for name, value in shape.items()} | STEPS
    settings |= {"vocab_size": 300, "context": 16, "rows": 2}
    given = [part for n, v in settings.items() for part in ("--set", f"{n}={v}")]
    out = tmp_path / "run"
    code, _, _ = run(
        capsys, "train", "lm", write_text(tmp_path), "-o", out, "--size", "gpt2", *given
    )
    assert code == 0
    told = json.loads((out / "config.json").read_text())
    assert told["model_type"] == "gpt2" and told["n_embd"] == 12
    assert regard.load(out).config.vocab_size == 300


def test_options_reach_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path)
    held = tmp_path / "held.txt"
    held.write_text("abc def gh " * 9)
    out = tmp_path / "run"
    options = ("--valid", held, "--test", held, "--tensorboard", "--device", "cpu")
    code, _, _ = run(capsys, "train", "lm", text, "-o", out, *options, *words("lm", steps=1))
    assert code == 0
    assert json.loads((out / "report.json").read_text())["tests"]["held.txt"]["bits_per_byte"] > 0
    assert list((out / "training" / "tensorboard").iterdir())
    again = tmp_path / "again"
    tokenizer = ("--tokenizer", out)
    code, said, _ = run(capsys, "train", "lm", text, "-o", again, *tokenizer, *words("lm", steps=1))
    assert code == 0 and "training a vocabulary" not in said


# ---- Stopping and going on


def test_ctrl_c_saves_and_the_same_command_with_resume_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real process and a real signal."""
    text, out, whole = write_text(tmp_path), tmp_path / "run", tmp_path / "whole"
    settings = words(
        "lm", steps=150, eval_every=1000, save_every=1000, **{"model.attention_dropout": 0.1}
    )
    command = ["train", "lm", str(text), *settings]
    assert run(capsys, *command, "--out", whole)[0] == 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    child = subprocess.Popen(
        [sys.executable, "-m", "regard", *command, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    log = out / "training" / "log.jsonl"
    limit = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b'"kind":"step"') < 3:
        assert child.poll() is None and time.monotonic() < limit, child.communicate()
        time.sleep(0.002)
    child.send_signal(signal.SIGINT)
    said, told = child.communicate(timeout=60)
    assert child.returncode == 130, told
    assert "stopping after this step" in said and "all is saved" in said
    assert told.strip() == f"go on with: the same command and --resume (--out {out})"
    saved = load_latest(out / "training" / "snapshots")
    assert saved is not None and 3 <= saved.step < 150
    assert not (out / "model.safetensors").exists()
    # Without a word about settings: the run knows them itself.
    code, said, _ = run(capsys, "train", "lm", text, "--out", out, "--resume")
    assert code == 0 and f"going on after {saved.step} steps" in said
    assert same(out, whole)


def test_a_masked_run_that_goes_on_is_the_run_that_did_not_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out, whole = write_text(tmp_path), tmp_path / "run", tmp_path / "whole"
    more = {"schedule": "constant", "model.hidden_dropout_prob": 0.1, "eval_every": 100}
    assert run(capsys, "train", "mlm", text, "-o", whole, *words("mlm", **more, steps=5))[0] == 0
    assert run(capsys, "train", "mlm", text, "-o", out, *words("mlm", **more, steps=2))[0] == 0
    code, said, _ = run(capsys, "train", "mlm", text, "-o", out, "--resume", "--set", "steps=5")
    assert code == 0 and "going on after 2 steps" in said
    one, other = (load_latest(folder / "training" / "snapshots") for folder in (whole, out))
    assert one is not None and other is not None and one.step == other.step == 5
    assert differing(one.tensors, other.tensors) == []
    logs = [read_log(folder / "training") for folder in (whole, out)]
    assert [s.loss for s in logs[0].steps] == [s.loss for s in logs[1].steps]


def test_settings_given_on_the_way_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    assert run(capsys, "train", "lm", text, "-o", out, *words("lm"))[0] == 0
    more = ("--resume", "--set", "lr=0.25", "--set", "steps=5")
    code, said, _ = run(capsys, "train", "lm", text, "-o", out, *more)
    assert code == 0 and "lr was 0.002, is 0.25" in said
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 5 and report["recipe"]["context"] == 16
    code, _, err = run(capsys, "train", "translate", write_pairs(tmp_path), "-o", out, "--resume")
    assert code == 2 and f"the run in {out} is for `regard train lm`" in err


def test_a_run_goes_on_by_its_own_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    command = ("train", "lm", text, "-o", out, "--recipe", "lm-small", *words("lm"))
    assert run(capsys, *command)[0] == run(capsys, *command, "--resume")[0] == 0
    other = (*command[:5], "--recipe", "shakespeare", "--resume")
    code, _, err = run(capsys, *other)
    assert code == 2 and "goes on as it was told, which 'shakespeare' is not" in err


def test_a_folder_with_a_run_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    assert run(capsys, "train", "lm", text, "-o", out, *words("lm"))[0] == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    code, _, err = run(capsys, "train", "lm", text, "-o", out, *words("lm", lr=0.5))
    assert code == 2 and len(err.splitlines()) == 1
    assert "holds a run" in err and "--resume" in err and "another folder" in err
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["lm", "mlm", "translate"])
def test_a_run_goes_on_with_its_own_text_only_and_keeps_what_it_prepared(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    text = write_pairs(tmp_path) if kind == "translate" else write_text(tmp_path)
    assert run(capsys, "train", kind, text, "-o", out, *words(kind))[0] == 0
    before = {p: p.read_bytes() for p in (out / "training").glob("*.tokens")}
    assert before
    other = folder / text.name
    lines = text.read_text(encoding="utf-8").splitlines()
    other.write_text("\n".join(lines[: len(lines) // 2 * 2 - 8]) + "\n", encoding="utf-8")
    told = run(capsys, "train", kind, other, "-o", out, "--resume", "--set", "steps=5")
    assert refused(told, "has read another text", "another folder")
    assert before == {p: p.read_bytes() for p in (out / "training").glob("*.tokens")}
    code, said, _ = run(capsys, "train", kind, text, "-o", out, "--resume", "--set", "steps=5")
    assert code == 0 and "going on after" in said


def test_what_was_saved_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    code, said, _ = run(capsys, "train", "lm", text, "-o", out, *words("lm"))
    best = json.loads((out / "report.json").read_text())["best"]
    assert code == 0 and f"{out}, with the weights of step {best['step']}, the best of" in said
    assert f"loss {best['loss']:.4f}" in said
    assert run_module.tell_weights(Result("done", 3, None), {}).endswith("of the last step, 3")


def test_there_must_be_a_run_to_go_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    told = run(capsys, "train", "lm", text, "-o", out, "--resume", *words("lm"))
    assert refused(told, "there is no run in", "leave --resume out") and not out.exists()


def test_a_stopped_run_without_weights_names_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    settings = words("lm", lr=1e30, warmup=2, save_every=1, eval_every=100, steps=9)
    assert run(capsys, "train", "lm", text, "-o", out, *settings)[0] == 2
    told = run(capsys, "generate", "abc", "--model", out)
    assert refused(told, "stopped before its weights were written", "--resume")


# ---- What goes wrong is one line


def refused(told: tuple[int, str, str], *parts: str) -> bool:
    code, _, err = told
    assert code == 2 and len(err.splitlines()) == 1, err
    missing = [part for part in parts if part not in err]
    assert not missing, f"{missing} not in {err!r}"
    return True


def test_a_loss_that_is_not_finite_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = words("lm", lr=1e30, warmup=2, save_every=1, eval_every=100, steps=9)
    told = run(capsys, "train", "lm", write_text(tmp_path), "-o", out, *settings)
    assert refused(told, "step ", "so training stopped", "lower lr")
    assert not (out / "model.safetensors").exists()
    logged = (out / "training" / "log.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in logged if '"step"' in line][-1]
    assert f"step {last['step']}: " in told[2]


def test_a_full_disk_is_one_line_and_the_old_snapshot_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    settings = words("lm", steps=6, eval_every=100)
    with monkeypatch.context() as patch:
        fill_disk(patch, at=3)
        told = run(capsys, "train", "lm", text, "-o", out, *settings)
    assert refused(told, "step-00000006", "No space left on device", "are free there", "resume")
    left = load_latest(out / "training" / "snapshots")
    assert left is not None and left.step == 4 and left.passed_over == ()
    assert run(capsys, "train", "lm", text, "-o", out, "--resume")[0] == 0
    whole = tmp_path / "whole"
    assert run(capsys, "train", "lm", text, "-o", whole, *settings)[0] == 0
    assert same(out, whole)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--set", "stepz=3"], ["no setting is named 'stepz'", "steps, lr"]),
        (["--set", "steps=soon"], ["steps='soon'; expected a whole number"]),
        (["--set", "steps"], ["expected key=value"]),
        (["--set", "lr=-1"], ["lr is -1.0; expected a finite number above 0"]),
        (["--set", "lr=inf"], ["lr is inf; expected a finite number"]),
        (["--set", "compiled=yes"], ["expected true or false"]),
        (["--set", "model.hiden_size=8"], ["'model.hiden_size'", "hidden_size", "'llama'"]),
        (["--set", "model.hidden_size=13"], ["llama"]),
        (["--set", "model.hidden_size=big"], ["hidden_size is 'big'"]),
        (["--recipe", "none-such"], ["no recipe is named 'none-such'", "lm-small", "shakespeare"]),
        (["--size", "none-such"], ["no size is named 'none-such'", "gpt2-medium"]),
        (["--recipe", "multi30k"], ["'multi30k' is for `regard train translate`"]),
        (["--recipe", "mlm-small"], ["is for `regard train mlm`"]),
        (["--size", "bert-mini"], ["'bert' is trained by `regard train mlm`, not by"]),
        (["--set", "cutting=wordpiece"], ["cutting is 'wordpiece'; expected one of"]),
        (["--device", "abacus"], ["device is 'abacus'"]),
        (["--device", "meta"], ["device is 'meta'"]),
        (["--data-parallel", "2"], ["torchrun --nproc-per-node 2"]),
        (["--tokenizer", "/none/such"], ["/none/such"]),
        (["--valid", "/none/such"], ["/none/such", "no such file"]),
        (["--set", "context=100000"], ["32768"]),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    out = tmp_path / "run"
    told = run(capsys, "train", "lm", write_text(tmp_path), "-o", out, *arguments)
    assert refused(told, *parts)
    assert not (out / "training" / "snapshots").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--recipe", "lm-small"], ["'lm-small' is for `regard train lm`"]),
        (["--size", "gpt2"], ["'gpt2' is trained by `regard train lm`, not by `regard train mlm`"]),
        (["--set", "cutting=scripts"], ["cutting is 'scripts'; expected one of 'bpe', 'char"]),
        (["--set", "model.is_decoder=true"], ["is_decoder"]),
        (["--set", "context=2"], ["windows of 3 or more"]),
        (["--set", "vocab_size=8"], ["5 tokens are special; that leaves no room"]),
    ],
)
def test_what_a_masked_run_cannot_mean_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    out = tmp_path / "run"
    told = run(capsys, "train", "mlm", write_text(tmp_path), "-o", out, *arguments)
    assert refused(told, *parts)
    assert not (out / "training" / "snapshots").exists()


def test_help_tells_what_a_masked_model_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "train", "mlm", "--help")
    assert code == 0
    for word in ("15%", "80%", "[MASK]", "regard fill", "unigram", "--resume", "mlm-small"):
        assert word in said
    assert "regard train mlm" in run(capsys, "train", "--help")[1]


def test_languages_are_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = write_pairs(tmp_path)
    for given in ("en", "en,", "en,ja,de", "en,en"):
        code, _, err = run(
            capsys, "train", "translate", pairs, "-o", tmp_path / "run", "--languages", given
        )
        assert code == 2 and "expected two, such as en,ja" in err


# ---- Bad data

LATIN = "Zoë saß\n".encode("latin-1")
PAIR = "the cat\tdie Katze\n"
BAD: dict[str, tuple[str, bytes, int, list[str]]] = {
    "lm, empty": ("lm", b"", 2, ["there is no text in it"]),
    "lm, blank": ("lm", b" \n\n ", 2, ["there is no text in it"]),
    "lm, one short line": ("lm", b"a b c\n", 2, ["fewer than one window", "give more text"]),
    "lm, one letter": ("lm", b"a", 2, ["give some text"]),
    "lm, one long line": ("lm", b"abc de fgh " * 60, 0, ["there is 1 line only"]),
    "lm, Latin-1 among UTF-8": (
        "lm",
        "Zoë ".encode() * 50 + b"\n" + LATIN * 3,
        2,
        ["3 of 5 lines are not UTF-8", "line 2", "iconv"],
    ),
    "lm, UTF-16": ("lm", ("abc " * 99).encode("utf-16"), 2, ["is UTF-16, expected UTF-8", "iconv"]),
    "lm, NUL": ("lm", b"abc\n" * 50 + b"a\0b\0\n", 2, ["2 NUL bytes", "line 51"]),
    "lm, a line of 10 MB": (
        "lm",
        b"abc defgh ij " * 800_000 + b"\nand more\n",
        0,
        ["1 document was found with lines over 1,000,000 characters", "10,400,000"],
    ),
    "lm, only duplicates": (
        "lm",
        b"\n<|endoftext|>\n".join([b"abc de fgh ij"] * 70),
        0,
        ["all 70 documents are the same"],
    ),
    "lm, only duplicate lines": ("lm", b"abc de fgh\n" * 70, 0, ["all 70 lines are the same"]),
    "lm, no JSON": ("jsonl", b'{"text": "a"}\nno json\n', 2, ["line 2 is not JSON"]),
    "pairs, empty": ("translate", b"", 2, ["the file is empty"]),
    "pairs, one line": ("translate", PAIR.encode(), 2, ["one pair is left, and one is held out"]),
    "pairs, no tab": (
        "translate",
        b"the cat - die Katze\n" * 30,
        2,
        ["30 of 30 lines have no tab", "line 1"],
    ),
    "pairs, some tabs missing": (
        "translate",
        PAIR.encode() * 50 + b"no tab\n",
        0,
        ["1 line was without a tab"],
    ),
    "pairs, Latin-1 among UTF-8": (
        "translate",
        PAIR.encode() * 9 + b"Zo\xeb\tsa\xdf\n",
        2,
        ["1 of 11 lines are not UTF-8", "line 10"],
    ),
    "pairs, NUL": ("translate", PAIR.encode() * 9 + b"a\0\tb\n", 2, ["1 NUL byte", "line 10"]),
    "pairs, a line of 10 MB": (
        "translate",
        PAIR.encode() * 40 + b"x" * 10_000_000 + b"\ty\n",
        0,
        ["1 pair was longer than 10,000 characters and left out"],
    ),
    "pairs, only duplicates": (
        "translate",
        PAIR.encode() * 40,
        0,
        ["all 40 pairs are the same: only one thing to learn"],
    ),
    "pairs, only empty sides": ("translate", b"a\t\n\tb\n" * 9, 2, ["no pair is left"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_an_error_or_a_word_with_a_count_never_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    kind, data, expected, parts = BAD[name]
    ending = {"lm": "txt", "jsonl": "jsonl", "translate": "tsv"}[kind]
    path = tmp_path / f"text.{ending}"
    path.write_bytes(data)
    kind = "lm" if kind == "jsonl" else kind
    out = tmp_path / "run"
    options: list[str | Path] = [*words(kind)]
    if len(data) > 1_000_000 and kind == "lm":
        options += ["--valid", write_text(tmp_path / "valid")]  # else a tenth of it is evaluated
    code, said, err = run(capsys, "train", kind, path, "-o", out, *options)
    assert code == expected, said + err
    if code:
        assert len(err.splitlines()) == 1 and not (out / "training" / "snapshots").exists()
    told = err if code else said
    missing = [part for part in parts if part not in told]
    assert not missing, f"{missing} not in {told!r}"
    if not code:
        assert (out / "model.safetensors").is_file() and list_snapshots(
            out / "training" / "snapshots"
        )
