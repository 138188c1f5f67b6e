"""`regard look`, `regard view`, `regard translate --look`: the digest, the pages, refusals."""

import io
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command as run
from lens_words import SENTENCE, make_record
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress, TaskID

import regard
from regard._look import Said, check_effect, own_subject, see, see_translation
from regard.cli.digest import DEEP_RGB, draw_bar, write_digest, write_effect
from regard.cli.look import see_showing
from regard.cli.progress import showing
from regard.lens.findings import choose_word
from regard.lens.record import Record
from regard.lens.word_links import words_of
from regard.models.embedded import ROOT


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def digest_of(record: Record, word: str | None = None, **console: object) -> str:
    page = io.StringIO()
    write_digest(record, Console(file=page, **console), word)  # type: ignore[arg-type]
    return page.getvalue()


def test_the_digest_names_what_heads_do_and_the_link_that_tells_most() -> None:
    digest = digest_of(make_record())
    assert digest.startswith("by hand: 12 tokens, 1 attention layer, 3 heads\n")
    lines = {line.split("  ")[1]: line.split() for line in digest.splitlines() if "  " in line}
    assert lines["the token before"][3] == "0.0"
    assert lines["the first token"][3] == "0.1"
    assert lines["the token itself"][3] == "0.2"
    links = digest.split("word to word\n")[1].split("\n\n")[0].splitlines()
    assert links[0].split()[:5] == ["it", "→", "animal", "0.2", "1.00"]


def test_a_pronoun_is_asked_about_unless_a_word_is_named() -> None:
    record = make_record()
    assert '"it" looks at\n  animal' in digest_of(record)
    asked = digest_of(record, "Animal")
    assert '"animal" is looked at by\n  it' in asked
    own, _ = words_of(record)
    assert choose_word(own, "1") == 1
    assert choose_word([word for word in own if word.text != "it"], None) == 9
    with pytest.raises(
        ValueError, match=r"no word of the text is 'dog'; expected one of The, anim"
    ):
        digest_of(record, "dog")


def test_output_that_is_no_terminal_is_plain_text_with_bars_and_a_terminal_gets_shades() -> None:
    record = make_record()
    plain = digest_of(record)
    assert "\x1b" not in plain and "1.00 ██████████" in plain
    shaded = digest_of(record, force_terminal=True, color_system="truecolor", width=80)
    assert f"48;2;{';'.join(map(str, DEEP_RGB))}m 1.00" in shaded and "█" not in shaded
    assert "48;" not in digest_of(record, force_terminal=True, no_color=True)


@pytest.mark.parametrize(
    ("weight", "bar"), [(0.0, ""), (0.0125, "▏"), (0.25, "██▌"), (0.3, "███"), (1.0, "█" * 10)]
)
def test_a_bar_is_as_long_as_the_weight(weight: float, bar: str) -> None:
    assert draw_bar(weight, blocks=True) == bar
    assert draw_bar(weight, blocks=False) == "#" * round(10 * weight)


def test_no_word_or_name_can_steer_the_terminal_and_long_ones_are_cut() -> None:
    record = make_record()
    words = [f"{word}\x1b[2J\u202e" for word in record.tokens]
    long = "x" * 10_000
    text = " ".join([*words[:7], long, *words[8:]])
    spans, at = [], 0
    for word in [*words[:7], long, *words[8:]]:
        spans.append((at, at + len(word)))
        at += len(word) + 1
    record.describe(text=text, tokens=words, spans=spans, model="a\x1b]0;x\x07")
    page = digest_of(record, "x" * 10_000)
    assert not [sign for sign in page if not sign.isprintable() and sign != "\n"]
    assert all(cell_len(line) <= 80 for line in page.splitlines() if "→" in line)


def test_a_stream_that_is_not_unicode_gets_signs_it_can_carry() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace")
    write_digest(make_record(), Console(file=stream, width=80))
    stream.flush()
    assert b"1.00 ##########" in raw.getvalue()


