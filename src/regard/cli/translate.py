"""`regard translate`: a sentence, a text, or a file of lines in another language.

Why: the package carries a translator; one line should show what it does, offline.

How: `regard.translate` does the work. A text on the command line comes back as one text; of a file
or standard input each line comes back as one line, written as soon as it is done, so that a long
file can be watched and cut off. Lines without letters stay as they are. What it took goes to
standard error, and on the way how far it is.

Left out: choosing among several translations.
"""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

from regard._look import see_translation
from regard.cli.loading import few_threads, is_small, load_model
from regard.cli.look import show_page, tell
from regard.cli.outputs import check_outputs
from regard.cli.printing import read_utf8, refusing, write_line, write_out
from regard.cli.progress import showing

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from regard.models import Transformer

DEFAULT_MODEL = "embedded:translate"
LINES_AT_ONCE = 64
SHORT = 500  # characters; a longer text fills several threads
NEWS_SECONDS = 3.0  # between two lines that say how far it is
KEPT = "\n\t\u3000"  # the space of Japanese texts is no trick
TRANSLATE_HELP = """Translate English to Japanese and Japanese to English.

Examples:

  regard translate "The cat sat on the mat."

  regard translate 猫がマットの上に座った。

  regard translate --from-file letter.txt --to ja > letter.ja.txt

  cat lines.txt | regard translate -

  regard translate --look "The cat sat on the mat."

  regard translate --model ./opus-mt-en-de "The cat sat on the mat."

A text with Japanese letters (kanji, hiragana, katakana) is translated to English, one with Latin
letters to Japanese; --to names the language. A text of several sentences is translated sentence by
sentence. A file, or standard input for "-", has one sentence a line, and gives one line for each.

Without --model it is the small translator inside the package, embedded:translate, which needs no
network. MODEL may be any encoder–decoder in Hugging Face's layout (Marian, T5, one that you
trained): it reads the text as it is and does what it was trained for.

The translation goes to standard output, the time it took to standard error. The same command gives
the same text.
"""


@final
class Counter:
    """Sentences translated so far; says how far it is on `notes`, now and then."""

    def __init__(self, notes: "Console", n_lines: int | None = None) -> None:
        """n_lines: of a file, whose lines are counted instead of sentences."""
        self._notes, self._n_lines = notes, n_lines
        self._lines = self._part = self._before = self._sentences = 0
        self._start = self._said = time.perf_counter()

    def begin(self, first: int, n_lines: int) -> None:
        self._lines, self._part, self._before = first, n_lines, self._sentences

    def __call__(self, done: int, total: int) -> None:
        """`done` sentences of `total` in this call of `translate`."""
        self._sentences = self._before + done
        reached, end, what = float(done), total, "sentences"
        if self._n_lines is not None:
            reached, end, what = self._lines + self._part * done / total, self._n_lines, "lines"
        now = time.perf_counter()
        if reached < end and now - self._said >= NEWS_SECONDS:
            self._said, spent = now, now - self._start
            far = f"{int(reached):,} of {end:,} {what} in {spent:.0f} s"
            left = spent * (end / reached - 1)
            write_line(self._notes, f"{far}, about {left:.0f} s left")

    def close(self, beams: int) -> None:
        spent = time.perf_counter() - self._start
        counted = f"{self._sentences:,} sentence" + ("" if self._sentences == 1 else "s")
        searched = f"{beams} beams" if beams > 1 else "greedy"
        write_line(self._notes, f"{counted} in {spent:.2f} s, {searched}")


def translate_text(
    model: "Transformer", text: str, notes: "Console", to: str | None, beams: int
) -> str:
    from regard.generation import translate
    from regard.generation.sentences import find_language

    counter = Counter(notes)
    translation = translate(model, text, to, beams=beams, progress=counter)
    write_out(f"{translation}\n", kept=KEPT)
    if to is not None and to == find_language(text):
        write_line(notes, f"The text looks like {to} already; it was translated as --to asked.")
    counter.close(beams)
    return translation


def translate_lines(
    model: "Transformer", lines: Sequence[str], notes: "Console", to: str | None, beams: int
) -> None:
    from regard.generation import translate
    from regard.generation.sentences import has_letters

    if not any(map(has_letters, lines)):
        what = f"there are no letters in the {len(lines):,} lines"
        raise ValueError(f"{what}, so there is nothing to translate")
    counter = Counter(notes, len(lines))
    for first in range(0, len(lines), LINES_AT_ONCE):
        part = lines[first : first + LINES_AT_ONCE]
        texts = [line for line in part if has_letters(line)]
        counter.begin(first, len(part))
        try:
            translated = iter(translate(model, texts, to, beams=beams, progress=counter))
        except ValueError as refusal:
            raise ValueError(f"in lines {first + 1} to {first + len(part)}: {refusal}") from None
        for line in part:
            write_out((next(translated) if has_letters(line) else line) + "\n", kept=KEPT)
    counter.close(beams)


def read_lines(path: Path | None) -> list[str]:
    text, where = read_utf8(path), "standard input" if path is None else str(path)
    lines = text.removesuffix("\n").split("\n")
    if not text.strip():
        raise ValueError(f"{where} is empty; expected one sentence a line")
    return [line.removesuffix("\r") for line in lines]


def add_translate(app: "typer.Typer") -> None:
    from rich.console import Console
    from typer import Argument, Option

    @app.command("translate", help=TRANSLATE_HELP)
    def translate_command(
        text: Annotated[
            list[str] | None, Argument(help='The text; "-" reads lines of standard input.')
        ] = None,
        to: Annotated[
            str | None, Option(help="ja or en; by default the other language than the text's.")
        ] = None,
        model: Annotated[
            str, Option("--model", "-m", help="Folder or hub name of an encoder–decoder.")
        ] = DEFAULT_MODEL,
        beams: Annotated[int, Option(help="Number of beams; 1 is greedy.")] = 5,
        from_file: Annotated[Path | None, Option(help="Translate the lines of this file.")] = None,
        look: Annotated[bool, Option("--look", help="Show which word looks at which.")] = False,
        html: Annotated[Path | None, Option(help="With --look: write the page here.")] = None,
        device: Annotated[
            str | None, Option(help="cpu, cuda, ...; by default a GPU, if there is one.")
        ] = None,
    ) -> None:
        notes = Console(stderr=True)
        with refusing(notes):
            whole = " ".join(text or ())
            check_outputs({"--html": html})
            if from_file is not None and text:
                raise ValueError("give a text or --from-file, not both")
            if html is not None and not look:
                raise ValueError("--html is where --look writes its page: give --look too")
            if from_file is not None or text == ["-"]:
                if look:
                    raise ValueError("--look shows one text: give it on the command line")
                lines = read_lines(from_file)
                loaded = load_model(model, notes, device=device)
                translate_lines(loaded, lines, notes, to, beams)
                return
            if not whole.strip():
                raise ValueError('the text is empty; try: regard translate "The cat sat."')
            loaded = load_model(model, notes, device=device)
            with few_threads(len(whole) < SHORT and is_small(loaded)):
                translation = translate_text(loaded, whole, notes, to, beams)
                if look:
                    progress = partial(showing, notes, again=True)
                    seen = see_translation(loaded, model, whole, translation, to, progress)
                    server = show_page(seen, notes, html=html)
                    write_line(Console())
                    tell(seen, server)
