"""Writes a model folder atomically: at no moment is there a broken checkpoint.

A checkpoint is several files, and a file system renames one at a time. So:
1. Every new file is written beside the old ones, under a temporary name that readers ignore.
2. One small file, `.regard-pending.json`, is renamed into place. It lists the files of the new
   checkpoint and the old files to be removed. This rename is the commit: before it `Folder.open`
   reads the complete old checkpoint, after it the complete new one.
3. The files are renamed to their names (shards, index, config, the rest), stale files are removed,
   and the pending file is removed last. If this is interrupted, the folder still reads as new, and
   the next `write_folder` finishes it first.
An error before step 2 removes what was written and is raised; the old folder is untouched. What a
killed process left behind is removed by the next `write_folder`.

Left out: two writers in one folder at the same time, and a guarantee for other programs that read
between steps 2 and 3: they do not know the pending file and may see old and new files together.
Weights under names other than ours and Hugging Face's are neither read nor removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard._files import (
    MARK,
    MAX_HEADER_BYTES,
    is_text,
    parse_json,
    read_json,
    remove_leftovers,
    replace_file,
    spell,
    spell_path,
    sync_folder,
)
from regard._files import make_header as pack_header
from regard.models.header import DTYPES, MAX_CONFIG_BYTES, BadCheckpoint

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PENDING = MARK + "pending.json"
MAX_NAME_BYTES = 200  # file systems allow 255; the temporary name is longer than the final one

_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_LEFTOVER = re.compile(re.escape(MARK) + "[0-9a-f]{16}-")
_DTYPE_WORDS = {dtype: word for word, dtype in DTYPES.items()}


def is_plain_name(name: object) -> bool:
    """Whether this is, on every operating system, the name of a file in the folder itself."""
    return (
        isinstance(name, str)
        and is_text(name)
        and 0 < len(name.encode("utf-8")) <= MAX_NAME_BYTES
        and name.isprintable()
        and not set(name) & set('/\\:*?"<>|')
        and not name.startswith(".")
    )


def _is_ours(name: str) -> bool:
    """Whether this is a name that `write_folder` gives to weights or to their index."""
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None


# ---- The pending file


@final
@dataclass(frozen=True)
class View:
    """A folder as of its last commit, whether or not its files have their final names yet."""

    root: Path
    tag: str = ""
    files: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    @staticmethod
    def of(root: Path) -> View:
        """Read `.regard-pending.json`; without one, all files have their final names."""
        path = root / PENDING
        if not os.path.lexists(path):
            return View(root)
        pending = read_json(path, MAX_HEADER_BYTES, BadCheckpoint)
        tag, files, stale = (pending.get(key) for key in ("tag", "files", "stale"))
        if (
            not isinstance(tag, str)
            or re.fullmatch("[0-9a-f]{16}", tag) is None
            or not isinstance(files, list)
            or not all(map(is_plain_name, files))
            or not isinstance(stale, list)
            or not all(isinstance(name, str) and _is_ours(name) for name in stale)
            or set(files) & set(stale)
        ):
            raise BadCheckpoint(
                f"{spell_path(path)} should tell of a write that was cut short (tag, files and "
                f"stale), but has {spell(pending)}; save the model again into a new folder"
            )
        return View(root, tag, tuple(files), tuple(stale))

    def beside(self, name: str) -> Path:
        return self.root / f"{MARK}{self.tag}-{name}"

    def locate(self, name: str) -> Path:
        if name in self.files and os.path.lexists(self.beside(name)):
            return self.beside(name)
        return self.root / name

    def names(self) -> set[str]:
        found = {name for name in os.listdir(self.root) if not name.startswith(MARK)}
        return (found | set(self.files)) - set(self.stale)

    def finish(self) -> None:
        """Rename pending files to their final names and remove stale ones; may be repeated."""
        for name in self.files:
            if os.path.lexists(self.beside(name)):
                os.replace(self.beside(name), self.root / name)
        sync_folder(self.root)  # the new names are on the disk before the old files go
        for name in self.stale:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.root / name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.root / PENDING)
        for name in os.listdir(self.root):
            if _LEFTOVER.match(name):
                os.unlink(self.root / name)
        remove_leftovers(self.root)
        sync_folder(self.root)


# ---- Writing


def write_folder(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = 5_000_000_000,
    files: Mapping[str, bytes | str] | None = None,
) -> None:
    """Write a folder that `Folder.open` and Hugging Face's `from_pretrained` read.

    Weights go into `model.safetensors`, or, above `max_shard_bytes`, into shards of at most that
    size (a larger tensor is alone in its shard) in the mapping's order, with their index. `files`
    are written too, by name (tokenizer, generation_config.json); text is encoded as UTF-8. Tensors
    may be on any device and have any strides; each is copied to contiguous CPU memory only while it
    is written. Tensors that share memory are written in full under each name.

    An existing folder keeps its other files; its old weights and config are replaced atomically:
    `Folder.open` always finds either the complete old checkpoint or the complete new one.
    """
    root = Path(os.fsdecode(path))
    if root.exists() and not root.is_dir():
        raise ValueError(f"{spell_path(root)} is a file; give a folder to write the model into")
    if not is_text(str(root)):
        raise ValueError(f"{spell_path(root)} is not UTF-8, and safetensors opens no such path")
    contents = _plan_weights(tensors, max_shard_bytes)
    contents[CONFIG] = _to_json(config, CONFIG)
    for name, given in (files or {}).items():
        _check_file(name, given, contents)
        contents[name] = given.encode("utf-8") if isinstance(given, str) else given
    root.mkdir(parents=True, exist_ok=True)
    View.of(root).finish()
    stale = [name for name in os.listdir(root) if _is_ours(name) and name not in contents]
    for name in (*contents, *stale):
        if (root / name).is_dir():
            raise ValueError(f"{spell_path(root / name)} is a folder where a file must go; move it")
    view = View(root, secrets.token_hex(8), tuple(contents), tuple(sorted(stale)))
    try:
        for name, content in contents.items():
            _write_file(view.beside(name), content)
        sync_folder(root)
        pending = {"tag": view.tag, "files": view.files, "stale": view.stale}
        with replace_file(root / PENDING) as file:
            file.write(json.dumps(pending).encode("utf-8"))
    except BaseException:
        # An interrupt may come after the rename: from then on these files are the checkpoint.
        if not os.path.lexists(root / PENDING):
            for name in contents:
                with contextlib.suppress(OSError):
                    os.unlink(view.beside(name))
        raise
    view.finish()


def _to_json(value: Mapping[str, Any], name: str) -> bytes:
    """Encode as JSON; refuse what `Folder.open` would refuse to read."""
    if not isinstance(value, Mapping):
        raise TypeError(f"config must be a dict for {name}, got {type(value).__name__}")
    try:
        data = (json.dumps(dict(value), indent=2, allow_nan=False) + "\n").encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"config cannot be written as {name}: {error}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ValueError(f"config takes {len(data)} bytes as {name}; at most {MAX_CONFIG_BYTES}")
    parse_json(data, f"{name} made of the given config", BadCheckpoint)
    return data


def _check_file(name: str, content: object, taken: Mapping[str, object]) -> None:
    if not isinstance(name, str) or not is_plain_name(name):
        raise ValueError(f"files has the file name {spell(name)}; expected a plain name, no path")
    lowered = {other.casefold() for other in taken}  # some file systems ignore case
    if name.casefold() in lowered or _is_ours(name.casefold()):
        raise ValueError(f"files has the file name {spell(name)}, which the checkpoint itself uses")
    if not isinstance(content, (bytes, str)):
        raise TypeError(f"files[{spell(name)}] must be bytes or str, got {type(content).__name__}")


def _plan_weights(
    tensors: Mapping[str, Tensor], max_shard_bytes: int
) -> dict[str, bytes | Mapping[str, Tensor]]:
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    if not tensors:
        raise ValueError("there are no tensors to write; expected at least one")
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
        total += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    files: dict[str, bytes | Mapping[str, Tensor]] = dict(zip(names, shards, strict=True))
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files[INDEX] = (json.dumps(index, indent=2) + "\n").encode("utf-8")
    return files


def check_tensor(name: str, tensor: object) -> None:
    if not isinstance(name, str) or not is_text(name) or name == "__metadata__":
        raise ValueError(f"{spell(name)} cannot be the name of a tensor in a safetensors file")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{spell(name)} must be a tensor, got {type(tensor).__name__}")
    if str(tensor.layout) != "torch.strided" or tensor.is_meta or tensor.is_quantized:
        what = f"{spell(name)} is {tensor.layout} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{what}; only dense tensors that hold data can be written")
    if tensor.dtype not in _DTYPE_WORDS:
        what = f"{spell(name)} has the type {tensor.dtype}, which is not written; convert it to one"
        known = (str(dtype).removeprefix("torch.") for dtype in _DTYPE_WORDS)
        raise ValueError(f"{what} of {', '.join(known)}")


def make_header(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """The header, and the order of the tensors: wide types first, so that all are aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    described = {
        name: (_DTYPE_WORDS[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }
    return pack_header(described, metadata or {"format": "pt"}, order=order), order


def _write_file(path: Path, content: bytes | Mapping[str, Tensor]) -> None:
    with path.open("xb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            header, order = make_header(content)
            file.write(header)
            for name in order:
                file.write(to_bytes(content[name]).data)
        file.flush()
        os.fsync(file.fileno())


def to_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes, copied only if it is not already contiguous in CPU memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    values: npt.NDArray[np.uint8] = plain.reshape(-1).view(torch.uint8).numpy()
    return values
