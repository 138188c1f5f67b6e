"""A model folder in Hugging Face's layout: config.json and safetensors, in one file or shards.

Why: the loader needs to know for sure which tensors there are, and to read each of them. So
`Folder.open` checks everything that can be checked without reading a weight, and `Folder.read`
then returns memory-mapped tensors: nothing is copied, and pages are read when they are used.

How: safetensors checks the headers, within our bounds (`_files.py`), and maps the files. Which
files are read:
- `model.safetensors`, if it is there; an index beside it is ignored, since `from_pretrained` of
  transformers does the same and two programs must not read two models from one folder.
- else `model.safetensors.index.json` and the shards it names: by plain names only, so that no
  index points outside the folder. A shard may itself be a symbolic link to anywhere, as in the
  hub's cache, where snapshots link to blobs: who can put links there could put the weights there.
- Pickled, TensorFlow and Flax weights beside these are ignored; alone they are refused, with
  advice. So are adapters (LoRA) without their model.
If a write was interrupted, the folder is read as it was before or after the whole write
(`save_folder.py`).

Left out: the meaning of configs and names, and whether the values are finite (the loader checks
these); the sizes in the index's metadata (often stale, never needed); other names (`variant`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from safetensors import SafetensorError
from torch import Tensor

from regard._files import (
    MAX_HEADER_BYTES,
    Header,
    is_text,
    read_header,
    read_json,
    spell,
    spell_path,
    spell_some,
)
from regard.models.header import DTYPES, MAX_CONFIG_BYTES, BadCheckpoint, check_unchanged
from regard.models.save_folder import CONFIG, INDEX, SINGLE, View, is_plain_name, write_folder

__all__ = ["BadCheckpoint", "Folder", "Stored", "write_folder"]

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin.index.json")
_FOREIGN = (".h5", ".msgpack", ".ckpt.index", ".pb", ".h5.index.json", ".msgpack.index.json")
_PICKLE_WORDS = (
    "loading a pickle runs whatever code is in it. Whoever trusts the file can convert it: open "
    "it with the library that made it and call save_pretrained(folder, safe_serialization=True), "
    "or use the convert tool of safetensors"
)


@dataclass(frozen=True)
class Stored:
    """One tensor, as described in the header of its file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


@dataclass(frozen=True)
class _Shard:
    path: Path
    stored: dict[str, Stored]
    header: Header

    @staticmethod
    def open(path: Path) -> _Shard:
        header = read_header(path, BadCheckpoint, framework="pt")
        stored = {}
        for name, entry in header.entries.items():
            if entry.dtype not in DTYPES:
                raise BadCheckpoint(
                    f"{spell_path(path)}: tensor {spell(name)} has the type {spell(entry.dtype)}, "
                    "a quantised one whose values mean nothing without scales kept elsewhere; "
                    "convert the checkpoint to BF16, F16 or F32 first"
                )
            stored[name] = Stored(entry.shape, DTYPES[entry.dtype], path)
        return _Shard(path, stored, header)


