"""A snapshot comes back bit for bit or not at all, and no kill or full disk loses the last one."""

import errno
import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.training import snapshot as module
from regard.training.snapshot import (
    BadSnapshot,
    SnapshotNotSaved,
    list_snapshots,
    load_best,
    load_latest,
    load_snapshot,
    save_snapshot,
)

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"seed": 17, "loss": 0.1 + 0.2, "order": [1, None, True], "deep": {"語": "猫\n\u0000"}}


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def steps_in(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in list_snapshots(folder)]


def save_steps(folder: Path, *steps: int, **how: Any) -> None:
    for step in steps:
        save_snapshot(folder, step, {"x": torch.full((3,), step)}, {"step": step}, **how)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8),
            right.contiguous().reshape(-1).view(torch.uint8),
        )
    )


def odd_tensors() -> dict[str, Tensor]:
    """One of every type that holds data, and the shapes and strides that others stumble over."""
    raw = torch.randint(0, 256, (7, 16), dtype=torch.uint8)
    kinds = [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
        *(torch.uint32, torch.uint64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    ]
    found = {str(kind): raw.view(kind) for kind in kinds}
    found["bool"] = raw > 100
    found["scalar"] = torch.tensor(2**62 + 1)
    found["odd scalar"] = torch.tensor(1.5, dtype=torch.float8_e5m2)
    found["empty"] = torch.empty(0, 5)
    found["not a number"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    found["turned"] = torch.randn(5, 3).T
    found["strided odd"] = torch.randn(4, 6, dtype=torch.complex128)[:, ::2].conj()
    found["parameter"] = torch.nn.Parameter(torch.randn(3))
    found["名前 with spaces"] = torch.ones(1)
    return found


# ---- There and back


def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    given = odd_tensors()
    path = save_snapshot(tmp_path / "new" / "run", 1000, given, FACTS)
    assert path == tmp_path / "new" / "run" / "step-00001000.safetensors"
    found = load_snapshot(path)
    assert (found.path, found.step, found.facts, found.passed_over) == (path, 1000, FACTS, ())
    assert list(found.tensors) == list(given)
    for name, tensor in given.items():
        assert same_bits(found.tensors[name], tensor.detach().resolve_conj()), name
    found.tensors["scalar"].add_(1)  # each has memory of its own
    assert not any(tensor.requires_grad for tensor in found.tensors.values())


def test_other_programs_read_a_snapshot_as_safetensors(tmp_path: Path) -> None:
    given = {"a": torch.randn(3, 5), "n": torch.tensor(7)}
    found = load_file(save_snapshot(tmp_path, 3, given, {}))
    assert same_bits(found["a"], given["a"]) and same_bits(found["n"], given["n"])


def test_a_state_without_tensors_is_one_too(tmp_path: Path) -> None:
    assert load_snapshot(save_snapshot(tmp_path, 0, {}, FACTS)).tensors == {}


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    one = save_snapshot(tmp_path / "a", 5, {"x": torch.ones(3)}, FACTS).read_bytes()
    assert save_snapshot(tmp_path / "b", 5, {"x": torch.ones(3)}, FACTS).read_bytes() == one


def test_the_state_is_not_copied_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is hashed and written is the tensor's own memory, in pieces."""
    state = {"x": torch.randn(2_000_003), "y": torch.randn(5)}
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in state.values()]
    sizes = []

    def look(tensor: Tensor) -> Any:
        data = true_to_bytes(tensor)
        assert any(start <= data.ctypes.data < end for start, end in spans)
        sizes.append(data.nbytes)
        return data

    true_to_bytes = module.to_bytes
    monkeypatch.setattr(module, "to_bytes", look)
    save_snapshot(tmp_path, 1, state, {})
    assert sorted(sizes) == [20, 8_000_012]


# ---- What is kept


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, keep=2)
    save_steps(tmp_path, 3, keep=2, best=True)
    save_steps(tmp_path, 4, 5, 6, keep=2)
    assert steps_in(tmp_path) == [6, 5, 3]
    best = load_best(tmp_path)
    assert best is not None and best.step == 3
    save_steps(tmp_path, 7, keep=1, best=True)
    assert steps_in(tmp_path) == [7]
    best = load_best(tmp_path)
    assert best is not None and best.step == 7


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    """A damaged file of a later step must not push out the snapshots written after it."""
    save_steps(tmp_path, 10, 20)
    list_snapshots(tmp_path)[0].write_bytes(b"damaged")
    save_steps(tmp_path, 11, 12, keep=1)
    assert steps_in(tmp_path) == [20, 12]
    latest = load_latest(tmp_path)
    assert latest is not None and latest.step == 12 and len(latest.passed_over) == 1


