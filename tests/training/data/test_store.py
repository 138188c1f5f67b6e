"""Token files: what goes in comes out, damage is seen, nothing is encoded twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard.tokens import Tokenizer
from regard.training.data import store
from regard.training.data.reading import BadData
from regard.training.data.store import TokenFile, encode_texts, write_tokens
from regard.training.data.vocabulary import train_tokenizer

DOCUMENTS = [[3, 1, 4], [], [1, 5, 9, 2, 6], [5]]
TEXTS = ["Two birds in a tree.\nOne bird.", "A tree <|endoftext|> no end", "", "Ünï çødé 猫"]


def write(path: Path, **more: Any) -> TokenFile:
    return write_tokens(path, DOCUMENTS, **{"vocab_size": 11, "fingerprint": "abc", **more})


def rows(file: TokenFile) -> list[list[int]]:
    pairs = zip(file.bounds[:-1], file.bounds[1:], strict=True)
    return [file.ids[start:end].tolist() for start, end in pairs]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 307)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(11, np.uint16), (65_536, np.uint16), (65_537, np.uint32)]
)
def test_documents_come_back_in_the_smallest_type(
    tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    documents = [[vocab_size - 1, 0], *DOCUMENTS]
    made = write_tokens(tmp_path / "t", documents, vocab_size=vocab_size, fingerprint="é")
    for file in (made, TokenFile.open(tmp_path / "t")):
        assert file.ids.dtype == dtype and file.bounds.dtype == np.int64
        assert rows(file) == documents
        assert (file.n_tokens, file.n_documents) == (11, 5)
        assert (file.vocab_size, file.fingerprint) == (vocab_size, "é")
    with pytest.raises(ValueError, match="read-only"):
        made.ids[0] = 1
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_file_with_no_documents_is_a_file(tmp_path: Path) -> None:
    made = write_tokens(tmp_path / "t", [], vocab_size=3, fingerprint="")
    assert made.n_tokens == made.n_documents == 0


@pytest.mark.parametrize("wrong", [11, -1])
def test_ids_beyond_the_vocabulary_are_refused_and_nothing_is_left(
    tmp_path: Path, wrong: int
) -> None:
    with pytest.raises(
        BadData, match=f"document 1 has ids from {min(wrong, 2)} to {max(wrong, 2)}"
    ):
        write_tokens(tmp_path / "t", [[1], [2, wrong]], vocab_size=11, fingerprint="")
    assert list(tmp_path.iterdir()) == []


def test_every_changed_byte_and_every_missing_one_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path)
    whole = path.read_bytes()
    told = whole.index(b" " * 99)
    for at in (*range(told), *range(store.HEADER, len(whole))):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(BadData):
            TokenFile.open(path)
    for size in (0, 7, 100, store.HEADER, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(BadData):
            TokenFile.open(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(BadData, match="its header tells of"):
        TokenFile.open(path)
    path.write_bytes(whole)
    assert rows(TokenFile.open(path)) == DOCUMENTS


def test_another_version_and_a_strangers_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path)
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(BadData, match="is of version 2, expected 1"):
        TokenFile.open(path)
    path.write_text("Dear diary")
    with pytest.raises(BadData, match="is no file of token ids"):
        TokenFile.open(path)
    with pytest.raises(BadData, match="is missing"):
        TokenFile.open(tmp_path / "none")


def test_a_writer_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path)

    def broken() -> Any:
        yield [1]
        raise KeyError("source ran dry")

    with pytest.raises(KeyError):
        write_tokens(path, broken(), vocab_size=11, fingerprint="new")
    assert rows(TokenFile.open(path)) == DOCUMENTS
    assert [found.name for found in tmp_path.iterdir()] == ["t"]


def test_documents_are_encoded_as_the_tokenizer_does_and_end(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = encode_texts(TEXTS, tokenizer, tmp_path / "t", after=(0,))
    made = rows(file)
    assert [row[-1] for row in made] == [0] * 4
    assert [tokenizer.decode(row[:-1]) for row in made] == TEXTS
    for at in (0, 2, 3):
        assert made[at][:-1] == tokenizer.encode(TEXTS[at]).ids
    # The name of a special token in a text is text, and ends nothing.
    assert 0 not in made[1][:-1]
    bare = encode_texts(TEXTS, tokenizer, tmp_path / "u")
    assert rows(bare) == [row[:-1] for row in made]


def test_a_side_of_pairs_gets_its_prefix_and_no_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = rows(encode_texts(TEXTS, tokenizer, tmp_path / "t"))
    assert plain[0] == tokenizer.encode(TEXTS[0]).ids
    led = rows(encode_texts(TEXTS, tokenizer, tmp_path / "u", before=(7, 5)))
    assert led == [[7, 5, *row] for row in plain]


def test_a_file_is_used_again_just_when_it_was_made_from_the_same(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    first = encode_texts(TEXTS, tokenizer, path, after=(0,))
    made: list[int] = []
    plain = store._rows

    def counted(*what: Any) -> Any:
        made.append(1)
        return plain(*what)

    monkeypatch.setattr(store, "_rows", counted)
    again = encode_texts(TEXTS, tokenizer, path, after=(0,))
    assert not made and rows(again) == rows(first)
    other = train_tokenizer(TEXTS, 258)
    for changed in (
        lambda: encode_texts([*TEXTS[:3], "x"], tokenizer, path, after=(0,)),
        lambda: encode_texts(TEXTS, tokenizer, path),
        lambda: encode_texts(TEXTS, tokenizer, path, after=(1,)),
        lambda: encode_texts(TEXTS, other, path, after=(1,)),
        lambda: encode_texts(["".join(TEXTS[:2]), *TEXTS[2:]], other, path, after=(1,)),
        lambda: encode_texts(TEXTS, other, path, before=(1,)),
    ):
        before = len(made)
        changed()
        assert len(made) == before + 1
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    encode_texts(TEXTS, other, path, before=(1,))
    assert len(made) == 7


def test_a_file_that_is_not_ours_is_never_overwritten(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "diary"
    path.write_text("Dear diary")
    with pytest.raises(BadData, match="is there, and is no file of token ids"):
        encode_texts(TEXTS, tokenizer, path, after=(0,))
    assert path.read_text() == "Dear diary"


@pytest.mark.parametrize("kind", ["bpe", "characters", "words", "wordpiece"])
def test_a_long_text_is_encoded_in_pieces_with_the_same_ids(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    signs = ["a", "b", "'s", " ", " ", "\n", ".", "猫", "7", "  ", "\u3000", "don't", "\t"]
    texts = ["".join(rng.choice(signs, size)) for size in (0, 1, 1999, 3, 997)]
    tokenizer = train_tokenizer(texts, 300, kind=kind, unk="<|endoftext|>")
    monkeypatch.setattr(store, "CHUNK", 37)
    sizes: list[int] = []
    encode = store._encode_chunk

    def counted(backend: Any, chunk: Any) -> Any:
        sizes.append(sum(len(piece.text) for piece in chunk))
        return encode(backend, chunk)

    monkeypatch.setattr(store, "_encode_chunk", counted)
    file = encode_texts(texts, tokenizer, tmp_path / "t")
    assert rows(file) == [tokenizer.encode(text).ids for text in texts]
    assert sum(sizes) == sum(map(len, texts))
    assert len(sizes) > 30 if kind != "words" else len(sizes) > 1


def test_a_character_the_vocabulary_does_not_have_is_named(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["abc"], 7, kind="characters")
    with pytest.raises(BadData, match="text 1 has the character 'x', which the vocabulary does"):
        encode_texts(["ab", "axb"], tokenizer, tmp_path / "t", after=(0,))
    assert list(tmp_path.iterdir()) == []


def test_no_texts_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadData, match="no texts to encode"):
        encode_texts([], tokenizer, tmp_path / "t", after=(0,))
    with pytest.raises(TypeError, match="one text"):
        encode_texts("abc", tokenizer, tmp_path / "t", after=(0,))


FORK = """
import os, sys
from regard.training.data.store import encode_texts
from regard.training.data.vocabulary import train_tokenizer
def count_threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
texts = ["some text here", "and more of it"] * 50
before = count_threads()
tokenizer = train_tokenizer(texts, 300)
encode_texts(texts, tokenizer, sys.argv[1], after=(0,))
assert count_threads() == before, "threads are left, which a fork would lose"
child = os.fork()
if child == 0:
    encode_texts(texts[:7], tokenizer, sys.argv[1] + "2", after=(0,))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(os.environ.get("TOKENIZERS_PARALLELISM"))
"""


def test_a_fork_after_encoding_is_quiet_and_the_environment_as_it_was(tmp_path: Path) -> None:
    source = Path(regard.__file__).parents[1]
    # Numpy's own threads would be there at the fork too, which later Pythons warn of.
    quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = {**os.environ, **quiet, "PYTHONPATH": str(source)}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, str(tmp_path / "t")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
    assert TokenFile.open(tmp_path / "t2").n_documents == 7


def test_the_header_is_plain_json(tmp_path: Path) -> None:
    write(tmp_path / "t")
    head = (tmp_path / "t").read_bytes()[: store.HEADER]
    told = json.loads(head[len(store.MAGIC) :])
    assert told["n_tokens"] == 9 and told["n_documents"] == 4 and len(told["checksum"]) == 64
