"""Token ids on disk, memory-mapped: written once, checked when opened, read without a copy.

Why: a corpus is encoded once and read for many epochs; Python lists would take twenty times the
memory.

How: one file. A header of 4096 bytes (magic, then JSON padded with spaces), the ids (two bytes each
if the vocabulary allows, else four), zeros up to a multiple of eight, and the bounds: document d is
`ids[bounds[d] : bounds[d + 1]]`. The header has sizes, the fingerprint of what was encoded, and a
checksum of everything else. `encode_texts` writes such a file, or opens the existing one if it was
made from the same texts with the same tokenizer. The name of a special token that occurs in a text
is encoded as ordinary text.

Left out: packing and batches (`packing.py`, `pairs.py`), appending, several writers of one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from regard._files import open_file, parse_json, replace_file
from regard.tokens import Tokenizer
from regard.training.data.reading import BadData
from regard.training.data.vocabulary import backend_module, one_thread

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Bounds = npt.NDArray[np.int64]

MAGIC = b"regardt\n"
VERSION = 1
HEADER = 4096
SMALL = 65_536  # the largest vocabulary whose ids take two bytes
CHUNK = 1_000_000  # characters encoded at once; a longer text is cut where no id changes by it

_AGAIN = "remove the file, and it will be made again"
# One space between two other characters: byte-level tokenizers start a new word there anyway.
_SEAM = re.compile(r"(?<=\S) (?=\S)")


@final
@dataclass(frozen=True, eq=False, repr=False)
class TokenFile:
    """The ids of many documents, read-only, mapped from a file. Made by `open`."""

    path: Path
    ids: Ids
    bounds: Bounds
    vocab_size: int
    fingerprint: str

    @staticmethod
    def open(path: str | os.PathLike[str]) -> TokenFile:
        """Map the file; a changed or missing byte raises BadData."""
        file = Path(path)
        header = _read_header(file)
        dtype, n_tokens = _dtype(header["vocab_size"]), header["n_tokens"]
        used = n_tokens * dtype.itemsize
        start = used + -used % 8
        size, there = HEADER + start + 8 * (header["n_documents"] + 1), file.stat().st_size
        if size != there:
            raise BadData(f"{file}: has {there:,} bytes, its header tells of {size:,}; {_AGAIN}")
        # A plain array over the mapping: accesses to a np.memmap are slower.
        body = np.asarray(np.memmap(file, np.uint8, mode="r"))[HEADER:]
        expected = header.pop("checksum")
        if _seal(hashlib.sha256(body.data), header) != expected:
            raise BadData(f"{file}: is damaged (its checksum does not fit); {_AGAIN}")
        ids, bounds = body[:used].view(dtype), body[start:].view(np.int64)
        if bounds[0] != 0 or bounds[-1] != n_tokens or (np.diff(bounds) < 0).any():
            raise BadData(f"{file}: the bounds of its documents do not fit its ids; {_AGAIN}")
        return TokenFile(file, ids, bounds, header["vocab_size"], header["fingerprint"])

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def n_documents(self) -> int:
        return len(self.bounds) - 1

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.n_tokens:,} ids, {self.n_documents:,} texts)"


def write_tokens(
    path: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | npt.NDArray[Any]],
    *,
    vocab_size: int,
    fingerprint: str,
) -> TokenFile:
    """Write the documents one after another as they come, and open the file."""
    if type(vocab_size) is not int or not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size is {vocab_size!r}, expected a whole number from 1 to 2**32")
    file = Path(path)
    dtype = _dtype(vocab_size)
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with replace_file(file) as out:
        out.write(b"\0" * HEADER)

        def put(data: bytes) -> None:
            digest.update(data)
            out.write(data)

        bounds = [0]
        for document in documents:
            ids = np.asarray(document, np.int64)
            _check_ids(ids, vocab_size, len(bounds) - 1)
            put(ids.astype(dtype).tobytes())
            bounds.append(bounds[-1] + len(ids))
        put(b"\0" * (-bounds[-1] * dtype.itemsize % 8))
        put(np.array(bounds, np.int64).tobytes())
        header: dict[str, Any] = {"version": VERSION, "vocab_size": vocab_size}
        header |= {"n_tokens": bounds[-1], "n_documents": len(bounds) - 1}
        header["fingerprint"] = fingerprint
        text = json.dumps(header | {"checksum": _seal(digest, header)}).encode()
        if len(text) > HEADER - len(MAGIC):
            raise ValueError(f"the fingerprint has {len(fingerprint):,} characters; too many")
        out.seek(0)
        out.write((MAGIC + text).ljust(HEADER))
    return TokenFile.open(file)


def encode_texts(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    fixed: bool = False,
) -> TokenFile:
    """Encode texts into the file at `path`, each between the ids `before` and `after`.

    fixed: refuse, instead of overwriting, an undamaged file there that was made from other texts.
    """
    file = Path(path)
    if isinstance(texts, str):
        raise TypeError("texts is one text, expected a list of them")
    if not texts:
        raise BadData(f"{file}: there are no texts to encode; expected at least one")
    around = [list(map(int, ids)) for ids in (before, after)]
    how = json.dumps([VERSION, tokenizer.texts["tokenizer.json"], around])
    digest = hashlib.sha256(how.encode())
    for text in texts:
        data = text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    fingerprint = digest.hexdigest()
    if (found := reuse_tokens(file, fingerprint)) is not None:
        return found
    if fixed and is_whole(file):
        raise BadData(
            f"{file}: the run in this folder has read another text, or by another tokenizer; go on "
            "with what it began with, or train into another folder"
        )
    first, last = np.array(before, np.int64), np.array(after, np.int64)
    rows = (np.concatenate((first, ids, last)) for ids in _rows(texts, tokenizer))
    return write_tokens(file, rows, vocab_size=tokenizer.vocab_size, fingerprint=fingerprint)


# ---- The file


def _dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= SMALL else np.uint32)


def _seal(digest: Any, header: dict[str, Any]) -> str:
    """The checksum of all bytes after the header and of the header's other fields."""
    digest.update(json.dumps(header, sort_keys=True).encode())
    return str(digest.hexdigest())


