"""Reading and writing of all files: bounded, checked, and atomic.

Files from the net may be truncated, damaged or malicious. So only regular files are opened (a pipe
would block for ever), sizes are limited, the nesting and the values of JSON are counted before it
is parsed, its pitfalls are refused (duplicate keys, NaN, lone surrogates), and the safetensors
library checks the headers of its files. A checksum is verified (`check_crc`) before what it covers
is parsed. Each reader is given `error`, the exception class to raise for any fault of a file.

Writing is atomic: into a temporary file beside the target whose name starts with `.regard-`, which
is flushed to disk and renamed.

Left out: what the bytes mean, and replacing several files as one (`models.save_folder`). Nothing
here needs torch; numpy and safetensors are imported where used.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import reprlib
import secrets
import shutil
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

Error = type[Exception]
Json = dict[str, Any]
Stamp = tuple[int, int, int, int]

MARK = ".regard-"
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
MAX_DEPTH = 100
MAX_VALUES = 2_000_000

_NEW = MARK + "new-"
_PIECE = 1 << 20
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'"[]{},')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PICKLE = "a pickle under another name; loading a pickle runs code, so it is refused"
_OTHER_FORMATS = {
    b"version ": "a Git LFS pointer, not the file itself; run `git lfs pull` in the folder",
    b"GGUF": "a GGUF file under another name; name it *.gguf",
    b"PK\x03\x04": _PICKLE,
    **{bytes((0x80, protocol)): _PICKLE for protocol in (2, 3, 4, 5)},
}


_SPELLER = reprlib.Repr()
_SPELLER.maxstring = _SPELLER.maxlong = _SPELLER.maxother = 80
_SPELLER.maxlist = _SPELLER.maxdict = 8
_SPELLER.maxlevel = 2


def spell(value: object) -> str:
    """Any value from a file, safe to print: shortened, with unprintable characters escaped."""
    return _SPELLER.repr(value)


def spell_some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    every = list(names)
    return ", ".join(map(spell, every[:5])) + (f" and {len(every) - 5} more" if every[5:] else "")


def spell_path(path: Path) -> str:
    """A path, safe to print and not shortened, since its end says most."""
    return repr(str(path))


def is_text(word: str) -> bool:
    """Whether a string can be encoded: JSON's escapes can spell lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


# ---- Reading


def stamp_of(status: os.stat_result) -> Stamp:
    """Identifies a file and its state, to check later that it is still the same one."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def open_file(path: Path, error: Error) -> Iterator[BinaryIO]:
    """Open a regular file for reading; an OSError inside the `with` is raised as `error` too."""
    where = spell_path(path)
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(None, "it is not a plain file")
            yield file
    except FileNotFoundError:
        target = f" (a link to {spell(os.readlink(path))})" if path.is_symlink() else ""
        raise error(f"{where}{target} is missing; get it again") from None
    except OSError as fault:
        raise error(f"{where} cannot be read: {fault.strerror or fault}") from fault


def read_bytes(path: Path, limit: int, error: Error) -> bytes:
    """All bytes of a file; `error` if it is larger than `limit`."""
    with open_file(path, error) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        what = f"{spell_path(path)} has more than {limit} bytes, the most that it may have"
        raise error(f"{what}. This is some other file under that name: get the right one")
    return data


def read_json(path: Path, limit: int, error: Error) -> Json:
    """The JSON object in a file of at most `limit` bytes."""
    return parse_json(read_bytes(path, limit, error), spell_path(path), error)


def check_crc(data: Any, expected: object, where: str, error: Error) -> None:
    """Refuse bytes whose CRC-32 is not `expected`, a whole number or eight hexadecimal digits."""
    found = zlib.crc32(data)
    if expected not in (found, f"{found:08x}"):
        raise error(f"{where} is damaged: it does not match its checksum")


def parse_json(data: bytes, where: str, error: Error, max_values: int = MAX_VALUES) -> Json:
    """The JSON object in `data`, with JSON's pitfalls refused; `where` names it in errors."""

    def refuse(what: str) -> NoReturn:
        raise error(f"{where} {what}") from None

    def to_dict(pairs: list[tuple[str, Any]]) -> Json:
        found: Json = {}
        for key, value in pairs:
            if key in found:
                refuse(f"has the key {spell(key)} twice; delete the one that is wrong")
            found[key] = value
        return found

    def to_number(digits: str) -> float:
        is_whole = digits.lstrip("-").isdigit() and len(digits) < 99
        if not math.isfinite(number := int(digits) if is_whole else float(digits)):
            refuse(f"has the number {spell(digits)}; expected a finite one, or null")
        return number

    depth, values = count_json(data, max_values)
    if depth > MAX_DEPTH:
        refuse(f"is nested too deep; expected at most {MAX_DEPTH} levels")
    if values > max_values:
        refuse(f"has too many values; expected at most {max_values}")
    hooks: Any = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), to_number)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=to_dict, **hooks)
    except UnicodeDecodeError as fault:
        refuse(f"is not UTF-8 text (byte {fault.start}); expected JSON in UTF-8")
    except json.JSONDecodeError as fault:
        refuse(f"is not JSON: {fault}; it is damaged or some other file, get it again")
    if not isinstance(value, dict):
        refuse(f"is a JSON {type(value).__name__}, {spell(value)}; expected an object, {{...}}")
    if _SURROGATE.search(data) and not is_text(json.dumps(value, ensure_ascii=False)):
        refuse("has half a character (a lone surrogate) in it; get it again")
    return value


