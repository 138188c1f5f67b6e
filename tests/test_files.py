"""The one layer for files: what it refuses, at once and in the caller's class; what it writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard import _files
from regard._files import (
    check_crc,
    count_json,
    is_text,
    lock_folder,
    make_header,
    open_file,
    parse_json,
    read_bytes,
    read_header,
    read_json,
    remove_leftovers,
    replace_file,
    replace_folder,
    spell,
    spell_some,
)


class BadThing(ValueError):
    """The caller's own class of error."""


def refused_json(data: bytes) -> str:
    with pytest.raises(BadThing) as caught:
        parse_json(data, "this file", BadThing)
    assert str(caught.value).startswith("this file ")
    return str(caught.value)


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refused_header(path: Path) -> str:
    with pytest.raises(BadThing) as caught:
        read_header(path, BadThing)
    assert str(path) in str(caught.value)
    return str(caught.value)


# ---- Opening


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "is missing"),
        (Path.mkdir, "cannot be read"),
        (os.mkfifo, "cannot be read: it is not a plain file"),
        (make_loop, "cannot be read: Too many levels of symbolic links"),
        (make_dangling, "(a link to 'nowhere') is missing"),
    ],
)
def test_what_is_no_plain_file_is_told_in_the_callers_class(
    tmp_path: Path, make: Any, words: str
) -> None:
    path = tmp_path / "a"
    make(path)
    with pytest.raises(BadThing, match=re.escape(words)):
        read_bytes(path, 100, BadThing)
    assert words in refused_header(path)


def test_a_name_that_is_too_long_is_told_in_the_callers_class(tmp_path: Path) -> None:
    with pytest.raises(BadThing, match="cannot be read: File name too long"):
        read_bytes(tmp_path / ("a" * 300), 100, BadThing)


def test_a_fault_while_reading_is_told_in_the_callers_class(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with pytest.raises(BadThing, match="cannot be read: a bad sector"), open_file(path, BadThing):
        raise OSError(5, "a bad sector")


def test_a_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5, BadThing) == b"12345"
    with pytest.raises(BadThing, match="has more than 4 bytes"):
        read_bytes(path, 4, BadThing)


def test_a_checksum_is_a_number_or_its_digits() -> None:
    data = b"abc"
    check_crc(data, zlib.crc32(data), "it", BadThing)
    check_crc(data, f"{zlib.crc32(data):08x}", "it", BadThing)
    for wrong in (zlib.crc32(b"abd"), f"{zlib.crc32(b'abd'):08x}", None):
        with pytest.raises(BadThing, match="it is damaged"):
            check_crc(data, wrong, "it", BadThing)


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
        (b'{"a": NaN}', "has the number 'NaN'"),
        (b'{"a": [-Infinity]}', "has the number '-Infinity'"),
        (b'{"a": 1e999}', "has the number '1e999'"),
        (b'{"a": -1e999}', "has the number '-1e999'"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has the number '99"),
        (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)"),
        (b"\xef\xbb\xbf{}", "is not JSON: Unexpected UTF-8 BOM"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8 text (byte 0)"),
        (b'{"a": "\\ud800"}', "has half a character (a lone surrogate)"),
        (b'{"a\\udfff": [[1]]}', "has half a character"),
        (b'{"a": ' + b"[" * 100_000, "is nested too deep"),
        (b'{"a": ' * 100_000, "is nested too deep"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "is nested too deep"),
    ],
)
def test_json_with_a_trap_in_it_is_refused(text: bytes, words: str) -> None:
    assert words in refused_json(text)


def test_json_without_a_trap_is_read() -> None:
    deep = b'{"a": ' + b"[" * 98 + b"]" * 98 + b', "b": 1.5e3, "c": "\\ud83d\\ude00", "d": -17}'
    found = parse_json(deep, "this file", BadThing)
    assert (found["b"], found["c"], found["d"]) == (1500.0, "😀", -17)


def test_brackets_in_strings_count_for_nothing() -> None:
    text = json.dumps({"a": '[["\\' * 200, "b\\": ["{", "}" * 300]}).encode()
    assert count_json(text) == (2, 4)
    assert parse_json(text, "this file", BadThing)["b\\"] == ["{", "}" * 300]


