"""`load` and `save`: a model from a Hugging Face folder, and such a folder from a model.

Why: the weights are the model; a tensor that is missing, unexpected or in the wrong place must
never go unnoticed.

How: the folder's headers have names and shapes. Our model is built on the meta device, where it
needs no memory; the family's links, applied backwards to it, give the names and shapes that must be
there. Only if both agree is data read, one tensor at a time, memory-mapped, straight to its device
and type. Saving applies the links backwards to the real tensors.

Left out: pickled weights, quantised ones other than GGUF's and our own (`int8.py`), and models that
are split over devices.
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

from regard._check import all_finite, check_number
from regard._files import read_bytes, spell_some
from regard.models.config import ModelConfig
from regard.models.embedded import find_embedded, is_embedded
from regard.models.families import FAMILIES, config_of
from regard.models.family import Family
from regard.models.hf_folder import BadCheckpoint, Folder, Stored, write_folder
from regard.models.hub import fetch_folder, looks_like_a_name
from regard.models.int8 import Int8Folder, is_int8, pack_folder
from regard.models.meta_init import make_blank
from regard.models.transformer import Transformer
from regard.models.weight_map import Link

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}
KEPT_FILES = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
KEPT_FILES += ["special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"]
KEPT_FILES += ["vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"]
KEPT_FILES += ["source.spm", "target.spm", "chat_template.jinja", "chat_template.json"]
"""Small files beside the weights that are copied when a loaded model is saved."""
MAX_KEPT_BYTES = 200_000_000
DIFFERENT = ": config and weights are of different models; download both again"


class Checkpoint(Protocol):
    """A source of tensors: a folder, or a GGUF file with the same interface."""

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
    """A pretrained model, in eval mode, with its tokenizer as `model.tokenizer` (or None).

    Args:
        path_or_name: A folder in Hugging Face's layout (config.json and safetensors), a GGUF file,
            a name on the Hugging Face hub, or a model inside the package: "embedded:encoder",
            "embedded:lm", "embedded:translate". A folder of that name is preferred to the hub.
        dtype: The dtype of the weights. None: the one that config.json names, else the one in
            which they are stored.
        device: Where the weights go.
        revision: The branch, tag or commit, for a hub name.

    Returns:
        A `Transformer`. `model(ids).logits` is (B, T, vocab_size) for ids (B, T).

    Raises:
        BadCheckpoint: (a ValueError) There is no such folder, or it is damaged (tensors missing,
            left over, or of the wrong shape), or of an architecture that regard does not have.
            Pickled weights are refused, as opening them runs code.
        FileNotFoundError: The hub did not give a model of that name.

    Example:
        >>> model = regard.load("embedded:lm")
        >>> ids = model.tokenizer.encode("The cat sat").ids
        >>> model(torch.tensor([ids])).logits.shape == (1, len(ids), model.config.vocab_size)
        True
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}, as torch types")
    target = find_device(device)
    path = check_path(path_or_name)
    if is_embedded(path_or_name):
        path = find_embedded(str(path_or_name))
    # os.path's test, since Path's raises if a name is too long for a file.
    if not os.path.lexists(path) and looks_like_a_name(path_or_name):
        path = fetch_folder(str(path_or_name), revision)
    elif revision is not None:
        raise ValueError(f"revision={revision!r} is for hub names, but {path} is on this machine")
    if path.suffix == ".gguf" and os.path.isfile(path):
        from regard.models.gguf import GGUFFile

        return build(GGUFFile.open(path), dtype, target)
    with Folder.open(path) as folder:
        return build(Int8Folder(folder) if is_int8(folder.config) else folder, dtype, target)


