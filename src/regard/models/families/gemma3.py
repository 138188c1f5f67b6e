"""Gemma 3: Gemma 2 with normed queries and keys, windows in five of six layers, two rotary bases.

Of its multimodal models only the text part is supported, which Hugging Face calls "gemma3_text".
"""

from __future__ import annotations

from typing import Any

from regard.models.config import ModelConfig
from regard.models.families import gemma, llama
from regard.models.family import ConfigReader, Source
from regard.positions import RotaryConfig


def config_from(read: ConfigReader) -> ModelConfig:
    # Files written later have this key with a leading underscore.
    key = "_sliding_window_pattern"
    every = read.count(key if read.has(key) else key.removeprefix("_"), 6)
    slides = [(n + 1) % every != 0 for n in range(read.layers("num_hidden_layers"))]
    softcap = gemma.read_cap(read, "attn_logit_softcapping", None)
    local, everywhere = find_rotary(read, local=True), find_rotary(read, local=False)
    more = {"qk_norm": "rms_offset", "qk_norm_eps": read.number("rms_norm_eps", 1e-6)}
    more["softcap"] = softcap
    windows = llama.find_windows(read, read.count("sliding_window", 4096), slides)
    blocks = [
        gemma.make_sandwich(read, window=seen, rotary=local if seen else everywhere, **more)
        for seen in windows
    ]
    final = gemma.read_cap(read, "final_logit_softcapping", None)
    return gemma.make_config("gemma3", read, blocks, final)


def find_rotary(read: ConfigReader, *, local: bool) -> RotaryConfig:
    """The rotary of windowed (local) or other layers; older files have a key for each base."""
    kind = "sliding_attention" if local else "full_attention"
    given = dict(ConfigReader(read.mapping("rope_parameters")).mapping(kind))
    if not local:
        given = {**read.mapping("rope_scaling"), **given}
    base = read.number("rope_local_base_freq", 1e4) if local else read.number("rope_theta", 1e6)
    given.setdefault("rope_theta", base)
    length = {"max_position_embeddings": read.count("max_position_embeddings")}
    return ConfigReader(length).rotary(read.count("head_dim"), parameters=given)


def size(*shape: Any, **more: Any) -> Source:
    named = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    usual = {"query_pre_attn_scalar": 256, "sliding_window": 1024, "rope_theta": 1e6}
    return gemma.size(*shape, **{**named, **usual, "rope_local_base_freq": 1e4, **more})


STRETCHED = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
LARGEST = {"head_dim": 128, "query_pre_attn_scalar": 168}

FAMILY = llama.make_family(
    "gemma3",
    config_from,
    {
        "gemma-3-270m": size(640, 18, (4, 1), 2048, 262144, 32768, sliding_window=512),
        "gemma-3-1b": size(1152, 26, (4, 1), 6912, 262144, 32768, sliding_window=512),
        "gemma-3-4b": size(2560, 34, (8, 4), 10240, 262208, 131072, **STRETCHED),
        "gemma-3-12b": size(3840, 48, (16, 8), 15360, 262208, 131072, **STRETCHED),
        "gemma-3-27b": size(5376, 62, (32, 16), 21504, 262208, 131072, **STRETCHED, **LARGEST),
    },
    gemma.make_links,
    model_types=("gemma3_text",),
)
