"""`load` and `save`: what is mapped, what is shared, what goes along, and where it is refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_small
from tiny_checkpoints import CONFIGS, edit_config, make_folder, make_model, make_sharded
from tokenmakers import byte_level
from torch import Tensor, nn

from regard.models import (
    BadCheckpoint,
    HeadConfig,
    ModelConfig,
    Transformer,
    config_of,
    count_parameters,
    load,
    save,
)
from regard.models.hf_folder import Folder

FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Where the tensors lie that folders hand out, by name; these are mapped from the file."""
    where: dict[str, tuple[int, int]] = {}
    read = Folder.read

    def note(self: Folder, name: str) -> Tensor:
        tensor = read(self, name)
        where[name] = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return tensor

    monkeypatch.setattr(Folder, "read", note)
    return where


def mapped(model: nn.Module, where: dict[str, tuple[int, int]]) -> list[str]:
    """The parameters that still lie where a folder handed them out."""
    return [
        name
        for name, tensor in model.named_parameters()
        if any(start <= tensor.data_ptr() < end for start, end in where.values())
    ]


def assert_same_weights(one: Transformer, other: Transformer) -> None:
    """Every parameter the same, under the same name and in the same type."""
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


# ---- Loading


@pytest.mark.parametrize("name", ["llama", "t5", "palm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_their_own_type_stay_in_the_file(
    name: str, dtype: torch.dtype, tmp_path: Path, handed_out: dict[str, tuple[int, int]]
) -> None:
    model = load(make_folder(name, tmp_path / "folder", dtype))
    every = [name for name, _ in model.named_parameters()]
    assert mapped(model, handed_out) == every
    assert all(tensor.dtype == dtype for tensor in model.parameters())


def test_what_must_be_turned_is_copied_and_nothing_else(
    tmp_path: Path, handed_out: dict[str, tuple[int, int]]
) -> None:
    model = load(make_folder("gpt2", tmp_path / "folder"))
    turned = {name for name, _ in model.named_parameters()} - set(mapped(model, handed_out))
    matrices = ("q_proj", "k_proj", "v_proj", "out_proj", "up_proj", "down_proj")
    assert turned == {
        name
        for name, tensor in model.named_parameters()
        if tensor.dim() == 2 and any(f"{word}.weight" in name for word in matrices)
    }
    assert all(tensor.is_contiguous() for tensor in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_type_are_converted(
    dtype: torch.dtype, tmp_path: Path, handed_out: dict[str, tuple[int, int]]
) -> None:
    root = make_folder("llama", tmp_path / "folder")
    stored = dict(load(root).named_parameters())
    model = load(root, dtype=dtype)
    assert not mapped(model, handed_out)
    for name, tensor in model.named_parameters():
        assert tensor.dtype == dtype and torch.equal(tensor, stored[name].to(dtype)), name


def test_changing_a_loaded_model_leaves_its_file_alone(tmp_path: Path) -> None:
    root = make_folder("llama", tmp_path / "folder")
    before = (root / FILE).read_bytes()
    model = load(root)
    out = model(torch.tensor([[5, 7, 11]]))
    assert out.logits is not None
    out.logits.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    kept = load(root)
    assert not torch.equal(kept.head.weight, model.head.weight)  # type: ignore[union-attr]
    assert (root / FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, torch.bfloat16),
        ({"dtype": None}, torch.bfloat16),
        ({"dtype": "float8_e4m3fn"}, torch.bfloat16),
        ({"dtype": ["float32"]}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": None, "torch_dtype": "float64"}, torch.float64),
        ({"dtype": "torch.float16"}, torch.float16),
    ],
)
def test_without_a_wish_the_type_is_the_configs_or_the_files(
    said: dict[str, Any], expected: torch.dtype, tmp_path: Path
) -> None:
    root = edit_config(make_folder("llama", tmp_path / "folder", torch.bfloat16), **said)
    assert {tensor.dtype for tensor in load(root).parameters()} == {expected}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_model_is_whole_tied_and_ready(name: str, tmp_path: Path) -> None:
    made = make_model(name)
    save(made, tmp_path / "folder")
    model = load(tmp_path / "folder")
    assert_same_weights(model, made)
    assert sum(tensor.numel() for tensor in model.parameters()) == count_parameters(model.config)
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in model.parameters())
    assert not any(module.training for module in model.modules())
    assert model.head is not None
    tables = [side.tokens.weight for side in (model.encoder_embed, model.decoder_embed) if side]
    assert all(table is tables[0] for table in tables)
    assert (model.head.weight is tables[0]) == model.config.head.tied


