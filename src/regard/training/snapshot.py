"""Snapshots: what a run needs to resume after a stop, a kill or a full disk, saved atomically.

A snapshot is one safetensors file, `step-00001000.safetensors`. Its metadata has the run's facts
(any JSON), the step, and two SHA-256 checksums, so every flipped or missing byte is noticed:

    8 bytes    length of the header
    header     {"__metadata__":{"header_sha256":"...","data_sha256":"...", ...}, tensors}
    data       the tensors' bytes, wide types first

`data_sha256` is the checksum of the data, `header_sha256` that of all bytes before the data, with
its own 64 digits as zeros. It comes first, at a fixed offset, so the header is checked before it is
parsed.

Saving goes in this order: temporary files of killed writers are removed; the file is written under
a temporary name, one tensor at a time, synced to disk and renamed; `best.json` is replaced the same
way if this snapshot is the best; only then are old snapshots removed, oldest first, never the best
one. So at every moment the last whole snapshot exists, and so does the file that `best.json` names.

Left out: snapshots of later steps than the one saved (after going back by hand) are neither counted
nor removed, and `load_latest` would choose them: move them away when going back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, final

import torch
from torch import Tensor

from regard._files import (
    MAX_HEADER_BYTES,
    Header,
    open_file,
    parse_json,
    read_bytes,
    read_header,
    remove_leftovers,
    replace_file,
    spell,
    spell_path,
    stamp_of,
    sync_folder,
)
from regard.models.header import DTYPES
from regard.models.save_folder import check_tensor, make_header, to_bytes

VERSION = 1
BEST = "best.json"
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})\.safetensors")
_OPENING = b'{"__metadata__":{"header_sha256":"'
_SUM = slice(8 + len(_OPENING), 8 + len(_OPENING) + 64)
_NO_SUM = "0" * 64
_CHUNK = 1 << 22  # small enough that a piece is still in the processor's cache when it is hashed


class BadSnapshot(ValueError):
    """A snapshot is damaged or cannot be saved; the message says which, why and what to do."""


class SnapshotNotSaved(BadSnapshot, OSError):
    """The disk refused the write (full, read-only, gone); earlier snapshots are untouched."""

    def __str__(self) -> str:
        return str(self.args[0])  # OSError would show its errno instead of our message


@final
@dataclass(frozen=True, eq=False)
class Snapshot:
    """One snapshot, read and checked; `passed_over` says which newer ones are damaged, and how."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    passed_over: tuple[str, ...] = ()


# ---- Saving