def test_strings_and_nesting_are_followed_from_piece_to_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = json.dumps({"a": ["[[", {"b": '"]"', "c": [1, 2, [3]]}], "d\\": "}"}).encode()
    whole = count_json(text)
    assert whole == (5, 10)
    for piece in range(1, 9):
        monkeypatch.setattr(_files, "_PIECE", piece)
        assert count_json(text) == whole


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"0,", b'"",', b"["])
def test_much_json_is_refused_before_it_is_parsed(unit: bytes) -> None:
    """Parsed, 90 MB of brackets took 13 s and 2.5 GB."""
    data = b'{"a":[' + unit * (90_000_000 // len(unit)) + b"0]}"
    tracemalloc.start()
    start = time.process_time()
    words = refused_json(data)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "has too many values" in words or "is nested too deep" in words
    assert seconds < 2
    assert peak < 100e6


def test_a_file_of_json_is_read_under_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": 1}')
    assert read_json(path, 8, BadThing) == {"a": 1}
    with pytest.raises(BadThing, match="more than 7 bytes"):
        read_json(path, 7, BadThing)


# ---- The header of a safetensors file

GOOD = entry(0, 20, [5])


def test_a_header_is_read_in_its_own_order(tmp_path: Path) -> None:
    entries = {"b": entry(8, 20, [3]), "a": entry(0, 8, [2, 1]), "__metadata__": {"k": "v"}}
    data = np.arange(5, dtype=np.float32).tobytes()
    header = read_header(write_raw(tmp_path / "a", entries, data), BadThing)
    assert list(header.entries) == ["b", "a"]
    assert header.metadata == {"k": "v"}
    assert header.entries["a"].shape == (2, 1)
    assert (tmp_path / "a").read_bytes()[header.data_start :] == data
    assert header.handle.get_tensor("b").tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("size", [0, 3, 7])
def test_less_than_eight_bytes_are_torn(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(bytes(size))
    assert "torn, or no safetensors file" in refused_header(tmp_path / "a")


@pytest.mark.parametrize("length", [1001, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "a").write_bytes(length.to_bytes(8, "little") + b"{}")
    assert f"{length} bytes of header, where 2 follow" in refused_header(tmp_path / "a")


def test_a_header_beyond_the_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as out:
        out.write((100_000_001).to_bytes(8, "little"))
        out.truncate(100_000_100)  # a hole: the bytes are "there", so only the limit refuses
    assert "100000000 are allowed" in refused_header(tmp_path / "a")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"PK\x03\x04\x00\x00\x08\x08rest", "a pickle under another name"),
        (b"\x80\x02}q\x00(X\x04\x00", "a pickle under another name"),
        (b"GGUF\x03\x00\x00\x00rest", "a GGUF file under another name"),
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, start: bytes, words: str) -> None:
    (tmp_path / "a").write_bytes(start)
    assert words in refused_header(tmp_path / "a")


def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path: Path) -> None:
    text = json.dumps({"a": entry(0, 4, [1])}).encode().ljust(0x0280)  # 640 = b"\x80\x02"
    assert list(read_header(write_raw(tmp_path / "a", text, bytes(4)), BadThing).entries) == ["a"]


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": GOOD}, 13),  # torn
        ({"a": GOOD}, 23),  # something appended
        ({"a": GOOD, "b": entry(16, 24, [2])}, 24),  # overlap
        ({"a": entry(4, 24, [5])}, 24),  # a hole
        ({"a": entry(0, 16, [5])}, 16),  # not what the shape takes
        ({"a": entry(20, 0, [5])}, 20),
        ({"a": entry(0, 20, [5], "X9")}, 20),
        ({"a": {**GOOD, "shape": [True, 5]}}, 20),
        ({"a": {**GOOD, "shape": [5.0]}}, 20),
        ({"a": {**GOOD, "shape": [-5]}}, 20),
        ({"a": {**GOOD, "shape": [2**62, 2**62]}}, 20),
        ({"a": {**GOOD, "data_offsets": [0]}}, 20),
        ({"a": []}, 0),
        ({"a": GOOD, "__metadata__": {"a": 1}}, 20),
        ({"a": GOOD, "__metadata__": [1]}, 20),
    ],
)
def test_safetensors_refuses_what_does_not_add_up(
    tmp_path: Path, header: dict[str, Any], data: int
) -> None:
    assert "safetensors says" in refused_header(write_raw(tmp_path / "a", header, bytes(data)))


