"""Reading: what is whole comes out whole; every kind of bad data is an error or a counted word."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from regard.training.data.reading import (
    LONG_LINE,
    LONG_SIDE,
    BadData,
    Notice,
    read_documents,
    read_pairs,
)

END = "<|endoftext|>"


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def told(notices: tuple[Notice, ...], words: str) -> int:
    """The count of the one notice with these words in it; the text tells the count too."""
    found = [notice for notice in notices if words in notice.text]
    assert len(found) == 1, notices
    assert f"{found[0].count:,}" in found[0].text
    return found[0].count


# ---- Documents


def test_a_text_without_separators_is_one_document_to_the_last_character(tmp_path: Path) -> None:
    text = "  One line.\n\nAnother\x0bwith\u2028odd\x85signs \x1c.\n\n"
    read = read_documents(put(tmp_path, "a.txt", text))
    assert read.texts == [text] and read.notices == ()


def test_separators_stand_on_lines_of_their_own(tmp_path: Path) -> None:
    text = f"{END}\none\ntwo\n{END}\nthree {END} four\n{END}\n\n{END}\nfive\n\n{END}\n"
    read = read_documents(put(tmp_path, "a.txt", text))
    assert read.texts == ["one\ntwo", f"three {END} four", "five\n"]
    assert told(read.notices, "inside a line and read as text") == 1
    assert told(read.notices, "empty and left out") == 1
    assert len(read.notices) == 2


def test_another_separator_or_none(tmp_path: Path) -> None:
    path = put(tmp_path, "a.txt", "one\n---\ntwo\n")
    assert read_documents(path, separator="---").texts == ["one", "two\n"]
    assert read_documents(path, separator=None).texts == ["one\n---\ntwo\n"]


def test_jsonl_gives_the_named_field_and_counts_empty_ones(tmp_path: Path) -> None:
    rows = [
        {"text": "one\ntwo", "body": "x"},
        {"text": "  ", "body": "y"},
        {"text": "é", "body": "z"},
    ]
    path = put(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    read = read_documents(path)
    assert read.texts == ["one\ntwo", "é"]
    assert told(read.notices, "empty and left out") == 1
    assert read_documents(path, field="body").texts == ["x", "y", "z"]


@pytest.mark.parametrize("packing", ["gz", "xz"])
def test_packed_files_are_unpacked(tmp_path: Path, packing: str) -> None:
    pack = {"gz": gzip.compress, "xz": lzma.compress}[packing]
    path = put(tmp_path, f"a.txt.{packing}", pack(f"one\n{END}\nzwölf\n".encode()))
    assert read_documents(path).texts == ["one", "zwölf\n"]
    path = put(tmp_path, f"a.jsonl.{packing}", pack(b'{"text": "three"}\n{"text": "four"}'))
    assert read_documents(path).texts == ["three", "four"]
    path = put(tmp_path, f"a.tsv.{packing}", pack(b"a\tb\nc\td\n"))
    assert read_pairs(path).targets == ["b", "d"]


@pytest.mark.parametrize("packing", ["gz", "xz"])
def test_a_packed_file_that_is_cut_short_is_refused(tmp_path: Path, packing: str) -> None:
    pack = {"gz": gzip.compress, "xz": lzma.compress}[packing]
    whole = pack(os.urandom(997).hex().encode())
    for damaged in (whole[: len(whole) // 2], b"not packed at all"):
        with pytest.raises(BadData, match=rf"a\.txt\.{packing}: damaged or cut short"):
            read_documents(put(tmp_path, f"a.txt.{packing}", damaged))


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (gzip.compress(b"one two\n"), "packed by gzip, expected text; rename it to a.txt.gz"),
        (lzma.compress(b"one two\n"), "packed by xz, expected text; rename it to a.txt.xz"),
        (b"BZh91AY&SY\xff\xfe", "packed by bzip2, expected text; unpack it first"),
        (b"(\xb5/\xfd\x04\x58\x99", "packed by zstd, expected text; unpack it first"),
        (b"PK\x03\x04\x14\x00\xff", "a zip archive, as .docx and .epub are, expected text"),
        (b"%PDF-1.7\n%\xe2\xe3", "a PDF, expected text; take its text out first"),
    ],
    ids=["gzip", "xz", "bzip2", "zstd", "zip", "pdf"],
)
def test_what_is_no_text_by_its_first_bytes_is_named(
    tmp_path: Path, start: bytes, said: str
) -> None:
    for read in (read_documents, read_pairs):
        with pytest.raises(BadData, match=re.escape(said)) as refused:
            read(put(tmp_path, "a.txt", start))
        assert "iconv" not in str(refused.value)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    put(tmp_path, "b.txt", "second\n")
    put(tmp_path, "a.jsonl", '{"text": "first"}')
    put(tmp_path, "c.txt.gz", gzip.compress(b"third\n"))
    put(tmp_path, "d.png", b"\x00\xff")
    put(tmp_path, "e.txt", "")
    put(tmp_path, ".hidden.txt", "never")
    (tmp_path / "deeper").mkdir()
    read = read_documents(tmp_path)
    assert read.texts == ["first", "second\n", "third\n"]
    assert told(read.notices, "left out") == 2
    assert told(read.notices, "1 file was empty, first: e.txt") == 1


def test_a_folder_with_nothing_to_read_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.png", b"x")
    with pytest.raises(BadData, match=r"without \.txt or \.jsonl files"):
        read_documents(tmp_path)


# ---- Bad data, one by one: both doors


def both(folder: Path, name: str, content: str | bytes) -> list[Any]:
    path = put(folder, name, content)
    return [lambda: read_documents(path), lambda: read_pairs(path)]


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n", "\ufeff", "\r\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadData, match=r"a\.txt: there is no text in it"):
        read_documents(put(tmp_path, "a.txt", content))
    with pytest.raises(BadData, match=r"a\.tsv: the file is empty"):
        read_pairs(put(tmp_path, "a.tsv", content))
    with pytest.raises(BadData, match=r"b\.jsonl: there is no text in it"):
        read_documents(put(tmp_path, "b.jsonl", content))


def test_a_missing_file_or_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    for read in (read_documents, read_pairs):
        with pytest.raises(BadData, match=r"none\.txt: no such file"):
            read(tmp_path / "none.txt")
    with pytest.raises(BadData, match="cannot be read"):
        read_pairs(tmp_path)


def test_one_line_only_is_told(tmp_path: Path) -> None:
    read = read_documents(put(tmp_path, "a.txt", "All that there is.\n"))
    assert read.texts == ["All that there is.\n"]
    assert told(read.notices, "there is 1 line only") == 1
    pairs = read_pairs(put(tmp_path, "a.tsv", "one\teins\n"))
    assert (pairs.sources, pairs.targets) == (["one"], ["eins"])
    assert told(pairs.notices, "there is 1 pair only") == 1


def test_only_duplicates_are_told_with_their_count(tmp_path: Path) -> None:
    lines = read_documents(put(tmp_path, "a.txt", "the same\n" * 1009))
    assert told(lines.notices, "all 1,009 lines are the same") == 1009
    whole = read_documents(put(tmp_path, "b.txt", f"the same\n{END}\n" * 11))
    assert told(whole.notices, "all 11 documents are the same") == 11
    pairs = read_pairs(put(tmp_path, "a.tsv", "one\teins\n" * 13))
    assert len(pairs.sources) == 13
    assert told(pairs.notices, "all 13 pairs are the same") == 13


def test_some_duplicates_are_told_and_kept(tmp_path: Path) -> None:
    pairs = read_pairs(put(tmp_path, "a.tsv", "a\tb\nc\td\na\tb\na\te\na\tb\n"))
    assert len(pairs.sources) == 5
    assert told(pairs.notices, "pairs were there before, word for word") == 2


def test_latin_1_lines_among_utf_8_are_refused_with_their_count(tmp_path: Path) -> None:
    lines = ["größe\tsize".encode()] * 7
    lines[3] = lines[5] = "größe\tsize".encode("latin-1")
    for read in both(tmp_path, "a.tsv", b"\n".join(lines)):
        with pytest.raises(
            BadData, match=r"a\.tsv: 2 of 7 lines are not UTF-8.* line 4 .*'ö'.*iconv"
        ):
            read()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be-mark"])
def test_wide_encodings_are_refused_by_name(tmp_path: Path, encoding: str) -> None:
    text = "one\teins\n"
    data = b"\xfe\xff" + text.encode("utf-16-be") if "be" in encoding else text.encode(encoding)
    for read in both(tmp_path, "a.txt", data):
        with pytest.raises(BadData, match=f"is {encoding[:6].upper()}, expected UTF-8; convert it"):
            read()


def test_nul_bytes_are_refused_with_their_count(tmp_path: Path) -> None:
    for read in both(tmp_path, "a.txt", "a\tb\nc\0\td\0\ne\tf\n"):
        with pytest.raises(BadData, match="2 NUL bytes, the first in line 2"):
            read()
    # UTF-16 without a mark is full of them.
    for read in both(tmp_path, "a.txt", "one\ttwo\n".encode("utf-16-le")):
        with pytest.raises(BadData, match="8 NUL bytes, the first in line 1"):
            read()
    path = put(tmp_path, "a.jsonl", '{"text": "fine"}\n{"text": "a\\u0000b"}')
    with pytest.raises(BadData, match="line 2: 'text' has a NUL"):
        read_documents(path)


def test_a_byte_order_mark_is_left_out_and_told(tmp_path: Path) -> None:
    read = read_documents(put(tmp_path, "a.txt", "\ufeffone\ntwo\n"))
    assert read.texts == ["one\ntwo\n"]
    assert told(read.notices, "byte order mark") == 1
    assert read_pairs(put(tmp_path, "a.tsv", "\ufeffone\ttwo\n")).sources == ["one"]


def test_crlf_is_read_as_a_line_end_and_told(tmp_path: Path) -> None:
    read = read_documents(put(tmp_path, "a.txt", f"one\r\n{END}\r\ntwo\r\n"))
    assert read.texts == ["one", "two\n"]
    assert told(read.notices, "CRLF") == 3
    pairs = read_pairs(put(tmp_path, "a.tsv", "one\teins\r\ntwo\tzwei\r\n"))
    assert pairs.targets == ["eins", "zwei"] and told(pairs.notices, "CRLF") == 2
    assert read_documents(put(tmp_path, "b.txt", "one\rtwo\r")).texts == ["one\ntwo\n"]


def test_a_line_of_10_mb_is_told_or_left_out_and_quickly(tmp_path: Path) -> None:
    line = "x" * 10_000_000
    start = time.process_time()
    read = read_documents(put(tmp_path, "a.txt", f"short\n{line}\n"))
    assert told(read.notices, f"lines over {LONG_LINE:,} characters") == 1
    assert "10,000,000" in read.notices[0].text
    pairs = read_pairs(put(tmp_path, "a.tsv", f"one\teins\n{line}\tx\ntwo\tzwei\n"))
    assert pairs.sources == ["one", "two"]
    assert told(pairs.notices, f"longer than {LONG_SIDE:,} characters and left out") == 1
    assert "a.tsv line 2" in pairs.notices[0].text
    assert time.process_time() - start < 5


def test_signs_of_a_wrong_decoding_are_told(tmp_path: Path) -> None:
    read = read_documents(put(tmp_path, "a.txt", "one\ngr\ufffd\ufffde\n"))
    assert told(read.notices, "U+FFFD") == 2
    assert "a.txt line 2" in read.notices[0].text


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", r"line 2 is not JSON"),
        ("[1, 2]", "line 2 holds a list"),
        ('{"title": "x"}', r"line 2 has no field 'text' \(there: 'title'\)"),
        ('{"text": 7}', "line 2: 'text' is a int"),
        ('{"text": "\\ud800"}', "line 2: 'text' has half of a UTF-16 pair"),
        ("[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_lines_that_are_not_the_json_expected_are_refused(
    tmp_path: Path, line: str, fault: str
) -> None:
    path = put(tmp_path, "a.jsonl", f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(BadData, match=rf"a\.jsonl: {fault}"):
        read_documents(path)


# ---- Pairs


def test_pairs_from_all_three_kinds_of_files_are_the_same(tmp_path: Path) -> None:
    rows = [("one\u2028two", "eins\x85zwei"), (" three ", "drei\x0c"), ("four", "vier")]
    want = ["one\u2028two", "three", "four"], ["eins\x85zwei", "drei", "vier"]
    tabs = put(tmp_path, "a.tsv", "".join(f"{s}\t{t}\n" for s, t in rows))
    objects = [json.dumps({"en": s, "de": t}, ensure_ascii=False) for s, t in rows]
    lines = put(tmp_path, "a.jsonl", "\n".join(objects))
    one = put(tmp_path, "a.en", "\n".join(s for s, _ in rows))
    other = put(tmp_path, "a.de", "\n".join(t for _, t in rows) + "\n")
    for read in (
        read_pairs(tabs),
        read_pairs(lines, fields=("en", "de")),
        read_pairs(one, target_path=other),
    ):
        assert (read.sources, read.targets) == want and read.notices == ()


def test_no_tab_at_all_is_refused_with_the_line(tmp_path: Path) -> None:
    path = put(tmp_path, "a.tsv", "\none two\nthree four\n")
    with pytest.raises(BadData, match=r"2 of 2 lines have no tab, the first is line 2: 'one two'"):
        read_pairs(path)


def test_a_few_lines_without_a_tab_are_left_out_and_told(tmp_path: Path) -> None:
    lines = [f"{number}\tn{number}" for number in range(29)]
    lines[17] = "no tab here"
    read = read_pairs(put(tmp_path, "a.tsv", "\n".join(lines)))
    assert len(read.sources) == 28 and "no tab here" not in read.sources
    assert told(read.notices, "without a tab and left out, first: a.tsv line 18") == 1


def test_more_columns_empty_sides_and_identical_sides_are_told(tmp_path: Path) -> None:
    text = "a\tb\tby someone\nc\t\n\td\ne\te\n\n\t \nf\tg\n"
    read = read_pairs(put(tmp_path, "a.tsv", text))
    assert list(zip(read.sources, read.targets, strict=True)) == [
        ("a", "b"),
        ("e", "e"),
        ("f", "g"),
    ]
    assert told(read.notices, "more than two columns") == 1
    assert told(read.notices, "empty on one side and left out, first: a.tsv line 2") == 2
    assert told(read.notices, "lines were empty and left out, first: a.tsv line 5") == 2
    assert told(read.notices, "the same on both sides (kept), first: a.tsv line 4") == 1


def test_parallel_files_of_different_length_are_refused(tmp_path: Path) -> None:
    one, other = put(tmp_path, "a.en", "a\nb\nc\n"), put(tmp_path, "a.de", "d\ne\n")
    with pytest.raises(BadData, match=r"a\.en has 3 lines and .*a\.de has 2"):
        read_pairs(one, target_path=other)


def test_a_file_of_which_no_pair_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"no pair is left .*2 pairs were empty on one side"):
        read_pairs(put(tmp_path, "a.tsv", "a\t\n\tb\n"))


def test_csv_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="CSV is not read"):
        read_pairs(put(tmp_path, "a.csv", "a,b\n"))
