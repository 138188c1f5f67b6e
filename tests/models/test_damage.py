"""Damaged folders, contradicting configs, wrong names: each is one clear error and nothing else."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import write_raw
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import (
    CONFIGS,
    edit_config,
    edit_index,
    edit_tensors,
    make_folder,
    make_sharded,
)
from torch import Tensor

from regard.models import BadCheckpoint, Transformer, config_of, load
from regard.models import hf_folder as folders
from regard.models.families import BY_MODEL_TYPE, UnknownFamily

FILE = "model.safetensors"
TABLE, PROJECTION = "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"
Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def held_files(root: Path) -> list[str]:
    """What this process has open or mapped in a folder."""
    if not Path("/proc/self/maps").exists():
        return []
    held = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    for handle in os.listdir("/proc/self/fd"):
        try:
            held.append(os.readlink(f"/proc/self/fd/{handle}"))
        except FileNotFoundError:  # the one that listed them
            continue
    return [path for path in held if path.startswith(str(root))]


def refused(root: Path, **how: Any) -> str:
    """The one error of `load`: no cause, one line, and no file is held after it."""
    try:
        load(root, **how)
    except BadCheckpoint as error:
        assert type(error) in (BadCheckpoint, UnknownFamily)
        assert error.__cause__ is None
        assert error.__context__ is None or error.__suppress_context__
        words = str(error)
    else:
        pytest.fail("the damaged folder was loaded")
    assert words.isprintable() and 30 < len(words) < 1000
    if held_files(root):
        gc.collect()  # an error and the frames it went through may hold each other
    assert not held_files(root)
    return words


# ---- The weights


def cut(n_bytes: int) -> Damage:
    return lambda root: os.truncate(root / FILE, n_bytes)


def cut_end(root: Path) -> None:
    os.truncate(root / FILE, (root / FILE).stat().st_size - 5)


def claim(n_bytes: int) -> Damage:
    """Say in the first eight bytes that the header is this long."""

    def damage(root: Path) -> None:
        data = (root / FILE).read_bytes()
        (root / FILE).write_bytes(n_bytes.to_bytes(8, "little") + data[8:])

    return damage


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    return lambda root: edit_tensors(root, change)


def set_one(value: float, dtype: torch.dtype, name: str = PROJECTION) -> Damage:
    """One number of one tensor."""

    def change(found: dict[str, Tensor]) -> None:
        found[name] = found[name].to(dtype)
        found[name][2, 3] = value

    return tensors(change)


def only_pickle(root: Path) -> None:
    (root / FILE).unlink()
    (root / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def pickle_renamed(root: Path) -> None:
    (root / FILE).write_bytes(pickle.dumps({"a": list(range(100))}))


WEIGHTS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no bytes": (cut(0), (FILE, "is torn", "get it again")),
    "torn in the header": (cut(99), (FILE, "91 follow", "get it again")),
    "torn at the end": (cut_end, (FILE, "is torn or damaged", "get it again")),
    "huge header": (claim(2**40), (FILE, "1099511627776 bytes", "100000000 are allowed")),
    "largest header": (claim(2**64 - 1), (FILE, "18446744073709551615", "torn")),
    "header beyond the end": (claim(10**7), (FILE, "10000000 bytes", "get it again")),
    "short header": (claim(64), (FILE, "is not JSON", "get it again")),
    "wrong shape": (
        tensors(lambda found: found.update({PROJECTION: torch.zeros(20, 29)})),
        (PROJECTION, "[20, 29]", "[20, 28]", "different models"),
    ),
    "transposed": (
        tensors(lambda found: found.update({PROJECTION: torch.zeros(28, 20)})),
        (PROJECTION, "[28, 20]", "[20, 28]"),
    ),
    "another axis": (
        tensors(lambda found: found.update({PROJECTION: torch.zeros(1, 20, 28)})),
        (PROJECTION, "[1, 20, 28]", "[20, 28]"),
    ),
    "missing tensor": (
        tensors(lambda found: found.pop(PROJECTION)),
        ("lacks 1 of the 40 tensors", PROJECTION, "download both again"),
    ),
    "left-over tensor": (
        tensors(lambda found: found.update({"lm_head.bias": torch.zeros(37)})),
        ("does not have: 'lm_head.bias'", "gpt2", "download both again"),
    ),
    "left-over layer": (
        tensors(lambda found: found.update({"transformer.h.3.ln_1.weight": torch.ones(20)})),
        ("does not have: 'transformer.h.3.ln_1.weight'",),
    ),
    "odd name": (
        tensors(lambda found: found.update({"a\nb\x1b[31m" + "c" * 999: torch.ones(2)})),
        ("does not have: 'a\\nb\\x1b[31mccc",),
    ),
    "NaN": (set_one(float("nan"), torch.float32), (PROJECTION, "1 numbers", "NaN", "of 560")),
    "infinity": (set_one(float("inf"), torch.float32), (PROJECTION, "infinite", "download")),
    "minus infinity": (set_one(float("-inf"), torch.float32), (PROJECTION, "infinite")),
    "NaN bf16": (set_one(float("nan"), torch.bfloat16), (PROJECTION, "NaN", "damaged")),
    "infinity bf16": (set_one(float("inf"), torch.bfloat16), (PROJECTION, "infinite")),
    "beyond float32": (
        set_one(1e300, torch.float64),
        (PROJECTION, "1e+300", "torch.float32 cannot hold", "dtype=torch.float64"),
    ),
    "whole numbers": (
        tensors(lambda found: found.update({PROJECTION: torch.ones(20, 28, dtype=torch.int64)})),
        (PROJECTION, "torch.int64", "expected floating point", "GGUF"),
    ),
    "bytes": (
        tensors(lambda found: found.update({PROJECTION: torch.ones(20, 28, dtype=torch.uint8)})),
        (PROJECTION, "torch.uint8", "expected floating point"),
    ),
    "complex numbers": (
        tensors(lambda found: found.update({TABLE: torch.ones(37, 20, dtype=torch.complex64)})),
        (TABLE, "torch.complex64", "expected floating point"),
    ),
    "another head": (
        tensors(lambda found: found.update({"lm_head.weight": found[TABLE] + 1})),
        ("lm_head.weight", TABLE, "two different tensors", "tie_word_embeddings to false"),
    ),
    "the same head, rounded": (
        tensors(lambda found: found.update({"lm_head.weight": found[TABLE].bfloat16()})),
        ("lm_head.weight", "two different tensors"),
    ),
    "NaN twice": (
        tensors(
            lambda found: found.update({"lm_head.weight": found[TABLE].fill_(torch.nan).clone()})
        ),
        (TABLE, "740 numbers that are NaN"),
    ),
    "pickle alone": (only_pickle, ("'pytorch_model.bin'", "runs", "save_pretrained")),
    "pickle renamed": (pickle_renamed, (FILE, "pickle", "refused")),
    "no tensors": (lambda root: write_raw(root / FILE, {}, b""), (FILE, "no tensors")),
    "no weights": (lambda root: (root / FILE).unlink(), ("no weights", f"expected {FILE}")),
    "no config": (lambda root: (root / "config.json").unlink(), ("config.json", "download")),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_damaged_weights_are_one_clear_error(name: str, tmp_path: Path) -> None:
    damage, expected = WEIGHTS[name]
    root = make_folder("gpt2", tmp_path / "folder")
    load(root)
    damage(root)
    words = refused(root)
    for part in expected:
        assert part in words


@pytest.mark.parametrize("value", [65_520.0, -1e5])
def test_numbers_beyond_the_type_asked_for_are_refused(value: float, tmp_path: Path) -> None:
    root = make_folder("gpt2", tmp_path / "folder")
    set_one(value, torch.float32)(root)
    words = refused(root, dtype=torch.float16)
    assert PROJECTION in words and f"up to {abs(value):g}" in words
    assert "torch.float16 cannot hold" in words and "dtype=torch.float32" in words
    weight = load(root).decoder.layers[1].ffn.up_proj.weight  # type: ignore[union-attr,index]
    assert weight.detach().abs().max() == abs(value)


def test_numbers_of_the_largest_size_pass_in_their_own_type(tmp_path: Path) -> None:
    """A sum over them overflows, which must not count as infinity."""
    root = make_folder("gpt2", tmp_path / "folder")
    edit_tensors(root, lambda found: found[PROJECTION].fill_(torch.finfo(torch.float32).max))
    weight = load(root).decoder.layers[1].ffn.up_proj.weight  # type: ignore[union-attr,index]
    assert bool((weight == torch.finfo(torch.float32).max).all())
    assert "torch.bfloat16 cannot hold" in refused(root, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_counts_and_checks_its_tensors(name: str, tmp_path: Path) -> None:
    root = make_folder(name, tmp_path / "folder")
    model = load(root)
    before = (root / FILE).read_bytes()
    with folders.Folder.open(root) as opened:
        every = sorted(opened.stored)
    chosen = every[len(every) // 2]

    def check(change: Callable[[dict[str, Tensor]], object], *expected: str) -> None:
        words = refused(edit_tensors(root, change))
        assert all(part in words for part in expected), words
        (root / FILE).unlink()
        (root / FILE).write_bytes(before)

    del model
    check(lambda found: found.pop(chosen), f"lacks 1 of the {len(every)} tensors", chosen)
    check(lambda found: found.update(more=torch.ones(3)), "does not have: 'more'")
    check(lambda found: found.update({chosen: found[chosen][:-1].clone()}), chosen, "has shape")
    check(lambda found: found[chosen].view(-1)[-1].fill_(torch.nan), chosen, "1 numbers", "NaN")


# ---- The index


def test_a_missing_shard_is_told_by_its_name(tmp_path: Path) -> None:
    root = make_sharded("gpt2", tmp_path / "folder")
    shards = sorted(root.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    words = refused(root)
    assert shards[1].name in words and f"lacks 1 of the {len(shards)} shards" in words


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/passwd",
        "/etc/x.safetensors",
        "inner/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        ".hidden.safetensors",
        "model\0.safetensors",
        "model.bin",
        "",
        "..",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_leads_nowhere_else(file: Any, tmp_path: Path) -> None:
    root = make_sharded("gpt2", tmp_path / "folder")
    make_folder("gpt2", root / "inner")
    make_folder("gpt2", tmp_path / "other")
    (tmp_path / "other" / FILE).rename(tmp_path / FILE)
    edit_index(root, lambda index: index["weight_map"].update({TABLE: file}))
    words = refused(root)
    assert TABLE in words and "model.safetensors.index.json" in words and "expected" in words


# ---- The config


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "more layers": ("gpt2", {"n_layer": 4}, ("lacks 12 of the 52", "transformer.h.3.ln_1.weight")),
    "fewer layers": ("gpt2", {"n_layer": 2}, ("12 tensors", "transformer.h.2.ln_1.weight")),
    "many layers": ("gpt2", {"n_layer": 10_000}, ("10000 layers", "40 tensors in all")),
    "many read": ("bart", {"encoder_layers": 9_999}, ("10001 layers", "tensors in all")),
    "many written": ("t5", {"num_decoder_layers": 9_999}, ("10002 layers", "tensors in all")),
    "too many layers": ("gpt2", {"n_layer": 10_001}, ("n_layer", "10001", "1 to 10000")),
    "width": ("gpt2", {"n_embd": 25}, (TABLE, "[37, 20]", "[37, 25]")),
    "inner width": ("gpt2", {"n_inner": 29}, ("mlp.c_fc.weight", "[20, 28]", "[20, 29]")),
    "vocabulary": ("gpt2", {"vocab_size": 36}, (TABLE, "[37, 20]", "[36, 20]")),
    "length": ("gpt2", {"n_positions": 14}, ("transformer.wpe.weight", "[13, 20]", "[14, 20]")),
    "heads": ("llama", {"num_attention_heads": 8}, ("q_proj.weight", "[32, 24]", "[64, 24]")),
    "key heads": ("llama", {"num_key_value_heads": 4}, ("k_proj.weight", "[16, 24]", "[32, 24]")),
    "head width": ("llama", {"head_dim": 6}, ("q_proj.weight", "[32, 24]", "[24, 24]")),
    "odd heads": ("gpt2", {"n_head": 6}, ("n_heads=6", "20", "not divisible")),
    "biases": ("llama", {"attention_bias": True}, ("lacks 12", "self_attn.q_proj.bias")),
    "untied, file is tied": (
        "gpt2",
        {"tie_word_embeddings": False},
        ("lm_head.weight", "set tie_word_embeddings"),
    ),
    "tied, file is not": (
        "llama",
        {"tie_word_embeddings": True},
        ("lm_head.weight", "model.embed_tokens.weight", "two different tensors"),
    ),
    "norms": ("opt", {"do_layer_norm_before": True}, ("lacks 2", "final_layer_norm.weight")),
    "another family": ("llama", {"model_type": "qwen3"}, ("qwen3", "self_attn.q_norm.weight")),
    "unknown": ("gpt2", {"model_type": "mamba"}, ("'mamba'", *BY_MODEL_TYPE)),
    "type that is none": ("gpt2", {"model_type": ["gpt2"]}, ("['gpt2']", "gpt_neox")),
    "no type": ("gpt2", {"model_type": None}, ("no model_type", *BY_MODEL_TYPE)),
    "packed": ("gpt2", {"quantization_config": {"bits": 4}}, ("quantization_config", "GGUF")),
    "classifier": (
        "llama",
        {"architectures": ["LlamaForSequenceClassification"]},
        ("architectures", "'LlamaForSequenceClassification'", "ForCausalLM", "not supported"),
    ),
    "overflow": (
        "llama",
        {"hidden_size": 2**31 - 2, "intermediate_size": 2**31 - 1},
        ("parameters", "one of its sizes is wrong"),
    ),
    "dropout": ("gpt2", {"embd_pdrop": 1.5}, ("embed dropout", "1.5", "between 0 and 1")),
    "turning": ("gpt_neox", {"rotary_pct": 1e308}, ("rotary_pct", "1e+308", "1 at most")),
    "token": ("gpt2", {"eos_token_id": [2**70]}, ("eos_token_id", "token id")),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_config_that_contradicts_the_tensors_is_refused(name: str, tmp_path: Path) -> None:
    variant, changes, expected = CONTRADICTIONS[name]
    root = edit_config(make_folder(variant, tmp_path / "folder"), **changes)
    start = time.process_time()
    words = refused(root)
    assert time.process_time() - start < 2.0
    for part in expected:
        assert part in words
    assert "config" in words


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', "\ufeff{}"])
def test_a_config_that_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    root = make_folder("gpt2", tmp_path / "folder")
    (root / "config.json").write_text(text)
    assert "config.json" in refused(root)


# ---- Everything else that a file may say


VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 8, 2**31 - 2, 2**31 - 1, 2**70, 10**400),
    *(0.5, 1.5, -1.5, 1e-320, 1e308, float("nan"), float("inf"), "", "text", "yarn", "\0\ud800"),
    *([], {}, [[]], [None], [1.5], [2**70], {"rope_type": "yarn"}, {"full_attention": []}),
)


def places(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value stands in nested objects and lists."""
    inner = found.items() if isinstance(found, dict) else enumerate(found)
    listed = []
    for key, value in inner:
        listed.append((*path, key))
        if isinstance(value, dict | list):
            listed += places(value, (*path, key))
    return listed


