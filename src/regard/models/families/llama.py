"""LLaMA 1, 2 and 3: rotary, RMSNorm, SwiGLU, grouped heads; and what its descendants share with it.

Mistral, Qwen and Gemma keep its names of tensors and most of its config, so their files call
`make_block`, `make_config`, `find_windows` and `make_links` from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard.layers import BlockConfig, ProjectionBias
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.family import ConfigReader, Family
from regard.models.hf_folder import BadCheckpoint
from regard.models.weight_map import Link, same

PREFIX = "model."
IGNORED = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
COPIES = {r"lm_head\.weight": "model.embed_tokens.weight"}


def make_block(read: ConfigReader, **more: Any) -> BlockConfig:
    """A layer of LLaMA's, with `more` in place of what a descendant does otherwise."""
    dim, n_heads = read.count("hidden_size"), read.count("num_attention_heads")
    head_dim = read.count("head_dim", max(dim // n_heads, 1))
    bias = read.flag("attention_bias", False)
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
        "attention_bias": bias,
        "ffn_bias": read.flag("mlp_bias", False),
        "attention_dropout": read.number("attention_dropout", 0.0),
    }
    if "rotary" not in more:
        found["rotary"] = read.rotary(head_dim)
    return BlockConfig(**{**found, **more})


def make_config(
    family: str, read: ConfigReader, blocks: Sequence[BlockConfig], **more: Any
) -> ModelConfig:
    """A decoder of such layers, its head tied or not."""
    found: dict[str, Any] = {
        "vocab_size": read.count("vocab_size"),
        "max_len": read.max_len(blocks),
        "embed": EmbedConfig(),
        "head": HeadConfig(tied=read.flag("tie_word_embeddings", False)),
        "tokens": read.special_tokens(),
    }
    return ModelConfig(
        family=family, decoder=tuple(blocks), source=read.source, **{**found, **more}
    )


def look_back(n_seen: int) -> tuple[int, None]:
    """The window in which a token sees `n_seen` tokens, itself among them."""
    return n_seen - 1, None


def find_windows(
    read: ConfigReader, n_seen: int | None, slides: Sequence[bool]
) -> list[tuple[int, None] | None]:
    """Each layer's window: where `layer_types` has one, else where `slides` says so."""
    kinds = {"full_attention": False, "sliding_attention": True}
    given = read.source.get("layer_types")
    if given is not None:
        known = isinstance(given, list) and all(
            isinstance(kind, str) and kind in kinds for kind in given
        )
        if not known or len(given) != len(slides):
            raise BadCheckpoint(
                f"config.json: layer_types is {repr(given)[:60]}; expected {len(slides)} words, "
                f"each {' or '.join(kinds)}"
            )
        slides = [kinds[kind] for kind in given]
    if any(slides) and n_seen is None:
        raise BadCheckpoint(
            "config.json: layer_types has layers with a window, but no window is in use: set "
            "sliding_window, and use_sliding_window where the architecture has it"
        )
    return [look_back(n_seen) if slide and n_seen is not None else None for slide in slides]


def config_from(source: Mapping[str, Any]) -> ModelConfig:
    read = ConfigReader(source)
    read.expect("pretraining_tp", 1, 2, 4, 8)  # how it was trained; the sums are the same
    block = make_block(read)
    return make_config("llama", read, (block,) * read.layers("num_hidden_layers"))


def make_links(
    config: ModelConfig,
    norms: Mapping[str, str] | None = None,
) -> list[Link]:
    """LLaMA's names; `norms` are a layer's norms by our names, where a descendant has others."""
    if norms is None:
        norms = {"self_attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    made = [
        same("model.embed_tokens.weight", "decoder_embed.tokens.weight"),
        same("model.norm.weight", "decoder.norm.weight"),
    ]
    if not config.head.tied and config.head.kind != "none":
        made.append(same("lm_head.weight", "head.weight"))
    for n, block in enumerate(config.decoder):
        theirs, ours = f"model.layers.{n}", f"decoder.layers.{n}"
        for our_name, name in norms.items():
            made.append(same(f"{theirs}.{name}.weight", f"{ours}.{our_name}.weight"))
        bias = block.attention_bias
        if isinstance(bias, bool):
            bias = ProjectionBias(q=bias, k=bias, v=bias, out=bias)
        for our_name, name, biased in (
            ("self_attn.q_proj", "self_attn.q_proj", bias.q),
            ("self_attn.k_proj", "self_attn.k_proj", bias.k),
            ("self_attn.v_proj", "self_attn.v_proj", bias.v),
            ("self_attn.out_proj", "self_attn.o_proj", bias.out),
            ("ffn.gate_proj", "mlp.gate_proj", block.ffn_bias),
            ("ffn.up_proj", "mlp.up_proj", block.ffn_bias),
            ("ffn.down_proj", "mlp.down_proj", block.ffn_bias),
        ):
            made.append(same(f"{theirs}.{name}.weight", f"{ours}.{our_name}.weight"))
            if biased:
                made.append(same(f"{theirs}.{name}.bias", f"{ours}.{our_name}.bias"))
        if block.qk_norm is not None:
            for name in ("q_norm", "k_norm"):
                part = f"self_attn.{name}.weight"
                made.append(same(f"{theirs}.{part}", f"{ours}.{part}"))
    return made


def size(
    dim: int,
    n_layers: int,
    heads: tuple[int, int],
    ffn_dim: int,
    vocab_size: int,
    max_len: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": dim,
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": ffn_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        **more,
    }


LLAMA_3_2 = {
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    config_from=config_from,
    links=make_links,
    prefix=PREFIX,
    ignored=IGNORED,
    copies=COPIES,
    sizes={
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
