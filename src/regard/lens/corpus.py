"""Stream the texts of a corpus, so that memory does not grow with their number.

How: `read_texts` reads a file line by line. `Hashed` hands out texts in blocks, and hashes all that
it has handed out, so that a resumed survey can check that the texts are the same.

Left out: compressed files, and texts of several lines that are not in JSON.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import final

from regard._files import open_file, parse_json

BOM = codecs.BOM_UTF8


def read_texts(path: Path, key: str = "text") -> Iterator[str]:
    """Yield the texts of a file, one per line; for .jsonl the string under `key` in each line."""
    in_json = path.suffix.lower() == ".jsonl"
    with open_file(path, ValueError) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not in_json:
                yield decode(line, where).rstrip("\r\n")
            elif line.strip():
                entry = parse_json(line.removeprefix(BOM), where, ValueError)
                if key in entry and not isinstance(entry[key], str):
                    raise ValueError(f"{where} has {entry[key]!r:.40} under {key!r}; expected text")
                if key not in entry:
                    known = ", ".join(map(repr, list(entry)[:9])) or "nothing"
                    what = f"has no text under {key!r}, but {known}"
                    raise ValueError(f"{where} {what}; name the key of the text (key, --key)")
                yield entry[key]


def decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        what = f"byte {line[wrong.start]:#04x} is not UTF-8"
        raise ValueError(f"{where}: {what}; convert the file, for example with iconv") from None


def count_lines(path: Path) -> int:
    """Count the lines of a file; the last one may lack a newline."""
    n_lines, last = 0, b"\n"
    with open_file(path, ValueError) as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            n_lines, last = n_lines + piece.count(b"\n"), piece[-1:]
    return n_lines + (last != b"\n")


@final
class Hashed:
    """An iterator over texts, with a running hash of all that were taken so far."""

    def __init__(self, texts: Iterable[str], limit: int | None) -> None:
        self._texts = iter(islice(texts, limit))
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def take(self, n: int) -> list[str]:
        taken = list(islice(self._texts, n))
        for text in taken:
            if not isinstance(text, str):
                raise TypeError(f"a text is a {type(text).__name__}; expected str")
            data = text.encode("utf-8", "surrogatepass")
            self._hash.update(len(data).to_bytes(8, "little") + data)
        return taken

    def pass_over(self, n: int) -> None:
        """Skip the first n texts (or all, if there are fewer); they are hashed too."""
        for first in range(0, n, 256):
            self.take(min(n - first, 256))

    def rounds(self, block: int, n_processes: int) -> Iterator[list[list[str]]]:
        """Yield rounds: one block of texts per process, until the texts run out."""
        while blocks := [texts for _ in range(n_processes) if (texts := self.take(block))]:
            yield blocks
