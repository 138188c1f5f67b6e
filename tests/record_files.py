"""A `.regard` file taken apart and joined again: what a stranger could send."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any


def parts(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header, the description in it, and the bytes of the arrays."""
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    return header, json.loads(header["__metadata__"]["regard"]), data[8 + n :]


def join(header: dict[str, Any], told: Any, arrays: bytes, mend: bool = True) -> bytes:
    """A file of changed parts, with checksums that fit: an attacker's, no accident's."""
    if mend and isinstance(told, dict) and isinstance(told.get("crc"), dict):
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                told["crc"][name] = zlib.crc32(arrays[first:last])
    text = told if isinstance(told, str) else json.dumps(told)
    header["__metadata__"] = {"regard": text, "regard.crc": f"{zlib.crc32(text.encode()):08x}"}
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + arrays