def save_snapshot(
    root: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    *,
    keep: int = 3,
    best: bool = False,
) -> Path:
    """Save a snapshot of this step, then remove all older ones but `keep - 1` and the best one.

    Tensors may have any type, device and strides. Facts are plain JSON: dicts with string keys,
    lists (tuples come back as lists), strings, whole and finite numbers, booleans, None.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be a whole number from 0 up, got {step!r}")
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}; the newest snapshot always stays")
    stored, odd = dict(tensors), {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dtype not in DTYPES.values():
            # complex128 or an 8-bit float, which safetensors may not know, is stored as bytes.
            odd[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            stored[name] = tensor.detach().resolve_conj().reshape(-1).view(torch.uint8)
        check_tensor(name, stored[name])
    metadata = {
        "header_sha256": _NO_SUM,
        "data_sha256": _NO_SUM,
        "format": "pt",
        "snapshot": str(VERSION),
        "step": str(step),
        "data_bytes": str(sum(tensor.nbytes for tensor in stored.values())),
        "facts": _to_json(facts),
        "odd_types": json.dumps(odd),
    }
    header, order = make_header(stored, metadata)
    folder = Path(os.fsdecode(root))
    path = folder / f"step-{step:08d}.safetensors"
    with _disk_errors(path, len(header) + int(metadata["data_bytes"])):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        remove_leftovers(folder)
        with replace_file(path) as file:
            file.write(header)
            metadata["data_sha256"] = _write_data(file, stored, order)
            header, _ = make_header(stored, metadata)
            file.seek(0)
            file.write(header[: _SUM.start] + _header_sum(header) + header[_SUM.stop :])
    if best:
        line = _best_line(path.name)
        with _disk_errors(folder / BEST, len(line)), replace_file(folder / BEST) as file:
            file.write(line)
    remove_old(folder, step, keep)
    return path


def _to_json(facts: Mapping[str, Any]) -> str:
    if not isinstance(facts, Mapping):
        raise TypeError(f"facts must be a dict of plain JSON, got {type(facts).__name__}")
    _check_keys(facts, "facts")
    try:
        text = json.dumps(dict(facts), allow_nan=False, separators=(",", ":"))
        parse_json(text.encode("utf-8"), "facts", ValueError)
    except (TypeError, ValueError, RecursionError) as error:
        todo = "give strings, finite numbers, booleans, None, lists and dicts"
        what = f"facts cannot be written as plain JSON: {error}"
        raise ValueError(f"{what}; {todo}, and put arrays among the tensors") from error
    return text


def _check_keys(value: object, where: str) -> None:
    """Refuse keys that are not strings: JSON would silently convert them."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {spell(key)}; JSON has only strings as keys")
            _check_keys(item, f"{where}[{spell(key)}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_keys(item, f"{where}[{number}]")


def _write_data(file: BinaryIO, tensors: Mapping[str, Tensor], order: list[str]) -> str:
    total = hashlib.sha256()
    for name in order:
        data = to_bytes(tensors[name]).data
        for start in range(0, len(data), _CHUNK):
            total.update(data[start : start + _CHUNK])
            file.write(data[start : start + _CHUNK])
    return total.hexdigest()


def _header_sum(head: bytes) -> bytes:
    zeroed = head[: _SUM.start] + _NO_SUM.encode() + head[_SUM.stop :]
    return hashlib.sha256(zeroed).hexdigest().encode()


@contextlib.contextmanager
def _disk_errors(path: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            parent = next(folder for folder in path.parents if folder.exists())
            free = f"; {shutil.disk_usage(parent).free:,} are free there"
        refusal = SnapshotNotSaved(
            f"{spell_path(path)} could not be written: {error.strerror or error}. It takes "
            f"{needed:,} bytes{free}. What was saved before is untouched; make room (or give "
            "another folder) and resume"
        )
        refusal.errno, refusal.strerror, refusal.filename = error.errno, error.strerror, str(path)
        raise refusal from error


def remove_old(folder: Path, step: int, keep: int) -> None:
    """Remove the snapshots up to this step but the last `keep` and the best one."""
    try:
        best = _read_best(folder)
    except BadSnapshot:
        return  # the best one is unknown, so none is removed; the next best snapshot repairs this
    until_now = [path for path in list_snapshots(folder) if _step_of(path) <= step]
    for path in reversed(until_now[keep:]):
        if path.name != best:
            path.unlink(missing_ok=True)


# ---- Which one is the best


def _best_line(name: str) -> bytes:
    """The bytes of `best.json`: a file name and its checksum, by which damage is noticed."""
    fields = {"file": name, "sha256": hashlib.sha256(name.encode("utf-8")).hexdigest()}
    return (json.dumps(fields) + "\n").encode("utf-8")


def _read_best(folder: Path) -> str | None:
    path = folder / BEST
    if not os.path.lexists(path):
        return None
    data = read_bytes(path, 1000, BadSnapshot)
    name = parse_json(data, spell_path(path), BadSnapshot).get("file")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _best_line(name) != data:
        what = f"{spell_path(path)} is damaged: {spell(data)} does not match its own checksum"
        raise BadSnapshot(f"{what}. Delete it, or choose a snapshot by its step")
    return name


def load_best(root: str | os.PathLike[str]) -> Snapshot | None:
    """Load the snapshot that was last saved as the best one; None if none was."""
    folder = Path(os.fsdecode(root))
    name = _read_best(folder)
    return None if name is None else load_snapshot(folder / name)


# ---- Loading


def _step_of(path: Path) -> int:
    """The step in the file's name; -1 for any other file."""
    match = _NAME.fullmatch(path.name)
    return -1 if match is None else int(match[1])


def list_snapshots(root: str | os.PathLike[str]) -> list[Path]:
    """List the snapshots in a folder by name, newest first; [] if the folder does not exist."""
    folder = Path(os.fsdecode(root))
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _step_of(path) >= 0 and path.is_file()]
    return sorted(found, key=_step_of, reverse=True)


def load_latest(root: str | os.PathLike[str]) -> Snapshot | None:
    """Load the newest undamaged snapshot; None if there are no snapshots at all.

    If all are damaged it is an error: starting over would overwrite what may still be rescued.
    """
    faults: list[str] = []
    for path in list_snapshots(root):
        try:
            return replace(load_snapshot(path), passed_over=tuple(faults))
        except BadSnapshot as error:
            faults.append(str(error))
    if faults:
        what = f"none of the {len(faults)} snapshots in {os.fsdecode(root)!r} is whole"
        raise BadSnapshot(f"{what}; move them away to start anew. The newest: {faults[0]}")
    return None


def load_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read one snapshot into CPU memory, with every byte checked."""
    path = Path(os.fsdecode(path))
    where = spell_path(path)
    with open_file(path, BadSnapshot) as file:
        stamp = stamp_of(status := os.fstat(file.fileno()))
        _check_sum(file, where, status.st_size)
    header = read_header(path, BadSnapshot, framework="pt")
    if header.stamp != stamp:
        raise BadSnapshot(f"{where} was replaced while it was read; try again")
    metadata = header.metadata
    if _step_of(path) not in (-1, int(metadata["step"])):
        raise BadSnapshot(f"{where} is of step {metadata['step']}; give it back its name")
    tensors = _read_data(header, where)
    facts = parse_json(metadata["facts"].encode("utf-8"), f"{where}: facts", BadSnapshot)
    odd = parse_json(metadata["odd_types"].encode("utf-8"), f"{where}: odd_types", BadSnapshot)
    for name, (word, shape) in odd.items():
        tensors[name] = tensors[name].view(getattr(torch, word)).reshape(shape)
    return Snapshot(path, int(metadata["step"]), tensors, facts)


def _check_sum(file: BinaryIO, where: str, size: int) -> None:
    """Check the header's checksum, then the version, then the file size that it states."""
    first = file.read(_SUM.stop)
    length = int.from_bytes(first[:8], "little")
    if len(first) < _SUM.stop:
        raise BadSnapshot(f"{where} is cut short: it has {size} bytes, less than any snapshot")
    if first[8 : _SUM.start] != _OPENING or length > MAX_HEADER_BYTES:
        raise BadSnapshot(f"{where} is not a snapshot, or its first bytes are damaged")
    head = first + file.read(max(0, 8 + length - len(first)))
    if len(head) != 8 + length:
        missing = f"its header should have {length} bytes, {size - 8} are there"
        raise BadSnapshot(f"{where} is cut short or its first bytes are damaged: {missing}")
    if _header_sum(head) != first[_SUM]:
        raise BadSnapshot(f"{where} is damaged: its header does not match its checksum")
    metadata = parse_json(head[8:], f"the header of {where}", BadSnapshot)["__metadata__"]
    if metadata.get("snapshot") != str(VERSION):
        what = f"{where} is of the format {spell(metadata.get('snapshot'))}; this version of regard"
        raise BadSnapshot(f"{what} reads {VERSION}. Use the version that wrote it")
    expected = 8 + length + int(metadata["data_bytes"])
    if size != expected:
        word = "cut short" if size < expected else "damaged"
        raise BadSnapshot(f"{where} is {word}: it has {size:,} bytes, {expected:,} were written")


def _read_data(header: Header, where: str) -> dict[str, Tensor]:
    """Copy each tensor from the mapped file, and check the checksum of the mapped bytes."""
    total, tensors, entries = hashlib.sha256(), {}, header.entries
    for name in sorted(entries, key=lambda name: (entries[name].start, entries[name].end)):
        mapped = header.handle.get_tensor(name)
        total.update(to_bytes(mapped).data)
        tensors[name] = mapped.clone()
    if total.hexdigest() != header.metadata["data_sha256"]:
        raise BadSnapshot(f"{where} is damaged: its tensors' bytes do not match their checksum")
    return {name: tensors[name] for name in entries}
