"""BART and mBART: encoder and decoder with learned positions and a norm of the embedding.

BART has norms after each sublayer, mBART before. The table of positions starts with two unused
rows. Marian has the same tensor names, so its file uses `make_blocks` and `make_links` from here.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig, SpecialTokens
from regard.models.family import ConfigReader, Family, Source
from regard.models.weight_map import Link, both, renamed, same

N_LEADING_ROWS = 2


def make_blocks(read: ConfigReader, side: str, **more: Any) -> tuple[BlockConfig, ...]:
    """The layers of one side ("encoder" or "decoder"); `more` adds to or overrides BART's."""
    usual: dict[str, Any] = {
        "dim": read.count("d_model"),
        "n_heads": read.count(f"{side}_attention_heads"),
        "ffn_dim": read.count(f"{side}_ffn_dim"),
        "activation": read.activation("activation_function", "gelu"),
        "dropout": read.number("dropout", 0.1),
        "attention_dropout": read.number("attention_dropout", 0.0),
        "ffn_dropout": read.number("activation_dropout", 0.0),
        "cross_attention": side == "decoder",
    }
    return (BlockConfig(**{**usual, **more}),) * read.layers(f"{side}_layers")


def embed_scale(read: ConfigReader) -> float:
    return math.sqrt(read.count("d_model")) if read.flag("scale_embedding", False) else 1.0


def special_tokens(read: ConfigReader, decoder_start: int | None) -> SpecialTokens:
    """The special tokens of an encoder–decoder; `decoder_start` is the default for that token."""
    start = read.token("decoder_start_token_id")
    return read.special_tokens(
        decoder_start=decoder_start if start is None else start,
        forced_bos=read.token("forced_bos_token_id"),
        forced_eos=read.token("forced_eos_token_id"),
        suppressed=read.suppressed(),
    )


def config_from(read: ConfigReader) -> ModelConfig:
    read.expect_class("BartForConditionalGeneration", "MBartForConditionalGeneration")
    # If False, the encoder and the decoder have separate tables too.
    read.expect("tie_word_embeddings", True)
    read.expect("is_encoder_decoder", True)
    read.expect("normalize_embedding", True)
    read.expect("static_position_embeddings", False)
    read.expect("extra_pos_embeddings", N_LEADING_ROWS)
    multilingual = read.word("model_type", "bart") == "mbart"
    # Old files have these settings, which the class determines anyway.
    read.expect("normalize_before", multilingual)
    read.expect("add_final_layer_norm", multilingual)
    order = "pre" if multilingual else "post"
    return read.model(
        "bart",
        max_len=read.count("max_position_embeddings", 1024),
        encoder=make_blocks(read, "encoder", order=order),
        decoder=make_blocks(read, "decoder", order=order),
        embed=EmbedConfig(
            positions="learned",
            offset=N_LEADING_ROWS,
            norm=True,
            scale=embed_scale(read),
            dropout=read.number("dropout", 0.1),
        ),
        head=HeadConfig(bias=True),
        tokens=special_tokens(read, None if multilingual else 2),
    )


def make_links(config: ModelConfig) -> list[Link]:
    """The tensor names of BART, mBART and Marian, for the parts that the config has."""
    found = [same("model.shared.weight", "decoder_embed.tokens.weight")]
    if config.head.kind == "lm" and config.head.bias:
        found.append(Link(("final_logits_bias",), ("head.bias",), squeeze, unsqueeze))
    for side, blocks in (("encoder", config.encoder), ("decoder", config.decoder)):
        prefix, embed = f"model.{side}", f"{side}_embed"
        if config.embed.positions == "learned":
            found += [same(f"{prefix}.embed_positions.weight", f"{embed}.positions.table.weight")]
        if config.embed.norm:
            found += both(f"{prefix}.layernorm_embedding", f"{embed}.norm")
        if blocks[0].order == "pre":
            found += both(f"{prefix}.layer_norm", f"{side}.norm")
        for n in range(len(blocks)):
            found += link_layer(f"{prefix}.layers.{n}", f"{side}.layers.{n}", side == "decoder")
    return found


def squeeze(tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[0].squeeze(0)]


def unsqueeze(tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[0].unsqueeze(0)]


def link_layer(theirs: str, ours: str, crossed: bool) -> list[Link]:
    names = {"fc1": "ffn.up_proj", "fc2": "ffn.down_proj", "final_layer_norm": "ffn_norm"}
    attentions = {"self_attn": "self_attn"} | ({"encoder_attn": "cross_attn"} if crossed else {})
    for name, our_name in attentions.items():
        names[f"{name}_layer_norm"] = f"{our_name}_norm"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            names[f"{name}.{part}"] = f"{our_name}.{part}"
    return renamed(theirs, ours, names)


COPIES = {
    r"(model\.)?(encoder|decoder)\.embed_tokens\.weight": "model.shared.weight",
    r"lm_head\.weight": "model.shared.weight",
}


def shape(dim: int, n_layers: int, n_heads: int, ffn_dim: int, vocab_size: int) -> Source:
    """The sizes of an encoder–decoder whose encoder and decoder have the same sizes."""
    alike = {"layers": n_layers, "attention_heads": n_heads, "ffn_dim": ffn_dim}
    both_sides = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in alike.items()}
    return {"d_model": dim, **both_sides, "vocab_size": vocab_size}


def size(dim: int, n_layers: int, **more: Any) -> Source:
    named = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    usual = {"max_position_embeddings": 1024, "activation_function": "gelu"}
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    tokens |= {"decoder_start_token_id": 2, "forced_eos_token_id": 2}
    return {**shape(dim, n_layers, dim // 64, 4 * dim, 50265), **named, **usual, **tokens, **more}


MBART = {"model_type": "mbart", "architectures": ["MBartForConditionalGeneration"]}
MULTILINGUAL = {"scale_embedding": True, "decoder_start_token_id": None}

FAMILY = Family(
    name="bart",
    model_types=("bart", "mbart"),
    config_from=config_from,
    links=make_links,
    prefix="model.",
    copies=COPIES,
    sizes={
        "bart-base": size(768, 6),
        "bart-large": size(1024, 12),
        "bart-large-cnn": size(1024, 12, vocab_size=50264, forced_bos_token_id=0),
        "mbart-large-cc25": size(1024, 12, vocab_size=250027, **MBART, **MULTILINGUAL),
    },
)
