"""The models inside the package: `load("embedded:translate")`, `load("embedded:lm")`.

Why: the first command after installing should do something real, without a network.

How: each is a model folder like any other, in `src/regard/embedded/NAME`, with its card README.md;
its weights are stored as `int8.py` says. The names stand here, once.

Left out: fetching them. A copy of the sources from before they were trained has none, and says so.
"""

from __future__ import annotations

import os
from pathlib import Path

SCHEME = "embedded:"
ROOT = Path(__file__).resolve().parent.parent / "embedded"
NAMES = {
    "translate": "English to Japanese and Japanese to English, one encoder–decoder",
    "lm": "English text, a decoder",
}


def is_embedded(name: str | os.PathLike[str]) -> bool:
    """Whether this asks for a model inside the package; a path object never does."""
    return isinstance(name, str) and name.startswith(SCHEME)


def find_embedded(name: str) -> Path:
    short = name.removeprefix(SCHEME)
    if short not in NAMES:
        known = "; ".join(f"{SCHEME}{key} ({what})" for key, what in NAMES.items())
        raise ValueError(f"no embedded model is named {name[:99]!r}; there are {known}")
    folder = ROOT / short
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{name} is not in this copy of regard: {str(folder)!r} has no config.json. It is part "
            "of an installed release; in a copy of the sources it is there once it was trained. "
            "Until then give another model: a folder, a GGUF file or a hub name"
        )
    return folder
