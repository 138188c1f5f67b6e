"""What a checkpoint's files say about themselves, believed only after it has been checked.

Files from the net are torn, half downloaded, or made to hurt. So nothing reads weights before this
module has read the JSON around them: size first, then UTF-8, then JSON with the traps closed (a
key given twice, NaN, endless nesting), then each field's type, then the arithmetic: every tensor's
bytes must be what its shape takes, and all of them together must cover the file, once. A fault of
any kind is one `BadCheckpoint` that names the file, what is there, and what to do. Names found in
files are spelled with escapes and cut, since they too may be made to hurt.

Left out: the values of the weights (NaN, infinities), and what the names mean. The loader judges
those.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

MAX_CONFIG_BYTES = 10_000_000
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit; also used for the index
MAX_DEPTH = 100
MAX_AXES = 64  # where torch's elementwise operations end
MAX_COUNT = 2**63 - 1
NAMES_SHOWN = 5

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class BadCheckpoint(ValueError):
    """A model folder or a file in it is not what it should be; the message says which and why."""


@dataclass(frozen=True)
class Entry:
    """One tensor as the header tells it; `start` and `end` count bytes after the header."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


@dataclass(frozen=True)
class Stamp:
    """Which file this was, so that a later look can tell that it is still the same one."""

    device: int
    inode: int
    size: int
    modified: int

    @staticmethod
    def of(status: os.stat_result) -> Stamp:
        return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


# ---- Words for errors


def _make_speller() -> reprlib.Repr:
    speller = reprlib.Repr()
    speller.maxstring = speller.maxlong = speller.maxother = 80
    speller.maxlist = speller.maxdict = 8
    speller.maxlevel = 2
    return speller


_SPELLER = _make_speller()


def spell(value: object) -> str:
    """Any value from a file, safe to print: escapes for what does not print, and cut short."""
    return _SPELLER.repr(value)


def spell_some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    every = list(names)
    shown = ", ".join(spell(name) for name in every[:NAMES_SHOWN])
    return shown + (f" and {len(every) - NAMES_SHOWN} more" if len(every) > NAMES_SHOWN else "")


def spell_path(path: Path) -> str:
    """A path, safe to print and whole: the end of a long one is what tells most."""
    return repr(str(path))


# ---- Files and JSON


def is_text(word: str) -> bool:
    """Whether the string can be written down at all: JSON's escapes can spell half a character."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_file(path: Path) -> os.stat_result:
    """Refuse what is not there or is no plain file; opening a pipe would wait for ever."""
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise BadCheckpoint(
                f"{spell_path(path)} is a link to {spell(os.readlink(path))}, which is not there; "
                "the download was not finished or its target was deleted: download it again"
            ) from None
        raise BadCheckpoint(f"{spell_path(path)} is missing; download it again") from None
    if not stat.S_ISREG(status.st_mode):
        raise BadCheckpoint(f"{spell_path(path)} is not a file; expected a plain file there")
    return status


def read_small(path: Path, limit: int) -> bytes:
    """All bytes of a file that has no business being larger than `limit`."""
    size = check_file(path).st_size
    if size <= limit:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        size = len(data)
    if size > limit:
        raise BadCheckpoint(
            f"{spell_path(path)} has {size} bytes; expected at most {limit} of JSON. "
            "This is some other file under that name: download the right one"
        )
    return data


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`, with every trap of JSON closed; `where` names it in errors."""

    def refuse(what: str) -> NoReturn:
        raise BadCheckpoint(f"{where} {what}") from None

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                refuse(f"has the key {spell(key)} twice; delete the one that is wrong")
            found[key] = value
        return found

    def to_float(digits: str) -> float:
        number = float(digits)
        if number in (float("inf"), float("-inf")):
            refuse(f"has the number {spell(digits)}, which is too large for a float")
        return number

    def no_constant(word: str) -> NoReturn:
        refuse(f"has {word} as a value, which is not JSON; write a finite number or null")

    if data.startswith(b"\xef\xbb\xbf"):
        refuse("starts with a byte order mark; save it as UTF-8 without one")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=to_dict,
            parse_float=to_float,
            parse_constant=no_constant,
        )
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 text (byte {error.start}); expected JSON in UTF-8")
    except RecursionError:
        refuse(f"is nested too deep; expected at most {MAX_DEPTH} levels")
    except BadCheckpoint:
        raise
    except ValueError as error:
        refuse(f"is not JSON: {error}; it is damaged or some other file, download it again")
    if not isinstance(value, dict):
        refuse(f"is a JSON {type(value).__name__}, {spell(value)}; expected an object, {{...}}")
    _check_tree(value, refuse)
    return value


