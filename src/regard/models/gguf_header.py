"""Reads and checks the header of a GGUF file.

Why: the `gguf` package's reader trusts its input: a truncated or malicious file makes it hang, fill
the memory, or fail deep inside. It also makes several arrays for each piece of a vocabulary: for
one of LLaMA 3's size it took 10 s and 600 MB, where this reader takes 0.4 s.

How: one pass over the mapped header: magic, version, counts, keys with their values, tensors with
their shapes and offsets. Every length is compared with the bytes that are left before it is used,
so the pass never goes beyond the file. Tensors must follow each other as the format says. The
`gguf` package provides the sizes of its types and unpacks them. Every fault is a `BadCheckpoint`.

The file: "GGUF", version, number of tensors, number of keys; the keys, each a name, a type and a
value; the tensors, each a name, a shape (fastest axis first), a type and an offset; their bytes.

Left out: version 1 (32-bit lengths, gone since 2023), big-endian files, arrays of arrays, and
models split over several files; each is refused with a reason.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np

from regard._files import Stamp, open_file, spell, spell_path, spell_some, stamp_of
from regard.models.checked import Values
from regard.models.header import BadCheckpoint

MAGIC = b"GGUF"
ALIGNMENT = 32  # unless general.alignment says otherwise
MAX_KEYS = 65_536
MAX_KEY_BYTES = 65_535  # the format's own limit
MAX_TENSORS = 1_000_000
MAX_NAME_BYTES = 1_024
MAX_STRINGS = 4_000_000  # in one array; the largest vocabularies have about 500,000 merges
MAX_AXES = 4  # the format's own limit
AGAIN = "it is torn or damaged: download it again"

FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9
NUMBERS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1")))
NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
"""The format's number types as numpy dtypes."""

Value = str | bool | int | float | list[str] | np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Packed:
    """One tensor of the header: shape in torch's order of axes, `gguf`'s type, and byte range."""

    shape: tuple[int, ...]
    kind: int
    start: int
    n_bytes: int


@dataclass(frozen=True)
class Header:
    metadata: Metadata
    tensors: dict[str, Packed]
    data: mmap.mmap
    stamp: Stamp


@final
class Metadata(Values):
    def words(self, key: str) -> list[str]:
        value = self.get(key, None)
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list of texts")
        return value

    def numbers(self, key: str, n: int) -> list[Any]:
        value = self.get(key, None)
        if not isinstance(value, np.ndarray) or len(value) != n:
            raise self.wrong(key, value, f"a list of {n} numbers")
        found: list[Any] = value.tolist()
        return found

    def token(self, key: str, n_tokens: int) -> int | None:
        """A token id below `n_tokens`; None if absent, or -1 as in old files."""
        value = self.get(key, -1)
        if type(value) is int and value in (-1, 2**32 - 1):
            return None
        return self.count(key, most=n_tokens - 1, least=0)


def read_gguf_header(path: Path) -> Header:
    where = spell_path(path)
    with open_file(path, BadCheckpoint) as file:
        stamp = stamp_of(os.fstat(file.fileno()))
        check_start(file.read(8), where)
        # Mapped with the size that was just read; a mapping stays valid after the file is closed.
        data = mmap.mmap(file.fileno(), stamp[2], access=mmap.ACCESS_READ)
    cursor = Cursor(data, where)
    n_tensors = cursor.number("<Q", "the number of its tensors")
    n_keys = cursor.number("<Q", "the number of its keys")
    cursor.check_count(n_keys, 13, MAX_KEYS, "keys")
    metadata = Metadata(read_keys(cursor, n_keys), where)
    cursor.check_count(n_tensors, 33, MAX_TENSORS, "tensors")
    return Header(metadata, read_tensors(cursor, n_tensors, metadata), data, stamp)


def check_start(first: bytes, where: str) -> None:
    version = int.from_bytes(first[4:], "little")
    if first[:4] != MAGIC:
        what = f"starts with {first[:4]!r}; a GGUF file starts with {MAGIC!r}: convert it again"
    elif len(first) < 8:
        what = f"ends after {len(first)} bytes; {AGAIN}"
    elif int.from_bytes(first[4:], "big") in (2, 3):
        what = "is a big-endian GGUF file; convert it with gguf-convert-endian of the gguf package"
    elif version not in (2, 3):
        what = f"is GGUF version {version}; expected 2 or 3: convert the model to GGUF again"
    else:
        return
    raise BadCheckpoint(f"{where} {what}")


