"""The models inside the package: "embedded:encoder", "embedded:translate" and "embedded:lm".

Why: the first command after installing should do something real, without a network.

How: each is a model folder like any other, in `src/regard/embedded/NAME`, with a model card
README.md; its weights are stored in the format of `int8.py`. Their names are listed only here.

If the user names no model for a text, `choose_reader` chooses one: the encoder, since more of what
its heads do is visible, or the language model, which reads any text.

Left out: downloading them. A copy of the sources from before they were trained lacks them, and the
error says so.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from regard.tokens import Tokenizer

SCHEME = "embedded:"
ENCODER, LANGUAGE_MODEL = "embedded:encoder", "embedded:lm"
UNREAD = 0.2
"""If more than this share of a text's tokens is unknown to the encoder, it is not chosen."""
ROOT = Path(__file__).resolve().parent.parent / "embedded"
NAMES = {
    "encoder": "English text, an encoder that fills gaps",
    "translate": "English to Japanese and Japanese to English, one encoder–decoder",
    "lm": "English text, a decoder",
}


def is_embedded(name: str | os.PathLike[str]) -> bool:
    """Whether this names a model inside the package; a path object never does."""
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


def choose_reader(
    text: str, *, in_parts: bool = False, asks_next: bool = False
) -> tuple[str, str | None]:
    """The embedded model that is to read a text, and the reason if it is not the encoder.

    in_parts: the caller splits a text that is too long. asks_next: the caller wants the next token,
    unless a word of the text is masked.
    """
    folder = find_embedded(ENCODER)
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(text).ids
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    most, unknown = config["max_position_embeddings"], ids.count(tokenizer.id("[UNK]"))
    why = None
    if len(ids) > most and not in_parts:
        why = f"the text has {len(ids):,} tokens, and {ENCODER} takes {most}"
    elif unknown > UNREAD * len(ids):
        why = f"{ENCODER} does not know {unknown:,} of {len(ids):,} tokens of the text"
    elif asks_next and tokenizer.id("[MASK]") not in ids:
        why = f"no word is masked ([MASK]), and {ENCODER} says no next one"
    return (ENCODER, None) if why is None else (LANGUAGE_MODEL, f"{why}: {LANGUAGE_MODEL} reads it")
