"""The example notebooks run, and what is stored of them is what they give."""

import base64
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_notebooks import (
    NOTEBOOKS,
    WIDGET,
    code_cells,
    lighten,
    read_notebook,
    run_notebook,
)

import regard

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def kinds(cell: Any) -> list[set[str]]:
    """The types in which each output of a cell can be shown; those on stderr aside."""
    shown = [out for out in cell.outputs if out.get("name") != "stderr"]
    return [set(out.get("data", {out.output_type: ""})) for out in shown]


def test_there_is_an_example() -> None:
    assert [path.name for path in NOTEBOOKS] == ["look.ipynb"]


@each_notebook
def test_two_lines_show_a_picture_and_all_cells_give_what_is_stored(
    path: Path, tmp_path: Path
) -> None:
    """One run for both claims: it takes ten seconds."""
    ran = run_notebook(path, tmp_path)
    first = code_cells(ran)[0]
    lines = [line for line in first.source.splitlines() if line.strip()]
    assert len(lines) <= 2 and not re.search(r";|\bexec\b", first.source)
    assert any({"image/png", WIDGET} & kind for kind in kinds(first))
    stored, fresh = code_cells(read_notebook(path)), code_cells(lighten(ran))
    assert [cell.execution_count for cell in stored] == list(range(1, len(stored) + 1))
    for cell, again in zip(stored, fresh, strict=True):
        assert kinds(cell) == kinds(again), cell.source
        for out, new in zip(cell.outputs, again.outputs, strict=True):
            assert out.get("text") == new.get("text")
            assert out.get("data", {}).get("text/plain") == new.get("data", {}).get("text/plain")


@each_notebook
def test_a_stored_notebook_is_small_shows_a_picture_and_no_error(path: Path) -> None:
    notebook = read_notebook(path)
    outputs = [out for cell in code_cells(notebook) for out in cell.outputs]
    assert path.stat().st_size < 200_000
    assert [out for out in outputs if out.output_type == "error"] == []
    assert [out for out in outputs if WIDGET in out.get("data", {})] == []
    pictures = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
    assert pictures
    assert all(base64.b64decode(picture)[1:4] == b"PNG" for picture in pictures)


@each_notebook
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    words = [cell.source for cell in read_notebook(path).cells if cell.cell_type == "markdown"]
    targets = [target for text in words for target in re.findall(r"\]\(([^)#\s]+)", text)]
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not (path.parent / target).exists()] == []


def test_look_gives_the_record_of_the_model_inside() -> None:
    text = "Two birds sang to me."
    record = regard.look(text)
    assert (record.model, record.text, record.kept) == ("embedded:encoder", text, "qk")
    words = [text[start:end] for start, end in record.spans if end > start]
    assert words == ["Two", "birds", "sang", "to", "me", "."] and len(record.places) == 6
    model = regard.load("embedded:encoder")
    again = regard.look(text, model)
    assert again.model == "encoder"
    assert again.rows(3, 5, 2).tolist() == record.rows(3, 5, 2).tolist()


def test_look_at_a_translator_has_both_texts() -> None:
    record = regard.look("The cat sat on the mat.", "embedded:translate", to="ja")
    assert (record.text, record.source_text) == ("猫はマットに座った。", "The cat sat on the mat.")
    assert {place.kind for place in record.places} == {"self", "cross"}


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (("  ",), ValueError, "the text is empty"),
        ((["Two"],), TypeError, "text is a list; expected str"),
        (("Two", object()), TypeError, "regard.watch"),
        (("Two", "embedded:none"), ValueError, "embedded:none"),
    ],
)
def test_look_refuses_in_words(given: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        regard.look(*given)


def test_a_text_of_no_tokens_or_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = regard.load("embedded:lm")
    model.config = replace(model.config, max_len=7)
    assert len(regard.look("one two three four five six seven", model).tokens) == 7
    with pytest.raises(ValueError, match=r"the text has 8 tokens, but lm takes 7; give a shorter"):
        regard.look("one two three four five six seven eight", model)
    assert model.tokenizer is not None
    nothing = model.tokenizer.encode("")
    monkeypatch.setattr(regard.Tokenizer, "encode", lambda self, text: nothing)
    with pytest.raises(ValueError, match=r"tokenizer of lm makes no token of this text of 3 char"):
        regard.look("one", model)


def test_a_language_is_for_translators() -> None:
    with pytest.raises(ValueError, match="does not translate"):
        regard.look("Two birds sang to me.", to="ja")
