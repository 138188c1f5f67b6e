"""`regard translate`: texts, files and standard input, which way, and refusals in one line."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch
import typer
from commands import run_command
from rich.console import Console
from scripted import make_model
from translators import make_tokenizer, make_translator

import regard
from regard import cli
from regard.cli import translate as command
from regard.models import Transformer, embedded, load, save

CAT = "The cat sat on the mat."
NEKO = "猫がマットの上に座った。"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return run_command(capsys, "translate", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_translator(tmp_path_factory.mktemp("cli") / "translate", int8=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load(folder)


@pytest.fixture(autouse=True)
def carried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny one stands in for the translator inside the package."""
    monkeypatch.setattr(embedded, "ROOT", folder.parent)


def spelled(text: str) -> str:
    return cli.printing.make_printable(text, "utf-8", kept="\n\t\u3000") + "\n"


@pytest.mark.parametrize("text", [CAT, NEKO, f"Yes, he did. {CAT}", "two\nlines"])
def test_it_writes_what_translate_gives_and_tells_what_it_took(
    capsys: pytest.CaptureFixture[str], model: Transformer, text: str
) -> None:
    code, out, err = run(capsys, text)
    assert (code, out) == (0, spelled(regard.translate(model, text)))
    counted = "1 sentence in " if text in (CAT, NEKO) else "2 sentences in "
    assert err.startswith(counted) and "5 beams" in err


def test_words_need_no_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *CAT.split())[1] == run(capsys, CAT)[1]


def test_options_reach_the_translation(
    capsys: pytest.CaptureFixture[str], folder: Path, model: Transformer
) -> None:
    _, out, err = run(capsys, "--to", "en", "--beams", "1", "--model", str(folder), NEKO)
    assert out == spelled(regard.translate(model, NEKO, "en", beams=1))
    assert "greedy" in err
    assert out != run(capsys, "--beams", "3", NEKO)[1]


def test_a_text_that_is_in_that_language_already_is_remarked_upon(
    capsys: pytest.CaptureFixture[str], model: Transformer
) -> None:
    code, out, err = run(capsys, "--to", "en", CAT)
    assert (code, out) == (0, spelled(regard.translate(model, CAT, "en")))
    assert "looks like en already" in err
    assert "already" not in run(capsys, "--to", "ja", CAT)[2]


def test_a_file_gives_a_line_for_each_line(
    capsys: pytest.CaptureFixture[str],
    model: Transformer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "LINES_AT_ONCE", 2)
    file = tmp_path / "lines.txt"
    file.write_bytes(f"\ufeff{CAT}\r\n\r\n1984\n{NEKO}\nYes. No.\n".encode())
    code, out, err = run(capsys, "--from-file", str(file))
    made = [regard.translate(model, text) for text in (CAT, NEKO, "Yes. No.")]
    assert code == 0
    assert out == spelled("\n".join([made[0], "", "1984", made[1], made[2]]))
    assert err.startswith("4 sentences in ")


def test_a_dash_reads_standard_input(
    capsys: pytest.CaptureFixture[str], model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO(f"{CAT}\n{NEKO}".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="ascii"))
    _, out, _ = run(capsys, "-")
    assert out == "".join(spelled(regard.translate(model, text)) for text in (CAT, NEKO))
    monkeypatch.setattr(sys, "stdin", io.StringIO(CAT))
    assert run(capsys, "-")[1] == spelled(regard.translate(model, CAT))


def test_long_input_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "NEWS_SECONDS", 0.0)
    monkeypatch.setattr(command, "LINES_AT_ONCE", 2)
    file = tmp_path / "lines.txt"
    file.write_text(f"{CAT}\n" * 5)
    _, _, err = run(capsys, "--beams", "1", "--from-file", str(file))
    assert re.fullmatch(
        r"2 of 5 lines in \d+ s, about \d+ s left\n"
        r"4 of 5 lines in \d+ s, about \d+ s left\n"
        r"5 sentences in [\d.]+ s, greedy\n",
        err,
    )
    assert run(capsys, "--beams", "1", f"{CAT} " * 40)[2].startswith("32 of 40 sentences in ")


