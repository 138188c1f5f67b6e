"""A record as one file: how it is written, and how a stranger's file is read without harm.

A file is in the safetensors format: 8 bytes with the length of a JSON header, the header, and the
arrays one after the other. The header's metadata holds the record's own JSON as text (`regard`) and
its CRC-32 (`regard.crc`); that JSON lists a CRC-32 for each array. `record.py` tells what is in it.

Nothing in a file is believed. The header is read here with ceilings on every length and on the
depth of its JSON; arrays must lie side by side and fill the file. Each array is checked when it is
first used: its CRC, its type and shape against what its place says, and its numbers against the
range they can have. Whatever is wrong is a `BadRecord`. Nothing is ever run.

Left out: compression, and writing other versions than the newest.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from regard.lens.lazy_weights import Array, BadRecord

VERSION = 1
MAX_HEADER = 1 << 28
MAX_DEPTH = 24
TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "U16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in TYPES.items()}


def write(path: str | os.PathLike[str], told: dict[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write a record beside its place and move it there, so that no half of one is ever seen."""
    laid = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    for name, array in laid.items():
        if array.dtype.newbyteorder("<") not in NAMES:
            raise TypeError(f"a record holds no {array.dtype}, as {name} is")
    told = {**told, "crc": {name: zlib.crc32(array.data) for name, array in laid.items()}}
    text = json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    entries: dict[str, Any] = {
        "__metadata__": {"regard": text, "regard.crc": f"{zlib.crc32(text.encode()):08x}"}
    }
    offset = 0
    for name, array in laid.items():
        entries[name] = {
            "dtype": NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER:
        raise ValueError(f"the record's header has {len(header):,} bytes; at most {MAX_HEADER:,}")
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            file.write(struct.pack("<Q", len(header)))
            file.write(header)
            for array in laid.values():
                file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


class File(Mapping[str, Array]):
    """The arrays of a file by name, mapped into memory and checked when first used."""

    def __init__(self, path: Path, entries: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
        self._path, self._entries = path, entries
        self._checked: set[str] = set()
        self._crc: dict[str, int] = {}

    def __getitem__(self, name: str) -> Array:
        kind, shape, offset = self._entries[name]
        if math.prod(shape) == 0:
            return np.zeros(shape, TYPES[kind])
        try:
            array = np.memmap(self._path, TYPES[kind], "r", offset, shape)
        except (OSError, ValueError) as error:
            raise BadRecord(f"{self._path.name}: {name} cannot be read: {error}") from error
        if name not in self._checked:
            if zlib.crc32(array.data) != self._crc.get(name):
                raise BadRecord(f"{self._path.name}: {name} was damaged: its checksum is another")
            self._checked.add(name)
        return array

    def trust(self, sums: Mapping[str, int]) -> None:
        """The checksums that the arrays must have."""
        self._crc = dict(sums)

    def form(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type and shape of an array, from the header alone."""
        return self._entries[name][:2]

    def __iter__(self) -> Any:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], File]:
    """The record's own JSON and its arrays, checked as far as the header tells."""
    place = Path(path)
    try:
        size = place.stat().st_size
        with open(place, "rb") as file:
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))[0]
            if length > min(MAX_HEADER, size - 8):
                _refuse(place, f"its header claims {length:,} bytes of a file of {size:,}")
            header = file.read(length)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadRecord(f"{place.name} cannot be read: {error}") from error
    entries = parse(header, f"{place.name}: the header")
    if not isinstance(entries, dict):
        _refuse(place, "its header is no object")
    meta = entries.pop("__metadata__", None)
    if not isinstance(meta, dict) or not isinstance(meta.get("regard"), str):
        _refuse(place, "it is a safetensors file, but no record")
    text = meta["regard"].encode("utf-8", "surrogatepass")
    if meta.get("regard.crc") != f"{zlib.crc32(text):08x}" or len(meta) != 2:
        _refuse(place, "its description was damaged: its checksum is another")
    told = parse(text, f"{place.name}: the description")
    if not isinstance(told, dict):
        _refuse(place, "its description is no object")
    found = File(place, _entries(place, entries, 8 + length, size))
    sums = told.pop("crc", None)
    if not isinstance(sums, dict) or set(sums) != set(found):
        _refuse(place, "its list of checksums does not fit its arrays")
    found.trust({name: value for name, value in sums.items() if type(value) is int})
    return told, found


def _entries(
    place: Path, entries: dict[str, Any], begin: int, size: int
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Type, shape and place of each array; they must lie side by side and fill the file."""
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    spans = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            _refuse(place, f"{name[:80]!r} is not described as an array")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
        if not whole or not all(type(x) is int and 0 <= x < 1 << 48 for x in shape + offsets):
            _refuse(place, f"the shape or place of {name[:80]!r} is not made of whole numbers")
        if not isinstance(kind, str) or kind not in TYPES or len(shape) > 4:
            _refuse(place, f"{name[:80]!r} has the type {str(kind)[:20]!r} and {len(shape)} axes")
        if offsets[1] - offsets[0] != math.prod(shape) * TYPES[kind].itemsize:
            _refuse(place, f"{name[:80]!r} does not have the bytes that its shape needs")
        spans.append((offsets[0], offsets[1]))
        found[name] = (kind, tuple(shape), begin + offsets[0])
    at = 0
    for first, last in sorted(spans):
        if first != at:
            _refuse(place, "its arrays do not lie side by side")
        at = last
    if begin + at != size:
        _refuse(place, f"it has {size:,} bytes, and its header tells of {begin + at:,}")
    return found


def parse(text: bytes, what: str) -> Any:
    """JSON of bounded depth, without repeated keys, NaN or infinities; BadRecord for all else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise BadRecord(f"{what} names something twice")
        return made

    def refuse(word: str) -> NoReturn:
        raise BadRecord(f"{what} holds {word}, which is no number")

    def whole(word: str) -> int:
        if len(word) > 20:
            raise BadRecord(f"{what} holds a number of {len(word)} digits")
        return int(word)

    if depth_of(text) > MAX_DEPTH:
        raise BadRecord(f"{what} is nested deeper than {MAX_DEPTH}")
    try:
        return json.loads(
            text.decode(), object_pairs_hook=unique, parse_constant=refuse, parse_int=whole
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadRecord(f"{what} is no JSON: {str(error)[:200]}") from None


def depth_of(text: bytes) -> int:
    """How deep brackets lie in brackets, those in strings left out."""
    marks = np.frombuffer(text, np.uint8)
    quotes = marks == ord('"')
    # A quote is escaped when an odd number of backslashes stands right before it.
    back = marks == ord("\\")
    if back.any():
        index = np.arange(len(marks))
        last_other = np.maximum.accumulate(np.where(back, -1, index))
        run = np.concatenate([[0], (index - last_other)[:-1]])
        quotes &= run % 2 == 0
    outside = np.cumsum(quotes) % 2 == 0
    opens = np.isin(marks, np.frombuffer(b"[{", np.uint8)) & outside
    closes = np.isin(marks, np.frombuffer(b"]}", np.uint8)) & outside
    depth = np.cumsum(opens.astype(np.int32) - closes.astype(np.int32))
    return int(depth.max(initial=0))


def _refuse(place: Path, why: str) -> NoReturn:
    raise BadRecord(f"{place.name} is not a good record: {why}")