def test_steps_are_ordered_as_numbers_and_other_files_are_not_ours(tmp_path: Path) -> None:
    save_steps(tmp_path, 99_999_999, 100_000_000, 7, keep=9)
    for name in ("step-7.safetensors", "step-000000007.safetensors", "step-00000008.safetensors~"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "step-00000009.safetensors").mkdir()
    assert steps_in(tmp_path) == [100_000_000, 99_999_999, 7]
    save_steps(tmp_path, 100_000_001, keep=1)
    assert len(names_in(tmp_path)) == 5
    assert list_snapshots(tmp_path / "nothing") == []
    assert load_latest(tmp_path / "nothing") is None and load_best(tmp_path / "nothing") is None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_snapshot(tmp_path, 1, {"x": torch.zeros(3)}, {})
    save_snapshot(tmp_path, 1, {"y": torch.ones(5)}, {"second": True})
    assert load_snapshot(list_snapshots(tmp_path)[0]).facts == {"second": True}
    assert names_in(tmp_path) == ["step-00000001.safetensors"]


# ---- Damage


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = save_snapshot(tmp_path, 1, {"x": torch.arange(5), "y": torch.tensor(True)}, {"a": [1]})
    whole = path.read_bytes()
    chance = random.Random(17)
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= chance.choice([0x20, 1 << chance.randrange(8), chance.randrange(1, 256)])
        path.write_bytes(broken)
        with pytest.raises(BadSnapshot):
            load_snapshot(path)
    path.write_bytes(whole)
    assert load_snapshot(path).step == 1


def test_every_cut_and_every_addition_is_noticed(tmp_path: Path) -> None:
    path = save_snapshot(tmp_path, 1, {"x": torch.arange(5)}, {})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(BadSnapshot, match="cut short"):
            load_snapshot(path)
    for more in (b"\0", b"x" * 999):
        path.write_bytes(whole + more)
        with pytest.raises(BadSnapshot, match="is damaged: it has"):
            load_snapshot(path)


def test_swapped_values_and_names_are_noticed(tmp_path: Path) -> None:
    """Changes that keep the file a sound safetensors file, which only a checksum can tell."""
    path = save_snapshot(tmp_path, 1, {"aa": torch.zeros(3), "bb": torch.ones(3)}, {"lr": 1})
    whole = path.read_bytes()
    for old, new in ((b'"aa"', b'"cc"'), (b"lr", b"rl"), (b'"step":"1"', b'"step":"2"')):
        assert whole.count(old) == 1
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(BadSnapshot, match="header does not match its checksum"):
            load_snapshot(path)
    path.write_bytes(whole[:-24] + whole[-12:] + whole[-24:-12])
    with pytest.raises(BadSnapshot, match="bytes do not match their checksum"):
        load_snapshot(path)


def test_a_file_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    path = save_snapshot(tmp_path, 1, {}, {})
    path.rename(tmp_path / "step-00000002.safetensors")
    with pytest.raises(BadSnapshot, match="is of step 1"):
        load_snapshot(tmp_path / "step-00000002.safetensors")
    (tmp_path / "step-00000002.safetensors").rename(tmp_path / "mine.safetensors")
    assert load_snapshot(tmp_path / "mine.safetensors").step == 1


