"""Qwen3: Qwen2 without biases, with a norm on each head's queries and keys."""

from __future__ import annotations

from typing import Any

from regard.models.config import ModelConfig
from regard.models.families import llama, qwen2
from regard.models.family import ConfigReader, Source


def config_from(read: ConfigReader) -> ModelConfig:
    read.count("num_key_value_heads")
    read.count("head_dim")
    eps = read.number("rms_norm_eps", 1e-6)
    blocks = [
        llama.make_block(read, qk_norm="rms", qk_norm_eps=eps, ffn_bias=False, window=window)
        for window in qwen2.find_windows(read)
    ]
    return llama.make_config("qwen3", read, blocks)


def size(*shape: Any, **more: Any) -> Source:
    named = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
    return qwen2.size(*shape, **{**named, **more})


FAMILY = llama.make_family(
    "qwen3",
    config_from,
    {
        "qwen3-0.6b": size(1024, 28, (16, 8), 3072, 151936, 40960, tie_word_embeddings=True),
        "qwen3-1.7b": size(2048, 28, (16, 8), 6144, 151936, 40960, tie_word_embeddings=True),
        "qwen3-4b": size(2560, 36, (32, 8), 9728, 151936, 40960, tie_word_embeddings=True),
        "qwen3-8b": size(4096, 36, (32, 8), 12288, 151936, 40960),
        "qwen3-14b": size(5120, 40, (40, 8), 17408, 151936, 40960),
        "qwen3-32b": size(5120, 64, (64, 8), 25600, 151936, 40960),
    },
)
