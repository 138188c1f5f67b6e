"""Mistral: LLaMA with grouped heads, and in its first version a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.models.config import ModelConfig
from regard.models.families import llama
from regard.models.family import ConfigReader, Family
from regard.models.hf_folder import BadCheckpoint


def config_from(source: Mapping[str, Any]) -> ModelConfig:
    read = ConfigReader(source)
    if read.has("layer_types"):
        raise BadCheckpoint(
            "config.json: layer_types is set, but all layers of a Mistral look alike; models whose "
            "layers differ are another architecture, Ministral"
        )
    read.count("num_key_value_heads")
    n_layers = read.layers("num_hidden_layers")
    # The only key whose absence and null differ: absent is Mistral 7B's window, null is none.
    n_seen = read.count("sliding_window", 4096)
    has_window = read.has("sliding_window") or "sliding_window" not in source
    block = llama.make_block(
        read,
        attention_bias=False,
        ffn_bias=False,
        window=llama.look_back(n_seen) if has_window else None,
    )
    return llama.make_config("mistral", read, (block,) * n_layers)


def size(*shape: Any, **more: Any) -> dict[str, Any]:
    named = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return llama.size(*shape, **{**named, **more})


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    config_from=config_from,
    links=llama.make_links,
    prefix=llama.PREFIX,
    ignored=llama.IGNORED,
    copies=llama.COPIES,
    sizes={
        "mistral-7b-v0.1": size(4096, 32, (32, 8), 14336, 32000, 32768, sliding_window=4096),
        "mistral-7b-v0.3": size(
            4096, 32, (32, 8), 14336, 32768, 32768, sliding_window=None, rope_theta=1e6
        ),
        "mistral-nemo-12b": size(
            5120,
            40,
            (32, 8),
            14336,
            131072,
            1024000,
            head_dim=128,
            sliding_window=None,
            rope_theta=1e6,
        ),
    },
)
