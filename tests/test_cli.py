"""The `regard` command, run in this process with its output caught, and once as a real process."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from regard import cli
from regard._version import __version__

ROOT = Path(__file__).resolve().parent.parent

# Worked by hand from x = [[1, .5, .2, .1], [.3, 1, .4, .2], [.2, .3, 1, .5]]. The first row of the
# one head: x[0]·x = [1.30, 0.90, 0.60], over √4; exp gives [1.9155, 1.5683, 1.3499], sum 4.8337.
ONE_HEAD_FIRST_ROW = [0.3963, 0.3245, 0.2793]
# Heads of width 2 see columns 0-1 and 2-3: [1.25, 0.80, 0.35] / √2 and [0.05, 0.10, 0.25] / √2.
TWO_HEADS_FIRST_ROWS = [[0.4431, 0.3224, 0.2345], [0.3137, 0.3250, 0.3613]]


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    caught = capsys.readouterr()
    code = left.value.code
    return (0 if code is None else int(code)), caught.out, caught.err


def look_on(text: str, **console: object) -> str:
    page = io.StringIO()
    cli.look.look(text, Console(file=page, **console))  # type: ignore[arg-type]
    return page.getvalue()


def tables(output: str) -> list[list[str]]:
    """The lines of each head's table, without its title."""
    parts = output.split("\n\n")
    return [part.splitlines()[1:] for part in parts if part.startswith("head ")]


def test_one_head_of_width_4_gives_the_worked_first_row() -> None:
    weights_hts = cli.look.weigh_example(1)
    assert len(weights_hts) == 1
    assert weights_hts[0][0] == pytest.approx(ONE_HEAD_FIRST_ROW, abs=5e-5)


def test_two_heads_of_width_2_each_see_their_half_of_the_width() -> None:
    weights_hts = cli.look.weigh_example(2)
    assert len(weights_hts) == 2
    for head, first_row in enumerate(TWO_HEADS_FIRST_ROWS):
        assert weights_hts[head][0] == pytest.approx(first_row, abs=5e-5)


def test_look_prints_one_table_for_each_head_with_rows_and_columns_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "look", "I love Transformers")
    assert (code, err) == (0, "")
    first, *others = tables(out)
    assert len(others) == 2
    assert first[0].split() == ["I", "love", "Transformers"]
    assert [line.split()[0] for line in first[1:]] == ["I", "love", "Transformers"]
    assert [float(part) for part in first[1].split()[1::2]] == ONE_HEAD_FIRST_ROW
    assert "head 2 of 2, width 2" in out


def test_look_says_that_no_trained_model_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "look", "I love Transformers")
    assert "not a trained model" in out


def test_look_takes_the_words_with_or_without_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "look", "I", "love", "it") == run(capsys, "look", " I  love\tit\n")