def save(model: Transformer, path: str | os.PathLike[str], *, max_shard_gb: float = 5.0) -> None:
    """Write a folder in Hugging Face's layout, which `load` opens, and `transformers` too.

    (`transformers` opens it where it knows the architecture.) The tokenizer and
    generation_config.json of the folder the model came from are copied along. A save that is
    interrupted leaves no half-written files.

    Args:
        model: What `load` returned, or a `Transformer` with a config from `models.config_of`.
        path: The folder; it is made if it is not there.
        max_shard_gb: The largest size of one safetensors file, in gigabytes.

    Raises:
        ValueError: The model has parameters that its config does not say, or lacks some.

    Example:
        >>> regard.save(regard.load("embedded:lm"), "copy")
        >>> model = regard.load("copy")
    """
    check_number("max_shard_gb", max_shard_gb)
    config, tensors = gather(model)
    size = int(max_shard_gb * 1e9)
    write_folder(path, config, tensors, max_shard_bytes=size, files=files_beside(model))


def save_int8(model: Transformer, path: str | os.PathLike[str]) -> None:
    """Write a folder of a quarter of the size, matrices in 8 bits (`int8.py`), that `load` opens.

    It is a separate function, not an option of `save`, because the loaded model is close to the
    original, not equal, and only regard can read the folder.
    """
    config, tensors = pack_folder(*gather(model))
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_folder(path, config, tensors, max_shard_bytes=size, files=files_beside(model))


