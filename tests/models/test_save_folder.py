"""What is written is read again, here and by transformers, and no interruption breaks a folder."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import CONFIG, assert_same, make_tensors
from safetensors import safe_open
from torch import Tensor

from regard.models.hf_folder import BadCheckpoint, Folder, write_folder

INDEX = "model.safetensors.index.json"
OLD_CONFIG = {"model_type": "old", "n_layer": 2}
NEW_CONFIG = {"model_type": "new", "n_layer": 5}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """These folders need not outlive a power cut, which no test here could make anyway."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def read_all(path: Path) -> dict[str, Tensor]:
    with Folder.open(path) as folder:
        return {name: folder.read(name) for name in folder.stored}


def names_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


# ---- What is written


def test_a_small_checkpoint_is_one_file(tmp_path: Path) -> None:
    root = tmp_path / "not" / "yet" / "there"
    write_folder(root, CONFIG, make_tensors())
    assert names_in(root) == ["config.json", "model.safetensors"]
    assert_same(read_all(root), make_tensors())
    assert list(read_all(root)) == list(make_tensors())
    assert json.loads((root / "config.json").read_text()) == CONFIG
    with safe_open(root / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same({name: file.get_tensor(name) for name in file.keys()}, make_tensors())  # noqa: SIM118


def test_a_large_checkpoint_is_split_in_order(tmp_path: Path) -> None:
    sizes = {"a": 3, "b": 5, "c": 7, "d": 41, "e": 1}
    tensors = {name: torch.full((size,), float(size)) for name, size in sizes.items()}
    write_folder(tmp_path, CONFIG, tensors, max_shard_bytes=32)
    shards = [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert names_in(tmp_path) == ["config.json", *shards, INDEX]
    # By hand: 12 + 20 fill the first 32 bytes; 28; 164 is alone, too large for any; 4.
    weight_map = {"a": shards[0], "b": shards[0], "c": shards[1], "d": shards[2], "e": shards[3]}
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {"metadata": {"total_size": 4 * 57}, "weight_map": weight_map}
    assert_same(read_all(tmp_path), tensors)


def test_tensors_are_written_whatever_their_strides_and_sharing(tmp_path: Path) -> None:
    base = torch.randn(5, 7)
    tensors = {
        "turned": base.t(),
        "stepped": base[::2, 1::3],
        "one axis": torch.arange(11.0)[::3],
        "spread": base[:1].expand(11, 7),
        "whole": base,
        "again": base,
        "part": base[1:3],
        "learned": torch.nn.Parameter(base.clone()),
        "conjugate": torch.complex(base, base).conj(),
        "byte": torch.arange(3, dtype=torch.uint8),
    }
    write_folder(tmp_path, CONFIG, tensors)
    assert_same(read_all(tmp_path), tensors)


def test_every_value_lies_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    types = (torch.uint8, torch.float64, torch.bfloat16, torch.bool, torch.float32, torch.int16)
    write_folder(tmp_path, CONFIG, {str(t): torch.ones(3).to(t) for t in types})
    first = json.loads((tmp_path / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    length = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert length % 8 == 0
    for dtype in types:
        assert first[str(dtype)]["data_offsets"][0] % dtype.itemsize == 0


def test_other_files_go_along_and_strangers_stay(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    write_folder(
        tmp_path,
        CONFIG,
        make_tensors(),
        files={"tokenizer.json": '{"ä": 1}', "spiece.model": b"\0"},
    )
    assert (tmp_path / "tokenizer.json").read_bytes() == '{"ä": 1}'.encode()
    assert (tmp_path / "spiece.model").read_bytes() == b"\0"
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_checkpoint_can_be_written_over_itself(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIG, make_tensors())
    folder = Folder.open(tmp_path)
    tensors = {name: folder.read(name) for name in folder.stored}
    write_folder(tmp_path, CONFIG, tensors)
    assert_same(read_all(tmp_path), make_tensors())


# ---- Refused at the door


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"a": float("nan")}, "config cannot be written as config.json"),
        ({"a": torch.float32}, "config cannot be written as config.json: Object of type dtype"),
        (cyclic(), "config cannot be written"),
        ({"a": "\ud800"}, "has half a character"),
        ({1: "a", "1": "b"}, "has the key '1' twice"),
        ({"a": "x" * 10_000_000}, "at most 10000000"),
    ],
)
def test_a_config_that_could_not_be_read_again_is_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        write_folder(tmp_path / "new", config, make_tensors())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "there are no tensors to write"),
        ({"__metadata__": torch.ones(3)}, "cannot be the name of a tensor"),
        ({"\ud800": torch.ones(3)}, "cannot be the name of a tensor"),
        ({"a": torch.ones(3, device="meta")}, "only dense tensors that hold data"),
        ({"a": torch.ones(3, 3).to_sparse()}, "only dense tensors that hold data"),
        ({"a": torch.ones(3).to(torch.float8_e5m2)}, "convert it to one of float64, float32"),
        ({"a": torch.ones(3, dtype=torch.complex128)}, "convert it to one of"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        write_folder(tmp_path / "new", CONFIG, tensors)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../evil", "expected a plain name, no path"),
        ("/etc/evil", "expected a plain name, no path"),
        (".regard-pending.json", "expected a plain name, no path"),
        ("", "expected a plain name, no path"),
        ("a\0", "expected a plain name, no path"),
        ("config.json", "which the checkpoint itself uses"),
        ("Config.JSON", "which the checkpoint itself uses"),
        ("model.safetensors", "which the checkpoint itself uses"),
        (INDEX, "which the checkpoint itself uses"),
        ("model-00001-of-00009.safetensors", "which the checkpoint itself uses"),
    ],
)
def test_names_that_are_not_theirs_to_take_are_refused(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        write_folder(tmp_path / "new", CONFIG, make_tensors(), files={name: b""})
    assert not (tmp_path / "new").exists()


def test_other_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, got 0"):
        write_folder(tmp_path, CONFIG, make_tensors(), max_shard_bytes=0)
    with pytest.raises(TypeError, match="must be a tensor, got list"):
        write_folder(tmp_path, CONFIG, {"a": [1]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="config must be a dict"):
        write_folder(tmp_path, [], make_tensors())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be bytes or str, got int"):
        write_folder(tmp_path, CONFIG, make_tensors(), files={"a": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="is not UTF-8"):
        write_folder(tmp_path / "a\udcff", CONFIG, make_tensors())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        write_folder(tmp_path / "file", CONFIG, make_tensors())
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match="is a folder where a file must go"):
        write_folder(tmp_path, CONFIG, make_tensors())


# ---- Interruptions


class Cut(BaseException):
    """The moment at which the process ends."""


@contextlib.contextmanager
def cut_at(step: int, failure: BaseException, how: str) -> Iterator[list[str]]:
    """Fail at one step of all that touch names or the disk, and tell which steps were done.

    "killed": nothing works afterwards, not even cleaning up. "late": the step itself is done.
    """
    done: list[str] = []
    count = itertools.count()

    def replaced(name: str, real: Any) -> Any:
        def act(*args: Any) -> None:
            number = next(count)
            if number == step and how == "late":
                with contextlib.suppress(FileNotFoundError):
                    real(*args)
                done.append(name)
            if number == step or (number > step and how == "killed"):
                raise failure
            real(*args)
            done.append(name)

        return act

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):
            patch.setattr(os, name, replaced(name, getattr(os, name)))
        yield done


LAYOUTS = {"single": 10**9, "few": 100, "many": 1}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "few"),
        ("single", "single"),
        ("single", "few"),
        ("few", "single"),
        ("few", "few"),
        ("few", "many"),
    ],
)
@pytest.mark.parametrize("how", ["killed", "failing", "early", "late"])
def test_a_write_cut_short_anywhere_leaves_the_old_or_the_new_whole(
    tmp_path: Path, before: str | None, after: str, how: str
) -> None:
    old, new = make_tensors(1), {**make_tensors(2), "more": torch.ones(3)}
    failure = OSError(errno.EIO, "the disk") if how == "failing" else Cut()
    seen = set()
    for step in range(99):
        root = tmp_path / f"{step}"
        if before:
            write_folder(root, OLD_CONFIG, old, max_shard_bytes=LAYOUTS[before])
        try:
            with cut_at(step, failure, how) as done:
                write_folder(root, NEW_CONFIG, new, max_shard_bytes=LAYOUTS[after])
            break
        except (Cut, OSError) as error:
            assert error is failure
        committed = any(name == "replace" for name in done)
        if before is None and not committed:
            with pytest.raises(BadCheckpoint, match="has no weights"):
                Folder.open(root)
        else:
            assert Folder.open(root).config == (NEW_CONFIG if committed else OLD_CONFIG)
            assert_same(read_all(root), new if committed else old)
        if not committed and how != "killed":
            assert not [name for name in names_in(root) if name.startswith(".regard")]
        seen.add(committed)
        # The next write finishes or clears what is there, and leaves nothing of either behind.
        write_folder(root, CONFIG, make_tensors(3), max_shard_bytes=10**9)
        assert names_in(root) == ["config.json", "model.safetensors"]
        assert_same(read_all(root), make_tensors(3))
    assert seen == {True, False}
    assert_same(read_all(root), new)


