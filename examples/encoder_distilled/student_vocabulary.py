"""A smaller vocabulary out of the teacher's: `make_vocabulary`.

Why: the teacher's 30,522 pieces would be most of a small student. And if every piece of the
student's is one of the teacher's, both can read the very same tokens, so that their attention can
be compared weight by weight.

How: the pieces that the text uses most are kept, with every single character, so that no word is
lost; they are numbered anew, special tokens first, as BERT has them. The table of student numbers
to teacher numbers comes beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The student's tokenizer, and for each of its pieces the teacher's number."""

    tokenizer: Tokenizer
    teacher_ids: npt.NDArray[np.int64]


def make_vocabulary(teacher: Path, texts: Iterable[str], size: int) -> Vocabulary:
    """The `size` pieces of the teacher's tokenizer.json that the texts use most."""
    described = json.loads(teacher.read_text(encoding="utf-8"))
    known: dict[str, int] = described["model"]["vocab"]
    whole = Tokenizer.from_file(str(teacher))
    whole.no_padding()
    whole.no_truncation()
    counts = np.zeros(max(known.values()) + 1, np.int64)
    for said in whole.encode_batch_fast(list(texts), add_special_tokens=False):
        np.add.at(counts, said.ids, 1)
    single = [piece for piece in known if len(piece.removeprefix("##")) == 1]
    used = [piece for piece in single if counts[known[piece]] or piece.removeprefix("##").isascii()]
    ranked = sorted(known, key=lambda piece: (-counts[known[piece]], known[piece]))
    pieces = list(dict.fromkeys([*SPECIAL, *used, *ranked]))[:size]
    described["model"]["vocab"] = {piece: number for number, piece in enumerate(pieces)}
    for added in described["added_tokens"]:
        added["id"] = pieces.index(added["content"])
    cls, sep = pieces.index("[CLS]"), pieces.index("[SEP]")
    for token, number in (("[CLS]", cls), ("[SEP]", sep)):
        described["post_processor"]["special_tokens"][token]["ids"] = [number]
    described["truncation"] = described["padding"] = None
    ids = np.array([known[piece] for piece in pieces])
    return Vocabulary(Tokenizer.from_str(json.dumps(described)), ids)