def gather(model: Transformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of this model's folder: config.json, and the tensors by their names there."""
    if not isinstance(model, Transformer):
        came = f"model is a {type(model).__name__}; expected a regard Transformer"
        raise TypeError(f"{came}; a model of transformers has save_pretrained")
    config = model.config
    check_source(config)
    family = FAMILIES[config.family]
    links = family.links(config)
    check_written(model, links)
    prefix = family.prefix if config.head.kind == "none" else ""
    tensors = {name.removeprefix(prefix): x for name, x in to_theirs(model, links).items()}
    source = {key: value for key, value in config.source.items() if key != "torch_dtype"}
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {**source, "dtype": dtype if dtype in DTYPES else "float32"}, tensors


def to_theirs(model: Transformer, links: Iterable[Link]) -> dict[str, Tensor]:
    ours = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    for link in links:
        written = link.write([ours[name].detach() for name in link.ours])
        found.update(zip(link.theirs, written, strict=True))
    return found


def check_source(config: ModelConfig) -> None:
    """Refuse a config that its config.json does not reproduce, but for what `fit_parts` changes."""
    if config.source:
        again = config_of(config.source)
        head = replace(again.head, pooler=again.head.pooler and config.head.pooler)
        if config.head.kind == "none" and is_bare(config.source):
            head = replace(head, kind="none")
        if FAMILIES[again.family].output_layer is not None:
            head = replace(head, tied=config.head.tied)
        if replace(again, head=head) == config:
            return
    raise ValueError(
        "this model's config was changed after it was made from config.json's words, so no "
        "config.json would say what it is; make it with models.config_of({...}) instead"
    )


def check_written(model: Transformer, links: Iterable[Link]) -> None:
    """Refuse a model with parameters that would not be saved, such as weights no longer tied."""
    ours = dict(model.named_parameters(remove_duplicate=False))
    needed = [name for link in links for name in link.ours]
    written = {id(ours[name]) for name in needed if name in ours}
    lost = [name for name, tensor in model.named_parameters() if id(tensor) not in written]
    lost += [name for name in needed if name not in ours]
    if lost:
        raise ValueError(
            f"the model's parameters are not those of its config: {spell_some(lost)}; a tie was "
            "undone, or a part was added or taken away. Make a model with models.config_of({...}) "
            "that has them, and copy them there"
        )


def files_beside(model: Transformer) -> dict[str, bytes]:
    origin = model.origin
    if origin is not None and origin.is_dir():
        found = [name for name in KEPT_FILES if os.path.lexists(origin / name)]
        return {name: read_bytes(origin / name, MAX_KEPT_BYTES, BadCheckpoint) for name in found}
    texts = {} if model.tokenizer is None else model.tokenizer.texts
    return {name: text.encode() for name, text in texts.items()}


def build(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> Transformer:
    """Build the model of a checkpoint: check all names and shapes, then read the tensors."""
    config = config_of(checkpoint.config)
    n_layers = len(config.encoder) + len(config.decoder)
    if n_layers > len(checkpoint.stored):
        what = f"{checkpoint.path}: config.json speaks of {n_layers} layers, but"
        raise BadCheckpoint(f"{what} there are {len(checkpoint.stored)} tensors in all{DIFFERENT}")
    family = FAMILIES[config.family]
    config = fit_parts(config, family, checkpoint)
    model = make_blank(config)
    links = family.links(config)
    names = find_names(checkpoint, family, links)
    shapes = {names[name]: tuple(x.shape) for name, x in to_theirs(model, links).items()}
    check_tensors(checkpoint, family, shapes, config)
    dtype = dtype or stored_dtype(checkpoint, names[links[0].theirs[0]])
    for link in links:
        theirs = [read_checked(checkpoint, names[name], dtype) for name in link.theirs]
        for name, tensor in zip(link.ours, link.read(theirs), strict=True):
            # A part of a stacked tensor is a view of it; a view that is not contiguous is copied.
            tensor = tensor.to(device=device, dtype=dtype).contiguous()
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._parameters[last] = nn.Parameter(tensor)
    if model.head is not None and config.head.tied:
        embed = model.decoder_embed or model.encoder_embed
        assert embed is not None
        model.head.weight = embed.tokens.weight
    unset = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert not unset, f"the links of {family.name} leave out {unset}"
    model.origin = checkpoint.path
    return model.eval()


def fit_parts(config: ModelConfig, family: Family, checkpoint: Checkpoint) -> ModelConfig:
    """The config without a head or pooler that the file may lack and has no tensors of."""
    links = family.links(config)
    names = find_names(checkpoint, family, links)

    def lacks(part: str) -> bool:
        own = [link for link in links if any(ours.startswith(part) for ours in link.ours)]
        theirs = {names[name] for link in own for name in link.theirs}
        return bool(theirs) and theirs.isdisjoint(checkpoint.stored)

    head = config.head
    if is_bare(checkpoint.config) and lacks("head."):
        head = replace(head, kind="none")
    if head.pooler and lacks("pooler."):
        head = replace(head, pooler=False)
    if head.kind == "lm" and family.output_layer is not None:
        name, table = family.output_layer, find_copied(family.output_layer, family)
        assert table is not None
        tied = name not in checkpoint.stored or are_equal(checkpoint, name, table)
        head = replace(head, tied=tied)
    return replace(config, head=head)


def is_bare(source: Mapping[str, Any]) -> bool:
    """Whether config.json names the class without a head, such as GPT2Model."""
    classes = source.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else ""
    return isinstance(named, str) and named.endswith("Model") and not named.endswith("HeadModel")


def are_equal(checkpoint: Checkpoint, name: str, original: str) -> bool:
    """Whether two tensors are equal; NaN equals NaN here, as it is refused when it is read."""
    one, other = checkpoint.stored.get(name), checkpoint.stored.get(original)
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    first, second = checkpoint.read(name), checkpoint.read(original)
    return torch.equal(first, second) or torch.allclose(first, second, 0, 0, equal_nan=True)


def find_names(checkpoint: Checkpoint, family: Family, links: Iterable[Link]) -> dict[str, str]:
    """The names in the links -> those in this file: files of the bare model have no prefix."""
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


def check_tensors(
    checkpoint: Checkpoint,
    family: Family,
    expected: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
) -> None:
    """Refuse missing and unexpected tensors, wrong shapes, and copies that differ."""
    stored = checkpoint.stored
    if missing := [name for name in expected if name not in stored]:
        hint = "; if its output layer is the embedding, set tie_word_embeddings in config.json"
        hint = hint if any("lm_head" in name for name in missing) else DIFFERENT
        raise BadCheckpoint(
            f"{checkpoint.path} lacks {len(missing)} of the {len(expected)} tensors that a "
            f"{family.name} model with this config has: {spell_some(missing)}{hint}"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            what = f"{checkpoint.path}: tensor {name} has shape {list(stored[name].shape)}"
            raise BadCheckpoint(f"{what}, but config.json makes it {list(shape)}{DIFFERENT}")
    left = []
    for name in [name for name in stored if name not in expected]:
        bare = name.removeprefix(family.prefix)
        original = find_copied(name, family)
        if original is not None:
            check_copy(checkpoint, name, original, expected)
        elif any(re.fullmatch(pattern, bare) for pattern in family.ignored):
            continue
        elif not is_constant(checkpoint, name, family, config):
            left.append(name)
    if left:
        what = f"{checkpoint.path} has {len(left)} tensors that a {family.name} model"
        raise BadCheckpoint(f"{what} with this config does not have: {spell_some(left)}{DIFFERENT}")


def is_constant(checkpoint: Checkpoint, name: str, family: Family, config: ModelConfig) -> bool:
    """Whether this tensor is one that we compute; then refuse it if its values are different."""
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
    what = f"{checkpoint.path}: tensor {name} is not what a {family.name} model with"
    raise BadCheckpoint(f"{what} this config computes there; a table of its own is not supported")


def find_copied(name: str, family: Family) -> str | None:
    found = (original for pattern, original in family.copies.items() if re.fullmatch(pattern, name))
    return next(found, None)


def check_copy(
    checkpoint: Checkpoint, name: str, original: str, expected: Mapping[str, tuple[int, ...]]
) -> None:
    if original not in expected:
        original = next((full for full in expected if original.endswith(f".{full}")), original)
    if not are_equal(checkpoint, name, original):
        raise BadCheckpoint(
            f"{checkpoint.path}: config.json says that {name} is the same as {original}, but the "
            "file has two different tensors; set tie_word_embeddings to false if both are meant"
        )


def read_checked(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """Read one tensor, and check that its numbers are finite and fit into the target type."""
    tensor, where = checkpoint.read(name), f"{checkpoint.path}: tensor {name}"
    if not tensor.is_floating_point():
        what = f"{where} holds {tensor.dtype}; expected floating point. If the weights"
        raise BadCheckpoint(f"{what} are quantised, load the unquantised model, or its GGUF file")
    if not all_finite(tensor) and not bool(torch.isfinite(tensor).all()):
        n_bad = int((~torch.isfinite(tensor)).sum())
        raise BadCheckpoint(
            f"{where} has {n_bad:,} numbers that are NaN or infinite of {tensor.numel():,}: the "
            "file is damaged (download it again), or training had failed before it was written"
        )
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and tensor.numel():
        largest = max(abs(float(end)) for end in torch.aminmax(tensor))
        if largest > torch.finfo(dtype).max:
            what = f"{where} has numbers up to {largest:g}, which {dtype} cannot hold"
            raise BadCheckpoint(f"{what}; load it with dtype={tensor.dtype}, as it is stored")
    return tensor


def stored_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """The default dtype for loading: config.json's, else that of the first linked tensor."""
    word = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    found: torch.dtype = DTYPES.get(str(word).removeprefix("torch."), checkpoint.stored[name].dtype)
    return found if found in DTYPES.values() else torch.float32


def check_path(path_or_name: str | os.PathLike[str]) -> Path:
    expected = "expected a folder, a GGUF file or a hub name"
    if not isinstance(path_or_name, str | os.PathLike):
        came = repr(path_or_name)[:60]
        raise TypeError(f"path_or_name is {came}; {expected}, as a str or a path")
    if not os.fspath(path_or_name):
        raise ValueError(f"path_or_name is empty; {expected}")
    return Path(path_or_name)


def find_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        what = f"device is {device!r}; expected a device of torch on this machine"
        raise ValueError(f"{what}, such as 'cpu'") from None
    if found.type == "meta":
        what = "device is 'meta', where tensors hold no numbers; for a model"
        raise ValueError(f"{what} without weights make models.Transformer(config, device='meta')")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as wrong:
        said = str(wrong).partition("\n")[0][:100]
        raise ValueError(
            f"device is {str(found)!r}, which torch cannot use on this machine ({said}); load the "
            "model with device='cpu', or install the torch that is made for the device"
        ) from None
    return found
