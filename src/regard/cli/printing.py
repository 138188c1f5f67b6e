"""Words on a terminal: written as they are, and harmless.

Why: what a user types and what a model writes may hold codes that steer the terminal, turn the
order of letters round, or hide.

How: `make_printable` spells such characters out; `write_line` hands a line to rich as plain text;
`refusing` turns an error of the library into one such line; `read_utf8` reads what is given. Each
command makes every word of a user or a model printable first.

Left out: right-to-left scripts are printed as they are; only the marks that change order are
spelled.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Joiners are invisible, but emoji and several scripts are spelled with them.
JOINERS = "\u200c\u200d"
# How torch says it: on a GPU, and, as a RuntimeError like many others, on a CPU.
NO_MEMORY = re.compile(r"out of memory|can't allocate memory")


def make_printable(text: str, encoding: str, kept: str = "") -> str:
    """Spell out each character that would steer the terminal, hide, reorder, or not encode."""

    def spell(char: str) -> str:
        if char.isprintable() or char in JOINERS + kept:
            return char.encode(encoding, "backslashreplace").decode(encoding)
        return char.encode("unicode_escape").decode("ascii")

    return "".join(spell(char) for char in text)


def count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def write_line(console: Console, line: Text | str = "") -> None:
    """Write a line as it is: not wrapped, and never read as markup, emoji codes or highlights."""
    from rich.text import Text

    console.print(line if isinstance(line, Text) else Text(line), soft_wrap=True)


def write_out(text: str, kept: str) -> None:
    """Write to standard output at once, with no end of line of its own."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(make_printable(text, encoding, kept))
    sys.stdout.flush()


def write_or_drop(text: str) -> None:
    """Write to standard output; where its reader has left, as `head` does, that is all right."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer goes nowhere, or the interpreter would stumble at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_utf8(path: Path | None) -> str:
    """The text of a file, or of standard input, which must be UTF-8; lines of Windows too."""
    if path is not None:
        data, where = path.read_bytes(), str(path)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        data, where = sys.stdin.buffer.read(), "standard input"
    else:  # a stand-in that has text already
        return sys.stdin.read()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as wrong:
        line = data.count(b"\n", 0, wrong.start) + 1
        raise ValueError(
            f"{where}, line {line}: byte {data[wrong.start]:#04x} is not UTF-8; convert the text, "
            "for example with iconv -f SHIFT_JIS -t UTF-8"
        ) from None


@contextmanager
def refusing(notes: Console) -> Iterator[None]:
    """What cannot be done is said in one line, and the command left with 2; by Ctrl-C with 130."""
    import typer

    try:
        yield
    except BrokenPipeError:  # the reader has gone, as `head` does; typer leaves without a word
        raise
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as refusal:
        write_line(notes, make_printable(str(refusal), notes.encoding))
        raise typer.Exit(code=2) from None
    except (MemoryError, RuntimeError) as fault:
        if isinstance(fault, RuntimeError) and NO_MEMORY.search(str(fault)) is None:
            raise
        said = make_printable(str(fault).partition("\n")[0][:200], notes.encoding)
        what = "there is not enough memory: give a shorter text, fewer beams, or a smaller model"
        write_line(notes, f"{what} ({said})" if said else what)
        raise typer.Exit(code=2) from None
    except KeyboardInterrupt:
        raise typer.Exit(code=130) from None
