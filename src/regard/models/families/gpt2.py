"""GPT-2: learned positions, norms before, one projection for q, k and v stored as a Conv1D."""

from __future__ import annotations

from dataclasses import replace

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, ModelConfig
from regard.models.family import ConfigReader, Family, Source, link_head
from regard.models.weight_map import Link, both, same, stacked, transposed


def config_from(read: ConfigReader) -> ModelConfig:
    read.expect("scale_attn_weights", True)
    read.expect("reorder_and_upcast_attn", False, True)
    read.expect("add_cross_attention", False)
    dim = read.count("n_embd")
    block = BlockConfig(
        dim=dim,
        n_heads=read.count("n_head"),
        ffn_dim=read.count("n_inner", 4 * dim),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        activation=read.activation("activation_function", "gelu_new"),
        dropout=read.number("resid_pdrop", 0.1),
        attention_dropout=read.number("attn_pdrop", 0.1),
    )
    blocks = [block] * read.layers("n_layer")
    if read.flag("scale_attn_by_inverse_layer_idx", False):
        scale = (dim // block.n_heads) ** -0.5
        blocks = [replace(block, scale=scale / (n + 1)) for n in range(len(blocks))]
    return read.model(
        "gpt2",
        max_len=read.count("n_positions", 1024),
        decoder=tuple(blocks),
        embed=EmbedConfig(positions="learned", dropout=read.number("embd_pdrop", 0.1)),
    )


def links(config: ModelConfig) -> list[Link]:
    found = [
        same("transformer.wte.weight", "decoder_embed.tokens.weight"),
        same("transformer.wpe.weight", "decoder_embed.positions.table.weight"),
        *both("transformer.ln_f", "decoder.norm"),
        *link_head(config),
    ]
    for n, block in enumerate(config.decoder):
        theirs, ours = f"transformer.h.{n}", f"decoder.layers.{n}"
        found += both(f"{theirs}.ln_1", f"{ours}.self_attn_norm")
        found += both(f"{theirs}.ln_2", f"{ours}.ffn_norm")
        for part in ("weight", "bias"):
            projections = [f"{ours}.self_attn.{name}_proj.{part}" for name in "qkv"]
            name = f"{theirs}.attn.c_attn.{part}"
            found.append(stacked(name, projections, block.dim, part == "weight"))
        for name, our_name in (
            ("attn.c_proj", "self_attn.out_proj"),
            ("mlp.c_fc", "ffn.up_proj"),
            ("mlp.c_proj", "ffn.down_proj"),
        ):
            found.append(transposed(f"{theirs}.{name}.weight", f"{ours}.{our_name}.weight"))
            found.append(same(f"{theirs}.{name}.bias", f"{ours}.{our_name}.bias"))
    return found


def size(dim: int, n_layers: int, n_heads: int) -> Source:
    named = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 1024}
    sizes = {"n_embd": dim, "n_layer": n_layers, "n_head": n_heads, "vocab_size": 50257}
    return {**named, **sizes, "bos_token_id": 50256, "eos_token_id": 50256}


FAMILY = Family(
    name="gpt2",
    config_from=config_from,
    links=links,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(masked_)?bias",),
    copies={r"lm_head\.weight": "transformer.wte.weight"},
    sizes={
        "gpt2": size(768, 12, 12),
        "gpt2-medium": size(1024, 24, 16),
        "gpt2-large": size(1280, 36, 20),
        "gpt2-xl": size(1600, 48, 25),
    },
)
