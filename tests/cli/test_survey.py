"""`regard survey`: texts go in, a table of heads comes out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from commands import run_command as run

import regard

TEXTS = ["The cat sat, and the cat slept.", "", "A dog ran.", "It was late; it was dark."]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"said": text}) + "\n" for text in TEXTS))
    return path


def test_a_file_of_texts_becomes_a_table_and_the_heads_that_stand_out_are_named(
    capsys: pytest.CaptureFixture[str], jsonl: Path
) -> None:
    out = jsonl.with_name("heads.csv")
    code, said, notes = run(capsys, "survey", jsonl, "--key", "said", "--out", out, "--top", "2")
    assert code == 0 and notes == f"reading 4 texts ...\ntable: {out}\n"
    assert said.startswith("embedded:lm: 4 texts, 64 heads, 1 empty ones left out\n")
    table = regard.survey("embedded:lm", TEXTS)
    with out.open(newline="") as file:
        means = [row["mean"] for row in csv.DictReader(file)]
    expected = [row.mean for row in table.rows()]
    np.testing.assert_allclose([float(mean) for mean in means], expected, rtol=1e-12)
    [line] = [line for line in said.splitlines() if "the token before" in line]
    best = [
        f"{row.layer}.{row.head} {row.mean:.2f} ±{row.std:.2f}" for row in table.top("previous", 2)
    ]
    assert line.split("before")[1].strip() == "   ".join(best)
    assert "the token after" not in said  # of a causal model nobody looks there
    assert not list(jsonl.parent.glob("*.state"))


def test_a_table_is_kept_and_opened_again_as_a_page_with_the_same_digest(
    capsys: pytest.CaptureFixture[str], jsonl: Path
) -> None:
    out, page, again = (jsonl.with_name(name) for name in ("h.regard", "h.html", "again.html"))
    code, said, notes = run(capsys, "survey", jsonl, "--key", "said", "--out", out, "--html", page)
    assert code == 0 and f"page: {page}" in notes
    code, told, notes = run(capsys, "view", out, "--html", again)
    assert (code, notes) == (0, f"page: {again}\n")
    assert told == said and again.read_bytes() == page.read_bytes()
    assert "words, beyond habit" in said
    for extra in ([out], ["--token", "it"]):
        code, _, notes = run(capsys, "view", out, *extra, "--html", again)
        assert code == 2 and "expected it alone, without another file or a word" in notes


def test_what_cannot_be_done_is_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], jsonl: Path
) -> None:
    for options, said in (
        (["--out", jsonl.with_name("heads.xlsx")], "expected .parquet, .csv, .json or .regard"),
        (["--resume"], "give --out too"),
        (["--limit", "0"], "limit"),
    ):
        code, _, notes = run(capsys, "survey", jsonl, "--model", "no-such-model", *options)
        assert code == 2 and said in notes
    code, _, notes = run(capsys, "survey", jsonl)
    assert code == 2 and "line 1 has no text under 'text', but 'said'" in notes
    with pytest.raises(ValueError, match="give out too"):
        regard.survey("no-such-model", TEXTS, resume=True)