def test_a_model_without_directions_reads_the_text_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_translator(tmp_path, directions=None)
    text = "translate English to German: Yes. No."
    _, out, _ = run(capsys, "-m", str(tmp_path), text)
    assert out == spelled(regard.translate(load(tmp_path), text))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the text is empty"),
        (("",), "the text is empty"),
        ((" \t",), "the text is empty"),
        (("123", "?!"), "the text has no letters"),
        (("--to", "fr", CAT), "translates to ja or en"),
        (("--to", "", CAT), "translates to ja or en"),
        (("Привет",), "neither Japanese nor Latin"),
        (("--beams", "0", CAT), "beams"),
        (("-m", "/no/such/folder", CAT), "/no/such/folder"),
        (("-m", "[/]", CAT), "[/]"),
        (("-m", "embedded:moon", CAT), "embedded:translate"),
        (("--device", "moon", CAT), "moon"),
        (("--from-file", "/no/such/file"), "/no/such/file"),
        (("--from-file", "FOLDER"), "directory"),
        (("--from-file", "FOLDER", CAT), "not both"),
        (("a\udcff b",), "lone surrogate"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    given = [str(folder) if argument == "FOLDER" else argument for argument in arguments]
    code, out, err = run(capsys, *given)
    assert (code, out) == (2, "")
    assert words in err and "Traceback" not in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"1\n2\n", "no letters in the 2 lines"),
        ("猫\n犬".encode("shift_jis"), "line 1: byte 0x94 is not UTF-8"),
        (b"Yes\nN\xff", "line 2: byte 0xff is not UTF-8"),
        ("Yes\nПривет".encode(), "in lines 1 to 2: text 1 is written in neither"),
    ],
)
def test_a_file_that_cannot_be_translated_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: bytes, words: str
) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(data)
    code, out, err = run(capsys, "--from-file", str(file))
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_a_decoder_is_no_translator(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    save(make_model(tokenizer.vocab_size), tmp_path)
    tokenizer.save(tmp_path)
    code, out, err = run(capsys, "-m", str(tmp_path), CAT)
    assert (code, out) == (2, "")
    assert "translate needs an encoder–decoder" in err


def test_a_copy_without_the_translator_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "ROOT", tmp_path)
    code, out, err = run(capsys, CAT)
    assert (code, out) == (2, "")
    assert "embedded:translate is not in this copy of regard" in err


def test_no_text_can_steer_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "a\x1b[31m\u202eb\u2066\x07\u3000猫"
    monkeypatch.setattr("regard.generation.translate", lambda *_, **__: written)
    assert run(capsys, CAT)[1] == "a\\x1b[31m\\u202eb\\u2066\\x07\u3000猫\n"
    monkeypatch.undo()
    for hostile in ("\x1b]0;x\x07", "\u202e\u2066", "Привет\x1b[2J\u202e", "\x9b12"):
        _, out, err = run(capsys, hostile)
        assert not [sign for sign in out + err if not sign.isprintable() and sign != "\n"]


def test_no_refusal_can_steer_the_terminal_either() -> None:
    page = io.StringIO()
    with pytest.raises(typer.Exit), cli.printing.refusing(Console(file=page)):
        raise ValueError("a\x1b[2J\u202eb")
    assert page.getvalue() == "a\\x1b[2J\\u202eb\n"


def test_a_line_without_letters_cannot_steer_the_terminal_either(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("Yes\n\x1b[2\u202e\n")
    assert run(capsys, "--from-file", str(file))[1].endswith("\n\\x1b[2\\u202e\n")


def test_a_missing_tokenizers_package_is_one_line_that_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, out, err = run(capsys, CAT)
    assert (code, out) == (2, "")
    assert "pip install 'regard[tokens]'" in err and err.count("\n") == 1


def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert CAT in out and NEKO in out and "--from-file" in out


def test_a_small_model_writes_a_short_text_with_one_thread(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def count(*_: object, **__: object) -> str:
        seen.append(torch.get_num_threads())
        return "x"

    monkeypatch.setattr("regard.generation.translate", count)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(capsys, CAT)
        run(capsys, CAT * 30)
        monkeypatch.setattr("regard.cli.loading.SMALL", 5)
        run(capsys, CAT)
        monkeypatch.setattr("regard.cli.loading.SMALL", 5_000_000)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        run(capsys, CAT)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 2, 2]