def _read_header(file: Path) -> dict[str, Any]:
    with open_file(file, BadData) as source:
        start = source.read(HEADER)
    if not start.startswith(MAGIC):
        raise BadData(f"{file}: is no file of token ids; name another one")
    try:
        header = parse_json(start[len(MAGIC) :], "it", ValueError)
    except ValueError as error:
        raise BadData(f"{file}: its header is damaged ({error}); {_AGAIN}") from error
    if (version := header.get("version")) != VERSION:
        raise BadData(f"{file}: is of version {version!r}, expected {VERSION}; {_AGAIN}")
    for name in ("vocab_size", "n_tokens", "n_documents", "fingerprint", "checksum"):
        if type(header.get(name)) is not (str if name in ("fingerprint", "checksum") else int):
            raise BadData(f"{file}: its header gives no {name}; {_AGAIN}")
    return header


def _check_ids(ids: npt.NDArray[np.int64], vocab_size: int, number: int) -> None:
    if ids.ndim != 1:
        raise ValueError(f"document {number} has shape {ids.shape}, expected a row of ids")
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        what = f"document {number} has ids from {ids.min()} to {ids.max()}"
        raise BadData(f"{what}; expected 0 to {vocab_size - 1}: it is of another vocabulary")


def reuse_tokens(file: Path, fingerprint: str) -> TokenFile | None:
    """Open the file if it is whole and has this fingerprint, else None; refuse other kinds."""
    if not file.exists():
        return None
    with file.open("rb") as source:
        if source.read(len(MAGIC)) not in (MAGIC, b""):
            raise BadData(f"{file}: is there, and is no file of token ids; name another place")
    with contextlib.suppress(BadData):
        found = TokenFile.open(file)
        return found if found.fingerprint == fingerprint else None
    return None