def test_the_next_write_finishes_the_one_cut_short(tmp_path: Path) -> None:
    write_folder(tmp_path, OLD_CONFIG, make_tensors(1))
    for step in range(99):
        with contextlib.suppress(Cut), cut_at(step, Cut(), "killed") as done:
            write_folder(tmp_path, NEW_CONFIG, make_tensors(2), files={"tokenizer.json": "{}"})
        if "replace" in done:
            break
    assert not (tmp_path / "tokenizer.json").exists()
    write_folder(tmp_path, CONFIG, make_tensors(3))
    assert names_in(tmp_path) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_same(read_all(tmp_path), make_tensors(3))


def test_a_full_disk_passes_through_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, OLD_CONFIG, make_tensors(1))
    before = names_in(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_folder(tmp_path, NEW_CONFIG, make_tensors(2), max_shard_bytes=100)
    assert caught.value.errno == errno.ENOSPC
    assert names_in(tmp_path) == before
    assert_same(read_all(tmp_path), make_tensors(1))


def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path, OLD_CONFIG, make_tensors(1))
    before = names_in(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_folder(tmp_path, NEW_CONFIG, {"a": torch.ones(7001)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == before
    assert_same(read_all(tmp_path), make_tensors(1))


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"tag": "0" * 16, "files": [], "stale": ["README.md"]},
        {"tag": "0" * 16, "files": ["../x"], "stale": []},
        {"tag": "../../../../x", "files": [], "stale": []},
        {"tag": "0" * 16, "files": [["x"]], "stale": []},
        {"tag": "0" * 16, "files": ["model.safetensors"], "stale": ["model.safetensors"]},
    ],
)
def test_a_hostile_note_of_a_pending_write_is_refused(tmp_path: Path, said: object) -> None:
    write_folder(tmp_path, CONFIG, make_tensors())
    (tmp_path / ".regard-pending.json").write_text(json.dumps(said))
    with pytest.raises(BadCheckpoint, match="should tell of a write that was cut short"):
        Folder.open(tmp_path)
    with pytest.raises(BadCheckpoint, match="should tell of a write that was cut short"):
        write_folder(tmp_path, CONFIG, make_tensors())


