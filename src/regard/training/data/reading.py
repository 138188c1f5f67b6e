"""Read files into documents or sentence pairs, and report every fault before training starts.

How: a file is read whole, unpacked (.gz, .xz), checked as bytes and decoded as UTF-8; then it is
split into documents or pairs. Data that must be a mistake raises `BadData`, a sentence that names
the file, the line, what was found, what was expected and what to do. Harmless faults (empty lines,
CRLF, repeats) are counted and reported once each in `notices`. Lines end at "\n" alone; other
characters at which Python splits lines are text, else two parallel files could get out of step.

Left out: guessing at encodings, CSV with its quotes, files larger than memory, folders in folders.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from regard._files import is_text

LONG_LINE = 1_000_000  # characters; longer lines of running text are reported
LONG_SIDE = 10_000  # characters of one side of a pair beyond which the pair is left out
MISSING_TABS = 0.1  # with a larger share of lines without a tab, a file is not one of pairs

_JSON = (".jsonl", ".json", ".ndjson")
_TEXT = (".txt", ".text")
_UNPACK = {".gz": gzip.decompress, ".xz": lzma.decompress}
# The longer marks first: that of UTF-32-LE begins with that of UTF-16-LE.
_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}
_MARKS |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
# First bytes of files that are no text but often given as such: what they are, and what to do.
_NO_TEXT = {
    b"\x1f\x8b": ("packed by gzip", "rename it to {}.gz"),
    b"\xfd7zXZ\0": ("packed by xz", "rename it to {}.xz"),
    b"BZh": ("packed by bzip2", "unpack it first"),
    b"(\xb5/\xfd": ("packed by zstd", "unpack it first"),
    b"PK\x03\x04": ("a zip archive, as .docx and .epub are", "unpack it, or save it as plain text"),
    b"%PDF": ("a PDF", "take its text out first, for example with pdftotext"),
}
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class BadData(ValueError):
    """Data that must be a mistake: one sentence with the file, the fault, and what to do."""


@dataclass(frozen=True)
class Notice:
    """Something about the data that its owner should know, and how often it occurred."""

    text: str
    count: int


@dataclass(frozen=True)
class Documents:
    texts: list[str]
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations: `targets[i]` belongs to `sources[i]`."""

    sources: list[str]
    targets: list[str]
    notices: tuple[Notice, ...] = ()


def read_documents(
    path: str | os.PathLike[str], *, field: str = "text", separator: str | None = "<|endoftext|>"
) -> Documents:
    """Read the documents of a file, or of all files in a folder in the order of their names.

    A text file is one document, or several, separated by lines that consist of `separator`. A
    .jsonl file has one document per line, under `field`. Both may be packed as .gz or .xz.
    """
    tally = _Tally()
    texts: list[str] = []
    root = Path(path)
    for file in _files(root, tally):
        text = _read(file, tally)
        if not text.strip():
            tally.add("file", "empty", file.name)
        elif _kind(file) in _JSON:
            texts += [row[field] for _, row in _objects(text, file, (field,), tally)]
        else:
            texts += _split(text, separator, file, tally)
    if not texts:
        raise BadData(f"{root}: there is no text in it; expected at least one document")
    return Documents(texts, (*tally.notices(), *_remarks(texts)))


def read_pairs(
    path: str | os.PathLike[str],
    *,
    target_path: str | os.PathLike[str] | None = None,
    fields: tuple[str, str] = ("source", "target"),
) -> Pairs:
    """Read the pairs of a file: one per line, separated by a tab, or .jsonl with two `fields`.

    With `target_path` they are in two files: line n of one belongs to line n of the other. All may
    be packed as .gz or .xz. White space around a sentence is stripped.
    """
    file, tally = Path(path), _Tally()
    rows: Iterable[tuple[str, str, str]]
    if target_path is not None:
        rows = _parallel(file, Path(target_path), tally)
    elif _kind(file) in _JSON:
        text, (one, other) = "\n".join(_lines(file, tally)), fields
        rows = ((at, row[one], row[other]) for at, row in _objects(text, file, fields, tally))
    elif _kind(file) == ".csv":
        raise BadData(f"{file}: CSV is not read; write one pair a line, with a tab between")
    else:
        rows = _tab_pairs(file, tally)
    sources, targets = [], []
    for where, source, target in rows:
        source, target = source.strip(), target.strip()
        if not source and not target:
            tally.add("line", "empty and left out", where)
        elif not source or not target:
            tally.add("pair", "empty on one side and left out", where)
        elif max(len(source), len(target)) > LONG_SIDE:
            tally.add("pair", f"longer than {LONG_SIDE:,} characters and left out", where)
        else:
            if source == target:
                tally.add("pair", "the same on both sides (kept)", where)
            sources.append(source)
            targets.append(target)
    if not sources:
        left = "; ".join(notice.text for notice in tally.notices())
        raise BadData(f"{file}: no pair is left ({left or 'the file is empty'}); expected some")
    both = list(zip(sources, targets, strict=True))
    return Pairs(sources, targets, (*tally.notices(), *_repeats(both, "pair")))


