"""Damaged and hostile GGUF files: one clear error each, and nothing else."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import MERGES, PIECES, finish, write_small
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from regard.models import BadCheckpoint, load
from regard.models.gguf import GGUFFile
from regard.models.gguf_header import read_gguf_header


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf").read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.gguf"


def header_end(data: bytes) -> int:
    """Where the names of tensors end and their bytes begin."""
    return data.rindex(b"blk.0.ffn_down.weight") + 64


def test_what_is_read_is_what_the_package_reads(path: Path, small: bytes) -> None:
    path.write_bytes(small)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    told = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.source.keys() == told.keys()
    for key, value in header.metadata.source.items():
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        want = told[key].contents()
        assert plain == (pytest.approx(want, rel=1e-7) if isinstance(plain, float) else want)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        packed = header.tensors[tensor.name]
        assert packed.shape == tuple(reversed(tensor.shape.tolist()))
        assert (packed.kind, packed.start) == (tensor.tensor_type, tensor.data_offset)
        assert packed.n_bytes == tensor.n_bytes


def test_the_small_file_is_whole(path: Path, small: bytes) -> None:
    path.write_bytes(small)
    model = load(path)
    assert model.tokenizer is not None
    assert [model.tokenizer.token(n) for n in range(11)] == PIECES


@pytest.mark.parametrize(
    "place, new, words",
    [
        (0, b"GGML", "starts with b'GGML'"),
        (0, b"PK\x03\x04", "a GGUF file starts with b'GGUF'"),
        (4, struct.pack("<I", 1), "GGUF version 1; expected 2 or 3"),
        (4, struct.pack("<I", 4), "GGUF version 4"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**63), "claims 9223372036854775808 tensors"),
        (8, struct.pack("<Q", 2_000), "claims 2000 tensors"),
        (8, struct.pack("<Q", 0), "holds no tensors"),
        (16, struct.pack("<Q", 2**64 - 1), "claims 18446744073709551615 keys"),
        (24, struct.pack("<Q", 2**40), "the name of key 0 has 1099511627776 bytes"),
        (24, struct.pack("<Q", 0), "the name of key 0 has 0 bytes"),
        (32, b"\xff\xfe", "the name of key 0 is not UTF-8"),
    ],
)
def test_a_damaged_start_is_refused(
    path: Path, small: bytes, place: int, new: bytes, words: str
) -> None:
    path.write_bytes(small[:place] + new + small[place + len(new) :])
    with pytest.raises(BadCheckpoint, match=words):
        GGUFFile.open(path)


def after(data: bytes, key: bytes) -> int:
    return data.index(key) + len(key)


@pytest.mark.parametrize(
    "key, skip, new, words",
    [
        (b"llama.block_count", 0, struct.pack("<I", 13), "type 13"),
        (b"llama.block_count", 0, struct.pack("<I", 6), "whole number"),
        (b"llama.block_count", 4, struct.pack("<I", 0), "whole number from 1"),
        (b"llama.block_count", 4, struct.pack("<I", 2**31 - 1), "2147483647"),
        (b"llama.embedding_length", 4, struct.pack("<I", 16), "embedding_length, 16"),
        (b"llama.feed_forward_length", 4, struct.pack("<I", 2**30), "no tensor is wider than 32"),
        (b"llama.attention.head_count", 4, struct.pack("<I", 2**30), "no tensor is wider"),
        (b"llama.attention.layer_norm_rms_epsilon", 4, b"\0\0\xc0\x7f", "finite number above 0"),
        (b"tokenizer.ggml.add_bos_token", 4, b"\x02", "0 or 1"),
        (b"tokenizer.ggml.tokens", 4, struct.pack("<I", 9), "array of arrays"),
        (b"tokenizer.ggml.tokens", 4, struct.pack("<I", 77), "unknown type 77"),
        (b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 2**60), "texts in the value of"),
        (b"tokenizer.ggml.tokens", 16, struct.pack("<Q", 2**60), "text 0 of the value of"),
        (b"tokenizer.ggml.token_type", 8, struct.pack("<Q", 2**61), "would take"),
        (b"output_norm.weight", 0, struct.pack("<I", 5), "5 axes"),
        (b"output_norm.weight", 0, struct.pack("<I", 0), "0 axes"),
        (b"output_norm.weight", 4, struct.pack("<Q", 0), "is empty"),
        (b"output_norm.weight", 4, struct.pack("<Q", 2**62), "would end at byte"),
        (b"output_norm.weight", 12, struct.pack("<I", 999), "type 999, which the installed"),
        (b"output_norm.weight", 12, struct.pack("<I", 8), "blocks of 32"),
        (b"output_norm.weight", 12, struct.pack("<I", 26), "as I32, which the gguf package"),
        (b"output_norm.weight", 16, struct.pack("<Q", 0), "lies at 0 among the tensors"),
        (b"blk.0.attn_k", -1, b"v", "twice"),
        (b"llama.block_count", -11, b"black_count", "llama.black_count"),
        (b"general.architecture", -12, b"archicecture", "has no 'general.architecture'"),
    ],
)
def test_a_damaged_entry_is_refused(
    path: Path, small: bytes, key: bytes, skip: int, new: bytes, words: str
) -> None:
    place = after(small, key) + skip
    path.write_bytes(small[:place] + new + small[place + len(new) :])
    with pytest.raises(BadCheckpoint, match=words):
        load(path)


def test_a_key_given_twice_is_refused(path: Path, small: bytes) -> None:
    path.write_bytes(small.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"))
    with pytest.raises(BadCheckpoint, match=r"'tokenizer\.ggml\.eos_token_id' twice"):
        GGUFFile.open(path)


def test_a_file_torn_anywhere_is_refused(path: Path, small: bytes) -> None:
    cuts = [*range(0, header_end(small), 23), *range(header_end(small), len(small) - 32, 301)]
    for cut in cuts:
        path.write_bytes(small[:cut])
        with pytest.raises(BadCheckpoint):
            GGUFFile.open(path)


def test_no_number_in_the_header_fills_the_memory(path: Path, small: bytes) -> None:
    """Eight bytes of every place become huge; the walk stays as small as the file."""
    tracemalloc.start()
    try:
        for place in range(4, header_end(small), 11):
            for huge in (2**63 - 1, 2**31 - 1, 2**20):
                path.write_bytes(small[:place] + struct.pack("<Q", huge) + small[place + 8 :])
                try:
                    read_gguf_header(path)
                except BadCheckpoint:
                    continue
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="cannot be read: Is a directory"):
        GGUFFile.open(tmp_path)
    with pytest.raises(BadCheckpoint, match="missing"):
        GGUFFile.open(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match="starts with b''"):
        GGUFFile.open(tmp_path / "empty.gguf")


def test_a_vocabulary_alone_is_no_model(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(PIECES)
    finish(writer)
    with pytest.raises(BadCheckpoint, match="a vocabulary, not a model"):
        GGUFFile.open(path)


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[float, bytes]]:
    """Where (as a part of the header), and what is written there."""
    raw = st.binary(min_size=1, max_size=8)
    counts = st.integers(0, 2**64 - 1).map(lambda n: struct.pack("<Q", n))
    small = st.integers(0, 70).map(lambda n: struct.pack("<I", n))
    odd = st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<f", float("nan")), b"\xed\xa0"])
    return draw(
        st.lists(st.tuples(st.floats(0, 1), raw | counts | small | odd), min_size=1, max_size=3)
    )


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("fuzz") / "file.gguf"


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
@given(changes=edits(), cut=st.none() | st.floats(0, 1))
@example(changes=[(0.0, b"")], cut=None)
def test_no_damage_to_the_header_gives_another_error(
    fuzzed: Path, small: bytes, changes: list[tuple[float, bytes]], cut: float | None
) -> None:
    data = bytearray(small)
    for part, new in changes:
        place = 4 + int(part * (header_end(small) - 12))
        data[place : place + len(new)] = new
    fuzzed.write_bytes(data if cut is None else data[: int(cut * len(data))])
    try:
        model = load(fuzzed)
        tokenizer = model.tokenizer  # made when it is first asked for
    except BadCheckpoint as wrong:
        assert len(str(wrong)) < 1500 and str(wrong).isprintable()
        return
    assert model.config.n_layers == 1
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("ab ab 12 c").ids)


def test_merges_and_pieces_agree_in_the_small_file() -> None:
    """The fuzz starts from a file that is whole in every part."""
    known: Any = set(PIECES)
    assert all("".join(merge.split(" ")) in known for merge in MERGES)
