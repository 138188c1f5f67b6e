"""Texts of files, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.lens.corpus import Hashed, count_lines, read_texts


def test_a_plain_file_has_a_text_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes('\ufeffone\r\n\n{"text": 3}\nça va\u2028?'.encode())
    assert list(read_texts(path)) == ["one", "", '{"text": 3}', "ça va\u2028?"]
    assert count_lines(path) == 4
    path.write_bytes(b"good\n\xff\n")
    assert count_lines(path) == 2
    with pytest.raises(ValueError, match="line 2: byte 0xff is not UTF-8"):
        list(read_texts(path))
    with pytest.raises(ValueError, match="is missing"):
        next(read_texts(tmp_path / "no.txt"))


def test_a_jsonl_file_has_a_text_under_the_key_of_each_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one\\ntwo", "id": 1}\n\n{"text": "", "id": "x"}\n')
    assert list(read_texts(path)) == ["one\ntwo", ""]
    with pytest.raises(ValueError, match="line 1 has no text under 'body', but 'text', 'id'"):
        list(read_texts(path, "body"))
    with pytest.raises(ValueError, match="line 1 has 1 under 'id'; expected text"):
        list(read_texts(path, "id"))
    path.write_bytes('\ufeff{"text": "one"}\r\n{"text": "two"}\r\n'.encode())
    assert list(read_texts(path)) == ["one", "two"]
    path.write_text('{"text": "one"}\n["two"]\n')
    with pytest.raises(ValueError, match=r"line 2 is a JSON list.*expected an object"):
        list(read_texts(path))


def test_the_hash_is_that_of_the_texts_however_they_are_taken() -> None:
    texts = ["a", "bc", "", "d"]
    whole, skipped, other = (
        Hashed(texts, None),
        Hashed(texts, None),
        Hashed(["ab", "c", "", "d"], 4),
    )
    assert list(whole.rounds(2, 3)) == [[["a", "bc"], ["", "d"]]]
    skipped.pass_over(99)
    other.pass_over(4)
    assert whole.digest == skipped.digest != other.digest