def test_what_is_no_snapshot_says_so(tmp_path: Path) -> None:
    save_file({"x": torch.randn(97)}, tmp_path / "model.safetensors")
    with pytest.raises(BadSnapshot, match="not a snapshot"):
        load_snapshot(tmp_path / "model.safetensors")
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(BadSnapshot, match=r"is missing|cannot be read"):
            load_snapshot(path)


def test_another_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSION", 2)
    path = save_snapshot(tmp_path, 1, {}, {})
    monkeypatch.undo()
    with pytest.raises(BadSnapshot, match=r"format '2'; this version of regard reads 1"):
        load_snapshot(path)


def test_damaged_ones_are_passed_over_and_told(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    newest, middle, oldest = list_snapshots(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-1])
    middle.write_bytes(b"")
    latest = load_latest(tmp_path)
    assert latest is not None and latest.step == 1
    assert [re.search(r"step-0+(\d)", text)[1] for text in latest.passed_over] == ["3", "2"]  # type: ignore[index]
    oldest.write_bytes(b"?")
    with pytest.raises(BadSnapshot, match="none of the 3 snapshots"):
        load_latest(tmp_path)


def test_a_damaged_best_is_an_error_and_nothing_is_removed_on_its_word(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, best=True)
    save_steps(tmp_path, 2, 3)
    best = tmp_path / "best.json"
    whole = best.read_bytes()
    for place, flip in itertools.product(range(len(whole)), (1, 2, 0x20)):
        broken = bytearray(whole)
        broken[place] ^= flip
        best.write_bytes(broken)
        with pytest.raises(BadSnapshot):
            load_best(tmp_path)
    save_steps(tmp_path, 4, keep=1)
    assert steps_in(tmp_path) == [4, 3, 2, 1]
    save_steps(tmp_path, 5, keep=1, best=True)
    assert steps_in(tmp_path) == [5]


# ---- Kills