# ---- transformers reads it


@pytest.mark.parametrize("max_shard_bytes", [10**9, 5_000])
@pytest.mark.parametrize("tied", ["left out", "written"])
def test_transformers_opens_what_was_written(
    tmp_path: Path, max_shard_bytes: int, tied: str
) -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=37, n_positions=23, n_embd=12, n_layer=2, n_head=3)
    torch.manual_seed(5)
    original = transformers.GPT2LMHeadModel(config).eval()
    state = original.state_dict()
    if tied == "left out":
        state.pop("lm_head.weight")
    write_folder(tmp_path, config.to_dict(), state, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / INDEX).exists() == (max_shard_bytes == 5_000)
    written = {
        "architectures": ["GPT2LMHeadModel"],
        **json.loads((tmp_path / "config.json").read_text()),
    }
    assert written["model_type"] == "gpt2"
    opened, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    ids = torch.tensor([[3, 1, 31, 7, 11]])
    with torch.no_grad():
        assert torch.equal(opened.eval()(ids).logits, original(ids).logits)
    # A single file goes before an index there, as it does here.
    if max_shard_bytes == 5_000:
        other = {name: tensor + 1 for name, tensor in state.items()}
        write_folder(tmp_path / "other", config.to_dict(), other)
        os.replace(tmp_path / "other" / "model.safetensors", tmp_path / "model.safetensors")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(
            again.state_dict()["transformer.ln_f.bias"], state["transformer.ln_f.bias"] + 1
        )
        assert_same(read_all(tmp_path), other)