def count_json(data: bytes, max_values: int = MAX_VALUES) -> tuple[int, int]:
    """How deep JSON is nested and how many values it has; counting stops beyond either limit."""
    import numpy as np

    step = np.zeros(256, np.int8)
    step[list(b"[{")], step[list(b"]}")] = 1, -1
    text = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    depth, deepest, values, in_string = 0, 0, 0, False
    for start in range(0, len(text), _PIECE):
        marks = np.frombuffer(text[start : start + _PIECE].translate(None, _NO_MARKS), np.uint8)
        inside = np.logical_xor.accumulate(np.append(in_string, marks == ord('"')))
        marks, in_string = marks[~inside[1:]], bool(inside[-1])
        depths = np.cumsum(np.append(depth, step[marks]))
        depth, deepest = int(depths[-1]), max(deepest, int(depths.max()))
        values += int(np.count_nonzero((step[marks] == 1) | (marks == ord(","))))
        if deepest > MAX_DEPTH or values > max_values:
            break
    return deepest, values


# ---- The header of a safetensors file


@dataclass(frozen=True)
class Entry:
    """One tensor as described in the header; `start` and `end` count bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header, with tensors in its order; `handle` is what `safe_open` returned."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    stamp: Stamp
    handle: Any


def read_header(
    path: Path, error: Error, *, limit: int = MAX_HEADER_BYTES, framework: str = "np"
) -> Header:
    """The header of a safetensors file, checked by that library and against our own bounds."""
    from safetensors import SafetensorError, safe_open

    where = spell_path(path)
    with open_file(path, error) as file:
        stamp = stamp_of(os.fstat(file.fileno()))
        first = file.read(8)
        length, rest = int.from_bytes(first, "little"), stamp[2] - 8
        if rest < length or length > limit:
            claim = f"{length} bytes of header, where {rest} follow and {limit} are allowed"
            torn = f"torn, or no safetensors file: it claims {claim}; get it again"
            known = (said for start, said in _OTHER_FORMATS.items() if first.startswith(start))
            raise error(f"{where} is {next(known, torn)}")
        described = parse_json(file.read(length), f"the header of {where}", error)
        metadata = described.pop("__metadata__", None) or {}
        try:
            handle: Any = safe_open(path, framework=framework)
        except (SafetensorError, UnicodeError) as fault:
            said = str(fault).removeprefix("Error while deserializing header: ")
            what = f"{where}, with {rest - length} bytes after its header, is torn or damaged"
            raise error(f"{what}; get it again (safetensors says: {spell(said)})") from None
        if stamp_of(path.stat()) != stamp:
            raise error(f"{where} changed while it was opened; open it again")
    entries = {}
    for name, entry in described.items():
        # safetensors also accepts the fields as a list, and further fields. Empty axes count as 1,
        # so that a 0 cannot hide sizes whose strides would overflow; torch allows 64 axes.
        shape = entry["shape"] if isinstance(entry, dict) and len(entry) == 3 else None
        if shape is None or len(shape) > 64 or math.prod(size or 1 for size in shape) >= 2**60:
            raise error(f"{where}: tensor {spell(name)} is {spell(entry)}, which no tensor can be")
        entries[name] = Entry(entry["dtype"], tuple(shape), *entry["data_offsets"])
    return Header(entries, metadata, 8 + length, stamp, handle)


def make_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]],
    metadata: Mapping[str, str],
    *,
    order: Iterable[str],
    limit: int = MAX_HEADER_BYTES,
) -> bytes:
    """The header of a safetensors file of name -> (type, shape, bytes), with data in `order`."""
    order = list(order)
    ends = dict(zip(order, itertools.accumulate(tensors[name][2] for name in order), strict=True))
    header: Json = {"__metadata__": dict(metadata)}
    for name, (dtype, shape, n_bytes) in tensors.items():
        offsets = [ends[name] - n_bytes, ends[name]]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    data = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    data += b" " * (-len(data) % 8)
    if len(data) > limit:
        raise ValueError(f"the header takes {len(data):,} bytes; expected at most {limit:,}")
    return len(data).to_bytes(8, "little") + data


# ---- Writing


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Replace a file atomically: whatever happens, readers find the old one or the new one.

    After an error the temporary file is removed; after a kill, `remove_leftovers` removes it.
    """
    beside = path.with_name(_NEW + secrets.token_hex(8))
    if not path.parent.is_dir():
        missing = errno.ENOTDIR if path.parent.exists() else errno.ENOENT
        raise OSError(missing, "there is no such folder to write into", str(path.parent))
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Replace a folder by a new one; yields a temporary folder to write into, which is renamed."""
    beside = path.with_name(_NEW + secrets.token_hex(8))
    beside.mkdir(parents=True)
    try:
        yield beside
        shutil.rmtree(path, ignore_errors=True)
        os.replace(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed writers; nobody else may be writing there now."""
    for path in folder.glob(_NEW + "*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, on systems where a folder can be opened for that."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for writing; a second process gets a BlockingIOError at once.

    It is a lock of the operating system, so a killed process releases it. On file systems without
    locks it has no effect.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        what = f"{spell_path(folder)} is no folder, or lies in something that is none"
        raise NotADirectoryError(f"{what}; name a folder") from None
    with (folder / f"{MARK}lock").open("ab") as file:
        try:
            _lock(file.fileno())
        except (BlockingIOError, PermissionError):
            what = f"{spell_path(folder)} is being written by another process"
            raise BlockingIOError(f"{what}; wait for it, stop it, or use another folder") from None
        yield


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        return msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
