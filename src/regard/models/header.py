"""The one error of a bad checkpoint, and the types that safetensors and torch both have."""

from __future__ import annotations

import torch

MAX_CONFIG_BYTES = 10_000_000

DTYPES = {f"F{n}": getattr(torch, f"float{n}") for n in (64, 32, 16)}
DTYPES |= {"BF16": torch.bfloat16, "BOOL": torch.bool, "C64": torch.complex64}
DTYPES |= {f"I{n}": getattr(torch, f"int{n}") for n in (64, 32, 16, 8)}
DTYPES |= {f"U{n}": getattr(torch, f"uint{n}") for n in (64, 32, 16, 8)}


class BadCheckpoint(ValueError):
    """A model folder or a file in it is not what it should be; the message says which and why."""