@pytest.mark.parametrize(
    "told",
    [
        ["F32", [5], [0, 20]],
        entry(0, 0, [0, 2**62, 2**62]),
        entry(0, 20, [1] * 64 + [5]),
    ],
)
def test_what_safetensors_takes_and_torch_does_not_is_refused(tmp_path: Path, told: Any) -> None:
    data = bytes(0 if isinstance(told, dict) and 0 in told["shape"] else 20)
    assert "which no tensor can be" in refused_header(write_raw(tmp_path / "a", {"a": told}, data))


def test_a_tensor_told_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(GOOD)
    twice = f'{{"a":{one},"a":{one}}}'.encode()
    assert "has the key 'a' twice" in refused_header(write_raw(tmp_path / "a", twice, bytes(20)))


def test_a_header_of_brackets_is_refused_at_once(tmp_path: Path) -> None:
    """safetensors alone takes 6 s for this one."""
    path = write_raw(tmp_path / "a", b'{"a":[' + b"[]," * 30_000_000 + b"[]]}")
    start = time.process_time()
    assert "has too many values" in refused_header(path)
    assert time.process_time() - start < 2


def test_a_header_made_here_is_read_here(tmp_path: Path) -> None:
    tensors = {"b": ("F16", (3,), 6), "a": ("F32", (2, 1), 8)}
    head = make_header(tensors, {"k": "v"}, order=("a", "b"))
    assert len(head) % 8 == 0
    (tmp_path / "a").write_bytes(head + bytes(14))
    header = read_header(tmp_path / "a", BadThing)
    assert list(header.entries) == ["b", "a"]
    assert (header.entries["a"].start, header.entries["b"].start) == (0, 8)
    assert header.data_start == len(head)
    with pytest.raises(ValueError, match="the header takes"):
        make_header(tensors, {}, order=tensors, limit=8)


# ---- Writing


def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with replace_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        (beside,) = {*tmp_path.iterdir()} - {path}
        assert beside.name.startswith(".regard-new-")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replace_file(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_with_the_longest_name_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    with replace_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").write_bytes(b"old")
    with pytest.raises(OSError, match="full"), replace_folder(path) as beside:
        (beside / "new").write_bytes(b"n")
        raise OSError("the disk is full")
    assert [found.name for found in path.iterdir()] == ["old"]
    with replace_folder(path) as beside:
        (beside / "new").write_bytes(b"new")
    assert [found.name for found in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".regard-new-0123456789abcdef").write_bytes(b"")
    (tmp_path / ".regard-new-0123456789abcdee").mkdir()
    (tmp_path / ".regard-pending.json").write_bytes(b"{}")
    (tmp_path / "a").write_bytes(b"")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".regard-pending.json", "a"]


# ---- The lock

HOLD = """
import sys, time
from pathlib import Path
from regard._files import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "locked\n"
        refused = pytest.raises(BlockingIOError, match="is being written by another process")
        with refused, lock_folder(folder):
            pytest.fail("two writers in one folder")
        first.send_signal(signal.SIGKILL)
    with lock_folder(folder):
        pass


def test_a_lock_holds_in_its_own_process_too_and_ends_with_its_block(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(BlockingIOError), lock_folder(tmp_path):
        pytest.fail("two writers in one folder")
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path):
        raise ZeroDivisionError
    with lock_folder(tmp_path):
        pass


# ---- Words


def test_a_file_is_no_folder_to_write_into(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_bytes(b"kept")
    for folder in (path, path / "below"):
        refused = pytest.raises(NotADirectoryError, match=r"there.* is no folder.*name a folder")
        with refused, lock_folder(folder):
            raise AssertionError
    assert path.read_bytes() == b"kept"


def test_names_from_files_are_escaped_and_cut() -> None:
    assert spell("\x1b[31m") == "'\\x1b[31m'"
    assert len(spell("a" * 10_000)) < 100
    assert spell_some("abcdefg") == "'a', 'b', 'c', 'd', 'e' and 2 more"
    assert is_text("añ😀")
    assert not is_text("a\udc80")


def test_nothing_here_needs_torch() -> None:
    code = "import sys, regard._files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
