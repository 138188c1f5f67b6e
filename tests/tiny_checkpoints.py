"""A tiny config.json of every family, and folders made of them, for tests that damage both.

The configs have the keys that a family reads, written out, so that each of them can be dropped or
replaced. Widths are far apart, so that tensors mixed up do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.models import Transformer, config_of, save

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 3]}
GPT2 = {
    "n_embd": 20,
    "n_layer": 3,
    "n_head": 5,
    "n_positions": 13,
    "n_inner": 28,
    "vocab_size": 37,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    **SPECIAL,
}
LLAMA = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 31,
    "vocab_size": 37,
    "max_position_embeddings": 41,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    **SPECIAL,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 31,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 23,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.1,
    "truncate": True,
}
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 29,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.3, 3.1, 4.7],
}
GEMMA = {
    **LLAMA,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
GEMMA_2 = {
    **GEMMA,
    "sliding_window": 7,
    "query_pre_attn_scalar": 11,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
BERT = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 28,
    "vocab_size": 37,
    "max_position_embeddings": 17,
    "type_vocab_size": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    **SPECIAL,
}
BART = {
    "d_model": 20,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 31,
    "max_position_embeddings": 17,
    "vocab_size": 37,
    "activation_function": "gelu",
    "scale_embedding": True,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "tie_word_embeddings": True,
    "decoder_start_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "bad_words_ids": [[0], [5]],
    **SPECIAL,
}
T5 = {
    "d_model": 20,
    "d_kv": 7,
    "num_heads": 3,
    "d_ff": 28,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "vocab_size": 37,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 17,
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.1,
    "tie_word_embeddings": True,
    "scale_decoder_outputs": True,
    "decoder_start_token_id": 0,
    **SPECIAL,
}

BLOOM = {
    "hidden_size": 20,
    "n_layer": 3,
    "n_head": 5,
    "vocab_size": 37,
    "layer_norm_epsilon": 1e-5,
    "hidden_dropout": 0.0,
    **SPECIAL,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2},
    "gpt2-scaled": {"model_type": "gpt2", **GPT2, "scale_attn_by_inverse_layer_idx": True},
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA},
    "llama-3": {"model_type": "llama", **LLAMA, "rope_parameters": LLAMA3},
    "llama-yarn": {"model_type": "llama", **LLAMA, "rope_scaling": YARN},
    "llama-long": {"model_type": "llama", **LLAMA, "rope_parameters": LONG},
    "llama-dynamic": {
        "model_type": "llama",
        **LLAMA,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "mistral": {"model_type": "mistral", **LLAMA, "sliding_window": 7},
    "qwen2": {
        "model_type": "qwen2",
        **LLAMA,
        "head_dim": 6,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **LLAMA},
    "gemma": {"model_type": "gemma", **GEMMA},
    "gemma2": {"model_type": "gemma2", **GEMMA_2},
    "gemma3": {
        "model_type": "gemma3_text",
        **GEMMA_2,
        "rope_local_base_freq": 70.0,
        "_sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 31,
        "vocab_size": 37,
        "max_position_embeddings": 41,
        "rotary_pct": 0.5,
        "rotary_emb_base": 700,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
        **SPECIAL,
    },
    "gptj": {"model_type": "gptj", **GPT2, "rotary_dim": 2, "tie_word_embeddings": False},
    "opt": {
        "model_type": "opt",
        "hidden_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "ffn_dim": 28,
        "vocab_size": 37,
        "word_embed_proj_dim": 11,
        "do_layer_norm_before": False,
        "enable_bias": True,
        "activation_function": "relu",
        "max_position_embeddings": 17,
        "dropout": 0.1,
        **SPECIAL,
    },
    "bloom": {"model_type": "bloom", **BLOOM},
    "bloom-normed": {
        "model_type": "bloom",
        **BLOOM,
        "apply_residual_connection_post_layernorm": True,
    },
    "palm": {
        "model_type": "palm",
        "dim": 20,
        "n_layers": 3,
        "n_heads": 5,
        "head_dim": 6,
        "ffn_dim": 28,
        "vocab_size": 37,
        "max_len": 41,
        **SPECIAL,
    },
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **BERT},
    "roberta": {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], **BERT},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **T5},
    "bart": {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], **BART},
    "mbart": {"model_type": "mbart", **BART},
    "marian": {"model_type": "marian", **BART, "decoder_vocab_size": 37},
    "original": {
        "model_type": "original",
        "d_model": 20,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 28,
        "decoder_ffn_dim": 31,
        "dropout": 0.1,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 17,
        "vocab_size": 37,
        "decoder_start_token_id": 1,
        **SPECIAL,
    },
}


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    """A model of that config with all weights random; `changes` go into its config.json."""
    model = Transformer(config_of({**CONFIGS[name], **changes}), dtype=dtype).eval()
    drawn = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=drawn) * 0.3)
    return model


def make_folder(name: str, root: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A folder with such a model."""
    save(make_model(name, dtype, **changes), root)
    return root


def edit_config(root: Path, **changes: Any) -> Path:
    """Write other values into config.json; the weights stay."""
    path = root / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return root


def edit_tensors(root: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Let `change` have its way with the tensors; the config stays."""
    path = root / "model.safetensors"
    # A new file in place of the old one: whoever has that one mapped keeps what it holds.
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    return root


def make_sharded(name: str, root: Path) -> Path:
    """A folder with such a model in several files and their index."""
    save(make_model(name), root, max_shard_gb=4e-6)
    return root


def edit_index(root: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return root
