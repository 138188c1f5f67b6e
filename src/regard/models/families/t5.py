"""T5 and mT5: a learned relative bias instead of positions, RMSNorm, no biases, scores not scaled.

The bias is one table for the encoder and one for the decoder, each shared by all layers; the
decoder's has no buckets for later keys. The first T5 ties embedding and output layer and multiplies
the last hidden states by dim^-0.5; T5 1.1, FLAN-T5 and mT5 have a separate output layer and do not.
`transformers` 5 writes `tie_word_embeddings: true` for both and distinguishes them by
`scale_decoder_outputs` and by whether the file has an output layer; so do we.
"""

from __future__ import annotations

from typing import Any

from regard.layers import BlockConfig, RelativeConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.family import ACTIVATIONS, ConfigReader, Family, Source, link_head
from regard.models.weight_map import Link, renamed, same, weight

FEEDS: dict[str, tuple[Any, bool]] = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_new": ("gelu_tanh", False),
    "silu": ("silu", False),
    "gated-gelu": ("gelu_tanh", True),  # the tanh form, though it is not called gelu_new
    "gated-relu": ("relu", True),
    "gated-silu": ("silu", True),
}
"""feed_forward_proj -> our activation, and whether the layer is gated."""


def config_from(read: ConfigReader) -> ModelConfig:
    read.expect_class("T5ForConditionalGeneration", "T5WithLMHeadModel", *MT5["architectures"])
    multilingual = read.word("model_type", "t5") == "mt5"
    feed = read.choice("feed_forward_proj", FEEDS, "gated-gelu" if multilingual else "relu")
    activation, gated = FEEDS[feed]
    # Newer files repeat this under other keys, which take precedence; here the two must agree.
    read.expect("is_gated_act", gated)
    read.expect("dense_act_fn", *(word for word, ours in ACTIVATIONS.items() if ours == activation))
    dim, dropout = read.count("d_model"), read.number("dropout_rate", 0.1)
    n_layers = read.layers("num_layers")
    tied = read.flag("tie_word_embeddings", True)
    scaled = read.flag("scale_decoder_outputs", tied) and not multilingual

    def make_block(cross_attention: bool) -> BlockConfig:
        return BlockConfig(
            dim=dim,
            n_heads=read.count("num_heads"),
            head_dim=read.count("d_kv"),
            ffn_dim=read.count("d_ff"),
            norm="rms",
            norm_eps=read.number("layer_norm_epsilon", 1e-6),
            activation=activation,
            gated=gated,
            attention_bias=False,
            ffn_bias=False,
            scale=1.0,
            dropout=dropout,
            attention_dropout=dropout,
            ffn_dropout=dropout,
            cross_attention=cross_attention,
        )

    alone = read.source.get("architectures") in (["T5EncoderModel"], ["MT5EncoderModel"])
    decoder = (make_block(True),) * read.layers("num_decoder_layers", n_layers)
    head = HeadConfig(tied=tied, scale=dim**-0.5 if scaled else 1.0)
    start, pad = read.token("decoder_start_token_id"), read.token("pad_token_id")
    n_buckets = read.count("relative_attention_num_buckets", 32)
    max_distance = read.count("relative_attention_max_distance", 128)
    return read.model(
        "t5",
        max_len=None,
        encoder=(make_block(False),) * n_layers,
        decoder=() if alone else decoder,
        embed=EmbedConfig(dropout=dropout),
        head=HeadConfig(kind="none") if alone else head,
        relative=RelativeConfig(n_buckets=n_buckets, max_distance=max_distance),
        tokens=read.special_tokens(decoder_start=pad if start is None else start),
    )


def links(config: ModelConfig) -> list[Link]:
    embed = "decoder_embed" if config.decoder else "encoder_embed"
    found = [same("shared.weight", f"{embed}.tokens.weight"), *link_head(config)]
    for side, blocks in (("encoder", config.encoder), ("decoder", config.decoder)):
        if not blocks:
            continue
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found.append(same(table, f"{side}.relative_table"))
        found += weight(f"{side}.final_layer_norm", f"{side}.norm")
        for n, block in enumerate(blocks):
            found += link_layer(f"{side}.block.{n}.layer", f"{side}.layers.{n}", block)
    return found


def link_layer(theirs: str, ours: str, block: BlockConfig) -> list[Link]:
    attentions = [("SelfAttention", "self_attn"), ("EncDecAttention", "cross_attn")]
    attentions = attentions[: 1 + block.cross_attention]
    names = {}
    for n, (name, our_name) in enumerate(attentions):
        names[f"{n}.layer_norm"] = f"{our_name}_norm"
        for part in ("q", "k", "v", "out"):
            names[f"{n}.{name}.{part[0]}"] = f"{our_name}.{part}_proj"
    last = len(attentions)
    feed = f"{last}.DenseReluDense"
    names |= {f"{last}.layer_norm": "ffn_norm", f"{feed}.wo": "ffn.down_proj"}
    if block.gated:
        names |= {f"{feed}.wi_0": "ffn.gate_proj", f"{feed}.wi_1": "ffn.up_proj"}
    else:
        names[f"{feed}.wi"] = "ffn.up_proj"
    return renamed(theirs, ours, names, has_bias=False)


def size(dim: int, n_layers: int, heads: int, ffn_dim: int, **more: Any) -> Source:
    named = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    sizes = {"d_model": dim, "num_layers": n_layers, "num_heads": heads, "d_ff": ffn_dim}
    usual = {"d_kv": 64, "vocab_size": 32128, "pad_token_id": 0, "eos_token_id": 1}
    return {**named, **sizes, **usual, "decoder_start_token_id": 0, **more}


NEWER: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MT5: dict[str, Any] = {**NEWER, "model_type": "mt5", "vocab_size": 250112}
MT5 |= {"architectures": ["MT5ForConditionalGeneration"]}
# Dim, layers, heads, hidden width of T5 1.1, also used by FLAN-T5 and mT5.
SHAPES = {
    "small": (512, 8, 6, 1024),
    "base": (768, 12, 12, 2048),
    "large": (1024, 24, 16, 2816),
    "xl": (2048, 24, 32, 5120),
    "xxl": (4096, 24, 64, 10240),
}

FAMILY = Family(
    name="t5",
    model_types=("t5", "mt5"),
    config_from=config_from,
    links=links,
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    copies={
        r"(encoder|decoder)\.embed_tokens\.weight": "shared.weight",
        r"lm_head\.weight": "shared.weight",
    },
    output_layer="lm_head.weight",
    sizes={
        "t5-small": size(512, 6, 8, 2048),
        "t5-base": size(768, 12, 12, 3072),
        "t5-large": size(1024, 24, 16, 4096),
        "t5-3b": size(1024, 24, 32, 16384, d_kv=128),
        "t5-11b": size(1024, 24, 128, 65536, d_kv=128),
        **{f"t5-v1_1-{name}": size(*shape, **NEWER) for name, shape in SHAPES.items()},
        **{f"flan-t5-{name}": size(*shape, **NEWER) for name, shape in SHAPES.items()},
        **{f"mt5-{name}": size(*shape, **MT5) for name, shape in SHAPES.items()},
    },
)