@final
class Cursor:
    """A read position in the mapped header, which never moves past the end of the file."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data, self.where = data, where
        self.offset, self.end = 8, len(data)

    def refuse(self, what: str) -> NoReturn:
        raise BadCheckpoint(f"{self.where}{what}; {AGAIN}") from None

    def step(self, n: int, what: str) -> int:
        start = self.offset
        if n > self.end - start:
            claim = f"{what} would take {n} bytes at {start}"
            self.refuse(f": {claim}, but the file ends at {self.end}")
        self.offset += n
        return start

    def number(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.data, self.step(struct.calcsize(form), what))[0]

    def text(self, what: str, most: int | None = None) -> str:
        n = self.number("<Q", what)
        if most is not None and not 1 <= n <= most:
            self.refuse(f": {what} has {n} bytes; expected 1 to {most}")
        start = self.step(n, what)
        try:
            return self.data[start : start + n].decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f": {what} is not UTF-8 text: {spell(self.data[start : start + 40])}")

    def check_count(self, n: int, n_bytes: int, most: int, what: str) -> None:
        left = self.end - self.offset
        if n > most or n * n_bytes > left:
            claim = f" claims {n} {what}, but {left} bytes are left"
            self.refuse(f"{claim}, and more than {most} are never expected")


def read_keys(cursor: Cursor, n_keys: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for n in range(n_keys):
        key = cursor.text(f"the name of key {n}", MAX_KEY_BYTES)
        if key in found:
            cursor.refuse(f" has the key {spell(key)} twice")
        what = f"the value of {spell(key)}"
        found[key] = read_value(cursor, cursor.number("<I", what), what)
    return found


def read_value(cursor: Cursor, kind: int, what: str) -> Value:
    if kind == STRING:
        return cursor.text(what)
    if kind == ARRAY:
        return read_array(cursor, what)
    if kind not in NUMBERS:
        cursor.refuse(f": {what} has type {kind}, which the format does not have")
    value = read_numbers(cursor, kind, 1, what)[0]
    # The shortest decimal of a float32 is what its writer meant: 1e-05, not 9.9999997e-06.
    plain: Value = float(str(value)) if kind == FLOAT32 else value.item()
    return plain


def read_array(cursor: Cursor, what: str) -> Value:
    """A list of texts, or an array of numbers that is a view of the mapped file."""
    kind, n = cursor.number("<I", what), cursor.number("<Q", what)
    if kind == STRING:
        cursor.check_count(n, 8, MAX_STRINGS, f"texts in {what}")
        return [cursor.text(f"text {i} of {what}") for i in range(n)]
    if kind not in NUMBERS:
        came = "arrays, which are not supported" if kind == ARRAY else f"the unknown type {kind}"
        cursor.refuse(f": {what} is an array of {came}")
    return read_numbers(cursor, kind, n, what)


def read_numbers(cursor: Cursor, kind: int, n: int, what: str) -> np.ndarray[Any, np.dtype[Any]]:
    dtype = np.dtype(NUMBERS[kind])
    start = cursor.step(n * dtype.itemsize, what)
    found = np.frombuffer(cursor.data, dtype, n, start) if n else np.empty(0, dtype)
    if kind != BOOL:
        return found
    if found.max(initial=0) > 1:
        cursor.refuse(f": {what} is {found.max()} where the format has 0 or 1")
    return found.astype(bool)


def read_tensors(cursor: Cursor, n_tensors: int, metadata: Metadata) -> dict[str, Packed]:
    n_parts = metadata.count("split.count", 1, least=0)
    if n_parts > 1:
        what = f"{cursor.where} is one of {n_parts} parts of a model; join them with"
        raise BadCheckpoint(f"{what} llama-gguf-split --merge of llama.cpp, and load the whole")
    alignment = metadata.count("general.alignment", ALIGNMENT)
    if alignment & (alignment - 1):
        cursor.refuse(f": general.alignment is {alignment}; expected a power of two")
    entries = [read_tensor(cursor, n) for n in range(n_tensors)]
    base = align(cursor.offset, alignment)
    found: dict[str, Packed] = {}
    expected = 0
    for name, shape, kind, offset in entries:
        tensor = f": tensor {spell(name)}"
        if name in found:
            cursor.refuse(f"{tensor} is there twice")
        start, n_bytes = base + offset, count_bytes(shape, kind, f"{cursor.where}{tensor}")
        if offset != expected:
            what = f"{tensor} lies at {offset} among the tensors"
            cursor.refuse(f"{what}; expected {expected}, right after the one before it")
        if start + n_bytes > cursor.end:
            end = f"{tensor} would end at byte {start + n_bytes}"
            cursor.refuse(f"{end}, but the file has {cursor.end}")
        found[name] = Packed(shape, kind, start, n_bytes)
        expected = align(offset + n_bytes, alignment)
    if not found:
        raise BadCheckpoint(f"{cursor.where} holds no tensors: it is a vocabulary, not a model")
    check_kinds(found, cursor.where)
    return found


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def read_tensor(cursor: Cursor, n: int) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text(f"the name of tensor {n}", MAX_NAME_BYTES)
    what = f"the entry of tensor {spell(name)}"
    n_axes = cursor.number("<I", what)
    if not 1 <= n_axes <= MAX_AXES:
        cursor.refuse(f": tensor {spell(name)} has {n_axes} axes; expected 1 to {MAX_AXES}")
    sizes = [cursor.number("<Q", what) for _ in range(n_axes)]
    if 0 in sizes:
        cursor.refuse(f": tensor {spell(name)} is empty: {sizes}")
    return name, tuple(reversed(sizes)), cursor.number("<I", what), cursor.number("<Q", what)


def count_bytes(shape: tuple[int, ...], kind: int, tensor: str) -> int:
    gguf = import_gguf()
    try:
        block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        what = f"{tensor} has type {kind}, which the installed gguf package does not know"
        raise BadCheckpoint(f"{what}; take the model in another one, such as Q8_0") from None
    if shape[-1] % block:
        what = f"{tensor} has rows of {shape[-1]} numbers; its type keeps blocks of {block}"
        raise BadCheckpoint(f"{what}; {AGAIN}")
    return math.prod(shape) // int(block) * int(n_bytes)


def check_kinds(tensors: Mapping[str, Packed], where: str) -> None:
    """Refuse types that `gguf` knows but cannot unpack, by unpacking one block of each."""
    gguf = import_gguf()
    for kind in sorted({packed.kind for packed in tensors.values()}):
        named = gguf.GGMLQuantizationType(kind)
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[named][1]), np.uint8)
        try:
            gguf.quants.dequantize(block, named)
        except NotImplementedError:
            users = [name for name, packed in tensors.items() if packed.kind == kind]
            what = f"{where} keeps {spell_some(users)} as {named.name}, which the gguf package"
            raise BadCheckpoint(f"{what} cannot unpack; take it as Q8_0 or F16") from None


def import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        what = "reading a GGUF file needs the gguf package"
        raise ImportError(f"{what}: pip install 'regard[gguf]'") from error
    return gguf
