"""Weights in 8 bits: what is stored by hand, what comes back, and every way it can be damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import CONFIGS, edit_config, edit_tensors, make_folder, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from regard.models import BadCheckpoint, load, save, save_int8
from regard.models.int8 import pack_rows

KEY = "quantization_config"
TABLE = "embed.weight"
VECTOR = "decoder.layers.0.ffn_norm.weight"


def test_a_row_is_stored_in_127ths_of_its_largest_number() -> None:
    matrix = torch.tensor([[1.27, -0.637, 0.0], [0.0, 0.0, 0.0], [-0.254, 0.0061, 0.0033]])
    numbers, scale = pack_rows(matrix)
    assert numbers.dtype == torch.int8 and scale.dtype == torch.float32
    assert numbers.tolist() == [[127, -64, 0], [0, 0, 0], [-127, 3, 2]]
    torch.testing.assert_close(scale, torch.tensor([0.01, 0.0, 0.002]))


@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-20, 1.0, 1e20, 3.4028e38])
def test_no_number_moves_by_more_than_half_a_step(size: float) -> None:
    drawn = torch.Generator().manual_seed(3)
    matrix = (torch.rand(13, 31, generator=drawn, dtype=torch.float64) * 2 - 1) * size
    matrix = matrix.float()
    numbers, scale = pack_rows(matrix)
    moved = (numbers.double() * scale.double()[:, None] - matrix.double()).abs()
    step = matrix.double().abs().amax(1, keepdim=True) / 127
    # Below the smallest normal number a scale has few digits; then a step is up to one of those.
    bound = step / 2 * (1 + 1e-5) + (1e-43 if size < 1e-30 else 0)
    assert bool((moved <= bound).all())
    assert int(numbers.min()) >= -127


@pytest.mark.parametrize("name", ["original", "gpt2", "llama", "t5", "bert"])
def test_a_model_comes_back_near_and_its_vectors_exactly(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    save(model, tmp_path / "plain")
    save_int8(model, tmp_path / "small")
    save(load(tmp_path / "small"), tmp_path / "again")
    plain, small, again = (
        load_file(tmp_path / part / "model.safetensors") for part in ("plain", "small", "again")
    )
    assert plain.keys() == again.keys()
    for key, tensor in plain.items():
        if tensor.ndim == 1:
            assert torch.equal(again[key], tensor)
            continue
        assert small[f"{key}.int8"].dtype == torch.int8 and key not in small
        moved = (again[key] - tensor).abs()
        step = tensor.abs().amax(1, keepdim=True) / 127
        assert bool((moved <= step * 0.5001).all()) and bool((moved > 0).any())


def test_storing_what_was_stored_keeps_every_whole_number(tmp_path: Path) -> None:
    save_int8(make_model("original"), tmp_path / "one")
    save_int8(load(tmp_path / "one"), tmp_path / "two")
    one, two = (load_file(tmp_path / part / "model.safetensors") for part in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        if name.endswith(".int8"):
            assert torch.equal(tensor, two[name])
        else:
            torch.testing.assert_close(tensor, two[name], rtol=2e-7, atol=0)


def test_the_folder_says_what_it_is_and_takes_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    model = make_model("original", d_model=60, vocab_size=1009)
    save(model, tmp_path / "plain")
    save_int8(model, tmp_path / "small")
    told = json.loads((tmp_path / "small" / "config.json").read_text())
    assert told[KEY] == {"kind": "regard-int8-rows", "version": 1}
    sizes = [(tmp_path / part / "model.safetensors").stat().st_size for part in ("plain", "small")]
    assert sizes[1] < 0.33 * sizes[0]


def test_types_are_float32_or_the_one_asked_for(tmp_path: Path) -> None:
    save_int8(make_model("original", torch.bfloat16), tmp_path)
    assert next(load(tmp_path).parameters()).dtype == torch.float32
    half = dict(load(tmp_path, dtype=torch.float16).named_parameters())
    for name, tensor in load(tmp_path).named_parameters():
        assert torch.equal(half[name], tensor.half())


def test_save_of_a_loaded_one_is_plain_and_equal(tmp_path: Path) -> None:
    save_int8(make_model("llama"), tmp_path / "small")
    model = load(tmp_path / "small")
    save(model, tmp_path / "plain")
    assert KEY not in json.loads((tmp_path / "plain" / "config.json").read_text())
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    again = dict(load(tmp_path / "plain").named_parameters())
    assert all(torch.equal(again[name], tensor) for name, tensor in model.named_parameters())


def test_transformers_refuses_the_small_one_and_opens_the_plain_one(tmp_path: Path) -> None:
    save_int8(make_model("llama"), tmp_path / "small")
    model = load(tmp_path / "small")
    with pytest.raises(ValueError, match="quant"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    save(model, tmp_path / "plain")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    ids = torch.tensor([[5, 7, 11, 13, 17]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


Change = Callable[[dict[str, Tensor]], object]


def put(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name].clone()))


def at(place: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[place] = value
        return tensor

    return change


def rows_without_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{TABLE}.scale"][3] = 0


DAMAGE: dict[str, tuple[Change, str]] = {
    "no scales": (lambda t: t.pop(f"{TABLE}.scale"), "and no 'embed.weight.scale'"),
    "no numbers": (lambda t: t.pop(f"{TABLE}.int8"), "lacks 1 of the"),
    "NaN scale": (put(f"{TABLE}.scale", at(5, float("nan"))), "negative, NaN or infinite"),
    "infinite scale": (put(f"{TABLE}.scale", at(5, float("inf"))), "negative, NaN or infinite"),
    "negative scale": (put(f"{TABLE}.scale", at(5, -0.1)), "negative, NaN or infinite"),
    "no scale for numbers": (rows_without_scale, "whose scale is 0"),
    "-128": (put(f"{TABLE}.int8", at(0, -128)), "has a -128"),
    "too few scales": (put(f"{TABLE}.scale", lambda x: x[:-1].clone()), "expected [N, M] and [N]"),
    "scales in a column": (put(f"{TABLE}.scale", lambda x: x[:, None]), "expected [N, M] and [N]"),
    "numbers in a row": (put(f"{TABLE}.int8", lambda x: x.flatten()), "expected [N, M] and [N]"),
    "another shape": (
        lambda t: t.update({f"{TABLE}.int8": t[f"{TABLE}.int8"][:, :-1].clone()}),
        "config.json makes it [37, 20]",
    ),
    "int16": (put(f"{TABLE}.int8", lambda x: x.to(torch.int16)), "expected int8 and float32"),
    "half scales": (put(f"{TABLE}.scale", lambda x: x.half()), "expected int8 and float32"),
    "one left over": (lambda t: t.update(stray=torch.ones(3)), "does not have: 'stray'"),
    "scales left over": (lambda t: t.update({"stray.scale": torch.ones(3)}), "stray.scale"),
    "a vector gone": (lambda t: t.pop(VECTOR), "lacks 1 of the"),
    "a vector of NaN": (put(VECTOR, at(0, float("nan"))), "NaN or infinite"),
    "a matrix twice": (lambda t: t.update({TABLE: torch.ones(37, 20)}), "twice"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_in_words(damage: str, tmp_path: Path) -> None:
    change, words = DAMAGE[damage]
    save_int8(make_model("original"), tmp_path)
    load(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(BadCheckpoint) as refused:
        load(tmp_path)
    assert words in str(refused.value)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"kind": "regard-int8-rows", "version": 2}, "newer regard"),
        ({"kind": "regard-int8-rows"}, "newer regard"),
        ({"kind": "regard-int8-rows", "version": 1, "groups": 4}, "newer regard"),
        ({"kind": "regard-int4"}, "format of another program"),
        ({"quant_method": "gptq", "bits": 4}, "format of another program"),
        (None, "lacks"),
    ],
)
def test_another_kind_or_version_is_refused(told: Any, words: str, tmp_path: Path) -> None:
    save_int8(make_model("original"), tmp_path)
    edit_config(tmp_path, **{KEY: told})
    with pytest.raises(BadCheckpoint, match=words):
        load(tmp_path)


def test_a_plain_folder_that_claims_to_be_small_is_refused_by_what_it_holds(tmp_path: Path) -> None:
    """A matrix in floating point is fine where it stands alone; its numbers are what they are."""
    plain = make_folder("original", tmp_path)
    edit_tensors(plain, lambda t: t.update({TABLE: t[TABLE].to(torch.int8)}))
    edit_config(plain, **{KEY: {"kind": "regard-int8-rows", "version": 1}})
    with pytest.raises(BadCheckpoint, match="expected floating point"):
        load(plain)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    save_int8(make_model("original"), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for end in (3, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(BadCheckpoint):
            load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_a_model_with_numbers_that_no_scale_tells_is_not_stored(
    value: float, tmp_path: Path
) -> None:
    model = make_model("original", torch.float64)
    with torch.no_grad():
        model.decoder.layers[0].ffn.up_proj.weight[1, 1] = value  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.ffn\.up_proj\.weight"):
        save_int8(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_loading_draws_nothing_and_leaves_the_compiler_alone(tmp_path: Path) -> None:
    """torch's compiler takes a second to load, and one random draw on the meta device loads it."""
    save_int8(make_model("original"), tmp_path)
    code = (
        "import sys, torch, regard\n"
        "before = torch.get_rng_state()\n"
        "regard.load(sys.argv[1])\n"
        "assert torch.equal(before, torch.get_rng_state())\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert done.returncode == 0, done.stderr


def test_every_config_of_the_tests_loads_small(tmp_path: Path) -> None:
    for name in CONFIGS:
        save_int8(make_model(name), tmp_path / name)
        assert load(tmp_path / name).config == make_model(name).config