def is_whole(file: Path) -> bool:
    """Whether the file has undamaged ids, of whatever texts."""
    if not file.exists():
        return False
    with contextlib.suppress(BadData):
        TokenFile.open(file)
        return True
    return False


# ---- Encoding


class _Piece(NamedTuple):
    number: int
    text: str
    is_last: bool


_Encoded = list[tuple[_Piece, npt.NDArray[np.int64]]]


def _rows(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the ids of each text, in order. Two threads encode while the caller writes."""
    backend = backend_module().Tokenizer.from_str(tokenizer.texts["tokenizer.json"])
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    parts: list[npt.NDArray[np.int64]] = []
    chunks = _chunks(texts, _may_cut(tokenizer.texts["tokenizer.json"]))
    with one_thread(), ThreadPoolExecutor(2) as pool:
        for piece, ids in _ahead(pool, backend, chunks):
            parts.append(ids)
            if piece.is_last:
                yield np.concatenate(parts)
                parts = []


def _ahead(
    pool: ThreadPoolExecutor, backend: Any, chunks: Iterable[list[_Piece]]
) -> Iterator[tuple[_Piece, npt.NDArray[np.int64]]]:
    """Yield each piece and its ids, in order, with only a few chunks in flight at a time."""
    waiting: deque[Future[_Encoded]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(_encode_chunk, backend, chunk))
        if len(waiting) > 3:
            yield from waiting.popleft().result()
    for future in waiting:
        yield from future.result()


def _encode_chunk(backend: Any, chunk: list[_Piece]) -> _Encoded:
    try:
        found = backend.encode_batch_fast([p.text for p in chunk], add_special_tokens=False)
    except Exception as error:  # the backend raises nothing more exact
        for piece in chunk:
            for letter in sorted(set(piece.text)):
                try:
                    backend.encode(letter, add_special_tokens=False)
                except Exception:
                    what = f"text {piece.number} has the character {letter!r}, which the vocabulary"
                    todo = "take it out, or train one that has it (kind='bpe' has every character)"
                    raise BadData(f"{what} does not have; {todo}") from error
        span = f"texts {chunk[0].number} to {chunk[-1].number}"
        raise BadData(f"{span}: {error}; see them") from error
    return [(p, np.array(one.ids, np.int64)) for p, one in zip(chunk, found, strict=True)]


def _may_cut(tokenizer_json: str) -> bool:
    """Whether a text can be cut before a space between words without changing its ids."""
    plan = json.loads(tokenizer_json)
    rule = plan.get("pre_tokenizer") or {}
    if rule.get("type") == "BertPreTokenizer":  # it splits at every space itself
        return (plan.get("normalizer") or {}).get("type") in ("BertNormalizer", None)
    may_cut = rule.get("type") == "ByteLevel" and not rule.get("add_prefix_space", True)
    may_cut = may_cut and rule.get("use_regex", True)
    if plan["model"].get("type") == "WordLevel":
        may_cut = rule.get("pattern") == {"Regex": r"[\s\S]"}
    return plan.get("normalizer") is None and bool(may_cut)


def _chunks(texts: Sequence[str], may_cut: bool) -> Iterator[list[_Piece]]:
    chunk: list[_Piece] = []
    size = 0
    for number, text in enumerate(texts):
        start, is_last = 0, False
        while not is_last:
            is_long = may_cut and len(text) - start > CHUNK
            seam = _SEAM.search(text, start + CHUNK) if is_long else None
            end = len(text) if seam is None else seam.start()
            is_last = end == len(text)
            chunk.append(_Piece(number, text[start:end], is_last))
            size += end - start
            if size >= CHUNK:
                yield chunk
                chunk, size = [], 0
            start = end
    if chunk:
        yield chunk
