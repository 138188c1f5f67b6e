"""GPT-2: learned positions, norms before, one projection for q, k and v kept as a Conv1D."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.family import ConfigReader, Family
from regard.models.weight_map import Link, both, same, stacked, transposed


def config_from(source: Mapping[str, Any]) -> ModelConfig:
    read = ConfigReader(source)
    read.expect("scale_attn_weights", True)
    read.expect("reorder_and_upcast_attn", False, True)
    read.expect("add_cross_attention", False)
    dim = read.count("n_embd")
    eps = read.number("layer_norm_epsilon", 1e-5)
    dropout = read.number("resid_pdrop", 0.1)
    block = BlockConfig(
        dim=dim,
        n_heads=read.count("n_head"),
        ffn_dim=read.count("n_inner", 4 * dim),
        norm_eps=eps,
        activation=read.activation("activation_function", "gelu_new"),  # type: ignore[arg-type]
        dropout=dropout,
        attention_dropout=read.number("attn_pdrop", 0.1),
    )
    blocks = [block] * read.layers("n_layer")
    if read.flag("scale_attn_by_inverse_layer_idx", False):
        scale = (dim // block.n_heads) ** -0.5
        blocks = [replace(block, scale=scale / (n + 1)) for n in range(len(blocks))]
    return ModelConfig(
        family="gpt2",
        vocab_size=read.count("vocab_size"),
        max_len=read.count("n_positions", 1024),
        decoder=tuple(blocks),
        embed=EmbedConfig(positions="learned", dropout=read.number("embd_pdrop", 0.1)),
        head=HeadConfig(tied=read.flag("tie_word_embeddings", True)),
        tokens=read.special_tokens(),
        source=source,
    )


def links(config: ModelConfig) -> list[Link]:
    made = [
        same("transformer.wte.weight", "decoder_embed.tokens.weight"),
        same("transformer.wpe.weight", "decoder_embed.positions.table.weight"),
        *both("transformer.ln_f", "decoder.norm"),
    ]
    if not config.head.tied and config.head.kind != "none":
        made.append(same("lm_head.weight", "head.weight"))
    for n, block in enumerate(config.decoder):
        theirs, ours = f"transformer.h.{n}", f"decoder.layers.{n}"
        made += both(f"{theirs}.ln_1", f"{ours}.self_attn_norm")
        made += both(f"{theirs}.ln_2", f"{ours}.ffn_norm")
        for part in ("weight", "bias"):
            projections = [f"{ours}.self_attn.{name}_proj.{part}" for name in "qkv"]
            sizes, turned = (block.dim,) * 3, part == "weight"
            made.append(stacked(f"{theirs}.attn.c_attn.{part}", projections, sizes, turned))
        for name, our_name in (
            ("attn.c_proj", "self_attn.out_proj"),
            ("mlp.c_fc", "ffn.up_proj"),
            ("mlp.c_proj", "ffn.down_proj"),
        ):
            made.append(transposed(f"{theirs}.{name}.weight", f"{ours}.{our_name}.weight"))
            made.append(same(f"{theirs}.{name}.bias", f"{ours}.{our_name}.bias"))
    return made


def size(dim: int, n_layers: int, n_heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": dim,
        "n_layer": n_layers,
        "n_head": n_heads,
        "n_positions": 1024,
        "vocab_size": 50257,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }


FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
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
