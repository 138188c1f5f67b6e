"""Strangers' records: whatever is wrong with a file, opening and using it is a `BadRecord`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from record_files import join, parts
from torch import Tensor, nn

import regard
from regard.lens import format as files
from regard.lens.lazy_weights import BadRecord
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import Causal


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        bias = regard.ALiBi(2) + regard.DenseBias(torch.linspace(0, 1, 7)[None])
        return regard.attention(q, k, k, mask=Causal(), bias=bias)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch.manual_seed(1)
    model = Attends()
    with torch.no_grad(), watch(model, keep="qk", tokens=list("abcdefg")) as record:
        model(torch.randn(1, 2, 7, 3), torch.randn(1, 2, 7, 3))
    path = tmp_path_factory.mktemp("good") / "x.regard"
    record.describe(text="abcdefg", spans=[(n, n + 1) for n in range(7)]).save(path)
    use(path)
    return path.read_bytes()


def use(path: Path) -> None:
    """Open a file and ask for all there is."""
    record = Record.open(path)
    for number, place in enumerate(record.places):
        record.statistics(number)
        record.ids(number)
        for head in range(place.n_heads):
            record.map(number, head)
            record.rows(number, head, place.n_queries - 1)
            record.column(number, head, 0)
    record.heads()
    record.rollout()
    record.compare(record)


def refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(BadRecord):
        use(path)


def test_the_parts_can_be_joined_again(good: bytes, tmp_path: Path) -> None:
    """So that what is refused below is refused for what was changed."""
    path = tmp_path / "x.regard"
    path.write_bytes(join(*parts(good)))
    use(path)


@given(st.data())
def test_cut_short_anywhere(good: bytes, tmp_path_factory: Any, data: Any) -> None:
    n = data.draw(st.integers(0, len(good) - 1))
    refused(tmp_path_factory.mktemp("short") / "x.regard", good[:n])


@given(st.data())
def test_any_bit_flipped(good: bytes, tmp_path_factory: Any, data: Any) -> None:
    at = data.draw(st.integers(0, len(good) * 8 - 1))
    flipped = bytearray(good)
    flipped[at // 8] ^= 1 << at % 8
    refused(tmp_path_factory.mktemp("flip") / "x.regard", bytes(flipped))


def test_bytes_added(good: bytes, tmp_path: Path) -> None:
    refused(tmp_path / "x.regard", good + b"\0")


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: Any, data: bytes) -> None:
    refused(tmp_path_factory.mktemp("any") / "x.regard", data)


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def put(path: str, value: Any) -> Change:
    """Set something in the description; numbers in the path are places in lists."""

    def change(header: dict[str, Any], told: dict[str, Any]) -> None:
        *way, last = [int(x) if x.isdecimal() else x for x in path.split("/")]
        at: Any = told
        for step in way:
            at = at[step]
        at[last] = value

    return change


def take(path: str) -> Change:
    def change(header: dict[str, Any], told: dict[str, Any]) -> None:
        *way, last = path.split("/")
        at: Any = told
        for step in way:
            at = at[int(step)] if step.isdecimal() else at[step]
        del at[last]

    return change


WRONG: dict[str, Change] = {
    "a token of 1 MB": put("tokens/3", "x" * 1_000_000),
    "a token that is no text": put("tokens/3", 7),
    "tokens that are no list": put("tokens", "abc"),
    "a text that is none": put("text", ["a"]),
    "a long model name": put("model", "x" * 10_000),
    "another version": put("version", 2),
    "a version that is no number": put("version", "1"),
    "kept otherwise": put("kept", "all"),
    "a span outside": put("spans/2", [3, 9]),
    "a span backwards": put("spans/2", [3, 2]),
    "a span of one": put("spans/2", [3]),
    "too few spans": put("spans", [[0, 1]]),
    "no places": put("places", []),
    "a place that is none": put("places/0", 3),
    "a nameless place": take("places/0/name"),
    "a place with more": put("places/0/more", 1),
    "a name of 1 MB": put("places/0/name", "x" * 1_000_000),
    "another kind": put("places/0/kind", "both"),
    "no heads": put("places/0/n_heads", 0),
    "more heads": put("places/0/n_heads", 3),
    "half a head": put("places/0/n_heads", 2.0),
    "heads that are none": put("places/0/heads", [0, "1"]),
    "too many queries": put("places/0/n_queries", 1 << 40),
    "fewer queries": put("places/0/n_queries", 6),
    "negative keys": put("places/0/n_keys", -7),
    "true keys": put("places/0/n_keys", True),
    "layer": put("places/0/layer", -1),
    "causal": put("places/0/causal", "yes"),
    "zoom": put("places/0/exact_zoom", 1),
    "no rule": put("places/0/rule", None),
    "a scale that is none": put("places/0/rule/scale", "1"),
    "an endless scale": put("places/0/rule/scale", 1e300),
    "a softcap of 0": put("places/0/rule/softcap", 0),
    "key heads beyond": put("places/0/rule/key_heads", [0, 5]),
    "no key heads": put("places/0/rule/key_heads", []),
    "a cell without base": put("places/0/rule/cell", -4),
    "many biases": put("places/0/rule/biases", [{"kind": "column", "lowest": 0}] * 99),
    "an unknown bias": put("places/0/rule/biases/0/kind", "pickle"),
    "a bias elsewhere": put("places/0/rule/biases/0/kind", "whole"),
    "a bias far away": put("places/0/rule/biases/0/lowest", 1 << 50),
    "no checksums": take("crc"),
    "checksums that are none": put("crc", []),
    "something more": put("more", {}),
    "something less": take("created"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_description(name: str, good: bytes, tmp_path: Path) -> None:
    header, told, arrays = parts(good)
    WRONG[name](header, told)
    refused(tmp_path / "x.regard", join(header, told, arrays))


TEXTS = {
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep in an object": '{"a":' * 50 + "1" + "}" * 50,
    "no JSON": "{",
    "a number": "7",
    "NaN": '{"version": NaN}',
    "infinite": '{"version": -Infinity}',
    "many digits": '{"version": 1' + "0" * 5000 + "}",
    "twice": '{"version": 1, "version": 1}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_description_that_is_none(name: str, good: bytes, tmp_path: Path) -> None:
    header, _, arrays = parts(good)
    refused(tmp_path / "x.regard", join(header, TEXTS[name], arrays))


@pytest.mark.parametrize("name", TEXTS)
def test_a_header_that_is_none(name: str, tmp_path: Path) -> None:
    text = TEXTS[name].encode()
    refused(tmp_path / "x.regard", struct.pack("<Q", len(text)) + text)


def test_a_description_is_counted_before_it_is_parsed(
    good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.regard"
    path.write_bytes(good)
    monkeypatch.setattr(files, "MAX_VALUES", 50)
    monkeypatch.setattr("json.loads", parse_only_headers)
    with pytest.raises(BadRecord, match="too many values; expected at most 50"):
        Record.open(path)


def parse_only_headers(text: str, **hooks: Any) -> Any:
    assert text.startswith('{"__metadata__"'), "the description was parsed"
    return json.JSONDecoder(**hooks).decode(text)


def test_a_checksum_is_judged_before_what_it_covers_is_parsed(good: bytes, tmp_path: Path) -> None:
    header, _, arrays = parts(good)
    data = join(header, "{", arrays)
    crc = header["__metadata__"]["regard.crc"].encode()
    path = tmp_path / "x.regard"
    path.write_bytes(data.replace(crc, b"00000000"))
    with pytest.raises(BadRecord, match="does not match its checksum"):
        Record.open(path)


def test_a_header_that_claims_the_world(tmp_path: Path) -> None:
    refused(tmp_path / "x.regard", struct.pack("<Q", 1 << 62) + b"{}")
    refused(tmp_path / "y.regard", b"")


NUMBERS: dict[str, tuple[str, Any]] = {
    "NaN in q": ("0.q", np.nan),
    "infinite k": ("0.k", np.inf),
    "huge q": ("0.q", 3e38),
    "NaN in lse": ("0.lse", np.nan),
    "infinite lse": ("0.lse", np.inf),
    "a low lse": ("0.lse", -1e30),
    "NaN entropy": ("0.entropy", np.nan),
    "negative entropy": ("0.entropy", -3.0),
    "too much entropy": ("0.entropy", 99.0),
    "a peak over 1": ("0.peak", 1.5),
    "a key beyond": ("0.peak_key", 7),
    "a key before": ("0.top_keys", -2),
    "a negative weight": ("0.top_weights", -0.5),
    "negative received": ("0.received", -1.0),
    "seen by more": ("0.seen_by", 99.0),
    "runs before": ("0.pairs", -1),
    "runs beyond": ("0.pairs", 8),
    "runs that are empty": ("0.pairs", 3),
    "rows beyond": ("0.first", 1 << 40),
    "rows before": ("0.first", -1),
    "spots": ("0.spots", np.nan),
    "counts": ("0.counts", -1),
    "what is real": ("0.real", 9),
    "a table of NaN": ("0.bias0.table", np.nan),
    "a column of infinity": ("0.bias1.column", np.inf),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_numbers(name: str, good: bytes, tmp_path: Path) -> None:
    header, told, arrays = parts(good)
    which, value = NUMBERS[name]
    entry = header[which]
    first, last = entry["data_offsets"]
    array = np.frombuffer(arrays[first:last], files.TYPES[entry["dtype"]]).copy()
    array[len(array) // 2] = value
    changed = arrays[:first] + array.tobytes() + arrays[last:]
    refused(tmp_path / "x.regard", join(header, told, changed))


def test_check_looks_at_every_array_at_once(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.regard"
    path.write_bytes(good)
    assert Record.open(path).check().places
    header, about, arrays = parts(good)
    first, _ = header["0.entropy"]["data_offsets"]
    changed = arrays[:first] + struct.pack("<f", np.nan) + arrays[first + 4 :]
    path.write_bytes(join(header, about, changed))
    record = Record.open(path)
    with pytest.raises(BadRecord, match="entropy of place 0 holds NaN"):
        record.check()


FORMS: dict[str, dict[str, Any]] = {
    "a shape": {"shape": [2, 21]},
    "an axis more": {"shape": [1, 2, 7, 3]},
    "turned": {"shape": [2, 3, 7]},
    "negative": {"shape": [-2, -7, 3]},
    "huge": {"shape": [1 << 47, 7, 3]},
    "no numbers": {"shape": ["2", 7, 3]},
    "whole numbers": {"dtype": "I32"},
    "an unknown type": {"dtype": "BOOL"},
    "no type": {"dtype": ["F32"]},
    "elsewhere": {"data_offsets": [0, 168]},
    "backwards": {"data_offsets": [168, 0]},
    "more": {"more": 1},
}


@pytest.mark.parametrize("name", FORMS)
def test_wrong_forms(name: str, good: bytes, tmp_path: Path) -> None:
    header, told, arrays = parts(good)
    assert header["0.q"]["shape"] == [2, 7, 3]
    header["0.q"].update(FORMS[name])
    refused(tmp_path / "x.regard", join(header, told, arrays, mend=False))


def test_arrays_that_belong_nowhere(good: bytes, tmp_path: Path) -> None:
    for new in ("9.q", "q", "0.pickle", "0.bias0.q", "x.q", "0.bias.table", "\u0660.q"):
        header, told, arrays = parts(good)
        for book in (header, told["crc"]):
            book[new] = book.pop("0.q")
        refused(tmp_path / "x.regard", join(header, told, arrays))


def test_a_missing_file_is_missing() -> None:
    with pytest.raises(FileNotFoundError):
        Record.open("/nowhere/at/all.regard")


def test_a_safetensors_file_is_no_record(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"0.q": np.zeros((1, 2, 3), np.float32)}, tmp_path / "x.regard")
    with pytest.raises(BadRecord, match="no record"):
        Record.open(tmp_path / "x.regard")


def test_a_link_to_itself_is_no_record_and_a_missing_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "loop.regard").symlink_to("loop.regard")
    with pytest.raises(BadRecord, match="Too many levels of symbolic links"):
        Record.open(tmp_path / "loop.regard")
    with pytest.raises(FileNotFoundError):
        Record.open(tmp_path / "none.regard")