def _check_tree(value: object, refuse: Any) -> None:
    """Refuse nesting that others would stumble over, and half characters that cannot be printed."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            refuse(f"is nested too deep; expected at most {MAX_DEPTH} levels")
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.keys())
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str) and not is_text(item):
                refuse(f"has half a character (a lone surrogate) in {spell(item)}")
        level = below


# ---- The header of one safetensors file


def read_header(path: Path) -> tuple[dict[str, Entry], Stamp]:
    """Every tensor that one safetensors file holds, in the order of its header, all checked.

    The file is 8 bytes that give the header's length, the header (JSON), and the tensors' bytes.
    """
    check_file(path)
    where = spell_path(path)
    with path.open("rb") as file:
        stamp = Stamp.of(os.fstat(file.fileno()))
        first = file.read(8)
        if len(first) < 8:
            raise BadCheckpoint(
                f"{where} has {len(first)} bytes; expected a safetensors file, which starts with 8 "
                "bytes for the length of its header. It is empty or torn: download it again"
            )
        length = int.from_bytes(first, "little")
        if length > MAX_HEADER_BYTES:
            _refuse_other_formats(first, where)
            raise BadCheckpoint(
                f"{where} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are "
                "allowed. It is damaged or not a safetensors file"
            )
        if length > stamp.size - 8:
            raise BadCheckpoint(
                f"{where} claims a header of {length} bytes, but only {stamp.size - 8} follow; "
                "it is torn or not a safetensors file: download it again"
            )
        data = file.read(length)
    header = parse_object(data, f"the header of {where}")
    _check_metadata(header.pop("__metadata__", {}), where)
    entries = {name: _parse_entry(name, entry, where) for name, entry in header.items()}
    _check_cover(entries, stamp.size - 8 - length, where)
    return entries, stamp


def _refuse_other_formats(first: bytes, where: str) -> None:
    """Three things are often found under a weight file's name; say which it is."""
    if first == b"version ":
        raise BadCheckpoint(
            f"{where} is a Git LFS pointer, not the weights; run `git lfs pull` in the folder"
        )
    if first[:4] == b"PK\x03\x04" or (first[0] == 0x80 and first[1] in (2, 3, 4, 5)):
        raise BadCheckpoint(
            f"{where} is a pickle under another name; loading a pickle runs code, so it is refused"
        )
    if first[:4] == b"GGUF":
        raise BadCheckpoint(f"{where} is a GGUF file under another name; name it *.gguf")


def _check_metadata(metadata: object, where: str) -> None:
    if not isinstance(metadata, dict):
        raise BadCheckpoint(
            f"{where} has {spell(metadata)} as __metadata__; expected an object of strings"
        )
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise BadCheckpoint(
                f"{where} has {spell(value)} under {spell(key)} in its __metadata__; "
                "expected strings only"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _parse_entry(name: str, entry: object, where: str) -> Entry:
    """One tensor of the header, with its types, its shape and the number of its bytes checked."""
    tensor = f"{where}: tensor {spell(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadCheckpoint(
            f"{tensor} is told by {spell(entry)}; expected an object with dtype, shape and "
            "data_offsets"
        )
    dtype = _parse_dtype(entry["dtype"], tensor)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise BadCheckpoint(
            f"{tensor} has the shape {spell(shape)}; expected a list of whole numbers from 0 to "
            f"{MAX_COUNT}"
        )
    if len(shape) > MAX_AXES:
        raise BadCheckpoint(f"{tensor} has {len(shape)} axes; expected at most {MAX_AXES}")
    # Empty axes count as 1, so that a 0 cannot hide sizes whose strides would overflow.
    takes = extent = dtype.itemsize
    for size in shape:
        takes, extent = takes * size, extent * max(size, 1)
    if extent > MAX_COUNT:
        raise BadCheckpoint(f"{tensor} has the shape {spell(shape)}: more than any file can hold")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise BadCheckpoint(
            f"{tensor} has the data_offsets {spell(offsets)}; expected two whole numbers, from 0 up"
        )
    start, end = offsets
    if end - start != takes:
        raise BadCheckpoint(
            f"{tensor} has the data_offsets {spell(offsets)}, {end - start} bytes, but the shape "
            f"{spell(shape)} of {entry['dtype']} takes {takes}"
        )
    return Entry(tuple(shape), dtype, start, end)


def _parse_dtype(word: object, tensor: str) -> torch.dtype:
    if isinstance(word, str) and word in DTYPES:
        return DTYPES[word]
    if isinstance(word, str) and word.startswith(("F8", "F6", "F4")):
        raise BadCheckpoint(
            f"{tensor} has the type {spell(word)}, a quantised one whose values mean nothing "
            "without scales kept elsewhere; convert the checkpoint to BF16, F16 or F32 first"
        )
    raise BadCheckpoint(
        f"{tensor} has the type {spell(word)}, which is not known; known are {', '.join(DTYPES)}"
    )


def _check_cover(entries: dict[str, Entry], size: int, where: str) -> None:
    """The tensors' bytes lie one after the other, without gap or overlap, to the file's end."""
    reached, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < reached:
            raise BadCheckpoint(
                f"{where}: tensors {spell(before)} and {spell(name)} overlap in the bytes "
                f"{entry.start} to {min(reached, entry.end)}; each must have its own"
            )
        if entry.start > reached:
            raise BadCheckpoint(
                f"{where}: the bytes {reached} to {entry.start}, before tensor {spell(name)}, "
                "belong to no tensor; nothing may be hidden there"
            )
        reached, before = entry.end, name
    if reached > size:
        raise BadCheckpoint(
            f"{where} is torn: the header promises {reached} bytes of tensors, {size} are there; "
            "download it again"
        )
    if reached < size:
        raise BadCheckpoint(
            f"{where}: the last {size - reached} of {size} bytes belong to no tensor; "
            "the header is damaged or something was appended"
        )
