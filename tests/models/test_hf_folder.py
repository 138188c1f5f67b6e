"""Folders are opened whole or refused in words; no damage gives any other exception."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    CONFIG,
    assert_same,
    entry,
    make_sharded,
    make_single,
    make_tensors,
    write_raw,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import regard
from regard.models.hf_folder import BadCheckpoint, Folder, Stored

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return make_single(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_sharded(tmp_path / "sharded")


def refused(path: Path | str) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        Folder.open(path)
    return str(caught.value)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with Folder.open(path) as folder:
        return {name: folder.read(name) for name in folder.stored}


def edit_index(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((root / INDEX).read_text())
    change(index)
    (root / INDEX).write_text(json.dumps(index))


# ---- What is right


@pytest.mark.parametrize("make", [make_single, make_sharded])
def test_a_folder_gives_back_what_was_saved(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    root = make(tmp_path / "model")
    assert_same(read_all(root), make_tensors())
    folder = Folder.open(str(root))
    assert (folder.path, folder.config) == (root, CONFIG)
    file = root / ("model.safetensors" if make is make_single else SHARDS[1])
    assert folder.stored["h.0.half"] == Stored((3, 5), torch.float16, file)


def test_links_into_a_hub_cache_are_followed(tmp_path: Path, sharded: Path) -> None:
    blobs = tmp_path / "hub" / "blobs"
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, blobs / f"{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number}")
    assert_same(read_all(snapshot), make_tensors())


def test_a_single_file_goes_before_an_index_as_in_transformers(sharded: Path) -> None:
    save_file({"other": torch.ones(3)}, sharded / "model.safetensors")
    assert list(read_all(sharded)) == ["other"]
    (sharded / INDEX).write_text("ruin")
    assert list(read_all(sharded)) == ["other"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"])
def test_other_weights_beside_safetensors_are_ignored(single: Path, name: str) -> None:
    (single / name).write_bytes(b"never looked at")
    assert_same(read_all(single), make_tensors())


def test_reading_maps_the_file_and_copies_nothing(single: Path) -> None:
    folder = Folder.open(single)
    tensor = folder.read("wte.weight")
    assert tensor.data_ptr() == folder.read("wte.weight").data_ptr()
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = [line.split() for line in maps.read_text().splitlines()]
        spans = [
            line[0].split("-") for line in lines if line[-1] == str(single / "model.safetensors")
        ]
        assert any(int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in spans)


def test_writing_into_a_tensor_leaves_the_file_alone(single: Path) -> None:
    before = (single / "model.safetensors").read_bytes()
    Folder.open(single).read("wte.weight").zero_()
    gc.collect()
    assert (single / "model.safetensors").read_bytes() == before


def test_a_tensor_that_lies_crooked_in_the_file_is_read_straight(single: Path) -> None:
    header = {"a": entry(0, 3, [3], "U8"), "b": entry(3, 11, [2], "F32")}
    text = json.dumps(header).encode().ljust(160)
    values = torch.tensor([1.5, -2.0])
    write_raw(single / "model.safetensors", text, b"abc" + values.numpy().tobytes())
    found = Folder.open(single).read("b")
    assert torch.equal(found, values)
    assert found.data_ptr() % 4 == 0


def test_close_lets_go_of_the_file_and_keeps_what_was_read(single: Path) -> None:
    folder = Folder.open(single)
    tensor = folder.read("wte.weight")
    folder.close()
    folder.close()
    with pytest.raises(ValueError, match="is closed; open it again"):
        folder.read("wte.weight")
    assert torch.equal(tensor, make_tensors()["wte.weight"])
    del tensor
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(single) not in maps.read_text()


def test_an_unused_folder_keeps_no_file_open(single: Path) -> None:
    handles = Path("/proc/self/fd")
    folder = Folder.open(single)
    folder.read("scalar")
    if handles.exists():
        held = [os.readlink(handle) for handle in handles.iterdir() if handle.is_symlink()]
        assert not any(str(single) in path for path in held)
        del folder
        assert str(single) not in Path("/proc/self/maps").read_text()


# ---- Folders that are none


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, single: Path) -> None:
    assert "there is no folder" in refused(tmp_path / "nowhere")
    assert "has a NUL in it" in refused("a\0b")
    assert "is not UTF-8, and safetensors opens no such path" in refused("a\udcffb")
    words = refused(single / "model.safetensors")
    assert "is a file of weights alone; give the folder it is in" in words and str(single) in words
    assert "is a file; expected a folder" in refused(single / "config.json")
    for name, expected in [("m.gguf", "is a GGUF file"), ("m.bin", "runs whatever code is in it")]:
        (tmp_path / name).touch()
        assert expected in refused(tmp_path / name)
    with pytest.raises(TypeError, match="must be a str or a path, got int"):
        Folder.open(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "has no weights: it is empty; expected model.safetensors"),
        (["README.md", "config.json"], "has no weights: it has 'README.md', 'config.json'"),
        (["training_args.bin"], "has no weights: it has 'training_args.bin'"),
        (["pytorch_model.bin"], "only as pickle ('pytorch_model.bin'), which is refused"),
        (["pytorch_model-00001-of-00002.bin"], "loading a pickle runs whatever code is in it"),
        (["pytorch_model.bin.index.json"], "save_pretrained(folder, safe_serialization=True)"),
        (["consolidated.00.pth"], "or use the convert tool of safetensors"),
        (["last.ckpt"], "only as pickle ('last.ckpt')"),
        (["model.pt"], "only as pickle ('model.pt')"),
        (["adapter_model.bin"], "only as pickle ('adapter_model.bin')"),
        (["adapter_model.safetensors"], "holds only an adapter"),
        (["tf_model.h5"], "only for TensorFlow or Flax ('tf_model.h5')"),
        (["flax_model.msgpack"], "only for TensorFlow or Flax ('flax_model.msgpack')"),
        (["model.ckpt.index"], "only for TensorFlow or Flax"),
        (["small.q4.gguf"], "only as GGUF ('small.q4.gguf'); give that file itself"),
        (["model.fp16.safetensors"], "safetensors under other names ('model.fp16.safetensors')"),
    ],
)
def test_a_folder_without_readable_weights_is_refused(
    tmp_path: Path, names: list[str], words: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    assert words in refused(tmp_path)


def test_a_checkpoint_without_tensors_is_refused(single: Path) -> None:
    write_raw(single / "model.safetensors", {"__metadata__": {"format": "pt"}}, b"")
    assert "holds no tensors at all" in refused(single)


def test_a_link_to_nothing_is_named(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").symlink_to("../../blobs/gone")
    words = refused(single)
    assert "(a link to '../../blobs/gone') is missing" in words


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", ".regard-pending.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, make_loop])
def test_what_is_no_plain_file_is_a_bad_checkpoint(
    single: Path, name: str, make: Callable[[Path], None]
) -> None:
    (single / name).unlink(missing_ok=True)
    make(single / name)
    words = refused(single)
    assert name in words and "cannot be read" in words


def test_a_mapping_that_fails_is_a_bad_checkpoint(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("safetensors.safe_open", fail)
    assert "cannot be read: Cannot allocate memory" in refused(single)


def test_a_folder_that_cannot_be_listed_is_a_bad_checkpoint(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", fail)
    assert "cannot be read: Permission denied" in refused(single)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_a_quantised_type_is_refused(single: Path, dtype: str) -> None:
    write_raw(single / "model.safetensors", {"a": entry(0, 20, [20], dtype)}, bytes(20))
    assert "a quantised one whose values mean nothing without scales" in refused(single)


# ---- config.json


def test_a_missing_config_is_refused(single: Path) -> None:
    (single / "config.json").unlink()
    assert "has weights but no config.json" in refused(single)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not JSON"),
        (b"{'a': 1}", "is not JSON: Expecting property name"),
        (b"[1, 2]", "is a JSON list, [1, 2]; expected an object"),
        (b'{"a": ' * 50_000, "is nested too deep"),
        (b'{"a": NaN}', "has the number 'NaN'"),
        (b'{"a": Infinity}', "has the number 'Infinity'"),
        (b'{"a": "\xc3"}', "is not UTF-8 text (byte 7)"),
        (b"\xef\xbb\xbf{}", "Unexpected UTF-8 BOM"),
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b" " * 10_000_001, "has more than 10000000 bytes"),
    ],
)
def test_a_damaged_config_is_refused(single: Path, text: bytes, words: str) -> None:
    (single / "config.json").write_bytes(text)
    told = refused(single)
    assert words in told and str(single / "config.json") in told


# ---- The index


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is a JSON list"),
        (b"{}", "has None as weight_map; expected an object"),
        (b'{"weight_map": []}', "has [] as weight_map"),
        (b'{"weight_map": {}}', "has {} as weight_map"),
        (b'{"weight_map": {"a": 3}}', "puts tensor 'a' in 3; expected the plain name"),
        (b'{"weight_map": {"a": "b", "a": "c"}}', "has the key 'a' twice"),
    ],
)
def test_a_damaged_index_is_refused(sharded: Path, text: bytes, words: str) -> None:
    (sharded / INDEX).write_bytes(text)
    told = refused(sharded)
    assert words in told and str(sharded / INDEX) in told


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd.safetensors",
        "../secret/model.safetensors",
        "..",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        ".hidden.safetensors",
        ".safetensors",
        "",
        "x" * 300 + ".safetensors",
        "config.json",
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(sharded: Path, name: str) -> None:
    target = sharded.parent / "secret" / "model.safetensors"
    target.parent.mkdir()
    save_file({"wte.weight": torch.ones(3)}, target)
    edit_index(sharded, lambda index: index["weight_map"].update({"wte.weight": name}))
    words = refused(sharded)
    assert "puts tensor 'wte.weight' in" in words and "may not lead elsewhere" in words


def test_missing_shards_are_counted(sharded: Path) -> None:
    (sharded / SHARDS[0]).unlink()
    (sharded / SHARDS[2]).unlink()
    words = refused(sharded)
    assert f"lacks 2 of the 3 shards that {INDEX} names: '{SHARDS[0]}', '{SHARDS[2]}'" in words


def test_a_tensor_that_no_shard_has_is_refused(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"ghost": SHARDS[0]}))
    assert f"puts tensor 'ghost' in '{SHARDS[0]}', but it is in 'no shard'" in refused(sharded)


def test_a_tensor_in_another_shard_than_told_is_refused(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"h.0.ids": SHARDS[0]}))
    words = refused(sharded)
    assert f"puts tensor 'h.0.ids' in '{SHARDS[0]}', but it is in '{SHARDS[1]}'" in words


def test_a_tensor_that_the_index_does_not_name_is_refused(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].pop("h.0.ids"))
    assert f"puts tensor 'h.0.ids' in 'no shard', but it is in '{SHARDS[1]}'" in refused(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    shutil.copy(sharded / SHARDS[0], sharded / SHARDS[2])
    words = refused(sharded)
    assert f"tensor 'wte.weight' in two shards, '{SHARDS[0]}' and '{SHARDS[2]}'" in words


# ---- Reading


def test_a_tensor_that_is_not_there_is_refused(single: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"has no tensor 'lm_head'; it has 7: .* and 2 more"):
        Folder.open(single).read("lm_head")


@pytest.mark.parametrize("how", ["shorter", "rewritten", "replaced", "deleted"])
def test_a_file_that_changed_after_opening_is_not_read(single: Path, how: str) -> None:
    folder = Folder.open(single)
    file = single / "model.safetensors"
    data = file.read_bytes()
    if how == "shorter":
        os.truncate(file, 100)
    elif how == "rewritten":
        file.write_bytes(data)
        os.utime(file, ns=(0, 0))
    elif how == "replaced":
        (single / "new").write_bytes(data)
        shutil.copystat(file, single / "new")
        os.replace(single / "new", file)
    else:
        file.unlink()
    with pytest.raises(BadCheckpoint, match=r"was (changed|deleted) after it was opened"):
        folder.read("wte.weight")


# ---- Fuzz


@st.composite
def damages(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a few of them changed, cut out, doubled, or words of JSON put in."""
    words = [b"-", b"0", b"9" * 20, b'"', b"{", b"[", b"null", b"1e9", b"\\ud800", b"\x00", b"../"]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 9)))
        kind = draw(st.sampled_from(["change", "cut", "double", "word", "end"]))
        put = {
            "change": draw(st.binary(min_size=to - at, max_size=to - at)),
            "cut": b"",
            "double": data[at:to] * 2,
            "word": draw(st.sampled_from(words)),
            "end": b"",
        }[kind]
        data = data[:at] + put + (b"" if kind == "end" else data[to:])
    return data


