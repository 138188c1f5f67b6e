"""Files as every part of regard reads and writes them: bounded, checked, and whole or not at all.

Files from the net are torn, half downloaded, or made to hurt. So only plain files are opened (a
pipe would wait for ever), sizes have limits, nesting and values of JSON are counted before it is
parsed, its traps are closed (a key given twice, NaN, half a character), and the safetensors library
judges the headers of its files. A checksum is judged (`check_crc`) before what it covers is parsed.
Each reader takes `error`, the caller's class for whatever is wrong with a file or hinders reading.

All is written beside under a name that starts with `.regard-`, brought to the disk, and renamed.

Left out: what the bytes mean, and several files replaced as one (`models.save_folder`). Nothing
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
    """Any value from a file, safe to print: escapes for what does not print, and cut short."""
    return _SPELLER.repr(value)


def spell_some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    every = list(names)
    return ", ".join(map(spell, every[:5])) + (f" and {len(every) - 5} more" if every[5:] else "")


def spell_path(path: Path) -> str:
    """A path, safe to print and whole: the end of a long one is what tells most."""
    return repr(str(path))


def is_text(word: str) -> bool:
    """Whether a string can be written down: JSON's escapes can spell half a character."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


# ---- Reading


def stamp_of(status: os.stat_result) -> Stamp:
    """Which file this was, so that a later look can tell that it is still the same one."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def open_file(path: Path, error: Error) -> Iterator[BinaryIO]:
    """A plain file, open for reading; an OSError inside the `with` is told as `error` too."""
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
    """All bytes of a file that has no business being larger than `limit`."""
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
    """The JSON object in `data`, with every trap of JSON closed; `where` names it in errors."""

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
    """How deep JSON is nested and how many values it has, counted up to a limit of either."""
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
    """One tensor as the header tells it; `start` and `end` count bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header, its tensors in its order; `handle` is what `safetensors.safe_open` gave."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    stamp: Stamp
    handle: Any


def read_header(
    path: Path, error: Error, *, limit: int = MAX_HEADER_BYTES, framework: str = "np"
) -> Header:
    """Every tensor that a safetensors file holds, as that library and our own bounds find them."""
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
        # safetensors takes the fields in a list too, and others beside them. Empty axes count as 1,
        # so that a 0 cannot hide sizes whose strides would overflow; torch ends at 64 axes.
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
    """The start of a safetensors file: name -> (type, shape, size), bytes to follow in `order`."""
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
    """Put a file in place whole: whatever happens, readers find the old one or the new one.

    An error takes the new one away. What a kill leaves, `remove_leftovers` clears away.
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
    """Put a folder in place whole, in place of an old one; gives the folder to write into."""
    beside = path.with_name(_NEW + secrets.token_hex(8))
    beside.mkdir(parents=True)
    try:
        yield beside
        shutil.rmtree(path, ignore_errors=True)
        os.replace(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left; nobody else may be writing there now."""
    for path in folder.glob(_NEW + "*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring the folder's names to the disk, on systems where a folder can be opened for that."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Be the only one that writes into a folder; a second one gets a BlockingIOError at once.

    The lock is the system's: a killed process lets go of it. File systems may know no locks.
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
