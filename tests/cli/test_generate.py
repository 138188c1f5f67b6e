"""`regard generate`: text as it is written, what it took, and refusals in one line."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from commands import run_command
from scripted import make_model
from tokenmakers import byte_level

from regard import cli
from regard.generation import generate
from regard.models import Transformer, embedded, load, save
from regard.tokens import Tokenizer


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return run_command(capsys, "generate", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte-level tokenizer beside it."""
    path = tmp_path_factory.mktemp("cli") / "model"
    tokenizer = Tokenizer.from_parts(byte_level(), {"eos_token": "<|end|>"})
    save(make_model(tokenizer.vocab_size, max_len=64), path)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load(folder)


def spelled(text: str) -> str:
    return cli.printing.make_printable(text, "utf-8", kept="\n\t") + "\n"


def test_it_writes_what_generate_gives_and_tells_what_it_took(
    capsys: pytest.CaptureFixture[str], folder: Path, model: Transformer
) -> None:
    code, out, err = run(capsys, "-m", str(folder), "--max-new-tokens", "17", "Once", "upon")
    assert code == 0
    assert out == spelled(generate(model, "Once upon", max_new_tokens=17))
    n_read = len(model.tokenizer.encode("Once upon").ids)  # type: ignore[union-attr]
    found = re.search(r"(\d+) tokens read in [\d.]+ s, (\d+) written, [\d.]+ tokens/s", err)
    assert found is not None and found.groups() == (str(n_read), "17")
    assert "ended by length" in err


def test_without_a_model_the_embedded_one_writes(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    model: Transformer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lm").symlink_to(folder)
    monkeypatch.setattr(embedded, "ROOT", tmp_path)
    drawn = {"max_new_tokens": 5, "temperature": 0.8, "top_p": 0.9}
    code, out, _ = run(capsys, "--max-new-tokens", "5", "Once")
    assert (code, out) == (0, spelled(generate(model, "Once", **drawn, seed=0)))
    _, out, _ = run(capsys, "--max-new-tokens", "5", "--seed", "7", "Once")
    assert out == spelled(generate(model, "Once", **drawn, seed=7))
    _, out, _ = run(capsys, "--max-new-tokens", "5", "--temperature", "0", "Once")
    assert out == spelled(generate(model, "Once", max_new_tokens=5))


def test_a_copy_without_the_embedded_model_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "ROOT", tmp_path)
    code, out, err = run(capsys, "hello")
    assert (code, out) == (2, "")
    assert "embedded:lm is not in this copy of regard" in err and err.count("\n") == 1


def test_options_reach_the_generation(
    capsys: pytest.CaptureFixture[str], folder: Path, model: Transformer
) -> None:
    given = ("--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01")
    given += ("--seed", "11", "--repetition-penalty", "1.2", "--max-new-tokens", "9")
    _, out, _ = run(capsys, "-m", str(folder), *given, "abc")
    expected = generate(
        model,
        "abc",
        temperature=1.5,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        seed=11,
        repetition_penalty=1.2,
        max_new_tokens=9,
    )
    assert out == spelled(expected)
    beams = ("--beams", "3", "--length-penalty", "0.5", "--max-new-tokens", "9")
    _, out, err = run(capsys, "-m", str(folder), *beams, "abc")
    searched = generate(model, "abc", num_beams=3, length_penalty=0.5, max_new_tokens=9)
    assert out == spelled(searched) and "3 beams" in err


def test_a_stop_string_ends_the_text(
    capsys: pytest.CaptureFixture[str], folder: Path, model: Transformer
) -> None:
    whole = generate(model, "abc", max_new_tokens=20)
    stop = whole[5:7]
    _, out, err = run(capsys, "-m", str(folder), "--max-new-tokens", "20", "--stop", stop, "abc")
    assert out == spelled(whole[: whole.index(stop)])
    assert "ended by stop" in err


def test_a_dash_reads_standard_input(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("-m", str(folder), "--max-new-tokens", "5")
    expected = run(capsys, *given, "two words")[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("two words"))
    assert run(capsys, *given, "-")[1] == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", "/no/such/folder", "hello"), "/no/such/folder"),
        (("-m", "MODEL", " "), "the prompt is empty"),
        (("-m", "MODEL", "--top-k", "5", "hello"), "top_k narrows a draw"),
        (("-m", "MODEL", "--dtype", "int8", "hello"), "expected float32, bfloat16 or float16"),
        (("-m", "MODEL", "--device", "moon", "hello"), "moon"),
        (("-m", "MODEL", "--chat", "hello"), "has no chat template"),
        (("-m", "MODEL", "x" * 500), "no room for an answer"),
        (("-m", "MODEL", "--max-new-tokens", "0", "hello"), "max_new_tokens"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    given = [str(folder) if argument == "MODEL" else argument for argument in arguments]
    code, out, err = run(capsys, *given)
    assert (code, out) == (2, "")
    assert words in err and "Traceback" not in err


def test_what_a_model_writes_cannot_steer_the_terminal(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.generation.generate", lambda *_, **__: "a\x1b[31m\nb\u202ec")
    _, out, _ = run(capsys, "-m", str(folder), "--beams", "2", "hi")
    assert out == "a\\x1b[31m\nb\\u202ec\n"


def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "The capital of France is" in out and "--temperature" in out