def kill_savers(folder: Path, *how: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("kill_savers.py")
    done = subprocess.run(
        [sys.executable, str(program), str(folder), *how],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_at_any_line_of_a_save_loses_nothing(tmp_path: Path) -> None:
    told = kill_savers(tmp_path, "lines")
    assert told["faults"] == []
    assert told["lines"] > 100
    # It was killed in each of these states, so the steps between them were really cut apart.
    kept = "step-00000001 step-00000003 step-00000004"
    assert told["ends"] == sorted(
        [
            f"best.json {kept}",  # not begun
            f"waiting best.json {kept}",  # being written
            f"best.json {kept} step-00000005",  # renamed
            f"waiting best.json {kept} step-00000005",  # the new best.json being written
            "best.json step-00000003 step-00000004 step-00000005",  # while old ones are removed
            "best.json step-00000004 step-00000005",  # done
        ]
    )
    assert told["bests"] == 2


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    told = kill_savers(tmp_path, "random", "40")
    assert told["faults"] == []
    assert told["torn"] >= 3  # of the 40, so many were killed inside a write
    assert told["steps"] >= 40


def test_the_file_is_on_the_disk_before_its_name_and_its_name_before_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power may fail as well; no test can cut it, so the order of the calls is held."""
    save_steps(tmp_path, 1)
    calls: list[str] = []
    fsync, rename, unlink = os.fsync, os.replace, Path.unlink

    def spy_fsync(handle: int) -> None:
        is_folder = os.path.samestat(os.fstat(handle), tmp_path.stat())
        calls.append("sync folder" if is_folder else "sync file")
        fsync(handle)

    def spy_rename(source: Path, target: Path) -> None:
        calls.append(f"name {target.name}")
        rename(source, target)

    def spy_unlink(self: Path, missing_ok: bool = False) -> None:
        if self.exists():
            calls.append(f"remove {self.name}")
        unlink(self, missing_ok)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_rename)
    monkeypatch.setattr(Path, "unlink", spy_unlink)
    save_steps(tmp_path, 2, keep=1, best=True)
    one, two = "step-00000001.safetensors", "step-00000002.safetensors"
    assert calls == [
        *("sync file", f"name {two}", "sync folder"),
        *("sync file", "name best.json", "sync folder"),
        f"remove {one}",
    ]


# ---- A full disk


class FullAfter(io.FileIO):
    """A file on a disk that has room for so many bytes more."""

    room = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size > FullAfter.room:
            taken = super().write(memoryview(data).cast("B")[: FullAfter.room])
            FullAfter.room -= taken
            if taken:
                return taken  # as a disk does it: a short write, and the error at the next
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullAfter.room -= size
        return super().write(data)


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    true_open = Path.open

    def open_file(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if mode == "xb":
            return io.BufferedWriter(FullAfter(self, "x"))
        return true_open(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", open_file)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 0.999])
def test_a_full_disk_is_told_and_leaves_the_old_ones(
    tmp_path: Path, small_disk: None, share: float
) -> None:
    state = {"x": torch.randn(30_011), "y": torch.randn(10_007)}
    FullAfter.room = 10**9
    size = save_snapshot(tmp_path, 1, state, FACTS, best=True).stat().st_size
    before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    FullAfter.room = int(size * share)
    with pytest.raises(SnapshotNotSaved, match="No space left on device") as caught:
        save_snapshot(tmp_path, 2, state, FACTS, keep=1, best=True)
    assert f"takes {size:,} bytes" in str(caught.value)
    assert re.search(r"; [\d,]+ are free there", str(caught.value))
    assert "step-00000002" in str(caught.value) and caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, BadSnapshot) and isinstance(caught.value, OSError)
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == before


def test_a_disk_that_is_full_for_best_json_keeps_both(tmp_path: Path, small_disk: None) -> None:
    FullAfter.room = 10**9
    state = {"x": torch.randn(101)}
    size = save_snapshot(tmp_path, 1, state, {}, best=True).stat().st_size
    header = size - 101 * 4
    FullAfter.room = size + header + 10  # the header is written twice
    with pytest.raises(SnapshotNotSaved, match=r"best\.json"):
        save_snapshot(tmp_path, 2, state, {}, keep=1, best=True)
    assert steps_in(tmp_path) == [2, 1]
    assert (tmp_path / "best.json").read_bytes().count(b"step-00000001") == 1


@pytest.mark.parametrize("refusing", ["fsync", "replace", "mkdir"])
def test_a_disk_that_refuses_later_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    save_steps(tmp_path, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(Path if refusing == "mkdir" else os, refusing, refuse)
        with pytest.raises(SnapshotNotSaved, match="quota"):
            save_steps(tmp_path / "new" if refusing == "mkdir" else tmp_path, 2)
    assert names_in(tmp_path) == ["step-00000001.safetensors"]


def test_an_interrupt_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_steps(tmp_path, 1)
    assert names_in(tmp_path) == []


# ---- The door


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -1}, "step must be a whole number"),
        ({"step": True}, "step must be a whole number"),
        ({"step": 1.0}, "step must be a whole number"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"facts": {"loss": float("nan")}}, "plain JSON"),
        ({"facts": {"a": {1: 2}}}, r"facts\['a'\] has the key 1"),
        ({"facts": {"a": [{None: 2}]}}, r"facts\['a'\]\[0\] has the key None"),
        ({"facts": {"a": torch.ones(1)}}, "put arrays among the tensors"),
        ({"facts": {"a": "\ud800"}}, "plain JSON"),
        ({"facts": [1]}, "facts must be a dict"),
        ({"tensors": {"x": torch.empty(3, device="meta")}}, "only dense tensors that hold data"),
        ({"tensors": {"x": torch.eye(3).to_sparse()}}, "only dense tensors that hold data"),
        ({"tensors": {"__metadata__": torch.ones(1)}}, "cannot be the name"),
        ({"tensors": {"x": 1.0}}, "must be a tensor"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    given: dict[str, Any] = {"step": 1, "tensors": {"x": torch.ones(3)}, "facts": {}, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        save_snapshot(tmp_path / "run", **given)
    assert names_in(tmp_path) == []
