"""GGUF files of tiny random models give what transformers gives with the same numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf_files import SHAPE, shake, tiny_llama, write_gguf
from rounding import assert_within, bound_sum

from regard.models import BadCheckpoint, load, save
from regard.models.gguf import GGUFFile

IDS = torch.tensor([[1, 5, 66, 23, 42, 5, 31, 17, 8, 50, 2, 61, 9]])
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)


def assert_same_logits(path: Path, model: Any) -> None:
    with torch.no_grad():
        want = model(IDS).logits
        got = load(path)(IDS).logits
    assert got is not None and got.dtype == torch.float32
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llama_in_every_packing_has_transformers_logits(
    tmp_path: Path, kind: Kind, tied: bool
) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    assert_same_logits(write_gguf(tmp_path / "m.gguf", "llama", model, kind), model)


def test_every_tensor_comes_back_bit_for_bit_under_its_name(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", "llama", model, Kind.Q4_1))
    state = model.state_dict()
    assert file.stored.keys() == state.keys()
    for name, tensor in state.items():
        assert file.stored[name].shape == tuple(tensor.shape)
        assert torch.equal(file.read(name), tensor), name


def test_llama_with_biases_has_transformers_logits(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    assert_same_logits(write_gguf(tmp_path / "m.gguf", "llama", model), model)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rotary_settings_are_kept(tmp_path: Path, scaling: dict[str, Any]) -> None:
    model = tiny_llama(rope_parameters={**scaling, "rope_theta": 700.0})

    def settle(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(700.0)
        writer.add_rope_dimension_count(16)
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(32)

    assert_same_logits(write_gguf(tmp_path / "m.gguf", "llama", model, settle=settle), model)


def llama3_divisors(base: float, width: int, original: int, factor: float) -> np.ndarray[Any, Any]:
    """As the converter writes them, from the published rule with low 1 and high 4."""
    found = []
    for pair in range(width // 2):
        wavelength = 2 * np.pi * base ** (2 * pair / width)
        if wavelength < original / 4:
            found.append(1.0)
        elif wavelength > original:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize("original, kind", [(8192, "llama3"), (64, "longrope")])
def test_rotary_divisors_of_llama_3_are_applied(tmp_path: Path, original: int, kind: str) -> None:
    """Known ones by their rule, others one by one: positions that differ are at most 12 apart."""
    base = 500000.0 if original == 8192 else 50.0
    scaling = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    model = tiny_llama(rope_parameters=scaling, max_position_embeddings=16384)
    divisors = llama3_divisors(base, 16, original, 8.0)
    assert len(set(divisors.tolist())) > 1
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        model,
        settle=lambda writer: writer.add_rope_freq_base(base),
        more={"rope_freqs.weight": divisors},
    )
    assert GGUFFile.open(path).config["rope_scaling"]["rope_type"] == kind
    assert_same_logits(path, model)


def test_divisors_of_one_change_nothing(tmp_path: Path) -> None:
    model = tiny_llama()
    more = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", model, more=more)
    assert GGUFFile.open(path).config["rope_scaling"] is None
    assert_same_logits(path, model)


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_window_makes_it_a_mistral(tmp_path: Path, arch: str) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = shake(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)))
    path = write_gguf(
        tmp_path / "m.gguf", arch, model, settle=lambda writer: writer.add_sliding_window(5)
    )
    assert GGUFFile.open(path).config["model_type"] == "mistral"
    assert_same_logits(path, model)


def tiny_gemma(generation: int) -> Any:
    import transformers

    if generation == 1:
        return shake(transformers.GemmaForCausalLM(transformers.GemmaConfig(**SHAPE)))
    more = {"sliding_window": 5, "query_pre_attn_scalar": 16}
    if generation == 2:
        return shake(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SHAPE, **more)))
    rotary = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **SHAPE, **more, rope_parameters=rotary, layer_types=kinds
    )
    return shake(transformers.Gemma3ForCausalLM(config))


def settle_gemma(generation: int) -> Callable[[GGUFWriter], None]:
    def settle(writer: GGUFWriter) -> None:
        if generation > 1:
            writer.add_sliding_window(5)
        if generation == 2:
            writer.add_attn_logit_softcapping(50.0)
            writer.add_final_logit_softcapping(30.0)
        if generation == 3:
            writer.add_rope_freq_base(1000.0)
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(8.0)
            writer.add_sliding_window_pattern(3)

    return settle


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_gemma_has_transformers_logits(tmp_path: Path, generation: int, kind: Kind) -> None:
    model = tiny_gemma(generation)
    arch = "gemma" if generation == 1 else f"gemma{generation}"
    path = write_gguf(tmp_path / "m.gguf", arch, model, kind, settle_gemma(generation))
    file = GGUFFile.open(path)
    for name, tensor in model.state_dict().items():
        if name in file.stored:
            # The file holds norms with 1 added, so that a number near 1 lost eps of about 2.
            lost = bound_sum(1, 1 + tensor.abs().max()) if "norm" in name else 0.0
            assert_within(file.read(name), tensor, lost, name)
    assert_same_logits(path, model)


def test_gemma_defaults_are_those_of_the_format(tmp_path: Path) -> None:
    """What the file need not say: Gemma 2's window and caps, which of Gemma 3's layers slide."""
    two = GGUFFile.open(write_gguf(tmp_path / "2.gguf", "gemma2", tiny_gemma(2))).config
    assert two["sliding_window"] == 4096 and two["attn_logit_softcapping"] == 50.0
    assert two["final_logit_softcapping"] == 30.0 and two["query_pre_attn_scalar"] == 16
    assert two["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    three = GGUFFile.open(write_gguf(tmp_path / "3.gguf", "gemma3", tiny_gemma(3))).config
    assert three["layer_types"] == ["full_attention"] * 3 and "sliding_window" not in three
    assert three["rope_theta"] == 1e6 and three["rope_local_base_freq"] == 10000.0


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)

    def settle(writer: GGUFWriter) -> None:
        writer.add_bos_token_id(3)
        writer.add_eos_token_id(4)
        writer.add_eot_token_id(5)
        writer.add_pad_token_id(6)
        writer.add_vocab_size(67)

    config = GGUFFile.open(write_gguf(tmp_path / "m.gguf", "llama", model, settle=settle)).config
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5  # not the float32 next to it
    assert (config["bos_token_id"], config["pad_token_id"]) == (3, 6)
    assert config["eos_token_id"] == [4, 5]
    assert config["vocab_size"] == 67 and config["max_position_embeddings"] == 128


def test_a_loaded_file_can_be_saved_as_a_folder(tmp_path: Path) -> None:
    model = tiny_llama()
    first = load(write_gguf(tmp_path / "m.gguf", "llama", model, Kind.Q8_0))
    save(first, tmp_path / "folder")
    second = load(tmp_path / "folder")
    with torch.no_grad():
        assert torch.equal(first(IDS).logits, second(IDS).logits)


def add(name: str, value: Any) -> Callable[[GGUFWriter], None]:
    kinds = {int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    return lambda writer: getattr(writer, kinds[type(value)])(name, value)


@pytest.mark.parametrize(
    "settle, words",
    [
        (add("llama.expert_count", 8), "mixture of 8 experts"),
        (add("llama.logit_scale", 0.5), "llama.logit_scale"),
        (add("llama.rope.dimension_count", 8), "rope.dimension_count is 8"),
        (add("llama.rope.scaling.type", "longrope"), "expected one of none, linear, yarn"),
        (add("llama.rope.scaling.type", "linear"), "has no 'llama.rope.scaling.factor'"),
        (add("llama.rope.freq_base", float("nan")), "finite number above 0"),
        (add("llama.rope.freq_base", "much"), "expected a number"),
        (add("llama.vocab_size", 66), "expected 67, as the embedding has rows"),
        (add("tokenizer.ggml.bos_token_id", 67), "a whole number from 0 to 66"),
        (add("split.count", 3), "one of 3 parts"),
        (add("general.alignment", 24), "power of two"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(
    tmp_path: Path, settle: Callable[[GGUFWriter], None], words: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_llama(), settle=settle)
    with pytest.raises(BadCheckpoint, match=words):
        GGUFFile.open(path)


def test_per_layer_settings_must_be_alike(tmp_path: Path) -> None:
    """The last value given to a key counts in the writer's hands."""
    model = tiny_llama()
    for heads in ([2, 2, 2], [2, 1, 2]):
        path = write_gguf(
            tmp_path / "m.gguf",
            "llama",
            model,
            settle=lambda writer, heads=heads: writer.kv_data[0].update(
                {
                    "llama.attention.head_count_kv": gguf.gguf_writer.GGUFValue(
                        heads, gguf.GGUFValueType.ARRAY
                    )
                }
            ),
        )
        if heads == [2, 2, 2]:
            assert_same_logits(path, model)
        else:
            with pytest.raises(BadCheckpoint, match="expected the same in every layer"):
                GGUFFile.open(path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "falcon", tiny_llama())
    with pytest.raises(BadCheckpoint, match=r"'falcon'; .* llama, mistral, gemma"):
        load(path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(tmp_path: Path, name: str, number: float) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.state_dict()[name].view(-1)[7] = number
    path = write_gguf(tmp_path / "m.gguf", "llama", model, Kind.F16)
    with pytest.raises(BadCheckpoint, match=f"tensor {name} has 1 numbers that are NaN"):
        load(path)


def test_damaged_scales_of_blocks_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_llama(), Kind.Q8_0)
    place = gguf.GGUFReader(path).get_tensor(0).data_offset
    data = bytearray(path.read_bytes())
    data[place : place + 2] = np.float16("inf").tobytes()
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match="NaN or infinite"):
        load(path)