def open_and_read(root: Path) -> int | None:
    """How many bytes its tensors have, or None if refused: by BadCheckpoint, at the door only."""
    try:
        folder = Folder.open(root)
    except BadCheckpoint as error:
        assert len(str(error)) < 2000 and str(error).isprintable()
        return None
    total = 0
    for name, stored in folder.stored.items():
        tensor = folder.read(name)
        assert (tuple(tensor.shape), tensor.dtype) == (stored.shape, stored.dtype)
        total += tensor.clone().nbytes
    return total


@pytest.mark.parametrize("which", ["config.json", INDEX, SHARDS[1]])
@settings(max_examples=300)
@given(draws=st.data())
def test_damaged_bytes_give_bad_checkpoint_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, which: str, draws: st.DataObject
) -> None:
    base = tmp_path_factory.getbasetemp() / f"fuzz-{which}"
    root = base if base.exists() else make_sharded(base)
    kept = root.parent / f"kept-{which}"
    if not kept.exists():
        shutil.copy(root / which, kept)
    data = kept.read_bytes()
    if which != SHARDS[1]:
        damaged = draws.draw(damages(data))
    else:
        length = int.from_bytes(data[:8], "little")
        header = draws.draw(damages(data[8 : 8 + length]))
        # Right lengths most of the time, so that the damage inside is what is met.
        told = draws.draw(st.just(len(header)) | st.integers(0, 2**64 - 1) | st.integers(0, 999))
        damaged = told.to_bytes(8, "little") + header + data[8 + length :]
    (root / which).write_bytes(damaged)
    assert open_and_read(root) is not None or damaged != data


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=7,
)
SIZES = st.integers(-1, 5) | st.sampled_from([2**31, 2**62, 2**63, 2**64])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BOOL", "F64", "C64", "F8_E5M2", "F4", "X"]),
        "shape": st.lists(SIZES, max_size=4) | ANY_JSON,
        "data_offsets": st.tuples(SIZES, SIZES) | ANY_JSON,
    }
)