# ---- Faults, counted


@final
class _Tally:
    """Counts how often each fault occurred, and remembers where first."""

    def __init__(self) -> None:
        self._met: dict[tuple[str, str], tuple[int, str]] = {}

    def add(self, unit: str, what: str, where: str, count: int = 1) -> None:
        if count:
            before, first = self._met.get((unit, what), (0, where))
            self._met[unit, what] = before + count, first

    def notices(self) -> tuple[Notice, ...]:
        return tuple(
            Notice(f"{_count(count, unit)} {what}, first: {first}", count)
            for (unit, what), (count, first) in self._met.items()
        )


def _count(count: int, unit: str) -> str:
    return f"1 {unit} was" if count == 1 else f"{count:,} {unit}s were"


def _repeats(items: Sequence[Any], unit: str) -> list[Notice]:
    """Notices about a single item, items that are all the same, or some repeated items."""
    count, distinct = len(items), len(set(items))
    if count == 1:
        return [Notice(f"there is 1 {unit} only: enough to try things out, not to learn from", 1)]
    if distinct == 1:
        return [Notice(f"all {count:,} {unit}s are the same: only one thing to learn", count)]
    again = count - distinct
    text = f"{_count(again, unit)} there before, word for word (kept)"
    return [Notice(text, again)] if again else []


def _remarks(texts: Sequence[str]) -> list[Notice]:
    """Notices about the documents as a whole; of a single document its lines are checked."""
    found = [] if len(texts) == 1 else _repeats(texts, "document")
    lengths = [max(map(len, text.split("\n"))) for text in texts]
    n_long = sum(length > LONG_LINE for length in lengths)
    if n_long:
        what = f"{_count(n_long, 'document')} found with lines over {LONG_LINE:,} characters, the "
        found.append(Notice(f"{what}longest has {max(lengths):,} (kept; is it text?)", n_long))
    lines = [line for line in texts[0].split("\n") if line.strip()] if len(texts) == 1 else []
    return found + _repeats(lines, "line") if len(set(lines)) == 1 else found


# ---- Files and bytes


def _kind(file: Path) -> str:
    """The suffix that says what is in a file: ".jsonl" of "a.jsonl.gz"."""
    name = file.with_suffix("") if file.suffix.lower() in _UNPACK else file
    return name.suffix.lower()


def _files(root: Path, tally: _Tally) -> list[Path]:
    if not root.is_dir():
        return [root]
    found = []
    for file in sorted(root.glob("[!.]*"), key=lambda file: file.name):
        if file.is_file() and _kind(file) in (*_TEXT, *_JSON):
            found.append(file)
        else:
            tally.add("entry", "no .txt or .jsonl file and left out", file.name)
    if not found:
        what = f"{root}: a folder without .txt or .jsonl files (or .gz or .xz of these)"
        raise BadData(f"{what}; name the file itself, or rename it")
    return found


def _unpack(file: Path) -> bytes:
    try:
        return _UNPACK.get(file.suffix.lower(), bytes)(file.read_bytes())
    except FileNotFoundError:
        raise BadData(f"{file}: no such file or folder; check the path") from None
    except (gzip.BadGzipFile, lzma.LZMAError, EOFError, zlib.error) as error:
        raise BadData(f"{file}: damaged or cut short ({error}); fetch or pack it again") from error
    except OSError as error:
        raise BadData(f"{file}: cannot be read ({error.strerror}); check the path") from error