# ---- Saving


def put_beside(root: Path) -> dict[str, bytes]:
    """A tokenizer and how to generate, as they lie beside weights."""
    files = {
        "tokenizer.json": byte_level().encode(),
        "tokenizer_config.json": b'{"eos_token": "<|end|>"}',
        "generation_config.json": b'{"max_new_tokens": 17}',
        "vocab.txt": b"a\nb\n",
        "chat_template.jinja": b"{{ messages[0].content }}",
    }
    for name, data in files.items():
        (root / name).write_bytes(data)
    return files


def test_a_link_to_a_file_that_is_lost_is_not_left_out_of_a_copy(tmp_path: Path) -> None:
    root = make_folder("llama", tmp_path / "root")
    model = load(root)
    (root / "vocab.txt").symlink_to(tmp_path / "lost")
    with pytest.raises(BadCheckpoint, match=r"vocab.txt' \(a link to .*\) is missing"):
        save(model, tmp_path / "copy")


def test_tokenizer_and_generation_config_go_along(tmp_path: Path) -> None:
    root = make_folder("gpt2", tmp_path / "folder")
    files = put_beside(root)
    (root / "README.md").write_text("stays")
    save(load(root), tmp_path / "again")
    found = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert found.keys() == {*files, "config.json", FILE}
    assert all(found[name] == data for name, data in files.items())
    again = load(tmp_path / "again")
    assert again.tokenizer is not None and again.tokenizer.decode([5, 7]) is not None
    assert load(make_folder("gpt2", tmp_path / "bare")).tokenizer is None


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    root = make_sharded("bart", tmp_path / "shards")
    assert len(list(root.glob("model-*.safetensors"))) > 3
    assert not (root / FILE).exists()
    assert_same_weights(load(root), make_model("bart"))


def test_a_folder_is_written_over_with_nothing_left_of_the_old(tmp_path: Path) -> None:
    root = make_sharded("gpt2", tmp_path / "folder")
    put_beside(root)
    save(make_model("llama"), root)
    assert {path.name for path in root.glob("model*")} == {FILE}
    assert_same_weights(load(root), make_model("llama"))
    save(make_model("bert"), root, max_shard_gb=4e-6)
    assert not (root / FILE).exists()
    assert_same_weights(load(root), make_model("bert"))


@pytest.mark.parametrize("gigabytes", [5.0, 4e-6])
def test_a_model_is_saved_into_the_folder_it_is_mapped_from(
    gigabytes: float, tmp_path: Path, handed_out: dict[str, tuple[int, int]]
) -> None:
    root = make_folder("llama", tmp_path / "folder")
    files = put_beside(root)
    model, before = load(root), make_model("llama")
    assert mapped(model, handed_out)
    with torch.no_grad():
        model.head.weight.mul_(2)  # type: ignore[union-attr]
        before.head.weight.mul_(2)  # type: ignore[union-attr]
    save(model, root, max_shard_gb=gigabytes)
    assert_same_weights(model, before)
    assert_same_weights(load(root), before)
    assert all((root / name).read_bytes() == data for name, data in files.items())


def head_with(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, head=replace(config.head, **changes))