def test_left_over_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    more = {"blk.0.ffn_gate_inp.weight": np.ones((2, 96), np.float32)}
    with pytest.raises(BadCheckpoint, match=r"does not have: 'blk\.0\.ffn_gate_inp\.weight'"):
        load(write_gguf(tmp_path / "m.gguf", "llama", model, more=more))
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(write_gguf(tmp_path / "m.gguf", "llama", model))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    more = {"model.norm.weight": np.ones(96, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_llama(), more=more)
    with pytest.raises(BadCheckpoint, match="are the same tensor"):
        GGUFFile.open(path)


def test_a_file_changed_after_opening_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_llama())
    file = GGUFFile.open(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(BadCheckpoint, match="was changed after"):
        file.read("model.norm.weight")
    path.unlink()
    with pytest.raises(BadCheckpoint, match="was deleted after"):
        file.read("model.norm.weight")
    with pytest.raises(BadCheckpoint, match="missing"):
        GGUFFile.open(path)


def test_an_unknown_name_is_refused_with_some_known_ones(tmp_path: Path) -> None:
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", "llama", tiny_llama()))
    with pytest.raises(BadCheckpoint, match=r"no tensor 'token_embd\.weight'; it has 30: "):
        file.read("token_embd.weight")


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[gguf\]'"):
        load(path)