def _read(file: Path, tally: _Tally) -> str:
    data = _unpack(file)
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            todo = f"iconv -f {name} -t UTF-8 {file.name} > new.txt"
            raise BadData(f"{file}: is {name}, expected UTF-8; convert it: {todo}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        for start, (what, todo) in _NO_TEXT.items():
            if data.startswith(start):
                what = f"{file}: is {what}, expected text; {todo.format(file.name)}"
                raise BadData(what) from None
        raise BadData(_tell_undecodable(file, data, error)) from error
    if "\0" in text:
        raise BadData(
            f"{file}: {text.count(chr(0)):,} NUL bytes, the first in line "
            f"{_line_of(text, chr(0))}; expected text. Is it UTF-16 (convert it with iconv), or "
            f"no text at all? To remove them: tr -d '\\000' < {file.name} > new.txt"
        )
    if text.startswith("\ufeff"):
        tally.add("byte order mark", "left out", file.name)
        text = text[1:]
    name, end = ("CRLF", "\r\n") if "\n" in text else ("CR", "\r")
    what = f"ended by {name} (read as a plain line end)"
    tally.add("line", what, file.name, text.count(end))
    text = text.replace(end, "\n")
    what = "U+FFFD, what a wrong decoding leaves behind (kept)"
    tally.add("character", what, f"{file.name} line {_line_of(text, _BROKEN)}", text.count(_BROKEN))
    return text


def _line_of(text: str, sign: str) -> int:
    return text.count("\n", 0, text.find(sign)) + 1


def _tell_undecodable(file: Path, data: bytes, error: UnicodeDecodeError) -> str:
    lines = data.split(b"\n")
    n_bad = sum(line.decode("utf-8", "replace").encode("utf-8") != line for line in lines)
    number = data.count(b"\n", 0, error.start) + 1
    byte = data[error.start]
    return (
        f"{file}: {n_bad:,} of {len(lines):,} lines are not UTF-8, the first is line {number} "
        f"(byte 0x{byte:02X}, {bytes([byte]).decode('latin-1')!r} if it is Latin-1); save the file "
        f"as UTF-8, for example: iconv -f LATIN1 -t UTF-8 {file.name} > new.txt"
    )


# ---- Documents and pairs in a text


def _split(text: str, separator: str | None, file: Path, tally: _Tally) -> list[str]:
    """Split a text at its separators; a text without one is kept to the last character."""
    if not separator or separator not in text:
        return [text]
    *pieces, last = re.split(rf"(?m)^{re.escape(separator)}$\n?", text)
    n_inside = text.count(separator) - len(pieces)
    tally.add("separator", "inside a line and read as text", file.name, n_inside)
    # Such files often start or end with a separator: an empty piece there is not reported.
    n_empty = sum(not piece.strip() for piece in pieces[1:])
    tally.add("document", "empty and left out", file.name, n_empty)
    pieces = [piece.removesuffix("\n") for piece in pieces]
    return [piece for piece in (*pieces, last) if piece.strip()]


def _objects(
    text: str, file: Path, fields: tuple[str, ...], tally: _Tally
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the object of each line of JSON, with strings under all `fields`."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}: line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = f"is not JSON ({error}): {line[:60]!r}"
            raise BadData(f"{where} {what}; expected one object a line") from error
        if not isinstance(row, dict):
            raise BadData(f"{where} holds a {type(row).__name__}, expected an object with texts")
        for field in fields:
            _check_field(row, field, where)
        if len(fields) == 1 and not row[fields[0]].strip():
            tally.add("document", "empty and left out", f"{file.name} line {number}")
            continue
        yield f"{file.name} line {number}", row


def _check_field(row: dict[str, Any], field: str, where: str) -> None:
    if field not in row:
        what = f"has no field {field!r} (there: {', '.join(map(repr, list(row)[:9])) or 'none'})"
        raise BadData(f"{where} {what}; name the one with the text")
    value = row[field]
    if not isinstance(value, str):
        raise BadData(f"{where}: {field!r} is a {type(value).__name__}, expected a text")
    if "\0" in value:
        raise BadData(f"{where}: {field!r} has a NUL character in it, expected text; remove it")
    if not is_text(value):
        what = f"{field!r} has half of a UTF-16 pair in it, which is no character"
        raise BadData(f"{where}: {what}; remove it")


def _lines(file: Path, tally: _Tally) -> list[str]:
    """Read the lines of a file; the newline at its end does not start another line."""
    text = _read(file, tally)
    if not text.strip():
        raise BadData(f"{file}: the file is empty; expected one pair a line")
    return text.removesuffix("\n").split("\n")


def _tab_pairs(file: Path, tally: _Tally) -> Iterator[tuple[str, str, str]]:
    lines = _lines(file, tally)
    n_filled = sum(bool(line.strip()) for line in lines)
    bare = [n for n, line in enumerate(lines, start=1) if line.strip() and "\t" not in line]
    if len(bare) > MISSING_TABS * n_filled:
        raise BadData(
            f"{file}: {len(bare):,} of {n_filled:,} lines have no tab, the first is line "
            f"{bare[0]}: {lines[bare[0] - 1][:60]!r}; expected a source, a tab, and its target in "
            "each line. For two parallel files give the second one as target_path"
        )
    for number, line in enumerate(lines, start=1):
        where = f"{file.name} line {number}"
        source, *targets = line.split("\t")
        if line.strip() and not targets:
            tally.add("line", "without a tab and left out", where)
            continue
        if line.strip() and len(targets) > 1:
            tally.add("line", "found with more than two columns (the first two count)", where)
        yield where, source, targets[0] if targets else ""


def _parallel(file: Path, other: Path, tally: _Tally) -> Iterator[tuple[str, str, str]]:
    sources, targets = _lines(file, tally), _lines(other, tally)
    if len(sources) != len(targets):
        what = f"{file} has {len(sources):,} lines and {other} has {len(targets):,}"
        raise BadData(f"{what}; expected as many: line n of the one belongs to line n of the other")
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
        yield f"{file.name} line {number}", source, target
