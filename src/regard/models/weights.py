"""`load` and `save`: a model from a folder of Hugging Face's, and such a folder from a model.

Why: the numbers are the model; a tensor that is missing, left over or in the wrong place must never
pass unseen.

How: the folder's headers tell names and shapes. Our model is built on the meta device, where it
weighs nothing; the family's links run backwards on it tell which names and shapes must be there.
Only when both agree is data read, one tensor at a time, memory-mapped, straight to its device and
type. Saving runs the links backwards on the real tensors.

Left out: pickled weights, quantised ones other than GGUF's, and models that are split over devices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.attention.finite import all_finite
from regard.models.config import ModelConfig
from regard.models.families import FAMILIES, config_of
from regard.models.family import Family
from regard.models.folder import BadCheckpoint, Folder, Stored, write_folder
from regard.models.hub import fetch_folder, looks_like_a_name
from regard.models.links import Link
from regard.models.transformer import Transformer

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
KEPT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Small files beside the weights that go along when a loaded model is saved."""


class Checkpoint(Protocol):
    """Where tensors come from: a folder, or a GGUF file that speaks like one."""

    path: Path
    config: dict[str, Any]
    stored: dict[str, Stored]

    def read(self, name: str) -> Tensor: ...


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> Transformer:
    """A model from a folder, a GGUF file, or a name on the Hugging Face hub; ready to use.

    dtype: None is the type the weights are stored in. device: where they go, with no second copy
    on the way. revision: the branch, tag or commit of a hub name. A folder of that name goes before
    the hub; what the hub sends is kept in its own cache.
    """
    check_dtype(dtype)
    path = Path(path_or_name)
    if not path.exists() and looks_like_a_name(path_or_name):
        path = fetch_folder(str(path_or_name), revision)
    elif revision is not None:
        raise ValueError(f"revision={revision!r} is for hub names, but {path} is on this machine")
    if path.suffix == ".gguf" and path.is_file():
        from regard.models.gguf import GGUFFile

        gguf = GGUFFile.open(path)
        model = build(gguf, dtype, torch.device(device))
        model.__dict__["tokenizer"] = gguf.tokenizer
        return model
    with Folder.open(path) as folder:
        return build(folder, dtype, torch.device(device))


def save(model: Transformer, path: str | os.PathLike[str], *, max_shard_gb: float = 5.0) -> None:
    """Write a folder that `load` and, where it knows the architecture, `transformers` open.

    Tensors have the type they have in the model. The tokenizer and generation_config.json of the
    folder the model came from go along. Files are written beside and renamed.
    """
    config = model.config
    if not config.source or config_of(config.source) != replace(config, head=_head_of(config)):
        raise ValueError(
            "this model's config was changed after it was made from config.json's words, so no "
            "config.json would say what it is; make it with models.config_of({...}) instead"
        )
    family = FAMILIES[config.family]
    ours = dict(model.named_parameters(remove_duplicate=False))
    bare = config.head.kind == "none"
    tensors: dict[str, Tensor] = {}
    for link in family.links(config):
        written = link.write([ours[name].detach() for name in link.ours])
        for name, tensor in zip(link.theirs, written, strict=True):
            tensors[name.removeprefix(family.prefix) if bare else name] = tensor
    source = dict(config.source)
    words = {value: word for word, value in DTYPES.items()}
    stored_as = words.get(next(iter(ours.values())).dtype, "float32")
    source.pop("torch_dtype", None)
    source["dtype"] = stored_as
    write_folder(
        path, source, tensors, max_shard_bytes=int(max_shard_gb * 1e9), files=files_beside(model)
    )


def _head_of(config: ModelConfig) -> Any:
    """The head that the config's source speaks of; a file may have had less."""
    return config_of(config.source).head


def files_beside(model: Transformer) -> dict[str, bytes]:
    """The small files that came with the weights."""
    origin = model.origin
    if origin is not None and origin.is_dir():
        found = (origin / name for name in KEPT_FILES)
        return {path.name: path.read_bytes() for path in found if path.is_file()}
    tokenizer = model.tokenizer
    texts = {} if tokenizer is None else tokenizer.texts
    return {name: text.encode() for name, text in texts.items()}