CHANGES: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "length": lambda config: replace(config, max_len=5),
    "tokens": lambda config: replace(config, tokens=replace(config.tokens, pad=5)),
    "layers": lambda config: replace(config, decoder=config.decoder[:2]),
    "window": lambda config: replace(
        config, decoder=tuple(replace(block, window=(3, None)) for block in config.decoder)
    ),
    "softcap": head_with(softcap=3.0),
    "scale": head_with(scale=0.5),
    "tie": head_with(tied=False),
    "no head": head_with(kind="none"),
    "family": lambda config: replace(config, family="mine"),
    "no source": lambda config: replace(config, source={}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_config_that_no_file_tells_is_not_saved(name: str, tmp_path: Path) -> None:
    model = Transformer(CHANGES[name](config_of(CONFIGS["gpt2"])))
    with pytest.raises(ValueError, match=r"config was changed.*models\.config_of"):
        save(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_bare_model_is_saved_where_its_config_says_so(tmp_path: Path) -> None:
    config = config_of({**CONFIGS["llama"], "architectures": ["LlamaModel"]})
    model = Transformer(replace(config, head=replace(config.head, kind="none")))
    save(model, tmp_path / "folder")
    assert_same_weights(load(tmp_path / "folder"), model)
    assert load(tmp_path / "folder").head is None


def undo_tie(model: Transformer) -> None:
    assert model.head is not None
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def add_part(model: Transformer) -> None:
    model.adapter = nn.Linear(3, 5)


def take_away(model: Transformer) -> None:
    assert model.decoder is not None
    model.decoder.layers[1].ffn.up_proj.bias = None  # type: ignore[assignment,union-attr]


@pytest.mark.parametrize(
    ("change", "name"),
    [(undo_tie, r"head\.weight"), (add_part, r"adapter\.weight"), (take_away, r"up_proj\.bias")],
)
def test_parameters_that_would_be_lost_are_not_saved(
    change: Callable[[Transformer], None], name: str, tmp_path: Path
) -> None:
    model = make_model("gpt2")
    change(model)
    with pytest.raises(ValueError, match=f"parameters are not those of its config: .*{name}"):
        save(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("size", [0, -1.0, float("nan"), float("inf"), "5"])
def test_a_shard_size_that_is_none_is_refused(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_gb is"):
        save(make_model("gpt2"), tmp_path / "folder", max_shard_gb=size)


def test_saving_tells_the_type_it_wrote(tmp_path: Path) -> None:
    root = edit_config(make_folder("gpt2", tmp_path / "folder"), torch_dtype="float32")
    save(load(root, dtype=torch.bfloat16), tmp_path / "half")
    told = json.loads((tmp_path / "half" / "config.json").read_text())
    assert told["dtype"] == "bfloat16" and "torch_dtype" not in told
    assert {tensor.dtype for tensor in load(tmp_path / "half").parameters()} == {torch.bfloat16}


def test_a_file_without_pooler_or_output_layer_is_saved_as_it_came(tmp_path: Path) -> None:
    """`load` takes away what a file lacks; that is no change of the config."""
    bert = config_of(CONFIGS["bert"])
    bare = Transformer(replace(bert, head=replace(bert.head, pooler=False)))
    save(bare, tmp_path / "bert")
    assert load(tmp_path / "bert").pooler is None
    t5 = config_of(CONFIGS["t5"])
    assert t5.head == HeadConfig(tied=True, scale=20**-0.5)
    untied = Transformer(replace(t5, head=replace(t5.head, tied=False)))
    save(untied, tmp_path / "t5")
    assert_same_weights(load(tmp_path / "t5"), untied)


# ---- GGUF


def test_a_gguf_loads_without_the_package_for_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small(tmp_path / "m.gguf")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tokenizers", None)
        model = load(path)
        with pytest.raises(ImportError, match=r"pip install 'regard\[tokens\]'"):
            model.tokenizer  # noqa: B018
    assert model.tokenizer is not None
    assert model.tokenizer is model.tokenizer
    assert model.tokenizer.decode(model.tokenizer.encode(" ab").ids) == " ab"


def test_a_saved_gguf_has_its_tokenizer_beside_it(tmp_path: Path) -> None:
    model = load(write_small(tmp_path / "m.gguf"))
    save(model, tmp_path / "folder")
    (tmp_path / "m.gguf").unlink()
    again = load(tmp_path / "folder")
    assert_same_weights(again, model)
    assert again.tokenizer is not None and model.tokenizer is not None
    text = "ab abc d<x>"
    assert again.tokenizer.encode(text).ids == model.tokenizer.encode(text).ids
    assert again.tokenizer.chat_template == model.tokenizer.chat_template
    assert again.tokenizer.special == model.tokenizer.special


def test_a_name_or_another_model_in_the_place_of_ours_is_refused_in_words(tmp_path: Path) -> None:
    for wrong in (lambda: Transformer("gpt2"), lambda: count_parameters("gpt2")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="config is a str; expected a ModelConfig"):
            wrong()
    with pytest.raises(TypeError, match=r"source is a str; expected the dict of a config.json"):
        config_of("gpt2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a Linear; expected a regard Transformer"):
        save(nn.Linear(2, 3), tmp_path / "new")  # type: ignore[arg-type]
