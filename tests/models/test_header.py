"""Every damage that a header or a JSON file can have is refused in its own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import entry, make_single, write_raw

from regard.models import header as header_module
from regard.models.header import MAX_COUNT, parse_object, read_header, spell, spell_some
from regard.models.hf_folder import BadCheckpoint, Folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refused(file: Path) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def refused_header(file: Path, header: dict[str, Any] | bytes, data: bytes) -> str:
    write_raw(file, header, data)
    return refused(file)


# ---- The file around the header


@pytest.mark.parametrize("size", [0, 3, 7])
def test_a_file_of_less_than_eight_bytes_is_torn(file: Path, size: int) -> None:
    file.write_bytes(bytes(size))
    assert f"has {size} bytes; expected a safetensors file" in refused(file)


def test_a_header_longer_than_the_file_is_refused(file: Path) -> None:
    file.write_bytes((1001).to_bytes(8, "little") + b"{}")
    assert "claims a header of 1001 bytes, but only 2 follow" in refused(file)


def test_a_header_beyond_the_limit_is_refused_without_reading_it(file: Path) -> None:
    with file.open("wb") as out:
        out.write((100_000_001).to_bytes(8, "little"))
        out.truncate(100_000_100)  # a hole: the bytes are "there", so only the limit refuses
    assert "claims a header of 100000001 bytes; at most 100000000" in refused(file)


@pytest.mark.parametrize("size", [2**63, 2**64 - 1])
def test_a_header_length_near_the_integer_limit_is_refused(file: Path, size: int) -> None:
    file.write_bytes(size.to_bytes(8, "little") + b"{}")
    assert f"claims a header of {size} bytes" in refused(file)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"PK\x03\x04\x00\x00\x08\x08rest", "a pickle under another name"),
        (b"\x80\x02}q\x00(X\x04\x00", "a pickle under another name"),
        (b"GGUF\x03\x00\x00\x00rest", "a GGUF file under another name"),
    ],
)
def test_what_is_no_safetensors_file_is_named(file: Path, start: bytes, words: str) -> None:
    file.write_bytes(start)
    assert words in refused(file)


def test_a_header_whose_length_looks_like_a_pickle_is_read(file: Path) -> None:
    text = json.dumps({"a": entry(0, 4, [1])}).encode()
    write_raw(file, text.ljust(0x0280), bytes(4))  # 640 = b"\x80\x02"
    assert list(read_header(file)[0]) == ["a"]


def test_a_torn_file_says_how_much_is_missing(file: Path) -> None:
    words = refused_header(file, {"a": entry(0, 20, [5])}, bytes(13))
    assert "is torn: the header promises 20 bytes of tensors, 13 are there" in words


def test_bytes_after_the_last_tensor_are_refused(file: Path) -> None:
    words = refused_header(file, {"a": entry(0, 20, [5])}, bytes(23))
    assert "the last 3 of 23 bytes belong to no tensor" in words


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused_without_waiting(file: Path, kind: str) -> None:
    import os

    file.mkdir() if kind == "folder" else os.mkfifo(file)
    assert "is not a file" in refused(file)


# ---- JSON


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not JSON: Expecting value"),
        (b'{"a": ', "is not JSON: Expecting value"),
        (b'{"a": 1}\x00', "is not JSON: Extra data"),
        (b"[]", "is a JSON list, []; expected an object"),
        (b'"word"', "is a JSON str, 'word'"),
        (b"null", "is a JSON NoneType"),
        (b'{"a": 1, "a": 1}', "has the key 'a' twice"),
        (b'{"x": {"a": 1, "b": 2, "a": 3}}', "has the key 'a' twice"),
        (b'{"a": NaN}', "has NaN as a value"),
        (b'{"a": [-Infinity]}', "has -Infinity as a value"),
        (b'{"a": 1e999}', "has the number '1e999', which is too large"),
        (b'{"a": -1e999}', "has the number '-1e999', which is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)"),
        (b"\xef\xbb\xbf{}", "starts with a byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8 text (byte 0)"),
        (b'{"a": "\\ud800"}', "has half a character (a lone surrogate) in '\\ud800'"),
        (b'{"a\\udfff": [[1]]}', "has half a character"),
        (b'{"a": ' + b"[" * 100_000, "is nested too deep"),
        (b'{"a": ' * 100_000, "is nested too deep"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "is nested too deep"),
    ],
)
def test_json_with_a_trap_in_it_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        parse_object(text, "this file")
    assert str(caught.value).startswith("this file ")
    assert words in str(caught.value)


def test_json_without_a_trap_is_read() -> None:
    deep = b'{"a": ' + b"[" * 98 + b"]" * 98 + b', "b": 1.5e3, "c": "\\ud83d\\ude00"}'
    found = parse_object(deep, "this file")
    assert (found["b"], found["c"]) == (1500.0, "😀")


# ---- The entries


GOOD = entry(0, 20, [5])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "is told by []; expected an object with dtype, shape and data_offsets"),
        (["F32", [5], [0, 20]], "expected an object with dtype, shape"),
        ({"dtype": "F32", "shape": [5]}, "expected an object with dtype, shape"),
        (GOOD | {"strides": [1]}, "expected an object with dtype, shape"),
        (GOOD | {"dtype": 3}, "has the type 3, which is not known; known are F64, F32, F16, BF16"),
        (GOOD | {"dtype": "f32"}, "has the type 'f32', which is not known"),
        (GOOD | {"dtype": []}, "has the type [], which is not known"),
        (GOOD | {"dtype": "F8_E4M3"}, "a quantised one whose values mean nothing without scales"),
        (GOOD | {"dtype": "F4"}, "a quantised one"),
        (GOOD | {"shape": 5}, "has the shape 5; expected a list of whole numbers"),
        (GOOD | {"shape": [-5]}, "has the shape [-5]; expected a list of whole numbers"),
        (GOOD | {"shape": [5.0]}, "has the shape [5.0]"),
        (GOOD | {"shape": [True, 5]}, "has the shape [True, 5]"),
        (GOOD | {"shape": ["5"]}, "has the shape ['5']"),
        (GOOD | {"shape": [2**63]}, "expected a list of whole numbers from 0 to"),
        (GOOD | {"shape": [1] * 65}, "has 65 axes; expected at most 64"),
        (GOOD | {"shape": [2**61]}, "more than any file can hold"),
        (GOOD | {"shape": [2**40, 2**40]}, "more than any file can hold"),
        (GOOD | {"shape": [0, 2**40, 2**40]}, "more than any file can hold"),
        (GOOD | {"shape": [2**32, 2**32, 5]}, "more than any file can hold"),
        (GOOD | {"data_offsets": 0}, "has the data_offsets 0; expected two whole numbers"),
        (GOOD | {"data_offsets": [0]}, "expected two whole numbers"),
        (GOOD | {"data_offsets": [0, 20, 20]}, "expected two whole numbers"),
        (GOOD | {"data_offsets": [-20, 0]}, "expected two whole numbers"),
        (GOOD | {"data_offsets": [0, 20.0]}, "expected two whole numbers"),
        (GOOD | {"data_offsets": [0, MAX_COUNT + 1]}, "expected two whole numbers"),
        (GOOD | {"data_offsets": [0, 16]}, "16 bytes, but the shape [5] of F32 takes 20"),
        (GOOD | {"data_offsets": [20, 0]}, "-20 bytes, but the shape [5] of F32 takes 20"),
        (GOOD | {"dtype": "F16"}, "20 bytes, but the shape [5] of F16 takes 10"),
    ],
)
def test_a_wrong_entry_is_refused(file: Path, wrong: object, words: str) -> None:
    told = refused_header(file, {"h.3.w": wrong}, bytes(20))
    assert words in told
    assert "tensor 'h.3.w'" in told


def test_tensors_that_overlap_are_refused(file: Path) -> None:
    header = {"a": entry(0, 20, [5]), "b": entry(12, 32, [5])}
    words = refused_header(file, header, bytes(32))
    assert "tensors 'a' and 'b' overlap in the bytes 12 to 20" in words


def test_two_tensors_in_the_same_bytes_are_refused(file: Path) -> None:
    header = {"a": entry(0, 20, [5]), "b": entry(0, 20, [5])}
    assert "overlap in the bytes 0 to 20" in refused_header(file, header, bytes(20))


def test_an_empty_tensor_inside_another_is_refused(file: Path) -> None:
    header = {"a": entry(0, 20, [5]), "b": entry(8, 8, [0])}
    assert "tensors 'a' and 'b' overlap" in refused_header(file, header, bytes(20))


@pytest.mark.parametrize("first", [0, 4])
def test_a_gap_is_refused(file: Path, first: int) -> None:
    header = {"a": entry(first, first + 20, [5]), "b": entry(28, 32, [1])}
    words = refused_header(file, header, bytes(32))
    assert "belong to no tensor; nothing may be hidden there" in words


@pytest.mark.parametrize("wrong", [None, 3, "pt", ["pt"], {"format": 1}, {"a": {"b": "c"}}])
def test_metadata_that_is_no_object_of_strings_is_refused(file: Path, wrong: object) -> None:
    header = {"__metadata__": wrong, "a": entry(0, 20, [5])}
    assert "__metadata__; expected" in refused_header(file, header, bytes(20))


def test_a_header_that_only_safetensors_refuses_is_refused_at_the_door(tmp_path: Path) -> None:
    root = make_single(tmp_path / "model")
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}'
    write_raw(root / "model.safetensors", text, bytes(4))
    with pytest.raises(BadCheckpoint, match="is refused by safetensors"):
        Folder.open(root)


# ---- Hostile names


def test_hostile_names_are_spelled_with_escapes_and_cut(file: Path) -> None:
    name = "\x1b[2J\n\u202e" + "x" * 100_000
    words = refused_header(file, {name: entry(0, 7, [5])}, bytes(7))
    assert "\x1b" not in words and "\n" not in words and "\u202e" not in words
    assert "\\x1b[2J\\n\\u202e" in words
    assert len(words) < 600


def test_long_lists_and_numbers_are_cut() -> None:
    assert spell_some(f"n{i}" for i in range(42)) == "'n0', 'n1', 'n2', 'n3', 'n4' and 37 more"
    assert spell_some(["a", "b"]) == "'a', 'b'"
    assert len(spell(10**4000)) <= 80
    assert len(spell([[["x" * 999] * 99] * 99] * 99)) < 999


def test_small_files_are_not_read_beyond_their_limit(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * 33)
    with pytest.raises(BadCheckpoint, match="has 33 bytes; expected at most 31 of JSON"):
        header_module.read_small(path, 31)
    assert header_module.read_small(path, 33) == b" " * 33
