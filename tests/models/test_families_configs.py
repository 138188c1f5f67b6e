"""What decoder-only families read out of config.json: older files, odd ones, what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from decoder_originals import GEMMA_2, LLAMA, NO_TOKENS, VARIANTS
from family_judge import (
    Draw,
    ask_original,
    ask_ours,
    assert_same_answer,
    check_count,
    draw_batch,
    make_subject,
)
from safetensors.torch import load_file, save_file

from regard.models import BadCheckpoint, Transformer, config_of, load, save


def config_dict(name: str) -> dict[str, Any]:
    """What `transformers` writes as config.json for a variant."""
    written: dict[str, Any] = json.loads(VARIANTS[name]().to_json_string(use_diff=False))
    return written


# Older files, as they lie on the hub, and what `transformers` of today makes of them.
OLD: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, {**LLAMA, "rope_theta": 700.0, "rope_scaling": None}),
    "llama-3": (
        hf.LlamaConfig,
        {
            **LLAMA,
            "rope_theta": 700.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 31,
            },
        },
    ),
    "llama-linear": (
        hf.LlamaConfig,
        {**LLAMA, "rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    ),
    "mistral": (hf.MistralConfig, {**LLAMA, "rope_theta": 700.0}),
    "mistral-null": (hf.MistralConfig, {**LLAMA, "sliding_window": None}),
    "qwen2": (
        hf.Qwen2Config,
        {**LLAMA, "use_sliding_window": False, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2-window": (
        hf.Qwen2Config,
        {**LLAMA, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "gemma": (hf.GemmaConfig, {**LLAMA, "head_dim": 8, "hidden_act": "gelu"}),
    "gemma2": (hf.Gemma2Config, {**GEMMA_2, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma3": (
        hf.Gemma3TextConfig,
        {
            **GEMMA_2,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 3,
            "rope_theta": 900.0,
            "rope_local_base_freq": 70.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3-defaults": (hf.Gemma3TextConfig, {**GEMMA_2, "num_hidden_layers": 7}),
    "gpt_neox": (
        hf.GPTNeoXConfig,
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "intermediate_size": 52,
            "vocab_size": 83,
            "rotary_pct": 0.5,
            "rotary_emb_base": 700,
            **NO_TOKENS,
        },
    ),
    "bloom": (
        hf.BloomConfig,
        {"n_embed": 40, "n_layer": 3, "num_attention_heads": 5, "vocab_size": 89, **NO_TOKENS},
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_older_config_means_what_transformers_makes_of_it(name: str) -> None:
    cls, old = OLD[name]
    kind = cls.model_type
    new = json.loads(cls(**old).to_json_string(use_diff=False))
    assert config_of({"model_type": kind, **old}) == config_of(new)


def test_gemma3_has_a_base_for_each_kind_of_layer() -> None:
    config = config_of({"model_type": "gemma3_text", **OLD["gemma3"][1]})
    kinds = [
        (block.window, block.rotary.base, block.rotary.scaling is None)
        for block in config.decoder
        if block.rotary is not None
    ]
    near, far = ((6, None), 70.0, True), (None, 900.0, False)
    assert kinds == [near, near, far, near, near, far, near]


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "yarn", "factor": 4.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.7],
            "long_factor": [1.0, 2.3, 3.1, 4.7],
            "original_max_position_embeddings": 71,  # the one outside goes before it
        },
    ],
)
def test_length_of_training_may_stand_beside_the_scaling(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    words = {**LLAMA, "head_dim": 8, "original_max_position_embeddings": 11}
    subject = make_subject(hf.LlamaConfig(**words, rope_scaling={**scaling}), tmp_path)
    # What `transformers` writes has it inside, too.
    words |= {"model_type": "llama", "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(words))
    batch, ours = draw_batch(subject), load(tmp_path)
    assert_same_answer(ask_ours(subject, batch, ours), ask_original(subject, batch), batch)


def test_window_counts_the_token_itself() -> None:
    """A token sees sliding_window tokens, itself among them."""
    assert config_of(config_dict("mistral")).decoder[0].window == (6, None)


REFUSED: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "gpt2-scale": ("gpt2", {"scale_attn_by_inverse_layer_idx": "yes"}, "scale_attn_by_inverse"),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    "gpt2-cross": ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    "gpt2-bend": ("gpt2", {"activation_function": "quick_gelu"}, "activation_function"),
    "llama-scaling": ("llama", {"rope_parameters": {"rope_type": "mrope"}}, "mrope"),
    "llama-both-ways": ("llama", {"is_causal": False}, "is_causal"),
    "llama-trained-on": (
        "llama-yarn",
        {"original_max_position_embeddings": "23"},
        "original_max_position_embeddings",
    ),
    "llama-part": ("llama-linear", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "llama-heads": ("llama", {"num_key_value_heads": 4}, "n_kv_heads=4"),
    "mistral-layers": ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    "qwen2-layers": ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    "qwen2-no-window": (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 3},
        "a window for layer_types",
    ),
    "qwen2-kind": ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    "qwen2-head": ("qwen2", {"head_dim": 10}, "head_dim"),
    "qwen2-from": ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
    "gemma2-both": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional"),
    "gemma2-scale": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    "gemma-bend": ("gemma", {"hidden_act": "silu"}, "hidden_act"),
    "gemma3-pattern": ("gemma3", {"_sliding_window_pattern": 0}, "_sliding_window_pattern"),
    "gpt_neox-base": (
        "gpt_neox",
        {"rope_parameters": None, "rotary_emb_base": 700, "rope_theta": 9000},
        "rope_theta is 9000.* rotary_emb_base 700",
    ),
    "gpt_neox-part": (
        "gpt_neox",
        {"rope_parameters": None, "rotary_pct": 0.5, "partial_rotary_factor": 0.25},
        "partial_rotary_factor is 0.25.* rotary_pct 0.5",
    ),
    "gptj-dim": ("gptj", {"rotary_dim": None}, "rotary_dim"),
    "opt-affine": ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise"),
    "opt-norm": ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    "bloom-residual": (
        "bloom",
        {"apply_residual_connection_post_layernorm": 1},
        "apply_residual_connection",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_setting_we_do_not_have_is_refused(name: str) -> None:
    variant, changes, word = REFUSED[name]
    with pytest.raises(BadCheckpoint, match=word):
        config_of({**config_dict(variant), **changes})


BARE = {
    "gpt2": hf.GPT2Model,
    "llama": hf.LlamaModel,
    "gemma3": hf.Gemma3TextModel,
    "gpt_neox": hf.GPTNeoXModel,
    "gptj": hf.GPTJModel,
    "opt": hf.OPTModel,
    "bloom-8-heads": hf.BloomModel,
}


@pytest.mark.parametrize("name", BARE)
def test_bare_model_loads_without_a_head(name: str, tmp_path: Path) -> None:
    subject = make_subject(VARIANTS[name](), tmp_path / "theirs", BARE[name])
    batch = draw_batch(subject)
    assert_same_answer(ask_ours(subject, batch), ask_original(subject, batch), batch)
    check_count(subject, tmp_path)
    save(subject.ours, tmp_path / "ours")
    again = BARE[name].from_pretrained(tmp_path / "ours", attn_implementation="eager")
    for one, other in zip(again.parameters(), subject.original.parameters(), strict=True):
        assert torch.equal(one, other)


# Tensors that older files have beside the weights, and what the head of a tied model repeats.
LEFTOVERS = {
    "gpt2": ("transformer.h.1.attn.bias", "transformer.h.0.attn.masked_bias"),
    "llama": ("model.layers.2.self_attn.rotary_emb.inv_freq",),
    "gpt_neox": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias"),
    "gptj": ("transformer.h.0.attn.bias", "transformer.h.1.attn.embed_positions"),
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_buffers_of_older_files_are_passed_over(name: str, tmp_path: Path) -> None:
    make_subject(VARIANTS[name](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for extra in LEFTOVERS[name]:
        tensors[extra] = torch.zeros(3)
    save_file(tensors, file, {"format": "pt"})
    load(tmp_path)
    tensors["something.else"] = torch.zeros(3)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"something\.else"):
        load(tmp_path)


COPIED = {
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
    "llama-tied-biased": ("lm_head.weight", "model.embed_tokens.weight"),
    "gpt_neox-sequential": ("embed_out.weight", "gpt_neox.embed_in.weight"),
    "opt": ("lm_head.weight", "model.decoder.embed_tokens.weight"),
    "bloom": ("lm_head.weight", "transformer.word_embeddings.weight"),
}


@pytest.mark.parametrize("name", COPIED)
def test_repeated_head_must_be_the_embedding(name: str, tmp_path: Path) -> None:
    make_subject(VARIANTS[name](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    copied, original = COPIED[name]
    tensors[copied] = tensors[original].clone()
    save_file(tensors, file, {"format": "pt"})
    load(tmp_path)
    tensors[copied][1, 1] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BadCheckpoint, match="two different tensors"):
        load(tmp_path)


def test_palm_is_saved_and_loaded_by_us(tmp_path: Path) -> None:
    source = {"model_type": "palm", "dim": 24, "n_layers": 3, "n_heads": 5, "head_dim": 6}
    model = Transformer(config_of({**source, "ffn_dim": 31, "vocab_size": 61})).eval()
    drawn = torch.Generator().manual_seed(Draw().seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=drawn) * 0.3)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    kept = dict(model.named_parameters())
    for name, tensor in again.named_parameters():
        assert torch.equal(tensor, kept[name]), name
    ids = torch.randint(61, (2, 13), generator=drawn)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_palm_has_one_key_head_and_no_biases() -> None:
    source = {"model_type": "palm", "dim": 24, "n_layers": 2, "n_heads": 5, "head_dim": 6}
    model = Transformer(config_of({**source, "vocab_size": 61}))
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if name.endswith("bias")]
    assert model.config.main.n_kv_heads == 1
    assert model.config.head.scale == pytest.approx(24**-0.5)
    x = torch.randn(2, 7, 24)
    block = model.decoder.layers[0]  # type: ignore[union-attr, index]
    ready = block.self_attn_norm(x)
    expected = x + block.self_attn(ready) + block.ffn(ready)
    torch.testing.assert_close(block(x), expected)