def test_output_that_is_no_terminal_is_plain_text_with_bars(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run(capsys, "look", "I love Transformers")
    assert "\x1b" not in out
    assert "0.3963 ████ " in out
    assert all(len(line) <= 80 and line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize(
    ("weight", "bar"), [(0.0, ""), (0.0125, "▏"), (0.25, "██▌"), (0.3, "███"), (1.0, "█" * 10)]
)
def test_a_bar_is_as_long_as_the_weight(weight: float, bar: str) -> None:
    assert cli.look.draw_bar(weight, blocks=True) == bar
    assert cli.look.draw_bar(weight, blocks=False) == "#" * round(10 * weight)


def test_a_terminal_gets_shades_and_the_largest_weight_the_deepest() -> None:
    page = look_on("I love it", force_terminal=True, color_system="truecolor", width=80)
    deepest = ";".join(str(part) for part in cli.look.DEEP_RGB)
    assert f"48;2;{deepest}m" in page
    assert "█" not in page
    line = next(line for line in page.splitlines() if f"48;2;{deepest}m" in line)
    assert "0.4085" in line.split(f"48;2;{deepest}m")[1].split("\x1b")[0]


def test_a_terminal_that_wants_no_colour_gets_bars() -> None:
    page = look_on("I love it", force_terminal=True, no_color=True, width=80)
    assert "48;" not in page
    assert "0.3963 ████" in page


def test_a_narrow_terminal_keeps_the_numbers_whole() -> None:
    for line in tables(look_on("I love Transformers", width=20))[0][1:]:
        numbers = line.split()[1:]
        assert [len(number) for number in numbers] == [6, 6, 6]
        assert sum(float(number) for number in numbers) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "The text is empty"),
        (" \t\n", "The text is empty"),
        ("Hello", "The text has 1 word,"),
        ("私は変換器が好き", "The text has 1 word,"),
        ("The animal didn't cross the street", "The text has 6 words,"),
        ("word " * 4321, "The text has 4,321 words,"),
    ],
)
def test_other_than_three_words_are_refused_with_what_can_be_done(
    capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    code, out, err = run(capsys, "look", text)
    assert (code, out) == (2, "")
    assert said in err
    assert 'regard look "I love Transformers"' in err
    assert len(err) < 400


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x1b]0;t\x07", r"\x1b]0;t\x07"),
        ("a\x08b", r"a\x08b"),
        ("\x9b2J", r"\x9b2J"),
        ("a\u202eb", r"a\u202eb"),
        ("a\u200bb", r"a\u200bb"),
        ("\udcff", r"\udcff"),
        ("[red]x[/]", "[red]x[/]"),
        (":smile:", ":smile:"),
        ("%s{0}", "%s{0}"),
    ],
)
def test_no_word_can_steer_the_terminal(word: str, shown: str) -> None:
    page = look_on(f"I {word} it", width=80)
    assert not [char for char in page if not char.isprintable() and char != "\n"]
    header, _, second, _ = tables(page)[0]
    assert header.split() == ["I", shown, "it"]
    assert second.split()[0] == shown


def test_a_line_is_written_as_it_is() -> None:
    page = io.StringIO()
    cli.printing.write_line(
        Console(file=page, width=20, force_terminal=True), "[red]7[/] :smile: " * 9
    )
    assert page.getvalue() == "[red]7[/] :smile: " * 9 + "\n"


def test_joiners_inside_emoji_stay() -> None:
    assert "👩\u200d🚀" in look_on("I 👩\u200d🚀 it", width=80)


@pytest.mark.parametrize(
    "words", ["私は 変換器が 好き", "a\u3000日本語b とても長い言葉ですから長い"]
)
def test_wide_characters_keep_the_columns_in_line(words: str) -> None:
    for header, *rows in tables(look_on(words, width=80)):
        seconds = [cell_len(row[: row.index("0.")]) for row in rows]
        assert len(set(seconds)) == 1
        last = words.split()[-1][:4]
        start_of_last = cell_len(header[: header.index(last)])
        assert all(cell_len(row[: row.rindex("0.")]) == start_of_last for row in rows)


def test_a_very_long_word_is_cut_and_marked() -> None:
    page = look_on(f"I {'x' * 100_000} it", width=80)
    assert "xxx…" in page
    assert all(cell_len(line) <= 80 for line in page.splitlines())


def test_a_stream_that_is_not_unicode_gets_signs_it_can_carry() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    cli.look.look("I 好き ü", Console(file=stream, width=80))
    stream.flush()
    page = raw.getvalue().decode("ascii")
    assert r"\u597d\u304d" in page
    assert r"\xfc" in page
    assert "0.3963 ####" in page


def test_help_teaches_the_first_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["look", "--help"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert 'regard look "I love Transformers"' in out
    assert "does not carry a trained model yet" in " ".join(out.split())


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("arguments", [["look"], ["gaze"], ["look", "--loudly", "a b c"]])
def test_what_is_not_understood_leaves_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "--help" in err


def test_doctor_tells_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert f"regard           {__version__}\n" in out
    assert f"torch            {torch.__version__}\n" in out
    verdicts = out.split("asked for a causal call in float32:\n")[1]
    for backend in ("reference", "blockwise", "sdpa", "flex"):
        assert backend in verdicts


def test_a_package_that_is_not_there_is_said_so() -> None:
    assert cli.doctor.version_of("no-such-package-anywhere") == "not installed"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_gives_one_sentence_that_names_it(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = run(capsys, "look", "I love Transformers")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "pip install 'regard[cli]'" in err


def test_python_dash_m_regard_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regard", "look", "I", "\udcff", "it"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\udcff" in done.stdout