def test_look_reads_a_text_with_the_model_inside_and_writes_what_was_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    html, png, kept = tmp_path / "a.html", tmp_path / "a.png", tmp_path / "a.regard"
    code, out, err = run(
        capsys, "look", SENTENCE, "--html", str(html), "--png", str(png), "--save", str(kept)
    )
    assert code == 0, err
    assert out.startswith("embedded:encoder: 16 tokens, 6 attention layers, 72 heads\n")
    assert '"it" looks at' in out
    assert "animal" in html.read_text(encoding="utf-8") and png.read_bytes()[1:4] == b"PNG"
    again, said, _ = run(capsys, "view", str(kept), "--html", str(tmp_path / "b.html"))
    assert (again, said) == (0, out)
    assert (tmp_path / "b.html").stat().st_size > 10_000


def test_unasked_a_page_is_written_and_no_browser_opens_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("opened"))
    code, _, err = run(capsys, "look", "Two", "birds", "sang", "to", "me")
    assert code == 0
    page = Path(err.split("page: ")[1].strip())
    assert page.is_file() and "birds" in page.read_text(encoding="utf-8")
    assert page.parent.stat().st_mode & 0o777 == 0o700, "a text is nobody else's"
    before = sorted(tmp_path.iterdir())
    code, _, err = run(capsys, "look", "Three", "fish", "swam")
    assert err.split("page: ")[1].strip() == str(page) and sorted(tmp_path.iterdir()) == before
    assert "birds" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "given",
    [
        ("--layer", "8"),
        ("--layer", "-1"),
        ("--layer", "1", "--head", "12"),
        ("--token", "bye"),
        ("--html", "no/x.html"),
        ("--save", "no/x.regard"),
    ],
)
def test_arguments_are_refused_before_the_model_reads(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.cli.look.see", lambda *_: pytest.fail("the model read"))
    code, out, err = run(capsys, "look", "Hello there", *given)
    assert (code, out) == (2, "") and err.count("\n") == 1


def test_what_may_be_a_path_is_said_to_be_read_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for word, what in (
        ("and/or", "no file"),
        ("folder", "a folder"),
        ("read notes.txt", "no file"),
    ):
        code, _, err = run(capsys, "look", word, "--html", "x.html")
        assert code == 0 and f"{word!r} is {what} here: it is read as the text" in err
    code, _, err = run(capsys, "look", "e.g. this.", "--html", "x.html")
    assert code == 0 and "read as" not in err
    code, _, err = run(capsys, "look", "./folder", "--html", "x.html")
    assert code == 2 and "'./folder' is a folder; give a file in it" in err


def test_a_reader_that_leaves_early_leaves_the_page(tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    command = [sys.executable, "-m", "regard", "look", SENTENCE, "--html", str(page)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 0, said
    assert page.stat().st_size > 10_000 and said == f"page: {page}\n"


def test_the_page_is_there_before_the_digest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "x.html"
    seen: list[bool] = []
    monkeypatch.setattr(
        "regard.cli.look.write_digest", lambda *_: seen.append(page.stat().st_size > 10_000)
    )
    assert run(capsys, "look", SENTENCE, "--html", str(page))[0] == 0
    assert seen == [True]


def test_a_model_is_named_by_its_folder_and_not_by_its_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "secret" / "tiny-lm"
    shutil.copytree(ROOT / "lm", folder)
    html, kept = tmp_path / "x.html", tmp_path / "x.regard"
    given = ("--model", str(folder), "--html", str(html), "--save", str(kept))
    code, out, err = run(capsys, "look", SENTENCE, *given)
    assert code == 0, err
    assert out.startswith("tiny-lm: 13 tokens") and "secret" not in html.read_text(encoding="utf-8")
    assert Record.open(kept).model == "tiny-lm"
    assert regard.look(SENTENCE, folder).model == "tiny-lm"


def test_look_reads_files_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(SENTENCE, encoding="utf-8")
    quiet = ("--html", str(tmp_path / "x.html"))
    straight = run(capsys, "look", SENTENCE, *quiet)[1]
    assert run(capsys, "look", str(file), *quiet)[1] == straight
    file.write_text(SENTENCE, encoding="utf-8-sig")
    assert run(capsys, "look", str(file), *quiet)[1] == straight, "with a byte order mark"
    file.write_bytes(SENTENCE.encode() + b"\xff")
    code, _, err = run(capsys, "look", str(file), *quiet)
    assert code == 2 and f"{file}, line 1: byte 0xff is not UTF-8" in err
    monkeypatch.setattr("sys.stdin", io.StringIO(SENTENCE))
    assert run(capsys, "look", "-", *quiet)[1] == straight


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((" ",), "the text is empty"),
        (("Hello there", "--token", "bye"), "no word of the text is 'bye'"),
        (("Hello there", "--head", "1"), "--head is one of a layer's heads"),
        (("Hello there", "--layer", "6"), "layers 0 to 5"),
        (("Hello there", "--layer", "1", "--head", "12"), "heads 0 to 11"),
        (("Hello there", "--png", "x.gif"), "'.gif'"),
        (("Hello there", "--png", "no/x.png"), "there is no folder 'no'"),
        (("nosuchfile.txt",), "there is no file 'nosuchfile.txt'"),
        (("./nosuchfile",), "there is no file './nosuchfile'"),
        (("Hello there", "-m", "embedded:translate"), "regard translate --look"),
        (("Hello there", "-m", "nowhere/at-all/x"), "nowhere"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "look", *given)
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_text_may_be_longer_than_a_file_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, "look", "it was late " * 30, "--html", str(tmp_path / "x.html"))
    assert "read as the text" not in err
    assert code == 0 and ": 92 tokens" in out, err


def test_a_text_of_no_tokens_or_too_many_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = own_subject(regard.load("embedded:lm"), "embedded:lm")
    nothing = replace(subject, encode=lambda text: Said([], [], []))
    with pytest.raises(ValueError, match=r"embedded:lm makes no token of this text of 5 char"):
        nothing.read("hello")
    short = replace(subject, max_len=7)
    assert len(short.read("one two three four five six seven").ids) == 7
    with pytest.raises(ValueError, match=r"has 8 tokens, but embedded:lm takes 7"):
        short.read("one two three four five six seven eight")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("it was late " * 50, (), "the text has 152 tokens, and embedded:encoder takes 128: embed"),
        (
            "猫はマットに座った。",
            (),
            "embedded:encoder does not know 5 of 7 tokens of the text: embed",
        ),
        ("It was", ("--effect",), "no word is masked ([MASK]), and embedded:encoder says no next"),
    ],
)
def test_what_the_encoder_inside_cannot_read_the_language_model_does(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    options: tuple[str, ...],
    said: str,
) -> None:
    quiet = ("--html", str(tmp_path / "x.html"))
    code, out, err = run(capsys, "look", text, *quiet, *options)
    assert code == 0 and err.startswith(said), err
    assert (0, out) == run(capsys, "look", text, *quiet, *options, "-m", "embedded:lm")[:2]
    assert out.startswith("embedded:lm: ")
    with pytest.warns(UserWarning, match=re.escape(said)):
        assert regard.look(text, effect="--effect" in options).model == "embedded:lm"


