"""The door of `load`: what is no path, type or device, and names on the hub, without a network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_folder

from regard.models import BadCheckpoint, load

NOWHERE = (
    "/no/such",
    "a/b/c",
    "../gone",
    "a..b",
    "~/x",
    "a b",
    "http://x/y",
    "gpt2\n",
    "-x",
    "é/x",
)
FILES = ("x.gguf", "owner/x.gguf", "weights.safetensors")
ODD = ("x" * 5000, "owner/" + "x" * 300, "a\0b", "\udc80")


@pytest.mark.parametrize("name", [*NOWHERE, *FILES, *ODD])
def test_a_path_that_is_not_there_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # it is not asked
    with pytest.raises(BadCheckpoint, match=r"no folder|NUL|not UTF-8"):
        load(name)
    with pytest.raises(BadCheckpoint, match=r"no folder|NUL|not UTF-8"):
        load(Path(name))


@pytest.mark.parametrize("given", [None, 3, b"gpt2", ["gpt2"]])
def test_what_is_no_path_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"path_or_name is .*expected a folder"):
        load(given)


def test_nothing_is_not_the_folder_we_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_folder("gpt2", tmp_path / "folder"))
    with pytest.raises(ValueError, match="path_or_name is empty"):
        load("")
    assert load(".").config.vocab_size == 37


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    root = make_folder("gpt2", tmp_path / "folder")
    with pytest.raises(BadCheckpoint, match="give the folder it is in"):
        load(root / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="expected a folder"):
        load(root / "config.json")


@pytest.mark.parametrize("dtype", ["float16", torch.int64, torch.complex64, 16, []])
def test_a_type_that_is_none_is_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype is .*expected one of float32, float16"):
        load(tmp_path / "is not looked at", dtype=dtype)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("nonsense", "device is 'nonsense'; expected"),
        (None, "device is None; expected"),
        (1.5, r"device is 1\.5; expected"),
        ("meta", r"hold no numbers.*Transformer\(config, device='meta'\)"),
        ("cuda:99", "cannot use on this machine.*device='cpu'"),
    ],
)
def test_a_device_that_is_none_is_refused(device: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load(tmp_path / "is not looked at", device=device)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ != (
        device == "meta"
    )


# ---- Names on the hub


def hub_faults() -> dict[str, Exception]:
    """What the package really raises, each made as it makes it."""
    from huggingface_hub import errors

    network: Any = errors.HfHubHTTPError.__bases__[0]
    response: Any = SimpleNamespace(headers={}, request=None)
    return {
        "offline": errors.OfflineModeIsEnabled("offline mode is enabled"),
        "not cached": errors.LocalEntryNotFoundError("cannot find it in the cache"),
        "no such entry": errors.EntryNotFoundError("no such entry"),
        "no such model": errors.RepositoryNotFoundError("404 not found", response=response),
        "gated": errors.GatedRepoError("403 gated", response=response),
        "no such revision": errors.RevisionNotFoundError("no revision", response=response),
        "network": network("proxy refused\n\nthe connection"),
        "disk": OSError(28, "No space left on device"),
    }


FAULTS = ["offline", "not cached", "no such entry", "no such model", "gated", "no such revision"]


@pytest.mark.parametrize("name", [*FAULTS, "network", "disk"])
def test_a_hub_that_gives_nothing_is_told_with_the_way_out(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault = hub_faults()[name]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise fault

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match="there is no folder 'owner/tiny' here") as caught:
        load("owner/tiny")
    words = str(caught.value)
    assert type(fault).__name__ in words and "hf download owner/tiny" in words
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert words.isprintable()


def test_offline_the_package_itself_is_understood(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"HF_HUB_OFFLINE.*hf download owner/tiny"):
        load("owner/tiny")
    with pytest.raises(ValueError, match="'no--such', and it is no hub name"):
        load("no--such")


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"'owner/tiny'.*pip install 'regard\[hub\]'"):
        load("owner/tiny")
    make_folder("gpt2", tmp_path / "owner" / "tiny")
    assert load("owner/tiny").config.vocab_size == 37  # a folder goes before the hub
    with pytest.raises(ValueError, match="revision='v1' is for hub names"):
        load("owner/tiny", revision="v1")


def test_a_name_is_fetched_without_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root, asked = make_folder("gpt2", tmp_path / "cache"), {}

    def fetch(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(root)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert load("owner/tiny", revision="v1").origin == root
    assert (asked["name"], asked["revision"]) == ("owner/tiny", "v1")
    assert not any(re.search("bin|pt|ckpt|py", pattern) for pattern in asked["patterns"])