@final
class Folder:
    """An opened model folder, made by `Folder.open`; leaving a `with`, or `close`, closes it.

    `config` is config.json; `stored` has every tensor in the order of the files' headers.
    """

    def __init__(self, path: Path, config: dict[str, Any], shards: Iterable[_Shard]) -> None:
        self.path = path
        self.config = config
        self.stored: dict[str, Stored] = {}
        self._holder: dict[str, _Shard] = {}
        for shard in shards:
            self.stored |= shard.stored
            self._holder |= dict.fromkeys(shard.stored, shard)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Folder:
        """Open a folder and check everything but the values; `BadCheckpoint` says what is wrong."""
        root = _check_root(path)
        view = View.of(root)
        try:
            names = view.names()
        except OSError as fault:
            what = f"{spell_path(root)} cannot be read: {fault.strerror}"
            raise BadCheckpoint(what) from None
        if SINGLE in names:
            shards = [_Shard.open(view.locate(SINGLE))]
        elif INDEX in names:
            shards = _open_shards(view, names)
        else:
            _refuse_without_weights(root, names)
        if not any(shard.stored for shard in shards):
            raise BadCheckpoint(f"{spell_path(shards[0].path)} holds no tensors at all")
        if CONFIG not in names:
            what = f"{spell_path(root)} has weights but no {CONFIG}, which says what they are"
            raise BadCheckpoint(f"{what}; download it from where the weights came from")
        config = read_json(view.locate(CONFIG), MAX_CONFIG_BYTES, BadCheckpoint)
        return Folder(root, config, shards)

    def read(self, name: str) -> Tensor:
        """The tensor, memory-mapped from its file; writing into it never changes the file.

        It stays valid after `close`. A tensor whose offset in the file is not a multiple of its
        item size (files of ours and of safetensors have none) is copied, since kernels may rely on
        alignment.
        """
        if self.stored and not self._holder:
            raise ValueError(f"the folder {spell_path(self.path)} is closed; open it again")
        shard = self._holder.get(name)
        if shard is None:
            what = f"{spell_path(self.path)} has no tensor {spell(name)}"
            raise BadCheckpoint(f"{what}; it has {len(self.stored)}: {spell_some(self.stored)}")
        check_unchanged(shard.path, shard.header.stamp)
        try:
            tensor: Tensor = shard.header.handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as fault:
            what = f"{spell_path(shard.path)}: tensor {spell(name)} cannot be read"
            raise BadCheckpoint(f"{what}: {spell(str(fault))}") from None
        return tensor.clone() if tensor.data_ptr() % tensor.dtype.itemsize else tensor

    def close(self) -> None:
        """Close the files; tensors that were read stay valid. May be called again."""
        self._holder.clear()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_root(path: str | os.PathLike[str]) -> Path:
    """The folder as a path; if it is none, raise with the reason and what to give instead."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, got {type(path).__name__}")
    root = Path(os.fsdecode(path))
    where = spell_path(root)
    if "\0" in str(root):
        raise BadCheckpoint(f"{where} has a NUL in it; no path may")
    if not is_text(str(root)):
        raise BadCheckpoint(f"{where} is not UTF-8, and safetensors opens no such path; rename it")
    # os.path's tests return False for a name that is too long, where Path's raise.
    if os.path.isdir(root):
        return root
    if not os.path.exists(root):
        linked = "is a link that leads nowhere, or to itself" if os.path.islink(root) else ""
        what = f"{where} {linked}" if linked else f"there is no folder or file {where}"
        raise BadCheckpoint(f"{what}; give a folder with config.json and weights, or a GGUF file")
    what = "is a file; expected a folder with config.json and weights"
    if root.suffix == ".safetensors":
        what = f"is a file of weights alone; give the folder it is in, {spell_path(root.parent)}, "
        what += "which must hold config.json too"
    elif root.suffix == ".gguf":
        what = "is a GGUF file, not a folder; it is read by its own reader"
    elif root.name.endswith(_PICKLED):
        what = f"is a pickle file and is refused: {_PICKLE_WORDS}"
    raise BadCheckpoint(f"{where} {what}")


def _refuse_without_weights(root: Path, names: set[str]) -> NoReturn:
    def having(endings: tuple[str, ...]) -> list[str]:
        return sorted(name for name in names if name.endswith(endings))

    pickled = [name for name in having(_PICKLED) if name != "training_args.bin"]
    expected = f"expected {SINGLE}, or {INDEX} and its shards"
    if "adapter_model.safetensors" in names:
        what = (
            f"holds only an adapter ('adapter_model.safetensors'), no model; {expected}. Merge the "
            "adapter into its model with the library that made it, and save that"
        )
    elif pickled:
        what = f"has its weights only as pickle ({spell_some(pickled)}), which is refused: "
        what += f"{_PICKLE_WORDS}"
    elif foreign := having(_FOREIGN):
        what = f"has its weights only for TensorFlow or Flax ({spell_some(foreign)}); {expected}. "
        what += "Convert them with transformers (from_tf or from_flax, then save_pretrained)"
    elif gguf := having((".gguf",)):
        what = f"has its weights only as GGUF ({spell_some(gguf)}); give that file itself"
    elif others := having((".safetensors",)):
        what = (
            f"has safetensors under other names ({spell_some(others)}); {expected}. Rename the one "
            f"that is meant to {SINGLE}, in a folder of its own"
        )
    elif (root / "training" / "recipe.json").is_file():
        what = (
            "holds a run that was stopped before its weights were written: go on with it by the "
            "same `regard train` command and --resume"
        )
    else:
        found = f"it has {spell_some(sorted(names))}" if names else "it is empty"
        what = f"has no weights: {found}; {expected}"
    raise BadCheckpoint(f"{spell_path(root)} {what}")


def _open_shards(view: View, names: set[str]) -> list[_Shard]:
    path = view.locate(INDEX)
    weight_map = _parse_index(path)
    files = list(dict.fromkeys(weight_map.values()))
    if lacking := [file for file in files if file not in names]:
        what = f"{spell_path(view.root)} lacks {len(lacking)} of the {len(files)} shards"
        raise BadCheckpoint(f"{what} that {INDEX} names: {spell_some(lacking)}; download them")
    shards = [_Shard.open(view.locate(file)) for file in files]
    found: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        for name in shard.stored:
            if name in found:
                raise BadCheckpoint(
                    f"{spell_path(view.root)} has tensor {spell(name)} in two shards, "
                    f"{spell(found[name])} and {spell(file)}; which one counts cannot be known"
                )
            found[name] = file
    for name in weight_map | found:
        if weight_map.get(name) != found.get(name):
            named, holds = (spell(files.get(name, "no shard")) for files in (weight_map, found))
            raise BadCheckpoint(
                f"{spell_path(path)} puts tensor {spell(name)} in {named}, but it is in {holds}; "
                "index and shards are not of one checkpoint: download them again"
            )
    return shards


def _parse_index(path: Path) -> dict[str, str]:
    where = spell_path(path)
    weight_map = read_json(path, MAX_HEADER_BYTES, BadCheckpoint).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        what = f"{where} has {spell(weight_map)} as weight_map"
        raise BadCheckpoint(f"{what}; expected an object that gives the file of each tensor")
    for name, file in weight_map.items():
        if not is_plain_name(file) or not file.endswith(".safetensors"):
            raise BadCheckpoint(
                f"{where} puts tensor {spell(name)} in {spell(file)}; expected the plain name of a "
                ".safetensors file in the same folder, since an index may not lead elsewhere"
            )
    return weight_map
