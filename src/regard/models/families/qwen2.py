"""Qwen2 and 2.5: LLaMA with biases on queries, keys and values; windows in the upper layers."""

from __future__ import annotations

from typing import Any

from regard.layers import ProjectionBias
from regard.models.config import ModelConfig
from regard.models.families import llama
from regard.models.family import ConfigReader, Source


def config_from(read: ConfigReader) -> ModelConfig:
    read.count("num_key_value_heads")
    n_heads = read.count("num_attention_heads")
    read.expect("head_dim", read.count("hidden_size") // n_heads)
    bias = ProjectionBias(q=True, k=True, v=True, out=False)
    blocks = [
        llama.make_block(read, attention_bias=bias, ffn_bias=False, window=window)
        for window in find_windows(read)
    ]
    return llama.make_config("qwen2", read, blocks)


def find_windows(read: ConfigReader) -> list[tuple[int, None] | None]:
    """Each layer's window: from `layer_types`, else in all layers from `max_window_layers` on."""
    n_layers = read.layers("num_hidden_layers")
    n_seen = None
    if read.flag("use_sliding_window", False) and read.has("sliding_window"):
        n_seen = read.count("sliding_window")
    first = 0  # 0 means all layers, but `count` would refuse it
    if read.source.get("max_window_layers") != 0:
        first = read.count("max_window_layers", 28)
    slides = [n_seen is not None and n >= first for n in range(n_layers)]
    return llama.find_windows(read, n_seen, slides)


def size(*shape: Any, **more: Any) -> Source:
    named = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    usual = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
    return llama.size(*shape, **{**named, **usual, **more})


FAMILY = llama.make_family(
    "qwen2",
    config_from,
    {
        "qwen2-0.5b": size(896, 24, (14, 2), 4864, 151936, 131072, tie_word_embeddings=True),
        "qwen2-1.5b": size(1536, 28, (12, 2), 8960, 151936, 131072, tie_word_embeddings=True),
        "qwen2-7b": size(3584, 28, (28, 4), 18944, 152064, 131072),
        "qwen2-72b": size(8192, 80, (64, 8), 29568, 152064, 131072, rms_norm_eps=1e-5),
        "qwen2.5-3b": size(2048, 36, (16, 2), 11008, 151936, 32768, tie_word_embeddings=True),
        "qwen2.5-14b": size(5120, 48, (40, 8), 13824, 152064, 131072, rms_norm_eps=1e-5),
        "qwen2.5-32b": size(5120, 64, (40, 8), 27648, 152064, 131072, rms_norm_eps=1e-5),
    },
)
