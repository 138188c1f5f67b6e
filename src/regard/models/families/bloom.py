"""BLOOM: ALiBi instead of positions, a norm after the embedding, q, k and v stored head by head."""

from __future__ import annotations

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, ModelConfig
from regard.models.families import gpt_neox
from regard.models.family import ConfigReader, Family, Source, link_head
from regard.models.weight_map import Link, both, renamed, same

LAYER = {**gpt_neox.LAYER, "self_attention.dense": "self_attn.out_proj"}


def config_from(read: ConfigReader) -> ModelConfig:

    def key(*names: str) -> str:
        """The first of these keys that the file has; older files have other keys."""
        return next(filter(read.has, names), names[0])

    dim = read.count(key("n_embed", "hidden_size"))
    eps = read.number("layer_norm_epsilon", 1e-5)
    block = BlockConfig(
        dim=dim,
        n_heads=read.count(key("n_head", "num_attention_heads")),
        ffn_dim=4 * dim,
        normed_residual=read.flag("apply_residual_connection_post_layernorm", False),
        norm_eps=eps,
        activation="gelu_tanh",
        alibi=True,
        dropout=read.number("hidden_dropout", 0.0),
        attention_dropout=read.number("attention_dropout", 0.0),
    )
    return read.model(
        "bloom",
        max_len=None,
        decoder=(block,) * read.layers(key("n_layer", "num_hidden_layers")),
        embed=EmbedConfig(norm=True, norm_eps=eps),
    )


def links(config: ModelConfig) -> list[Link]:
    found = [
        same("transformer.word_embeddings.weight", "decoder_embed.tokens.weight"),
        *both("transformer.word_embeddings_layernorm", "decoder_embed.norm"),
        *both("transformer.ln_f", "decoder.norm"),
        *link_head(config),
    ]
    for n, block in enumerate(config.decoder):
        theirs, ours = f"transformer.h.{n}", f"decoder.layers.{n}"
        found += renamed(theirs, ours, LAYER)
        found += gpt_neox.link_qkv(f"{theirs}.self_attention", ours, block.n_heads, has_bias=True)
    return found


def size(dim: int, n_layers: int, n_heads: int) -> Source:
    named = {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "vocab_size": 250880}
    sizes = {"hidden_size": dim, "n_layer": n_layers, "n_head": n_heads}
    return {**named, **sizes, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}


FAMILY = Family(
    name="bloom",
    config_from=config_from,
    links=links,
    prefix="transformer.",
    copies={r"lm_head\.weight": "transformer.word_embeddings.weight"},
    sizes={
        "bloom-560m": size(1024, 24, 16),
        "bloom-1b1": size(1536, 24, 16),
        "bloom-1b7": size(2048, 24, 16),
        "bloom-3b": size(2560, 30, 32),
        "bloom-7b1": size(4096, 30, 32),
        "bloom-176b": size(14336, 70, 112),
    },
)
