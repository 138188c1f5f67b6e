"""Downloads models by name, through the package `huggingface_hub` (extra `hub`).

Why: most models are known by a name, and that package knows where they are, has a cache of its own
and uses the user's account.

How: only the files that `load` reads are downloaded; pickled weights never are.

Left out: uploading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATTERNS = ["*.json", "*.safetensors", "merges.txt", "*.jinja"]
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
MAX_NAME = 96  # the hub's own limit
FILES = (".gguf", ".safetensors", ".json", ".bin")
"""Suffixes of names that are files of a model, not models."""


def looks_like_a_name(name: str | os.PathLike[str]) -> bool:
    """Whether this may be "owner/model" or "model", and not a path."""
    if not isinstance(name, str) or len(name) > MAX_NAME or name.endswith(FILES):
        return False
    return NAME.fullmatch(name) is not None and ".." not in name


def fetch_folder(name: str, revision: str | None, more: Sequence[str] = ()) -> Path:
    """The model's folder in the hub's cache, downloaded if needed; `more`: more file patterns."""
    advice = f"fetch it where there is a network (hf download {name}) and copy its folder here"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"there is no folder {name!r}, and to ask the hub for a model of that name takes the "
            "package huggingface_hub: pip install 'regard[hub]'",
            name=missing.name,
        ) from None
    # The base classes are the errors of the network library that this version of the package uses.
    faults: tuple[Any, ...] = (*HfHubHTTPError.__bases__, EntryNotFoundError, OSError)
    patterns = [*PATTERNS, *more]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except HFValidationError as wrong:
        raise ValueError(f"there is no folder {name!r}, and it is no hub name: {wrong}") from None
    except faults as wrong:
        said = " ".join(str(wrong).split())[:300]
        what = f"there is no folder {name!r} here, and the hub did not give a model of that"
        raise FileNotFoundError(f"{what} name ({type(wrong).__name__}: {said}); {advice}") from None
