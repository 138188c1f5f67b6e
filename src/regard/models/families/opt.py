"""OPT: an open GPT-3; learned positions, whose table starts with two unused rows; ReLU.

The model of 350 million parameters has its norms after each sublayer and a token embedding that is
narrower than the model.
"""

from __future__ import annotations

from typing import Any

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, ModelConfig
from regard.models.family import ConfigReader, Family, Source, link_head, usual_size
from regard.models.weight_map import Link, both, renamed, same, weight

LAYER = {f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")}
LAYER |= {"fc1": "ffn.up_proj", "fc2": "ffn.down_proj"}
NORMS = {"self_attn_layer_norm": "self_attn_norm", "final_layer_norm": "ffn_norm"}


def config_from(read: ConfigReader) -> ModelConfig:
    read.expect("layer_norm_elementwise_affine", True)
    dim = read.count("hidden_size")
    embed_dim = read.count("word_embed_proj_dim", dim)
    narrow = None if embed_dim == dim else embed_dim
    norms_first = read.flag("do_layer_norm_before", True)
    if norms_first:
        read.expect("_remove_final_layer_norm", False)
    biased = read.flag("enable_bias", True)
    block = BlockConfig(
        dim=dim,
        n_heads=read.count("num_attention_heads"),
        ffn_dim=read.count("ffn_dim"),
        order="pre" if norms_first else "post",
        activation=read.activation("activation_function", "relu"),
        attention_bias=biased,
        ffn_bias=biased,
        dropout=read.number("dropout", 0.1),
        attention_dropout=read.number("attention_dropout", 0.0),
    )
    return read.model(
        "opt",
        max_len=read.count("max_position_embeddings", 2048),
        decoder=(block,) * read.layers("num_hidden_layers"),
        embed=EmbedConfig(positions="learned", offset=2, dim=narrow),
    )


def links(config: ModelConfig) -> list[Link]:
    found = [
        same("model.decoder.embed_tokens.weight", "decoder_embed.tokens.weight"),
        same("model.decoder.embed_positions.weight", "decoder_embed.positions.table.weight"),
        *link_head(config),
    ]
    if config.main.order == "pre":
        found += both("model.decoder.final_layer_norm", "decoder.norm")
    if config.embed.dim is not None:
        found += weight("model.decoder.project_in", "decoder_embed.project")
    if config.embed.dim is not None and config.head.kind != "none":
        found += weight("model.decoder.project_out", "head.project")
    for n, block in enumerate(config.decoder):
        theirs, ours = f"model.decoder.layers.{n}", f"decoder.layers.{n}"
        found += renamed(theirs, ours, NORMS)
        found += renamed(theirs, ours, LAYER, block.ffn_bias)
    return found


def size(dim: int, n_layers: int, n_heads: int, **more: Any) -> Source:
    tokens = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}
    usual = {"ffn_dim": 4 * dim, "vocab_size": 50272, "max_position_embeddings": 2048, **tokens}
    return usual_size("opt", "OPTForCausalLM", dim, n_layers, n_heads, **{**usual, **more})


FAMILY = Family(
    name="opt",
    config_from=config_from,
    links=links,
    prefix="model.",
    copies={r"lm_head\.weight": "model.decoder.embed_tokens.weight"},
    sizes={
        "opt-125m": size(768, 12, 12),
        "opt-350m": size(1024, 24, 16, do_layer_norm_before=False, word_embed_proj_dim=512),
        "opt-1.3b": size(2048, 24, 32),
        "opt-2.7b": size(2560, 32, 32),
        "opt-6.7b": size(4096, 32, 32),
        "opt-13b": size(5120, 40, 40),
        "opt-30b": size(7168, 48, 56),
        "opt-66b": size(9216, 64, 72),
        "opt-175b": size(12288, 96, 96),
    },
)