def test_a_masked_word_and_a_text_to_be_cut_are_the_encoders(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quiet = ("--html", str(tmp_path / "x.html"))
    for text, option in (("It was [MASK].", "--effect"), ("it was late " * 50, "--truncate")):
        code, out, err = run(capsys, "look", text, option, *quiet)
        assert code == 0 and out.startswith("embedded:encoder: "), err


def test_words_that_a_model_does_not_know_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quiet, text = ("--html", str(tmp_path / "x.html")), "Two 猫 sang to me."
    said = "embedded:encoder does not know 1 of 8 tokens: they are all one to it"
    code, _, err = run(capsys, "look", text, *quiet)
    assert code == 0 and err.splitlines()[0] == said
    with pytest.warns(UserWarning, match=said):
        regard.look(text)
    assert "does not know" not in run(capsys, "look", text, *quiet, "--model", "embedded:lm")[2]
    assert "does not know" not in run(capsys, "look", SENTENCE, *quiet)[2]


def test_long_work_is_told_in_one_line_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("regard.cli.progress.MANY", 16)
    quiet = ("--html", str(tmp_path / "x.html"))
    code, long, err = run(capsys, "look", SENTENCE, *quiet)
    assert code == 0 and err.splitlines()[0] == "reading 16 tokens ..." and err.count("\n") == 2
    err = run(capsys, "translate", "--look", "The cat sat on the mat.", *quiet)[2]
    assert "tokens again ...\n" in err
    monkeypatch.setattr("regard.cli.progress.MANY", 17)
    code, short, err = run(capsys, "look", SENTENCE, *quiet)
    assert (code, short) == (0, long) and "reading" not in err


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    notes = Console(file=page, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr("regard.cli.progress.MANY", 13)
    subject = own_subject(regard.load("embedded:lm"), "embedded:lm")
    told: list[tuple[float, float | None]] = []
    update = Progress.update

    def follow(bar: Progress, task: TaskID, **given: Any) -> None:
        update(bar, task, **given)
        told.append((bar.tasks[0].completed, bar.tasks[0].total))

    monkeypatch.setattr(Progress, "update", follow)
    record = see_showing(subject, SENTENCE, notes)
    assert told == [(n, 8) for n in range(1, 9)]
    drawn = page.getvalue()
    assert "reading 13 tokens" in drawn and "0/8" in drawn and drawn.endswith("\x1b[2K")
    assert digest_of(record) == digest_of(see(subject, SENTENCE))


def test_a_translation_tells_of_all_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.cli.progress.MANY", 7)
    told: list[int] = []
    monkeypatch.setattr(Progress, "update", lambda *args, completed: told.append(completed))
    model = regard.load("embedded:translate")
    notes = Console(file=io.StringIO(), force_terminal=True)
    progress = partial(showing, notes, again=True)
    record = see_translation(model, "m", "The cat sat.", "猫が座った。", None, progress)
    n_places = len(model.config.encoder) + 2 * len(model.config.decoder)
    assert told == list(range(1, n_places + 1)) and len(record.places) == n_places


def test_translate_look_shows_neko_at_cat(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "cat.html"
    code, out, _ = run(
        capsys, "translate", "--look", "The cat sat on the mat.", "--html", str(page)
    )
    assert code == 0 and out.startswith("猫はマットに座った。\n")
    aligned = [line.split()[:3] for line in out.splitlines() if "→" in line]
    assert ["猫", "→", "cat"] in aligned and ["座", "→", "sat"] in aligned
    assert page.stat().st_size > 10_000


def test_view_refuses_what_is_no_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.regard"
    bad.write_bytes(b"no record at all")
    for given in ((str(bad),), (str(tmp_path / "gone.regard"),), (str(bad),) * 3):
        code, out, err = run(capsys, "view", *given)
        assert (code, out) == (2, "") and err.count("\n") == 1


def test_a_text_that_is_cut_keeps_its_end_signs_and_its_words() -> None:
    """As of a BERT: [CLS] stays at the beginning, [SEP] at the end, whatever is left out."""
    labels = ["[CLS]", "The", "cat", "sat", "on", "mats", "[SEP]"]
    spans = [(0, 0), (0, 3), (4, 7), (8, 11), (12, 14), (15, 19), (0, 0)]
    said = Said([101, 5, 6, 7, 8, 9, 102], labels, spans).first(5)
    assert said.ids == [101, 5, 6, 7, 102]
    assert said.labels == ["[CLS]", "The", "cat", "sat", "[SEP]"]
    assert said.covered("The cat sat on mats") == "The cat sat"
    unknown = Said([1, 2, 3], ["a", "b", "c"], None).first(2)
    assert unknown.ids == [1, 2] and unknown.covered("abc") == "abc"


def test_the_beginning_of_a_long_text_is_what_the_model_reads_of_it_alone() -> None:
    text = "The cat sat on the mat and saw the dog. " * 60
    record = regard.look(text, "embedded:lm", truncate=True)
    assert len(record.tokens) == 512 == record.trained_len
    again = regard.look(record.text, "embedded:lm")
    assert again.tokens == record.tokens and text.startswith(record.text)
    for place in (0, 7):
        np.testing.assert_array_equal(again.rows(place, 3, 511), record.rows(place, 3, 511))
    with pytest.raises(ValueError, match="an encoder–decoder; leave it out"):
        regard.look("The cat sat.", "embedded:translate", truncate=True)


def test_a_language_model_is_kept_saying_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model = regard.load("embedded:lm")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    record = regard.look(SENTENCE, model)
    found = record.next_tokens()
    ids = torch.tensor([tokenizer.encode(SENTENCE).ids])
    with torch.no_grad():
        chances = model(ids).logits[0].double().softmax(-1)
    assert found is not None and record.vocabulary is not None
    assert found.probs == pytest.approx(chances.topk(5).values.numpy(), abs=1e-5)
    came = chances[torch.arange(ids.shape[1] - 1), ids[0, 1:]].numpy()
    assert found.given[1:] == pytest.approx(came, abs=1e-5)
    names = {n: tokenizer.decode([n], skip_special=False) for n in record.vocabulary}
    assert record.vocabulary == names
    monkeypatch.setattr("regard._look.MOST_LOGITS", 100)
    unsaid = regard.look(SENTENCE, model)
    assert unsaid.next_tokens() is None and unsaid.tokens == record.tokens


def test_a_translation_is_kept_with_what_could_have_come_next() -> None:
    record = regard.look("The cat sat on the mat.", "embedded:translate")
    found = record.next_tokens()
    assert found is not None and len(found.given) == len(record.tokens)
    assert np.isnan(found.given[0]) and (found.given[1:] > 0.05).mean() > 0.5


def test_the_lengths_of_values_are_kept_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for options, kept in (([], False), (["--values"], True)):
        path = tmp_path / f"{kept}.regard"
        code, _, err = run(
            capsys, "look", SENTENCE, *options, "--save", str(path), "--html", f"{path}.html"
        )
        assert code == 0, err
        found = Record.open(path).value_norms(3)
        assert (found is not None) == kept
    again = regard.look(SENTENCE, values=True).value_norms(3)
    assert found is not None and again is not None
    np.testing.assert_array_equal(found, again)
    norms = regard.look("The cat sat.", "embedded:translate", values=True).value_norms(0)
    assert norms is not None and (norms > 0).all()


def test_what_heads_are_worth_is_told_under_the_digest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = SENTENCE.removesuffix(" tired.")
    page, saved = tmp_path / "page.html", tmp_path / "x.regard"
    options = ["--effect", "--edge", "it", "animal", "--html", page, "--save", saved]
    options += ["--model", "embedded:lm"]
    code, out, err = run(capsys, "look", text, *options)
    assert code == 0, err
    model = regard.load("embedded:lm")
    found, look = regard.effect(model, text), regard.effect(model, text, edges=("it", "animal"))
    kept = [effect.whole for effect in Record.open(saved).effects()]
    assert kept == pytest.approx([found.whole, look.whole])
    assert '"edit":"forbidding it \\u2192 animal in a head"' in page.read_text()
    again = run(capsys, "view", saved, "--html", page)
    assert again[0] == 0 and again[1] == out and look.title in out
    told = out.split(look.title)[0]
    assert told.rstrip().endswith(f"all heads {found.whole:+.3f}")
    out = told.rstrip() + "\n"
    told = out.split(found.title + "\n")[1].splitlines()
    layer, head, change = found.top(1)[0]
    assert told[0] == f"  {f'{layer}.{head}':<8}  {change:+.3f} {'█' * 10}"
    assert len(told) == 9 and told[-1] == f"  all heads {found.whole:+.3f}"
    shaded = io.StringIO()
    write_effect(found, Console(file=shaded, force_terminal=True, color_system="truecolor"))
    assert f"48;2;{';'.join(map(str, DEEP_RGB))}m {change:+.3f}" in shaded.getvalue()
    speechless = replace(own_subject(regard.load("embedded:lm"), "reader"), module=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reader has no head that predicts tokens"):
        check_effect(replace(speechless, tokenizer=None), text, "refuse", None)
    code, _, err = run(capsys, "look", text, "--edge", "it", "dog", "--html", page)
    assert code == 2 and "no word of the text is 'dog'" in err
