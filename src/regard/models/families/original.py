"""The Transformer of "Attention Is All You Need" (2017): sinusoids, norms after, one table.

The embedding table is multiplied by √dim at the input and is also the output layer. Projections and
feed-forward layers have biases, the output layer has none. Dropout is applied to each sublayer's
output and to the sum of embedding and sinusoid, as in the paper.

`transformers` has no such class, so the keys of config.json and the names of tensors are our own,
in the usual style:

    model_type "original", vocab_size, d_model, encoder_layers, decoder_layers,
    encoder_attention_heads, decoder_attention_heads, encoder_ffn_dim, decoder_ffn_dim;
    and where they differ from the paper dropout (0.1), attention_dropout and activation_dropout
    (0), normalize_before (false; true puts norms before the sublayers and one at each end),
    layer_norm_eps (1e-5), max_position_embeddings (none: a sinusoid has no end), pad_token_id,
    bos_token_id, eos_token_id, decoder_start_token_id (bos_token_id).

    embed.weight, and under encoder.layers.N and decoder.layers.N: self_attn, cross_attn (each with
    q_proj, k_proj, v_proj, out_proj), ffn (up_proj, down_proj), self_attn_norm, cross_attn_norm,
    ffn_norm; .weight and .bias each. With norms before: encoder.norm and decoder.norm too.
"""

from __future__ import annotations

import math

from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.families import bart
from regard.models.family import ConfigReader, Family, Source
from regard.models.weight_map import Link, both, renamed, same


def config_from(read: ConfigReader) -> ModelConfig:
    read.expect("tie_word_embeddings", True)
    dim, dropout = read.count("d_model"), read.number("dropout", 0.1)
    order = "pre" if read.flag("normalize_before", False) else "post"
    more = {"order": order, "norm_eps": read.number("layer_norm_eps", 1e-5), "activation": "relu"}
    ends = read.has("max_position_embeddings")
    start, bos = read.token("decoder_start_token_id"), read.token("bos_token_id")
    return read.model(
        "original",
        max_len=read.count("max_position_embeddings") if ends else None,
        encoder=bart.make_blocks(read, "encoder", **more),
        decoder=bart.make_blocks(read, "decoder", **more),
        embed=EmbedConfig(positions="sinusoidal", scale=math.sqrt(dim), dropout=dropout),
        head=HeadConfig(),
        tokens=read.special_tokens(decoder_start=bos if start is None else start),
    )


def links(config: ModelConfig) -> list[Link]:
    found = [same("embed.weight", "decoder_embed.tokens.weight")]
    for side, blocks in (("encoder", config.encoder), ("decoder", config.decoder)):
        attentions = ["self_attn", "cross_attn"] if side == "decoder" else ["self_attn"]
        parts = ["ffn.up_proj", "ffn.down_proj", "ffn_norm"]
        for name in attentions:
            parts += [f"{name}.{part}_proj" for part in ("q", "k", "v", "out")]
            parts.append(f"{name}_norm")
        if blocks[0].order == "pre":
            found += both(f"{side}.norm", f"{side}.norm")
        for layer in (f"{side}.layers.{n}" for n in range(len(blocks))):
            found += renamed(layer, layer, dict(zip(parts, parts, strict=True)))
    return found


def size(dim: int, n_heads: int, ffn_dim: int, dropout: float) -> Source:
    """A size of the paper, with its English–German vocabulary of about 37,000 pieces."""
    sizes = bart.shape(dim, 6, n_heads, ffn_dim, 37000)
    return {"model_type": "original", **sizes, "dropout": dropout}


FAMILY = Family(
    name="original",
    config_from=config_from,
    links=links,
    sizes={"original-base": size(512, 8, 2048, 0.1), "original-big": size(1024, 16, 4096, 0.3)},
)
