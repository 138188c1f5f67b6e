"""LLaMA 1, 2 and 3: rotary, RMSNorm, SwiGLU, grouped heads; and what its descendants share with it.

Mistral, Qwen and Gemma have its tensor names and most of its config, so their files use
`make_block`, `make_config`, `find_windows` and `make_links` from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regard.layers import BlockConfig
from regard.models.config import HeadConfig, ModelConfig
from regard.models.family import ConfigReader, Family, Source, link_head, usual_size
from regard.models.weight_map import Link, renamed, same


def make_block(read: ConfigReader, **more: Any) -> BlockConfig:
    """A layer of LLaMA; `more` overrides what differs in a descendant."""
    dim, n_heads = read.count("hidden_size"), read.count("num_attention_heads")
    head_dim = read.count("head_dim", max(dim // n_heads, 1))
    rotary = more.get("rotary") or read.rotary(head_dim)
    if rotary.rotary_dim is not None:  # `transformers` ignores it and rotates whole heads, or fails
        part = rotary.rotary_dim / head_dim
        raise read.wrong("partial_rotary_factor", part, "1: in this family whole heads rotate")
    found: dict[str, Any] = {
        "dim": dim,
        "n_heads": n_heads,
        "n_kv_heads": read.count("num_key_value_heads", n_heads),
        "head_dim": head_dim,
        "ffn_dim": read.count("intermediate_size"),
        "norm": "rms",
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "activation": read.activation("hidden_act", "silu"),
        "gated": True,
        "attention_bias": read.flag("attention_bias", False),
        "ffn_bias": read.flag("mlp_bias", False),
        "attention_dropout": read.number("attention_dropout", 0.0),
        "rotary": rotary,
    }
    return BlockConfig(**{**found, **more})


def make_config(
    family: str, read: ConfigReader, blocks: Sequence[BlockConfig], **more: Any
) -> ModelConfig:
    head = HeadConfig(tied=read.flag("tie_word_embeddings", False))
    found = {"max_len": read.max_len(blocks), "decoder": tuple(blocks), "head": head}
    return read.model(family, **{**found, **more})


def look_back(n_seen: int) -> tuple[int, None]:
    """The window in which a token attends to `n_seen` tokens, including itself."""
    return n_seen - 1, None


def find_windows(
    read: ConfigReader, n_seen: int | None, slides: Sequence[bool]
) -> list[tuple[int, None] | None]:
    """Each layer's window: which layers have one is in `layer_types`, else in `slides`."""
    kinds = {"full_attention": False, "sliding_attention": True}
    given = read.source.get("layer_types")
    if given is not None:
        known = isinstance(given, list) and all(kind in [*kinds] for kind in given)
        if not known or len(given) != len(slides):
            expected = f"{len(slides)} words, each {' or '.join(kinds)}"
            raise read.wrong("layer_types", given, expected)
        slides = [kinds[kind] for kind in given]
    if any(slides) and n_seen is None:
        expected = "a window for layer_types, and use_sliding_window where it is known"
        raise read.wrong("sliding_window", read.source.get("sliding_window"), expected)
    return [look_back(n_seen) if slide and n_seen is not None else None for slide in slides]


def config_from(read: ConfigReader) -> ModelConfig:
    read.expect("pretraining_tp", 1, 2, 4, 8)  # how it was trained; the sums are the same
    block = make_block(read)
    return make_config("llama", read, (block,) * read.layers("num_hidden_layers"))


NORMS = {"input_layernorm": "self_attn_norm", "post_attention_layernorm": "ffn_norm"}
QK_NORMS = {"self_attn.q_norm": "self_attn.q_norm", "self_attn.k_norm": "self_attn.k_norm"}
FFN = {f"mlp.{name}_proj": f"ffn.{name}_proj" for name in ("gate", "up", "down")}


def make_links(config: ModelConfig, norms: Mapping[str, str] = NORMS) -> list[Link]:
    """The links for LLaMA's tensor names; `norms`: the names of a layer's norms."""
    found = [
        same("model.embed_tokens.weight", "decoder_embed.tokens.weight"),
        same("model.norm.weight", "decoder.norm.weight"),
        *link_head(config),
    ]
    for n, block in enumerate(config.decoder):
        theirs, ours = f"model.layers.{n}", f"decoder.layers.{n}"
        found += renamed(theirs, ours, norms, has_bias=False)
        found += renamed(theirs, ours, FFN, block.ffn_bias)
        bias = block.attention_bias
        for name in ("q", "k", "v", "out"):
            part = {f"self_attn.{name[0]}_proj": f"self_attn.{name}_proj"}
            has_bias = bias if isinstance(bias, bool) else getattr(bias, name)
            found += renamed(theirs, ours, part, has_bias)
        if block.qk_norm is not None:
            found += renamed(theirs, ours, QK_NORMS, has_bias=False)
    return found


def make_family(
    name: str,
    config_from: Callable[[ConfigReader], ModelConfig],
    sizes: Mapping[str, Source],
    links: Callable[[ModelConfig], list[Link]] = make_links,
    **more: Any,
) -> Family:
    return Family(
        name=name,
        config_from=config_from,
        links=links,
        prefix="model.",
        ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        copies={r"lm_head\.weight": "model.embed_tokens.weight"},
        sizes=sizes,
        **more,
    )


def size(dim: int, n_layers: int, heads: tuple[int, int], *sizes: int, **more: Any) -> Source:
    """A config.json; `sizes` are ffn_dim, vocab_size and max_len, `heads` (n_heads, n_kv_heads)."""
    keys = ("intermediate_size", "vocab_size", "max_position_embeddings")
    usual = usual_size("llama", "LlamaForCausalLM", dim, n_layers, heads[0], rms_norm_eps=1e-5)
    named = dict(zip(keys, sizes, strict=True))
    return {**usual, "num_key_value_heads": heads[1], **named, **more}


SCALING = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
SCALING |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_2 = {"rope_theta": 500000.0, "tie_word_embeddings": True, "rope_scaling": SCALING}

FAMILY = make_family(
    "llama",
    config_from,
    {
        "llama-7b": size(4096, 32, (32, 32), 11008, 32000, 2048, rms_norm_eps=1e-6),
        "llama-13b": size(5120, 40, (40, 40), 13824, 32000, 2048, rms_norm_eps=1e-6),
        "llama-33b": size(6656, 60, (52, 52), 17920, 32000, 2048, rms_norm_eps=1e-6),
        "llama-65b": size(8192, 80, (64, 64), 22016, 32000, 2048),
        "llama-2-7b": size(4096, 32, (32, 32), 11008, 32000, 4096),
        "llama-2-13b": size(5120, 40, (40, 40), 13824, 32000, 4096),
        "llama-2-70b": size(8192, 80, (64, 8), 28672, 32000, 4096),
        "llama-3-8b": size(4096, 32, (32, 8), 14336, 128256, 8192, rope_theta=500000.0),
        "llama-3-70b": size(8192, 80, (64, 8), 28672, 128256, 8192, rope_theta=500000.0),
        "llama-3.2-1b": size(2048, 16, (32, 8), 8192, 128256, 131072, head_dim=64, **LLAMA_3_2),
        "llama-3.2-3b": size(3072, 28, (24, 8), 8192, 128256, 131072, head_dim=128, **LLAMA_3_2),
    },
)
