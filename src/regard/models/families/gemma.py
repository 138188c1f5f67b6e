"""Gemma: norm weights stored as their difference from 1, an embedding scaled by its width.

Gemma 2 and 3 have these too, and their files use `make_block`, `make_sandwich` and `make_config`
from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.families import llama
from regard.models.family import ConfigReader, Source
from regard.models.weight_map import Link


def config_from(read: ConfigReader) -> ModelConfig:
    # Old files have "gelu", which means the tanh form here.
    given = "hidden_activation" if read.has("hidden_activation") else "hidden_act"
    read.expect(given, "gelu_pytorch_tanh", "gelu_new", "gelu")
    block = make_block(read, activation="gelu_tanh")
    return make_config("gemma", read, [block] * read.layers("num_hidden_layers"))


def make_block(read: ConfigReader, **more: Any) -> BlockConfig:
    read.expect("use_bidirectional_attention", False)
    read.count("num_key_value_heads")
    read.count("head_dim")
    return llama.make_block(read, **{"norm": "rms_offset", "ffn_bias": False, **more})


def make_sandwich(read: ConfigReader, **more: Any) -> BlockConfig:
    scale = read.number("query_pre_attn_scalar", 256)
    if scale <= 0:
        read.count("query_pre_attn_scalar")
    more["activation"] = read.activation("hidden_activation", "gelu_pytorch_tanh")
    return make_block(read, order="sandwich", scale=scale**-0.5, **more)


def make_config(
    family: str, read: ConfigReader, blocks: Sequence[BlockConfig], softcap: float | None = None
) -> ModelConfig:
    read.count("max_position_embeddings")
    head = HeadConfig(tied=read.flag("tie_word_embeddings", True), softcap=softcap)
    embed = EmbedConfig(scale=blocks[0].dim ** 0.5)
    return llama.make_config(family, read, blocks, head=head, embed=embed)


def read_cap(read: ConfigReader, key: str, default: float | None) -> float | None:
    """A softcap; null means none, an absent key the default."""
    if key not in read.source:
        return default
    return read.number(key) if read.has(key) else None


def make_links(config: ModelConfig) -> list[Link]:
    norms = {
        "input_layernorm": "self_attn_norm",
        "post_attention_layernorm": "self_attn_after",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_after",
    }
    return llama.make_links(config, norms)


def size(*shape: Any, **more: Any) -> Source:
    named = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 256}
    return llama.size(*shape, **{**named, "rms_norm_eps": 1e-6, **more})


FAMILY = llama.make_family(
    "gemma",
    config_from,
    {
        "gemma-2b": size(2048, 18, (8, 1), 16384, 256000, 8192),
        "gemma-7b": size(3072, 28, (16, 16), 24576, 256000, 8192),
    },
)
