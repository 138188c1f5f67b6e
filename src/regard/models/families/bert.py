"""BERT: bidirectional, learned positions, token types, norms after; pooler and masked-LM head.

Of `BertForPreTraining` the masked-LM head is read; the two tensors of its next-sentence prediction
(`cls.seq_relationship`) are ignored. Old files call a norm's weight and bias gamma and beta; these
are read, and saved under the new names.
"""

from __future__ import annotations

from dataclasses import replace

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.family import ConfigReader, Family, Source, usual_size
from regard.models.weight_map import Link, both, renamed, same

HEAD = HeadConfig(kind="masked", bias=True, pooler=True)
OLDER_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_norm",
    "intermediate.dense": "ffn.up_proj",
    "output.dense": "ffn.down_proj",
    "output.LayerNorm": "ffn_norm",
}


def make_config(
    family: str, read: ConfigReader, offset: int = 0, head_activation: str | None = None
) -> ModelConfig:
    """BERT's config; `offset`: the number of unused rows at the start of the position table."""
    read.expect("is_decoder", False)
    read.expect("add_cross_attention", False)
    read.expect("position_embedding_type", "absolute")
    read.expect("tie_word_embeddings", True)
    eps = read.number("layer_norm_eps", 1e-12)
    dropout = read.number("hidden_dropout_prob", 0.1)
    activation = read.activation("hidden_act", "gelu")
    block = BlockConfig(
        dim=read.count("hidden_size"),
        n_heads=read.count("num_attention_heads"),
        ffn_dim=read.count("intermediate_size"),
        order="post",
        norm_eps=eps,
        activation=activation,
        dropout=dropout,
        attention_dropout=read.number("attention_probs_dropout_prob", 0.1),
    )
    return read.model(
        family,
        max_len=read.count("max_position_embeddings", 512) - offset,
        encoder=(block,) * read.layers("num_hidden_layers"),
        embed=EmbedConfig(
            positions="learned",
            offset=offset,
            n_token_types=read.count("type_vocab_size", 2),
            norm=True,
            norm_eps=eps,
            dropout=dropout,
        ),
        head=replace(HEAD, activation=head_activation or activation, norm_eps=eps),
    )


def config_from(read: ConfigReader) -> ModelConfig:
    read.expect_class("BertForMaskedLM", "BertForPreTraining")
    return make_config("bert", read)


def make_links(config: ModelConfig, prefix: str) -> list[Link]:
    embed = f"{prefix}embeddings"
    found = [
        same(f"{embed}.word_embeddings.weight", "encoder_embed.tokens.weight"),
        same(f"{embed}.position_embeddings.weight", "encoder_embed.positions.table.weight"),
        same(f"{embed}.token_type_embeddings.weight", "encoder_embed.token_types.weight"),
        *both(f"{embed}.LayerNorm", "encoder_embed.norm"),
    ]
    for n in range(len(config.encoder)):
        found += renamed(f"{prefix}encoder.layer.{n}", f"encoder.layers.{n}", LAYER)
    if config.head.pooler:
        found += both(f"{prefix}pooler.dense", "pooler")
    return found


def links(config: ModelConfig) -> list[Link]:
    found = make_links(config, "bert.")
    if config.head.kind == "masked":
        names = {"dense": "dense", "LayerNorm": "norm"}
        found += renamed("cls.predictions.transform", "head", names)
        found.append(same("cls.predictions.bias", "head.bias"))
    return found


def size(dim: int, n_layers: int, n_heads: int, vocab_size: int = 30522) -> Source:
    sizes = {"intermediate_size": 4 * dim, "vocab_size": vocab_size, "type_vocab_size": 2}
    more = {"max_position_embeddings": 512, "layer_norm_eps": 1e-12, "pad_token_id": 0}
    cls = "BertForPreTraining"
    return usual_size("bert", cls, dim, n_layers, n_heads, hidden_act="gelu", **sizes, **more)


FAMILY = Family(
    name="bert",
    config_from=config_from,
    links=links,
    prefix="bert.",
    ignored=(r"embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)"),
    copies={
        r"cls\.predictions\.decoder\.weight": "bert.embeddings.word_embeddings.weight",
        r"cls\.predictions\.decoder\.bias": "cls.predictions.bias",
    },
    older_names=OLDER_NAMES,
    sizes={
        "bert-tiny": size(128, 2, 2),
        "bert-mini": size(256, 4, 4),
        "bert-small": size(512, 4, 8),
        "bert-medium": size(512, 8, 8),
        "bert-base-uncased": size(768, 12, 12),
        "bert-base-cased": size(768, 12, 12, 28996),
        "bert-base-multilingual-cased": size(768, 12, 12, 119547),
        "bert-large-uncased": size(1024, 24, 16),
        "bert-large-cased": size(1024, 24, 16, 28996),
    },
)
