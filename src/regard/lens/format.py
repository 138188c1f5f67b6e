"""The file format of records: how a file is written, and how an untrusted file is read safely.

A file is in the safetensors format: 8 bytes with the length of a JSON header, the header, and the
arrays one after the other. The header's metadata holds the record's own JSON as text (`regard`) and
its CRC-32 (`regard.crc`); that JSON lists a CRC-32 for each array. `record.py` says what is in it.

Nothing in a file is trusted. `regard._files` bounds the header before it is parsed, and the
safetensors library validates it: arrays must be contiguous and fill the file. The description's
checksum is verified before it is parsed. Each array is checked when it is first used: its CRC, its
type and shape against what its place says, and its numbers against their valid range. Whatever is
wrong raises `BadRecord`. Nothing is ever executed.

Left out: compression, and writing other versions than the newest.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from regard._files import Header, check_crc, make_header, parse_json, read_header, replace_file
from regard.lens.lazy_weights import Array, BadRecord

VERSION = 1
MAX_VALUES = 1 << 24
"""The most JSON values in a description: enough for labels and spans of four million tokens."""
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


def write(path: str | os.PathLike[str], about: dict[str, Any], arrays: Mapping[str, Array]) -> None:
    laid = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    for name, array in laid.items():
        if array.dtype.newbyteorder("<") not in NAMES:
            raise TypeError(f"a record holds no {array.dtype}, as {name} is")
        laid[name] = array.astype(array.dtype.newbyteorder("<"), copy=False)
    about = {**about, "crc": {name: zlib.crc32(array.data) for name, array in laid.items()}}
    text = json.dumps(about, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    metadata = {"regard": text, "regard.crc": f"{zlib.crc32(text.encode()):08x}"}
    forms = {name: (NAMES[array.dtype], array.shape, array.nbytes) for name, array in laid.items()}
    header = make_header(forms, metadata, order=laid)
    with replace_file(Path(path)) as file:
        file.write(header)
        for array in laid.values():
            file.write(array.tobytes())


class File(Mapping[str, Array]):
    """The arrays of a file by name, mapped into memory and checked when first used."""

    def __init__(self, path: Path, header: Header, sums: Mapping[str, object]) -> None:
        self._path, self._header, self._sums = path, header, sums
        self._checked: set[str] = set()

    def __getitem__(self, name: str) -> Array:
        entry = self._header.entries[name]
        if math.prod(entry.shape) == 0:
            return np.zeros(entry.shape, TYPES[entry.dtype])
        offset = self._header.data_start + entry.start
        try:
            array = np.memmap(self._path, TYPES[entry.dtype], "r", offset, entry.shape)
        except (OSError, ValueError) as error:
            raise BadRecord(f"{self._path.name}: {name} cannot be read: {error}") from error
        if name not in self._checked:
            where = f"{self._path.name}: {name}"
            check_crc(array.data, self._sums[name], where, BadRecord)
            self._checked.add(name)
        return array

    def form(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._header.entries[name].dtype, self._header.entries[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.entries)

    def __len__(self) -> int:
        return len(self._header.entries)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], File]:
    """Read the record's own JSON and its arrays, which are checked as far as the header goes."""
    path = Path(path)
    os.lstat(path)  # a missing file is a FileNotFoundError, not a bad record
    header = read_header(path, BadRecord)
    if set(header.metadata) != {"regard", "regard.crc"}:
        raise BadRecord(f"{path.name} is a safetensors file, but no record")
    text, where = header.metadata["regard"].encode(), f"the description of {path.name}"
    check_crc(text, header.metadata["regard.crc"], where, BadRecord)
    about = parse_json(text, where, BadRecord, MAX_VALUES)
    sums = about.pop("crc", None)
    if not isinstance(sums, dict) or set(sums) != set(header.entries):
        raise BadRecord(f"{where} has a list of checksums that does not fit its arrays")
    return about, File(path, header, sums)
