"""`BadCheckpoint`, a check that a file did not change, and safetensors' types as torch dtypes."""

from __future__ import annotations

from pathlib import Path

import torch

from regard._files import Stamp, spell_path, stamp_of

MAX_CONFIG_BYTES = 10_000_000

DTYPES = {f"F{n}": getattr(torch, f"float{n}") for n in (64, 32, 16)}
DTYPES |= {"BF16": torch.bfloat16, "BOOL": torch.bool, "C64": torch.complex64}
DTYPES |= {f"I{n}": getattr(torch, f"int{n}") for n in (64, 32, 16, 8)}
DTYPES |= {f"U{n}": getattr(torch, f"uint{n}") for n in (64, 32, 16, 8)}


class BadCheckpoint(ValueError):
    """A model folder or file is missing, damaged or not supported; the message says how."""


def check_unchanged(path: Path, stamp: Stamp) -> None:
    """Refuse a file that is no longer the one whose header was checked."""
    if not path.exists() or stamp_of(path.stat()) != stamp:
        how = "changed" if path.exists() else "deleted"
        raise BadCheckpoint(f"{spell_path(path)} was {how} after it was opened; open it again")