@settings(max_examples=300)
@given(
    header=st.dictionaries(st.text(max_size=3), ENTRIES | ANY_JSON, max_size=3),
    meta=st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3)) | ANY_JSON,
    size=st.integers(0, 40),
)
def test_made_up_headers_give_bad_checkpoint_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], meta: object, size: int
) -> None:
    base = tmp_path_factory.getbasetemp() / "made-up"
    root = base if base.exists() else make_single(base)
    if meta is not None:
        header = {"__metadata__": meta, **header}
    write_raw(root / "model.safetensors", header, bytes(size))
    assert open_and_read(root) in (None, size)


@settings(max_examples=100)
@given(shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
def test_right_headers_open(tmp_path_factory: pytest.TempPathFactory, shapes: list[Any]) -> None:
    base = tmp_path_factory.getbasetemp() / "right"
    root = base if base.exists() else make_single(base)
    header, reached = {}, 0
    for number, shape in enumerate(shapes):
        takes = 4 * torch.Size(shape).numel()
        header[f"t{number}"] = entry(reached, reached + takes, shape)
        reached += takes
    write_raw(root / "model.safetensors", header, bytes(reached))
    assert open_and_read(root) == reached


def test_a_folder_that_is_a_link_to_itself_is_told_and_no_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_loop(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadCheckpoint, match="'model' is a link that leads nowhere, or to itself"):
        regard.load("model")
