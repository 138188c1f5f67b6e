"""The one error of a bad checkpoint, and the types that safetensors and torch both have."""

from __future__ import annotations

import torch

MAX_CONFIG_BYTES = 10_000_000

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
