"""A survey of made-up texts with a tiny model: what the tests of surveys run, also as a program.

`survey_runs.py OUT N SLEEP` surveys N texts, and takes so many seconds for each, so that it can be
killed on the way. Under torchrun several processes share the texts.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from tiny_checkpoints import make_model

from regard.lens import survey
from regard.lens.head_table import HeadTable
from regard.lens.word_links import find_words

BLOCK = 16


def make_texts(n: int) -> list[str]:
    """Words of few letters; some texts are empty, some longer than the model takes."""
    drawn = random.Random(5)
    texts = ["".join(drawn.choices("abcd,,", k=drawn.randint(1, 9))) for _ in range(n)]
    texts[3::50] = ["" for _ in texts[3::50]]
    texts[7::50] = ["ab" * 20 for _ in texts[7::50]]
    return texts


def make_reader(name: str = "tiny", sleep_s: float = 0.0) -> survey.Reader:
    """One token a letter, 13 at most."""
    model = make_model("llama", num_hidden_layers=2)

    def encode(text: str) -> survey.Tokens:
        time.sleep(sleep_s)
        letters = list(text[:13])
        ids = [5 + ord(letter) % 23 for letter in letters]
        words = find_words(text, letters, [(n, n + 1) for n in range(len(letters))])
        return survey.Tokens(ids, letters, len(text) > 13, words)

    return survey.Reader(name, model, encode, model.run)


def run(texts: list[str], *, sleep_s: float = 0.0, **plan: object) -> HeadTable:
    chosen = survey.Plan(**{"block": BLOCK, "batch": 5, **plan})  # type: ignore[arg-type]
    return survey.survey_texts(make_reader(sleep_s=sleep_s), texts, chosen)


def main(out: Path, n_texts: int, sleep_s: float) -> None:
    torch.set_num_threads(1)
    survey.EVERY_S = 0.0
    state = out.with_name("state")
    table = run(make_texts(n_texts), sleep_s=sleep_s, state=state)
    if survey.is_main():
        table.save(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
