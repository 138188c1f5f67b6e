"""Mistral: LLaMA with grouped heads, and in its first version a sliding window."""

from __future__ import annotations

from typing import Any

from regard.models.config import ModelConfig
from regard.models.families import llama
from regard.models.family import ConfigReader, Source


def config_from(read: ConfigReader) -> ModelConfig:
    if read.has("layer_types"):
        expected = "none: models whose layers differ are another architecture, Ministral"
        raise read.wrong("layer_types", read.source["layer_types"], expected)
    read.count("num_key_value_heads")
    n_layers = read.layers("num_hidden_layers")
    # The only key for which absent and null differ: absent means Mistral 7B's window, null none.
    n_seen = read.count("sliding_window", 4096)
    has_window = read.has("sliding_window") or "sliding_window" not in read.source
    window = llama.look_back(n_seen) if has_window else None
    block = llama.make_block(read, attention_bias=False, ffn_bias=False, window=window)
    return llama.make_config("mistral", read, (block,) * n_layers)


def size(*shape: Any, **more: Any) -> Source:
    named = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return llama.size(*shape, **{**named, **more})


NO_WINDOW = {"sliding_window": None, "rope_theta": 1e6}
WIDE = {"head_dim": 128}

FAMILY = llama.make_family(
    "mistral",
    config_from,
    {
        "mistral-7b-v0.1": size(4096, 32, (32, 8), 14336, 32000, 32768, sliding_window=4096),
        "mistral-7b-v0.3": size(4096, 32, (32, 8), 14336, 32768, 32768, **NO_WINDOW),
        "mistral-nemo-12b": size(5120, 40, (32, 8), 14336, 131072, 1024000, **NO_WINDOW, **WIDE),
    },
)