@st.composite
def mutated(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """The config with a few values dropped or replaced, wherever they stand."""
    config = copy.deepcopy(config)
    for _ in range(draw(st.integers(1, 4))):
        *path, last = draw(st.sampled_from(places(config)))
        at: Any = config
        for key in path:
            at = at[key]
        value = draw(st.sampled_from((*VALUES, "drop it")))
        if value == "drop it":
            del at[last]
        else:
            at[last] = copy.deepcopy(value)
        if not config:
            break
    return config


@pytest.mark.parametrize("name", CONFIGS)
@given(data=st.data())
def test_any_config_is_built_or_refused(name: str, data: st.DataObject) -> None:
    """Nothing else is raised, and nothing takes long or much memory."""
    source = data.draw(mutated(CONFIGS[name]))
    start = time.process_time()
    try:
        config = config_of(source)
        Transformer(config, device="meta")
    except BadCheckpoint as error:
        assert error.__cause__ is None
        assert error.__context__ is None or error.__suppress_context__
        assert 10 < len(str(error)) < 1000
    assert time.process_time() - start < 2.0


def rewrite(path: Path, data: bytes) -> None:
    """A new file under the name: the old one may still be mapped."""
    path.unlink()
    path.write_bytes(data)


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole folders, for tests that put back what they damage."""
    root = tmp_path_factory.mktemp("victims")
    made = {name: make_folder(name, root / name) for name in ("gpt2", "llama-3", "t5", "bert")}
    made["sharded"] = make_sharded("gpt2", root / "sharded")
    assert all(map(assert_loads_or_refuses, made.values()))
    return made


def assert_loads_or_refuses(root: Path) -> bool:
    start = time.process_time()
    try:
        load(root)
    except BadCheckpoint as error:
        assert error.__cause__ is None
        assert error.__context__ is None or error.__suppress_context__
        assert str(error).isprintable() and len(str(error)) < 3000
        return False
    finally:
        assert time.process_time() - start < 2.0
    return True


@pytest.mark.parametrize("name", ["gpt2", "llama-3", "t5", "bert"])
@given(data=st.data())
def test_any_config_beside_weights_is_loaded_or_refused(
    name: str, victims: dict[str, Path], data: st.DataObject
) -> None:
    path = victims[name] / "config.json"
    before = path.read_bytes()
    try:
        path.write_text(json.dumps(data.draw(mutated(json.loads(before)))))
        assert_loads_or_refuses(victims[name])
    finally:
        path.write_bytes(before)


@st.composite
def scratched(draw: st.DrawFn, data: bytes, n_bytes: int) -> bytes:
    """The bytes with a few of the first `n_bytes` changed, put in, left out, or all cut off."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, n_bytes - 1))
        length = draw(st.integers(0, 4))
        new = draw(st.binary(max_size=4) | st.sampled_from([b"9", b"0", b"-1", b"[", b"null"]))
        data = data[:at] + new + data[at + length :]
        if draw(st.integers(0, 9)) == 0:
            data = data[: draw(st.integers(0, len(data)))]
    return data


@pytest.mark.parametrize(
    ("name", "file"),
    [("gpt2", FILE), ("gpt2", "config.json"), ("sharded", f"{FILE}.index.json")],
)
@given(data=st.data())
def test_any_bytes_are_loaded_or_refused(
    name: str, file: str, victims: dict[str, Path], data: st.DataObject
) -> None:
    path = victims[name] / file
    before = path.read_bytes()
    header = 8 + int.from_bytes(before[:8], "little") if file == FILE else len(before)
    try:
        rewrite(path, data.draw(scratched(before, header)))
        assert_loads_or_refuses(victims[name])
    finally:
        rewrite(path, before)