def build(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> Transformer:
    """The model of a checkpoint: everything is checked by name and shape, then read."""
    config = config_of(checkpoint.config)
    if config.n_layers > len(checkpoint.stored):
        raise BadCheckpoint(
            f"config.json speaks of {config.n_layers} layers, but there are "
            f"{len(checkpoint.stored)} tensors in all: config and weights are of different models"
        )
    family = FAMILIES[config.family]
    config = fit_parts(config, family, checkpoint)
    model = Transformer(config, device="meta")
    links = family.links(config)
    names = find_names(checkpoint, family, links)
    check_tensors(checkpoint, family, expected_shapes(model, links, names), config)
    dtype = dtype or stored_dtype(checkpoint, names[links[0].theirs[0]])
    for link in links:
        theirs = [read_checked(checkpoint, names[name], dtype) for name in link.theirs]
        for name, tensor in zip(link.ours, link.read(theirs), strict=True):
            # A part of a stacked tensor is a view of it; only what lies in one piece may stay one.
            put(model, name, tensor.to(device=device, dtype=dtype).contiguous())
    if model.head is not None and config.head.tied:
        embed = model.decoder_embed or model.encoder_embed
        assert embed is not None
        model.head.weight = embed.tokens.weight
    unset = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert not unset, f"the links of {family.name} leave out {unset}"
    model.origin = checkpoint.path
    return model.eval()


def fit_parts(config: ModelConfig, family: Family, checkpoint: Checkpoint) -> ModelConfig:
    """The config without a head or pooler of which the file has nothing, where it may lack them."""
    classes = checkpoint.config.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else ""
    bare = isinstance(named, str) and named.endswith("Model") and not named.endswith("HeadModel")
    links = family.links(config)
    names = find_names(checkpoint, family, links)

    def lacks(part: str) -> bool:
        own = [link for link in links if any(ours.startswith(part) for ours in link.ours)]
        return bool(own) and not any(
            names[name] in checkpoint.stored for link in own for name in link.theirs
        )

    head = config.head
    if bare and lacks("head."):
        head = replace(head, kind="none")
    if head.pooler and lacks("pooler."):
        head = replace(head, pooler=False)
    if head.kind == "lm" and family.output_layer is not None:
        table = find_copied(family.output_layer, family)
        assert table is not None
        head = replace(head, tied=not differ(checkpoint, family.output_layer, table))
    return replace(config, head=head)


def differ(checkpoint: Checkpoint, name: str, original: str) -> bool:
    """Whether the file has a tensor of this name that does not repeat the original."""
    one, other = checkpoint.stored.get(name), checkpoint.stored.get(original)
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return one is not None
    return not torch.equal(checkpoint.read(name), checkpoint.read(original))


def find_names(checkpoint: Checkpoint, family: Family, links: Iterable[Link]) -> dict[str, str]:
    """Each name of the links as this file spells it: files of the bare model have no prefix."""
    prefix = family.prefix
    prefixed = any(name.startswith(prefix) for name in checkpoint.stored)

    def spell(name: str) -> str:
        spelled = name if prefixed else name.removeprefix(prefix)
        for end, older_end in family.older_names.items():
            older = spelled.removesuffix(end) + older_end
            if spelled.endswith(end) and spelled not in checkpoint.stored:
                return older if older in checkpoint.stored else spelled
        return spelled

    return {name: spell(name) for link in links for name in link.theirs}


def expected_shapes(
    model: Transformer, links: Iterable[Link], names: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """The names and shapes that a file of this model has."""
    ours = dict(model.named_parameters(remove_duplicate=False))
    shapes = {}
    for link in links:
        written = link.write([ours[name] for name in link.ours])
        for name, tensor in zip(link.theirs, written, strict=True):
            shapes[names[name]] = tuple(tensor.shape)
    return shapes


def check_tensors(
    checkpoint: Checkpoint,
    family: Family,
    expected: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
) -> None:
    """None missing, none left over, every shape right, every repeated tensor equal."""
    stored = checkpoint.stored
    missing = [name for name in expected if name not in stored]
    if missing:
        hint = ""
        if any("lm_head" in name for name in missing):
            hint = "; if its output layer is the embedding, set tie_word_embeddings in config.json"
        raise BadCheckpoint(
            f"{checkpoint.path} lacks {len(missing)} tensors that a {family.name} model with this "
            f"config has: {some(missing)}{hint}"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise BadCheckpoint(
                f"{checkpoint.path}: tensor {name} has shape {list(stored[name].shape)}, but "
                f"config.json makes it {list(shape)}: config and weights are of different models"
            )
    left = []
    for name in stored:
        if name in expected:
            continue
        original = find_copied(name, family)
        if original is not None:
            check_copy(checkpoint, name, original, expected)
        elif not is_ignored(name, family) and not is_constant(checkpoint, name, family, config):
            left.append(name)
    if left:
        raise BadCheckpoint(
            f"{checkpoint.path} has {len(left)} tensors that a {family.name} model with this "
            f"config does not have: {some(left)}"
        )


def is_ignored(name: str, family: Family) -> bool:
    """Whether a file may have this tensor though the model does not need it."""
    bare = name.removeprefix(family.prefix)
    return any(re.fullmatch(pattern, bare) for pattern in family.ignored)


def is_constant(checkpoint: Checkpoint, name: str, family: Family, config: ModelConfig) -> bool:
    """Whether this tensor is one that is computed; then it must hold what is computed."""
    bare = name.removeprefix(family.prefix)
    makers = [make for end, make in family.constants.items() if re.fullmatch(end, bare)]
    if not makers:
        return False
    found = checkpoint.stored[name]
    wanted = makers[0](config, found.shape)
    if wanted is not None and found.dtype.is_floating_point:
        # A table in half precision is the same table, rounded.
        bound = max(1e-6, torch.finfo(found.dtype).eps)
        if bool(((checkpoint.read(name).float() - wanted).abs() <= bound).all()):
            return True
    raise BadCheckpoint(
        f"{checkpoint.path}: tensor {name} is not what a {family.name} model with this config "
        "computes there; a table of its own is not supported"
    )


def find_copied(name: str, family: Family) -> str | None:
    """The name of the tensor that this one repeats in tied models."""
    for pattern, original in family.copies.items():
        if re.fullmatch(pattern, name):
            return original
    return None


def check_copy(
    checkpoint: Checkpoint, name: str, original: str, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """A repeated tensor must be equal to the one it repeats."""
    if original not in expected:
        original = next((full for full in expected if original.endswith(f".{full}")), original)
    if original in checkpoint.stored:
        one, other = checkpoint.read(name), checkpoint.read(original)
        if one.shape == other.shape and torch.equal(one, other):
            return
    raise BadCheckpoint(
        f"{checkpoint.path}: config.json says that {name} is the same as {original}, but the file "
        "has two different tensors; set tie_word_embeddings to false there if both are meant"
    )


def read_checked(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """One tensor, all of its numbers finite, also in the type it will have."""
    tensor = checkpoint.read(name)
    if not tensor.is_floating_point():
        raise BadCheckpoint(
            f"{checkpoint.path}: tensor {name} holds {tensor.dtype}; expected floating point"
        )
    if not all_finite(tensor) and not bool(torch.isfinite(tensor).all()):
        n_bad = int((~torch.isfinite(tensor)).sum())
        raise BadCheckpoint(
            f"{checkpoint.path}: tensor {name} has {n_bad:,} numbers that are NaN or infinite of "
            f"{tensor.numel():,}: the file is damaged, or training had failed before it was written"
        )
    if dtype == torch.float16 and tensor.dtype != dtype and tensor.numel():
        largest = float(tensor.abs().max())
        if largest > torch.finfo(dtype).max:
            raise BadCheckpoint(
                f"{checkpoint.path}: tensor {name} has numbers up to {largest:g}, which float16 "
                "cannot hold; load it as bfloat16 or float32"
            )
    return tensor


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter of this dotted name."""
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._parameters[last] = nn.Parameter(tensor)


def stored_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """The type a model is loaded in when none is asked for: config.json's, else its embedding's."""
    word = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if isinstance(word, str) and word.removeprefix("torch.") in DTYPES:
        return DTYPES[word.removeprefix("torch.")]
    found = checkpoint.stored[name].dtype
    return found if found in DTYPES.values() else torch.float32


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}, as torch types")


def some(names: list[str], most: int = 4) -> str:
    """The first few names, made printable, and how many more there are."""
    shown = ", ".join(
        name if name.isprintable() and len(name) < 200 else repr(name)[:200]
        for name in names[:most]
    )
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
