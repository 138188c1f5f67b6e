"""Gemma 2: norms after each sublayer too, capped scores and logits, every other layer windowed."""

from __future__ import annotations

from typing import Any

from regard.models.config import ModelConfig
from regard.models.families import gemma, llama
from regard.models.family import ConfigReader, Source


def config_from(read: ConfigReader) -> ModelConfig:
    softcap = gemma.read_cap(read, "attn_logit_softcapping", 50.0)
    slides = [n % 2 == 0 for n in range(read.layers("num_hidden_layers"))]
    blocks = [
        gemma.make_sandwich(read, window=window, softcap=softcap)
        for window in llama.find_windows(read, read.count("sliding_window", 4096), slides)
    ]
    final = gemma.read_cap(read, "final_logit_softcapping", 30.0)
    return gemma.make_config("gemma2", read, blocks, final)


def size(*shape: Any, **more: Any) -> Source:
    named = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    usual = {"sliding_window": 4096, "query_pre_attn_scalar": 256}
    return gemma.size(*shape, 256000, 8192, **{**named, **usual, **more})


FAMILY = llama.make_family(
    "gemma2",
    config_from,
    {
        "gemma-2-2b": size(2304, 26, (8, 4), 9216),
        "gemma-2-9b": size(3584, 42, (16, 8), 14336),
        "gemma-2-27b": size(4608, 46, (32, 16), 36864, head_dim=128, query_pre_attn_scalar=144),
    },
    gemma.make_links,
)
