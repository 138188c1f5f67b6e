"""Models that ranks share: one record of all heads on every rank, edits by the heads' own numbers.

The processes are started once (`watch_ranks.py` says what they do), two of them, on the CPU with
gloo; the same is done here on one device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_model
from watch_ranks import CASES, FAILING, IDS, OURS, SLOW, run_case

from regard.lens.head_shards import HeadShard, choose_heads, join
from regard.lens.record import Record
from regard.lens.recorder import Recorder
from regard.lens.row_takes import Chosen
from regard.lens.watch import DEFAULT_WANTS, hooks_to, watch
from regard.ops import ALiBi, Dense, attention

RANKS = Path(__file__).resolve().parent.parent / "watch_ranks.py"
CLOSE = 2e-5
"""Of the largest number: sums over ranks are made in another order, layer after layer."""


def start(folder: Path, *words: str) -> Path:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(RANKS), str(folder), *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    logs = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
    assert not ended.returncode, "\n".join([ended.stdout, ended.stderr, logs])
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("ranks"), "slow")


def assert_close(found: Any, want: Any, what: str = "") -> None:
    found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
    assert found.shape == want.shape, what
    gap = np.abs(found - want).max(initial=0.0)
    assert gap <= CLOSE * max(1.0, np.abs(want).max(initial=0.0)), (what, gap)


def compare(name: str, folder: Path, home: Path) -> None:
    home.mkdir()
    want = run_case(CASES[name], CASES[name][0](), home, name)
    for rank in range(2):
        found = torch.load(folder / f"rank {rank}" / f"{name}.pt", weights_only=True)
        assert torch.equal(found["all"], found["plain"])  # watching changed no bit
        for word, value in want.items():
            if word == "refused":
                assert found[word] == value
            else:
                assert_close(found[word], value, f"{name} {word} on rank {rank}")
        for word in ("all", "some"):
            one, two = (
                Record.open(place / f"{name} {word}.regard").check()
                for place in (folder / f"rank {rank}", home)
            )
            assert one.places == two.places and not one.notes
            for number, place in enumerate(two.places):
                for head in range(place.n_heads):
                    assert_close(one.map(number, head), two.map(number, head), place.name)
                statistics = set(two.statistics(number)) - {"top_keys", "peak_key"}
                for each in statistics:
                    mine, other = (x.statistics(number)[each] for x in (one, two))
                    assert_close(mine, other, f"{place.name} {each}")
                norms = two.value_norms(number)
                assert norms is None or np.allclose(one.value_norms(number), norms, atol=1e-4)


@pytest.mark.parametrize("name", OURS)
def test_ranks_have_one_record_and_edits_their_own_heads(
    name: str, ours: Path, tmp_path: Path
) -> None:
    compare(name, ours, tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_ranks_have_one_record_of_other_models(name: str, slow: Path, tmp_path: Path) -> None:
    compare(name, slow, tmp_path / "alone")


def test_a_place_that_fails_on_one_rank_is_left_out_on_both(ours: Path) -> None:
    for rank, why in ((0, "another rank could not record it"), (1, "IndexError: of no use")):
        found = torch.load(ours / f"rank {rank}" / "llama tensor.pt", weights_only=True)
        names, *notes = found["failed"]
        assert FAILING not in names and "decoder.layers.0.self_attn" in names
        assert len(notes) == 1 and FAILING in notes[0] and why in notes[0]


def record_parts(keep: str, **call: Any) -> list[Any]:
    """What a recorder has of one call when the block ends."""

    class Attends(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attention(x, x[:, ::2], x[:, ::2], **call)

    model = Attends()
    recorder = Recorder(model, Chosen(DEFAULT_WANTS, keep, None, None), None, None)
    with hooks_to(recorder):
        model(torch.randn(1, 4, 7, 5))
    return [take.finish() for take in recorder.takes.order]


RULES: dict[str, Any] = {
    "plain": {},
    "slopes": {"bias": ALiBi(4)},
    "bias of one head": {"bias": torch.randn(7, 7)},
    "runs of all": {"mask": Dense(torch.ones(7, 7).tril().bool())},
    "runs by head": {"mask": Dense(torch.rand(1, 4, 7, 7) < 0.7)},
    "runs of some heads": {
        "mask": Dense(torch.ones(1, 4, 7, 7).tril(3).bool() | (torch.arange(4) < 2)[:, None, None])
    },
}


@pytest.mark.parametrize("keep", ["qk", "statistics"])
@pytest.mark.parametrize("rule", RULES)
def test_parts_that_are_joined_are_the_whole(rule: str, keep: str) -> None:
    (whole,) = record_parts(keep, **RULES[rule])
    place, about, arrays = whole
    parts = [choose_heads(whole, heads) for heads in ((0, 1), (2, 3))]
    found_place, found_about, found = join(parts)
    assert found_place == place and found.keys() == arrays.keys()
    wide = np.arange(4) if "k" in arrays else about["key_heads"]
    assert found_about["key_heads"] == list(wide if keep == "qk" else found_about["key_heads"])
    for name in arrays.keys() - {"k", "first", "pairs"}:
        array = arrays[name]
        if name.startswith("bias") and len(found[name]) != len(array):
            array = np.broadcast_to(array, found[name].shape)
        assert np.array_equal(found[name], array), name
    if "k" in arrays:
        assert np.array_equal(found["k"], arrays["k"][about["key_heads"]])


def test_parts_of_other_sizes_are_not_joined() -> None:
    (whole,) = record_parts("qk")
    other = (replace(whole[0], n_keys=9), *whole[1:])
    with pytest.raises(ValueError, match="recorded different calls"):
        join([whole, other])
    with pytest.raises(ValueError, match=r"heads are \(1, 4\), and there are 4"):
        choose_heads(whole, (1, 4))


def test_heads_are_numbered_by_their_own_numbers() -> None:
    shard = HeadShard(None, first=3, total=6)
    assert shard.local((0, 2, 3, 5), 3) == [0, 2] and shard.local((0, 2), 3) == []
    assert shard.local(None, 3) is None


def test_a_model_of_one_device_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.lens.recorder.gather", None)
    model = make_model("llama")
    with torch.no_grad(), watch(model) as record:
        model(IDS)
    assert record.places
